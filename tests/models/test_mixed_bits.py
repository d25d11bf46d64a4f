"Sensitivities and the bits that follow from them"
from itertools import product
import math, time
import pytest
import torch
from torch import nn
import torch.nn.functional as F
import repq
from repq.models.costs import cost
from repq.quantization.bits import layers_of
from repq.models.mixed_bits import Bits, LayerSensitivity, Sensitivity, best_choices, mean_loss


def measured_of(losses, macs, weights=None, choices=(8, 4, 2)):
    "A measurement with given numbers"
    choices = tuple(Bits(b, b) for b in choices)
    rows = [LayerSensitivity(f'layer{i}', '3×3', m, w, dict(zip(choices, l)))
            for i, (l, m, w) in enumerate(zip(losses, macs, weights or macs))]
    return Sensitivity(tuple(rows), 1., choices, (3, 8, 8))


def brute_force(losses, costs, budget):
    picks = torch.tensor(list(product(range(losses.shape[1]), repeat=len(losses))))
    rows = torch.arange(len(losses))
    within = costs[rows, picks].sum(1) <= budget
    return losses[rows, picks].sum(1)[within].min().item()


@pytest.mark.parametrize('seed', range(60))
def test_allocation_is_optimal(seed):
    "Against all combinations: random, with ties, with losses that do not fall with cost, with tight budgets"
    g = torch.Generator().manual_seed(seed)
    n, k = 2 + seed % 7, 2 + seed % 3
    losses = torch.rand(n, k, generator=g, dtype=torch.float64)
    costs = torch.randint(0, 25, (n, k), generator=g).double()
    if seed % 4 == 1: losses = losses.round(decimals=1)
    if seed % 4 == 2: losses[:, -1] = 0
    least = costs.min(1).values.sum()
    budget = least + (0 if seed % 5 == 0 else torch.rand((), generator=g)*(costs.max(1).values.sum() - least))
    picked, rows = best_choices(losses, costs, budget), torch.arange(n)
    assert costs[rows, picked].sum() <= budget
    assert losses[rows, picked].sum().item() == pytest.approx(brute_force(losses, costs, budget), abs=1e-12)


def test_a_budget_is_met_and_spent_where_it_helps():
    m = measured_of([[0, .1, 9], [0, .1, .1], [0, .001, .002]], [100, 100, 100])
    uniform = 3*100*16
    found = repq.allocate(m, bit_ops=uniform)
    assert sum(100*w*a for w, a in found.values()) <= uniform and found['layer0'] != (2, 2)
    assert repq.allocate(m, bit_ops=3*100*64) == dict.fromkeys(found, (8, 8))
    assert repq.allocate(m, bit_ops=3*100*4) == dict.fromkeys(found, (2, 2))
    assert repq.allocate(m, size=300*4/8)['layer0'] == (8, 8)


def test_noise_earns_nothing():
    "A layer that seems to gain from few bits counts as one that loses nothing"
    m = measured_of([[0, -5., -9.], [0, .5, 1.]], [10, 10])
    assert repq.allocate(m, bit_ops=10*4 + 10*64) == {'layer0': (2, 2), 'layer1': (8, 8)}


def test_layers_with_given_bits_count_in_the_budget():
    m = measured_of([[0, .1, 1.]]*3, [100]*3)
    found = repq.allocate(m, bit_ops=100*64 + 2*100*16, exceptions={'layer0': (8, 8)})
    assert found == {'layer0': (8, 8), 'layer1': (4, 4), 'layer2': (4, 4)}
    with pytest.raises(ValueError, match='cannot be met'):
        repq.allocate(m, bit_ops=100*64, exceptions={'layer0': (8, 8)})
    assert repq.allocate(m, bit_ops=300*64, exceptions={'*': (4, 8)}) == dict.fromkeys(found, (4, 8))


