"Deployment: the file computes what the network computes, on integers, and the certificate tells when it does not"
import copy, hashlib, json, subprocess, sys
from collections import OrderedDict
from functools import partial
import numpy as np
import pytest, torch
from torch import nn
import torch.nn.functional as F
onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
import repq
from repq.blocks import BLOCKS, make_block
from repq.deploy import export
from repq.deploy.export import code_range, integer_parameters
from repq.deploy.runtimes import executed_ops, onnx_session, run_onnx
from repq.deploy.parity import FOLD, check_parity, saturates
from repq.quantization.network import merge, quantizable_layers, quantize, recalibrate
from repq.tools.testing import assert_same, randomize_bn

export_onnx = partial(export.export_onnx, target='integer')   # every product on integers; other targets: test_targets.py
FLOAT_KERNELS = {'Conv', 'FusedConv', 'Gemm', 'FusedGemm', 'MatMul', 'ConvTranspose'}
MODELS = {'repvgg_a0': ((3, 32, 32), dict(n_classes=10, width=.125)), 'resnet18': ((3, 32, 32), dict(n_classes=10, width=.125)), 'ecbsr': ((1, 12, 12), dict(blocks=1))}


def integer_product(x, w, **kwargs):
    "What ONNX Runtime makes of unsigned by signed bytes"
    helper, T = onnx.helper, onnx.TensorProto
    graph = helper.make_graph([helper.make_node('MatMulInteger', ['x', 'w'], ['y'])], 'g', [helper.make_tensor_value_info('x', T.UINT8, list(x.shape))],
                              [helper.make_tensor_value_info('y', T.INT32, [len(x), w.shape[1]])], [onnx.numpy_helper.from_array(w, 'w')])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 21)], ir_version=10).SerializeToString()
    return onnx_session(model, **kwargs).run(None, {'x': x})[0]


def runtime_is_exact():
    "Some versions of ONNX Runtime get small integer products wrong on some processors"
    r = np.random.default_rng(0)
    x, w = r.integers(0, 16, (64, 27)).astype(np.uint8), r.integers(-128, 128, (27, 17)).astype(np.int8)
    return np.array_equal(integer_product(x, w), x.astype(int)@w.astype(int))


pytestmark = pytest.mark.skipif(not runtime_is_exact(), reason='this version of onnxruntime multiplies integers wrongly on this processor: take another')


def settled(net, x, weight_bits, act_bits, **kwargs):
    "A quantized network with random norms whose quantizers and statistics have seen data"
    quantize(randomize_bn(net), weight_bits, act_bits, **kwargs, start='first')
    for _ in range(2): net(x)
    return recalibrate(net.eval(), [x], 'ranges') # channels without variance do not wait any longer


def assert_parity(net, path, x):
    "Layer by layer equal but for single ties, nothing multiplied in float"
    report = check_parity(net, path, [x])
    assert report.ok, report
    assert all(s.largest <= 1 and s.error < 5e-3 and set(s.why) <= {'rounding tie'} for s in report.stations), report
    assert sum(s.numbers for s in report.stations) > 100
    assert not FLOAT_KERNELS & set(executed_ops(path))
    return report


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('block', BLOCKS)
def test_every_model_and_block(tmp_path, model, block):
    "8 or 4 bits, in turn; norms at random, negative gammas included; other batch and size than the example's"
    (shape, kwargs), bits = MODELS[model], (8, 4)[(list(BLOCKS).index(block) + list(MODELS).index(model)) % 2]
    net, x = repq.models.build_model(model, block=block, **kwargs), torch.randn(4, *shape)
    settled(net, x, bits, bits)
    assert_parity(net, export_onnx(net, tmp_path/'net.onnx', torch.randn(1, shape[0], 24, 40), packed=bits == 4), x)


LAYERS = {
    'stride 2': dict(stride=2), 'depthwise': dict(groups=8), 'grouped': dict(groups=2, stride=2), '1×1': dict(kernel_size=1, padding=0), '1×1, stride 2': dict(kernel_size=1, padding=0, stride=2),
    '5×5': dict(kernel_size=5, padding=2), 'even': dict(kernel_size=4, padding=1, stride=2), 'oblong': dict(kernel_size=(1, 3), padding=(0, 1), stride=(2, 1)), 'no bias': dict(bias=False)}


