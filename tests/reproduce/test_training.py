"The training of a run: its best epoch, its random numbers, its memory, and how it ends when it diverges"
import copy, gc, json, os, signal, subprocess, sys
from contextlib import contextmanager
from pathlib import Path
import pytest, torch
import torch.nn.functional as F
pytest.importorskip('fastai')
from fastai.metrics import accuracy
from fastai.torch_core import defaults
from repq.data import digits_dls
from repq.reproduce.training import Keeper, Workspace, adam, finish, fit, full_precision_network, load_tensors
from repq.reproduce.training import pack_optimizer, pilot, quantized_network, save_tensors, sgd
from repq.reproduce.training import unpack_optimizer

pytestmark = pytest.mark.filterwarnings('ignore')
ROOT = Path(__file__).parents[2]


def network():
    return full_precision_network('repvgg_a0', 'repvgg', 'batch', width=1/8, depth=1/4, small_input=True,
                                  in_channels=1, n_classes=10)


@pytest.fixture(scope='module')
def parent():
    torch.manual_seed(0)
    net = network()
    fit(net, digits_dls(), F.cross_entropy, accuracy, Workspace(), 4, 0.1, schedule_name='one_cycle')
    return net


def train_in_stages(parent, folder=None, **kwargs):
    "Two epochs of 8 bits, two of 2"
    torch.manual_seed(0)
    net = quantized_network(copy.deepcopy(parent), 'repq', 2, 'batch')
    with Workspace(folder) as work:
        return net, fit(net, digits_dls(), F.cross_entropy, accuracy, work, 4, 0.01, step_lr=1e-3, bits=2,
                        schedule_bits={0: 8, 2: 2}, keep_best=True, **kwargs)


def test_the_best_epoch_is_of_the_final_bits(parent):
    net, keeper = train_in_stages(parent)
    scores = [h['metric'] for h in keeper.history]
    assert max(scores[:2]) > max(scores[2:]), 'the test needs a better epoch of 8 bits'
    assert keeper.best_epoch in (3, 4) and scores[keeper.best_epoch - 1] == max(scores[2:])
    net.load_state_dict(keeper.best)
    assert {l.weight_quantizer.bits for l in net.modules() if getattr(l, 'weight_quantizer', None)} == {2}
    x, y = map(torch.cat, zip(*digits_dls().valid))
    assert accuracy(net.eval()(x), y).item() == pytest.approx(max(scores[2:]), abs=1e-6)


@contextmanager
def cut_after(epoch):
    "A training in this block is stopped after so many epochs"
    after_epoch = Keeper.after_epoch
    def cut(self):
        after_epoch(self)
        if self.epoch + 1 == epoch: raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(Keeper, 'after_epoch', cut)
        yield


@pytest.mark.parametrize('epoch', [1, 2, 3])
def test_the_best_epoch_after_a_cut(parent, tmp_path, epoch):
    "Before, at and after the step to the final bits"
    _, whole = train_in_stages(parent)
    with cut_after(epoch): train_in_stages(parent, tmp_path)
    _, resumed = train_in_stages(parent, tmp_path)
    assert resumed.sessions == 2 and resumed.history == whole.history
    assert resumed.best_epoch == whole.best_epoch
    assert all(torch.equal(t, resumed.best[n]) for n, t in whole.best.items())


class Noisy(torch.nn.Module):
    "A network that draws random numbers while it trains"
    def __init__(self, draw):
        super().__init__()
        self.net, self.draw = network(), draw
    def forward(self, x): return self.net(x + .3*self.draw(x) if self.training else x)


