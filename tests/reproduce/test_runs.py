"The driver: real trainings in real kernels, killed, broken, resumed, and on a cluster"
import json, os, shutil, signal, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
import pytest
from repq.reproduce import driver as D, records, runs as R
from repq.tools.files import seal, sha256, write_json

ROOT = Path(__file__).parents[2]


def short(run, **changes):
    "A run of super-resolution that takes a few seconds"
    parent = short(run.parent, **changes) if run.parent else None
    # with a limit it is not judged
    few = dict(epochs=4, steps_per_epoch=6, batch_size=4, max_steps=10_000)
    return replace(run, parent=parent, settings=run.settings | few | changes)


def family(**changes):
    "A parent and two children"
    plain = R.super_resolution('smoke', 0, 'fp', block='plain')
    return [short(r, **changes)
            for r in (plain, R.super_resolution('smoke', 0, 'plain', 8),
                      R.super_resolution('smoke', 0, 'plain', 4))]


def classifiers():
    "A parent and its child, whose blocks are merged in C"
    child = R.classifier('smoke', 0, 'RepVGG-A0', 'repq', 'estimate', 4)
    parent = replace(child.parent, settings=child.parent.settings | dict(epochs=1))
    return [parent, replace(child, parent=parent, settings=child.settings | dict(epochs=4))]


def need_c():
    "Skip a test of the path in C where there is none: without a compiler, or without the room `fast`"
    from repq.tools.registry import ready_path
    if ready_path('fused')[0] != 'fused': pytest.skip('needs repq.fast and a C compiler')


CODE = '''
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler) # a job in the background ignores it
sys.path.insert(0, sys.argv[1])
from tests.reproduce import test_runs
from repq.reproduce.driver import run_batch
if __name__ == '__main__':
    runs, scheduler = getattr(test_runs, sys.argv[4])(), sys.argv[3] or None
    batch = run_batch(runs, sys.argv[2], workers=2, live=False, scheduler=scheduler)
    sys.exit(any(o.state != 'done' for o in batch.outcomes.values()))
'''


def start(root, scheduler='', runs=family, cwd=None):
    script = Path(root).parent/'driver.py'
    script.write_text(CODE)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen([sys.executable, str(script), str(ROOT), str(root), scheduler, runs.__name__],
                            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True, cwd=cwd)


def results(root, runs=family):
    "What must not depend on how a batch came about: metrics, history and the bytes of the weights"
    found = {}
    for r in runs():
        record = R.read_record(Path(root)/'smoke'/r.id, weights=True)
        found[r.id] = record['metrics'], record['history'], record['weights']['sha256']
    return found


def wait_for(condition, seconds=120, what=''):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f'waited {seconds} s for {what}'
        time.sleep(0.05)


def pids_in(root):
    "Kernels that are at a run below a folder"
    return [json.loads(p.read_text())['pid'] for p in Path(root).glob('smoke/.work/*/progress.json')]


def alive(pid):
    try: return open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[0] != 'Z'
    except FileNotFoundError: return False


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "A batch that nothing happens to: where it is, what came out, how long it took"
    root, began = tmp_path_factory.mktemp('undisturbed')/'results', time.time()
    driver = start(root)
    out = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, out
    return root, results(root), time.time() - began


def test_finished_runs_are_complete(undisturbed):
    root = undisturbed[0]
    for r in family():
        folder = root/'smoke'/r.id
        assert {p.name for p in folder.iterdir()} >= {'record.json', 'notebook.ipynb', 'weights.safetensors',
                                                      'crop.png'}
        assert not (folder/'checkpoint.safetensors').exists() and not (folder/'lock').exists()
        text = (folder/'notebook.ipynb').read_text()
        assert 'image/png' in text, 'the executed notebook has no pictures, or no parameters'
        assert 'injected-parameters' in text, 'the executed notebook has no pictures, or no parameters'
        record = R.read_record(folder)
        assert record['time']['sessions'] == 1 and len(record['history']) == 4
        assert record['environment']['torch']
    assert not any((root/'smoke'/'.work').iterdir())


def test_same_seed_twice(undisturbed, tmp_path):
    "In other kernels, started the ordinary way"
    parent = family()[0]
    o = D.execute(parent, tmp_path, fork=False)
    assert o.state == 'done', o.why
    record = R.read_record(tmp_path/'smoke'/parent.id)
    assert (record['metrics'], record['history'], record['weights']['sha256']) == undisturbed[1][parent.id]
    other = replace(parent, seed=1)
    assert D.execute(other, tmp_path).state == 'done'
    assert R.read_record(tmp_path/'smoke'/other.id)['metrics'] != record['metrics']


@pytest.mark.skipif(sys.version_info < (3, 11),
                    reason='Python 3.10 always looks in the folder it is started in')
