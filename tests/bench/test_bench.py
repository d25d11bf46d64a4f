"Measurements: how rows are composed and judged, what is recorded, and the commands in tiny settings"
import builtins, copy, json, re, time, warnings
import pandas as pd
import pytest, torch
from torch import nn
from repq.bench import cases as bench, timing as measuring
from repq.algebra import statistics as norm
from repq.tools.registry import Seam, is_there, use_path
from repq.bench.cases import (LAYOUTS, LATE, Candidate, Setting, bench_quantizer, bench_step, branch_chain,
                              candidate_steps, compared_networks, compose_rows, find_peers, step_networks,
                              step_targets)
from repq.cli.command import ABOUT, main
from repq.algebra.branch import Conv, Norm, Seq
from repq.quantization.layer import RepConv2d
from repq.bench.timing import (allocated_bytes, interleaved, judge, make_record, measured_where, read_bench,
                               record_markdown, relative, save_bench, saved_bytes, summarize,
                               targets_markdown)
from repq.algebra.statistics import interval
from repq.reproduce.evidence import paper_times

TINY = dict(batch=2, size=16, width=.125, depth=.1, n_classes=10)
ORDINARY, MEASURING = 'QAT RepQ-calibrated, ordinary step', 'QAT RepQ-calibrated, measuring step'


@pytest.fixture(autouse=True)
def simple():
    with use_path('simple'): yield


def table_of(**times):
    times = pd.DataFrame(times)
    return summarize(times, times*0)


# -- taking turns

def test_rounds_are_interleaved_and_garbage_is_collected_between():
    calls, collected = [], []
    class Cycle:
        def __init__(self): self.me = self
        def __del__(self): collected.append(len(calls))
    def leave():
        calls.append('a')
        Cycle()
    t = interleaved(dict(a=leave, b=lambda: calls.append('b')), rounds=3, warmup=1)
    assert calls == ['a', 'b']*4, 'garbage of a candidate is gone before the next one runs'
    assert collected == [1, 3, 5, 7], 'garbage of a candidate is gone before the next one runs'
    assert t.attrs['rounds'].shape == (3, 2)
    assert list(t.columns) == ['median ms', 'min ms', 'spread', 'page faults']


def test_threads_and_collector_come_back_after_an_error():
    import gc
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError): interleaved(dict(a=lambda: 1/0))
    assert gc.isenabled() and torch.get_num_threads() == threads and gc.get_freeze_count() == 0


def test_ratios_are_taken_within_rounds():
    r = relative(table_of(a=[1., 10., 100.], b=[2., 20., 500.]), 'a')
    assert r['median']['b'] == 2, 'the ratio of medians would be 2 as well, its quartile not'
    assert r.high['b'] == 3.5, 'the ratio of medians would be 2 as well, its quartile not'


# -- composed rows

def test_calibrated_row_is_ordinary_steps_and_a_measuring_one():
    t = compose_rows(table_of(**{ORDINARY: [1., 2., 4.], MEASURING: [33., 34., 36.]}),
                     {'QAT RepQ-calibrated': [ORDINARY, MEASURING]})
    assert t.attrs['rounds']['QAT RepQ-calibrated'].tolist() == [2, 3, 5]
    assert t['median ms']['QAT RepQ-calibrated'] == 3
    assert t.attrs['parts'] == [ORDINARY, MEASURING]
    assert list(t.index) == ['QAT RepQ-calibrated', ORDINARY, MEASURING]


def test_the_two_calibrated_steps_are_what_they_say():
    "True variances are measured in one of them only, however often it is called"
    net = compared_networks(lambda plain: branch_chain(0 if plain else 2, 8),
                            methods=['RepQ-calibrated'])['QAT RepQ-calibrated']
    x, y, seen = torch.randn(4, 8, 8, 8), torch.randint(10, (4,)), []
    steps = candidate_steps({'QAT RepQ-calibrated': net}, x, y)['QAT RepQ-calibrated']
    before, norm.variance_ratio = norm.variance_ratio, lambda *args: seen.append(1) or before(*args)
    try:
        for _ in range(3): steps[ORDINARY]()
        assert not seen
        for _ in range(3): steps[MEASURING]()
        assert len(seen) == 3*6, 'two norms in each of three blocks'
    finally: norm.variance_ratio = before
    assert interval(LATE) == interval(10**6) == 32 and LATE % 32 == 0 and (LATE + 1) % 32