def two_gpus(monkeypatch):
    "Where there is no GPU: generators on the CPU behind torch.cuda's functions, and a draw from the second"
    found = [torch.Generator().manual_seed(i) for i in range(2)]
    answers = dict(
        is_available=lambda: True, device_count=lambda: 2,
        get_rng_state_all=lambda: [g.get_state() for g in found],
        set_rng_state=lambda state, i: found[i].set_state(state))
    for name, f in answers.items(): monkeypatch.setattr(torch.cuda, name, f)
    monkeypatch.setattr(defaults, 'use_cuda', False, raising=False) # fastai stays on the CPU
    def draw(x): return torch.randn(x.shape, generator=found[1])
    def seed():
        for i, g in enumerate(found): g.manual_seed(i)
    return draw, seed


with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')

@pytest.mark.parametrize('gpu', ['stand-in', pytest.param('real', marks=with_gpu)])
def test_random_numbers_of_gpus_after_a_cut(tmp_path, monkeypatch, gpu):
    "Bit for bit as undisturbed; from a checkpoint that does not have their state it goes on too, with others"
    dls = digits_dls()
    draw, seed = torch.randn_like, lambda: torch.cuda.manual_seed_all(0)
    if gpu == 'stand-in': draw, seed = two_gpus(monkeypatch)
    def train(folder=None):
        torch.manual_seed(0)
        seed()
        net = Noisy(draw)
        with Workspace(folder) as work: return net, fit(net, dls, F.cross_entropy, accuracy, work, 3, 0.05)
    net, whole = train()
    with cut_after(1): train(tmp_path)
    path = tmp_path/'checkpoint.safetensors'
    tensors, about = load_tensors(path)
    again, resumed = train(tmp_path)
    assert resumed.sessions == 2 and resumed.history == whole.history
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())
    known = sorted(n for n in tensors if n.startswith('random')) # the CPU's first
    assert len(known) == 1 + torch.cuda.device_count()
    save_tensors(path, {n: t for n, t in tensors.items() if n not in known[1:]}, about)
    _, old = train(tmp_path)
    assert old.history[:1] == whole.history[:1] and old.history[1:] != whole.history[1:]


def test_a_checkpoint_of_gpus_without_them(tmp_path, monkeypatch):
    "What this machine does not have is left aside"
    dls = digits_dls()
    def train(net, epochs):
        with Workspace(tmp_path) as work: return fit(net, dls, F.cross_entropy, accuracy, work, epochs, 0.05)
    with monkeypatch.context() as m:
        two_gpus(m)
        train(network(), 1)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert len(train(network(), 2).history) == 2


def test_cut_off_before_the_final_bits_nothing_is_best(parent):
    _, keeper = train_in_stages(parent, max_steps=30)
    assert len(keeper.history) == 1 and keeper.best == {} and keeper.best_epoch == 0


def test_stages_that_never_end(parent):
    net = quantized_network(copy.deepcopy(parent), 'repq', 2, 'batch')
    with pytest.raises(ValueError, match='2 bits begin with epoch 3 of 2.*more epochs'):
        fit(net, digits_dls(), F.cross_entropy, accuracy, Workspace(), 2, 0.01, step_lr=1e-3, bits=2,
            schedule_bits={0: 8, 2: 2})


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('what', ['the validation loss', 'accuracy on the validation data'])
def test_validation_that_is_no_number_ends_the_training(tmp_path, what, value):
    "In the epoch where it happens; the checkpoint stays that of the epoch before"
    steps = 0
    def loss(pred, y):
        nonlocal steps
        steps += torch.is_grad_enabled()
        spoil = what == 'the validation loss' and not torch.is_grad_enabled() and steps > 22
        return F.cross_entropy(pred, y)*(value if spoil else 1)
    def score(pred, y):
        return accuracy(pred, y)*(value if what != 'the validation loss' and steps > 22 else 1)
    said = f'{what} is {value} in epoch 2.*smaller learning rate'
    with Workspace(tmp_path) as work, pytest.raises(FloatingPointError, match=said):
        fit(network(), digits_dls(), loss, score, work, 4, 0.05, keep_best=True)
    about = load_tensors(tmp_path/'checkpoint.safetensors')[1]
    assert about['epochs'] == len(about['history']) == 1 and steps == 44
    assert not (tmp_path/'record.json').exists() and not (tmp_path/'weights.safetensors').exists()


