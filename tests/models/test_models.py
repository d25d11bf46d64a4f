"The networks: parameter counts, every block in every network, what they know about themselves, cost"
import copy, json
import pytest, torch, torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
import torch.nn.functional as F
from repq.blocks import BLOCKS
from repq.quantization.layer import RepConv2d
from repq.models import (MODELS, RepVGG, build_model, cost, draw_net, ecbsr, output_shapes, repvgg_a0,
                         repvgg_b0, resnet18)
from repq.models.networks import scaled
from repq.quantization import layer_bits, layers_of, set_mode
from repq.quantization.network import merge
from repq.tools.testing import assert_modes_agree, assert_same, randomize_bn

NARROW = dict(     # name -> arguments of a narrow network, shape of its input, shape of its output
    repvgg_a0=(dict(n_classes=4, width=1/16, small_input=True), (3, 3, 12, 9), (3, 4)),
    repvgg_b0=(dict(n_classes=4, width=1/16), (3, 3, 33, 40), (3, 4)),
    resnet18=(dict(n_classes=4, width=1/16), (3, 3, 33, 40), (3, 4)),
    ecbsr=(dict(blocks=2, channels=4, scale=3, colors=2), (2, 2, 6, 5), (2, 2, 18, 15)))


@pytest.fixture(autouse=True)
def one_thread():
    "Narrow networks are slower on several threads"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def narrow(name, block='plain', **kw): return build_model(name, block=block, **{**NARROW[name][0], **kw})

def count(net): return sum(p.numel() for p in net.parameters())

def deployed(net):
    inside = [m for m in net.modules() if isinstance(m, RepConv2d)]
    with torch.no_grad(): kernels = sum(t.numel() for m in inside for t in m.kernel())
    return kernels + count(net) - sum(map(count, inside))


@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('name', MODELS)
def test_branches_equal_merged(name, block):
    "Outputs, gradients and running statistics, everything random"
    net = randomize_bn(narrow(name, block).double())
    for n, p in net.named_parameters():
        if n.endswith(('scale', 'bias')): nn.init.normal_(p, std=0.5)
    _, shape, out = NARROW[name]
    for training in (True, False): assert_modes_agree(net.train(training), torch.randn(shape).double())
    assert net(torch.randn(shape).double()).shape == out


@pytest.mark.parametrize('small_input', [False, True])
def test_orepa_stem(small_input):
    net = randomize_bn(narrow('resnet18', 'orepa', orepa_stem=True, small_input=small_input).double())
    assert net.stem.kernel_size == (7, 7) and net.stem.stride == ((1, 1) if small_input else (2, 2))
    for training in (True, False): assert_modes_agree(net.train(training), torch.randn(3, 3, 16, 24).double())
    assert count(narrow('resnet18', 'acnet', orepa_stem=True)) > count(narrow('resnet18', 'acnet'))
    plain = narrow('resnet18', 'plain', orepa_stem=True, small_input=small_input)
    def merged_shapes(net): return {n: t.shape for n, t in merge(net.eval()).state_dict().items()}
    assert merged_shapes(net) == merged_shapes(plain)


def test_strides():
    net = repvgg_a0(10, width=1/8, depth=1/4, strides=[2, 1, 2, 2, 1])
    stages = net.stage1, net.stage2, net.stage3, net.stage4
    assert [m.stride[0] for m in (net.stem, *(s[0] for s in stages))] == [2, 1, 2, 2, 1]
    net = narrow('resnet18', small_input=True, strides=(2, 1, 2, 2, 1))
    stages = net.layer1, net.layer2, net.layer3, net.layer4
    assert [m.stride[0] for m in (net.stem, *(s[0].conv1 for s in stages))] == [2, 1, 2, 2, 1]
    for wrong in ((2, 1, 2), (2, 1, 2, 0, 1), (2, 1, 2, 1., 1)):
        with pytest.raises(ValueError, match='strides must be five whole numbers'): repvgg_b0(strides=wrong)


