"Targets: each writes the graph its runtime runs fastest, and both runtimes compute what the network computes"
import json, warnings
import pytest, torch
from torch import nn
import torch.nn.functional as F
onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
import repq
from repq.blocks import BLOCKS
from repq.deploy import operators
from repq.deploy.parity import file_layers
from repq.deploy.runtimes import executed_convolutions, executed_ops, installed_runtimes, onnx_session, open_session
from repq.deploy.runtimes import openvino_session, run_onnx, run_outputs
from repq.deploy.targets import LayerShape, estimated_speed, fastest_form
from repq.deploy.tensorrt import check_tensorrt
from repq.quantization.network import merge, quantize, recalibrate
from repq.tools.testing import assert_same, randomize_bn

RUNTIMES = ['onnxruntime', pytest.param('openvino', marks=pytest.mark.skipif(
    'openvino' not in installed_runtimes(), reason='openvino is not installed: pip install repq[openvino]'))]
MODELS = {'repvgg_a0': ((3, 32, 32), dict(n_classes=10, width=.25)),
          'resnet18': ((3, 32, 32), dict(n_classes=10, width=.25)),
          'ecbsr': ((1, 16, 16), dict(blocks=2))}


def settled(net, x, bits=8, **kwargs):
    "A quantized network with random norms whose quantizers have seen data"
    quantize(randomize_bn(net), bits, bits, **kwargs, start='first')
    for _ in range(2): net(x)
    return recalibrate(net.eval(), [x], 'ranges')


def exported(net, path, x, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='repq: in ONNX Runtime')   # small networks are slow, and it says so
        return repq.export_onnx(net, path, x, **kwargs)


def assert_parity(net, path, x, runtime='onnxruntime', **limits):
    "Layer by layer equal but for ties, fewer than 1 in 1,000; the same at the end"
    report = repq.check_parity(net, path, [x], runtime=runtime, **limits)
    assert report.ok, report
    assert all(s.largest <= 1 and set(s.why) <= {'rounding tie'} for s in report.stations), report
    assert sum(s.numbers for s in report.stations) > 100
    assert report.versions['runtime'] == runtime and report.versions['processor'] and report.versions[runtime]
    return report


def forms(path): return {l['name']: l['form'] for l in file_layers(onnx.load(path))}


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('target', ['onnxruntime', 'openvino', 'tensorrt'])
@pytest.mark.parametrize('model', MODELS)
def test_every_target_in_every_runtime(tmp_path, model, target, runtime):
    "Other batch and size than the example's"
    shape, kwargs = MODELS[model]
    net, x = repq.models.build_model(model, **kwargs), torch.randn(4, *shape)
    settled(net, x, target=target)
    path = exported(net, tmp_path/'net.onnx', torch.randn(1, shape[0], 24, 40), target=target)
    assert_parity(net, path, x, runtime)
    props = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert props['repq.target'] == target


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('block', BLOCKS)
def test_every_block_for_tensorrt(tmp_path, model, block):
    "The file keeps every rule that TensorRT's documentation has, and computes what the network computes"
    shape, kwargs = MODELS[model]
    net, x = repq.models.build_model(model, block=block, **kwargs | (dict(width=.125) if 'width' in kwargs else {})), torch.randn(4, *shape)
    settled(net, x, target='tensorrt')
    path = exported(net, tmp_path/'net.onnx', x[:1], target='tensorrt')
    assert check_tensorrt(path) == []
    assert_parity(net, path, x, end_to_end_error=.1, top1=.5)      # random weights amplify a tie
    kinds = {t.data_type for t in onnx.load(path).graph.initializer if t.name.endswith('.bias')}
    assert kinds == {onnx.TensorProto.FLOAT}
    for target in ('onnxruntime', 'openvino'):                     # which are no files for TensorRT
        assert check_tensorrt(exported(net, tmp_path/'other.onnx', x[:1], target=target))