@pytest.mark.parametrize('layers', [54, 160])
def test_large_networks_take_seconds(layers):
    g = torch.Generator().manual_seed(layers)
    macs = (torch.rand(layers, generator=g)*1e8).long().tolist()
    losses = torch.rand(layers, 3, generator=g).sort(1).values.mul(torch.tensor([1e-4, 1e-2, 1.])).tolist()
    begin = time.process_time()
    found = repq.allocate(measured_of(losses, macs), bit_ops=16*sum(macs))
    assert time.process_time() - begin < 20
    assert sum(m*w*a for m, (w, a) in zip(macs, found.values())) <= 16*sum(macs)


@pytest.fixture(scope='module')
def net():
    torch.manual_seed(0)
    net = repq.models.repvgg_a0(n_classes=4, width=.125, depth=.1, small_input=True)
    for _ in range(3): net(torch.randn(8, 3, 16, 16))
    return net.eval()


@pytest.fixture(scope='module')
def batches():
    g = torch.Generator().manual_seed(1)
    def batch(): return torch.randn(8, 3, 16, 16, generator=g), torch.randint(0, 4, (8,), generator=g)
    return [batch(), batch()]


def test_sensitivity_is_its_definition(net, batches):
    before = {n: t.clone() for n, t in net.state_dict().items()}
    m = repq.sensitivity(net, batches, F.cross_entropy, bits=(4, (2, 8)))
    assert [r.name for r in m.rows] == list(layers_of(net))
    assert m.loss == pytest.approx(mean_loss(net, batches, F.cross_entropy), rel=1e-4)
    for row in (m.rows[0], m.rows[-1]):
        others = {r.name: None for r in m.rows if r.name != row.name}
        alone = repq.ptq(net, [x for x, _ in batches], 2, 8, exceptions=others)
        increase = mean_loss(alone, batches, F.cross_entropy) - m.loss
        assert row.increase[2, 8] == pytest.approx(increase, abs=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items()) and not net.training
    assert 'stem' in repr(m) and '+loss at 2×8' in m._repr_html_()


def test_the_result_is_what_quantize_takes(net, batches):
    m = repq.sensitivity(net, batches, F.cross_entropy)
    uniform = cost(net, m.input_size, 4, 4, exceptions=None).bit_ops
    exceptions = repq.allocate(m, bit_ops=uniform)
    assert cost(net, m.input_size, 4, 4, exceptions=exceptions).bit_ops <= uniform
    small = repq.ptq(net, [x for x, _ in batches], 4, 4, exceptions=exceptions)
    for name, layer in layers_of(small).items():
        assert (layer.weight_quantizer.bits, layer.input_quantizer.bits) == exceptions[name]


def test_layers_that_stay_in_float_have_no_row(batches):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2), nn.ReLU(), nn.Conv2d(4, 4, 3),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.warns(UserWarning, match='dilation'): m = repq.sensitivity(net, batches, F.cross_entropy)
    assert [r.name for r in m.rows] == ['2']


@pytest.mark.parametrize('arguments, message', [
    (dict(batches=[]), 'got no batch'),
    (dict(batches=[torch.zeros(2, 3, 16, 16)]), 'batches of \\(input, target\\)'),
    (dict(bits=()), 'bits is empty'),
    (dict(bits=(16,)), 'bits must be 2 to 8'),
    (dict(bits=(True,)), 'must be a whole number'),
    (dict(loss=lambda p, y: p.sum()*math.inf), 'the loss is .* in full precision'),
    (dict(n=0), 'n must be a whole number')])
def test_bad_input(net, batches, arguments, message):
    arguments = dict(batches=batches, loss=F.cross_entropy) | arguments
    with pytest.raises(ValueError, match=message): repq.sensitivity(net, **arguments)


@pytest.mark.parametrize('budget', [
    dict(), dict(bit_ops=1e9, size=1e9), dict(bit_ops=math.nan), dict(size='1 MB'), dict(size=1)])
def test_bad_budgets(budget):
    with pytest.raises(ValueError, match='budget'): repq.allocate(measured_of([[0, 1, 2]], [100]), **budget)
