"QAT and QATDoctor in real, short trainings"
import copy, re
from functools import partial
import pytest, torch
from torch import nn
pytest.importorskip('fastai')
from fastai.basics import CrossEntropyLossFlat, Learner, accuracy
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.all import EarlyStoppingCallback, GradientAccumulation, MixedPrecision, ProgressCallback
from fastai.callback.all import SaveModelCallback
from fastai.learner import load_learner
from fastai.optimizer import Adam, Larc, OptimWrapper, RAdam, SGD, ranger
import repq
from repq.data import FollowEpoch, digits_dls
from repq.train.doctor import QATDoctor
from repq.train.learner import QAT, StepRates, steps_of
from repq.algebra.statistics import STATISTICS
from repq.quantization.network import quantizable_layers

pytestmark = pytest.mark.filterwarnings('ignore')


def network(block='repvgg'):
    torch.manual_seed(0)
    b = repq.blocks.BLOCKS[block]
    return nn.Sequential(b(1, 16), nn.ReLU(), b(16, 32, stride=2), nn.ReLU(), b(32, 32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def learner(tmp_path, cbs=None, net=None, **kw):
    learn = Learner(digits_dls(), net or network(), CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs,
                    path=tmp_path, **kw)
    learn.remove_cbs([c for c in learn.cbs if isinstance(c, ProgressCallback)])
    learn.logger = lambda *a: None
    return learn


@pytest.fixture(scope='module')
def parent(tmp_path_factory):
    learn = learner(tmp_path_factory.mktemp('fp'))
    learn.fit_one_cycle(5, 0.01)
    assert learn.validate()[1] > 0.93
    return learn.model


@pytest.mark.parametrize('statistics', STATISTICS)
def test_trains_with_every_statistics(parent, tmp_path, statistics):
    learn = learner(tmp_path, QAT(4, 4, statistics=statistics, exceptions={'0': (4, 8)}),
                    copy.deepcopy(parent))
    learn.fit_one_cycle(2, 0.005)
    assert learn.validate()[1] > 0.9
    x = learn.dls.valid.one_batch()[0]
    assert torch.equal(repq.merge(learn.model)(x), learn.model.eval()(x))


def halves(m): return [list(m[:4].parameters()), list(m[4:].parameters())]


def inner_rates(opt):
    "For each group: learning rate and decay of its weights, and of its steps"
    found = []
    for steps, rest in opt.homes:
        found.append([(h['lr'], h['wd']) for h in (opt.opt.hypers[rest], opt.opt.hypers[steps])])
    return found


class Rates(Callback):
    "Keeps the learning rates that each batch was trained with"
    order = 90
    def __init__(self): self.seen = []
    def after_step(self): self.seen.append([h['lr'] for h in self.opt.hypers])


def train_one_cycle(learn): learn.fit_one_cycle(1, slice(1e-4, 1e-3))
def train_list(learn): learn.fit(1, [1e-4, 1e-3])
def train_slice(learn): learn.fit(1, slice(1e-4, 1e-3))
def train_flat(learn): learn.fit_flat_cos(1, slice(1e-3))
def train_fine(learn): learn.fine_tune(1, 0.01)
def train_frozen(learn):
    learn.freeze_to(1)
    learn.fit_one_cycle(1, slice(1e-4, 1e-3))


@pytest.mark.parametrize('train',
                         [train_one_cycle, train_list, train_slice, train_flat, train_fine, train_frozen])
def test_learning_rates_as_without_qat(tmp_path, train):
    "Groups, slices, frozen parameters and schedules are those of the same Learner without the callback"
    found = []
    for qat in ([], [QAT(4, 4)]):
        rates = Rates()
        learn = learner(tmp_path, [*qat, rates], splitter=halves)
        train(learn)
        steps = {id(p) for p in steps_of(learn.model)}
        weights = [p for p in learn.model.parameters() if id(p) not in steps]
        found.append((rates.seen, learn.opt.frozen_idx, len(learn.opt.param_lists),
                      [p.requires_grad for p in weights]))
    assert found[0] == found[1] and len(found[0][0]) >= 22
    inner = inner_rates(learn.opt)
    for (lr, wd), (step_lr, step_wd) in inner: assert step_lr == 0.1*lr and step_wd == 0 < wd


def test_the_steps_of_a_layer_are_in_the_group_of_its_weights(tmp_path):
    learn = learner(tmp_path, QAT(4, 4), splitter=halves)
    learn.create_opt()
    groups = [{id(p) for p in g} for g in learn.opt.param_lists]
    for name, layer in quantizable_layers(learn.model).items():
        group = groups[int(name) >= 4]
        assert {id(layer.weight_quantizer.step), id(layer.input_quantizer.step)} <= group
    assert groups[0].isdisjoint(groups[1])
    assert len(groups[0] | groups[1]) == len(list(learn.model.parameters()))


def decay_apart(m):
    "As many do it: everything that is not a kernel in a group of its own, the quantizers' steps nowhere"
    weights = [p for n, p in m.named_parameters() if p.ndim > 1]
    return [weights, [p for n, p in m.named_parameters() if p.ndim < 2 and 'quantizer' not in n]]


def test_a_splitter_that_does_not_know_of_steps(tmp_path):
    learn = learner(tmp_path, QAT(4, 4), splitter=decay_apart)
    learn.fit(1, [1e-3, 1e-2])
    assert {id(s) for s in steps_of(learn.model)} < {id(p) for p in learn.opt.param_lists[0]}
    assert [h['lr'] for h in learn.opt.hypers] == [1e-3, 1e-2]


def states(net): return {n: t.clone() for n, t in net.state_dict().items()}


def test_after_freeze_the_head_trains_with_its_steps(parent, tmp_path):
    learn = learner(tmp_path, QAT(4, 4, statistics='batch'), copy.deepcopy(parent), splitter=halves, wd=0.)
    learn.fit(1, 1e-3)                 # the steps are there
    learn.freeze()
    before = states(learn.model)
    learn.fit(1, 1e-2)
    moved = {n for n, t in learn.model.state_dict().items() if not torch.equal(t, before[n])}
    steps = {n for n in before if n.endswith('.step')}
    assert steps & moved == {n for n in steps if int(n.split('.')[0]) >= 4}
    assert not any(n.startswith(('0.', '2.')) and n.endswith('child.weight') for n in moved)


def test_frozen_before_qat_stays_frozen(parent, tmp_path):
    learn = learner(tmp_path, None, copy.deepcopy(parent), splitter=halves)
    learn.freeze()
    learn.add_cb(QAT(4, 4))
    assert learn.opt.frozen_idx == 1 and not learn.model[2].weight_quantizer.step.requires_grad
    assert learn.model[8].weight_quantizer.step.requires_grad


def first_update(parent, tmp_path, ratio, opt):
    "How far one batch moves each step"
    torch.manual_seed(0)
    learn = learner(tmp_path, QAT(4, 4, step_lr=ratio, start='first'), copy.deepcopy(parent), opt_func=opt)
    class FirstStep(Callback):
        def before_step(self): self.before = [s.detach().clone() for s in steps_of(self.model)]
        def after_step(self):
            self.moved = [(s.detach() - b).flatten() for s, b in zip(steps_of(self.model), self.before)]
            raise CancelFitException
    first = FirstStep()
    learn.fit(1, 1e-2, wd=0.3, cbs=first)
    return torch.cat(first.moved)


OPTIMIZERS = dict(
    sgd=SGD, adam=Adam, radam=RAdam, ranger=ranger, torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD),
    torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
    torch_rms=partial(OptimWrapper, opt=torch.optim.RMSprop))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_ratio_reaches_every_optimizer(parent, tmp_path, name):
    "Ten times the ratio moves the steps ten times as far, and decay does not move them"
    slow, fast = (first_update(parent, tmp_path, ratio, OPTIMIZERS[name]) for ratio in (0.05, 0.5))
    assert fast.abs().max() > 0 and torch.allclose(10*slow, fast, rtol=1e-2, atol=1e-6)
    assert not first_update(parent, tmp_path, 0., OPTIMIZERS[name]).any()


@pytest.mark.parametrize('opt',
                         [Larc, partial(SGD, mom=0.9, decouple_wd=False, lr=0.02), *OPTIMIZERS.values()])
def test_optimizers_train(parent, tmp_path, opt):
    learn = learner(tmp_path, QAT(4, 4, step_lr=0.01), copy.deepcopy(parent), opt_func=opt, wd=0.1,
                    splitter=halves)
    learn.fit(1, 1e-3)
    for (lr, wd), (step_lr, step_wd) in inner_rates(learn.opt):
        assert (step_lr, step_wd, wd) == (0.01*lr, 0, 0.1)
    assert all(s.isfinite().all() for s in steps_of(learn.model))
    if isinstance(opt, partial) and 'lr' in opt.keywords:
        assert learn.lr == 0.02  # as create_opt would have set it


@pytest.mark.parametrize('quantized', [False, True])
def test_an_optimizer_that_was_made_before(tmp_path, quantized):
    "A torch optimizer of the bare network, or of one that has its quantizers already"
    net = network()
    if quantized: repq.quantize(net, 4, 4)
    opt = torch.optim.SGD([dict(params=g) for g in halves(net)], lr=0.01, momentum=0.9, weight_decay=0.1)
    learn = learner(tmp_path, QAT(4, 4, step_lr=0.02), net, opt_func=OptimWrapper(opt=opt))
    for reset in (False, True):
        learn.fit(1, [1e-3, 1e-2], reset_opt=reset)
        assert [h['lr'] for h in learn.opt.hypers] == [1e-3, 1e-2]
        assert inner_rates(learn.opt) == [[(lr, 0.1), (0.02*lr, 0)] for lr in (1e-3, 1e-2)]
        assert {id(p) for g in learn.opt.param_lists for p in g} == {id(p) for p in learn.model.parameters()}


def test_groups_with_options(tmp_path):
    "A splitter that gives dicts, as torch's optimizers take them"
    def split(m): return [dict(params=g, momentum=mom) for g, mom in zip(halves(m), (0.5, 0.9))]
    learn = learner(tmp_path, QAT(4, 4), splitter=split, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.fit(1, 1e-3)
    assert [(g['momentum'], g['lr']) for g in learn.opt.opt.opt.param_groups] == [
        (0.5, 1e-4), (0.5, 1e-3), (0.9, 1e-4), (0.9, 1e-3)]


def test_no_optimizer_of_fastai(tmp_path):
    for opt in (torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)):
        with pytest.raises(TypeError,
                           match=r'is an optimizer of torch.*partial\(OptimWrapper, opt=torch.optim.SGD\)'):
            learner(tmp_path, QAT(4, 4), opt_func=opt)


def test_gradient_accumulation(parent, tmp_path):
    "Two batches of 64 are one of 128: the same steps of the optimizer, at the same rates"
    rates = Rates()
    learn = learner(tmp_path, [QAT(4, 4), GradientAccumulation(128), rates], copy.deepcopy(parent),
                    opt_func=SGD)
    learn.fit_one_cycle(1, 1e-2)
    assert len(learn.opt.param_lists) == 1 and len(rates.seen) == 11
    (lr, _), (step_lr, _) = inner_rates(learn.opt)[0]
    assert step_lr == pytest.approx(0.1*lr, rel=0.5) and learn.validate()[1] > 0.9


class ScaledOnCPU(MixedPrecision):
    "fastai's mixed precision with a real gradient scaler, which skips the first steps; autocast is left out"
    def before_fit(self):
        self.autocast = torch.autocast('cpu', enabled=False)
        self.learn.n_skipped = 0
        self.learn.scaler, self.scales = torch.amp.GradScaler('cpu', init_scale=2.**127), []
    def after_step(self):
        super().after_step()
        self.learn.n_skipped += self.skipped


def test_gradient_scaling(parent, tmp_path):
    learn = learner(tmp_path, [QAT(4, 4, statistics='batch'), ScaledOnCPU()], copy.deepcopy(parent),
                    splitter=halves)
    learn.loss_func = lambda p, y: 1000*nn.functional.cross_entropy(p, y)   # Adam does not mind
    learn.fit(2, 1e-3)
    assert 2 < learn.n_skipped < 30 and len(learn.opt.param_lists) == 2 and learn.validate()[1] > 0.9
    assert all(step == (0.1*lr, 0) for (lr, _), step in inner_rates(learn.opt))


@pytest.mark.parametrize('how', ['argument', 'add_cb', 'fit', 'fit_one_cycle', 'after a fit'])
def test_attached_in_any_way(parent, tmp_path, how):
    "Also by a schedule that was made before the callback was there"
    qat = QAT(4, 4, step_lr=0.01)
    learn = learner(tmp_path, qat if how == 'argument' else None, copy.deepcopy(parent), wd=0.1)
    if how == 'after a fit': learn.fit(1, 1e-3)
    if how in ('add_cb', 'after a fit'): learn.add_cb(qat)
    if how == 'fit': learn.fit(1, 0.01, cbs=[qat])
    else: learn.fit_one_cycle(1, 0.01, cbs=[qat] if how == 'fit_one_cycle' else None)
    assert len(steps_of(learn.model)) == 8 and [len(g) for g in learn.opt.opt.param_lists][0] == 8
    assert {id(p) for g in learn.opt.param_lists for p in g} == {id(p) for p in learn.model.parameters()}
    (lr, wd), (step_lr, step_wd) = inner_rates(learn.opt)[0]
    assert step_lr == 0.01*lr and (wd, step_wd) == (0.1, 0)


def test_removed_the_steps_keep_their_rate(parent, tmp_path):
    learn = learner(tmp_path, QAT(4, 4, step_lr=0.01), copy.deepcopy(parent), wd=0.1)
    learn.fit(1, 1e-3)
    learn.remove_cb(QAT)
    assert not hasattr(learn, 'qat')
    for reset in (False, True):       # also in an optimizer made anew
        learn.fit(1, 1e-3, reset_opt=reset)
        assert inner_rates(learn.opt) == [[(1e-3, 0.1), (1e-5, 0)]]
    assert learn.model[2].mode == 'quantized'
    with learn.removed_cbs([]): learn.add_cb(QAT(4, 4, step_lr=0.5))
    learn.fit(1, 1e-3)
    assert inner_rates(learn.opt) == [[(1e-3, 0.1), (5e-4, 0)]]


class Initialised(Callback):
    "Counts how often a quantizer is initialised"
    order = 50
    def __init__(self): self.cold = []
    def before_train(self): self.cold.append(not self.model[2].weight_quantizer.ready)


@pytest.mark.parametrize('how', ['together', 'add_cb', 'fit'])
def test_a_second_qat_takes_over(parent, tmp_path, how):
    "From 8 to 4 bits; the quantizers are initialised once for 4 bits, not in every epoch"
    cold = Initialised()
    first, second = QAT(8, 8, statistics='batch', step_lr=0.5), QAT(4, 4, statistics='batch', step_lr=0.05)
    learn = learner(tmp_path, [first, second, cold] if how == 'together' else [first, cold],
                    copy.deepcopy(parent))
    if how != 'together':
        learn.fit_one_cycle(1, 3e-3)
        assert learn.model[2].weight_quantizer.bits == 8
        assert inner_rates(learn.opt)[0][1][0] == 0.5*learn.opt.hypers[0]['lr']
        cold.cold.clear()
    if how == 'add_cb': learn.add_cb(second)
    learn.fit_one_cycle(3, 3e-3, cbs=second if how == 'fit' else None)
    assert cold.cold == [True, False, False] and learn.model[2].weight_quantizer.bits == 4
    assert inner_rates(learn.opt)[0][1][0] == 0.05*learn.opt.hypers[0]['lr']
    assert [c for c in learn.cbs if isinstance(c, QAT)] == ([] if how == 'fit' else [second])
    learn.fit(1, 1e-3)                # and again, with what is there
    assert cold.cold[3:] == [False] and learn.model[2].weight_quantizer.bits == 4
    assert learn.validate()[1] > 0.9


def test_a_quantized_network_gets_what_was_asked_for(parent, tmp_path):
    net = repq.quantize(copy.deepcopy(parent), 8, 8, statistics='batch', start='first')
    x = digits_dls().train.one_batch()[0]
    net(x)
    steps, learn = [s.clone() for s in steps_of(net)], learner(tmp_path, QAT(8, 8), net)
    # nothing was asked
    assert all(torch.equal(a, b) for a, b in zip(steps, steps_of(net))) and net[2].statistics == 'batch'
    learn.add_cb(QAT(8, 8, statistics='estimate', family='noise', start='batches'))
    assert all(torch.equal(a, b) for a, b in zip(steps, steps_of(net)))
    assert {l.statistics for l in net.modules() if isinstance(l, repq.RepConv2d)} == {'estimate'}
    layers = quantizable_layers(net).values()
    assert {type(q) for l in layers for q in (l.weight_quantizer, l.input_quantizer)} == {repq.NoiseQuantizer}
    assert {q.start for l in layers for q in (l.weight_quantizer, l.input_quantizer)} == {'batches'}
    learn.fit(1, 1e-3)
    assert {id(s) for s in steps_of(net)} <= {id(p) for g in learn.opt.param_lists for p in g}
    assert not any(torch.equal(a, b) for a, b in zip(steps, steps_of(net)))   # the new ones are trained


def test_layers_that_the_network_left_in_full_precision(parent, tmp_path):
    net = repq.quantize(copy.deepcopy(parent), 8, 8, exceptions={'0': None})
    with pytest.warns(UserWarning, match='^0: in full precision'): learner(tmp_path, QAT(4, 4), net)


def test_fine_tune_after_fit_and_load(parent, tmp_path):
    def make():
        return learner(tmp_path, QAT(4, 4, statistics='batch'), copy.deepcopy(parent), splitter=halves)
    learn = make()
    learn.fit_one_cycle(1, 3e-3)
    steps = [s.clone() for s in steps_of(learn.model)]
    learn.save('once', with_opt=True)
    learn.fine_tune(1, 3e-3)
    # not initialised again
    assert all(0.5 < (a/b).median() < 2 for a, b in zip(steps, steps_of(learn.model)))
    assert learn.validate()[1] > 0.9
    fresh = make().load('once')
    assert all(torch.equal(a, b) for a, b in zip(steps, steps_of(fresh.model)))
    fresh.fine_tune(1, 3e-3)
    for (name, a), b in zip(learn.model.state_dict().items(), fresh.model.state_dict().values()):
        assert a.shape == b.shape, name
    lower = learner(tmp_path, QAT(3, 3, statistics='batch'), copy.deepcopy(parent), splitter=halves)
    lower.load('once')                  # 4 bits into a Learner of 3 bits
    lower.fit_one_cycle(1, 3e-3)
    assert lower.model[2].weight_quantizer.bits == 3 and lower.validate()[1] > 0.85


def test_full_precision_is_a_stage_too(parent, tmp_path):
    learn = learner(tmp_path, QAT(32, 32), copy.deepcopy(parent))
    learn.fit(1, 1e-3)
    assert learn.model[2].mode == 'branches' and not steps_of(learn.model) and learn.validate()[1] > 0.93


@pytest.mark.parametrize('wrong, said', [
    (dict(weight_bits='4', act_bits='4'), r"from 2 to 8, or 32 for both.*got \('4', '4'\).*QAT\(4, 4\)"),
    (dict(weight_bits=16), 'from 2 to 8.*got \\(16, 4\\)'),
    (dict(act_bits=32), '32 for both.*got \\(4, 32\\)'),
    (dict(weight_bits=True), 'whole numbers'),
    (dict(weight_bits=4.), 'whole numbers'),
    (dict(statistics='exact'), "'batch', 'estimate'.*got 'exact'"),
    (dict(exceptions='official'), "'paper', None or a dict"),
    (dict(exceptions={'stem': 9}), "bits of 'stem' must be.*got 9"),
    (dict(family='lqs'), "'lsq', 'noise'.*got 'lqs'"),
    (dict(start_epoch=-1), 'start_epoch.*got -1'),
    (dict(start_epoch=1.5), 'start_epoch.*got 1.5'),
    (dict(schedule=[8, 4]), 'a dict from epoch to bits.*got \\[8, 4\\]'),
    (dict(schedule={2: 8}), 'epoch 0 on'),
    (dict(schedule={0: '8'}), "bits of epoch 0.*got '8'"),
    (dict(schedule={'0': 8}), "number of an epoch.*got '0'"),
    (dict(schedule={0: 8}, start_epoch=1), 'give one of them'),
    (dict(step_lr=-1), 'relative to that of the weights'),
    (dict(start='second'), "'batches'.*got 'second'"),
    (dict(step_lr='0.1'), "got '0.1'"),
    (dict(step_lr=float('nan')), 'got nan'),
    (dict(freeze_bn_epoch='last'), "got 'last'")])
def test_wrong_arguments(wrong, said):
    "At construction, with what was given and what is possible"
    with pytest.raises(ValueError, match=said): QAT(**wrong)


def test_numbers_of_numpy_and_lists_are_fine():
    import numpy as np
    qat = QAT(np.int64(4), np.int64(8), schedule={np.int64(0): [8, 8]}, step_lr=np.float32(0.5),
              exceptions={'stem': [8, 8]})
    assert qat.plan == {0: (8, 8), 1: (4, 8)} and qat.exceptions == {'stem': (8, 8)}


@pytest.mark.parametrize('cls', [QAT, QATDoctor])
def test_help_explains_every_argument(cls):
    import inspect, pydoc
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for name in inspect.signature(cls).parameters: assert re.search(rf'\n.*  {name}: .{{10}}', text), name


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Digits as picture files, for fastai's own loaders"
    from PIL import Image
    from sklearn.datasets import load_digits
    root, digits = tmp_path_factory.mktemp('pictures'), load_digits()
    for i, (image, label) in enumerate(zip(digits.images[:300], digits.target)):
        (root/str(label)).mkdir(exist_ok=True)
        Image.fromarray((image*15).astype('uint8')).resize((16, 16)).save(root/str(label)/f'{i}.png')
    return root


class ExportAfter(Callback):
    order = 90
    def __init__(self, batches): self.batches = batches
    def after_batch(self):
        if self.training and self.train_iter == self.batches: raise CancelFitException


@pytest.mark.parametrize('when', ['before', 'during', 'after'])
def test_export_of_a_learner_with_fastais_transforms(folder, tmp_path, when):
    "plum-dispatch 2.10 could not be pickled; what comes back predicts the same, and can be trained on"
    from fastai.vision.all import ImageDataLoaders
    b = repq.blocks.repvgg
    net = nn.Sequential(b(3, 8), nn.ReLU(), b(8, 16, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                        nn.Flatten(), nn.Linear(16, 10))
    dls = ImageDataLoaders.from_folder(folder, valid_pct=0.2, bs=32, num_workers=0, seed=0)
    learn = Learner(dls, net, CrossEntropyLossFlat(), cbs=QAT(4, 4, step_lr=0.02), path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        if when != 'before': learn.fit(2, 1e-2, cbs=ExportAfter(3) if when == 'during' else None)
        learn.export('qat.pkl')
        loaded = load_learner(tmp_path/'qat.pkl')
        x = dls.valid.one_batch()[0]
        if when != 'before': assert torch.equal(loaded.model.eval()(x), learn.model.eval()(x))
        assert isinstance(learn.opt, StepRates) and loaded.qat.learn is loaded
        assert loaded.qat.plan == learn.qat.plan
        loaded.dls = dls
        with loaded.no_bar(), loaded.no_logging():
            loaded.fit_one_cycle(2, 1e-2)  # steps need 8 batches, an epoch has 7
    (lr, _), (step_lr, _) = inner_rates(loaded.opt)[0]
    assert step_lr == 0.02*lr and loaded.model[2].mode == 'quantized'
    assert loaded.model[2].weight_quantizer.ready
    assert loaded.opt_func.learn is loaded


def test_lr_find_leaves_the_network_as_it_was(parent, tmp_path):
    "Its steps too: they begin with the training"
    from fastai.callback.schedule import LRFinder
    learn = learner(tmp_path, QAT(4, 4), copy.deepcopy(parent))
    before = states(learn.model)
    learn.fit(1, cbs=LRFinder(num_it=10))
    assert all(torch.equal(t, before[n]) for n, t in learn.model.state_dict().items())
    assert not any(l.weight_quantizer.ready for l in quantizable_layers(learn.model).values())
    learn.fit_one_cycle(1, 3e-3)
    assert learn.validate()[1] > 0.9


class Modes(Callback):
    order = 50
    def __init__(self): self.seen = []
    def after_train(self):
        l = self.model[2]
        self.seen.append((l.mode, l.weight_quantizer.bits, l.branch.parts[0].bn.training))


@pytest.mark.parametrize('statistics, fp_mode', [('batch', 'branches'), ('estimate', 'merged')])
def test_stages_go_down_and_stay(tmp_path, statistics, fp_mode):
    modes = Modes()
    learn = learner(tmp_path,
                    [QAT(4, 4, statistics=statistics, schedule={0: 32, 1: 8, 2: 4}, freeze_bn_epoch=3),
                     modes])
    learn.fit(4, 0.01)
    assert [m[0] for m in modes.seen] == [fp_mode, 'quantized', 'quantized', 'quantized']
    assert [m[1] for m in modes.seen][1:] == [8, 4, 4]
    assert [m[2] for m in modes.seen] == [True, True, True, False]
    # a second fit starts at epoch 0 but does not go up again
    learn.fit(1, 0.01)
    assert modes.seen[-1][:2] == ('quantized', 4)


def test_start_epoch(tmp_path):
    modes = Modes()
    learner(tmp_path, [QAT(4, 4, start_epoch=1), modes]).fit(2, 0.01)
    assert [m[0] for m in modes.seen] == ['branches', 'quantized']


def test_the_best_epoch_is_of_the_final_stage(parent, tmp_path):
    "8 bits are better than 2; what is kept, and what ends a training, are epochs of 2 bits"
    best, patient = SaveModelCallback('accuracy'), EarlyStoppingCallback('accuracy', patience=2)
    learn = learner(tmp_path, QAT(2, 2, statistics='batch', schedule={0: 8, 2: 2}), copy.deepcopy(parent))
    learn.fit_one_cycle(4, 0.003, cbs=[best, patient])
    scores = [v[-1] for v in learn.recorder.values]
    assert len(scores) == 4 and max(scores[:2]) > max(scores[2:]), 'the test needs a better epoch of 8 bits'
    assert learn.model[2].weight_quantizer.bits == 2 and best.best == learn.validate()[1] == max(scores[2:])


def test_the_best_of_one_stage_is_compared_over_fits(parent, tmp_path):
    "A second fit of the same bits forgets nothing if it was told so"
    best = SaveModelCallback('accuracy', reset_on_fit=False)
    learn = learner(tmp_path, QAT(4, 4, statistics='batch', schedule={0: 8, 1: 4}), copy.deepcopy(parent))
    learn.fit_one_cycle(3, 0.003, cbs=best)
    before = best.best
    learn.fit(1, 1., cbs=best)     # ruins the network
    assert learn.recorder.values[-1][-1] < before == best.best == learn.validate()[1]


class StopAndSave(Callback):
    order = 90
    def __init__(self, epoch): self.last = epoch
    def after_epoch(self):
        if self.epoch == self.last:
            self.learn.save('stopped', with_opt=True)
            raise CancelFitException


@pytest.mark.parametrize('statistics', STATISTICS)
def test_resume_is_exact(tmp_path, statistics):
    def run(start=0, cbs=()):
        learn = learner(tmp_path, QAT(4, 4, statistics=statistics, schedule={0: 32, 1: 8, 3: 4}))
        if start: learn.load('stopped')
        learn.fit_one_cycle(4, 0.01, start_epoch=start, cbs=[FollowEpoch(), *cbs])
        return learn.model.state_dict()
    whole = run()
    run(cbs=[StopAndSave(1)])
    for (name, a), b in zip(whole.items(), run(start=2).values()): assert torch.equal(a, b), name


def test_doctor_sees_and_advises(parent, tmp_path, capsys):
    healthy, sick = QATDoctor(), QATDoctor(report=False)
    learner(tmp_path, [QAT(4, 4, statistics='batch'), healthy], copy.deepcopy(parent)).fit_one_cycle(2, 0.002)
    t = healthy.table()
    assert set(t.epoch) == {0, 1} and set(t.layer) == {'0', '2', '4', '8'} and (t.weight_step > 0).all()
    assert t.inputs_clipped.between(0, 0.5).all()
    assert capsys.readouterr().out.strip() == '\n'.join(healthy.advice())
    learner(tmp_path, [QAT(2, 2, statistics='estimate', step_lr=30., start='first'), sick],
            copy.deepcopy(parent)).fit(2, 0.02)
    said = '\n'.join(sick.advice())
    assert 'lower step_lr' in said
    sick.plot()


def test_doctor_sees_a_poor_estimate(parent, tmp_path):
    "Weights of one sign add up channels that go together, and the estimate takes them for independent"
    net, doctor = copy.deepcopy(parent), QATDoctor(report=False)
    for norm in net[2].norms(): norm.child.weight.data.abs_()
    learner(tmp_path, [QAT(8, 8, statistics='estimate', start='first'), doctor], net).fit(1, 1e-5)
    assert doctor.table().set_index('layer').variance_error['2'] > .6
    assert "statistics='calibrated'" in said(doctor)


def said(doctor): return '\n'.join(doctor.advice())


def test_doctor_names_a_collapse(parent, tmp_path):
    "Steps a thousand times too fast at 2 bits give chance; the healthy network of these bits is not accused"
    ill, well = QATDoctor(report=False), QATDoctor(report=False)
    learn = learner(tmp_path, [QAT(2, 2, statistics='batch', step_lr=100.), ill], copy.deepcopy(parent))
    learn.fit(2, 0.02)
    assert learn.validate()[1] < 0.2, 'the test needs a collapse'
    assert 'collapsed: ' in said(ill) and 'most frequent class' in said(ill)
    assert 'schedule={0: 8, 2: 4}' in said(ill)
    learn = learner(tmp_path, [QAT(2, 2, statistics='batch'), well], copy.deepcopy(parent))
    learn.fit(2, 0.003)
    assert learn.validate()[1] > 0.5 and 'collapsed' not in said(well) and 'rises' not in said(well)


@pytest.mark.parametrize('bits, schedule', [(8, None), (4, {0: 8, 1: 4}), (2, {0: 32, 1: 8, 2: 2})])
def test_doctor_does_not_mistake_fewer_bits_for_illness(parent, tmp_path, bits, schedule):
    "A loss that is flat, because the network was good, or higher, because bits went down, is no collapse"
    doctor = QATDoctor(report=False)
    learner(tmp_path, [QAT(bits, bits, statistics='batch', schedule=schedule), doctor],
            copy.deepcopy(parent)).fit(3, 1e-3)
    assert 'collapsed' not in said(doctor) and 'rises' not in said(doctor) and 'run away' not in said(doctor)


def test_doctor_sees_a_rising_loss(parent, tmp_path):
    doctor = QATDoctor(report=False)
    class Faster(Callback):
        def before_batch(self): self.opt.set_hyper('lr', 1e-4*1.25**self.train_iter)
    learner(tmp_path, [QAT(4, 4, statistics='batch'), doctor, Faster()], copy.deepcopy(parent)).fit(2, 1e-3)
    assert re.search(r'the loss rises, from [\d.]+ to [\d.]+ .*lower the learning rate', said(doctor))


def run_away(layer): layer.input_quantizer.set_step(1e4, layer.input_quantizer.signed)
def weights_run_away(layer): layer.weight_quantizer.set_step(layer.weight_quantizer.step*1e4, True)


@pytest.mark.parametrize('spoil, expected', [
    (run_away, '2: 100% of its input becomes 0: the step has run away'),
    (weights_run_away, '2: 100% of its output channels have only zeros as weights')])
def test_doctor_sees_a_step_that_has_run_away(parent, tmp_path, spoil, expected):
    doctor = QATDoctor(report=False)
    learn = learner(tmp_path, [QAT(4, 4, statistics='batch'), doctor], copy.deepcopy(parent))
    learn.fit(2, 1e-3)
    assert 'run away' not in said(doctor)
    spoil(learn.model[2])
    learn.fit(1, 1e-3)        # one epoch, after a fit of two: the advice is about the last
    assert expected in said(doctor)
    assert 'all integers of its weights, or all of its input, are the same' in said(doctor)
    assert doctor.table().fit.tolist() == [1]*8 + [2]*4


class Positive(Callback):
    def before_batch(self): self.learn.xb = tuple(x - x.min() for x in self.xb)


def test_doctor_sees_a_sign_that_later_batches_contradict(parent, tmp_path):
    "Pixels of 0 and more at first, normalised ones later: the first layer clips what is below 0"
    doctor = QATDoctor(report=False)
    learn = learner(tmp_path, [QAT(4, 4, statistics='batch'), doctor], copy.deepcopy(parent))
    learn.fit(1, 1e-3, cbs=Positive())
    assert learn.model[0].input_quantizer.signed is False and 'negative' not in said(doctor)
    learn.fit(1, 1e-3)
    found = re.search(r'^0: (\d+)% of its input is negative and clipped to 0: the sign was decided',
                      said(doctor), re.M)
    assert 30 < int(found[1]) < 80
    assert doctor.table().negatives_clipped[doctor.table().layer != '0'].max() == 0


def test_doctor_sees_one_answer_for_all(tmp_path):
    "Also where there are no classes: a regression whose last layer has lost its input"
    doctor, net = QATDoctor(report=False), nn.Sequential(network(), nn.ReLU(), nn.Linear(10, 1))
    learn = learner(tmp_path, [QAT(4, 4), doctor], net)
    learn.loss_func, learn.metrics = lambda p, y: (p[:, 0] - y.float()).square().mean(), []
    learn.fit(1, 1e-3)
    assert 'same answer' not in said(doctor)
    run_away(net[2])
    learn.fit(1, 1e-3)
    assert 'it gives the same answer to every input' in said(doctor)


def test_doctor_names_layers_that_were_never_initialised(tmp_path):
    class Silent(nn.Module):
        def forward(self, x): return x*0
    net, doctor = network(), QATDoctor(report=False)
    net[3] = Silent()
    learner(tmp_path, [QAT(4, 4), doctor], net).fit(1, 1e-3)
    assert '4: was not initialised in a whole epoch' in said(doctor)


def test_doctor_takes_its_hooks_away(parent, tmp_path):
    "Also after an interruption"
    class Interrupt(Callback):
        def after_pred(self):
            if self.iter == self.n_iter - 1: raise KeyboardInterrupt
    doctor = QATDoctor(report=False)
    learn = learner(tmp_path, [QAT(4, 4), doctor], copy.deepcopy(parent))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 1e-3, cbs=Interrupt())
    assert len(learn.model[2]._forward_pre_hooks) == 1
    learn.fit(1, 1e-3)
    assert not any(m._forward_pre_hooks for m in learn.model.modules())


def test_doctor_leaves_the_search_for_a_rate_alone(parent, tmp_path, capsys):
    from fastai.callback.schedule import LRFinder
    doctor = QATDoctor()
    learn = learner(tmp_path, [QAT(4, 4), doctor], copy.deepcopy(parent))
    learn.fit(1, cbs=LRFinder(num_it=10))
    assert not doctor.rows and not capsys.readouterr().out
    learn.fit(1, 1e-3)
    assert doctor.rows and capsys.readouterr().out


def test_doctor_without_quantized_layers(tmp_path):
    doctor = QATDoctor()
    learner(tmp_path, doctor).fit(1, 0.01)
    assert doctor.advice() == ['nothing was seen: no layer was quantized']


def test_models_rules_are_used(tmp_path):
    "A RepNet's own exceptions reach the layers through the callback"
    net = repq.models.repvgg_a0(10, width=0.125, small_input=True, in_channels=1)
    layers = quantizable_layers(learner(tmp_path, QAT(4, 4), net).model)
    assert (layers['stem'].weight_quantizer.bits, layers['stem'].input_quantizer.bits) == (4, 8)
    assert layers['stage1.0'].input_quantizer.bits == 4
    assert layers['stem'].input_quantizer.signed is True
    assert layers['stage1.0'].input_quantizer.signed is False


@pytest.mark.parametrize('statistics', STATISTICS)
def test_mixed_precision(parent, statistics):
    "The body in bfloat16, the head in float32; without oneDNN: some virtual machines lack its instructions"
    net = repq.quantize(copy.deepcopy(parent), 4, 4, statistics=statistics, start='first')
    opt, losses = torch.optim.SGD(net.parameters(), 0.001, momentum=.9), []
    for x, y in digits_dls().train:
        with torch.backends.mkldnn.flags(enabled=False):
            with torch.autocast('cpu', torch.bfloat16): features = net[:-1](x)
            loss = nn.functional.cross_entropy(net[-1](features.float()), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        losses.append(loss.item())
        assert all(p.grad.isfinite().all() for p in net.parameters())
    assert sum(losses[-5:]) < 1.2*sum(losses[:5]) and net.eval()(x).isfinite().all()


def test_validates_what_was_loaded(tmp_path):
    "A plan that begins in full precision sees that the network is quantized; validation changes no step"
    def make(): return learner(tmp_path, QAT(2, 2, schedule={0: 32, 1: 8, 2: 2}))
    learn = make()
    learn.fit(3, 0.01)
    expected = learn.validate()
    learn.save('trained')
    fresh = make()
    fresh.validate()
    assert fresh.model[2].mode == 'branches'   # nothing was loaded: full precision, as the plan says
    fresh.load('trained')
    assert fresh.validate() == expected and fresh.model[2].mode == 'quantized'
    for (name, a), b in zip(learn.model.state_dict().items(), fresh.model.state_dict().values()):
        assert torch.equal(a, b), name


def test_finished_training_is_resumed_quantized(tmp_path):
    from repq.reproduce.training import Workspace, fit
    def run():
        net = repq.quantize(network(), 4, 4, start='first')
        with Workspace(tmp_path/'run') as work:
            fit(net, digits_dls(), nn.functional.cross_entropy, accuracy, work, 2, 0.01, bits=4, step_lr=1e-3,
                schedule_bits={0: 32, 1: 4})
        return net.eval()
    x, first, again = digits_dls().valid.one_batch()[0], run(), run()
    assert again[2].mode == 'quantized' and torch.equal(first(x), again(x))


def test_a_plan_that_comes_back(tmp_path):
    "No stage is skipped because a later one has the same bits"
    modes = Modes()
    learner(tmp_path, [QAT(4, 4, schedule={0: 4, 1: 8, 2: 4}), modes]).fit(4, 0.01)
    assert [m[1] for m in modes.seen] == [4, 8, 4, 4]


@pytest.mark.parametrize('statistics', STATISTICS)
def test_doctor_in_half_precision(parent, tmp_path, statistics):
    "What it kept of a bfloat16 training it looks at in the type of the parameters, and lets it go"
    class HalfInputs(Callback):
        order = 29   # just before the doctor, as if the layers had got them from mixed precision
        def after_train(self): doctor.inputs = {n: x.bfloat16() for n, x in doctor.inputs.items()}
    doctor = QATDoctor(report=False)
    callbacks = [QAT(4, 4, statistics=statistics), doctor, HalfInputs()]
    learner(tmp_path, callbacks, copy.deepcopy(parent)).fit(1, 0.002)
    t = doctor.table()
    assert len(t) == 4 and t.variance_error[:3].notna().all() and t.inputs_clipped.between(0, 0.5).all()
    assert not doctor.inputs

@pytest.mark.parametrize('look', ['validate', 'summary', 'get_preds', 'show_training_loop'])
def test_looking_before_training_leaves_quantizers_cold(parent, tmp_path, look):
    "Evaluation never initialises; the training after it is the one that would have been without"
    def run(before):
        torch.manual_seed(0)
        learn = learner(tmp_path, QAT(4, 4, statistics='batch'), copy.deepcopy(parent))
        if before: getattr(learn, look)()
        assert not any(l.weight_quantizer.ready for l in quantizable_layers(learn.model).values())
        torch.manual_seed(0)
        learn.fit(1, 1e-3, cbs=FollowEpoch())
        return learn.model.state_dict()
    for (name, a), b in zip(run(False).items(), run(True).values()): assert torch.equal(a, b), name


@pytest.mark.parametrize('start, ready',
                         [('first', [False, True]), (None, [False, False]), ('batches', [False, False])])
def test_how_steps_start(parent, tmp_path, start, ready):
    "With the first batch, or with several, which is the default"
    seen = []
    class Watch(Callback):
        def before_batch(self):
            if self.training: seen.append(self.model[2].weight_quantizer.ready)
    learner(tmp_path, [QAT(4, 4, start=start), Watch()], copy.deepcopy(parent)).fit(1, 1e-3)
    assert seen[:2] == ready and seen[-1]
