# SPDX-License-Identifier: Apache-2.0
"""Score ``pytest-nixl connector`` on pairs of files, and ``pytest-nixl telemetry`` on pages of metrics.

``score.py`` prints the score of both halves. Right: each line that must be printed has its verdict and its word, and no
other line is printed. Generic: the verdict is right, the word is missing, or an INCONCLUSIVE line is too many. Silent:
a line that must be printed is not. False: a FAIL or a WARN that must not be printed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.telemetry.live_endpoint import answer_questions
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.metrics_text import read_metrics
from pytest_nixl.core.texts import parse_texts
from pytest_nixl.model.verdicts import Verdict

FIELD = Path(__file__).parent
HALVES = ("", "held_out_")
QUESTIONS = ("used", "fails", "slow")
_SILENT = (Verdict.PASS, Verdict.NOT_APPLICABLE)


def read_entries(half: str, kind: str) -> list[dict[str, Any]]:
    """Return the pairs or the pages of one half."""
    text = (FIELD / f"{half}{kind}s.toml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = parse_texts(text)[kind]
    return entries


def read_pair(pair: dict[str, Any], folder: Path) -> list[str]:
    """Return the lines printed of a pair, each with its verdict, or ``error`` and the sentence."""
    sides = []
    for name in ("prefill", "decode"):
        path = folder / f"{name}.txt"
        path.write_text(pair[name].lstrip("\n"), encoding="utf-8")
        sides.append(str(path))
    try:
        compared = compare_connectors(*map(read_engine, sides), one_host=pair.get("one_host", False))
    except ValueError as error:
        return [f"error {error}"]
    return [
        f"{result.verdict} {result.sentence} {result.remedy}"
        for result in compared.results
        if result.verdict not in _SILENT
    ]


def score_pair(pair: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Return the score of a pair, and what was printed."""
    printed = read_pair(pair, folder)
    expected = [text.partition(" ")[::2] for text in pair["expect"]]
    remaining = list(printed)
    scores = ["right"]
    for verdict, phrase in expected:
        same = [line for line in remaining if line.startswith(verdict)]
        named = [line for line in same if phrase.casefold() in line.casefold()]
        for line in (named or same)[:1]:
            remaining.remove(line)
        scores.append("right" if named else "generic" if same else "silent")
    for line in remaining:
        scores.append("generic" if line.startswith("INCONCLUSIVE") else "false")
    return max(scores, key=("right", "generic", "silent", "false").index), printed


def score_page(page: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the score of a page, and what was printed."""
    try:
        answers = answer_questions(read_metrics(page["text"].encode()))
    except NixlPluginError as error:
        right = "error" in page and page["error"].casefold() in str(error).casefold()
        return "right" if right else "silent", [str(error)]
    printed = [f"{answer.question}: {answer.verdict} {answer.text}" for answer in answers]
    if "error" in page:
        return "false", printed
    scores = ["right"]
    for question, answer in zip(QUESTIONS, answers, strict=True):
        verdict, _, phrase = page[question].partition(" ")
        if verdict == str(answer.verdict):
            text = f"{answer.text} {answer.remedy}".casefold()
            scores.append("right" if phrase.casefold() in text else "generic")
        else:
            scores.append("silent" if answer.verdict is Verdict.UNKNOWN else "false")
    return max(scores, key=("right", "generic", "silent", "false").index), printed


def scores(half: str) -> Iterator[tuple[str, dict[str, Any], str, list[str]]]:
    """Yield the kind of each entry of one half, the entry, its score, and what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        for pair in read_entries(half, "pair"):
            yield "pair", pair, *score_pair(pair, Path(folder))
    for page in read_entries(half, "page"):
        yield "page", page, *score_page(page)


def print_scores(verbose: bool) -> None:
    """Print the score of both halves, and with ``verbose`` the wrong entries of the half that may be read."""
    for half in HALVES:
        results = list(scores(half))
        for kind in ("pair", "page"):
            counts = [score for entry_kind, _, score, _ in results if entry_kind == kind]
            listed = ", ".join(f"{counts.count(score)} {score}" for score in ("right", "generic", "silent", "false"))
            print(f"{half or 'known_'}{kind}s: {listed} of {len(counts)}")
        for kind, entry, score, printed in results if verbose and not half else ():
            if score != "right":
                print(f"  {score}: {kind} {entry['name']}", *(f"\n    {line[:200]}" for line in printed), sep="")
