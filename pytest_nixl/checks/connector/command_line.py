# SPDX-License-Identifier: Apache-2.0
"""Read a shell command or the words of a container's command: variables, the engine that it starts, and its options."""

from __future__ import annotations

import bisect
import re
import shlex
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count, pairwise, takewhile
from pathlib import PurePosixPath

from pytest_nixl.checks.connector.shell_functions import called_body, take_functions

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
#: A variable that a script sets, in whatever form, also on a line that is not understood: ``NAME=``, ``${NAME:=``, or
#: its bare name, as in ``read NAME``, ``export NAME`` and ``unset NAME``.
_ASSIGNED = re.compile(r"(?<![\w$-])(?:\$\{)?([A-Za-z_]\w*)(?::?=|\+=)|(?<![\w${(-])([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b")
#: Words before a command that leave it what it is.
_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"})
_DECLARATIONS = frozenset({"export", "declare", "typeset", "local", "readonly"})
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
#: Where a text begins that ends in a line with the same word.
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
#: A command that prints the text of a here-document.
_PRINTS_TEXT = re.compile(r"\$\(\s*cat\s*$")
#: A reference to a variable: $(NAME), ${NAME}, ${NAME:-default}, ${NAME:=default} or $NAME.
_REFERENCE = re.compile(
    r"\$(?:\((?P<container>[A-Za-z_]\w*)\)|\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^{}]*))?\}"
    r"|(?P<plain>[A-Za-z_]\w*))"
)
#: What is left of a reference whose value the file does not contain.
_UNRESOLVED = re.compile(r"\$[({A-Za-z_0-9@*]|`")
#: A word that stands for several words: an array of the shell, or all arguments.
_ARRAY = re.compile(r"\$\{\w+\[[@*]\][^{}]*\}|\$[@*]|\$\{[@*][^{}]*\}")
#: The definition of an array with numbers, and a use of it.
_ARRAY_DEFINED = re.compile(
    r"(?m)^[ \t]*(?:(?:local|declare|typeset|readonly)[ \t]+(?:-[a-zB-Z]+[ \t]+)*)?"
    r"(\w+)(\+?)=\(((?:[^()'\"]|'[^']*'|\"[^\"]*\")*)\)"
)
#: A choice of the shell, and the most of them in a script that are made.
_CASE = re.compile(r"\bcase[ \t]+(\S+)[ \t]+in\b(.*?)\besac\b", re.DOTALL)
_MOST_CASES = 32
#: The most characters of a script whose arrays are replaced.
_MOST_INLINED = 1 << 17
#: The most characters of a value whose references are replaced, and of the result.
_MOST_EXPANDED = 1 << 12
#: The most characters of a script: the time that shlex takes grows with their square.
MOST_SCRIPT = 1 << 16
#: The engines whose options are read.
ENGINES = ("vLLM", "SGLang")
#: The most calls of functions and turns of loops that are followed in one script.
_MOST_CALLS = 32
#: Commands that begin a loop, and programs that start several others, which a colon separates.
_LOOPS = frozenset({"for", "while", "until", "select"})
_SEVERAL_PROGRAMS = frozenset({"mpirun", "mpiexec"})
#: The most engines that are looked for in one script.
_MOST_LAUNCHES = 32
#: Python modules that start an engine, with the engine and whether Dynamo runs it. A module below one of them, such as
#: ``dynamo.vllm.unified_main``, starts the same.
_MODULES = {
    "vllm.entrypoints": ("vLLM", False),
    "sglang.launch_server": ("SGLang", False),
    "dynamo.vllm": ("vLLM", True),
    "dynamo.sglang": ("SGLang", True),
    "dynamo.trtllm": ("TensorRT-LLM", True),
}
#: Programs that start an engine if their first argument is ``serve``.
_PROGRAMS = {"vllm": ("vLLM", False), "sglang": ("SGLang", False)}
#: A word of a command that starts a server of models, whichever it is.
_SERVES = re.compile(r"serve|--?model[\w-]*(=.*)?|--?served-model-name(=.*)?|--?checkpoint[\w-]*(=.*)?")
#: A word before the options of a command that starts a server.
_SERVER = re.compile(r"(?:.*[-_./])?(?:serve|server|launch|launcher|worker)(?:[-_.].*)?", re.IGNORECASE)
#: Options that take several words.
_LISTS = frozenset({"--connector"})
#: The quotation marks of text processors, which no shell and no JSON reads.
_TYPOGRAPHIC = "\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb"
#: Names of images whose entry point is the engine, so that the container has only its options.
_IMAGES = {"vllm-openai": "vLLM", "vllm": "vLLM", "sglang": "SGLang"}
#: Options of ``docker run`` whose values may be named like an image.
_NAMES = frozenset({"--name", "--entrypoint", "--hostname", "-h", "--network", "--network-alias"})


