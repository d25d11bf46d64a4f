"""Real records, altered by the project's own writing functions: several processors, another METHOD, a missing
seed, a run that collapsed or diverged. Tables and verdicts say so, and use what is valid."""
import shutil
from pathlib import Path
import pytest
from records import write_failure
from repq.reproduce import report, verdicts
from repq.reproduce.evidence import Results
from repq.reproduce.figures import curves_figure
from repq.reproduce.protocol import HOLDS, OPEN
from repq.reproduce.records import METHOD, id_of
from repq.reproduce.runs import Store
from repq.reproduce.statements import accuracy, list_claims
from repq.reproduce.tables import table
from repq.tools.files import read_json, seal, write_json

CPU = Path(__file__).parents[2]/'results'/'cpu'
A = accuracy('AC-ResNet-18', 'RepQ-BN', '8')
B = accuracy('AC-ResNet-18', 'Merged', '8')
CLAIM = 'RepQ-BN beats Merged at 8 bits'
OTHER = dict(name='Another Chip', instructions='ffffffffffff')
SOURCE = 'resnet18-acnet-repq-batch-8bit-s0-*'
DIVERGED = 'FloatingPointError: train_loss is nan in epoch 2, and nothing of that epoch was kept'

pytestmark = pytest.mark.skipif(not list(CPU.glob(SOURCE)), reason='results/cpu has no record to copy')


def runs_at(address): return Results('cpu', '/nowhere', 3).cells[address].runs


def write_like(root, run, source, level=None, **changes):
    "The record of a real run under the name of another, sealed again"
    folder = Store(root, 'cpu').done(run)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    record = read_json(folder/'record.json')
    record |= dict(id=run.id, spec=run.stored) | changes
    if level is not None: record['metrics'] |= dict(accuracy=level, best_accuracy=level)
    write_json(folder/'record.json', seal(record))
    return folder


@pytest.fixture
def batch(tmp_path):
    "Three seeds of two arms; RepQ-BN is better by about a point"
    source = next(CPU.glob(SOURCE))
    for address, level in ((A, .805), (B, .795)):
        for run in runs_at(address):
            write_like(tmp_path, run, source, level + .0007*((run.seed + len(address.row[1])) % 3))
    return tmp_path


def item(root, address):
    labels, columns = address.row, {'32': 0, '8': 2, '4': 4}
    rows = dict(table(2, 'cpu', root, 3).rows)
    return rows[labels][columns[address.column]]


def judged(root):
    results = Results('cpu', root, 3)
    return verdicts.judge_claim(next(c for c in list_claims() if c.text == CLAIM), results)


def alter(root, run, **changes):
    path = Store(root, 'cpu').done(run)/'record.json'
    write_json(path, seal(read_json(path) | changes))


def put_on(root, run, processor):
    first = read_json(Store(root, 'cpu').done(run)/'record.json')['segments'][0]
    alter(root, run, processor=processor, segments=[first | dict(processor=processor)])


def test_the_altered_records_are_believed(batch):
    assert item(batch, A).text.startswith('80.5') and not item(batch, A).note
    v = judged(batch)
    assert v.verdict == HOLDS and v.evidence[0].ours.how == '1 of 4 networks and 3 seeds'
    assert 'processors' not in table(2, 'cpu', batch, 3).caption


def test_two_processors_in_one_arm(batch):
    "The mean over both is marked as such, the pair across them is not formed"
    put_on(batch, runs_at(A)[1], OTHER)
    found = item(batch, A)
    assert 'the mean of 2 processors: ' in found.note and 'Another Chip, ffffffffffff (seed 1)' in found.note
    assert 'Runs of 2 processors' in table(2, 'cpu', batch, 3).caption
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds'
    assert any('no pair of two processors' in n and '(seed 1)' in n for n in v.notes)
    put_on(batch, runs_at(B)[1], OTHER)
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 3 seeds'
    assert any('pairs from 2 processors, each pair from one' in n for n in v.notes)


def test_arms_on_two_processors(batch):
    "Each mean is of one processor, but no pair is: the caption warns, and nothing is decided"
    for run in runs_at(B): put_on(batch, run, OTHER)
    assert not item(batch, A).note and not item(batch, B).note
    assert 'no verdict compares them' in table(2, 'cpu', batch, 3).caption
    v = judged(batch)
    assert v.verdict == OPEN and v.weakest is None and 'no pair of two processors' in ' '.join(v.notes)
    page = report.write_report(batch, 'cpu', 3).read_text()
    assert 'Another Chip' in page and 'no verdict compares them' in page


