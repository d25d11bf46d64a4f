"Networks on their way to integers: refusals of merge, hooks, post-training quantization, parameter groups"
import copy, warnings
import pytest, torch
from torch import nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
import repq
from repq.blocks import make_block
from repq.quantization.layer import QuantLinear, RepConv2d
from repq.quantization.network import FrozenQuantizer, quantizable_layers, set_bits
from repq.tools.testing import assert_same, randomize_bn


def network(block='repvgg'):
    return nn.Sequential(make_block(block, 3, 8), nn.ReLU(), make_block(block, 8, 8), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 4))


def batches(n=3): return [torch.randn(16, 3, 12, 12) for _ in range(n)]


def quantized(block='repvgg', bits=4):
    "A network whose quantizers have their steps"
    net = repq.quantize(randomize_bn(network(block)), bits, bits)
    return repq.recalibrate(net, batches(), 'ranges').eval()


def set_first(t, value):
    with torch.no_grad(): t.view(-1)[0] = value


# -- merge refuses what integers would hide

BROKEN = {
    'weight of a block': (lambda net: net[2].branch.parts[0].child.weight,
                          r'2: .*branch\.parts\.0\.child\.weight'),
    'running mean': (lambda net: net[2].branch.parts[1].bn.running_mean, r'2: .*running_mean'),
    'running variance': (lambda net: net[2].branch.parts[1].bn.running_var, r'2: .*running_var'),
    'weight of a linear layer': (lambda net: net[6].weight, '6: .*weight'),
    'bias of a linear layer': (lambda net: net[6].bias, '6: .*bias'),
    'step of weights': (lambda net: net[0].weight_quantizer.step, r'0: .*weight_quantizer\.step'),
    'step of the input': (lambda net: net[0].input_quantizer.step, r'0: .*input_quantizer\.step'),
}

@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('case', BROKEN)
def test_merge_refuses_what_is_not_finite(case, value):
    "A NaN would become the code 0, and its output a finite number"
    tensor, message = BROKEN[case]
    net = quantized()
    set_first(tensor(net), value)
    with pytest.raises(ValueError, match=message): repq.merge(net)


def test_merge_refuses_nan_without_quantizers():
    net = randomize_bn(network('orepa')).eval()
    repq.merge(net)
    set_first(net[0].after.running_var, float('nan'))
    with pytest.raises(ValueError, match='0: .*running_var'): repq.merge(net)


def test_merge_refuses_a_negative_variance():
    "Finite, but its square root is not"
    net = quantized()
    set_first(net[2].branch.parts[0].bn.running_var, -1.)
    with pytest.raises(ValueError, match='2: .*running_var.* negative'): repq.merge(net)


def test_steps_below_their_floor_merge_as_they_evaluate():
    "The last update may push a step below zero: evaluation projects it, and merging does the same"
    net, x = quantized(), batches(1)[0]
    with torch.no_grad(): net[2].weight_quantizer.step[0] = -1.
    merged = repq.merge(net)
    assert (merged[2].conv.step > 0).all() and torch.equal(merged(x), net(x))


# -- layers that saw no data

class Auxiliary(nn.Module):
    "A second head that only training uses, and a third that nothing uses"
    def __init__(self):
        super().__init__()
        self.body, self.head = make_block('repvgg', 3, 8), nn.Linear(8, 4)
        self.helper, self.unused = nn.Linear(8, 4), make_block('repvgg', 8, 8)
    def forward(self, x):
        y = self.body(x).relu().mean((2, 3))
        return (self.head(y), self.helper(y)) if self.training else self.head(y)


def test_unused_layers_merge_as_float():
    net, x = repq.quantize(Auxiliary(), 4, 4), batches(1)[0]
    expected = net.unused.kernel().weight
    repq.recalibrate(net, [x], 'ranges')           # in evaluation: the helper is not called
    with pytest.warns(UserWarning) as said: merged = repq.merge(net)
    said = [str(w.message) for w in said]
    assert len(said) == 1 and 'helper, unused' in said[0] and 'full precision' in said[0]
    assert 'recalibrate' in said[0]
    assert type(merged.helper) is nn.Linear and type(merged.unused) is nn.Conv2d
    assert isinstance(merged.body.quantize, FrozenQuantizer)
    assert_same(merged.unused.weight, expected, 1e-6)
    assert torch.equal(merged(x), net.eval()(x))


