"Foreign networks: random graphs, timm families, networks that cannot be converted"
import copy, random, warnings
from collections import OrderedDict
import pytest, torch
from torch import nn
import torch.nn.functional as F
import repq
from repq.adopt.foreign import Rewritten
from repq.quantization.layer import RepConv2d
from repq.quantization.network import quantizable_layers
from repq.tools.testing import assert_differs, assert_same, rel_error, randomize_bn
from conftest import PROVEN


def rand(*shape): return torch.randn(shape, dtype=torch.float64)


class RandomNet(nn.Module):
    "A random graph of convolutions, norms, sums, factors, pools and activations on maps of one size"
    def __init__(self, rng, channels=4, steps=14):
        super().__init__()
        self.steps, self.mods, c = [], nn.ModuleList(), channels
        self.gamma = nn.Parameter(torch.rand(c, 1, 1) + 0.5)
        for i in range(steps):
            # values 0..i exist; value 0 is the input
            last = i + 1 if rng.random() < 0.7 else rng.randrange(i + 1)
            kind = rng.choice('conv conv conv norm norm add add sub gain pool relu'.split())
            if kind == 'conv':
                k = rng.choice([1, 1, 3, (1, 3), (3, 1)])
                kh, kw = (k, k) if isinstance(k, int) else k
                groups, bias = rng.choice([1, 1, 2, c]), rng.random() < 0.5
                conv = nn.Conv2d(c, c, (kh, kw), padding=(kh//2, kw//2), groups=groups, bias=bias)
                self.mods.append(conv)
            elif kind == 'norm': self.mods.append(nn.BatchNorm2d(c))
            elif kind == 'pool': self.mods.append(nn.AvgPool2d(3, 1, 1))
            self.steps.append((kind, min(last, i), rng.randrange(i + 1), len(self.mods) - 1))

    def forward(self, x):
        values = [x]
        for kind, a, b, m in self.steps:
            a, b = values[a], values[b]
            if kind in ('conv', 'norm', 'pool'): y = self.mods[m](a)
            elif kind == 'add': y = a + b
            elif kind == 'sub': y = a - b
            elif kind == 'gain': y = a*self.gamma
            else: y = a.relu()
            values.append(y)
        return values[-1] + 0.5*values[-2]


def by_value(net):
    return sorted((b for n, b in net.named_buffers() if 'running' in n), key=lambda b: b.sum().item())


def test_random_networks(request):
    "Converted, merged and in training they compute what they did, to float64"
    rng, layers, blocks, wanted = random.Random(0), 0, 0, 1000 if request.config.getoption('--slow') else 60
    for _ in range(wanted):
        net = randomize_bn(RandomNet(rng).double()).train()
        if not any(isinstance(m, nn.Conv2d) for m in net.modules()): continue
        x, before = rand(2, 4, 7, 6), copy.deepcopy(net)
        new = repq.convert(net, inplace=True)
        ours = {id(p) for p in new.parameters()}
        assert ours <= {id(p) for p in net.parameters()} | {id(p) for p in new.parameters() if p.ndim}
        expected = before.eval()(x)
        assert_same(copy.deepcopy(new).eval()(x), expected, 1e-11)
        assert_same(repq.merge(new)(x), expected, 1e-11)
        if not new.conversion.nested:
            assert_same(new.train()(x), before.train()(x), 1e-11)
            for a, b in zip(by_value(new), by_value(before)): assert_same(a, b, 1e-11)
        layers += len(new.conversion.layers)
        blocks += len(new.conversion.blocks)
    assert blocks > wanted/4 and layers > 3*blocks/2
    PROVEN['random foreign networks'] = wanted


def test_gradients_of_random_networks():
    "The same gradient for every parameter, by name of the original"
    rng = random.Random(1)
    for _ in range(15):
        net = randomize_bn(RandomNet(rng).double()).train()
        if not any(isinstance(m, nn.Conv2d) for m in net.modules()): continue
        x, before = rand(3, 4, 7, 6), copy.deepcopy(net)
        params = dict(net.named_parameters())   # the objects before conversion
        new = repq.convert(net, inplace=True)
        if new.conversion.nested: continue
        (new(x).pow(3).sum() + new(x).sum()).backward()
        (before(x).pow(3).sum() + before(x).sum()).backward()
        scale = max(p.grad.abs().max().item() for p in before.parameters() if p.grad is not None)
        for name, p in before.named_parameters():
            if p.grad is not None: assert_same(params[name].grad, p.grad, 1e-10, name, scale)


FAMILIES = dict( # name -> learning rate of QAT
    repvgg_a0=0.02, mobileone_s0=0.002, repvit_m0_9=0.02, fastvit_t8=0.02, repghostnet_050=0.02,
    lcnetv2_small=None, shvit_s1=None, ghostnetv3_050=None)


@pytest.fixture(scope='module')
def timm(): return pytest.importorskip('timm', reason='the extra `timm` is not installed')


def family(timm, name):
    net = randomize_bn(timm.create_model(name, num_classes=10))
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d): m.weight.data.mul_(0.4)
        if isinstance(getattr(m, 'gamma', None), nn.Parameter): nn.init.uniform_(m.gamma, 0.2, 0.5)
    return net.eval()


@pytest.mark.parametrize('name', FAMILIES)
def test_timm_families(timm, name):
    "Converted and merged they equal the original, and timm's own re-parametrized network"
    original, x = family(timm, name), torch.randn(2, 3, 64, 64)
    net = repq.convert(original)
    with torch.no_grad():
        y = original(x)
        assert y.std() > 1e-3
        assert_same(net(x), y, 1e-5)
        merged = repq.merge(net)
        assert_same(merged(x), y, 1e-5)
        assert_same(merged(x), timm.utils.reparameterize_model(original)(x), 1e-5)
    assert not net.conversion.left and not net.conversion.closed and len(net.conversion.blocks) > 4
    assert not any(isinstance(m, (nn.BatchNorm2d, RepConv2d)) for m in merged.modules())


@torch.no_grad()
def assert_layers_agree(net, plain, x):
    "Layer by layer, each fed what the reference is fed: a rounding tie would cascade"
    seen, layers, hooks = {}, quantizable_layers(net), []
    for name, layer in layers.items():
        def keep(m, args, y, name=name): seen[name] = args[0].clone(), y.clone()   # activations work in place
        hooks.append(layer.register_forward_hook(keep))
    net(x)
    for h in hooks: h.remove()
    assert len(seen) == len(layers)
    for name, (given, y) in seen.items():
        off = (plain.get_submodule(name)(given) - y).abs() > 1e-4*y.abs().max()
        assert off.float().mean() < 1e-3, name


@pytest.mark.parametrize('name', [n for n, lr in FAMILIES.items() if lr])
def test_two_qat_steps(timm, name):
    torch.manual_seed(0)
    net = repq.convert(timm.create_model(name, num_classes=10, drop_rate=0.)).train()
    net, losses = repq.quantize(net, 8, 8, start='first'), []
    opt = torch.optim.SGD(net.parameters(), FAMILIES[name])
    x, target = torch.randn(8, 3, 64, 64), torch.arange(8)
    for _ in range(6):
        loss = F.cross_entropy(net(x), target)
        losses.append(loss.item())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
    assert min(losses[1:]) < losses[0]
    plain = repq.merge(net)
    assert_layers_agree(net.eval(), plain, x)
    conv = next(m for m in plain.modules() if hasattr(m, 'codes') and m.weight.ndim == 4)
    assert torch.equal(conv.weight, conv.codes.to(conv.step)*conv.step[:, None, None, None])


def test_untraceable_attention_is_closed(timm):
    "TinyViT's attention cannot be traced: closed, said, and everything else converted"
    torch.manual_seed(0)
    original = randomize_bn(timm.create_model('tiny_vit_5m_224', num_classes=10)).eval()
    with pytest.warns(UserWarning, match='converted in part'): net = repq.convert(original)
    assert net.conversion.closed and not net.conversion.left and len(net.conversion.layers) > 20
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad(): assert_same(net(x), original(x), 1e-5)


def test_drop_path_keeps_branches_apart(timm):
    "A random drop between branches is no linear map in training: reported"
    with pytest.warns(UserWarning, match='converted in part'):
        net = repq.convert(timm.create_model('repvgg_a0', drop_path_rate=0.1))
    assert any('drop_path' in n and 'in training' in why for n, why in net.conversion.closed.items())


def test_copy_and_inplace():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    kept = copy.deepcopy(net.state_dict())
    new = repq.convert(net)
    assert type(net[0]) is nn.Conv2d and new[0].branch.weight is not net[0].weight
    assert new[0].after is not net[1]
    for k, t in net.state_dict().items(): assert torch.equal(t, kept[k])
    weight, norm = net[0].weight, net[1]
    assert repq.convert(net, inplace=True) is net and net[0].branch.weight is weight and net[0].after is norm


def test_frozen_norms_and_parameters_stay_frozen():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    new = repq.convert(net)
    assert new[0].training and not new[0].after.training and not new[0].branch.weight.requires_grad


class Forked(nn.Module):
    "Sums in its own forward, so it is rewritten"
    note = 'kept'
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.bn, self.reduction = nn.BatchNorm2d(4), 7
        self.head = nn.Linear(4, 3)
    def forward(self, x): return self.head((self.bn(self.a(x)) + self.b(x) + x).relu().mean((2, 3)))


def test_a_rewritten_network_lives_on(tmp_path):
    "It can be copied, saved, loaded, quantized, counted, and keeps its attributes"
    net, x = repq.convert(randomize_bn(Forked())).eval(), torch.randn(2, 4, 9, 9)
    assert isinstance(net, Rewritten) and net.reduction == 7 and 'Sum(' in repr(net.conversion)
    twin = copy.deepcopy(net)
    assert twin.reduction == 7 and twin.conversion is not None and torch.equal(twin(x), net(x))
    other = repq.convert(randomize_bn(Forked())).eval()
    assert_differs(other(x), net(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))
    torch.save(net, tmp_path/'net.pt')
    assert torch.equal(torch.load(tmp_path/'net.pt', weights_only=False)(x), net(x))
    assert repq.models.cost(net, (4, 9, 9)).macs == 81*4*4*9 + 12
    q = repq.quantize(twin.train(), 8, 8, start='first')
    q(x)
    assert repq.merge(q)(x).shape == (2, 3)


class Weighted(nn.Module):
    "A branch times a buffer"
    def __init__(self, shape):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.register_buffer('factor', torch.randn(shape))
    def forward(self, x): return self.a(x) + self.b(x)*self.factor


@pytest.mark.parametrize('shape', [(), (4, 1, 1)])
def test_a_factor_is_saved_and_loaded(shape):
    "A buffer of the original is part of the state of the converted network"
    net, other = (repq.convert(Weighted(shape)).eval() for _ in range(2))
    x = torch.randn(2, 4, 9, 9)
    assert len(net.conversion.layers) == 1
    assert_differs(other(x), net(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))


class Sampler(nn.Module):
    "Reads the value of a tensor"
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
    def forward(self, x): return self.conv(x) if float(x.mean()) > 0 else x


@pytest.mark.parametrize('module, why', [
    (Sampler(), 'torch.fx cannot trace it'),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode='reflect'), "padding_mode='reflect'"),
    (nn.Conv2d(4, 4, 3, dilation=2), 'dilation=(2, 2)'),
    (nn.Conv2d(4, 4, 2, padding='same'), 'even kernel'),
    (nn.ConvTranspose2d(4, 4, 2), 'not a plain nn.Conv2d')])
