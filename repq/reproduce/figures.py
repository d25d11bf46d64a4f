"The charts of the report, filled with our numbers: quality, cost, time, curves, the estimate's error"
# plain Python: charts put together from strings, with nothing to teach; tests/reproduce/test_figures.py
import html
from base64 import b64encode
from math import isfinite
from pathlib import Path
from ..tools.drawing import Chart, figure, key, nice_ticks
from .evidence import USABLE, Measured, Results, paper_value, spread
from .formats import MARKS, method_keys
from .statements import VARIANTS, accuracy

__all__ = ['bits_figure', 'cost_figure', 'time_figure', 'curves_figure', 'estimate_figure', 'crops_figure',
           'show_bits', 'error_of', 'quality_of', 'series', 'FIGURES']


def show_bits(bits)->str: return 'FP' if int(bits) == 32 else f'{bits} bits'


def error_of(m:Measured, results:Results)->float:
    "The spread as a number, 0 if there is none"
    return float(spread(m, results) or 0)


def quality_of(address:tuple)->tuple: # (model, method, bits), or None
    "What a place of Table 2 or 3 is in a chart; PSNR is that on Set5"
    table, row, column = address
    if table == '2': return row[0], row[1], int(column)
    if table == '3' and column == 'Set5': return 'ECBSR', row[1] or 'RepQ', int(row[0])
    return None


def series(results:Results)->dict: # model -> method -> [(bits, Measured)]
    "Accuracy by model and method, and PSNR on the first set as ECBSR"
    found = {}
    for address in results.cells:
        place = quality_of(address)
        if place is None: continue
        model, method, bits = place
        m = results.measured(address)
        if m.values: found.setdefault(model, {}).setdefault(method, []).append((bits, m))
    return found


def unit_of(model:str)->str: return 'dB, Set5' if model == 'ECBSR' else 'accuracy %'


def bits_chart(model:str, methods:dict, results:Results)->Chart:
    "Quality against bits for one network"
    bits = sorted({b for points in methods.values() for b, _ in points}, reverse=True)
    values = [m.mean for points in methods.values() for _, m in points]
    ticks = [(i, 'FP' if b == 32 else f'{b}') for i, b in enumerate(bits)]
    xs = -.3, max(len(bits) - 1, 1) + .3
    chart = Chart(f'{model}, {unit_of(model)}', xs, (min(values), max(values)), ticks, 'bits')
    for k, (method, points) in enumerate(methods.items()):
        shift = .035*(k - len(methods)/2)   # so that marks of methods do not hide each other
        points = sorted(((bits.index(b) + shift, m) for b, m in points), key=lambda p: p[0])
        chart.line([(x, m.mean) for x, m in points], MARKS[method][0])
        for x, m in points:
            chart.mark(x, m.mean, *MARKS[method], f'{method}: {m.mean:.2f}', error_of(m, results))
    return chart


def bits_figure(results:Results)->str:
    "Quality against bits, one chart for each network"
    data = series(results)
    charts = [bits_chart(model, methods, results) for model, methods in data.items()]
    names = dict.fromkeys(method for methods in data.values() for method in methods)
    return figure(charts, 'Quality against bits. Bars: the ± of Tables 2 and 3.', method_keys(names))


COST_GROUPS = {'RepVGG': ('RepVGG-A0', 'RepVGG-B0'), 'ResNet-18': ('AC-ResNet-18', 'OREPA-ResNet-18'),
               'ECBSR': ('ECBSR',)}


def cost_points(
    models:tuple,
    data:dict # of `series`
)->list: # of (model, method, [(million bit-operations, Measured, bits)])
    "The quantized networks of a group whose records count bit-operations"
    found = []
    for model in models:
        for method, points in data.get(model, {}).items():
            own = []
            for bits, m in points:
                cost = m.record.get('cost', {}).get('bit_ops')
                if bits < 32 and cost: own.append((cost/1e6, m, bits))
            if own: found.append((model, method, sorted(own, key=lambda p: (p[0], p[2]))))
    return found


