# SPDX-License-Identifier: Apache-2.0
"""The nixlbench of each rank: whether it is installed, which flags it has, and how its processes can meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from pytest_nixl.checks.nixlbench.command import Meeting, command, known_flags
from pytest_nixl.checks.nixlbench.driver import NixlbenchError, Ran, run_at, run_in
from pytest_nixl.checks.nixlbench.group import Group
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.sources import SessionEtcd
from pytest_nixl.host.network import read_network
from pytest_nixl.host.rdma import read_rdma
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.external_program import Tool
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.nixlbench_flags import name_of

_HELP_SECONDS = 30.0


class Nixlbench:
    """nixlbench on all ranks. The programs are looked up at first use.

    :param settings: settings of the run.
    :param cluster: the ranks of the run.
    :param etcd: the session's etcd; it is started if the processes meet in it.
    :param supervisor: returns the supervisor, which owns keys and workers.
    """

    def __init__(
        self, settings: Settings, cluster: Cluster, etcd: SessionEtcd, supervisor: Callable[[], SupervisorClient]
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._etcd = etcd
        self._supervisor = supervisor
        self._tools: dict[int, Tool] = {}
        self._flags: dict[int, frozenset[str]] = {}

    def __enter__(self) -> Nixlbench:
        return self

    def __exit__(self, *_: object) -> None:
        for tool in self._tools.values():
            tool.close()

    @staticmethod
    def plain(row: RowKey) -> RowKey:
        """Return the key of the same row as measured by pytest-nixl itself."""
        return replace(row, backend=row.plain_backend)

    def obstacle(self, row: RowKey) -> str | None:
        """Return why nixlbench cannot measure a row; None if it can.

        :raises NixlPluginError: if a rank does not answer, or its nixlbench does not work.
        """
        if row.memory.stored:
            return f"{self.plain(row).backend} moves bytes to storage, but nixlbench is run between two ranks"
        if row.memory.on_gpu and not Path("/dev/nvidiactl").exists():
            return f"{row.memory} needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)"
        for rank in row.pair:
            if not self._tool(rank).is_installed:
                host_label = f"rank {rank}" if self._cluster.several else "this host"
                return f"{host_label} has no nixlbench on its PATH, and --nixl-nixlbench PATH names none"
        if row.depth > 1 and not self._all_know(row, "pipeline_depth"):
            return f"this nixlbench has no --pipeline_depth, which rows of depth {row.depth} need"
        return self._meeting_obstacle(row)

    def run(self, row: RowKey) -> Ran:
        """Measure a row.

        :raises NixlPluginError: if it fails; the message names the rank at fault, what it did and its output.
        """
        plain, settings = self.plain(row), self._settings
        tools = (self._tool(row.pair[0]), self._tool(row.pair[1]))

        def arguments(meeting: Meeting) -> list[str]:
            command_line = command(
                plain,
                BACKENDS[plain.backend].PLUGIN,
                meeting,
                iterations=settings.iterations,
                warmup=settings.warmup,
                more=settings.nixlbench_args,
            )
            self._check_known(row, command_line)
            return command_line

        environment = BACKENDS[plain.backend].environment(os.environ)
        variables: dict[str, str | None] = {name: text for name, text in environment.items() if name not in os.environ}
        # The agents of nixlbench meet through its own runtime, so an etcd that is down must not delay them.
        variables["NIXL_ETCD_ENDPOINTS"] = None
        if self._runtime(row) == "ASIO":
            return run_at(tools, self._address(row.pair[0]), arguments, variables, settings.timeout)
        server = self._etcd.server()
        our_server = None if server.kind == "external" else server
        with server.client() as client:
            group = Group(client, server.endpoint, self._supervisor(), our_server=our_server)
            try:
                return run_in(tools, group, arguments, variables, settings.timeout)
            except NixlPluginError:
                # If the etcd of this run died or was stopped, the raised error says so. The next row gets a new one.
                with suppress(EtcdError, SupervisorError):
                    self._etcd.check(stopped=True)
                raise

    def described(self, row: RowKey) -> dict[str, object]:
        """Return the details of the programs that are recorded with a row."""
        description: dict[str, object] = {"nixlbench_runtime": self._runtime(row)}
        if self._settings.nixlbench_args:
            description["nixlbench_args"] = list(self._settings.nixlbench_args)
        for role, rank in zip(("initiator", "target"), row.pair, strict=True):
            tool = self._tool(rank)
            description |= {f"{role}_{name}": text for name, text in tool.versions.items()}
            description[f"{role}_host"] = tool.worker.versions["host"]
        return description

    def line_rates(self, row: RowKey) -> dict[str, float]:
        """Return the line rates in bytes/s of the initiator's network cards; empty if it is on another host."""
        if not isinstance(self._cluster.hosts[row.pair[0]], LocalHost):
            return {}
        root = FactsRoot()
        cards = {nic.name: nic.rate for nic in read_network(root).nics if not nic.virtual}
        cards |= {adapter.name: adapter.rate for adapter in read_rdma(root)}
        return {name: rate for name, rate in cards.items() if rate}

    def _tool(self, rank: int) -> Tool:
        tool = self._tools.get(rank)
        if tool is None or not tool.worker.alive:
            tool = self._tools[rank] = Tool(
                self._cluster.hosts[rank], "nixlbench", self._settings.timeout, self._settings.start_timeout
            )
        return tool

    def _known_flags(self, rank: int) -> frozenset[str]:
        """Return the flags that a rank's nixlbench lists in its help. :raises ToolError: if it lists none."""
        if rank not in self._flags:
            with ExitStack() as stack:
                help_process = stack.enter_context(self._tool(rank).start(["--help"]))
                code = help_process.wait(_HELP_SECONDS)  # gflags ends with 1 after its help
                flags = known_flags(help_process.output())
                if "backend" not in flags or "start_block_size" not in flags:
                    raise help_process.failure(
                        f"does not list its flags (exit code {code} of nixlbench --help)",
                        "check that it starts on that host: `ldd` names missing libraries",
                    )
                self._flags[rank] = flags
        return self._flags[rank]

    def _all_know(self, row: RowKey, flag: str) -> bool:
        return all(flag in self._known_flags(rank) for rank in row.pair)

    def _check_known(self, row: RowKey, arguments: list[str]) -> None:
        for rank in row.pair:
            unknown = [f"--{name_of(flag)}" for flag in arguments if name_of(flag) not in self._known_flags(rank)]
            if unknown:
                raise NixlbenchError(
                    f"{self._tool(rank).where} has no {', '.join(unknown)}",
                    "read `nixlbench --help` there, and change --nixl-nixlbench-args or use another version of it",
                )

    def _runtime(self, row: RowKey) -> str:
        runtime = self._settings.nixlbench_runtime
        if runtime != "auto":
            return runtime
        has_asio = self._all_know(row, "asio_address")
        if self._cluster.several:
            return "ASIO" if has_asio and self._cluster.etcd() is None else "ETCD"
        return "ASIO" if has_asio else "ETCD"

    def _meeting_obstacle(self, row: RowKey) -> str | None:
        if self._runtime(row) == "ASIO":
            if self._all_know(row, "asio_address"):
                return None
            return "this nixlbench has no ASIO runtime: give --nixl-nixlbench-runtime=ETCD"
        server = self._etcd.server()
        settings = self._settings
        secret = settings.etcd_user or settings.etcd_cacert or settings.etcd_cert
        is_secured = server.kind == "external" and (secret or "https://" in server.endpoint or "@" in settings.etcd)
        if (self._cluster.several and self._cluster.etcd() is None) or is_secured:
            return (
                "nixlbench cannot use this run's etcd, because nixlbench speaks plaintext and sends no password; give "
                "--nixl-nixlbench-runtime=ASIO if this nixlbench has it"
            )
        return None

    def _address(self, rank: int) -> str:
        if not self._cluster.several:
            return "127.0.0.1"
        address = str(self._cluster.ask("address")[rank])
        if address.startswith("127."):
            raise NixlPluginError(
                f"{self._cluster.names[rank]} knows only its address {address}, which the other rank cannot reach",
                "name the etcd by an address that is not loopback, or give --nixl-nixlbench-runtime=ETCD",
            )
        return address
