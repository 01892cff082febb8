# SPDX-License-Identifier: Apache-2.0
"""Run tests against many changes of the package, each in a process forked from one that has imported everything.

``pytest -p helpers.swapped FILE…`` collects the tests once, with the path of a :class:`Work` in ``MATRIX_WORK``. For
each change it forks: the child puts the changed code into the functions that exist, runs the tests that reach the
change, and leaves. A change of what runs while a module is imported is left to ``python -m helpers.swapped WORK``: its
children import the changed module, and collect their tests.

Each change becomes a line of JSON in the file of the work (``matrix`` reads it).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import importlib.machinery
import inspect
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

import pytest
from _pytest.assertion import rewrite

from helpers.mutations import Mutant

#: The variable with the path of the work.
WORK = "MATRIX_WORK"
#: A test is late after so many seconds and that many times what it takes; after so many late tests the others are left.
LATE_SECONDS, LATE_TIMES, MOST_LATE = 3.0, 10.0, 3
#: The most memory of a child, in bytes: a change may allocate without end.
MOST_MEMORY = 3 << 30
_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_OPTIONS = ("-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")


@dataclass
class Change:
    """A change and the tests that reach it.

    :ivar tests: the first of them all run; each other runs if none before it has failed.
    :ivar all_of_them: how many run whatever the others do.
    :ivar at_import: whether its line also runs while modules are imported.
    """

    mutant: Mutant
    tests: list[str]
    all_of_them: int
    at_import: bool = False


@dataclass
class Work:
    """What one process does.

    :ivar file: gets a line for each change.
    :ivar left: gets the changes that need an import.
    :ivar seconds: of each test without a change.
    :ivar modules: what the tests import of others, for a process that is to fork quickly.
    """

    file: str
    left: str
    changes: list[Change]
    seconds: dict[str, float] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Work:
        values = json.loads(path.read_text(encoding="utf-8"))
        changes = []
        for value in values.pop("changes"):
            mutant = value.pop("mutant")
            start, end, text = mutant.pop("edit")
            changes.append(Change(Mutant(edit=(start, end, text), **mutant), **value))
        return cls(changes=changes, **values)


class Late(BaseException):
    """A test takes far longer than without the change."""


class Recorder:
    """A plugin of pytest that limits the time of tests, and sends their outcomes through a pipe."""

    def __init__(self, pipe: int, tests: Sequence[str], all_of_them: int, seconds: Mapping[str, float]) -> None:
        self._pipe, self._tests, self._all, self._seconds = pipe, tests, all_of_them, seconds
        self.ran = self.failed = self.late = 0
        self._failing = False
        self._start = 0.0

    def _send(self, *values: object) -> None:
        os.write(self._pipe, json.dumps(values).encode() + b"\n")

    def collect_none(self) -> None:
        """Say that no test can be collected."""
        self._send("end", "*", True, 0.0)

    def enough(self) -> bool:
        return (bool(self.failed) and self.ran >= self._all) or self.late >= MOST_LATE

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self._tests if name in by_name]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            for name in self._tests:
                if name.startswith(f"{report.nodeid}::"):
                    self.failed += 1
                    self._send("end", name, True, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self) -> list[str]:
        return ["differs"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def interrupt(signal_number: int, frame: FrameType | None) -> None:
            self.late += 1
            raise Late

        for name in ("repr_failure", "_repr_failure_py"):  # nobody reads it, and it takes longer than most tests
            setattr(item, name, lambda *arguments, **keywords: "failed")
        self._failing, self._start = False, time.monotonic()
        self._send("start", item.nodeid)
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, LATE_SECONDS + LATE_TIMES * self._seconds.get(item.nodeid, 1.0), 1.0)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.ran += 1
            self.failed += self._failing
            self._send("end", item.nodeid, self._failing, time.monotonic() - self._start)
            if self.enough():
                item.session.shouldstop = "enough"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failing |= report.failed


@dataclass
class Outcomes:
    """Which tests failed, and the seconds of each that ran."""

    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    ended: bool = False


def in_child(run: Callable[[int], None], tests: Sequence[str], limit: float) -> Outcomes:
    """Fork, call a function with the end of a pipe, and return what it sends until it ends or its time does.

    A test in which the child ends has failed.
    """
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp(prefix="m")
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(reading)
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nowhere, descriptor)
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, resource.RLIM_INFINITY))
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            run(writing)
        os._exit(0)
    os.close(writing)
    outcomes, text, end, running = Outcomes(), b"", time.monotonic() + limit, ""
    while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(reading, 65536)
        if not data:
            outcomes.ended = True
            break
        *lines, text = (text + data).split(b"\n")
        for kind, name, *values in map(json.loads, lines):
            running = name if kind == "start" else ""
            if kind == "end":
                outcomes.seconds[name] = values[1]
                outcomes.failed += (tests if name == "*" else [name]) if values[0] else []
    outcomes.failed += [running] if running else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def same(first: CodeType, second: CodeType, *, inside: bool = True) -> bool:
    """Whether two codes do the same, wherever their lines are. Without ``inside`` the codes in them may differ."""

    def parts(code: CodeType) -> tuple[object, ...]:
        values = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
        return (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
                code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount,
                [(type(value), repr(value)) for value in values])  # fmt: skip

    codes = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (first, second)]
    if parts(first) != parts(second) or len(codes[0]) != len(codes[1]):
        return False
    return not inside or all(map(same, *codes))


def differences(old: CodeType, new: CodeType, *, at_import: bool = True) -> list[tuple[CodeType, CodeType]] | None:
    """Return the codes of functions that differ, with the new ones; None: what runs at import differs.

    :param at_import: whether the code itself runs at import.
    """
    alike = same(old, new, inside=False)
    if at_import and not alike:
        return None
    results = [] if at_import or same(old, new) else [(old, new)]
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (old, new)]
    for first, second in zip(*inner, strict=True) if alike else ():
        at_once = at_import and (not first.co_flags & inspect.CO_OPTIMIZED or first.co_name in _AT_ONCE)
        below = differences(first, second, at_import=at_once)
        if below is None:
            return None
        results += below
    return results


Swaps = list[tuple[FunctionType, CodeType]]


class Functions:
    """The functions that exist in this process, by the place of their code."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._functions: dict[tuple[str, int, str], list[FunctionType]] = defaultdict(list)
        for value in gc.get_objects():
            if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(f"{root}{os.sep}"):
                code = value.__code__
                self._functions[code.co_filename, code.co_firstlineno, code.co_name].append(value)

    def swaps(self, mutant: Mutant) -> Swaps | None:
        """Return the functions that a change concerns, each with its changed code; None: an import is needed."""
        file = self._root / f"{mutant.module}.py"
        text = file.read_text(encoding="utf-8")
        rewritten = any(
            isinstance(getattr(module, "__loader__", None), rewrite.AssertionRewritingHook)
            for module in list(sys.modules.values())
            if getattr(module, "__file__", None) == str(file)
        )
        old, new = (_compiled(source, file, rewritten=rewritten) for source in (text, mutant.code(text)))
        swaps: Swaps = []
        outer: CodeType | None = None
        for before, after in differences(old, new) or ():
            functions = [
                function
                for function in self._functions[str(file), before.co_firstlineno, before.co_name]
                if same(function.__code__, before)
            ]
            if any(len(function.__code__.co_freevars) != len(after.co_freevars) for function in functions):
                return None
            if not functions and (outer is None or before not in _inside(outer)):
                return None
            outer = before if outer is None or before not in _inside(outer) else outer
            swaps += [(function, after) for function in functions]
        return swaps or None


