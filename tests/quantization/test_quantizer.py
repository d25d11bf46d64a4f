"Quantizers: published formulas number by number, bad input, state, processes"
import copy, math, multiprocessing, shutil, warnings
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from safetensors.torch import load_file, save_file
from repq.tools.registry import use_path
from repq.quantization.lsq import LSQ, Quantizer, families, make_quantizer
from repq.quantization.lsq import int_range, min_error_step, squared_error
from repq.tools.testing import assert_same

needs_compiler = pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')),
                                    reason='no C++ compiler for torch.compile')
RANGES = [(bits, signed, symmetric) for bits in range(2, 9)
          for signed, symmetric in ((False, False), (True, False), (True, True))]


@pytest.fixture(autouse=True)
def one_thread():
    "On one thread"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def scalar_lsq(x, s, g, qmin, qmax):
    "Esser et al. 2020 for one number: value, gradient of x, gradient of s"
    v = x/s
    if v < qmin: return qmin*s, 0., qmin*g
    if v > qmax: return qmax*s, 0., qmax*g
    return round(v)*s, g, (round(v) - v)*g


@pytest.mark.parametrize('channels', [None, 3])
@pytest.mark.parametrize('bits,signed,symmetric', RANGES)
def test_lsq_is_the_published_formula(bits, signed, symmetric, channels):
    "Ties, bounds, their neighbours and numbers far outside, in float64"
    q = LSQ(bits, signed, channels, symmetric).double()
    steps = torch.tensor([.25, .37, 3.], dtype=torch.float64)[:channels or 1]
    q.set_step(steps if channels else steps[0], signed)
    v = torch.cat([torch.arange(q.qmin - 1, q.qmax + 1.5, .5, dtype=torch.float64),
                   torch.tensor([-1e3, 1e3, .3, -.7])])
    v = torch.cat([v, torch.nextafter(v, v + 1), torch.nextafter(v, v - 1)])
    x = (steps.view(-1, 1)*v).view(channels or 1, -1, 1, 1).requires_grad_()
    g = torch.randn_like(x)
    y = q(x)
    dx, ds = torch.autograd.grad(y, (x, q.step), g)
    n = len(v)
    factor = 1/math.sqrt(n*q.qmax)
    for i, s in enumerate(steps.tolist()):
        value, by_x, by_step = zip(*[scalar_lsq(a, s, b, q.qmin, q.qmax)
                                     for a, b in zip(x[i].flatten().tolist(), g[i].flatten().tolist())])
        assert y[i].flatten().tolist() == list(value) and dx[i].flatten().tolist() == list(by_x)
        assert math.isclose(ds.view(-1)[i].item(), sum(by_step)*factor, rel_tol=1e-12,
                            abs_tol=1e-12*sum(map(abs, by_step))*factor)


def test_gradient_scale():
    x, w = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3)
    for data, channels, n in ((x, None, 96), (w, 5, 27)):
        grads = []
        for scale in (True, False, .5):
            q = LSQ(4, True, channels, grad_scale=scale)
            q(data).sum().backward()
            grads.append(q.step.grad)
        assert_same(grads[0], grads[1]/math.sqrt(n*7), 1e-6)
        assert_same(grads[2], grads[1]/2, 1e-6)


@pytest.mark.parametrize('family', families)
def test_same_grid_in_codes_and_evaluation(family):
    w = torch.randn(6, 3, 3, 3)
    q = make_quantizer(family, bits=4, channels=6)
    q(w)
    q.eval()
    assert q.dequantize(q.codes(w)).equal(q(w)) and q.codes(w).dtype == torch.int32
    assert q.codes(w).min() >= q.qmin and q.codes(w).max() <= q.qmax and len(q(w)[0].unique()) <= 16


