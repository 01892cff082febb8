# SPDX-License-Identifier: Apache-2.0
"""Which checks run before their turn, with which arguments, and when pytest waits for them. Runs of pytest with them
are in ``tests/integration/test_early.py``; here pytest's items are doubles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_nixl.model.settings import Settings
from suites import early
from suites.early import CheckArguments, EarlyCheck

#: Fixtures of a package of suites, and of one suite in it.
OF_ALL = """
def settings(nixl_settings):
    return f"of {nixl_settings}"

def seconds():
    return 30
"""
OF_SUITE = """
def seconds():
    LOG.append("seconds")
    return 60

def pair(settings, seconds, backend):
    LOG.append("pair opens")
    yield f"{backend}, {settings}, within {seconds} s"
    LOG.append("pair ends")
"""
LOG: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def packages() -> None:
    """Declare the fixtures of ``own.suites`` and of ``own.suites.faults``."""
    for package, text in (("own.suites", OF_ALL), ("own.suites.faults", OF_SUITE)):
        functions: dict[str, Any] = {"__package__": package, "LOG": LOG}
        exec(text, functions)
        for function in [value for value in functions.values() if callable(value)]:
            early.fixture(function)


@pytest.fixture
def log() -> list[str]:
    LOG.clear()
    return LOG


@pytest.fixture
def run(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that may have checks beside each other."""
    run = SimpleNamespace(settings=make_settings(backend=("POSIX", "UCX"), pattern=None), in_cluster=False)
    monkeypatch.setattr(early, "Run", SimpleNamespace(of=lambda config: run))
    return run


class Session:
    """A session of pytest with the items of :meth:`item`."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.stash: Any = {early.FIXTURES: lambda name: f"value of {name}"}
        self.options: dict[str, bool] = {"usepdb": False, "trace": False}
        self.config: Any = SimpleNamespace(getoption=self.options.__getitem__)

    def item(
        self,
        name: str,
        function: Callable[..., None] = lambda: None,
        *,
        suite: str | None = "own.suites.faults",
        waits: float | None = 0,
        fixtures: tuple[str, ...] = (),
        parameters: dict[str, Any] | None = None,
        of: type[pytest.Item] = pytest.Function,
    ) -> Any:
        """Return an item that has the marker of early checks unless ``waits`` is None."""
        marker = None if waits is None else SimpleNamespace(kwargs={"waits": waits} if waits else {})
        item = MagicMock(spec=of, **{"get_closest_marker.side_effect": {"nixl_early": marker}.get})
        item.name, item.nodeid, item.session, item.config = name, f"t.py::{name}", self, self.config
        item.function, item.fixturenames, item.funcargs = function, fixtures, {}
        item.module = SimpleNamespace(__package__=suite)
        if parameters is not None:
            item.callspec = SimpleNamespace(params=parameters)
        self.items.append(item)
        return item


@pytest.fixture
def session() -> Session:
    return Session()


class Threads:
    """Threads that begin when the test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.targets: list[Callable[[], None]] = []
        self.options: list[tuple[str, bool]] = []
        monkeypatch.setattr(early, "threading", SimpleNamespace(Thread=self.thread, Event=threading.Event))

    def thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> Any:
        self.options.append((name, daemon))
        return SimpleNamespace(start=lambda: self.targets.append(target))

    def run(self) -> None:
        for target in self.targets:
            target()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_an_argument_is_made_once_from_parameters_shared_values_and_the_fixtures_of_its_package(
    log: list[str], session: Session
) -> None:
    """A fixture of a suite hides that of all suites; what a fixture does after its ``yield`` happens at the end."""
    shared = {"nixl_settings": "the run", "backend": "UCX"}
    with ExitStack() as stack:
        arguments = CheckArguments(session.item("test", parameters={"backend": "LIBFABRIC"}), shared, stack)
        assert arguments.name == "test"
        assert arguments["nixl_settings"] == "the run"
        assert log == []
        assert [arguments["pair"] for _ in range(2)] == ["LIBFABRIC, of the run, within 60 s"] * 2
        assert log == ["seconds", "pair opens"]
    assert log == ["seconds", "pair opens", "pair ends"]
    of_all = CheckArguments(session.item("test", suite="own.suites"), shared, ExitStack())
    assert (of_all["seconds"], of_all["settings"], of_all["backend"]) == (30, "of the run", "UCX")
    other = CheckArguments(session.item("test", suite="own.suites.other"), shared, ExitStack())
    assert other["seconds"] == 30


