"What lies on disk is not believed: damaged, malformed, linked and foreign files; records computed again"
import contextlib, copy, io, json, os, random, shutil, signal, subprocess, sys, time
from collections import Counter
from dataclasses import replace
import pytest
import reference, test_runs
from records import all_runs, metrics_of, write_all, write_failure, write_run
from repq.reproduce import driver as D, records, runs as R, tables
from repq.cli.command import main
from repq.tools.files import read_json, seal, write_json
from repq.reproduce.records import WEIGHTS, Corrupt, read_record
from test_runs import ROOT, classifiers, family, long_family, results, start, wait_for
from conftest import PROVEN

pytestmark = pytest.mark.filterwarnings('ignore')
undisturbed = test_runs.undisturbed   # a fixture


# -- malformed files and flipped bits

STRANGE = [None, True, -1, 0, 1e308, 10**400, 'x', '', '\ud800', '\x1b[31m', [], {}, [[]], {'a': None},
           'a'*300_000, 1e-320, -0., [1]*1000]

def places(value, path=()):
    "Every place in a JSON value"
    yield path
    parts = ()
    if isinstance(value, dict): parts = value.items()
    if isinstance(value, list): parts = enumerate(value)
    for k, v in parts: yield from places(v, (*path, k))


def malformed(value, r):
    "A JSON text with one thing wrong in it, and whether it is sealed"
    value, path = copy.deepcopy(value), r.choice(list(places(value))[1:])
    inner = value
    for k in path[:-1]: inner = inner[k]
    kind = r.choice(['replace']*6 + ['remove', 'deep', 'text', 'constant', 'whole'])
    if kind == 'replace': inner[path[-1]] = r.choice(STRANGE)
    if kind == 'remove': del inner[path[-1]]
    if kind == 'deep':
        inner[path[-1]] = deep = []
        for _ in range(r.choice([13, 60, 400])):
            deep.append([])
            deep = deep[0]
    # a seal that fits what has not the shape
    if 'spec' in value and r.random() < .8 and records.record_misfit(value):
        with contextlib.suppress(ValueError): value = seal(value)
    text = json.dumps(value)
    if kind == 'text': text = text[:r.randrange(len(text))]
    if kind == 'constant':
        text = text.replace('0.', r.choice(['NaN', '1e999', '-Infinity', '9'*5000 + '.']), 1)
    if kind == 'whole':
        text = r.choice(['', 'null', '7', '[]', '"x"', '['*100_000, '{"a":'*2000, '\x00', '{}'])
    return text.encode('utf-8', 'surrogatepass')


def numbers(root):
    "What tables show, by place, and the states of all runs"
    found = tables.Results('smoke', root, 1)
    return {a: found.measured(a).values for a in found.cells}, [found.look(r) for r in found.runs]


@pytest.fixture(scope='module')
def whole(tmp_path_factory): return write_all(tmp_path_factory.mktemp('whole'), images=1)


def check_unharmed(root, before, runs, counts):
    "No traceback, and every number is the one of before or not there; what is wrong is named"
    values, found = numbers(root)
    for address, v in values.items(): assert v in (before[address], {}), address
    for r in runs:
        f = R.Store(root, 'smoke').look(r)
        counts[f.state] = counts.get(f.state, 0) + 1
        assert f.state in ('done', 'corrupt', 'collapsed', 'failed', 'interrupted', 'missing')
        assert f.why or f.state == 'done'
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        assert main(['status', '--results', str(root), '--all']) in (0, 1)
        assert main(['tables', '--results', str(root), '--claims', '--write']) in (0, 1)
    assert 'Traceback' not in out.getvalue() and '\x1b' not in out.getvalue()


