# SPDX-License-Identifier: Apache-2.0
"""What a worker does of a command, in order: it loads the libraries of all backends, then creates the agent and each.

NIXL is a double, because a real one does not tell what was loaded before it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.worker import commands as worker_commands
from pytest_nixl.nixl.worker import devices, nixl_api, transfer
from pytest_nixl.nixl.worker.commands import CommandRefusedError, Commands
from pytest_nixl.nixl.worker.imported_files import import_file
from pytest_nixl.nixl.worker.memory import DramBuffer

#: The first object that a worker keeps.
AGENT = Ref(1, "agent")


class LoggedNixl:
    """An agent with these plugins, and backends, that write to one log what is done with them."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.fails = False

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "POSIX", "OWN"]

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        self.log.append(("create", plugin, parameters))

    def make_agent(self, name: str, **options: object) -> LoggedNixl:
        if self.fails:
            raise RuntimeError("no plugin")
        self.log.append(("agent", name, options))
        return self

    def backend(self, name: str) -> SimpleNamespace:
        def load(nixl: dict[str, str]) -> dict[str, str]:
            self.log.append(("load", name, nixl["nixl"]))
            return {f"library of {name}": "1.0"}

        @contextlib.contextmanager
        def creating() -> Iterator[None]:
            self.log.append(("begin", name))
            yield
            self.log.append(("end", name))

        return SimpleNamespace(load=load, creating=creating)


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> LoggedNixl:
    logged = LoggedNixl()
    monkeypatch.setattr(worker_commands, "BACKENDS", {name: logged.backend(name) for name in ("UCX", "POSIX", "GDS")})
    monkeypatch.setattr(nixl_api, "load", lambda: {"nixl": "1.5.1"})
    monkeypatch.setattr(nixl_api, "make_agent", logged.make_agent)
    monkeypatch.setattr(
        nixl_api, "backend_parameters", lambda *arguments: {**arguments[2], "threads": f"{arguments[3]}"}
    )
    monkeypatch.setattr(worker_commands, "ucx_version", lambda: "1.23.0")
    monkeypatch.setattr(worker_commands, "obstacle", lambda: "Yama forbids it")
    return logged


def create(backends: list[str], **more: Any) -> dict[str, Any]:
    options = {"progress_thread": True, "listen_thread": True, "listen_port": 5, "telemetry": True, **more}
    reply: dict[str, Any] = Commands(lambda: False).handle(
        "create_agent", {"name": "a", "backends": backends, **options}
    )
    return reply


