"Official checkpoints: modules that follow the papers, with the names of the official state dicts"
import copy, math
from collections import OrderedDict
import pytest, torch
from torch import nn
import torch.nn.functional as F
import repq
from repq.adopt.official import LAYOUTS, fit_official, official_name
from repq.tools.testing import assert_differs, assert_same, randomize_bn


def rand(*shape): return torch.randn(shape, dtype=torch.float64)


def conv_bn(i, o, k, stride=1):
    return OrderedDict(conv=nn.Conv2d(i, o, k, stride, k//2, bias=False), bn=nn.BatchNorm2d(o))


class ACBlock(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        for name, k in dict(square=(3, 3), hor=(1, 3), ver=(3, 1)).items():
            self.add_module(f'{name}_conv', nn.Conv2d(i, o, k, stride, (k[0]//2, k[1]//2), bias=False))
            self.add_module(f'{name}_bn', nn.BatchNorm2d(o))
    def forward(self, x):
        return sum(getattr(self, f'{n}_bn')(getattr(self, f'{n}_conv')(x)) for n in ('square', 'hor', 'ver'))


class OREPA(nn.Module):
    "Every branch computed by itself, on the padded input"
    def __init__(self, i, o, stride=1, norm=True):
        super().__init__()
        self.i, self.o, self.stride = i, o, stride
        shapes = {
            'origin': (o, i, 3, 3), 'avg_conv': (o, i, 1, 1), 'pfir_conv': (o, i, 1, 1), '1x1': (o, i, 1, 1),
            '1x1_kxk_idconv1': (i, i, 1, 1), '1x1_kxk_conv2': (o, i, 3, 3),
            'gconv_dw': (8*i, 1, 3, 3), 'gconv_pw': (o, 8*i, 1, 1)}
        for name, shape in shapes.items():
            weight = torch.randn(shape)/math.sqrt(shape[1]*shape[2]*shape[3])
            self.register_parameter(f'weight_orepa_{name}', nn.Parameter(weight))
        self.vector = nn.Parameter(torch.randn(6, o)/2)
        self.register_buffer('weight_orepa_avg_avg', torch.full((3, 3), 1/9, dtype=torch.float64))
        def prior(c, h, w):
            position, frequency = (h, c + 1) if c < o/2 else (w, c + 1 - o/2)
            return math.cos(math.pi*(position + 0.5)*frequency/3)
        filters = [[[prior(c, h, w) for w in range(3)] for h in range(3)] for c in range(o)]
        self.register_buffer('weight_orepa_prior', torch.tensor(filters, dtype=torch.float64))
        self.register_buffer('id_tensor', torch.eye(i)[:, :, None, None])
        if norm: self.bn = nn.BatchNorm2d(o)

    def weight(self, name): return getattr(self, f'weight_orepa_{name}')
    def branches(self, x, stride):
        "x is padded already"
        inner = x[..., 1:-1, 1:-1]
        yield F.conv2d(x, self.weight('origin'), stride=stride)
        yield F.avg_pool2d(F.conv2d(x, self.weight('avg_conv')), 3, stride)
        y = F.conv2d(x, self.weight('pfir_conv'))
        yield F.conv2d(y, self.weight('prior')[:, None], stride=stride, groups=self.o)
        y = x + F.conv2d(x, self.weight('1x1_kxk_idconv1'))
        yield F.conv2d(y, self.weight('1x1_kxk_conv2'), stride=stride)
        yield F.conv2d(inner, self.weight('1x1'), stride=stride)
        y = F.conv2d(x, self.weight('gconv_dw'), stride=stride, groups=self.i)
        yield F.conv2d(y, self.weight('gconv_pw'))
    def linear(self, x, stride=1):
        return sum(y*v[:, None, None] for y, v in zip(self.branches(x, stride), self.vector))
    def kernel(self):
        "The 3×3 of this block, read off its response to unit impulses"
        impulses = torch.zeros(self.i, self.i, 5, 5, dtype=self.vector.dtype)
        for c in range(self.i): impulses[c, c, 2, 2] = 1
        return self.linear(impulses).flip(-1, -2).transpose(0, 1)
    def forward(self, x): return self.bn(self.linear(F.pad(x, (1, 1, 1, 1)), self.stride))


class LargeOREPA(nn.Module):
    "7×7 from three 3×3, whose kernels are correlated as the official code does"
    def __init__(self, i, o, stride):
        super().__init__()
        self.stride, self.weight0 = stride, OREPA(i, o, norm=False)
        self.weight1, self.weight2 = OREPA(o, o, norm=False), OREPA(o, o, norm=False)
        self.bn = nn.BatchNorm2d(o)
    def forward(self, x):
        w = self.weight0.kernel().transpose(0, 1)
        for block in (self.weight1, self.weight2): w = F.conv2d(w, block.kernel(), padding=2)
        return self.bn(F.conv2d(x, w.transpose(0, 1), stride=self.stride, padding=3))


class Residual(nn.Module):
    def __init__(self, conv1, conv2, i, o, stride):
        super().__init__()
        self.conv1, self.conv2 = conv1, conv2
        self.shortcut = nn.Sequential(conv_bn(i, o, 1, stride)) if stride > 1 or i != o else nn.Identity()
    def forward(self, x): return (self.conv2(self.conv1(x).relu()) + self.shortcut(x)).relu()


def official_resnet(stem, make1, make2, stem_name):
    net, i = nn.Sequential(), 8
    outer, _, inner = stem_name.partition('.')
    net.add_module(outer, nn.Sequential(OrderedDict({inner: stem})) if inner else stem)
    net.add_module('relu', nn.ReLU())
    net.add_module('maxpool', nn.MaxPool2d(3, 2, 1))
    for s, o in enumerate((8, 16, 32, 64), 1):
        shapes = (i, 1 if s == 1 else 2), (o, 1)
        blocks = [Residual(make1(a, o, st), make2(o, o, 1), a, o, st) for a, st in shapes]
        net.add_module(f'stage{s}', nn.Sequential(*blocks))
        i = o
    net.add_module('pool', nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net.add_module('linear', nn.Linear(64, 5))
    return randomize_bn(net.double())


def acnet_resnet():
    def first(i, o, stride): return nn.Sequential(OrderedDict(acb=ACBlock(i, o, stride), relu=nn.ReLU()))
    return official_resnet(nn.Sequential(conv_bn(3, 8, 7, 2)), first, ACBlock, 'conv1')


def orepa_resnet(): return official_resnet(LargeOREPA(3, 8, 2), OREPA, OREPA, 'stage0.conv1')


class ECB(nn.Module):
    def __init__(self, i, o, act=True, with_idt=False):
        super().__init__()
        self.with_idt = with_idt and i == o
        def branch(**shapes):
            m = nn.Module()
            for name, shape in shapes.items(): m.register_parameter(name, nn.Parameter(torch.randn(shape)/2))
            return m
        self.conv3x3 = nn.Conv2d(i, o, 3, padding=1)
        self.conv1x1_3x3 = branch(k0=(2*o, i, 1, 1), b0=(2*o,), k1=(o, 2*o, 3, 3), b1=(o,))
        masks = dict(sbx=[[1, 0, -1], [2, 0, -2], [1, 0, -1]], sby=[[1, 2, 1], [0, 0, 0], [-1, -2, -1]],
                     lpl=[[0, 1, 0], [1, -4, 1], [0, 1, 0]])
        for name, mask in masks.items():
            m = branch(k0=(o, i, 1, 1), b0=(o,), scale=(o, 1, 1, 1), bias=(o,))
            mask = torch.tensor(mask, dtype=torch.float32).expand(o, 1, 3, 3).clone()
            m.mask = nn.Parameter(mask, requires_grad=False)
            self.add_module(f'conv1x1_{name}', m)
        if act: self.act = nn.PReLU(o)
    def forward(self, x):
        padded = F.pad(x, (1, 1, 1, 1))
        m = self.conv1x1_3x3
        y = self.conv3x3(x) + F.conv2d(F.conv2d(padded, m.k0, m.b0), m.k1, m.b1)
        for m in (self.conv1x1_sbx, self.conv1x1_sby, self.conv1x1_lpl):
            y = y + F.conv2d(F.conv2d(padded, m.k0, m.b0), m.scale*m.mask, m.bias, groups=len(m.bias))
        if self.with_idt: y = y + x
        return self.act(y) if hasattr(self, 'act') else y


class OfficialECBSR(nn.Module):
    def __init__(self, blocks=2, channels=4, scale=2, with_idt=False):
        super().__init__()
        ins, outs = [1] + [channels]*(blocks + 1), [channels]*(blocks + 1) + [scale**2]
        parts = [ECB(i, o, n <= blocks, with_idt) for n, (i, o) in enumerate(zip(ins, outs))]
        self.backbone = nn.Sequential(*parts)
        self.upsampler = nn.PixelShuffle(scale)
    def forward(self, x): return self.upsampler(self.backbone(x) + x)


def our_orepa(): return repq.models.resnet18(5, 'orepa', 0.125, orepa_stem=True)


OFFICIAL = {'acnet': (acnet_resnet, lambda: repq.models.resnet18(5, 'acnet', 0.125), (2, 3, 64, 64)),
            'orepa': (orepa_resnet, our_orepa, (2, 3, 64, 64)),
            'ecbsr': (OfficialECBSR, lambda: repq.models.ecbsr(2, 4, 2), (2, 1, 11, 9))}


@pytest.mark.parametrize('kind', OFFICIAL)
def test_official_checkpoints(kind):
    "Loaded from the official layout, our network computes the same, border included"
    make, ours, shape = OFFICIAL[kind]
    official, net, x = make().double().eval(), ours().double().eval(), rand(*shape)
    with torch.no_grad(): y = official(x)
    assert_differs(net(x), y)
    options = dict(with_idt=False) if kind == 'ecbsr' else {}
    fit = repq.load_official(net, {'state_dict': official.state_dict()}, **options)
    assert fit and len(fit.loaded) > 20
    assert_same(net(x), y, 1e-11)


def test_an_official_network_scores_as_its_own_code_says():
    "Luma in 0..255, in and out: the same pictures, and the PSNR of the official formula"
    from repq.data import SRBenchmark, evaluate_sr, photos
    bench, official = SRBenchmark(photos('test')), OfficialECBSR().eval()
    for n, p in official.named_parameters():
        if p.requires_grad and 'act' not in n:
            p.data.mul_(.05 if p.ndim > 1 else 1.)   # the biases are as large as one step of luma
    net = repq.models.ecbsr(2, 4, 2).eval()
    repq.load_official(net, official.state_dict())
    def official_psnr(sr, hr):
        sr, hr = (t[:, :, 2:-2, 2:-2].clamp(0, 255).double() for t in (sr, hr))
        return 10*torch.log10(255**2/(sr - hr).square().mean()).item()
    with torch.no_grad():
        for lr, _, _ in bench: assert_same(net(lr[None]), official(lr[None]), 1e-5)
        expected = [official_psnr(official(lr[None]), hr[None]) for lr, hr, _ in bench]
    mean = sum(expected)/len(expected)
    def score(net): return evaluate_sr(net, bench, ssim=False)['psnr']
    assert score(net) == pytest.approx(mean, abs=1e-3) == score(official)
    assert abs(score(lambda x: net(x/255)*255) - mean) > 1, 'the range matters'


def test_the_stem_of_orepa_needs_its_flips():
    "Without them the 7×7 is another one"
    official, net = orepa_resnet().eval(), our_orepa().double().eval()
    state = official.state_dict()
    for k, t in state.items():
        is_stacked = k.startswith(('stage0.conv1.weight1', 'stage0.conv1.weight2'))
        if is_stacked and t.ndim == 4: state[k] = t.flip(-1, -2)
    repq.load_official(net, state)
    x = rand(1, 3, 64, 64)
    assert_differs(net(x), official(x))


def test_wrong_networks_are_told_what_does_not_fit():
    state = acnet_resnet().state_dict()
    before = copy.deepcopy((net := repq.models.resnet18(5, 'acnet', 0.25).double()).state_dict())
    shapes = r'stem.branch.weight \(16, 3, 7, 7\) ← conv1.conv.weight \(8, 3, 7, 7\)'
    with pytest.raises(ValueError, match=r'nothing was loaded(.|\n)*shapes \(\d+\): ' + shapes):
        repq.load_official(net, state)
    for k, t in net.state_dict().items(): assert torch.equal(t, before[k])
    with pytest.raises(ValueError, match='missing(.|\n)*branch.parts.0.scale'):
        repq.load_official(repq.models.resnet18(5, 'orepa', 0.125), state)
    with pytest.raises(ValueError, match='unexpected(.|\n)*stage0.conv1.weight0'):
        repq.load_official(repq.models.resnet18(5, 'orepa', 0.125), orepa_resnet().state_dict())
    with pytest.raises(ValueError, match='deployed'):
        repq.load_official(net, {'stage1.0.conv1.acb.fused_conv.weight': rand(1)})


def test_the_stem_of_orepa_is_named():
    "Refused with the option that builds the stem of the checkpoint, either way round"
    stacked = orepa_resnet().state_dict()
    single = {k: t for k, t in orepa_resnet().state_dict().items() if 'weight0' not in k}
    for stem, state in ((False, stacked), (True, single)):
        net = repq.models.resnet18(5, 'orepa', 0.125, orepa_stem=stem)
        advice = f'nothing was loaded(.|\n)*build the network with orepa_stem={not stem}'
        with pytest.raises(ValueError, match=advice):
            repq.load_official(net, state)


def test_numpy_arrays():
    "ACNet's code saves numpy arrays in hdf5, with the widths of its layers as `deps`"
    official, x = acnet_resnet().eval(), rand(1, 3, 64, 64)
    arrays = {k: t.numpy() for k, t in official.state_dict().items()}
    arrays |= {'deps': torch.tensor([8, 8, 16]).numpy(), 'note': 'of an experiment'}
    net = repq.models.resnet18(5, 'acnet', 0.125).double().eval()
    assert repq.load_official(net, arrays)
    assert_same(net(x), official(x), 1e-11)


def test_an_open_hdf5_file(tmp_path):
    h5py = pytest.importorskip('h5py', reason='h5py reads hdf5, and is not installed')
    official, x = acnet_resnet().eval(), rand(1, 3, 64, 64)
    arrays = {k: t.numpy() for k, t in official.state_dict().items()}
    with h5py.File(tmp_path/'net.hdf5', 'w') as f:
        for k, v in arrays.items(): f.create_dataset(k, data=v)
    net = repq.models.resnet18(5, 'acnet', 0.125).double().eval()
    with h5py.File(tmp_path/'net.hdf5') as f: assert repq.load_official(net, f)
    assert_same(net(x), official(x), 1e-11)


def test_the_identity_of_ecb_has_to_be_told(recwarn):
    "The checkpoint does not show it: a warning names the option, and with it the network is the same"
    official, x = OfficialECBSR(with_idt=True).double().eval(), rand(2, 1, 11, 9)
    assert [b.with_idt for b in official.backbone] == [False, True, True, True]
    net, without = repq.models.ecbsr(2, 4, 2).double(), repq.models.ecbsr(2, 4, 2).double()
    repq.load_official(net, official.state_dict(), with_idt=True)
    assert_same(net(x), official(x), 1e-11)
    repq.load_official(without, official.state_dict(), with_idt=False)
    assert not recwarn
    assert_differs(without(x), official(x))
    with pytest.warns(UserWarning, match='idt_ecbsr(.|\n)*with_idt=False or True'):
        repq.load_official(without, official.state_dict())
    with pytest.raises(ValueError, match='an option of ECBSR, this is a checkpoint of acnet'):
        other = repq.models.resnet18(5, 'acnet', 0.125)
        repq.load_official(other, acnet_resnet().state_dict(), with_idt=True)


def test_the_prior_of_odd_channels():
    "OREPA halves the channels in float"
    from repq.algebra.kernel import frequency_prior
    for n in (5, 8):
        assert_same(frequency_prior(n, dtype=torch.float64).weight[:, 0], OREPA(3, n).weight('prior'), 1e-12)


def test_every_layout_covers_its_network():
    "Each tensor of our networks that is not constant has an official name, and no two share one"
    nets = {'repvgg': repq.models.repvgg_a0(10, width=0.125)}
    nets |= {k: ours() for k, (_, ours, _) in OFFICIAL.items()}
    for kind, net in nets.items():
        blocks = len(getattr(net, 'body', ()))
        names = [official_name(k, LAYOUTS[kind], blocks) for k, _ in net.named_parameters()]
        assert None not in names and len(set(names)) == len(names), kind
        assert fit_official(net, {}, LAYOUTS[kind])[1].missing
