"A small page for one finished run: what it was asked, how it trained, what came out, and where"
# plain Python: string templates with nothing to teach; tests/reproduce/test_run_pages.py proves it
import html
from pathlib import Path
from urllib.parse import quote
from ..tools.drawing import Chart, figure, key, nice_ticks
from .html_page import facts_table, page, show_seconds
from .records import METHOD, WEIGHTS, collapse, id_of, read_record
from .runs import CLASSIFIERS

__all__ = ['run_page', 'run_title', 'spec_facts', 'metric_facts', 'curves', 'origin_facts']

STRATEGIES = dict(fp='full precision', plain='Plain', merged='Merged', repq='RepQ', ptq='PTQ',
                  time='time of a training step')
STATISTICS = {'batch': 'batch statistics', 'estimate': 'estimated statistics',
              'sampled': 'sampled statistics',
              'calibrated': 'calibrated statistics', '1x1': 'statistics estimated for 1×1 branches only'}
NAMES = dict(lr='learning rate', step_lr='learning rate of steps', macs='multiply-accumulate operations',
             bit_ops='bit-operations')   # where a record's word is short
METRIC = {'classification': ('accuracy', 'accuracy in %', 100), 'super-resolution': ('PSNR', 'PSNR in dB', 1)}


def network_name(spec:dict)->str:
    "The name that the paper has for a network, or model and block"
    for name, (model, block, _) in CLASSIFIERS.items():
        if (model, block) == (spec['model'], spec['block']): return name
    model = dict(repvgg_a0='RepVGG-A0', repvgg_b0='RepVGG-B0', resnet18='ResNet-18', ecbsr='ECBSR')
    name = model.get(spec['model'], spec['model'])
    return name if spec['block'] == 'ecb' else f'{name} with {spec["block"]} blocks'


def run_title(spec:dict)->str:
    "A run in words"
    parts = [network_name(spec), STRATEGIES.get(spec['strategy'], spec['strategy'])]
    if spec['statistics']: parts.append(STATISTICS.get(spec['statistics'], spec['statistics']))
    if spec['bits'] < 32: parts.append(f'{spec["bits"]} bits')
    return ', '.join([*parts, f'seed {spec["seed"]}'])


def show_name(name:str)->str: return NAMES.get(name, name.replace('_', ' '))


def show_value(value)->str:
    "A value of a record in one line"
    if value is None: return ''
    if isinstance(value, bool): return 'yes' if value else 'no'
    if isinstance(value, dict): return ', '.join(f'{k}: {show_value(v)}' for k, v in value.items())
    if isinstance(value, list): return ', '.join(map(show_value, value))
    if isinstance(value, float): return f'{value:.6g}'
    return f'{value:,}' if isinstance(value, int) else str(value)


def spec_facts(record:dict)->list:
    "The specification: network, strategy, every setting, and the run it started from"
    spec = record['spec']
    parent = spec.get('parent')
    names = 'task', 'model', 'block', 'strategy', 'statistics', 'bits', 'seed'
    facts = [(name, show_value(spec[name])) for name in names]
    facts += [(show_name(name), show_value(value)) for name, value in spec['settings'].items()]
    if parent: facts.append(('starts from', id_of(parent, record['method'])))
    return facts + [('profile', record['profile']), ('METHOD', str(record['method']))]


def metric_facts(record:dict)->list:
    "What came out, in the units of the tables"
    m, facts = record['metrics'], []
    if 'best_accuracy' in m:
        chosen = 'on held-out images' if m.get('held_out') else 'on the test images, as in the paper'
        facts = [('test accuracy at the chosen epoch', f'{100*m["best_accuracy"]:.2f} %'),
                 ('chosen epoch', f'{m["best_epoch"]}, chosen {chosen}'),
                 ('test accuracy at the last epoch', f'{100*m["accuracy"]:.2f} %'),
                 ('test images', f'{m["test_size"]:,}, chance is {100*m["chance"]:.0f} %'),
                 ('validation images', f'{m["valid_size"]:,}')]
    for name, psnr in m.get('psnr', {}).items():
        stand_in = m.get('stand_ins', {}).get(name)
        where = f'the photograph {stand_in} stands in' if stand_in else f'{m["images"][name]} images'
        facts.append((f'PSNR, {name}', f'{psnr:.2f} dB (bicubic {m["bicubic"][name]:.2f} dB; {where})'))
    for name, relative in m.get('relative', {}).items():
        seconds = m['seconds'][name]['median']
        facts.append((name, f'{100*relative["median"]:.0f} % of the plain network, {seconds:.3g} s a step'))
    facts += [(f'layers, {name}', show_value(n)) for name, n in record.get('layers', {}).items()]
    return facts + [(show_name(name), show_value(n)) for name, n in record.get('cost', {}).items()]


def curve_chart(title:str, curves:dict)->Chart: # curves: color -> [(epoch, value)]
    "Curves over epochs on one scale"
    xs, ys = zip(*(point for points in curves.values() for point in points))
    ticks = [(x, f'{x:g}') for x in nice_ticks(min(xs), max(xs)) if x == int(x)]
    chart = Chart(title, (min(xs), max(max(xs), min(xs) + 1)), (min(ys), max(ys)), ticks, 'epoch', width=360)
    for color, points in curves.items():
        chart.line(points, color)
        epoch, value = points[-1]
        chart.mark(epoch, value, color, title=f'epoch {epoch}: {value:.4g}', scale=.7)
    return chart