@pytest.mark.parametrize('faster', LAYOUTS)
def test_plain_is_the_faster_layout(faster):
    # the other one has the better minimum, not the better median
    times = {f'QAT Plain, {l}': [1., 2., 3.] if l == faster else [0.5, 2.5, 2.5]
             for l in LAYOUTS} | {'QAT RepQ': [2., 4., 6.]}
    t = compose_rows(table_of(**times), {'QAT Plain': [f'QAT Plain, {l}' for l in LAYOUTS],
                                         'QAT RepQ': ['QAT RepQ']})
    assert t.attrs['baseline'] == {'QAT': faster} and relative(t, 'QAT Plain')['median']['QAT RepQ'] == 2
    assert len(t) == 4, 'both layouts stay visible'


def test_networks_are_in_their_layouts():
    nets = compared_networks(lambda plain: branch_chain(0 if plain else 1, 8), methods=['RepQ-BNEst'])
    steps = candidate_steps(nets, torch.randn(2, 8, 8, 8), torch.randint(10, (2,)), 'contiguous')
    assert list(steps['QAT Plain']) == ['QAT Plain, contiguous', 'QAT Plain, channels-last']
    assert list(steps['QAT RepQ-BNEst']) == ['QAT RepQ-BNEst']
    with pytest.raises(ValueError, match="layout must be one of 'contiguous', 'channels-last', got 'nhwc'"):
        candidate_steps(nets, None, None, 'nhwc')
    def last(f):
        return [c.cell_contents for c in f.__closure__ if isinstance(c.cell_contents, torch.Tensor)
                and c.cell_contents.ndim == 4][0].is_contiguous(memory_format=torch.channels_last)
    assert [last(f) for f in steps['QAT Plain'].values()] == [False, True]
    assert not last(steps['QAT RepQ-BNEst']['QAT RepQ-BNEst'])


def test_estimate_everywhere_and_as_in_the_paper():
    nets = step_networks('acnet', methods=('RepQ-BNEst', 'RepQ-BNEst, all'), width=.125, n_classes=10)
    def kinds(name):
        return {n: l.statistics for n, l in nets[name].named_modules() if isinstance(l, RepConv2d)
                and l.branch.has_norm}
    exact = nets['QAT RepQ-BNEst'].exact_norms()
    assert exact and {n for n, s in kinds('QAT RepQ-BNEst').items() if s == 'batch'} == set(exact)
    assert set(kinds('QAT RepQ-BNEst, all').values()) == {'estimate'}
    assert 'RepQ-BNEst, all' not in bench.methods_for(branch_chain(2, 8))
    assert bench.methods_for(bench.build_model('resnet18', block='orepa', width=.125)) == ['RepQ']


def test_products_in_bfloat16_are_those_of_the_rows_that_say_so(monkeypatch):
    "Every statistic of such a row is taken in it, none of another row, and nothing stays behind"
    nets = compared_networks(lambda plain: branch_chain(0 if plain else 2, 8),
                             methods=['RepQ-BN', 'RepQ-BN, bfloat16', 'RepQ-sampled, bfloat16'])
    steps, seen, count = candidate_steps(nets, torch.randn(2, 8, 8, 8),
                                         torch.randint(10, (2,))), [], norm.output_moments
    monkeypatch.setattr(norm, 'output_moments', lambda signal, kernel,
                        dtype=None: seen.append(dtype) or count(signal, kernel, dtype))
    half = torch.bfloat16
    types = {'QAT RepQ-BN, bfloat16': half, 'QAT RepQ-sampled, bfloat16': half, 'QAT RepQ-BN': None}
    for name, dtype in types.items():
        seen.clear()
        steps[name][name]()
        assert seen == [dtype]*6, 'two norms in each of three blocks'
    memory = bench.bench_memory('acnet', methods=('RepQ-BN', 'RepQ-BN, bfloat16'), **TINY | dict(size=64))
    assert memory['saved MB']['QAT RepQ-BN, bfloat16'] != memory['saved MB']['QAT RepQ-BN']