def test_the_fixtures_of_the_plugin_are_opened_for_a_check_and_closed_after_it(
    log: list[str], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(name: str, value: Any) -> Any:
        @contextmanager
        def context(*arguments: object) -> Iterator[Any]:
            log.append(f"{name}{arguments}")
            yield value
            log.append(f"{name} closes")

        return context

    agents = SimpleNamespace(start=lambda: "an agent")
    for name, value in (
        ("opened_etcd", "an etcd"),
        ("opened_private_etcd", "a private etcd"),
        ("opened_etcd_proxies", "proxies"),
        ("opened_agents", agents),
    ):
        monkeypatch.setattr(early, name, opens(name, value))
    shared = {"nixl_settings": "settings", "nixl_etcd_server": "a server"}
    names = ["nixl_etcd", "nixl_private_etcd", "nixl_etcd_proxy", "nixl_agent"]
    with ExitStack() as stack:
        arguments = CheckArguments(session.item("a-test"), shared, stack)
        assert [arguments[name] for name in names] == ["an etcd", "a private etcd", "proxies", "an agent"]
        assert log == [
            "opened_etcd('a server', 'a-test')",
            "opened_private_etcd('settings',)",
            "opened_etcd_proxies()",
            "opened_agents('settings',)",
        ]
    assert log[4:] == [f"opened_{name} closes" for name in ("agents", "etcd_proxies", "private_etcd", "etcd")]


def conclude_by_verdict(pair: str, verdict: Callable[..., None]) -> None:
    LOG.append(pair)
    verdict("an argument", affects=True)
    raise AssertionError("it has ended")


def conclude_by_finding(pair: str, finding: Callable[..., None]) -> None:
    conclude_by_verdict(pair, finding)


@pytest.mark.parametrize(("name", "body"), [("verdict", conclude_by_verdict), ("finding", conclude_by_finding)])
def test_a_check_ends_with_the_verdict_or_the_finding_that_its_body_called(
    name: str, body: Callable[..., None], log: list[str], session: Session
) -> None:
    check = EarlyCheck(session.item("test", body), {"nixl_settings": "the run", "backend": "UCX"})
    check.run()
    assert log == ["seconds", "pair opens", "UCX, of the run, within 60 s", "pair ends"]
    decide = check.item.funcargs[name] = MagicMock()
    check.conclude()
    decide.assert_called_once_with("an argument", affects=True)


@pytest.mark.parametrize("error", [None, OSError("it failed"), KeyboardInterrupt()])
def test_a_check_without_a_conclusion_passes_or_raises_what_its_body_raised(
    error: BaseException | None, session: Session
) -> None:
    def body() -> None:
        if error is not None:
            raise error

    check = EarlyCheck(session.item("test", body), {})
    check.run()
    check.wait()
    if error is None:
        check.conclude()
        return
    with pytest.raises(type(error)) as caught:
        check.conclude()
    assert caught.value is error


def test_a_conclusion_waits_for_the_end_of_the_body(session: Session) -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), list[str]()

    def body() -> None:
        began.set()
        assert goes_on.wait(60)
        ended.append("body")

    check = EarlyCheck(session.item("test", body), {})

    def conclude() -> None:
        check.conclude()
        ended.append("conclusion")

    worker, waiter = threading.Thread(target=check.run), threading.Thread(target=conclude)
    worker.start()
    assert began.wait(60)
    waiter.start()
    goes_on.set()
    worker.join(60)
    waiter.join(60)
    assert ended == ["body", "conclusion"]


@pytest.mark.usefixtures("run")
def test_the_checks_that_follow_start_and_each_is_concluded_in_its_turn(
    log: list[str], session: Session, threads: Threads
) -> None:
    """Those that wait longest start first; what has no marker, is no function or follows a measurement does not."""

    def conclude_third(verdict: Callable[..., None]) -> None:
        log.append("third")
        verdict("a judgement")

    def check(name: str, waits: float | None = 0, **options: Any) -> Any:
        return session.item(name, lambda: log.append(name), waits=waits, **options)

    check("before")
    first = check("first", fixtures=("nixl_etcd_server",))
    second = check("second", fixtures=("nixl_settings", "nixl_agent", "other"))
    third = session.item("third", conclude_third, fixtures=("verdict",))
    plain = check("plain", None)
    check("of no function", of=pytest.Item)
    slow, slower = check("slow", 2.5), check("slower", 3, fixtures=("other", "nixl_cluster"))
    check("measures", suite="suites.bandwidth", fixtures=("nixl_etcd_server",))
    check("behind")
    values: list[str] = []
    session.stash[early.FIXTURES] = values.append
    assert early.call(first) is None
    assert values == ["nixl_settings", "nixl_cluster"]
    assert threads.options == [("early checks", True)] * 4
    threads.run()
    assert log == ["slower", "slow", "second", "third"]
    assert early.call(plain) is None
    assert early.call(first) is None, "they have started already"
    decide = third.funcargs["verdict"] = MagicMock()
    for item in (second, third, slow, slower):
        early.before_setup(item)
        assert early.call(item) is True
        assert decide.called is (item is not second)
    assert early.call(slower) is None, "it was concluded"
    assert log == ["slower", "slow", "second", "third"]
    assert len(threads.targets) == 4


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("processors", "checks", "count"),
    [(None, 9, 4), (1, 9, 4), (2, 9, 4), (3, 9, 6), (4, 9, 8), (64, 9, 8), (64, 2, 2), (1, 0, 0)],
)
def test_a_few_threads_run_the_checks(
    processors: int | None,
    checks: int,
    count: int,
    session: Session,
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early, "os", SimpleNamespace(cpu_count=lambda: processors))
    for number in range(checks + 1):
        session.item(f"test-{number}")
    assert early.call(session.items[0]) is None
    assert len(threads.targets) == count