def test_only_the_input_and_the_step_are_saved():
    saved = []
    x, q = torch.randn(8, 4, 6, 6, requires_grad=True), LSQ(4)
    q(x.detach())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t): q(x)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), q.step.data_ptr()}


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    x, q = torch.randn(2, 3, 8, 8).to(dtype).requires_grad_(), LSQ(4)
    y = q(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype and q.step.grad.dtype == torch.float32
    wide = torch.float64 if dtype == torch.float64 else torch.float32 # what it is computed in
    step = q.step.to(wide)
    assert y.equal((torch.round((x.to(wide)/step).clamp(-8, 7))*step).to(dtype))


def test_memory_formats():
    q, g = LSQ(4), torch.randn(2, 3, 8, 8)
    x = torch.randn(2, 3, 8, 8)
    expected = q(x)
    for like in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3),
                 torch.cat([x, x], 1)[:, :3]):
        like = like.detach().requires_grad_()
        y = q(like)
        assert y.equal(expected)
        assert torch.autograd.grad(y, like, g)[0].equal(g*(y.detach() - x).abs().le(q.step/2 + 1e-6))
    assert q(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('signed,source',
                         [(True, 'normal'), (False, 'relu'), (True, 'heavy'), (False, 'discrete')])
@pytest.mark.parametrize('bits', [2, 4, 8])
def test_min_error_is_near_the_optimum(bits, signed, source):
    x = torch.randn(8192)
    x = dict(normal=x, relu=x.relu(), heavy=x.pow(3), discrete=(x.abs()*20).round()/20)[source][None]
    qrange = int_range(bits, signed)
    top = x.abs().max().item()/qrange[1]
    best = min(squared_error(x, torch.tensor(top*r), *qrange).item()
               for r in torch.linspace(2, .005, 1000).tolist())
    ours = squared_error(x, min_error_step(x, *qrange).float().view(1, 1), *qrange).item()
    # numbers on a grid of their own have an error of 0 at a single step
    assert ours <= 1.03*best + 1e-6*x.square().mean().item()


def test_step_stays_positive():
    x, q = torch.randn(4096).relu(), LSQ(4, signed=False, grad_scale=False)
    q(x)
    best = squared_error(x[None], q.step.detach(), 0, 15).item()
    with torch.no_grad(): q.step.fill_(-5.)
    assert q(x).abs().max() > 0 and q.step.item() == q.floor.item() > 0
    opt = torch.optim.SGD(q.parameters(), .2)
    for _ in range(300):
        opt.zero_grad()
        (q(x) - x).square().mean().backward()
        opt.step()
    assert squared_error(x[None], q.scale().detach(), 0, 15).item() < 1.1*best


class TestBadInput:
    x = torch.tensor([[1., -2.], [.5, 3.]])

    @pytest.mark.parametrize('bits', [0, 1, 9, 2.5, None])
    def test_bits(self, bits):
        with pytest.raises(ValueError, match=f'bits must be 2..8, got {bits}'): LSQ(bits)

    @pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
    def test_not_finite(self, bad):
        with pytest.raises(ValueError, match='NaN or infinity'): LSQ(4)(torch.tensor([1., bad]))

    def test_zeros_wait(self):
        q, zeros = LSQ(4), torch.zeros(2, 2)
        with pytest.warns(UserWarning, match='zeros'): assert q(zeros) is zeros
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert q(zeros) is zeros and not q.ready and q.signed is None
            q(self.x)
        assert q.ready and q.signed

    def test_a_channel_of_zeros(self):
        q, w = LSQ(4, channels=3), torch.randn(3, 8)
        w[1] = 0
        assert q(w)[1].abs().max() == 0
        assert_same(q.step[1], q.step[[0, 2]].median(), 1e-6)

    def test_negative_numbers_into_unsigned(self):
        q = LSQ(4, signed=False)
        with pytest.raises(ValueError, match='signed=True'): q(self.x)
        q(self.x.abs())
        assert q(-self.x.abs()).abs().max() == 0

    def test_shapes_and_types(self):
        with pytest.raises(ValueError, match='3 channels.*shape .2, 2.'): LSQ(4, channels=3)(self.x)
        with pytest.raises(TypeError, match='int64'): LSQ(4)(torch.arange(3))
        with pytest.raises(RuntimeError, match='no step yet'): LSQ(4).codes(self.x)
        with pytest.raises(RuntimeError, match='not decided'): LSQ(4).qmin
        q = LSQ(4)
        q(self.x)
        assert q(self.x[:0]).shape == (0, 2)

    def test_family(self):
        class Mine(Quantizer):
            def quantize(self, x, step): return torch.round((x/step).clamp(self.qmin, self.qmax))*step
        assert make_quantizer(Mine, bits=3)(self.x).equal(LSQ(3)(self.x))
        for bad in ('lsqq', None, nn.Linear, 4):
            with pytest.raises(ValueError, match="'lsq', 'noise' or a subclass"): make_quantizer(bad, bits=3)
        with pytest.raises(ValueError, match="'auto', got 'yes'"), use_path('yes'): pass


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)

@settings(max_examples=150, deadline=None)
@given(first=st.lists(numbers, min_size=1, max_size=12), then=st.lists(numbers, min_size=1, max_size=12),
       bits=st.integers(2, 8), family=st.sampled_from(sorted(families)), per_channel=st.booleans())
