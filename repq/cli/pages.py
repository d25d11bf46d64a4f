"From a notebook to a page that Quarto renders without executing anything"
# plain Python: dense mechanism of rendering with nothing to teach; tests/cli/test_site.py proves it
import ast, contextlib, functools, html, json, os, re, textwrap, warnings
from pathlib import Path
from urllib.parse import unquote, urlsplit
from .readme import NOT_IN_README, made_again

ROOT = Path(__file__).parents[2]
NBS = ROOT/'nbs'
LIVE = ('results.ipynb', 'reference.ipynb') # executed for each site: they show what is there now
TOP = ('CONTRIBUTING.md', 'CHANGELOG.md', 'CITATION.cff') # files of the top level that pages link to
IMAGES = ('image/png', 'image/svg+xml', 'image/jpeg')


def source(name): return ROOT/name if name in TOP else NBS/name

def as_lines(text):
    "A text as a notebook stores it: Quarto joins the lines of a list and loses the newlines of a string"
    return text.splitlines(True)

def outside(target): return bool(urlsplit(target).scheme or target.startswith('//'))


# -- what a cell defines

def folded(code):
    "A cell of source code behind a fold"
    return '\n'.join(['#| code-fold: true', '#| code-summary: "Source"', *code.strip('\n').splitlines()])

def header(node, lines):
    "A definition up to its body, with the comments on its arguments, as it stands in the source"
    first, body = node.lineno - 1, node.body[0]
    text, last = lines[first:body.lineno - 1], lines[body.lineno - 1]
    shared = body.lineno - 1 == first or last[:body.col_offset].strip()
    if shared: text = text + [last.encode()[:body.col_offset].decode()]
    return textwrap.dedent('\n'.join(text)).rstrip()

def fields(node, lines):
    "The fields of a dataclass or named tuple, with their comments"
    found = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return textwrap.dedent('\n'.join('\n'.join(lines[n.lineno - 1:n.end_lineno]) for n in found))

def has_fields(node):
    words = [ast.unparse(n) for n in (*node.decorator_list, *node.bases)]
    return any('dataclass' in w or 'NamedTuple' in w for w in words)

def patched(node):
    "The class that a function is patched into (fastcore's `@patch`), or ''"
    names = [ast.unparse(d).split('(')[0] for d in node.decorator_list]
    if not isinstance(node, ast.FunctionDef) or 'patch' not in names or not node.args.args: return ''
    first = node.args.args[0].annotation
    return ast.unparse(first) if isinstance(first, ast.Name) else ''

def full_name(node):
    owner = patched(node)
    return f'{owner}.{node.name}' if owner else node.name

def described(node, lines, link, prefix='', level='###'):
    "Name, signature and docstring of a function or class, and of its public methods, as Markdown"
    doc, parts = ast.get_docstring(node), [header(node, lines)]
    if isinstance(node, ast.ClassDef):
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == '__init__'), None)
        data = fields(node, lines) if has_fields(node) else ''
        parts += [textwrap.indent(t, '    ') for t in (header(init, lines) if init else '', data) if t]
    if patched(node): level = '####'
    name, code = prefix + full_name(node), '\n'.join(parts)
    says = ' '.join(filter(None, [doc.strip() if doc else '', link(name)]))
    yield f'{level} {name}\n\n```python\n{code}\n```\n' + (f'\n{says}\n' if says else '')
    for n in node.body if isinstance(node, ast.ClassDef) else ():
        if not isinstance(n, ast.FunctionDef) or n.name.startswith('_') or not ast.get_docstring(n): continue
        yield from described(n, lines, link, f'{node.name}.', level + '#')

def documented(code, link=lambda name: ''):
    "Markdown for all that a cell defines for others"
    lines, kinds = code.splitlines(), (ast.FunctionDef, ast.ClassDef)
    found = [n for n in ast.parse(code).body if isinstance(n, kinds) and not n.name.startswith('_')]
    return [t for n in found for t in described(n, lines, link)]


# -- modules, and where a name is

def module_of(cells):
    "The module that a notebook exports, 'algebra.kernel', or None"
    for c in cells:
        found = re.search(r'^#\|\s*default_exp\s+(\S+)', ''.join(c['source']), re.M)
        if found: return found[1]
    return None

def module_file(module): return ROOT/'repq'/(module.replace('.', '/') + '.py')

def source_page(module): return f'code/{module.replace(".", "/")}.html'

