# SPDX-License-Identifier: Apache-2.0
"""The variables of an env file as its reader reads them: Docker Compose and systemd, ``docker run``, or a shell.

They differ in ``NAME = VALUE``. Compose (compose-go's dotenv/parser.go) and systemd (src/basic/env-file.c) leave out
blanks around the equals sign. ``docker run`` (docker/cli's pkg/kvfile/kvfile.go) refuses a blank before it, and keeps
one after it. A shell runs ``NAME``, or ``VALUE``, as a command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.checks.connector.command_line import expand
from pytest_nixl.core.strict import escape

_NAME = r"[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)(?P<before>[ \t]*)=(?P<after>[ \t]*)"
#: A word of a shell, or several, that could set a variable.
_ASSIGNMENT = re.compile(_NAME + r"(?P<value>.*)", re.DOTALL)
#: What Compose reads as one variable: a value in quotation marks may have several lines.
_ENTRY = re.compile(
    _NAME + r"(?:(?:'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\")[ \t]*(?:#[^\n]*)?$|(?P<plain>[^\n]*)$)\n?",
    re.DOTALL | re.MULTILINE,
)
_NO_ENTRY = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|$)")
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True)
class EnvFile:
    """The variables of an env file.

    :param blanks: the names with a blank before or after their equals sign.
    """

    variables: Mapping[str, str]
    blanks: tuple[str, ...] = ()


def read_for_compose(text: str) -> EnvFile | None:
    """Read a file as Docker Compose does, and systemd as far as both agree; None if a line sets no variable."""
    variables: dict[str, str] = {}
    blanks = []
    text, place = text.replace("\r\n", "\n"), 0
    while place < len(text):
        if nothing := _NO_ENTRY.match(text, place):
            place = nothing.end()
            continue
        match = _ENTRY.match(text, place)
        if match is None:
            return None
        place = match.end()
        if match["single"] is not None:
            value = match["single"]
        elif match["double"] is not None:
            value = expand(re.sub(r"\\(.)", r"\1", match["double"]), variables, shell=True)
        else:
            value = expand(_COMMENT.sub("", match["plain"]).rstrip(), variables, shell=True)
        variables[match["name"]] = value
        blanks += [match["name"]] if match["before"] or match["after"] else []
    return EnvFile(variables, tuple(dict.fromkeys(blanks)))


def read_for_docker(text: str) -> dict[str, str]:
    """Read a file as ``docker run --env-file`` does. :raises ValueError: if it has a name with a blank."""
    variables: dict[str, str] = {}
    for line in text.splitlines():
        name, sign, value = line.lstrip().partition("=")
        if name.startswith("#"):
            continue
        if re.search(r"[ \t]", name):
            raise ValueError(f"docker run refuses the name {escape(name)!r}, which has a blank: write NAME=VALUE")
        if sign:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name] = value[1:-1] if is_quoted else value
    return variables


def read_for_shell(commands: Sequence[Sequence[str]]) -> EnvFile | None:
    """Read the commands of a script that only sets variables; None if it has another command.

    :returns: with the names that it does not set, because a blank makes a command of them.
    """
    variables: dict[str, str] = {}
    blanks = []
    for command in commands:
        words = command[1:] if command[0] == "export" else command
        pairs = [match for match in map(_ASSIGNMENT.fullmatch, words) if match is not None]
        whole = _ASSIGNMENT.fullmatch(" ".join(words))
        if len(pairs) == len(words):
            variables |= {match["name"]: expand(match["value"], variables, shell=True) for match in pairs}
        elif whole is not None and (whole["before"] or whole["after"]):
            blanks.append(whole["name"])
        else:
            return None
    return EnvFile(variables, tuple(dict.fromkeys(blanks)))