@pytest.mark.parametrize('make', [network, lambda: make_block('repvgg', 3, 8)])
def test_nothing_initialised_is_refused(make):
    net = repq.quantize(nn.Sequential(make()), 4, 4)
    with pytest.raises(ValueError) as error: repq.merge(net)
    said = str(error.value)
    assert "repq.recalibrate(net, batches, 'ranges')" in said and 'repq.ptq' in said
    assert 'training mode' not in said


def test_a_single_cold_layer_is_refused():
    with pytest.raises(ValueError, match='never initialised'):
        repq.merge(make_block('repvgg', 3, 8).quantize(4, 4))


# -- hooks

def hooked(layer, calls):
    "A hook of each kind on a layer"
    layer.register_forward_pre_hook(lambda m, args: calls.append('before'))
    layer.register_forward_pre_hook(lambda m, args, kwargs: calls.append('before with keywords'),
                                    with_kwargs=True)
    layer.register_forward_hook(lambda m, args, out: calls.append('after'))
    layer.register_full_backward_hook(lambda m, gi, go: calls.append('backward'))
    layer.register_full_backward_pre_hook(lambda m, go: calls.append('before backward'))


ALL_HOOKS = ['after', 'backward', 'before', 'before backward', 'before with keywords']

def test_hooks_are_carried_over():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(256, 2))
    calls = []
    for i in (2, 4): hooked(net[i], calls)
    handle = net[2].register_forward_hook(lambda m, args, out: calls.append('removed'))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        repq.quantize(net, 8, 8)
    handle.remove()                       # handles of before still work
    assert isinstance(net[2], RepConv2d) and isinstance(net[4], QuantLinear)
    net(batches(1)[0]).sum().backward()
    assert sorted(calls) == sorted(ALL_HOOKS*2)


def test_hooks_that_see_something_else_are_named():
    "Behind the layer there is now its norm too"
    net, calls = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)), []
    hooked(net[0], calls)
    hooked(net[1], calls)
    with pytest.warns(UserWarning, match='0: .*hooks.*batch norm'): repq.quantize(net, 8, 8)
    net(batches(1)[0]).sum().backward()
    assert sorted(calls) == sorted(ALL_HOOKS*2)      # those of the norm are called once


# -- weights that are computed from others

RECOMPUTED = {
    'pruned': (lambda l: prune.l1_unstructured(l, 'weight', .5), lambda l: prune.remove(l, 'weight'),
               'prune.remove'),
    'weight_norm': (weight_norm, remove_weight_norm, 'remove_weight_norm'),
    'spectral_norm': (spectral_norm, remove_spectral_norm, 'remove_spectral_norm'),
    'parametrized weight_norm': (parametrizations.weight_norm,
                                 lambda l: parametrize.remove_parametrizations(l, 'weight'),
                                 'remove_parametrizations'),
    'parametrized spectral_norm': (parametrizations.spectral_norm,
                                   lambda l: parametrize.remove_parametrizations(l, 'weight'),
                                   'remove_parametrizations'),
}

