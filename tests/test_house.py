"The house: every room imports what its row of the table in CONTRIBUTING.md allows, and nothing else"
import ast, re, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = {'all': set()}


def rows():
    "room -> what its row says that it may import"
    table = re.findall(r'^\| `(\w+)` \| .* \| ([^|]+) \|$', (ROOT/'CONTRIBUTING.md').read_text(), re.M)
    return {room: words.strip() for room, words in table}


def allowed():
    "room -> rooms that it may import, with what those may"
    table, found = rows(), {}
    def reach(room):
        if room not in found:
            words = table[room]
            if words.startswith('all'): own = set(table) - {room} - set(re.findall(r'\w+', words)[1:])
            else: own = {w for w in re.findall(r'\w+', words) if w in table}
            found[room] = {room} | own | (set() if words.startswith('all') else set().union(*map(reach, own)))
        return found[room]
    for room in table: reach(room)
    return found


def imports(path):
    "rooms that a module imports, at any depth of its code"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == 1 or not node.level and not (node.module or '').startswith('repq'): continue
            parts = (node.module or '').removeprefix('repq').lstrip('.').split('.')
            yield from [parts[0]] if parts[0] else [a.name for a in node.names]
        if isinstance(node, ast.Import): yield from (a.name.split('.')[1] for a in node.names if a.name.startswith('repq.'))


def test_the_table_is_that_of_the_folders():
    folders = {p.name for p in (ROOT/'repq').iterdir() if (p/'__init__.py').exists()}
    assert set(rows()) == folders
    notebooks = {p.name for p in (ROOT/'nbs').iterdir() if p.is_dir() and list(p.glob('[0-9]*_*.ipynb'))}
    assert notebooks == folders
    assert {p.name for p in (ROOT/'tests').iterdir() if list(p.glob('test_*.py'))} <= folders


@pytest.mark.parametrize('room', rows())
def test_imports_follow_the_table(room):
    may, wrong = allowed()[room], []
    for path in sorted((ROOT/'repq'/room).rglob('*.py')):
        wrong += [f'{path.relative_to(ROOT)} imports {r}' for r in imports(path) if r in rows() and r not in may]
    assert not wrong, f'{room} may import {", ".join(sorted(may))}: {wrong}'


def test_imports_are_seen(tmp_path):
    "The reader of imports finds each form"
    (tmp_path/'a.py').write_text('from ..algebra.kernel import x\nfrom .lsq import y\ndef f():\n  from repq.models import z\n  import repq.fast.c\n'
                                 'from repq import deploy\n')
    assert list(imports(tmp_path/'a.py')) == ['algebra', 'deploy', 'models', 'fast'] or set(imports(tmp_path/'a.py')) == {'algebra', 'deploy', 'models', 'fast'}
    assert {'algebra', 'tools'} <= allowed()['models'] and 'models' not in allowed()['quantization']


def test_no_room_has_the_name_of_a_function():
    "Importing every module leaves every public name what it was"
    code = '''
import repq, pkgutil, importlib
before = {n: getattr(repq, n) for n in repq.__all__}
for m in pkgutil.walk_packages(repq.__path__, 'repq.'):
    if m.name.endswith('__main__') or m.name.startswith('repq.experiments'): continue
    importlib.import_module(m.name)
wrong = [n for n, v in before.items() if getattr(repq, n) is not v]
rooms = [m for m in repq.__path__]
for room in repq._rooms:
    package = getattr(repq, room)
    for name in package.__all__:
        module = f'repq.{room}.{name}'
        import sys
        if module in sys.modules and getattr(package, name) is not sys.modules[module]: wrong.append(module)
print(wrong)
assert not wrong, wrong
'''
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_notebooks_of_a_room_are_numbered_in_reading_order():
    for room in rows():
        numbers = sorted(int(p.name.split('_')[0]) for p in (ROOT/'nbs'/room).glob('*.ipynb'))
        assert numbers == list(range(1, len(numbers) + 1)), room
