"One file for a merged network: the same bits come back, and nothing that is damaged, foreign or wrong"
import json, pickle, struct
import pytest, torch
from torch import nn
from safetensors.torch import load as tensors_in, save_file
import repq
from repq.blocks import make_block
from repq.models import build_model
from repq.quantization.files import NO_DIGEST, about_file, sealed
from repq.tools.testing import randomize_bn


def foreign():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Conv2d(8, 8, 3, groups=2), nn.PReLU(8),
                         nn.Flatten(), nn.Linear(128, 4))


def data(channels=3, size=8): return [torch.rand(8, channels, size, size)*2 - 1 for _ in range(2)]
def merged(net, bits=4, batches=None):
    return repq.merge(repq.ptq(randomize_bn(net).eval(), batches or data(), bits, bits))


def assert_equal(a, b, x):
    "The same network, to the bit"
    assert torch.equal(a(x), b(x)) and not a.training
    a, b = a.state_dict(), b.state_dict()
    assert [*a] == [*b]
    for name in a: assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype, name


# -- there and back

NETS = {'repvgg': dict(name='repvgg_a0', n_classes=5, width=.25, small_input=True),
        'orepa': dict(name='resnet18', n_classes=5, width=.125, block='orepa'),
        'acnet with strides': dict(name='resnet18', n_classes=5, width=.125, block='acnet',
                                   strides=(1, 1, 2, 1, 1)),
        'ecbsr': dict(name='ecbsr', blocks=2)}

@pytest.mark.parametrize('bits', [2, 3, 4, 8])
@pytest.mark.parametrize('case', NETS)
def test_networks_of_the_package(case, bits, tmp_path):
    args = NETS[case]
    batches = data(1 if case == 'ecbsr' else 3, 16)
    net = merged(build_model(**args), bits, batches)
    again = repq.load(repq.save(net, tmp_path/'net.safetensors'))
    assert_equal(again, net, batches[0])
    assert repr(again) == repr(net) and again.hparams == net.hparams and type(again) is type(net)
    learns, wanted = ({n: p.requires_grad for n, p in m.named_parameters()} for m in (again, net))
    assert learns == wanted


def test_negative_gammas(tmp_path):
    "A norm turns −8 into 8, which 4 bits do not have"
    for bits in (2, 4):
        net = nn.Sequential(make_block('plain', 3, 4))
        with torch.no_grad():
            net[0].after.weight.fill_(-1.)
            net[0].branch.weight.uniform_(-.1, .1)
            net[0].branch.weight[:, 0, 0, 0] = -1.
        net = repq.ptq(net.eval(), data(), bits, 8)
        with torch.no_grad(): net[0].weight_quantizer.step.fill_(1/2**(bits - 1))
        net = repq.merge(net)
        assert int(net[0].conv.codes.max()) == 2**(bits - 1)
        path = repq.save(net, tmp_path/'net.safetensors')
        assert '0.turned' in tensors_in(path.read_bytes())
        assert_equal(repq.load(path, net=nn.Sequential(make_block('plain', 3, 4))), net, data()[0])


def test_full_precision(tmp_path):
    net = repq.merge(randomize_bn(build_model('repvgg_a0', n_classes=5, width=.25)).eval())
    assert_equal(repq.load(repq.save(net, tmp_path/'net.safetensors')), net, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize('skeleton', ['float', 'quantized', 'merged', 'double'])
def test_networks_of_others(skeleton, tmp_path):
    net, x = merged(foreign()), data()[0]
    path = repq.save(net, tmp_path/'net.safetensors')
    frame = dict(float=foreign, quantized=lambda: repq.quantize(foreign(), 8, 8),
                 merged=lambda: merged(foreign(), 8),
                 double=lambda: foreign().double())[skeleton]()
    before = repr(frame)
    assert_equal(repq.load(path, net=frame), net, x)
    assert repr(frame) == before                 # not changed


def test_torchvision(tmp_path):
    torchvision = pytest.importorskip('torchvision')
    x = torch.randn(2, 3, 32, 32)
    net = repq.merge(repq.ptq(torchvision.models.resnet18(num_classes=4).eval(), [x], 4, 4))
    path = repq.save(net, tmp_path/'net.safetensors')
    assert_equal(repq.load(path, net=torchvision.models.resnet18(num_classes=4)), net, x)
    with pytest.raises(ValueError, match='layer1.0.downsample|layers'):
        repq.load(path, net=torchvision.models.resnet34(num_classes=4))


def test_converted_network(tmp_path):
    def make():
        return repq.convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                                          nn.Conv2d(8, 4, 1)).eval())
    net = merged(make())
    assert_equal(repq.load(repq.save(net, tmp_path/'net.safetensors'), net=make()), net, data()[0])


