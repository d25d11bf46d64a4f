"What goes wrong is said in one line that helps: data, folders, tables, terminals, leftovers"
import json, os, struct, subprocess, sys, tempfile, time, zipfile, zlib
from pathlib import Path
import numpy as np
import pytest
from PIL import Image
from repq import data as A
from repq.reproduce import driver as D, runs as R
from repq.tools import files
from repq.cli.command import main
from records import write_failure, write_run

ROOT = Path(__file__).parents[2]


def picture(size=16, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype='uint8'))


def class_tree(folder, classes=('cat', 'dog'), n=2, suffix='.png'):
    "A small data set, train/ and val/"
    for half in ('train', 'val'):
        for k, c in enumerate(classes):
            (folder/half/c).mkdir(parents=True, exist_ok=True)
            for i in range(n): picture(seed=10*k + i).save(folder/half/c/f'{i}{suffix}')
    return folder


# -- tables

def test_a_table_of_settings_needs_no_runs(tmp_path, capsys):
    assert main(['reproduce', '--table', 'S1', '--results', str(tmp_path/'here')]) == 0
    out = capsys.readouterr().out
    assert 'No runs belong to this' in out and 'weight decay' in out.lower()
    assert not (tmp_path/'here').exists()


def test_smoke_has_no_side_experiments(tmp_path, capsys):
    assert main(['reproduce', '--table', 'side', '--results', str(tmp_path)]) == 1
    assert '--profile cpu' in capsys.readouterr().err
    with pytest.raises(ValueError, match='a batch needs runs'): D.reproduce('smoke', ['side'], root=tmp_path)


def test_the_module_is_the_command(tmp_path):
    out = subprocess.run([sys.executable, '-m', 'repq.cli', '--version'], capture_output=True, text=True,
                         env={**os.environ, 'PYTHONPATH': str(ROOT)}, cwd=tmp_path)
    assert out.returncode == 0 and out.stdout.startswith('repq 0'), out
    out = subprocess.run([sys.executable, '-m', 'repq.cli', 'nonsense'], capture_output=True, text=True,
                         env={**os.environ, 'PYTHONPATH': str(ROOT)}, cwd=tmp_path)
    assert out.returncode == 2, out


# -- images

def test_grey_of_16_bits_keeps_its_greys(tmp_path):
    "Pillow would cut 16 bits off at 255, and nearly every pixel would be white"
    class_tree(tmp_path)
    ramp = np.linspace(0, 65535, 64*64).astype('uint16').reshape(64, 64)
    for half in ('train', 'val'): Image.fromarray(ramp).save(tmp_path/half/'cat'/'0.png')
    deep = A.image_folder_dls(tmp_path, batch_size=2, size=64, min_scale=1., num_workers=0).valid.dataset
    i, = [i for i, f in enumerate(deep.files) if f == tmp_path/'val'/'cat'/'0.png']
    seen = A.eight_bit(A.open_image(deep.files[i], ''))
    assert seen.mode == 'L' and np.array_equal(np.asarray(seen), ramp//257)
    x = deep.decode_batch((deep[i][0][None], deep[i][1][None]))[0]
    assert 0.45 < x.mean() < 0.55 and (x > 0.99).float().mean() < 0.05
    with pytest.raises(ValueError, match='0.png is a grey image'): A.read_rgb(tmp_path/'val'/'cat'/'0.png')


@pytest.mark.parametrize('where', ['HR', 'LR_bicubic/X2'])
def test_two_pictures_of_one_name(tmp_path, where):
    for name in ('a', 'b'):
        for folder, stem, size in (('HR', name, 32), ('LR_bicubic/X2', f'{name}x2', 16)):
            (tmp_path/folder).mkdir(parents=True, exist_ok=True)
            picture(size).save(tmp_path/folder/f'{stem}.png')
    assert len(A.luma_pairs(tmp_path, 2, cache=False)) == 2
    twin = 'a' if where == 'HR' else 'ax2'
    picture(32).save(tmp_path/where/f'{twin}.jpg')
    with pytest.raises(ValueError, match=rf'{twin}\.jpg and .*{twin}\.png are two pictures with one name'):
        A.luma_pairs(tmp_path, 2, cache=False)


def test_class_names_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"a class called 'ca\\nt'"):
        A.folder_tensors(class_tree(tmp_path, ('ca\nt', 'dog')), cache=False)


def test_a_single_class(tmp_path):
    class_tree(tmp_path, ('cat',))
    for load in (lambda: A.folder_tensors(tmp_path, cache=False), lambda: A.image_folder_dls(tmp_path)):
        with pytest.raises(ValueError, match="single class, 'cat'.*at least two"): load()