def test_full_precision_is_trained_as_its_authors_do():
    "Branches if a norm needs them, else one merged kernel; `repq reproduce` trains the same way"
    from repq.reproduce.training import full_precision_network
    def modes(net):
        return {n: l.mode for n, l in net.named_modules() if isinstance(l, RepConv2d)
                and type(l.branch).__name__ == 'Sum'}
    for block, mode in dict(acnet='branches', repvgg='branches', orepa='merged', ecb='merged').items():
        net = step_networks(block, methods=(), width=.125, n_classes=10)['FP Re-parametrized']
        assert set(modes(net).values()) == {mode}, block
        assert modes(net) == modes(full_precision_network('resnet18', block, width=.125, n_classes=10)), block


# -- operations

def counted(branch, x, **kwargs):
    "Multiplications of a training step of one quantized block, initialised before"
    layer = RepConv2d(branch, **kwargs).quantize(4, 4)
    def step(): layer(x).sum().backward()
    step()
    return bench.multiplications(step)


def test_operations_by_hand():
    "A 3×3 convolution of two 6×6 images, 8 to 8 channels, three times: forward, by input and by weight"
    x = torch.randn(2, 8, 6, 6)
    c = 2*6*6 * 8*8 * 9
    assert counted(Conv(8, 8, 3), x) == 3*c
    assert counted(Conv(8, 8, 3), x, stride=2) == 3*c//4
    assert counted(Conv(8, 8, 3, groups=4), x) == 3*c//4, 'PyTorch counts 4 times too much for the weight'
    assert counted(Norm(Conv(8, 8, 3)), x) == 3*c + 2*c, 'exact statistics: forward and by weight'
    assert counted(Norm(Conv(8, 8, 3)), x, statistics='estimate') == 3*c
    merge = 8*8*8 * 9 # a 1×1 convolution into a 3×3, as a matrix product
    assert counted(Seq(Conv(8, 8, 1), Conv(8, 8, 3)),
                   x) == 3*c + 3*merge, 'merged once, not again in the backward pass'
    wide = 8*8*8 * 9*9 # two 3×3 into one 5×5, a transposed convolution of kernels
    assert counted(Seq(Conv(8, 8, 3), Conv(8, 8, 3)), x) == 3*c*25//9 + 3*wide


def test_operations_of_steps(monkeypatch):
    "Counts relative to plain of the same stage, composed like times, taken when all is measured"
    when, timed = [], bench.interleaved
    monkeypatch.setattr(bench, 'interleaved', lambda *args,
                        **kwargs: (timed(*args, **kwargs), when.append('timed'))[0])
    count = bench.multiplications
    monkeypatch.setattr(bench, 'multiplications', lambda f: when.append('counted') or count(f))
    with use_path('fused'):
        nets = compared_networks(lambda plain: branch_chain(0 if plain else 2, 8, blocks=2),
                                 methods=['RepQ-BN', 'RepQ-BNEst', 'RepQ-calibrated'])
        t = bench.measure_steps(nets, torch.randn(2, 8, 6, 6), torch.randint(10, (2,)), rounds=1)
    assert when == ['timed'] + ['counted']*(len(t) - 3), 'one step for each part, none for the composed rows'
    c, linear = 2*6*6 * 8*8 * 9, 3*2*8*10
    plain = 6*c + linear
    count = t.operations
    assert (count[['QAT Plain', 'QAT Plain, contiguous', 'FP Plain', 'QAT RepQ-BNEst']] == 1).all()
    # the first layer has no gradient of its input
    assert count['FP Re-parametrized'] == pytest.approx((2*5*c + linear)/(5*c + linear))
    # a convolution for each of two norms, in the first layer without the gradient of the image
    assert count['QAT RepQ-BN'] == pytest.approx((plain + 2*5*c)/plain)
    assert count['QAT RepQ-calibrated'] == pytest.approx((31*count[ORDINARY] + count[MEASURING])/32)
    more = count[MEASURING] - count[ORDINARY]
    assert more == pytest.approx(4*c/plain), 'four convolutions more, forward only'


# -- targets