class Shared(nn.Module):
    "A layer under two names, and a PReLU weight in two modules"
    def __init__(self):
        super().__init__()
        self.conv, self.acts = nn.Conv2d(3, 3, 3, padding=1), nn.ModuleList([nn.PReLU(3), nn.PReLU(3)])
        self.again, self.acts[1].weight = self.conv, self.acts[0].weight
    def forward(self, x): return self.acts[1](self.again(self.acts[0](self.conv(x))))


def test_shared_layers_and_tied_weights(tmp_path):
    net = merged(Shared())
    path = repq.save(net, tmp_path/'net.safetensors')
    again = repq.load(path, net=Shared())
    assert_equal(again, net, data()[0])
    assert again.again is again.conv and again.acts[1].weight is again.acts[0].weight
    assert sum(n.endswith('acts.0.weight') or n.endswith('acts.1.weight')
               for n in tensors_in(path.read_bytes())) == 1


def test_a_single_layer(tmp_path):
    layer = merged(make_block('repvgg', 3, 8))
    assert_equal(repq.load(repq.save(layer, tmp_path/'l.safetensors'), net=make_block('repvgg', 3, 8)), layer,
                 data()[0])


def test_dilated_and_unused_layers(tmp_path):
    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2, padding=2), nn.ReLU(),
                             nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False))
    with pytest.warns(UserWarning, match='dilation'): net = merged(make())
    assert_equal(repq.load(repq.save(net, tmp_path/'net.safetensors'), net=make()), net, data()[0])


class OwnNorm(nn.BatchNorm2d):
    "As timm has them: a batch norm under another name"


@pytest.mark.parametrize('quantized', [True, False])
def test_norms_under_another_name(quantized, tmp_path):
    "`quantize` makes ordinary norms of them, those that it folds and those that it leaves"
    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm(4), nn.ReLU(), OwnNorm(4), nn.Conv2d(4, 4, 1))
    net = merged(make()) if quantized else repq.merge(randomize_bn(make()).eval())
    again = repq.load(repq.save(net, tmp_path/'net.safetensors'), net=make())
    assert_equal(again, net, data()[0])
    assert isinstance(net[1], nn.Identity) == quantized


def test_double_precision(tmp_path):
    net = merged(foreign().double(), batches=[x.double() for x in data()])
    assert_equal(repq.load(repq.save(net, tmp_path/'net.safetensors'), net=foreign()), net,
                 data()[0].double())


def test_the_loaded_network_exports(tmp_path):
    pytest.importorskip('onnx')
    net, x = merged(foreign(), 8), data()[0]
    again = repq.load(repq.save(net, tmp_path/'net.safetensors'), net=foreign())
    for n, name in ((net, 'a.onnx'), (again, 'b.onnx')): repq.export_onnx(n, tmp_path/name, x)
    assert (tmp_path/'a.onnx').read_bytes() == (tmp_path/'b.onnx').read_bytes()


def test_the_file_is_the_same_each_time(tmp_path):
    net = merged(build_model('ecbsr'), batches=data(1))
    a, b = (repq.save(net, tmp_path/name).read_bytes() for name in 'ab')
    assert a == b


