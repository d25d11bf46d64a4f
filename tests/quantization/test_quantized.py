"RepQ: the quantized layer and network, for every block and every statistics"
import copy, math, warnings
import pytest, torch
from torch import nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
import repq
from repq.blocks import BLOCKS, make_block
from repq.quantization.layer import QuantLinear, RepConv2d
from repq.algebra.statistics import STATISTICS
from repq.quantization.network import quantizable_layers, set_bits, set_statistics
from repq.tools.testing import assert_modes_agree, assert_same, randomize_bn


def quantizers(net):
    return [q for l in quantizable_layers(net).values() for q in (l.weight_quantizer, l.input_quantizer)]


def network(block):
    return nn.Sequential(make_block(block, 3, 8), nn.ReLU(), make_block(block, 8, 8), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize('block', BLOCKS)
def test_quantizers_off_is_the_branch_form(block):
    "RepQ-BN with quantizers switched off equals the branches in float64 to 1e-10, gradients included"
    layer = randomize_bn(make_block(block, 6, 6).double())
    for p in layer.parameters():
        if not p.any(): nn.init.normal_(p)
    x = torch.randn(3, 6, 9, 7).double()
    layer.quantize(4, 4)(x)
    for q in quantizers(layer):
        q.enabled = False
        q.requires_grad_(False)
    for training in (True, False):
        assert_modes_agree(layer.train(training), x, modes=('branches', 'quantized'))


@pytest.mark.parametrize('statistics', STATISTICS)
@pytest.mark.parametrize('block', BLOCKS)
def test_learns_and_deploys(block, statistics):
    "4-bit steps reduce the loss; evaluation equals the merged network, bit for bit where no norm follows"
    x, y = torch.randn(32, 3, 12, 12), torch.arange(32) % 4
    x += y.view(-1, 1, 1, 1)*torch.linspace(-1, 1, 3).view(3, 1, 1)     # a class is a tint
    net = repq.quantize(network(block), 4, 4, statistics=statistics, start='first')
    losses = []
    for step in range(25):
        loss = F.cross_entropy(net(x), y)
        if step == 0: opt = torch.optim.SGD([{'params': [p for n, p in net.named_parameters()
                                                         if not n.endswith('.step')], 'lr': .05},
                                             {'params': [q.step for q in quantizers(net)], 'lr': .001}],
                                             momentum=.9)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        assert all((q.scale() > 0).all() for q in quantizers(net))
    assert sum(losses[-3:]) < 0.8*sum(losses[:3])
    repq.recalibrate(net, [x])
    net.eval()
    merged = repq.merge(net)
    if net[2].after is None: assert torch.equal(merged(x), net(x))
    else: assert (merged(x).argmax(1) == net(x).argmax(1)).float().mean() > 0.9
    for layer in merged.modules():
        if hasattr(layer, 'codes'):
            assert torch.equal(layer.weight,
                               layer.codes.float()*layer.step.view(-1, *[1]*(layer.weight.ndim - 1)))


@pytest.mark.parametrize('statistics', STATISTICS)
@pytest.mark.parametrize('block', BLOCKS)
def test_forward_on_fake_cuda(block, statistics):
    "With initialised quantizers, no tensor is left on the CPU"
    with FakeTensorMode(allow_non_fake_inputs=False):
        with torch.device('cuda'): net = repq.quantize(network(block), 4, 4, start='first')
        for layer in (net[0], net[2]): layer.statistics = statistics
        for q in quantizers(net): q.set_step(torch.ones_like(q.step), signed=True)
        y = net(torch.randn(4, 3, 8, 8, device='cuda'))
    assert y.device.type == 'cuda' and y.shape == (4, 4)


def test_state_dict_round_trip():
    "A reloaded model does not initialise again, and answers the same"
    x = torch.randn(8, 3, 12, 12)
    net = repq.quantize(network('repvgg'), 4, 4, statistics='calibrated', start='first')
    for _ in range(5): net(x)
    fresh = repq.quantize(network('repvgg'), 4, 4, statistics='calibrated', start='first')
    fresh.load_state_dict(net.state_dict())
    steps = [q.step.clone() for q in quantizers(net)]
    for a, b in ((net, fresh), (net.eval(), fresh.eval())): assert torch.equal(a(x), b(x))
    for q, s in zip(quantizers(fresh), steps): assert torch.equal(q.step, s)


def test_memory_of_the_estimate():
    "AC-ResNet-18, 128×128, batch 16: a forward pass with `estimate` keeps no more memory than plain QAT"
    from torch.profiler import ProfilerActivity, profile
    x = torch.randn(16, 3, 128, 128)
    def kept(block, statistics):
        net = repq.quantize(repq.models.resnet18(10, block=block), 4, 4, statistics=statistics, start='first')
        net(x)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p: y = net(x)
        assert y.requires_grad
        return sum(e.self_cpu_memory_usage for e in p.events())
    plain, estimate = kept('plain', None), kept('acnet', 'estimate')
    assert 1e8 < estimate <= plain, (estimate, plain)


def test_paper_exceptions_and_exact_norms():
    net = repq.quantize(repq.models.resnet18(10, block='acnet', width=0.125), 4, 4, statistics='estimate',
                        start='first')
    layers = quantizable_layers(net)
    assert (layers['stem'].weight_quantizer.bits, layers['stem'].input_quantizer.bits) == (8, 8)
    assert {n for n, l in layers.items() if isinstance(l, RepConv2d)
            and l.statistics == 'batch'} == {'layer4.1.conv1', 'layer4.1.conv2'}
    assert layers['layer1.0.conv1'].weight_quantizer.bits == 4 and isinstance(layers['head'], QuantLinear)


def test_post_training_quantization_of_a_foreign_network():
    torchvision = pytest.importorskip('torchvision')
    net = torchvision.models.resnet18(num_classes=4).eval()
    x = torch.randn(4, 3, 64, 64)
    expected = net(x)
    quantized = repq.quantize(copy.deepcopy(net), 8, 8, start='first')
    assert isinstance(quantized.conv1.after, nn.BatchNorm2d)
    assert isinstance(quantized.layer1[0].bn2, nn.Identity)
    repq.recalibrate(quantized, [x], 'ranges')
    assert_same(quantized.eval()(x), expected, 0.1)
    # ties cascade through 18 layers of random weights
    assert_same(repq.merge(quantized)(x), quantized(x), 0.1)


BAD = {
    'one bit': (lambda: repq.quantize(network('plain'), 1, 4), 'bits must be 2..8, got 1'),
    'nine bits': (lambda: repq.quantize(network('plain'), 4, 9), 'bits must be 2..8, got 9'),
    'twice': (lambda: repq.quantize(repq.quantize(network('plain'))), 'quantized already'),
    'nothing to quantize': (lambda: repq.quantize(nn.Sequential(nn.ReLU())),
                            'no convolution or linear layer'),
    'merging a cold quantizer': (lambda: repq.merge(repq.quantize(network('plain'))), 'never initialised'),
    'unknown exception': (lambda: repq.quantize(network('plain'), exceptions={'stem': (8, 8)}),
                          "no layer is called 'stem'"),
    'unknown family': (lambda: repq.quantize(network('plain'), family='dorefa'), 'lsq'),
    'bits of an unquantized network': (lambda: set_bits(network('plain'), 4, 4), 'not quantized'),
    'ranges without quantizers': (lambda: repq.recalibrate(network('plain'), [torch.randn(2, 3, 8, 8)],
                                                           'ranges'), 'no quantizers'),
    'recalibrate without data': (lambda: repq.recalibrate(network('plain'), []), 'no batch'),
    'statistics': (lambda: repq.quantize(network('plain'), statistics='exact'), "'estimate'"),
    'NaN in the first batch': (lambda: repq.quantize(network('plain'))(torch.full((2, 3, 8, 8), math.nan)),
                               'NaN'),
}


@pytest.mark.parametrize('case', BAD)
def test_says_what_is_wrong(case):
    call, message = BAD[case]
    with pytest.raises(ValueError) as error: call()
    assert message in str(error.value)


def test_statistics_of_another_kind_warn():
    net = network('repvgg')
    net(torch.randn(4, 3, 8, 8))
    with pytest.warns(UserWarning, match='recalibrate'): set_statistics(net, 'estimate')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        set_statistics(net, 'estimate')


def test_batch_of_one():
    "One image is enough for exact statistics as long as a channel has more than one value"
    net = repq.quantize(network('repvgg'), 4, 4, statistics='batch', start='first')
    assert net(torch.randn(1, 3, 8, 8)).isfinite().all()
    with pytest.raises(ValueError, match='more than one value per channel'): net(torch.randn(1, 3, 1, 1))
    assert net.eval()(torch.randn(1, 3, 1, 1)).isfinite().all()


def test_constant_input_channel():
    "A channel that never changes has variance zero: finite everywhere, merged and estimated"
    x = torch.randn(8, 3, 8, 8)
    x[:, 1] = 0.5
    for statistics in STATISTICS:
        net = repq.quantize(network('repvgg'), 4, 4, statistics=statistics, start='first')
        y = net(x)
        y.square().sum().backward()
        assert y.isfinite().all() and all(p.grad.isfinite().all() for p in net.parameters())


class Overwrites(nn.Module):
    "Uses its layer's input again, in place"
    def __init__(self, conv):
        super().__init__()
        self.conv = conv
    def forward(self, x):
        x = x.clone()
        y = self.conv(x)
        x.mul_(100)
        return y


def test_ranges_from_a_copy():
    "What happens to a layer's input after the layer does not reach the ranges"
    x = torch.randn(4, 3, 8, 8)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    nets = [repq.quantize(net, 8, 8, start='first') for net in (copy.deepcopy(plain), Overwrites(plain[0]))]
    steps = [quantizers(repq.recalibrate(net, [x], 'ranges'))[1].step for net in nets]
    assert torch.equal(*steps)


class Heads(nn.Module):
    "One head and one convolution under several names"
    def __init__(self):
        super().__init__()
        self.conv, self.norm, head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.again, self.norm2, self.heads = self.conv, self.norm, nn.ModuleList([head]*3)
    def forward(self, x):
        features = self.norm2(self.again(x)).mean((2, 3))
        return torch.cat([h(features) for h in self.heads], 1)


def test_layers_under_several_names():
    "A shared layer is quantized and merged wherever it is"
    x, net = torch.randn(8, 3, 8, 8), repq.quantize(Heads(), 4, 4, start='first')
    assert net.again is net.conv and isinstance(net.conv.after, nn.BatchNorm2d)
    assert isinstance(net.norm, nn.Identity) and net.norm2 is net.norm
    assert len({*net.heads}) == 1 and isinstance(net.heads[2], QuantLinear)
    net(x)
    merged = repq.merge(net.eval())
    assert not quantizable_layers(merged) and len({*merged.heads}) == 1 and merged.again is merged.conv
    assert_same(merged(x), net(x), 1e-2)


class Untraceable(nn.Sequential):
    def forward(self, x): return super().forward(x) if x.sum() > 0 else super().forward(x)


def test_shared_modules_where_nothing_can_be_traced():
    "Neighbours are paired only if neither is used elsewhere"
    act, conv = nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
    net = Untraceable(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act, conv, nn.BatchNorm2d(4), act,
                                    conv, nn.BatchNorm2d(4), act))
    x = torch.randn(4, 3, 8, 8)
    expected = randomize_bn(net).eval()(x)
    with pytest.warns(UserWarning, match='cannot trace'): repq.quantize(net, 8, 8, start='first')
    assert isinstance(net[0][0].after, nn.BatchNorm2d) and net[0][3].after is None and net[0][6] is net[0][3]
    for layer in quantizable_layers(net).values(): layer.mode = 'merged'
    assert_same(net(x), expected, 1e-5)


