"One page to read: tables, claims with their evidence, charts, machine; and the tables in three formats"
# plain Python: HTML put together from strings, with nothing to teach; tests/reproduce/test_report.py
import html
from datetime import datetime
from pathlib import Path
from ..tools.files import write_whole
from ..tools.text_tables import markdown_table
from .evidence import USABLE, Results
from .figures import FIGURES
from .formats import escape_markdown
from .html_page import facts_table, page, show_seconds
from .protocol import EQUAL, FAILS, HOLDS, OPEN, Interval
from .runs import PROFILES, STATES
from .statements import digits, show_number, thresholds
from .tables import MEASURES, has_numbers, report_tables
from .verdicts import CHOSEN, VERDICT_WORDS, Answer, Verdict, claims, count_verdicts, results_summary

__all__ = ['write_report', 'write_tables', 'report_html', 'claims_html', 'claims_markdown', 'claim_html',
           'machine_html', 'progress', 'progress_html', 'runs_html', 'tiles']


# What was run

def progress(results:Results)->dict: # state -> runs
    "How far the batch is"
    by_state = {}
    for r in results.runs: by_state.setdefault(results.look(r).state, []).append(r)
    return by_state


def run_link(run, found, results:Results)->str:
    "The id of a run, as a link if its notebook is there"
    link, name = results.link(found), f'<code>{html.escape(run.id)}</code>'
    return f'<a href="{html.escape(link)}">{name}</a>' if link else name


def progress_html(results:Results)->str:
    "A bar, the counts, and the runs that failed"
    by_state = progress(results)
    total, done = sum(map(len, by_state.values())), len(by_state.get('done', []))
    there = [s for s in STATES if s in by_state]
    counts = ', '.join(f'{len(by_state[s])} {"not run" if s == "missing" else s}' for s in there)
    parts = ''.join(f'<i class="{s.replace(" ", "-")}" style="flex:{len(by_state[s])}"></i>' for s in there)
    of = 'All runs of the profile are done' if done == total else f'Of {total} runs'
    text = f'<p>{of}: {counts}.</p><div class="progress" role="img" aria-label="{counts}">{parts}</div>'
    rows = []
    for state in ('failed', 'corrupt', 'collapsed'):
        for run in by_state.get(state, []):
            found = results.look(run)
            why = html.escape(found.why or 'no reason was recorded')
            rows.append(f'<li>{run_link(run, found, results)}: {html.escape(found.state)}, {why}</li>')
    if not rows: return text
    return text + f'<h3>Runs that went wrong</h3><ul class="wrong">{"".join(rows)}</ul>'


def runs_html(results:Results)->str:
    "Every run, with its state, time and notebook"
    rows = []
    for run in results.runs:
        found = results.look(run)
        wall = ((found.record or {}).get('time') or {}).get('wall')
        time = show_seconds(wall) if wall else ''
        rows.append(f'<tr><th scope="row">{run_link(run, found, results)}</th>'
                    f'<td>{html.escape(found.state)}</td><td>{time}</td></tr>')
    head = ''.join(f'<th scope="col">{h}</th>' for h in ('Run', 'State', 'Time'))
    return (f'<details><summary>All {len(rows)} runs</summary>'
            '<div class="scroll" role="region" tabindex="0" aria-label="All runs">'
            f'<table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>')


# A claim and its evidence

def css(words:str)->str: return words.split()[0] if words else 'open'


def interval_svg(ours:Interval, threshold:float, verdict:str, scale:tuple)->str: # scale: low, high
    "An interval and the threshold of its claim"
    low, high = scale
    def x(v): return f'{6 + 108*(v - low)/((high - low) or 1):.1f}'
    a, b = ours.bounds()
    return ('<svg class="interval" viewBox="0 0 120 16" aria-hidden="true">'
            f'<path class="grid" d="M{x(threshold)} 1V15"/>'
            f'<path class="line {css(verdict)}" d="M{x(a)} 8H{x(b)}"/>'
            f'<circle class="mark {css(verdict)}" cx="{x(ours.mid)}" cy="8" r="3.5"/></svg>')


def scale_of(answers)->tuple: # low, high
    "One scale for the intervals of a claim and their thresholds"
    marks = []
    for a in answers:
        for x in (a, *a.singles):
            if x.ours: marks += [*x.ours.bounds(), a.compare.than]
    return (min(marks), max(marks)) if marks else (0., 0.)


