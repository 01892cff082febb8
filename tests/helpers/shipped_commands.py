# SPDX-License-Identifier: Apache-2.0
"""The command lines of pytest that this project ships: manifests, scripts, recipes for CI, the Dockerfile, docs."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from helpers.cli_run import ROOT
from helpers.manifests import pods_of, read
from pytest_nixl import cli

#: How the files for CI and clusters start pytest: as a child, whose exit code 0 is accepted only with a verdict.
JUDGED = "pytest-nixl run --as-given --"
#: Suites and modules of them that measure rows, as command lines name them; no name is all suites.
_MEASURE = re.compile(r"(suites/?|pytest_nixl\.suites)$|(suites/|pytest_nixl\.suites\.)bandwidth\b")
#: A line of docs on which a person runs pytest, by a launcher or in a container too.
_TYPED = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S* )*(?:(?:srun|mpirun|mpiexec|torchrun|docker run|deploy/mpi/run\.sh)\b.*? )?"
    r"(?:pytest|pytest-nixl run --as-given --|(?P<choice>pytest-nixl run)(?= \w))(?= |$)"
)


@dataclass(frozen=True)
class Command:
    """One command line.

    :param file: the file that has it, from the root of the clone.
    :param words: what follows ``pytest``.
    :param variables: names and values that the file sets for it.
    :param text: all that the file says.
    :param learns: whether it is one of the runs that a profile is learned from.
    """

    file: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    text: str = ""
    learns: bool = False

    @property
    def measures(self) -> bool:
        """Whether it measures rows."""
        named = [argument for argument in self.words if argument.startswith(("suites", "pytest_nixl.suites"))]
        return not named or any(_MEASURE.match(argument) for argument in named)

    def option(self, name: str) -> str | None:
        """The value of an option of ours, in either form; None: it is not given; empty: it takes none."""
        flag, results = f"--nixl-{name}", None
        for argument, following in zip(self.words, (*self.words[1:], ""), strict=True):
            name_given, equals, value = argument.partition("=")
            if name_given == flag:
                results = value if equals else "" if following.startswith("-") else following
        return results

    def __str__(self) -> str:
        return f"{self.file}: pytest {shlex.join(self.words)}"


def arguments_of_pytest(arguments: Sequence[str]) -> list[str]:
    """Return what pytest gets of a command line by which :data:`JUDGED` starts it; without that, all words."""
    start = shlex.split(JUDGED)
    places = (place for place in range(len(arguments)) if list(arguments[place : place + len(start)]) == start)
    place = next(places, None)
    return list(arguments) if place is None else list(arguments[place + len(start) :])


def shipped(root: Path = ROOT) -> list[Command]:
    """Return every command line below ``root``, in the order of the files."""
    return [
        *_manifests(root), *_overlays(root), *_scripts(root), *_recipes(root), *_dockerfile(root), *_docs(root),
    ]  # fmt: skip


def _manifests(root: Path) -> Iterator[Command]:
    for manifest in read(sorted((root / "deploy/kubernetes").glob("*.yaml"))):
        for pod in (pod for document in manifest.documents for pod in pods_of(document)):
            arguments = arguments_of_pytest(pod.arguments)
            if any(argument.startswith("--nixl-") for argument in arguments):
                yield Command(f"deploy/kubernetes/{manifest.name}", tuple(arguments))


#: The values of an overlay that are options of the command line.
_OVERLAY_OPTIONS = {"nodes": "ranks", "backend": "backend", "profile": "profile", "memory-types": "memory"}


def _overlays(root: Path) -> Iterator[Command]:
    """The command line of the Indexed Job with the values of each overlay.

    tests/integration/test_overlays.py compares it with what a real kustomize makes.
    """
    (job,) = (manifest for manifest in _manifests(root) if manifest.file.endswith("/indexed-job.yaml"))
    for path in sorted((root / "deploy/overlays").glob("*/cluster.yaml")):
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)["data"]
        arguments = {f"--nixl-{option}": str(values[name]) for name, option in _OVERLAY_OPTIONS.items()}
        line = (f"{flag}={arguments.get(flag, value)}" if equals else flag
                for flag, equals, value in (argument.partition("=") for argument in job.words))  # fmt: skip
        yield Command(str(path.relative_to(root)), tuple(line), text=text.replace("\n# ", " "))


def _scripts(root: Path) -> Iterator[Command]:
    for name in ("deploy/slurm/pytest-nixl.sbatch", "deploy/mpi/run.sh"):
        text = (root / name).read_text(encoding="utf-8")
        array = re.search(r"^options=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
        assert array is not None, f"{name} has no array of options"
        judged = re.search(r"^judged=\((.*)\)$", text, re.MULTILINE)
        inner = array[1].replace('"${suites[@]}"', judged[1] if judged is not None else "")
        parts = shlex.split(inner, comments=True)
        usages = re.findall(rf"{name} \d+((?: (?:--\S+|\\\n# +--\S+))*)", text) or [""]
        for usage in usages:
            yield Command(name, (*parts, *re.findall(r"--\S+", usage)), text=text)


def _recipes(root: Path) -> Iterator[Command]:
    for name in ("deploy/ci/github.yml", "deploy/ci/github-rdma.yml", "deploy/ci/gitlab.yml"):
        text = (root / name).read_text(encoding="utf-8")
        recipe: dict[Any, Any] = yaml.safe_load(text)
        variables = {**recipe.get("env", {}), **recipe.get("variables", {})}
        if "jobs" in recipe:
            lines = [step["run"] for job in recipe["jobs"].values() for step in job["steps"] if "run" in step]
        else:
            lines = [line for job in recipe.values() if isinstance(job, dict) for line in job.get("script", [])]
        for line in (line for line in lines if JUDGED in line):
            for variable, value in variables.items():
                line = line.replace(f"${variable}", str(value))
            arguments = shlex.split(line.partition(";")[0])  # a comparison is a function, with what follows it
            yield Command(name, tuple(arguments_of_pytest(arguments)), tuple(variables.items()), text)


def _dockerfile(root: Path) -> Iterator[Command]:
    name = "deploy/docker/Dockerfile"
    text = (root / name).read_text(encoding="utf-8")
    plain = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    yield from _typed(name, plain.replace("\\\n", " "))


def _docs(root: Path) -> Iterator[Command]:
    for path in [*sorted((root / "docs").rglob("*.md")), root / "README.md"]:
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield from _typed(name, block.replace("\\\n", " "), text)
        for inline in re.findall(r"`(pytest [^`]*--nixl-[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            yield Command(name, tuple(shlex.split(inline)[1:]), text=text)


def _chosen(arguments: Sequence[str]) -> list[str]:
    """Return what pytest gets of ``pytest-nixl run LEVEL …``."""
    with redirect_stdout(io.StringIO()) as output:
        assert cli.main(["run", "--print", *arguments]) == 0
    line = re.search(r"^\$ (?:\S+ -m )?pytest (.*)$", output.getvalue(), re.MULTILINE)
    assert line is not None, output.getvalue()
    return shlex.split(line[1])


def _typed(name: str, block: str, text: str = "") -> Iterator[Command]:
    learns = "profile learn" in block
    for line in (line.strip() for line in block.splitlines()):
        started = _TYPED.match(line)
        if started is None:
            continue
        arguments = shlex.split(line[started.end() :], comments=True)
        if started["choice"]:
            arguments = _chosen(arguments)
        run = tuple(arguments)
        yield Command(name, run, text=text or block, learns=learns and "--nixl-gate" not in run)