def test_targets():
    t = table_of(**{'QAT Plain': [1.], 'QAT RepQ-BNEst': [1.28], 'QAT RepQ-BNEst, bfloat16': [1.2],
                    'QAT RepQ-BNEst, all': [1.1], 'QAT RepQ-calibrated': [1.14], 'QAT RepQ-BN': [2.7],
                    'QAT RepQ-sampled': [1.5]})
    t['relative'] = relative(t, 'QAT Plain')['median']
    judge(t, step_targets(Setting(), t), t.relative)
    assert t.met.to_dict() == {'QAT Plain': '', 'QAT RepQ-BNEst': 'no', 'QAT RepQ-BNEst, bfloat16': 'must',
                               'QAT RepQ-BNEst, all': 'must', 'QAT RepQ-calibrated': 'aim',
                               'QAT RepQ-BN': 'no', 'QAT RepQ-sampled': 'aim'}
    assert t.must['QAT RepQ-calibrated'] == pytest.approx(1.15) and t.must.isna()['QAT Plain']
    for more, met in ((.04, 'aim'), (.06, 'no')): # the median of the differences, whatever the medians are
        u = table_of(**{'QAT Plain': [1.]*3, 'QAT RepQ-BNEst, all': [1., 1.2, 1.4],
                        'QAT RepQ-calibrated': [1. + more, 1.5, 1.4 + more]})
        u['relative'] = relative(u, 'QAT Plain')['median']
        assert judge(u, step_targets(Setting(), u), u.relative).met['QAT RepQ-calibrated'] == met
    assert step_targets(Setting(size=64), t) == dict.fromkeys(['QAT RepQ-BNEst', 'QAT RepQ-BNEst, bfloat16',
                                                               'QAT RepQ-BNEst, all'], (1.25, 1.1))
    assert step_targets(Setting(size=65), t) == {}
    assert step_targets(Setting(block='orepa', batch=48), t) == {'QAT RepQ': (1.35, 1.15)}
    assert step_targets(Setting('repvgg_a0', 'repvgg', 96), t) == {'QAT RepQ-BNEst': (1.25, 1.05)}


# -- memory

def test_two_counts_of_memory_agree():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Sigmoid())
    x = torch.randn(4, 3, 16, 16)
    saved, (held, peak) = saved_bytes(lambda: net(x), x, *net.parameters()), allocated_bytes(lambda: net(x))
    assert saved == held == 4*4*8*(14*14 + 12*12) and peak >= held


# -- peers

def test_missing_peers_are_left_out_and_named(monkeypatch):
    real = builtins.__import__
    def without(name, *args, **kwargs):
        if name.split('.')[0] in ('brevitas', 'torchao'): raise ImportError(f'No module named {name!r}')
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', without)
    found, notes = find_peers(torch.randn(2, 4, 4, 4))
    assert not found and len(notes) == 2 and notes[0].startswith('Brevitas is left out')
    assert notes[1].startswith('torchao is left out') and "pip install 'repq[bench]'" in notes[0]


def slow_peer(x, bits):
    step = torch.ones((), requires_grad=True)
    return Candidate(lambda x: x*step + (time.sleep(.001) or 0), step)


def test_a_peer_takes_part(monkeypatch):
    quantizer = pytest.importorskip('repq.fast.quantizer', reason='without repq.fast nothing is compiled')
    monkeypatch.setattr(bench, 'PEERS', {'Brevitas': slow_peer})
    programs = quantizer.Programs('a quantizer', None)
    monkeypatch.setattr(quantizer, 'FORMULAS', programs)
    monkeypatch.setattr(quantizer, 'compile_formula', lambda *args: 1/0) # no compiler
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        t = bench_quantizer(3, (2, 4, 8, 8))
    assert 'Brevitas' in t.index and 'times faster than Brevitas' in t and 'repq, compiled' not in t.index
    assert any('torch.compile failed for a quantizer' in n for n in t.attrs['notes'])
    assert programs.failed and t.attrs['rounds'].shape == (3, len(t))
    with use_path('auto'): assert measuring.conditions()['path'] == 'auto, compiling failed'
    for path in ('simple', 'fused'): # neither asks torch.compile for anything
        with use_path(path): assert measuring.conditions()['path'] == path


