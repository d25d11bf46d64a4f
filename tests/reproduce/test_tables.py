"Tables and claims from records: what is there, missing or damaged; several seeds; three formats"
import math, os, re, shutil, subprocess, sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
import pytest
from records import metrics_of, write_all, write_failure, write_run
from repq.reproduce import report, runs, tables, verdicts
from repq.tools.files import write_json
from repq.reproduce.records import METHOD, id_of
from repq.reproduce.evidence import Results, show_error
from repq.reproduce.protocol import OPEN
from repq.reproduce.statements import accuracy, psnr
from repq.reproduce.tables import table

BEATS = 'RepQ-BN beats Plain at 8 bits'


@pytest.fixture(scope='module')
def whole(tmp_path_factory): return write_all(tmp_path_factory.mktemp('whole'), images=1)


@pytest.fixture
def batch(whole, tmp_path): return Path(shutil.copytree(whole, tmp_path/'results'))


def run_at(address, seed=0, profile='smoke', seeds=1):
    return next(r for r in Results(profile, '/nowhere', seeds).cells[address].runs if r.seed == seed)


def verdict(root, claim, profile='smoke', seeds=1):
    return next(v for v in verdicts.claims(profile, root, seeds) if v.claim == claim)


def change(root, run, **metrics):
    "The same run with other metrics"
    return write_run(root, run, {**metrics_of(run, images=1), **metrics})


def row(t, *labels): return next(items for l, items in t.rows if l == labels)


def test_little_is_loaded():
    heavy = 'torch', 'pandas', 'matplotlib', 'numpy', 'scipy', 'fastai'
    modules = 'import repq.reproduce.tables, repq.reproduce.report, repq.reproduce.run_pages'
    code = f'import sys; {modules}; print(*[m for m in {heavy} if m in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ''


# Numbers and what stands in for them

def test_numbers_come_from_the_best_epoch(whole):
    run = run_at(accuracy('RepVGG-A0', 'RepQ-BN', '8'))
    m, item = metrics_of(run, images=1), row(table(2, 'smoke', whole, 1), 'RepVGG-A0', 'RepQ-BN')[2]
    error = 100*math.sqrt(m['best_accuracy']*(1 - m['best_accuracy'])/m['test_size'])
    assert item.text == f'{100*m["best_accuracy"]:.2f} ± {error:.2f}'
    assert item.links == (f'{run.id}/notebook.ipynb',)
    assert f'last epoch: {100*m["accuracy"]:.2f}' in item.title
    assert row(table(2, 'smoke', whole, 1), 'RepVGG-A0', 'RepQ-BN')[3].text == '73.11'


def test_not_run_yet(batch):
    run = run_at(accuracy('RepVGG-A0', 'Plain', '8'))
    shutil.rmtree(batch/'smoke'/run.id)
    item = row(table(2, 'smoke', batch, 1), 'RepVGG-A0', 'Plain')[2]
    assert (item.text, item.links, item.title) == ('not run', (), 'not run yet')
    v = verdict(batch, BEATS)
    assert v.verdict == OPEN and 'RepVGG-A0 Plain at 8 bits was not run (seed 0)' in v.evidence[0].notes


def test_failed_run_says_why_everywhere(batch):
    run, why = run_at(accuracy('RepVGG-A0', 'Plain', '8')), 'ValueError: <b>50%_of {x} | & $1~^\\'
    shutil.rmtree(batch/'smoke'/run.id)
    write_failure(batch, run, why)
    t = table(2, 'smoke', batch, 1)
    item = row(t, 'RepVGG-A0', 'Plain')[2]
    assert item.text == 'failed' and item.note == f'failed: {why}'
    assert item.links == (f'.work/{run.id}/notebook.ipynb',) and (batch/'smoke'/item.links[0]).exists()
    assert '&lt;b&gt;50%_of {x} | &amp; $1~^\\' in t.html() and '<b>50' not in t.html()
    in_latex = (r'\textless{}b\textgreater{}50\%\_of \{x\} | \& \$1'
                r'\textasciitilde{}\textasciicircum{}\textbackslash{}')
    assert in_latex in t.latex()
    assert r'\<b\>50%\_of {x} \| & $1\~^\\' in t.markdown()
    assert why in str(t) and any(why in n for n in verdict(batch, BEATS).evidence[0].notes)
    page = report.write_report(batch, 'smoke', 1).read_text()
    assert 'Runs that went wrong' in page and '&lt;b&gt;50%_of' in page and '<b>50' not in page