def shallow(name, block):
    "RepVGG with blocks not its own in few layers: fake tensors are slow, and depth adds nothing here"
    if not name.startswith('repvgg') or block == 'repvgg': return narrow(name, block)
    return RepVGG((1, 1, 2, 1), (48, 48, 96, 192, 1280), 4, block, 1/16, True, 3)


BUILT = [(n, b) for n in MODELS for b in BLOCKS if n != 'repvgg_b0' or b == 'repvgg']

@pytest.mark.parametrize('name, block', BUILT)
def test_nothing_stays_on_the_cpu(name, block):
    "Forward on fake CUDA tensors: a tensor left on the CPU raises"
    _, shape, out = NARROW[name]
    with FakeTensorMode(allow_non_fake_inputs=False):
        with torch.device('cuda'): net = shallow(name, block)
        x = torch.randn(shape, device='cuda')
        for mode, training in (('branches', False), ('merged', True)):
            y = set_mode(net.train(training), mode)(x)
            assert y.shape == out and y.device.type == 'cuda'


def test_parameter_counts():
    sizes = [(count(n), deployed(n)) for n in (repvgg_a0(), repvgg_b0())]
    assert sizes == [(9_108_968, 8_309_384), (15_817_960, 14_339_048)]
    assert count(resnet18(block='plain')) == 11_689_512
    assert deployed(ecbsr()) == deployed(ecbsr(block='plain')) == count(ecbsr(block='plain')) == 2748


def test_resnet_is_torchvisions():
    "Same weights, same outputs; the names translate one to one"
    names = {'downsample.0.': 'shortcut.branch.', 'downsample.1.': 'shortcut.after.', 'fc.': 'head.',
             'conv1.': 'conv1.branch.', 'conv2.': 'conv2.branch.',
             'bn1.': 'conv1.after.', 'bn2.': 'conv2.after.'}
    def ours(n):
        for theirs, our in names.items(): n = n.replace(theirs, our)
        return n if n.startswith(('layer', 'head')) else n.replace('conv1', 'stem')
    theirs = randomize_bn(torchvision.models.resnet18(num_classes=5).double())
    net = resnet18(5, 'plain').double()
    net.load_state_dict({ours(n): t for n, t in theirs.state_dict().items()})
    x = torch.randn(2, 3, 40, 33).double()
    for training in (True, False): assert_same(net.train(training)(x), theirs.train(training)(x))
    assert cost(net, (3, 40, 33)).macs == cost(theirs, (3, 40, 33), exceptions=None).macs


@pytest.mark.parametrize('colors, scale', [(1, 1), (1, 2), (3, 3)])
def test_ecbsr_adds_the_input(colors, scale):
    net = ecbsr(1, 4, scale, 'plain', colors)
    for p in net.head.parameters(): nn.init.zeros_(p)
    x = torch.randn(2, colors, 5, 4)
    assert_same(net(x), F.interpolate(x, scale_factor=scale, mode='nearest'))


def test_plain_ecbsr_has_no_norm():
    for block in ('plain', 'ecb'):
        assert not any(isinstance(m, nn.BatchNorm2d) for m in ecbsr(block=block).modules())


@pytest.mark.parametrize('name', MODELS)
def test_rebuilt_from_plain_data(name):
    net = narrow(name, 'acnet')
    again = build_model(**json.loads(json.dumps(net.hparams)))
    again.load_state_dict(net.state_dict())
    x = torch.randn(NARROW[name][1])
    assert_same(again.eval()(x), net.eval()(x))
    assert copy.deepcopy(net).hparams == net.hparams == again.hparams


@pytest.mark.parametrize('name', MODELS)
def test_names_and_signs_are_real(name):
    net, seen, hooks = narrow(name), {}, []
    for n, m in layers_of(net).items():
        def look(m, args, n=n): seen[n] = bool((args[0] < 0).any())
        hooks.append(m.register_forward_pre_hook(look))
    net(torch.randn(NARROW[name][1]))
    for h in hooks: h.remove()
    assert net.signed_inputs() == seen
    named = {*net.precision_exceptions(4, 4), *net.exact_norms()}
    assert named <= set(seen) <= set(dict(net.named_modules()))
    assert all(isinstance(m, (RepConv2d, nn.Linear)) for m in layers_of(net).values())


