"Calls as operators of ONNX, several inputs and outputs, and networks of other people as files"
import copy, random, re, warnings
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple
import pytest, torch
from torch import nn, Tensor
import torch.nn.functional as F
onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
from safetensors.torch import save as to_bytes
import repq
from conftest import PROVEN
from repq.cli.command import main
from repq.deploy.export import onnx_session, run_outputs
from repq.reproduce.training import data_of
from repq.tools.testing import randomize_bn
from repq.reproduce.records import to_words
from repq.reproduce.training import full_precision_network, quantized_network, save_tensors


class Calls(nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, x): return self.f(x)


def in_place_and_read_again(x):
    y = x*1
    return F.mish(y, inplace=True) + y


def shuffled(x): return x.view(x.size(0), 2, 3, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
def focus(x): return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
def gated(x): a, b = x.chunk(2, 1); return a*b.sigmoid()
def to_the_size_of(x): return F.interpolate(F.max_pool2d(x, 2), size=x.shape[-2:], mode='bilinear')


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x): return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class StandardizedConv(nn.Conv2d):
    "What is computed from weights alone is a constant of the file"
    def forward(self, x): return F.conv2d(x, (self.weight - self.weight.mean((1, 2, 3), keepdim=True))/self.weight.std((1, 2, 3), keepdim=True), self.bias)