@pytest.mark.parametrize('kind', LAYERS)
@pytest.mark.parametrize('end', ['requantized', 'float'])
def test_layers(tmp_path, kind, end):
    "Every shape of convolution, with bytes behind it and with floats behind it"
    kwargs = {**dict(kernel_size=3, padding=1), **LAYERS[kind]}
    layers = [nn.Conv2d(8, 8, **kwargs), nn.BatchNorm2d(8), nn.ReLU() if end == 'requantized' else nn.PReLU(8), nn.Conv2d(8, 6, 1)]
    x = torch.randn(4, 8, 13, 14)
    net = settled(nn.Sequential(*layers), x, 8, 8)
    path = export_onnx(net, tmp_path/'net.onnx', x[:1])
    assert_parity(net, path, x)
    assert ('QLinearConv' in executed_ops(path)) == (end == 'requantized')


@pytest.mark.parametrize('bits', [(8, 8), (4, 8), (8, 4), (2, 2), (3, 5)])
@pytest.mark.parametrize('fine_bias', [False, True])
def test_bits(tmp_path, bits, fine_bias):
    "Any bits live in bytes; packed or not, and with finer biases, the integers agree"
    x = torch.randn(4, 3, 16, 16)
    net = settled(nn.Sequential(make_block('qarepvgg', 3, 8), nn.ReLU(), make_block('orepa', 8, 8), nn.ReLU(), make_block('plain', 8, 8)), x, *bits)
    paths = [export_onnx(net, tmp_path/f'{p}.onnx', x[:1], packed=p, fine_bias=fine_bias) for p in (False, True)]
    for path in paths: assert_parity(net, path, x)
    assert torch.equal(*(run_onnx(onnx_session(p), x) for p in paths))
    kinds = [{t.data_type for t in onnx.load(p).graph.initializer if t.name.endswith('.weight')} for p in paths]
    assert kinds == [{onnx.TensorProto.INT8}, {onnx.TensorProto.INT4 if bits[0] <= 4 else onnx.TensorProto.INT8}]


class Clips(nn.Module):
    "Clips of every kind in front of quantizers"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
    def forward(self, x):
        x = F.relu6(self.a(x)*3)
        x = F.hardtanh(self.b(x), -.7, .4)
        return self.d(self.c(x).clamp(min=-.2).relu().clamp(max=.9))


@pytest.mark.parametrize('bits', [8, 4])
def test_clips_become_clips_of_bytes(tmp_path, bits):
    x = torch.randn(4, 4, 12, 12)
    net = settled(Clips(), x, bits, bits)
    path = export_onnx(net, tmp_path/'net.onnx', x[:1])
    assert_parity(net, path, x)
    written = [n for n in onnx.load(path).graph.node if n.op_type in ('Relu', 'Clip')]
    assert len(written) <= 4 and all(n.name.endswith('.codes') for n in written)     # no clip of floats is left
    assert executed_ops(path)['QLinearConv'] == 2                                    # b and c; a is scaled, d is the end


def test_relu_before_a_signed_quantizer(tmp_path):
    "The bytes are clipped at the zero point"
    x = torch.randn(4, 3, 12, 12)
    net = nn.Sequential(make_block('plain', 3, 4), nn.ReLU(), make_block('plain', 4, 4))
    quantize(randomize_bn(net), 8, 8, start='first')
    for l in quantizable_layers(net).values(): l.input_quantizer.fixed_sign = True; l.input_quantizer.reset(8)
    for _ in range(3): net(x)
    net.eval()
    assert code_range(merge(net)[2].quantize, low=0)[:2] == (128, 128)
    assert_parity(net, export_onnx(net, tmp_path/'net.onnx', x[:1]), x)


@pytest.mark.parametrize('gamma', [0., 1e-9, -1e-9, 1e-25])
def test_vanishing_gamma(tmp_path, gamma):
    "A channel whose sum is tiny beside its bias keeps its bias"
    x = torch.randn(4, 3, 12, 12)
    net = settled(nn.Sequential(make_block('qarepvgg', 3, 8), nn.ReLU(), make_block('qarepvgg', 8, 8)), x, 8, 8)
    with torch.no_grad():
        for layer in (net[0], net[2]): layer.after.weight[2], layer.after.bias[2] = gamma, .7
    path = export_onnx(net, tmp_path/'net.onnx', x[:1])
    assert_parity(net, path, x)
    assert_same(run_onnx(onnx_session(path), x)[:, 2], torch.full((4, 12, 12), .7), 1e-5)
    conv = merge(net)[2].conv                    # what a plain rounding to 32 bits gives
    naive = (conv.bias[2].double()/(conv.step[2].double()*merge(net)[2].quantize.step.double())).clamp(-2.**31, 2.**31)
    if gamma not in (0., 1e-25): assert abs(naive*conv.step[2].double()*merge(net)[2].quantize.step.double() - .7) > .1


