"Random expressions: branches and merged kernel are one map, in output, gradients and running statistics"
import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from conftest import PROVEN
from repq import Conv, Fixed, Identity, Norm, RepConv2d, Scale, Seq, Sum, WeightNorm
from repq.algebra.kernel import Kernel, average_kernel, frequency_prior, laplacian, sobel_x
from repq.algebra.branch import Merged
from repq.tools.testing import assert_modes_agree, randomize_bn

CHANNELS, ODD = (1, 2, 4, 6, 12), (1, 3, (1, 3), (3, 1))
FIXED = dict(average=average_kernel, sobel=sobel_x, laplacian=laplacian, prior=frequency_prior)


def divisors(*channels): return [g for g in range(1, 13) if all(c % g == 0 for c in channels)]


@st.composite
def leaf(draw, i, o):
    name = draw(st.sampled_from(list(FIXED)))
    size, groups = draw(st.sampled_from(ODD)), draw(st.sampled_from(divisors(i, o)))
    def fixed(): return Fixed(FIXED[name](i), name)
    leaves = [lambda: Conv(i, o, size, groups), lambda: Conv(i, o, size, groups, bias=True),
              lambda: WeightNorm(Conv(i, o, size, groups))]
    if i == o: leaves += [lambda: Identity(i), fixed, fixed]
    return draw(st.sampled_from(leaves))()


@st.composite
def odd_branch(draw, i, o, depth):
    "An expression with odd sizes, nested up to `depth`"
    if depth == 0: return draw(leaf(i, o))
    kind = draw(st.sampled_from(['leaf', 'norm', 'scale', 'sum', 'seq']))
    if kind == 'leaf': return draw(leaf(i, o))
    if kind == 'norm': return Norm(draw(odd_branch(i, o, depth - 1)))
    if kind == 'scale': return Scale(draw(odd_branch(i, o, depth - 1)), bias=draw(st.booleans()))
    if kind == 'sum':
        return fitting(Sum, [draw(odd_branch(i, o, depth - 1)) for _ in range(draw(st.integers(1, 3)))])
    middle = [draw(st.sampled_from(CHANNELS)) for _ in range(draw(st.integers(1, 2)))]
    return fitting(Seq, [draw(odd_branch(a, b, depth - 1)) for a, b in zip([i, *middle], [*middle, o])])


def fitting(kind, parts):
    "Sum or Seq; parts whose groups do not fit together get a dense neighbour, which makes them fit"
    try: return kind(*parts)
    except ValueError as e:
        assert 'do not fit together' in str(e)
        first, *others = parts
        dense = Conv(first.in_channels, first.out_channels, 1)
        return Sum(*parts, dense) if kind is Sum else Seq(Sum(first, dense), *others)


@st.composite
def layer(draw):
    "A layer around a random expression, everything in it random; sometimes its kernel is even"
    i, o = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(CHANNELS))
    branch = draw(odd_branch(i, o, 3))
    even = draw(st.sampled_from([None, None, (2, 2), (4, 1)]))
    if even: branch = Sum(Seq(Norm(branch), Conv(o, o, even)), Conv(i, o, even))
    stride, padding = draw(st.sampled_from([1, 2, (1, 2)])), draw(st.integers(0, 2))
    try: made = RepConv2d(branch, stride, padding, after=draw(st.sampled_from([None, True])))
    except ValueError as e:
        assert 'an identity cannot have stride' in str(e)
        made = RepConv2d(branch, 1, padding)
    made = randomize_bn(made.double())
    for name, p in made.named_parameters():
        if name.endswith(('scale', 'bias')) or not p.any(): nn.init.normal_(p, 0.5)
    return made


@st.composite
def case(draw):
    torch.manual_seed(draw(st.integers(0, 10**6)))
    made = draw(layer())
    sides = [max(k - 2*p, 1) + draw(st.integers(3, 6)) for k, p in zip(made.kernel_size, made.padding)]
    return made, torch.randn(3, made.in_channels, *sides).double()


def prove(made, x):
    "Training first, then evaluation with the statistics that training left"
    for training in (True, False): assert_modes_agree(made.train(training), x)


def test_random_expressions(request):
    slow = request.config.getoption('--slow')
    examples = 10_000 if slow else 200
    norms, kinds = [], set()

    @settings(max_examples=examples, derandomize=not slow, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(case())
    def run(made_x):
        prove(*made_x)
        modules = list(made_x[0].modules())
        norms.append(sum(isinstance(m, Norm) for m in modules))
        kinds.update(getattr(m, 'name', type(m).__name__) for m in modules)
    run()
    PROVEN['random expressions proven'] = f'{len(norms)}, with {sum(norms)} batch norms inside'
    assert len(norms) >= examples and sum(n > 1 for n in norms) > len(norms)//10
    assert kinds >= {'identity', 'Conv', 'Scale', 'Norm', 'Seq', 'Sum', 'WeightNorm'}, kinds
    # what hypothesis draws depends on what else is imported: one may be missed in 200
    assert len(set(FIXED) - kinds) <= (0 if slow else 1), kinds


def test_the_proof_can_fail():
    "A merge rule with a mistake is caught: here the scale forgets the bias"
    class Forgetful(Scale):
        def merge(self, signal=None, reuse=None):
            k, used = super().merge(signal, reuse)
            return Merged(Kernel(k.weight, k.bias - self.bias, k.groups), used)
    wrong = Forgetful(Conv(2, 2, 3), bias=True)
    nn.init.normal_(wrong.bias)
    with pytest.raises(AssertionError, match='relative error'):
        prove(RepConv2d(wrong).double(), torch.randn(2, 2, 5, 5).double())