def test_eight_bits_before_a_negative_gamma():
    "The code -128 would become 128: it is left out, and refused where it was asked for"
    x = torch.randn(4, 3, 8, 8)
    for kwargs in ({}, dict(symmetric=False)):
        layer = make_block('plain', 3, 4)
        with torch.no_grad():
            layer.branch.weight.copy_(layer.branch.weight.sign()*.5)
            layer.branch.weight[:, 0, 0, 0] = -.5
            layer.after.weight.fill_(-1)
        layer.quantize(8, 8, **kwargs)(x)
        with torch.no_grad(): layer.weight_quantizer.step.fill_(.5/128)
        if not kwargs: assert_same(repq.merge(layer.eval())(x), layer(x), 1e-5)
        else:
            with pytest.raises(ValueError, match='int8 does not have'): repq.merge(layer)


def test_refused_bits_leave_a_layer_untouched():
    layer = make_block('plain', 3, 4)
    with pytest.raises(ValueError, match='bits must be 2..8, got 32'): layer.quantize(8, 32)
    assert layer.weight_quantizer is None and layer.mode == 'branches'
    assert layer.quantize(8, 8).mode == 'quantized'


@pytest.mark.parametrize('bits, wrong',
                         [((8, 32), 'act_bits must be 2..8, got 32'),
                          ((32, 8), 'weight_bits must be 2..8, got 32'),
                          ((4, 9), 'act_bits must be 2..8, got 9')])