def bomb(width=60_000, height=60_000):
    "A PNG of a few hundred bytes that says it has 3.6 billion pixels"
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    head = chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0))
    body = chunk(b'IDAT', zlib.compress(b'\0'*1000))
    return b'\x89PNG\r\n\x1a\n' + head + body + chunk(b'IEND', b'')


BAD = {'bomb': bomb(), 'large': bomb(10_000, 10_000), 'cut': None, 'text': b'hello', 'empty': b'',
       'png without data': bomb(16, 16)[:33]}

@pytest.mark.parametrize('how', BAD)
def test_bad_images_are_named(tmp_path, how):
    class_tree(tmp_path)
    bad = tmp_path/'val'/'dog'/'1.png'
    bad.write_bytes(bad.read_bytes()[:200] if BAD[how] is None else BAD[how])
    files = A.image_folder_dls(tmp_path, batch_size=2, num_workers=0).valid.dataset
    for load in (lambda: A.folder_tensors(tmp_path, cache=False),
                 lambda: [files[i] for i in range(len(files))]):
        with pytest.raises(ValueError, match=r'val/dog/1\.png (has too many pixels|is not an image)'): load()


def zipped(tmp_path):
    class_tree(tmp_path/'tree')
    with zipfile.ZipFile(tmp_path/'set.zip', 'w', zipfile.ZIP_DEFLATED) as z:
        for p in (tmp_path/'tree').rglob('*.png'): z.write(p, p.relative_to(tmp_path/'tree'))
    return tmp_path/'set.zip'


@pytest.mark.parametrize('how', ['flipped', 'directory', 'cut', 'inflated', 'encrypted', 'nothing'])
def test_bad_zips_are_named(tmp_path, how):
    path = zipped(tmp_path)
    assert len(A.folder_tensors(path, cache=False)[0]['train_x']) == 4
    raw = bytearray(path.read_bytes())
    if how == 'flipped': raw[200] ^= 0xff
    if how == 'directory':
        at = raw.rindex(b'PK\1\2')
        raw[at:at + 4] = b'XXXX'
    if how == 'cut': raw = raw[:200] + raw[-22:]
    if how == 'encrypted':
        for sign, place in ((b'PK\3\4', 6), (b'PK\1\2', 8)):
            at = raw.find(sign)
            while at >= 0:
                raw[at + place] |= 1
                at = raw.find(sign, at + 4)
    path.write_bytes(b'' if how == 'nothing' else raw)
    if how == 'inflated':
        with zipfile.ZipFile(path, 'a', zipfile.ZIP_DEFLATED) as z:
            with z.open('train/cat/9.png', 'w', force_zip64=True) as f:
                for _ in range(300): f.write(bytes(2**20))
    with pytest.raises(ValueError, match='set.zip'): A.folder_tensors(path, cache=False)


@pytest.mark.parametrize('call, variable',
                         [(lambda: A.find_data('cifar10'), 'REPQ_DATA'),
                          (lambda: A.cache_path('a', 'b'), 'REPQ_CACHE'),
                                            (lambda: A.torchvision_dls('MNIST'), 'REPQ_DATA')])
def test_a_home_that_is_not_there(call, variable, monkeypatch):
    monkeypatch.setenv(variable, '~nosuchuser/data')
    with pytest.raises(FileNotFoundError,
                       match=f'{variable} is .~nosuchuser/data., and there is no such user'):
        call()


# -- folders

def test_the_own_message_of_a_folder_that_is_none(tmp_path):
    "What is tidied up afterwards must not hide it"
    (tmp_path/'file').write_text('')
    said = 'a.json could not be written .Not a directory.*what was there before is unchanged'
    with pytest.raises(OSError, match=said):
        files.write_json(tmp_path/'file'/'a.json', {})


@pytest.fixture
def read_only(tmp_path):
    "A folder on a file system that is mounted read-only"
    folder = tmp_path/'read-only'
    folder.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro,size=64k', 'tmpfs', str(folder)],
                      capture_output=True).returncode:
        pytest.skip('needs the right to mount a file system')
    yield folder
    subprocess.run(['umount', '-l', str(folder)], check=True)


def test_a_read_only_folder_says_so(read_only, capsys):
    with pytest.raises(OSError, match='could not be written .Read-only file system.*unchanged'):
        files.write_json(read_only/'a.json', {})
    assert main(['reproduce', '--table', '3', '--results', str(read_only)]) == 1
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and f'results cannot be written to {read_only}' in err
    assert 'Read-only file system' in err and '--results' in err


