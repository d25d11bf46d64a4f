"Everything outside tests/fast passes without the folder repq/fast: it makes things faster, and nothing else"
import os, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
# an editable installation would find the hidden folder
RUN = """if True:
    import sys
    def is_editable(finder):
        return 'editable' in f'{getattr(finder, "__name__", "")} {finder.__module__}'.lower()
    sys.meta_path[:] = [f for f in sys.meta_path if not is_editable(f)]
    import pytest, repq
    from repq.tools.registry import FASTER, is_there
    assert not is_there('repq.fast') and not FASTER and repq.__file__.startswith(sys.argv[1]), repq.__file__
    sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))"""

OTHERS = [pytest.param(room, marks=pytest.mark.slow('the tests of a room once more'))
          for room in 'tools adopt train deploy reproduce bench cli'.split()]


@pytest.mark.parametrize('rooms', ['algebra quantization models', *OTHERS])
def test_rooms_without_fast(rooms, tmp_path):
    "Tests of rooms in a copy of the package without the folder"
    shutil.copytree(ROOT/'repq', tmp_path/'repq', ignore=shutil.ignore_patterns('fast', '__pycache__'))
    shutil.copytree(ROOT/'tests', tmp_path/'tests', ignore=shutil.ignore_patterns('__pycache__'))
    for folder in ('nbs', 'results'): (tmp_path/folder).symlink_to(ROOT/folder)
    for name in ('settings.ini', 'setup.py', 'CONTRIBUTING.md', 'README.md'):
        shutil.copy(ROOT/name, tmp_path/name)
    env = os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS='1')
    env = {k: v for k, v in env.items() if not k.startswith(('PYTEST_', 'REPQ_PROVEN'))}
    command = [sys.executable, '-c', RUN, str(tmp_path), *(f'tests/{room}' for room in rooms.split())]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
    print(done.stdout.splitlines()[-1])