@functools.cache
def line_numbers(module):
    "name -> line, of all that a module defines"
    found = {}
    for n in ast.parse(module_file(module).read_text(encoding='utf-8')).body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)): found[full_name(n)] = n.lineno
        for m in n.body if isinstance(n, ast.ClassDef) else ():
            if isinstance(m, ast.FunctionDef): found[f'{n.name}.{m.name}'] = m.lineno
    return found

def source_link(module, depth):
    "name -> Markdown of a link to its line"
    lines = line_numbers(module)
    def link(name):
        place = f'#L{lines[name]}' if name in lines else ''
        return f'[source]({"../"*depth}{source_page(module)}{place}){{.source-link}}'
    return link

CODE_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>repq.{module}: source</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px system-ui, sans-serif; margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem }}
pre {{ font: 13px/1.5 ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; overflow-x: auto }}
:target {{ background: #ffe08a66 }}
</style></head><body>
<p><a href="{up}{page}">The page that explains it</a> · repq.{module}</p>
<pre><code>{code}</code></pre>
</body></html>
"""

def code_page(
    module, # 'algebra.kernel'
    page,   # address of the page that explains it
):
    "A module as a page on which each line has a name"
    text = html.escape(module_file(module).read_text(encoding='utf-8'))
    lines = [f'<span id="L{i}">{line}</span>' for i, line in enumerate(text.splitlines(), 1)]
    up = '../'*(module.count('.') + 1)
    return CODE_PAGE.format(module=module, page=page, up=up, code='\n'.join(lines))


# -- links from names in prose

# public names that are ordinary words when they stand in prose
WORDS = 'merged sampled plain repq fit schedule registered flatten load save'.split()

@functools.cache
def symbols():
    "name -> {module: address} of functions and classes"
    from .._modidx import d
    found = {}
    for module, names in d['syms'].items():
        for full, (address, _) in names.items():
            name = full[len(module) + 1:]
            if '.' not in name and not name.startswith('_'): found.setdefault(name, {})[module] = address
    return found

def says_its_kind(name):
    "Whether this is a name and no word: RepConv2d and check_parity, but not Batch or draw"
    return '_' in name or bool(re.search('[a-z0-9][A-Z]|[0-9]', name))

def address_of(code):
    "Where the name in a piece of code is explained, or None: a public name, one like no word, or a call"
    from .. import _home
    match = re.fullmatch(r'(?:repq\.((?:\w+\.)*))?(\w+)(\(.*\))?', code)
    if not match: return None
    path, name, call = match.groups()
    homes = symbols().get(name, {})
    if path: homes = {m: a for m, a in homes.items() if m.endswith(path.rstrip('.').split('.')[-1])}
    home = f'repq.{_home.get(name)}'
    if home in homes and not path and (name not in WORDS or path is not None or call): return homes[home]
    plain = path is None and not call and not says_its_kind(name)
    return None if plain or len(homes) != 1 else next(iter(homes.values()))

def link_names(text, up):
    "Prose in which pieces of code that are names lead to their explanation"
    fixed = r'^(`{3,}|~{3,}).*?^\1\s*$|^#[^\n]*$|\[[^\]]*\]\([^)]*\)|<[^>]*>|``.+?``|\$\$.+?\$\$'
    out, last = [], 0
    def linked(m):
        address = address_of(m[1])
        return f'[{m[0]}]({up}{address})' if address else m[0]
    for m in re.finditer(fixed, text, re.M | re.S):
        out += [re.sub(r'(?<!\[)`([^`\n]+)`', linked, text[last:m.start()]), m[0]]
        last = m.end()
    return ''.join(out) + re.sub(r'(?<!\[)`([^`\n]+)`', linked, text[last:])


# -- cells and outputs

def processors(module, depth):
    "nbdev's, except that nothing is executed: stored outputs stay, signatures are read from the source"
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import Processor
    from nbdev.processors import (clean_magics, hide_, hide_line, populate_language, rm_export,
                                  rm_header_dash, strip_ansi, strip_hidden_metadata)
    from execnb.nbio import mk_cell
    link = source_link(module, depth) if module else lambda name: ''

    class exports(Processor):
        "Exported cells become signatures and folded source; imports go"
        def begin(self):
            cells = []
            for c in self.nb.cells:
                if c.cell_type != 'code' or 'export' not in c.directives_:
                    cells.append(c)
                    continue
                body = ast.parse(c.source).body
                if all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body): continue
                found = documented(c.source, link)
                for text in found:
                    cells.append(mk_cell(text, 'markdown'))
                    cells[-1].directives_ = {}
                # what has a signature above is folded; a table of constants has none, and is shown
                if found or len(c.source.splitlines()) > 24: c.source = folded(c.source)
                c.directives_, c.outputs = {}, []
                cells.append(c)
            self.nb.cells = cells
    return [FrontmatterProc, populate_language, exports, strip_ansi, hide_line, rm_header_dash, rm_export,
            clean_magics, hide_, strip_hidden_metadata]

def visible(text):
    words = re.sub(r'<style.*?</style>|<[^>]*>|\s', '', text, flags=re.S)
    return words or '<img' in text or '<svg' in text

def offline(output):
    "An output without what makes Quarto fetch scripts: HTML as raw Markdown; None if nothing is left to see"
    data = output.get('data')
    if data is None: return output
    if 'text/html' in data:
        text = ''.join(data['text/html']).strip()
        if not visible(text): return None
        fence = '`'*max([3, *(len(m) + 1 for m in re.findall('`+', text))])
        data = {'text/markdown': f'{fence}{{=html}}\n{text}\n{fence}\n'}
    def keep(kind):
        doubled = kind == 'text/plain' and 'text/markdown' in data
        return 'javascript' not in kind and 'widget' not in kind and not doubled
    return {**output, 'data': {k: v for k, v in data.items() if keep(k)}}

def listed(output):
    "An output whose texts are lists of lines"
    def lines(value): return as_lines(''.join(value)) if isinstance(value, (str, list)) else value
    if 'text' in output: return {**output, 'text': lines(output['text'])}
    if 'data' not in output: return output
    texts = {k: lines(v) for k, v in output['data'].items() if k.startswith('text/')}
    return {**output, 'data': output['data'] | texts}

def is_log(output):
    "Whether an output is what a library said while it was loaded"
    said = output.get('name') == 'stderr' and ''.join(output['text'])
    return bool(said and re.search(r'site-packages/|^\[?W(ARNING|\d)', said, re.M))

def joined(outputs):
    "Outputs in which texts that were printed one after another are one"
    found = []
    for o in outputs:
        last = found[-1] if found else {}
        if o.get('output_type') == last.get('output_type') == 'stream' and o['name'] == last['name']:
            found[-1] = {**last, 'text': ''.join(last['text']) + ''.join(o['text'])}
        else: found.append(o)
    return found

def without_examples(text, folder):
    "A stored output without links into a folder that was there for an example only"
    def keep(m):
        there = outside(m[2]) or m[2].startswith('#') or (folder/unquote(urlsplit(m[2]).path)).exists()
        return m[0] if there else m[1]
    text = re.sub(r'\[([^\[\]]*)\]\(([^()\s]+)\)', keep, text)
    return re.sub(r'<a href="([^"]+)">(.*?)</a>', lambda m: keep([m[0], m[2], m[1]]), text, flags=re.S)

def localize(text, depth):
    "Links to results and to files of the top level as seen from a page; a run's notebook becomes its page"
    ours = rf'(\]\(|href=")(?:\.\./)+(results/|{"|".join(map(re.escape, TOP))})'
    text = re.sub(ours, rf'\g<1>{"../"*depth}\g<2>', text)
    return re.sub(r'(results/[\w-]+/[\w.-]+/)notebook\.ipynb', r'\1index.html', text)

def describe_images(cell, heading):
    "Alternative texts for pictures that have none: the section they are in"
    says = f'Figure of the section "{heading}"'
    code = ''.join(cell['source'])
    if any(set(o.get('data', ())) & set(IMAGES) for o in cell['outputs']) and '#| fig-alt:' not in code:
        cell['source'] = f'#| fig-alt: {json.dumps(says, ensure_ascii=False)}\n{code}'
    for o in cell['outputs']:
        if 'text/markdown' not in o.get('data', {}): continue
        text, label = ''.join(o['data']['text/markdown']), html.escape(says)
        text = re.sub(r'<svg (?![^>]*aria-label)', f'<svg role="img" aria-label="{label}" ', text)
        text = re.sub(r'<img (?![^>]*\balt=)', f'<img alt="{label}" ', text)
        o['data']['text/markdown'] = text
    return cell

def as_prose(cell):
    "Outputs of a cell that shows only Markdown as prose: its headings reach the table of contents"
    texts = [o.get('data', {}).get('text/markdown') for o in cell['outputs']]
    if not texts or None in texts: return [cell]
    return [dict(cell_type='markdown', metadata={}, source=''.join(t)) for t in texts]

def last_heading(text, heading):
    found = re.findall(r'^#{1,4}\s+(.+?)\s*$', re.sub(r'^(`{3,}).*?^\1', '', text, flags=re.M | re.S), re.M)
    return re.sub(r'[`*_]|\{#.*\}', '', found[-1]).strip() if found else heading


# -- pages

def of_text(path):
    "A file of the top level as a page"
    title, text = re.match(r'# ([^\n]+)\n(.*)', path.read_text(encoding='utf-8'), re.S).groups()
    front = f'---\ntitle: {title}\noutput-file: {path.stem.lower()}.html\n---\n'
    text = re.sub(r'\]\(nbs/', '](', text)
    cells = [dict(cell_type='raw', source=as_lines(front)), dict(cell_type='markdown', source=as_lines(text))]
    return dict(cells=[dict(metadata={}, **c) for c in cells])

def about_source(name, module, depth):
    "Where a page comes from: its notebook to download, its module to read"
    up = '../'*depth
    code = f', and the source of [`repq.{module}`]({up}{source_page(module)})' if module else ''
    return f'::: {{.source-note}}\nThis page is a notebook{code}: [download it]({up}notebooks/{name}).\n:::\n'

def process(path, live=True):
    "A page as a dictionary: a notebook that Quarto renders without executing anything"
    path = Path(path)
    if path.suffix == '.md': return of_text(path)
    from execnb.nbio import dict2nb, nb2dict
    from nbdev.process import NBProcessor
    name = path.relative_to(NBS).as_posix()
    depth = name.count('/')
    raw = json.loads(path.read_text(encoding='utf-8'))
    module = module_of(raw['cells'])
    with warnings.catch_warnings(), inside(ROOT):
        warnings.simplefilter('ignore')
        if live and name in LIVE: raw['cells'] = made_again(raw['cells'], path.parent, lambda cell: True)
        nb = dict2nb(raw)
        nb.path_ = path
        NBProcessor(nb=nb, procs=processors(module, depth)).process()
    page = nb2dict(nb)
    page['metadata'] = dict(kernelspec=page['metadata']['kernelspec'])
    page['cells'] = [new for c in page['cells'] for new in page_cells(c, name, depth)]
    note = dict(cell_type='markdown', metadata={}, source=about_source(name, module, depth))
    # those who want to run a tutorial look for the notebook before they read it
    page['cells'].insert(1 if name.startswith('tutorials/') else len(page['cells']), note)
    heading = ''
    for c in page['cells']:
        if c['cell_type'] == 'markdown': heading = last_heading(''.join(c['source']), heading)
        if c['cell_type'] == 'code':
            describe_images(c, heading)
            c['outputs'] = list(map(listed, c['outputs']))
        c['source'] = as_lines(''.join(c['source']))
    for i, c in enumerate(page['cells']): c['id'] = f'cell-{i}'
    return page

def page_cells(cell, name, depth):
    "A processed cell as cells of the page"
    text = ''.join(cell['source'])
    cell['metadata'] = {}
    if cell['cell_type'] == 'markdown':
        cell['source'] = localize(link_names(text.removeprefix(NOT_IN_README + '\n'), '../'*depth), depth)
    if cell['cell_type'] != 'code': return [cell]
    cell['source'] = re.sub(r'^#\| eval:.*\n', '', text, flags=re.M)
    cell['outputs'] = joined(o for o in map(offline, cell['outputs']) if o and not is_log(o))
    for o in cell['outputs']:
        if 'text/markdown' not in o.get('data', {}): continue
        shown = ''.join(o['data']['text/markdown'])
        if name not in (*LIVE, 'index.ipynb'): shown = without_examples(shown, (NBS/name).parent)
        o['data']['text/markdown'] = localize(shown, depth)
    return as_prose(cell) if re.search(r'^#\| echo: false', text, re.M) else [cell]

@contextlib.contextmanager
def inside(folder):
    "nbdev looks for settings.ini from here, and must not write"
    here, test = os.getcwd(), os.environ.get('IN_TEST')
    os.chdir(folder)
    os.environ['IN_TEST'] = '1'
    try: yield
    finally:
        os.chdir(here)
        os.environ.pop('IN_TEST') if test is None else os.environ.__setitem__('IN_TEST', test)