def test_what_is_left_is_named(module, why):
    net = nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 3), odd=module))
    with pytest.warns(UserWarning, match='converted in part'): new = repq.convert(net)
    report = new.conversion
    assert why in {**report.left, **report.closed}['odd'] and 'stem' in report.layers
    assert 'odd' in repr(report) and 'odd' in report._repr_html_()


def test_norms_without_statistics_or_weights_stay():
    for bn in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), bn).double()
        new, x = repq.convert(net), rand(2, 3, 8, 8)
        assert isinstance(new[0], RepConv2d) and new[0].after is None and type(new[1]) is nn.BatchNorm2d
        for training in (True, False): assert_same(new.train(training)(x), net.train(training)(x))


def test_a_change_in_place_of_a_value_in_use_is_no_sum():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        def forward(self, x):
            y = self.a(x)
            z = y
            z += self.b(x)
            return z.relu() + y   # y is z now
    net = Sneaky().double()
    new, x = repq.convert(net), rand(1, 4, 5, 5)
    assert_same(new(x), net(x))


def test_a_source_that_changes_in_place_starts_no_region():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
            self.act = nn.ReLU(inplace=True)
        def forward(self, x):
            x = x + 1
            y = self.a(x)
            self.act(x)
            return y + self.b(x)   # b reads what act left
    net = Sneaky().double()
    new, x = repq.convert(net), rand(1, 4, 5, 5)
    assert set(new.conversion.layers) == {'a', 'b'}
    assert_same(new(x), net(x))


