# SPDX-License-Identifier: Apache-2.0
"""The HTML report: what is in the page. ``templates/page.html.j2`` says how it is shown."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from pytest_nixl.core import units
from pytest_nixl.judge.run_comparison import CHECK as REGRESSION
from pytest_nixl.judge.run_comparison import change_text
from pytest_nixl.model.conclusion import NEXT_STEPS, counted, known_limits
from pytest_nixl.model.findings import FINDINGS, reproduction
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey, UnknownKey
from pytest_nixl.model.verdicts import GOOD, Outcome, Verdict, outcome
from pytest_nixl.report.charts import bandwidth, change_bar, change_scale, changes_axis, history, latency, time_text
from pytest_nixl.report.matrix import matrices
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.table import figure_rows, reasons, repeats
from pytest_nixl.session.selection import suite_checks
from pytest_nixl.store.provenance import changes

_STYLES = {Outcome.PASS: "pass", Outcome.WARN: "warn", Outcome.FAIL: "fail", Outcome.SKIP: "soft"}
_BARS = {Verdict.REGRESSED: "bad", Verdict.IMPROVED: "good", Verdict.UNCHANGED: "s0"}
#: The styles of rows, the most severe first, and the figures of a row.
_ORDER = ("fail", "warn", "pass", "soft")
_NUMBERS = 5
#: The verdicts of a row that say less than that it lost bandwidth since the baseline.
_GOOD_ROW = (None, *GOOD)
#: The most commands of one card.
_MOST_COMMANDS = 12
#: A rank in a sentence.
_RANK = re.compile(r"\branks? (\d+)")
#: In a sentence: code between backticks, or an option.
_CODE = re.compile(r"`([^`]+)`|(?<!\S)(\(?--?[a-z]\S*)")
#: The name in ``[project.urls]`` of the address of the site.
_SITE = "Documentation"
_TEMPLATES = Path(__file__).parent / "templates"


def page(report: RunReport) -> str:
    """Return the whole page. It loads nothing from elsewhere, and is readable without its script."""
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    return _template().render(
        name=report.run.name,
        gate=report.gate,
        verdict=_verdict(report),
        compared=_comparison(report),
        rows=_rows(report),
        checks=_checks(report),
        not_applicable=_not_applicable(report),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        bandwidth=bandwidth(report.run, report.compared.before if report.compared is not None else None),
        latency=latency(report.run),
        history=history(report.history),
        matrices=matrices(report.run),
        ratios=[ratio for result in report.run.results for ratio in result.ratios if ratio.comparable],
        figures=figure_rows(report.run.results),
        findings=_findings(report),
        known_limits=_known_limits(report),
        provenance=_provenance(report),
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        css_text=_css_text, gigabytes=units.gigabytes, sentence=_sentence, whole_words=_whole_words
    )
    return environment.get_template("page.html.j2")


def _whole_words(text: str) -> Markup:
    """Return a command as HTML that is broken between its words, and not inside an option."""
    return Markup(" ").join(Markup("<b class=word>{}</b>").format(part) for part in text.split(" "))


def _sentence(text: str) -> Markup:
    """Return a sentence as HTML: code between backticks is shown as code, and an option is not broken."""
    parts, end = [], 0
    for match in _CODE.finditer(text):
        code, option = match.groups()
        shown = Markup("<code>{}</code>").format(_whole_words(code)) if code else _whole_words(option)
        parts += [escape(text[end : match.start()]), shown]
        end = match.end()
    return Markup().join((*parts, escape(text[end:])))


def _css_text(text: str) -> Markup:
    """Return a text as a string of a style sheet, whatever its characters are."""
    return Markup("".join(sign if sign.isascii() and sign.isalnum() else f"\\{ord(sign):x} " for sign in text))


def _outcome(report: RunReport, result: Result) -> Outcome:
    return outcome(result.verdict, gate=report.gate)


def _verdict(report: RunReport) -> Mapping[str, Any]:
    run = report.run
    worst = report.outcome
    listing = ", ".join(f"{count} {verdict}" for verdict, count in counted(run.results).items())
    bad = [result for result in run.results if _outcome(report, result) is worst and worst is not Outcome.PASS]
    alike: dict[tuple[Verdict, str], list[Result]] = {}
    for result in bad:
        alike.setdefault((result.verdict, result.check), []).append(result)
    image, host, lost = run.provenance.image, run.provenance.host, run.unmeasured
    about = {
        **report.chosen,
        "image": str(image),
        "hosts": ", ".join(dict.fromkeys(map(str, host.get("ranks", ())))) or str(host.get("name", "unknown")),
        "measured": f"{run.when:%Y-%m-%d %H:%M} UTC",
        "checks": listing or "none",
        "rows": f"{len(run.rows)} measured" + (f", {len(lost)} not" if lost else ""),
    }
    if report.compared is not None:
        about["against"] = report.compared.before.name
    return {
        "style": _STYLES[worst] if report.recorded else "warn",
        "numbers": _first_numbers(report),
        "words": report.verdict_text,
        "reasons": [(group[0].verdict, reasons(group)) for group in alike.values()],
        "next": (report.next_step, NEXT_STEPS[report.next_step]) if report.recorded else None,
        "remedy": bad[0].remedy if bad else "",
        "about": {name: text for name, text in about.items() if text},
    }


def _first_numbers(report: RunReport) -> list[tuple[str, str]]:
    """Return the figures that a reader sees first, each with what it is of."""
    numbers = []
    if report.compared is not None and report.compared.comparison.pooled is not None:
        change = change_text(report.compared.comparison.pooled)
        numbers.append((change.partition(" [")[0], f"all rows together against {report.compared.before.name}"))
    rows = {key: row for key, row in report.run.rows.items() if row.floor}
    if rows:
        key = min(rows, key=lambda key: rows[key].bandwidth / rows[key].floor)
        margin = f"{rows[key].bandwidth / rows[key].floor:.2f} × its floor"
        count = f"{len(rows)} row{'s' if len(rows) > 1 else ''}"
        numbers.append((margin, f"{key.short} at {units.gigabytes(rows[key].bandwidth)} GB/s, the lowest of {count}"))
    return numbers


def _comparison(report: RunReport) -> Mapping[str, Any] | None:
    compared = report.compared
    if compared is None:
        return None
    rows: list[Mapping[str, Any]] = []
    effects = compared.comparison.rows.values()
    ends = [end - 1 for effect in effects for end in (effect.ratio, *(effect.interval or ()))]
    axis = changes_axis([*ends, -compared.margin, compared.margin])
    order = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.UNCHANGED)
    for key, effect in sorted(
        compared.comparison.rows.items(), key=lambda item: (order.index(item[1].verdict), item[1].ratio)
    ):
        rows.append(
            {
                "name": key.short,
                "id": f"row-{key}",
                "style": _STYLES[outcome(effect.verdict, gate=False)],
                "verdict": effect.verdict,
                "change": change_text(effect),
                "bar": change_bar(
                    axis,
                    effect.ratio,
                    effect.interval,
                    compared.margin,
                    _BARS.get(effect.verdict, "s5"),
                    change_text(effect),
                ),
                "before": units.gigabytes(compared.before.rows[key].bandwidth),
                "now": units.gigabytes(compared.now.rows[key].bandwidth),
                "launches": f"{effect.now}:{effect.before}",
                "p": f"{effect.p:.2g}",
            }
        )
    pooled = compared.comparison.pooled
    together = f" All rows together: {pooled.text}." if pooled is not None else ""
    description = (
        f"The run is {compared.comparison.verdict}.{together} The band shows changes that count as unchanged, up to "
        f"{100 * compared.margin:.3g} % in each direction; the bar is a 90 % interval."
        if rows
        else "No row can be compared: each failed in this run, or was not measured in both. The findings say why."
    )
    name, scale = compared.before.name, change_scale(axis)
    return {"before": name, "words": description, "rows": rows, "scale": scale, "changes": compared.changes}


def _findings(report: RunReport) -> list[Mapping[str, Any]]:
    used: set[str] = set()
    return [
        {
            "style": _STYLES[_outcome(report, group[0])],
            "verdict": group[0].verdict,
            "checks": _anchors(group, used),
            "reasons": reasons(group),
            "remedy": group[0].remedy,
            "commands": list(dict.fromkeys(_commands(group)))[:_MOST_COMMANDS],
            "docs": _docs(group),
        }
        for group in report.problems
        if _outcome(report, group[0]) is not Outcome.SKIP
    ]


def _commands(results: Sequence[Result]) -> Iterator[str]:
    """Yield the commands that repeat results, that reproduce findings with NIXL alone, and that explain both."""
    yield from repeats(results)
    for result in results:
        if result.finding in FINDINGS and reproduction(result.finding) is not None:
            yield f"pytest-nixl explain {result.finding} --reproduce | python -"
    yield from (f"pytest-nixl explain {anchor}" for _, anchor in _sections(results))


def _sections(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield page and name of what the docs have of results. A check of another package has nothing there."""
    checks = {check.id for check in suite_checks()}
    for result in results:
        if result.finding in FINDINGS:
            yield "findings", result.finding
        if result.check in checks:
            yield "checks", result.check