@pytest.mark.usefixtures("run")
def test_pytest_makes_no_arguments_for_a_check_that_runs(session: Session, threads: Threads) -> None:
    names = (
        "verdict",
        "nixl_etcd",
        "nixl_private_etcd",
        "nixl_etcd_proxy",
        "nixl_agent",
        "settings",
        "pair",
        "seconds",
    )
    first, check = session.item("first", fixtures=names), session.item("check", fixtures=names)
    early.call(first)
    check.funcargs["pair"] = "a value"
    early.before_setup(check)
    assert check.funcargs == {**dict.fromkeys(names[1:]), "pair": "a value"}
    early.before_setup(first)
    assert first.funcargs == {}
    threads.run()


@pytest.mark.parametrize(
    ("suite", "pattern", "measures"),
    [
        *((f"suites.{name}", None, True) for name in ("bandwidth", "control_path", "endurance", "kv_cache")),
        ("suites.pattern", "incast:3", True),
        ("suites.pattern", None, False),
        ("suites.faults", "incast:3", False),
        ("bandwidth", None, True),
        ("bandwidth.own", None, False),
        ("", None, False),
        (None, None, False),
    ],
)
def test_a_test_that_measures_waits_for_all_checks(
    suite: str | None,
    pattern: str | None,
    measures: bool,
    session: Session,
    threads: Threads,
    run: Any,
    make_settings: Callable[..., Settings],
) -> None:
    run.settings = make_settings(pattern=pattern)
    started = [session.item(f"check-{number}", fixtures=("seconds",)) for number in range(4)]
    test = session.item("test", suite=suite, waits=None)
    early.call(started[0])
    threads.run()
    early.before_setup(test)
    for item in started:
        early.before_setup(item)
    arguments = {} if measures else {"seconds": None}  # pytest makes no argument of a check that runs
    assert [item.funcargs for item in started] == [{}, *[arguments] * 3]


@pytest.mark.usefixtures("run")
def test_a_test_that_measures_begins_after_the_end_of_each_check(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(EarlyCheck, "wait", lambda check: waited.append(check.item.name))
    monkeypatch.setattr(early, "threading", MagicMock())
    names = [f"check-{number}" for number in range(4)]
    for name in names:
        session.item(name)
    early.call(session.items[0])
    early.before_setup(session.item("test", suite="suites.bandwidth"))
    assert waited == names[1:]


@pytest.mark.parametrize(
    ("settings", "options", "in_cluster", "worker", "starts"),
    [
        ({}, {}, False, False, True),
        ({"backend": ("LIBFABRIC",), "level": "quick"}, {}, False, False, True),
        ({"backend": ("UCX", "LIBFABRIC")}, {}, False, False, False),
        ({"backend": ("POSIX",)}, {}, False, False, False),
        ({"progress_thread": ("on", "off")}, {}, False, False, False),
        ({"backend": ("UCX", "LIBFABRIC"), "progress_thread": ("on", "off")}, {}, False, False, False),
        ({"level": "extended"}, {}, False, False, False),
        ({}, {"usepdb": True}, False, False, False),
        ({}, {"trace": True}, False, False, False),
        ({}, {}, True, False, False),
        ({}, {}, False, True, False),
    ],
)
def test_checks_start_early_unless_many_processes_or_a_debugger_would_be_in_the_way(
    settings: dict[str, Any],
    options: dict[str, bool],
    in_cluster: bool,
    worker: bool,
    starts: bool,
    session: Session,
    threads: Threads,
    run: Any,
    make_settings: Callable[..., Settings],
) -> None:
    run.settings, run.in_cluster = make_settings(**{"backend": ("UCX",), **settings}), in_cluster
    session.options.update(options)
    if worker:
        session.config.workerinput = {}
    first, _ = session.item("first"), session.item("second")
    assert early.call(first) is None
    assert len(threads.targets) == starts


@pytest.mark.usefixtures("run")
def test_only_a_marked_check_starts_those_that_follow(session: Session, threads: Threads) -> None:
    plain, _, _ = session.item("plain", waits=None), session.item("first"), session.item("second")
    assert early.call(plain) is None
    assert threads.targets == []