def test_malformed_files(whole, tmp_path, below_2_gb):
    "500 records, batch and failure files with one thing wrong: no traceback, and no number changes"
    before, runs, counts, made = numbers(whole)[0], all_runs('smoke'), {}, 0
    for turn in range(500//50):
        r, root = random.Random(turn), tmp_path/str(turn)
        shutil.copytree(whole, root)
        store, chosen = R.Store(root, 'smoke'), r.sample(runs, 40)
        for run in chosen[:36]:
            path = store.done(run)/'record.json'
            path.write_bytes(malformed(json.loads(path.read_text()), r))
        for run in chosen[36:]:
            shutil.rmtree(store.done(run))
            write_failure(root, run, 'out of memory')
            path = store.work(run)/'failed.json'
            path.write_bytes(malformed(json.loads(path.read_text()), r))
        for _ in range(10):
            manifest = dict(seeds=1, workers=2, started='now', seconds=3., tables=['2'])
            (store.folder/'batch.json').write_bytes(malformed(manifest, r))
            assert store.manifest().get('seeds', 1) in range(1, R.MOST_SEEDS + 1)
        (store.folder/'batch.json').unlink()
        check_unharmed(root, before, chosen, counts)
        made += 50
        shutil.rmtree(root)
    assert made == 500 and counts['corrupt'] > 250
    PROVEN['malformed records, batch and failure files'] = f'{made}, of the records {counts}'


def test_flipped_bits_in_records(whole, tmp_path, below_2_gb):
    "250 records with one flipped bit: noticed, or of no consequence"
    before, runs, counts, made = numbers(whole)[0], all_runs('smoke'), {}, 0
    for turn in range(5):
        r, root = random.Random(1000 + turn), tmp_path/str(turn)
        shutil.copytree(whole, root)
        chosen = [r.choice(runs) for _ in range(50)]
        for run in set(chosen):
            path = R.Store(root, 'smoke').done(run)/'record.json'
            data = bytearray(path.read_bytes())
            data[r.randrange(len(data))] ^= 1 << r.randrange(8)
            path.write_bytes(data)
        check_unharmed(root, before, set(chosen), counts)
        made += len(set(chosen))
        shutil.rmtree(root)
    while made < 250: # those that were drawn twice
        run, made = r.choice(runs), made + 1
        path = whole/'smoke'/run.id/'record.json'
        good = path.read_bytes()
        data = bytearray(good)
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)
        path.write_bytes(data)
        try:
            f = R.Store(whole, 'smoke').look(run)
            assert f.state == 'corrupt' or f.record == json.loads(good)
            counts[f.state] = counts.get(f.state, 0) + 1
        finally: path.write_bytes(good)
    PROVEN['flipped bits in records'] = f'{made}: {counts}'


def test_flipped_bits_in_checkpoints(tmp_path, below_2_gb):
    "250 files of tensors with one flipped bit: refused, or the same tensors"
    import torch
    from repq.reproduce.training import load_tensors, save_tensors
    torch.manual_seed(0)
    tensors = {f'net.{i}': torch.randn(4, 5) for i in range(6)} | {'random': torch.get_rng_state()}
    path = save_tensors(tmp_path/'checkpoint.safetensors', tensors,
                        dict(epochs=2, history=[dict(epoch=1, metric=.5)]))
    good, r, refused = path.read_bytes(), random.Random(0), 0
    for i in range(250):
        data = bytearray(good)
        data[r.randrange(len(data) if i % 2 else 900)] ^= 1 << r.randrange(8)
        path.write_bytes(data)
        try: again, about = load_tensors(path)
        except Corrupt as e:
            refused += 1
            assert 'checkpoint.safetensors is damaged' in str(e)
        else:
            assert about == dict(epochs=2, history=[dict(epoch=1, metric=.5)])
            assert all(torch.equal(t, again[n]) for n, t in tensors.items())
    assert refused > 240
    PROVEN['flipped bits in checkpoints'] = f'250, {refused} refused'


