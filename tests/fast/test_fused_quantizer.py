"Fused and compiled LSQ: the numbers of the formulas, when it is compiled, and speed"
import math, multiprocessing, shutil, statistics, time
import pytest, torch
from torch import nn
from repq.fast import quantizer as fast
from repq.fast.quantizer import FORMULAS, Programs
from repq.quantization.lsq import LSQ
from repq.tools.registry import use_path
from repq.tools.testing import assert_same

needs_compiler = pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')),
                                    reason='no C++ compiler for torch.compile')
RANGES = [(bits, signed, symmetric) for bits in range(2, 9) for signed,
          symmetric in ((False, False), (True, False), (True, True))]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_eager_until_it_pays(monkeypatch):
    asked = []
    monkeypatch.setattr(fast, 'compile_formula', lambda formula: formula)
    monkeypatch.setattr(fast, 'FORMULAS', Programs('a quantizer', 1000))
    whole = Programs.run
    monkeypatch.setattr(Programs, 'run', lambda self, *args: asked.append(args) or whole(self, *args))
    q, x = LSQ(4), torch.randn(400)
    for _ in range(4): q(x)
    assert len(asked) == 2                    # the third and the fourth
    fast.FORMULAS.after = None
    q(x)
    assert len(asked) == 2


def test_without_a_compiler(monkeypatch):
    def broken(formula): raise RuntimeError('no compiler')
    monkeypatch.setattr(fast, 'compile_formula', broken)
    monkeypatch.setattr(fast, 'FORMULAS', Programs('a quantizer', 1000))
    q, x = LSQ(4), torch.randn(400)
    y = q(x)
    with use_path('compiled'), pytest.warns(UserWarning, match='no compiler') as record:
        for _ in range(3): assert q(x).equal(y)
    assert len(record) == 1


@needs_compiler
def test_paths_agree():
    "Values, codes and gradient of x bit for bit; the step's gradient to float32 rounding"
    cases = [(None, (4, 8, 14, 14), torch.float32), (None, (3, 5, 7), torch.float32),
             (8, (8, 6, 3, 3), torch.float32), (None, (4, 300), torch.bfloat16),
             (None, (4, 300), torch.float64)]
    for channels, shape, dtype in cases:
        for bits, signed in ((2, True), (4, False), (8, True)):
            x = torch.randn(shape)
            x = (x if signed else x.relu()).to(dtype).requires_grad_()
            q, g, found = LSQ(bits, signed, channels, grad_scale=False), torch.randn(shape).to(dtype), []
            q(x.detach())
            # ties
            with torch.no_grad():
                x.view(-1)[:9] = ((torch.arange(9) - 3)/2*q.step.detach().view(-1)[0]).to(dtype)
            for path in ('simple', 'fused', 'compiled'):
                with use_path(path):
                    y = q(x)
                    found.append((y.detach(), *torch.autograd.grad(y, (x, q.step), g)))
            y, dx, ds = found[0]
            for y2, dx2, ds2 in found[1:]:
                assert y.equal(y2) and dx.equal(dx2)
                # its usual size, for independent gradients
                assert_same(ds2, ds, 1e-4, scale=math.sqrt(x.numel()))
    assert not FORMULAS.failed


@needs_compiler
def test_compiles_once_for_all_shapes_and_ranges():
    def graphs(): return torch._dynamo.utils.counters['stats']['unique_graphs']
    with use_path('compiled'):
        for i, (bits, signed, symmetric) in enumerate(RANGES):
            q = LSQ(bits, signed, None, symmetric)
            q.set_step(.1, signed)
            for shape in ((7, 11), (40 + i,), (2, 3, 4, 5 + i)):
                q(torch.rand(shape, requires_grad=True)).sum().backward()
            if i == 0: count = graphs() # forward and backward, unless an earlier test had them
        q(nn.Parameter(torch.rand(4, 6))), q(torch.rand(4, 6)[:, :3])
        with torch.no_grad(): q(torch.rand(7, 13))
    assert graphs() == count and not FORMULAS.failed


@needs_compiler
def test_compiled_then_forked():
    q, x = LSQ(4), torch.randn(64)
    with use_path('compiled'): y = q(x).detach()
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    def child():
        with use_path('compiled'): queue.put(q(x).tolist())
    p = context.Process(target=child)
    p.start()
    assert queue.get(timeout=60) == y.tolist()
    p.join()


def naive_lsq(x, s, qmin, qmax):
    v = (x/s).clamp(qmin, qmax)
    return ((v.round() - v).detach() + v)*s


@pytest.mark.slow('CPU times also move with what else the machine does')
@needs_compiler
def test_speed():
    "CPU time of forward and backward, in turns. Bounds against regressions; `repq bench quantizer` measures"
    x, g = torch.randn(16, 64, 56, 56, requires_grad=True), torch.randn(16, 64, 56, 56)
    q = LSQ(4)
    q(x)
    def run(quantize, path):
        with use_path(path): torch.autograd.grad(quantize(x), (x, q.step), g)
    paths = dict(naive=lambda: run(lambda x: naive_lsq(x, q.step, -8, 7), 'simple'),
                 eager=lambda: run(q, 'fused'), compiled=lambda: run(q, 'compiled'))
    times = {name: [] for name in paths}
    for i in range(14):
        for name, f in paths.items():
            start = time.process_time()
            f()
            if i > 2: times[name].append(time.process_time() - start)
    median = {name: statistics.median(t) for name, t in times.items()}
    shown = {name: f'{1e3*m:.1f} (min {1e3*min(times[name]):.1f}) ms' for name, m in median.items()}
    assert median['naive'] >= 2*median['eager'], shown
    assert median['naive'] >= 4*median['compiled'], shown
