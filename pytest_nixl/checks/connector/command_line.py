# SPDX-License-Identifier: Apache-2.0
"""Read a shell command or the words of a container's command: variables, the engine that it starts, and its options."""

from __future__ import annotations

import re
import shlex
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
#: A reference to a variable: $(NAME), ${NAME}, ${NAME:-default} or $NAME.
_REFERENCE = re.compile(
    r"\$(?:\((?P<container>[A-Za-z_]\w*)\)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\}"
    r"|(?P<plain>[A-Za-z_]\w*))"
)
#: What is left of a reference whose value the file does not contain.
_UNRESOLVED = re.compile(r"\$[({A-Za-z_]|`")
#: The most characters of a value whose references are replaced, and of the result.
_MOST_EXPANDED = 1 << 12
#: The most characters of a script: the time that shlex takes grows with their square.
MOST_SCRIPT = 1 << 16
#: The most engines that are looked for in one script.
_MOST_LAUNCHES = 32
#: Python modules that start an engine, with the engine and whether Dynamo runs it.
_MODULES = {
    "vllm.entrypoints.openai.api_server": ("vLLM", False),
    "vllm.entrypoints.api_server": ("vLLM", False),
    "sglang.launch_server": ("SGLang", False),
    "dynamo.vllm": ("vLLM", True),
    "dynamo.sglang": ("SGLang", True),
    "dynamo.trtllm": ("TensorRT-LLM", True),
}
#: Programs that start an engine if their first argument is ``serve``.
_PROGRAMS = {"vllm": ("vLLM", False), "sglang": ("SGLang", False)}
#: Names of images whose entry point is the engine, so that the container has only its options.
_IMAGES = {"vllm-openai": "vLLM", "vllm": "vLLM", "sglang": "SGLang"}


class LongScriptError(ValueError):
    """A script is too long to be read."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started.

    :param options: for each option its values in the order given; the names of options have dashes for underscores.
    :param model: the model that is given without an option.
    :param environment: the variables that the command sees.
    :param script: the text of the whole command, which may install packages.
    :param has_options: whether the file contains the engine's options.
    :param has_environment: whether the file contains the engine's variables.
    """

    engine: str
    dynamo: bool
    options: Mapping[str, Sequence[str]]
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    has_options: bool = True
    has_environment: bool = True


def is_resolved(text: str) -> bool:
    """Return whether a value has no reference left to something that the file does not contain."""
    return _UNRESOLVED.search(text) is None


def expand(text: str, environment: Mapping[str, str], *, shell: bool) -> str:
    """Replace references to variables by their values, once.

    :param shell: whether a shell reads the text; otherwise only ``$(NAME)`` is a reference, as in a pod spec.
    """
    room = _MOST_EXPANDED

    def value(match: re.Match[str]) -> str:
        nonlocal room
        if not shell and match["container"] is None:
            return match[0]
        name = match["container"] or match["braced"] or match["plain"]
        found = environment.get(name, match["default"] if match["default"] is not None else match[0])
        room -= len(found)
        return found if room >= 0 else match[0]

    return _REFERENCE.sub(value, text) if len(text) <= _MOST_EXPANDED else text


def launches(words: Sequence[str], environment: Mapping[str, str], image: str = "") -> list[Launch]:
    """Return the engines that a container's command and arguments start.

    :param words: the command and the arguments together.
    :raises ValueError: if the words contain a shell script whose quotes are not closed.
    """
    words = [expand(word, environment, shell=False) for word in words]
    if words and PurePosixPath(words[0]).name in _SHELLS:
        for number, word in enumerate(words[1:-1], 1):
            if re.fullmatch(r"-[a-z]*c", word):
                return script_launches(words[number + 1], environment)
    found = _launch(words, environment, " ".join(words))
    if found is None and (not words or words[0].startswith("-")):
        engine = _IMAGES.get(re.sub(r"[@:].*", "", image.rpartition("/")[2]))
        if engine is not None:
            options, model = _options(words)
            found = Launch(engine, False, options, model, environment)
    return [] if found is None else [found]


def script_launches(text: str, environment: Mapping[str, str]) -> list[Launch]:
    """Return the engines that a shell script starts. :raises ValueError: if its quotes are not closed."""
    seen = dict(environment)
    found = []
    for command in split_commands(text):
        words = command[1:] if command[0] == "export" else command
        own: dict[str, str] = {}
        given = ChainMap(own, seen)
        number = 0
        while number < len(words) and (match := _ASSIGNMENT.fullmatch(words[number])):
            own[match[1]] = expand(match[2], given, shell=True)
            number += 1
        if number == len(words):
            seen.update(own)
            continue
        launch = _launch([expand(word, given, shell=True) for word in words[number:]], given, text)
        if launch is not None:
            found.append(launch)
            if len(found) == _MOST_LAUNCHES:
                break
    return found


def split_commands(text: str) -> list[list[str]]:
    """Split a shell script into the words of its commands.

    :raises LongScriptError: if it is too long.
    :raises ValueError: if its quotes are not closed.
    """
    if len(text) > MOST_SCRIPT:
        raise LongScriptError(f"has a script of {len(text)} characters: expected at most {MOST_SCRIPT}")
    text = re.sub(r"(?m)^[ \t]*#.*$", "", re.sub(r"\\\r?\n", " ", text))
    # What a command prints is not known: keep it as one word.
    text = re.sub(r"\$\(([^()'\"]*)\)", lambda match: re.sub(r"\s", "\u00a0", match[0]), text)
    reader = shlex.shlex(text, posix=True, punctuation_chars=";|&\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    for word in reader:
        if word and not word.strip(";|&\n"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _launch(words: Sequence[str], environment: Mapping[str, str], script: str) -> Launch | None:
    """Return the engine that a command starts, also after a program such as ``numactl``; None if it starts none."""
    for number, word in enumerate(words[:-1]):
        following = words[number + 1]
        if word == "-m":
            start = _MODULES.get(following.removesuffix(".main").removesuffix(".__main__"))
        else:
            start = _PROGRAMS.get(PurePosixPath(word).name) if following == "serve" else None
        if start is not None:
            options, model = _options(words[number + 2 :])
            assigned = {match[1]: match[2] for match in map(_ASSIGNMENT.fullmatch, words[:number]) if match is not None}
            return Launch(*start, options, model, {**environment, **assigned}, script)
    return None


def _options(words: Sequence[str]) -> tuple[dict[str, list[str]], str]:
    """Return the options, and the first word if it is not an option: the model."""
    options: dict[str, list[str]] = {}
    model = words[0] if words and not words[0].startswith("-") else ""
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, sign, value = word.partition("=")
        if not sign and number < len(words) and not re.match(r"--?[A-Za-z]", words[number]):
            value = words[number]
            number += 1
        head, dot, tail = name.partition(".")
        options.setdefault(head.replace("_", "-") + dot + tail, []).append(value)
    return options, model
