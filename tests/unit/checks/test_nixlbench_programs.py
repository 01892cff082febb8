# SPDX-License-Identifier: Apache-2.0
"""Which ranks have which nixlbench, why a row cannot be measured with it, and how its processes are told to meet.

Ranks, their programs and the etcd are doubles; ``test_nixlbench_driver`` and the suites run real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.nixlbench import programs
from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.driver import NixlbenchError
from pytest_nixl.checks.nixlbench.programs import Nixlbench
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.hosts import LocalHost

ROW = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536).measured_by("nixlbench")
FLAGS = [
    "backend", "op_type", "initiator_seg_type", "target_seg_type", "start_block_size", "max_block_size", "num_iter",
    "start_batch_size", "max_batch_size", "warmup_iter", "total_buffer_size", "runtime_type", "etcd_endpoints",
    "benchmark_group",
]  # fmt: skip
ASIO = ["asio_address", "asio_port"]


class Rank:
    """A double of a rank's host, its worker and its nixlbench with some flags; None: it has no nixlbench."""

    def __init__(self, rank: int, flags: list[str] | None) -> None:
        self.rank, self.flags, self.timeout, self.alive, self.closed = rank, flags, 1.0, True, 0
        self.versions = {"host": f"h{rank}"}

    def start(self, *_: object) -> Rank:
        return self

    def call(self, name: str, **_: object) -> Any:
        if name == "tool_find":
            return None if self.flags is None else {"path": f"/b{self.rank}/nixlbench", "ucx": f"1.{self.rank}"}
        if name == "tool_start":
            return {"program": self, "pid": 1}
        text = "".join(f"    -{flag} (text)\n" for flag in self.flags or ())
        return {"from": 0, "bytes": text.encode(), "more": False, "code": 1, "cost": {}}

    def close(self) -> None:
        self.closed += 1


class Server:
    """A double of the run's etcd, and of what starts it."""

    def __init__(self, kind: str = "embedded", endpoint: str = "http://e:1") -> None:
        self.kind, self.endpoint = kind, endpoint
        self.checked: list[bool] = []

    def check(self, *, stopped: bool) -> None:
        self.checked.append(stopped)
        raise EtcdError("it has ended")

    def server(self) -> Server:
        return self

    def client(self) -> Any:
        return nullcontext(self)


def bench(
    settings: Settings,
    *flags: list[str] | None,
    server: Server | None = None,
    several: bool = False,
    group: object = None,
) -> Nixlbench:
    """Return nixlbench on ranks with these flags."""
    cluster = SimpleNamespace(
        hosts=[Rank(rank, given) for rank, given in enumerate(flags)], several=several, etcd=lambda: group,
        names=["rank 0 on a", "rank 1 on b"], ask=lambda what: {"address": ["10.0.0.1", "127.0.0.2"]}[what],
    )  # fmt: skip
    return Nixlbench(settings, cast("Any", cluster), cast("Any", server or Server()), cast("Any", lambda: "supervisor"))


SECURED = (
    "nixlbench cannot use this run's etcd, because nixlbench speaks plaintext and sends no password; give "
    "--nixl-nixlbench-runtime=ASIO if this nixlbench has it"
)
NO_DRIVER = "DRAM:VRAM needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)"
NO_PROGRAM = "has no nixlbench on its PATH, and --nixl-nixlbench PATH names none"
WITH_ASIO = [*FLAGS, *ASIO]