@pytest.mark.parametrize('seeds', ['100000000', '0', '101', '9'*400, '-3'])
def test_seeds_have_a_limit(tmp_path, seeds, capsys):
    assert main(['reproduce', '--dry-run', '--seeds', seeds, '--results', str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert 'from 1 to 100' in err or 'a positive number is needed' in err or 'expected one argument' in err


SIZES = {'10**400 seeds': (b'{"seeds": 1' + b'0'*400 + b'}',
                           'seeds must be a whole number from 1 to 100, got a whole number of 1329 bits'),
         'ten thousand levels': (b'{"seeds": ' + b'['*10_000 + b']'*10_000 + b'}', 'nested'),
         'a number of 5,000 digits': (b'{"seeds": ' + b'9'*5000 + b'}', 'is damaged')}

@pytest.mark.parametrize('what', SIZES)
def test_a_batch_file_of_no_bounds(whole, tmp_path, what, below_2_gb):
    "It is named with the field, and the batch has the seeds of its profile"
    content, message = SIZES[what]
    root = shutil.copytree(whole, tmp_path/'results')
    (root/'smoke'/'batch.json').write_bytes(content)
    with pytest.raises(Corrupt, match=message): read_json(root/'smoke'/'batch.json', R.MANIFEST)
    assert R.Store(root, 'smoke').manifest() == {} and main(['status', '--results', str(root)]) == 0


@pytest.mark.parametrize('name', ['record.json', WEIGHTS])
@pytest.mark.parametrize('how', ['huge', 'a pipe'])
def test_files_that_must_not_be_read(whole, tmp_path, name, how, below_2_gb):
    "5 GB without content, and a pipe that nobody writes to: refused at once, for records and for weights"
    from repq.reproduce.training import load_tensors
    run = next(r for r in all_runs('smoke') if r.task == 'super_resolution')
    root = shutil.copytree(whole, tmp_path/'results')
    path = root/'smoke'/run.id/name
    path.unlink()
    if how == 'huge':
        with open(path, 'wb') as f: f.truncate(5*2**30)
    else: os.mkfifo(path)
    if name == WEIGHTS:
        with pytest.raises(Corrupt, match='at most|no ordinary file'): load_tensors(path)
    else:
        f = R.Store(root, 'smoke').look(run)
        assert f.state == 'corrupt' and name in f.why, f


# -- links

def test_links_that_lead_out_are_refused(whole, tmp_path):
    "A picture, a notebook, weights, a record, a whole folder"
    secret = tmp_path/'secret'
    secret.mkdir()
    for i, name in enumerate(('crop.png', 'notebook.ipynb', WEIGHTS, 'record.json', '')):
        root, run = tmp_path/str(i), next(r for r in all_runs('smoke') if r.task == 'super_resolution')
        shutil.copytree(whole, root)
        folder = write_run(root, run, metrics_of(run, images=1), pictures={'crop.png': b'picture'})
        if name:
            (folder/name).rename(secret/'file')
            (folder/name).symlink_to(secret/'file')
        else:
            shutil.move(folder, secret/'folder')
            folder.symlink_to(secret/'folder')
        f = R.Store(root, 'smoke').look(run)
        assert f.state == 'corrupt' and 'leads out of its folder' in f.why, name


def test_nothing_is_written_through_a_link(tmp_path):
    "The notebook of a run under way, its lock and its claim point at files elsewhere, which stay as they are"
    run, precious = family()[0], tmp_path/'precious'
    for name in ('notebook.ipynb', 'lock', 'claim'):
        root = tmp_path/name
        store = R.Store(root, 'smoke')
        store.work(run).mkdir(parents=True)
        precious.write_text('mine')
        (store.claim(run) if name == 'claim' else store.work(run)/name).symlink_to(precious)
        o = D.execute(run, root)
        assert o.state == 'failed' and 'leads out of its folder' in o.why, (name, o)
        assert precious.read_text() == 'mine', (name, o)


def test_what_is_damaged_is_not_moved_through_a_link(whole, tmp_path):
    "The folder for what is set aside leads elsewhere: nothing is moved there"
    root, run, elsewhere = shutil.copytree(whole, tmp_path/'results'), family()[0], tmp_path/'elsewhere'
    elsewhere.mkdir()
    store = R.Store(root, 'smoke')
    store.done(run).mkdir()
    (store.folder/'.corrupt').symlink_to(elsewhere)
    o = D.execute(run, root)
    assert o.state == 'failed' and 'leads out of its folder' in o.why and not list(elsewhere.iterdir()), o


# -- batches

def test_a_report_cannot_end_a_batch(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed[0], tmp_path/'results')
    runs = family()
    for r in runs[1:]: shutil.rmtree(tmp_path/'results'/'smoke'/r.id)
    def report(batch): raise KeyError('metrics')
    batch = D.run_batch(runs, tmp_path/'results', workers=1, live=False, on_change=report)
    assert {o.state for o in batch.outcomes.values()} == {'done'}
    assert capsys.readouterr().out.count('the report could not be written (KeyError') == 1


SCRIPT = '''
import sys
print('the script runs', flush=True)
sys.path.insert(0, sys.argv[1])
from tests.reproduce.test_runs import family
from repq.reproduce.driver import run_batch
batch = run_batch(family()[:1], sys.argv[2], workers=1, live=False)
print([o.state for o in batch.outcomes.values()])
'''

def test_a_script_without_main_guard(tmp_path):
    "The script is not run again inside the kernels"
    (tmp_path/'script.py').write_text(SCRIPT)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, str(tmp_path/'script.py'), str(ROOT), str(tmp_path/'results')],
                          env=env, capture_output=True, text=True, timeout=300)
    assert "['done']" in done.stdout and (done.stdout + done.stderr).count('the script runs') == 1, done