def test_openvino_runs_every_layer_on_bytes(tmp_path):
    pytest.importorskip('openvino')
    for model, (shape, kwargs) in MODELS.items():
        net, x = repq.models.build_model(model, **kwargs), torch.randn(4, *shape)
        path = exported(settled(net, x), tmp_path/'net.onnx', x[:1], target='openvino')
        found = executed_convolutions(openvino_session(path))
        assert set(found) <= {'u8', 'i8'} and found.total() == len(forms(path)), (model, found)
        assert not {n.op_type for n in onnx.load(path).graph.node} & {'MatMulInteger', 'ConvInteger', 'QLinearConv'}


SLOPES = {'positive': [.25]*8, 'all kinds': [-.5, -.1, 0., .2, .5, 1., 1.5, 3.], 'one for all': [.1], 'steep': [2.]*8}


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('bits', [8, 4])
@pytest.mark.parametrize('slopes', SLOPES)
def test_prelu_inside_the_layer(tmp_path, slopes, bits, runtime):
    "Twice the channels and a Max of bytes are the PReLU, whatever its slopes"
    act, x = nn.PReLU(len(SLOPES[slopes])), torch.randn(4, 3, 12, 13)
    with torch.no_grad(): act.weight.copy_(torch.tensor(SLOPES[slopes]))
    net = settled(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), act, nn.Conv2d(8, 8, 3), nn.LeakyReLU(.2), nn.Conv2d(8, 4, 1)), x, bits)
    path = exported(net, tmp_path/'net.onnx', x[:1], packed=bits == 4)
    assert list(forms(path).values()) == ['doubled', 'doubled', 'float']
    assert_parity(net, path, x, runtime)
    if runtime == 'onnxruntime':
        ops = executed_ops(path)
        assert ops['QLinearConv'] == 2 and not {'PRelu', 'LeakyRelu'} & set(ops)
        assert ops['Min'] == (max(SLOPES[slopes]) > 1)


class PReLUAndMore(nn.Module):
    "A PReLU that others read too, and one with slopes that the network computes"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.act = nn.PReLU(8)
    def forward(self, x):
        y = self.act(self.a(x))
        z = self.b(y)
        return self.c(F.prelu(z, x.mean((0, 2, 3)))) + y


def test_prelu_that_stays(tmp_path):
    x = torch.randn(4, 8, 12, 12)
    net = settled(PReLUAndMore(), x)
    path = exported(net, tmp_path/'net.onnx', x[:1])
    assert 'doubled' not in forms(path).values()
    assert_parity(net, path, x)


@pytest.mark.parametrize('end', ['requantized', 'float'])
def test_grouped_layers_keep_their_steps(tmp_path, end):
    "In float, with one step for each channel: ONNX Runtime does not quantize the weights anew"
    x = torch.randn(4, 16, 12, 12)
    middle = nn.Conv2d(16, 16, 3, padding=1, groups=4)
    with torch.no_grad(): middle.weight[:4] *= 100                 # one step for all would lose the other channels
    net = settled(nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), middle, nn.ReLU() if end == 'requantized' else nn.SiLU(), nn.Conv2d(16, 16, 1)), x)
    path = exported(net, tmp_path/'net.onnx', x[:1])
    assert forms(path)['2'] == 'float'
    assert_parity(net, path, x)
    ops = executed_ops(path)
    assert ops['Conv'] + ops['FusedConv'] >= 1 and ops['QLinearConv'] <= 1


def test_signed_codes_before_a_float_layer(tmp_path):
    "Codes with a zero point, cast, and a quantizer behind the layer"
    x = torch.randn(4, 16, 12, 12)
    net = settled(nn.Sequential(nn.Conv2d(16, 16, 3, groups=4), nn.ReLU(), nn.Conv2d(16, 4, 1)), x)
    path = exported(net, tmp_path/'net.onnx', x[:1])
    assert 'Sub' in {n.op_type for n in onnx.load(path).graph.node} and forms(path)['0'] == 'float'
    assert_parity(net, path, x)


