"A wheel, installed: the package with its rooms and the experiment notebooks, and nothing of the checkout"
import os, shutil, subprocess, sys, zipfile
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
ONE_RUN = '''
import sys
from dataclasses import replace
from repq.reproduce.driver import run_batch
from repq.reproduce.runs import super_resolution
if __name__ == '__main__':
    run = super_resolution('smoke', 0, 'fp', block='plain')
    short = dict(epochs=1, steps_per_epoch=4, batch_size=4, max_steps=10_000)
    run = replace(run, settings=run.settings | short)
    batch = run_batch([run], sys.argv[1], workers=1, live=False)
    print(run.id, batch.outcomes[run.id].state)
'''


@pytest.fixture(scope='module')
def installed(request, tmp_path_factory):
    "A folder with what the wheel holds"
    if not request.config.getoption('--slow'): pytest.skip('builds a wheel and trains: --slow')
    copy, folder = tmp_path_factory.mktemp('checkout'), tmp_path_factory.mktemp('installed')
    for name in ('settings.ini', 'setup.py', 'README.md', 'LICENSE'): shutil.copy(ROOT/name, copy/name)
    for name in ('repq', 'nbs'):
        shutil.copytree(ROOT/name, copy/name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    options = ['--quiet', '--no-build-isolation', '--no-deps', '--no-index', '--wheel-dir', 'dist']
    command = [sys.executable, '-m', 'pip', 'wheel', *options, '.']
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    wheel, = (copy/'dist').glob('*.whl')
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed, cwd, *args):
    env = {**os.environ, 'PYTHONPATH': str(installed), 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_everything(installed):
    def kept(root):
        return {p.relative_to(root).as_posix() for p in root.rglob('*') if p.suffix in ('.py', '.c')}
    assert kept(installed/'repq') == kept(ROOT/'repq')
    experiments = {p.name for p in (ROOT/'nbs'/'experiments').glob('*.ipynb')}
    assert {p.name for p in (installed/'repq'/'experiments').iterdir()} == experiments
    about = next(installed.glob('*.dist-info'))
    assert {p.name for p in installed.iterdir()} == {'repq', about.name}, 'nothing else is installed'
    assert 'repq = repq.cli.command:main' in (about/'entry_points.txt').read_text()


def test_it_plans_runs(installed, tmp_path):
    assert str(installed) in run(installed, tmp_path, '-c', 'import repq; print(repq.__file__)')
    said = run(installed, tmp_path, '-m', 'repq.cli', 'reproduce', '--profile', 'smoke', '--dry-run')
    assert 'ecbsr-plain-fp-s0' in said and 'repvgg_a0-repvgg-repq' in said


def test_it_makes_a_run(installed, tmp_path):
    "A training in a kernel, from the notebook that was installed"
    (tmp_path/'one.py').write_text(ONE_RUN)
    said = run(installed, tmp_path, 'one.py', 'results')
    name, state = said.split()[-2:]
    assert state == 'done' and (tmp_path/'results'/'smoke'/name/'record.json').exists()
    assert (tmp_path/'results'/'smoke'/name/'notebook.ipynb').exists()
