"Bad command lines: one line that says what is wrong and what to do, status 1 or 2, no traceback"
import json, os, subprocess, sys
from pathlib import Path
import pytest
from conftest import PROVEN
from records import write_run
from repq.reproduce import runs as R

ROOT = Path(__file__).parents[2]
BATCH = ('reproduce', 'status', 'tables')
LONG = 'x'*5000

# words -> what the line must say; {file}, {run}, {fp}, {results}, {empty} are made below
CASES = [
    ([], 'COMMAND'), (['nonsense'], 'nonsense'), ([''], "''"), (['--nonsense'], 'COMMAND'),
    (['Reproduce'], 'reproduce'), (['bench'], 'WHAT'),
    (['env', 'more'], 'unrecognized arguments: more'),
    *(([c, '--profile', 'gigantic'], "'gigantic'") for c in (*BATCH, 'verify')),
    (['status', '--profile', ''], 'smoke'), (['status', '--profile'], 'expected one argument'),
    *((['reproduce', '--seeds', n], 'from 1 to 100')
      for n in ('0', '-1', '1e9', '1000000000', '9'*400, 'three', '', '1.5', '٣', 'nan')),
    *(([c, '--seeds', '101'], '101') for c in ('status', 'tables')),
    *(([c, '--table', '7'], "'7'") for c in BATCH), (['tables', '--table', ''], 'S1'),
    (['reproduce', '--table', 'side', '--results', '{empty}'], '--profile cpu'),
    *(([c, '--results', ''], 'is empty') for c in (*BATCH, 'verify')),
    *(([c, '--results', '{file}'], 'is a file') for c in (*BATCH, 'verify')),
    (['status', '--results', 'a\udcffb'], r'\udcff'), (['reproduce', '--results', LONG], '4,000'),
    (['reproduce', '--results', 'line\nbreak'], r'\n'),
    (['reproduce', '--results', '{file}/below', '--table', '3'], 'Not a directory'),
    (['tables', '--write', '--results', '{file}/below'], 'Not a directory'),
    *((['reproduce', '--workers', n], 'from 1 to 1,000') for n in ('0', '-2', 'many', '1000000')),
    *((['reproduce', '--steps', n], 'whole number') for n in ('0', '-5', '1e3', '9'*30)),
    (['reproduce', '--scheduler', ''], 'is empty'),
    (['reproduce', '--scheduler', 'somewhere', '--results', '{empty}'], 'tcp://host:8786'),
    (['reproduce', '--scheduler', 'tls://127.0.0.1:1', '--results', '{empty}'], 'certificates'),
    (['reproduce', '--scheduler', 'tcp://127.0.0.1:1', '--workers', '2'], 'give one of them'),
    (['tables', '--format', 'pdf'], "'pdf'"), (['tables', '--format'], 'expected one argument'),
    (['status', 'smoke'], 'unrecognized arguments: smoke'),
    (['verify', '--sample', '0'], "'0'"), (['verify', '--sample', '-3'], '-3'),
    (['verify', '--id', ''], 'is empty'),
    (['verify', '--id', 'nothing-like-it', '--results', '{results}'], 'nothing-like-it'),
    (['export'], 'source'), (['export', ''], 'is empty'), (['export', '{empty}/nothing'], 'there is no'),
    (['export', '{empty}'], 'record.json'), (['export', '{file}'], 'cannot be read as weights'),
    (['export', 'caf\udce9.safetensors'], r'\udce9'),
    (['export', '{run}', '--batches', '2'], '--check is missing'),
    (['export', '{run}', '--check', '--batches', '0'], "'0'"),
    (['export', '{run}', '--out', ''], 'is empty'), (['export', '{run}', '{run}'], 'unrecognized'),
    (['export', '{run}', '--check'], 'cannot be read as weights'),
    (['bench', 'nothing'], "'nothing'"), (['bench', 'quantizer', '--rounds', '0'], 'from 1 to 10,000'),
    (['bench', 'step', '--rounds', '1e9'], "'1e9'"), (['bench', 'step', '--rounds', '99999999'], '99999999'),
    (['bench', 'quantizer', '--shape', '65536', '65536'], 'too large'),
    (['bench', 'quantizer', '--shape', '0'], "'0'"),
    (['bench', 'quantizer', '--shape'], 'expected at least one'),
    (['bench', 'step', '--batch', '4096', '--size', '4096'], 'too large'),
    (['bench', 'memory', '--size', '99999999999'], '4,096'), (['bench', 'deploy', '--size', '5000'], '1,024'),
    (['bench', 'step', '--width', '0'], "'0'"), (['bench', 'step', '--width', 'nan'], 'nan'),
    (['bench', 'deploy', '--width', '1e9'], 'at most 4'), (['bench', 'step', '--width=-1'], '-1'),
    (['bench', 'step', '--block', 'nothing'], 'repvgg'),
    (['bench', 'step', '--model', 'alexnet'], "'alexnet'"),
    (['bench', 'growth', '--axis', 'depth'], "'depth'"),
    (['bench', 'step', '--layout', 'diagonal'], "'diagonal'"),
    (['bench', 'quantizer', '--out', '{file}'], 'is a file'), (['bench', 'all', '--out', ''], 'is empty'),
    (['bench', 'deploy', '--batch', '3'], 'unrecognized'),
]