SMALL = dict(width=1/8, depth=1/4, small_input=True, in_channels=1)
SPEC = dict(task='classify', model='repvgg_a0', block='repvgg', strategy='fp', statistics='batch', bits=32,
            seed=0, settings=dict(data='digits', batch_size=64, path='simple', network=SMALL))


def test_a_metric_that_is_no_number_is_no_record(tmp_path):
    "Post-training quantization has no loss to look at: it is noticed before anything is written"
    said = r'metrics\.psnr\.Set5 is nan: no result'
    with Workspace(tmp_path) as work, pytest.raises(FloatingPointError, match=said):
        finish(work, SPEC, dict(psnr=dict(Set5=float('nan'), B100=30.)), {}, network())
    assert not (tmp_path/'record.json').exists() and not (tmp_path/'weights.safetensors').exists()
    with Workspace(tmp_path) as work: finish(work, SPEC, dict(psnr=dict(Set5=29., B100=30.)), {}, network())
    assert json.loads((tmp_path/'record.json').read_text())['metrics']['psnr']['Set5'] == 29.


OPTIMIZERS = dict(adam=(adam, torch.optim.Adam, {}), sgd=(sgd, torch.optim.SGD, dict(momentum=0.9)),
                  nesterov=(lambda *a, **k: sgd(*a, nesterov=True, **k), torch.optim.SGD,
                            dict(momentum=0.9, nesterov=True)))

def a_step(net, opt, i):
    "A step with another batch and another learning rate each time"
    torch.manual_seed(i)
    x = torch.rand(4, 1, 12, 12)
    (net(x) - F.interpolate(x, scale_factor=2)).abs().mean().backward()
    if hasattr(opt, 'set_hyper'): opt.set_hyper('lr', 1e-3*(1 + i))
    else: opt.param_groups[0]['lr'] = 1e-3*(1 + i)
    opt.step()
    opt.zero_grad()

def ecbsr_net():
    torch.manual_seed(0)
    return full_precision_network('ecbsr', 'ecb', blocks=2, channels=4)


@pytest.mark.parametrize('wd', [0., 0.01])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizers_are_those_of_torch(name, wd):
    "Twenty steps, equal to the bit"
    ours, theirs, kwargs = OPTIMIZERS[name]
    nets = ecbsr_net(), ecbsr_net()
    opts = (ours(list(nets[0].parameters()), lr=1e-3, wd=wd),
            theirs(nets[1].parameters(), lr=1e-3, weight_decay=wd, **kwargs))
    for i in range(20):
        for net, opt in zip(nets, opts): a_step(net, opt, i)
    for (n, p), q in zip(nets[0].named_parameters(), nets[1].parameters()): assert torch.equal(p, q), n


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_checkpoint(tmp_path, name):
    make = OPTIMIZERS[name][0]
    whole, part = ecbsr_net(), ecbsr_net()
    opt, first = make(list(whole.parameters()), lr=1e-3), make(list(part.parameters()), lr=1e-3)
    for i in range(6): a_step(whole, opt, i)
    for i in range(3): a_step(part, first, i)
    tensors, rest = pack_optimizer(first)
    save_tensors(tmp_path/'opt.safetensors', tensors, rest)
    again = make(list(part.parameters()), lr=1e-3)
    unpack_optimizer(again, *load_tensors(tmp_path/'opt.safetensors'))
    for i in range(3, 6): a_step(part, again, i)
    for (n, p), q in zip(whole.named_parameters(), part.named_parameters()): assert torch.equal(p, q[1]), n


