"The site without Quarto: pages as Quarto gets them, and what can be checked of them. `make docs` calls it"
# plain Python: dense mechanism of rendering with nothing to teach; tests/cli/test_site.py proves it
import ast, contextlib, html, json, os, re, shutil, subprocess, sys, textwrap, warnings
from pathlib import Path
from urllib.parse import unquote, urlsplit
from .readme import made_again, need_checkout

ROOT = Path(__file__).parents[2]
NBS = ROOT/'nbs'
LIVE = ('results.ipynb', 'reference.ipynb') # executed for each site: they show what is there now
TOP = ('CONTRIBUTING.md', 'CHANGELOG.md', 'CITATION.cff') # files of the top level that pages link to


# -- the sidebar

def config():
    import yaml
    return yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))

def sections(): return config()['website']['sidebar']['contents']

def flat(contents):
    "Pages, those of inner sections too"
    return [p for c in contents for p in ([c] if isinstance(c, str) else flat(c['contents']))]

def sidebar():
    "section -> pages, in order"
    return {s['section']: flat(s['contents']) for s in sections()}

def rooms():
    "inner section -> pages, in order"
    inner = [c for s in sections() for c in s['contents'] if not isinstance(c, str)]
    return {c['section']: flat(c['contents']) for c in inner}

def pages(): return flat(sections())

def source(name): return ROOT/name if name in TOP else NBS/name


# -- from a notebook to a page

def folded(source):
    "A cell of source code as Quarto shows it: open if it is short"
    lines = source.strip('\n').splitlines()
    fold = 'show' if len(lines) <= 24 else 'true'
    return '\n'.join([f'#| code-fold: {fold}', '#| code-summary: "Source"', *lines])

def header(node, lines):
    "A definition up to its body, with the comments on its arguments, as it stands in the source"
    first, body = node.lineno - 1, node.body[0]
    text, last = lines[first:body.lineno - 1], lines[body.lineno - 1]
    shared = body.lineno - 1 == first or last[:body.col_offset].strip()
    if shared: text = text + [last.encode()[:body.col_offset].decode()]
    return textwrap.dedent('\n'.join(text)).rstrip()

def fields(node, lines):
    "The fields of a dataclass, with their comments"
    found = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return textwrap.dedent('\n'.join('\n'.join(lines[n.lineno - 1:n.end_lineno]) for n in found))

def described(node, lines, prefix='', level='###'):
    "Name, signature and docstring of a function or class, and of its public methods, as Markdown"
    doc, parts = ast.get_docstring(node), [header(node, lines)]
    if isinstance(node, ast.ClassDef):
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == '__init__'), None)
        data = fields(node, lines) if any('dataclass' in ast.unparse(d) for d in node.decorator_list) else ''
        parts += [textwrap.indent(t, '    ') for t in (header(init, lines) if init else '', data) if t]
    code = '\n'.join(parts)
    yield f'{level} {prefix}{node.name}\n\n```python\n{code}\n```\n' + (f'\n*{doc.strip()}*\n' if doc else '')
    for n in node.body if isinstance(node, ast.ClassDef) else ():
        if not isinstance(n, ast.FunctionDef) or n.name.startswith('_') or not ast.get_docstring(n): continue
        yield from described(n, lines, f'{node.name}.', level + '#')

def documented(code):
    "Markdown for all that a cell defines for others"
    lines, kinds = code.splitlines(), (ast.FunctionDef, ast.ClassDef)
    found = [n for n in ast.parse(code).body if isinstance(n, kinds) and not n.name.startswith('_')]
    return [t for n in found for t in described(n, lines)]

def processors():
    "nbdev's, except that nothing is executed: stored outputs stay, signatures are read from the source"
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import Processor
    from nbdev.processors import (add_links, clean_magics, hide_, hide_line, populate_language, rm_export,
                                  rm_header_dash, strip_ansi, strip_hidden_metadata)
    from execnb.nbio import mk_cell

    class exports(Processor):
        "Exported cells become signatures and source; imports go"
        def begin(self):
            cells = []
            for c in self.nb.cells:
                if c.cell_type != 'code' or 'export' not in c.directives_: cells.append(c); continue
                body = ast.parse(c.source).body
                if all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body): continue
                for text in documented(c.source):
                    cells.append(mk_cell(text, 'markdown'))
                    cells[-1].directives_ = {}
                c.source, c.directives_, c.outputs = folded(c.source), {}, []
                cells.append(c)
            self.nb.cells = cells
    return [FrontmatterProc, populate_language, exports, strip_ansi, hide_line, rm_header_dash, rm_export,
            clean_magics, hide_, add_links, strip_hidden_metadata]

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