def test_children_of_a_failed_parent_name_it(batch):
    child = run_at(accuracy('AC-ResNet-18', 'RepQ-BN', '8'))
    for r in (child, child.parent): shutil.rmtree(batch/'smoke'/r.id)
    write_failure(batch, child.parent, 'out of memory')
    assert (
        row(table(2, 'smoke', batch, 1), 'AC-ResNet-18', 'RepQ-BN')[2].note
        == f'not run: its parent {child.parent.id} is failed'
    )


@pytest.mark.parametrize('damage, says', [
    (lambda f: (f/'record.json').write_text((f/'record.json').read_text()[:200]), 'record.json is damaged'),
    (lambda f: (f/'record.json').unlink(), 'record.json is missing')])
def test_damaged_results_are_named_not_trusted(batch, damage, says):
    run = run_at(accuracy('RepVGG-A0', 'Plain', '8'))
    damage(batch/'smoke'/run.id)
    item = row(table(2, 'smoke', batch, 1), 'RepVGG-A0', 'Plain')[2]
    assert item.text == 'corrupt' and says in item.note
    assert verdict(batch, BEATS).verdict == OPEN
    assert says in report.write_report(batch, 'smoke', 1).read_text()


@pytest.mark.parametrize('metrics, says', [
    (dict(best_accuracy=None), 'metrics.best_accuracy must be a finite number, got None'),
    (dict(best_accuracy=93.), 'metrics.best_accuracy must be a finite number from 0 to 1, got 93.0'),
    (dict(test_size=0), 'metrics.test_size must be a whole number from 1'),
    (dict(variance_error=[]), 'metrics.variance_error must be an object, got []')])
def test_a_record_without_a_number(batch, metrics, says):
    change(batch, run_at(accuracy('RepVGG-A0', 'Plain', '8')), **metrics)
    item = row(table(2, 'smoke', batch, 1), 'RepVGG-A0', 'Plain')[2]
    assert item.text == 'corrupt' and says in item.note and verdict(batch, BEATS).verdict == OPEN


def test_a_record_without_a_column(batch):
    run = run_at(psnr('8', 'Plain', 'U100'))
    change(batch, run, psnr={'Set5': 33.})
    assert (
        'metrics.psnr and metrics.bicubic are not of the same things'
        in row(table(3, 'smoke', batch, 1), '8', 'Plain')[6].note
    )
    m = metrics_of(run, images=1)
    change(
        batch,
        run,
        **{
            k: {s: v for s, v in m[k].items() if s != 'U100'}
            for k in ('psnr', 'bicubic', 'per_image', 'images')
        },
    )
    assert row(table(3, 'smoke', batch, 1), '8', 'Plain')[6].note == "its record has no 'U100'"


def test_results_of_another_method_are_shown_as_such(batch, monkeypatch):
    "They have a place, a word and a link, and no number is taken from them"
    run = run_at(accuracy('RepVGG-A0', 'Plain', '8'))
    old = id_of(run.stored, 7)
    shutil.rmtree(batch/'smoke'/run.id)
    write_run(batch, run, metrics_of(run, images=1), id=old, method=7).rename(batch/'smoke'/old)
    item = row(table(2, 'smoke', batch, 1), 'RepVGG-A0', 'Plain')[2]
    assert item.text == f'METHOD 7, now {METHOD}' and item.links == (f'{old}/notebook.ipynb',)
    assert verdict(batch, BEATS).verdict == OPEN and f'METHOD 7, now {METHOD}' in verdict(batch, BEATS).why
    assert '1 other method' in report.write_report(batch, 'smoke', 1).read_text()


def test_what_collapsed_is_no_number(seeds3, tmp_path):
    "It is called so, and the mean is that of the other seeds"
    root, address = Path(shutil.copytree(seeds3, tmp_path/'r')), accuracy('RepVGG-A0', 'Plain', '8')
    first, *others = (run_at(address, s, seeds=3) for s in range(3))
    change(root, first, accuracy=.1, best_accuracy=.95)
    item = row(table(2, 'smoke', root, 3), 'RepVGG-A0', 'Plain')[2]
    mean = sum(100*metrics_of(r, images=1)['best_accuracy'] for r in others)/2
    assert item.text.startswith(f'{mean:.2f} ±')
    assert '2 of 3 seeds; collapsed: accuracy 0.1000 at its end, chance is 0.1000 (seed 0)' in item.note
    for r in others: change(root, r, accuracy=.1)
    item = row(table(2, 'smoke', root, 3), 'RepVGG-A0', 'Plain')[2]
    assert item.text == 'collapsed' and len(item.links) == 1
    assert 'Runs that went wrong' in report.write_report(root, 'smoke', 3).read_text()
    sr = run_at(psnr('2', 'Plain', 'Set5'), seeds=3)
    bicubic = metrics_of(sr, images=1)['bicubic']['Set5']
    for level, state in ((bicubic - .9, 'done'), (bicubic - 1.1, 'collapsed')): # a margin of 1 dB
        change(root, sr, psnr={s: level for s in runs.TEST_SETS})
        found = Results('smoke', root, 3).look(sr)
        assert found.state == state
        assert state == 'done' or f'{level:.2f} dB at its end, more than 1 dB below bicubic' in found.why