def cost_chart(title:str, models:tuple, points:list)->Chart:
    "Quality against bit-operations for one group of networks"
    xs, ys = zip(*((x, m.mean) for *_, own in points for x, m, _ in own))
    low, high = min(xs)/1.15, max(xs)*1.15
    round_numbers = [f*10.**k for k in range(-3, 7) for f in (1, 2, 5)]
    ticks = [(v, f'{v:g}') for v in round_numbers if low <= v <= high]
    chart = Chart(f'{title}, {unit_of(title)}', (low, high), (min(ys), max(ys)), ticks,
                  'million bit-operations for one input', log=True, width=325, height=220)
    for model, method, own in points:
        hollow = model == models[0] and len(models) > 1
        chart.line([(x, m.mean) for x, m, _ in own], MARKS[method][0], dashed=hollow)
        for x, m, bits in own:
            text = f'{model}, {method}, {bits} bits: {m.mean:.2f}'
            chart.mark(x, m.mean, *MARKS[method], text, hollow=hollow)
    return chart


def cost_figure(results:Results)->str:
    "Quality against bit-operations of the quantized networks"
    data, charts, names = series(results), [], {}
    for title, models in COST_GROUPS.items():
        points = cost_points(models, data)
        if not points: continue
        names |= dict.fromkeys(method for _, method, _ in points)
        charts.append(cost_chart(title, models, points))
    text = ('Quality against bit-operations, at 8 and fewer bits. Hollow and dashed: RepVGG-A0 and '
            'AC-ResNet-18; filled: RepVGG-B0 and OREPA-ResNet-18.')
    return figure(charts, text, method_keys(names))


SHORT = {'FP Plain': 'FP', 'QAT Plain': 'QAT', 'FP Re-parametrized': 'FP rep.', 'QAT RepQ': 'RepQ',
         'QAT RepQ-calibrated': 'calibr.'}


def bar(chart:Chart, x, y, color, width=16, title=''):
    "A bar from the bottom of a chart"
    height = max(chart.box[3] - chart.y(y), 0)
    left, top = f'{chart.x(x) - width/2:.1f}', f'{chart.y(y):.1f}'
    size = f'x="{left}" y="{top}" width="{width}" height="{height:.1f}"'
    chart.add(f'<rect class="bar {color}" {size}><title>{html.escape(title)}</title></rect>')


def time_chart(block:tuple, measured:list)->Chart:
    "Training time with one block: bars, with the paper's as lines"
    paper = [paper_value(m.address) or 0 for m in measured]
    top = max([m.mean for m in measured] + paper)
    columns = [m.address[2] for m in measured]
    ticks = [(i, SHORT.get(c, c.split('-')[-1])) for i, c in enumerate(columns)]
    chart = Chart(f'{block[0]}: % of plain', (-.4, len(measured) - .6), (0, top), ticks, width=360)
    for i, (m, column, printed) in enumerate(zip(measured, columns, paper)):
        name = column.split(' ', 1)[1]
        color = 'c0' if 'FP' in column else MARKS.get(name, MARKS['Plain'])[0]
        bar(chart, i, m.mean, color, 22, f'{column}: {m.mean:.0f} %')
        if not printed: continue
        line = f'M{chart.x(i) - 15:.1f} {chart.y(printed):.1f}h30'
        chart.add(f'<path class="paper" d="{line}"><title>paper: {printed:.0f} %</title></path>')
    return chart


def time_figure(results:Results)->str:
    "Training time relative to plain, bars; the paper's as lines"
    blocks = dict.fromkeys(a[1] for a in results.cells if a[0] == '4')
    charts = []
    for block in blocks:
        measured = [results.measured(a) for a in results.cells if a[:2] == ('4', block)]
        measured = [m for m in measured if m.values]
        if measured: charts.append(time_chart(block, measured))
    text = ('Time of a training step relative to the plain network of the same stage. Bars: ours; lines: the '
            'paper’s, on two V100.')
    return figure(charts, text)


def curve_of(found, scale:float)->list: # of (epoch, metric)
    "The metric after each epoch; nothing of a run that no table counts"
    if found.state not in USABLE: return []
    history = found.record.get('history') or []
    points = [(e['epoch'], e.get('metric')) for e in history]
    return [(epoch, scale*y) for epoch, y in points if y is not None and isfinite(y)]


def curves_chart(model:str, bits:int, methods:dict)->Chart:
    "Training curves of one network at one precision"
    xs, ys = zip(*(p for points in methods.values() for p in points))
    ticks = [(x, f'{x:g}') for x in nice_ticks(min(xs), max(xs)) if x == int(x)]
    first, last = min(xs), max(max(xs), min(xs) + 1)
    title, span = f'{model}, {show_bits(bits)}', (min(ys), max(ys))
    chart = Chart(title, (first, last), span, ticks, width=230, height=160)
    for method, points in methods.items():
        chart.line(points, MARKS[method][0])
        chart.mark(*points[-1], *MARKS[method], f'{method}: {points[-1][1]:.2f}', scale=.7)
    return chart


