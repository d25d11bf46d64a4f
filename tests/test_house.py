"Rooms: each imports what its row in CONTRIBUTING.md allows, and has one name everywhere"
import ast, importlib.util, re, subprocess, sys
from pathlib import Path
import pytest
import repq

ROOT = Path(__file__).parent.parent


def table():
    "room -> what it may import, in the words of the table"
    text = (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8')
    return dict(re.findall(r'^\| `(\w+)` \|.*\| (.+) \|$', text, re.M))

ROOMS = table()


def allowed(room):
    "The rooms that a room may import: those of its row, and what they may"
    words = re.findall(r'\w+', ROOMS[room])
    if words[:1] == ['all']: return set(ROOMS) - set(words)   # all, or all but some
    named = set(words) & set(ROOMS)
    return named.union(*map(allowed, named))


def order():
    "module -> (room, number of its notebook)"
    found = {}
    for path in (ROOT/'nbs').glob('*/[0-9]*_*.ipynb'):
        number, module = path.stem.split('_', 1)
        found[f'{path.parent.name}.{module}'] = path.parent.name, int(number)
    return found

ORDER = order()


def homes(name):
    "Room and module of a dotted name below repq: algebra.kernel.Kernel, or merge, which the package shows"
    parts = dict(blocks='models.blocks', data='train').get(name, repq._home.get(name, name)).split('.')
    return (parts[0], '.'.join(parts[:2])) if parts[0] in ROOMS else (None, None)


def imported(path, package):
    "Dotted names below repq that a file imports, or reads as attributes of repq, anywhere in its code"
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        names = []
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name('.'*node.level + (node.module or ''), package)
            names = [f'{base}.{a.name}' for a in node.names]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f'{node.value.id}.{node.attr}']
        yield from (n.removeprefix('repq.') for n in names if n.startswith('repq.'))


def files(room): return sorted((ROOT/'repq'/room).glob('*.py'))


def test_one_name_for_a_room():
    "The table, sub-packages, folders of notebooks and folders of tests agree"
    packages = {p.parent.name for p in (ROOT/'repq').glob('*/__init__.py')}
    assert packages == set(ROOMS) == set(repq._rooms)
    assert {room for room, _ in ORDER.values()} == packages
    assert {p.parent.name for p in (ROOT/'tests').glob('*/test_*.py')} == packages


def test_notebooks_of_a_room_are_numbered_from_one():
    for room in ROOMS:
        numbers = sorted(number for r, number in ORDER.values() if r == room)
        assert numbers == list(range(1, len(numbers) + 1)), room


@pytest.mark.parametrize('room', ROOMS)
def test_imports_follow_the_table(room):
    wrong = []
    for path in files(room):
        module = f'{room}.{path.stem}'
        rooms = {homes(name)[0] for name in imported(path, f'repq.{room}')} - {None, room} - allowed(room)
        wrong += [f'{module} imports {r}' for r in sorted(rooms)]
    assert not wrong, f'{room} may import {", ".join(sorted(allowed(room))) or "no other room"}: {wrong}'


@pytest.mark.parametrize('room', ROOMS)
def test_imports_inside_a_room_go_to_lower_numbers(room):
    for path in files(room):
        module = f'{room}.{path.stem}'
        for name in imported(path, f'repq.{room}'):
            other = homes(name)[1]
            if {module, other} <= set(ORDER) and ORDER[other][0] == room and other != module:
                assert ORDER[other][1] < ORDER[module][1], f'{module} imports {other}, which comes later'


def test_imports_are_seen(tmp_path):
    "Every form of import is found, and nothing else"
    file = tmp_path/'a.py'
    file.write_text('''
import torch.nn, repq
from .lsq import y
from ..algebra.kernel import x
from repq import deploy, merge, __version__
import repq.bench.cases
def f():
    from repq.models import z
    return repq.convert, repq.__version__, torch.algebra
''')
    found = {homes(name) for name in imported(file, 'repq.quantization')}
    modules = 'quantization.lsq algebra.kernel deploy quantization.network bench.cases models.z adopt.foreign'
    assert found == {(None, None), *((m.split('.')[0], m) for m in modules.split())}


def test_the_table_is_read():
    assert allowed('tools') == set() and allowed('algebra') == {'tools'}
    assert allowed('models') == {'tools', 'algebra', 'quantization'} and allowed('cli') == set(ROOMS)
    assert 'bench' not in allowed('reproduce') and 'models' not in allowed('deploy')


def test_no_room_or_module_takes_the_place_of_a_name():
    "Importing every module changes no public name, neither of the package nor of a room"
    code = '''
import importlib, pkgutil, repq
packages = [repq, *(getattr(repq, room) for room in repq._rooms)]
before = {(p, name): getattr(p, name) for p in packages for name in p.__all__}
for module in pkgutil.walk_packages(repq.__path__, 'repq.'):
    if not module.name.endswith('__main__'): importlib.import_module(module.name)
changed = [f'{p.__name__}.{name}' for (p, name), value in before.items() if getattr(p, name) is not value]
assert not changed, changed
print(len(before))
'''
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 80