def _docs(results: Sequence[Result]) -> dict[str, str]:
    """Return the address of each section of the docs on the site that the distribution names, by the section's name."""
    try:
        urls = metadata("pytest-nixl").get_all("Project-URL") or []
    except PackageNotFoundError:
        return {}
    site = dict(url.split(", ", 1) for url in urls if ", " in url).get(_SITE, "").rstrip("/")
    if not site.startswith(("https://", "http://")):
        return {}
    return {name: f"{site}/reference/{page}.html#{name.lower()}" for page, name in _sections(results)}


def _anchors(results: Sequence[Result], used: set[str]) -> dict[str, str]:
    """Return the ids of findings, or else of checks, with an anchor for each that no other part of the page has.

    :param used: the anchors so far, to which these are added.
    """
    anchors = {}
    for result in results:
        id = result.finding or result.check
        if id in anchors:
            continue
        first = anchor = f"{'finding' if result.finding else 'check'}-{id}"
        number = 1
        while anchor in used:
            number += 1
            anchor = f"{first}-{number}"
        used.add(anchor)
        anchors[id] = anchor
    return anchors


def _lost(report: RunReport) -> dict[RowKey, Verdict]:
    """Return the verdict of each row that lost bandwidth since the baseline, or may have."""
    if report.compared is None:
        return {}
    comparison = report.compared.comparison
    return {
        key: effect.verdict
        for key, effect in comparison.rows.items()
        if effect.verdict is Verdict.REGRESSED or key in comparison.suspects
    }