class Twice(nn.Module):
    "A layer that is called twice, a skip connection and a concatenation"
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(12, 5)
    def forward(self, x):
        a = F.relu(self.stem(x))
        b = F.relu(self.body(a) + a)
        return self.head(torch.cat([F.relu(self.body(b)), b], 1).permute(0, 2, 3, 1))


def test_shared_layer_and_linear_in_four_dimensions(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    net = settled(Twice(), x, 8, 8)
    report = assert_parity(net, export_onnx(net, tmp_path/'net.onnx', x[:1]), x)
    assert {s.layer for s in report.stations} >= {'body', 'body#1', 'head'}


def test_single_layer_and_merged_network(tmp_path):
    "A network that is one layer; and the merged form gives the same file"
    x = torch.randn(4, 3, 9, 9)
    layer = settled(make_block('acnet', 3, 6), x, 8, 8)
    for net in (layer, merge(layer)): assert_parity(net, export_onnx(net, tmp_path/f'{type(net).__name__}.onnx', x[:1]), x)
    files = [{t.name: t.SerializeToString() for t in onnx.load(p).graph.initializer} for p in sorted(tmp_path.glob('*.onnx'))]
    assert files[0] == files[1] and 'layer.weight' in files[0]


def test_foreign_network(tmp_path):
    "MobileNetV2: depthwise convolutions, ReLU6 and skip connections, after post-training quantization"
    models = pytest.importorskip('torchvision').models
    net, x = models.mobilenet_v2(num_classes=6, width_mult=.25), torch.randn(4, 3, 48, 48)
    for _ in range(5): randomize_bn(net).train()(x)
    quantize(net.eval(), 8, 8, start='first')
    recalibrate(net, [x], 'ranges')
    assert_parity(net.eval(), export_onnx(net, tmp_path/'net.onnx', x[:1]), x)


def test_pure_qdq(tmp_path):
    "target='openvino' writes QuantizeLinear and DequantizeLinear only, and computes the same"
    x = torch.randn(4, 3, 32, 32)
    net = settled(repq.models.repvgg_a0(10, width=.125), x, 8, 8)
    path = export_onnx(net, tmp_path/'qdq.onnx', x[:1], target='openvino')
    kinds = {n.op_type for n in onnx.load(path).graph.node}
    assert {'QuantizeLinear', 'DequantizeLinear', 'Conv'} <= kinds and not kinds & {'MatMulInteger', 'ConvInteger'}
    assert check_parity(net, path, [x]).ok


class Functions(nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, x): return self.f(x)


class Normalizing(nn.Module):
    "Reads two buffers, a parameter and a constant"
    def __init__(self):
        super().__init__()
        for name in ('mean', 'std'): self.register_buffer(name, torch.rand(6, 1, 1) + 1)
        self.gain = nn.Parameter(torch.rand(6, 1, 1))
    def forward(self, x): return (x - self.mean)/self.std*self.gain + torch.tensor(.5)


OPERATORS = {
    'buffers': Normalizing(),
    'activations': nn.Sequential(nn.LeakyReLU(.2), nn.PReLU(6), nn.Hardswish(), nn.SiLU(), nn.GELU(), nn.GELU('tanh'), nn.Hardsigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Dropout()),
    'pooling': nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.MaxPool2d(2, ceil_mode=True)),
    'layers': nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, padding='same', bias=False), nn.Conv2d(4, 8, 3, 2, 2, 2, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3), nn.Softmax(1)),
    'upsampling': nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode='bilinear'), nn.ReLU6(), nn.Hardtanh(-.5, .5)),
    'arithmetic': Functions(lambda x: (1 - x)*2/(x.sigmoid() + 3) - x.mean((2, 3), keepdim=True)),
    'division that rounds down': Functions(lambda x: x//.25 + 3//(x.relu() + .5) + x*4//(x.relu() + .5) + x.reshape(x.shape[0], 6, x.size(2)//2, -1).mean((2, 3), keepdim=True)),
    'sizes': Functions(lambda x: x.reshape(x.shape[0], 2, 3*x.size(2), -1).flatten(1, 2).permute(0, 2, 1).contiguous()),
    'flatten in the middle': Functions(lambda x: torch.flatten(x, 1, 2)),
    'shuffle': Functions(lambda x: F.pixel_shuffle(torch.cat([x, x.relu()], 1).repeat_interleave(3, 1), 2)),
    'adaptive pooling at a fixed size': nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96, 3)),
}