def test_about(tmp_path):
    path = tmp_path/'net.safetensors'
    repq.save(merged(foreign()), path, input_range='RGB -1..1', about=dict(accuracy=.9, labels=['a', 'b']))
    about = about_file(path)
    assert about['about'] == dict(accuracy=.9, labels=['a', 'b']) and about['repq'] == repq.__version__
    assert about['format'] == 1
    assert about['input_range'] == 'RGB -1..1'
    again = repq.load(path, foreign(), input_range='RGB -1..1')
    assert again.input_range == 'RGB -1..1'
    assert about_file(repq.save(again, path))['input_range'] == 'RGB -1..1'      # it stays with the network
    with pytest.raises(ValueError, match="its inputs are in 'RGB -1..1', not in 'RGB 0..1'"):
        repq.load(path, foreign(), input_range='RGB 0..1')
    for wrong in ([1], dict(a=float('nan')), dict(a=torch.ones(1)), dict(a=(1, 2))):
        with pytest.raises(ValueError, match='about must be'): repq.save(merged(foreign()), path, about=wrong)


def test_range_of_super_resolution(tmp_path):
    net, path = merged(build_model('ecbsr'), batches=data(1)), tmp_path/'net.safetensors'
    repq.save(net, path)
    assert about_file(path)['input_range'] == repq.load(path).input_range == '0..255'
    with pytest.raises(ValueError, match='ECBSR takes input in 0..255'):
        repq.save(net, path, input_range='0..1')
    header, tensors = opened(path)
    for wrong in ('0..1', None):
        path.write_bytes(sealed(tensors, dict(header, input_range=wrong)))
        for frame in (None, build_model('ecbsr')):
            with pytest.raises(ValueError, match='ECBSR takes input in 0..255'): repq.load(path, net=frame)


def test_smaller_than_float(tmp_path):
    net = build_model('repvgg_a0', n_classes=10, width=.5)
    full = repq.save(repq.merge(net.eval()), tmp_path/'full').stat().st_size
    for bits, share in ((8, .27), (4, .145), (2, .085)):
        assert repq.save(merged(net, bits, data(3, 32)), tmp_path/'small').stat().st_size < share*full, bits


# -- what is not saved

def test_save_refuses(tmp_path):
    path = tmp_path/'net.safetensors'
    quantized = repq.ptq(foreign().eval(), data())
    with pytest.raises(ValueError, match=r'not merged: repq\.save\(repq\.merge\(net\), path\)'):
        repq.save(quantized, path)
    with pytest.raises(ValueError, match='no convolution'): repq.save(nn.Sequential(nn.ReLU()), path)
    with pytest.raises(TypeError, match='takes a network'): repq.save(quantized.state_dict(), path)
    net = merged(foreign())
    with torch.no_grad(): net[0].conv.weight[0, 0, 0, 0] += 1
    with pytest.raises(ValueError, match='0: the weights are not integers times steps'): repq.save(net, path)
    with pytest.raises(ValueError, match='0: the weights are not integers times steps'):
        repq.save(merged(foreign()).half(), path)
    net = merged(foreign())
    with torch.no_grad(): net[6].linear.bias[0] = float('nan')
    with pytest.raises(ValueError, match='6.bias holds NaN'): repq.save(net, path)
    net = merged(foreign())
    with torch.no_grad(): net[4].weight[0] = float('inf')
    with pytest.raises(ValueError, match='4.weight holds NaN or infinity'): repq.save(net, path)
    net = merged(foreign())
    net[0].quantize.step.zero_()
    with pytest.raises(ValueError, match='0.input_step must be positive'): repq.save(net, path)
    assert not path.exists()


def test_a_network_that_was_changed_needs_a_frame(tmp_path):
    "Its function would build another one"
    net = build_model('repvgg_a0', n_classes=5, width=.25)
    net.head = nn.Linear(net.head.in_features, 7)
    net = merged(net, batches=data(3, 32))
    with pytest.warns(UserWarning, match='loading it will need net='):
        path = repq.save(net, tmp_path/'net.safetensors')
    with pytest.raises(ValueError, match=r'repq\.load\(path, net=\.\.\.\)'): repq.load(path)
    frame = build_model('repvgg_a0', n_classes=7, width=.25)
    assert_equal(repq.load(path, net=frame), net, data(3, 32)[0])


