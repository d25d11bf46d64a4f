"Two processes train one network: `learn.distrib_ctx()` with `QAT`. This file is also the script they run"
import json, os, socket, subprocess, sys, time, warnings
from pathlib import Path
import pytest, torch
from safetensors.torch import load_file, save_file
from repq.quantization import lsq as quantizer
from repq.algebra.statistics import STATISTICS

ONCE = 0.05   # the step that the run 'loaded' begins with
RUNS = {**{s: dict(statistics=s) for s in STATISTICS}, 'orepa': dict(block='orepa'),
        'staged': dict(statistics='estimate', schedule={0: 32, 1: 4})}


def network(block):
    from repq.models import RepVGG
    return RepVGG((1, 1, 1, 1), (8, 8, 16, 16, 32), 10, block, 1, True, 1)


def copies(named): return {n: t.detach().clone() for n, t in named}


def train(name, out, block='repvgg', **options):
    "One run in this process; writes all that the tests compare"
    from fastai.basics import Callback, CrossEntropyLossFlat, Learner
    from fastai.distributed import rank_distrib
    import fastai.callback.schedule  # noqa: F401 (adds fit_one_cycle)
    from repq.data import digits_dls
    from repq.train.doctor import QATDoctor
    from repq.train.learner import QAT, cpu_distributed, running_statistics
    torch.manual_seed(rank_distrib())   # different weights at first: rank 0's must win
    net, seen, note = network(block), {}, dict(losses=[], shares=[], own=True)
    qat, loaded = QAT(4, 4, start='first', **options), name == 'loaded'

    def keep(what, named): seen.update({f'{what}/{n}': t for n, t in copies(named).items()})
    def steps(): return ((n, p) for n, p in net.named_parameters() if n.endswith('quantizer.step'))
    def statistics(): return ((str(i), t) for i, t in enumerate(running_statistics(net)))

    class Before(Callback):
        order = QAT.order - 1
        def after_pred(self):
            if not self.training or not net.stem.weight_quantizer.ready: return
            if any(k.startswith('initial') for k in seen): return
            keep('initial', steps())
            keep('batch', [('x', self.xb[0])])
        def after_train(self): keep('alone', statistics())

    class After(Callback):
        order = QAT.order + 10   # DistributedTrainer has wrapped the loader
        def before_train(self): note['shares'].append(self.learn.dl.get_idxs())
        def after_loss(self):
            if self.training:
                note['losses'].append(self.loss.item())
                keep('last', statistics())
        def after_train(self):
            keep('averaged', statistics())
            note['wrapped'] = type(self.learn.model).__name__

    def untouched(*_):   # between two batches nobody has written into the statistics
        if net.training and note['losses']:
            note['own'] &= all(torch.equal(t, seen[f'last/{i}']) for i, t in statistics())
    net.register_forward_pre_hook(untouched)
    local, share = [], quantizer.share_steps
    def spy(steps):
        local.append(steps)
        return share(steps)
    quantizer.share_steps = spy
    doctor = QATDoctor(looks=2, report=False)
    learn = Learner(digits_dls(62 if loaded else 48), net, CrossEntropyLossFlat(),
                    cbs=[qat, doctor, Before(), After()])
    if loaded and rank_distrib() == 0:   # as if it alone had read a checkpoint
        for m in net.modules():
            if isinstance(m, quantizer.Quantizer):
                m.set_step(ONCE, signed=m.channels is not None or m is net.stem.input_quantizer)
            if isinstance(m, torch.nn.BatchNorm2d): m.running_mean.fill_(3.)
    with cpu_distributed(), learn.distrib_ctx(cpu=True), learn.no_logging(), learn.no_bar():
        learn.fit_one_cycle(1 + ('schedule' in options), 0.03)
    quantizer.share_steps = share
    keep('local', ((str(i), t) for i, t in enumerate(local)))
    keep('final', ((n, t) for n, t in net.state_dict().items()))
    note |= dict(doctor=sorted({r['layer'] for r in doctor.rows}),
                 bits={n: [l.weight_quantizer.bits, l.input_quantizer.bits] for n, l in net.named_modules()
                       if hasattr(l, 'weight_quantizer')})
    note['bare'] = learn.model is net and not any(isinstance(m, torch.nn.SyncBatchNorm)
                                                  for m in net.modules())
    save_file(seen, out/f'{name}.{rank_distrib()}.safetensors')
    (out/f'{name}.{rank_distrib()}.json').write_text(json.dumps(note))


def zeros(out):
    "One of the two processes sees nothing but zeros at first"
    rank, seen = int(os.environ['RANK']), []
    for empty in (0, 1):
        q = quantizer.LSQ(4, signed=True)
        x = torch.randn(64, generator=torch.Generator().manual_seed(rank))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            q(x*0 if rank == empty else x)
        seen.append([q.ready, q.step.item(), quantizer.min_error_step(x[None], -8, 7).item()])
    (out/f'zeros.{rank}.json').write_text(json.dumps(seen))


if __name__ == '__main__':
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for name, options in RUNS.items(): train(name, out, **options)
    train('loaded', out)
    zeros(out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)   # threads of gloo that still run can abort an ordinary exit of Python


