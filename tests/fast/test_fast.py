"Every fast way gives what the simple one gives: output, gradients, running statistics"
import copy, os, platform, subprocess, sys
import pytest, torch
import torch.nn.functional as F
import repq
from repq import blocks
from repq.fast import native, small_maps
from repq.algebra.branch import Conv, Fixed, Identity, Norm, Scale, Seq, Sum
from repq.algebra.kernel import Kernel
from repq.quantization.layer import RepConv2d
from repq.algebra.statistics import STATISTICS, Calibrated, Exact, Sampled
from repq.tools.registry import paths_taken, reset_paths, use_path
from repq.tools.testing import assert_same, randomize_bn, rel_error
from repq.fast.quantizer import FORMULAS
from repq.fast.weights import BLOCKS as PROGRAMS, native_norms

NATIVE = ('repvgg', 'acnet', 'mobileone')


def block(name, i=6, o=6, stride=1, groups=1, statistics='estimate', bits=4):
    "A quantized block with random norms, its steps set by one batch, in float64"
    torch.manual_seed(0)
    layer = randomize_bn(getattr(blocks, name)(i, o, 3, stride, groups).double()).quantize(bits, bits, True)
    layer.statistics = statistics
    layer(torch.randn(3, i, 9, 7, dtype=torch.float64))
    return layer


def step(layer, x, path):
    "Output, gradients by name, buffers after one training step"
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    reset_paths()
    with use_path(path):
        y = layer(x)
        y.pow(3).mean().backward()
    taken = {'fused': 0, 'compiled': 0, 'simple': 0} | {path: 1}
    assert paths_taken() == taken, 'another path was taken silently'
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return y.detach(), {'x': x.grad} | grads, dict(layer.named_buffers())


def assert_same_step(ours, expected):
    assert_same(ours[0], expected[0], 1e-10)
    scale = max(g.abs().max().item() for g in expected[1].values())
    for n in ours[1].keys() | expected[1].keys():
        g, e = ours[1].get(n), expected[1].get(n)
        if g is None or e is None: assert (e if g is None else g).abs().max() < 1e-12*scale, n
        else: assert_same(g, e, 1e-10, n, scale)
    for n, b in expected[2].items(): assert_same(ours[2][n], b, 1e-10, n)


@pytest.mark.parametrize('statistics', STATISTICS)
@pytest.mark.parametrize('name', NATIVE)
def test_native(name, statistics):
    "The C loop: strides, groups, other channels, both layouts of weights and of the input, later steps too"
    assert native.library(torch.float64) is not None, 'the tests need a C compiler'
    shapes = [(6, 6, 1, 1), (4, 8, 2, 1), (6, 6, 1, 3), (6, 6, 2, 6),
              (16, 6, 1, 1), (16, 16, 1, 2)]   # 16 and 8 channels fill lines of the cache
    for i, o, stride, groups in shapes:
        layer = block(name, i, o, stride, groups, statistics)
        assert native_norms(layer.branch)
        for weights in (torch.contiguous_format, torch.channels_last):
            for layout in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(3, i, 9, 7, dtype=torch.float64).to(memory_format=layout)
                laid = copy.deepcopy(layer).to(memory_format=weights)
                for m in laid.modules():
                    # not due, due
                    if hasattr(m, 'calibration'):
                        m.calibration.step = 5 if layout is torch.channels_last else 4
                assert_same_step(step(laid, x, 'fused'), step(laid, x, 'simple'))


