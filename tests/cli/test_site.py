"The site, as far as it can be checked without Quarto; README and tutorials, executed"
import ast, importlib, json, os, re, shutil, subprocess, sys
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote, urlsplit
import pytest, yaml
import records, repq
from repq.cli import readme, site as docs

ROOT, NBS = docs.ROOT, docs.NBS
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
SIDEBAR = docs.sidebar()
TUTORIALS = SIDEBAR['Tutorials']


def cells_of(path): return json.loads(Path(path).read_text(encoding='utf-8'))['cells']
def source_of(cell): return ''.join(cell['source'])


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "What Quarto gets: (folder, {name: page})"
    folder = tmp_path_factory.mktemp('site')/'_proc'
    return folder, docs.build(folder)


# -- the sidebar, and what a page must have

def test_sidebar_has_all_pages_in_groups():
    assert list(SIDEBAR) == ['Start', 'Learn', 'Tutorials', 'Results', 'Reference', 'Development']
    listed, there = docs.pages(), [p.relative_to(NBS).as_posix() for p in NBS.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    assert len(listed) == len(set(listed)), 'a page is in the sidebar twice'
    assert set(listed) - set(docs.TOP) == set(there), f'notebooks and the sidebar of _quarto.yml differ: {set(listed) ^ set(there)}'
    assert SIDEBAR['Start'][0] == 'index.ipynb' and {'own_block', 'reproduce', 'cluster', 'digits', 'classify', 'super_resolution', 'timm_to_int8'} <= {Path(p).stem for p in TUTORIALS}


def test_sections_are_rooms():
    "Learn and Development have a section for each room, with its notebooks in the order of their numbers"
    rooms = docs.rooms()
    assert set(rooms) == set(repq._rooms)
    for room, listed in rooms.items():
        numbered = sorted((NBS/room).glob('*.ipynb'), key=lambda p: int(p.name.split('_')[0]))
        assert listed == [p.relative_to(NBS).as_posix() for p in numbered], room
    first, *rooms = SIDEBAR['Learn']
    assert first == 'thirty_lines.ipynb', 'Learn begins with the algorithm itself'
    learn = [p.split('/')[0] for p in rooms]
    assert list(dict.fromkeys(learn)) == ['algebra', 'quantization', 'models', 'adopt', 'train', 'deploy']


def test_every_page_is_rendered_and_nothing_else():
    patterns = docs.config()['project']['render']
    def matches(name): return [p for p in patterns if fnmatch(name, p) and name.count('/') == p.count('/')]
    assert [n for n in docs.pages() if len(matches(n)) != 1] == []
    used = {p for n in docs.pages() for p in matches(n)}
    assert used == set(patterns), f'nothing is rendered by {set(patterns) - used}'


def test_front_matter(site):
    folder, made = site
    addresses = {}
    for name, page in made.items():
        front = docs.front_matter(page)
        assert front.get('title') and front.get('output-file', '').endswith('.html'), f'{name}: {front}'
        if name not in docs.TOP: assert front.get('description'), f'{name} has no > line'
        address = (Path(name).parent/front['output-file']).as_posix()
        assert addresses.setdefault(address, name) == name, f'{name} and {addresses[address]} would both become {address}'
    assert 'index.html' in addresses


def test_title_cells_hold_nothing_else():
    "nbdev makes front matter of the whole first cell: prose in it would not be on the site"
    for name in docs.pages():
        if name in docs.TOP: continue
        first = source_of(cells_of(NBS/name)[0])
        assert re.fullmatch(r'# [^\n]+\n\n> [^\n]+\n?', first), f'{name}: the first cell must hold the title and one > line, and nothing else'


def test_pages_have_prose(site):
    "No page is only signatures"
    for name, page in site[1].items():
        if name in docs.TOP: continue
        prose = ' '.join(source_of(c) for c in cells_of(NBS/name)[1:] if c['cell_type'] == 'markdown')
        words = len(docs.without_code(prose).split())
        assert words >= (20 if name.startswith('experiments') else 60), f'{name} has {words} words of prose'


def test_learning_has_pictures(site):
    for name in SIDEBAR['Learn']:
        kinds = {k for c in site[1][name]['cells'] for o in c.get('outputs', ()) for k in o.get('data', {})}
        assert kinds & {'image/png', 'image/svg+xml', 'image/jpeg'}, f'{name} has no stored picture: run it, and store its outputs'


def test_exports_are_shown(site):
    "Signatures with comments on arguments, and the source; nothing is executed for it"
    text = '\n'.join(docs.markdown_of(site[1]['quantization/2_layer.ipynb']))
    assert '### RepConv2d\n' in text and '#### RepConv2d.kernel\n' in text and 'int or pair, applied at the end of the expression' in text
    code = [c['source'] for c in site[1]['algebra/1_kernel.ipynb']['cells'] if c['cell_type'] == 'code']
    assert any('code-fold:' in c and 'def compose(' in c for c in code) and not any('#| export' in c for c in code)
    with_output = [c for c in cells_of(NBS/'quantization/2_layer.ipynb') if c.get('outputs')]
    assert sum(bool(c.get('outputs')) for c in site[1]['quantization/2_layer.ipynb']['cells']) == len(with_output)


def test_pages_that_are_made_anew_store_nothing():
    "What they would store is out of date at the next change"
    for name in docs.LIVE: assert not any(c.get('outputs') for c in cells_of(NBS/name)), f'{name}: clear its outputs, the site makes them'


def test_pages_are_notebooks(site):
    "As Quarto expects them: of format 4, with plain cells"
    import nbformat
    for name in site[1]:
        if name.endswith('.ipynb'): nbformat.validate(json.loads((site[0]/name).read_text(encoding='utf-8')))


# -- links

def link_errors(folder, made):
    "Links of processed pages that lead nowhere"
    address = {(Path(n).parent/docs.front_matter(p)['output-file']).as_posix(): n for n, p in made.items()}
    places, errors = {n: docs.anchors(p) for n, p in made.items()}, []
    for name, page in made.items():
        for target in dict.fromkeys(t for text in docs.markdown_of(page) for t in docs.links(text)):
            if docs.outside(target): continue
            part = urlsplit(target)
            path = os.path.normpath(Path(name).parent/unquote(part.path)).replace(os.sep, '/') if part.path else name
            path = address.get(path, path)
            if not (folder/path).is_file(): errors.append(f'{name}: {target} leads nowhere')
            elif part.fragment and path in places and unquote(part.fragment) not in places[path]: errors.append(f'{name}: {target} has no such place')
    return errors


def test_links_and_images(site):
    errors = link_errors(*site)
    assert not errors, '\n'.join(errors)
    found = [t for p in site[1].values() for text in docs.markdown_of(p) for t in docs.links(text)]
    assert len(found) > 300 and 'images/repq.svg' in found and any('#' in t for t in found)


def test_wrong_links_are_found(site, tmp_path):
    folder, made = site
    page = {'cells': [made['index.ipynb']['cells'][0], dict(cell_type='markdown', metadata={}, source='[a](nowhere.ipynb) [b](algebra/1_kernel.ipynb#nowhere) ![c](images/no.png) [d](algebra/1_kernel.ipynb#compose) [e](https://x.y) `[f](no)` <a href="no.html">g</a>')]}
    assert len(link_errors(folder, {**made, 'index.ipynb': page})) >= 4
    own = [e for e in link_errors(folder, {**made, 'index.ipynb': page}) if e.startswith('index.ipynb')]
    assert len(own) == 4 and not any('compose' in e for e in own)


def test_files_of_the_top_level_link_to_files():
    for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md'):
        for target in docs.links((ROOT/name).read_text(encoding='utf-8')):
            if not docs.outside(target): assert (ROOT/unquote(urlsplit(target).path)).exists(), f'{name}: {target} leads nowhere'


# -- mathematics

def test_equations(site):
    n = 0
    for name, page in site[1].items():
        for text in docs.markdown_of(page):
            for e in docs.equations(text):
                n += 1
                assert not docs.unbalanced(e), f'{name}: {docs.unbalanced(e)} in {e}'
            assert not docs.stray_dollars(text), f'{name}: a $ that belongs to no equation in {text[:200]!r}'
    assert n > 150


@pytest.mark.parametrize('tex', [r'\frac{1}{2', r'a}', r'\left( x', r'\begin{pmatrix} 1', r'\begin{a} \end{b}'])
def test_wrong_equations_are_found(tex): assert docs.unbalanced(tex)


def test_equations_are_seen():
    assert docs.equations(r'$a_1$ costs 5$ and $$\sum_i x_i$$ but not `$b$`, and $c$.') == [r'\sum_i x_i', 'a_1', 'c']
    assert docs.stray_dollars('costs 5$, or $x') and not docs.stray_dollars('`$x` and $x$')
    assert not docs.unbalanced(r'\left\{ \frac{a}{b} \right\} \leftarrow \begin{cases} 1 \\ 2 \end{cases}')


# -- nothing from outside

def test_pages_ask_nothing_of_the_outside(site):
    "HTML outputs make Quarto load scripts from elsewhere; here they are raw Markdown"
    for name, page in site[1].items():
        assert 'widgets' not in page.get('metadata', {})
        for c in page['cells']:
            for o in c.get('outputs', ()):
                assert not [k for k in o.get('data', {}) if k == 'text/html' or 'javascript' in k or 'widget' in k], name
        text = '\n'.join(docs.markdown_of(page))
        raw = docs.without_code(text)
        assert not re.search(r'<script|<link\b|<iframe|@import|src=["\'](?:https?:)?//|!\[[^\]]*\]\(https?:', raw), f'{name} loads something'
        assert all('text/plain' in o['data'] or 'text/markdown' in o['data'] for c in page['cells'] for o in c.get('outputs', ()) if 'data' in o)


def test_configuration_asks_nothing_of_the_outside():
    config = docs.config()
    html = config['format']['html']
    assert html['html-math-method'] == dict(method='katex', url='katex/') and config['execute']['enabled'] is False
    for mode in ('light', 'dark'):
        base, *own = html['theme'][mode]
        assert base == 'default', "Bootswatch's themes ask for web fonts"
        for name in own: assert not re.search(r'@import|url\(|https?:', (NBS/name).read_text()), name
    assert config['website']['search'] and not {'google-analytics', 'comments', 'twitter-card', 'open-graph', 'cookie-consent'} & set(config['website'])
    assert (NBS/'_quarto.yml').is_symlink() and (NBS/'_quarto.yml').resolve() == (ROOT/'_quarto.yml').resolve()


def test_folders_know_where_katex_is(site):
    for name in ('tutorials', 'experiments', *docs.rooms()):
        settings = yaml.safe_load((site[0]/name/'_metadata.yml').read_text())
        assert settings['format']['html']['html-math-method']['url'] == '../katex/'


def test_the_check_of_the_rendered_site(tmp_path):
    "What `make docs` does at its end"
    (tmp_path/'a.css').write_text('body { background: url(b.png) }')
    (tmp_path/'b.png').write_bytes(b'')
    good = '<html><head><link rel="stylesheet" href="a.css"><script src="k/katex.min.js"></script></head><body><h2 id="x">x</h2><a href="index.html#x">x</a> <a href="https://x.y">out</a><code>src="//no"</code></body></html>'
    (tmp_path/'index.html').write_text(good)
    assert docs.site_errors(tmp_path) == ['index.html needs k/katex.min.js, which is not there']
    (tmp_path/'k').mkdir(); (tmp_path/'k'/'katex.min.js').write_text('')
    assert docs.site_errors(tmp_path) == []
    for bad in ('<script src="https://cdn.example/x.js"></script>', '<link rel="stylesheet" href="//fonts.example/f.css">', '<style>@import url("https://fonts.example/f.css");</style>',
                '<img src="http://x.y/z.png">', '<a href="nowhere.html">n</a>', '<a href="#nowhere">n</a>'):
        (tmp_path/'index.html').write_text(good.replace('<body>', '<body>' + bad))
        assert len(docs.site_errors(tmp_path)) == 1, bad
    (tmp_path/'index.html').write_text(good)
    (tmp_path/'a.css').write_text('@import "https://fonts.example/f.css"; @font-face { src: url(https://fonts.example/f.woff) }')
    assert len(docs.site_errors(tmp_path)) == 2


# -- make docs

def tools(folder, *names):
    "A folder of links to some programs, for a PATH without others"
    folder.mkdir()
    for name in names: (folder/name).symlink_to(shutil.which(name))
    return str(folder)


def test_make_docs_without_quarto_says_so(tmp_path):
    path = tools(tmp_path/'bin', 'make', 'sh')
    done = subprocess.run(['make', 'docs', 'PYTHON=false'], cwd=ROOT, env=dict(PATH=path), capture_output=True, text=True, timeout=60)
    assert done.returncode and 'https://quarto.org' in done.stdout and 'npm' not in done.stdout, done
    (tmp_path/'bin'/'quarto').symlink_to('/bin/true')
    done = subprocess.run(['make', 'docs', 'PYTHON=false'], cwd=ROOT, env=dict(PATH=path), capture_output=True, text=True, timeout=60)
    assert done.returncode and 'npm is not on the PATH' in done.stdout, done


def test_nothing_else_needs_quarto():
    text = (ROOT/'Makefile').read_text()
    for target, needs in re.findall(r'^([a-z]+):([^\n#]*)', text, re.M):
        assert target in ('docs', 'quarto') or not {'docs', 'quarto'} & set(needs.split()), f'make {target} needs Quarto'
    assert not re.search(r'nbdev_(docs|proc_nbs|readme|prepare)', text), 'this command would install Quarto'


# -- the reference

def test_reference_is_complete(site):
    text = '\n'.join(docs.markdown_of(site[1]['reference.ipynb']))
    notebooks = [p for pages in docs.rooms().values() for p in pages]
    for room, notebook in (p.removesuffix('.ipynb').split('/') for p in notebooks):
        module = f'{room}.{notebook.split("_", 1)[1]}'
        assert f'## repq.{module}\n' in text, f'{module} is not in the reference'
        tree = ast.parse((ROOT/'repq'/f'{module.replace(".", "/")}.py').read_text(encoding='utf-8'))
        names = ast.literal_eval(next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == '__all__'))
        part = text.split(f'## repq.{module}\n')[1].split('\n## repq.')[0]
        missing = [n for n in names if f'| [{n}](' not in part]
        assert names and not missing, f'{module}: {missing} not in the reference'
    for name, module in importlib.import_module('repq')._home.items():
        assert (f'`repq.{name}`' in text) == (not module.startswith('_')), name   # names that go are not shown