def test_hooks_stay():
    "A convolution with weight_norm computes its weight in a hook"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        hooked = nn.utils.weight_norm(nn.Conv2d(3, 4, 3))
        parametrized = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
        net = nn.Sequential(hooked, nn.ReLU(), parametrized, nn.Conv2d(4, 4, 1)).double()
    with pytest.warns(UserWarning, match='converted in part'): new = repq.convert(net, inplace=True)
    assert 'hooks' in new.conversion.left['0'] and 'not a plain' in new.conversion.left['2']
    assert list(new.conversion.layers) == ['3']
    x = rand(1, 3, 8, 8)
    assert new(x).isfinite().all()


class Dropping(nn.Module):
    "A functional dropout, which a new forward would freeze in one mode"
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    def forward(self, x): return self.bn(self.conv(F.dropout(x, 0.5, self.training)))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.a, self.b = Dropping(), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
    def forward(self, x):
        x = self.drop(x).relu()
        return self.a(x) + self.b(x)


def test_dropout_by_function_keeps_working():
    "The module with the sum is rewritten, the one with the dropout keeps its code"
    net, x = Around().double(), rand(2, 4, 8, 8)
    new = repq.convert(net)
    assert set(new.conversion.layers) == {'rep', 'drop.conv'} and isinstance(new.drop, Dropping)
    assert_same(new.eval()(x), net.eval()(x))
    assert_differs(new.train()(x), new.train()(x))   # random in training