# -- what is not loaded

@pytest.fixture
def file(tmp_path): return repq.save(merged(foreign()), tmp_path/'net.safetensors')


def refused(path, match, net=None):
    with pytest.raises(ValueError, match=match) as error:
        repq.load(path, net=foreign() if net is None else net)
    assert str(path) in str(error.value)


def test_cut_off(file):
    whole = file.read_bytes()
    for n in (*range(20), *range(20, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:n])
        refused(file, 'cut off|damaged|sha256')
    file.write_bytes(whole + b'\0')
    refused(file, 'damaged|sha256')


def test_every_bit_counts(file):
    whole = bytearray(file.read_bytes())
    for i in range(0, len(whole), 7):
        whole[i] ^= 1 << i % 8
        file.write_bytes(whole)
        refused(file, 'cannot be loaded')
        whole[i] ^= 1 << i % 8


FOREIGN = {
    'empty': (b'', 'no safetensors file'),
    'text': (b'These are the weights of my network\n'*20, 'text file'),
    'pickle': (pickle.dumps(dict(a=1)), 'pickle.*never opens'),
    'huge header': (struct.pack('<Q', 2**62) + b'{}'*50, 'no safetensors file'),
    'large header': (struct.pack('<Q', 2**25) + b' '*(2**25 + 100), 'no safetensors file'),
    'header that is no JSON': (struct.pack('<Q', 8) + b'{"a":1,,' + b'0'*50, 'header is damaged'),
    'header that is no object': (struct.pack('<Q', 8) + b'[1, 2]  ', 'not of repq.save'),
    'header without end': (struct.pack('<Q', 100_000) + b'['*100_000, 'header is damaged'),
    'header that is no text': (struct.pack('<Q', 8) + b'\xff'*8, 'header is damaged'),
    'metadata of another kind': (struct.pack('<Q', 24) + b'{"__metadata__":["repq"]}'[:24],
                                 'damaged|not of repq.save'),
}

@pytest.mark.parametrize('case', FOREIGN)
def test_foreign_files(case, tmp_path):
    content, message = FOREIGN[case]
    (tmp_path/'f.safetensors').write_bytes(content)
    refused(tmp_path/'f.safetensors', message)


def test_torch_save_and_other_safetensors(tmp_path):
    torch.save(foreign(), tmp_path/'net.pt')
    refused(tmp_path/'net.pt', 'pickle')
    save_file(foreign().state_dict(), tmp_path/'net.safetensors')
    refused(tmp_path/'net.safetensors', 'not of repq.save')
    with pytest.raises(FileNotFoundError): repq.load(tmp_path/'nowhere')


def opened(path):
    "Header and tensors of a file, to be changed by someone who can compute digests"
    data = path.read_bytes()
    n, = struct.unpack('<Q', data[:8])
    header = json.loads(json.loads(data[8:8 + n])['__metadata__']['repq'])
    header.pop('sha256')
    return header, dict(tensors_in(data))


def without(d, key): return {k: v for k, v in d.items() if k != key}
def layer(h, **changes): return dict(h, layers={**h['layers'], '0': {**h['layers']['0'], **changes}})

