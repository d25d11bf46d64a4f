"The reference page: first the names a user types, by task, then every name of every room"
# plain Python: tables made of strings, with nothing to teach; tests/cli/test_reference.py proves it
import ast, importlib, re
from pathlib import Path
import repq

ROOT = Path(__file__).parents[2]
NBS = ROOT/'nbs'

# task -> name and example, in the order in which one would try them; a test executes them one after another
FIRST = {
    'Get a network': {
        'models.repvgg_a0': 'net = repq.models.repvgg_a0(n_classes=10, width=0.25, small_input=True)',
        'models.resnet18': "repq.models.resnet18(n_classes=10, block='acnet')",
        'models.ecbsr': "repq.models.ecbsr(blocks=4, channels=8, scale=2, block='ecb')",
        'convert': "repq.convert(timm.create_model('repvgg_a0', num_classes=10))",
        'expand': "repq.expand(repq.models.resnet18(n_classes=10, block='plain'), block='acnet')",
        'load_official': 'repq.load_official(net, state_dict)'},
    'Quantize and train': {
        'ptq': 'int8 = repq.ptq(net, batches, weight_bits=8, act_bits=8)',
        'inspect': 'repq.inspect(int8, batches)',
        'sensitivity': 'measured = repq.sensitivity(net, dls.train, F.cross_entropy, n=2)',
        'allocate': 'bits = repq.allocate(measured, size=200_000)',
        'quantize': "repq.quantize(net, weight_bits=4, act_bits=4, statistics='estimate')",
        'parameter_groups': 'torch.optim.SGD(repq.parameter_groups(net, lr=0.01, step_lr=0.001))',
        'QAT': 'Learner(dls, net, cbs=repq.QAT(weight_bits=4, act_bits=4))',
        'QATDoctor': 'Learner(dls, net, cbs=[repq.QAT(4, 4), repq.QATDoctor()])',
        'recalibrate': 'repq.recalibrate(net, batches)'},
    'Deploy': {
        'merge': 'plain = repq.merge(net.eval())',
        'export_onnx': "repq.export_onnx(plain, 'net.onnx', batches[0])",
        'check_parity': "repq.check_parity(plain, 'net.onnx', batches)",
        'save': "repq.save(plain, 'net.safetensors')",
        'load': "repq.load('net.safetensors', plain)",
        'models.cost': 'repq.models.cost(net, (3, 32, 32), weight_bits=4, act_bits=4).bit_ops'},
    'Write a block of your own': {
        'RepConv2d': 'layer = repq.RepConv2d(Sum(Norm(Conv(8, 8, 3)), Norm(Identity(8))), stride=1)',
        'Conv': 'Conv(8, 16, kernel_size=3)',
        'Identity': 'Identity(8)',
        'Norm': 'Norm(Conv(8, 8, 3))',
        'Sum': 'Sum(Conv(8, 8, 3), Conv(8, 8, 1))',
        'Seq': 'Seq(Conv(8, 16, 1), Conv(16, 8, 3))',
        'Scale': 'Scale(Conv(8, 8, 3), init=0.25)',
        'Fixed': 'Fixed(repq.algebra.kernel.laplacian(8))'},
    'Load data': {
        'data.digits_dls': 'dls = repq.data.digits_dls(batch_size=64)',
        'data.cifar10_dls': "dls = repq.data.cifar10_dls('data', batch_size=128)"}}

# what `statistics=` can be -> the paper's name, what happens, the object behind it
STATISTICS = {
    'batch': ('RepQ-BN', 'Convolves the batch once more and takes its exact mean and variance.', 'Exact'),
    'estimate': ('RepQ-BNEst', 'Estimates both from the moments of the input and the weight, without that '
                 'convolution: faster, less exact.', 'Estimated'),
    'calibrated': ('ours', 'Takes the exact mean, and the estimated variance times a ratio that is measured '
                   'now and then.', 'Calibrated'),
    'sampled': ('ours', 'Exact statistics of part of the positions.', 'Sampled')}

STATISTICS_TEXT = """## What `statistics=` means {#statistics}

A batch norm inside a branch needs the mean and variance of what its convolution computes, but RepQ merges the
branches before it convolves. `statistics=` says where they come from while training:

TABLE

In evaluation all of them use running statistics. `Norm(..., statistics='batch')` overrides the choice for one
norm. Blocks without norms do not use it.
[Statistics inside a block](algebra/3_statistics.ipynb) derives the rules.
"""


# -- where a name is

def notebooks():
    "module -> notebook, rooms in their order: 'algebra.kernel' -> 'algebra/1_kernel.ipynb'"
    def order(path): return repq._rooms.index(path.parent.name), int(path.stem.split('_')[0])
    found = sorted(NBS.glob('*/[0-9]*_*.ipynb'), key=order)
    return {f'{p.parent.name}.{p.stem.split("_", 1)[1]}': p.relative_to(NBS).as_posix() for p in found}

def home_of(name):
    "The module of a name as a user types it after `repq.`"
    if name in repq._home: return repq._home[name]
    room, _, last = name.partition('.')
    modules = dict(data=['train.images', 'train.super_resolution'],
                   models=['models.networks', 'models.costs'])
    return next(m for m in modules[room] if hasattr(importlib.import_module(f'repq.{m}'), last))