class ScriptError(ValueError):
    """A script cannot be read: it is too long, or a quotation in it is not closed. The text follows the file's name."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started.

    :param options: for each option its values in the order given; the names of options have dashes for underscores.
    :param model: the model that is given without an option.
    :param environment: the variables that the command sees.
    :param script: the text of the whole command, which may install packages.
    :param has_options: whether the file contains the engine's options.
    :param has_environment: whether the file contains the engine's variables.
    :param launcher: the program or kind of object that starts an engine which is not read, or Ray Serve; else empty.
    :param image: the image that a script runs; else empty.
    :param env_files: the env files of the container that a script runs.
    :param place: the number of the container or the remote shell in which a script starts the engine; else 0.
    :param unknown: words of the command that stand for options which the file does not contain, such as ``$ARGS``.
    """

    engine: str
    dynamo: bool
    options: Mapping[str, Sequence[str]]
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    has_options: bool = True
    has_environment: bool = True
    launcher: str = ""
    image: str = ""
    env_files: tuple[str, ...] = ()
    place: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether the engine's options are known here: vLLM's and SGLang's are."""
        return self.engine in ENGINES


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
    :raises ScriptError: if the words contain a shell script with a quotation that is not closed.
    """
    words = [expand(word, environment, shell=False) for word in words]
    if words and PurePosixPath(words[0]).name in _SHELLS:
        for number, word in enumerate(words[1:-1], 1):
            if re.fullmatch(r"-[a-z]*c", word):
                script = number + 2 if words[number + 1] == "--" and len(words) > number + 2 else number + 1
                return script_launches(words[script], environment)
    if started := _launches(words, environment, " ".join(words)):
        return started
    if started := [launch for launch in _nested_launches(words, environment) if launch.engine]:
        return started
    found = None
    if _only_arguments(words):
        engine = _IMAGES.get(_image_name(image))
        if engine is not None:
            options, model = _options(words)
            found = Launch(engine, False, options, model, environment)
            if mark := typographic_mark(words):
                raise ScriptError(_describe_mark(mark))
    found = found or _by_option(words, environment, " ".join(words))
    if found is None and _serves(words):
        program = image.rpartition("/")[2] if words[0].startswith("-") else _launcher(words)
        found = Launch("", False, {}, "", environment, launcher=program)
    return [] if found is None else [found]


def _only_arguments(words: Sequence[str]) -> bool:
    """Return whether words are options, or a model and options, and so follow a program that the image starts."""
    return not words or words[0].startswith("-") or (len(words) > 1 and _is_option(words[1]) and ".sh" not in words[0])


def script_launches(text: str, environment: Mapping[str, str]) -> list[Launch]:
    """Return the engines that a shell script starts. :raises ScriptError: if a quotation is not closed."""
    seen = dict(environment)
    found: list[Launch] = []
    unread = []
    conditions = calls = 0
    places = count(1)
    rest, functions = _with_functions(text)
    commands = deque(split_commands(rest))
    while commands:
        command = commands.popleft()
        words = _without_keywords(command)
        turns = _turns(words, seen)
        if turns and calls + len(turns) <= _MOST_CALLS:
            calls += len(turns)
            body = _take_body(commands)
            commands.extendleft(part for turn in reversed(turns) for part in (*reversed(body), turn))
            continue
        conditions += {"if": 1, "case": 1, "fi": -1, "esac": -1}.get(command[0], 0)
        is_turn = command[0] == "for"
        words = command[1:] if is_turn else words
        own: dict[str, str] = {}
        given = ChainMap(own, seen)
        number = 0
        while number < len(words) and (match := _ASSIGNMENT.fullmatch(words[number])):
            own[match[1]] = expand(match[2], given, shell=True)
            number += 1
        if number == len(words):
            unsure = {name for name in own if conditions and not is_turn and seen.get(name, own[name]) != own[name]}
            seen.update({name: f"$({name})" if name in unsure else value for name, value in own.items()})
            continue
        expanded = [part for word in words[number:] for part in _expand_word(word, given)]
        if expanded[0] in functions and calls < _MOST_CALLS:
            calls += 1
            seen.update(own)
            commands.extendleft(reversed(_called(functions[expanded[0]], expanded[1:])))
            continue
        started = _launches(expanded, given, text)
        if not started and (launch := _by_option(expanded, given, text)) is not None:
            started = [launch]
        if in_place := _container_launches(expanded, text) or ([] if started else _nested_launches(expanded, given)):
            place = next(places)
            started = [replace(launch, place=place) for launch in in_place]
        if not started and _serves(expanded):
            unread.append(Launch("", False, {}, "", dict(given), text, launcher=_launcher(expanded)))
        found += started
        if len(found) >= _MOST_LAUNCHES:
            break
    assigned = dict.fromkeys(match[1] or match[2] for match in _ASSIGNED.finditer(_without_comments(text)))
    return [
        launch
        if launch.image
        else replace(launch, environment={**{name: f"$({name})" for name in assigned}, **launch.environment})
        for launch in found or unread[:_MOST_LAUNCHES]
    ]


def _with_functions(text: str) -> tuple[str, Mapping[str, str]]:
    """Return a script without the functions that it calls, and their bodies; as it is if one of them cannot be read."""
    rest, functions = take_functions(text)
    try:
        for body in (rest, *functions.values()) if functions else ():
            split_commands(body)
    except ScriptError:
        return text, {}
    return rest, functions


def _turns(words: Sequence[str], environment: Mapping[str, str]) -> list[list[str]]:
    """Return the assignment of each turn of a ``for`` loop whose words are known; empty for any other command."""
    if len(words) < 4 or words[0] != "for" or words[2] != "in":
        return []
    values: list[str] = []
    for word in words[3:]:
        values += expand(word, environment, shell=True).split() if _REFERENCE.search(word) else [word]
    return [["for", f"{words[1]}={value}"] for value in values] if all(map(is_resolved, values)) else []


def _take_body(commands: deque[list[str]]) -> list[list[str]]:
    """Take the commands of a loop from those of a script, with its end."""
    body: list[list[str]] = []
    depth = 1
    while commands:
        command = commands.popleft()
        depth += sum(word in _LOOPS for word in takewhile((_KEYWORDS | _LOOPS).__contains__, command))
        depth -= command[0] == "done"
        if depth == 0:
            break
        body.append(command)
    return body


def _called(body: str, arguments: Sequence[str]) -> list[list[str]]:
    """Return the commands of a function with the arguments of a call, or without if they do not fit its quotations."""
    try:
        return split_commands(called_body(body, arguments))
    except ScriptError:
        return split_commands(body)


def _without_keywords(command: Sequence[str]) -> Sequence[str]:
    """Return a command without the words of the shell before it."""
    first = next((number for number, word in enumerate(command) if word not in _KEYWORDS), len(command))
    words = command[first:]
    if words and words[0] in _DECLARATIONS:
        return [word for word in words[1:] if not word.startswith("-")]
    return words[1:] if words and words[0] in ("exec", "env", "nohup") else words


def _nested_launches(words: Sequence[str], environment: Mapping[str, str]) -> list[Launch]:
    """Return the engines of a script that is one word of a command, as with ``bash -c``, ``ssh`` and ``su -c``."""
    found: list[Launch] = []
    for word in words[1:]:
        if any(program in word for program in (*_PROGRAMS, *_MODULES)) and re.search(r"\s", word):
            with suppress(ScriptError):
                found += script_launches(word, environment)
    return found


def _expand_word(word: str, environment: Mapping[str, str]) -> list[str]:
    """Return a word with its references replaced: several words if it is one reference to a list of options."""
    expanded = expand(word, environment, shell=True)
    if _REFERENCE.fullmatch(word) and expanded.startswith("-") and " " in expanded:
        try:
            return shlex.split(expanded)
        except ValueError:
            return [expanded]
    return [expanded]


def split_commands(text: str) -> list[list[str]]:
    """Split a shell script into the words of its commands.

    :raises ScriptError: if it is too long, or a quotation is not closed.
    """
    if len(text) > MOST_SCRIPT:
        raise ScriptError(f"has a script of {len(text)} characters: expected at most {MOST_SCRIPT}")
    original = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    text = _inline_arrays(_chosen_branches(_without_comments(re.sub(r"\\\r?\n", " ", _without_copied_texts(text)))))
    reader = shlex.shlex(_join_substitutions(text), posix=True, punctuation_chars=";|&\n()")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in reader:
            if word and not word.strip(";|&\n()"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        raise ScriptError(_describe_open_quotation(original)) from None
    return [command for command in commands if command]


def _without_copied_texts(text: str) -> str:
    """Remove the texts that a script only copies into files; one that ``$(cat <<END`` reads becomes a quoted word."""
    lines = text.split("\n")
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(number)
    kept = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        match = _HERE_DOCUMENT.search(line)
        ends = places.get(match[2], []) if match else []
        following = bisect.bisect_left(ends, number)
        if match is None or following == len(ends) or not re.search(r"\b(?:cat|tee|xargs)\b", line):
            kept.append(line)
            continue
        start, end = number, ends[following]
        number = end + 1
        command, rest = line[: match.start()], line[match.end() :]
        if re.search(r"\bxargs\b", line):
            command, rest = (re.sub(r"\bxargs\b", "env", part) for part in (command, rest))
            rest = " ".join([rest, *lines[start:end]])
        if _PRINTS_TEXT.search(command) and number < len(lines) and lines[number].lstrip().startswith(")"):
            command, rest = _PRINTS_TEXT.sub("", command), lines[number].lstrip()[1:]
            number += 1
            copied = "\n".join(lines[start:end]).strip()
            in_quotation = command.count('"') % 2 == 1
            command += re.sub(r'(["\\`])', r"\\\1", copied) if in_quotation else shlex.quote(copied)
        kept.append(command + rest)
    return "\n".join(kept)


def _without_comments(text: str) -> str:
    return _scan(text, join=False)


def _join_substitutions(text: str) -> str:
    """Make one word of each ``$(COMMAND)`` and each command between backticks: what a command prints is not known."""
    return _scan(text, join=True)


def _scan(text: str, *, join: bool) -> str:
    """Remove comments, or join substitutions of commands, outside the quotations in which they mean nothing."""
    kept = []
    place, in_quotation, open_end = 0, False, False
    comment = "" if join else r"|(?:^|(?<=[\s;]))#[^\n]*"
    tokens = re.compile(r"\\.|['\"`]|\$\(" + comment, re.DOTALL | re.MULTILINE)
    while (match := tokens.search(text, place)) is not None:
        kept.append(text[place : match.start()])
        place, end, part = match.start(), match.end(), match[0]
        if part == '"':
            in_quotation = not in_quotation
        elif part in ("$(", "`") and not open_end:
            end = _end_of_substitution(text, place)
            open_end = end == match.end()
            part = text[place:end]
            if join:
                part = re.sub(r"[\s;|&'\"\\]", "\u00a0", part.replace("(", "{").replace(")", "}"))
        elif part == "'" and not in_quotation:
            end = text.find("'", end) + 1 or len(text)
            part = text[place:end]
        elif part.startswith("#"):
            part, end = ("#", place + 1) if in_quotation else ("", end)
        kept.append(part)
        place = end
    return "".join([*kept, text[place:]])


def _end_of_substitution(text: str, start: int) -> int:
    """Return where a substitution of a command ends, if it begins at a place; after its mark if it never ends."""
    mark = re.compile(r"\$\(|`").match(text, start)
    assert mark is not None
    depth, place = 1, mark.end()
    tokens = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|[()]" if mark[0] == "$(" else r"\\.|`", re.DOTALL)
    while (match := tokens.search(text, place)) is not None:
        place = match.end()
        depth += {"(": 1, ")": -1, "`": -1}.get(match[0], 0)
        if depth == 0:
            return place
    return mark.end()


def _chosen_branches(text: str) -> str:
    """Replace each ``case`` over a variable that the script sets, once and before it, by the branch that is taken."""

    def branch(match: re.Match[str]) -> str:
        reference = _REFERENCE.fullmatch(match[1].strip('"'))
        name = reference and (reference["braced"] or reference["plain"])
        values = re.findall(rf"(?m)(?:^|[\s;]){name}=([\w./:-]+)[ \t]*$", text[: match.start()]) if name else []
        if len(values) != 1:
            return match[0]
        for choice in match[2].split(";;"):
            patterns, _, commands = choice.partition(")")
            if any(fnmatchcase(values[0], pattern.strip(" \t\n('\"")) for pattern in patterns.split("|")):
                return commands
        return ""

    return _CASE.sub(branch, text) if text.count("case") <= _MOST_CASES else text


def _inline_arrays(text: str) -> str:
    """Replace each use of an array of the shell by its words. One that is defined twice is left as it is."""
    arrays: dict[str, str] = {}
    twice = set()
    for match in _ARRAY_DEFINED.finditer(text):
        twice |= {match[1]} & set(arrays) if not match[2] else set()
        arrays[match[1]] = f"{arrays.get(match[1], '')} {match[3]}"
    inlined = _ARRAY_DEFINED.sub("", text) if arrays else text
    for name, words in arrays.items():
        if name not in twice and len(inlined) + len(words) * inlined.count(f"{name}[") <= _MOST_INLINED:
            flat = " ".join(re.sub(r"(?m)^[ \t]*#.*$", "", words).splitlines())
            inlined = re.sub(rf"\"?\$\{{{name}\[[@*]\]\}}\"?", lambda _, flat=flat: flat, inlined)  # type: ignore[misc]
    return inlined


def _describe_open_quotation(text: str) -> str:
    """Say which quotation of a script is not closed, and whether a typographic mark stands where its end should."""
    place, opened, line = 0, "", 1
    while (match := re.compile(r"\\.|['\"]", re.DOTALL).search(text, place)) is not None:
        mark = match[0]
        place = match.end()
        if mark in "'\"":
            end = re.compile(r"'" if mark == "'" else r'(?<!\\)"').search(text, place)
            if end is None:
                opened, line = mark, text.count("\n", 0, match.start()) + 1
                break
            place = end.end()
    reason = f"has a quotation that is not closed: it begins with {opened or 'a quotation mark'} in line {line}"
    if mark_in_text := next((mark for mark in text[place:] if mark in _TYPOGRAPHIC), ""):
        reason += f"; the typographic mark {mark_in_text} (U+{ord(mark_in_text):04X}) closes nothing: write {opened}"
    return reason


def _describe_mark(mark: str) -> str:
    return f"has the typographic quotation mark {mark} (U+{ord(mark):04X}), which neither a shell nor JSON reads"


def typographic_mark(words: Sequence[str]) -> str:
    """Return the typographic mark in which a word of a command begins or ends; empty if none does."""
    ends = (end for word in words for end in (word[:1], word.rpartition("=")[2][:1], word[-1:]))
    return next((end for end in ends if end and end in _TYPOGRAPHIC), "")


def _launches(words: Sequence[str], environment: Mapping[str, str], script: str) -> list[Launch]:
    """Return the engine that a command starts, or those that ``mpirun`` starts."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ":" and PurePosixPath(words[0]).name in _SEVERAL_PROGRAMS:
            parts.append([])
        else:
            parts[-1].append(word)
    started = (_launch(part, environment, script) for part in parts)
    return [launch for launch in started if launch is not None]


def _launch(words: Sequence[str], environment: Mapping[str, str], script: str) -> Launch | None:
    """Return the engine that a command starts, also after a program such as ``numactl``; None if it starts none."""
    for number, word in enumerate(words[:-1]):
        following = words[number + 1]
        if word == "-m":
            start = next((_MODULES[name] for name in _MODULES if f"{following}.".startswith(f"{name}.")), None)
        else:
            start = _PROGRAMS.get(PurePosixPath(word).name) if following == "serve" else None
        if start is not None:
            if mark := typographic_mark(words):
                raise ScriptError(_describe_mark(mark))
            rest = words[number + 2 :]
            rest = rest[1:] if rest[:1] == ["serve"] else rest
            options, model = _options(rest)
            from_input = ["what xargs reads"] if "xargs" in words[:number] else []
            unknown = tuple(dict.fromkeys([*from_input, *_unknown_words(rest)]))
            assigned = {match[1]: match[2] for match in map(_ASSIGNMENT.fullmatch, words[:number]) if match is not None}
            return Launch(*start, options, model, {**environment, **assigned}, script, unknown=unknown)
    return None


def printed_command(word: str) -> str:
    """Return a word that a command prints as the script has it, with blanks for its quotation marks and operators."""
    text = word.replace("\u00a0", " ")
    return f"$({text[2:-1]})" if text != word and text.startswith("${") else text


def _unknown_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that may be any options: arrays, and references and commands where no value can stand."""
    for place, word in enumerate(words):
        follows_option = place > 0 and re.match(r"--?[A-Za-z][^=]*$", words[place - 1]) is not None
        if _ARRAY.fullmatch(word) or (place > 0 and not follows_option and _REFERENCE.fullmatch(word)):
            yield re.sub(r"\$\{(\w+)\[.*", r"$\1", word)
        elif place > 0 and not follows_option and word.startswith(("$", "`")) and "\u00a0" in word:
            yield printed_command(word)


def _serves(words: Sequence[str]) -> bool:
    """Return whether a command seems to start a server of models."""
    first = next((number for number, word in enumerate(words) if _is_option(word)), len(words))
    return any(map(_SERVES.fullmatch, words)) or (first < len(words) and any(map(_SERVER.fullmatch, words[:first])))


def _launcher(words: Sequence[str]) -> str:
    """Return the name of the program that starts the server: a module, or the last program before the options."""
    for word, following in pairwise(words):
        if word == "-m":
            return following
    first = next((number for number, word in enumerate(words) if _is_option(word)), len(words))
    servers = [word for word in words[:first] if _SERVER.fullmatch(word) and word != "serve"]
    return PurePosixPath(servers[-1] if servers else words[0]).name


def _is_option(word: str) -> bool:
    return re.match(r"--[A-Za-z]", word) is not None


def _by_option(words: Sequence[str], environment: Mapping[str, str], script: str) -> Launch | None:
    """Return the engine of a program that is not known by an option that only one engine has; None if it has none."""
    if not any(word.partition("=")[0] in ("--kv-transfer-config", "--kv_transfer_config") for word in words):
        return None
    if mark := typographic_mark(words):
        raise ScriptError(_describe_mark(mark))
    options, _ = _options(words)
    return Launch("vLLM", False, options, "", environment, script)


def _container_launches(words: Sequence[str], script: str) -> list[Launch]:
    """Return the engines that ``docker run`` starts, with the variables of its container.

    The program of an image whose entry point is not known is one of the words, such as ``vllm serve``.
    """
    if PurePosixPath(words[0]).name not in ("docker", "podman", "nerdctl") or "run" not in words[:3]:
        return []
    options = takewhile(lambda number: _launch(words[number : number + 2], {}, "") is None, range(2, len(words)))
    images = (number for number in options if _image_name(words[number]) in _IMAGES)
    place = next((number for number in images if words[number - 1] not in _NAMES), None)
    before = words[:place]
    assignments = [*_values(before, "-e"), *_values(before, "--env")]
    environment = {match[1]: match[2] for match in map(_ASSIGNMENT.fullmatch, assignments) if match is not None}
    env_files = tuple(_values(before, "--env-file"))
    image = "" if place is None else words[place]
    if place is None:
        started = _launches(words, environment, script) or _nested_launches(words, environment)
    else:
        program = [value for value in _values(before, "--entrypoint") if value]
        started = launches([*program[-1:], *words[place + 1 :]], environment, image)
    return [replace(launch, script=script, image=image, env_files=env_files) for launch in started]


def _values(words: Sequence[str], option: str) -> list[str]:
    """Return what follows an option, as the next word or after an equals sign."""
    following = [value for word, value in pairwise(words) if word == option]
    return [*following, *(word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}="))]


def _image_name(image: str) -> str:
    return re.sub(r"[@:].*", "", image.rpartition("/")[2])


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
            while name in _LISTS and number < len(words) and not words[number].startswith("-"):
                value += f" {words[number]}"
                number += 1
        head, dot, tail = name.partition(".")
        options.setdefault(head.replace("_", "-") + dot + tail, []).append(value)
    return options, model
