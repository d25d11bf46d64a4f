"README.md from nbs/index.ipynb, without Quarto: `make readme` brings its tables up to date and writes it"
# plain Python: dense mechanism of rendering with nothing to teach; tests/cli/test_site.py proves it
import json, os, re, sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = ROOT/'nbs'/'index.ipynb'
NOT_IN_README = '<!-- not in README -->' # first line of a cell of prose that the start page alone shows


def need_checkout():
    "End where there are no notebooks to read: an installed repq brings only those of the experiments"
    if INDEX.exists(): return
    sys.exit(f'{INDEX} is not there: call make docs or make readme in a checkout of the repository')


def text_of(output):
    "What an output says, as Markdown if it is; whether it is"
    data = output.get('data', {})
    markdown = ''.join(data.get('text/markdown', ''))
    return markdown or ''.join(output.get('text') or data.get('text/plain', '')), bool(markdown)


def outputs(cell):
    "The text a cell printed or returned: as a block, Markdown as it is"
    for markdown, found in groupby(map(text_of, cell['outputs']), key=lambda o: o[1]):
        text = ''.join(t for t, _ in found).rstrip()
        if text.strip(): yield text if markdown else f'```\n{text}\n```'


def from_here(text):
    "Links that start in nbs/ start at the top"
    def link(m): return m[1] + os.path.normpath(f'nbs/{m[2]}').replace(os.sep, '/')
    return re.sub(r'(\]\()(?![a-z]+:|#|/)([^)\s]+)', link, text)


def hidden(source): return source.startswith('#| echo: false')


def render(cells=None):
    parts = []
    for cell in cells or json.loads(INDEX.read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source'])
        if source.startswith(NOT_IN_README): continue
        if cell['cell_type'] == 'markdown': parts.append(from_here(source))
        elif hidden(source): parts += map(from_here, outputs(cell))
        elif not source.startswith('#|'): parts += [f'```python\n{source}\n```', *outputs(cell)]
    return '\n\n'.join(parts) + '\n'


def best_table(
    results,     # repq.reproduce.tables.Results
    base:str,    # address of its folder as seen from the page, ending in /
    most:int=8,  # rows; if there are more, only those of the network with most of them
)->str:
    "Accuracy of the networks and methods of Table 2 with a quantized run, the paper's in brackets"
    from repq.reproduce.evidence import paper_value, spread
    have = {a[1:]: results.measured(a) for a in results.cells if a[0] == '2'}
    have = {a: m for a, m in have.items() if m.values}
    rows = list(dict.fromkeys(row for row, bits in have if bits != '32'))
    if not rows: return 'No quantized run has finished here yet.'
    networks = [network for network, _ in rows]
    if len(rows) > most: rows = [r for r in rows if r[0] == max(networks, key=networks.count)]
    columns = [b for b in ('32', '8', '4', '2') if any((row, b) in have for row in rows)]
    def shown(m):
        if m is None: return ''
        link = next(results.link(f) for seed, f in m.found.items() if seed in m.values)
        text, paper = f'{m.mean:.2f} ± {spread(m, results)}', paper_value(m.address)
        text = f'[{text}]({base}{link})' if link else text
        return text if paper is None else f'{text} ({paper:.2f})'
    bits = ['full precision' if b == '32' else f'{b} bits' for b in columns]
    lines = [f'| network | method | {" | ".join(bits)} |', '|:---|:---|' + '---:|'*len(columns)]
    for network, method in rows:
        values = [shown(have.get(((network, method), b))) for b in columns]
        lines.append(f'| {network} | {method} | {" | ".join(values)} |')
    return '\n'.join(lines)


def made_again(cells, folder=INDEX.parent, which=hidden):
    "Copies of cells, those of a kind with outputs as they are now; by default those that show results"
    from execnb.shell import CaptureShell
    shell, here, cells = CaptureShell(folder), os.getcwd(), json.loads(json.dumps(cells))
    os.chdir(folder)
    try:
        for cell in cells:
            if cell['cell_type'] != 'code' or not which(''.join(cell['source'])): continue
            cell['outputs'] = json.loads(json.dumps(shell.run(''.join(cell['source'])), default=list))
            if shell.exc: raise RuntimeError(''.join(cell['source'])) from shell.exc
    finally: os.chdir(here)
    return cells


def as_markdown(output):
    "An output that shows Markdown, as a notebook stores it"
    text = text_of(output)[0].splitlines(True)
    data = {'text/markdown': text, 'text/plain': ['<IPython.core.display.Markdown object>']}
    return dict(output_type='execute_result', execution_count=None, metadata={}, data=data)


def write():
    "Execute what shows results, keep everything else as stored, write notebook and README"
    need_checkout()
    nb = json.loads(INDEX.read_text(encoding='utf-8'))
    for cell, new in zip(nb['cells'], made_again(nb['cells'])):
        if cell['cell_type'] != 'code' or not hidden(''.join(cell['source'])): continue
        if list(outputs(cell)) != list(outputs(new)): cell['outputs'] = list(map(as_markdown, new['outputs']))
    INDEX.write_text(json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n', encoding='utf-8')
    (ROOT/'README.md').write_text(render(), encoding='utf-8')


if __name__ == '__main__': write()