def killed(root, times):
    "A batch whose kernel is killed so many times, each time after an epoch"
    driver, store, run, pids = start(root, runs=long_family), R.Store(root, 'smoke'), long_family()[0], []
    for _ in range(times):
        def kernel():
            pid = R.read_progress(store.work(run)).get('pid')
            new = pid and pid not in pids and (store.work(run)/'checkpoint.safetensors').exists()
            return pid if new else None
        wait_for(kernel, what='a kernel')
        pids.append(kernel())
        os.kill(pids[-1], signal.SIGKILL)
    out = driver.communicate(timeout=300)[0]
    return driver.returncode, out, store.look(run)


def test_a_killed_kernel_is_tried_again(tmp_path):
    status, out, found = killed(tmp_path/'results', 1)
    assert status == 0 and found.state == 'done' and 'its kernel died and was started again' in out
    assert found.record['time']['sessions'] == 2
    assert [s['first'] for s in found.record['segments']][0] == 0 and len(found.record['segments']) == 2


def test_a_kernel_that_dies_thrice_is_reported(tmp_path):
    status, out, found = killed(tmp_path/'results', 3)
    assert status == 1 and found.state == 'failed' and 'Kernel died' in found.why
    assert 'tried 3 times' in found.why


# -- weights, checkpoints, rates

def test_children_of_altered_weights_are_refused(undisturbed, tmp_path):
    "Altered between the look of the driver and the load of the notebook: the load itself looks"
    from repq.reproduce.training import full_precision_network, load_parent
    parent = tmp_path/family()[0].id
    shutil.copytree(undisturbed[0]/'smoke'/family()[0].id, parent)
    net = full_precision_network('ecbsr', 'plain', blocks=4, channels=8, scale=2)
    load_parent(net, parent)
    data = bytearray((parent/WEIGHTS).read_bytes())
    data[-3] ^= 1
    (parent/WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match='its hash is not the one in the record'): load_parent(net, parent)


def trained(folder, epochs=2, **kwargs):
    import torch
    import torch.nn.functional as F
    from fastai.metrics import accuracy
    from repq.data import digits_dls
    from repq.reproduce.training import Workspace, fit, full_precision_network
    torch.manual_seed(0)
    net = full_precision_network('repvgg_a0', 'repvgg', 'batch', width=1/8, depth=1/4, small_input=True,
                                 in_channels=1, n_classes=10)
    with Workspace(folder) as work:
        return fit(net, digits_dls(), F.cross_entropy, accuracy, work, epochs, kwargs.pop('lr', .05),
                   **kwargs)


