"A Dask cluster as an executor, of those workers that have answered the driver's questions"
# plain Python: threads and futures with nothing to teach; tests/reproduce/test_cluster.py proves it
import threading, time
from concurrent.futures import Future, TimeoutError
from repq.tools.files import sha256
from repq.reproduce.cluster import code_here, gpu_taken, introduce, objection, write_token
from repq.reproduce.runs import ON_GPU, Store, printable

__all__ = ['PATIENCE', 'Cluster', 'ClusterExecutor', 'connect', 'in_background', 'why_lost']

PATIENCE = 20. # seconds without a worker that can be given runs


def connect(address:str): # Dask's `Client`
    "A connection to a scheduler, or an error that says what to do"
    try: from distributed import Client
    except ImportError: raise ValueError("a cluster needs Dask: pip install 'repq[cluster]'") from None
    try: return Client(address, timeout=10)
    except TypeError as e:
        if not address.startswith(('tls:', 'wss:')):
            raise ValueError(f'{address!r} cannot be used as the address of a Dask scheduler ({e})') from e
        raise ValueError(
            f'{address!r} needs certificates, and Dask is not given any: set '
            'DASK_DISTRIBUTED__COMM__TLS__CA_FILE, DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and '
            'DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY, or use a tcp:// address') from e
    except (ValueError, ImportError) as e:
        raise ValueError(f'{address!r} is not the address of a Dask scheduler ({e}): '
                         'give one such as tcp://host:8786') from e
    except (OSError, TimeoutError, RuntimeError) as e:
        raise OSError(f'no Dask scheduler answers at {address!r} ({e}). '
                      'Start one with: dask scheduler') from e


def why_lost(
    address:str,
    ever:bool,    # whether there was a worker that could be given runs
    silent:bool,  # whether the scheduler itself does not answer
    reasons=()    # why workers are left out
)->str:
    "Why nothing will happen any more, and what to do"
    rest = 'Nothing was run.'
    if ever: rest = 'What is finished is kept, and the same command goes on from there.'
    if silent:
        return (f'the Dask scheduler at {address} no longer answers. {rest} '
                'Start it again with: dask scheduler')
    if reasons:
        return f'no worker of the Dask scheduler at {address} can be given runs. {rest} ' + '; '.join(reasons)
    what = 'has lost all its workers' if ever else 'has no workers'
    return (f'the Dask scheduler at {address} {what}. {rest} '
            f'Start some with: dask worker {address} --nthreads 1')


def in_background(f, *args)->Future:
    "Call a function in a thread that ends with this process; what it raises is its result"
    future = Future()
    def call():
        try: future.set_result(f(*args))
        except Exception as e: future.set_result(e) # a lost connection raises many things; the caller decides
    threading.Thread(target=call, daemon=True).start()
    return future