def _compiled(text: str, file: Path, *, rewritten: bool) -> CodeType:
    """Return the code of a module, whose assertions pytest has rewritten if it is named like a test."""
    tree = ast.parse(text)
    if rewritten:
        rewrite.rewrite_asserts(tree, text.encode(), str(file))
    return compile(tree, str(file), "exec", dont_inherit=True)


def _inside(code: CodeType) -> list[CodeType]:
    """Return the codes in a code, at any depth."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [*inner, *(below for part in inner for below in _inside(part))]


def record(work: Work, change: Change, way: str, outcomes: Outcomes) -> None:
    """Append the outcome of a change to the file of the work, in one write."""
    line = {"mutant": asdict(change.mutant), "way": way, "killers": sorted(set(outcomes.failed)),
            "ran": len(outcomes.seconds), "reach": len(change.tests)}  # fmt: skip
    append(work.file, [line])


def append(file: str, lines: Iterable[Mapping[str, object]]) -> None:
    """Append lines to a file that several processes write."""
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(number, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    os.close(number)


def pytest_configure() -> None:
    """Let hypothesis try the same examples for each change, and not look for the least that fails."""
    with contextlib.suppress(ImportError):
        from hypothesis import Phase, settings

        settings.register_profile(
            "matrix", settings.default, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("matrix")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Try all changes of the work instead of running the tests; leave those that need an import."""
    if WORK not in os.environ:
        return None
    work = Work.read(Path(os.environ[WORK]))
    items = {item.nodeid: item for item in session.items}

    def run_tests(pipe: int, tests: Sequence[str], all_of_them: int, swaps: Swaps) -> None:
        for function, code in swaps:
            function.__code__ = code
        recorder = Recorder(pipe, tests, all_of_them, work.seconds)
        session.config.pluginmanager.register(recorder)
        for name, following in zip(tests, [*tests[1:], None], strict=True):
            item = items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items[following] if following else None)
            if recorder.enough():
                return

    for value in gc.get_objects():
        if isinstance(value, functools._lru_cache_wrapper) and f"{value.__module__}".startswith("pytest_nixl"):
            value.cache_clear()
    functions = Functions(Path.cwd())
    gc.collect()
    gc.freeze()
    verified: dict[str, bool] = {}

    def passes(name: str) -> bool:
        """Return whether a test passes in a child without a change."""
        if name not in verified:
            run = functools.partial(run_tests, tests=[name], all_of_them=1, swaps=[])
            outcomes = in_child(run, [name], 20 + LATE_TIMES * work.seconds.get(name, 1.0))
            verified[name] = name in outcomes.seconds and not outcomes.failed
        return verified[name]

    left = []
    for change in work.changes:
        if not change.tests:
            record(work, change, "none", Outcomes())
            continue
        swaps = functions.swaps(change.mutant)
        if swaps is None:
            left.append(change)
            continue
        while True:
            change.tests = [name for name in change.tests if name in items and verified.get(name, True)]
            limit = 20 + LATE_TIMES * sum(work.seconds.get(name, 1.0) for name in change.tests)
            run = functools.partial(run_tests, tests=change.tests, all_of_them=change.all_of_them, swaps=swaps)
            outcomes = in_child(run, change.tests, limit)
            if all(list(map(passes, outcomes.failed))):
                break
        if change.at_import and not outcomes.failed:  # what it made at import is unchanged
            left.append(change)
        else:
            record(work, change, "swapped", outcomes)
    work.changes = left
    work.modules = [name for name, module in sys.modules.items() if _is_of_others(name, module)]
    work.write(Path(work.left))
    return True