def test_a_run_that_went_on_elsewhere(batch):
    "Its segments are of two processors, so it pairs with none of them"
    run = runs_at(A)[2]
    record = read_json(Store(batch, 'cpu').done(run)/'record.json')
    alter(batch, run, segments=[record['segments'][0], record['segments'][0] | dict(processor=OTHER)])
    assert ' and Another Chip' in item(batch, A).note
    assert judged(batch).evidence[0].ours.how == '1 of 4 networks and 2 seeds'


def test_two_methods(batch):
    "A record of another METHOD is named and not averaged, not even into the curves"
    run = runs_at(A)[0]
    old = Store(batch, 'cpu').done(run)
    record = read_json(old/'record.json')
    name = id_of(run.stored, METHOD + 1)
    record |= dict(method=METHOD + 1, id=name)
    record['metrics'] |= dict(best_accuracy=.999, accuracy=.999)
    for epoch in record['history']: epoch['metric'] = .999
    write_json(old/'record.json', seal(record))
    old.rename(old.with_name(name))
    found = item(batch, A)
    assert f'2 of 3 seeds; other method: METHOD {METHOD + 1}, now {METHOD} (seed 0)' in found.note
    assert found.text.startswith('80.') and len(found.links) == 2
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds'
    assert any(f'METHOD {METHOD + 1}, now {METHOD} (seed 0)' in n for n in v.notes)
    results = Results('cpu', batch, 3)
    assert '99.90' not in curves_figure(results) and '1 other method' in report.report_html(results)
    assert '5 of 257 runs' in verdicts.results_summary(results)[0]


def test_a_seed_missing_in_one_arm(batch):
    shutil.rmtree(Store(batch, 'cpu').done(runs_at(B)[2]))
    assert item(batch, B).note == '2 of 3 seeds; not run yet (seed 2)' and not item(batch, A).note
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds'
    assert 'AC-ResNet-18 Merged at 8 bits was not run (seed 2)' in v.notes


@pytest.mark.parametrize('address, expected', [(A, OPEN), (B, HOLDS)])
def test_a_run_that_collapsed(batch, address, expected):
    "No number of it is used, and its arm is not declared better"
    path = Store(batch, 'cpu').done(runs_at(address)[1])/'record.json'
    metrics = read_json(path)['metrics'] | dict(accuracy=.1, best_accuracy=.79)
    alter(batch, runs_at(address)[1], metrics=metrics)
    found = item(batch, address)
    assert '2 of 3 seeds; collapsed: accuracy 0.1000 at its end, chance is 0.1000 (seed 1)' in found.note
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds' and v.verdict == expected
    assert any('the arm that it favours went wrong' in n for n in v.notes) == (expected == OPEN)
    assert 'Runs that went wrong' in report.report_html(Results('cpu', batch, 3))


@pytest.mark.parametrize('address, expected', [(A, OPEN), (B, HOLDS)])
@pytest.mark.parametrize('parent', [False, True])
def test_a_run_that_diverged(batch, address, expected, parent):
    "It left a reason and no record; the arm is not declared better, whether it was the run or its parent"
    run = runs_at(address)[1]
    shutil.rmtree(Store(batch, 'cpu').done(run))
    write_failure(batch, run.parent if parent else run, DIVERGED)
    why = f'not run: its parent {run.parent.id} is failed' if parent else f'failed: {DIVERGED}'
    for own in (A, B):   # both arms start from one parent, but only one of their runs is missing
        assert (why in item(batch, own).note) == (own == address)
    v = judged(batch)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds' and any(why in n for n in v.notes)
    assert v.verdict == expected
    if expected == OPEN: assert any('the arm that it favours went wrong' in n for n in v.notes)


def test_a_run_that_failed_for_another_reason(batch):
    "A full disk says nothing about a method: the pair is lost, the verdict stays"
    run = runs_at(A)[1]
    shutil.rmtree(Store(batch, 'cpu').done(run))
    write_failure(batch, run, 'OSError: no space left on device')
    v = judged(batch)
    assert v.verdict == HOLDS and any('no space left' in n for n in v.notes)
    assert v.evidence[0].ours.how == '1 of 4 networks and 2 seeds'


def test_numbers_that_were_typed_into_a_record(batch):
    "Without a new seal a record is not believed"
    run = runs_at(A)[0]
    path = Store(batch, 'cpu').done(run)/'record.json'
    record = read_json(path)
    record['metrics'] |= dict(best_accuracy=.95)
    write_json(path, record)
    assert '2 of 3 seeds; corrupt:' in item(batch, A).note and 'digest' in item(batch, A).note
    assert judged(batch).evidence[0].ours.how == '1 of 4 networks and 2 seeds'