def test_kernels_have_the_code_of_the_driver(undisturbed, tmp_path):
    "Started inside another clone, whose repq is not the one that the run is named after"
    (tmp_path/'clone'/'repq').mkdir(parents=True)
    code = 'from pathlib import Path; (Path(__file__).parent/"imported").touch()'
    (tmp_path/'clone'/'repq'/'__init__.py').write_text(code)
    driver = start(tmp_path/'results', cwd=tmp_path/'clone')
    out = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0 and not (tmp_path/'clone'/'repq'/'imported').exists(), out
    assert results(tmp_path/'results') == undisturbed[1]
    (tmp_path/'one.py').write_text('from tests.reproduce.test_runs import D, family\n'
                                   'print(D.execute(family()[0], "ordinary", fork=False))')
    out = subprocess.run([sys.executable, str(tmp_path/'one.py')],
                         env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
                         cwd=tmp_path/'clone', capture_output=True, text=True)
    assert "state='done'" in out.stdout and not (tmp_path/'clone'/'repq'/'imported').exists(), out


@pytest.mark.parametrize('moment', ['in the parent', 'in a child', 'before the rename'])
def test_kill_9_and_again(undisturbed, tmp_path, moment):
    "Killed without a chance to clean up: no kernel stays, the next batch ends as if nothing had happened"
    root, (parent, child, _) = tmp_path/'results', family()
    store = R.Store(root, 'smoke')
    condition = {'in the parent': lambda: (store.work(parent)/'checkpoint.safetensors').exists(),
                 'in a child': lambda: (store.work(child)/'checkpoint.safetensors').exists(),
                 'before the rename': lambda: (store.work(parent)/'record.json').exists()}[moment]
    driver = start(root)
    try: wait_for(condition, what=moment)
    finally: driver.kill()
    driver.wait()
    pids = pids_in(root)
    wait_for(lambda: not any(map(alive, pids)) and not any(R.locked(store.work(r)) for r in family()), 15,
             f'kernels {pids} to end')
    states = [store.look(r).state for r in (parent, child)]
    assert states[0] == ('done' if moment == 'in a child' else 'interrupted'), states
    stamp = (store.done(parent)/'record.json').stat().st_mtime_ns if states[0] == 'done' else None
    driver = start(root)
    out = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, out
    assert results(root) == undisturbed[1]
    if stamp:
        assert (store.done(parent)/'record.json').stat().st_mtime_ns == stamp, 'a finished run was done twice'
    sessions = R.read_record(store.done(child if moment == 'in a child' else parent))['time']['sessions']
    assert sessions == (1 if moment == 'before the rename' else 2)


# -- two drivers, one folder

def slow_family(): return family(steps_per_epoch=60)
def long_family(): return family(steps_per_epoch=120)[:1]


class Driver:
    "A driver whose lines can be waited for while it runs"
    def __init__(self, root, runs=slow_family):
        self.process, self.lines = start(root, runs=runs), []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()
    @property
    def out(self): return ''.join(self.lines)
    def says(self, text):
        wait_for(lambda: text in self.out or not self.reader.is_alive(), what=text)
        assert text in self.out, self.out
    def end(self, number=None):
        if number: self.process.send_signal(number)
        status = self.process.wait(300)
        self.reader.join(10)
        return status


@pytest.fixture
def driver(tmp_path):
    "Starts drivers on one folder; none of them outlives the test"
    made = []
    def start_one(runs=slow_family):
        made.append(Driver(tmp_path/'results', runs))
        return made[-1]
    yield start_one
    for d in made: d.process.kill()


def at_work(store, run):
    "The kernel that is at a run, after its first epoch"
    wait_for(lambda: (store.work(run)/'checkpoint.safetensors').exists(), what=f'an epoch of {run.id}')
    return R.read_progress(store.work(run))['pid']


def test_two_drivers_share_the_work(undisturbed, tmp_path, driver):
    "Started one after the other: every run is made once, both wait for all, and the results are the same"
    root = tmp_path/'results'
    drivers = [driver(family), driver(family)]
    for d in drivers: assert d.end() == 0, d.out
    assert results(root) == undisturbed[1]
    out = [d.out for d in drivers]
    assert any('is at it: waiting for its result' in o for o in out), out
    assert all(o.count(' done ') == 3 for o in out), out
    found = sum(o.count('was there already') for o in out)
    assert found == 3, 'each run is made by one driver and found by the other'
    assert all(R.read_record(root/'smoke'/r.id)['time']['sessions'] == 1 for r in family())
    assert not any((root/'smoke'/'.work').iterdir())