FREE = { # at any size
    'upsample to a size': nn.Upsample(size=(13, 7)), 'upsample bilinear': nn.Upsample(scale_factor=1.7, mode='bilinear'),
    'upsample, corners aligned': nn.Upsample(scale_factor=(2, 1.5), mode='bilinear', align_corners=True), 'to a size of another': to_the_size_of,
    'upsample nearest': lambda x: F.interpolate(F.max_pool2d(x, 2), x.shape[2:]), 'by a fraction': lambda x: F.interpolate(x, scale_factor=1.7),
    'downsample': lambda x: F.interpolate(x, scale_factor=.5, mode='bilinear', align_corners=False), 'to one number': lambda x: F.interpolate(x, 9),
    'nearest-exact': lambda x: F.interpolate(x, size=(11, 5), mode='nearest-exact'), 'bicubic': lambda x: F.interpolate(x, scale_factor=2, mode='bicubic'),
    'to a size computed': lambda x: F.interpolate(x, size=(x.shape[2]*2, x.size(3)//2 + 1), mode='bilinear', align_corners=True),
    'UpsamplingBilinear2d': nn.UpsamplingBilinear2d(scale_factor=2), 'UpsamplingNearest2d': nn.UpsamplingNearest2d(scale_factor=3),
    'max pool to 1': nn.AdaptiveMaxPool2d(1), 'avg pool to 1': nn.AdaptiveAvgPool2d((1, 1)),
    'GroupNorm': nn.GroupNorm(3, 6), 'GroupNorm(1)': nn.GroupNorm(1, 6), 'InstanceNorm2d': nn.InstanceNorm2d(6), 'InstanceNorm2d, affine': nn.InstanceNorm2d(6, affine=True),
    'InstanceNorm2d, tracking': nn.InstanceNorm2d(6, track_running_stats=True), 'BatchNorm2d without statistics': nn.BatchNorm2d(6, track_running_stats=False),
    'BatchNorm2d, not affine': nn.BatchNorm2d(6, affine=False), 'LayerNorm2d': LayerNorm2d(6), 'LocalResponseNorm': nn.LocalResponseNorm(3), 'layer_norm': lambda x: F.layer_norm(x.flatten(2).transpose(1, 2), (6,)),
    'ELU': nn.ELU(.7), 'SELU': nn.SELU(), 'CELU': nn.CELU(.6), 'Softplus': nn.Softplus(2.), 'Mish': nn.Mish(), 'GLU': nn.GLU(1), 'LogSigmoid': nn.LogSigmoid(),
    'Hardtanh': nn.Hardtanh(), 'Softsign': nn.Softsign(), 'LogSoftmax': nn.LogSoftmax(1), 'Tanhshrink': nn.Tanhshrink(), 'PReLU': nn.PReLU(),
    'activations in place': nn.Sequential(nn.Mish(inplace=True), nn.ELU(inplace=True), nn.SiLU(inplace=True)), 'read again': in_place_and_read_again,
    'ConvTranspose2d': nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), 'ConvTranspose2d, grouped': nn.ConvTranspose2d(6, 4, (2, 3), (2, 1), groups=2, bias=False),
    'conv1d': lambda x: F.conv1d(x.mean(2), torch.ones(6, 6, 3), padding=1), 'weights standardized': StandardizedConv(6, 4, 3),
    'conv, reflect': nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect'), 'conv, circular': nn.Conv2d(6, 6, 3, padding=1, padding_mode='circular'), 'conv, replicate': nn.Conv2d(6, 6, 3, padding=1, padding_mode='replicate'),
    'pad': lambda x: F.pad(x, (1, 2, 0, 3), value=.5), 'pad reflect': nn.ReflectionPad2d((1, 2, 3, 4)), 'pad zeros': nn.ZeroPad2d((1, 0, 2, 1)), 'crop': lambda x: F.pad(x, (-1, 2, 0, -3)), 'pad channels': lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
    'transpose': lambda x: x.transpose(1, -1), 'movedim': lambda x: x.movedim(1, -1), 'T': lambda x: x.mean((2, 3)).T, 'mT': lambda x: x.mT, 'swapaxes': lambda x: torch.swapaxes(x, 2, 3),
    'chunk': gated, 'split by sizes': lambda x: torch.cat(x.split([1, 2, 3], 1)[::-1], 1), 'split': lambda x: torch.cat([t*i for i, t in enumerate(torch.split(x, 4, dim=1))], 1), 'unbind': lambda x: sum(x.unbind(1)),
    'x[:, 0]': lambda x: x[:, 0], 'slices': lambda x: x[:, 1:5:2, ..., -1], 'None': lambda x: x[:, None, :, 2:-1], 'steps': lambda x: x[..., ::2, 1::2], 'list': lambda x: x[:, [0, 3, 1]], 'to the half': lambda x: x[:, :, :x.shape[2]//2],
    'rounded up': lambda x: x[:, :, :-(-x.shape[2]//3)], 'indices': lambda x: x[:, torch.tensor([5, 0])], 'focus': focus, 'flip': lambda x: x.flip(-1), 'narrow': lambda x: x.narrow(1, 1, 3), 'select': lambda x: x.select(1, 2),
    'expand': lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, x.shape[2], x.shape[3]), 'expand_as': lambda x: x.mean(1, keepdim=True).expand_as(x), 'repeat': lambda x: x.repeat(1, 2, 1, 3), 'repeat in front': lambda x: x.repeat(2, 1, 1, 1, 1),
    'stack': lambda x: torch.stack([x, x*2], -1), 'squeeze': lambda x: x.mean((2, 3), keepdim=True).squeeze(-1).squeeze(2).unsqueeze(1), 'squeeze all': lambda x: x.mean(1, keepdim=True).squeeze(1),
    'matmul': lambda x: x@x.transpose(2, 3), 'bmm': lambda x: torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2)), 'einsum': lambda x: torch.einsum('bchw,bkhw->bck', x, x.relu()), 'attention': lambda x: F.scaled_dot_product_attention(x, x, x),
    'sum': lambda x: x.sum((1, 2)), 'sum of all': lambda x: x*x.sum(), 'amax': lambda x: x.amax((2, 3), keepdim=True), 'max': lambda x: x.max(1)[0], 'values': lambda x: x.max(1, keepdim=True).values, 'minimum': lambda x: torch.min(x, 2*x),
    'std': lambda x: x.std((2, 3)), 'var': lambda x: x.var(1, unbiased=False), 'axis': lambda x: x.sum(axis=1, keepdims=True), 'mean of all': lambda x: x.mean(), 'argmax': lambda x: x.argmax(1),
    'powers': lambda x: (x.abs() + 1)**.3 + x**2 + 2**x, 'roots': lambda x: (x*x).sqrt() + (x*x + 1).rsqrt() + torch.rsub(x, 1), 'reversed': lambda x: 1 - x/2 + 3/(x.abs() + 1) - (-x), 'alpha': lambda x: torch.add(x, x.relu(), alpha=2) - x.sub(1, alpha=.5),
    'by a size': lambda x: x.sum((2, 3))/(x.shape[2]*x.shape[3]), 'remainder': lambda x: x % .7, 'remainder of a size': lambda x: x*(x.shape[2] % 3 + 1), 'floor': lambda x: torch.div(x, .3, rounding_mode='floor'), 'norms': lambda x: F.normalize(x, dim=1) + x.norm(dim=1, keepdim=True),
    'types': lambda x: x.to(torch.float32).float().type_as(x) + x.long().float(), 'unflatten': lambda x: x.unflatten(1, (2, 3)), 'PixelUnshuffle': nn.PixelUnshuffle(2), 'ChannelShuffle': nn.ChannelShuffle(3), 'shuffle by hand': shuffled,
    'dropout': lambda x: F.dropout(x, .5, training=False), 'made on the device': lambda x: x*torch.linspace(0, 1, 6, device=x.device, dtype=x.dtype)[:, None, None] + x.new_tensor([1.]), 'zeros': lambda x: torch.cat([x, torch.zeros_like(x), x.new_zeros(x.shape)], 1),
}
FIXED = { # at the size of the example
    'recompute_scale_factor': lambda x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=True), 'bilinear, recomputed': lambda x: F.interpolate(x, scale_factor=1.3, recompute_scale_factor=True, mode='bilinear'),
    'area': lambda x: F.interpolate(x, size=(5, 7), mode='area'), 'max pool to 7': nn.AdaptiveMaxPool2d(7), 'avg pool to 7': nn.AdaptiveAvgPool2d(7), 'avg pool that divides': nn.AdaptiveAvgPool2d((4, 5)), 'one side': nn.AdaptiveAvgPool2d((None, 3)),
    'to a line': nn.AdaptiveAvgPool2d((1, None)), 'chunks of the height': lambda x: torch.cat(x.chunk(2, 2), 3), 'branch on a size': lambda x: x if x.shape[2] > 10 else -x,
}
X = torch.randn(2, 6, 16, 20)


