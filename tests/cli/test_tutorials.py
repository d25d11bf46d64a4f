"README and tutorials as a newcomer uses them: every block executed, every command there"
import json, os, re, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit
import pytest, yaml
from repq.cli import page_checks as checks, pages, readme, site

ROOT, NBS = pages.ROOT, pages.NBS
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
TUTORIALS = site.sidebar()['Tutorials']


def cells_of(path): return json.loads(Path(path).read_text(encoding='utf-8'))['cells']
def source_of(cell): return ''.join(cell['source'])
def prose_of(path): return [source_of(c) for c in cells_of(path) if c['cell_type'] == 'markdown']


# -- README

def test_readme_is_up_to_date():
    "Tables are as they are in results/ now"
    made = readme.render(readme.made_again(cells_of(readme.INDEX)))
    assert made == (ROOT/'README.md').read_text(encoding='utf-8'), 'results/ has changed: run make readme'


def test_readme_has_what_it_must():
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    lead = text.split('> ')[1].split('\n', 2)[2].split('![')[0]
    assert len(re.findall(r'[.] (?=[A-Z*r])|[.]\n', lead)) == 3, 'what it is in three sentences'
    for words in ('pip install', 'CITATION.cff', 'nbs/images/repq.svg', '**Use it**', '**Understand it**',
                  '**Check it**', 'nbs/install.ipynb', 'nbs/reference.ipynb'): assert words in text
    assert text.index('pip install') < text.index('```python')


def test_readme_fits_two_screens():
    "A screen shows some 45 lines of about 110 characters"
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    shown = re.sub(r'\]\([^)]*\)', ']', text) # addresses are not seen
    lines = [1 + len(line)//110 for line in shown.splitlines()]
    assert sum(lines) <= 90, f'{sum(lines)} lines'
    assert shown.count('|:---|') <= 1, 'one table is enough'


def test_the_paper_is_read_closely():
    "Where it disagrees with itself is said in the tutorial that reproduces it"
    text = '\n'.join(prose_of(NBS/'tutorials/reproduce.ipynb'))
    assert 'Where the paper disagrees with itself' in text and '69.21' in text
    assert 'For whom, and for whom not' in '\n'.join(prose_of(readme.INDEX))


def python_blocks(text): return re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)


