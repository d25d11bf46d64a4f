"What pages say, and what is wrong with them: links, headings, mathematics, pictures, requests to the outside"
# plain Python: patterns and nothing to teach; tests/cli/test_site.py proves it
import html, json, os, re, subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit
from .pages import IMAGES, outside


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

def headings(page):
    "(level, text) of the headings that reach the table of contents: those of prose, not those of outputs"
    prose = [''.join(c['source']) for c in page['cells'] if c['cell_type'] == 'markdown']
    texts = [re.sub(r'^(`{3,}|~{3,}).*?^\1\s*$', '', t, flags=re.M | re.S) for t in prose]
    return [(len(m[1]), m[2]) for t in texts for m in re.finditer(r'^(#{1,6})\s+(.+?)\s*$', t, re.M)]

def code_lines(page):
    "Lines of code that a page shows: cells, and blocks in prose"
    for c in page['cells']:
        text = ''.join(c['source'])
        if c['cell_type'] == 'code' and not re.search(r'^#\| (echo|include): false', text, re.M):
            yield from re.sub(r'^#\|.*\n', '', text, flags=re.M).splitlines()
        if c['cell_type'] == 'markdown':
            blocks = re.finditer(r'^(`{3,})([^\n]*)\n(.*?)^\1\s*$', text, re.M | re.S)
            for m in blocks:
                if not m[2].startswith('{='): yield from m[3].splitlines()

def pictures(page):
    "The alternative text of each picture of a page, '' if it has none"
    for c in page['cells']:
        alt = re.search(r'^#\| fig-alt:\s*(.+?)\s*$', ''.join(c['source']), re.M)
        for o in c.get('outputs', ()):
            if set(o.get('data', ())) & set(IMAGES): yield alt[1] if alt else ''
    for text in markdown_of(page):
        text = re.sub(r'^(`{3,}|~{3,})(?!\{=html).*?^\1\s*$', '', text, flags=re.M | re.S)
        yield from re.findall(r'!\[([^\]]*)\]\(', text)
        for tag in re.findall(r'<(?:img|svg)\b[^>]*>', text):
            hidden = 'aria-hidden' in tag
            found = re.search(r'\b(?:alt|aria-label)="([^"]*)"', tag)
            yield 'hidden from readers' if hidden else found[1] if found else ''

def text_lists(page):
    "Texts of a page that are strings where Quarto needs lists of lines"
    for i, c in enumerate(page['cells']):
        if not isinstance(c['source'], list): yield f'source of cell {i}'
        for o in c.get('outputs', ()):
            texts = [v for k, v in o.get('data', {}).items() if k.startswith('text/')]
            if 'text' in o: texts.append(o['text'])
            if not all(isinstance(t, list) for t in texts): yield f'output of cell {i}'


# -- links

def address_of_pages(made):
    "address of the rendered page -> name"
    return {(Path(n).parent/front_matter(p)['output-file']).as_posix(): n for n, p in made.items()}

def link_errors(folder, made):
    "Links of processed pages that lead nowhere"
    address, errors = address_of_pages(made), []
    places = {n: anchors(p) for n, p in made.items()}
    for name, page in made.items():
        for target in dict.fromkeys(t for text in markdown_of(page) for t in links(text)):
            if outside(target): continue
            part = urlsplit(target)
            path = Path(name).parent/unquote(part.path) if part.path else name
            path = os.path.normpath(path).replace(os.sep, '/')
            path = address.get(path, path)
            if not (folder/path).is_file():
                errors.append(f'{name}: {target} leads nowhere')
                continue
            if not part.fragment: continue
            if path not in places:
                text = (folder/path).read_text(encoding='utf-8')
                places[path] = set(re.findall(r'id="([^"]+)"', text))
            if unquote(part.fragment) not in places[path]:
                errors.append(f'{name}: {target} has no such place')
    return errors


# -- the rendered site

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

def katex_errors(
    katex, # folder with katex.js
    made   # {name: page}
):
    "Equations that KaTeX does not take; needs node"
    texts = [(name, text) for name, page in made.items() for text in markdown_of(page)]
    found = [(name, e) for name, text in texts for e in equations(text)]
    command = ['node', '-e', TRY_KATEX, str(Path(katex).resolve()/'katex.js')]
    out = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True).stdout
    return len(found), json.loads(out)