def sizes_of(path): return [[d.dim_param or d.dim_value for d in t.type.tensor_type.shape.dim] for t in onnx.load(path).graph.input]


@pytest.mark.parametrize('name', FREE | FIXED)
def test_calls(tmp_path, name):
    "In full precision, at another batch and, if the file allows it, at another size"
    f = (FREE | FIXED)[name]
    net = randomize_bn(f if isinstance(f, nn.Module) else Calls(f)).eval()
    path = repq.export_onnx(net, tmp_path/'net.onnx', X)
    assert sizes_of(path) == [['batch', 6, 'height', 'width'] if name in FREE else ['batch', 6, 16, 20]]
    batches = [torch.randn(3, 6, 16, 20), torch.randn(1, 6, 22, 34)][:1 + (name in FREE)]
    report = repq.check_parity(net, path, batches, error=1e-5, end_to_end_error=1e-5)
    assert report.ok, report


class Scores(NamedTuple):
    logits: Tensor
    features: tuple


@dataclass
class Detection:
    boxes: Tensor
    levels: list


OUTPUTS = {
    'tuple': (lambda x: (x, [x*2, None, {'a': x + 1}]), ['output.0', 'output.1.0', 'output.1.2.a']),
    'dict': (lambda x: dict(out=x.mean((2, 3)), aux=x), ['out', 'aux']),
    'a key like the input': (lambda x: dict(input=x, output=x*2), ['output.input', 'output']),
    'dataclass': (lambda x: Detection(x, [x, x*2]), ['boxes', 'levels.0', 'levels.1']),
    'named tuple': (lambda x: Scores(x.mean((2, 3)), (x, x.relu())), ['logits', 'features.0', 'features.1']),
    'parts': (lambda x: x.split(2, 1), ['output.0', 'output.1', 'output.2']),
    'the same twice': (lambda x: [x, x], ['output.0', 'output.1']),
    'integers too': (lambda x: (x, x.argmax(1)), ['output.0', 'output.1']),
    'one in a list': (lambda x: [x.relu()], ['output.0']),
}