class Own(Dropping):
    def __init__(self):
        super().__init__()
        self.skip = nn.Conv2d(4, 4, 1)
    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        return self.bn(self.conv(x)) + self.skip(x)


def test_a_module_that_would_be_frozen_is_closed():
    "Dropout and sum in one forward: not rewritten, said, children converted"
    net, x = nn.Sequential(OrderedDict(own=Own())).double(), rand(2, 4, 8, 8)
    with pytest.warns(UserWarning, match='converted in part'): new = repq.convert(net)
    assert 'in training' in new.conversion.closed['own']
    assert set(new.conversion.layers) == {'own.conv', 'own.skip'}
    assert_same(new.eval()(x), net.eval()(x))
    assert_differs(new.train()(x), new.train()(x))


def test_quantize_says_when_it_cannot_trace():
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), Sampler())
    with pytest.warns(UserWarning, match='torch.fx cannot trace Sequential .*repq.convert'):
        repq.quantize(net, 8, 8)


# Many networks, from convert to integers

QUICK = '''timm/repvgg_a0 timm/edgenext_xx_small timm/mobilenetv3_small_050 timm/regnetx_002
torchvision/resnet18 torchvision/shufflenet_v2_x0_5'''.split()
MANY = '''timm/repvgg_b0 timm/mobileone_s0 timm/repvit_m0_9 timm/fastvit_t8 timm/repghostnet_050
timm/lcnetv2_small timm/shvit_s1 timm/efficientvit_b0 timm/efficientvit_m0 timm/levit_128s
timm/mobilevit_xxs timm/mobilevitv2_050 timm/resnet10t timm/resnet18 timm/resnetv2_50
timm/convnext_atto timm/mixnet_s timm/tinynet_e timm/ghostnet_050 timm/dla46_c timm/hrnet_w18_small
timm/cspresnet50 timm/ese_vovnet19b_dw timm/selecsls42b timm/poolformer_s12 timm/starnet_s1
timm/mobilenetv4_conv_small timm/inception_next_atto timm/efficientnet_lite0 timm/gernet_s
timm/resnest14d timm/swiftformer_xs timm/visformer_tiny timm/darknet53 timm/seresnet18
timm/mobilenetv2_035 timm/semnasnet_075 timm/efficientformer_l1 timm/densenet121 timm/resnet18d
timm/nf_regnet_b0 timm/rexnet_100 timm/skresnet18 timm/sebotnet33ts_256 timm/hardcorenas_a
timm/tiny_vit_5m_224 timm/vit_tiny_patch16_224 torchvision/resnet50 torchvision/mobilenet_v2
torchvision/mobilenet_v3_small torchvision/squeezenet1_1 torchvision/efficientnet_b0
torchvision/regnet_y_400mf torchvision/mnasnet0_5 torchvision/convnext_tiny torchvision/swin_t
torchvision/vgg11_bn torchvision/alexnet torchvision/vit_b_16'''.split()
LARGE = '''efficientvit_m0 levit_128s swiftformer_xs visformer_tiny efficientformer_l1 tiny_vit_5m_224
vit_tiny_patch16_224 vit_b_16'''.split()
SIZES = dict.fromkeys(LARGE, 224) | dict(alexnet=96, sebotnet33ts_256=256)   # others 64


