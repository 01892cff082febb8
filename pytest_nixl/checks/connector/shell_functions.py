# SPDX-License-Identifier: Apache-2.0
"""The functions of a shell script: their bodies, with the arguments of a call in place of their parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

_DEFINITION = re.compile(r"(?m)^[ \t]*(?:function[ \t]+([A-Za-z_]\w*)[ \t]*(?:\(\))?|([A-Za-z_]\w*)[ \t]*\(\))\s*\{")
#: What a body is made of: comments and quotations, in which a brace means nothing, and braces.
_PART = re.compile(r"(?:^|(?<=[\s;]))#[^\n]*|\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|[{}]", re.DOTALL | re.MULTILINE)
_SHIFT = re.compile(r"\bshift\b(?:[ \t]+(\d))?")
#: A parameter: "$@", $1, ${1} or ${1:-default}, with the quotation marks around it if it is a word of its own.
_PARAMETER = re.compile(
    r'(?P<word>"?)\$(?:(?P<all>[@*])|(?P<plain>[1-9])'
    r'|\{(?:(?P<braced_all>[@*])|(?P<braced>[1-9])(?::?-(?P<default>[^{}]*))?)\})(?P<end>"?)'
)
#: A call, after the variables that it is given. A definition has parentheses or the word function instead.
_CALL = r"(?m)(?:^|[;&|{{(])[ \t]*(?:\w+=\S*[ \t]+)*{name}(?=[\s;&|)]|$)(?![ \t]*\()"
#: What needs no quotation marks, wherever it stands.
_SIMPLE = re.compile(r"[\w./:,=@%+-]*")
#: The most functions of a script that are read.
_MOST_FUNCTIONS = 64


def take_functions(text: str) -> tuple[str, Mapping[str, str]]:
    """Return a script without the functions that it calls, and the body of each of these by its name."""
    bodies: dict[str, str] = {}
    spans: list[tuple[str, int, int]] = []
    for match in _DEFINITION.finditer(text):
        if spans and match.start() < spans[-1][2]:
            continue
        end = _end_of_body(text, match.end())
        if end < 0 or len(spans) == _MOST_FUNCTIONS:
            break
        bodies[match[1] or match[2]] = text[match.end() : end]
        spans.append((match[1] or match[2], match.start(), end + 1))
    called = {name for name in bodies if re.search(_CALL.format(name=name), text)}
    for name, start, end_of_body in reversed(spans):
        if name in called:
            text = text[:start] + text[end_of_body:]
    return text, {name: bodies[name] for name in called}


def _end_of_body(text: str, start: int) -> int:
    """Return where the brace stands that ends a body; -1 if there is none."""
    depth = 1
    for part in _PART.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return part.start()
    return -1


def called_body(body: str, arguments: Sequence[str]) -> str:
    """Return the body of a function as a call with these arguments runs it; what is not clear stays a reference."""
    shifts = [(match.start(), int(match[1] or 1)) for match in _SHIFT.finditer(body)]

    def value(match: re.Match[str]) -> str:
        left = arguments[sum(count for place, count in shifts if place < match.start()) :]
        whole_word = bool(match["word"]) == bool(match["end"])
        if match["all"] or match["braced_all"]:
            return shlex.join(left) if whole_word else match[0]
        number = int(match["plain"] or match["braced"])
        text = "".join(left[number - 1 : number]) or match["default"] or ""
        around = body[match.start() - 1 : match.start()] + body[match.end() : match.end() + 1]
        if (match["word"] and match["end"]) or (whole_word and not around.strip(" \t\n;()")):
            return shlex.quote(text)
        return f"{match['word']}{text}{match['end']}" if _SIMPLE.fullmatch(text) else match[0]

    return _PARAMETER.sub(value, body)
