# SPDX-License-Identifier: Apache-2.0
"""Run checks that measure nothing beside each other: most of their time they wait.

A check with the marker ``nixl_concurrent`` may run at the same time as the other marked checks that follow it directly.
When pytest calls the first check of such a block, the others start, each in a thread and with fixtures of its own.
Fixtures of the session are shared: what they return must be safe in several threads.
Pytest reports each check in its turn: it waits for the result, and concludes in the main thread. A block has ended
before any other test starts, so that nothing runs beside a measurement.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import pytest

MARKER = "nixl_concurrent"
#: Fixtures that end a test with a verdict. In a thread they record what they are called with.
_CONCLUDE = frozenset({"verdict", "finding"})
_BLOCKS = pytest.StashKey["dict[str, _Check]"]()


class _ConcludedError(BaseException):
    """The body of a check has called ``verdict`` or ``finding``, which ends it."""


class _Check:
    """One check that runs in a thread.

    :param item: its test.
    :param shared: the values of its fixtures of the session.
    """

    def __init__(self, item: pytest.Function, shared: Mapping[str, Any]) -> None:
        self.item = item
        self._shared = shared
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._conclusion: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    def run(self) -> None:
        """Open the fixtures, run the body of the test, and close the fixtures; keep how it ended."""
        try:
            with contextlib.ExitStack() as stack:
                own: dict[str, Any] = {}
                arguments = {name: self._value(name, stack, own) for name in _arguments(self.item)}
                with contextlib.suppress(_ConcludedError):
                    self.item.function(**arguments)
        except BaseException as error:  # every end is told in the main thread
            self._error = error
        finally:
            self._ended.set()

    def conclude(self, fixtures: Mapping[str, Any]) -> None:
        """Wait for the end of the check, and end the test as its body has ended.

        :param fixtures: the values of ``verdict`` and ``finding`` in the main thread.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        if self._conclusion is not None:
            name, positional, named = self._conclusion
            fixtures[name](*positional, **named)

    def wait(self) -> None:
        """Wait for the end of the check. Each of its steps has a deadline of its own."""
        self._ended.wait()

    def _value(self, name: str, stack: contextlib.ExitStack, own: dict[str, Any]) -> Any:
        if name in _CONCLUDE:
            return self._recorder(name)
        if name == "request":
            return self.item._request
        if name in self._shared:
            return self._shared[name]
        if name not in own:
            made_by = _definition(self.item, name)
            call = made_by.func(**{each: self._value(each, stack, own) for each in made_by.argnames})
            if isinstance(call, Generator):
                own[name] = next(call)
                stack.callback(_finish, call)  # also after a failure, as pytest does
            else:
                own[name] = call
        return own[name]

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(*positional: Any, **named: Any) -> None:
            self._conclusion = name, positional, named
            raise _ConcludedError

        return record


def _finish(fixture: Generator[Any, None, None]) -> None:
    """Let a fixture clean up."""
    for _ in fixture:
        raise RuntimeError("a fixture yielded twice")


def before_setup(item: pytest.Item) -> None:
    """Let pytest set up nothing of a check that already runs; wait for all of them before any other test."""
    running = _running(item.session)
    check = running.get(item.nodeid)
    if check is None:
        for other in running.values():
            other.wait()
        running.clear()
    elif isinstance(item, pytest.Function):
        automatic = set(item._fixtureinfo.initialnames) - set(_arguments(item))
        for name in {*item.fixturenames} - automatic - _CONCLUDE:
            item.funcargs.setdefault(name, None)  # pytest sets up only what has no value


def call(item: pytest.Function) -> bool | None:
    """Conclude a check that already runs, or start the others of its block; True: there is nothing left to call."""
    running = _running(item.session)
    check = running.pop(item.nodeid, None)
    if check is not None:
        check.conclude({name: item.funcargs[name] for name in _CONCLUDE & item.funcargs.keys()})
        return True
    checks = []
    for each in _block(item):
        shared = _shared(each, item)
        if shared is None:
            break
        checks.append(_Check(each, shared))
    if checks:
        _start(checks, running)
    return None


def _running(session: pytest.Session) -> dict[str, _Check]:
    return session.stash.setdefault(_BLOCKS, {})


def _block(first: pytest.Item) -> list[pytest.Function]:
    """Return the marked checks that follow a marked one directly; none if they are to run one after the other."""
    config = first.config
    alone = hasattr(config, "workerinput") or config.getoption("usepdb") or config.getoption("trace")
    # These names are not of pytest's public API: with a pytest that lacks one, each check runs in its turn.
    alone = alone or not (
        hasattr(first, "_fixtureinfo") and hasattr(first, "_request") and hasattr(first.session, "_fixturemanager")
    )
    if alone or not _marked(first) or first not in first.session.items:
        return []
    found = []
    for item in first.session.items[first.session.items.index(first) + 1 :]:
        if not isinstance(item, pytest.Function) or not _marked(item):
            break
        found.append(item)
    return found


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None


def _waits(check: _Check) -> float:
    marker = check.item.get_closest_marker(MARKER)
    return 0.0 if marker is None else float(marker.kwargs.get("waits", 0))


def _start(checks: Sequence[_Check], running: dict[str, _Check]) -> None:
    """Run checks in a few threads, first those that wait longest.

    The threads end with pytest: what they have started is ended by the supervisor if pytest is interrupted.
    """
    running.update({check.item.nodeid: check for check in checks})
    todo: queue.SimpleQueue[_Check] = queue.SimpleQueue()
    for check in sorted(checks, key=_waits, reverse=True):
        todo.put(check)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                todo.get_nowait().run()

    for _ in range(min(len(checks), max(4, min(8, 2 * (os.cpu_count() or 1))))):
        threading.Thread(target=work, name="concurrent checks", daemon=True).start()


def _arguments(item: pytest.Function) -> tuple[str, ...]:
    return item._fixtureinfo.argnames


def _definition(item: pytest.Function, name: str) -> Any:
    return item._fixtureinfo.name2fixturedefs[name][-1]


def _shared(item: pytest.Function, first: pytest.Function) -> dict[str, Any] | None:
    """Return the values of the parameters and fixtures of a test that are not made for this test alone.

    :param first: the running test, which requests the fixtures; None is returned if it cannot see one of them.
    """
    found: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    todo = list(_arguments(item))
    while todo:
        name = todo.pop()
        if name in found or name in _CONCLUDE or name == "request":
            continue
        if name not in item._fixtureinfo.name2fixturedefs:
            return None  # pytest names the missing fixture
        made_by = _definition(item, name)
        if made_by.scope == "function":
            todo += made_by.argnames
            continue
        seen = first.session._fixturemanager.getfixturedefs(name, first)
        if not seen or seen[-1] is not made_by:
            return None
        found[name] = first._request.getfixturevalue(name)
    return found
