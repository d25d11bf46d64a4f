"A board that shows the progress of a batch: bars on a terminal, lines in a log"
# plain Python: a progress display with nothing to teach; tests/reproduce/test_board.py proves it
import sys, time
from repq.reproduce.runs import Store, printable, read_progress

__all__ = ['Board', 'clock']


def clock(seconds:float)->str:
    "Seconds as hours, minutes and seconds"
    if seconds != seconds: return 'unknown' # not a number
    m, s = divmod(int(seconds), 60)
    return f'{m//60}:{m % 60:02d}:{s:02d}' if m >= 60 else f'{m}:{s:02d}'


class Board:
    "Shows a batch: one bar for all of it and one for each run under way, or a line for each run that ended"
    def __init__(self,
        batch,         # a `repq.reproduce.driver.Batch`
        store:Store,
        workers:int,
        live:bool=None # draw bars; by default on a terminal
    ):
        self.batch, self.store, self.workers, self.tasks = batch, store, workers, {}
        self.live = sys.stdout.isatty() if live is None else live

    def __enter__(self):
        if not self.live: return self
        from rich.progress import BarColumn, Progress, TextColumn
        name, note = TextColumn('{task.description}'), TextColumn('{task.fields[note]}')
        self.bars = Progress(name, BarColumn(bar_width=24), note, transient=True)
        self.bars.start()
        self.all = self.bars.add_task('[bold]all runs', total=len(self.batch.runs), note='')
        return self

    def __exit__(self, *_):
        if self.live: self.bars.stop()

    def print(self, text:str):
        if self.live: self.bars.console.print(text, markup=False, highlight=False)
        else: print(text, flush=True)

    def left(self)->str: return f'about {clock(self.batch.left(self.workers))} left'

    def line(self, outcome)->str:
        "How a run ended"
        o, batch = outcome, self.batch
        text = f'{len(batch.outcomes):3}/{len(batch.runs)}  {o.state:7} {o.id}  {clock(o.seconds)}'
        if batch.unfinished and not self.live: text += f', {self.left()}'
        return text + (f'\n         {printable(o.why)}' if o.why else '')

    def update(self, new):
        "Show the outcomes that are new, and how far the other runs are"
        for o in new: self.print(self.line(o))
        if self.live: self.draw()

    def draw(self):
        "Bring all bars up to date"
        batch, n = self.batch, len(self.batch.outcomes)
        note = f'{n}/{len(batch.runs)}  {clock(time.time() - batch.started)} gone, {self.left()}'
        self.bars.update(self.all, completed=n, note=note)
        running = {r.id: r for r in batch.futures.values()}
        for gone in set(self.tasks) - set(running): self.bars.remove_task(self.tasks.pop(gone))
        for id, r in running.items():
            p = read_progress(self.store.work(r))
            if id not in self.tasks: self.tasks[id] = self.bars.add_task(f'  {r.label}', total=1, note='')
            self.bars.update(self.tasks[id], completed=p['done']/max(1e-9, p['total']), note=p['text'])
