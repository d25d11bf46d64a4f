"The report in a real browser: wide and narrow, light and dark, complete, half done and empty"
import html, json, os, re, shutil, struct, subprocess, zlib
from pathlib import Path
import pytest
from records import all_runs, write_all, write_failure, write_run
from repq.reproduce import report
from repq.reproduce.evidence import Results

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None
)
browser = pytest.mark.skipif(CHROMIUM is None, reason='no Chromium or Chrome on this machine')
WIDTHS = (1280, 390)

# Runs inside a copy of the page. The policy forbids every request, so that one that was tried is reported.
PROBE = (Path(__file__).parent/'probe.html').read_text()


def open_in_browser(page, folder, dark=False, widths=WIDTHS):
    "What the page is like at each width; a phone is narrower than a window can be, so pages stand in frames"
    folder.mkdir(exist_ok=True)
    text = Path(page).read_text()
    assert '<meta charset="utf-8">' in text
    (folder / 'page.html').write_text(
        text.replace('<meta charset="utf-8">', '<meta charset="utf-8">' + PROBE, 1)
    )
    frames = ''.join(
        f'<iframe src="page.html" style="width:{w}px;height:900px;border:0"></iframe>' for w in widths
    )
    (folder / 'frames.html').write_text(
        '<!doctype html><meta charset="utf-8"><script>addEventListener("message", e => { '
        'const p = document.createElement("pre"); p.textContent = JSON.stringify(e.data); '
        f'document.body.append(p); }});</script><body>{frames}</body>'
    )
    flags = [
        '--headless',
        '--no-sandbox',
        '--disable-gpu',
        '--no-first-run',
        '--disable-background-networking',
        '--disable-component-update',
        '--disable-sync',
        '--host-resolver-rules=MAP * ~NOTFOUND',
        f'--user-data-dir={folder / "profile"}',
        '--hide-scrollbars',
        '--window-size=1400,1000',
        f'--blink-settings=preferredColorScheme={0 if dark else 1}',
        '--virtual-time-budget=20000',
        '--enable-logging=stderr',
        '--dump-dom',
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, (folder / 'frames.html').as_uri()], capture_output=True, text=True, timeout=120
    )
    found = [json.loads(html.unescape(p)) for p in re.findall(r'<pre>(.*?)</pre>', done.stdout, re.S)]
    assert len(found) == len(widths), f'the browser said nothing: {done.stderr[-500:]}'
    console = [l for l in done.stderr.splitlines() if ':CONSOLE' in l]
    return {f['width']: f | dict(console=console) for f in found}


def png(size=24):
    "A small grey picture"
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    rows = b''.join(b'\0' + bytes((x*y) % 256 for x in range(size)) for y in range(size))
    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', struct.pack('>IIBBBBB', size, size, 8, 0, 0, 0, 0))
        + chunk(b'IDAT', zlib.compress(rows))
        + chunk(b'IEND', b'')
    )


@pytest.fixture(scope='module')
def complete(tmp_path_factory):
    "The largest one: rows beyond the paper, side experiments, pictures"
    root = write_all(tmp_path_factory.mktemp('complete'), 'cpu')
    for run in all_runs('cpu'):
        if run.task != 'super_resolution': continue
        names = ('crop.png', 'crop-original.png', 'crop-bicubic.png')[:1 if run.bits < 32 else 3]
        write_run(root, run, pictures={name: png() for name in names})
    return report.write_report(root, 'cpu', 1)


@pytest.fixture(scope='module')
def half(tmp_path_factory):
    "A batch under way: some runs failed, some were not run, one is damaged; long words"
    root, runs = write_all(tmp_path_factory.mktemp('half'), images=1), all_runs('smoke')
    for i, run in enumerate(runs):
        if i % 3 == 1: shutil.rmtree(root/'smoke'/run.id)
        if i % 9 == 1:
            write_failure(root, run, f'RuntimeError: <script>alert("{i}")</script> ' + '0123456789'*20)
    (root/'smoke'/runs[0].id/'record.json').write_text('{')
    return report.write_report(root, 'smoke', 1)


def check_page(found, dark=False):
    "What must be true of every report at every width"
    for width, f in found.items():
        assert not f['errors'] and not f['requests'], (f['errors'], f['requests'], f['console'])
        assert not f['console'], (f['errors'], f['requests'], f['console'])
        assert f['overflow'] == 0, f'the page scrolls sideways at {width}: {f["overflow"]} {f["outside"][:5]}'
        assert not f['outside'], f'the page scrolls sideways at {width}: {f["overflow"]} {f["outside"][:5]}'
        assert all(decoded and shown and alt for alt, decoded, shown in f['images']), f['images']
        assert all(0 < w <= width and h > 50 and label for label, w, h in f['charts']), f['charts']
        assert not f['spilled'], f'marks or text outside the chart: {f["spilled"]}'
        assert not f['pale'] and f['texts'] > 100, f'too little contrast: {f["pale"][:5]}'
        assert not f['heads'] and all(inside for inside, _ in f['tables'])
        assert f['headings'][0] == 1 and f['headings'].count(1) == 1
        assert all(b - a <= 1 for a, b in zip(f['headings'], f['headings'][1:]))
        assert len(f['ids']) == len(set(f['ids'])), 'two elements have one id'
        assert f['background'] == ('rgb(20, 24, 27)' if dark else 'rgb(255, 255, 255)')


