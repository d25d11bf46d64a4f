"The compiled library on disk: whatever happened to it, a training goes on, by C or with one warning the simple way"
import hashlib, json, os, subprocess, sys
import pytest

TRAIN = '''if True:
    import json, warnings, torch, repq
    from repq.blocks import repvgg
    from repq.tools.testing import assert_same
    from repq.tools.registry import paths_taken, reset_paths
    torch.set_num_threads(1)
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
    print(json.dumps([taken, [str(w.message) for w in said if 'repq' in str(w.message)]]))'''

BY_C, SIMPLE = {'fused': 2, 'compiled': 0, 'simple': 0}, {'fused': 0, 'compiled': 0, 'simple': 2}


def train(cache, cc='cc'):
    "Ways taken and warnings of a training in a process of its own"
    env = {**os.environ, 'XDG_CACHE_HOME': str(cache), 'CC': str(cc)}
    done = subprocess.run([sys.executable, '-c', TRAIN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f'ended with {done.returncode}: {done.stderr}'
    return json.loads(done.stdout.splitlines()[-1])


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
    assert len(made) == 2 and digest == f'{library}.sha256' and library.endswith('-float64.so') and is_whole(made)


DAMAGE = {'cut in half': (lambda b: b[:len(b)//2], None), 'cut to a page': (lambda b: b[:4096], None), 'a bit flipped': (flipped, None),
          'empty': (lambda b: b'', None), 'no library': (lambda b: None, None), 'no digest': (None, lambda b: None),
          'empty digest': (None, lambda b: b''), 'a bit of the digest flipped': (None, flipped), 'digest of bytes': (None, lambda b: b'\xff'*80),
          'both cut': (lambda b: b[:4096], lambda b: b[:10])}

@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged(damage, made, tmp_path):
    "Compiled again and whole again; the next training finds it so"
    folder = tmp_path/'repq'
    folder.mkdir(mode=0o700)
    for (name, data), change in zip(sorted(made.items()), DAMAGE[damage]):   # the library sorts before its digest
        data = change(data) if change else data
        if data is not None: (folder/name).write_bytes(data)
    assert train(tmp_path) == [BY_C, []]
    found = {p.name: p.read_bytes() for p in folder.iterdir()}
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
    assert all(part in said[0] for part in ('without compiled C', f'{library} is damaged', 'compiled again', 'disk on fire')), said


@pytest.mark.parametrize('cc', ['false', 'true', 'no-such-compiler'])
def test_a_compiler_that_does_not(cc, tmp_path):
    "It fails, writes nothing, or is not there"
    taken, said = train(tmp_path, cc)
    assert taken == SIMPLE and len(said) == 1 and 'without compiled C' in said[0], said
    assert not [*(tmp_path/'repq').iterdir()]


def test_a_cache_that_cannot_be_written(tmp_path):
    "A file in its place, a folder without rights (which do not stop root), and one that others may write to"
    (tmp_path/'file').touch()
    (tmp_path/'closed').mkdir(mode=0o500)
    (tmp_path/'open'/'repq').mkdir(parents=True)
    (tmp_path/'open'/'repq').chmod(0o777)
    for cache in ('file', 'closed', 'open'): assert train(tmp_path/cache) == [BY_C, []], cache
    assert not [*(tmp_path/'open'/'repq').iterdir()]


def test_a_name_that_is_taken(made, tmp_path):
    "A folder with the name of the library: it works, and a warning says that it is not kept"
    (tmp_path/'repq').mkdir(mode=0o700)
    (tmp_path/'repq'/of_kind(made, False)).mkdir()
    (tmp_path/'repq'/of_kind(made, True)).write_bytes(made[of_kind(made, True)])
    taken, said = train(tmp_path)
    assert taken == BY_C and len(said) == 1 and 'is not kept' in said[0], said
