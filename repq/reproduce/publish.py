"Copy finished runs to where they are kept: `python -m repq.reproduce.publish FROM TO`"
# plain Python: it copies files, with nothing to teach; tests/reproduce/test_publish.py proves it
import argparse, shutil, sys, tempfile
from pathlib import Path

from repq.reproduce.records import WEIGHTS, read_record
from repq.reproduce.runs import PROFILES, Store, cells, graph
from repq.tools.files import Corrupt, inside

NETWORK = 'network.safetensors' # the merged network, as `repq.load` opens it


def needed(run, runs, store)->bool:
    "Whether a run that is still to come starts from these weights"
    return any(r.parent == run and store.look(r).state not in ('done', 'collapsed') for r in runs)


def keeps_weights(run, runs, store)->bool:
    "Whether the weights of a run are kept: those of full precision, of seed 0 or while they are needed"
    return run.strategy == 'fp' and (run.seed == 0 or needed(run, runs, store))


def save_merged(folder, path)->Path:
    "The trained network of a run, merged, integers as integers"
    import repq
    from repq.reproduce.training import load_network
    net, _ = load_network(folder)
    return repq.save(repq.merge(net), path, about=dict(run=Path(folder).name))


def add_network(run, source, target):
    "Put the merged network of a quantized run of seed 0 beside its record, if it is not there"
    here, there = source.done(run), target.done(run)
    if run.seed or run.bits == 32 or run.task == 'time': return
    if (there/NETWORK).exists() or not there.exists(): return
    if (here/WEIGHTS).is_file() and read_record(here, weights=True): save_merged(here, there/NETWORK)


def publish_run(run, runs, source, target)->bool: # whether it was new
    "Copy one finished run, whole or not at all"
    here, there = source.done(run), target.done(run)
    if there.exists(): return False
    found = source.look(run, weights=True)
    if found.state == 'corrupt': raise Corrupt(found.why)
    if found.state not in ('done', 'collapsed'): return False
    target.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.folder, prefix='.publish-') as temporary:
        new = Path(temporary)/run.id
        new.mkdir()
        record = read_record(here)
        names = ['record.json', *record['files']]
        if (here/WEIGHTS).is_file() and keeps_weights(run, runs, target): names.append(WEIGHTS)
        for name in names: shutil.copyfile(inside(here/name, here), new/name)
        read_record(new, weights=True)
        new.rename(there)
    return True


def publish(
    source,             # folder of results that trainings write to
    target='results',   # folder of results that is kept
    profile:str='cpu',
    seeds:int=None,     # by default what the profile has
    say=print
)->list: # ids of runs that are new
    "Copy finished runs; weights that no run needs any more stay behind as a digest"
    runs, new = graph(cells(profile, seeds=seeds)), []
    source, target = Store(source, profile), Store(target, profile)
    if not source.folder.is_dir():
        raise ValueError(f'there are no results of profile {profile} in {source.root}')
    for run in runs:
        try:
            if publish_run(run, runs, source, target):
                new.append(run.id)
                say(run.id)
            add_network(run, source, target)
        except Corrupt as e: say(f'{run.id} was left out: {e}')
    for run in runs: # weights that were kept for runs that have ended by now
        weights = target.done(run)/WEIGHTS
        if weights.is_file() and not keeps_weights(run, runs, target): weights.unlink()
    return new


def main(args=None):
    parser = argparse.ArgumentParser(prog='python -m repq.reproduce.publish', description=__doc__)
    parser.add_argument('source', help='folder of results that trainings write to')
    parser.add_argument('target', help='folder of results that is kept')
    parser.add_argument('--profile', choices=PROFILES, default='cpu')
    parser.add_argument('--seeds', type=int, help='default: as many as the profile has')
    a = parser.parse_args(args)
    try: new = publish(a.source, a.target, a.profile, a.seeds)
    except ValueError as e: sys.exit(f'repq.reproduce.publish: {e}')
    print(f'{len(new)} new')


if __name__ == '__main__': main()