@pytest.mark.parametrize('bits', [32, 4])
@pytest.mark.parametrize('decay', ['weights', 'all'])
def test_what_decays(bits, decay):
    "Without a gradient only decay moves a parameter: weights; norms and biases if asked for; steps never"
    net = network()
    if bits < 32: net = quantized_network(net, 'repq', bits, 'batch')
    dls, nothing = digits_dls(360), lambda pred, y: pred.sum()*0.
    if bits < 32: net.train()(dls.one_batch()[0])   # the first batch initialises the steps
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    fit(net, dls, nothing, accuracy, Workspace(), 1, 0.1, schedule_name='constant', weight_decay=0.01,
        bits=bits, step_lr=0.1, nesterov=True, decay=decay)
    moved = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    weights = {n for n, p in net.named_parameters() if n.endswith('weight') and p.ndim > 1}
    norms = {n for n, p in net.named_parameters() if '.bn.weight' in n}
    assert weights and norms
    # the others begin at zero
    assert moved == weights | (norms | {'head.bias'} if decay == 'all' else set())


def test_a_pilot_never_sees_a_test_image(monkeypatch):
    "It scores held-out training images; the options reach the training"
    import repq.data as D
    seen = []
    batch = D.ImageSet.batch
    def watched(self, i, draws=None):
        seen.append(len(self))
        return batch(self, i, draws)
    monkeypatch.setattr(D.ImageSet, 'batch', watched)
    def train(**kw):
        return pilot('repvgg_a0', 'repvgg', 2, data='digits', width=1/8, depth=1/4, strides=(1, 1, 2, 2, 1),
                     batch_size=64, in_channels=1, **kw)
    p = train()
    assert set(seen) == {1280, 160} and len(p.history) == 2 and p.accuracy == p.history[-1]['metric'] > .3
    assert p.cpu_seconds > 0
    assert p.best_accuracy == p.history[p.best_epoch - 1]['metric'] == max(h['metric'] for h in p.history)
    assert train().history == p.history
    for other in (dict(nesterov=False), dict(label_smoothing=0.), dict(weight_decay=0.), dict(lr=.05),
                  dict(seed=101)):
        assert train(**other).history != p.history


def run_classifier(**changes):
    "The experiment's notebook, cell by cell, in this process; its names at the end"
    import matplotlib
    matplotlib.use('Agg')
    from repq.reproduce.runs import experiments
    cells = json.loads((experiments()/'classify.ipynb').read_text(encoding='utf-8'))['cells']
    names = {}
    for c in cells:
        if c['cell_type'] != 'code': continue
        exec(''.join(c['source']), names)
        if 'parameters' in c['metadata'].get('tags', []): names['settings'] = names['settings'] | changes
    return names


def test_the_test_images_are_scored_once(monkeypatch):
    "Held-out images choose the epoch; test images are scored after the training, with last and best weights"
    import repq.data as D
    seen, batch = [], D.ImageSet.batch
    def watched(self, i, draws=None):
        seen.append((len(self), len(i)))
        return batch(self, i, draws)
    monkeypatch.setattr(D.ImageSet, 'batch', watched)
    names = run_classifier(epochs=4)
    m = names['record']['metrics']
    tests = [i for i, (size, _) in enumerate(seen) if size == 357]
    assert sum(n for size, n in seen if size == 357) == 2*357
    assert tests[0] > max(i for i, (size, _) in enumerate(seen) if size == 160)
    assert m['valid_accuracy'] == [h['metric'] for h in names['keeper'].history]
    assert len(m['valid_accuracy']) == 4
    assert m['best_epoch'] == max(range(4), key=lambda e: (m['valid_accuracy'][e], e)) + 1
    assert (m['test_size'], m['valid_size'], m['held_out']) == (357, 160, True)
    x, y = map(torch.cat, zip(*D.scoring_loader(names['dls'])))
    names['net'].load_state_dict(names['keeper'].best)
    assert accuracy(names['net'].eval()(x), y).item() == pytest.approx(m['best_accuracy'], abs=1e-6)


