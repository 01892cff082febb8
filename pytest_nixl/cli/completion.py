# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl completion``: print a script with which a shell completes the arguments of ``pytest-nixl``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

PROGRAM = "pytest-nixl"
#: Options of the program itself.
_OF_PROGRAM = ("--help", "--version")
_BASH = """\
# Completion of pytest-nixl for bash. Add to ~/.bashrc: eval "$(pytest-nixl completion bash)"
_pytest_nixl() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="" path="" words="" number
    if [ "$COMP_CWORD" -gt 0 ]; then previous="${COMP_WORDS[COMP_CWORD-1]}"; fi
    # --option=value is three words.
    if [ "$current" = "=" ]; then current=""
    elif [ "$previous" = "=" ] && [ "$COMP_CWORD" -gt 1 ]; then previous="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    COMPREPLY=()
    for ((number = 1; number < COMP_CWORD; number++)); do
        case "${COMP_WORDS[number]}" in
            --) return ;;
        esac
        case "$path ${COMP_WORDS[number]}" in
            @PATHS@) path="$path ${COMP_WORDS[number]}" ;;
        esac
    done
    case "$path:$previous" in
@VALUES@
        *)
            case "$path" in
@WORDS@
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _pytest_nixl pytest-nixl
"""
#: zsh runs the script for bash.
_ZSH = """\
# Completion of pytest-nixl for zsh. Add to ~/.zshrc, below compinit: eval "$(pytest-nixl completion zsh)"
autoload -U +X bashcompinit && bashcompinit
"""
_FISH = """\
# Completion of pytest-nixl for fish: pytest-nixl completion fish > ~/.config/fish/completions/pytest-nixl.fish
function __pytest_nixl_at
    set -l found
    set -l tokens (commandline -opc)
    set -e tokens[1]
    for token in $tokens
        if test "$token" = --
            return 1
        end
        set -l path (string join ' ' -- $found $token)
        if contains -- "$path" @PATHS@
            set found $found $token
        end
    end
    set -l path (string join ' ' -- $found)
    test "$path" = "$argv"
end
"""


@dataclass(frozen=True)
class CompletedOption:
    """An option of a subcommand.

    :param names: such as ``--level``.
    :param values: the words that it takes; empty: any, such as a file.
    :param takes: whether it takes a value.
    """

    names: tuple[str, ...]
    values: tuple[str, ...]
    takes: bool
    help: str


@dataclass(frozen=True)
class CompletedCommand:
    """A subcommand of the program.

    :param path: its words, such as ``profile show``; empty: the program itself.
    :param words: what stands without a dash: the subcommands below it, and the values of its positional arguments.
    """

    path: str
    words: tuple[str, ...]
    options: tuple[CompletedOption, ...]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script with which bash, zsh or fish completes the arguments of pytest-nixl",
        description='For bash add to ~/.bashrc: eval "$(pytest-nixl completion bash)". For zsh add to ~/.zshrc, below '
        'compinit: eval "$(pytest-nixl completion zsh)". For fish type: pytest-nixl completion fish > '
        "~/.config/fish/completions/pytest-nixl.fish",
    )
    completion.add_argument("shell", choices=tuple(_SCRIPTS), help="bash, zsh or fish")
    completion.set_defaults(run=partial(_run, commands))


def _run(commands: argparse._SubParsersAction[argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    options = tuple(CompletedOption((name,), (), False, "") for name in _OF_PROGRAM)
    program = CompletedCommand("", tuple(commands.choices), options)
    below = [found for name, parser in commands.choices.items() for found in _subcommands(name, parser)]
    print(_SCRIPTS[arguments.shell]([program, *below]), end="")
    return 0


def _subcommands(path: str, parser: argparse.ArgumentParser) -> Iterator[CompletedCommand]:
    words: list[str] = []
    options = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, below in action.choices.items():
                yield from _subcommands(f"{path} {name}", below)
        elif action.option_strings:
            takes = action.nargs != 0
            text = (action.help or "").replace("%%", "%")
            options.append(
                CompletedOption(tuple(action.option_strings), _values(path, action) if takes else (), takes, text)
            )
        else:
            words += _values(path, action)
    yield CompletedCommand(path, tuple(words), tuple(options))


def _values(path: str, action: argparse.Action) -> tuple[str, ...]:
    """Return the words that an argument takes; empty: any."""
    from pytest_nixl.judge.profiles import bundled_profiles
    from pytest_nixl.model.findings import FINDINGS
    from pytest_nixl.session.suites import checks_of_suites

    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    if action.dest == "profile":
        return bundled_profiles()
    if action.dest == "suite":
        return tuple(checks_of_suites())
    if action.dest == "backend":
        from pytest_nixl.nixl.backends import BACKENDS

        return tuple(BACKENDS)
    if action.dest == "ids" and path == "checks":
        return tuple(sorted({id for ids in checks_of_suites().values() for id in ids}))
    if action.dest == "ids":
        return tuple(FINDINGS)
    return ()


def _bash(subcommands: Iterable[CompletedCommand]) -> str:
    paths, values, words = [], [], []
    for command in subcommands:
        path = f" {command.path}" if command.path else ""
        if path:
            paths.append(f'"{path}"')
        for option in (option for option in command.options if option.takes):
            names = "|".join(f'"{path}:{name}"' for name in option.names)
            values.append(f'        {names}) words="{" ".join(option.values)}" ;;')
        listed = (*command.words, *(name for option in command.options for name in option.names))
        words.append(f'                "{path}") words="{" ".join(listed)}" ;;')
    script = _BASH.replace("@PATHS@", "|".join(paths))
    return script.replace("@VALUES@", "\n".join(values)).replace("@WORDS@", "\n".join(words))


def _zsh(subcommands: Iterable[CompletedCommand]) -> str:
    _, _, script = _bash(subcommands).partition("\n")
    return _ZSH + script


def _fish(subcommands: Iterable[CompletedCommand]) -> str:
    commands = list(subcommands)
    lines = [_FISH.replace("@PATHS@", " ".join(_quoted(each.path) for each in commands if each.path))]
    for command in commands:
        begin = f"complete -c {PROGRAM} -n {_quoted(f'__pytest_nixl_at {command.path}'.strip())}"
        if command.words:
            lines.append(f"{begin} -f -a {_quoted(' '.join(command.words))}")
        for option in command.options:
            names = " ".join(f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in option.names)
            value = f" -r -a {_quoted(' '.join(option.values))}" if option.values else " -r" if option.takes else ""
            text = f" -d {_quoted(' '.join(option.help.split()))}" if option.help else ""
            lines.append(f"{begin} {names}{value}{text}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Quote a text for fish, in which a backslash and a quote are escaped inside single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: dict[str, Any] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
