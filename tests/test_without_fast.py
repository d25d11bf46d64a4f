"Everything outside tests/fast passes without the folder repq/fast: it makes things faster, and nothing else"
import os, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
# an editable installation would find the hidden folder; `bench` measures it, and may name it
RUN = """if True:
    import sys
    sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f'{getattr(f, "__name__", "")} {f.__module__}'.lower()]
    import pytest, repq
    from repq.tools.registry import FASTER, is_there
    assert not is_there('repq.fast') and not FASTER and repq.__file__.startswith(sys.argv[1]), repq.__file__
    sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))"""


def test_rooms_without_fast(tmp_path, request):
    slow = request.config.getoption('--slow')
    rooms = 'algebra quantization models'.split() + ('tools adopt train deploy reproduce cli'.split()
                                                     if slow else [])
    shutil.copytree(ROOT/'repq', tmp_path/'repq', ignore=shutil.ignore_patterns('fast', '__pycache__'))
    for folder in ('tests', 'nbs', 'results'):
        (tmp_path/folder).symlink_to(ROOT/folder) if folder != 'tests' else shutil.copytree(ROOT/folder,
                                                                                            tmp_path/folder)
    for name in ('settings.ini', 'setup.py', 'CONTRIBUTING.md', 'README.md'):
        shutil.copy(ROOT/name, tmp_path/name)
    env = os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS='1')
    env = {k: v for k, v in env.items() if not k.startswith(('PYTEST_', 'REPQ_PROVEN'))}
    done = subprocess.run([sys.executable, '-c', RUN, str(tmp_path), *(f'tests/{room}' for room in rooms)], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
    print(done.stdout.splitlines()[-1])