@pytest.mark.parametrize(
    ("row", "changes", "flags", "ranks", "obstacle"),
    [
        ({}, {}, (WITH_ASIO, WITH_ASIO), {}, None),
        ({}, {}, (FLAGS, FLAGS), {}, None),
        ({"memory": MemoryPair("DRAM", "FILE"), "backend": "nixlbench:POSIX"}, {}, (None, None), {},
         "POSIX moves bytes to storage, but nixlbench is run between two ranks"),
        ({}, {}, (FLAGS, None), {}, f"this host {NO_PROGRAM}"),
        ({}, {}, (None, FLAGS), {"several": True}, f"rank 0 {NO_PROGRAM}"),
        ({}, {}, (FLAGS, None), {"several": True}, f"rank 1 {NO_PROGRAM}"),
        *(({"depth": 2}, {}, flags, {}, "this nixlbench has no --pipeline_depth, which rows of depth 2 need")
          for flags in ((FLAGS, [*FLAGS, "pipeline_depth"]), ([*FLAGS, "pipeline_depth"], FLAGS))),
        ({"depth": 2}, {}, ([*FLAGS, "pipeline_depth"],) * 2, {}, None),
        ({}, {"nixlbench_runtime": "ASIO"}, (WITH_ASIO, WITH_ASIO), {}, None),
        ({}, {"nixlbench_runtime": "ASIO"}, (WITH_ASIO, FLAGS), {},
         "this nixlbench has no ASIO runtime: give --nixl-nixlbench-runtime=ETCD"),
        *(({}, changes, (FLAGS, FLAGS), {"server": Server("external", endpoint)}, SECURED) for changes, endpoint in (
            ({"etcd_user": "u"}, "http://e:1"), ({"etcd_cacert": "c"}, "http://e:1"), ({"etcd_cert": "c"}, "http://e:1"),
            ({"etcd": "http://u:p@e:1"}, "http://e:1"), ({}, "https://e:1"))),
        ({}, {"etcd_user": "u"}, (FLAGS, FLAGS), {}, None),
        ({}, {}, (FLAGS, FLAGS), {"server": Server("external")}, None),
        ({}, {}, (FLAGS, FLAGS), {"several": True}, SECURED),
        ({}, {}, (FLAGS, FLAGS), {"several": True, "group": "an etcd"}, None),
        ({}, {}, (WITH_ASIO, WITH_ASIO), {"several": True}, None),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_measured_has_a_reason(
    row: dict[str, Any], changes: dict[str, Any], flags: tuple[list[str] | None, ...], ranks: dict[str, Any],
    obstacle: str | None, make_settings: Callable[..., Settings],
) -> None:  # fmt: skip
    with bench(make_settings(**changes), *flags, **ranks) as nixlbench:
        assert nixlbench.obstacle(replace(ROW, **row)) == obstacle


@pytest.mark.parametrize(
    ("changes", "flags", "ranks", "runtime"),
    [
        ({}, WITH_ASIO, {}, "ASIO"),
        ({}, FLAGS, {}, "ETCD"),
        ({}, FLAGS, {"server": Server("external")}, "ETCD"),
        ({"nixlbench_runtime": "ETCD"}, WITH_ASIO, {}, "ETCD"),
        ({}, WITH_ASIO, {"several": True}, "ASIO"),
        ({}, WITH_ASIO, {"several": True, "group": "an etcd"}, "ETCD"),
        ({}, WITH_ASIO, {"group": "an etcd"}, "ASIO"),
    ],
)
def test_the_processes_meet_in_an_etcd_or_at_a_port(
    changes: dict[str, Any], flags: list[str], ranks: dict[str, Any], runtime: str,
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(programs, "run_at", lambda *given: calls.append(("ASIO", *given)))
    monkeypatch.setattr(programs, "run_in", lambda *given: calls.append(("ETCD", *given)))
    monkeypatch.setattr(programs, "Group", lambda *given, **more: (*given, more))
    monkeypatch.setenv("UCX_PROTO_INFO", "n")
    ranks = {"server": Server(), **ranks}
    server = ranks["server"]
    settings = make_settings(iterations=16, warmup=1, nixlbench_args=("--num_iter=7",), timeout=9.0, **changes)
    nixlbench = bench(settings, flags, flags, **ranks)
    nixlbench.run(ROW)
    [(given, tools, place, arguments, variables, timeout)] = calls
    assert (given, [tool.where for tool in tools]) == (
        runtime,
        ["nixlbench of rank 0 on h0", "nixlbench of rank 1 on h1"],
    )
    address = "10.0.0.1" if ranks.get("several") else "127.0.0.1"
    our_server = {"our_server": server if server.kind == "embedded" else None}
    assert place == (address if runtime == "ASIO" else (server, "http://e:1", "supervisor", our_server))
    assert timeout == 9.0
    assert variables["NIXL_ETCD_ENDPOINTS"] is None
    assert "UCX_PROTO_INFO" not in variables
    words = arguments(Meeting("X", {"runtime_type": "X"}))
    assert [word for word in words if "backend" in word or "iter" in word or "runtime" in word] == [
        "--runtime_type=X", "--backend=UCX", "--num_iter=16", "--warmup_iter=16", "--num_iter=7"]  # fmt: skip
    with pytest.raises(NixlbenchError) as raised:
        arguments(Meeting("X", {"other": "1", "another": "2"}))
    assert raised.value.reason == "nixlbench of rank 0 on h0 has no --other, --another"
    assert nixlbench.described(ROW) == {
        "nixlbench_runtime": runtime, "nixlbench_args": ["--num_iter=7"], "initiator_ucx": "1.0", "target_ucx": "1.1",
        "initiator_host": "h0", "target_host": "h1",
    }  # fmt: skip


def test_the_etcd_of_the_run_is_looked_at_after_a_row_that_failed(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ended or was stopped, the next row gets another one."""
    fault, server = NixlbenchError("the row failed"), Server()
    monkeypatch.setattr(programs, "Group", MagicMock())
    monkeypatch.setattr(programs, "run_in", MagicMock(side_effect=fault))
    with bench(make_settings(), FLAGS, FLAGS, server=server) as nixlbench, pytest.raises(NixlbenchError) as raised:
        nixlbench.run(ROW)
    assert (raised.value, server.checked) == (fault, [True])


@pytest.mark.parametrize(("driver", "obstacle"), [(True, None), (False, NO_DRIVER)])
def test_a_row_of_gpu_memory_needs_the_driver(
    driver: bool, obstacle: str | None, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "Path", lambda path: MagicMock(**{"exists.return_value": driver}))
    with bench(make_settings(), WITH_ASIO, WITH_ASIO) as nixlbench:
        assert nixlbench.obstacle(replace(ROW, memory=MemoryPair("DRAM", "VRAM"))) == obstacle


def test_line_rates_are_those_of_the_initiators_cards(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    nics = [SimpleNamespace(name=name, rate=rate, virtual=virtual) for name, rate, virtual in (
        ("eth0", 1e9, False), ("eth1", None, False), ("veth0", 2e9, True))]  # fmt: skip
    adapters = [SimpleNamespace(name="mlx5_0", rate=50e9), SimpleNamespace(name="mlx5_1", rate=None)]
    monkeypatch.setattr(programs, "read_network", lambda root: SimpleNamespace(nics=nics))
    monkeypatch.setattr(programs, "read_rdma", lambda root: adapters)
    hosts = [Rank(0, FLAGS), LocalHost(cast("Any", None))]
    cluster = cast("Any", SimpleNamespace(hosts=hosts))
    nixlbench = Nixlbench(make_settings(), cluster, cast("Any", None), cast("Any", None))
    assert nixlbench.line_rates(replace(ROW, pair=(1, 0))) == {"eth0": 1e9, "mlx5_0": 50e9}
    assert nixlbench.line_rates(ROW) == {}, "of another host they are not known"


def test_an_address_that_no_other_rank_can_reach_is_named(make_settings: Callable[..., Settings]) -> None:
    nixlbench = bench(make_settings(), WITH_ASIO, WITH_ASIO, several=True)
    with pytest.raises(NixlPluginError) as raised:
        nixlbench.run(replace(ROW, pair=(1, 0)))
    assert raised.value.reason == "rank 1 on b knows only its address 127.0.0.2, which the other rank cannot reach"
    assert raised.value.remedy == (
        "name the etcd by an address that is not loopback, or give --nixl-nixlbench-runtime=ETCD"
    )
    assert nixlbench.plain(ROW) == replace(ROW, backend="UCX")


@pytest.mark.parametrize("flags", [["backend"], ["start_block_size"], []])
def test_a_program_that_does_not_list_its_flags_is_named(
    flags: list[str], make_settings: Callable[..., Settings]
) -> None:
    with pytest.raises(NixlPluginError) as raised, bench(make_settings(), flags, FLAGS) as nixlbench:
        nixlbench.obstacle(ROW)
    assert raised.value.reason == (
        "nixlbench of rank 0 on h0 does not list its flags (exit code 1 of nixlbench --help)"
    )
    assert raised.value.remedy == "check that it starts on that host: `ldd` names missing libraries"
