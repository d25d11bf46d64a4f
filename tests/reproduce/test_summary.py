"The few sentences on top of the report: what was measured, where we disagree, and what the premise says"
import shutil
from dataclasses import replace
from pathlib import Path
import pytest
from records import metrics_of, write_all, write_run
from repq.reproduce import report, verdicts
from repq.reproduce.evidence import Results
from repq.reproduce.protocol import FAILS, HOLDS
from repq.reproduce.statements import accuracy
from repq.reproduce.tables import table
from repq.reproduce.verdicts import CHOSEN, claims, disagreements, premise_summary, premises, results_summary


@pytest.fixture(scope='module')
def seeds3(tmp_path_factory): return write_all(tmp_path_factory.mktemp('seeds'), seeds=3)


@pytest.fixture
def batch(seeds3, tmp_path): return Path(shutil.copytree(seeds3, tmp_path/'results'))


def change(root, address, **metrics):
    for run in Results('smoke', '/nowhere', 3).cells[address].runs:
        write_run(root, run, metrics_of(run) | metrics)


def test_nothing_was_run(tmp_path):
    first, second, third = results_summary(Results('cpu', tmp_path, 3))
    assert first == '0 of 257 runs of the cpu profile are finished.'
    assert '2 do not hold, 44 cannot be told' in second and 'Counted on the paper’s own networks' in third


def test_summary_leads_everywhere(seeds3):
    results = Results('smoke', seeds3, 3)
    judged = claims(results=results)
    lines = results_summary(results, judged)
    assert lines[0].startswith('176 of 176 runs') and verdicts.count_verdicts(judged) in lines[1]
    page, files = report.report_html(results), report.write_tables(seeds3, 'smoke', 3)
    assert page.index('class="summary"') < page.index('Table 2') < page.index('<h2 id="claims"')
    assert 'class="summary"' in files[1].read_text()
    texts = page, files[0].read_text(), report.claims_html(judged), report.claims_markdown(judged)
    for text in texts: assert CHOSEN in text, 'it says what the setting was chosen for, wherever verdicts are'


def test_disagreements_are_said_plainly(seeds3):
    judged = claims('smoke', seeds3, 3)
    fails = [v for v in judged if v.verdict == FAILS and v.weakest.compare.unit != 'times']
    text, counted = disagreements(judged, most=2)
    assert text.startswith('Our results disagree with the paper on “') and 'and 8 more' in text
    assert len(fails) == 10 and counted.startswith('Counted on')
    everything = disagreements(judged, most=50)[0]
    for v in fails:
        assert f'“{v.claim}” (ours ' in everything and ', the paper ' in everything
        if v.outside: assert 'judged outside its premise' in everything
    alright = [replace(v, verdict=HOLDS) for v in judged]
    assert disagreements(alright) == ['No claim about accuracy or PSNR is refuted by our runs.']


def test_the_premise_in_a_sentence(batch):
    plain, ours = accuracy('RepVGG-A0', 'Plain', '32'), accuracy('RepVGG-A0', 'RepQ-BN', '32')
    results = Results('smoke', batch, 3)
    assert 'was not tested on ECBSR' in premise_summary(premises(results), results)
    change(batch, plain, best_accuracy=.95)
    change(batch, ours, best_accuracy=.93)
    results = Results('smoke', batch, 3)
    text = premise_summary(premises(results), results)
    assert 'does not hold on RepVGG-A0 (RepQ-BN) −2.00 points' in text
    for run in results.cells[ours].runs[1:]: shutil.rmtree(results.store.done(run))
    results = Results('smoke', batch, 3)
    text = premise_summary(premises(results), results)
    assert 'cannot be told from one seed on RepVGG-A0 (RepQ-BN) −2.00 points' in text


def test_rows_beyond_the_paper_wait_for_their_first_run(tmp_path):
    results = Results('cpu', tmp_path, 1)
    empty = table(2, 'cpu', tmp_path, 1)
    assert not any('†' in labels[1] for labels, _ in empty.rows)
    assert 'Beyond the paper and not run yet: RepQ-calibrated, RepQ-sampled, PTQ.' in empty.caption
    run = results.cells[accuracy('RepVGG-B0', 'PTQ', '8')].runs[0]
    write_run(tmp_path, run)
    begun = table(2, 'cpu', tmp_path, 1)
    assert [labels for labels, _ in begun.rows if '†' in labels[1]] == [('RepVGG-B0', 'PTQ †')]
    assert 'PTQ (RepVGG-A0, AC-ResNet-18, OREPA-ResNet-18).' in begun.caption and '† ours' in begun.caption


def test_links_are_numbered_by_seed(batch):
    address = accuracy('RepVGG-A0', 'Plain', '8')
    results = Results('smoke', batch, 3)
    shutil.rmtree(results.store.done(results.cells[address].runs[1]))
    item = dict(table(2, 'smoke', batch, 3).rows)['RepVGG-A0', 'Plain'][2]
    assert item.seeds == (0, 2) and len(item.links) == 2
    assert '>2</a></sup>' in table(2, 'smoke', batch, 3).html()
