"The page of a run: read from its record, complete, safe, and without outside requests"
import json, re
from html.parser import HTMLParser
from pathlib import Path
import pytest
from records import all_runs, metrics_of, write_run
from repq.reproduce.html_page import facts_table, show_seconds
from repq.reproduce.records import collapse
from repq.reproduce.run_pages import run_page, run_title, show_name
from repq.tools.files import Corrupt

CPU = Path(__file__).parents[2]/'results'/'cpu'
FOLDERS = sorted(CPU.glob('*/record.json'))


class Page(HTMLParser):
    "Text, tags that are open, and every address that a browser would ask for"
    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.addresses, self.tags = '', [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ('meta', 'link', 'img', 'br', 'path', 'circle', 'rect'): self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ('href', 'src')]

    def handle_startendtag(self, tag, attrs): self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag in ('path', 'rect'): return
        assert self.open.pop() == tag

    def handle_data(self, data): self.text += data


def run_of(task, profile='cpu', **wanted):
    for run in all_runs(profile):
        if run.task == task and all(getattr(run, k) == v for k, v in wanted.items()): return run


@pytest.mark.skipif(not FOLDERS, reason='no records in results/cpu')
@pytest.mark.parametrize('path', FOLDERS, ids=lambda p: p.parent.name)
def test_page_of_every_record_we_have(path):
    record, text = json.loads(path.read_text()), run_page(path.parent)
    page = Page(text)
    assert not page.open and page.addresses == ['data:,'], 'a page asks for nothing from elsewhere'
    assert not re.search(r'https?:|@import|url\(|<script', text)
    assert record['id'] in page.text and record['commit'] in page.text and record['digest'] in page.text
    assert f'{100*record["metrics"]["best_accuracy"]:.2f} %' in page.text
    for name, version in record['versions'].items(): assert name in page.text and version in page.text
    for name in record['spec']['settings']: assert show_name(name) in page.text
    assert page.tags.count('svg') == (5 if record['history'] else 0)   # two charts, three keys
    assert record['files']['notebook.ipynb'] in page.text and record['weights']['sha256'] in page.text
    assert ('not a result' in page.text) == bool(collapse(record))


def test_page_of_each_task(tmp_path):
    sr = write_run(tmp_path, run := run_of('super_resolution', strategy='repq', bits=4))
    page = Page(run_page(sr))
    assert 'ECBSR, RepQ, 4 bits, seed 0' in page.text and 'PSNR, Set5' in page.text
    assert f'{metrics_of(run)["psnr"]["B100"]:.2f} dB' in page.text and run.parent.id in page.text
    page = Page(run_page(write_run(tmp_path, run_of('time', block='acnet'))))
    assert 'QAT RepQ-BNEst' in page.text and '130 % of the plain network' in page.text
    assert 'svg' not in page.tags and 'Curves' not in page.text


def test_page_of_a_run_that_is_no_result(tmp_path):
    run = run_of('classify', strategy='repq', bits=4)
    bad = metrics_of(run) | dict(accuracy=.1, best_accuracy=.4)
    text = Page(run_page(write_run(tmp_path, run, bad))).text
    assert 'This run collapsed, and no table counts it' in text and '40.00 %' in text


def test_page_of_another_method(tmp_path, monkeypatch):
    from repq.reproduce import run_pages
    folder = write_run(tmp_path, run_of('classify', strategy='fp'))
    monkeypatch.setattr(run_pages, 'METHOD', 2)
    assert 'made under METHOD 1; this version of repq is at METHOD 2' in Page(run_page(folder)).text


def test_texts_are_escaped_and_files_linked(tmp_path):
    run = run_of('classify', strategy='fp')
    evil = '<script>alert(1)</script>"&'
    folder = write_run(tmp_path, run, versions=dict(torch=evil), restarts=[evil], pictures={'a b.png': b'x'})
    text = run_page(folder, base='../files/x/')
    assert '<script' not in text and evil in Page(text).text
    assert {'../files/x/record.json', '../files/x/a%20b.png'} <= set(Page(text).addresses)


def test_a_damaged_record_has_no_page(tmp_path):
    folder = write_run(tmp_path, run_of('classify', strategy='fp'))
    path = folder/'record.json'
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(Corrupt, match='digest'): run_page(folder)


def test_words_of_a_page():
    shown = {5: '5 s', 119.6: '120 s', 120: '2 min', 7199: '120 min', 7200: '2.0 h'}
    for seconds, text in shown.items(): assert show_seconds(seconds) == text
    assert facts_table([('a', ''), ('b', '<')]).count('<tr>') == 1
    titles = [run_title(run.stored) for run in all_runs('cpu')]
    assert 'RepVGG-A0, RepQ, estimated statistics, 4 bits, seed 0' in titles
    assert 'RepVGG-A0 with plain blocks, full precision, seed 0' in titles