def test_refused_bits_leave_a_network_untouched(bits, wrong):
    "Also if it is not the first layer whose bits cannot be had"
    x = torch.randn(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match=f'0: {wrong}'): repq.quantize(net, *bits)
    with pytest.raises(ValueError, match=f'3: {wrong}'): repq.quantize(net, 8, 8, exceptions={'3': bits})
    assert type(net[0]) is nn.Conv2d and type(net[1]) is nn.BatchNorm2d
    repq.quantize(net, 8, 8, start='first')(x)
    with pytest.raises(ValueError, match=f'3: {wrong}'): set_bits(net, 4, 4, {'3': bits})
    assert all(q.bits == 8 and q.ready for q in quantizers(net)) and net[0].mode == net[3].mode == 'quantized'
    set_bits(net, 4, 4, {'3': None})
    assert net[0].weight_quantizer.bits == 4 and net[3].mode == 'merged'


def test_recalibrate_keeps_modes():
    "A layer that was set to full precision stays there"
    x, net = torch.randn(4, 3, 8, 8), repq.quantize(network('repvgg'), 8, 8, start='first')
    set_bits(net, 8, 8, {'2': None})
    repq.recalibrate(net, [x], 'ranges')
    assert [l.mode for l in quantizable_layers(net).values()] == ['quantized', 'merged', 'quantized']
    assert all(q.ready for q in quantizers(net))


