"Records as the experiments write them, with made-up numbers, for tests of tables and report"
import random
from repq.reproduce import runs
from repq.tools.files import seal, sha256, write_json
from repq.reproduce.records import METHOD, WEIGHTS
from repq.reproduce.evidence import listing

ACCURACY = {'plain': .90, 'merged': .91, 'repq': .93, 'ptq': .89, 'fp': .92}
COST = {32: 1024, 8: 64, 4: 16.2, 2: 4.6}   # bit-operations for one multiplication
TIMES = {'FP Plain': 1., 'FP Re-parametrized': 1.9, 'QAT Plain': 1., 'QAT RepQ': 1.5, 'QAT RepQ-BN': 1.9,
         'QAT RepQ-BNEst': 1.3, 'QAT RepQ-calibrated': 1.4, 'QAT RepQ-sampled': 1.6}


def metrics_of(run, images=5, n=10_000):
    "Metrics of one run: RepQ a little better than Merged, Merged than Plain, fewer bits worse"
    noise = random.Random(run.key)
    if run.task == 'time':
        span = {c: dict(median=v, low=v*.99, high=v*1.01) for c, v in TIMES.items()}
        return dict(seconds=span, relative=span, rounds=9, shape=[4, 3, 32, 32])
    loss = {32: 0, 8: -.005, 4: .03, 2: .2}[run.bits]
    if run.task == 'super_resolution':
        level = 33 + 20*(ACCURACY[run.strategy] - .9) - 10*loss
        per_image = {s: {f'{s} {i}': level + i + .1*noise.random() for i in range(images)}
                     for s in runs.TEST_SETS}
        psnr = {s: sum(v.values())/len(v) for s, v in per_image.items()}
        stand_ins = dict(Set5='coffee', Set14='rocket', B100='camera', U100='coins') if images == 1 else {}
        return dict(psnr=psnr, bicubic={s: 31. for s in psnr}, per_image=per_image,
                    images={s: images for s in psnr}, stand_ins=stand_ins)
    estimate = run.statistics == 'estimate'
    a = ACCURACY[run.strategy] - loss + .002*noise.random() + .004*(estimate and run.bits == 4)
    layers = range(8 if estimate else 0)
    errors = {f'stage1.{i}': .05 + .02*i + noise.random()*.03 for i in layers}
    return dict(accuracy=a - .004, best_accuracy=a, best_epoch=3, valid_accuracy=[a], test_size=n,
                valid_size=n//2, held_out=True, chance=.1, variance_error=errors)


def record_of(run, metrics):
    "A whole record, as the notebook and the driver write it"
    level = metrics.get('best_accuracy') or metrics.get('psnr', {}).get('Set5') or 1.
    size = {'repvgg_b0': 2.2}.get(run.model, 1.)
    history, more = [], {}
    if run.task != 'time':
        for e in range(1, 5):
            history.append(dict(epoch=e, train_loss=1/e, valid_loss=1/e, metric=level*(1 - .1/e**2)))
        branches = 0 if run.block == 'plain' or run.strategy == 'merged' else 21
        layers = dict(total=22, reparametrized=branches, quantized=0 if run.bits == 32 else 22)
        bit_ops = int(1_000_000*size*COST[run.bits])
        more = dict(layers=layers, cost=dict(macs=1_000_000, bit_ops=bit_ops, parameters=100_000))
    commit, chip = '0123456789abcdef', dict(name='a processor', instructions='0123456789ab')
    segment = dict(commit=commit, processor=chip, torch='2.8.0', path='simple', first=0, last=40)
    return dict(
        format=2, id=run.id, method=METHOD, profile=run.profile, spec=run.stored, metrics=metrics,
        history=history, **more, commit=commit, finished='2026-01-01T00:00:00Z',
        environment=dict(python='3.12.1', cpu='a processor', cores=2, gpu='none', torch='2.8.0'),
        versions=dict(python='3.12.1', torch='2.8.0'), processor=chip,
        path=dict(asked='simple', taken={}), segments=[segment],
        probe=dict(losses=[(2.5).hex()], metrics=dict(accuracy=(.9).hex())),
        time=dict(wall=63., cpu=60., training_cpu=50., sessions=1))


def write_run(root, run, metrics=None, pictures=(), **changes):
    "The folder of a finished run, where the store looks for it"
    folder = runs.Store(root, run.profile).done(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder/'notebook.ipynb').write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    (folder/WEIGHTS).write_bytes(b'weights')
    for name, data in dict(pictures).items(): (folder/name).write_bytes(data)
    files = {p.name: sha256(p) for p in folder.iterdir() if p.name not in (WEIGHTS, 'record.json')}
    record = {**record_of(run, metrics or metrics_of(run)),
              'weights': dict(file=WEIGHTS, sha256=sha256(folder/WEIGHTS)), 'files': files, **changes}
    write_json(folder/'record.json', seal(record))
    return folder


def write_failure(root, run, why):
    "The folder of a run that failed"
    folder = runs.Store(root, run.profile).work(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder/'notebook.ipynb').write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    write_json(folder/'failed.json', dict(why=why, when='2026-01-01T00:00:00Z'))


def all_runs(profile, seeds=1): return listing(profile, seeds)[1]


def write_all(root, profile='smoke', seeds=1, **kwargs):
    "A whole batch"
    for run in all_runs(profile, seeds): write_run(root, run, metrics_of(run, **kwargs))
    return root