def without_examples(text, folder):
    "A stored output without links into a folder that was there for an example only"
    def keep(m):
        there = outside(m[2]) or m[2].startswith('#') or (folder/unquote(urlsplit(m[2]).path)).exists()
        return m[0] if there else m[1]
    text = re.sub(r'\[([^\[\]]*)\]\(([^()\s]+)\)', keep, text)
    return re.sub(r'<a href="([^"]+)">(.*?)</a>', lambda m: keep([m[0], m[2], m[1]]), text, flags=re.S)

# functions, but in prose these words mean something else
WORDS = 'merged sampled plain repq fit schedule registered flatten'.split()

def localize(text, depth, host):
    "Links to our own site, and to results, as relative links"
    up = '../'*depth
    text = re.sub(rf'\[`({"|".join(WORDS)})`\]\({re.escape(host)}[^)]*\)', r'`\1`', text)
    ours = rf'(\]\(|href=")(?:\.\./)+(results/|{"|".join(map(re.escape, TOP))})'
    return re.sub(ours, rf'\g<1>{up}\g<2>', text.replace(host, up))

def of_text(path):
    "A file of the top level as a page"
    title, text = re.match(r'# ([^\n]+)\n(.*)', path.read_text(encoding='utf-8'), re.S).groups()
    front = f'---\ntitle: {title}\noutput-file: {path.stem.lower()}.html\n---\n'
    text = re.sub(r'\]\(nbs/', '](', text)
    cells = [dict(cell_type='raw', source=front), dict(cell_type='markdown', source=text)]
    return dict(cells=[dict(metadata={}, **c) for c in cells])

def process(path, live=True):
    "A page as a dictionary: a notebook that Quarto renders without executing anything"
    if path.suffix == '.md': return of_text(path)
    from execnb.nbio import dict2nb, nb2dict
    from nbdev.config import get_config
    from nbdev.process import NBProcessor
    path, config = Path(path), get_config(path=ROOT)
    host = config.doc_host.rstrip('/') + '/' + config.doc_baseurl.strip('/') + '/'
    depth = len(path.relative_to(NBS).parts) - 1
    raw = json.loads(path.read_text(encoding='utf-8'))
    with warnings.catch_warnings(), inside(ROOT):
        warnings.simplefilter('ignore')
        if live and path.name in LIVE: raw['cells'] = made_again(raw['cells'], path.parent, lambda cell: True)
        nb = dict2nb(raw)
        nb.path_ = path
        NBProcessor(nb=nb, procs=processors()).process()
    page = nb2dict(nb)
    page['metadata'] = dict(kernelspec=page['metadata']['kernelspec'])
    for c in page['cells']:
        source = ''.join(c['source'])
        prose = c['cell_type'] == 'markdown'
        shown = re.sub(r'^#\| eval:.*\n', '', source, flags=re.M)
        c['source'] = localize(source, depth, host) if prose else shown
        c['metadata'] = {}
        if c['cell_type'] != 'code': continue
        c['outputs'] = [o for o in map(offline, c['outputs']) if o]
        for o in c['outputs']:
            if 'text/markdown' in o.get('data', {}):
                text = ''.join(o['data']['text/markdown'])
                if path.name not in (*LIVE, 'index.ipynb'): text = without_examples(text, path.parent)
                o['data']['text/markdown'] = localize(text, depth, host)
    return page

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


# -- what a page says

def markdown_of(page):
    "Prose and Markdown outputs"
    for c in page['cells']:
        if c['cell_type'] == 'markdown': yield ''.join(c['source'])
        for o in c.get('outputs', ()):
            if 'text/markdown' in o.get('data', {}): yield ''.join(o['data']['text/markdown'])

def front_matter(page):
    import yaml
    first = page['cells'][0]
    return yaml.safe_load(''.join(first['source']).strip().strip('-')) if first['cell_type'] == 'raw' else {}

def without_code(text):
    return re.sub(r'^(`{3,}|~{3,})(?!\{=html).*?^\1\s*$|`[^`\n]+`', '', text, flags=re.M | re.S)

def equations(text):
    "Mathematics of a text, by Pandoc's rules: $$..$$, and $..$ without space inside and no digit behind"
    text = without_code(text)
    found = [m[1] for m in re.finditer(r'\$\$(.+?)\$\$', text, re.S)]
    rest = re.sub(r'\$\$.+?\$\$', '', text, flags=re.S)
    inline = r'(?<![\\$])\$(?![\s$])((?:\\.|[^$\\])+?)(?<!\s)\$(?!\d)'
    return found + [m[1] for m in re.finditer(inline, rest)]