def test_reference_says_what_things_are(site):
    "A line and a signature for each function and class"
    text = '\n'.join(docs.markdown_of(site[1]['reference.ipynb']))
    rows = re.findall(r'^\| \[(\w+)\]\((\S+)\)[^|]*\| `(.*?)` \| (.*?) \|$', text, re.M)
    assert len(rows) > 400
    assert any(n == 'compose' and s == 'compose(first, second)' and 'row' in d for n, _, s, d in rows)
    silent = [n for n, _, s, d in rows if not d.strip()]
    assert len(silent) < 0.15*len(rows), silent


# -- the results page

@pytest.mark.parametrize('filled', [False, True])
def test_results_page_shows_what_is_there(tmp_path, filled):
    (tmp_path/'nbs').mkdir()
    shutil.copytree(ROOT/'results'/'bench', tmp_path/'results'/'bench')
    if filled: records.write_all(tmp_path/'results', 'smoke')
    made = readme.made_again(cells_of(NBS/'results.ipynb'), tmp_path/'nbs', lambda source: True)
    text = '\n'.join(''.join(o['data'].get('text/html') or o['data'].get('text/markdown', '')) for c in made for o in c.get('outputs', ()) if 'data' in o)
    assert 'repq bench quantizer' in text and '`paper`' in text
    if not filled:
        assert 'None of its' in text and 'there is no table to show' in text
        return
    assert text.count('.repq-results{') >= 1 and text.count('<table') > 5 and 'Profile smoke' in text and '<svg' in text and 'a processor' in text and '2026-01-01' in text and 'cannot be told' in text
    targets = [t for t in docs.links(text) if '/notebook.ipynb' in t]
    assert len(targets) > 50 and all((tmp_path/'nbs'/unquote(t)).is_file() for t in targets), 'each number leads to the notebook that made it'