@pytest.mark.parametrize('fast', [True, False])
def test_rows_of_a_quantizer_with_and_without_fast(fast, monkeypatch):
    "One row on the plain path instead of two; the record says that the folder is missing"
    if fast and not is_there('repq.fast'): pytest.skip('repq.fast is missing')
    for module in (bench, measuring): monkeypatch.setattr(module, 'is_there', lambda name: fast)
    ours = [name for name in bench.quantizer_candidates(torch.randn(2, 4, 8, 8)) if name.startswith('repq')]
    assert ours == (['repq, eager', 'repq, compiled'] if fast else ['repq, simple'])
    with use_path('both'):
        assert measuring.conditions()['path'] == ('both' if fast else 'both, without repq.fast')
        net = bench.build_model('resnet18', block='acnet', width=.125)
        assert ('RepQ-BNEst, torch.compile' in bench.methods_for(net)) == fast
    if not fast:
        monkeypatch.setattr(bench, 'PEERS', {'Brevitas': slow_peer})
        assert 'repq, simple' in bench_quantizer(1, (2, 4, 8, 8)).index


@pytest.mark.parametrize('name', bench.PEERS)
def test_peers_quantize_to_the_same_grid(name):
    pytest.importorskip(name.lower())
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    f, scale = bench.PEERS[name](x.detach(), 4)
    y = f(x)
    by_x, by_scale = torch.autograd.grad(y, (x, scale), torch.ones_like(y))
    assert y.shape == x.shape and 2 < y.unique().numel() <= 16 and by_x.shape == x.shape
    assert by_scale.abs().sum() > 0


# -- records

def test_record_has_everything(tmp_path):
    paper = paper_times('resnet18', 'acnet')
    t = bench_step('acnet', 3, methods=['RepQ-BNEst', 'RepQ-calibrated'], layout='contiguous', paper=paper,
                   **TINY)
    record = json.loads(save_bench(t, 'step', tmp_path, 'repq bench step').read_text(),
                        parse_constant=lambda c: pytest.fail(f'{c} is not JSON'))
    assert record == read_bench(tmp_path)['step']
    assert {'name', 'command', 'when', 'environment', 'conditions', 'setting', 'baseline', 'parts', 'notes',
            'layout', 'columns', 'rows', 'rounds', 'title'} <= set(record)
    assert {k: len(v) for k, v in record['rounds'].items()} == dict.fromkeys(t.index, 3)
    ordinary, measuring, whole = (record['rounds'][k] for k in (ORDINARY, MEASURING, 'QAT RepQ-calibrated'))
    assert whole == pytest.approx([(31*a + b)/32 for a, b in zip(ordinary, measuring)])
    assert record['setting'] == dict(model='resnet18', block='acnet', size=16, batch=2, width=.125)
    assert record['layout'] == 'contiguous'
    assert {'median ms', 'spread', 'relative', 'low', 'high', 'operations', 'at peak', 'must', 'aim', 'met',
            'paper'} <= set(record['columns'])
    assert all(row['operations'] >= 1 for row in record['rows'].values())
    assert 'operations' in record_markdown(record).splitlines()[0]
    assert record['rows']['QAT RepQ-BNEst']['paper'] == 1.5
    assert record['rows']['QAT RepQ-BNEst']['must'] is None, 'a target is for the full network only'
    assert record['conditions']['path'] == 'simple', 'no path of a machine'
    assert not re.search(r'"[^"]*/(usr|bin|home|root|work)/', json.dumps(record)), 'no path of a machine'


def test_pages_say_what_was_measured():
    t = table_of(**{'QAT Plain': [100.], 'QAT RepQ-BNEst': [105.2]})
    t['relative'], t['low'], t['high'] = [1., 1.05], [1., 1.04], [1., 1.06]
    t.attrs.update(title='A network', baseline={'QAT': 'channels-last'}, notes=['compiling failed'])
    record = make_record(judge(t, {'QAT RepQ-BNEst': (1.1, 1.)}, t.relative), 'step-a', 'repq bench step')
    text = targets_markdown([record])
    numbers = '105.2 | 1.050 | 1.040 | 1.060 | 1.100 | 1.000'
    assert text.splitlines()[2] == f'| A network | RepQ-BNEst | {numbers} | must | channels-last |'
    assert len(text.splitlines()) == 3
    assert all(words in record_markdown(record) for words in ('QAT Plain is channels-last',
                                                              'compiling failed', '`repq bench step`',
                                                              record['environment']['cpu']))
    # as they were before
    old = {k: v for k, v in record.items() if k not in ('conditions', 'notes', 'rounds', 'title', 'baseline')}
    assert record_markdown(old) and measuring.bar_figure([old])
    assert measured_where(old).startswith('`repq bench step`')