def _is_of_others(name: str, module: ModuleType) -> bool:
    """Whether a module is neither of this project nor a plugin of pytest."""
    file = getattr(module, "__file__", None)
    ours = file is not None and Path(file).is_relative_to(Path.cwd())
    return not ours and not any(part in name for part in ("pytest", "helpers", "xdist", "__main__", "__editable__"))


def _load_changed(file: Path, text: str) -> None:
    """Let whatever imports a module load it from its changed text."""
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def changed_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if self.path == str(file):
            return compile(text, str(file), "exec", dont_inherit=True)
        return get_code(self, name)

    rewrite_test, read_pyc = rewrite._rewrite_test, rewrite._read_pyc

    def changed_test(path: Path, config: pytest.Config) -> Any:
        return (path.stat(), _compiled(text, path, rewritten=True)) if path == file else rewrite_test(path, config)

    def no_pyc(source: Path, *arguments: Any, **options: Any) -> CodeType | None:
        return None if source == file else read_pyc(source, *arguments, **options)

    for owner, name, function in (
        (loader, "get_code", changed_code),
        (rewrite, "_rewrite_test", changed_test),
        (rewrite, "_read_pyc", no_pyc),
    ):
        setattr(owner, name, function)


def _import_changed(pipe: int, change: Change, work: Work) -> None:
    """Run the tests of a change in a process that has not imported its module."""
    file = Path.cwd() / f"{change.mutant.module}.py"
    _load_changed(file, change.mutant.code(file.read_text(encoding="utf-8")))
    recorder = Recorder(pipe, change.tests, change.all_of_them, work.seconds)
    files = list(dict.fromkeys(name.partition("::")[0] for name in change.tests))
    code: int = pytest.ExitCode.INTERNAL_ERROR
    with contextlib.suppress(BaseException):
        code = pytest.main([*_OPTIONS, *files], plugins=[recorder, sys.modules[__name__]])
    if code not in (0, 1) and not recorder.ran and not recorder.failed:
        recorder.collect_none()


def main() -> NoReturn:
    """Try the changes of a work whose module has to be imported."""
    work = Work.read(Path(sys.argv[1]))
    os.environ.pop(WORK, None)
    for name in work.modules:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for change in work.changes:
        limit = 30 + LATE_TIMES * sum(work.seconds.get(name, 1.0) for name in change.tests)
        run: Any = functools.partial(_import_changed, change=change, work=work)
        record(work, change, "imported", in_child(run, change.tests, limit))
    sys.exit()


if __name__ == "__main__":
    from helpers import swapped

    swapped.main()
