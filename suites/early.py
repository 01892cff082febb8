# SPDX-License-Identifier: Apache-2.0
"""Run checks that measure nothing at the same time: most of their time they wait, or use one processor.

Such a check has the marker ``nixl_early``. When pytest calls the first of them, those that follow start, a few at a
time, each in a thread and with arguments of its own, from the fixtures that are declared by :func:`fixture`. Pytest
reports each check in its turn: it waits for the end of its body, and gives its verdict in the main thread. A test of
a package that measures begins after all of them have ended.
"""

from __future__ import annotations

import inspect
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, TypeVar, cast

import pytest

from pytest_nixl import NixlAgent, Run, between_agents
from pytest_nixl.fixtures.agents import opened_agents
from pytest_nixl.fixtures.opened_etcd import opened_etcd, opened_etcd_proxies, opened_private_etcd

MARKER = "nixl_early"
#: The packages whose checks measure. Nothing else runs meanwhile.
_MEASURING = ("bandwidth", "control_path", "endurance", "kv_cache", "pattern")
#: Fixtures that end a test with a verdict. In a thread they keep what they are called with.
_CONCLUDE = ("verdict", "finding")
#: Fixtures of the session that the arguments of checks are made of. They are safe in several threads.
_SHARED = ("nixl_settings", "nixl_cluster", "nixl_etcd_server")
_RUNNING: pytest.StashKey[dict[str, EarlyCheck]] = pytest.StashKey()
#: The function that returns the value of a fixture of the session.
FIXTURES: pytest.StashKey[Callable[[str], Any]] = pytest.StashKey()

_F = TypeVar("_F", bound=Callable[..., Any])
#: By package: the functions of its fixtures that make arguments, by their names.
_fixtures: dict[str, dict[str, Callable[..., Any]]] = {}


class _ConcludedError(BaseException):
    """The body of a check has called ``verdict`` or ``finding``, which ends it."""


class CheckArguments:
    """The arguments of one check that runs beside others, each made when it is first taken.

    :param item: its test.
    :param shared: the values of the fixtures of the session.
    :param stack: ends what they are made of.
    """

    def __init__(self, item: pytest.Function, shared: Mapping[str, Any], stack: ExitStack) -> None:
        self.name = item.name
        self._package = _package(item)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        self._values = {**shared, **parameters}
        self._stack = stack

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._make(name)
        return self._values[name]

    def _make(self, name: str) -> Any:
        if name in _OPENED:
            return self._stack.enter_context(_OPENED[name](self))
        function = _fixtures_of(self._package)[name]
        arguments = {parameter: self[parameter] for parameter in inspect.signature(function).parameters}
        if inspect.isgeneratorfunction(function):
            return self._stack.enter_context(contextmanager(function)(**arguments))
        return function(**arguments)


def fixture(function: _F) -> _F:
    """Declare a fixture that a check that runs beside others takes, too. It takes fixtures by name, but no request."""
    _fixtures.setdefault(function.__globals__["__package__"], {})[function.__name__] = function
    declared: Any = pytest.fixture(function)
    return cast("_F", declared)


class EarlyCheck:
    """One check that runs in a thread."""

    def __init__(self, item: pytest.Function, shared: Mapping[str, Any]) -> None:
        self.item = item
        self._shared = shared
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._conclusion: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None

    def run(self) -> None:
        """Run the body of the test with arguments of its own; keep how it ended."""
        try:
            with ExitStack() as stack:
                own_fixtures = CheckArguments(self.item, self._shared, stack)
                names = inspect.signature(self.item.function).parameters
                arguments = {name: self._concluder(name) if name in _CONCLUDE else own_fixtures[name] for name in names}
                with suppress(_ConcludedError):
                    self.item.function(**arguments)
        except BaseException as error:  # it is raised in the main thread
            self._error = error
        finally:
            self._ended.set()

    def conclude(self) -> None:
        """Wait for the end of the body, and end the test as it has ended."""
        self.wait()
        if self._error is not None:
            raise self._error
        if self._conclusion is not None:
            name, positional, named = self._conclusion
            decide: Any = self.item.funcargs[name]
            decide(*positional, **named)

    def wait(self) -> None:
        """Wait for the end of the body. Each of its steps has a deadline of its own."""
        self._ended.wait()

    def _concluder(self, name: str) -> Callable[..., None]:
        def keep(*positional: Any, **named: Any) -> None:
            self._conclusion = name, positional, named
            raise _ConcludedError

        return keep


