"Kernels for runs: forked from a process that has already imported everything, and ended with the batch"
# plain Python: processes and sockets with nothing to teach; tests/reproduce/test_runs.py proves it
import os, shutil, signal, sys, tempfile, threading, weakref
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from repq.reproduce.runs import ON_GPU, Run

__all__ = ['KERNELS', 'PRELOAD', 'Forked', 'Kernels', 'can_fork', 'die_with', 'environment_variables',
           'forkserver', 'kernel_main', 'kernel_manager', 'socket_folder', 'sweep_folders', 'without_main']

# Importing torch and fastai takes five seconds of a core, as long as a short training. So kernels are
# forked from a server process that has imported everything. Where processes cannot be forked (Windows,
# CUDA, inside a Dask worker), kernels start the ordinary way.
PRELOAD = [
    'repq.reproduce.training', 'repq.bench.cases', 'matplotlib.pyplot', 'pandas', 'ipykernel.kernelapp',
    'ipykernel.ipkernel', 'skimage.data', 'sympy', 'torch._dynamo']


def die_with(sentinel):
    "End this process, and those it started, when another one has ended"
    from multiprocessing.connection import wait
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def kernel_main(argv, env, cwd):
    "A Jupyter kernel, in a process that was forked for it"
    import multiprocessing
    os.setsid()
    multiprocessing.set_start_method(None, force=True) # workers of loaders start as in any other process
    driver = multiprocessing.parent_process().sentinel
    threading.Thread(target=die_with, args=(driver,), daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    from ipykernel.kernelapp import IPKernelApp
    IPKernelApp.launch_instance(argv=argv)


_preparing = threading.Lock()

@contextmanager
def without_main():
    """Processes that are started in this block do not import the script of this one.

    The standard library imports it as `__main__`, and a script without `if __name__ == '__main__'` would
    start the batch again inside every kernel."""
    from multiprocessing import spawn
    with _preparing:
        whole = spawn.get_preparation_data
        def without(name): return {k: v for k, v in whole(name).items() if not k.startswith('init_main')}
        spawn.get_preparation_data = without
        try: yield
        finally: spawn.get_preparation_data = whole


class Forked:
    "A forked kernel, with the methods of `Popen` that Jupyter uses"
    stdin = stdout = stderr = None
    def __init__(self, argv, env, cwd):
        self.process = forkserver().Process(target=kernel_main, args=(argv, env, cwd))
        with without_main(): self.process.start()
        self.pid = self.process.pid
    def poll(self): return self.process.exitcode
    def wait(self): return self.process.join() or self.process.exitcode
    def send_signal(self, number):
        try: os.kill(self.pid, number)
        except ProcessLookupError: pass # it has ended by itself
    def kill(self): self.send_signal(signal.SIGKILL)
    def terminate(self): self.send_signal(signal.SIGTERM)


class Kernels:
    "The kernels that this process has started: another driver may be at work in the same folder"
    def __init__(self): self.running, self.lock, self.stopped = weakref.WeakSet(), threading.Lock(), False
    def add(self, process):
        "Register a kernel; one that starts while all are being stopped ends at once"
        with self.lock: self.running.add(process)
        if self.stopped: process.kill()
    def stop(self):
        "End them all"
        self.stopped = True
        with self.lock: found = list(self.running)
        for p in found:
            if p.poll() is None: p.kill()

KERNELS = Kernels()


# Kernels talk over socket files, each in a folder of its own: two kernels that start at the same moment may
# be given the same TCP port. A driver that is killed cannot remove its folders, so the next batch does. The
# folders of living drivers are locked.

def sweep_folders():
    "Remove the socket folders that killed drivers have left"
    import fcntl
    for path in Path(tempfile.gettempdir()).glob('repq-*/lock'):
        try:
            with open(path) as f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except OSError: pass # its driver lives, or it belongs to another user


def socket_folder(owner)->str:
    "A folder for the sockets of a kernel, which is removed with its owner"
    folder, lock = tempfile.mkdtemp(prefix='repq-'), None
    if os.name != 'nt':
        import fcntl
        lock = open(f'{folder}/.lock', 'w')
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(f'{folder}/.lock', f'{folder}/lock') # visible to others only when it is locked
    def remove():
        shutil.rmtree(folder, ignore_errors=True)
        if lock: lock.close()
    weakref.finalize(owner, remove)
    return folder


@contextmanager
def environment_variables(**values):
    "Set environment variables for a block"
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try: yield
    finally:
        for k, v in before.items():
            if v is None: os.environ.pop(k)
            else: os.environ[k] = v


@cache
def forkserver(): # multiprocessing context
    "The process that kernels are forked from, started when first asked for"
    import multiprocessing, multiprocessing.forkserver as server
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOAD)
    inline = 'module://matplotlib_inline.backend_inline'
    # safe path: import the repq of the driver, not one in the folder where the command was typed
    added = dict(PYTHONWARNINGS='ignore::FutureWarning', MPLBACKEND=inline, PYTHONSAFEPATH='1')
    with environment_variables(**added): server.ensure_running()
    return context


def can_fork(run:Run)->bool:
    "Whether the kernel of a run may be forked"
    import multiprocessing
    if run.profile in ON_GPU or multiprocessing.current_process().daemon: return False
    return 'forkserver' in multiprocessing.get_all_start_methods()


@cache
def kernel_manager(fork:bool): # class
    "A kernel manager for kernels on this machine, forked or not"
    from jupyter_client import AsyncKernelManager
    class Manager(AsyncKernelManager):
        def __init__(self, **kwargs):
            folder = socket_folder(self)
            sockets = dict(transport='ipc', ip=f'{folder}/k', connection_file=f'{folder}/kernel.json')
            super().__init__(**(kwargs if os.name == 'nt' else sockets | kwargs))
        async def _async_launch_kernel(self, kernel_cmd, **kw): # jupyter_client's place for this
            p = self.provisioner
            if not fork: await super()._async_launch_kernel(kernel_cmd, **kw)
            else:
                argv = kernel_cmd[kernel_cmd.index('ipykernel_launcher') + 1:]
                p.process = Forked(argv, kw.get('env') or dict(os.environ), str(kw.get('cwd') or Path.cwd()))
                p.pid = p.pgid = p.process.pid # it leads a group of its own
                self._reconcile_connection_info(p.connection_info)
            KERNELS.add(p.process)
    return Manager