@pytest.mark.filterwarnings('ignore:.*weight_norm.*is deprecated')
@pytest.mark.parametrize('place', [0, 6])
@pytest.mark.parametrize('case', RECOMPUTED)
def test_weights_that_are_computed_from_others(case, place):
    "The layer stays in float and learns as before, and the warning says how to quantize it"
    apply, remove, way_out = RECOMPUTED[case]
    net, other = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
                                nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                nn.Linear(8, 4)) for _ in range(2))
    for n in (net, other): apply(n[place])
    names, x = {n for n, _ in net[place].named_parameters()}, batches(1)[0]
    with pytest.warns(UserWarning, match=f'{place} .*{way_out}'): repq.quantize(net, 8, 8)
    assert isinstance(net[place], (nn.Conv2d, nn.Linear))
    assert {n for n, _ in net[place].named_parameters()} == names
    net(x).square().sum().backward()
    assert all(p.grad is not None for p in net[place].parameters())
    repq.recalibrate(net, [x], 'ranges').eval()
    assert_same(repq.merge(net)(x), net(x), 1e-2)
    remove(other[place])
    repq.quantize(other, 8, 8)
    assert isinstance(other[place], (RepConv2d, QuantLinear))


def test_blocks_with_computed_weights_are_refused():
    "Merging reads the weight without the forward pass that would compute it anew"
    for call in (lambda net: repq.quantize(net, 8, 8), repq.merge):
        net = network()
        prune.l1_unstructured(net[2].branch.parts[0].child, 'weight', .5)
        words = r'2: branch\.parts\.0\.child is pruned: call torch\.nn\.utils\.prune\.remove'
        with pytest.raises(ValueError, match=words):
            call(net)
        prune.remove(net[2].branch.parts[0].child, 'weight')
        call(net)


# -- arguments

BAD = {
    'bits as text': (lambda: repq.quantize(network(), '4', '4'),
                     "weight_bits must be a whole number from 2 to 8, got '4'"),
    'bits as a float': (lambda: repq.quantize(network(), 4, 4.),
                        'act_bits must be a whole number from 2 to 8, got 4.0'),
    'bits as a truth value': (lambda: repq.quantize(network(), True, 4), 'got True'),
    'bits as a pair': (lambda: repq.quantize(network(), (4, 4)), 'got (4, 4)'),
    'bits of an exception': (lambda: repq.quantize(network(), 4, 4, exceptions={'0': ('8', 8)}),
                             "exceptions['0']: weight_bits must be a whole number"),
    'an exception of one number': (lambda: repq.quantize(network(), 4, 4, exceptions={'0': 8}),
                                   "'0' needs (weight_bits, act_bits), got 8"),
    'exceptions as a list': (lambda: repq.quantize(network(), 4, 4, exceptions=['0']), "got ['0']"),
    'set_bits with text': (lambda: set_bits(quantized(), '4', '4'), "got '4'"),
    'a merged network': (lambda: repq.quantize(repq.merge(quantized())), 'merged already (0)'),
    'set_bits of a merged network': (lambda: set_bits(repq.merge(quantized()), 4, 4), 'merged already (0)'),
    'a part that is merged': (lambda: repq.quantize(nn.Sequential(repq.merge(quantized()), nn.Linear(4, 2))),
                              'merged already (0.0)'),
    'ranges of a merged network': (lambda: repq.recalibrate(repq.merge(quantized()), batches(), 'ranges'),
                                   'merged'),
    'one tensor for batches': (lambda: repq.recalibrate(network(), batches()[0]), 'put it into a list'),
    'no batches': (lambda: repq.recalibrate(network(), None),
                   'an iterable of tensors or (input, target) pairs'),
    'batches as text': (lambda: repq.recalibrate(network(), 'train'),
                        'an iterable of tensors or (input, target) pairs'),
    'batches of dictionaries': (lambda: repq.recalibrate(network(), [dict(x=batches()[0])]),
                                'a batch is a dict'),
    'batches of numbers': (lambda: repq.recalibrate(network(), [1, 2]), 'a batch is a int'),
    'batches of arrays': (lambda: repq.recalibrate(network(), [([1, 2], 3)]), 'a batch begins with a list'),
    'number of batches': (lambda: repq.recalibrate(network(), batches(), n=0), 'n must be'),
    'number of batches as text': (lambda: repq.recalibrate(network(), batches(), n='2'), "got '2'"),
    'ptq without data': (lambda: repq.ptq(network(), []), 'no batch'),
    'ptq with bits as text': (lambda: repq.ptq(network(), batches(), '8'), "got '8'"),
}

