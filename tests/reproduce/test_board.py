"What a batch shows while it runs: lines in a log, bars on a terminal"
import time
from types import SimpleNamespace
import pytest
from repq.reproduce import runs as R
from repq.reproduce.board import Board, clock
from repq.reproduce.driver import Outcome
from repq.tools.files import write_json


@pytest.mark.parametrize('seconds, text', [
    (9, '0:09'), (61, '1:01'), (3661, '1:01:01'), (float('nan'), 'unknown')])
def test_clock(seconds, text): assert clock(seconds) == text


def batch(running=()):
    "Three runs, one of which has ended"
    made = [R.super_resolution('smoke', 0, 'fp'), R.super_resolution('smoke', 0, 'repq', 8),
            R.super_resolution('smoke', 0, 'repq', 4)]
    ended = Outcome(made[0].id, 'done', 'with a \x1b[31mremark', 61.)
    return SimpleNamespace(runs=made, outcomes={made[0].id: ended}, started=time.time(), unfinished=True,
                           futures=dict(enumerate(running or made[1:2])), left=lambda workers: 120/workers)


def test_a_log_has_a_line_for_each_run_that_ended(tmp_path, capsys):
    b = batch()
    with Board(b, R.Store(tmp_path), 2, live=False) as board:
        board.update(list(b.outcomes.values()))
        board.update([])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f'  1/3  done    {b.runs[0].id}  1:01, about 1:00 left'
    assert second == '         with a  [31mremark', 'control characters of a file do not reach the terminal'


def test_a_terminal_has_a_bar_for_each_run_under_way(tmp_path):
    b, store = batch(), R.Store(tmp_path)
    write_json(store.work(b.runs[1])/'progress.json', dict(done=3, total=4, text='epoch 3/4'), parents=True)
    with Board(b, store, 1, live=True) as board:
        board.update([])
        tasks = {t.description.strip(): (t.completed/t.total, t.fields['note']) for t in board.bars.tasks}
        assert tasks[b.runs[1].label] == (.75, 'epoch 3/4')
        share, note = tasks['[bold]all runs']
        assert share == 1/3 and '1/3' in note and 'about 2:00 left' in note
        b.futures = {}
        board.update([])
        assert [t.description for t in board.bars.tasks] == ['[bold]all runs'] and not board.tasks
