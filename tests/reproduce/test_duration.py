"How long a batch takes: what is counted, what finished runs say, and what the command line shows"
import os, re
from dataclasses import replace
import pytest, torch
from records import write_run
from repq.reproduce import duration as U, runs as R
from repq.cli import main

A0 = dict(name='RepVGG-A0', strategy='fp', statistics='batch')


def given(rate=1e10, cost=1., python=0.):
    "A processor of so many operations a second, and so many seconds of Python for a layer, everywhere"
    return dict(rate=lambda *shape: rate, cost=lambda kind: cost, python=lambda kind: python)


def test_operations_are_those_that_torch_counts():
    "Forward and backward of a plain network: six operations for a multiplication, but for the input"
    from torch.utils.flop_counter import FlopCounterMode
    from repq.reproduce.training import full_precision_network
    run = R.limited([R.classifier('smoke', 0, 'RepVGG-A0', 'fp', block='plain')], 1)[0]
    size, network = U.shape_of(run)
    net = full_precision_network(run.model, 'plain', **dict(network))
    with FlopCounterMode(display=False) as counter:
        net(torch.rand(run.settings['batch_size'], *size)).sum().backward()
    assert 0.95 < counter.get_total_flops()/U.work_of(run).operations <= 1


@pytest.mark.parametrize('profile', R.PROFILES)
def test_every_run_has_an_estimate(profile):
    for r in R.graph(R.cells(profile, seeds=1)):
        e = U.estimate(r, **given())
        assert e.finished == 0 and e.seconds >= U.START[profile], r.id
        assert (e.seconds > U.START[profile]) == (r.strategy != 'ptq'), r.id


def test_gpu_takes_a_day():
    "On an A100, as far as that can be counted; Python is measured, and makes it longer on a slow processor"
    hours = sum(U.estimate(r, **given()).seconds for r in R.graph(R.cells('gpu')))/3600
    assert 8 < hours < 24


def test_what_a_processor_takes():
    "Operations, times what the kind of run adds, at its rate"
    run = R.classifier('cpu', 0, **A0)
    assert U.estimate(run, **given(2e10, 1.5)).seconds == pytest.approx(
        U.START['cpu'] + 1.5 * U.work_of(run).operations / 2e10
    )


def test_what_a_gpu_waits_for():
    "A step takes as long as the slower of the two, GPU or Python; bfloat16 makes the former faster"
    run = R.classifier('gpu', 0, **A0)
    work, device = U.work_of(run), U.DEVICES['A100']
    def seconds(run, python): return U.estimate(run, **given(python=python)).seconds - U.START['gpu']
    assert seconds(run, 1.) == pytest.approx(work.steps*work.layers)
    assert seconds(run, 0.) == pytest.approx(2*work.operations/device.half)
    single = replace(run, settings={k: v for k, v in run.settings.items() if k != 'autocast'})
    assert seconds(single, 0.) == pytest.approx(2*work.operations/device.rate)


def test_measured_kinds():
    "Branches, statistics and quantizers cost Python more than a plain layer; measuring leaves no trace"
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    kinds = {U.kind_of(r) for r in R.graph(R.cells('gpu', seeds=1)) if U.work_of(r).steps}
    assert {k.block for k in kinds} == {'plain', 'repvgg', 'qarepvgg', 'acnet', 'orepa', 'ecb'}
    assert len(kinds) > 15
    U.layer_seconds.cache_clear()
    plain, bn = U.Kind('classify', 'plain', False, ''), U.Kind('classify', 'repvgg', True, 'batch')
    assert 0 < U.python_seconds(plain) < U.python_seconds(bn) and U.cost_here(plain) == 1 < U.cost_here(bn)
    assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads


def finished(root, run, seconds, **settings):
    "A record of a run that trained for so many seconds"
    run = replace(run, settings=run.settings | settings)
    write_run(root, run, time=dict(wall=seconds, cpu=seconds, training_cpu=seconds, sessions=1))
    return run


def test_finished_runs_say_how_long_others_take(tmp_path):
    "By network and kind, whatever seed, bits and epochs; the median of several"
    run = R.classifier('cpu', 0, **A0)
    for seed, seconds in enumerate((100., 110., 500.)):
        finished(tmp_path, R.classifier('cpu', seed, **A0), seconds)
    known = U.paces(R.Store(tmp_path, 'cpu'))
    other = replace(run, seed=7, settings=run.settings | dict(epochs=2*run.settings['epochs']))
    assert U.estimate(run, known, rate=lambda *shape: pytest.fail('measured, although records say it')) == (
        pytest.approx(110 + U.START['cpu']),
        3,
    )
    assert U.estimate(other, known).seconds == pytest.approx(220 + U.START['cpu'])
    assert U.estimate(R.classifier('cpu', 0, 'RepVGG-A0', 'ptq', 'batch', 8), known) == (U.START['cpu'], 0)


