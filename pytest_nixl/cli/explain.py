# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain``: read a log; look up an error's text, a finding, a check, an option or a fault."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import select
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from pytest_nixl.cli.log_scan import WEIGHTS, LogScan, MessageMatch, read_messages
from pytest_nixl.core.texts import parse_texts, text_file, with_plain_links
from pytest_nixl.core.untrusted_file import open_regular
from pytest_nixl.model.findings import FINDINGS, known_finding, reproduction
from pytest_nixl.model.settings import LEVELS, OPTIONS
from pytest_nixl.session.selection import SuiteCheck, suite_checks, suites_folder

_PACKAGE = Path(__file__).resolve().parents[1]
#: The most entries that a look-up prints without ``--all``.
_MOST = 8
#: The most letters of words that are looked up. A longer text is a part of a log.
_MOST_LETTERS = 200
#: The most bytes of a log: it is read in pieces.
_LARGEST_LOG = 1 << 40
#: How long the first byte of a pipe may take, in seconds.
FIRST_BYTE_SECONDS = 60.0
#: The last place of entries that contain the whole words. Entries that contain parts of the words come later.
_WHOLE_WORDS = 4


@dataclass(frozen=True)
class Entry:
    """The explanation of one error, finding, check, option or fault.

    :param names: its id or its text, and its other names.
    :param lines: what is printed below the first name. A look-up also searches them.
    :param fields: what ``--json`` prints.
    """

    kind: str
    names: tuple[str, ...]
    lines: tuple[str, ...]
    fields: dict[str, Any]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="explain a log, an error's text, a finding, a check, an option or a fault; list all checks or findings",
    )
    explain.add_argument(
        "words",
        metavar="FILE or WORD",
        nargs="*",
        help="logs, pipes too (`-` or none: the standard input); or a part of a message, or an id; case does not count",
    )
    kind = explain.add_mutually_exclusive_group()
    kind.add_argument(
        "--checks",
        dest="kind",
        action="store_const",
        const="check",
        default="",
        help="search only the checks of the suites; without WORD list them all",
    )
    kind.add_argument(
        "--findings",
        dest="kind",
        action="store_const",
        const="finding",
        help="search only the known defects of NIXL; without WORD list them all",
    )
    kind.add_argument(
        "--reproduce",
        action="store_true",
        help="print a script that reproduces the finding WORD with NIXL alone: `pytest-nixl explain ID --reproduce | "
        "python -`",
    )
    explain.add_argument(
        "--all", action="store_true", help=f"print every entry that has the word, not only the best {_MOST}"
    )
    explain.add_argument("--json", action="store_true", help="print a list of JSON objects")
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    query = " ".join(arguments.words).strip()
    if arguments.reproduce:
        return _reproduce(query)
    logs = [] if arguments.kind else _logs(arguments.words)
    if logs:
        return _explain_logs(logs, arguments)
    if query and not arguments.kind and (matches := _scan(io.BytesIO(os.fsencode(query)), quoted=True).seen()):
        return _print_matches([("", match) for match in matches], arguments)
    if len(query) > _MOST_LETTERS:
        raise ValueError("nothing is known of these words")
    entries = [entry for entry in _entries() if arguments.kind in ("", entry.kind)]
    whole_list = bool(arguments.kind) and not arguments.words
    if not whole_list:
        entries = _matches(query, entries)
    more = 0 if whole_list or arguments.all else max(len(entries) - _MOST, 0)
    printed = entries[: len(entries) - more]
    if arguments.json:
        print(json.dumps([{"kind": entry.kind, **entry.fields} for entry in printed], indent=2))
        return 0
    for entry in printed:
        print(f"{entry.kind} {entry.names[0]}")
        for line in entry.lines:
            print(f"    {line}")
    if more:
        print(f"and {more} more: give more words, or --all")
    return 0


