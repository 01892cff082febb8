# SPDX-License-Identifier: Apache-2.0
"""What a worker does of a command, in order: it loads the libraries of all backends, then creates the agent and each.

NIXL is a double, because a real one does not tell what was loaded before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock
from unittest.mock import call as mock_call

import pytest

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.worker import commands as worker_commands
from pytest_nixl.nixl.worker import devices, nixl_api, transfer
from pytest_nixl.nixl.worker.commands import CommandRefusedError, Commands
from pytest_nixl.nixl.worker.devices import WorkerGpu

#: The first object that a worker keeps.
AGENT = Ref(1, "agent")


class LoggedNixl:
    """An agent with these plugins, and backends, that write to one log what is done with them."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.fault: Exception | None = None

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "POSIX", "OWN"]

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        self.log.append(("create", plugin, parameters))

    def make_agent(self, name: str, **options: object) -> LoggedNixl:
        if self.fault is not None:
            raise self.fault
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
    versions = {
        "library of UCX": "1.0", "library of POSIX": "1.0", "ucx": "1.23.0", "obstacle": "Yama forbids it",
    }  # fmt: skip
    assert reply == {"agent": AGENT, "versions": versions}


def test_only_an_agent_with_ucx_says_what_limits_its_transports(
    nixl: LoggedNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp," * 60)
    assert create(["UCX"])["versions"]["ucx_tls"] == "tcp," * 50
    assert create(["POSIX"])["versions"] == {"library of POSIX": "1.0", "ucx": "1.23.0"}


def test_the_store_of_an_agent_is_tried_before_nixl_is_asked(nixl: LoggedNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_store(*values: object) -> SimpleNamespace:
        nixl.log.append(values)
        return SimpleNamespace(close=lambda: nixl.log.append("close"))

    monkeypatch.setattr(worker_commands, "objects", SimpleNamespace(open_store=open_store))
    monkeypatch.setattr(nixl, "get_plugin_list", lambda: ["UCX", "OBJ", "AZURE_BLOB"])
    container = {"container_name": "c"}
    create(["UCX", "AZURE_BLOB", "OBJ"], parameters={"AZURE_BLOB": container})
    assert nixl.log[:3] == [("AZURE_BLOB", container), "close", ("load", "UCX", "1.5.1")]


def test_a_plugin_that_this_nixl_lacks_is_named_with_those_that_it_has(nixl: LoggedNixl) -> None:
    with pytest.raises(NixlPluginError) as caught:
        create(["UCX", "GDS"])
    assert caught.value.reason == "NIXL has no plugin GDS: it has UCX, POSIX, OWN"
    assert caught.value.remedy == nixl_api.plugin_remedy()
    assert ("create", "UCX", {"threads": "0"}) in nixl.log


def test_an_agent_that_nixl_refuses_has_its_words(nixl: LoggedNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_api, "creation_remedy", lambda error, port: f"remedy of {error} at {port}")
    monkeypatch.setattr(worker_commands, "start_fault", lambda: ("too many threads", "end some"))
    busy = "thread: Resource temporarily unavailable"
    for error, reason, remedy in (
        ("no plugin", "no plugin", "remedy of no plugin at 5"),
        (busy, f"{busy}: too many threads", "end some"),
    ):
        nixl.fault = RuntimeError(error)
        with pytest.raises(NixlPluginError) as caught:
            create(["UCX"])
        assert (caught.value.reason, caught.value.remedy) == (f"NIXL cannot create an agent: {reason}", remedy)
    nixl.fault = ValueError("an empty name")
    with pytest.raises(nixl_api.NixlCallError, match=r"^an empty name$"):
        create(["UCX"])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("eat", {}, "there is no command 'eat'"),
        ("cancel", {}, "there is no command 'cancel'"),
        ("serve", {"agent": AGENT}, "invalid arguments of 'serve': "),
        ("serve", {"agent": Ref(7, "agent"), "timeout": 1.0}, "this worker has created no agent with the number 7"),
        ("allocate", {"size": 1, "memory_type": "TAPE"}, "no buffers of type TAPE: expected DRAM, VRAM, FILE or OBJ"),
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


class Raw:
    """An agent whose methods return what they get, with a kind of value each."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None

    def transfer(self, handle: object, message: bytes = b"", **more: Any) -> object:
        self.log.append(("transfer", handle, message, more))
        if self.fault is not None:
            raise self.fault
        return {1: ("DONE", [1.5, None, b"x", True], object())}

    def initialize_xfer(self, *values: object) -> int | None:
        self.log.append(("initialize_xfer", *values))
        return None if values[0] == "NONE" else 77

    def release_xfer_handle(self, handle: object) -> None:
        self.log.append(("release_xfer_handle", handle))

    def get_xfer_descs(self, *values: object) -> str:
        self.log.append(("get_xfer_descs", *values))
        return "a list"

    def _secret(self) -> None:
        self.log.append(("_secret",))


@pytest.fixture
def worker() -> tuple[Commands, Raw]:
    """Commands that keep an agent, then a handle, a list for transfers and an object that is no buffer."""
    commands, raw = Commands(lambda: False), Raw()
    for value, kind in (
        (raw, "agent"),
        ("handle", "nixl_xfer_handle"),
        ("places", "nixlXferDList"),
        ("it", "transfers"),
    ):
        commands.keep(value, kind)
    return commands, raw


HANDLE, PLACES = Ref(2, "nixl_xfer_handle"), Ref(3, "nixlXferDList")


def call(commands: Commands, method: str, *arguments: Any, **keywords: Any) -> Any:
    values = {"method": method, "arguments": list(arguments), "keywords": keywords}
    return commands.handle("call", {"agent": AGENT, **values})


@pytest.mark.parametrize(
    ("method", "values", "called", "answer"),
    [
        ("transfer", [HANDLE, b"x"], ("handle", b"x", {}), {"1": ["DONE", [1.5, None, b"x", True], Ref(5, "object")]}),
        ("initialize_xfer", ["WRITE", PLACES, PLACES, "t"], ("WRITE", "places", "places", "t"),
         Ref(5, "nixl_xfer_handle")),
        ("initialize_xfer", ["NONE", PLACES, PLACES], ("NONE", "places", "places"), None),
        ("get_xfer_descs", [[[1, 2, 3], [4, 5, 6]], "DRAM"], ([(1, 2, 3), (4, 5, 6)], "DRAM"), "a list"),
    ],
)  # fmt: skip
def test_a_method_of_nixl_gets_objects_and_tuples_and_its_answer_is_plain(
    worker: tuple[Commands, Raw], method: str, values: list[Any], called: tuple[Any, ...], answer: object
) -> None:
    commands, raw = worker
    assert call(commands, method, *values) == answer
    assert raw.log == [(method, *called)]


def test_an_empty_list_is_made_without_nixls_method_which_refuses_it(
    worker: tuple[Commands, Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, raw = worker
    monkeypatch.setattr(nixl_api, "empty_list", lambda agent, method, memory: f"{agent is raw} {method} {memory}")
    assert call(commands, "get_xfer_descs", [], "DRAM") == "True get_xfer_descs DRAM"
    assert raw.log == []


def test_a_handle_that_is_released_is_released_once(worker: tuple[Commands, Raw]) -> None:
    commands, raw = worker
    assert [call(commands, "release_xfer_handle", HANDLE) for _ in range(2)] == [None, None]
    assert raw.log == [("release_xfer_handle", "handle")]
    with pytest.raises(CommandRefusedError, match="this nixl_xfer_handle is no longer there: it was released, freed"):
        call(commands, "transfer", HANDLE)
    raw.fault = KeyError("no such operation")
    with pytest.raises(nixl_api.NixlCallError) as caught:
        call(commands, "transfer", commands.keep("other", "nixl_xfer_handle"))
    assert (caught.value.type_name, str(caught.value)) == ("KeyError", "'no such operation'")


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("transfer", [PLACES], "argument 1 is a nixlXferDList: expected nixl_xfer_handle"),
        ("transfer", [7], "argument 1 is not a reference to a nixl_xfer_handle"),
        ("transfer", [HANDLE, HANDLE], "argument 2 is a nixl_xfer_handle: expected no reference"),
        ("transfer", [Ref(4, "nixl_xfer_handle")], "object 4 of this worker is a transfers and not a nixl_xfer_handle"),
        ("transfer", [Ref(9, "nixl_xfer_handle")], "this worker has created no nixl_xfer_handle with the number 9"),
        ("fault", [], "'fault' is not a public method of NIXL's agent"),
        ("_secret", [], "'_secret' is not a public method of NIXL's agent"),
    ],
)
def test_a_call_that_would_crash_nixl_is_refused(
    worker: tuple[Commands, Raw], method: str, values: list[Any], message: str
) -> None:
    commands, raw = worker
    with pytest.raises(CommandRefusedError) as caught:
        call(commands, method, *values)
    assert str(caught.value) == message
    assert raw.log == []


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        ("nixlXferDList", "sort", "'sort' is not a method of a descriptor list (nixlXferDList)"),
        ("buffer", "append", "'append' is not a method of a descriptor list (buffer)"),
    ],
)
def test_only_a_descriptor_list_has_its_methods(
    worker: tuple[Commands, Raw], kind: str, method: str, message: str
) -> None:
    commands, _ = worker
    ref = commands.keep([], kind)
    with pytest.raises(CommandRefusedError, match=re.escape(message)):
        commands.handle("descriptor_list", {"descriptors": ref, "method": method, "arguments": []})


def test_a_buffer_is_filled_compared_registered_and_freed() -> None:
    commands, log = Commands(lambda: False), MagicMock()
    log.buffer.configure_mock(memory="VRAM", address=64, size=32, device=5)
    log.buffer.configure_mock(**{"kernel_seconds.return_value": 0.5, "read.return_value": b"bytes"})
    agent, ref = commands.keep(log.agent, "agent"), commands.keep(log.buffer, "buffer")
    other = commands.keep("another", "buffer")
    parts = [[1, 2, 3], [4, 5, 6]]
    log.buffer.compare.side_effect = [None, {"wrong_bytes": 1}]
    steps: dict[str, dict[str, Any]] = {
        "fill": {"parts": parts, "inverted": True}, "compare": {"parts": parts}, "kernel_seconds": {},
        "read": {"offset": 1, "size": 2}, "write": {"offset": 1, "data": b"x"}, "probe_objects": {},
        "register": {"agent": agent},
    }  # fmt: skip
    answers = [commands.handle(name, {"buffer": ref, **values}) for name, values in steps.items()]
    for count in (0, 3):
        commands.handle("prepare_objects", {"agent": agent, "buffer": ref, "block": 8, "count": count})
    commands.handle("add_agents", {"agent": agent, "metadata": [b"1", b"2"]})
    commands.handle("forget", {"objects": [ref, ref, agent]})
    assert answers == [None, [None, {"wrong_bytes": 1}], 0.5, b"bytes", None, None, Ref(4, "MagicMock")]
    buffer = mock_call.buffer
    assert log.mock_calls == [
        buffer.fill(1, 2, 3, inverted=True), buffer.fill(4, 5, 6, inverted=True), buffer.compare(1, 2, 3),
        buffer.compare(4, 5, 6), buffer.kernel_seconds(), buffer.read(1, 2), buffer.write(1, b"x"),
        buffer.name_fault(), buffer.activate(), mock_call.agent.register_memory([(64, 32, 5, "")], "VRAM"),
        buffer.release(log.agent), buffer.prepare(log.agent, 8, 3), mock_call.agent.add_remote_agent(b"1"),
        mock_call.agent.add_remote_agent(b"2"), buffer.free(),
    ]  # fmt: skip
    assert commands.get(other) == "another"
    with pytest.raises(CommandRefusedError, match="this buffer is no longer there"):
        commands.get(ref)


@pytest.mark.parametrize(
    ("memory_type", "values", "expected"),
    [
        ("DRAM", {}, mock_call.DramBuffer(8, huge=True)),
        ("DRAM", {"pages": "base"}, mock_call.DramBuffer(8, huge=False)),
        ("VRAM", {"device": 3}, mock_call.VramBuffer(8, 3)),
        ("FILE", {"directory": "/d", "alignment": 16}, mock_call.FileBuffer(8, "/d", 16)),
    ],
)
def test_a_buffer_is_of_its_memory_type(
    monkeypatch: pytest.MonkeyPatch, memory_type: str, values: dict[str, Any], expected: Any
) -> None:
    modules, buffer = MagicMock(), SimpleNamespace(address=64, device=5)
    for module in ("memory", "vram", "files"):
        monkeypatch.setattr(worker_commands, module, modules)
    for kind in (modules.DramBuffer, modules.VramBuffer, modules.FileBuffer):
        kind.return_value = buffer
    answer = Commands(lambda: False).handle("allocate", {"size": 8, "memory_type": memory_type, **values})
    assert answer == {"buffer": Ref(1, "buffer"), "address": 64, "device": 5}
    assert modules.mock_calls == [expected]


@pytest.mark.parametrize("stored", [False, True])
def test_a_row_of_storage_syncs_its_file_and_watches_its_objects(
    worker: tuple[Commands, Raw], monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    commands, raw = worker
    prepare = MagicMock()
    monkeypatch.setattr(worker_commands, "prepare_row", prepare)
    file, objects = SimpleNamespace(sync="sync"), SimpleNamespace()
    storage, watched = (commands.keep(end, "buffer") if stored else None for end in (file, objects))
    sides = [[64, "DRAM", 0], [32, "VRAM", 1]]
    row = {"op": "READ", "target": "t", "plugin": "P", "sides": sides}
    plain = {"block": 1, "batch": 2, "count": 3, "depth": 4}
    plain |= {"acknowledged": False, "notify_each": True, "announced": False}
    commands.handle("row_prepare", {"agent": AGENT, **row, **plain, "storage": storage, "objects": watched})
    extra = {"sync": "sync", "watch": objects} if stored else {"sync": None, "watch": None}
    prepare.assert_called_once_with(raw, *row.values(), **plain, **extra)


def test_transfers_and_targets_have_the_deadline_of_their_command(
    worker: tuple[Commands, Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, raw = worker
    prepared, serve = SimpleNamespace(), MagicMock(return_value=4)
    ref, buffer = commands.keep(prepared, "transfers"), commands.keep("the buffer", "buffer")
    fields = {"size": 8, "seed": 7, "receives": True, "new_patterns": False}
    end = {"buffer": buffer, **fields}
    monkeypatch.setattr(transfer, "RowEnd", lambda **named: named)
    monkeypatch.setattr(
        transfer, "move_each", lambda *values: {"corrupt": values[2], "first": None, "values": values[:2]}
    )
    monkeypatch.setattr(transfer, "serve", serve)
    moved = commands.handle("move_each", {"transfers": ref, "timeout": 600.0, "count": 5, "end": end})
    assert moved == {"corrupt": 5, "first": None, "values": (prepared, {"buffer": "the buffer", **fields})}
    assert 500 < prepared.deadline - time.monotonic() <= 600
    for more, idle, row_end in (({"idle": True, "end": end}, True, moved["values"][1]), ({}, False, None)):
        assert commands.handle("serve", {"agent": AGENT, "timeout": 60.0, **more}) == 4
        named = dict(serve.call_args.kwargs)
        assert 0 < named.pop("deadline") - time.monotonic() <= 60
        assert (serve.call_args.args, named) == (
            (raw,),
            {"idle": idle, "end": row_end, "cancelled": commands.cancelled},
        )


def test_a_worker_says_which_gpus_it_sees_or_why_it_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(devices, "device", lambda number: SimpleNamespace(activate=lambda: current.append(number)))
    commands = Commands(lambda: False)
    commands.handle("activate", {"device": 1})
    assert current == [1]
    gpu = WorkerGpu(0, "H", "u", "0000:01:00.0")
    monkeypatch.setattr(devices, "vendor", lambda: SimpleNamespace(name="cuda", devices=lambda: [gpu]))
    gpus = [{"number": 0, "name": "H", "uuid": "u", "pci": "0000:01:00.0"}]
    assert commands.handle("devices", {}) == {"devices": gpus, "by": "cuda", "why": "", "remedy": ""}

    def refuse() -> None:
        raise NotApplicableError("there is no driver", "install it")

    monkeypatch.setattr(devices, "vendor", refuse)
    refusal = {"devices": [], "by": "", "why": "there is no driver", "remedy": "install it"}
    assert commands.handle("devices", {}) == refusal


def test_a_program_is_kept_by_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, process = MagicMock(), SimpleNamespace(pid=99)
    tools.find.return_value, tools.start.return_value, tools.look.return_value = {"path": "/p"}, process, {"from": 5}
    monkeypatch.setattr(worker_commands, "Tools", lambda cancelled: tools)
    commands, program = Commands(lambda: False), {"program": Ref(1, "program")}
    started = {"tool": "nixlbench", "arguments": ["-p"], "variables": {"A": None}}
    assert commands.handle("tool_find", {"tool": "nixlbench"}) == {"path": "/p"}
    assert commands.handle("tool_start", started) == {**program, "pid": 99}
    assert commands.handle("tool_look", {**program, "seen": 5, "timeout": 2.0}) == {"from": 5}
    commands.handle("tool_listens", {**program, "port": 7})
    commands.handle("tool_end", {**program, "number": 9})
    assert tools.mock_calls == [
        mock_call.find("nixlbench"), mock_call.start(*started.values()), mock_call.look(process, 5, 2.0),
        mock_call.listens(process, 7), mock_call.end(process, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("loads", [False, True])
def test_a_worker_greets_with_its_process_and_takes_the_path_of_pytest(
    monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    monkeypatch.setattr(nixl_api, "load", lambda: {"nixl": "1.5.1"})
    monkeypatch.setattr(sys, "path", ["a", "b"])
    answer = Commands(lambda: False).handle("hello", {"path": ["c", "b", "d"], "loads": loads})
    assert sys.path == ["a", "b", "c", "d"]
    process = {"pid": os.getpid(), "python": platform.python_version(), "host": platform.node()}
    assert answer == {**process, **({"nixl": "1.5.1"} if loads else {})}


def test_a_function_gets_the_agent_and_the_objects_of_references(worker: tuple[Commands, Raw], tmp_path: Path) -> None:
    commands, raw = worker
    (tmp_path / "function_of_test.py").write_text("def of(agent, **given):\n    return type(agent).__name__, given\n")
    run = {"agent": AGENT, "arguments": {"handle": HANDLE, "count": 3}, "file": str(tmp_path / "function_of_test.py")}
    try:
        answer = commands.handle("run", {**run, "function": "function_of_test:of"})
    finally:
        sys.modules.pop("function_of_test", None)
    assert answer == ("Raw", {"handle": "handle", "count": 3})
    assert raw.log == []
    assert 0 < commands.handle("free_port", {}) < 65536


def test_a_worker_greets_each_target_before_its_deadline(
    worker: tuple[Commands, Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, raw = worker
    transfers = MagicMock()
    monkeypatch.setattr(transfer, "Transfers", transfers)
    commands.handle("connect", {"agent": AGENT, "targets": ["a", "b"], "timeout": 60.0})
    assert all(0 < made.kwargs["deadline"] - time.monotonic() <= 60 for made in transfers.call_args_list)
    how = {"depth": 0, "acknowledged": True, "notify_each": False, "deadline": ANY}
    greeting = mock_call().greet()
    assert transfers.mock_calls == [
        mock_call(raw, "a", [], {}, **how),
        greeting,
        mock_call(raw, "b", [], {}, **how),
        greeting,
    ]


@pytest.mark.parametrize("longest", [2.0, None])
def test_contention_and_counters_are_of_the_timed_windows(
    monkeypatch: pytest.MonkeyPatch, longest: float | None
) -> None:
    commands, log, prepared = Commands(lambda: False), list[Any](), SimpleNamespace()

    class Counted:
        """Contention or counters, whose result exists once the windows have been timed within it."""

        cores = 0.25

        def __init__(self, subject: object) -> None:
            self._subject = subject

        def __enter__(self) -> list[str]:
            log.append(f"{self._subject} begin")
            return [f"counted {self._subject}"]

        def __exit__(self, *_: object) -> None:
            log.append(f"{self._subject} end")

    def measure(initiator: object, *, around: contextlib.AbstractContextManager[object], **how: Any) -> dict[str, Any]:
        with around:
            log.append((initiator is prepared, how))
        return {"windows": [7]}

    monkeypatch.setattr(worker_commands, "CpuContention", Counted)
    monkeypatch.setattr("pytest_nixl.model.device_counters.CarrierBytes.counting", Counted)
    monkeypatch.setattr(transfer, "measure", measure)
    how: dict[str, Any] = {"iterations": 7, "warmup": 6, "warmup_seconds": 5.0, "duration": 4.0, "decisive_rate": 3.0}
    values = {"transfers": commands.keep(prepared, "transfers"), "timeout": 60.0, "op": "READ", "own": [5]}
    measurement = commands.handle("measure", {**values, **how, "longest": longest})
    assert measurement == {"windows": [7], "counted": ["counted READ"], "contention": 0.25}
    how |= {"end": None, "longest": longest or math.inf}
    assert log == ["[5] begin", "READ begin", (True, how), "READ end", "[5] end"]


def test_pytest_reads_the_table_of_commands_without_numpy() -> None:
    read = "import sys; from pytest_nixl.model.worker_commands import WORKER_COMMANDS; len(WORKER_COMMANDS)"
    subprocess.run([sys.executable, "-c", f"{read}; assert 'numpy' not in sys.modules"], check=True)