class Cluster:
    """A Dask cluster, of which runs are given only to workers that are trusted.

    Workers come and go, so a thread asks the scheduler once a second which are `present`. Each new one is
    `asked` in a thread of its own, since one that hangs must not hold up the others. It is then `trusted`,
    with the number of runs that it takes at a time, or `left_out`, with the reason. `given` remembers which
    workers a run was given to."""
    def __init__(self,
        address:str,
        profile:str='smoke',
        store:Store=None # without one, folders are not compared
    ):
        self.address, self.store, self.gpu, self.client = address, store, profile in ON_GPU, connect(address)
        resources = dict(resources={'GPU': 1}) if self.gpu else {}
        self.pool = self.client.get_executor(pure=False, retries=2, **resources)
        self.path = write_token(store) if store else None
        self.token, self.code = sha256(self.path) if store else '', code_here()
        self.present, self.asked, self.trusted, self.left_out, self.given = {}, {}, {}, {}, {}
        self.heard = self.useful = time.monotonic() # last answer of the scheduler, last trusted worker
        self.ever, self.closed = False, False
        in_background(self.watch)

    def watch(self):
        "Ask the scheduler which workers are present, once a second"
        while not self.closed:
            try: workers = self.client.scheduler_info()['workers']
            except Exception: workers = None # whatever a lost connection raises: `heard` tells since when
            if workers is not None and self.client.status == 'running':
                self.present, self.heard = dict(workers), time.monotonic()
            time.sleep(1.)

    def name(self, address:str)->str:
        return printable(f'{self.present.get(address, {}).get("name", "")} ({address})')

    def ask(self, address:str)->dict:
        "The answers of a worker"
        return self.client.run(introduce, str(self.path or ''), workers=[address])[address]

    def admit(self, address:str)->str: # empty: it is trusted now
        "Trust a worker that has answered, or say why it is left out"
        answer = self.asked[address].result()
        if type(answer).__name__ in ('CommClosedError', 'TimeoutError'): # ask again
            self.asked.pop(address)
            return ''
        worker = self.present[address]
        slots = int(worker.get('resources', {}).get('GPU', 0)) if self.gpu else worker['nthreads']
        why = self.refusal(answer, slots)
        if why: self.left_out[address] = why
        else: self.trusted[address] = slots
        return why

    def refusal(self, answer, slots:int)->str:
        "Why a worker with these answers is not given runs"
        if not slots: return 'it offers no GPU: start it with --resources GPU=1'
        if why := objection(answer, self.code, self.token, self.store and self.store.root): return why
        if not self.gpu: return ''
        return gpu_taken(answer['gpu'], {self.name(a): self.asked[a].result()['gpu'] for a in self.trusted})

    def slots(self)->int:
        "How many runs can be under way at a time"
        return sum(self.trusted.values()) if time.monotonic() - self.heard < 5 else 0

    def forget(self, address:str):
        "Forget a worker that has gone; its GPU may be free now"
        for known in (self.asked, self.trusted, self.left_out): known.pop(address, None)
        self.left_out = {a: w for a, w in self.left_out.items() if 'same GPU' not in w}

    def look(self, say=print):
        "Ask workers that joined, forget those that left; raises `OSError` when nothing will happen any more"
        present = self.present
        for address in [a for a in self.asked if a not in present]: self.forget(address)
        for address in present:
            if address not in self.asked: self.asked[address] = in_background(self.ask, address)
            if address in self.trusted or address in self.left_out or not self.asked[address].done(): continue
            if why := self.admit(address): say(f'worker {self.name(address)} is left out: {why}')
        for f, workers in list(self.given.items()):
            if f.done(): del self.given[f]
            elif not workers & set(present): f.cancel() # none of the workers it was given to is left
        if self.slots(): self.useful, self.ever = time.monotonic(), True
        elif time.monotonic() - self.useful > PATIENCE: raise OSError(self.complaint())

    def complaint(self)->str:
        "Why nothing will happen any more"
        reasons = [f'{self.name(a)}: {self.left_out.get(a, "it does not answer")}' for a in self.asked]
        return why_lost(self.address, self.ever, time.monotonic() - self.heard > PATIENCE/2, reasons)


class ClusterExecutor(Cluster):
    "A checked cluster with the methods of an executor"
    def submit(self, f, *args)->Future:
        "Give work to any of the trusted workers; waits for the first"
        while not self.slots():
            self.look()
            time.sleep(0.1)
        workers = sorted(self.trusted)
        future = self.pool.submit(f, *args, workers=workers)
        self.given[future] = set(workers)
        return future

    def shutdown(self, wait:bool=True):
        "Take back what has not begun, and leave; a cluster that does not answer is not waited for"
        self.closed = True
        if self.path: self.path.unlink(missing_ok=True)
        def leave():
            self.pool.shutdown(wait=wait)
            self.client.close(timeout=2)
        try: in_background(leave).result(None if wait else 5)
        except TimeoutError: pass # the scheduler is gone: there is nobody to take leave of
