"A real, short training of ECBSR on photographs: full precision, then 4 bits, then merged"
import copy, warnings
import pytest, torch
import repq
from repq import data as D

warnings.simplefilter('ignore', FutureWarning)


def fit(net, epochs, lr, seed, cbs=None):
    from fastai.basics import Learner
    from repq.reproduce.training import adam
    import fastai.callback.progress, fastai.callback.schedule  # noqa: F401 (add no_bar, fit_one_cycle)
    learn = Learner(D.photo_dls(patch=24, batch_size=16, steps_per_epoch=25, n_valid=16, seed=seed), net,
                    torch.nn.L1Loss(), opt_func=adam, wd=0., cbs=cbs)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, lr)
    return [row[1] for row in learn.recorder.values]


def psnr(net, bench): return D.evaluate_sr(net, bench, ssim=False)['psnr']


@pytest.fixture(scope='module')
def trained():
    "Test pictures, the scores of an untrained and of a trained network, and the trained one"
    torch.manual_seed(0)
    bench, net = D.SRBenchmark(D.photos('test')), repq.models.ecbsr(block='ecb')
    net.mode = 'merged'
    before = psnr(net, bench)
    fit(net, 10, 4e-3, seed=0)
    return bench, before, psnr(net, bench), net


def test_full_precision_learns(trained):
    bench, before, after, net = trained
    assert after > before + 1 and after > D.bicubic_baseline(bench, ssim=False)['psnr']


def test_four_bits_from_it(trained):
    "Training improves on ranges alone and stays near the parent; the merged network is the same, bit for bit"
    bench, _, after, parent = trained
    state = copy.deepcopy(parent.state_dict())
    ranges = repq.recalibrate(repq.quantize(copy.deepcopy(parent), 4, 4), D.photo_dls(n_valid=16).valid,
                              'ranges')
    net = copy.deepcopy(parent)
    losses = fit(net, 2, 3e-3, seed=1, cbs=repq.QAT(4, 4))
    assert losses[-1] < losses[0] and psnr(net, bench) > max(psnr(ranges, bench), after - 1)
    assert (net.stem.weight_quantizer.bits, net.body[0].weight_quantizer.bits,
            net.body[0].input_quantizer.bits) == (8, 4, 4)
    assert all(torch.equal(t, state[n]) for n, t in parent.state_dict().items())
    deployed = repq.merge(net.eval())
    with torch.no_grad(): assert all(torch.equal(deployed(lr[None]), net(lr[None])) for lr, _, _ in bench)
    assert psnr(deployed, bench) == psnr(net, bench)