@pytest.mark.parametrize('statistics', STATISTICS)
@pytest.mark.parametrize('name', NATIVE)
def test_native_on_small_maps(name, statistics):
    "Few pixels, many channels, channels last: exact statistics from matrix products go to the loop"
    shapes = [(64, 64, 1, (2, 2)), (64, 64, 1, (4, 3)), (128, 70, 2, (7, 5)), (64, 64, 1, (1, 4))]
    for i, o, stride, size in shapes:
        layer = block(name, i, o, stride, 1, statistics).to(memory_format=torch.channels_last)
        x = torch.randn(3, i, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
        assert_same_step(step(layer, x, 'fused'), step(layer, x, 'simple'))
        layer.branch.parts[0].bn.eval()          # one part frozen
        assert_same_step(step(layer, x, 'fused'), step(layer, x, 'simple'))


@pytest.mark.parametrize('statistics', ['batch', 'sampled'])
@pytest.mark.parametrize('size', [(2, 2), (4, 3), (12, 10)])
@pytest.mark.parametrize('batch', [3, 16])
def test_statistics_in_bfloat16(batch, size, statistics):
    "Means and variances to a few thousandths, and the same by every way"
    layer = block('acnet', 64, 32, statistics=statistics).float().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 64, *size).relu().to(memory_format=torch.channels_last)
    exact, found = step(layer, x, 'simple')[2], {}
    layer.statistics = dict(batch=Exact, sampled=Sampled)[statistics](dtype=torch.bfloat16)
    for path in ('simple', 'fused'):
        y, grads, half = step(layer, x, path)
        found[path] = {n: b for n, b in half.items() if 'running' in n}
        assert all(0 < rel_error(b, exact[n]) < 5e-3 for n, b in found[path].items())
        assert len(found[path]) == 6
        assert y.isfinite().all() and all(g.isfinite().all() for g in grads.values())
    # moments in another order of sums
    for n, b in found['fused'].items(): assert_same(b, found['simple'][n], 1e-6)


def test_a_loaded_bias_is_used():
    "A fixed kernel without a bias takes one from a file"
    weight, bias, x = torch.randn(4, 4, 3, 3), torch.randn(4), torch.randn(2, 4, 6, 6)
    fixed, other = RepConv2d(Fixed(Kernel(weight))), RepConv2d(Fixed(Kernel(weight, bias)))
    assert not torch.equal(fixed(x), other(x))
    fixed.load_state_dict(other.state_dict())
    assert torch.equal(fixed(x), other(x))