def test_readme_runs(tmp_path):
    "Every block, in order, by someone who has nothing but the package"
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    blocks = python_blocks(text)
    cells = [source_of(c) for c in cells_of(readme.INDEX) if c['cell_type'] == 'code']
    assert len(blocks) == len([c for c in cells if not c.startswith('#|')]) >= 1
    kinds = re.findall(r'^```(\S*)\n', text, re.M)
    assert set(kinds) <= {'python', 'sh', ''}, 'a block of code that nothing executes'
    done = subprocess.run([sys.executable, '-c', '\n'.join(blocks)], cwd=tmp_path, env=ENV,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'parity holds' in done.stdout and (tmp_path/'net.onnx').stat().st_size > 10_000


class FakeResults:
    "Two networks; one has more finished quantized runs"
    def __init__(self, values): self.cells, self.values = {('2', *a): None for a in values}, values
    def link(self, found): return found
    def measured(self, address):
        mean = self.values[address[1:]]
        found = {0: f'{address[1][1]}-{address[2]}/notebook.ipynb'}
        return SimpleNamespace(address=address, mean=mean, values={0: mean} if mean else {}, found=found)


def test_best_table_shows_what_is_finished(monkeypatch):
    monkeypatch.setattr('repq.reproduce.evidence.spread', lambda m, results: '0.40')
    net, other = ('Net', 'RepQ-BN'), ('Net', 'Merged')
    table = readme.best_table(FakeResults({(net, '32'): 80., (net, '4'): 77., (other, '4'): None}), 'r/')
    assert table.splitlines()[0] == '| network | method | full precision | 4 bits |'
    assert '| Net | RepQ-BN | [80.00 ± 0.40](r/RepQ-BN-32/notebook.ipynb) |' in table
    paper = readme.best_table(FakeResults({(('RepVGG-A0', 'RepQ-BN'), '4'): 77.}), '')
    assert '77.00 ± 0.40](RepQ-BN-4/notebook.ipynb) (70.31) |' in paper, 'the paper beside ours'
    assert 'Merged' not in table
    many = {((f'N{n}', f'm{i}'), '8'): 70. for n, count in ((1, 7), (2, 5)) for i in range(count)}
    rows = readme.best_table(FakeResults(many), '').splitlines()[2:]
    assert len(rows) == 7 and all('N1' in r for r in rows)
    assert 'yet' in readme.best_table(FakeResults({(net, '32'): 80.}), '')


def test_files_of_the_top_level_link_to_files():
    for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md'):
        for target in checks.links((ROOT/name).read_text(encoding='utf-8')):
            if pages.outside(target): continue
            assert (ROOT/unquote(urlsplit(target).path)).exists(), f'{name}: {target} leads nowhere'


# -- tutorials

@pytest.mark.parametrize('name', TUTORIALS)
def test_tutorials_say_what_they_are(name):
    "They open with what one learns, needs and waits for, and end with where to go next"
    prose = prose_of(NBS/name)
    for words in ('**You will learn**', '**You need**', '**Takes**'):
        assert words in prose[1], f'{name}: {words}'
    assert '../install.ipynb' in prose[1], f'{name} does not say how to install what it needs'
    last = prose[-1][prose[-1].rindex('## '):]
    assert last.startswith('## Where to go next\n') and len(checks.links(last)) >= 2, name


@pytest.mark.parametrize('name', TUTORIALS)
def test_tutorials_need_no_data(name):
    "They run on what the dependencies ship"
    code = '\n'.join(source_of(c) for c in cells_of(NBS/name) if c['cell_type'] == 'code')
    assert not re.search(r'find_data|cifar10_dls|REPQ_DATA', code), f'{name} needs data'


def test_tutorials_are_executed():
    "By `make notebooks`; cells that it skips are executed below"
    skip = re.search(r"--skip_folder_re '([^']*)'", (ROOT/'Makefile').read_text())[1].replace('$$', '$')
    assert not re.search(skip, 'tutorials') and re.search(skip, 'experiments')
    for name in TUTORIALS:
        cells = cells_of(NBS/name)
        code = [source_of(c) for c in cells if c['cell_type'] == 'code']
        skipped = any(re.search(r'skip_exec|#\|\s*notest', source_of(c)) for c in cells)
        assert not skipped, f'{name} is not executed'
        if any(re.match(r'#\| eval: false', c) for c in code):
            assert name in WHOLE, f'{name} has cells that nothing executes'
        assert any('assert' in c for c in code), f'{name} asserts nothing'
        blocks = [k for text in prose_of(NBS/name) for k in re.findall(r'^```(\S*)\n', text, re.M)][::2]
        assert set(blocks) <= {'sh', ''}, f'{name} has code in its prose that nothing executes'


WHOLE = ('tutorials/reproduce.ipynb', 'tutorials/cluster.ipynb')
PRINTED = ("Counter({'done': 11})", 'ecbsr-plain-plain-4bit-s0')

@pytest.mark.parametrize('name,printed', zip(WHOLE, PRINTED))
def test_the_whole_page_runs(name, printed, tmp_path):
    "With the cells that `make notebooks` skips because they start processes"
    pytest.importorskip('distributed')
    code = [source_of(c) for c in cells_of(NBS/name) if c['cell_type'] == 'code']
    assert any('eval: false' in c for c in code)
    script = tmp_path/'page.py'
    lines = ['    ' + line for c in code for line in c.splitlines()]
    script.write_text('if __name__ == "__main__":\n' + '\n'.join(lines))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env={**ENV, 'TMPDIR': str(tmp_path)},
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert printed in done.stdout
    left = []
    for p in Path('/proc').glob('[0-9]*/cmdline'):
        command = read_or_nothing(p)
        if str(tmp_path).encode() in command and b'distributed.cli' in command: left.append(p.parent.name)
    assert not left, f'the page has left processes {left}'


def read_or_nothing(path):
    "A file that may be gone"
    try: return path.read_bytes()
    except OSError: return b''


# -- commands, citation

def shell_lines():
    "Commands in blocks marked sh: (file, words)"
    texts = {name: (ROOT/name).read_text(encoding='utf-8') for name in ('README.md', 'CONTRIBUTING.md')}
    texts |= {p.name: '\n\n'.join(prose_of(p)) for p in NBS.rglob('*.ipynb')}
    for name, text in texts.items():
        for block in re.findall(r'^```sh\n(.*?)^```', text, re.M | re.S):
            for line in block.splitlines():
                words = line.split('#')[0].split()
                if words: yield name, words


def test_commands_exist(capsys):
    "Each `repq ...` is one that the command line takes, each `make ...` a target"
    from repq.cli.command import make_parser
    targets, seen = set(re.findall(r'^([a-z]+):', (ROOT/'Makefile').read_text(), re.M)), set()
    for name, words in shell_lines():
        if words[0] == 'make':
            assert {w for w in words[1:] if '=' not in w} <= targets, f'{name}: {" ".join(words)}'
        if words[0] == 'repq':
            try: make_parser().parse_args(words[1:])
            except SystemExit as e:
                assert not e.code, f'{name}: {" ".join(words)}: {capsys.readouterr().err}'
        seen.add(words[0])
    assert {'make', 'repq', 'dask', 'pip'} <= seen


def test_installation_is_from_a_clone():
    "repq is on no index: what a page tells to install is the folder itself, with extras that exist"
    extras = set(re.findall(r'^(\w+)_requirements', (ROOT/'settings.ini').read_text(), re.M))
    for name, words in shell_lines():
        if words[:2] != ['pip', 'install']: continue
        for word in words[2:]:
            assert not word.strip("'").startswith('repq'), f'{name}: {" ".join(words)}'
            named = re.search(r'^\'?\.\[([\w,]+)\]', word)
            if named: assert set(named[1].split(',')) <= extras, f'{name}: {word}'


def test_citation_and_changelog():
    version = re.search(r'^version = (.*)$', (ROOT/'settings.ini').read_text(), re.M)[1]
    citation = yaml.safe_load((ROOT/'CITATION.cff').read_text(encoding='utf-8'))
    assert str(citation['version']) == version
    assert citation['cff-version'] and citation['authors'] and citation['message']
    paper, = citation['references']
    assert paper['title'].startswith('RepQ: Generalizing') and len(paper['authors']) == 5
    assert f'## {version}' in (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')