def test_pictures_show_targets_and_paper():
    t = table_of(**{'QAT Plain': [1., 1.], 'QAT RepQ-BN': [2., 3.]})
    t['relative'], t['low'], t['high'], t['paper'] = [1., 2.5], [1., 2.2], [1., 2.8], [1., 1.95]
    fig = measuring.bar_figure([make_record(judge(t, {'QAT RepQ-BN': (2.6, 2.4)}, t.relative), 'a', '')])
    ax = fig.axes[0]
    drawn = [tuple(line.get_xdata()) for line in ax.lines]
    assert (2.6, 2.6) in drawn and (2.4, 2.4) in drawn and (1.95,) in drawn and (2.2, 2.8) in drawn
    assert len(ax.patches) == 2
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ['middle half of the rounds', 'must', 'aim',
                                                                  'paper, Table 4 (two V100)']


# -- the command

@pytest.mark.parametrize('what', [None, *ABOUT])
def test_help(what, capsys):
    assert main(['bench', *([what] if what else []), '--help']) == 0
    out = capsys.readouterr().out
    assert 'quick' in out
    options = ['--rounds' if what != 'memory' else '--batch', '--path', '--no-keep-memory', '--out']
    for word in ABOUT if what is None else options: assert word in out


@pytest.mark.parametrize('words, said', [
    (['step', '--layout', 'nhwc'], 'invalid choice'), (['growth', '--axis', 'depth'], 'invalid choice'),
    (['step', '--width', '0'], 'a number above 0 is needed'), (['nothing'], 'invalid choice')])
def test_wrong_usage(words, said, capsys):
    assert main(['bench', *words]) == 2 and said in capsys.readouterr().err


def test_memory_that_cannot_be_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measuring, 'keep_memory', lambda: False)
    assert main(['bench', 'step', '--quick', '--keep-memory', '--out', str(tmp_path)]) == 1
    assert '--keep-memory needs' in capsys.readouterr().err


def test_all_writes_everything(monkeypatch, tmp_path, capsys):
    "In tiny settings, two of them and two axes"
    monkeypatch.setattr(bench, 'STEP_TARGETS', {s: bench.STEP_TARGETS[s]
                                                for s in (Setting(), Setting(block='orepa', batch=48))})
    monkeypatch.setattr(bench, 'AXES', dict(size=(32, 64), branches=(1, 2)))
    monkeypatch.setattr(measuring, 'keep_memory', lambda: False) # it would stay for the rest of the tests
    threads, path = torch.get_num_threads(), Seam.path
    assert main(['bench', 'all', '--quick', '--path', 'simple', '--rounds', '1', '--out', str(tmp_path)]) == 0
    names = [f'{kind}-resnet18-{block}-32-4-w0.125-simple' for kind in ('step', 'memory')
             for block in ('acnet', 'orepa')]
    names += ['quantizer', 'deploy', 'growth-size-simple', 'growth-branches-simple']
    assert {p.stem for p in tmp_path.glob('*.json')} == set(names)
    assert {p.stem for p in tmp_path.glob('*.png')} == {'quantizer', 'deploy', 'step-simple', 'memory-simple',
                                                        'growth-simple'}
    assert not list(tmp_path.glob('.*'))
    for name, r in read_bench(tmp_path).items():
        kind = name.split('-')[0]
        assert r['command'] == f'repq bench {kind} --quick --path simple --rounds 1' and r['quick']
        assert r['conditions']['threads'] == 1 and r['rows'] and any('mean nothing' in n for n in r['notes'])
        assert kind == 'memory' or r['rounds']
    out, err = capsys.readouterr()
    heads = [line for line in out.splitlines() if 'operations' in line and 'relative' in line]
    assert len(heads) == 4, 'two tables of steps, two of growth'
    assert [line.split(':')[0] for line in err.splitlines() if re.search(r': \d+ s$', line)] == ['quantizer',
                                                                                                 'deploy',
                                                                                                 'memory',
                                                                                                 'memory',
                                                                                                 'step',
                                                                                                 'step',
                                                                                                 'growth',
                                                                                                 'growth']
    assert (torch.get_num_threads(), Seam.path) == (threads, path)