BOTH_ENDS = {'stem': (8, 8), 'head': (8, 8)}

@pytest.mark.parametrize('name, block, bits, expected', [
    ('repvgg_a0', 'repvgg', (4, 4), {'stem': (4, 8)}),
    ('repvgg_b0', 'plain', (2, 2), {'stem': (2, 8)}),
    ('repvgg_a0', 'repvgg', (4, 8), {}),
    ('repvgg_a0', 'repvgg', (32, 32), {}),
    ('resnet18', 'acnet', (4, 4), {'stem': (8, 8)}),
    ('resnet18', 'plain', (4, 4), {'stem': (8, 8)}),
    ('resnet18', 'acnet', (8, 4), {'stem': (8, 8)}),
    ('resnet18', 'orepa', (4, 4), BOTH_ENDS),
    ('resnet18', 'orepa', (8, 8), {}),
    ('ecbsr', 'ecb', (4, 4), BOTH_ENDS),
    ('ecbsr', 'ecb', (2, 2), BOTH_ENDS),
    ('ecbsr', 'ecb', (8, 8), {})])
def test_exceptions_of_the_paper(name, block, bits, expected):
    assert narrow(name, block).precision_exceptions(*bits) == expected


def test_exact_norms():
    assert narrow('resnet18').exact_norms() == ['layer4.1.conv1', 'layer4.1.conv2']
    assert narrow('repvgg_a0').exact_norms() == narrow('ecbsr').exact_norms() == []


def test_mode_of_a_network():
    net = narrow('repvgg_a0', 'repvgg')
    assert net.mode == 'branches'
    net.mode = 'merged'
    assert {m.mode for m in net.modules() if isinstance(m, RepConv2d)} == {'merged'}
    net.stem.mode = 'branches'
    assert net.mode is None


def test_small_input():
    "What shrinks the picture, and what does not"
    layers = 'stem', 'stage1.0', 'stage4.0', 'layer1.0.conv1', 'layer4.1.conv2'
    def sides(net, size):
        return [shapes[-1][-1] for n, shapes in output_shapes(net, size).items() if n in layers]
    assert sides(narrow('repvgg_a0'), (3, 32, 32)) == [32, 32, 4]
    assert sides(narrow('repvgg_b0'), (3, 224, 224)) == [112, 56, 7]
    assert sides(narrow('resnet18'), (3, 224, 224)) == [112, 56, 7]
    assert sides(narrow('resnet18', small_input=True), (3, 32, 32)) == [32, 32, 4]


def test_width():
    cases = [(48, 0.25), (64, 0.25), (1280, 0.25), (48, 0.01), (4, 1), (48, 2)]
    assert [scaled(c, w) for c, w in cases] == [16, 16, 320, 8, 4, 96]
    assert repvgg_a0(width=0.25).head.in_features == 320 and ecbsr(width=2.).stem.out_channels == 16


@pytest.mark.parametrize('name', MODELS)
def test_cost_leaves_the_network_alone(name):
    net = narrow(name, 'repvgg').double().train()
    def attributes(): return {n: sorted(vars(m)) for n, m in net.named_modules()}
    before, attributes_before = copy.deepcopy(net.state_dict()), attributes()
    c = cost(net, NARROW[name][1][1:])
    assert net.training and attributes() == attributes_before
    for n, t in net.state_dict().items(): assert t.device.type == 'cpu' and torch.equal(t, before[n])
    assert c.params == deployed(net) and c.macs == cost(narrow(name, 'plain'), NARROW[name][1][1:]).macs