def test_a_damaged_checkpoint_is_set_aside(tmp_path, capsys):
    "A flipped bit: named, kept, and the training starts again and ends as if nothing had been"
    whole = trained(None)
    trained(tmp_path, max_steps=30)
    path = tmp_path/'checkpoint.safetensors'
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    again = trained(tmp_path)
    assert again.history == whole.history and again.losses == whole.losses and len(again.losses) == 5
    assert again.sessions == 1
    assert 'starting again: the checkpoint could not be used' in capsys.readouterr().out
    assert len(list((tmp_path/'.corrupt').iterdir())) == 1


@pytest.mark.parametrize('what', ['processor', 'torch', 'ready', 'compiler'])
def test_on_another_machine_a_training_starts_again(tmp_path, monkeypatch, capsys, what):
    from repq.reproduce import training
    trained(tmp_path, max_steps=30)
    there = training.origin
    other = dict(name='another', instructions='0') if what == 'processor' else 'another'
    monkeypatch.setattr(training, 'origin', lambda work: there(work) | {what: other})
    again = trained(tmp_path)
    assert again.sessions == 1 and len(again.history) == 2 and len(again.segments) == 1
    assert again.segments[0]['first'] == 0
    assert 'starting again: ' in capsys.readouterr().out and 'another' in again.restarts[0]


def test_the_compiler_behind_a_path(monkeypatch):
    "Another compiler, or other options, round differently: the path of compiled C names it, without folders"
    from repq.tools.registry import ready_path
    def compiler_of(path): return ready_path(path)[1]
    pytest.importorskip('repq.fast.native')
    if not shutil.which('cc'): pytest.skip('needs a C compiler')
    monkeypatch.setenv('CC', shutil.which('cc'))
    plain = compiler_of('fused')
    monkeypatch.setenv('CC', 'cc -ffp-contract=off')
    assert plain and '/' not in plain and compiler_of('fused').endswith(' -ffp-contract=off')
    assert compiler_of('fused') != plain
    assert compiler_of('simple') == compiler_of('both') == ''


RATES = [dict(lr=0), dict(lr=-.1), dict(lr=float('nan')), dict(lr=.1, step_lr=0., bits=8), dict(lr=0, bits=4)]

@pytest.mark.parametrize('rates', RATES)
def test_rates_that_train_nothing(rates):
    with pytest.raises(ValueError, match='lr must be a number above 0, got'): trained(None, **rates)


def hopeless(run, **changes):
    "A short training with far too high a learning rate; without a limit on its steps, so it is judged"
    parent = hopeless(run.parent, **changes) if run.parent else None
    return replace(run, parent=parent,
                   settings=run.settings | dict(lr=1., schedule='constant', epochs=1) | changes)


def test_a_collapse_is_no_result(tmp_path, capsys):
    "A run with finite numbers is collapsed, with the reason; its child is skipped, no table has its number"
    child = hopeless(R.super_resolution('smoke', 0, 'plain', 8), steps_per_epoch=6, batch_size=4)
    batch = D.run_batch([child.parent, child], tmp_path, workers=1, live=False)
    parent = batch.outcomes[child.parent.id]
    assert parent.state == 'collapsed' and 'dB at its end, more than 1 dB below bicubic' in parent.why, parent
    assert batch.outcomes[child.id].state == 'skipped' and 'collapsed' in batch.outcomes[child.id].why
    record = read_record(R.Store(tmp_path).done(child.parent))
    assert 3 < sum(record['metrics']['psnr'].values())/4 < 8 and record['probe']['losses']
    assert D.execute(child.parent, tmp_path).why == 'was there already'
    write_run(tmp_path/'tables', run := R.super_resolution('smoke', 0, 'fp', block='ecb'), record['metrics'])
    assert main(['tables', '--table', '3', '--results', str(tmp_path/'tables')]) == 0
    assert 'collapsed' in capsys.readouterr().out
    assert main(['status', '--results', str(tmp_path/'tables')]) == 0
    assert f'collapsed    {run.id}' in capsys.readouterr().out


# -- records computed again

