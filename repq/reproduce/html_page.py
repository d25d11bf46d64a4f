"The frame of every HTML page that this room writes: one style sheet, nothing from elsewhere"
# plain Python: a style sheet and string templates, with nothing to teach; tests/reproduce/test_run_pages.py
import html

__all__ = ['STYLE', 'page', 'show_seconds', 'facts_table']

STYLE = '''
:root{--ink:#1c2126;--soft:#56616b;--faint:#69747d;--page:#fff;--panel:#f6f7f8;--rule:#c9ced3;
--hair:#e6e9eb;--link:#0b5cad;--shade:#0002;--good:#18794e;--bad:#b42318;--warn:#8a5a00;--c0:#8a949d;
--c1:#6b7680;--c2:#c9730a;--c3:#0b6bcb;--c4:#0a8f6c;--c5:#a8479b;--c6:#b08900}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8eb;--soft:#a3adb6;--faint:#87929c;--page:#14181b;
--panel:#1b2024;--rule:#48525a;--hair:#2a3136;--link:#7cb8f5;--shade:#000a;--good:#5cc796;--bad:#ff8a7a;
--warn:#e2b04a;--c0:#77828c;--c1:#a3adb6;--c2:#f0a04b;--c3:#66aef5;--c4:#46cfa4;--c5:#dd8ad2;--c6:#dcb944}}
*{box-sizing:border-box}html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;overflow-wrap:break-word;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,
-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:66rem;margin:0 auto;padding:0 1.25rem}header{padding-top:2.5rem}
footer{padding-bottom:3rem;color:var(--soft);font-size:.85rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.015em}
h2{font-size:1.3rem;margin:3rem 0 .6rem;padding-top:.9rem;border-top:1px solid var(--hair);
letter-spacing:-.01em}
h3{font-size:1rem;margin:1.6rem 0 .4rem}p{max-width:46rem;margin:.5rem 0}
.lead{color:var(--soft);margin-top:0}a{color:var(--link);text-decoration:none}
a:hover,a:focus{text-decoration:underline}
code{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;padding:0;margin:1rem 0 0;
font-size:.92rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;margin:1.4rem 0}
.tile{background:var(--panel);border-radius:8px;padding:.7rem .9rem}
.tile b{display:block;font-size:1.5rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.scroll{position:relative;overflow-x:auto;margin:.9rem 0 .2rem;background:linear-gradient(to right,
var(--page) 40%,transparent) 0 0/3rem 100% no-repeat local,linear-gradient(to left,var(--page) 40%,
transparent) 100% 0/3rem 100% no-repeat local,linear-gradient(to right,var(--shade),
transparent) 0 0/.8rem 100% no-repeat scroll,linear-gradient(to left,var(--shade),
transparent) 100% 0/.8rem 100% no-repeat scroll}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;
border-bottom:1.5px solid var(--ink)}
caption{text-align:left;font-weight:600;font-size:.95rem;padding-bottom:.5rem}
caption span{position:sticky;left:0;display:inline-block;max-width:min(100%,calc(100vw - 2.5rem))}
th,td{padding:.26rem .6rem;text-align:right;white-space:nowrap;vertical-align:baseline}
th{font-weight:500}thead th{color:var(--soft);border-bottom:1px solid var(--hair)}
thead tr:first-child th{border-top:1.5px solid var(--ink)}
thead tr:last-child th,thead th[rowspan]{border-bottom:1px solid var(--rule)}
thead th[scope=colgroup]{text-align:center}tbody th,thead th[rowspan]{text-align:left}
tbody th[scope=rowgroup]{vertical-align:top}
.scroll tbody th[scope=row]{position:sticky;left:0;background:var(--page)}
tbody tr.group:not(:first-child)>*{border-top:1px solid var(--hair)}
td.paper,th.paper{color:var(--soft);padding-left:.2rem}td.ours{padding-left:1.1rem}
u{text-decoration-thickness:1px;text-underline-offset:3px}td sup{font-size:.7em;line-height:0}
.seeds a{margin-left:.15em}.quiet{color:var(--faint)}.pm{color:var(--soft)}
p.caption{color:var(--soft);font-size:.86rem;max-width:54rem}
ul.notes{list-style:none;padding:0;margin:.2rem 0;color:var(--soft);font-size:.84rem;overflow-wrap:anywhere}
#table-S1 td{white-space:normal;min-width:5.5rem}.facts{border:0}
.summary{max-width:54rem;padding-left:1.1rem}.summary li{margin:.25rem 0}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}.facts th{color:var(--soft)}
.verdict{display:inline-block;font-size:.78rem;font-weight:600;padding:.05rem .5rem;border-radius:99px;
border:1px solid currentColor;white-space:nowrap}
.verdict.holds{color:var(--good)}.verdict.does,.verdict.contradicts{color:var(--bad)}
.verdict.outside{color:var(--warn)}.verdict.equal{color:var(--link)}
.verdict.cannot,.verdict.ties,.verdict.gives{color:var(--warn)}
.verdict.paper-holds,.verdict.gives{color:var(--faint);font-weight:400}
details.claim{border-top:1px solid var(--hair)}
details.claim:last-of-type{border-bottom:1px solid var(--hair)}
summary{cursor:pointer;padding:.5rem 0}
.claim summary{display:flex;flex-wrap:wrap;gap:.25rem .7rem;align-items:baseline}
.claim .what{flex:1 1 20rem}.claim summary>.verdict:first-child{min-width:8.2rem;text-align:center}
.where{color:var(--faint);font-size:.82rem}
.claim .why{flex:1 1 100%;min-width:0;overflow-wrap:anywhere;color:var(--soft);font-size:.9rem;
padding-left:8.9rem}
.claim td.judged{text-align:left}.claim p.caption{margin-bottom:.4rem}
.claim ul.notes{margin-bottom:1rem}.claim tr.single th{padding-left:1.6rem;color:var(--soft)}
.claim tr.pooled th{font-weight:600}
.claim tr.pooled:not(:first-child)>*{border-top:1px solid var(--hair)}
.hidden{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.claim th{text-align:left}
.progress{display:flex;height:.55rem;border-radius:99px;overflow:hidden;background:var(--hair);
max-width:46rem;margin:.7rem 0;gap:1px}
.progress i{background:var(--hair)}.progress .done{background:var(--good)}
.progress .other-method,.progress .collapsed{background:var(--c6)}
.progress .running,.progress .interrupted{background:var(--c3)}
.progress .failed,.progress .corrupt{background:var(--bad)}
.wrong{font-size:.9rem;overflow-wrap:anywhere}figure{margin:.8rem 0 2.2rem}
h3+figure .legend{margin-top:.2rem}
figcaption{color:var(--soft);font-size:.86rem;max-width:54rem;margin-top:.4rem}
.charts{display:flex;flex-wrap:wrap;gap:.6rem 1rem}.chart{flex:0 1 auto;max-width:100%;height:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;padding:0;margin:0 0 .5rem;
font-size:.85rem}
.legend svg{width:28px;height:14px;vertical-align:-2px;margin-right:.35rem}
.chart text{font:10.5px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
.chart .title{font-size:12px;font-weight:600;fill:var(--ink)}.grid{stroke:var(--hair);fill:none}
.axis{stroke:var(--rule);fill:none}.line{fill:none;stroke-width:1.6;stroke:var(--c)}
.thin{stroke-width:1}.dashed{stroke-dasharray:4 3}
.mark{fill:var(--c);stroke:var(--c);stroke-width:1}.mark.hollow{fill:var(--page)}
.mark.cross,.mark.plus{fill:none;stroke-width:2}.bar{fill:var(--c);opacity:.85}
path.paper{stroke:var(--ink);stroke-width:2;fill:none}
.interval{width:120px;height:16px;vertical-align:middle}.interval .grid{stroke:var(--ink)}
.holds{--c:var(--good)}.does{--c:var(--bad)}.equal{--c:var(--link)}.cannot{--c:var(--warn)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}.c6{--c:var(--c6)}
.crops{display:grid;grid-template-columns:repeat(auto-fill,minmax(7.5rem,1fr));gap:.8rem}
.crop img{width:100%;display:block;border-radius:4px;image-rendering:pixelated}
.crop span{font-size:.82rem;color:var(--soft)}
@media(max-width:36rem){body{font-size:15px}h1{font-size:1.5rem}main,header,footer{padding-left:1rem;
padding-right:1rem}th,td{padding:.26rem .42rem}tbody th{white-space:normal;min-width:6.4rem;max-width:9rem}
tbody th[scope=rowgroup]{min-width:4.6rem;max-width:5rem}td.ours{padding-left:.5rem}.claim .why{
padding-left:0}.claim tbody th{min-width:9rem}.claim summary>.verdict:first-child{min-width:0}
.charts .chart{flex:1 1 100%}}
@media print{.scroll{overflow:visible}details:not([open])>*:not(summary){display:block}}
'''

HEAD = ('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>{title}</title><link rel="icon" href="data:,"><style>{style}</style>')


def page(title:str, body:str)->str:
    "A page that needs nothing from elsewhere"
    head = HEAD.format(title=html.escape(title), style=STYLE)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def show_seconds(seconds:float)->str:
    "A duration in seconds, minutes or hours"
    if seconds < 120: return f'{seconds:.0f} s'
    if seconds < 7200: return f'{seconds/60:.0f} min'
    return f'{seconds/3600:.1f} h'


def facts_table(
    facts # pairs of name and text
)->str:
    "Names and values as a table of two columns, without empty values"
    row = '<tr><th scope="row">{}</th><td>{}</td></tr>'
    body = ''.join(row.format(html.escape(name), html.escape(value)) for name, value in facts if value)
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