def random_network(timm, name):
    "A network of timm or torchvision with random statistics and no weight at zero"
    library, name = name.split('/')
    if library == 'timm': net = family(timm, name)
    else:
        models = pytest.importorskip('torchvision').models
        net = randomize_bn(models.get_model(name, num_classes=10))
    for m in net.modules():
        if library == 'torchvision' and isinstance(m, nn.BatchNorm2d): m.weight.data.mul_(0.4)
        if isinstance(m, nn.Linear) and not m.weight.any(): nn.init.normal_(m.weight, std=0.02)
    return net.eval()


@pytest.mark.parametrize('name', QUICK + MANY)
def test_many_networks(timm, name, request):
    "Converted: the same function and class. At 8 bits, with ranges from data: close. Merged: the same again"
    if name in MANY and not request.config.getoption('--slow'): pytest.skip('--slow tries all networks')
    torch.manual_seed(0)
    net, size = random_network(timm, name), SIZES.get(name.split('/')[1], 64)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')   # what is left is named, and tested elsewhere
        y, new = net(x), repq.convert(net)
        assert isinstance(new, type(net)) and y.std() > 1e-6
        assert_same(new(x), y, 1e-5)
        if hasattr(net, 'forward_features'):
            assert_same(new.forward_features(x), net.forward_features(x), 1e-5)
        repq.recalibrate(repq.quantize(new, 8, 8), [x], 'ranges')
        quantized = new.eval()(x)
        assert rel_error(quantized, y) < 0.1
        assert rel_error(repq.merge(new)(x), quantized) < 0.05   # a tie may round the other way


# Batch norm under other names

class Doubled(nn.BatchNorm2d):
    "A subclass that computes something else"
    def forward(self, x): return 2*super().forward(x)


class Named(nn.BatchNorm2d):
    "A subclass that computes batch norm, in code of its own"
    def forward(self, x):
        uses_batch = self.training and not self.track_running_stats
        stats = (None, None) if uses_batch else (self.running_mean, self.running_var)
        return F.batch_norm(x, *stats, self.weight, self.bias, self.training, self.momentum, self.eps)


class Vgg(nn.Module):
    "RepVGG's block, a few times, with any batch norm"
    def __init__(self, norm=nn.BatchNorm2d, depth=3, channels=4):
        super().__init__()
        def conv_bn(k):
            return nn.Sequential(nn.Conv2d(channels, channels, k, padding=k//2, bias=False), norm(channels))
        def block(): return nn.ModuleList([conv_bn(3), conv_bn(1), norm(channels)])
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(channels, 3)
    def forward(self, x):
        for a, b, c in self.blocks: x = (a(x) + b(x) + c(x)).relu()
        return self.head(x.mean((2, 3)))


def synchronised(): return nn.SyncBatchNorm.convert_sync_batchnorm(Vgg())


@pytest.mark.parametrize('make', [Vgg, synchronised, lambda: Vgg(Named)])
def test_batch_norm_under_other_names(make):
    "The same blocks, the same function in training and evaluation, no norm left after merging"
    net, x = randomize_bn(make().double()), rand(4, 4, 7, 7)
    new = repq.convert(net)
    assert len(new.conversion.blocks) == len(new.conversion.layers) == 3
    for training in (True, False): assert_same(new.train(training)(x), net.train(training)(x), 1e-12)
    for a, b in zip(by_value(new), by_value(net)): assert_same(a, b, 1e-12)
    assert_same(repq.merge(new)(x), net(x), 1e-12)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in repq.merge(new).modules())
    q = repq.quantize(repq.convert(make()), 8, 8)
    assert len(quantizable_layers(q)) == 4


def test_quantize_folds_synchronised_norms():
    parts = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)
    net = nn.Sequential(*parts)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    randomize_bn(net)
    q, x = repq.quantize(copy.deepcopy(net), 8, 8), torch.randn(8, 4, 5, 5)
    assert type(q[0].after) is nn.BatchNorm2d and type(q[1]) is nn.Identity
    assert type(q[4]) is nn.SyncBatchNorm   # behind a linear layer: it sees (batch, channels)
    repq.recalibrate(q, [x], 'ranges')
    assert rel_error(q.eval()(x), net.eval()(x)) < 0.05
    repq.merge(q)(x)