def test_a_record_names_the_path_that_was_taken(tmp_path, monkeypatch, capsys):
    "C was asked for, and there is no compiler: the record says simple; verify, with one, compares closely"
    test_runs.need_c()
    parent, child = R.limited(classifiers(), 3)
    with monkeypatch.context() as m:
        m.setenv('CC', 'false')
        m.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
        assert [D.execute(r, tmp_path).state for r in (parent, child)] == ['done', 'done']
    record = read_record(R.Store(tmp_path).done(child))
    assert record['spec']['settings']['path'] == record['path']['asked'] == 'fused'
    assert record['path']['taken']['simple'] > 0 and not record['path']['taken']['fused']
    assert [(s['path'], s['ready'], s['compiler']) for s in record['segments']] == [('simple', 'simple', '')]
    assert main(['verify', '--results', str(tmp_path), '--id', '4bit']) == 0
    assert '3 losses close (the path of execution was simple, and is fused)' in capsys.readouterr().out


def test_verify_takes_the_path_of_the_run(undisturbed, monkeypatch):
    "After many records torch.compile would pay off, and round differently: the recorded path is taken"
    quantizer = pytest.importorskip('repq.fast.quantizer')   # the path that must not be taken
    from repq.reproduce import verify
    folder = R.Store(undisturbed[0]).done(family()[1])
    record, modes = read_record(folder), []
    monkeypatch.setattr(quantizer.FORMULAS, 'after', 0)
    whole = quantizer.Programs.pays
    monkeypatch.setattr(quantizer.Programs, 'pays', lambda *args: modes.append(whole(*args)) or modes[-1])
    metrics = verify.metrics_again(folder, record, records.from_words(record['spec']))
    assert metrics == record['probe']['metrics']
    assert modes and not any(modes), 'the compiled path was taken'


def test_verify(undisturbed, tmp_path, capsys):
    "A batch leaves what this code gives; what was changed, with a seal that fits, is found and named"
    root = tmp_path/'results'
    shutil.copytree(undisturbed[0], root)
    assert main(['verify', '--results', str(root)]) == 0
    out = capsys.readouterr().out
    assert '3 records: 3 done, 0 differs, 0 unverified' in out
    assert out.count('5 losses equal; psnr equal') == 3
    parent, child, other = (root/'smoke'/r.id for r in family())
    def change(folder, f):
        record = json.loads((folder/'record.json').read_text())
        f(record)
        write_json(folder/'record.json', seal(record))
    change(child, lambda r: r['probe']['losses'].__setitem__(2, (0.125).hex()))
    change(other, lambda r: r['probe']['metrics'].update(psnr=(40.).hex()))
    assert main(['verify', '--results', str(root)]) == 1
    out = capsys.readouterr().out
    assert 'the loss of step 3 was 0.125, and is' in out
    assert 'psnr of the stored weights was 40.0, and is' in out and '1 done, 2 differs, 0 unverified' in out
    assert main(['verify', '--results', str(root), '--id', family()[0].id]) == 0
    assert '1 records: 1 done' in capsys.readouterr().out
    (parent/'notebook.ipynb').write_text('{}')
    assert main(['verify', '--results', str(root), '--id', 'fp']) == 1
    assert 'corrupt: notebook.ipynb is not the file' in capsys.readouterr().out
    assert main(['verify', '--results', str(root), '--id', 'nonsense']) == 1
    assert "has 'nonsense' in its name" in capsys.readouterr().err


def test_verify_elsewhere(undisturbed, tmp_path, capsys):
    "Made on another processor: close is enough, far is not; without the parent only the metric is left"
    from repq.reproduce.verify import TOLERANCE
    root = tmp_path/'results'
    full, quantized = (TOLERANCE[k].limit for k in ('losses in full precision', 'losses, quantized'))
    shutil.copytree(undisturbed[0], root)
    parent, child, other = (root/'smoke'/r.id for r in family())
    def change(folder, factor):
        record = read_record(undisturbed[0]/'smoke'/folder.name)
        for s in record['segments']: s['processor']['name'] = 'another'
        record['probe']['losses'] = [(factor*float.fromhex(x)).hex() for x in record['probe']['losses']]
        write_json(folder/'record.json', seal(record))
    change(parent, 1 + .9*full)
    change(child, 1 + .9*quantized)
    change(other, 1 + 2*quantized)
    assert main(['verify', '--results', str(root)]) == 1
    out = capsys.readouterr().out
    assert 'close (the processor was another' in out and f'at most {quantized:g} is allowed' in out
    assert '2 done, 1 differs' in out
    change(parent, 1 + 2*full)
    assert 2*full < quantized and main(['verify', '--results', str(root), '--id', parent.name]) == 1
    assert f'at most {full:g} is allowed' in capsys.readouterr().out, 'full precision moves less'
    shutil.rmtree(parent)
    assert main(['verify', '--results', str(root), '--id', child.name]) == 0
    assert 'psnr close' in (out := capsys.readouterr().out)
    assert f'not checked: its parent {parent.name} is not there' in out


