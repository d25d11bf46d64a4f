"The compiled library: on disk, in memory, under sanitizers, from another compiler"
import ctypes, hashlib, json, os, platform, re, shutil, subprocess, sys
from pathlib import Path
import pytest, torch
from repq.fast import merging, native
from repq.tools.testing import assert_same

ROOT = Path(__file__).parent.parent.parent

# ---- on disk: whatever happened to it, a training goes on, by C or with one warning the simple way ----

TRAIN = '''if True:
    import json, os, sys, warnings, torch, repq
    from repq.blocks import repvgg
    from repq.fast import native
    from repq.tools.testing import assert_same
    from repq.tools.registry import paths_taken, reset_paths
    torch.set_num_threads(1)

    def train(cache, cc):
        "A training that has not loaded the library before"
        os.environ.update(XDG_CACHE_HOME=cache, CC=cc)
        native._libraries.clear()
        layer = repvgg(16, 16).double().quantize(4, 4, True)
        layer.statistics = 'estimate'
        x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
        with repq.use_path('simple'): layer(x)
        def step(path):
            with repq.use_path(path): y = layer(x)
            return y, *torch.autograd.grad(y.pow(3).mean(), list(layer.parameters()))
        reset_paths()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            found = [step('fused') for _ in range(2)][-1]
        taken = paths_taken()
        for a, b in zip(found, step('simple')): assert_same(a, b, 1e-9)
        return taken, [str(w.message) for w in said if 'repq' in str(w.message)]

    for line in sys.stdin: print(json.dumps(train(*json.loads(line))), flush=True)'''

BY_C, SIMPLE = {'fused': 2, 'compiled': 0, 'simple': 0}, {'fused': 0, 'compiled': 0, 'simple': 2}