@pytest.mark.parametrize('name', OUTPUTS)
def test_outputs(tmp_path, name):
    "Each tensor has a name, and each is compared: a change in the last one fails"
    f, names = OUTPUTS[name]
    net = Calls(f).eval()
    path = repq.export_onnx(net, tmp_path/'net.onnx', X)
    assert list(run_outputs(onnx_session(path), X)) == names
    report = repq.check_parity(net, path, [X, X[:1]])
    assert report.ok and len(report.end_to_end.get('more', ())) == len(names) - 1, report
    assert all(n in report.to_json() for n in names[1:])
    model = onnx.load(path)
    last = model.graph.node[-1]
    assert list(last.output) == names[-1:]
    if name == 'integers too': return
    last.op_type = 'Neg'
    onnx.save(model, path)
    report = repq.check_parity(net, path, [X])
    assert not report.ok and (len(names) == 1 or f'output {names[-1]!r}' in str(report.failures())), report


def test_other_outputs_than_the_file(tmp_path):
    path = repq.export_onnx(Calls(lambda x: (x, x)).eval(), tmp_path/'net.onnx', X)
    with pytest.raises(ValueError, match='the file gives output.0, output.1, the network output: was the file exported from this network'):
        repq.check_parity(Calls(lambda x: x).eval(), path, [X])


class TwoInputs(nn.Module):
    def __init__(self): super().__init__(); self.conv = nn.Conv2d(6, 6, 3, padding=1); self.film = nn.Linear(5, 6)
    def forward(self, image, condition, scale=2.): return self.conv(image)*self.film(condition)[..., None, None]*scale


def test_several_inputs(tmp_path):
    net, x, c = TwoInputs().eval(), torch.randn(3, 6, 9, 9), torch.randn(3, 5)
    path = repq.export_onnx(net, tmp_path/'net.onnx', (X, torch.randn(2, 5)))
    assert sizes_of(path) == [['batch', 6, 'image_2', 'image_3'], ['batch', 5]]
    assert repq.check_parity(net, path, [(x, c)]).ok
    with pytest.raises(ValueError, match='the network takes 2 inputs, a batch has 1'): repq.check_parity(net, path, [x])


def torchvision(name, family='models', **kwargs):
    "A network of torchvision without pretrained weights"
    module = pytest.importorskip(f'torchvision.{family}')
    return getattr(module, name)(**{'num_classes': 6} | kwargs)


def timm(name, num_classes=6, **kwargs): return pytest.importorskip('timm').create_model(name, num_classes=num_classes, **kwargs)


def fastai_head(**kwargs):
    "What `vision_learner` trains: a body, AdaptiveConcatPool2d, BatchNorm1d, Dropout and Linear"
    learner = pytest.importorskip('fastai.vision.learner')
    return learner.create_vision_model(pytest.importorskip('torchvision.models').resnet18, 6, pretrained=False, **kwargs)