def show_interval(ours:Interval, unit:str)->str:
    "The middle of an interval, and its bounds unless it is exact"
    low, high = ours.bounds()
    text, d = html.escape(show_number(ours.mid, unit)), digits(unit)
    if low == high: return text
    return text + f' <span class="pm">[{low:.{d}f}, {high:.{d}f}]</span>'.replace('-', '−')


def evidence_row(name:str, a:Answer, x, links:tuple, scale:tuple)->str:
    "The pooled difference (`x` is the answer), or a single network (a `Single`), as a row"
    unit, picture, ours = a.compare.unit, '', '<span class="quiet">–</span>'
    if x.ours:
        ours = show_interval(x.ours, unit)
        if x.ours.error: picture = interval_svg(x.ours, a.compare.than, x.verdict, scale)
    numbers = ' '.join(f'<a href="{html.escape(l)}" aria-label="notebook {i}">{i}</a>'
                       for i, l in enumerate(links, 1))
    paper = '–' if x.paper is None else html.escape(show_number(x.paper, unit))
    return (f'<tr class="{"pooled" if x is a else "single"}"><th scope="row">{html.escape(name)}</th>'
            f'<td class="ours">{ours}</td><td>{picture}</td><td class="paper">{paper}</td>'
            f'<td class="judged"><span class="verdict {css(x.verdict)}">{x.verdict}</span></td>'
            f'<td class="seeds">{numbers}</td></tr>')


def answer_rows(a:Answer, scale:tuple, several:bool)->str:
    "The rows of one comparison: pooled first, the single networks below"
    alone = len(a.singles) == 1
    name = a.compare.what if several or alone else 'pooled over ' + (a.ours.how if a.ours else 'all')
    rows = evidence_row(name, a, a, a.singles[0].links if alone else (), scale)
    if alone: return rows
    return rows + ''.join(evidence_row(s.pair.name, a, s, s.links, scale) for s in a.singles)


def evidence_table(v:Verdict)->str:
    "All comparisons of a claim; intervals of one unit share a scale"
    names = ('Comparison', 'Ours, 90 % interval', '<span class="hidden">Interval, drawn</span>', 'Paper',
             'Verdict', 'Notebooks')
    head = ''.join(f'<th scope="col">{h}</th>' for h in names)
    units = {a.compare.unit for a in v.evidence}
    scales = {unit: scale_of([a for a in v.evidence if a.compare.unit == unit]) for unit in units}
    several = len(v.evidence) > 1
    rows = ''.join(answer_rows(a, scales[a.compare.unit], several) for a in v.evidence)
    return (f'<div class="scroll" role="region" tabindex="0" aria-label="Evidence: {html.escape(v.claim)}">'
            f'<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>')


def claim_rule(v:Verdict)->str:
    "What the interval has to do, in a sentence; empty if the parts of a claim differ in that"
    holds, fails = thresholds(v.evidence[0].compare)
    alike = len({thresholds(a.compare) for a in v.evidence}) == 1
    rule = f'Holds if the whole interval is {holds}; does not hold if it is {fails}.' if alike else ''
    corrected = ' Verdicts on single rows are corrected for being several.'
    return rule + corrected*(len(v.evidence[0].singles) > 1)


def claim_notes_html(v:Verdict)->str:
    "The notes of a verdict as a list"
    notes = [n[:1].upper() + n[1:] for n in v.notes]
    if v.paper_why: notes.append(f'The paper’s own numbers: {v.paper_why}')
    if not notes: return ''
    return f'<ul class="notes">{"".join(f"<li>{html.escape(n)}.</li>" for n in notes)}</ul>'


def claim_html(v:Verdict)->str:
    "A claim that opens to its evidence"
    look = 'paper-holds' if v.paper == 'holds' else css(v.paper)
    paper = f'<span class="verdict {look}">paper: {v.paper}</span>'
    outside = '<span class="verdict outside">outside its premise</span> ' if v.outside else ''
    why = html.escape(v.why[:1].upper() + v.why[1:])
    return (f'<details class="claim"><summary><span class="verdict {css(v.verdict)}">{v.verdict}</span> '
            f'<span class="what">{html.escape(v.claim)}</span> {outside}{paper} '
            f'<span class="where">{html.escape(v.where)}</span><span class="why">{why}.</span></summary>'
            f'{evidence_table(v)}<p class="caption">{html.escape(claim_rule(v))}</p>'
            f'{claim_notes_html(v)}</details>')