def test_a_norm_that_computes_something_else_stays():
    net, x = randomize_bn(nn.Sequential(nn.Conv2d(4, 4, 3), Doubled(4)).double()), rand(2, 4, 7, 7)
    with pytest.warns(UserWarning, match='converted in part'): new = repq.convert(net)
    assert type(new[1]) is Doubled
    assert_same(new.eval()(x), net.eval()(x))


def test_synchronised_timm_norms(timm):
    "timm's norm with an activation, synchronised: the same layers as without"
    net = randomize_bn(timm.create_model('mobilenetv3_small_050', num_classes=10)).eval()
    sync, x = timm.layers.convert_sync_batchnorm(copy.deepcopy(net)), torch.randn(1, 3, 64, 64)
    assert any(isinstance(m, nn.SyncBatchNorm) for m in sync.modules())
    a, b = repq.convert(net), repq.convert(sync)
    assert a.conversion.layers == b.conversion.layers
    with torch.no_grad(): assert_same(b(x), net(x), 1e-5)


# What stays as it is, and who says so

class Reader(nn.Module):
    "Reads the weight of a convolution that it also calls"
    def __init__(self):
        super().__init__()
        self.body, self.conv = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
    def forward(self, x): return self.conv(self.body(x).relu()) + self.conv.weight.sum()


@pytest.mark.parametrize('converted', [True, False])
def test_a_weight_that_is_read_stays(converted):
    net, x = Reader(), torch.randn(2, 3, 8, 8)
    if converted:
        with pytest.warns(UserWarning, match='converted in part'): net = repq.convert(net)
    left = r'left in full precision: conv \(its parameters are (also )?read by other code'
    with pytest.warns(UserWarning, match=left):
        repq.quantize(net, 8, 8)
    assert type(net.conv) is nn.Conv2d and isinstance(net.body, RepConv2d)
    net(x)


def test_quantize_leaves_what_convert_left():
    net = nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 3), body=Vgg(), more=nn.Linear(3, 3)))
    new = repq.convert(net, leaf=['body'])
    with pytest.warns(UserWarning, match=r'left in full precision: body \(as leaf= says\)'):
        q = repq.quantize(new, 8, 8)
    assert set(quantizable_layers(q)) == {'stem', 'more'}
    assert type(q.body.blocks[0][0][0]) is nn.Conv2d and type(q.body.head) is nn.Linear
    repq.recalibrate(q, [torch.randn(4, 3, 8, 8)], 'ranges')
    assert 'as leaf= says' in repr(repq.merge(q).conversion)
    wrapped = nn.Sequential(repq.convert(net, leaf=['body']))   # a part of another network
    with pytest.warns(UserWarning, match=r'0\.body \(as leaf= says\)'): repq.quantize(wrapped, 8, 8)
    assert set(quantizable_layers(wrapped)) == {'0.stem', '0.more'}


def test_edgenext(timm):
    "Its position encoding reads a weight: 19 other convolutions are quantized, and it runs"
    torch.manual_seed(0)
    original, x = family(timm, 'edgenext_xx_small'), torch.randn(2, 3, 64, 64)
    with pytest.warns(UserWarning, match='converted in part'): net = repq.convert(original)
    with pytest.warns(UserWarning, match=r'pos_embd.token_projection \(its parameters'):
        repq.quantize(net, 8, 8)
    repq.recalibrate(net, [x], 'ranges')
    with torch.no_grad(): assert rel_error(net.eval()(x), original(x)) < 0.1
    assert_layers_agree(net, repq.merge(net), x)


def test_a_convolution_that_is_called_twice_is_a_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        def forward(self, x): return self.b(self.a(x)) + self.a(x.relu())
    net, x = Twice().double(), rand(2, 4, 7, 7)
    new = repq.convert(net)
    assert set(new.conversion.layers) == {'a', 'b'} and not new.conversion.left
    assert_same(new(x), net(x))
    q = repq.quantize(repq.convert(Twice()), 8, 8)
    repq.recalibrate(q, [torch.randn(2, 4, 7, 7)], 'ranges')
    repq.merge(q)(torch.randn(2, 4, 7, 7))


