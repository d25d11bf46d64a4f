"README.md from nbs/index.ipynb, without Quarto: `python tests/readme.py` brings its tables up to date and writes it"
import json, os, re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
INDEX = ROOT/'nbs'/'index.ipynb'


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
        if cell['cell_type'] == 'markdown': parts.append(from_here(source))
        elif hidden(source): parts += map(from_here, outputs(cell))
        elif not source.startswith('#|'): parts += [f'```python\n{source}\n```', *outputs(cell)]
    return '\n\n'.join(parts) + '\n'


def made_again(cells, folder=INDEX.parent, which=hidden):
    "Copies of cells, those of a kind with outputs as they are now: by default those whose source is hidden, which show results"
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


def write():
    "Execute what shows results, keep everything else as stored, write notebook and README"
    nb = json.loads(INDEX.read_text(encoding='utf-8'))
    for cell, new in zip(nb['cells'], made_again(nb['cells'])):
        if cell['cell_type'] == 'code' and hidden(''.join(cell['source'])) and list(outputs(cell)) != list(outputs(new)):
            cell['outputs'] = [dict(output_type='execute_result', execution_count=None, metadata={}, data={'text/markdown': text_of(o)[0].splitlines(True), 'text/plain': ['<IPython.core.display.Markdown object>']}) for o in new['outputs']]
    INDEX.write_text(json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + '\n', encoding='utf-8')
    (ROOT/'README.md').write_text(render(), encoding='utf-8')


if __name__ == '__main__': write()
