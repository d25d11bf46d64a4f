"A real Dask scheduler and workers: other code, another folder, killed, and not there at all"
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path
import pytest
from repq.reproduce import driver as D, runs as R

pytest.importorskip('distributed')
ROOT = Path(__file__).parents[2]
LIMIT = 30 + 15   # seconds until a message: 30, and this machine may be slow in starting Python


def runs(steps=2):
    "A parent and two children, cut off after a few steps"
    made = [R.super_resolution('smoke', 0, 'fp', block='plain'), R.super_resolution('smoke', 0, 'plain', 8),
            R.super_resolution('smoke', 0, 'plain', 4)]
    return R.limited(made, steps)


def worker_words(address, name, folder):
    "The module of a worker, and its arguments"
    return ('distributed.cli.dask_worker', address, '--nthreads', '1', '--no-nanny', '--no-dashboard',
            '--name', name, '--local-directory', str(folder/name))


class Site:
    "A scheduler and its workers; none outlives a test"
    def __init__(self, folder): self.folder, self.processes = folder, []
    def start(self, *words, **env):
        # started outside the repository: its code is that of PYTHONPATH
        env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', **env}
        p = subprocess.Popen([sys.executable, '-m', *words], env=env, cwd=self.folder,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.processes.append(p)
        return p
    def scheduler(self, *more):
        file = self.folder/'scheduler.json'
        p = self.start('distributed.cli.dask_scheduler', '--port', '0', '--host', '127.0.0.1',
                       '--no-dashboard', '--scheduler-file', str(file), *more)
        wait_for(lambda: file.exists() and file.read_text(), 60, 'the scheduler')
        return p, json.loads(file.read_text())['address']
    def worker(self, address, name, *more, **env):
        return self.start(*worker_words(address, name, self.folder), *more, **env)
    def end(self):
        for p in self.processes:
            try: os.killpg(p.pid, signal.SIGKILL)
            except ProcessLookupError: pass
            p.wait()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.end()


def wait_for(condition, seconds=120, what=''):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f'waited {seconds} s for {what}'
        time.sleep(0.05)


def other_code(folder, change):
    "A copy of the package, changed"
    shutil.copytree(ROOT/'repq', folder/'repq', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copytree(ROOT/'nbs'/'experiments', folder/'nbs'/'experiments')
    change(folder/'repq')
    return str(folder)


def raise_method(package):
    path = package/'reproduce'/'records.py'
    path.write_text(path.read_text().replace('METHOD = 1 ', 'METHOD = 2 '))

def edit_a_file(package): (package/'quantization'/'network.py').open('a').write('\n# edited\n')
def forget_the_question(package):
    path = package/'reproduce'/'cluster.py'
    path.write_text(path.read_text().replace('def introduce', 'def hello'))


def command(*words, cwd):
    "`repq reproduce` on a cluster, as a process"
    return subprocess.Popen([sys.executable, '-m', 'repq.cli', 'reproduce', '--table', '3', '--steps', '2',
                             *words], cwd=cwd, text=True,
                            env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_workers_with_other_code_are_left_out(site, tmp_path, capsys):
    "One of three has the code of the driver: it does all runs, the others are named with the reason"
    _, address = site.scheduler()
    for name, change in (('raised', raise_method), ('edited', edit_a_file), ('older', forget_the_question)):
        site.worker(address, name, PYTHONPATH=other_code(tmp_path/f'code-{name}', change))
    site.worker(address, 'right')
    batch = D.run_batch(runs(), tmp_path/'results', scheduler=address, live=False)
    out = capsys.readouterr().out
    assert [o.state for o in batch.outcomes.values()] == ['done']*3, batch.outcomes
    assert all(R.read_record(R.Store(tmp_path/'results').done(r), weights=True) for r in runs())
    assert 'worker raised' in out and 'it has METHOD 2, the driver has 1' in out, out
    assert 'worker edited' in out and 'source code with the digest' in out, out
    assert 'worker older' in out and 'another version' in out, out
    assert 'worker right' not in out
    assert not list((tmp_path/'results'/'smoke').glob('.here-*')), 'the token stays behind'


def test_a_worker_with_another_folder_is_left_out(site, tmp_path):
    "Its results folder has the same path and is another one: the batch ends, says so, and runs nothing"
    results = tmp_path/'results'
    _, address = site.scheduler()
    if subprocess.run(['unshare', '-m', 'true'], capture_output=True).returncode:
        pytest.skip('needs the right to mount in a namespace of its own')
    (results/'smoke').mkdir(parents=True)
    worker = [sys.executable, '-m', *worker_words(address, 'apart', tmp_path)]
    inner = f'mount -t tmpfs tmpfs {results} && mkdir {results}/smoke && exec {" ".join(worker)}'
    p = subprocess.Popen(['unshare', '-m', 'sh', '-c', inner], env={**os.environ, 'PYTHONPATH': str(ROOT)},
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    site.processes.append(p)
    began = time.time()
    said = 'no worker of the Dask scheduler.*Nothing was run.*apart.*does not have the results folder'
    with pytest.raises(OSError, match=said):
        D.run_batch(runs(), results, scheduler=address, live=False)
    assert time.time() - began < LIMIT and not any(R.Store(results).done(r).exists() for r in runs())


def test_each_gpu_has_one_worker(site, tmp_path, capsys):
    "The second of two workers with one GPU is left out, until the first has gone"
    _, address = site.scheduler()
    gpu = ('--resources', 'GPU=1')
    first = site.worker(address, 'first', *gpu, CUDA_VISIBLE_DEVICES='0')
    with D.open_executor(1, address, 'gpu', R.Store(tmp_path/'results', 'gpu')) as cluster:
        def trusted():
            cluster.look()
            return sorted(cluster.present[a]['name'] for a in cluster.trusted)
        wait_for(lambda: trusted() == ['first'], what='the first worker')
        site.worker(address, 'second', *gpu, CUDA_VISIBLE_DEVICES='0,1')
        site.worker(address, 'third', *gpu, CUDA_VISIBLE_DEVICES='1')
        wait_for(lambda: trusted() == ['first', 'third'] and cluster.left_out, what='the other two')
        out = capsys.readouterr().out
        assert 'worker second' in out and 'it takes the same GPU as worker first' in out
        assert 'CUDA_VISIBLE_DEVICES' in out
        os.killpg(first.pid, signal.SIGKILL)
        wait_for(lambda: trusted() == ['second', 'third'], what='the second to take the place of the first')
    with D.open_executor(1, address, 'smoke', R.Store(tmp_path/'results')) as cluster:
        wait_for(lambda: cluster.look() is None and cluster.slots() == 2,
                 what='workers that share a processor')


def test_what_a_worker_says_is_not_believed(tmp_path):
    "Done, says an outcome, and nothing is here: the run has failed, with the folder named"
    from concurrent.futures import ThreadPoolExecutor
    parent = runs()[0]
    batch, elsewhere = D.Batch([parent], tmp_path/'here'), tmp_path/'there'
    R.Store(tmp_path/'here').folder.mkdir(parents=True)
    class Elsewhere(ThreadPoolExecutor):
        "Executes a run in another folder than it was asked to"
        def submit(self, f, run, root): return super().submit(f, run, str(elsewhere))
    with Elsewhere(1) as pool:
        while batch.unfinished: new = batch.step(pool, 1)
    assert R.Store(elsewhere).look(parent).state == 'done'
    assert new[0].state == 'failed' and 'said that' in new[0].why and str(tmp_path/'here') in new[0].why, new
    assert 'missing' in new[0].why, new


def test_no_workers(site, tmp_path):
    _, address = site.scheduler()
    began = time.time()
    p = command('--scheduler', address, '--results', 'here', cwd=tmp_path)
    out = p.communicate(timeout=120)[0]
    assert p.returncode == 1 and time.time() - began < LIMIT, out
    assert 'Traceback' not in out and f'repq: the Dask scheduler at {address} has no workers' in out, out
    assert 'dask worker' in out, out


@pytest.mark.parametrize('who', ['workers', 'scheduler'])
def test_gone_in_mid_batch(site, tmp_path, who):
    "Killed after the first run: a message in time, status 1; what is finished stays, the rest is done later"
    scheduler, address = site.scheduler()
    workers = [site.worker(address, 'one'), site.worker(address, 'two')]
    p = command('--scheduler', address, '--results', 'here', cwd=tmp_path)
    made = R.limited(R.graph(R.cells('smoke', ['3'])), 2)
    store = R.Store(tmp_path/'here')
    try:
        wait_for(lambda: any(store.done(r).exists() for r in made) or p.poll() is not None,
                 what='the first run')
    finally: began = time.time()
    for q in workers if who == 'workers' else [scheduler]: os.killpg(q.pid, signal.SIGKILL)
    out = p.communicate(timeout=120)[0]
    assert p.returncode == 1 and time.time() - began < LIMIT, out
    assert 'Traceback' not in out, out
    assert ('lost all its workers' if who == 'workers' else 'no longer answers') in out, out
    assert 'the same command goes on' in out, out
    site.end()
    kept = {r.id: (store.done(r)/'record.json').stat().st_mtime_ns for r in made
            if store.look(r).state == 'done'}
    assert kept
    some = [r for r in made if r.id in kept or r.parent is None]
    batch = D.run_batch(some, tmp_path/'here', workers=2, live=False)
    assert {o.state for o in batch.outcomes.values()} == {'done'}, batch.outcomes
    assert kept == {i: (store.folder/i/'record.json').stat().st_mtime_ns
                    for i in kept}, 'a finished run was done twice'


SCRIPT = '''
import sys
from repq.reproduce.driver import run_batch
from tests.reproduce.test_cluster import runs
if __name__ == '__main__':
    batch = run_batch(runs(400), sys.argv[1], scheduler=sys.argv[2], live=False)
    sys.exit(any(o.state != 'done' for o in batch.outcomes.values()))
'''

def test_a_worker_that_comes_later_goes_on(site, tmp_path):
    "The only worker dies, another one joins in time: the batch goes on with it"
    _, address = site.scheduler()
    first = site.worker(address, 'first')
    (tmp_path/'batch.py').write_text(SCRIPT)
    p = subprocess.Popen([sys.executable, str(tmp_path/'batch.py'), str(tmp_path/'here'), address], text=True,
                         env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    store, parent = R.Store(tmp_path/'here'), runs(400)[0]
    wait_for(lambda: (store.work(parent)/'checkpoint.safetensors').exists() or p.poll() is not None,
             what='an epoch of the parent')
    os.killpg(first.pid, signal.SIGKILL)
    site.worker(address, 'second')
    out = p.communicate(timeout=240)[0]
    assert p.returncode == 0, out
    assert R.read_record(store.done(parent))['time']['sessions'] == 2


@pytest.mark.parametrize('address, message', {
    'tls://127.0.0.1:8786': 'needs certificates', 'tcp://127.0.0.1:9': 'no Dask scheduler answers',
    'somewhere': 'is not the address of a Dask scheduler',
    'http://127.0.0.1:9': 'is not the address', 'tcp://host:port': 'is not the address',
    'ucx://127.0.0.1:8': 'cannot be used as the address'}.items())
def test_addresses(address, message, tmp_path, capsys):
    from repq.cli.command import main
    began = time.time()
    assert main(['reproduce', '--table', '3', '--results', str(tmp_path), '--scheduler', address]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and repr(address) in err and time.time() - began < LIMIT, err