def test_libraries_are_loaded_before_the_agent_and_each_backend_is_created_by_itself(
    nixl: LoggedNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    reply = create(["UCX", "POSIX", "OWN"], parameters={"POSIX": {"a": "b"}}, threads=3)
    options = {"progress_thread": True, "listen_thread": True, "listen_port": 5, "telemetry": True, "sync_mode": "auto"}
    assert nixl.log == [
        ("load", "UCX", "1.5.1"), ("load", "POSIX", "1.5.1"), ("agent", "a", options),
        ("begin", "UCX"), ("create", "UCX", {"threads": "3"}), ("end", "UCX"),
        ("begin", "POSIX"), ("create", "POSIX", {"a": "b", "threads": "3"}), ("end", "POSIX"),
        ("create", "OWN", {"threads": "3"}),
    ]  # fmt: skip
    assert reply["versions"] == {
        "library of UCX": "1.0", "library of POSIX": "1.0", "ucx": "1.23.0", "obstacle": "Yama forbids it",
    }  # fmt: skip


def test_only_an_agent_with_ucx_says_what_limits_its_transports(
    nixl: LoggedNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert create(["UCX"])["versions"]["ucx_tls"] == "tcp"
    assert create(["POSIX"])["versions"] == {"library of POSIX": "1.0", "ucx": "1.23.0"}


def test_a_plugin_that_this_nixl_lacks_is_named_with_those_that_it_has(nixl: LoggedNixl) -> None:
    with pytest.raises(NixlPluginError, match=r"^NIXL has no plugin GDS: it has UCX, POSIX, OWN"):
        create(["UCX", "GDS"])
    assert ("create", "UCX", {"threads": "0"}) in nixl.log


def test_an_agent_that_nixl_refuses_has_its_words(nixl: LoggedNixl) -> None:
    nixl.fails = True
    with pytest.raises(NixlPluginError, match=r"^NIXL cannot create an agent: no plugin"):
        create(["UCX"])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("eat", {}, "there is no command 'eat'"),
        ("cancel", {}, "there is no command 'cancel'"),
        ("serve", {"agent": AGENT}, "invalid arguments of 'serve': "),
        ("serve", {"agent": Ref(7, "agent"), "timeout": 1.0}, "this worker has created no agent with the number 7"),
        ("call", {"agent": AGENT, "method": "__init__", "arguments": [], "keywords": {}}, "is not a public method"),
        ("allocate", {"size": 1, "memory_type": "TAPE"}, "there are no buffers of type TAPE"),
        ("run", {"agent": AGENT, "function": "os.getpid", "arguments": {}}, "'os.getpid' is not module:function"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_refused_in_words(
    command: str, arguments: dict[str, Any], message: str
) -> None:
    commands = Commands(lambda: False)
    commands.keep(object(), "agent")
    with pytest.raises(CommandRefusedError) as caught:
        commands.handle(command, arguments)
    assert message in str(caught.value)


def test_a_gpu_becomes_the_current_one_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(devices, "device", lambda number: SimpleNamespace(activate=lambda: current.append(number)))
    Commands(lambda: False).handle("activate", {"device": 1})
    assert current == [1]


def test_a_buffer_that_is_forgotten_is_freed_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[DramBuffer] = []
    monkeypatch.setattr(DramBuffer, "free", lambda self: freed.append(self))
    commands = Commands(lambda: False)
    first, other = (commands.handle("allocate", {"size": 8, "memory_type": "DRAM"})["buffer"] for _ in range(2))
    buffer = commands.get(first)
    commands.handle("forget", {"objects": [first, first]})
    assert freed == [buffer]
    assert commands.get(other).size == 8
    with pytest.raises(CommandRefusedError, match="this buffer is no longer there"):
        commands.get(first)


def test_a_worker_greets_each_target_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[object] = []

    class Transfers:
        def __init__(self, agent: object, target: str, plain: object, tagged: object, **how: Any) -> None:
            remaining = how.pop("deadline") - time.monotonic()
            log.append((agent, target, plain, tagged, how, 0 < remaining <= 60))

        def greet(self) -> None:
            log.append("greet")

    monkeypatch.setattr(transfer, "Transfers", Transfers)
    commands = Commands(lambda: False)
    agent = commands.keep("agent", "agent")
    commands.handle("connect", {"agent": agent, "targets": ["a", "b"], "timeout": 60.0})
    how = {"depth": 0, "acknowledged": True, "notify_each": False}
    assert log == [("agent", "a", [], {}, how, True), "greet", ("agent", "b", [], {}, how, True), "greet"]


def test_contention_and_counters_are_of_the_timed_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, log = Commands(lambda: False), list[str]()

    class Known:
        """Contention or counters, whose result exists once the windows have been timed within it."""

        cores = 0.25

        def __init__(self, what: object) -> None:
            self._what = what

        def __enter__(self) -> list[str]:
            log.append(f"{self._what} begin")
            return [f"counted {self._what}"]

        def __exit__(self, *_: object) -> None:
            log.append(f"{self._what} end")

    def measure(initiator: object, *, around: contextlib.AbstractContextManager[object], **how: Any) -> dict[str, Any]:
        with around:
            log.append("timed")
        return {"windows": [how["iterations"]]}

    monkeypatch.setattr(worker_commands, "CpuContention", Known)
    monkeypatch.setattr("pytest_nixl.model.device_counters.CarrierBytes.counting", Known)
    monkeypatch.setattr(transfer, "measure", measure)
    monkeypatch.setattr(commands, "_prepared", lambda *_: None)
    how: dict[str, Any] = {"iterations": 7, "warmup": 0, "warmup_seconds": 0.0, "duration": 0.0}
    measurement = commands.do_measure(Ref(1, "transfers"), 1.0, "READ", [5], **how)
    assert measurement == {"windows": [7], "counted": ["counted READ"], "contention": 0.25}
    assert log == ["[5] begin", "READ begin", "timed", "READ end", "[5] end"]


def test_pytest_reads_the_table_of_commands_without_numpy() -> None:
    read = "import sys; from pytest_nixl.model.worker_commands import WORKER_COMMANDS; len(WORKER_COMMANDS)"
    subprocess.run([sys.executable, "-c", f"{read}; assert 'numpy' not in sys.modules"], check=True)


@pytest.mark.parametrize("marked", [True, False])
def test_a_module_of_a_file_is_imported_after_its_packages(tmp_path: Path, marked: bool) -> None:
    inner = tmp_path / "outer_of_test" / "inner"
    inner.mkdir(parents=True)
    (inner / "value.py").write_text("VALUE = 7\n")
    (inner / "test_x.py").write_text("from .value import VALUE\nfrom ..inner.value import VALUE as SAME\n")
    for folder in (inner, inner.parent) if marked else ():
        (folder / "__init__.py").touch()
    try:
        module = import_file("outer_of_test.inner.test_x", str(inner / "test_x.py"))
        assert module.VALUE == module.SAME == 7
        assert import_file("outer_of_test.inner.test_x", str(inner / "test_x.py")) is module
    finally:
        for name in [name for name in sys.modules if name.startswith("outer_of_test")]:
            del sys.modules[name]