RUN_ALL = '''
import contextlib, io, json, re, sys, traceback
from repq.cli.command import main
found = []
for words in json.loads(sys.stdin.buffer.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: status = main(words)
        except BaseException: status = traceback.format_exc()
    found.append((status, out.getvalue(), err.getvalue()))
# ru_maxrss would count the process that started this one
peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])
print(json.dumps(dict(found=found, memory=peak/2**20)))
'''


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "All of them in one process of their own"
    home = tmp_path_factory.mktemp('lines')
    for name in ('empty', 'results'): (home/name).mkdir()
    (home/'file').write_text('just a file')
    fp, child = R.super_resolution('smoke', 0, 'fp'), R.super_resolution('smoke', 0, 'repq', 8)
    places = {k: str(home/k) for k in ('empty', 'results', 'file')}
    places |= {k: str(write_run(home/'results', run)) for k, run in (('fp', fp), ('run', child))}
    def fill(word):
        for k, v in places.items(): word = word.replace('{' + k + '}', v)
        return word
    lines = [[fill(w) for w in words] for words, _ in CASES]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    p = subprocess.run([sys.executable, '-c', RUN_ALL], input=json.dumps(lines), capture_output=True,
                       text=True, env=env, cwd=home, timeout=600)
    assert p.returncode == 0, p.stderr
    return lines, json.loads(p.stdout.splitlines()[-1]), home


def name_of(i):
    words = ' '.join(CASES[i][0])[:50].encode('ascii', 'backslashreplace').decode()
    return words.replace('\n', ' ') or 'nothing'


@pytest.mark.parametrize('i', range(len(CASES)), ids=name_of)
def test_bad_command_line(ran, i):
    status, out, err = ran[1]['found'][i]
    assert status in (1, 2), (status, err)
    lines = err.splitlines()
    assert 'Traceback' not in out + err and len(lines) == 1 and lines[0].startswith('repq'), err
    assert CASES[i][1] in lines[0] and lines[0].isprintable() and len(lines[0]) < 2200, err
    assert 'See: repq' in lines[0] or status == 1 or lines[0].startswith('repq: '), err


def test_all_bad_command_lines(ran):
    "Their number, their memory, and that nothing was made on the way"
    lines, result, home = ran
    assert len({tuple(w) for w in lines}) == len(CASES) >= 70 and result['memory'] < 2
    assert not list((home/'empty').rglob('record.json'))
    assert {p.name for p in home.iterdir()} <= {'empty', 'results', 'file'}
    PROVEN['bad command lines'] = f'{len(lines)} refused in one line, {result["memory"]:.1f} GB at most'


@pytest.mark.parametrize('words', [
    ['reproduce', '--seeds', '1000000000'], ['status', '--results', b'caf\xe9'],
    ['export', b'\xff\xfe.safetensors'], ['tables', '--results', '/dev/null'],
    ['bench', 'step', '--width', '1e400']])
def test_as_processes(words, tmp_path):
    "As a shell would start them, with bytes that are no Unicode"
    p = subprocess.run([sys.executable, '-m', 'repq.cli', *words], capture_output=True, cwd=tmp_path,
                       env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert p.returncode in (1, 2) and p.stderr.count(b'\n') == 1, p
    assert b'Traceback' not in p.stderr and p.stderr.startswith(b'repq'), p


def test_a_full_disk(tmp_path):
    "Room for almost nothing: a line that says so, before anything is run"
    small = tmp_path/'small'
    small.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=4k,nr_inodes=3', 'tmpfs', str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('needs the right to mount a small file system')
    try:
        (small/'smoke').mkdir()
        (small/'full').write_bytes(bytes(4096))
        command = [sys.executable, '-m', 'repq.cli', 'reproduce', '--table', '3', '--results', str(small)]
        p = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300,
                           env={**os.environ, 'PYTHONPATH': str(ROOT)})
        assert p.returncode == 1 and p.stderr.count('\n') == 1, p
        assert 'No space left on device' in p.stderr and '--results' in p.stderr, p
    finally: subprocess.run(['umount', '-l', str(small)], check=True)