@pytest.mark.parametrize('name', MODELS)
def test_shapes_are_those_of_a_real_forward(name):
    net, seen = narrow(name, 'repvgg').eval(), {}
    for n, m in layers_of(net).items():
        def look(m, args, y, n=n): seen[n] = [tuple(y.shape[1:])]
        m.register_forward_hook(look)
    net(torch.randn(NARROW[name][1]))
    assert output_shapes(net, NARROW[name][1][1:]) == seen


def macs_by_hand(depths, widths, side=112):
    "RepVGG from its table: stem, then stages that halve the side, then the linear layer"
    total, i = side**2*9*3*widths[0], widths[0]
    for depth, o in zip(depths, widths[1:]):
        side //= 2
        total, i = total + side**2*9*(i*o + (depth - 1)*o*o), o
    return total + i*1000


def test_cost_against_literature_and_paper():
    a0, b0 = repvgg_a0(), repvgg_b0()
    a0_by_hand = macs_by_hand((2, 4, 14, 1), (48, 48, 96, 192, 1280))
    b0_by_hand = macs_by_hand((4, 6, 16, 1), (64, 64, 128, 256, 1280))
    assert cost(a0).macs == a0_by_hand == pytest.approx(1.4e9, rel=0.05)
    assert cost(b0).macs == b0_by_hand == pytest.approx(3.1e9, rel=0.05)
    assert cost(resnet18()).macs == 1_814_073_344                # what torchvision and others report as 1.8 G
    assert cost(ecbsr(), (1, 360, 640)).macs == 360*640*9*(8 + 4*64 + 32)
    ratio = cost(a0, weight_bits=8, act_bits=8).bit_ops/cost(b0, weight_bits=4, act_bits=4).bit_ops
    assert 1.76 < ratio < 1.78, 'the paper says two times'


def test_bit_operations_by_hand():
    "One layer and the exceptions, without the counter"
    c = cost(ecbsr(1, 8, 2), (1, 10, 20), 4, 4)
    assert [r.bit_ops for r in c.rows[:3]] == [200*72*64, 200*576*16, 200*288*64]
    assert c.stages()['body'] == 200*576*16
    assert c.bit_ops == sum(c.stages().values()) and sum(r.params for r in c.rows if r.kind == 'PReLU') == 16
    assert 'total' in repr(c) and '<table>' in c._repr_html_()
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=2)
    grouped = nn.Sequential(conv, nn.Flatten(), nn.Linear(8*4*4, 3, bias=False)).double()
    rows = cost(grouped, (4, 9, 9), exceptions=None).rows
    assert [(r.macs, r.params) for r in rows] == [(16*8*2*9, 8*2*9 + 8), (128*3, 128*3)]


def test_a_layer_used_twice_costs_twice_and_has_its_parameters_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
        def forward(self, x): return self.conv(self.conv(x))
    c = cost(Twice(), (2, 3, 3), exceptions=None)
    assert (c.macs, c.params) == (2*9*4, 6)


@pytest.mark.parametrize('block', BLOCKS)
def test_a_single_layer_costs_what_it_costs_in_a_network(block):
    "Its branches are merged: they are neither rows nor parameters of their own"
    layer = BLOCKS[block](3, 8)
    alone, inside = cost(layer, (3, 7, 9)), cost(nn.Sequential(layer), (3, 7, 9))
    assert (alone.macs, alone.params, len(alone.rows)) == (63*8*27, 8*27 + 8, 1)
    assert (inside.macs, inside.params) == (alone.macs, alone.params)


@pytest.mark.parametrize('name', MODELS)
def test_draws_itself(name):
    svg = narrow(name)._repr_svg_()
    assert svg.startswith('<svg') and 'stem' in svg and 'head' in svg and draw_net(narrow(name)).width > 0