class Parts(nn.Module):
    "Several outputs, a concatenation, an upsampling, a linear layer in four dimensions"
    def __init__(self):
        super().__init__()
        self.down, self.up, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(19, 16, 3, padding=1), nn.Conv2d(16, 5, 1)
        self.box, self.mlp = nn.Conv2d(16, 4, 1), nn.Linear(16, 6)
    def forward(self, x):
        y = F.relu(self.down(x))
        z = F.relu(self.up(torch.cat([F.interpolate(y, scale_factor=2), x], 1)))
        return dict(scores=self.head(z), boxes=[self.box(y), self.box(z)], features=self.mlp(z.permute(0, 2, 3, 1)))


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('target', ['onnxruntime', 'openvino', 'tensorrt'])
def test_several_outputs(tmp_path, target, runtime):
    "Each is compared, at other sizes than the example's"
    if (target, runtime) == ('tensorrt', 'openvino'):
        pytest.skip('OpenVINO 2026.4 gets a concatenation before signed bytes wrong: test_a_fault_of_openvino')
    net = settled(Parts(), torch.randn(4, 3, 16, 24), target=target)
    path = exported(net, tmp_path/'net.onnx', torch.randn(1, 3, 32, 32), target=target)
    for x in (torch.randn(2, 3, 16, 24), torch.randn(3, 3, 40, 20)):
        report = assert_parity(net, path, x, runtime)
        assert list(report.end_to_end['more']) == ['boxes.0', 'boxes.1', 'features']
    assert list(run_outputs(open_session(path, runtime), x)) == ['scores', 'boxes.0', 'boxes.1', 'features']


def test_a_fault_of_openvino(tmp_path):
    "A concatenation in front of signed bytes, which only TensorRT's files have: right, or parity fails and says so"
    pytest.importorskip('openvino')
    net, x = settled(Parts(), torch.randn(4, 3, 16, 24), target='tensorrt'), torch.randn(2, 3, 16, 24)
    path = exported(net, tmp_path/'net.onnx', x, target='tensorrt')
    assert_parity(net, path, x)
    report = repq.check_parity(net, path, [x], runtime='openvino')
    wrong = not torch.allclose(run_outputs(openvino_session(path), x)['scores'], net(x)['scores'], atol=1e-2)
    assert report.ok != wrong


@pytest.mark.parametrize('runtime', RUNTIMES)
def test_a_changed_file_fails_in_every_runtime(tmp_path, runtime):
    x = torch.randn(4, 3, 16, 16)
    net = settled(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.SiLU(), nn.Conv2d(16, 4, 1)), x)
    path = exported(net, tmp_path/'net.onnx', x[:1], target='openvino')
    model = onnx.load(path)
    step = next(t for t in model.graph.initializer if t.name == '2.weight_step')
    step.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(step)*1.3, step.name))
    onnx.save(model, path)
    report = repq.check_parity(net, path, [x], runtime=runtime)
    assert not report.ok and 'weight step' in report.failures()[0] and report.stations[2].error > .05


def test_zero_that_is_added(tmp_path):
    "Nothing is left of `0 + x`, which blocks without a branch compute, and the layer before stays on bytes"
    class Zero(nn.Module):
        def forward(self, x): return 0 + x + 0.
    class Later(nn.Module):
        def forward(self, x): y = x + 0; y.relu_(); return x - y
    x = torch.randn(4, 16, 9, 9)
    net = settled(nn.Sequential(nn.Conv2d(16, 16, 3), Zero(), nn.ReLU(), nn.Conv2d(16, 16, 1)), x)
    path = exported(net, tmp_path/'net.onnx', x[:1])
    assert executed_ops(path)['QLinearConv'] == 1 and 'constant' not in {t.name for t in onnx.load(path).graph.initializer}
    assert_parity(net, path, x)
    assert_same(run_onnx(onnx_session(repq.export_onnx(Later().eval(), path, x)), x), Later()(x), 1e-6)


