"expand: the same function with branches, gradients for all of them, and everything behind it"
import copy, warnings
import pytest
import torch
from torch import nn
import torch.nn.functional as F
import repq
from repq.adopt.expand_network import count_multiplications, expand_layer, innermost, main_part, new_norms
from repq.algebra.branch import Conv, Identity, Norm, Scale, Seq, Sum
from repq.models.blocks import BLOCKS, make_block
from repq.quantization.layer import RepConv2d
from repq.tools.testing import assert_differs, assert_same, gradients, randomize_bn

ZOO = [b for b in BLOCKS if b != 'plain']
NORMED = [b for b in ZOO if b != 'ecb']
BARE = ['orepa', 'ecb', 'expandnet', 'diracnet']   # for convolutions without a norm


@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)


def rand(*shape): return torch.randn(shape, dtype=torch.float64)


def conv(i, o, k=3, **kw): return nn.Conv2d(i, o, k, **{'padding': k//2, **kw})


def small(norm=True):
    "Two convolutions with bias, a shortcut of 1×1, a head"
    def part(i, o, stride=1):
        return [conv(i, o, stride=stride), nn.BatchNorm2d(o) if norm else nn.Identity(), nn.ReLU()]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    return nn.Sequential(*part(3, 8), *part(8, 8), *part(8, 16, 2), *head)


class UNet(nn.Module):
    "One level down and up again, with concatenation and a transposed convolution"
    def __init__(self, c=8):
        super().__init__()
        def double(i, o):
            def part(n): return conv(n, o, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
            return nn.Sequential(*part(i), *part(o))
        self.down, self.pool, self.middle = double(3, c), nn.MaxPool2d(2), double(c, 2*c)
        self.up, self.merge, self.out = nn.ConvTranspose2d(2*c, c, 2, 2), double(2*c, c), nn.Conv2d(c, 2, 1)

    def forward(self, x):
        high = self.down(x)
        low = self.up(self.middle(self.pool(high)))
        return self.out(self.merge(torch.cat([high, low], 1)))


def tame(net):
    "Random norms that do not let activations grow"
    for m in randomize_bn(net).modules():
        if isinstance(m, nn.BatchNorm2d): m.weight.data.mul_(0.4)
    return net


CASES = dict(
    skip=dict(i=6, o=6), stride=dict(i=6, o=6, stride=2), wider=dict(i=4, o=6),
    one_direction=dict(i=4, o=4, stride=(1, 2)),
    groups=dict(i=6, o=6, groups=2), depthwise=dict(i=6, o=6, groups=6), no_padding=dict(i=4, o=4, padding=0),
    wide_padding=dict(i=4, o=4, padding=2), large=dict(i=4, o=4, k=5))


def layer(i, o, k=3, stride=1, groups=1, padding=None, bias=True, norm=True):
    after = randomize_bn(nn.BatchNorm2d(o)) if norm else None
    return RepConv2d(Conv(i, o, k, groups, bias=bias), stride, padding, after=after).double()


def check(old, block, x, training_tol=1e-10):
    new = expand_layer(copy.deepcopy(old), BLOCKS[block])
    assert_same(copy.deepcopy(new).eval()(x), copy.deepcopy(old).eval()(x), 1e-10, block)
    a, b = copy.deepcopy(old).train(), copy.deepcopy(new).train()
    assert_same(b(x), a(x), training_tol, block)
    if block != 'qarepvgg':   # its two norms average their statistics one by one
        assert_same(b.eval()(x), a.eval()(x), training_tol, f'{block}, running statistics after a step')
    merged = copy.deepcopy(new).train()
    merged.mode = 'merged'
    assert_same(merged(x), copy.deepcopy(old).train()(x), training_tol, f'{block}, merged')
    return new


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('block', NORMED)
def test_the_same_function_with_norm(block, case):
    x = rand(4, CASES[case]['i'], 10, 9)
    new = check(layer(**CASES[case]), block, x, 1e-3 if block == 'qarepvgg' else 1e-10)
    assert type(new.branch) is not Conv and sum(p.numel() for p in new.parameters()) > CASES[case]['o']


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('block', BARE)
def test_the_same_function_without_norm(block, case, bias):
    if block == 'ecb' and case == 'large': pytest.skip('ecb has 3×3 filters')
    new = check(layer(**CASES[case], norm=False, bias=bias), block, rand(4, CASES[case]['i'], 10, 9))
    assert new.after is None


@pytest.mark.parametrize('bias', [True, False])
def test_qarepvgg_differs_by_epsilon_alone_in_training(bias):
    "With a tiny epsilon the outer norm removes all that the inner one does"
    old, x = layer(6, 6, bias=bias), rand(4, 6, 10, 9)
    old.after.eps = 1e-12
    check(old, 'qarepvgg', x, 1e-9)


def silent(module, forward, steps=2, lr=0.05):
    "Parameters whose gradient is zero in all of the first steps, beside the largest"
    seen = {}
    for _ in range(steps):
        grads = gradients(module, forward())
        with torch.no_grad():
            for n, p in module.named_parameters():
                p -= lr*grads[n]
                seen.setdefault(n, []).append(grads[n].abs().max().item())
    top = max(max(s) for s in seen.values())
    return {n for n, s in seen.items() if max(s) < 1e-10*top}


@pytest.mark.parametrize('norm', [True, False])
@pytest.mark.parametrize('block', ZOO)
def test_every_parameter_learns_within_two_steps(block, norm):
    if block not in (NORMED if norm else BARE): pytest.skip('does not fit')
    x, old = rand(4, 6, 9, 9), layer(6, 6, norm=norm)
    new, fresh = expand_layer(old, BLOCKS[block]), make_block(block, 6, 6).double()
    if not norm: fresh.after = None
    mine = silent(new, lambda: new(x).pow(3).mean())
    theirs = silent(fresh, lambda: fresh(x).pow(3).mean())
    assert mine <= theirs
    if block not in ('qarepvgg', 'dbb', 'ecb'): assert not mine


@pytest.mark.parametrize('block', ['acnet', 'repvgg', 'orepa', 'mobileone', 'expandnet', 'diracnet'])
def test_every_parameter_learns_through_the_quantized_kernel(block):
    "A network at 4 bits, two steps of training after its quantizers have started"
    net = repq.expand(tame(small()).train(), block, where='*').double()
    repq.quantize(net, 4, 4, start='first', exceptions=None)
    x, target = rand(16, 3, 12, 12), torch.arange(16) % 4
    net(x)
    steps = {n for n, _ in net.named_parameters() if 'quantizer' in n}
    assert not silent(net, lambda: F.cross_entropy(net(x), target), lr=0.01) - steps


def test_the_main_branch_has_the_old_parameters():
    old = layer(4, 6, bias=False)
    for block in ('repvgg', 'acnet', 'orepa', 'mobileone', 'dbb', 'qarepvgg'):
        new = expand_layer(copy.deepcopy(old), BLOCKS[block])
        main = main_part(new.branch)
        assert torch.equal(innermost(main).weight, old.branch.weight), block
        norm = main.bn if new.after is None else new.after
        state = norm.state_dict()
        for name, t in old.after.state_dict().items(): assert torch.equal(state[name], t), (block, name)


def test_momentum_epsilon_and_frozen_norms_stay():
    old = layer(4, 4)
    old.after.eps, old.after.momentum = 1e-3, 0.02
    old.train()
    old.after.eval()
    new = expand_layer(old, BLOCKS['repvgg'])
    assert [(n.bn.eps, n.bn.momentum) for n in new.norms()] == [(1e-3, 0.02)]*3
    assert [n.bn.training for n in new.norms()] == [False, True, True]


def test_a_dead_filter():
    old = layer(4, 4)
    with torch.no_grad(): old.branch.weight[1] = 0
    for block in NORMED: check(old, block, rand(4, 4, 8, 8), 1e-3 if block == 'qarepvgg' else 1e-10)


@pytest.mark.parametrize('block', ['acnet', 'repvgg', 'orepa', 'qarepvgg', 'dbb'])
def test_torchvision(block):
    from torchvision.models import resnet18
    net = tame(resnet18(num_classes=5))
    x, weights = torch.randn(4, 3, 64, 64), copy.deepcopy(net.state_dict())
    new = repq.expand(net, block)
    assert len(new.expansion.expanded) == 16 and type(new).__name__ == 'ResNet'
    with torch.no_grad():
        assert_same(copy.deepcopy(new).eval()(x), copy.deepcopy(net).eval()(x), 1e-5)
        assert_same(repq.merge(new)(x), copy.deepcopy(net).eval()(x), 1e-5)
        a, b = copy.deepcopy(net).train()(x), copy.deepcopy(new).train()(x)
        assert_same(b, a, 1e-5 if block != 'qarepvgg' else 1e-2)
    for name, t in net.state_dict().items(): assert torch.equal(t, weights[name]), name   # a copy was changed


def test_timm():
    timm = pytest.importorskip('timm')
    for name in ('resnet10t', 'mobilenetv2_035'):   # norms with an activation inside; depthwise convolutions
        net = tame(timm.create_model(name, num_classes=5)).eval()
        x = torch.randn(2, 3, 64, 64)
        new = repq.expand(net, 'repvgg')
        with torch.no_grad(): assert_same(new(x), net(x), 1e-5)
        depthwise = [n for n in new.expansion.expanded if new.get_submodule(n).groups > 1]
        assert len(new.expansion.expanded) > 5 and bool(depthwise) == (name == 'mobilenetv2_035')


def test_unet_from_expansion_to_onnx(tmp_path):
    net = tame(UNet()).eval()
    new = repq.expand(net, 'acnet', input_size=(3, 16, 16))
    x = torch.randn(4, 3, 16, 16)
    assert set(new.expansion.left) == {'up', 'out'} and 'ConvTranspose2d' in new.expansion.left['up']
    assert new.expansion.step.plain < new.expansion.step.branches < new.expansion.step.merged
    with torch.no_grad(): assert_same(new(x), net(x), 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # the transposed convolution stays in full precision
        repq.quantize(new.train(), 8, 8, start='first')
    opt = torch.optim.SGD(new.parameters(), 0.02)
    for _ in range(4):
        opt.zero_grad()
        new(x).square().mean().backward()
        opt.step()
    plain = repq.merge(new)
    with torch.no_grad(): assert_same(plain(x), new.eval()(x), 1e-4)
    pytest.importorskip('onnxruntime')
    repq.export_onnx(plain, tmp_path/'net.onnx', x)
    assert repq.check_parity(plain, tmp_path/'net.onnx', [x])


def test_converted_plain_and_own_networks_agree():
    net, x = tame(small()).eval(), torch.randn(2, 3, 12, 12)
    for given in (net, repq.convert(net)):
        torch.manual_seed(1)
        new = repq.expand(given, 'acnet')
        assert_same(new(x), net(x), 1e-5)
        assert list(new.expansion.expanded) == ['0', '3', '6'] and 'Norm' in new.conversion.layers['3'][0]
    own = tame(repq.models.resnet18(block='plain', n_classes=4, width=0.125)).eval()
    new = repq.expand(own, 'repvgg')
    assert type(new) is type(own) and 'conversion' not in vars(new)
    assert_same(new(x), own(x), 1e-5)
    again = repq.expand(repq.expand(net, 'acnet', where='0'), 'repvgg')
    assert list(again.expansion.left) == ['0'] and 'branches already' in again.expansion.left['0']
    assert_same(again(x), net(x), 1e-5)


def test_fastai_trains_an_expanded_network():
    pytest.importorskip('fastai')
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    x, y = torch.randn(32, 3, 12, 12), torch.arange(32) % 4
    data = torch.utils.data.TensorDataset(x, y)
    dls = DataLoaders(*(torch.utils.data.DataLoader(data, 8) for _ in range(2)))
    net = repq.expand(tame(small()), 'acnet')
    gammas = [n.bn.weight for name in net.expansion.expanded for n in new_norms(net.get_submodule(name))]
    assert len(gammas) == 6 and not any(g.any() for g in gammas)
    learn = Learner(dls, net, loss_func=F.cross_entropy, cbs=repq.QAT(4, 4, start='first'), lr=0.01)
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    assert all(g.any() for g in gammas)   # single channels may be dead
    plain = repq.merge(learn.model)
    with torch.no_grad(): assert_same(plain(x), learn.model.eval()(x), 1e-4)
    assert not any(isinstance(m, (RepConv2d, nn.BatchNorm2d)) for m in plain.modules())


@pytest.mark.parametrize('block', ['repvgg', 'dbb'])
def test_running_statistics_from_batches(block):
    "Those that a long training without learning would arrive at"
    net, batches = tame(small()), [torch.randn(16, 3, 12, 12)*3 for _ in range(3)]
    new = repq.expand(net, block, batches=batches)
    truth = copy.deepcopy(new)
    truth.eval()
    for name in new.expansion.expanded:
        for n in new_norms(truth.get_submodule(name)):
            n.bn.reset_running_stats()
            n.bn.momentum = None
            n.bn.train()
    with torch.no_grad():
        for x in batches: truth(x)
    for name in new.expansion.expanded:
        for a, b in zip(new_norms(new.get_submodule(name)), new_norms(truth.get_submodule(name))):
            assert_same(a.bn.running_mean, b.bn.running_mean, 1e-4)
            assert_same(a.bn.running_var, b.bn.running_var, 5e-2)   # PyTorch's are unbiased
            assert_differs(a.bn.running_var, torch.ones_like(a.bn.running_var), 0.02)
    assert not any(m._forward_pre_hooks for m in new.modules())


def test_estimated_statistics_are_of_the_right_order():
    "After the first steps evaluation is close to training, though gamma has moved"
    x = torch.randn(64, 3, 12, 12)*5 + 3
    net = small()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d): m.momentum = None
    with torch.no_grad(): net(x)
    new = repq.expand(net, 'repvgg')
    for name in new.expansion.expanded:
        for n in new_norms(new.get_submodule(name)):
            estimated = n.bn.running_var.clone()
            n.bn.reset_running_stats()
            n.bn.estimated = estimated
    with torch.no_grad(): new.train()(x)
    for name in new.expansion.expanded:
        for n in new_norms(new.get_submodule(name)):
            ratio = (n.bn.estimated/n.bn.running_var).log().mean().exp()
            assert 0.2 < ratio < 5, (name, ratio)


def test_where():
    net = tame(small())
    assert list(repq.expand(net, where='3').expansion.expanded) == ['3']
    assert list(repq.expand(net, where=['3', '6']).expansion.expanded) == ['3', '6']
    assert list(repq.expand(net, where='[03]').expansion.expanded) == ['0', '3']
    strided = repq.expand(net, where=lambda name, layer: layer.stride == (2, 2))
    assert list(strided.expansion.expanded) == ['6']
    assert strided.expansion.left == {'0': 'not chosen', '3': 'not chosen'}


class Odd(nn.Module):
    "Convolutions that cannot be expanded, and one that can"
    def __init__(self):
        super().__init__()
        self.twice, self.wide = conv(4, 4), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, 2), nn.Sequential(conv(4, 4), nn.BatchNorm2d(4))
        self.tied, self.hooked = conv(4, 4), conv(4, 4)
        self.tied.weight = self.twice.weight
        self.hooked.register_forward_hook(lambda *args: None)

    def forward(self, x):
        y = self.wide(self.twice(self.twice(x).relu()).relu())
        return self.last(self.up(self.hooked(self.tied(y).relu())))


def own(branch):
    "A block of one's own with a norm after it"
    return lambda i, o, k, stride, groups: RepConv2d(branch(i, o, k), stride, after=True)


REFUSED = [
    (dict(where='wide'), r'wide cannot be expanded: dilation=\(2, 2\)'),
    (dict(where='up'), 'up cannot be expanded: ConvTranspose2d'),
    (dict(where='twice'), 'twice cannot be expanded: it is called 2 times'),
    (dict(where='tied'), 'tied cannot be expanded: another layer uses the same weight'),
    (dict(where='hooked'), 'hooked cannot be expanded: it has hooks'),
    (dict(where='lats'), "no convolution is called 'lats'; there are .*last.0"),
    (dict(where=[]), 'no convolution was expanded'),
    (dict(where=lambda name, layer: False), 'no convolution was expanded'),
    (dict(block='acent'), "block must be one of 'repvgg'.*'acent'"),
    (dict(block='plain'), 'plain has no branches to expand to; possible: repvgg'),
    (dict(block='ecb'), 'it has a batch norm, the block has none; possible: repvgg'),
    (dict(block=own(lambda i, o, k: Conv(i, o, k))), 'has no branches'),
    (dict(block=own(lambda i, o, k: Conv(i, o, 5))), r'kernel \(5, 5\)'),
    (dict(block=own(lambda i, o, k: Sum(Conv(i, o, k), Identity(i)))), 'no branch can cancel'),
    (dict(block=own(lambda i, o, k: Seq(Conv(i, o, k), Conv(o, o, 1)))), 'of sequences only'),
    (dict(block=own(lambda i, o, k: Sum(Seq(Conv(i, o, 1), Conv(o, o, k)), Conv(i, o, 1)))),
     'no branch that is a single'),
    (dict(batches=torch.randn(2, 4, 8, 8)), 'put it into a list'),
    (dict(batches=[]), 'batches held no batch')]


@pytest.mark.parametrize('given, message', REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_bad_input_is_refused(given, message):
    with pytest.raises(ValueError, match=message): repq.expand(Odd(), **given)


def test_more_bad_input():
    with pytest.raises(ValueError, match='possible: orepa, ecb, expandnet, diracnet'):
        repq.expand(small(norm=False), 'acnet')
    with pytest.raises(ValueError, match='cannot be centred'):
        repq.expand(nn.Sequential(conv(3, 4, 4), nn.BatchNorm2d(4)), 'acnet', where='0')
    with pytest.raises(ValueError, match='kernel_size must be 3'):
        repq.expand(nn.Sequential(conv(3, 4, 5)), 'ecb', where='0')
    with pytest.raises(ValueError, match='expand first, then quantize'):
        repq.expand(repq.quantize(small(), 8, 8))
    with pytest.raises(TypeError, match='takes a network'): repq.expand({'weight': 1})
    net = repq.ptq(small(), [torch.randn(4, 3, 12, 12)])
    with pytest.raises(ValueError, match='merged already'): repq.expand(repq.merge(net))
    report = repq.expand(Odd()).expansion
    assert list(report.expanded) == ['last.0']
    assert {'wide', 'up', 'twice', 'tied', 'hooked'} == set(report.left)
    text = repr(report)
    assert all(name in text for name in (*report.left, *report.expanded))
    assert '<table>' in report._repr_html_()


def test_multiplications_are_those_of_the_formula():
    "ACNet and the scaled sequence of OREPA, counted by hand"
    positions = 32*8*8*16*16
    def count(layer, mode='branches'):
        return count_multiplications(nn.Sequential(layer), (8, 16, 16), mode=mode)
    assert count(repq.blocks.acnet(8, 8)) == 2*positions*15
    assert count(repq.blocks.plain(8, 8), 'merged') == 2*positions*9
    assert count(RepConv2d(Sum(Conv(8, 8, 3), Scale(Conv(8, 8, 1))))) == 2*positions*10
    layer = repq.blocks.acnet(8, 8)
    weights = copy.deepcopy(layer.state_dict())
    count(layer)
    for name, t in layer.state_dict().items(): assert torch.equal(t, weights[name]), name


class Switch(nn.Module):
    "Control flow that depends on data"
    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4)), conv(3, 4)

    def forward(self, x): return self.near(x) if x.mean() > 0 else self.far(x)


def test_control_flow_and_averaged_statistics():
    "What has no graph is expanded piece by piece, but its multiplications cannot be counted"
    net, x = randomize_bn(Switch()).eval(), torch.randn(2, 3, 8, 8)
    new = repq.expand(net, 'acnet')
    assert list(new.expansion.expanded) == ['near.0'] and 'no batch norm' in new.expansion.left['far']
    for sign in (x.abs(), -x.abs()): assert_same(new(sign), net(sign), 1e-5)
    with pytest.raises(ValueError, match='leave out input_size'):
        repq.expand(net, 'acnet', input_size=(3, 8, 8))
    averaged = small()
    for m in averaged.modules():
        if isinstance(m, nn.BatchNorm2d): m.momentum = None
    new = repq.expand(averaged, 'acnet', input_size=(3, 8, 8))
    assert new.expansion.step.plain > 0 and all(n.bn.momentum is None for n in new[0].norms())


def test_a_layer_that_does_not_fit_stays_as_it_is():
    "Its bias and running statistics too"
    def only_without_stride(i, o, k, stride, groups):
        if stride == (1, 1): return repq.blocks.acnet(i, o, k, stride, groups)
        return RepConv2d(Sum(Norm(Seq(Conv(i, o, 1), Conv(o, o, k))), Norm(Conv(i, o, 1))), stride)
    net, x = tame(small()).eval(), torch.randn(2, 3, 8, 8)
    new = repq.expand(net, only_without_stride)
    assert list(new.expansion.expanded) == ['0', '3'] and 'single convolution' in new.expansion.left['6']
    assert new[6].branch.bias is not None and torch.equal(new[6].after.running_mean, net[7].running_mean)
    assert_same(new(x), net(x), 1e-5)


@pytest.mark.parametrize('block', ['acnet', 'orepa', 'diracnet'])
def test_frozen_weights_stay_frozen(block):
    net = small().requires_grad_(False)
    new = repq.expand(net, block)
    for name in new.expansion.expanded:
        layer = new.get_submodule(name)
        frozen = [n for n, p in layer.named_parameters() if not p.requires_grad]
        assert len(frozen) == 3 and any(p.requires_grad for p in layer.parameters())   # weight, gamma, beta


def test_norm_inside_the_weight_alone():
    "A sum of one branch: the norm moves into the weight, nothing is added"
    def folded(i, o, k, stride, groups): return RepConv2d(Sum(Norm(Conv(i, o, k, groups))), stride)
    net, x = tame(small()).eval(), torch.randn(2, 3, 8, 8)
    new = repq.expand(net, folded)
    assert len(new.expansion.expanded) == 3 and new[0].after is None
    assert_same(new(x), net(x), 1e-5)


def test_type_and_state_are_kept(tmp_path):
    "A network in float64 keeps its type; its state is saved, and loaded into another"
    net = tame(small()).double().eval()
    new = repq.expand(net, 'orepa')
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    torch.save(new.state_dict(), tmp_path/'net.pt')
    other = repq.expand(small().double(), 'orepa').eval()
    other.load_state_dict(torch.load(tmp_path/'net.pt'))
    x = rand(2, 3, 12, 12)
    assert_same(other(x), net(x))