@pytest.mark.parametrize('name', OPERATORS)
def test_operators(tmp_path, name):
    "In full precision, at another batch and, where that is possible, another size"
    net, x = randomize_bn(copy.deepcopy(OPERATORS[name])).eval(), torch.randn(2, 6, 16, 20)
    if name.startswith('adaptive'): net, x = nn.Sequential(Functions(lambda t: t.reshape(t.shape[0], 6, 16, 20)), net).eval(), x
    session = onnx_session(export_onnx(net, tmp_path/'net.onnx', x))
    sizes = [(2, 6, 16, 20), (5, 6, 16, 20)] + ([] if name.startswith('adaptive') else [(1, 6, 22, 34)])
    for size in sizes:
        x = torch.randn(size)
        assert_same(run_onnx(session, x), net(x).detach(), 1e-5, f'{name} at {size}')


class OwnWeights(nn.Module):
    "Reads its parameters and buffers in `forward`, and computes some"
    def __init__(self):
        super().__init__()
        self.kernel, self.bias, self.matrix = (nn.Parameter(torch.randn(s)) for s in ((6, 6, 3, 3), (6,), (5, 6)))
        self.register_buffer('mean', torch.randn(6)); self.register_buffer('var', torch.rand(6) + .5)
    def forward(self, x):
        y = F.prelu(F.conv2d(x, self.kernel, self.bias, padding=1), self.bias*.1)
        y = F.batch_norm(F.conv2d(y, self.kernel.mean((2, 3), keepdim=True)), self.mean, self.var, self.bias, self.mean)
        return F.linear(F.linear(y.permute(0, 2, 3, 1), self.matrix, self.matrix.mean(1)).mean((1, 2)), self.matrix.permute(1, 0), bias=self.bias)


def test_weights_read_in_forward(tmp_path):
    net = OwnWeights().eval()
    path = export_onnx(net, tmp_path/'net.onnx', torch.randn(2, 6, 16, 20))
    x = torch.randn(5, 6, 22, 34)
    assert_same(run_onnx(onnx_session(path), x), net(x).detach(), 1e-5)
    stored = [t for t in onnx.load(path).graph.initializer if list(t.dims) == [6, 6, 3, 3]]
    assert len(stored) == 1                                                          # once, although it is read twice


def changed_input(x): y = x*2; z = F.relu(y, inplace=True)*3; return z + y
def changed_by_statement(x): y = x*2; before = y + 1; y.add_(x); return y*before
def changed_twice(x): y = x*2; y.add_(x); torch.relu_(y); y *= 3; return y
def changed_under_two_names(x): y = x*2; same = y.contiguous(); y.mul_(3); return same + y
def changed_network_input(x): y = x.relu_(); return y - x*2
def shifted_network_input(x): return x.add_(1)*2
def changed_by_position(x): y = x*2; z = F.relu(y, True); F.leaky_relu(y, .1, True); F.hardtanh(y, -.5, .5, True); F.relu6(y, True); return F.silu(y, True) + z
def changed_and_not_read(x): y = x*2; z = y + 1; y.relu_(); return z
EFFECTS = (changed_input, changed_by_statement, changed_twice, changed_under_two_names, changed_network_input, shifted_network_input, changed_by_position, changed_and_not_read)