ERRORS = {
    'unknown model': (
        lambda: build_model('repvgg_a1'),
        "model must be one of 'repvgg_a0', 'repvgg_b0', 'resnet18', 'ecbsr', got 'repvgg_a1'"),
    'unknown block': (lambda: resnet18(block='acn'), "block must be one of 'plain'"),
    'unknown block in ecbsr': (lambda: ecbsr(block='edge'), "'ecb'"),
    'width zero': (lambda: repvgg_a0(width=0), 'width must be a number above 0, got 0'),
    'width negative': (lambda: resnet18(width=-1), 'width must be a number above 0, got -1'),
    'width not a number': (lambda: resnet18(width=float('nan')), 'width must be'),
    'no classes': (lambda: repvgg_b0(n_classes=0), 'n_classes must be a whole number of at least 1, got 0'),
    'half a class': (lambda: resnet18(n_classes=2.5), 'got 2.5'),
    'scale zero': (lambda: ecbsr(scale=0), 'scale must be a whole number of at least 1, got 0'),
    'fractional scale': (lambda: ecbsr(scale=1.5), 'scale must be a whole number'),
    'no channels': (lambda: ecbsr(channels=0), 'channels must be'),
    'no blocks': (lambda: ecbsr(blocks=0), 'blocks must be'),
    'no colors': (lambda: ecbsr(colors=0), 'colors must be'),
    'grey image': (
        lambda: narrow('resnet18')(torch.zeros(2, 1, 32, 32)),
        'resnet18 takes a batch of shape (batch, 3, height, width), got (2, 1, 32, 32): '
        'for images with other channels make it with in_channels='),
    'image without a batch': (lambda: narrow('repvgg_a0')(torch.zeros(3, 32, 32)), 'got (3, 32, 32)'),
    'colour image': (lambda: ecbsr()(torch.zeros(1, 3, 8, 8)),
                     'ecbsr takes a batch of shape (batch, 1, height, width), got (1, 3, 8, 8)'),
    'cost of a grey image': (lambda: cost(narrow('resnet18'), (1, 32, 32)), 'in_channels='),
    'input size': (lambda: cost(ecbsr(), (8, 8)), 'input_size must be (channels, height, width), got (8, 8)'),
    'bits': (lambda: cost(ecbsr(), (1, 8, 8), weight_bits=0), 'weight_bits must be 1..32, got 0'),
    'bits of an exception': (
        lambda: layer_bits(ecbsr(), 4, 4, {'stem': (8, 64)}),
        'act_bits must be 1..32, got 64'),
    'exception of one number': (
        lambda: layer_bits(ecbsr(), 4, 4, {'stem': 8}),
        "'stem' needs (weight_bits, act_bits), got 8"),
    'exception for no layer': (
        lambda: layer_bits(ecbsr(), 4, 4, {'tail': (8, 8)}),
        "no layer is called 'tail', layers are stem, body.0"),
    'exceptions by another name': (
        lambda: layer_bits(ecbsr(), 4, 4, 'all'),
        "exceptions must be 'paper', None or a dict"),
    'unknown mode': (lambda: set_mode(ecbsr(), 'fast'), "'branches', 'merged'"),
}


@pytest.mark.parametrize('case', ERRORS)
def test_says_what_to_do(case):
    make, message = ERRORS[case]
    with pytest.raises(ValueError) as error: make()
    assert message in str(error.value)


def test_unknown_argument_names_the_function():
    with pytest.raises(TypeError, match='repvgg_a0.*stages'): build_model('repvgg_a0', stages=3)


def test_rules_hold_inside_another_network():
    "Bits, signs and exact norms of a RepNet behind another module are its own"
    import repq
    def described(net, prefix=''):
        repq.quantize(net, 4, 4, statistics='estimate', start='first')
        layers = repq.quantization.network.quantizable_layers(net)
        assert all(n.startswith(prefix) for n in layers)
        def rules(layer):
            weight, x = layer.weight_quantizer, layer.input_quantizer
            return weight.bits, x.bits, x.signed, getattr(layer, 'statistics', None)
        return {n.removeprefix(prefix): rules(layer) for n, layer in layers.items()}
    for name in ('repvgg_a0', 'resnet18', 'ecbsr'):
        alone = described(narrow(name))
        assert len(set(alone.values())) > 1
        assert described(nn.Sequential(nn.Identity(), narrow(name)), '1.') == alone
