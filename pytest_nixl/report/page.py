# SPDX-License-Identifier: Apache-2.0
"""The HTML report: one self-contained page with the verdict, the measurements and the findings."""

from __future__ import annotations

from html import escape

from pytest_nixl.core import units
from pytest_nixl.judge.run_comparison import shown_change
from pytest_nixl.model.conclusion import Conclusion, counted, known_limits
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import GOOD, Outcome, Verdict, outcome
from pytest_nixl.report.charts import bandwidth, history, latency
from pytest_nixl.report.matrix import matrices
from pytest_nixl.report.names import short
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.style import STYLE
from pytest_nixl.report.svg import change_bar
from pytest_nixl.store.provenance import changes

_STYLES = {Outcome.PASS: "pass", Outcome.WARN: "warn", Outcome.FAIL: "fail", Outcome.SKIP: "soft"}
_BARS = {Verdict.REGRESSED: "bad", Verdict.IMPROVED: "good", Verdict.UNCHANGED: "s0"}


def page(report: RunReport) -> str:
    """Return the whole page. It loads nothing: no script, font or image from elsewhere."""
    name = escape(report.run.name)
    sections = "\n".join(
        section
        for section in (
            _verdict(report),
            _comparison(report),
            _charts("Bandwidth over block size", bandwidth(report.run), _BANDWIDTH),
            _charts("Latency of single transfers", latency(report.run), _LATENCY),
            _charts("History by image", history(report.history), _HISTORY),
            _matrix(report),
            _raw(report),
            _findings(report),
            _known_limits(report),
            _provenance(report),
        )
        if section
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f'<link rel="icon" href="data:,">\n<title>NIXL: {name}</title>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


_BANDWIDTH = (
    "Delivered bandwidth: the bytes that arrived and were verified, divided by the time until the last proof of "
    "delivery. A line joins the medians over launches; each launch is a dot."
)
_LATENCY = "From post to completion of one transfer, over all launches. Both scales are logarithmic."
_HISTORY = (
    "Each point is the median over the launches of one run, the oldest on the left. A dashed red line marks a lasting "
    "change of the bandwidth by 5 % or more."
)


def _outcome(report: RunReport, result: Result) -> Outcome:
    return outcome(result.verdict, gate=report.gate)


def _verdict(report: RunReport) -> str:
    run = report.run
    conclusion = Conclusion.of(run.results, gate=report.gate, interrupted=run.interrupted)
    worst = conclusion.outcome
    word = escape(str(conclusion)) if run.results or run.interrupted else "NO CHECK IS RECORDED"
    said = ", ".join(f"{count} {verdict}" for verdict, count in counted(run.results).items())
    count = len(run.rows)
    bad = [result for result in run.results if _outcome(report, result) is worst and worst is not Outcome.PASS]
    alike: dict[tuple[Verdict, str], list[Result]] = {}
    for result in bad:
        alike.setdefault((result.verdict, result.check), []).append(result)
    reasons = "".join(_first_of(group) for group in alike.values())
    image, host = run.provenance.image, run.provenance.host
    about = {
        "image": str(image),
        "host": str(host.get("name", "unknown")),
        "measured": f"{run.when:%Y-%m-%d %H:%M} UTC",
        "checks": said or "none",
        "rows": f"{count} measured",
    }
    if report.compared is not None:
        about["against"] = report.compared.before.name
    return (
        f"<h1>NIXL {'gate' if report.gate else 'verdict'}</h1>\n"
        f'<div class="verdict {_STYLES[worst]}"><strong>{word}</strong>{f"<ul>{reasons}</ul>" if reasons else ""}'
        f'<dl class="about">{"".join(_pair(name, text) for name, text in about.items())}</dl></div>'
    )


def _first_of(group: list[Result]) -> str:
    first = group[0]
    more = f" <i>(and {len(group) - 1} more like it, below)</i>" if len(group) > 1 else ""
    return f"<li><b>{first.verdict}</b> {escape(first.reason or first.row or first.check)}{more}</li>"


def _pair(name: str, text: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"


def _comparison(report: RunReport) -> str:
    compared = report.compared
    if compared is None:
        return ""
    rows = []
    order = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.UNCHANGED)
    for key, effect in sorted(
        compared.comparison.rows.items(), key=lambda item: (order.index(item[1].verdict), item[1].ratio)
    ):
        bar = change_bar(effect.ratio, effect.interval, compared.margin, _BARS.get(effect.verdict, "s5"))
        kind = _STYLES[outcome(effect.verdict, gate=False)]
        rows.append(
            f'<tr><td>{escape(short(key))}</td><td class="text {kind}">{effect.verdict}</td>'
            f'<td>{escape(shown_change(effect))}</td><td class="bar">{bar}</td>'
            f"<td>{units.gigabytes(compared.before.rows[key].bandwidth)}</td>"
            f"<td>{units.gigabytes(compared.now.rows[key].bandwidth)}</td>"
            f"<td>{effect.now}:{effect.before}</td><td>{effect.p:.2g}</td></tr>"
        )
    heads = ("row", "verdict", "change [90 %]", "", "GB/s before", "GB/s now", "launches", "p")
    pooled = compared.comparison.pooled
    together = f" All rows together: {pooled.words}." if pooled is not None else ""
    words = (
        f"The run is {compared.comparison.verdict}.{together} The band shows changes that count as unchanged, up to "
        f"{100 * compared.margin:.3g} % in each direction; the bar is a 90 % interval."
    )
    return _section(f"Against {compared.before.name}", words, _table(heads, rows) if rows else "")


def _charts(title: str, cards: list[str], words: str) -> str:
    return _section(title, words, f'<div class="charts">{"".join(cards)}</div>') if cards else ""


def _section(title: str, words: str, inner: str) -> str:
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="soft">{escape(words)}</p>\n{inner}\n</section>'


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _matrix(report: RunReport) -> str:
    found = matrices(report.run)
    if not found:
        return ""
    words = (
        "Delivered bandwidth in GB/s from each initiator (down) to each target (across). The slowest link is framed."
    )
    return _section("Ranks and links", words, f'<div class="charts">{"".join(found)}</div>')


def _raw(report: RunReport) -> str:
    ratios = [ratio for result in report.run.results for ratio in result.ratios if ratio.comparable]
    if not ratios:
        return ""
    rows = []
    for ratio in ratios:
        figures = (units.gigabytes(ratio.nixl), units.gigabytes(ratio.raw.value), f"{ratio.value:.2f}")
        told = (ratio.raw.words, "+".join(ratio.raw.transports))
        cells = [f"<td>{text}</td>" for text in (escape(short(ratio.row)), *figures)]
        cells += [f'<td class="text">{escape(text)}</td>' for text in told]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    words = (
        "The same blocks over the same transport without NIXL: a low raw bandwidth is a slow fabric, a low ratio is a "
        "loss in NIXL. At depth 1 NIXL waits for each block, which alone makes small blocks slow."
    )
    heads = ("row", "NIXL GB/s", "raw GB/s", "ratio", "by", "over")
    return _section("NIXL and raw", words, _table(heads, rows))


def _findings(report: RunReport) -> str:
    alike: dict[tuple[Verdict, str], list[Result]] = {}
    for result in report.run.results:
        if result.verdict not in GOOD:
            alike.setdefault((result.verdict, result.remedy), []).append(result)
    if not alike:
        return ""
    order = [Outcome.FAIL, Outcome.WARN, Outcome.SKIP, Outcome.PASS]
    groups = sorted(alike.items(), key=lambda item: order.index(_outcome(report, item[1][0])))
    cards = []
    for (verdict, remedy), group in groups:
        reasons = "".join(f"<p>{escape(one.reason or one.row or one.check)}</p>" for one in group[:12])
        more = f"<p>and {len(group) - 12} more</p>" if len(group) > 12 else ""
        said = f'<p class="soft"><b>What to do.</b> {escape(remedy)}</p>' if remedy else ""
        repeat = f"<p><code>{escape(group[0].repeat)}</code></p>" if group[0].repeat else ""
        checks = ", ".join(dict.fromkeys(one.check for one in group))
        kind = _STYLES[_outcome(report, group[0])]
        cards.append(
            f'<div class="card {kind}"><h3>{verdict}: {escape(checks)}</h3>{reasons}{more}{said}{repeat}</div>'
        )
    return _section("Findings", "Every result that is not good, with its reason and remedy.", "".join(cards))


def _known_limits(report: RunReport) -> str:
    shown = known_limits(report.run.results)
    if not shown:
        return ""
    rows = []
    for id in shown:
        first = next(result for result in report.run.results if result.known_limit and result.finding == id)
        cells = [f'<td class="wrap">{escape(text)}</td>' for text in (id, first.reason, first.remedy)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    words = "Defects of NIXL that were seen only on processes that the suites started. None affects this deployment."
    return _section("Known limits of NIXL", words, _table(("id", "what was seen", "remedy"), rows))


def _provenance(report: RunReport) -> str:
    run = report.run
    before = report.compared.before if report.compared is not None else None
    changed = {item.what: item for item in changes(before.provenance, run.provenance)} if before is not None else {}
    now = {change.what: change.now for change in changes(type(run.provenance)(), run.provenance)}
    rows = []
    for name in dict.fromkeys((*changed, *now)):
        item = changed.get(name)
        value = now.get(name, "")
        cells = f'<td class="wrap">{escape(value) or "–"}</td>'
        if before is not None:
            was = item.before if item is not None else value
            cells = f'<td class="wrap">{escape(was) or "–"}</td>{cells}'
        rows.append(f'<tr{" class=changed" if item else ""}><td class="wrap">{escape(name)}</td>{cells}</tr>')
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in run.notes)
    if not rows:
        return ""
    words, heads = "The circumstances in which this run was measured.", ["", "this run"]
    if before is not None:
        words, heads = f"The differences from {before.name} come first.", ["", before.name, "this run"]
    head = "".join(f'<th class="text">{escape(text)}</th>' for text in heads)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return _section("Provenance and what changed", words, table + notes)