def _rows(report: RunReport) -> list[Mapping[str, Any]]:
    """Return each row with its figures, as numbers to sort by and as text, the worst first.

    A row that was not measured has no figures.
    """
    results = {result.row: result for result in report.run.results if result.summary is not None}
    lost = _lost(report)
    rows: list[Mapping[str, Any]] = []
    for key, summary in report.run.rows.items():
        verdict = results[key].verdict if key in results else None
        if verdict in _GOOD_ROW:
            verdict = lost.get(key, verdict)
        rates = ((summary.bandwidth, "–"), (summary.floor, "no floor"), (summary.ceiling, "–"))
        times = (0.0 if math.isnan(value) else value for value in (summary.p50, summary.p99))
        rows.append(
            {
                "name": key.short,
                "id": f"row-{key}",
                "marks": _marks(key, ""),
                "numbers": [
                    *((value, units.gigabytes(value) if value else missing) for value, missing in rates),
                    *((value, time_text(value) if value else "–") for value in times),
                ],
                "transport": "+".join(summary.transports) or "unknown",
                "verdict": str(verdict or "–"),
                "style": _STYLES[outcome(verdict, gate=report.gate)] if verdict is not None else "soft",
                "margin": summary.bandwidth / summary.floor if summary.floor else math.inf,
            }
        )
    for lost_key, result in report.run.unmeasured.items():
        rows.append(
            {
                "name": lost_key.short,
                "id": f"row-{lost_key}",
                "marks": _marks(lost_key, ""),
                "numbers": [(0.0, "–")] * _NUMBERS,
                "transport": "–",
                "verdict": str(result.verdict),
                "style": _STYLES[_outcome(report, result)],
                "margin": 0.0,
            }
        )
    return sorted(rows, key=lambda row: (_ORDER.index(row["style"]), row["margin"]))


def _marks(key: RowKey | UnknownKey | None, text: str) -> Mapping[str, str]:
    """Return what the filter of the page finds a row or a check by.

    :param text: a sentence that may name ranks.
    """
    ranks = _RANK.findall(text)
    if not isinstance(key, RowKey):
        return {"backend": "", "memory": "", "rank": " ".join(dict.fromkeys(ranks))}
    pair = (str(rank) for rank in key.pair)
    return {"backend": key.backend, "memory": key.memory_text, "rank": " ".join(dict.fromkeys((*pair, *ranks)))}


def _checks(report: RunReport) -> list[Mapping[str, Any]]:
    """Return every result that is applicable and not a measured row, in the order of the run."""
    return [
        {
            "check": result.finding or result.check,
            "verdict": str(result.verdict),
            "style": _STYLES[_outcome(report, result)],
            "about": result.row.short if result.row is not None else "",
            "reason": result.reason,
            "marks": _marks(result.row, result.reason),
        }
        for result in report.run.results
        if result.row not in report.run.rows
        and result.verdict is not Verdict.NOT_APPLICABLE
        and not (result.check == REGRESSION and report.compared is not None)  # the page begins with those
    ]


def _not_applicable(report: RunReport) -> Mapping[str, Sequence[str]]:
    """Return the checks that do not apply, by their reason."""
    reasons: dict[str, list[str]] = {}
    for result in report.run.results:
        if result.verdict is Verdict.NOT_APPLICABLE:
            name = result.row.short if result.row is not None else result.finding or result.check
            reasons.setdefault(result.reason or name, []).append(name)
    return reasons


def _known_limits(report: RunReport) -> list[Result]:
    return [
        next(result for result in report.run.results if result.known_limit and result.finding == id)
        for id in known_limits(report.run.results)
    ]


def _provenance(report: RunReport) -> Mapping[str, Any]:
    run = report.run
    before = report.compared.before if report.compared is not None else None
    changed = {item.what: item for item in changes(before.provenance, run.provenance)} if before is not None else {}
    now = {change.what: change.now for change in changes(type(run.provenance)(), run.provenance)}
    rows: list[Mapping[str, Any]] = []
    for name in dict.fromkeys((*changed, *now)):
        item = changed.get(name)
        cells = [now.get(name, "")]
        if before is not None:
            cells.insert(0, item.before if item is not None else cells[0])
        rows.append({"name": name, "changed": item is not None, "cells": cells})
    summary, heads = "The circumstances in which this run was measured.", ["what", "this run"]
    if before is not None:
        summary, heads = f"The differences from {before.name} come first.", ["what", before.name, "this run"]
    return {"words": summary, "heads": heads, "rows": rows, "notes": run.notes}