def claims_html(verdicts:list)->str:
    "All claims by verdict, those that could not be told last"
    odd = sum(v.paper in ('ties', 'contradicts itself') for v in verdicts)
    intro = (f'<p>{len(verdicts)} claims, at this scale: {count_verdicts(verdicts)}. In {odd} of them the '
             'paper’s own numbers tie with the claim or contradict it. Verdicts are computed, by rules that '
             'were written down before the runs. ± is half of the 90 % interval of the difference; a claim '
             'is decided when the whole interval is on one side of its threshold. '
             f'{CHOSEN} A claim that was judged where that premise does not hold says so.</p>')
    parts = []
    for word, words in VERDICT_WORDS.items():
        own = [v for v in verdicts if v.verdict == word]
        run, without = [v for v in own if v.weakest], [v for v in own if not v.weakest]
        if run: parts.append(f'<h3>{len(run)} {words}</h3>' + ''.join(map(claim_html, run)))
        if not without: continue
        parts.append(f'<h3>{len(without)} without enough runs</h3>' + ''.join(map(claim_html, without)))
    return intro + ''.join(parts)


# The machine

def several(values)->str:
    "Different values, most frequent first"
    values = [str(v) for v in values if v not in (None, '')]
    return ', '.join(sorted(set(values), key=lambda v: -values.count(v)))


def batch_facts(batch:dict)->list:
    "What the manifest says about the last batch"
    facts = [('Command', str(batch['command']))] if batch.get('command') else []
    parts = [f'started {batch["started"]}' if batch.get('started') else '',
             show_seconds(batch['seconds']) if batch.get('seconds') else '',
             f'{batch["workers"]} workers' if batch.get('workers') else '']
    return facts + [('Last batch', ', '.join(filter(None, parts)))]


def record_facts(records:list)->list:
    "Time, versions and machines of finished runs"
    times = [r.get('time', {}) for r in records]
    cpu, wall = (show_seconds(sum(t.get(k) or 0 for t in times)) for k in ('cpu', 'wall'))
    continued = sum((t.get('sessions') or 1) > 1 for t in times)
    facts = [('All runs together', f'{cpu} of CPU time, {wall} one after the other'),
             ('Interrupted and continued', f'{continued} runs')]
    known = [{**r.get('machine', {}), **r.get('versions', {}), **r.get('environment', {})} for r in records]
    names = dict.fromkeys(k for e in known for k in e)
    facts += [(name, several(e.get(name) for e in known)) for name in names]
    return facts + [('commit', several((r.get('commit') or '')[:10] for r in records))]


def machine_html(results:Results)->str:
    "What it ran on and how long it took"
    found = [results.look(r) for r in results.runs]
    records = [f.record for f in found if f.record]
    batch = results.store.manifest()
    facts = (batch_facts(batch) if batch else []) + (record_facts(records) if records else [])
    return facts_table(facts) if facts else '<p>No run has finished yet.</p>'


# The page

def summary_html(results:Results, verdicts:list)->str:
    "What was measured and what it means, as a list"
    items = ''.join(f'<li>{html.escape(sentence)}</li>' for sentence in results_summary(results, verdicts))
    return f'<ul class="summary">{items}</ul>'


def tiles(results:Results, verdicts:list)->str:
    "The most important numbers"
    by_state = progress(results)
    records = [results.look(r).record for s in USABLE for r in by_state.get(s, [])]
    counts = {w: sum(v.verdict == w for v in verdicts) for w in VERDICT_WORDS}
    cpu = sum((r.get('time') or {}).get('cpu') or 0 for r in records)
    numbers = [(counts[HOLDS], 'claims hold'), (counts[FAILS], 'do not hold'),
               (counts[EQUAL], 'equal within the margin'), (counts[OPEN], 'cannot be told at this scale'),
               (f'{len(records)} of {len(results.runs)}', 'runs finished'),
               (show_seconds(cpu), 'of CPU time')]
    shown = ''.join(f'<div class="tile"><b>{n}</b><span>{what}</span></div>' for n, what in numbers)
    return f'<div class="tiles">{shown}</div>'