def test_small_maps_twice_back():
    "A second backward pass over the same graph gives the same: nothing in it was changed in place"
    layer = block('acnet', 64, 64, statistics='batch').to(memory_format=torch.channels_last)
    x = torch.randn(3, 64, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    before = [p.detach().clone() for p in layer.parameters()]
    with use_path('fused'): y = layer(x).pow(3).mean()
    first, second = (torch.autograd.grad(y, [x, *layer.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, before, layer.parameters()))


@pytest.mark.parametrize('options', ['-mno-avx512f', '-mno-avx', '-O1 -fno-openmp'])
@pytest.mark.skipif(platform.machine() != 'x86_64', reason='options of x86')
def test_processors_of_less(options, monkeypatch, tmp_path):
    "Narrower vectors, fewer registers, no threads: the same numbers"
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(native, '_libraries', {})
    x = torch.randn(5, 64, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    ways = [block('acnet', 64, 50, statistics=s).to(memory_format=torch.channels_last)
            for s in ('estimate', 'batch')]
    expected = [step(layer, x, 'simple') for layer in ways]
    monkeypatch.setenv('CC', f'cc {options}')
    for layer, e in zip(ways, expected): assert_same_step(step(layer, x, 'fused'), e)
    assert len([*tmp_path.rglob('*.so')]) == 1


@pytest.mark.parametrize('name', sorted(set(blocks.BLOCKS) - {*NATIVE, 'plain'}))
def test_compiled(name):
    "torch.compile, for a block of every other form"
    layer = block(name, statistics='estimate')
    assert native_norms(layer.branch) is None
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    assert_same_step(step(layer, x, 'compiled'), step(layer, x, 'simple'))
    assert not PROGRAMS.failed and not FORMULAS.failed


@pytest.mark.parametrize('groups, stride', [(1, 1), (2, 2)])
def test_compiled_channels_last(groups, stride):
    "Depthwise-separable branches, merged in a way of their own in channels-last layout"
    layer = blocks.orepa(6, 4, stride=stride, groups=groups).double()
    layer = layer.to(memory_format=torch.channels_last).quantize()
    for p in layer.branch.parameters(): p.data.copy_(torch.randn_like(p))
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    layer(x)
    assert_same_step(step(layer, x, 'compiled'), step(layer, x, 'simple'))
    assert not PROGRAMS.failed and not FORMULAS.failed


@pytest.fixture
def traced(request, monkeypatch):
    "torch.compile traces and differentiates blocks, but generates code for them with --slow only"
    if request.config.getoption('--slow'): return
    compile = torch.compile
    def trace(f, **kwargs):
        if 'options' in kwargs: return compile(f, **kwargs)     # a quantizer
        return compile(f, backend='aot_eager_decomp_partition', **kwargs)
    monkeypatch.setattr(torch, 'compile', trace)
    monkeypatch.setattr(PROGRAMS, 'made', {})


@pytest.mark.parametrize('statistics', ['batch', 'sampled', 'calibrated'])
def test_compiled_statistics(statistics, traced):
    layer = block('dbb', statistics=statistics)
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    assert_same_step(step(layer, x, 'compiled'), step(layer, x, 'simple'))
    assert not PROGRAMS.failed


def with_stride(name, measure):
    layer = block(name, 6, 8, 2, statistics=Calibrated(measure=measure))
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    assert_same_step(step(layer, x, 'compiled'), step(layer, x, 'simple'))
    assert not PROGRAMS.failed


@pytest.mark.parametrize('measure', [True, False])
def test_compiled_calibrated_with_a_stride(measure):
    "Windows of the mean image, at stride 2, in a program of torch.compile"
    with_stride('acnet', measure)


@pytest.mark.parametrize('name', ['orepa', 'dbb', 'repvgg'])
@pytest.mark.parametrize('measure', [True, False])
def test_traced_calibrated_with_a_stride(name, measure, traced):
    "The same for other blocks"
    with_stride(name, measure)


def test_compiled_calibrated_inside_a_sequence():
    "Norms outside and inside of a sequence, a scale with a bias, and an identity"
    torch.manual_seed(0)
    sequence = Seq(Norm(Conv(6, 8, 1)), Scale(Conv(8, 6, 3), bias=True))
    layer = RepConv2d(Sum(Norm(Conv(6, 6, 3)), sequence, Identity(6)), statistics='calibrated').double()
    layer = randomize_bn(layer).quantize(4, 4, True)
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    layer(x)
    assert_same_step(step(layer, x, 'compiled'), step(layer, x, 'simple'))
    assert not PROGRAMS.failed


def test_a_block_that_cannot_be_compiled(monkeypatch):
    "One warning that names it; it goes on the simple way, and others are compiled"
    for programs in (PROGRAMS, FORMULAS): monkeypatch.setattr(programs, 'failed', set())
    for programs in (PROGRAMS, FORMULAS): monkeypatch.setattr(programs, 'made', {})
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    bad, good = block('acnet'), block('repvgg')
    compile = torch.compile
    def refuse(*args, **kwargs): raise RuntimeError('not this one')
    monkeypatch.setattr(torch, 'compile', refuse)
    failed = 'torch.compile failed for a block .*not this one'
    with use_path('compiled'), pytest.warns(UserWarning, match=failed) as said:
        reset_paths()
        for _ in range(3): bad(x)
    assert len([w for w in said if 'repq' in str(w.message) and 'a block' in str(w.message)]) == 1
    assert paths_taken()['simple'] == 3
    monkeypatch.setattr(torch, 'compile', compile)
    step(good, x, 'compiled')
    with use_path('compiled'):
        reset_paths()
        bad(x)
    assert paths_taken() == {'fused': 0, 'compiled': 0, 'simple': 1}, 'it is not tried again'


def test_frozen_norms():
    layer = block('repvgg')
    layer.branch.parts[1].bn.eval()
    x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
    before = layer.branch.parts[1].bn.running_mean.clone()
    ours = step(layer, x, 'fused')
    assert_same_step(ours, step(layer, x, 'simple'))
    assert torch.equal(ours[2]['branch.parts.1.bn.running_mean'], before)


def test_threads_do_not_change_the_result():
    "Two threads: the same every time, and equal to one up to the order of sums"
    layer, x = block('acnet', 16, 16), torch.randn(3, 16, 9, 7, dtype=torch.float64)
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            found.append(step(layer, x, 'fused'))
    finally: torch.set_num_threads(before)
    assert all(torch.equal(found[1][1][n], found[2][1][n]) for n in found[1][1])
    assert_same_step(found[1], found[0])


BLOCKS = 16   # of AC-ResNet-18 with branches; its stem and shortcuts are plain


def test_a_network_trains_the_same():
    "Four steps of AC-ResNet-18 in float64: losses agree (later a rounding tie will fall differently)"
    x, y = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.arange(4)
    def losses(path):
        torch.manual_seed(0)
        net = repq.quantize(repq.models.resnet18(block='acnet', width=.125, n_classes=4).double(), 4, 4,
                            statistics='estimate', start='first')
        opt, found = torch.optim.SGD(net.parameters(), 1e-3, momentum=.9), []
        with use_path(path):
            for _ in range(4):
                loss = F.cross_entropy(net(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                found.append(loss.item())
        return torch.tensor(found, dtype=torch.float64)
    reset_paths()
    expected = losses('simple')
    assert paths_taken() == {'fused': 0, 'compiled': 0, 'simple': 4*BLOCKS}
    reset_paths()
    assert_same(losses('fused'), expected, 1e-8)
    assert paths_taken() == {'fused': 4*BLOCKS, 'compiled': 0, 'simple': 0}


def test_small_maps_are_only_faster():
    "The last layers of a network with and without the matrix product"
    torch.manual_seed(0)
    net = repq.models.resnet18(block='plain', n_classes=4).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64).to(memory_format=torch.channels_last)
    def run(): return torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
    with pytest.MonkeyPatch.context() as m:
        ours = run()
        calls = []
        m.setitem(small_maps.small_map, 'pixels', 0)
        m.setattr(small_maps.SmallMap, 'apply', lambda *a: calls.append(a))
        expected = run()
    assert not calls
    for a, b in zip(ours, expected):
        assert_same(a, b, 1e-9, scale=max(g.abs().max().item() for g in expected))


def test_without_a_compiler(tmp_path):
    "A warning, once, and the simple way"
    code = '''if True:
        import warnings, torch, repq
        from repq.blocks import repvgg
        torch.set_num_threads(1)
        layer = repvgg(4, 4).quantize(4, 4, True)
        layer.statistics = 'estimate'
        x = torch.randn(2, 4, 8, 8)
        with repq.use_path('simple'): layer(x)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            for _ in range(3): layer(x).sum().backward()
            with torch.no_grad(): layer.eval()(x)
        taken = repq.tools.registry.paths_taken()
        assert taken == {'fused': 0, 'compiled': 0, 'simple': 4}, 'steps set once, three steps without C'
        said = [str(w.message) for w in said if 'repq' in str(w.message)]
        assert len(said) == 1 and 'without compiled C' in said[0] and 'no-such-compiler' in said[0], said
        print('fine')'''
    env = {**os.environ, 'CC': 'no-such-compiler', 'XDG_CACHE_HOME': str(tmp_path)}
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == 'fine', done.stderr


def test_a_layer_input_is_not_kept():
    "No cycle holds a batch after the step"
    import gc, weakref
    layer = block('acnet')
    gc.disable()
    try:
        x = torch.randn(3, 6, 9, 7, dtype=torch.float64)
        seen = weakref.ref(x)
        layer(x).sum().backward()
        del x
        assert seen() is None
    finally: gc.enable()


def test_order_of_statistics():
    "A calibrated norm that measures without gradients leaves those of its neighbour alone"
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    first, a, b = Conv(4, 8, 1), Norm(Conv(8, 4, 3), statistics='calibrated'), Norm(Conv(8, 4, 3),
                                                                                    statistics='batch')
    def by_first(*parts):
        layer = RepConv2d(Seq(first, Sum(*parts))).double().train()
        return torch.autograd.grad(layer.kernel(x).weight.square().sum(), first.weight)[0]
    assert_same(by_first(a, b), by_first(b, a), 1e-12)
    b.statistics = 'estimate'
    expected = by_first(b, a)
    b.statistics = 'batch'
    difference = (by_first(a, b) - expected).abs().max()
    assert difference > 1e-6, 'the gradient through exact statistics is another one'
