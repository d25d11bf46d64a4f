"README.md from nbs/index.ipynb, without Quarto: `python tests/readme.py` writes it"
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def outputs(cell):
    "The text a cell printed or returned, as an indented block"
    texts = [''.join(o.get('text') or o.get('data', {}).get('text/markdown') or o.get('data', {}).get('text/plain', '')) for o in cell['outputs']]
    return [f'```\n{t.rstrip()}\n```' for t in texts if t.strip()]


def render():
    parts = []
    for cell in json.loads((ROOT/'nbs'/'index.ipynb').read_text())['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': parts.append(source)
        elif cell['cell_type'] == 'code' and not source.startswith('#|'): parts += [f'```python\n{source}\n```', *outputs(cell)]
    return '\n\n'.join(parts) + '\n'


if __name__ == '__main__': (ROOT/'README.md').write_text(render())
