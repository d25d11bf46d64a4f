"One look at all layers of a quantized network"
import math
import pytest
import torch
from torch import nn
import torch.nn.functional as F
import repq
from repq.quantization.bits import layers_of
from repq.models.inspection import sqnr

BATCHES = [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.fixture(scope='module')
def net():
    torch.manual_seed(0)
    net = repq.models.repvgg_a0(n_classes=4, width=.125, depth=.2, small_input=True)
    for x in BATCHES: net(x)
    return net.eval()


@pytest.mark.parametrize('block', ['repvgg', 'qarepvgg', 'plain'])
def test_every_layer_has_its_row(block):
    torch.manual_seed(0)
    net = repq.models.repvgg_a0(n_classes=4, width=.125, depth=.1, small_input=True, block=block)
    for x in BATCHES: net(x)
    small = repq.ptq(net.eval(), BATCHES, 4, 4)
    before = {n: t.clone() for n, t in small.state_dict().items()}
    small.train()
    rows = repq.inspect(small, BATCHES).rows
    assert [r.name for r in rows] == list(layers_of(net))
    for r in rows:
        layer = small.get_submodule(r.name)
        assert (r.weight_bits, r.act_bits) == (layer.weight_quantizer.bits, layer.input_quantizer.bits)
        assert not r.why and 0 <= r.clipped < .2 and 5 < r.input_sqnr < 60 and 3 < r.weight_sqnr < 60
        q = layer.input_quantizer
        assert r.high == pytest.approx(q.qmax*q.scale().item())
    assert small.training and all(torch.equal(t, before[n]) for n, t in small.state_dict().items())


def test_more_bits_have_a_smaller_error(net):
    few, many = (repq.inspect(repq.ptq(net, BATCHES, b, b, exceptions=None), BATCHES).rows for b in (4, 8))
    for a, b in zip(few, many):
        assert b.input_sqnr > a.input_sqnr + 10 and b.weight_sqnr > a.weight_sqnr + 15
        assert b.bit_ops == 4*a.bit_ops


def test_a_step_that_is_too_small_clips(net):
    small = repq.ptq(net, BATCHES, 8, 8)
    layer = small.get_submodule('stage3.0')
    before = next(r for r in repq.inspect(small, BATCHES).rows if r.name == 'stage3.0')
    with torch.no_grad(): layer.input_quantizer.step /= 20
    after = next(r for r in repq.inspect(small, BATCHES).rows if r.name == 'stage3.0')
    assert after.clipped > .3 > .05 > before.clipped and after.input_sqnr < before.input_sqnr - 15


def test_sensitivities_are_shown_at_the_bits_of_the_layer(net):
    pairs = [(x, torch.zeros(len(x), dtype=torch.long)) for x in BATCHES]
    measured = repq.sensitivity(net, pairs, F.cross_entropy, bits=(8, 4))
    seen = repq.inspect(repq.ptq(net, BATCHES, 4, 4, exceptions={'stem': (8, 8)}), BATCHES, measured)
    for r, m in zip(seen.rows, measured.rows): assert r.increase == m.increase[r.weight_bits, r.act_bits]
    assert '+loss' in repr(seen) and '+loss' not in repr(repq.inspect(repq.ptq(net, BATCHES, 4, 4), BATCHES))


def test_what_stays_in_full_precision_is_explained(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),
                        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 4, 1))
    with pytest.warns(UserWarning, match='full precision'):
        small = repq.ptq(net, BATCHES, 8, 8, exceptions={'5': None})
    seen = repq.inspect(small, BATCHES)
    why = {r.name: r.why for r in seen.rows}
    assert 'dilation' in why['0'] and not why['2'] and 'parametrized' in why['4'] and 'no bits' in why['5']
    text = seen.save(tmp_path/'layers.html', title='<a & b>').read_text()
    assert '<h1>&lt;a &amp; b&gt;</h1>' in text and 'dilation=(2, 2)' in text and 'http' not in text


def test_bad_input(net):
    small = repq.ptq(net, BATCHES, 8, 8)
    with pytest.raises(ValueError, match='merged already'): repq.inspect(repq.merge(small), BATCHES)
    with pytest.raises(ValueError, match='no batch'): repq.inspect(small, [])
    with pytest.raises(ValueError, match='put it into a list'): repq.inspect(small, BATCHES[0])
    with pytest.raises(TypeError, match='takes a network'): repq.inspect(small.state_dict(), BATCHES)


def test_sqnr():
    x = torch.tensor([3., 4.])
    assert sqnr(x, x + torch.tensor([.3, .4])) == pytest.approx(20, abs=1e-5)
    assert sqnr(x, x) == math.inf and math.isnan(sqnr(x*0, x))