FORGED = {
    'newer version': (lambda h, t: (dict(h, format=2), t), 'version 2 of the format.*Update repq'),
    'no version': (lambda h, t: (without(h, 'format'), t), 'version None'),
    'version as text': (lambda h, t: (dict(h, format='1'), t), "version '1'"),
    'no layers': (lambda h, t: (without(h, 'layers'), t), "its entry 'layers'"),
    'layers as a list': (lambda h, t: (dict(h, layers=[]), t), "its entry 'layers'"),
    'a layer that is none': (lambda h, t: (dict(h, layers={**h['layers'], '0': 7}), t), 'layer 0'),
    'missing layer': (lambda h, t: (dict(h, layers=without(h['layers'], '0')), t),
                      'layers: the file does not have 0'),
    'extra layer': (lambda h, t: (dict(h, layers={**h['layers'], '9': h['layers']['0']}), t),
                    'the file has 9'),
    'missing tensor': (lambda h, t: (h, without(t, '0.step')), '0: step missing'),
    'missing codes': (lambda h, t: (h, without(t, '3.codes')), '3: codes missing'),
    'missing weight of a PReLU': (lambda h, t: (h, without(t, '4.weight')),
                                  'the file does not have 4.weight'),
    'extra tensor': (lambda h, t: (h, {**t, 'more': torch.ones(1)}), 'the file has more'),
    'extra tensor of a layer': (lambda h, t: (h, {**t, '0.weight': torch.ones(8, 3, 3, 3)}),
                                'the file has 0.weight'),
    'shape of steps': (lambda h, t: (h, {**t, '0.step': torch.ones(1)}),
                       r'0: step has the shape \(1,\), expected \(8,\)'),
    'shape of codes': (lambda h, t: (h, {**t, '0.codes': t['0.codes'][:-1].clone()}),
                       '0: codes has the shape'),
    'shape of a PReLU': (lambda h, t: (h, {**t, '4.weight': torch.ones(1)}), '4.weight has the shape'),
    'type of codes': (lambda h, t: (h, {**t, '0.codes': t['0.codes'].float()}), '0: codes has the type'),
    'type of steps': (lambda h, t: (h, {**t, '0.step': torch.ones(8, dtype=torch.int64)}),
                      '0: step has the type'),
    'type of a PReLU': (lambda h, t: (h, {**t, '4.weight': torch.ones(8, dtype=torch.int64)}),
                        '4.weight has the type'),
    'NaN step': (lambda h, t: (h, {**t, '0.step': torch.full((8,), float('nan'))}), '0: step holds NaN'),
    'negative step': (lambda h, t: (h, {**t, '0.step': -t['0.step']}), '0: step must be positive'),
    'step of zero': (lambda h, t: (h, {**t, '0.input_step': torch.zeros(())}),
                     '0: input_step must be positive'),
    'infinite bias': (lambda h, t: (h, {**t, '6.bias': torch.full((4,), float('inf'))}),
                      '6: bias holds NaN or infinity'),
    'NaN in a PReLU': (lambda h, t: (h, {**t, '4.weight': torch.full((8,), float('nan'))}),
                       '4.weight holds NaN'),
    'other shape of a layer': (lambda h, t: (layer(h, shape=[8, 3, 1, 1]), t), '0: in the file shape'),
    'other stride': (lambda h, t: (layer(h, stride=[2, 2]), t),
                     r'0: in the file stride \(2, 2\), here \(1, 1\)'),
    'other kind': (lambda h, t: (layer(h, kind='linear', shape=[8, 3]), t), '0: in the file kind'),
    'unknown kind': (lambda h, t: (layer(h, kind='os.system'), t),
                     "layer 0: kind must be 'conv' or 'linear'"),
    'unknown key': (lambda h, t: (layer(h, code='print(1)'), t), 'layer 0'),
    'bits': (lambda h, t: (layer(h, bits=64), t), 'layer 0: bits must be 2..8, got 64'),
    'bits of another packing': (lambda h, t: (layer(h, bits=2), t), '0: codes has the shape'),
    'bits without an input': (lambda h, t: (layer(h, input=None), t), 'layer 0: bits and input'),
    'range of the input': (lambda h, t: (layer(h, input=[4, -8, 200]), t), 'layer 0: input is'),
    'huge shape': (lambda h, t: (layer(h, shape=[2**40, 3, 3, 3]), t), 'layer 0: shape must be'),
    'shape of text': (lambda h, t: (layer(h, shape='8333'), t), 'layer 0: shape must be'),
    'groups': (lambda h, t: (layer(h, groups=0), t), 'layer 0: groups'),
    'folded something else': (lambda h, t: (dict(h, folded=['0']), t), '0 was a batch norm'),
    'folded something that is not there': (lambda h, t: (dict(h, folded=['nowhere']), t),
                                           'nowhere was a batch norm'),
    'folded numbers': (lambda h, t: (dict(h, folded=[1]), t), "entry 'folded'"),
    'not folded': (lambda h, t: (dict(h, folded=[]), t), 'not those of the network|the file does not have'),
    'other activations': (lambda h, t: (dict(h, structure='0'*16), t), 'activations, pooling'),
}