def train_all(trainings):
    "Paths taken and warnings of trainings with (cache, compiler), one after the other in a new process"
    lines = '\n'.join(json.dumps([str(cache), str(cc)]) for cache, cc in trainings)
    done = subprocess.run([sys.executable, '-c', TRAIN], input=lines, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    went = f'{len(results)} of {len(trainings)} trainings, then {done.returncode}: {done.stderr}'
    assert done.returncode == 0 and len(results) == len(trainings), went
    return results


def train(cache, cc='cc'):
    "One training in a process of its own"
    return train_all([(cache, cc)])[0]


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "Library and digest as a first training leaves them: names -> contents"
    cache = tmp_path_factory.mktemp('first')
    assert train(cache) == [BY_C, []]
    return {p.name: p.read_bytes() for p in (cache/'repq').iterdir()}


def of_kind(files, digest): return next(name for name in files if name.endswith('.sha256') == digest)


def is_whole(files):
    library, digest = of_kind(files, False), of_kind(files, True)
    return files[digest].decode() == f'{hashlib.sha256(files[library]).hexdigest()}  {library}\n'


def flipped(data):
    middle = len(data)//2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1:]


def test_what_is_kept(made):
    "One library and its digest, as sha256sum writes and checks it; nothing else is left"
    library, digest = of_kind(made, False), of_kind(made, True)
    assert len(made) == 2 and digest == f'{library}.sha256' and library.endswith('-float64.so')
    assert is_whole(made)


DAMAGE = { # change of the library, change of its digest
    'cut in half': (lambda b: b[:len(b)//2], None), 'cut to a page': (lambda b: b[:4096], None),
    'a bit flipped': (flipped, None), 'empty': (lambda b: b'', None), 'no library': (lambda b: None, None),
    'no digest': (None, lambda b: None), 'empty digest': (None, lambda b: b''),
    'a bit of the digest flipped': (None, flipped), 'digest of bytes': (None, lambda b: b'\xff'*80),
    'both cut': (lambda b: b[:4096], lambda b: b[:10])}

@pytest.fixture(scope='module')
def damaged(made, tmp_path_factory):
    "A cache for each damage, after a training with each, all in one process: damage -> cache, result"
    caches = {damage: tmp_path_factory.mktemp('damaged') for damage in DAMAGE}
    for damage, cache in caches.items():
        (cache/'repq').mkdir(mode=0o700)
        for (name, data), change in zip(sorted(made.items()), DAMAGE[damage]):   # library, then digest
            data = change(data) if change else data
            if data is not None: (cache/'repq'/name).write_bytes(data)
    results = train_all([(cache, 'cc') for cache in caches.values()])
    return {damage: (cache, result) for (damage, cache), result in zip(caches.items(), results)}


@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged(damage, damaged, made):
    "Compiled again and whole again; the next training finds it so"
    cache, result = damaged[damage]
    assert result == [BY_C, []]
    found = {p.name: p.read_bytes() for p in (cache/'repq').iterdir()}
    assert found.keys() == made.keys() and is_whole(found)


def test_a_whole_library_is_used(made, tmp_path):
    "Without the compiler, which would be another way to the same result"
    cc = tmp_path/'cc'
    cc.write_text('#!/bin/sh\n[ -e "$0.broken" ] && echo "disk on fire" >&2 && exit 1\nexec cc "$@"\n')
    cc.chmod(0o700)
    assert train(tmp_path, cc) == [BY_C, []]
    (tmp_path/'cc.broken').touch()
    assert train(tmp_path, cc) == [BY_C, []]
    library = next((tmp_path/'repq').glob('*.so'))
    library.write_bytes(library.read_bytes()[:4096])
    taken, said = train(tmp_path, cc)
    assert taken == SIMPLE and len(said) == 1, said
    parts = 'without compiled C', f'{library} is damaged', 'compiled again', 'disk on fire'
    assert all(part in said[0] for part in parts), said


def test_a_compiler_that_does_not(tmp_path):
    "It fails, writes nothing, or is not there"
    compilers = 'false', 'true', 'no-such-compiler'
    for cc, (taken, said) in zip(compilers, train_all([(tmp_path/cc, cc) for cc in compilers])):
        assert taken == SIMPLE and len(said) == 1 and 'without compiled C' in said[0], (cc, said)
        assert not [*(tmp_path/cc/'repq').iterdir()], cc


def test_a_cache_that_cannot_be_written(tmp_path):
    "A file in its place, a folder without rights (which do not stop root), and one that others may write to"
    (tmp_path/'file').touch()
    (tmp_path/'closed').mkdir(mode=0o500)
    (tmp_path/'open'/'repq').mkdir(parents=True)
    (tmp_path/'open'/'repq').chmod(0o777)
    caches = 'file', 'closed', 'open'
    for cache, result in zip(caches, train_all([(tmp_path/cache, 'cc') for cache in caches])):
        assert result == [BY_C, []], cache
    assert not [*(tmp_path/'open'/'repq').iterdir()]


def test_a_name_that_is_taken(made, tmp_path):
    "A folder with the name of the library: it works, and a warning says that it is not kept"
    (tmp_path/'repq').mkdir(mode=0o700)
    (tmp_path/'repq'/of_kind(made, False)).mkdir()
    (tmp_path/'repq'/of_kind(made, True)).write_bytes(made[of_kind(made, True)])
    taken, said = train(tmp_path)
    assert taken == BY_C and len(said) == 1 and 'is not kept' in said[0], said


# ---- structures: Python and C mean the same bytes ----

@pytest.mark.parametrize('dtype', native.STRUCTURES)
def test_structures_agree(dtype):
    "Size of both structures, name, offset and size of every field"
    found = native.c_layout(native.load(dtype))
    assert found == native.python_layout(dtype)
    assert len(found) == sum(len(s._fields_) + 1 for s in native.STRUCTURES[dtype]) > 30


def swap(fields, a, b):
    names = [name for name, _ in fields]
    fields = list(fields)
    i, j = names.index(a), names.index(b)
    fields[i], fields[j] = fields[j], fields[i]
    return fields

@pytest.mark.parametrize('which, change', [
    (0, lambda fields: swap(fields, 'mean', 'var')), (0, lambda fields: fields[:-1]),
    (1, lambda fields: swap(fields, 'low', 'high')), (1, lambda fields: [*fields, ('more', ctypes.c_int64)])])
def test_other_structures_are_refused(which, change, monkeypatch):
    "Two fields of one type in another order, a field too few, a field too many"
    both = list(native.STRUCTURES[torch.float64])
    both[which] = type(both[which].__name__, (ctypes.Structure,), dict(_fields_=change(both[which]._fields_)))
    monkeypatch.setitem(native.STRUCTURES, torch.float64, native.Structures(*both))
    with pytest.raises(RuntimeError, match='fields of C'): native.load(torch.float64)


def test_the_notebook_shows_the_file():
    "Every function of the C file, as it is now: an output that was stored before a change is noticed"
    cells = json.loads((ROOT/'nbs'/'fast'/'4_native.ipynb').read_text(encoding='utf-8'))['cells']
    outputs = [o for c in cells if c['cell_type'] == 'code' for o in c['outputs']]
    shown = [''.join(o['data']['text/markdown']) for o in outputs if 'text/markdown' in o.get('data', {})]
    paragraphs = [p for s in shown for p in re.fullmatch(r'```c\n(.*)\n```', s, re.S)[1].split('\n\n')]
    stale = [p for p in paragraphs if p not in native.SOURCE]
    assert not stale, f'not in merge_lsq.c: run the notebook again\n{stale[0]}'
    printed = [''.join(o['text']) for o in outputs if o['output_type'] == 'stream']
    top = native.SOURCE[:native.SOURCE.index('*/') + 3]
    assert top in printed, 'the comment at its top: run the notebook again'
    def functions(text): return set(re.findall(r'^(?:static |int ).*?(\w+)\(', text, re.M))
    assert functions('\n'.join(paragraphs)) == functions(native.SOURCE) and len(functions(native.SOURCE)) > 15


# ---- memory ----

COUNTED_MALLOC = """
#include <limits.h>
#include <stddef.h>
/* allocations that succeed, that were asked for, that are not freed */
int limit = INT_MAX, asked = 0, live = 0;
void *__real_malloc(size_t);
void __real_free(void*);
void *__wrap_malloc(size_t n)
{
  if (__atomic_fetch_add(&asked, 1, __ATOMIC_SEQ_CST) >= limit) return 0;
  __atomic_fetch_add(&live, 1, __ATOMIC_SEQ_CST);
  return __real_malloc(n);
}
void __wrap_free(void *p)
{
  if (p) __atomic_fetch_sub(&live, 1, __ATOMIC_SEQ_CST);
  __real_free(p);
}
"""

@pytest.fixture
def counted(monkeypatch, tmp_path):
    "The library with an allocator that counts, and refuses when it is told to"
    if platform.system() != 'Linux': pytest.skip('replaces malloc by the linker option --wrap of Linux')
    (tmp_path/'malloc.c').write_text(COUNTED_MALLOC)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setenv('CC', f'cc {tmp_path}/malloc.c -Wl,--wrap=malloc -Wl,--wrap=free')
    monkeypatch.setattr(native, '_libraries', {})
    threads = torch.get_num_threads()
    yield native.library(torch.float32)
    torch.set_num_threads(threads)


def small_block():
    "Parts, variance of the input, step, frame, and the tensors that learn"
    def leaf(*shape): return torch.randn(shape).requires_grad_()
    mean, var, step = leaf(8), torch.rand(8).add(.1).requires_grad_(), torch.rand(8).add(.1).requires_grad_()
    weights = leaf(8, 8, 3, 3), leaf(8, 8, 1, 1), None
    parts = [merging.Part(w, leaf(8), leaf(8), 1e-5, windows=mean) for w in weights]
    leaves = [mean, var, step, *(t for p in parts for t in p[:3] if t is not None)]
    return parts, var, step, merging.Frame((3, 3), 1, -4, 3, .1, True), leaves


@pytest.mark.parametrize('threads', [1, 2])
def test_no_memory(counted, threads):
    "Each allocation refused in turn: MemoryError from forward and backward, no leak, and it works afterwards"
    torch.set_num_threads(threads)
    limit, asked, live = (ctypes.c_int.in_dll(counted, name) for name in ('limit', 'asked', 'live'))
    *block, leaves = small_block()
    def forward():
        asked.value = 0
        return merging.merge_quantize(*block)[:2]
    def backward(results):
        asked.value = 0
        return torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], retain_graph=True)
    before = forward()
    expected = [*before, *backward(before)]
    needed = asked.value
    assert needed == 2*threads and live.value == 0
    for n in range(needed):
        limit.value = n
        with pytest.raises(MemoryError, match=f'8x8 channels and 9 taps with {threads} threads'): forward()
        with pytest.raises(MemoryError, match='use fewer threads'): backward(before)
        assert live.value == 0
    limit.value = needed
    after = forward()
    assert all(map(torch.equal, [*after, *backward(after)], expected)) and live.value == 0


# ---- sanitizers, and another compiler ----

MERGE_ALL = """
import itertools, sys, torch
from repq.fast import merging, native
from repq.fast.native import library
from repq.fast.merging import Frame, Part, c_block, call, merge_quantize

def leaf(*shape, dtype): return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
def positive(n, dtype): return torch.rand(n, dtype=torch.float64).add(.1).to(dtype).requires_grad_()

def make_part(source, size, dtype, i, o, groups, shared, layout):
    "A part with a random kernel, or an identity"
    weight = None
    if size:
        weight = leaf(o, i//groups, *size, dtype=dtype).detach()
        weight = weight.to(memory_format=layout).requires_grad_()
    part = Part(weight, leaf(o, dtype=dtype), leaf(o, dtype=dtype), 1e-3)
    if source == 'given': return part._replace(mean=leaf(o, dtype=dtype), var=positive(o, dtype))
    if source == 'estimated': return part._replace(windows=shared)
    return part._replace(windows=leaf(9, i, dtype=dtype), ratio=positive(o, dtype).detach())

def merge(source, last, shape, dtype):
    "Results and all gradients of a random block"
    i, o, groups, sizes = shape
    shared, var, step = leaf(i, dtype=dtype), positive(i, dtype), positive(o, dtype)
    layouts = itertools.cycle([torch.channels_last, torch.contiguous_format])
    parts = [make_part(source, s, dtype, i, o, groups, shared, layout) for s, layout in zip(sizes, layouts)]
    q, bias, stats = merge_quantize(parts, var, step, Frame((3, 3), groups, -8, 7, .1, last))
    leaves = {var, step, *(t for p in parts for t in p if isinstance(t, torch.Tensor) and t.requires_grad)}
    leaves = sorted(leaves, key=lambda t: (*t.shape, t.sum().item()))
    directions = [torch.randn(t.shape, dtype=torch.float64).to(dtype) for t in (q, bias)]
    grads = torch.autograd.grad((q, bias), leaves, directions, allow_unused=True)
    return [t.detach().double() for t in (q, bias, *sum(stats, ()), *grads) if t is not None]

SHAPES = [(5, 7, 1, [(3, 3), (1, 3), (3, 1)]),             # ACNet, odd channels
          (6, 6, 2, [(3, 3), (1, 1), None]),               # RepVGG, grouped
          (6, 6, 6, [(3, 3)]*4 + [(1, 1), None]),          # MobileOne, depthwise, more than three in a tap
          (1, 3, 1, [(3, 3)]),
          (37, 4, 1, [(3, 3), (1, 1)]),                    # whole lines, and some channels after them
          (32, 32, 2, [(3, 3), (3, 1), None])]             # whole lines
torch.manual_seed(0)
found = []
for threads, dtype in itertools.product((1, 2), (torch.float32, torch.float64)):
    torch.set_num_threads(threads)
    for block in itertools.product(('given', 'estimated', 'calibrated'), (True, False), SHAPES):
        found += merge(*block, dtype)
assert all(library(dtype) for dtype in (torch.float32, torch.float64))
"""

SAVE = 'torch.save(found, sys.argv[1])'
WRITE_TOO_FAR = """
ones = torch.ones(4)
part = Part(torch.ones(4, 4, 1, 1), ones, ones, 1e-3, mean=ones, var=ones)
block = c_block(Frame((1, 1), 1, -8, 7, .1, True), [part], [True], ones, ones)
forward = library(torch.float32).forward
print('compiled', flush=True)
call(forward, block, torch.ones(4, 4, 1, 1), torch.ones(3))   # a bias for three of four channels
"""


def run_merges(code, to, cc, **env):
    "The script in a process of its own"
    env = {**os.environ, 'XDG_CACHE_HOME': str(to.parent), 'CC': cc, 'OMP_NUM_THREADS': '1', **env}
    command = [sys.executable, '-c', code, str(to)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope='module')
def sanitizers():
    "What a process needs to use a library that gcc compiled with sanitizers"
    if not shutil.which('gcc'): pytest.skip('no gcc')
    found = []
    for name in ('libasan.so', 'libstdc++.so.6'):
        command = ['gcc', f'-print-file-name={name}']   # its path, or the name again if there is none
        found.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if not all(map(os.path.isabs, found)): pytest.skip('this gcc has no AddressSanitizer')
    cc = 'gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all'
    leaks = 'detect_leaks=0'   # Python and torch have many; test_no_memory looks for ours
    return dict(cc=cc, LD_PRELOAD=' '.join(found), ASAN_OPTIONS=leaks)


@pytest.mark.slow('compiles and runs under sanitizers')
def test_sanitizers(sanitizers, tmp_path):
    "No read or write out of bounds, no undefined behaviour, in any shape, layout or type"
    done = run_merges(MERGE_ALL + SAVE, tmp_path/'found.pt', **sanitizers)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'Sanitizer' not in done.stderr and 'runtime error' not in done.stderr, done.stderr[-3000:]
    found = torch.load(tmp_path/'found.pt')
    assert len(found) > 1000 and all(t.isfinite().all() for t in found)


@pytest.mark.slow('compiles and runs under sanitizers')
def test_sanitizers_see(sanitizers, tmp_path):
    "A write behind the end of a tensor is reported, so their silence means something"
    imports = MERGE_ALL.split('def leaf')[0]
    done = run_merges(imports + WRITE_TOO_FAR, tmp_path/'found.pt', **sanitizers)
    assert done.stdout == 'compiled\n' and done.returncode != 0, done.stderr[-3000:]
    for said in ('AddressSanitizer: heap-buffer-overflow', 'WRITE of size 4'): assert said in done.stderr


@pytest.mark.slow('compiles with two compilers')
def test_clang_agrees(tmp_path):
    "Another compiler, another order of sums: the same numbers up to rounding"
    missing = [name for name in ('gcc', 'clang') if not shutil.which(name)]
    if missing: pytest.skip(f'no {missing[0]}')
    found = {}
    for cc in ('gcc', 'clang'):
        done = run_merges(MERGE_ALL + SAVE, tmp_path/f'{cc}.pt', cc)
        assert done.returncode == 0, done.stderr[-3000:]
        found[cc] = torch.load(tmp_path/f'{cc}.pt')
    assert len(found['gcc']) == len(found['clang']) > 1000
    for a, b in zip(found['clang'], found['gcc']): assert_same(a, b, 1e-5)
