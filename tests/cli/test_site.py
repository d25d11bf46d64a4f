"The site, as far as it can be checked without Quarto: processed pages and configuration"
import ast, importlib, json, re, shutil, subprocess
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote
import pytest, yaml
import records, repq
from repq.cli import page_checks as checks, pages, readme, reference, site as docs

ROOT, NBS = pages.ROOT, pages.NBS
SIDEBAR = docs.sidebar()
WIDTH = 110 # characters of code that a page shows side by side
TEXT = ('index.ipynb', 'install.ipynb', 'compare.ipynb', 'thirty_lines.ipynb', 'reference.ipynb')


def cells_of(path): return json.loads(Path(path).read_text(encoding='utf-8'))['cells']
def source_of(cell): return ''.join(cell['source'])
def text_of(page): return '\n'.join(checks.markdown_of(page))


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "What Quarto gets: (folder, {name: page})"
    folder = tmp_path_factory.mktemp('site')/'_proc'
    return folder, docs.build(folder)


def written(site):
    "(name, page) of each notebook as it was written to disk"
    for name in site[1]:
        if name.endswith('.ipynb'): yield name, json.loads((site[0]/name).read_text(encoding='utf-8'))


# -- the sidebar

def test_sidebar_has_all_pages_in_groups():
    assert list(SIDEBAR) == ['Start', 'Tutorials', 'Learn', 'Results', 'Reference', 'Development']
    listed = docs.pages()
    found = [p for p in NBS.rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    there = [p.relative_to(NBS).as_posix() for p in found]
    assert len(listed) == len(set(listed)), 'a page is in the sidebar twice'
    missing = (set(listed) - set(pages.TOP)) ^ set(there)
    assert not missing, f'notebooks and the sidebar of _quarto.yml differ: {missing}'
    assert SIDEBAR['Start'][:2] == ['index.ipynb', 'install.ipynb']
    tutorials = {Path(p).stem for p in SIDEBAR['Tutorials']}
    assert tutorials == {p.stem for p in (NBS/'tutorials').glob('*.ipynb')}


def test_sections_are_rooms():
    "Learn and Development have every room, with its notebooks in the order of their numbers"
    rooms = docs.rooms()
    assert set(rooms) == set(repq._rooms)
    for room, listed in rooms.items():
        numbered = sorted((NBS/room).glob('*.ipynb'), key=lambda p: int(p.name.split('_')[0]))
        assert listed == [p.relative_to(NBS).as_posix() for p in numbered], room
    first, *others = SIDEBAR['Learn']
    assert first == 'thirty_lines.ipynb', 'Learn begins with the algorithm itself'
    learn = [p.split('/')[0] for p in others]
    assert list(dict.fromkeys(learn)) == reference.LEARN
    assert reference.LEARN == 'algebra quantization models adopt train deploy'.split()
    inside = {p.split('/')[0] for p in SIDEBAR['Development'] if '/' in p}
    assert inside == {*reference.internals(), 'experiments'}


def test_a_visitor_sees_about_twenty_entries():
    sidebar = docs.config()['website']['sidebar']
    seen = docs.entries(sidebar['contents'], sidebar['collapse-level'])
    assert 15 <= len(seen) <= 30, f'{len(seen)} entries before anything is unfolded'
    assert len(docs.pages()) > 60, 'the rest is folded'


def test_titles_are_for_newcomers():
    "Every entry has words of its own; no section holds a page of its own name"
    def walk(contents, above=''):
        for item in contents:
            assert isinstance(item, dict), f'{item} has no title in the sidebar'
            title = docs.title_of(item)
            assert title and title != above and len(title) <= 30, f'{above} > {title}'
            assert title.lower() not in (*repq._rooms[:-1], 'parity', 'runs', 'cases'), title
            walk(item.get('contents', ()), title)
    walk([s for s in docs.sections() if docs.title_of(s) not in ('Start', 'Learn')])
    titles = {i['href']: i['text'] for s in docs.sections() for i in s.get('contents', ()) if 'href' in i}
    assert titles['install.ipynb'] == 'Install'


# -- what is rendered

def matches(name, pattern):
    "Quarto's rule: a pattern matches at any depth unless it begins with /"
    if pattern.startswith('/'):
        return fnmatch(name, pattern[1:]) and name.count('/') == pattern.count('/') - 1
    parts = name.split('/')
    return any(fnmatch('/'.join(parts[i:]), pattern) for i in range(len(parts)))


def test_every_page_is_rendered_and_nothing_else(site):
    patterns = [p for p in docs.config()['project']['render'] if not p.startswith('!')]
    assert [n for n in docs.pages() if sum(matches(n, p) for p in patterns) != 1] == []
    used = {p for n in docs.pages() for p in patterns if matches(n, p)}
    assert used == set(patterns), f'nothing is rendered by {set(patterns) - used}'
    files = [p.relative_to(site[0]).as_posix() for p in site[0].rglob('*') if p.suffix in ('.ipynb', '.md')]
    rendered = {f for f in files if any(matches(f, p) for p in patterns)}
    assert rendered == set(docs.pages()), f'Quarto would also render {rendered - set(docs.pages())}'
    assert len(files) > len(rendered), 'notebooks to download are there and are no pages'


def test_depth_of_patterns():
    assert matches('results/cpu/run/notebook.ipynb', '*.ipynb') and not matches('a/b.ipynb', '/*.ipynb')
    assert matches('a/b.ipynb', '/a/*.ipynb') and not matches('c/a/b.ipynb', '/a/*.ipynb')


def test_runs_have_pages(site):
    "One for each finished record; numbers lead to it, and no executed notebook is on the site"
    found = sorted((ROOT/'results').glob('*/*/record.json'))
    for record in found:
        page = site[0]/record.parent.relative_to(ROOT)/'index.html'
        text = page.read_text(encoding='utf-8')
        trained = bool(json.loads(record.read_text(encoding='utf-8'))['history']) # others have no curves
        assert record.parent.name in text and ('<svg' in text) == trained, page
        asked = [t for pattern in checks.REQUESTS for t in re.findall(pattern, text)]
        asked = [t for t in asked if pages.outside(t) and not t.startswith('data:')]
        assert not asked, f'{page} asks {asked}'
    assert not list((site[0]/'results').rglob('*.ipynb'))
    linked = [t for t in checks.links(text_of(site[1]['index.ipynb'])) if t.startswith('results/')]
    assert linked and all(t.endswith('/index.html') for t in linked)


# -- pages as Quarto needs them

def test_texts_are_lists_of_lines(site):
    "Quarto loses the newlines of a string; nbformat takes both"
    for name, page in written(site): assert not list(checks.text_lists(page)), name


def test_strings_are_found():
    cell = dict(cell_type='code', source=['x'], outputs=[dict(output_type='stream', text='a\nb')])
    markdown = dict(cell_type='markdown', source='# a\n\nb')
    assert list(checks.text_lists(dict(cells=[cell, markdown]))) == ['output of cell 0', 'source of cell 1']


def test_pages_are_notebooks(site):
    "As Quarto expects them: of format 4, with plain cells"
    import nbformat
    for _, page in written(site): nbformat.validate(page)


def test_front_matter(site):
    addresses = {}
    for name, page in site[1].items():
        front = checks.front_matter(page)
        assert front.get('title') and front.get('output-file', '').endswith('.html'), f'{name}: {front}'
        assert page['cells'][0]['cell_type'] == 'raw' and page['cells'][0]['source'][0] == '---\n', name
        if name not in pages.TOP: assert front.get('description'), f'{name} has no > line'
        address = (Path(name).parent/front['output-file']).as_posix()
        assert addresses.setdefault(address, name) == name, f'{name} and {addresses[address]}: both {address}'
    assert 'index.html' in addresses


def test_title_cells_hold_nothing_else():
    "nbdev makes front matter of the whole first cell: prose in it would not be on the site"
    for name in docs.pages():
        if name in pages.TOP: continue
        first = source_of(cells_of(NBS/name)[0])
        assert re.fullmatch(r'# [^\n]+\n\n> [^\n]+\n?', first), f'{name}: title and one > line, nothing else'


def test_pages_have_prose(site):
    "No page is only signatures"
    for name in site[1]:
        if name in pages.TOP: continue
        prose = ' '.join(source_of(c) for c in cells_of(NBS/name)[1:] if c['cell_type'] == 'markdown')
        words = len(checks.without_code(prose).split())
        assert words >= (20 if name.startswith('experiments') else 60), f'{name} has {words} words of prose'


def test_headings_reach_the_table_of_contents(site):
    "Those that code makes too: they are prose on the page, not outputs"
    depth = docs.config()['format']['html']['toc-depth']
    for name in pages.LIVE:
        outputs = [t for c in site[1][name]['cells'] for o in c.get('outputs', ())
                   for t in o.get('data', {}).get('text/markdown', ())]
        assert not [t for t in outputs if t.startswith('#')], f'{name}: headings inside outputs'
        listed = [text for level, text in checks.headings(site[1][name]) if level <= depth]
        assert len(listed) >= 5, f'{name} has {listed} in its table of contents'
    listed = [text for level, text in checks.headings(site[1]['reference.ipynb']) if level <= depth]
    assert {'Deploy', 'Internals', 'repq.algebra.kernel'} <= set(listed)


def test_tables_of_outputs_stay_tables(site):
    "An output that became prose is a cell of its own, so that nothing runs into it"
    rows = [c for c in site[1]['reference.ipynb']['cells'] if any(r.startswith('|:---') for r in c['source'])]
    assert len(rows) >= 3 and all(c['cell_type'] == 'markdown' for c in rows)
    for c in rows:
        text = source_of(c)
        for m in re.finditer(r'^\|(?!:?-).*\n\|:---', text, re.M):
            assert m.start() == 0 or text[:m.start()].endswith('\n\n'), text[m.start() - 80:m.end()]


def test_pages_that_are_made_anew_store_nothing():
    "What they would store is out of date at the next change"
    for name in pages.LIVE:
        assert not any(c.get('outputs') for c in cells_of(NBS/name)), f'{name}: clear its outputs'


# -- what a definition looks like

def test_exports_are_shown_once(site):
    "Signatures with comments on arguments; the source behind a fold, and linked; nothing is executed for it"
    page = site[1]['quantization/2_layer.ipynb']
    text = text_of(page)
    assert '### RepConv2d\n' in text and '#### RepConv2d.kernel\n' in text
    assert '../code/quantization/layer.html#L' in text
    stored = [c for c in cells_of(NBS/'quantization/2_layer.ipynb') if c.get('outputs')]
    assert sum(bool(c.get('outputs')) for c in page['cells']) == len(stored)
    for name, page in site[1].items():
        for c in page['cells']:
            code = source_of(c)
            if c['cell_type'] != 'code': continue
            assert not re.search(r'^#\|\s*export', code, re.M), name
            folded = '#| code-fold: true\n' in code
            assert folded or '#| code-fold' not in code, f'{name} shows a source open'


def test_what_is_defined():
    code = ('def f(\n    x, # a number\n):\n    "Twice"\n    return 2*x\n\n'
            '@patch\ndef kernel(self:Layer, x=None):\n    "The kernel"\n\n'
            'class A(NamedTuple):\n    "Pair"\n    x:int # one\n')
    made = pages.documented(code, lambda name: f'[source](m.html#{name})')
    assert made[0] == '### f\n\n```python\ndef f(\n    x, # a number\n):\n```\n\nTwice [source](m.html#f)\n'
    assert made[1].startswith('#### Layer.kernel\n') and 'm.html#Layer.kernel' in made[1]
    assert '    x:int # one' in made[2] and len(made) == 3


def test_sources_are_on_the_site(site):
    "Each page leads to its notebook and its module; no link to a repository that may not exist"
    for name, page in site[1].items():
        if not name.endswith('.ipynb'): continue
        up = '../'*name.count('/')
        assert f'({up}notebooks/{name})' in text_of(page), f'{name} cannot be downloaded'
        assert (site[0]/'notebooks'/name).read_bytes() == (NBS/name).read_bytes()
    text = (site[0]/'code'/'algebra'/'kernel.html').read_text(encoding='utf-8')
    line = pages.line_numbers('algebra.kernel')['compose']
    assert f'<span id="L{line}">def compose(' in text and 'href="../../algebra/kernel.html"' in text
    git = re.search(r'^git_url = (.*)$', (ROOT/'settings.ini').read_text(), re.M)[1].split('%')[0]
    assert not [n for n, p in site[1].items() if git in text_of(p)]


def test_tutorials_begin_with_their_download(site):
    for name in SIDEBAR['Tutorials']:
        assert 'download it' in source_of(site[1][name]['cells'][1]), name


# -- links

def test_links_and_images(site):
    errors = checks.link_errors(*site)
    assert not errors, '\n'.join(errors)
    found = [t for p in site[1].values() for t in checks.links(text_of(p))]
    assert len(found) > 300 and 'images/repq.svg' in found and any('#' in t for t in found)


def test_wrong_links_are_found(site):
    folder, made = site
    text = ('[a](nowhere.ipynb) [b](algebra/1_kernel.ipynb#nowhere) ![c](images/no.png) '
            '[d](algebra/1_kernel.ipynb#compose) [e](https://x.y) `[f](no)` <a href="no.html">g</a> '
            '[h](code/algebra/kernel.html#L1) [i](code/algebra/kernel.html#L99999)')
    first = made['index.ipynb']['cells'][0]
    page = dict(cells=[first, dict(cell_type='markdown', metadata={}, source=[text])])
    errors = checks.link_errors(folder, {**made, 'index.ipynb': page})
    own = [e for e in errors if e.startswith('index.ipynb')]
    assert len(own) == 5 and not any('compose' in e or '#L1 ' in e for e in own), own


@pytest.mark.parametrize('code', 'draw Batch measure key measured imresize load x net.onnx'.split())
def test_words_are_no_links(code): assert pages.address_of(code) is None


@pytest.mark.parametrize('code,place', [
    ('RepConv2d', 'quantization/layer.html#repconv2d'), ('repq.merge', 'quantization/network.html#merge'),
    ('check_parity', 'deploy/parity.html#check_parity'), ('repq.load', 'quantization/files.html#load'),
    ('imresize(x, 2)', 'train/super_resolution.html#imresize'),
    ('repq.blocks.repvgg(8, 8)', 'models/blocks.html#repvgg')])
def test_names_are_links(code, place): assert pages.address_of(code) == place


def test_links_from_names_keep_text():
    text = '# `RepConv2d`\n\n`RepConv2d`, [`merge`](x) and `key`.\n\n```python\n`RepConv2d`\n```\n'
    made = pages.link_names(text, '../')
    link = '[`RepConv2d`](../quantization/layer.html#repconv2d)'
    assert made == text.replace('\n\n`RepConv2d`,', f'\n\n{link},')


# -- mathematics

def test_equations(site):
    n = 0
    for name, page in site[1].items():
        for text in checks.markdown_of(page):
            for e in checks.equations(text):
                n += 1
                assert not checks.unbalanced(e), f'{name}: {checks.unbalanced(e)} in {e}'
            assert not checks.stray_dollars(text), f'{name}: a $ outside equations in {text[:200]!r}'
    assert n > 150


WRONG = r'\frac{1}{2', r'a}', r'\left( x', r'\begin{pmatrix} 1', r'\begin{a} \end{b}'

@pytest.mark.parametrize('tex', WRONG)
def test_wrong_equations_are_found(tex): assert checks.unbalanced(tex)


def test_equations_are_seen():
    text = r'$a_1$ costs 5$ and $$\sum_i x_i$$ but not `$b$`, and $c$.'
    assert checks.equations(text) == [r'\sum_i x_i', 'a_1', 'c']
    assert checks.stray_dollars('costs 5$, or $x') and not checks.stray_dollars('`$x` and $x$')
    fine = r'\left\{ \frac{a}{b} \right\} \leftarrow \begin{cases} 1 \\ 2 \end{cases}'
    assert not checks.unbalanced(fine)


# -- it can be read

def test_code_fits_its_column(site):
    "Lines of up to 110 characters; longer ones would wrap"
    html = docs.config()['format']['html']
    assert html['code-overflow'] == 'wrap' and html['grid']['body-width'] == '1040px'
    for name in (*TEXT, *SIDEBAR['Tutorials']):
        long = [line for line in checks.code_lines(site[1][name]) if len(line) > WIDTH]
        assert not long, f'{name}: {long[0]}'


def test_pictures_have_words(site):
    "An alternative text each; those of the tutorials are written by hand"
    total = 0
    for name, page in site[1].items():
        alts = list(checks.pictures(page))
        total += len(alts)
        assert all(alts), f'{name}: {alts.count("")} pictures without alternative text'
        if name.startswith('tutorials'): assert not [a for a in alts if 'Figure of the section' in a], name
    assert total > 60


def test_pictures_without_words_are_found():
    image = dict(data={'image/png': 'x'})
    cell = dict(cell_type='code', source=['plot()'], outputs=[image])
    prose = dict(cell_type='markdown', source=['![](a.png) <svg viewBox="0 0 1 1"></svg> ![words](b.png)'])
    assert sorted(checks.pictures(dict(cells=[cell, prose]))) == ['', '', '', 'words']
    pages.describe_images(cell, 'Steps')
    assert list(checks.pictures(dict(cells=[cell]))) == ['"Figure of the section \\"Steps\\""']


def test_no_log_lines(site):
    noise = dict(output_type='stream', name='stderr', text=['/x/site-packages/a.py:1: Warning\n'])
    assert pages.is_log(noise) and not pages.is_log({**noise, 'text': ['repq: a channel waits\n']})
    assert not pages.is_log({**noise, 'name': 'stdout'})
    for name, page in site[1].items():
        for c in page['cells']:
            printed = [''.join(o['text']) for o in c.get('outputs', ()) if o.get('name') == 'stderr']
            assert not re.search(r'WARNING|FutureWarning|\[W\d|torch[/.]\S+\.py:\d+', ''.join(printed)), name


def test_pages_are_not_called_by_numbers(site):
    for name, page in site[1].items():
        text = re.sub(r'<[^>]*>', '', checks.without_code(text_of(page)))
        found = re.findall(r'.{0,40}\b[Nn]otebooks? \d+.{0,20}', text)
        assert not found, f'{name}: {found}; the site has no numbers, use a link with the title of the page'


def test_styles():
    "Found in a browser: black on black, cut tables, names broken in mid-word, pages wider than a phone"
    dark, style = ((NBS/f'{name}.scss').read_text() for name in ('dark', 'style'))
    assert re.search(r'^\$pre-color: #[d-f]', dark, re.M)
    assert re.search(r'main table \{[^}]*overflow-x: auto', style)
    assert re.search(r'td:first-child a[^}]*white-space: nowrap', style)
    assert re.search(r'main p code[^}]*overflow-wrap: anywhere', style)


def test_start_page_is_short(site):
    "About 2,500 px at a width of 1280; rendering it took a browser"
    page = site[1]['index.ipynb']
    text = text_of(page)
    prose = re.sub(r'^\|.*$', '', re.sub(r'\]\([^)]*\)', ']', text), flags=re.M)
    words = len(checks.without_code(prose).split())
    assert words < 600 and len(list(checks.code_lines(page))) < 35 and text.count('|:---|') == 1
    assert not re.search(r'\b(must|aim|times faster)\b', text), 'nothing about timing targets'
    for door in ('tutorials/digits.ipynb', 'thirty_lines.ipynb', 'results.ipynb', 'install.ipynb'):
        assert f']({door})' in text


# -- nothing from outside

def test_pages_ask_nothing_of_the_outside(site):
    "HTML outputs make Quarto load scripts from elsewhere; here they are raw Markdown"
    loads = r'<script|<link\b|<iframe|@import|src=["\'](?:https?:)?//|!\[[^\]]*\]\(https?:'
    for name, page in site[1].items():
        assert 'widgets' not in page.get('metadata', {})
        for c in page['cells']:
            for o in c.get('outputs', ()):
                kinds = list(o.get('data', {}))
                assert not [k for k in kinds if k == 'text/html' or 'javascript' in k or 'widget' in k], name
                if kinds: assert 'text/plain' in kinds or 'text/markdown' in kinds, name
        assert not re.search(loads, checks.without_code(text_of(page))), f'{name} loads something'


def test_configuration_asks_nothing_of_the_outside():
    config = docs.config()
    html = config['format']['html']
    assert html['html-math-method'] == dict(method='katex', url='katex/')
    assert config['execute']['enabled'] is False
    for mode in ('light', 'dark'):
        base, *own = html['theme'][mode]
        assert base == 'default', "Bootswatch's themes ask for web fonts"
        for name in own: assert not re.search(r'@import|url\(|https?:', (NBS/name).read_text()), name
    asking = {'google-analytics', 'comments', 'twitter-card', 'open-graph', 'cookie-consent'}
    assert config['website']['search'] and not asking & set(config['website'])
    assert (NBS/config['website']['favicon']).is_file()
    assert (NBS/'_quarto.yml').is_symlink()
    assert (NBS/'_quarto.yml').resolve() == (ROOT/'_quarto.yml').resolve()


def test_folders_know_where_katex_is(site):
    for name in ('tutorials', 'experiments', *docs.rooms()):
        settings = yaml.safe_load((site[0]/name/'_metadata.yml').read_text())
        assert settings['format']['html']['html-math-method']['url'] == '../katex/'


GOOD = """<html><head><link rel="stylesheet" href="a.css"><script src="k/katex.min.js"></script></head><body>
<h2 id="x">x</h2><a href="index.html#x">x</a> <a href="https://x.y">out</a><code>src="//no"</code></body></html>"""
BAD = ('<script src="https://cdn.example/x.js"></script>', '<img src="http://x.y/z.png">',
       '<link rel="stylesheet" href="//fonts.example/f.css">', '<a href="nowhere.html">n</a>',
       '<style>@import url("https://fonts.example/f.css");</style>', '<a href="#nowhere">n</a>')

def test_the_check_of_the_rendered_site(tmp_path):
    "What `make docs` does at its end"
    (tmp_path/'a.css').write_text('body { background: url(b.png) }')
    (tmp_path/'b.png').write_bytes(b'')
    (tmp_path/'index.html').write_text(GOOD)
    assert checks.site_errors(tmp_path) == ['index.html needs k/katex.min.js, which is not there']
    (tmp_path/'k').mkdir()
    (tmp_path/'k'/'katex.min.js').write_text('')
    assert checks.site_errors(tmp_path) == []
    for bad in BAD:
        (tmp_path/'index.html').write_text(GOOD.replace('<body>', '<body>' + bad))
        assert len(checks.site_errors(tmp_path)) == 1, bad
    (tmp_path/'index.html').write_text(GOOD)
    fonts = '@import "https://fonts.example/f.css"; @font-face { src: url(https://fonts.example/f.woff) }'
    (tmp_path/'a.css').write_text(fonts)
    assert len(checks.site_errors(tmp_path)) == 2


# -- make docs

def tools(folder, *names):
    "A folder of links to some programs, for a PATH without others"
    folder.mkdir()
    for name in names: (folder/name).symlink_to(shutil.which(name))
    return str(folder)


def make_docs(path):
    return subprocess.run(['make', 'docs', 'PYTHON=false'], cwd=ROOT, env=dict(PATH=path),
                          capture_output=True, text=True, timeout=60)


def test_make_docs_without_quarto_says_so(tmp_path):
    path = tools(tmp_path/'bin', 'make', 'sh')
    done = make_docs(path)
    assert done.returncode and 'https://quarto.org' in done.stdout and 'npm' not in done.stdout, done
    (tmp_path/'bin'/'quarto').symlink_to('/bin/true')
    done = make_docs(path)
    assert done.returncode and 'npm is not on the PATH' in done.stdout, done


def test_nothing_else_needs_quarto():
    text = (ROOT/'Makefile').read_text()
    for target, needs in re.findall(r'^([a-z]+):([^\n#]*)', text, re.M):
        alone = not {'docs', 'quarto'} & set(needs.split())
        assert target in ('docs', 'quarto') or alone, f'make {target} needs Quarto'
    assert not re.search(r'nbdev_(docs|proc_nbs|readme|prepare)', text), 'this command would install Quarto'


# -- the reference

def public(file):
    "What a module exports"
    tree = ast.parse(file.read_text(encoding='utf-8'))
    assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
    named, = [n for n in assigned if getattr(n.targets[0], 'id', '') == '__all__']
    return ast.literal_eval(named.value)


def test_reference_is_complete(site):
    text = text_of(site[1]['reference.ipynb'])
    for room, notebook in (p.removesuffix('.ipynb').split('/') for p in sum(docs.rooms().values(), [])):
        module = f'{room}.{notebook.split("_", 1)[1]}'
        assert f'\n### repq.{module}\n' in text, f'{module} is not in the reference'
        names = public(ROOT/'repq'/f'{module.replace(".", "/")}.py')
        part = text.split(f'\n### repq.{module}\n')[1].split('\n### repq.')[0]
        missing = [n for n in names if f'| [{n}](' not in part]
        assert names and not missing, f'{module}: {missing} not in the reference'
    for name, module in importlib.import_module('repq')._home.items():
        goes = module.startswith('_')
        assert (f'`repq.{name}`' in text) == (not goes), name   # names that go are not shown


def test_reference_begins_with_what_users_type(site):
    "By task, about 25 names with an example each; then rooms, internals last"
    titles = [text for level, text in checks.headings(site[1]['reference.ipynb']) if level <= 2]
    assert titles[0] == 'First' and titles[1].startswith('What `statistics=` means')
    assert titles.index('Room algebra') < titles.index('Internals') < titles.index('Room tools')
    assert 20 <= sum(map(len, reference.FIRST.values())) <= 32
    rows = re.findall(r"^\| `'(\w+)'` \|", text_of(site[1]['reference.ipynb']), re.M)
    assert rows == list(importlib.import_module('repq.algebra.statistics').STATISTICS)


def test_reference_says_what_things_are(site):
    "A line and a signature for each function and class, and what is in each value"
    text = text_of(site[1]['reference.ipynb'])
    rows = re.findall(r'^\| \[(\w+)\]\((\S+)\)[^|]*\| `(.*?)` \| (.*?) \|$', text, re.M)
    assert len(rows) > 400
    assert any(n == 'compose' and s == 'compose(first, second)' and 'row' in d for n, _, s, d in rows)
    silent = [n for n, _, s, d in rows if not d.strip()]
    assert len(silent) < 0.15*len(rows), silent
    assert not [n for n, _, s, d in rows if 'see its notebook' in d]
    assert any(n == 'BLOCKS' and 'repvgg' in d for n, _, s, d in rows)


def test_examples_of_the_reference_run(tmp_path, monkeypatch):
    "One after another, as a user would type them"
    import timm, torch
    from fastai.basics import Learner
    from torchvision.utils import save_image
    monkeypatch.chdir(tmp_path)
    for part in ('train', 'test'):
        for kind in ('a', 'b'):
            folder = tmp_path/'data'/'cifar10'/part/kind
            folder.mkdir(parents=True)
            save_image(torch.rand(3, 32, 32), folder/'0.png')
            for i in range(1, 64): shutil.copy(folder/'0.png', folder/f'{i}.png')
    torch.manual_seed(0)
    names = {n: getattr(repq, n) for n in ('Conv', 'Fixed', 'Identity', 'Norm', 'Scale', 'Seq', 'Sum')}
    space = dict(repq=repq, timm=timm, torch=torch, F=torch.nn.functional, Learner=Learner, **names)
    space['dls'] = repq.data.digits_dls(batch_size=64, channels=3, size=32)
    space['batches'] = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    for task, examples in reference.FIRST.items():
        if task == 'Get a network': examples = {n: e for n, e in examples.items() if n != 'load_official'}
        for name, example in examples.items():
            assert re.search(rf'\b{name.split(".")[-1]}\(', example), f'{name} is not in its example'
            exec(example, space)
            if name == 'quantize': # a little training, which sets the steps
                for _ in range(5): list(map(space['net'].train(), space['batches']))
    assert (tmp_path/'net.onnx').exists() and (tmp_path/'net.safetensors').exists()


# -- the results page

@pytest.mark.parametrize('filled', [False, True])
def test_results_page_shows_what_is_there(tmp_path, filled):
    (tmp_path/'nbs').mkdir()
    shutil.copytree(ROOT/'results'/'bench', tmp_path/'results'/'bench')
    if filled: records.write_all(tmp_path/'results', 'smoke')
    made = readme.made_again(cells_of(NBS/'results.ipynb'), tmp_path/'nbs', lambda source: True)
    data = [o['data'] for c in made for o in c.get('outputs', ()) if 'data' in o]
    text = '\n'.join(''.join(d.get('text/html') or d.get('text/markdown', '')) for d in data)
    assert 'repq bench quantizer' in text and '`paper`' in text
    if not filled:
        assert 'None of its' in text and 'there is no table to show' in text
        return
    assert text.count('.repq-results{') >= 1 and text.count('<table') > 5 and '<svg' in text
    for words in ('Profile smoke', 'a processor', '2026-01-01', 'cannot be told'): assert words in text
    targets = [t for t in checks.links(text) if '/notebook.ipynb' in t]
    there = [(tmp_path/'nbs'/unquote(t)).is_file() for t in targets]
    assert len(targets) > 50 and all(there), 'each number leads to the notebook that made it'