def test_what_is_done_is_kept(monkeypatch, tmp_path):
    "A run that is cut in its second setting has written the first"
    def cut(block, rounds, **kwargs):
        if block == 'orepa': raise KeyboardInterrupt
        t = table_of(**{'QAT Plain': [1.]})
        t['relative'] = 1.
        t.attrs.update(title='a')
        return t
    monkeypatch.setattr(bench, 'STEP_TARGETS', {Setting(): {}, Setting(block='orepa'): {}})
    monkeypatch.setattr(bench, 'bench_step', cut)
    assert main(['bench', 'step', '--no-keep-memory', '--rounds', '1', '--out', str(tmp_path)]) == 130
    assert list(read_bench(tmp_path)) == ['step-resnet18-acnet-128-16-page-faults']
    assert any('Fewer than 7 rounds' in n for r in read_bench(tmp_path).values() for n in r['notes'])


def test_a_long_bar_is_cut_and_says_so():
    t = table_of(**{'FP Plain': [1.], 'FP Re-parametrized': [11.], 'QAT Plain': [1.], 'QAT RepQ': [1.7]})
    t['relative'] = [1., 11., 1., 1.7]
    ax = measuring.bar_figure([make_record(t, 'a', '')]).axes[0]
    assert [text.get_text() for text in ax.texts] == ['1.00', '11.00 »', '1.00', '1.70']
    assert ax.get_xlim()[1] < 2


def test_a_step_at_peak(monkeypatch):
    "Plain QAT with the additional multiplications at the rate of a large matrix product, round by round"
    def timed(candidates, rounds, **_):
        assert candidates['large product']().shape == (bench.LARGE, bench.LARGE)
        times = {n: [10., 20., 40.] for n in candidates} | {'large product': [5., 8., 100.]}
        return measuring.summarize(*(pd.DataFrame(times)*k for k in (1, 0)))
    monkeypatch.setattr(bench, 'interleaved', timed)
    monkeypatch.setattr(bench, 'multiplications', lambda f: f())
    monkeypatch.setattr(bench, 'candidate_steps', lambda *_: {n: {n: lambda k=k: k*bench.LARGE**3} for n,
                                                              k in (('QAT Plain', 3), ('QAT RepQ-BN', 5),
                                                                    ('QAT RepQ-BNEst', 3))})
    t = bench.measure_steps(dict.fromkeys(['QAT Plain', 'QAT RepQ-BN', 'QAT RepQ-BNEst']), torch.zeros(1),
                            None, rounds=3)
    assert t['at peak'].to_dict() == {'QAT Plain': 1, 'QAT RepQ-BN': 1 + 2*.5, 'QAT RepQ-BNEst': 1}
    assert t.operations['QAT RepQ-BN'] == 5/3


@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_training_step_trains(layout):
    "The optimizer has views of the weights: they learn as by PyTorch's own SGD"
    net = compared_networks(lambda plain: branch_chain(0 if plain else 2, 8, blocks=2),
                            methods=['RepQ-BNEst'])['QAT RepQ-BNEst'].to(memory_format=LAYOUTS[layout])
    x, y = torch.randn(4, 8, 6, 6).to(memory_format=LAYOUTS[layout]), torch.randint(10, (4,))
    other = copy.deepcopy(net).train()
    before = copy.deepcopy(net.state_dict())
    step = bench.training_step(net, x, y) # makes one step itself
    step()
    step()
    opt = torch.optim.SGD(other.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(3):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(other(x), y).backward()
        opt.step()
    for n, p in other.named_parameters():
        torch.testing.assert_close(net.get_parameter(n), p, rtol=1e-4, atol=1e-7)
        assert not torch.equal(net.get_parameter(n), before[n]), n