def test_best_and_second_best_of_ours(batch):
    scores = {'QARepVGG, PTQ': .5, 'QARepVGG, QAT': .6, 'Plain': .91, 'Merged': .89, 'RepQ-BN': .92,
              'RepQ-BNEst': .90}
    for method, a in scores.items():
        change(batch, run_at(accuracy('RepVGG-A0', method, '8')), best_accuracy=a)
    styles = {
        m: row(table(2, 'smoke', batch, 1), 'RepVGG-A0', m)[2].style
        for m in ('Plain', 'Merged', 'RepQ-BN', 'RepQ-BNEst')
    }
    assert styles == {'Plain': 'second', 'Merged': '', 'RepQ-BN': 'best', 'RepQ-BNEst': ''}


# Several seeds

@pytest.fixture(scope='module')
def seeds3(tmp_path_factory): return write_all(tmp_path_factory.mktemp('seeds'), seeds=3, images=1)


def test_mean_and_deviation_over_seeds(seeds3):
    at = accuracy('RepVGG-A0', 'RepQ-BN', '4')
    values = [100*metrics_of(run_at(at, s, seeds=3), images=1)['best_accuracy'] for s in range(3)]
    t = table(2, 'smoke', seeds3, 3)
    item = row(t, 'RepVGG-A0', 'RepQ-BN')[4]
    assert item.text == f'{fmean(values):.2f} ± {show_error(stdev(values))}'
    assert item.links == tuple(f'{run_at(at, s, seeds=3).id}/notebook.ipynb' for s in range(3))
    assert all((Path(seeds3)/'smoke'/l).exists() for l in item.links)
    assert 'standard deviation over 3 seeds' in t.caption


def test_a_seed_that_is_missing(seeds3, tmp_path):
    root, at = Path(shutil.copytree(seeds3, tmp_path/'r')), accuracy('RepVGG-A0', 'RepQ-BN', '4')
    shutil.rmtree(root/'smoke'/run_at(at, 1, seeds=3).id)
    values = [100*metrics_of(run_at(at, s, seeds=3))['best_accuracy'] for s in (0, 2)]
    item = row(table(2, 'smoke', root, 3), 'RepVGG-A0', 'RepQ-BN')[4]
    assert item.text.startswith(f'{fmean(values):.2f} ±')
    assert item.note == '2 of 3 seeds; not run yet (seed 1)' and len(item.links) == 2


def test_seeds_of_the_last_batch_are_the_default(seeds3, tmp_path):
    root = Path(shutil.copytree(seeds3, tmp_path/'r'))
    assert Results('smoke', root).seeds == runs.SEEDS['smoke']
    write_json(root/'smoke'/'batch.json', dict(seeds=3))
    assert Results('smoke', root).seeds == 3
    assert len(row(table(2, 'smoke', root), 'RepVGG-A0', 'Plain')[2].links) == 3


@pytest.fixture(scope='module')
def cpu(tmp_path_factory): return write_all(tmp_path_factory.mktemp('cpu'), 'cpu')


def test_rows_beyond_the_paper_and_side_experiments(cpu):
    found = {t.number: t for t in tables.all_tables('cpu', cpu, 1)}
    assert list(found) == ['1', '2', '3', '4', 'S1', 'side']
    assert row(found['2'], 'RepVGG-A0', 'RepQ-calibrated †')[3].text == '–' and '†' in found['2'].caption
    assert [l for l, _ in found['3'].rows][:3] == [('32', ''), ('32', 'Plain †'), ('8', 'Plain')]
    assert ('QAT', 'RepQ-calibrated †', 'ours') in found['4'].columns
    assert ('QAT', 'RepQ-calibrated †', 'paper') not in found['4'].columns
    labels = [l for l, _ in found['side'].rows]
    assert ('Merged 8-bit RepVGG-A0, learning rate', 'tenfold: 0.01') in labels
    assert ('full-precision RepVGG-A0, norms that estimate', 'only on 1×1') in labels
    assert [row(found['side'], *labels[i])[1].text for i in (0, 1)] == ['68.65', '69.21']


