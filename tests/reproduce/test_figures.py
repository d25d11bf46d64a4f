"The charts of the report: what the tables have, and nothing of runs that no table counts"
import re
import pytest
from records import all_runs, metrics_of, write_all, write_run
from repq.reproduce.evidence import Results
from repq.reproduce.figures import (FIGURES, bits_figure, cost_figure, crops_figure, curves_figure,
                                    estimate_figure, quality_of, series, time_figure)
from repq.reproduce.statements import accuracy, psnr
from repq.reproduce.tables import table


@pytest.fixture(scope='module')
def whole(tmp_path_factory): return write_all(tmp_path_factory.mktemp('whole'), 'cpu')


@pytest.fixture
def results(whole): return Results('cpu', whole, 1)


def titles(svg): return re.findall(r'<title>(.*?)</title>', svg)


def charts(svg): return re.findall(r'aria-label="(.*?)"', svg)


def test_nothing_without_records(tmp_path):
    empty = Results('cpu', tmp_path, 1)
    assert all(make(empty) == '' for make in FIGURES.values()) and series(empty) == {}


def test_places_of_charts():
    assert quality_of(accuracy('RepVGG-A0', 'Plain', '8')) == ('RepVGG-A0', 'Plain', 8)
    assert quality_of(psnr('32', '', 'Set5')) == ('ECBSR', 'RepQ', 32)
    assert quality_of(psnr('8', 'Plain', 'B100')) is None
    assert quality_of(('4', ('ACNets',), 'QAT RepQ')) is None


def test_marks_have_the_numbers_of_the_tables(results, whole):
    shown = titles(bits_figure(results))
    for labels, items in table(2, 'cpu', whole, 1).rows:
        if labels[1].endswith('†') or items[2].text in ('–', 'not run'): continue
        assert f'{labels[1]}: {items[2].text.split()[0]}' in shown, labels
    assert len(charts(bits_figure(results))) == 5


def test_cost_time_and_error(results):
    assert [c.split(',')[0] for c in charts(cost_figure(results))] == ['RepVGG', 'ResNet-18', 'ECBSR']
    assert 'FP' not in ' '.join(titles(cost_figure(results)))
    shown = titles(time_figure(results))
    assert 'QAT RepQ-BNEst: 130 %' in shown and 'paper: 150 %' in shown
    assert len(charts(estimate_figure(results))) == 3
    assert crops_figure(results) == '', 'no run stored a picture'


def test_curves_are_of_runs_that_count(results, tmp_path):
    run = results.cells[accuracy('RepVGG-A0', 'Plain', '8')].runs[0]
    root = tmp_path/'results'
    history = [dict(epoch=e, train_loss=1., valid_loss=1., metric=.777) for e in (1, 2)]
    write_run(root, run, history=history)
    assert 'Plain: 77.70' in titles(curves_figure(Results('cpu', root, 1)))
    write_run(root, run, metrics_of(run) | dict(accuracy=.1), history=history)
    assert curves_figure(Results('cpu', root, 1)) == '', 'it collapsed'


def test_every_chart_says_what_it_is(results):
    for name, make in FIGURES.items():
        svg = make(results)
        if not svg: continue
        assert all(charts(svg)) and '<figcaption>' in svg and 'nan' not in svg, name
    assert len(all_runs('cpu')) > 80