def test_dropout_is_no_convolution(recwarn):
    "A dropout in a head is not worth a word; one between two branches splits them"
    convs = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 4, 1)
    head = nn.Sequential(*convs, nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 2))
    report = repq.convert(head).conversion
    assert not recwarn and not report.left and not report.split
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Dropout(0.1)
        def forward(self, x): return self.drop(self.a(x)) + self.b(x)
    report = repq.convert(Between()).conversion
    assert not recwarn and not report.left and report.split[0][0] == 'drop'
    assert 'in training' in report.split[0][1]


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), fused
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused: y = F.scaled_dot_product_attention(q, k, v)
        else: y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y)


class Sequences(nn.Module):
    "All kinds of things without a layer of ours"
    def __init__(self):
        super().__init__()
        self.fused, self.plain = Attention(True), Attention(False)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
    def forward(self, x):
        x = self.plain(self.fused(x))
        x = x + self.mha(x, x, x)[0]
        return self.head(self.lstm(x)[0])


def test_what_stays_in_float_is_said_once():
    with pytest.warns(UserWarning) as said: q = repq.quantize(Sequences(), 8, 8)
    assert len(said) == 1
    text = str(said[0].message)
    parts = ('mha (MultiheadAttention', 'lstm (LSTM: a recurrent layer)', 'fused (attention)',
             'plain (a matrix product)')
    for part in parts:
        assert part in text, part
    assert set(quantizable_layers(q)) == {'fused.qkv', 'fused.proj', 'plain.qkv', 'plain.proj', 'head'}
    repq.recalibrate(q, [torch.randn(2, 5, 8)], 'ranges')
    repq.merge(q)(torch.randn(2, 5, 8))


def test_weights_that_a_function_takes(timm):
    "torchvision's Swin hands the weights of its linear layers to a function: they are never called, and stay"
    from torchvision.models import swin_t
    net = swin_t(num_classes=5).eval()
    left = r'qkv and \d+ more|attn.(qkv|proj), .* \(its parameters are read by other code\)'
    with pytest.warns(UserWarning, match=left):
        repq.quantize(net, 8, 8)
    x = torch.randn(1, 3, 64, 64)
    repq.recalibrate(net, [x], 'ranges')
    assert repq.merge(net)(x).shape == (1, 5) and len(quantizable_layers(net)) == 29


def test_networks_without_products_say_nothing(recwarn):
    repq.quantize(repq.convert(Vgg()), 8, 8)
    repq.quantize(repq.models.resnet18(5, 'acnet', 0.125), 4, 4)
    assert not recwarn


# Rewritten modules keep what they are

class Own2(nn.Module):
    "A network with methods, attributes and a property of its own, whose forward has a region"
    scale = 3
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.bn, self.classifier, self.reduction = nn.BatchNorm2d(4), nn.Linear(4, 3), 7
        self.unused = nn.Linear(2, 2)
    def forward_head(self, x): return self.classifier(x.mean((2, 3)))
    def forward(self, x): return self.forward_head((self.bn(self.a(x)) + self.b(x)).relu())
    def get_classifier(self): return self.classifier
    def reset_classifier(self, n): self.classifier = nn.Linear(4, n)
    @property
    def first(self): return self.a
    @staticmethod
    def made_by(): return 'us'


def test_a_rewritten_network_keeps_its_class(tmp_path):
    net, x = randomize_bn(Own2()).eval(), torch.randn(2, 4, 9, 9)
    new = repq.convert(net)
    assert isinstance(new, Own2) and type(new).__name__ == 'Own2' and set(new.conversion.layers) == {'rep'}
    torch.save(new, tmp_path/'net.pt')
    loaded = torch.load(tmp_path/'net.pt', weights_only=False)
    for n in (new, copy.deepcopy(new), loaded, repq.convert(copy.deepcopy(net), inplace=True)):
        assert isinstance(n, (Own2, Rewritten)) and n.scale == 3 and n.reduction == 7
        assert n.made_by() == 'us' and n.get_classifier() is n.classifier
        assert_same(n(x), net(x), 1e-6)
        for name in ('a', 'first'):
            with pytest.raises(AttributeError, match='a of this Own2 became part of the layer rep'):
                getattr(n, name)
        with pytest.raises(AttributeError, match="no attribute 'c'"): n.c
        assert set(dict(n.named_children())) == {'rep', 'classifier', 'unused'}
        n.reset_classifier(5)
        assert n(x).shape == (2, 5)
    assert repq.convert(net, inplace=True) is net


