"The site without Quarto: everything that Quarto gets, in one folder. `make docs` calls it"
# plain Python: dense mechanism of rendering with nothing to teach; tests/cli/test_site.py proves it
import json, re, shutil, sys
from pathlib import Path
from urllib.parse import unquote, urlsplit
from .page_checks import front_matter, katex_errors, links, markdown_of, site_errors
from .pages import NBS, ROOT, code_page, module_of, process, source, source_page
from .readme import need_checkout


# -- the sidebar

def config():
    import yaml
    return yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))

def sections(): return config()['website']['sidebar']['contents']

def title_of(item): return item.get('section') or item.get('text')

def flat(contents):
    "Pages, those of inner sections too"
    found = []
    for item in contents:
        if isinstance(item, str): found.append(item)
        elif 'href' in item: found.append(item['href'])
        if not isinstance(item, str): found += flat(item.get('contents', ()))
    return found

def sidebar():
    "entry of the first level -> pages, in order"
    return {title_of(s): flat([s]) for s in sections()}

def rooms():
    "room -> its pages in the order of the sidebar"
    found = {}
    for page in pages():
        room, _, file = page.partition('/')
        if re.match(r'\d+_', file): found.setdefault(room, []).append(page)
    return found

def pages(): return flat(sections())

def entries(contents, open_levels=2, depth=1):
    "What a visitor sees of the sidebar before opening anything, by Quarto's rule: deeper sections are folded"
    seen = []
    for item in contents:
        seen.append(item if isinstance(item, str) else title_of(item))
        if isinstance(item, dict) and depth < open_levels:
            seen += entries(item.get('contents', ()), open_levels, depth + 1)
    return seen


# -- the site

KATEX_HERE = """format:
  html:
    html-math-method:
      method: katex
      url: {up}katex/
"""
COPIED = ('katex', 'results', 'code', 'notebooks') # what Quarto is not trusted to take along whole

def page_text(name, page):
    "A page as the file that Quarto reads"
    if name.endswith('.md'): return '\n'.join(''.join(c['source']) for c in page['cells'])
    return json.dumps(page, ensure_ascii=False, indent=1) + '\n'

def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')

def copy_to(path, dest):
    dest.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, dest)

def linked_results(made):
    "Files of results that pages link to"
    targets = {t for page in made.values() for text in markdown_of(page) for t in links(text)}
    paths = {unquote(urlsplit(t).path).lstrip('./') for t in targets if re.match(r'(\.\./)*results/', t)}
    return [ROOT/p for p in sorted(paths) if (ROOT/p).is_file()]

def write_run_pages(dest, results=ROOT/'results'):
    "A page for each finished run: results/<profile>/<run>/index.html"
    from ..reproduce.run_pages import run_page
    folders = sorted(p.parent for p in results.glob('*/*/record.json'))
    for folder in folders:
        name = folder.relative_to(results.parent)
        write_text(dest/name/'index.html', run_page(folder))
    return folders

def write_sources(dest, made):
    "The notebook behind each page, to download, and its module, to read"
    for name, page in made.items():
        if not name.endswith('.ipynb'): continue
        copy_to(NBS/name, dest/'notebooks'/name)
        module = module_of(json.loads((NBS/name).read_text(encoding='utf-8'))['cells'])
        if not module: continue
        address = (Path(name).parent/front_matter(page)['output-file']).as_posix()
        write_text(dest/source_page(module), code_page(module, address))

def build(dest=ROOT/'_proc', katex=None):
    "Everything that Quarto needs, in one folder"
    dest, made = Path(dest), {}
    shutil.rmtree(dest, ignore_errors=True)
    for name in pages():
        made[name] = process(source(name))
        write_text(dest/name, page_text(name, made[name]))
    for name in ('_quarto.yml', 'CITATION.cff'): shutil.copy(ROOT/name, dest/name)
    for p in NBS.rglob('*'):
        if p.suffix not in ('.scss', '.svg', '.png', '.html') or '.ipynb_checkpoints' in p.parts: continue
        copy_to(p, dest/p.relative_to(NBS))
    for folder in {(dest/name).parent for name in made} - {dest}:
        # Quarto writes the address of KaTeX as it stands
        up = '../'*len(folder.relative_to(dest).parts)
        (folder/'_metadata.yml').write_text(KATEX_HERE.format(up=up))
    write_run_pages(dest)
    write_sources(dest, made)
    for file in linked_results(made): copy_to(file, dest/file.relative_to(ROOT))
    if katex:
        unused = shutil.ignore_patterns('*.mjs', 'contrib', 'katex.js', 'katex.css', '*.md', '*swap*')
        shutil.copytree(katex, dest/'katex', dirs_exist_ok=True, ignore=unused)
    return made

def finish(source=ROOT/'_proc', dest=ROOT/'_docs'):
    "Take the site out of Quarto's folder, and what no page names (fonts) with it"
    shutil.rmtree(dest, ignore_errors=True)
    shutil.move(source/'_docs', dest)
    for name in COPIED:
        if (source/name).is_dir(): shutil.copytree(source/name, dest/name, dirs_exist_ok=True)
    shutil.copy(source/'CITATION.cff', dest)


def main(
    command, # 'build': pages for Quarto, with the folder of KaTeX; 'finish': take and check what it rendered
    *args
):
    need_checkout()
    if command == 'build':
        katex = Path(args[0]) if args else None
        made = build(katex=katex)
        if katex:
            n, wrong = katex_errors(katex, made)
            if wrong: sys.exit('\n'.join(wrong))
            print(f'KaTeX takes all {n} equations')
        print(f'{len(made)} pages in _proc')
    elif command == 'finish':
        finish()
        errors = site_errors(ROOT/'_docs')
        if errors: sys.exit('\n'.join(errors[:50] + [f'{len(errors)} defects']))
        print('The site is in _docs: open _docs/index.html. It asks nothing of the outside, '
              'and all its links lead somewhere')
    else: sys.exit(f'python -m repq.cli.site takes build or finish, got {command}')

if __name__ == '__main__': main(*sys.argv[1:])