def unbalanced(tex):
    "What is wrong with an equation, or ''"
    depth = 0
    for c in re.sub(r'\\\\|\\[{}]', '', tex):
        depth += (c == '{') - (c == '}')
        if depth < 0: return 'a } without {'
    if depth: return 'a { without }'
    left, right = (len(re.findall(rf'\\{w}(?![a-zA-Z])', tex)) for w in ('left', 'right'))
    if left != right: return f'{left} \\left and {right} \\right'
    stack = []
    for kind, name in re.findall(r'\\(begin|end)\{(\w+\*?)\}', tex):
        if kind == 'begin': stack.append(name)
        elif not stack or stack.pop() != name: return f'\\end{{{name}}} without \\begin'
    return f'\\begin{{{stack[-1]}}} without \\end' if stack else ''

def stray_dollars(text):
    "Dollar signs that belong to no equation"
    text = re.sub(r'\$\$.+?\$\$', '', without_code(text), flags=re.S)
    for e in equations(text): text = text.replace(f'${e}$', '')
    return re.findall(r'(?<!\\)\$', re.sub(r'^(`{3,})\{=html\}.*?^\1', '', text, flags=re.M | re.S))

def links(text):
    "Targets of links and images of a Markdown text, raw HTML included"
    text = without_code(text)
    markdown = re.finditer(r'\]\(<?([^()\s>]+(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+"[^"]*")?\)', text)
    raw = re.finditer(r'(?:href|src)="([^"]+)"', text)
    return [m[1] for m in markdown] + [html.unescape(m[1]) for m in raw]

def identifier(heading):
    "Pandoc's name of a heading"
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading)
    text = re.sub(r'[^\w\s.-]', '', text.replace('`', '')).strip().lower()
    return re.sub(r'^[^a-z]+', '', re.sub(r'\s+', '-', text)) or 'section'

def anchors(page):
    "Where links into a page can go"
    found, seen = set(), {}
    for text in markdown_of(page):
        found |= set(re.findall(r'id="([^"]+)"', text)) | set(re.findall(r'\{#([\w.:-]+)', text))
        prose = re.sub(r'^(`{3,}).*?^\1\s*$', '', text, flags=re.M | re.S)
        for m in re.finditer(r'^#{1,6}\s+(.+?)\s*$', prose, re.M):
            name = identifier(m[1])
            found.add(name if name not in seen else f'{name}-{seen[name]}')
            seen[name] = seen.get(name, 0) + 1
    return found

def outside(target): return bool(urlsplit(target).scheme or target.startswith('//'))


# -- the site

KATEX_HERE = """format:
  html:
    html-math-method:
      method: katex
      url: {up}katex/
"""

def page_text(name, page):
    "A page as the file that Quarto reads"
    if name.endswith('.md'): return '\n'.join(c['source'] for c in page['cells'])
    return json.dumps(page, ensure_ascii=False, indent=1) + '\n'

def copy_to(path, dest):
    dest.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, dest)

def linked_results(made):
    "Files of results that pages link to"
    targets = {t for page in made.values() for text in markdown_of(page) for t in links(text)}
    paths = {unquote(urlsplit(t).path).lstrip('./') for t in targets if re.match(r'(\.\./)*results/', t)}
    return [ROOT/p for p in sorted(paths) if (ROOT/p).is_file()]

def build(dest=ROOT/'_proc', katex=None):
    "Everything that Quarto needs, in one folder"
    dest, made = Path(dest), {}
    shutil.rmtree(dest, ignore_errors=True)
    for name in pages():
        made[name] = process(source(name))
        (dest/name).parent.mkdir(parents=True, exist_ok=True)
        (dest/name).write_text(page_text(name, made[name]), encoding='utf-8')
    for name in ('_quarto.yml', 'CITATION.cff'): shutil.copy(ROOT/name, dest/name)
    for p in NBS.rglob('*'):
        if p.suffix not in ('.scss', '.svg', '.png', '.html') or '.ipynb_checkpoints' in p.parts: continue
        copy_to(p, dest/p.relative_to(NBS))
    for folder in {(dest/name).parent for name in made} - {dest}:
        # Quarto writes the address of KaTeX as it stands
        up = '../'*len(folder.relative_to(dest).parts)
        (folder/'_metadata.yml').write_text(KATEX_HERE.format(up=up))
    for file in linked_results(made): copy_to(file, dest/file.relative_to(ROOT))
    if katex:
        unused = shutil.ignore_patterns('*.mjs', 'contrib', 'katex.js', 'katex.css', '*.md', '*swap*')
        shutil.copytree(katex, dest/'katex', dirs_exist_ok=True, ignore=unused)
    return made