def place(module, name):
    "Address of a name in its notebook"
    return f'{notebooks()[module]}#{name.lower()}'

def tree_of(module):
    return ast.parse((ROOT/'repq'/f'{module.replace(".", "/")}.py').read_text(encoding='utf-8'))

def definitions(tree): return {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}

def public(tree):
    "What a module exports"
    for n in tree.body:
        named = isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == '__all__'
        if named: return ast.literal_eval(n.value)
    return []


# -- what a name is

def cell(text): return text.replace('|', '\\|').replace('\n', ' ')

def first_line(node): return next(iter((ast.get_docstring(node) or '').splitlines()), '')

def arguments(node):
    "Arguments as written, without annotations"
    if isinstance(node, ast.ClassDef):
        words = ''.join(map(ast.unparse, (*node.decorator_list, *node.bases)))
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == '__init__'), None)
        if init is None:
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            fields = fields if 'dataclass' in words or 'NamedTuple' in words else []
            return ', '.join(n.target.id + (f'={ast.unparse(n.value)}' if n.value else '') for n in fields)
        node = init
    args = node.args
    others = [a for a in (args.vararg, args.kwarg) if a]
    for a in args.posonlyargs + args.args + args.kwonlyargs + others: a.annotation = None
    return re.sub(r'^self(, )?', '', ast.unparse(args))

def value_text(value):
    "What a name that is neither function nor class holds"
    if isinstance(value, (str, int, float, bool)) or value is None:
        return f'`{repr(value)[:60]}`' if len(repr(value)) <= 60 else f'a text of {len(value):,} characters'
    kind = type(value).__name__
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        some = [str(x) for x in list(value)[:4] if isinstance(x, (str, int, float))]
        more = ', …' if len(value) > len(some) else ''
        listed = f': {", ".join(some)}{more}' if some and len(str(some)) < 120 else ''
        return f'{kind} of {len(value)}{listed}'
    doc = next(iter((getattr(value, '__doc__', '') or '').splitlines()), '')
    if callable(value) and doc: return doc
    return f'an object of the class {kind}'


# -- the page

FOLD = """```{{=html}}
<details><summary>{what}</summary>
```

{table}

```{{=html}}
</details>
```"""

def table(*columns, rows, widths):
    "A table in Markdown; Pandoc takes the widths of columns from the numbers of dashes"
    head = f'| {" | ".join(columns)} |\n|' + '|'.join(':---' + '-'*w for w in widths) + '|\n'
    return head + '\n'.join(rows)

def first_names():
    "The names a user types, by task, each with an example"
    parts = []
    for task, names in FIRST.items():
        rows = []
        for name, example in names.items():
            module, last = home_of(name), name.split('.')[-1]
            says = first_line(definitions(tree_of(module))[last])
            rows.append(f'| [`repq.{name}`]({place(module, last)}) | {cell(says)} | `{cell(example)}` |')
        made = table('name', 'what it does', 'example', rows=rows, widths=(3, 5, 6))
        parts.append(f'### {task}\n\n{made}')
    return '## First\n\n' + '\n\n'.join(parts)

def statistics_names():
    rows = []
    for name, (paper, says, kind) in STATISTICS.items():
        link = f'[`repq.{kind}`]({place("algebra.statistics", kind)})'
        rows.append(f"| `'{name}'` | {paper} | {says} | {link} |")
    made = table('value', 'in the paper', 'what happens', 'as an object', rows=rows, widths=(3, 3, 8, 4))
    return STATISTICS_TEXT.replace('TABLE', made)

def module_table(module, fold=False):
    "A module's names; those at the top level of repq come first"
    tree, notebook = tree_of(module), notebooks()[module]
    nodes, loaded = definitions(tree), importlib.import_module(f'repq.{module}')
    rows = []
    for name in sorted(public(tree), key=lambda name: repq._home.get(name) != module):
        node = nodes.get(name)
        shown = f' · `repq.{name}`' if repq._home.get(name) == module else ''
        address = place(module, name) if node else notebook
        call = f'{name}({arguments(node)})' if node else name
        says = first_line(node) if node else value_text(getattr(loaded, name))
        rows.append(f'| [{name}]({address}){shown} | `{cell(call)}` | {cell(says)} |')
    about = (ast.get_docstring(tree) or '').rstrip('.')
    head = f'### repq.{module}\n\n{about}. [The page that explains it]({notebook}).\n\n'
    made = table('name', 'signature', 'what it does', rows=rows, widths=(3, 6, 6))
    return head + (FOLD.format(what=f'{len(rows)} names', table=made) if fold else made)

def room_tables(rooms, fold=False):
    "Every name of some rooms"
    parts = []
    for room in rooms:
        about = importlib.import_module(f'repq.{room}').__doc__
        parts.append(f'## Room {room}\n\n{(about or "").rstrip(".")}.')
        parts += [module_table(m, fold) for m in notebooks() if m.startswith(f'{room}.')]
    return '\n\n'.join(parts)

LEARN = 'algebra quantization models adopt train deploy'.split()

def internals(): return [room for room in repq._rooms if room not in LEARN]