# -- README, tutorials, commands

def test_readme_is_up_to_date():
    "Tables are as they are in results/ now"
    cells = cells_of(readme.INDEX)
    assert readme.render(readme.made_again(cells)) == (ROOT/'README.md').read_text(encoding='utf-8'), 'results/ has changed: run make readme'


def test_readme_has_what_it_must():
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert len(re.findall(r'[.] (?=[A-Z*r])|[.]\n', text.split('> ')[1].split('\n', 2)[2].split('![')[0])) == 3, 'what it is in three sentences'
    for words in ('make test', 'make reproduce', 'For whom, and for whom not', 'Where the paper disagrees with itself', '69.21', 'CITATION.cff', 'nbs/images/repq.svg'): assert words in text
    assert text.index('make test') < text.index('```python')


def python_blocks(text): return re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)


def test_readme_runs(tmp_path):
    "Every block, in order, by someone who has nothing but the package"
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    blocks = python_blocks(text)
    assert len(blocks) == len([c for c in cells_of(readme.INDEX) if c['cell_type'] == 'code' and not source_of(c).startswith('#|')]) >= 2
    kinds = re.findall(r'^```(\S*)\n', text, re.M)
    assert set(kinds) <= {'python', 'sh', ''}, 'a block of code that nothing executes'
    done = subprocess.run([sys.executable, '-c', '\n'.join(blocks)], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'parity holds' in done.stdout and (tmp_path/'net.onnx').stat().st_size > 10_000


def test_tutorials_are_executed():
    "By `make notebooks`; cells that it skips are executed below"
    skip = re.search(r"--skip_folder_re '([^']*)'", (ROOT/'Makefile').read_text())[1].replace('$$', '$')
    assert not re.search(skip, 'tutorials') and re.search(skip, 'experiments')
    for name in TUTORIALS:
        cells = cells_of(NBS/name)
        code = [source_of(c) for c in cells if c['cell_type'] == 'code']
        assert not any(re.search(r'skip_exec|#\|\s*notest', source_of(c)) for c in cells), f'{name} is not executed'
        if any(re.match(r'#\| eval: false', c) for c in code): assert name in WHOLE, f'{name} has cells that nothing executes'
        assert any('assert' in c for c in code), f'{name} asserts nothing'
        blocks = [k for c in cells if c['cell_type'] == 'markdown' for k in re.findall(r'^```(\S*)\n', source_of(c), re.M)][::2]
        assert set(blocks) <= {'sh', ''}, f'{name} has code in its prose that nothing executes'


WHOLE = ('tutorials/reproduce.ipynb', 'tutorials/cluster.ipynb')

@pytest.mark.parametrize('name', WHOLE)
def test_the_whole_page_runs(name, tmp_path):
    "With the cells that `make notebooks` skips because they start processes"
    pytest.importorskip('distributed')
    code = [source_of(c) for c in cells_of(NBS/name) if c['cell_type'] == 'code']
    assert any('eval: false' in c for c in code)
    script = tmp_path/'page.py'
    script.write_text('if __name__ == "__main__":\n' + '\n'.join('    ' + line for c in code for line in c.splitlines()))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env={**ENV, 'TMPDIR': str(tmp_path)}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {'tutorials/reproduce.ipynb': "Counter({'done': 11})", 'tutorials/cluster.ipynb': 'ecbsr-plain-plain-4bit-s0'}[name] in done.stdout
    left = [p.parent.name for p in Path('/proc').glob('[0-9]*/cmdline') if str(tmp_path).encode() in read_or_nothing(p) and b'distributed.cli' in read_or_nothing(p)]
    assert not left, f'the page has left processes {left}'


def read_or_nothing(path):
    "A file that may be gone"
    try: return path.read_bytes()
    except OSError: return b''


def shell_lines():
    "Commands in blocks marked sh: (file, words)"
    texts = {name: (ROOT/name).read_text(encoding='utf-8') for name in ('README.md', 'CONTRIBUTING.md')}
    texts |= {p.name: '\n\n'.join(source_of(c) for c in cells_of(p) if c['cell_type'] == 'markdown') for p in NBS.rglob('*.ipynb')}
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
        if words[0] == 'make': assert {w for w in words[1:] if '=' not in w} <= targets, f'{name}: {" ".join(words)}'
        if words[0] == 'repq':
            try: make_parser().parse_args(words[1:])
            except SystemExit as e: assert not e.code, f'{name}: {" ".join(words)}: {capsys.readouterr().err}'
        seen.add(words[0])
    assert {'make', 'repq', 'dask'} <= seen


def test_citation_and_changelog():
    version = re.search(r'^version = (.*)$', (ROOT/'settings.ini').read_text(), re.M)[1]
    citation = yaml.safe_load((ROOT/'CITATION.cff').read_text(encoding='utf-8'))
    assert str(citation['version']) == version and citation['cff-version'] and citation['authors'] and citation['message']
    paper, = citation['references']
    assert paper['title'].startswith('RepQ: Generalizing') and len(paper['authors']) == 5
    assert f'## {version}' in (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')