def run_ranks(folder)->str:
    "Train everything in two processes; what went wrong"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'WORLD_SIZE': '2',
           'GLOO_SOCKET_IFNAME': 'lo', 'OMP_NUM_THREADS': '1',
           'PYTHONPATH': os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH', '')])}
    logs = [folder/f'log.{r}' for r in range(2)]
    ranks = [subprocess.Popen([sys.executable, __file__, str(folder)],
                              env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)}, stdout=l.open('w'),
                              stderr=subprocess.STDOUT)
             for r, l in enumerate(logs)]
    end = time.monotonic() + 240
    while None in (codes := [p.poll() for p in ranks]) and not any(codes) and time.monotonic() < end:
        time.sleep(0.2)  # one that fails leaves the other waiting
    for p in ranks:
        p.kill()
        p.wait()
    if codes == [0, 0]: return ''
    said = [l.read_text()[-3000:] for l in logs]
    return '\n'.join([f'exit codes {codes} (None: was still running)', *said])


@pytest.fixture(scope='module')
def out(tmp_path_factory):
    "The folder with what the two processes wrote; pytest-xdist's workers share it"
    pytest.importorskip('accelerate', reason='accelerate is not installed: pip install repq[dist]')
    from filelock import FileLock
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if 'PYTEST_XDIST_WORKER' in os.environ else root)/'ranks'
    with FileLock(f'{folder}.lock'):
        folder.mkdir(exist_ok=True)
        if not (folder/'outcome').exists(): (folder/'outcome').write_text(run_ranks(folder))
    wrong = (folder/'outcome').read_text()
    if wrong: pytest.fail(wrong)
    return folder


def of_ranks(out, name, what):
    "Tensors of one kind that both processes wrote"
    found = [{k.removeprefix(f'{what}/'): t for k, t in load_file(out/f'{name}.{r}.safetensors').items()
              if k.startswith(f'{what}/')} for r in range(2)]
    assert found[0] and found[0].keys() == found[1].keys()
    return found


def notes(out, name): return [json.loads((out/f'{name}.{r}.json').read_text()) for r in range(2)]
def furthest(a, b): return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


@pytest.mark.parametrize('name', RUNS)
def test_steps_of_rank_0_are_broadcast(out, name):
    x, first, local = (of_ranks(out, name, w) for w in ('batch', 'initial', 'local'))
    assert furthest(*x) > 0.1                          # other data,
    assert furthest(*local) > 1e-4                     # for which each process alone finds other steps:
    assert furthest(*first) == 0                       # without the broadcast these would differ
    found = torch.cat([local[0][k] for k in sorted(local[0], key=int)]).float().sort().values
    assert torch.equal(torch.cat([t.flatten() for t in first[0].values()]).sort().values, found)


@pytest.mark.parametrize('name', RUNS)
def test_processes_end_with_one_network(out, name):
    final, first = of_ranks(out, name, 'final'), of_ranks(out, name, 'initial')[0]
    assert furthest(*final) < 1e-6
    assert furthest(first, {k: final[0][k] for k in first}) > 1e-3   # steps were trained


@pytest.mark.parametrize('name', RUNS)
def test_running_statistics_are_averaged(out, name):
    alone, averaged = of_ranks(out, name, 'alone'), of_ranks(out, name, 'averaged')
    assert furthest(*alone) > 1e-3 and furthest(*averaged) == 0
    # averaged once in an epoch, not overwritten in between
    if name != 'staged':
        assert all(n['own'] for n in notes(out, name))
    for k, t in averaged[0].items():
        torch.testing.assert_close(t, (alone[0][k] + alone[1][k])/2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('name', RUNS)
def test_training_through_the_wrapper(out, name):
    ranks = notes(out, name)
    for n in ranks:
        losses = n['losses']
        assert sum(losses[-3:]) < 0.9*sum(losses[:3]), losses
        assert n['wrapped'] == 'DistributedDataParallel' and n['bare']
        # the paper's exceptions go by name
        assert n['bits']['stem'] == [4, 8] and n['bits']['head'] == [4, 4]
        assert 'stem' in n['doctor'] and 'head' in n['doctor']
    for a, b in zip(*(n['shares'] for n in ranks)):
        assert len(a) == len(b) and not set(a) & set(b) and sorted(a + b) == list(range(1440))
    assert len(ranks[0]['losses']) == len(ranks[1]['losses'])


def test_a_checkpoint_that_only_rank_0_has_read(out):
    first = of_ranks(out, 'loaded', 'initial')
    assert all((t == torch.tensor(ONCE)).all() for steps in first for t in steps.values())
    assert furthest(*of_ranks(out, 'loaded', 'final')) < 1e-6
    # no step was searched
    assert not any(k.startswith('local') for k in load_file(out/'loaded.1.safetensors'))
    # fastai promises 12 batches of 62: the doctor must not wait for the last
    for n in notes(out, 'loaded'):
        assert len(n['losses']) == 11 and 'stem' in n['doctor']


def test_a_process_that_sees_zeros(out):
    "Nothing hangs: rank 0 decides, and if it has seen nothing, both wait"
    a, b = notes(out, 'zeros')
    assert not a[0][0] and not b[0][0]
    assert a[1][0] and b[1][0] and a[1][1] == b[1][1] == pytest.approx(a[1][2])