def _logs(paths: list[str]) -> list[str]:
    """Return the logs that the words name: files, pipes such as ``<(COMMAND)``, or ``-`` for the standard input."""
    if not paths and sys.stdin is not None and not sys.stdin.isatty():
        return ["-"]
    if all(path == "-" or os.path.isfile(path) or _is_pipe(path) for path in paths):
        return paths
    if len(paths) == 1 and paths[0].endswith((".log", ".txt", ".out", ".err")):
        raise ValueError("there is no file of this name")
    return []


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # most words name no file
        return False


@contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        yield sys.stdin.buffer
    elif _is_pipe(log):
        with open(os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not select.select([stream], [], [], FIRST_BYTE_SECONDS)[0]:
                raise ValueError(f"nothing was written to this pipe within {FIRST_BYTE_SECONDS:.0f} s")
            os.set_blocking(stream.fileno(), True)
            yield stream
    else:
        with open_regular(Path(log), _LARGEST_LOG, "a log") as stream:
            yield stream


def _explain_logs(logs: list[str], arguments: argparse.Namespace) -> int:
    matches: list[tuple[str, MessageMatch]] = []
    lines = 0
    for log in logs:
        with _opened(log) as stream:
            scan = _scan(stream)
        lines += scan.line_count
        label = f"{'the standard input' if log == '-' else log}: " if len(logs) > 1 else ""
        matches += ((label, match) for match in scan.seen())
    if not matches:
        length = f"{lines} line{'s' if lines > 1 else ''}"
        raise ValueError(f"nothing is known of this log of {length}" if lines else "the log is empty")
    matches.sort(key=lambda pair: WEIGHTS.index(pair[1].message.weight))
    return _print_matches(matches, arguments, log=True)


def _scan(stream: BinaryIO, *, quoted: bool = False) -> LogScan:
    scan = LogScan(*read_messages(_shipped_text("error-texts")), quoted=quoted)
    scan.read(stream)
    return scan


def _print_matches(matches: list[tuple[str, MessageMatch]], arguments: argparse.Namespace, *, log: bool = False) -> int:
    """Print what messages mean, the most likely cause first, and those that are harmless in one line.

    :param log: say on which lines they are.
    """
    if arguments.json:
        places = [{"line": match.line, "count": match.count} if log else {} for _, match in matches]
        print(
            json.dumps(
                [
                    {"kind": "error", **place, **match.message.fields}
                    for place, (_, match) in zip(places, matches, strict=True)
                ],
                indent=2,
            )
        )
        return 0
    harmful = [(label, match) for label, match in matches if match.message.weight != "harmless"]
    printed = harmful if arguments.all else harmful[:_MOST]
    for label, match in printed:
        print(f"{_place_in_log(label, match) if log else 'error'} {match.text}")
        for line in _lines(match.message.fields):
            print(f"    {line}")
    if len(harmful) > len(printed):
        print(f"and {len(harmful) - len(printed)} more: --all prints them")
    if len(harmful) < len(matches):
        harmless = [f"{match.text} ({match.message.fields['means']})" for _, match in matches[len(harmful) :]]
        print(f"{'also seen, harmless' if harmful else 'seen, harmless'}: {'; '.join(harmless)}")
    return 0


def _place_in_log(label: str, match: MessageMatch) -> str:
    times = f", {match.count} times" if match.count > 1 else ""
    return f"{label}line {match.line}{times}:"


def _lines(error: Mapping[str, Any]) -> tuple[str, ...]:
    facts = ((name, error.get(name, "")) for name in ("by", "means", "do"))
    return tuple(f"{name + ':':7} {text}" for name, text in facts if text)


def _matches(query: str, entries: list[Entry]) -> list[Entry]:
    """Return the entries that contain a word, the best first. :raises ValueError: there is none."""
    if not query:
        raise ValueError("the word is empty: give a log, a part of a message, an id, --checks or --findings")
    ranked = sorted(
        ((place, entry) for entry in entries if (place := _place(query, entry)) is not None), key=lambda pair: pair[0]
    )
    # A part of a longer word, such as the "hang" of "change", counts only if no entry has the word itself.
    matches = [entry for place, entry in ranked if place <= _WHOLE_WORDS or ranked[0][0] > _WHOLE_WORDS]
    if not matches:
        names = [] if " " in query else [name.casefold() for entry in entries for name in entry.names]
        near = get_close_matches(query.casefold(), names, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "give the line as it was printed, or one word of it, --checks or --findings"
        )
        raise ValueError(f"no entry matches: {hint}")
    return matches


def _place(query: str, entry: Entry) -> int | None:
    """Return the place of an entry among those that contain a word, the best first; None: it does not contain it."""
    folded = query.casefold()
    if any(folded == name.casefold() for name in entry.names):
        return 0
    names, text = "\n".join(entry.names), "\n".join((*entry.names, *entry.lines))
    whole = rf"(?<![^\W_]){re.escape(query)}(?![^\W_])"
    begun = [rf"(?<![^\W_]){re.escape(part)}" for part in query.split()]
    for place, (patterns, searched) in enumerate(
        (([whole], names), (begun, names), ([whole], text), (begun, text), ([re.escape(query)], text)), 1
    ):
        if all(re.search(pattern, searched, re.IGNORECASE) for pattern in patterns):
            return place
    return None


def _entries() -> Iterator[Entry]:
    texts = _shipped_text("error-texts")
    for error in (*texts.get("error", ()), *texts.get("class", ())):
        yield Entry("error", (error["text"], *error.get("also", ())), _lines(error), error)
    for finding in FINDINGS.values():
        lines = [
            f"what:    {finding.title}",
            f"seen in: {finding.seen}",
            f"met if:  {finding.met_by}",
            f"remedy:  {finding.remedy}",
        ]
        if reproduction(finding.id) is not None:
            lines.append(f"script:  `pytest-nixl explain {finding.id} --reproduce`")
        yield Entry("finding", (finding.id, finding.title), tuple(lines), asdict(finding))
    for check in suite_checks():
        command = _command(check)
        lines = [f"suite:  {check.suite} (level {check.level})", f"proves: {check.proves}", f"run it: {command}"]
        fields = {name: getattr(check, name) for name in ("id", "suite", "test", "findings", "level", "proves")}
        yield Entry("check", (check.id,), tuple(lines), {**fields, "command": command})
    for fault in _shipped_text("checks").get("fault", ()):
        lines = [f"sign:   {fault['sign']}", f"remedy: {fault['remedy']}", f"check:  {', '.join(fault['checks'])}"]
        yield Entry("fault", (fault["fault"], *fault["checks"]), tuple(lines), fault)
    for option in OPTIONS:
        yield Entry(
            "option", (option.flag, option.flag.lstrip("-")), (option.help,), {"flag": option.flag, "help": option.help}
        )


def _reproduce(id: str) -> int:
    scripts = {finding: script for finding in FINDINGS if (script := reproduction(finding)) is not None}
    if not id:
        raise ValueError(f"--reproduce prints the script of one finding: name one of {', '.join(scripts)}")
    if known_finding(id) not in scripts:
        raise ValueError(f"there is no script for {id}: findings with a script are {', '.join(scripts)}")
    print(scripts[known_finding(id)], end="")
    return 0


def _in_package() -> bool:
    """Return whether the suites are those of the installed package, and not those of a clone."""
    return suites_folder().parent == _PACKAGE


def _command(check: SuiteCheck) -> str:
    """Return a command that runs the check: from the root of a clone, or where the plugin is installed."""
    level = [] if check.level != LEVELS[-1] else [f"--nixl-level={check.level}"]
    if not _in_package():
        return shlex.join(["pytest", check.test, *level])
    file, _, test = check.test.partition("::")
    module = file.removesuffix(".py").replace("/", ".")
    return shlex.join(["pytest", "--pyargs", f"pytest_nixl.{module}::{test}", *level])


def _shipped_text(name: str) -> dict[str, Any]:
    """Return a file of texts for a terminal. Its commands are for a clone; without one they have ``--pyargs``.

    :param name: its name without ``.toml``.
    """
    text = with_plain_links(text_file(name))
    if _in_package():
        text = re.sub(r"\bpytest suites/(\w+)", r"pytest --pyargs pytest_nixl.suites.\1", text)
    return parse_texts(text)