def smoke_runs(slow):
    "One RepVGG and one ECBSR with their parents; with --slow all"
    return [r for r in R.graph(R.cells('smoke')) if r.task != 'time'] if slow else reference.chosen_runs()


def test_smoke_runs_twice(tmp_path, request):
    "From first to last step, in two batches: equal to the bit, none has collapsed, all end as the reference"
    runs = smoke_runs(request.config.getoption('--slow'))
    found = []
    for name in ('one', 'two'):
        batch = D.run_batch(runs, tmp_path/name, workers=2, live=False)
        wrong = [o for o in batch.outcomes.values() if o.state != 'done']
        assert not wrong and len(batch.outcomes) == len(runs), wrong
        found.append({r.id: read_record(tmp_path/name/'smoke'/r.id, weights=True) for r in runs})
    for id, record in found[0].items():
        for k in ('metrics', 'history', 'weights', 'probe', 'spec', 'path'):
            assert record[k] == found[1][id][k], (id, k)
    if not request.config.getoption('--slow'): assert main(['verify', '--results', str(tmp_path/'one')]) == 0
    kept = read_json(reference.FILE)
    wrong = [m for r in reference.chosen_runs() if (m := reference.moved(kept, r.label, found[0][r.id]))]
    assert not wrong, wrong[0]


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
def test_an_end_that_moved_is_noticed(where):
    "A last loss that differs in its last bit where the reference was made, a metric that is far off"
    kept = read_json(reference.FILE)
    assert kept['method'] == records.METHOD, reference.__doc__
    for r in reference.chosen_runs():
        end = kept['ends'][r.label]
        name = 'accuracy' if 'accuracy' in end else 'psnr'
        segment = end['segment'] | (dict(torch='another') if where == 'elsewhere' else {})
        def said(loss=0., metric=0.):
            moved = end[name] + metric
            if name == 'psnr': moved = dict.fromkeys('abcd', moved)   # of four test sets
            history = [dict(train_loss=end['train_loss']*(1 + loss), valid_loss=end['valid_loss'])]
            record = dict(id=end['id'], segments=[segment], metrics={name: moved}, history=history)
            return reference.moved(kept, r.label, record)
        limit = reference.near(kept, name)
        assert 0 < limit < dict(accuracy=.15, psnr=1.)[name] and said() == ''
        assert bool(said(loss=1e-15)) == bool(said(metric=limit/2)) == (where == 'here')
        assert f'{name} of {r.label}' in said(metric=-2*limit)


ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

def test_killed_at_random_moments(undisturbed, tmp_path, request):
    "Whenever and however a driver is ended, the next one ends as if nothing had happened; --slow: 20 moments"
    r, n, hit = random.Random(0), 20 if request.config.getoption('--slow') else 1, Counter()
    for i in range(n):
        (tmp_path/str(i)).mkdir()
        root, how = tmp_path/str(i)/'results', r.choice(ENDS)
        driver = start(root)
        time.sleep(undisturbed[2]*r.random())
        hit[how.name] += driver.poll() is None
        driver.send_signal(how)
        driver.wait(600)
        again = start(root)
        out = again.communicate(timeout=600)[0]
        assert again.returncode == 0 and results(root) == undisturbed[1], (how, out)
    assert hit.total() >= n//2, 'most had ended before they were to be killed'
    PROVEN['drivers ended at random moments'] = f'{n}, of them while at work {dict(hit)}'