@pytest.mark.parametrize('case', BAD)
def test_says_what_is_wrong(case):
    call, message = BAD[case]
    with pytest.raises(ValueError) as error: call()
    assert message in str(error.value)


@pytest.mark.parametrize('call',
                         [repq.quantize, repq.merge, lambda net: repq.recalibrate(net, batches()),
                          lambda net: set_bits(net, 4, 4),
                                  lambda net: repq.ptq(net, batches()),
                                  lambda net: repq.parameter_groups(net)])
def test_takes_a_network(call):
    class Learner: model = None
    for wrong in ('net.onnx', Learner(), network().state_dict()):
        with pytest.raises(TypeError, match=f'takes a network .*got .*{type(wrong).__name__}'): call(wrong)
    with pytest.raises(TypeError, match='give it learn.model'): call(Learner())


def test_codes_of_others_are_no_merged_layer():
    class CodeBook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('codes', torch.zeros(3))
        def forward(self, x): return x + self.codes.sum()
    net = repq.quantize(nn.Sequential(nn.Conv2d(3, 4, 3), CodeBook()), 8, 8)
    assert isinstance(net[0], RepConv2d)


def test_bits_of_numpy():
    import numpy as np
    net = repq.quantize(network(), np.int64(4), np.int8(4))
    assert {type(q.bits) for l in quantizable_layers(net).values()
            for q in (l.weight_quantizer, l.input_quantizer)} == {int}


def test_wrong_arguments_change_nothing():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    for bits in (('4', 4), (4, None)):
        with pytest.raises(ValueError, match='whole number'): repq.quantize(net, *bits)
    assert type(net[0]) is nn.Conv2d and type(net[1]) is nn.BatchNorm2d


# -- what recomputes, compiles and traces

def initialised(net=None):
    net = repq.quantize(net or network(), 4, 4)
    return repq.recalibrate(net, batches(), 'ranges').train()


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('cold', [True, False])
def test_checkpointing(reentrant, cold):
    "Activation checkpoints give the same gradients, also in the batch that initialises"
    x = batches(1)[0].requires_grad_()
    plain = repq.quantize(network(), 4, 4, start='first') if cold else initialised()
    recomputed = copy.deepcopy(plain)
    plain(x).square().sum().backward()
    checkpoint(recomputed, x, use_reentrant=reentrant).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), recomputed.parameters()):
        assert_same(q.grad, p.grad, 1e-4, name)


def test_compiled_network():
    "An initialised network compiles once, to the same numbers"
    import torch._dynamo
    torch._dynamo.reset()
    plain = initialised(nn.Sequential(make_block('repvgg', 3, 8, stride=2), nn.ReLU(), nn.Flatten(),
                                      nn.Linear(288, 4)))
    steps = 4
    compiled = torch.compile(copy.deepcopy(plain), backend='aot_eager')
    torch._dynamo.utils.counters.clear()
    for x in batches(steps):
        a, b = plain(x), compiled(x)
        assert_same(b, a, 1e-5)
        for y in (a, b): y.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters()):
        assert_same(q.grad, p.grad, 1e-4, name)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1
    assert not torch._dynamo.utils.counters['graph_break']


@pytest.mark.parametrize('how', ['trace', 'export'])
def test_tracing_says_merge_first(how):
    net, x = initialised().eval(), batches(1)[0]
    def trace(net):
        return torch.jit.trace(net, x) if how == 'trace' else torch.export.export(net, (x,)).module()
    with pytest.raises(Exception, match=r'repq\.merge\(net\)'): trace(net)
    merged = repq.merge(net)
    assert torch.equal(trace(merged)(x), merged(x))


# -- post-training quantization in one call