def test_rule():
    "The form of a layer in ONNX Runtime, and whether a network can be faster than float32"
    wide, narrow, deep = LayerShape(64, 64, 9), LayerShape(8, 8, 9), LayerShape(64, 64, 9, 64)
    assert [fastest_form(s, True) for s in (wide, narrow, deep, LayerShape(64, 64, 9, 4), LayerShape(64, 64, 49, 64))] == ['qdq', 'float', 'qdq', 'float', 'float']
    assert [fastest_form(s, False) for s in (wide, narrow, deep, LayerShape(3, 64, 49), LayerShape(32, 32))] == ['integer'] + ['float']*4
    assert fastest_form(narrow, False, True) == 'doubled' and fastest_form(deep, False, True) == 'float'
    assert estimated_speed([(wide, 'qdq', 100)]) > 2 > 1 > estimated_speed([(deep, 'qdq', 100)])
    assert estimated_speed([]) == 1


def test_slow_file_is_announced(tmp_path):
    "A network of depthwise layers is slower than float32 in ONNX Runtime; a wide one, ECBSR and other targets are not"
    x = torch.randn(2, 16, 16, 16)
    net = settled(nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(3)]), x)
    with pytest.warns(UserWarning, match="times the speed of float32.*target='openvino'"): repq.export_onnx(net, tmp_path/'net.onnx', x)
    wide = settled(nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)), x)
    sr, low = repq.models.ecbsr(blocks=4, channels=8, scale=2), torch.rand(2, 1, 24, 24)*255
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        repq.export_onnx(net, tmp_path/'net.onnx', x, target='openvino')
        repq.export_onnx(wide, tmp_path/'net.onnx', x)
        repq.export_onnx(settled(sr, low), tmp_path/'net.onnx', low)


def test_old_argument(tmp_path):
    "integer= is a target for one release"
    x = torch.randn(2, 3, 16, 16)
    net = settled(nn.Sequential(nn.Conv2d(3, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 3)), x)
    for integer, target in ((True, 'onnxruntime'), (False, 'openvino')):
        with pytest.warns(DeprecationWarning, match=f"integer={integer} is now target='{target}'"):
            old = repq.export_onnx(net, tmp_path/'old.onnx', x, integer=integer)
        assert old.read_bytes() == repq.export_onnx(net, tmp_path/'new.onnx', x, target=target).read_bytes()


def small(*middle): return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *middle, nn.Conv2d(16, 8, 3))
def with_nan():
    net = settled(small(), torch.randn(2, 3, 16, 16))
    with torch.no_grad(): net[0].branch.weight[0, 0, 0, 0] = float('nan')
    return net
def cubic(): return settled(small(nn.Upsample(scale_factor=2, mode='bicubic')), torch.randn(2, 3, 16, 16), target='tensorrt')
def for_any(bits=8): return settled(small(), torch.randn(2, 3, 16, 16), bits)

REFUSED = {
    'unknown target': (for_any, dict(target='coreml'), 'target must be one of .*got .coreml.'),
    'not initialised': (lambda: quantize(small(), 8, 8).eval(), {}, 'never initialised'),
    'not a network': (lambda: 3, {}, 'takes a torch.nn.Module'),
    'training': (lambda: for_any().train(), {}, 'in training mode'),
    'NaN in a weight': (with_nan, {}, 'not finite|NaN'),
    'NaN in a weight, tensorrt': (with_nan, dict(target='tensorrt'), 'not finite|NaN'),
    'trained on 0..255': (for_any, dict(target='tensorrt'), r"its input was trained on 0..255, .*repq.QAT\(8, 8, target='tensorrt'\).*or export with target='onnxruntime'"),
    '4 bits': (lambda: for_any(4), dict(target='tensorrt'), '4 bits, and tensorrt multiplies integers of 8 bits only'),
    'operator': (cubic, dict(target='tensorrt'), 'TensorRT cannot load this network: .*mode cubic'),
    'packed': (cubic, dict(target='tensorrt', packed=True), 'TensorRT has 8-bit weights only'),
}


@pytest.mark.parametrize('kind', REFUSED)
def test_refused_and_no_file_left(tmp_path, kind):
    make, kwargs, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message): repq.export_onnx(make(), tmp_path/'net.onnx', torch.randn(1, 3, 16, 16), **kwargs)
    assert not list(tmp_path.iterdir())