def check_links(page, anchors):
    assert len(anchors) > 5
    for a in anchors:
        if a.startswith('#'): assert f'id="{a[1:]}"' in page.read_text(), a
        else: assert (page.parent/a).exists(), f'{a} leads nowhere'


@browser
@pytest.mark.parametrize('dark', [False, True])
def test_complete_report(complete, tmp_path, dark):
    found = open_in_browser(complete, tmp_path/'b', dark)
    assert sorted(found) == sorted(WIDTHS)
    check_page(found, dark)
    f = found[1280]
    assert len(f['images']) == 16 and len(f['charts']) >= 4 + 1 + 3 + 2 + 3 + 16
    assert any(w > 390 for _, w in found[390]['tables']), (
        'a table is wider than a phone, so that its box has something to do'
    )
    check_links(complete, f['anchors'])
    notebooks = {a for a in f['anchors'] if a.endswith('notebook.ipynb')}
    assert notebooks == {f'{r.id}/notebook.ipynb' for r in all_runs('cpu')}, 'every run is linked'


@browser
def test_report_of_a_batch_under_way(half, tmp_path):
    found = open_in_browser(half, tmp_path/'b')
    check_page(found)
    check_links(half, found[1280]['anchors'])
    text = half.read_text()
    assert '<script>' not in text and '&lt;script&gt;alert' in text
    assert text.index('id="results"') < text.index('id="progress"')
    by = report.progress(Results('smoke', half.parent.parent, 1))
    assert len(by['failed']) > 5 and len(by['corrupt']) == 1
    assert all(f'{len(r)} {"not run" if state == "missing" else state}' in text for state, r in by.items())
    assert all(r.id in text for r in by['failed'])


@browser
def test_report_of_nothing(tmp_path):
    page = report.write_report(tmp_path/'results', 'smoke', 1)
    found = open_in_browser(page, tmp_path/'b')
    check_page(found)
    assert found[390]['charts'] == [] and found[390]['images'] == []
    assert '73.11' in page.read_text() and 'No run has finished yet' in page.read_text()


@browser
@pytest.mark.parametrize('spoil, complaint', [
    ('<div style="width:1500px">wide</div>', 'scrolls sideways'),
    ('<img alt="x" src="https://example.org/x.png">', 'example.org'),
    ('<img alt="x" src="data:image/png;base64,AAAA">', 'AAAA'),
    ('<script>missing()</script>', 'missing is not defined'),
    ('<p style="color:#ccc">pale</p>', 'too little contrast')])
def test_the_checks_can_fail(complete, tmp_path, spoil, complaint):
    page = tmp_path/'spoilt.html'
    page.write_text(complete.read_text().replace('</main>', spoil + '</main>'))
    with pytest.raises(AssertionError, match=complaint):
        check_page(open_in_browser(page, tmp_path/'b', widths=(1280,)))


def test_nothing_comes_from_elsewhere(complete):
    text = complete.read_text()
    patterns = (r'https?:', r'"//', r'@import', r'<script', r'<iframe', r'url\((?!#)',
                r'<link(?! rel="icon" href="data:,")')
    for pattern in patterns:
        assert not re.search(pattern, text), pattern
    assert re.findall(r'src="([^"]{0,22})', text) == ['data:image/png;base64,']*16


def test_machine_versions_and_time(complete):
    text = complete.read_text()
    n = len(all_runs('cpu'))
    time = f'{n} min of CPU time' if n < 120 else f'{n/60:.1f} h of CPU time'
    for words in ('a processor', '2.8.0', '0123456789', time, f'All {n} runs'):
        assert words in text, words


def test_a_reader_never_sees_half_a_page(complete, monkeypatch):
    before, seen = complete.read_text(), []
    replace = os.replace
    def watch(a, b):
        whole = Path(a).read_text().endswith('</html>\n')
        seen.append((complete.read_text() == before, Path(a).parent == complete.parent, whole))
        replace(a, b)
    monkeypatch.setattr(os, 'replace', watch)
    report.write_report(complete.parent.parent, 'cpu', 1)
    assert seen == [(True, True, True)] and not list(complete.parent.glob('.report*'))