@pytest.mark.parametrize('case', FORGED)
def test_a_right_digest_is_not_enough(case, file):
    change, message = FORGED[case]
    header, tensors = change(*opened(file))
    file.write_bytes(sealed(tensors, header))
    refused(file, message)


def test_the_forger_can_write_whole_files(file):
    "So the messages above are not about broken tests"
    header, tensors = opened(file)
    before = file.read_bytes()
    file.write_bytes(sealed(tensors, header))
    assert file.read_bytes() == before and repq.load(file, net=foreign())
    assert NO_DIGEST.encode() not in before


NETWORKS = {
    'unknown function': (dict(name='system'), "repq has no network 'system', it has repvgg_a0"),
    'a path to a function': (dict(name='os.system'), 'repq has no network'),
    'name of another kind': (dict(name=['ecbsr']), 'repq has no network'),
    'unknown argument': (dict(name='ecbsr', code='1'), "ecbsr has no argument 'code'"),
    'a download': (dict(name='ecbsr', pretrained='fp'), "no argument 'pretrained'"),
    'without end': (dict(name='ecbsr', blocks=10**9), 'blocks is 1000000000'),
    'wide': (dict(name='ecbsr', width=1e9), 'width is'),
    'negative': (dict(name='ecbsr', blocks=-1), 'blocks is -1'),
    'nested': (dict(name='ecbsr', block=dict(a=1)), 'block is'),
    'unknown block': (dict(name='ecbsr', block='exec'), 'block'),
    'another network': (dict(name='ecbsr', blocks=3), 'layers: the file does not have body.2'),
    'other channels': (dict(name='ecbsr', blocks=2, channels=16), 'stem: in the file shape'),
}

@pytest.mark.parametrize('case', NETWORKS)
def test_forged_networks(case, tmp_path):
    network, message = NETWORKS[case]
    path = repq.save(merged(build_model('ecbsr', blocks=2), batches=data(1)), tmp_path/'net.safetensors')
    header, tensors = opened(path)
    path.write_bytes(sealed(tensors, dict(header, network=network)))
    with pytest.raises(ValueError, match=message): repq.load(path)


def test_frames_that_do_not_fit(file):
    "Another network of the same length is not filled"
    changes = {0: nn.Conv2d(3, 8, 5), 2: nn.SiLU(), 3: nn.Conv2d(8, 8, 3), 4: nn.PReLU(1),
               6: nn.Linear(128, 5)}
    for i, module in changes.items():
        frame = foreign()
        frame[i] = module
        refused(file, {2: 'activations'}.get(i, f'{i}'), frame)
    refused(file, 'the file has', nn.Sequential(*list(foreign())[:-1]))
    with pytest.raises(TypeError, match='takes a network'): repq.load(file, net='resnet18')


def test_nothing_of_a_file_is_executed(file, monkeypatch):
    "No unpickling, no evaluation"
    net = repq.load(file, net=foreign())
    def never(*args, **kwargs): raise AssertionError('executed')
    for module, names in ((pickle, ('load', 'loads', 'Unpickler')), (torch, ('load',))):
        for name in names: monkeypatch.setattr(module, name, never)
    monkeypatch.setattr('builtins.eval', never)
    assert_equal(repq.load(file, net=foreign()), net, data()[0])
