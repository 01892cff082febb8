# SPDX-License-Identifier: Apache-2.0
"""The style sheet of the HTML report: light or dark by the reader's setting, and readable on a phone."""

STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --text: #1b1f24; --soft: #59636e; --line: #d9dee4; --grid: #e8ebef;
  --pass: #1a7f37; --warn: #9a6700; --fail: #cf222e; --pass-bg: #e6f6ea; --warn-bg: #fff6dc; --fail-bg: #ffebe9;
  --s0: #0969da; --s1: #bc4c00; --s2: #0b8577; --s3: #8250df; --s4: #bf3989; --s5: #6e7781; --band: #e4ecf7; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0d1117; --card: #161b22; --text: #e6edf3; --soft: #9aa4af; --line: #30363d; --grid: #232a33;
  --pass: #4ac26b; --warn: #d9a520; --fail: #ff7b72; --pass-bg: #12261a; --warn-bg: #2a2210; --fail-bg: #301416;
  --s0: #58a6ff; --s1: #f0883e; --s2: #3fc8b4; --s3: #bc8cff; --s4: #f778ba; --s5: #8b949e; --band: #1c2738; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 56px; }
h1 { font-size: 1.05rem; font-weight: 600; margin: 0 0 12px; color: var(--soft); }
h2 { font-size: 1.2rem; margin: 36px 0 4px; }
h3 { font-size: .98rem; margin: 0 0 6px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); font-size: .92rem; }
section > p.soft { max-width: 75ch; }
.verdict { border-radius: 12px; padding: 20px 22px; border: 1px solid; }
.verdict.pass { background: var(--pass-bg); border-color: var(--pass); }
.verdict.warn { background: var(--warn-bg); border-color: var(--warn); }
.verdict.fail { background: var(--fail-bg); border-color: var(--fail); }
.verdict strong { display: block; font-size: 2rem; line-height: 1.2; }
.verdict.pass strong, td.pass { color: var(--pass); } .verdict.warn strong, td.warn { color: var(--warn); }
.verdict.fail strong, td.fail { color: var(--fail); }
.verdict ul { margin: 10px 0 0; padding-left: 20px; } .verdict li { overflow-wrap: anywhere; }
.about { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px 22px; margin: 16px 0 0; }
.about dt { color: var(--soft); font-size: .8rem; } .about dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; margin: 0;
  min-width: 0; }
.card + .card { margin-top: 12px; } .charts .card + .card { margin-top: 0; }
.card.fail { border-left: 5px solid var(--fail); } .card.warn { border-left: 5px solid var(--warn); }
.card code, .card pre { overflow-wrap: anywhere; white-space: pre-wrap; }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
svg { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .86rem; color: var(--soft); margin: 6px 0 0;
  padding: 0; list-style: none; }
.legend i { display: inline-block; width: 18px; height: 0; border-top: 3px solid; margin-right: 6px;
  vertical-align: middle; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: .82rem; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 12ch; text-align: left; }
td.bar { width: 190px; min-width: 150px; padding-top: 4px; padding-bottom: 4px; }
tr.changed td { background: var(--warn-bg); }
td.cell { text-align: center; min-width: 64px; } td.slow { outline: 3px solid var(--fail); outline-offset: -4px;
  font-weight: 700; }
text { font: 13.5px system-ui, sans-serif; fill: var(--soft); } text.title { font-size: 12.5px; }
.grid { stroke: var(--grid); } .axis, .tickmark { stroke: var(--soft); stroke-width: 1; } .band { fill: var(--band); }
.line { fill: none; stroke: currentColor; stroke-width: 2.4; stroke-linejoin: round; }
.point { fill: currentColor; stroke: var(--card); stroke-width: 1.2; } .dot { fill: currentColor; opacity: .35; }
.interval { stroke: currentColor; stroke-width: 3; opacity: .55; } .mark { stroke: var(--fail); stroke-width: 2;
  stroke-dasharray: 3 4; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); }
.s4 { color: var(--s4); } .s5 { color: var(--s5); }
.floor { color: var(--warn); } .limit { color: var(--s5); } .bad { color: var(--fail); } .good { color: var(--pass); }
polyline.floor { stroke-dasharray: 7 5; stroke-width: 2; } polyline.limit { stroke-dasharray: 2 5; stroke-width: 2; }
.legend i.floor { border-top-style: dashed; } .legend i.limit { border-top-style: dotted; }
@media (max-width: 560px) { body { font-size: 15px; } .verdict strong { font-size: 1.6rem; } text { font-size: 17px; }
  text.title { font-size: 15px; } th, td { padding: 7px 9px; } }
@media print { body { background: #fff; } .card, .scroll { break-inside: avoid; } }
"""