def test_ctrl_c_ends_only_its_own_kernels(tmp_path, driver):
    "The second of two drivers is stopped: the kernel of the first lives, and the first ends well"
    root, parent = tmp_path/'results', slow_family()[0]
    first = driver()
    kernel = at_work(R.Store(root, 'smoke'), parent)
    second = driver()
    second.says(f'process {first.process.pid} on')
    assert second.end(signal.SIGINT) != 0 and alive(kernel), second.out
    assert first.end() == 0, first.out
    assert all(R.read_record(root/'smoke'/r.id, weights=True)['time']['sessions'] == 1 for r in slow_family())


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_a_driver_takes_over(tmp_path, driver, how):
    "The first of two drivers ends in mid-run: its kernel ends too, the second goes on from the checkpoint"
    root, parent = tmp_path/'results', slow_family()[0]
    store, first = R.Store(root, 'smoke'), driver()
    kernel = at_work(store, parent)
    second = driver()
    second.says(f'process {first.process.pid} on')
    assert first.end(how) != 0
    wait_for(lambda: not alive(kernel), 15, 'the kernel to end')
    assert second.end() == 0 and 'failed' not in second.out + first.out, second.out
    assert all(R.read_record(store.done(r), weights=True) for r in slow_family())
    assert R.read_record(store.done(parent))['time']['sessions'] == 2


def test_ctrl_c_is_no_failure(tmp_path, driver):
    "A batch that was stopped is interrupted, at once, and goes on"
    root, parent = tmp_path/'results', slow_family()[0]
    only, store = driver(), R.Store(root, 'smoke')
    kernel, began = at_work(store, parent), time.time()
    assert only.end(signal.SIGINT) != 0 and time.time() - began < 15 and not alive(kernel)
    assert store.look(parent).state == 'interrupted', store.look(parent)
    assert 'stopping: the same command goes on' in only.out
    assert not store.claim(parent).exists()


def test_ctrl_c_while_kernels_start(tmp_path, driver):
    "Before the first kernel is there: it ends as soon as it has come"
    root, parent = tmp_path/'results', slow_family()[0]
    only, store = driver(), R.Store(root, 'smoke')
    wait_for(lambda: store.claim(parent).exists(), what='a claim')
    assert only.end(signal.SIGINT) != 0
    assert store.look(parent).state in ('interrupted', 'missing') and not store.claim(parent).exists()


def test_a_claim_is_of_one(tmp_path):
    "Many at a time, claiming and giving back: never two at once"
    run, store, inside, most = family()[0], R.Store(tmp_path, 'smoke'), [], []
    def work():
        mine = 0
        while mine < 40:
            with D.claimed(run, store) as other:
                if other: continue
                inside.append(1)
                most.append(len(inside))
                time.sleep(1e-4)
                inside.pop()
                mine += 1
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert max(most) == 1 and len(most) == 8*40 and not store.claim(run).exists()


def test_a_finished_run_is_not_written_into(undisturbed, tmp_path):
    "A driver that saw nothing when it began finds the result when it gets there"
    root, parent = tmp_path/'results', family()[0]
    batch = D.Batch(family()[:1], root)
    shutil.copytree(undisturbed[0], root)
    files = {p: p.stat().st_mtime_ns for p in (root/'smoke'/parent.id).iterdir()}
    with D.open_executor(1) as pool:
        while batch.unfinished: new = batch.step(pool, 1)
    assert [(o.state, o.why, o.seconds) for o in new] == [('done', 'was there already', 0.)]
    assert not batch.times
    assert files == {p: p.stat().st_mtime_ns for p in (root/'smoke'/parent.id).iterdir()}


def test_kill_9_and_again_in_c(tmp_path):
    "Smoke's classifiers: after the kill another process loads the library, and every bit is the same"
    need_c()
    parent, child = classifiers()
    whole, cut = tmp_path/'whole', tmp_path/'cut'
    assert parent.settings['path'] == child.settings['path'] == 'fused'
    assert [D.execute(r, whole).state for r in (parent, child)] == ['done', 'done']
    store = R.Store(cut, 'smoke')
    shutil.copytree(R.Store(whole, 'smoke').done(parent), store.done(parent))
    driver = start(cut, runs=classifiers)
    try: wait_for(lambda: (store.work(child)/'checkpoint.safetensors').exists(), what='an epoch of the child')
    finally: driver.kill()
    driver.wait()
    wait_for(lambda: not R.locked(store.work(child)), 15, 'the kernel to end')
    assert store.look(child).state == 'interrupted'
    driver = start(cut, runs=classifiers)
    out = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, out
    assert results(cut, classifiers) == results(whole, classifiers)
    assert R.read_record(store.done(child))['time']['sessions'] == 2
    record = R.read_record(store.done(child))
    assert record['spec']['settings']['path'] == 'fused' and record['path']['taken']['fused'] > 0
    assert not record['path']['taken']['compiled']


def test_paths_of_the_profiles():
    "Every specification names a path that there is"
    from repq.tools.registry import use_path
    for run in (r for p in R.PROFILES for r in R.graph(R.cells(p, seeds=1))):
        with use_path(run.settings['path']): pass
        if run.profile in R.ON_GPU: assert run.settings['path'] == 'both', run.id
        else: assert run.settings['path'] == ('both' if run.task == 'time' else 'fused'), run.id