def report_sections(results:Results, verdicts:list)->list: # of (id, title, HTML)
    "The parts of the report: results first, what was not run last"
    tables = report_tables(results)
    shown = ''.join(t.html() for t in tables if has_numbers(t.number, results))
    how = ''.join(t.html() for t in tables if t.number not in MEASURES)
    not_run = [t for t in tables if t.number in MEASURES and not has_numbers(t.number, results)]
    drawn = {title: make(results) for title, make in FIGURES.items()}
    pictures = ''.join(f'<h3>{title}</h3>{svg}' for title, svg in drawn.items() if svg)
    nothing = '<p>No run has finished yet.</p>'
    rest = progress_html(results) + ''.join(t.html() for t in not_run) + runs_html(results)
    return [('results', 'Results', shown or nothing),
            ('claims', 'Claims', tiles(results, verdicts) + claims_html(verdicts)),
            ('figures', 'Figures', pictures or nothing), ('setting', 'How it was run', how),
            ('machine', 'Machine, versions, time', machine_html(results)),
            ('progress', 'What was run, and what was not', rest)]


def report_html(results:Results)->str:
    "The report as text"
    verdicts = claims(results=results)
    sections = report_sections(results, verdicts)
    seeds = 'One seed' if results.seeds == 1 else f'{results.seeds} seeds'
    contents = ''.join(f'<li><a href=#{i}>{t}</a></li>' for i, t, _ in sections)
    head = ('<header><h1>RepQ, reproduced</h1>'
            f'<p class="lead">Profile <b>{html.escape(results.profile)}</b>: '
            f'{html.escape(PROFILES[results.profile])}. {seeds}. '
            'Each number of ours is a link to the executed notebook that made it.</p>'
            f'{summary_html(results, verdicts)}<nav aria-label="Contents"><ul>{contents}</ul></nav></header>')
    section = '<section aria-labelledby="{0}"><h2 id="{0}">{1}</h2>{2}</section>'
    main = ''.join(section.format(*s) for s in sections)
    now = datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z')
    foot = f'<footer><p>Written by repq on {now}, from the records in this folder.</p></footer>'
    return page(f'RepQ, reproduced: {results.profile}', f'{head}<main>{main}</main>{foot}')


def write_report(
    root='results',  # folder of the profiles
    profile='smoke',
    seeds:int=None   # by default those of the last batch, or of the profile
)->Path: # results/<profile>/report.html
    "Write the report; cheap, so it can follow a running batch"
    text = report_html(Results(profile, root, seeds))
    return write_whole(Path(root)/profile/'report.html', text, parents=True)


def claims_markdown(verdicts:list)->str:
    "The claims as a table, in the order of the verdicts"
    e, order, rows = escape_markdown, list(VERDICT_WORDS), []
    for v in sorted(verdicts, key=lambda v: (order.index(v.verdict), v.weakest is None)):
        paper = f'{v.paper}: {e(v.paper_why)}' if v.paper_why else v.paper
        words = f'{v.why}; {v.premise}' if v.premise else v.why
        rows.append((e(v.claim), f'**{v.verdict}**', e(words), paper))
    head = 'Claim', 'Verdict', 'In words (± is half of the 90 % interval)', 'In the paper'
    return f'**Claims**\n\n{e(CHOSEN)}\n\n{markdown_table(head, rows, left=4)}\n'


def write_tables(
    root='results',
    profile='smoke',
    seeds:int=None   # by default those of the last batch, or of the profile
)->list: # paths of tables.md, tables.html, tables.tex
    "Write all tables in three formats; the claims too in Markdown and HTML"
    results = Results(profile, root, seeds)
    tables, verdicts = report_tables(results), claims(results=results)
    title, folder = f'RepQ, reproduced: the tables of the {profile} profile', Path(root)/profile
    said = '\n'.join(f'- {escape_markdown(sentence)}' for sentence in results_summary(results, verdicts))
    shown = '\n'.join(t.markdown() for t in tables)
    markdown = f'# {title}\n\n{said}\n\n{shown}\n{claims_markdown(verdicts)}'
    head = f'<header><h1>{title}</h1>{summary_html(results, verdicts)}</header>'
    shown = ''.join(t.html() for t in tables)
    body = f'{head}<main>{shown}<h2>Claims</h2>{claims_html(verdicts)}</main>'
    latex = '% needs booktabs, hyperref, amssymb\n' + '\n'.join(t.latex() for t in tables)
    return [write_whole(folder/'tables.md', markdown, parents=True),
            write_whole(folder/'tables.html', page(title, body)), write_whole(folder/'tables.tex', latex)]