@pytest.mark.parametrize('mode', [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize('f', EFFECTS)
def test_operations_in_place(tmp_path, f, mode):
    "Whoever reads a tensor after it was changed reads the result, in the file too; the example stays as it was"
    with mode():
        net, x = Functions(f).eval(), torch.randn(2, 6, 8, 8)
        kept = x.clone()
        session = onnx_session(export_onnx(net, tmp_path/'net.onnx', x))
        assert torch.equal(x, kept)
    x = torch.randn(3, 6, 10, 12)
    assert_same(run_onnx(session, x), net(x.clone()), 1e-6)
    kept = x.clone()
    assert check_parity(net, tmp_path/'net.onnx', [x]).ok and torch.equal(x, kept)


class SharedByActivation(nn.Module):
    "The skip connection starts before a ReLU in place, so it starts behind it"
    def __init__(self): super().__init__(); self.a, self.act, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)
    def forward(self, x): y = self.a(x); return self.b(self.act(y)) + y


def test_operations_in_place_of_quantized_layers(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    net = settled(SharedByActivation(), x, 8, 8)
    assert_parity(net, export_onnx(net, tmp_path/'net.onnx', x[:1]), x)


def test_full_precision_parity(tmp_path):
    "A float32 file has a certificate too, and a changed network fails it"
    x = torch.randn(4, 3, 32, 32)
    net = randomize_bn(repq.models.resnet18(10, width=.125)).eval()
    path = export_onnx(net, tmp_path/'net.onnx', x[:1])
    assert check_parity(net, path, [x]).ok
    with torch.no_grad(): net.head.bias[0] += 1
    assert not check_parity(net, path, [x]).ok


@pytest.fixture
def exported(tmp_path):
    x = torch.randn(8, 3, 16, 16)
    net = nn.Sequential(OrderedDict(stem=make_block('qarepvgg', 3, 8), a=nn.ReLU(), body=make_block('qarepvgg', 8, 8), b=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(8, 5)))
    net = settled(net, x, 8, 8)
    return net, export_onnx(net, tmp_path/'net.onnx', x[:1]), x


def test_certificate(exported, tmp_path):
    net, path, x = exported
    report = check_parity(net, path, [(x, torch.arange(8) % 5)])
    record = json.loads(report.save(tmp_path/'parity.json').read_text())
    assert record['ok'] and record['failures'] == [] and record['sha256'] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record['end_to_end']['images'] == 8 and {'accuracy', 'top1_agreement'} <= set(record['end_to_end'])
    assert [s['layer'] for s in record['stations']] == ['input of stem', 'stem', 'body', 'input of head', 'head', 'the end']
    assert 'parity holds: net.onnx' in str(report) and '<td>body</td>' in report._repr_html_() and str(report) == repr(report)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['net.onnx', 'parity.json']


@pytest.mark.parametrize('tensor, change, layer, why', [
    ('stem.weight', lambda a: -a, 'stem', 'have the opposite sign'), ('stem.weight', lambda a: a//2, 'stem', 'are others'), ('stem.bias', lambda a: a + 5000, 'stem', 'the bias of channel 0'),
    ('stem.weight_step', lambda a: a*np.float32(1.5), 'stem', 'the weight step of channel 0 is 1.5 times'), ('body.scale', lambda a: a*np.float32(.5), 'body', 'the scale of channel 0 is 0.5 times'),
    ('body.step', lambda a: a*np.float32(1.1), 'body', 'the step of the input'), ('head.weight', lambda a: -a, 'head', 'have the opposite sign')])
def test_tampered_file(exported, tensor, change, layer, why):
    "The layer and the cause are named"
    net, path, x = exported
    model = onnx.load(path)
    t = next(t for t in model.graph.initializer if t.name == tensor)
    t.CopyFrom(onnx.numpy_helper.from_array(np.asarray(change(onnx.numpy_helper.to_array(t)), dtype=onnx.numpy_helper.to_array(t).dtype), tensor))
    onnx.save(model, path)
    report = check_parity(net, path, [x])
    assert not report.ok and report.failures()[0].startswith(f'{layer}: {FOLD}') and why in report.failures()[0], report
    assert any(why.startswith(FOLD) for s in report.stations if s.layer == layer for why in s.why) or tensor == 'body.step', report


def test_operator_between_layers_is_checked(exported):
    "The part of the network between two layers differs"
    net, path, x = exported
    net = copy.deepcopy(net)
    net.pool = nn.AdaptiveMaxPool2d(1).eval()
    report = check_parity(net, path, [x])
    assert not report.ok and report.first.layer == 'input of head' and 'an operator before the quantizer gives something else' in report.first.why, report


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('where', ['input', 'inside'])
def test_what_is_not_finite_fails(exported, tmp_path, bad, where):
    "Equal or not, such outputs certify nothing"
    net, path, x = exported
    if where == 'inside':
        net = chain(Functions(lambda x: torch.log(x*0) if bad < 0 or bad == float('inf') else torch.log(x*0 - 1)))
        path = export_onnx(net, tmp_path/'bad.onnx', x[:1])
    x = x.clone()
    if where == 'input': x[0, 0, 3, 3] = bad
    report = check_parity(net, path, [x])
    assert 'not finite' in str(report.failures()) if where == 'inside' or bad != bad else report.ok, report    # a quantizer clips what is infinite


def test_outputs_of_zero(tmp_path):
    "Nothing to divide by: equal is equal"
    net = chain(nn.ReLU())
    with torch.no_grad(): net.conv.weight.zero_(), net.conv.bias.fill_(-1)
    report = check_parity(net, export_onnx(net, tmp_path/'net.onnx', X), [X])
    assert report.ok and report.end_to_end['relative_error'] == 0, report
    with torch.no_grad(): net.conv.bias.fill_(1)
    assert not check_parity(net, tmp_path/'net.onnx', [X]).ok


def test_perfect_outputs(tmp_path):
    "Network and file both hit the target exactly"
    net, x = Functions(lambda x: x.relu()).eval(), torch.rand(2, 3, 8, 8)
    report = check_parity(net, export_onnx(net, tmp_path/'net.onnx', x), [(x, x)])
    assert report.ok and report.end_to_end['psnr_difference'] == 0, report


def test_a_certificate_is_json(tmp_path):
    "Equal images have an infinite PSNR, images without contrast none; JSON has neither"
    def refuse(name): raise AssertionError(f'{name} is not JSON')
    net = Functions(lambda x: x.relu()).eval()
    path = export_onnx(net, tmp_path/'net.onnx', X)
    report = check_parity(net, path, [X])
    assert report.end_to_end['psnr'] == float('inf')
    assert json.loads(report.to_json(), parse_constant=refuse)['end_to_end']['psnr'] is None
    report = check_parity(Functions(lambda x: x.relu()*0 + 1).eval(), path, [X])
    assert not report.ok and json.loads(report.to_json(), parse_constant=refuse)['end_to_end']['psnr'] is None


def test_bias_rounding_is_the_reason_without_emulation(tmp_path):
    x = torch.randn(16, 3, 16, 16)
    net = settled(nn.Sequential(make_block('plain', 3, 8), nn.ReLU(), make_block('plain', 8, 8), nn.ReLU(), make_block('plain', 8, 4)), x, 4, 4)
    path = export_onnx(net, tmp_path/'net.onnx', x[:1])
    emulated, not_emulated = (check_parity(net, path, [x], bias_rounding=b) for b in (True, False))
    assert emulated.ok and not not_emulated.ok
    assert not_emulated.first.layer == '0' and max(not_emulated.first.why, key=not_emulated.first.why.get) == 'int32 bias rounding'
    assert emulated.end_to_end['rounding_biases']['relative_error'] > 10*emulated.end_to_end['relative_error']


def test_the_range_of_the_input_is_in_the_file(tmp_path):
    "Of ECBSR, merged or not; a classifier has none"
    onnx = pytest.importorskip('onnx')
    def props(net, x): return {p.key: p.value for p in onnx.load(export_onnx(net.eval(), tmp_path/'net.onnx', x)).metadata_props}
    net, x = repq.models.ecbsr(blocks=1), torch.rand(1, 1, 12, 12)*255
    for n in (net, repq.merge(net), settled(net, x, 8, 8)): assert props(n, x)['repq.input_range'] == '0..255'
    assert 'repq.input_range' not in props(repq.models.repvgg_a0(10, width=1/8), torch.rand(1, 3, 32, 32))


def test_super_resolution_is_judged_by_psnr(tmp_path):
    low = torch.rand(2, 1, 12, 12)*255
    high = F.interpolate(low, scale_factor=2, mode='bilinear')
    net = settled(repq.models.ecbsr(blocks=1), low, 8, 8)
    report = check_parity(net, export_onnx(net, tmp_path/'net.onnx', low[:1]), [(low, high)])
    assert report.ok and abs(report.end_to_end['psnr_difference']) < .02
    assert not check_parity(net, tmp_path/'net.onnx', [(low, high)], psnr=-1.).ok


@pytest.mark.parametrize('paired', [True, False])
def test_pictures_of_several_sizes(tmp_path, paired):
    "One certificate for all of them"
    low = [torch.rand(2, 1, h, w)*255 for h, w in ((12, 12), (9, 14))]
    net = settled(repq.models.ecbsr(blocks=1), low[0], 8, 8)
    path = export_onnx(net, tmp_path/'net.onnx', low[0][:1])
    batches = [(x, F.interpolate(x, scale_factor=2, mode='bilinear')) for x in low] if paired else low
    report = check_parity(net, path, batches)
    assert report.ok and report.end_to_end['images'] == 4 and ('psnr_difference' if paired else 'psnr') in report.end_to_end, report
    assert check_parity(net, path, batches[:1]).end_to_end['largest_difference'] <= report.end_to_end['largest_difference']


def test_saturation():
    "The largest products are exact with precise=True; without, exactly where saturates() says so"
    x, w = np.full((5, 320), 255, np.uint8), np.full((320, 48), 127, np.int8)
    exact = x.astype(int)@w.astype(int)
    assert np.array_equal(integer_product(x, w, precise=True), exact) and np.array_equal(integer_product(x, w), exact) == (not saturates())


def cold(): return quantize(nn.Sequential(OrderedDict(stem=make_block('repvgg', 3, 8), act=nn.ReLU())), 8, 8).eval()
class Branching(nn.Module):
    def forward(self, x): return x if x.mean() > 0 else -x
class OnSize(nn.Module):
    def forward(self, x): return x if x.shape[2] > 10 else -x
class Counting(nn.Module):
    def __init__(self): super().__init__(); self.register_buffer('seen', torch.zeros(()))
    def forward(self, x): return x*self.seen.add_(x.mean((0, 1, 2, 3)))
class Stepping(Counting):
    def forward(self, x): self.seen += 1; return x*self.seen
class TwoInputs(nn.Module):
    def forward(self, x, y): return x + y
def chain(*more): return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 8, 3), **{f'm{i}': m for i, m in enumerate(more)})).eval()