@pytest.mark.parametrize('what', ['statistics', 'ranges'])
def test_recalibrate_without_data_changes_nothing(what):
    net = repq.quantize(network('repvgg'), 8, 8, start='first')
    net(torch.randn(4, 3, 8, 8))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match='no batch'): repq.recalibrate(net, [], what)
    for name, t in net.state_dict().items(): assert torch.equal(t, before[name]), name


@pytest.mark.parametrize('what', ['statistics', 'ranges'])
def test_recalibrate_of_a_network_that_fails(what):
    "Momenta, hooks, modes and training flags are put back"
    net = repq.quantize(network('repvgg'), 8, 8, start='first')
    set_bits(net, 8, 8, {'2': None})
    net[0].eval()
    flags, modes = [m.training for m in net.modules()], [l.mode for l in quantizable_layers(net).values()]
    with pytest.raises(ValueError, match='expected an input of shape'):
        repq.recalibrate(net, [torch.randn(4, 3, 8, 8), torch.randn(4, 2, 8, 8)], what)
    assert [m.training for m in net.modules()] == flags
    assert [l.mode for l in quantizable_layers(net).values()] == modes
    assert all(m.momentum == 0.1 for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_state_dict_of_a_merged_network():
    "It brings its ranges along, bits and sign; files from before ranges were saved load as well"
    x, nets = torch.randn(4, 3, 8, 8), []
    for bits, batch in ((4, x), (8, x.abs())):
        nets.append(repq.quantize(network('repvgg'), bits, bits, start='first'))
        nets[-1](batch)
        nets[-1].eval()
    (four, eight), saved = map(repq.merge, nets), repq.merge(nets[0]).state_dict()
    eight.load_state_dict(saved)
    assert torch.equal(eight(x), four(x)) and eight[0].quantize.qmin == -8
    old = {n: t for n, t in saved.items() if not n.endswith('.limits')}
    for bits in (4, 8):
        net = repq.quantize(network('repvgg'), bits, bits, start='first')
        net(x)
        net = repq.merge(net)
        net.load_state_dict(old)
        assert torch.equal(net(x), four(x))
    assert 'limits' not in ' '.join(old)


def test_frozen_norms_stay_frozen():
    "Wrapping and merging keep the training flag of each norm"
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3),
                        nn.BatchNorm2d(4))
    net[1].eval()
    repq.quantize(net, 4, 4, start='first')
    assert not net[0].after.training and net[0].training and net[0].branch.training and net[3].after.training
    net = network('orepa')
    net[0].after.eval()
    single = repq.quantization.network.merge_for_training(net)
    assert not single[0].after.training and single[0].training and single[0].branch.training
    assert single[2].after.training and net[2].branch.training


@pytest.mark.parametrize('kind', ['affine', 'track_running_stats'])
def test_norms_that_cannot_be_folded(kind):
    "They stay modules of their own, and the network can be merged"
    x, norm = torch.randn(4, 3, 8, 8), nn.BatchNorm2d(4, **{kind: False})
    net = repq.quantize(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()), 8, 8, start='first')
    net(x)
    assert net[0].after is None and net[1] is norm
    assert torch.equal(repq.merge(net.eval())(x), net(x))
    with pytest.raises(ValueError, match='cannot be folded'):
        RepConv2d(repq.algebra.branch.Conv(3, 4, 3), after=norm)
