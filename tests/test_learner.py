"QAT and QATDoctor in real, short trainings"
import copy
from functools import partial
import pytest, torch
from torch import nn
pytest.importorskip('fastai')
from fastai.basics import CrossEntropyLossFlat, Learner, accuracy
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.all import EarlyStoppingCallback, ProgressCallback, SaveModelCallback
from fastai.optimizer import OptimWrapper
import repq
from repq.data import FollowEpoch, digits_dls
from repq.learner import QAT, QATDoctor, StepSplitter, steps_of
from repq.norm import STATISTICS
from repq.qat import quantizable_layers

pytestmark = pytest.mark.filterwarnings('ignore')


def network(block='repvgg'):
    torch.manual_seed(0)
    b = repq.blocks.BLOCKS[block]
    return nn.Sequential(b(1, 16), nn.ReLU(), b(16, 32, stride=2), nn.ReLU(), b(32, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def learner(tmp_path, cbs=None, net=None, **kw):
    learn = Learner(digits_dls(), net or network(), CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs, path=tmp_path, **kw)
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
    learn = learner(tmp_path, QAT(4, 4, statistics=statistics, exceptions={'0': (4, 8)}), copy.deepcopy(parent))
    learn.fit_one_cycle(2, 0.005)
    assert learn.validate()[1] > 0.9
    x = learn.dls.valid.one_batch()[0]
    assert torch.equal(repq.merge(learn.model)(x), learn.model.eval()(x))


def check_groups(opt):
    assert opt.hypers[0]['lr'] == pytest.approx(0.01*opt.hypers[-1]['lr']) and opt.hypers[0]['wd'] == 0 and opt.hypers[-1]['wd'] == 0.1


@pytest.mark.parametrize('opt', [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_of_torch(tmp_path, opt):
    learn = learner(tmp_path, QAT(4, 4, step_lr=0.01), opt_func=partial(OptimWrapper, opt=opt), wd=0.1)
    learn.fit(1, 0.001)
    check_groups(learn.opt)


@pytest.mark.parametrize('how', ['argument', 'add_cb', 'fit'])
def test_attached_in_any_way(parent, tmp_path, how):
    qat = QAT(4, 4, step_lr=0.01)
    learn = learner(tmp_path, qat if how == 'argument' else None, copy.deepcopy(parent), wd=0.1)
    if how == 'add_cb': learn.add_cb(qat)
    if how == 'fit': learn.fit(1, 0.01, cbs=[qat])
    else: learn.fit_one_cycle(1, 0.01)
    steps = steps_of(learn.model)
    assert len(steps) == 8 and [len(g) for g in learn.opt.param_lists][0] == 8
    assert {id(p) for g in learn.opt.param_lists for p in g} == {id(p) for p in learn.model.parameters()}
    check_groups(learn.opt)


def test_too_late_for_a_schedule(tmp_path):
    with pytest.raises(RuntimeError, match='give QAT to the Learner'): learner(tmp_path).fit_one_cycle(1, 0.01, cbs=QAT(4, 4))


def test_user_splitter_is_kept(tmp_path):
    learn = learner(tmp_path, QAT(4, 4), splitter=lambda m: [list(m[0].parameters()), list(m[2:].parameters())])
    learn.fit(1, slice(1e-4, 1e-2))
    assert len(learn.opt.param_lists) == 3 and isinstance(learn.splitter, StepSplitter)
    assert learn.opt.hypers[1]['lr'] < learn.opt.hypers[2]['lr']


class Modes(Callback):
    order = 50
    def __init__(self): self.seen = []
    def after_train(self):
        l = self.model[2]
        self.seen.append((l.mode, l.weight_quantizer.bits, l.branch.parts[0].bn.training))


@pytest.mark.parametrize('statistics, fp_mode', [('batch', 'branches'), ('estimate', 'merged')])
def test_stages_go_down_and_stay(tmp_path, statistics, fp_mode):
    modes = Modes()
    learn = learner(tmp_path, [QAT(4, 4, statistics=statistics, schedule={0: 32, 1: 8, 2: 4}, freeze_bn_epoch=3), modes])
    learn.fit(4, 0.01)
    assert [m[0] for m in modes.seen] == [fp_mode, 'quantized', 'quantized', 'quantized']
    assert [m[1] for m in modes.seen][1:] == [8, 4, 4] and [m[2] for m in modes.seen] == [True, True, True, False]
    learn.fit(1, 0.01)                                # a second fit starts at epoch 0 but does not go up again
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
    assert set(t.epoch) == {0, 1} and set(t.layer) == {'0', '2', '4', '8'} and (t.weight_step > 0).all() and t.inputs_clipped.between(0, 0.5).all()
    assert capsys.readouterr().out.strip() == '\n'.join(healthy.advice())
    learner(tmp_path, [QAT(2, 2, statistics='estimate', step_lr=30.), sick], copy.deepcopy(parent)).fit(2, 0.02)
    said = '\n'.join(sick.advice())
    assert 'lower step_lr' in said and "statistics='calibrated'" in said
    sick.plot()


def test_doctor_without_quantized_layers(tmp_path):
    doctor = QATDoctor()
    learner(tmp_path, doctor).fit(1, 0.01)
    assert doctor.advice() == ['nothing was seen: no layer was quantized']


def test_models_rules_are_used(tmp_path):
    "A RepNet's own exceptions reach the layers through the callback"
    net = repq.models.repvgg_a0(10, width=0.125, small_input=True, in_channels=1)
    layers = quantizable_layers(learner(tmp_path, QAT(4, 4), net).model)
    assert (layers['stem'].weight_quantizer.bits, layers['stem'].input_quantizer.bits) == (4, 8) and layers['stage1.0'].input_quantizer.bits == 4
    assert layers['stem'].input_quantizer.signed is True and layers['stage1.0'].input_quantizer.signed is False


@pytest.mark.parametrize('statistics', STATISTICS)
def test_mixed_precision(parent, statistics):
    "The body in bfloat16, without oneDNN, whose bfloat16 instructions some virtual machines lack; the head in float32 for the same reason"
    net = repq.quantize(copy.deepcopy(parent), 4, 4, statistics=statistics)
    opt, losses = torch.optim.SGD(net.parameters(), 0.001, momentum=.9), []
    for x, y in digits_dls().train:
        with torch.backends.mkldnn.flags(enabled=False):
            with torch.autocast('cpu', torch.bfloat16): features = net[:-1](x)
            loss = nn.functional.cross_entropy(net[-1](features.float()), y)
            opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
        assert all(p.grad.isfinite().all() for p in net.parameters())
    assert sum(losses[-5:]) < 1.2*sum(losses[:5]) and net.eval()(x).isfinite().all()


def test_validates_what_was_loaded(tmp_path):
    "A plan that begins with full precision does not hide that the loaded network is quantized; validation changes no step"
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
    for (name, a), b in zip(learn.model.state_dict().items(), fresh.model.state_dict().values()): assert torch.equal(a, b), name


def test_finished_training_is_resumed_quantized(tmp_path):
    from repq.training import Workspace, fit
    def run():
        net = repq.quantize(network(), 4, 4)
        with Workspace(tmp_path/'run') as work: fit(net, digits_dls(), nn.functional.cross_entropy, accuracy, work, 2, 0.01, bits=4, step_lr=1e-3, schedule_bits={0: 32, 1: 4})
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
    learner(tmp_path, [QAT(4, 4, statistics=statistics), doctor, HalfInputs()], copy.deepcopy(parent)).fit(1, 0.002)
    t = doctor.table()
    assert len(t) == 4 and t.variance_error[:3].notna().all() and t.inputs_clipped.between(0, 0.5).all() and not doctor.inputs