def half_training():
    net = chain(nn.BatchNorm2d(8))
    net.m0.train()
    return net

X = torch.randn(1, 3, 16, 16)
def poisoned(name, value):
    "A quantized network, merged, with one number that means nothing"
    net = merge(settled(nn.Sequential(OrderedDict(stem=make_block('plain', 3, 8), act=nn.ReLU(), head=make_block('plain', 8, 4))), X.repeat(4, 1, 1, 1), 4, 4))
    with torch.no_grad(): net.get_parameter(name)[0] = value
    return net


def merged_with(name, value):
    "The same for steps and codes, which are buffers"
    net = merge(settled(nn.Sequential(OrderedDict(stem=make_block('plain', 3, 8), act=nn.ReLU(), head=make_block('plain', 8, 4))), X.repeat(4, 1, 1, 1), 4, 4))
    net.get_buffer(name).fill_(value)
    return net


BAD = {
    'training mode': (lambda: chain().train(), X, 'the network is in training mode: call net.eval()'),
    'partly in training mode': (half_training, X, 'm0 is in training mode'),
    'cold quantizers': (cold, X, 'never initialised (stem'),
    'unknown module': (lambda: chain(nn.Sequential(nn.Softshrink())), X, 'm0.0 (Softshrink): softshrink cannot be exported. Supported are'),
    'unknown function': (lambda: chain(Functions(lambda x: torch.fft.fft(x).real)), X, 'm0 (Functions): '),
    'recurrent': (lambda: chain(nn.Flatten(2), nn.LSTM(196, 8)), X, 'm1 (LSTM)'),
    'unknown option': (lambda: chain(nn.Upsample(size=(5, 5), mode='bilinear', align_corners=False), Functions(lambda x: F.interpolate(x, 3, mode='bilinear', antialias=True))),
                       X, 'm1 (Functions): interpolate cannot be exported in this form: mode='),
    'other divisor': (lambda: chain(nn.AvgPool2d(2, divisor_override=1)), X,
                      'm0 (AvgPool2d): avg_pool2d cannot be exported in this form: ONNX averages over the window, got divisor_override=1'),
    'dropout that is always on': (lambda: chain(Functions(lambda x: F.dropout(x, .5))), X, 'm0 (Functions): dropout with training=True draws at random'),
    'branch on a value': (lambda: chain(Branching()), X, 'm0 (Branching) cannot be traced'),
    'part changed in place': (lambda: chain(Functions(lambda x: (x.flatten(1).relu_(), x)[1])), X,
                              "m0: relu_ changes a tensor of which 'conv2d', read afterwards, is another part or shape"),
    'state changed in place': (lambda: chain(Counting()), X, "m0: add_ changes 'm0.seen', which belongs to the network, in place"),
    'state changed without input': (lambda: chain(Stepping()), X, "changes 'm0.seen', which belongs to the network, in place"),
    'no tensor comes out': (lambda: chain(Functions(lambda x: None)), X, 'the network gives no tensor'),
    'wrong channels': (lambda: chain(), torch.randn(1, 4, 16, 16), 'conv (Conv2d) cannot run an example of shape (1, 4, 16, 16)'),
    'too small': (lambda: chain(), torch.randn(1, 3, 2, 2), 'conv (Conv2d) cannot run an example of shape (1, 3, 2, 2)'),
    'second input': (lambda: TwoInputs().eval(), X, "TwoInputs needs another input, 'y': give the example as a tuple"),
    'integers': (lambda: chain(), torch.ones(1, 3, 8, 8).int(), 'example must be a floating point batch'),
    'empty batch': (lambda: chain(), torch.ones(0, 3, 8, 8), 'example must be a floating point batch'),
    'no tensor': (lambda: chain(), (1, 3, 8, 8), 'got tuple'),
    'no network': (lambda: 'net', X, 'takes a torch.nn.Module, got str'),
    'NaN in a weight': (lambda: poisoned('stem.conv.weight', float('nan')), X, 'stem.conv.weight holds numbers that are not finite'),
    'infinite bias': (lambda: poisoned('head.conv.bias', float('inf')), X, 'head.conv.bias holds numbers that are not finite'),
    'step of zero': (lambda: merged_with('head.quantize.step', 0.), X, 'head.quantize: its step must be a positive finite number, got 0'),
    'infinite step': (lambda: merged_with('stem.conv.step', float('inf')), X, 'stem.conv: its step must be a positive finite number, got inf'),
    'negative step': (lambda: merged_with('stem.conv.step', -1.), X, 'stem.conv: its step must be a positive finite number, got -1'),
    'codes of more bits': (lambda: merged_with('head.conv.codes', 9), X, 'head.conv: its codes do not fit into 4 bits: they are 9 to 9'),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input(tmp_path, case):
    make, example, message = BAD[case]
    with pytest.raises(ValueError) as e: export_onnx(make(), tmp_path/'net.onnx', example)
    assert message in str(e.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_the_old_file(exported):
    net, path, x = exported
    before = path.read_bytes()
    with pytest.raises(ValueError): export_onnx(net.train(), path, x)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_bad_parity_input(exported, tmp_path):
    net, path, x = exported
    other = quantize(nn.Sequential(OrderedDict(stem=make_block('plain', 3, 8))), 8, 8, start='first')
    other(x)
    plain_file = tmp_path/'theirs.onnx'
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, plain_file)
    for args, message in [((net, path, []), 'got no batch'), ((net, tmp_path/'none.onnx', [x]), 'there is no file'), ((net, path, [x[:, :2]]), 'cannot run a batch of shape (8, 2, 16, 16)'),
                          ((other.eval(), path, [x]), "a quantized layer 'body', the network has none there"), ((net, plain_file, [x]), 'was not written by repq.export_onnx')]:
        with pytest.raises(ValueError) as e: check_parity(*args)
        assert message in str(e.value)
    with pytest.raises(ValueError, match='training mode'): check_parity(net.train(), path, [x])


def test_without_onnx():
    "The module loads without the packages, and says what to install when they are needed"
    code = ('import sys; sys.modules["onnx"] = None; import torch, repq\n'
            'assert "onnxruntime" not in sys.modules\n'
            'try: repq.export_onnx(torch.nn.Sequential(torch.nn.ReLU()).eval(), "never.onnx", torch.randn(1, 3, 8, 8))\n'
            'except ImportError as e: print(e)')
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert 'deployment needs the package onnx: pip install repq[onnx]' in out


def test_integer_parameters_keep_ordinary_channels():
    codes, step, bias = torch.randint(-127, 128, (9, 4, 3, 3)), torch.rand(9) + .01, torch.randn(9)*10
    q, s, scale, b = integer_parameters(codes, step, bias, .03)
    assert torch.equal(q.long(), codes) and torch.equal(s, step) and q.dtype == torch.int8 and b.dtype == torch.int32
    assert ((b.double()*scale.double() - bias.double()).abs() <= scale.double()/2*(1 + 1e-6)).all()