def test_failures_are_said_before_the_report(tmp_path, monkeypatch, capsys):
    "A report that cannot be written must not hide why runs failed"
    monkeypatch.setenv('REPQ_DATA', str(tmp_path/'nowhere'))
    (tmp_path/'here'/'cpu'/'tables.md').mkdir(parents=True)   # in its place: a folder
    assert main(['reproduce', '--profile', 'cpu', '--table', '3', '--seeds', '1', '--steps', '1', '--results',
                 str(tmp_path/'here')]) == 1
    out, err = capsys.readouterr()
    assert err.count('failed:') == 2 and 'not found' in err and '0 of 14 runs done' in out
    assert 'tables.md could not be written' in err.splitlines()[-1]


# -- terminals

ESCAPE = '\x1b]0;title\x07\x1b[31m\x9b2Jred\r\n\u202egnp'

def test_files_cannot_write_to_the_terminal(tmp_path, capsys):
    "Failures, progress, names of fields: what files say is shown without control characters"
    first, second, third = R.graph(R.cells('smoke', ['3']))[:3]
    write_failure(tmp_path, first, f'failed {ESCAPE}')
    folder = write_run(tmp_path, second)
    record = json.loads((folder/'record.json').read_text())
    changed = {**record, 'history': [{ESCAPE: {}}], 'metrics': {ESCAPE: {'a': None, ESCAPE: 1e999}}}
    (folder/'record.json').write_text(json.dumps(changed).replace('Infinity', '1'))
    (R.Store(tmp_path).work(third)).mkdir(parents=True)
    for words in (['status', '--table', '3', '--all'], ['tables', '--table', '3'], ['verify']):
        main([*words, '--results', str(tmp_path)])
        out, err = capsys.readouterr()
        assert not [c for c in out + err if not c.isprintable() and c != '\n'], repr(out + err)
    main(['status', '--results', str(tmp_path)])
    assert 'red' in capsys.readouterr().out
    main(['export', f'{tmp_path}/{ESCAPE}'])
    err = capsys.readouterr().err
    assert not [c for c in err if not c.isprintable() and c != '\n'], repr(err)


# -- leftovers

LEFT = '''
import sys
from repq.reproduce import driver as D, runs as R
if __name__ == '__main__':
    two = [R.super_resolution('smoke', 0, 'fp', block='plain'), R.super_resolution('smoke', 0, 'plain', 8)]
    runs = R.limited(two, int(sys.argv[2]))
    D.run_batch(runs, sys.argv[1], workers=2, live=False)
'''


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path, capsys, monkeypatch):
    "After a batch, after one that was killed and the next one, after an export"
    # short: the address of a socket has 108 characters
    results, outer = tmp_path/'results', tempfile.TemporaryDirectory(prefix='r')
    temp = Path(outer.name)
    (tmp_path/'batch.py').write_text(LEFT)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'TMPDIR': str(temp)}
    def batch(steps):
        return subprocess.Popen([sys.executable, str(tmp_path/'batch.py'), str(results), str(steps)], env=env,
                                start_new_session=True, stdout=subprocess.DEVNULL)
    def ours():
        return sorted(p.name for p in temp.iterdir() if not p.name.startswith(('torchinductor', 'pymp-')))
    p = batch(10**6)
    end = time.time() + 120
    while not list(results.glob('smoke/.work/*/checkpoint.safetensors')):
        assert time.time() < end and p.poll() is None
        time.sleep(.05)
    p.kill()
    p.wait()
    python = sorted(temp.glob('pymp-*'))   # of multiprocessing itself, when it is killed
    assert ours(), 'a killed driver cannot tidy up: without this the next line proves nothing'
    assert batch(2).wait() == 0
    assert ours() == [] and sorted(temp.glob('pymp-*')) == python
    done, = [p for p in (results/'smoke').glob('*8bit*') if (p/'record.json').exists()]
    export = [sys.executable, '-m', 'repq.cli', 'export', str(done), '--out', str(tmp_path/'net.onnx')]
    subprocess.run(export, env=env, check=True, stdout=subprocess.DEVNULL)
    assert ours() == [] and (tmp_path/'net.onnx').exists()
    assert not [p for p in (results/'smoke').rglob('.*') if p.is_file()], 'half-written files'


def test_half_written_files_are_not_kept(tmp_path):
    "What a killed kernel was about to write is not part of the result"
    run, = R.limited([R.super_resolution('smoke', 0, 'fp', block='plain')], 1)
    store = R.Store(tmp_path)
    store.work(run).mkdir(parents=True)
    (store.work(run)/'.checkpoint.safetensors.0a1b2c3d').write_bytes(b'half')
    assert D.execute(run, tmp_path).state == 'done'
    assert not [p.name for p in store.done(run).iterdir() if p.name.startswith('.')]