def test_merge_refuses_a_nan():
    with pytest.raises(ValueError, match='NaN or infinite'): merge(with_nan())


def test_runtime_that_is_not_there(tmp_path, monkeypatch):
    "An unknown one, and one that is not installed: said before anything runs"
    net, x = for_any(), torch.randn(2, 3, 16, 16)
    path = exported(net, tmp_path/'net.onnx', x)
    with pytest.raises(ValueError, match="runtime must be one of 'onnxruntime', 'openvino', got 'tflite'"): repq.check_parity(net, path, [x], runtime='tflite')
    def missing(name): raise ImportError(name)
    monkeypatch.setattr(operators, 'import_module', missing)
    with pytest.raises(ImportError, match=r'pip install repq\[openvino\]'): repq.check_parity(net, path, [x], runtime='openvino')
    assert installed_runtimes() == {}


def test_bits_and_targets_in_training():
    "quantize and QAT refuse bits and targets that do not fit, before they change the network"
    for target, bits, message in (('tensorrt', 4, 'TensorRT multiplies integers of 8 bits only'), ('coreml', 8, 'target must be one of')):
        net = small()
        with pytest.raises(ValueError, match=message): repq.quantize(net, bits, bits, exceptions=None, target=target)
        assert type(net[0]) is nn.Conv2d
        with pytest.raises(ValueError, match=message): repq.QAT(bits, bits, target=target)


def test_signed_bytes_survive_everything(tmp_path):
    "State dicts, other bits and back, another family, files of merged networks"
    x = torch.randn(4, 3, 16, 16)
    net = settled(small(), x, target='tensorrt')
    again = quantize(small(), 8, 8, start='first').eval()
    again.load_state_dict(net.state_dict())
    assert_same(again(x).detach(), net(x).detach(), 0.)
    q = net[2].input_quantizer
    assert (q.qmin, q.qmax) == (0, 127) and (net[0].input_quantizer.qmin, net[0].input_quantizer.qmax) == (-128, 127)
    assert again[2].input_quantizer.qmax == 127 and merge(again)[2].quantize.qmax == 127
    assert check_tensorrt(exported(merge(net), tmp_path/'net.onnx', x, target='tensorrt')) == []


@pytest.fixture(scope='module')
def digits():
    "A network trained for a few seconds on the digits of scikit-learn, quantized for each target, and 1,000 images"
    data = pytest.importorskip('sklearn.datasets').load_digits()
    x, y = torch.tensor(data.images).float().unsqueeze(1)/16, torch.tensor(data.target)
    def train(net, steps, lr):
        opt = torch.optim.SGD(repq.parameter_groups(net.train(), lr), momentum=.9)
        for _ in range(steps):
            rows = torch.randint(0, 1500, (64,))
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            opt.step(); opt.zero_grad()
        return recalibrate(net, [x[:1500]]).eval()
    def make(): return repq.models.repvgg_a0(10, width=.25, depth=.2, in_channels=1, small_input=True)
    torch.manual_seed(0)
    first = train(make(), 80, .05)
    found = {}
    for target in ('onnxruntime', 'openvino', 'tensorrt'):
        net = make()
        net.load_state_dict(first.state_dict())
        found[target] = train(quantize(net, 8, 8, target=target, start='first'), 15, .005)
    return found, x[:1000], y[:1000]


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('target', ['onnxruntime', 'openvino', 'tensorrt'])
def test_decisions_of_a_trained_network(tmp_path, digits, target, runtime):
    "Top-1 agrees on at least 99.5% of 1,000 images, and the network has learned something"
    nets, x, y = digits
    path = exported(nets[target], tmp_path/'net.onnx', x[:1], target=target)
    report = repq.check_parity(nets[target], path, [(a, b) for a, b in zip(x.split(250), y.split(250))], runtime=runtime)
    end = report.end_to_end
    assert report.ok and end['images'] == 1000 and end['top1_agreement'] >= .995 and end['accuracy'] > .8, report
    assert json.loads(report.to_json())['versions']['runtime'] == runtime