def test_damage_is_named_and_set_aside(undisturbed, tmp_path, capsys):
    root, (_, child, other) = tmp_path/'results', family()
    shutil.copytree(undisturbed[0], root)
    store = R.Store(root, 'smoke')
    record = store.done(child)/'record.json'
    record.write_text(record.read_text()[:-40])
    (store.done(other)/'weights.safetensors').write_bytes(b'nonsense')
    batch = D.run_batch(family(), root, workers=2, live=False)
    out = capsys.readouterr().out
    assert 'record.json is damaged' in out and 'its hash differs' in out and out.count('not trusted') == 2
    assert all(o.state == 'done' for o in batch.outcomes.values()) and results(root) == undisturbed[1]
    assert len(list((root/'smoke'/'.corrupt').iterdir())) == 2


def test_failures_stay_alone(undisturbed, tmp_path):
    "A run that fails is reported with its notebook; its children are skipped, all others go on"
    root = tmp_path/'results'
    shutil.copytree(undisturbed[0], root)
    good, bad = family(), family(data='nonsense')
    batch = D.run_batch(bad + good, root, workers=2, live=False)
    states = {r.id: batch.outcomes[r.id].state for r in bad + good}
    assert [states[r.id] for r in bad + good] == ['failed', 'skipped', 'skipped', 'done', 'done', 'done']
    store = R.Store(root, 'smoke')
    found = store.look(bad[0])
    assert found.state == 'failed' and "data must be one of" in found.why and 'nonsense' in found.why
    assert 'nonsense' in (found.folder/'notebook.ipynb').read_text()
    assert bad[0].id in batch.outcomes[bad[1].id].why


def test_exit_status_of_the_command(tmp_path, monkeypatch, capsys):
    "Without data the cpu profile cannot start: runs are named, the status is 1, tables and report are there"
    from repq.cli.command import main
    monkeypatch.setenv('REPQ_DATA', str(tmp_path/'nowhere'))
    monkeypatch.chdir(tmp_path)
    assert main(['reproduce', '--profile', 'cpu', '--table', '3', '--seeds', '1', '--steps', '1', '--results',
                 'here']) == 1
    out, err = capsys.readouterr()
    assert err.count('failed:') == 2 and err.count('skipped:') == 12
    assert "data set 'sr/BSDS400' not found" in err and 'notebook.ipynb' in err
    assert '0 of 14 runs done' in out and (tmp_path/'here/cpu/report.html').is_file()
    assert (tmp_path/'here/cpu/tables.md').is_file()
    assert main(['status', '--profile', 'cpu', '--table', '3', '--seeds', '1', '--results', 'here']) == 0
    assert '14 missing' in capsys.readouterr().out     # runs of one step are other runs


def test_diverging_training_is_a_failure(tmp_path):
    run = replace(family()[0],
                  settings=family()[0].settings | dict(lr=1e9, schedule='constant', optimizer='sgd'))
    o = D.execute(run, tmp_path)
    assert o.state == 'failed' and 'the loss is' in o.why and 'learning rate' in o.why


def test_records_without_weights(undisturbed, tmp_path, capsys):
    "If only the digest of the weights is there, a run has ended; it is made again only for its child"
    root = tmp_path/'results'
    shutil.copytree(undisturbed[0], root)
    store, (parent, child, *_) = R.Store(root, 'smoke'), family()
    for r in (parent, child): (store.done(r)/'weights.safetensors').unlink()
    assert store.look(parent).state == store.look(child, weights=True).state == 'done'
    batch = D.run_batch([parent, child], root, workers=1, live=False)
    assert not batch.times, 'nothing was to be done'
    assert not (store.done(parent)/'weights.safetensors').exists(), 'nothing was to be done'
    shutil.rmtree(store.done(child))
    with pytest.raises(ValueError, match='its weights are not'): D.check_parent(child, store)
    batch = D.run_batch([parent, child], root, workers=1, live=False)
    assert {o.state for o in batch.outcomes.values()} == {'done'}
    assert 'starts from them: it will be run again' in capsys.readouterr().out
    for r in (parent, child):
        record = R.read_record(store.done(r), weights=True)
        assert (record['metrics'], record['history'], record['weights']['sha256']) == undisturbed[1][r.id]


def test_weights_that_do_not_fit(undisturbed, tmp_path):
    "A parent of another shape under the parent's name: its record is whole, so the network must notice"
    root, (parent, child, _) = tmp_path/'results', family()
    wide = replace(parent, settings=parent.settings | dict(channels=16))
    assert D.execute(wide, root).state == 'done'
    store = R.Store(root, 'smoke')
    shutil.copytree(undisturbed[0]/'smoke'/parent.id, store.done(parent))
    shutil.copy(store.done(wide)/'weights.safetensors', store.done(parent))
    record = json.loads((store.done(parent)/'record.json').read_text())
    record['weights']['sha256'] = sha256(store.done(parent)/'weights.safetensors')
    write_json(store.done(parent)/'record.json', seal(record))
    o = D.execute(child, root)
    assert o.state == 'failed' and 'does not fit the network' in o.why and 'expected' in o.why