def finish(source=ROOT/'_proc', dest=ROOT/'_docs'):
    "Take the site out of Quarto's folder, and what no page names (fonts) with it"
    shutil.rmtree(dest, ignore_errors=True)
    shutil.move(source/'_docs', dest)
    for name in ('katex', 'results'):
        if (source/name).is_dir(): shutil.copytree(source/name, dest/name, dirs_exist_ok=True)
    shutil.copy(source/'CITATION.cff', dest)

REQUESTS = (   # what a browser fetches by itself: of HTML, and from the third on of style sheets too
    r'<(?:script|img|iframe|embed|source|audio|video)\b[^>]*?\bsrc=["\']([^"\']+)',
    r'<link\b(?=[^>]*\brel=["\'](?:stylesheet|preload|icon|modulepreload|shortcut icon)["\'])'
    r'[^>]*?\bhref=["\']([^"\']+)',
    r'@import\s+(?:url\()?["\']?([^"\')\s;]+)',
    r'url\(["\']?([^"\')]+)')

def target_of(site, page, path):
    "The file that an address means"
    if not path: return page
    to = (site/path.lstrip('/') if path.startswith('/') else page.parent/path).resolve()
    return to/'index.html' if to.is_dir() else to

def site_errors(site):
    "What is wrong with a rendered site: requests to the outside, files and anchors that are not there"
    site, errors, ids = Path(site).resolve(), [], {}
    files = [p for p in site.rglob('*') if p.suffix in ('.html', '.css')]
    for p in files:
        if p.suffix != '.html': continue
        ids[p] = set(re.findall(r'\b(?:id|name)=["\']([^"\']+)', p.read_text(encoding='utf-8')))
    for p in files:
        name = p.relative_to(site)
        text = re.sub(r'<pre.*?</pre>|<code.*?</code>', '', p.read_text(encoding='utf-8'), flags=re.S)
        patterns = REQUESTS if p.suffix == '.html' else REQUESTS[2:]
        asked = [m for pattern in patterns for m in re.findall(pattern, text)]
        out = [t for t in dict.fromkeys(asked) if outside(t) and not t.startswith('data:')]
        errors += [f'{name} asks {t}' for t in out]
        linked = re.findall(r'<a\b[^>]*?\bhref=["\']([^"\']*)', text) if p.suffix == '.html' else []
        for t in dict.fromkeys(asked + linked):
            if outside(t) or not t or t.startswith('#') and p.suffix == '.css': continue
            part = urlsplit(html.unescape(t))
            to = target_of(site, p, unquote(part.path))
            if not to.exists(): errors.append(f'{name} needs {t}, which is not there')
            elif part.fragment and to in ids and unquote(part.fragment) not in ids[to]:
                errors.append(f'{name} links to {t}, which has no such place')
    return errors

TRY_KATEX = """
const katex = require(process.argv[1]);
const all = JSON.parse(require("fs").readFileSync(0));
function wrong([name, tex]) {
  try { katex.renderToString(tex, {throwOnError: true, strict: "ignore"}); return null }
  catch (x) { return name + ": " + x.message }
}
console.log(JSON.stringify(all.map(wrong).filter(x => x)))
"""

def katex_errors(katex):
    "Equations that KaTeX does not take; needs node"
    texts = [(name, text) for name in pages() for text in markdown_of(process(source(name), live=False))]
    found = [(name, e) for name, text in texts for e in equations(text)]
    command = ['node', '-e', TRY_KATEX, str(Path(katex).resolve()/'katex.js')]
    out = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True).stdout
    return len(found), json.loads(out)


def main(
    command, # 'build': pages for Quarto, with the folder of KaTeX; 'finish': take and check what it rendered
    *args
):
    need_checkout()
    if command == 'build':
        katex = Path(args[0]) if args else None
        if katex:
            n, wrong = katex_errors(katex)
            if wrong: sys.exit('\n'.join(wrong))
            print(f'KaTeX takes all {n} equations')
        print(f'{len(build(katex=katex))} pages in _proc')
    elif command == 'finish':
        finish()
        errors = site_errors(ROOT/'_docs')
        if errors: sys.exit('\n'.join(errors[:50] + [f'{len(errors)} defects']))
        print('The site is in _docs: open _docs/index.html. It asks nothing of the outside, '
              'and all its links lead somewhere')
    else: sys.exit(f'python -m repq.cli.site takes build or finish, got {command}')

if __name__ == '__main__': main(*sys.argv[1:])