# Tables 1 and S1

def test_table_1_counts_what_really_happened(batch):
    t = table(1, 'smoke', batch, 1)
    for name, marks in {'Plain': '1010', 'Merged': '0110', 'RepQ': '0101'}.items():
        items = row(t, name)
        assert (
            ''.join('1' if i.text.startswith('✓') else '0' for i in items[::2])
            == ''.join('1' if i.text else '0' for i in items[1::2])
            == marks
        )
    run = run_at(accuracy('RepVGG-A0', 'Merged', '8'))
    write_run(batch, run, layers=dict(total=22, reparametrized=3, quantized=22))
    before, after = (row(x, 'Merged')[6].text for x in (t, table(1, 'smoke', batch, 1)))
    assert re.fullmatch(r'0 of \d+', before) and after == '✓ 1' + before[1:]


def test_table_s1_is_what_the_runs_are_told(whole):
    t = table('S1', 'smoke', whole, 1)
    run = run_at(accuracy('AC-ResNet-18', 'RepQ-BN', '8'))
    columns = {c: i for i, c in enumerate(t.columns)}
    assert (
        row(t, '8-bit step learning rate')[columns['AC-ResNet-18', 'ours']].text
        == f'{run.settings["step_lr"]:g}'
    )
    assert row(t, 'Merged 8-bit learning rate')[columns['RepVGG-A0 & B0', 'paper']].text == '0.001'
    assert row(t, 'FP learning rate')[columns['ECBSR', 'paper']].text == '0.0005'
    paper = table('S1', 'paper', whole, 1)
    labels = ('Epochs', 'Epochs of QAT', 'Batch size', 'Weight decay', 'FP learning rate',
              'Quantized learning rate', 'Merged 8-bit learning rate', '8-bit step learning rate',
              '4-bit step learning rate')
    for label in labels:
        items = row(paper, label)
        assert [i.text for i in items[::2]] == [i.text for i in items[1::2]], (
            f'{label}: the paper profile does not follow the paper'
        )


# Formats

class Cells(HTMLParser):
    "The rows of an HTML table as text, spans filled in"
    def __init__(self, text):
        super().__init__()
        self.rows, self.spans, self.inside = [], {}, False
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if tag == 'tr':
            self.rows.append([])
            self.fill()
        if tag in ('td', 'th'):
            self.cell, self.inside = '', True
            self.span = int(a.get('rowspan') or 1), int(a.get('colspan') or 1)
    def fill(self):
        while (len(self.rows) - 1, len(self.rows[-1])) in self.spans:
            self.rows[-1].append(self.spans[len(self.rows) - 1, len(self.rows[-1])])
    def handle_endtag(self, tag):
        if tag not in ('td', 'th'): return
        self.inside, (down, across), r = False, self.span, len(self.rows) - 1
        for _ in range(across):
            for d in range(1, down): self.spans[r + d, len(self.rows[r])] = ''
            self.rows[r].append(self.cell)
        self.fill()
    def handle_data(self, data):
        if self.inside: self.cell += data


def plain_markdown(cell):
    return re.sub(
        r'\\(.)', r'\1', re.sub(r'<sup>\w+</sup>|</?u>|\*\*', '', re.sub(r'\[(.*?)\]\([^)]*\)', r'\1', cell))
    ).strip()


@pytest.mark.parametrize('number', ['1', '2', '3', '4', 'S1'])
def test_three_formats_say_the_same(whole, number):
    t = table(number, 'smoke', whole, 1)
    width = len(t.stubs) + len(t.columns)
    lines = [re.split(r' (?<!\\)\| ', l[2:-2]) for l in t.markdown().splitlines() if l.startswith('|')][2:]
    cells = Cells(t.html()).rows
    head, body = cells[:len(t.columns[0])], cells[len(t.columns[0]):]
    assert {len(r) for r in lines} == {len(r) for r in cells} == {width}
    assert len(lines) == len(body) == len(t.rows)
    for line, html_row, (_, items) in zip(lines, body, t.rows):
        assert [plain_markdown(c) for c in line[len(t.stubs):]] == [i.text for i in items]
        for cell, item in zip(html_row[len(t.stubs):], items):
            assert cell == item.text + t.letters.get(item.note, '')
    assert [' '.join(dict.fromkeys(filter(None, column))) for column in zip(*head)][len(t.stubs) :] == [
        ' '.join(dict.fromkeys(c)) for c in t.columns
    ]
    latex = t.latex()
    rows = [l for l in latex.splitlines() if l.endswith(r'\\')]
    assert latex.count('{') == latex.count('}') and latex.count(r'\begin') == latex.count(r'\end') == 2
    for l in rows[-len(t.rows):]: assert len(re.findall(r'(?<!\\)&', l)) == width - 1
    for l in rows[:-len(t.rows)]:
        assert sum(int(n) for n in re.findall(r'multicolumn\{(\d+)\}', l)) == len(t.columns)
    assert latex.isascii() and not re.search(r'(?<!\\)[%#_]', re.sub(r'\\href\{[^}]*\}', '', latex))