def test_full_disk(tmp_path):
    "On a file system with room for almost nothing; afterwards, with room, the run goes on"
    small = tmp_path/'small'
    small.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', str(small)],
                      capture_output=True).returncode:
        pytest.skip('needs the right to mount a small file system')
    try:
        run = family()[0]
        o = D.execute(run, small)
        assert o.state == 'failed' and 'No space left on device' in o.why, o
        assert not R.Store(small, 'smoke').done(run).exists()
        subprocess.run(['mount', '-o', 'remount,size=64m', str(small)], check=True)
        assert D.execute(run, small).state == 'done'
    finally: subprocess.run(['umount', '-l', str(small)], check=True)


def test_parameters_are_checked(tmp_path):
    nb = json.loads((R.experiments()/'classify.ipynb').read_text())
    path = tmp_path/'nb.ipynb'
    names = {'model', 'bits', 'settings'}
    path.write_text(json.dumps(nb))
    D.check_parameters(path, names)
    with pytest.raises(ValueError, match='no parameter bitz'): D.check_parameters(path, names | {'bitz'})
    for c in nb['cells']: c['metadata'].pop('tags', None)
    path.write_text(json.dumps(nb))
    with pytest.raises(ValueError, match='0 cells with the tag parameters'): D.check_parameters(path, names)


def test_what_the_notebook_did_is_compared(undisturbed, tmp_path):
    parent = family()[0]
    store = R.Store(tmp_path, 'smoke')
    shutil.copytree(undisturbed[0]/'smoke'/parent.id, store.work(parent))
    record = json.loads((store.work(parent)/'record.json').read_text())
    write_json(store.work(parent)/'record.json', record | dict(spec=record['spec'] | dict(seed=7)))
    with pytest.raises(ValueError, match='did not run with the values it was given: seed'):
        D.complete(parent, store)
    assert not store.done(parent).exists()


def test_another_method_is_told(undisturbed, tmp_path, monkeypatch):
    "Raising METHOD gives every run another name; the old record is found and called what it is"
    root, old = tmp_path/'results', family()[0]
    shutil.copytree(undisturbed[0], root)
    assert R.Store(root, 'smoke').look(old).state == 'done'
    monkeypatch.setattr(records, 'METHOD', records.METHOD + 1)
    monkeypatch.setattr(R, 'METHOD', records.METHOD)
    run = family()[0]
    found = R.Store(root, 'smoke').look(run)
    assert run.id != old.id and found.state == 'other method'
    assert found.why == f'METHOD {records.METHOD - 1}, now {records.METHOD}' and found.record['metrics']


PINNED = {
    'repvgg_a0-repvgg-fp-batch-s0': '9e13f8ae5f',
    'repvgg_b0-plain-plain-8bit-s1': '95edbab7f8',
    'resnet18-acnet-repq-estimate-4bit-s2': 'c713a43b6e',
    'resnet18-orepa-merged-4bit-s0': '4c894b3df5',
    'repvgg_a0-qarepvgg-ptq-8bit-s0': 'ceb394bfe5',
    'repvgg_a0-repvgg-repq-calibrated-4bit-s0': '3b02df0942',
    'repvgg_a0-repvgg-repq-sampled-4bit-s0': '0f9d9c898c',
    'repvgg_a0-repvgg-fp-1x1-s0': '55cd4aa5c9',
    'ecbsr-ecb-fp-s0': '7c3a95f3c3',
    'resnet18-acnet-time-4bit-s0': 'e90f17d3ee',
}

def pinned_runs():
    "Ten runs, each with a word or a setting that a renaming could touch"
    return [R.Run(*words[:4], *words[5:7], 'smoke', settings, words[4], parent=None)
            for words, settings in SPECIFICATIONS]

SPECIFICATIONS = [ # task, model, block, strategy, statistics, bits, seed; settings
    (('classify', 'repvgg_a0', 'repvgg', 'fp', 'batch', 32, 0), dict(data='digits', path='fused', lr=0.1)),
    (('classify', 'repvgg_b0', 'plain', 'plain', '', 8, 1),
     dict(data='cifar10', path='simple', lr=0.02, warmup=0)),
    (('classify', 'resnet18', 'acnet', 'repq', 'estimate', 4, 2),
     dict(data='cifar10', path='both', network=dict(width=0.25, small_input=True))),
    (('classify', 'resnet18', 'orepa', 'merged', '', 4, 0),
     dict(path='fused', exceptions=dict(stem=[8, 8], head=[8, 8]))),
    (('classify', 'repvgg_a0', 'qarepvgg', 'ptq', '', 8, 0), dict(data='imagenet', loader=dict(size=224))),
    (('classify', 'repvgg_a0', 'repvgg', 'repq', 'calibrated', 4, 0), dict(lr=1e-3, step_lr=1e-4)),
    (('classify', 'repvgg_a0', 'repvgg', 'repq', 'sampled', 4, 0), dict(lr=1e-3, step_lr=1e-4)),
    (('classify', 'repvgg_a0', 'repvgg', 'fp', '1x1', 32, 0), dict(lr=0.1, epochs=120)),
    (('super_resolution', 'ecbsr', 'ecb', 'fp', '', 32, 0),
     dict(data='div2k', patch=64, path='both', weight_decay=0.)),
    (('time', 'resnet18', 'acnet', 'time', '', 4, 0),
     dict(batch=16, size=128, rounds=9, methods=['RepQ-BN'], path='both'))]