def curves_figure(results:Results)->str:
    "The metric of every epoch, by network and precision"
    groups, names = {}, {}
    for address, cell in results.cells.items():
        place = quality_of(address)
        if place is None: continue
        model, method, bits = place
        for run in cell.runs[:1]:
            points = curve_of(results.look(run), 100 if address[0] == '2' else 1)
            if not points: continue
            groups.setdefault((model, bits), {})[method] = points
            names[method] = 1
    charts = [curves_chart(model, bits, methods) for (model, bits), methods in groups.items()]
    text = ('Validation accuracy in % (ECBSR: PSNR in dB) after each epoch, first seed. The mark is the last '
            'epoch.')
    return figure(charts, text, method_keys(names))


ESTIMATE_COLORS = {'32': 'c1', '8': 'c3', '4': 'c4'}


def estimate_chart(model:str, lines:dict)->Chart: # lines: bits -> {layer: relative error}
    "Error of the variance estimate in one network"
    values = [v for errors in lines.values() for v in errors.values()]
    n = max(map(len, lines.values()))
    chart = Chart(f'{model}, error by layer', (1, max(n, 2)), (0, max(values)), width=325)
    for bits, errors in lines.items():
        points, color = list(enumerate(errors.values(), 1)), ESTIMATE_COLORS[bits]
        chart.line(points, color)
        for (x, y), name in zip(points, errors):
            chart.mark(x, y, color, 'circle', f'{name}, {show_bits(bits)}: {y:.2f}', scale=.6)
    return chart


def estimate_figure(results:Results)->str:
    "Error of the variance estimate, layer by layer"
    charts = []
    for model in VARIANTS:
        lines = {}
        for bits in ESTIMATE_COLORS:
            m = results.measured(accuracy(model, 'RepQ-BNEst', bits))
            errors = (m.record or {}).get('metrics', {}).get('variance_error') or {}
            if errors: lines[bits] = errors
        if lines: charts.append(estimate_chart(model, lines))
    text = ('Relative error of the estimated variance (RepQ-BNEst), layer by layer from the input to the '
            'output.')
    return figure(charts, text, [key(show_bits(b), c) for b, c in ESTIMATE_COLORS.items()])


def crop_html(file:Path, name:str, note='')->str:
    "A picture with its name, inside the page"
    data, name = b64encode(file.read_bytes()).decode(), html.escape(name)
    image = f'<img alt="Detail of a photograph: {name}" src="data:image/png;base64,{data}">'
    return f'<div class="crop">{image}<span>{name}<br>{html.escape(note)}</span></div>'


def crops_of(address:tuple, m:Measured)->list:
    "The details that one super-resolution run stored"
    folder, (bits, method) = Path(m.found[min(m.values)].folder), address[1]
    files, images = m.record['files'], []
    if address[1] == ('32', ''):
        bicubic = f'{m.record["metrics"]["bicubic"]["Set5"]:.2f} dB'
        for what, note in (('original', ''), ('bicubic', bicubic)):
            if f'crop-{what}.png' in files: images.append(crop_html(folder/f'crop-{what}.png', what, note))
    if 'crop.png' in files:
        name = ', '.join(filter(None, (show_bits(bits), method)))
        images.append(crop_html(folder/'crop.png', name, f'{m.mean:.2f} dB'))
    return images


def crops_figure(results:Results)->str:
    "The same detail from every super-resolution network"
    images = []
    places = [a for a in results.cells if a[0] == '3' and a[2] == 'Set5']
    for address in sorted(places, key=lambda a: -int(a[1][0])):
        m = results.measured(address)
        if m.values: images += crops_of(address, m)
    if not images: return ''
    text = 'The same detail, scaled up by each network, with the PSNR on Set5 (or what stands in for it).'
    return f'<figure><div class="crops">{"".join(images)}</div><figcaption>{text}</figcaption></figure>'


FIGURES = {'Quality against bits': bits_figure, 'Quality against bit-operations': cost_figure,
           'Training time': time_figure, 'Error of the estimate': estimate_figure,
           'Super-resolution, seen': crops_figure, 'Training curves': curves_figure}