def test_a_rewritten_network_is_quantized_traced_and_compiled_like_any_other():
    net, x = repq.convert(randomize_bn(Own2())).eval(), torch.randn(2, 4, 9, 9)
    graph = torch.fx.symbolic_trace(repq.merge(net))
    assert_same(graph(x), net(x), 1e-5)
    exported = torch.export.export(repq.merge(net), (x,)).module()
    assert_same(exported(x), net(x), 1e-5)
    again = repq.convert(net)
    assert isinstance(again, Own2) and torch.equal(again(x), net(x))


class Loop(nn.Module):
    "Iterates over a sequence that it never calls; the region goes over its border"
    def __init__(self):
        super().__init__()
        self.stage, self.conv = nn.Sequential(Skip(), nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 3)
    def forward(self, x):
        for m in self.stage: x = m(x)
        return self.conv(x.relu())


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
    def forward(self, x): return x + self.conv(x)


def test_a_sequence_that_is_iterated_is_not_rewritten():
    net, x = Loop().double(), rand(2, 4, 7, 7)
    new = repq.convert(net)
    assert_same(new(x), net(x))
    assert len(new.conversion.layers) == 2


def test_timm_methods_live_on(timm):
    original, x = family(timm, 'mobileone_s0'), torch.randn(1, 3, 64, 64)
    net = repq.convert(original)
    assert type(net) is type(original) and type(net.stages[0][0]).__name__ == 'MobileOneBlock'
    assert isinstance(net.stages[0][0], type(original.stages[0][0]))
    with torch.no_grad(): assert_same(net.forward_features(x), original.forward_features(x), 1e-5)
    net.reset_classifier(4)
    assert net(x).shape == (1, 4)


# The paper's exceptions for the families it has

def bits_of(net):
    return {n: (l.weight_quantizer.bits, l.input_quantizer.bits) for n, l in quantizable_layers(net).items()}


def test_exceptions_of_the_paper_in_converted_networks(timm, recwarn):
    from torchvision.models import resnet18
    repvgg = repq.convert(timm.create_model('repvgg_a0', num_classes=10))
    resnet = repq.convert(resnet18(num_classes=10))
    cases = {'repvgg': (repvgg, 'stem.rep', (4, 8)), 'resnet': (resnet, 'conv1', (8, 8))}
    for name, (net, first, bits) in cases.items():
        assert net.conversion.family == name
        got = bits_of(repq.quantize(net, 4, 4))
        assert got.pop(first) == bits and set(got.values()) == {(4, 4)}
    part = nn.Sequential(OrderedDict(body=repq.convert(resnet18(num_classes=10)), head=nn.Linear(10, 2)))
    assert bits_of(repq.quantize(part, 4, 4))['body.conv1'] == (8, 8)
    without = repq.quantize(repq.convert(resnet18(num_classes=10)), 4, 4, exceptions=None)
    assert set(bits_of(without).values()) == {(4, 4)}
    assert not recwarn


def test_an_unknown_family_is_said_once(recwarn):
    for exceptions, bits in ((None, 4), ('paper', 8), ({'0': (8, 8)}, 4)):
        repq.quantize(nn.Sequential(nn.Conv2d(3, 4, 3)), bits, bits, exceptions=exceptions)
    assert not recwarn
    told = r"no rule for Sequential, all layers get the same bits.*exceptions=\{'0': \(8, 8\)\}"
    with pytest.warns(UserWarning, match=told) as said:
        net = repq.quantize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), 4, 4)
    assert len(said) == 1 and set(bits_of(net).values()) == {(4, 4)}


def test_timm_network_to_integers(tmp_path):
    "Converted, quantized, exported: the file does what the network does, attention included"
    pytest.importorskip('onnxruntime')
    timm = pytest.importorskip('timm')
    torch.manual_seed(0)
    net, x = repq.convert(timm.create_model('repvit_m0_9', num_classes=10).eval()), torch.randn(2, 3, 64, 64)
    repq.quantize(net, 8, 8, start='first')
    net.train()(x)
    repq.export_onnx(net.eval(), tmp_path/'net.onnx', x)
    report = repq.check_parity(net, tmp_path/'net.onnx', [x])
    assert report.ok, report