def test_names_are_pinned():
    "Renaming something in the code leaves every name of a run as it is; METHOD is raised by hand alone"
    runs = pinned_runs()
    runs[5] = replace(runs[5], parent=runs[0])
    assert records.METHOD == 1 and {r.label: r.id for r in runs} == {l: f'{l}-{k}' for l, k in PINNED.items()}
    same = replace(runs[1], settings=dict(data='cifar10', path='simple', lr=0.02, warmup=0., loader=None))
    assert same.id == runs[1].id, '0. is 0, and None is left out'
    for r in runs: assert records.from_words(r.stored) == json.loads(json.dumps(r.spec())), 'and back'
    every = [r for p in R.PROFILES for r in R.graph(R.cells(p, seeds=1))]
    assert all(r.stored[k] in table.values() for r in every for k, table in records.WORDS.items())
    ids, pairs = {r.id for r in every}, {(r.id, r.profile) for r in every}
    assert len(ids) == len(pairs), 'no two profiles share a run'


def test_renamings_leave_names(monkeypatch):
    "A block, a path and a setting are renamed in the code: the stored words, and so all ids, stay"
    run = pinned_runs()[0]
    assert run.id == f'{run.label}-{PINNED[run.label]}'
    def renamed(table, old, new): return {new if k == old else k: v for k, v in table.items()}
    monkeypatch.setitem(records.WORDS, 'block', renamed(records.WORDS['block'], 'repvgg', 'three_branches'))
    monkeypatch.setitem(records.VALUE_WORDS, 'path', renamed(records.VALUE_WORDS['path'], 'fused', 'loop'))
    monkeypatch.setattr(records, 'SETTING_WORDS', dict(execution='path', rate='lr'))
    new = replace(run, block='three_branches', settings=dict(data='digits', execution='loop', rate=0.1))
    assert new.id == run.id and records.from_words(new.stored) == new.spec()
    with pytest.raises(ValueError, match="block 'repvgg' has no word"):
        replace(run, settings=dict(data='digits')).id


def test_export_from_a_record(undisturbed, tmp_path, capsys):
    "From a finished run, and from its file of weights alone, to ONNX with a certificate"
    pytest.importorskip('onnxruntime')
    from repq.cli.command import main
    store, (parent, child, _) = R.Store(undisturbed[0], 'smoke'), family()
    shutil.copy(store.done(child)/'weights.safetensors', tmp_path/'alone.safetensors')
    for source in (store.done(child), tmp_path/'alone.safetensors'):
        assert main(['export', str(source), '--check', '--out', str(tmp_path/'net.onnx')]) == 0
        assert 'parity holds' in capsys.readouterr().out
        assert json.loads((tmp_path/'net.json').read_text())['ok'] is True
    assert main(['export', str(store.done(parent)), '--out', str(tmp_path/'fp.onnx')]) == 0
    assert (tmp_path/'fp.onnx').stat().st_size > 5000
    assert main(['export', str(store.done(parent)), '--check', '--out', str(tmp_path/'no.onnx')]) == 2
    assert 'full precision' in capsys.readouterr().err
    assert main(['export', str(tmp_path/'nothing'), '--out', str(tmp_path/'no.onnx')]) == 2
    assert 'there is no' in capsys.readouterr().err
    assert not (tmp_path/'no.onnx').exists()


def test_network_of_a_run_is_the_trained_one(undisturbed):
    # here: a driver that imports this file must not wait for torch
    from repq.reproduce.training import load_network
    net, run = load_network(R.Store(undisturbed[0], 'smoke').done(family()[1]))
    from repq.data import evaluate_sr
    from repq.reproduce.training import stand_in
    record = R.read_record(R.Store(undisturbed[0], 'smoke').done(family()[1]))
    psnr = evaluate_sr(net, stand_in('coffee'), ssim=False)['psnr']
    assert psnr == pytest.approx(record['metrics']['psnr']['Set5'], abs=1e-9)
    assert run['bits'] == 8


# -- a cluster

