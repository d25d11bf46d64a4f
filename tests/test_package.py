"The package as a whole: notebooks make the modules, imports go one way, little is loaded"
import ast, filecmp, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT/'nbs').glob('[0-9][0-9]_*.ipynb'))
MODULES = {nb.stem[3:]: i for i, nb in enumerate(NOTEBOOKS)}   # module -> place in the order of names


def test_notebooks_and_modules_agree(tmp_path):
    "Exporting again, from clean notebooks, gives the modules as they are, and no module without a notebook"
    for name in ('nbs', 'repq', 'settings.ini', '_quarto.yml'):
        src = ROOT/name
        (shutil.copytree if src.is_dir() else shutil.copy)(src, tmp_path/name, **(dict(symlinks=True) if src.is_dir() else {}))
    for f in (tmp_path/'repq').glob('*.py'):
        if f.name != '__init__.py': f.unlink()
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    for command in ('nbdev_clean', 'nbdev_export'):
        subprocess.run([Path(sys.executable).parent/command], cwd=tmp_path, env=env, check=True, capture_output=True)
    ours, fresh = ({f.name for f in (d/'repq').glob('*.py')} for d in (ROOT, tmp_path))
    assert ours == fresh, 'a module has no notebook, or a notebook was not exported: run make export'
    differ = [f for f in sorted(fresh) if not filecmp.cmp(ROOT/'repq'/f, tmp_path/'repq'/f, shallow=False)]
    assert not differ, f'modules differ from their notebooks: {differ}. Edit the notebook, then run make export'
    paths = [p.relative_to(ROOT) for p in (ROOT/'nbs').rglob('*.ipynb')]
    unclean = [str(p) for p in paths if (ROOT/p).read_bytes() != (tmp_path/p).read_bytes()]
    assert not unclean, f'notebooks are not clean: {unclean}. Run make export'


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or '').startswith('repq')):
            module = (node.module or '').removeprefix('repq').lstrip('.').split('.')[0]
            yield from [module] if module else [a.name for a in node.names]
        if isinstance(node, ast.Import): yield from (a.name.split('.')[1] for a in node.names if a.name.startswith('repq.'))


@pytest.mark.parametrize('module', MODULES)
def test_imports_go_one_way(module):
    for imported in imports_of(ROOT/'repq'/f'{module}.py'):
        assert MODULES[imported] < MODULES[module], f'{module} imports {imported}, which comes later'


def test_imports_are_seen():
    "The reader of imports above finds what is there"
    assert {'kernel', 'norm'} <= set(imports_of(ROOT/'repq'/'branch.py'))


def test_no_function_has_the_name_of_a_module():
    for module in MODULES:
        tree = ast.parse((ROOT/'repq'/f'{module}.py').read_text())
        names = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        assert not names & set(MODULES), f'{module} defines {names & set(MODULES)}'


def loaded_by(statement):
    code = f'import sys; {statement}; print(*sorted({{m.split(".")[0] for m in sys.modules}}))'
    return set(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


@pytest.mark.parametrize('module', ['testing', 'kernel', 'norm', 'branch', 'quantizer', 'weights', 'layer', 'blocks', 'models'])
def test_ground_floor_needs_torch_alone(module):
    extra = loaded_by(f'import repq.{module}') - loaded_by('import torch') - set(sys.stdlib_module_names)
    assert extra - {'fastcore'} == {'repq'} # fastcore for @patch, which imports nothing else


@pytest.mark.parametrize('module', ['files', 'runs', 'driver'])
def test_runs_and_their_driver_need_no_torch(module):
    "Asking how far a batch is takes no five seconds, and the driver's kernels alone pay for torch"
    extra = loaded_by(f'import repq.{module}') - loaded_by('pass') - set(sys.stdlib_module_names)
    assert extra == {'repq'}


def test_top_level_names():
    import repq
    for name in repq.__all__: assert getattr(repq, name) is not None
    with pytest.raises(AttributeError, match='repq has no .nonsense.'): repq.nonsense
    version = re.search(r'^version = (.*)$', (ROOT/'settings.ini').read_text(), re.M)[1]
    assert repq.__version__ == version


def test_notebooks_teach():
    "Each notebook has an H1, a > line, prose for its code and asserts"
    for nb in NOTEBOOKS:
        cells = json.loads(nb.read_text())['cells']
        first = ''.join(cells[0]['source'])
        assert re.match(r'# .+\n\n> .+', first), f'{nb.name} does not open with a title and a > line'
        code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
        exported = [c for c in code if c.startswith('#| export')]
        assert not [c for c in exported if len(c.splitlines()) > 55], nb.name
        assert sum(c['cell_type'] == 'markdown' for c in cells) >= len(exported), f'{nb.name}: more exported cells than prose'
        assert any(re.search(r'\bassert\b|assert_\w+\(', c) for c in code), f'{nb.name} asserts nothing'


def test_no_path_of_a_machine():
    "Nothing that was printed on one machine gives away its folders"
    for nb in (ROOT/'nbs').rglob('*.ipynb'):
        found = re.findall(r'/(?:home|root|work|Users)/[^"\\s]{0,60}', nb.read_text())
        assert not found, f'{nb.name}: {found[0]}'


def test_readme_comes_from_index():
    import readme
    assert (ROOT/'README.md').read_text() == readme.render(), 'README.md differs from nbs/index.ipynb: run make readme'