def before_setup(item: pytest.Item) -> None:
    """Let pytest make no arguments for a check that already runs; let a test that measures wait for all checks."""
    running = item.session.stash.setdefault(_RUNNING, {})
    if (check := running.get(item.nodeid)) is not None:
        makers = {*_OPENED, *_fixtures_of(_package(item))}
        for name in check.item.fixturenames:
            if name in makers:
                check.item.funcargs.setdefault(name, None)  # pytest sets up only what has no value
    elif _measures(item):
        for check in running.values():  # pytest did not call these: their setup failed
            check.wait()
        running.clear()


def call(item: pytest.Function) -> bool | None:
    """Conclude a check that already runs, or start those that follow a marked one.

    :returns: True: there is nothing left to call.
    """
    running = item.session.stash.setdefault(_RUNNING, {})
    if (check := running.pop(item.nodeid, None)) is not None:
        check.conclude()
        return True
    if not running and _marked(item) and _beside_each_other(item.config):
        items = list(_following(item))
        fixture, fixture_names = item.session.stash[FIXTURES], {name for item in items for name in item.fixturenames}
        shared = {name: fixture(name) for name in _SHARED if name in fixture_names}
        _start([EarlyCheck(item, shared) for item in items], running)
    return None


def _following(first: pytest.Function) -> Iterator[pytest.Function]:
    """Yield the marked checks after a marked one, up to the next test that measures."""
    items = first.session.items
    for item in items[items.index(first) + 1 :]:
        if _measures(item):
            return
        if isinstance(item, pytest.Function) and _marked(item):
            yield item


def _start(checks: Sequence[EarlyCheck], running: dict[str, EarlyCheck]) -> None:
    """Run checks in a few threads, first those that wait longest.

    The threads end with pytest if it is interrupted. The supervisor ends the processes that they have started.
    """
    running.update({check.item.nodeid: check for check in checks})
    todo: queue.SimpleQueue[EarlyCheck] = queue.SimpleQueue()
    for check in sorted(checks, key=_waits, reverse=True):
        todo.put(check)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                todo.get_nowait().run()

    for _ in range(min(len(checks), max(4, min(8, 2 * (os.cpu_count() or 1))))):
        threading.Thread(target=work, name="early checks", daemon=True).start()


def _waits(check: EarlyCheck) -> float:
    marker = check.item.get_closest_marker(MARKER)
    return 0.0 if marker is None else float(marker.kwargs.get("waits", 0))


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None


def _measures(item: pytest.Item) -> bool:
    name = _package(item).rpartition(".")[2]
    return name in _MEASURING and (name != "pattern" or bool(Run.of(item.config).settings.pattern))


def _package(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "module", None), "__package__", ""))


def _fixtures_of(package: str) -> dict[str, Callable[..., Any]]:
    return {**_fixtures.get(package.rpartition(".")[0], {}), **_fixtures.get(package, {})}


def _beside_each_other(config: pytest.Config) -> bool:
    """Whether checks may run beside each other: not if many processes would delay each other.

    A debugger has the terminal for itself, and of several backends each is asked in its turn.
    """
    run = Run.of(config)
    settings = run.settings
    single = len(between_agents(settings.backend)) == len(settings.progress_thread) == 1
    alone = hasattr(config, "workerinput") or config.getoption("usepdb") or config.getoption("trace")
    return single and not (alone or settings.extended or run.in_cluster)


@contextmanager
def _opened_agent(arguments: CheckArguments) -> Iterator[NixlAgent]:
    with opened_agents(arguments["nixl_settings"]) as agents:
        yield agents.start()


#: The plugin's fixtures that checks take, each with the context that it is.
_OPENED: dict[str, Callable[[CheckArguments], AbstractContextManager[Any]]] = {
    "nixl_etcd": lambda arguments: opened_etcd(arguments["nixl_etcd_server"], arguments.name),
    "nixl_private_etcd": lambda arguments: opened_private_etcd(arguments["nixl_settings"]),
    "nixl_etcd_proxy": lambda arguments: opened_etcd_proxies(),
    "nixl_agent": _opened_agent,
}