@pytest.fixture
def cluster(tmp_path):
    "A Dask scheduler and two workers, each a process of its own"
    pytest.importorskip('distributed')
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    file = tmp_path/'scheduler.json'
    def dask(*words):
        return subprocess.Popen([sys.executable, '-m', 'distributed.cli.'+words[0], *words[1:]], env=env,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    started = [dask('dask_scheduler', '--port', '0', '--scheduler-file', str(file), '--no-dashboard',
                    '--host', '127.0.0.1')]
    wait_for(lambda: file.exists() and file.read_text(), what='the scheduler')
    address = json.loads(file.read_text())['address']
    started += [dask('dask_worker', address, '--nthreads', '1', '--no-dashboard', '--no-nanny', '--name',
                     name, '--local-directory', str(tmp_path/name), *more)
                for name, more in (('one', ()), ('two', ('--resources', 'GPU=1')))]
    yield address, started[1:]
    for p in started:
        try: os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError: pass


def test_cluster_loses_a_worker(undisturbed, tmp_path, cluster):
    "Of two workers one is killed in mid-run: the other goes on from the checkpoint, with the same results"
    address, workers = cluster
    root, (parent, *_) = tmp_path/'results', family()
    store = R.Store(root, 'smoke')
    driver = start(root, address)
    wait_for(lambda: (store.work(parent)/'checkpoint.safetensors').exists(),
             what='the first epoch on the cluster')
    kernel, = pids_in(root)
    owner, = [w for w in workers if parent_of(kernel, w.pid)]
    owner.kill()
    out = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, out
    assert results(root) == undisturbed[1]
    assert R.read_record(store.done(parent))['time']['sessions'] == 2 and not alive(kernel)


@pytest.mark.parametrize('profile', R.ON_GPU)
def test_runs_for_gpus_ask_for_one(cluster, profile):
    address, workers = cluster
    with D.open_executor(1, address, 'smoke') as any_worker, D.open_executor(1, address, profile) as with_gpu:
        wait_for(lambda: len(any_worker.client.scheduler_info()['workers']) == 2, what='both workers')
        assert {with_gpu.submit(os.getpid).result(60) for _ in range(6)} == {workers[1].pid}
        assert any_worker.submit(os.getpid).result(60) in {w.pid for w in workers}


def parent_of(pid, ancestor):
    while pid > 1:
        if pid == ancestor: return True
        try: pid = int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])
        except FileNotFoundError: return False
    return False


def test_no_scheduler_there(tmp_path):
    pytest.importorskip('distributed')
    with pytest.raises(OSError, match='no Dask scheduler answers'):
        with D.open_executor(1, 'tcp://127.0.0.1:9'): pass


# -- the paper's setting, and that of one GPU

@pytest.fixture(scope='module')
def paper_data(tmp_path_factory):
    "A few pictures in the layouts of ImageNet, CIFAR-10, DIV2K, BSDS400 and the test sets"
    import skimage.data
    from PIL import Image
    data, picture = tmp_path_factory.mktemp('data'), Image.fromarray(skimage.data.astronaut())
    def save(path, size, at):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.crop((at, at, at + size, at + size)).save(path)
    for i, wnid in enumerate(('n01440764', 'n01443537')):
        for k in range(2): save(data/f'imagenet/train/{wnid}/{wnid}_{k}.JPEG', 240, 50*i + 20*k)
        save(data/f'imagenet/val/{wnid}/ILSVRC2012_val_{i:08d}.JPEG', 240, 40*i)
    for i, name in enumerate(('cat', 'dog')):
        for k in range(130):
            # a record's probe takes batches of 250
            save(data/f'cifar10/train/{name}/{k}.png', 32, 60*i + 3*k)
        save(data/f'cifar10/test/{name}/0.png', 32, 90*i)
    for k in range(2): save(data/f'sr/DIV2K/DIV2K_train_HR/{k + 1:04d}.png', 160, 100*k)
    for k in range(2): save(data/f'sr/BSDS400/HR/{k + 1:04d}.png', 160, 100*k)
    for name in ('Set5', 'Set14', 'B100', 'Urban100'): save(data/f'sr/benchmark/{name}/HR/a.png', 96, 200)
    return data


def test_paper_runs_are_complete():
    runs = R.graph(R.cells('paper'))
    assert {r.model for r in runs} == {'repvgg_a0', 'repvgg_b0', 'resnet18', 'ecbsr'}
    assert {r.strategy for r in runs} == {'fp', 'plain', 'merged', 'repq', 'ptq', 'time'}
    assert {r.statistics for r in runs} == {'', 'batch', 'estimate', 'calibrated', 'sampled', '1x1'}
    by = {(r.model, r.block, r.strategy, r.statistics, r.bits): r.settings for r in runs if r.task != 'time'}
    assert by['repvgg_a0', 'repvgg', 'merged', '', 8]['lr'] in (0.001, 0.01)
    assert by['resnet18', 'acnet', 'repq', 'estimate', 8]['step_lr'] == 1e-4
    expected = dict(
        epochs=1000, batch_size=32, optimizer='adam', schedule='constant', warmup=0, weight_decay=0.,
        data='div2k', patch=64, steps_per_epoch=1600, lr=5e-4, step_lr=5e-4, threads=0, path=0)
    assert by['ecbsr', 'ecb', 'repq', '', 2] | dict(threads=0, path=0) == expected
    from repq.reproduce.duration import estimate
    assert all(0 < estimate(r, python=lambda kind: 0.).seconds < 1000*3600 for r in runs)


