# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain``: what is known of a word: an error's text, a finding, a check, an option or a fault."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from pytest_nixl.cli.shipped_docs import faults, shipped_text


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``pytest-nixl explain`` to the command's parsers."""
    explain = commands.add_parser(
        "explain", help="print what is known of a word: an error's text, a finding, a check, an option, a fault"
    )
    explain.add_argument("words", metavar="WORD", nargs="+", help="a part of a message, or an id; case does not count")
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    word = " ".join(arguments.words).strip()
    if not word:
        raise ValueError("the word is empty: give a part of a message, or an id")
    found = False
    for kind, entries in (
        ("error", _errors(word)),
        ("finding", _findings(word)),
        ("check", _checks(word)),
        ("option", _options(word)),
        ("fault", _faults(word)),
    ):
        for name, *lines in entries:
            found = True
            print(f"{kind} {name}")
            for line in lines:
                print(f"    {line}")
    if not found:
        raise ValueError(
            f"nothing is known of {word!r}: give a shorter part of the message, or see `pytest-nixl checks` and "
            "`pytest-nixl findings`"
        )
    return 0


def _has(word: str, *texts: str) -> bool:
    """Whether a text has the word, or one that begins with it: ``hang`` is in "it hangs", not in "change"."""
    pattern = re.compile(rf"(?<![^\W_]){re.escape(word)}", re.IGNORECASE)
    return any(pattern.search(text) for text in texts)


def _errors(word: str) -> Iterator[tuple[str, ...]]:
    for error in shipped_text("error-texts").get("error", ()):
        if _has(word, error["text"], error.get("also", "")):
            yield error["text"], f"by:     {error['by']}", f"means:  {error['means']}", f"do:     {error['do']}"


def _findings(word: str) -> Iterator[tuple[str, ...]]:
    from pytest_nixl.model.findings import FINDINGS

    for finding in FINDINGS.values():
        if _has(word, finding.id, finding.title):
            yield finding.id, f"what:   {finding.title}", f"met if: {finding.met_by}", f"remedy: {finding.remedy}"


def _checks(word: str) -> Iterator[tuple[str, ...]]:
    from pytest_nixl.session.suites import suite_checks

    for check in suite_checks():
        if _has(word, check.id):
            yield check.id, f"proves: {check.proves}", f"more:   pytest-nixl checks {check.id}"


def _options(word: str) -> Iterator[tuple[str, ...]]:
    from pytest_nixl.model.settings import OPTIONS

    for option in OPTIONS:
        if _has(word.lstrip("-"), option.flag.lstrip("-")):
            yield option.flag, option.help


def _faults(word: str) -> Iterator[tuple[str, ...]]:
    for fault in faults():
        if _has(word, fault["fault"], fault["sign"], *fault["checks"]):
            told = f"sign:   {fault['sign']}", f"remedy: {fault['remedy']}"
            yield fault["fault"], *told, f"check:  {', '.join(fault['checks'])}"