def test_without_held_out_images_validation_is_the_test():
    "As in the paper"
    m = run_classifier(epochs=2, loader={})['record']['metrics']
    assert (m['test_size'], m['valid_size'], m['held_out']) == (357, 357, False)
    assert m['best_accuracy'] == pytest.approx(max(m['valid_accuracy']), abs=1e-6)
    assert m['accuracy'] == pytest.approx(m['valid_accuracy'][-1], abs=1e-6)


def test_weights_of_another_range_are_refused(tmp_path):
    "ECBSR takes 0..255: files that do not say so, or say another range, are refused; classifiers take any"
    from repq.reproduce.training import load_weights, stored_range
    from repq.reproduce.runs import super_resolution
    net, spec = full_precision_network('ecbsr', 'ecb'), super_resolution('smoke', 0, 'fp').spec()
    with Workspace(tmp_path) as work: finish(work, spec, dict(psnr=30.), {}, net)
    path = tmp_path/'weights.safetensors'
    assert stored_range(path) == '0..255' and load_weights(full_precision_network('ecbsr', 'ecb'), path)
    save_tensors(tmp_path/'old.safetensors', net.state_dict(), dict(task='super_resolution'))
    said = r'old.safetensors: ecbsr takes input in 0\.\.255, and these weights do not say which.*0\.\.1'
    with pytest.raises(ValueError, match=said):
        load_weights(full_precision_network('ecbsr', 'ecb'), tmp_path/'old.safetensors')
    save_tensors(tmp_path/'other.safetensors', net.state_dict(), input_range='0..1')
    with pytest.raises(ValueError, match=r'these weights say 0\.\.1'):
        load_weights(full_precision_network('ecbsr', 'ecb'), tmp_path/'other.safetensors')
    save_tensors(tmp_path/'classifier.safetensors', network().state_dict())
    assert load_weights(network(), tmp_path/'classifier.safetensors')


@pytest.mark.parametrize('bits', [32, 4])
def test_a_training_with_adam_goes_on_bit_for_bit(tmp_path, bits):
    "ECBSR, in full precision and quantized, cut off after its first epoch"
    from repq.data import photo_dls
    dls = photo_dls(patch=16, batch_size=4, steps_per_epoch=5, n_valid=4)
    def train(folder=None):
        net = ecbsr_net()
        if bits < 32: net = quantized_network(net, 'repq', bits)
        with Workspace(folder) as work:
            return net, fit(net, dls, F.l1_loss, lambda pred, y: F.l1_loss(pred, y), work, 3, 1e-3, 'adam',
                            'one_cycle', bits=bits, step_lr=1e-3)
    net, whole = train()
    with cut_after(1): train(tmp_path)
    again, resumed = train(tmp_path)
    assert resumed.sessions == 2 and resumed.history == whole.history
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())


@pytest.mark.parametrize('bits, statistics', [(32, 'batch'), (32, 'estimate'), (4, 'batch'), (4, 'estimate')])
def test_a_training_in_channels_last_goes_on_bit_for_bit(tmp_path, bits, statistics):
    "A checkpoint has tensors without a memory layout, and the network keeps its own; as in the cpu profile"
    from repq.tools.registry import use_path
    def train(folder=None):
        torch.manual_seed(0)
        net = full_precision_network('repvgg_a0', 'repvgg', statistics, width=1/8, depth=1/4,
                                     small_input=True, in_channels=1, n_classes=10)
        if bits < 32: net = quantized_network(net, 'repq', bits, statistics)
        net.to(memory_format=torch.channels_last)
        with Workspace(folder, 'fused') as work, use_path('fused'):
            return net, fit(net, digits_dls(), F.cross_entropy, accuracy, work, 3, .05,
                            schedule_name='one_cycle', bits=bits, nesterov=True, keep_best=True)
    net, whole = train()
    with cut_after(1): train(tmp_path)
    again, resumed = train(tmp_path)
    assert any(p.ndim == 4 and min(p.shape) > 1 and p.is_contiguous(memory_format=torch.channels_last)
               for p in again.parameters())
    assert resumed.sessions == 2 and resumed.history == whole.history
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())


