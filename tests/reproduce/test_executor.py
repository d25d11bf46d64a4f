"The parts of a cluster's executor that need no cluster"
import pytest
from repq.reproduce.executor import in_background, why_lost

ADDRESS = 'tcp://host:8786'

@pytest.mark.parametrize('case, words', [
    (dict(ever=False, silent=False),
     ['has no workers. Nothing was run.', f'dask worker {ADDRESS} --nthreads 1']),
    (dict(ever=True, silent=False), ['has lost all its workers. What is finished is kept']),
    (dict(ever=True, silent=True), ['no longer answers', 'Start it again with: dask scheduler']),
    (dict(ever=False, silent=False, reasons=['one: it offers no GPU']),
     ['no worker of the Dask scheduler', 'can be given runs', 'one: it offers no GPU'])])
def test_why_nothing_will_happen(case, words):
    said = why_lost(ADDRESS, **case)
    assert ADDRESS in said and all(w in said for w in words), said


def test_what_a_thread_raises_is_its_result():
    assert in_background(max, 2, 3).result(5) == 3
    assert isinstance(in_background(int, 'x').result(5), ValueError)
