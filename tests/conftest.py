"Options, and the count of random expressions in the closing summary"
import json, os, resource, sys, tempfile
from pathlib import Path
import pytest, torch

HERE = Path(__file__).parent
sys.path[:0] = map(str, [HERE, *sorted(HERE.glob('[a-z]*/'))])   # what tests share
torch.set_num_threads(1)   # small tensors, and several test processes on few cores


class Proven:
    "What was proven on how many random cases; written by tests in any process, printed at the end"
    path = None
    def __setitem__(self, what, n): self.path.open('a').write(json.dumps([what, n]) + '\n')

PROVEN = Proven()


def pytest_configure(config):
    if 'PYTEST_XDIST_WORKER' not in os.environ: os.environ['REPQ_PROVEN'] = tempfile.mkstemp()[1]
    PROVEN.path = Path(os.environ['REPQ_PROVEN'])
    config.addinivalue_line('markers', 'slow(why): runs with --slow alone')


def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'): return
    for item in items:
        if mark := item.get_closest_marker('slow'):
            item.add_marker(pytest.mark.skip(reason=f'{mark.args[0]}: pytest --slow'))


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true',
                     help='the long versions: 10,000 random expressions instead of 200')


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, 'workerinput'): return   # a worker process of pytest-xdist: the main one prints
    for line in PROVEN.path.read_text().splitlines():
        terminalreporter.write_line('{}: {}'.format(*json.loads(line)))
    PROVEN.path.unlink()


@pytest.fixture(autouse=True)
def seed(): torch.manual_seed(0)


@pytest.fixture
def below_2_gb():
    "Fail if this process has needed more than 2 GB, or 0.25 GB more than before the test"
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20
    before = peak()
    yield
    assert peak() < max(2, before + .25)