FAST, SLOW = {
    'torchvision resnet18': (lambda: torchvision('resnet18'), 64),
    'torchvision shufflenet_v2_x0_5': (lambda: torchvision('shufflenet_v2_x0_5'), 64),
    'torchvision lraspp': (lambda: torchvision('lraspp_mobilenet_v3_large', 'models.segmentation', weights_backbone=None), 64),
    'timm repvgg_a0': (lambda: timm('repvgg_a0'), 64),
    'timm mobileone_s0': (lambda: timm('mobileone_s0'), 64),
    'fastai head': (fastai_head, 64),
}, {
    'torchvision mobilenet_v3_small': (lambda: torchvision('mobilenet_v3_small'), 64),
    'torchvision convnext_tiny': (lambda: torchvision('convnext_tiny'), 64),
    'torchvision densenet121': (lambda: torchvision('densenet121'), 64),
    'torchvision efficientnet_b0': (lambda: torchvision('efficientnet_b0'), 64),
    'torchvision regnet_y_400mf': (lambda: torchvision('regnet_y_400mf'), 64),
    'torchvision vgg11_bn': (lambda: torchvision('vgg11_bn'), 64),
    'torchvision squeezenet1_1': (lambda: torchvision('squeezenet1_1'), 64),
    'torchvision googlenet': (lambda: torchvision('googlenet', init_weights=False, aux_logits=False), 64),
    'torchvision inception_v3': (lambda: torchvision('inception_v3', init_weights=False, aux_logits=False), 96),
    'torchvision fcn_resnet50': (lambda: torchvision('fcn_resnet50', 'models.segmentation', weights_backbone=None, aux_loss=True), 64),
    'torchvision deeplabv3_mobilenet': (lambda: torchvision('deeplabv3_mobilenet_v3_large', 'models.segmentation', weights_backbone=None), 64),
    'timm fastvit_t8': (lambda: timm('fastvit_t8'), 64),
    'timm repvit_m0_9': (lambda: timm('repvit_m0_9'), 64),
    'timm repghostnet_050': (lambda: timm('repghostnet_050'), 64),
    'timm convnext_atto': (lambda: timm('convnext_atto'), 64),
    'timm convnextv2_atto': (lambda: timm('convnextv2_atto'), 64),
    'timm mobilenetv4_conv_small': (lambda: timm('mobilenetv4_conv_small'), 64),
    'timm tf_efficientnet_lite0': (lambda: timm('tf_efficientnet_lite0'), 64),
    'timm ghostnet_050': (lambda: timm('ghostnet_050'), 64),
    'timm hardcorenas_a': (lambda: timm('hardcorenas_a'), 64),
    'timm eca_resnet33ts': (lambda: timm('eca_resnet33ts'), 64),
    'timm nf_regnet_b0': (lambda: timm('nf_regnet_b0'), 64),
    'timm resnetv2_50': (lambda: timm('resnetv2_50'), 64),
    'timm res2net50_14w_8s': (lambda: timm('res2net50_14w_8s'), 64),
    'timm hrnet_w18_small': (lambda: timm('hrnet_w18_small'), 64),
    'timm dla34': (lambda: timm('dla34'), 64),
    'timm cspdarknet53': (lambda: timm('cspdarknet53'), 64),
    'timm levit_128s': (lambda: timm('levit_128s', img_size=64), 64),
    'timm mobilevit_xxs': (lambda: timm('mobilevit_xxs'), 64),
    'timm poolformer_s12': (lambda: timm('poolformer_s12'), 64),
    'timm features': (lambda: timm('resnet18', num_classes=0, features_only=True), 64),
}
NETWORKS = FAST | SLOW


def calibrated(name, bits=8):
    "A network with random norms, converted where it can be, quantized, its ranges from data; and a batch"
    make, size = NETWORKS[name]
    net, x = make(), torch.randn(2, 3, size, size)
    for _ in range(3): randomize_bn(net).train()(x)
    net.eval()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        if any(n in name for n in ('repvgg', 'mobileone', 'fastvit', 'repvit', 'repghost')): net = repq.convert(net)
        repq.quantize(net, bits, bits)
        repq.recalibrate(net, [x], 'ranges')
    return net.eval(), x


