"""The ends of four smoke trainings, kept in reference.json: a refactoring must not move them.

`python tests/reproduce/reference.py` writes them anew, in minutes. Do that only after METHOD was raised,
or the settings of smoke were changed."""
import json, os, subprocess, sys, tempfile
from pathlib import Path
from repq.reproduce import driver as D, runs as R
from repq.tools.files import write_json
from repq.reproduce.records import METHOD, read_record
from repq.reproduce.training import made_elsewhere

FILE = Path(__file__).with_suffix('.json')
# older processors: the libraries can act as on one
OTHERS = dict(avx2=dict(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2', MKL_CBWR='AVX2'),
              sse4=dict(ATEN_CPU_CAPABILITY='default', ONEDNN_MAX_CPU_ISA='SSE41', MKL_CBWR='COMPATIBLE'))


def chosen_runs():
    "One RepVGG and one ECBSR, each after its parent"
    chosen = [R.classifier('smoke', 0, 'RepVGG-A0', 'repq', 'batch', 4),
              R.super_resolution('smoke', 0, 'repq', 4)]
    return [r for c in chosen for r in (c.parent, c)]


def end_of(record):
    "What is kept of a record: who made it, its last losses, its metric"
    m, last = record['metrics'], record['history'][-1]
    if 'accuracy' in m: metric = dict(accuracy=m['accuracy'])
    else: metric = dict(psnr=sum(m['psnr'].values())/len(m['psnr']))
    return dict(id=record['id'], segment=record['segments'][-1], train_loss=last['train_loss'],
                valid_loss=last['valid_loss'], **metric)


def near(reference, name):
    "How far a metric may be off elsewhere: three times as far as the furthest of the other processors"
    here = reference['ends']
    far = []
    for ends in reference['others'].values():
        far += [abs(end[name] - here[label][name]) for label, end in ends.items() if name in end]
    return 3*max(far)


def moved(reference, label, record):
    "How the end of a training differs from the reference: to the bit where that was made, near it elsewhere"
    kept, now = reference['ends'][label], end_of(record)
    if now['id'] != kept['id']:
        return f'the run is now called {now["id"]}: were the settings of smoke changed? {__doc__}'
    exact = not made_elsewhere(kept['segment'], now['segment'])
    names = [k for k in kept if k in ('accuracy', 'psnr') or exact and k.endswith('loss')]
    limits = {k: 0. if exact else near(reference, k) for k in names}
    far = [f'{k} of {label} at its end was {kept[k]!r}, and is {now[k]!r}, at most {limit:.2g} is allowed'
           for k, limit in limits.items() if abs(kept[k] - now[k]) > limit]
    return f'{"; ".join(far)}. If that is meant, raise METHOD. {__doc__}' if far else ''


def train(root):
    "The ends of all of them, trained now"
    batch = D.run_batch(chosen_runs(), root, workers=1, live=False)
    if any(o.state != 'done' for o in batch.outcomes.values()):
        sys.exit(f'a run failed, so nothing was written: {batch.outcomes}')
    return {r.label: end_of(read_record(R.Store(root).done(r))) for r in chosen_runs()}


def elsewhere(env):
    "The same in a process that takes itself to be on another processor"
    done = subprocess.run([sys.executable, __file__, 'print'], env=os.environ | env, stdout=subprocess.PIPE,
                          text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as root:
        ends = train(root)
        if sys.argv[1:] == ['print']: print(json.dumps(ends))
        else:
            others = {name: elsewhere(env) for name, env in OTHERS.items()}
            write_json(FILE, dict(method=METHOD, ends=ends, others=others))