def test_gpu_runs_are_complete():
    "Every cell of cpu, full width, Table S1's rates; what only gpu has is in no run of smoke and cpu"
    runs, settings = R.graph(R.cells('gpu')), lambda *args: R.settings_for('gpu', *args)
    assert [r.label for r in runs] == [r.label for r in R.graph(R.cells('cpu'))]
    assert all('width' not in r.settings['network'] and 'depth' not in r.settings['network'] for r in runs
               if r.task == 'classify')
    assert all(r.settings['channels_last'] and r.settings['path'] == 'both' for r in runs if r.task != 'time')
    assert {(r.task, r.strategy) for r in runs if 'autocast' in r.settings} == {('classify', 'fp')}
    assert [settings('repvgg', 'merged', 8)[k] for k in ('lr', 'step_lr')] == [0.001, 0.01]
    assert settings('acnet', 'repq', 4)['step_lr'] == 1e-3
    assert not [r.id for p in ('smoke', 'cpu') for r in R.graph(R.cells(p, seeds=1))
                if 'autocast' in r.settings]


SOME = dict(paper=[('ecbsr', 'ecb', 'repq', '', 4), ('resnet18', 'acnet', 'repq', 'estimate', 8),
                   ('repvgg_a0', 'qarepvgg', 'ptq', '', 8)],
            # all others start from a parent in bfloat16, which some virtual machines cannot do
            gpu=[('ecbsr', 'ecb', 'repq', '', 4)])

def pytest_generate_tests(metafunc):
    "Some of the runs for GPUs, with --slow all of them"
    if 'big_run' not in metafunc.fixturenames: return
    slow = metafunc.config.getoption('--slow')
    runs = [r for p in R.ON_GPU for r in R.limited(R.graph(R.cells(p, seeds=1)), steps=2)]
    runs = [r for r in runs if slow
            or (r.model, r.block, r.strategy, r.statistics, r.bits) in SOME[r.profile]]
    metafunc.parametrize('big_run', runs, ids=lambda r: f'{r.profile}-{r.label}')


@pytest.fixture(scope='module')
def big_results(tmp_path_factory): return tmp_path_factory.mktemp('big')


def light(run):
    "The same run on a CPU and on a few pictures: small batches, nothing compiled"
    small = dict(path='simple', threads=1)
    if run.task == 'time': small |= dict(batch=2, size=64)
    elif run.profile == 'gpu':
        small |= dict(batch_size=2)
        if run.task == 'classify': small |= dict(loader=dict(held_out=2))
    elif run.model == 'ecbsr': small |= dict(patch=16)
    return replace(run, parent=light(run.parent) if run.parent else None, settings=run.settings | small)


def test_runs_for_gpus_start(big_run, paper_data, big_results, monkeypatch):
    "Two steps of each, on CPU, with the batch of `paper` as large as the data; parents are shared"
    monkeypatch.setenv('REPQ_DATA', str(paper_data))
    monkeypatch.setenv('REPQ_CACHE', str(big_results/'cache'))
    run = light(big_run)
    for r in ([run.parent] if run.parent else []) + [run]:
        o = D.execute(r, big_results, fork=True)
        assert o.state == 'done', o.why
    record = R.read_record(big_results/run.profile/run.id, weights=run.task != 'time')
    assert record['spec']['settings'].get('max_steps', 2) == 2
    if run.task != 'time' and run.strategy != 'ptq': assert len(record['probe']['losses']) == 2


@pytest.mark.parametrize('fork', [True, False])
def test_kernels_see_the_gpu_of_their_worker(fork, tmp_path, monkeypatch):
    "A kernel has the environment of the process that starts it, as it is then"
    import nbformat, papermill
    cell = nbformat.v4.new_code_cell('import os; print(os.environ["CUDA_VISIBLE_DEVICES"])')
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path/'which.ipynb')
    for gpu in ('1', '3'):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpu)
        made = papermill.execute_notebook(str(tmp_path/'which.ipynb'), None, kernel_name='python3',
                                          progress_bar=False, kernel_manager_class=D.kernel_manager(fork))
        assert made.cells[0].outputs[0].text.strip() == gpu


def test_one_training_at_a_time_on_a_gpu(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 16)
    assert [R.usual_workers(p) for p in R.PROFILES] == [16, 16, 1, 1]
    assert not any(D.can_fork(R.super_resolution(p, 0, 'fp')) for p in R.ON_GPU)
    assert D.can_fork(R.super_resolution('cpu', 0, 'fp'))