# -- memory

def test_a_step_leaves_no_tensor_behind(monkeypatch):
    "A small tensor of each step among the large ones would fragment the heap, by a megabyte a step"
    alive, after_batch = [], Keeper.after_batch
    def count(self):
        after_batch(self)
        if self.training: alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    monkeypatch.setattr(Keeper, 'after_batch', count)
    keeper = fit(network(), digits_dls(), F.cross_entropy, accuracy, Workspace(), 1, 0.05)
    assert len(alive) > 20 and alive[5] == alive[-1], alive
    losses = keeper.recorder.losses
    assert len(losses) == keeper.steps and all(type(l) is float for l in losses)


# -- bfloat16

def half_network(statistics='batch'):
    torch.manual_seed(0)
    return full_precision_network('repvgg_a0', 'repvgg', statistics, width=1/8, depth=1/4, small_input=True,
                                  in_channels=1, n_classes=10)

def train_half(statistics='batch', folder=None, epochs=4, **kwargs):
    "A training in bfloat16, and the types that its layers gave"
    net, seen = half_network(statistics), set()
    net.stage2[0].register_forward_hook(lambda layer, args, y: seen.add((layer.training, y.dtype)))
    with Workspace(folder) as work:
        keeper = fit(net, digits_dls(), F.cross_entropy, accuracy, work, epochs, 0.05, autocast='bfloat16',
                     **kwargs)
    assert not torch.is_autocast_enabled('cpu'), 'autocast outlives the training'
    return net, keeper, seen

def half_learns(folder):
    "Convolutions in bfloat16, everything that is kept in float32; the network is as good without autocast"
    for statistics in ('batch', 'estimate'):
        net, keeper, seen = train_half(statistics)
        assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}, seen
        kept = [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]
        assert not [t for t in kept if t.dtype == torch.bfloat16]
        x, y = digits_dls().valid.one_batch()
        assert keeper.history[-1]['metric'] > 0.5 and (net.eval()(x).argmax(1) == y).float().mean() > 0.5

def half_goes_on(folder):
    "Cut off after its first epoch, and ended by its number of steps"
    net, whole, _ = train_half(epochs=2)
    with cut_after(1): train_half(epochs=2, folder=folder)
    again, resumed, _ = train_half(epochs=2, folder=folder)
    assert resumed.sessions == 2 and resumed.history == whole.history
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())
    _, keeper, _ = train_half(max_steps=2)
    assert keeper.steps == 2


@pytest.mark.parametrize('what', [half_learns, half_goes_on], ids=lambda f: f.__name__)
def test_trainings_in_bfloat16(what, tmp_path):
    "In a process of its own: some virtual machines lack instructions for bfloat16 that they say they have"
    code = ('import torch; torch.set_num_threads(1); import test_training; '
            f'test_training.{what.__name__}({str(tmp_path)!r})')
    folders = ROOT, ROOT/'tests', ROOT/'tests'/'reproduce'
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, folders))}
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=env, capture_output=True, text=True)
    if p.returncode == -signal.SIGILL: pytest.skip('this machine has no bfloat16, and does not know')
    assert p.returncode == 0, p.stderr


def test_what_stays_in_float32():
    "Quantized networks are refused, and so is every type but bfloat16"
    net = quantized_network(network(), 'repq', 4, 'batch')
    said = 'full precision, got bits=4: it would round the numbers of a grid of 8 bits by up to a step'
    with pytest.raises(ValueError, match=said):
        fit(net, digits_dls(), F.cross_entropy, accuracy, Workspace(), 1, 0.1, bits=4, step_lr=0.1,
            autocast='bfloat16')
    with pytest.raises(ValueError, match="autocast must be one of None, 'bfloat16', got 'float16'"):
        fit(network(), digits_dls(), F.cross_entropy, accuracy, Workspace(), 1, 0.1, autocast='float16')