def test_records_that_say_nothing(tmp_path):
    "Damaged, cut off after a few steps, without a training: none of them is asked"
    run = R.classifier('cpu', 0, **A0)
    folder = R.Store(tmp_path, 'cpu').done(finished(tmp_path, run, 100.))
    finished(tmp_path, run, 1., max_steps=2)
    finished(tmp_path, R.classifier('cpu', 0, 'RepVGG-A0', 'ptq', 'batch', 8), 0.)
    assert [len(p) for p in U.paces(R.Store(tmp_path, 'cpu')).values()] == [1]
    (folder/'record.json').write_text('{')
    assert U.paces(R.Store(tmp_path, 'cpu')) == {} == U.paces(R.Store(tmp_path/'nowhere', 'cpu'))


def table_in(out): return {w[0]: w[1:] for w in map(str.split, out.split('\n\n')[-1].splitlines()[1:-1])}


WHO = dict(gpu='1 GPU', paper='1 GPU', cpu='2 workers', smoke='2 workers')

@pytest.mark.parametrize('profile, who', WHO.items())
def test_dry_run(profile, who, tmp_path, capsys, monkeypatch):
    "Every run with its time, the tables and their sum, and where the numbers come from"
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    runs = R.graph(R.cells(profile))
    assert main(['reproduce', '--profile', profile, '--dry-run', '--results', str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = table_in(out)
    assert (
        out.count('[missing]')
        == len(runs)
        == int(rows['all'][0])
        == sum(int(r[0]) for t, r in rows.items() if t != 'all')
    )
    assert len(re.findall(r'\]  (?:after \S+  )?about [\d.,]+ (?:s|min|h)\n', out)) == len(runs)
    assert f'with {who}. Training times: ' in out.splitlines()[-1]
    assert 'from multiplications' in out.splitlines()[-1]
    assert ('steps measured on this processor' if who.endswith('workers') else 'TFLOP/s') in out.splitlines()[
        -1
    ]
    assert not list(tmp_path.iterdir()), 'nothing is written'


def test_dry_run_of_half_a_batch(tmp_path, capsys):
    "What is done takes nothing more, two workers take half as long, and each run is counted once"
    run = R.classifier('cpu', 0, **A0)
    finished(tmp_path, run, 3600.)
    ends = {}
    for workers in ('1', '2'):
        assert (
            main(
                [
                    'reproduce',
                    '--profile',
                    'cpu',
                    '--seeds',
                    '1',
                    '--table',
                    '1',
                    '--table',
                    'side',
                    '--workers',
                    workers,
                    '--dry-run',
                    '--results',
                    str(tmp_path),
                ]
            )
            == 0
        )
        out = capsys.readouterr().out
        assert f'{run.id}  [done]  about 60 min' in out and '1 from finished runs of the same kind; ' in out
        rows, ends[workers] = table_in(out), float(re.search(r'About ([\d.]+) h with', out)[1])
    assert set(rows) == {'2', 'side', 'all'} and rows['2'][1] == rows['all'][1] == '1'
    takes, left = (float(rows['all'][i].replace(',', '')) for i in (2, 4))
    assert takes - left == pytest.approx(1, abs=0.11) and ends['1'] == pytest.approx(left)
    assert ends['2'] == pytest.approx(left/2, abs=0.06)


def test_dry_run_without_runs_and_with_steps(tmp_path, capsys):
    assert main(['reproduce', '--table', 'S1', '--dry-run', '--results', str(tmp_path)]) == 0
    assert capsys.readouterr().out == '0 runs\n'
    assert main(['reproduce', '--table', '3', '--steps', '2', '--dry-run', '--results', str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert 'max_steps=2' in out and table_in(out)['all'][0] == '11'


def test_seconds_in_words():
    assert [U.about(s) for s in (5, 89, 90, 3600, 5400, 1e7)] == [
        '5 s',
        '89 s',
        '2 min',
        '60 min',
        '1.5 h',
        '2,777.8 h',
    ]