@pytest.mark.parametrize('name', NETWORKS)
def test_networks(tmp_path, name, request):
    "The file of a quantized network agrees with it, layer by layer and at every output"
    if name in SLOW and not request.config.getoption('--slow'): pytest.skip('large: pytest --slow')
    net, x = calibrated(name)
    report = repq.check_parity(net, repq.export_onnx(repq.merge(net), tmp_path/'net.onnx', x[:1]), [x])
    assert report.ok, '\n'.join(report.summary())
    assert sum(s.numbers for s in report.stations) > 1000
    if 'fcn' in name: assert list(report.end_to_end['more']) == ['aux']
    if 'features' in name: assert len(report.end_to_end['more']) == 4


def test_a_network_that_cannot_be_traced(tmp_path):
    "fastai's DynamicUnet hands stand-ins to hooks that take only tensors: an error with the layer, and no file"
    learner = pytest.importorskip('fastai.vision.learner')
    net = learner.create_unet_model(pytest.importorskip('torchvision.models').resnet18, 4, (64, 64), pretrained=False).eval()
    with pytest.raises(ValueError, match=r'layers\.0.* cannot be traced'): repq.export_onnx(net, tmp_path/'net.onnx', torch.randn(1, 3, 64, 64))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope='module')
def weights():
    "The tensors and the description of a small quantized network, as a run of the smoke profile leaves them"
    settings = pytest.importorskip('repq.reproduce.runs').SETTINGS['smoke']['repvgg']
    settings = settings | dict(network=dict(width=.125, depth=.1, small_input=True, in_channels=1), lr=.1)
    run = dict(task='classify', model='repvgg_a0', block='repvgg', strategy='repq', statistics='', bits=8, seed=0, settings=settings)
    torch.manual_seed(0)
    net = quantized_network(randomize_bn(full_precision_network('repvgg_a0', 'repvgg', n_classes=10, **settings['network'])), 'repq', 8)
    x = data_of(run)[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(3): net.train()(x)
    return net.state_dict(), to_words(run)


def some(names, r, *endings): return r.choice([n for n in names if n.endswith(endings)])


def spoil(kind, r, tensors, about):
    "Change tensors and description in one way; what the message must say, or None where the file may still be good"
    if kind == 'good': return None
    step, weight = some(tensors, r, '.step'), some(tensors, r, '.weight')
    def one(name, value):
        t = tensors[name] = tensors[name].clone()
        t.view(-1)[r.randrange(t.numel())] = value
    if kind == 'bad step': one(step, r.choice([0., -1., -1e-30, float('inf'), float('nan')])); return 'step|finite'
    if kind == 'bad weight': one(weight, r.choice([float('nan'), float('inf'), -float('inf')])); return 'finite|NaN'
    if kind == 'bad statistics': one(some(tensors, r, 'running_mean', 'running_var'), float('nan')); return 'NaN'
    if kind == 'bad origin': one(some(tensors, r, '.origin'), r.choice([0x7f800000, 0x7fc00000])); return 'finite' # as float32: inf, NaN
    if kind == 'negative variance': one(some(tensors, r, 'running_var'), -1e3); return 'finite|NaN|negative'
    if kind == 'bytes': tensors[weight] = tensors[weight].mul(50).to(torch.int8); return 'holds int8, expected float32'
    if kind == 'half': tensors[weight] = tensors[weight].half(); return 'holds float16, expected float32'
    if kind == 'other shape': tensors[weight] = tensors[weight][:-1]; return 'does not fit|cannot be built'
    if kind == 'missing tensor': del tensors[r.choice(list(tensors))]; return 'is missing|cannot be built'
    if kind == 'unknown tensor': tensors['extra.weight'] = torch.zeros(3); return 'is unknown'
    if kind == 'state': tensors[n] = t = tensors[n := some(tensors, r, '.state')].clone(); t[r.randrange(4)] = r.choice([-128, -1, 0, 2, 9, 64, 127]); return None
    if kind == 'no description': about.clear(); return 'does not say which network'
    if kind == 'missing key': del about[k := r.choice(['task', 'block', 'strategy', 'statistics', 'bits', 'settings'])]; return f"does not say '{k}'"
    if kind == 'other type': about[r.choice(list(about))] = r.choice([None, [], {}, 3.5, 'x'*10, -1, 10**400]); return None
    if kind == 'other setting': about['settings'][r.choice(list(about['settings']))] = r.choice([None, [], 'nonsense', -1, 0, 1e30, {'a': 1}]); return None
    if kind == 'huge network': about['settings']['network'][r.choice(['width', 'depth'])] = r.choice([1e9, 10**30, -3, 'wide']); return 'no run makes such a network'
    raise ValueError(kind)


KINDS = ['bad step']*8 + ['bad weight']*5 + ['bad statistics']*3 + ['bad origin']*3 + ['negative variance']*2 + ['bytes']*3 + ['half']*2 + ['other shape']*3
KINDS += ['missing tensor']*4 + ['unknown tensor'] + ['state']*8 + ['no description']*1 + ['missing key']*6 + ['other type']*7 + ['other setting']*6 + ['huge network']*5
RAW = ['readme', 'empty', 'truncated', 'header', 'metadata', 'nested', 'no metadata', 'flipped bits']


def write_raw(kind, r, path, tensors, about):
    "Files that are damaged as bytes"
    good = save_tensors(path, tensors, about).read_bytes()
    at = r.randrange(8, 400)
    deep = '['*100_000
    raw = dict(readme=b'# A README\n\nNot weights.\n', empty=b'', truncated=good[:r.randrange(1, len(good))], header=b'\xff'*8 + good[8:], metadata=good[:at] + b'\x00"' + good[at + 2:])
    if kind in raw: path.write_bytes(raw[kind])
    elif kind == 'nested': path.write_bytes(to_bytes(tensors, metadata={'about': deep}))
    elif kind == 'no metadata': path.write_bytes(to_bytes(tensors))
    else:
        flipped = bytearray(good)
        for _ in range(20): flipped[r.randrange(len(good))] ^= 1 << r.randrange(8)
        path.write_bytes(bytes(flipped))


def exported(source, out):
    "Status of the command"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return main(['export', str(source), '--check', '--batches', '1', '--out', str(out/'net.onnx')])


def test_bad_files(tmp_path, weights, capfd, below_2_gb):
    "75 bad files for `repq export`: each exports what agrees with its network, or gives one line and leaves nothing"
    count = Counter()
    for i, kind in enumerate(['good', *KINDS, *RAW]):
        r, out, source, expected = random.Random(i), tmp_path/f'{i}', tmp_path/f'{i}.safetensors', None
        out.mkdir()
        tensors, about = {k: v.contiguous() for k, v in weights[0].items()}, copy.deepcopy(weights[1])
        if kind in RAW: write_raw(kind, r, source, tensors, about)
        else:
            expected = spoil(kind, r, tensors, about)
            save_tensors(source, tensors, about)
        status, said, left = exported(source, out), capfd.readouterr(), sorted(p.name for p in out.iterdir())
        if status == 0: assert expected is None and left == ['net.json', 'net.onnx'] and 'parity holds' in said.out, (kind, said)
        else:
            assert kind != 'good' and status == 2 and left == [], (kind, status, left, said)
            assert said.err.startswith('repq: ') and len(said.err.splitlines()) == 1 and len(said.err) < 1500, (kind, said)
            assert expected is None or re.search(expected, said.err), (kind, expected, said)
        count[status] += kind != 'good'
    assert count.total() == 75
    PROVEN['bad files for export'] = f'{count[2]} refused in one line, {count[0]} exported with parity'