def test_ptq():
    net, data = randomize_bn(network()).eval(), batches()
    before = copy.deepcopy(net.state_dict())
    expected = repq.recalibrate(repq.quantize(copy.deepcopy(net), 8, 8), data, 'ranges').eval()
    small = repq.ptq(net, data)
    assert torch.equal(small(data[0]), expected(data[0])) and not small.training
    # a copy
    assert type(net[6]) is nn.Linear and all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert repq.ptq(net, data, 4, 6, exceptions={'6': None}, family='noise')[2].input_quantizer.bits == 6
    assert torch.equal(repq.merge(small)(data[0]), small(data[0]))


def test_ptq_takes_no_more_batches_than_asked_for():
    asked = []
    def loader():
        for x in batches(9):
            asked.append(1)
            yield x, torch.zeros(16)
    repq.ptq(network(), loader(), n=4)
    assert len(asked) == 4


def test_ptq_tells_how_far_it_is(capsys):
    repq.ptq(network(), batches(4))
    assert not capsys.readouterr().err             # done at once: nothing to tell
    from repq.quantization.network import tell_progress
    assert len(list(tell_progress(batches(3), 'ptq', 3, wait=0))) == 3
    assert 'ptq: 2 of 3 batches' in capsys.readouterr().err
    assert len(list(tell_progress(iter(batches(2)), 'ptq', None, wait=0))) == 2
    assert 'ptq: 1 batches' in capsys.readouterr().err


# -- parameter groups

def once(net, groups):
    "Every parameter of a network is in exactly one group"
    ids = [id(p) for g in groups for p in g['params']]
    return len(ids) == len(set(ids)) and set(ids) == {id(p) for p in net.parameters()}


@pytest.mark.parametrize('block', ['repvgg', 'orepa', 'ecb', 'plain'])
def test_parameter_groups(block):
    net = repq.quantize(network(block), 4, 4)
    groups = repq.parameter_groups(net, lr=.1, step_lr=.02, weight_decay=1e-4)
    assert once(net, groups) and [g['name'] for g in groups] == ['weights', 'steps']
    assert [(g['lr'], g['weight_decay']) for g in groups] == [(.1, 1e-4), (.02, 0.)]
    assert len(groups[-1]['params']) == 6                       # two for each of three layers
    groups = repq.parameter_groups(net, lr=.1, weight_decay=1e-4, decay_norms=False)
    assert once(net, groups) and [(g['name'], g['lr'], g['weight_decay']) for g in groups] == [
        ('weights', .1, 1e-4), ('norms and biases', .1, 0.), ('steps', pytest.approx(.01), 0.)]
    assert all(p.ndim > 1 for p in groups[0]['params']) and all(p.ndim == 1 for p in groups[1]['params'])


def test_parameter_groups_of_shared_layers():
    layer = nn.Linear(8, 8)
    net = repq.quantize(nn.Sequential(layer, nn.ReLU(), layer), 4, 4)
    assert once(net, repq.parameter_groups(net, lr=.1))


@pytest.mark.parametrize('optimizer', [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_take_the_groups(optimizer):
    net = initialised()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    opt = optimizer(repq.parameter_groups(net, lr=1e-2, step_lr=0., weight_decay=.1))
    F.cross_entropy(net(batches(1)[0]), torch.arange(16) % 4).backward()
    opt.step()
    for n, p in net.named_parameters(): assert torch.equal(p, before[n]) == n.endswith('quantizer.step'), n


def test_parameter_groups_refuse():
    with pytest.raises(ValueError, match='no quantizers.*repq.quantize'):
        repq.parameter_groups(network(), lr=.1, step_lr=.01)
    assert [g['name'] for g in repq.parameter_groups(network(), lr=.1)] == ['weights']
    with pytest.raises(ValueError, match='nothing to train'):
        repq.parameter_groups(repq.merge(quantized()), lr=.1)
    for wrong in ('0.1', -1., float('nan'), None):
        with pytest.raises(ValueError, match=r'lr must be a number'):
            repq.parameter_groups(network(), lr=wrong)
    with pytest.raises(ValueError, match='weight_decay must be'):
        repq.parameter_groups(network(), lr=.1, weight_decay=-1)