def test_every_number_of_ours_links_to_its_notebook(whole):
    for number in ('2', '3', '4'):
        t = table(number, 'smoke', whole, 1)
        ours = [
            i
            for _, items in t.rows
            for c, i in zip(t.columns, items)
            if c[-1] == 'ours' and re.match(r'\d', i.text)
        ]
        assert len(ours) > 8
        assert all(len(i.links) == 1 and (Path(whole)/'smoke'/i.links[0]).exists() for i in ours)
        for text in (t.html(), t.markdown(), t.latex()): assert all(i.links[0] in text for i in ours)


def test_files_are_written_whole_or_not_at_all(batch, monkeypatch):
    paths = report.write_tables(batch, 'smoke', 1)
    assert [p.name for p in paths] == ['tables.md', 'tables.html', 'tables.tex']
    assert all('93.' in p.read_text() for p in paths)
    links = re.findall(r'\]\(([^)]+)\)', paths[0].read_text())
    assert len(links) > 50 and all((batch/'smoke'/l).exists() for l in links)
    before = paths[0].read_text()
    def refuse(*_): raise OSError('no space left')
    monkeypatch.setattr(os, 'replace', refuse)
    with pytest.raises(OSError, match='no space left'): report.write_tables(batch, 'smoke', 1)
    assert paths[0].read_text() == before and not list((batch/'smoke').glob('.tables*'))


def test_wrong_questions():
    with pytest.raises(ValueError, match=r'a table is one of 1, 2, 3, 4, S1, side, got 7'): table(7)
    with pytest.raises(ValueError, match="profile must be one of smoke, cpu, gpu, paper, got 'big'"):
        table(2, 'big')
    message = 'the smoke profile has no side experiments: choose cpu, gpu or paper'
    with pytest.raises(ValueError, match=message):
        table('side', 'smoke', '/nowhere')


def test_a_reader_that_has_seen_enough():
    "`repq ... | head -1` ends without a traceback"
    command = [
        sys.executable,
        '-c',
        'import sys; from repq.cli.command import main; sys.exit(main(sys.argv[1:]))',
        'reproduce',
        '--profile',
        'paper',
        '--dry-run',
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout.readline()
        p.stdout.close()
        assert p.stderr.read() == '' and p.wait() == 0


# The order of the report

def sections(text): return re.findall(r'<h2 id="([\w-]+)"', text)


def test_table_2_leads_and_what_was_not_run_is_last(batch):
    text = report.write_report(batch, 'smoke', 1).read_text()
    assert sections(text) == ['results', 'claims', 'figures', 'setting', 'machine', 'progress']
    captions = re.findall(r'<caption><span>(.*?)</span>', text)
    assert captions[0].startswith('Table 2') and text.index(captions[0]) < text.index('<h2 id="claims"')
    for run in {r for a, c in Results('smoke', batch, 1).cells.items() if a[0] == '2' for r in c.runs}:
        shutil.rmtree(batch/'smoke'/run.id, ignore_errors=True)
    text = report.write_report(batch, 'smoke', 1).read_text()
    captions = re.findall(r'<caption><span>(.*?)</span>', text)
    assert captions[0].startswith('Table 3') and captions[-1].startswith('Table 2')
    assert text.index(captions[-1]) > text.index('<h2 id="progress"')
    assert [t.number for t in tables.report_tables(Results('smoke', batch, 1))] == ['3', '4', '1', 'S1', '2']


def test_claims_by_verdict(seeds3):
    text = report.claims_html(verdicts.claims('smoke', seeds3, 3))
    heads = re.findall(r'<h3>\d+ (.*?)</h3>', text)
    assert heads[0] == 'hold' and heads[-1] == 'without enough runs' and 'nan' not in text
    assert 'None' not in text