def test_finite_in_finite_out(first, then, bits, family, per_channel):
    q = make_quantizer(family, bits=bits, channels=1 if per_channel else None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for values in (first, then):
            x = torch.tensor([values], requires_grad=True)
            y = q(x)
            y.backward(torch.ones_like(y)) if y is not x else None
            grads = [g for g in (x.grad, q.step.grad) if g is not None]
            assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_state_dict(tmp_path):
    w = torch.randn(3, 2, 3, 3)
    for family in families:
        q = make_quantizer(family, bits=4, channels=3)
        q.initialize(w)
        y = q.eval()(w)
        save_file(q.state_dict(), tmp_path/'q.safetensors')
        fresh = make_quantizer(family, bits=4, channels=3).eval()
        fresh.load_state_dict(load_file(tmp_path/'q.safetensors'))
        assert fresh.ready and fresh.signed is True and fresh(w).equal(y) and fresh.floor.equal(q.floor)
        fresh(100*w)
        assert fresh.step.equal(q.step), 'a loaded quantizer initialised again'
        fresh.load_state_dict(make_quantizer(family, bits=4, channels=3).state_dict())
        assert not fresh.ready and fresh.signed is None
    other = LSQ(8, channels=3)
    other.load_state_dict(q.state_dict())
    assert other.bits == 4 and other.ready and torch.equal(other.step, q.step)
    meta = LSQ(4, channels=3).to('meta')
    meta.load_state_dict(q.state_dict(), assign=True)
    assert meta.ready and meta(w).equal(LSQ.quantize(q, w, q.scale()))


def test_copies_are_independent():
    w, q = torch.randn(3, 8), LSQ(4, channels=3)
    y = q(w)
    twin = copy.deepcopy(q)
    twin.set_step(2*q.step.detach(), True)
    assert q(w).equal(y) and not twin(w).equal(y)


def test_off_and_twice():
    x, q = torch.randn(10, requires_grad=True), LSQ(4)
    q.enabled = False
    assert q(x) is x and not q.ready
    q.enabled = True
    (q(x) + q(2*x)).sum().backward() # two forwards, then backward
    assert x.grad is not None


@pytest.mark.parametrize('family', families)
@pytest.mark.parametrize('path', ['compiled', 'simple', 'auto'])
def test_nothing_stays_on_the_cpu(family, path):
    with FakeTensorMode(), use_path(path):
        for channels, shape in ((None, (2, 3, 8, 8)), (6, (6, 3, 3, 3))):
            with torch.device('cuda'): q = make_quantizer(family, bits=4, channels=channels)
            q.set_step(.1, True)
            x = torch.randn(shape, device='cuda')
            for out in (q(x), q.eval()(x), q.codes(x), q.dequantize(q.codes(x))):
                assert out.device.type == 'cuda' and out.shape == shape


def rank(i, port, queue):
    from torch import distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=i, world_size=2)
    torch.manual_seed(i)
    q, late = LSQ(4), LSQ(4)
    x = torch.randn(100)*(i + 1)
    q(x.abs() if i == 0 else x)               # only rank 1 has negative numbers
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        late(x*0 if i == 0 else x)            # rank 0 has zeros: both wait
    queue.put((i, q.step.item(), q.signed, late.ready))
    dist.barrier()
    dist.destroy_process_group()


def test_processes_share_the_step():
    import socket
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    processes = [context.Process(target=rank, args=(i, port, queue)) for i in range(2)]
    for p in processes: p.start()
    (_, a, signed, late), (_, b, signed2, late2) = (queue.get(timeout=60) for _ in processes)
    for p in processes: p.join(30)
    assert a == b and signed is signed2 is True and late is late2 is False


@needs_compiler
def test_inside_torch_compile():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), LSQ(4), nn.Linear(8, 2))
    x = torch.randn(5, 6)
    y = net(x).detach()
    fast = torch.compile(net, fullgraph=True, backend='aot_eager')
    assert_same(fast(x).detach(), y, 1e-6)
    fast(x).sum().backward()
    assert net[2].step.grad.isfinite()
    with torch.no_grad(): net[2].step.fill_(-1.)
    fast(x)
    assert net[2].step.item() == net[2].floor.item()


def test_replicas_of_data_parallel_are_refused():
    "What a replica learns of its first batch would be lost; initialised before, it is fine"
    q, x = LSQ(4), torch.randn(8)
    def replica():
        r = q._replicate_for_data_parallel()
        r.step = q.step   # as nn.parallel.replicate hands them over
        return r
    with pytest.raises(RuntimeError, match='DistributedDataParallel.*distrib_ctx'): replica()(x)
    assert not q.ready
    expected = q(x)
    assert torch.equal(replica()(x), expected)