def curves(record:dict)->str:
    "Losses and the metric of every epoch, as inline SVG; empty for a measurement of time"
    history = record['history']
    if not history: return ''
    name, title, scale = METRIC[record['spec']['task']]
    losses = {'c2': [(e['epoch'], e['train_loss']) for e in history],
              'c3': [(e['epoch'], e['valid_loss']) for e in history]}
    metric = {'c4': [(e['epoch'], scale*e['metric']) for e in history]}
    charts = [curve_chart('Loss', losses), curve_chart(f'Validation {title}', metric)]
    keys = [key('training loss', 'c2'), key('validation loss', 'c3'), key(f'validation {name}', 'c4')]
    first, last = history[0], history[-1]
    text = (f'Loss and validation {name} after each of {len(history)} epochs: training loss from '
            f'{first["train_loss"]:.3g} to {last["train_loss"]:.3g}, {name} from {scale*first["metric"]:.2f} '
            f'to {scale*last["metric"]:.2f}.')
    return figure(charts, text, keys)


def segment_text(segment:dict)->str:
    "One uninterrupted stretch of a training"
    return (f'steps {segment["first"]:,} to {segment["last"]:,} at commit {segment["commit"] or "unknown"}, '
            f'torch {segment["torch"]}, path {segment["path"]}, {segment["processor"]["name"]} '
            f'({segment["processor"]["instructions"]})')


def origin_facts(record:dict)->list:
    "Where, when and with what the run was made, and how it can be checked"
    times, taken = record['time'], show_value(record['path']['taken']) or 'none'
    facts = [('finished', record['finished']), ('commit', record['commit'] or 'unknown'),
             ('processor', f'{record["processor"]["name"]} ({record["processor"]["instructions"]})'),
             ('path', f'{record["path"]["asked"]} asked; taken: {taken}')]
    facts += [(f'{name.replace("_", " ")} time', show_seconds(times[name]))
              for name in ('wall', 'cpu', 'training_cpu') if name in times]
    facts += [(f'segment {i}', segment_text(s)) for i, s in enumerate(record['segments'], 1)]
    facts += [(f'restart {i}', why) for i, why in enumerate(record.get('restarts', []), 1)]
    known = record['environment'] | record['versions']
    facts += [(name, show_value(value)) for name, value in known.items()]
    probe = record['probe']
    losses = ', '.join(f'{float.fromhex(x):.6g}' for x in probe['losses'])
    facts.append(('probe: first losses', losses))
    facts += [(f'probe: {name}', f'{float.fromhex(x):.6g}') for name, x in probe['metrics'].items()]
    return facts + [('probe: note', probe.get('note', '')), ('digest of the record', record['digest'])]


def file_rows(record:dict, base)->str:
    "The files of a run and their SHA-256, linked if `base` says where they are"
    files = {'record.json': '', **record['files']}
    if record['weights']: files[WEIGHTS] = record['weights']['sha256']
    rows = []
    for name, digest in files.items():
        text = html.escape(name)
        link = text if base is None else f'<a href="{html.escape(base + quote(name))}">{text}</a>'
        rows.append(f'<tr><th scope="row">{link}</th><td><code>{digest}</code></td></tr>')
    return f'<div class="scroll"><table class="facts"><tbody>{"".join(rows)}</tbody></table></div>'


def warnings_of(record:dict)->str:
    "What a reader must know before believing the numbers"
    found = [f'This run collapsed, and no table counts it: {why}.' for why in [collapse(record)] if why]
    if record['method'] != METHOD:
        found.append(f'This run was made under METHOD {record["method"]}; this version of repq is at METHOD '
                     f'{METHOD}, and its tables do not count it.')
    if 'max_steps' in record['spec']['settings']:
        found.append('This run was stopped early on purpose, as a test.')
    mark = '<span class="verdict does">not a result</span>'
    return ''.join(f'<p>{mark} {html.escape(why)}</p>' for why in found)


def run_page(
    folder,        # of a finished run
    base:str=None  # address of that folder as seen from the page, ending in /; None: files are not linked
)->str: # a whole HTML page without outside requests
    "The page of one run; raises `Corrupt` if its record cannot be trusted"
    record = read_record(Path(folder))
    title = run_title(record['spec'])
    sections = [('Result', facts_table(metric_facts(record))), ('Curves', curves(record)),
                ('Specification', facts_table(spec_facts(record))),
                ('Machine, versions, time', facts_table(origin_facts(record))),
                ('Files and their SHA-256', file_rows(record, base))]
    body = ''.join(f'<section><h2>{name}</h2>{content}</section>' for name, content in sections if content)
    head = (f'<header><h1>{html.escape(title)}</h1><p class="lead">One run of the '
            f'<b>{html.escape(record["profile"])}</b> profile, <code>{html.escape(record["id"])}</code>. '
            'Everything on this page is read from its record.</p></header>')
    return page(title, f'{head}<main>{warnings_of(record)}{body}</main>')
