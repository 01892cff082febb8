# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain``: what is known of a word: an error's text, a finding, a check, an option or a fault."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_nixl.cli.shipped_docs import faults, shipped_text

#: The most entries that are printed without ``--all``.
_MOST = 8


@dataclass(frozen=True)
class Entry:
    """What is known of one error, finding, check, option or fault.

    :param names: its id or its text, and others by which it is known.
    :param lines: what is printed under the first name. The word is looked for in them, too.
    """

    kind: str
    names: tuple[str, ...]
    lines: tuple[str, ...]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain", help="print what is known of a word: an error's text, a finding, a check, an option, a fault"
    )
    explain.add_argument("words", metavar="WORD", nargs="+", help="a part of a message, or an id; case does not count")
    explain.add_argument(
        "--all", action="store_true", help=f"print every entry that has the word, not only the best {_MOST}"
    )
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    word = " ".join(arguments.words).strip()
    if not word:
        raise ValueError("the word is empty: give a part of a message, or an id")
    ranked = sorted(((place, entry) for entry in _entries() if (place := _place(word, entry)) is not None),
                    key=lambda each: each[0])  # fmt: skip
    # A part of a longer word, such as the "hang" of "change", counts only if no entry has the word itself.
    found = [entry for place, entry in ranked if place <= _WORDS or ranked[0][0] > _WORDS]
    if not found:
        raise ValueError(
            f"nothing is known of {word!r}: give a shorter part of the message, or see `pytest-nixl checks` and "
            "`pytest-nixl findings`"
        )
    for entry in found if arguments.all else found[:_MOST]:
        print(f"{entry.kind} {entry.names[0]}")
        for line in entry.lines:
            print(f"    {line}")
    if len(found) > _MOST and not arguments.all:
        print(f"and {len(found) - _MOST} more: give more words, or --all")
    return 0


#: The last place in the order of entries that have whole words; behind it are those with parts of words.
_WORDS = 4


def _place(word: str, entry: Entry) -> int | None:
    """Return the place of an entry among those that have a word, the best first; None: it does not have it."""
    asked = word.casefold()
    if any(asked == name.casefold() for name in entry.names):
        return 0
    # A whole line of a log has more words than the error in it.
    if entry.kind == "error" and entry.names[0].casefold() in asked:
        return 0
    names, told = "\n".join(entry.names), "\n".join((*entry.names, *entry.lines))
    whole = rf"(?<![^\W_]){re.escape(word)}(?![^\W_])"
    begun = [rf"(?<![^\W_]){re.escape(part)}" for part in word.split()]
    for place, (patterns, text) in enumerate(
        (([whole], names), (begun, names), ([whole], told), (begun, told), ([re.escape(word)], told)), 1
    ):
        if all(re.search(pattern, text, re.IGNORECASE) for pattern in patterns):
            return place
    return None


def _entries() -> Iterator[Entry]:
    from pytest_nixl.model.findings import FINDINGS
    from pytest_nixl.model.settings import OPTIONS
    from pytest_nixl.session.suites import suite_checks

    for error in shipped_text("error-texts").get("error", ()):
        told = f"by:     {error['by']}", f"means:  {error['means']}", f"do:     {error['do']}"
        yield Entry("error", (error["text"], error.get("also", "")), told)
    for finding in FINDINGS.values():
        told = f"what:   {finding.title}", f"met if: {finding.met_by}", f"remedy: {finding.remedy}"
        yield Entry("finding", (finding.id, finding.title), told)
    for check in suite_checks():
        yield Entry("check", (check.id,), (f"proves: {check.proves}", f"more:   pytest-nixl checks {check.id}"))
    for fault in faults():
        told = f"sign:   {fault['sign']}", f"remedy: {fault['remedy']}", f"check:  {', '.join(fault['checks'])}"
        yield Entry("fault", (fault["fault"], *fault["checks"]), told)
    for option in OPTIONS:
        yield Entry("option", (option.flag, option.flag.lstrip("-")), (option.help,))
