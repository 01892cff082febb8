# SPDX-License-Identifier: Apache-2.0
"""Run a raw tool between two ranks: its server on the target's host, its client on the initiator's host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from pytest_nixl.checks.raw_tools.tools import RawTool
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.processes.external_program import RunningProgram, Tool, contention_of
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_process import START_SECONDS, ended

#: Target duration in seconds at NIXL's speed, and the duration after which the current result of a slow tool counts.
SECONDS, LONGEST = 0.15, 1.2
_FEWEST, _MOST = 8, 200_000
#: Number of attempts, because another process may take a free port in between; seconds between two polls.
_PORTS, _LOOK = 5, 0.02
_UNREADABLE = "report the version and the output of the tool to pytest-nixl"


class RawPair:
    """A raw tool on two ranks.

    :param tool: the tool.
    :param hosts: hosts of initiator and target.
    :param address: address at which the initiator reaches the target's host.
    :param timeout: seconds that a step may take.
    :param start_timeout: seconds that each worker may take to start.
    """

    def __init__(
        self,
        tool: RawTool,
        hosts: tuple[Host, Host],
        address: str,
        timeout: float,
        start_timeout: float = START_SECONDS,
    ) -> None:
        self._tool = tool
        self._address = address
        self._timeout = timeout
        with ExitStack() as stack:
            self.client, self.server = (
                stack.enter_context(Tool(host, tool.name, timeout, start_timeout)) for host in hosts
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> RawPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def missing(self) -> str:
        """Tool, ranks and hosts on which the tool is missing; empty if it is on both."""
        return " and ".join(tool.where for tool in (self.client, self.server) if not tool.is_installed)

    def cannot(self, memory: MemoryPair) -> str:
        """Return why the tool cannot use a pair of memory types; empty if it can."""
        for tool, kind in ((self.client, memory.initiator), (self.server, memory.target)):
            if kind != "DRAM" and not self._tool.can(tool.start(["-h"]).final_output(10), kind):
                return f"{tool.where} was built without {kind}"
        return ""

    def measure(self, key: RowKey, expected: float, transports: Sequence[str] = ()) -> RawMeasurement:
        """Measure the same transfer as a row of NIXL: the same operation, block size and depth.

        :param key: the row.
        :param expected: expected bytes per second.
        :param transports: transports that carried NIXL's bytes.
        :raises ToolError: if the tool fails, or moves nothing in time.
        """
        count = int(min(_MOST, max(_FEWEST, SECONDS * expected / key.block)))
        warmup = max(1, count // 10)
        server, port = self._serve(key, count, warmup, transports)
        with server:
            arguments = self._tool.client(key, count, warmup, port, transports, self._address)
            with self.client.start(arguments, self._tool.environment) as client:
                value = self._read(client, server, key.block)
            # Wait for the end of both, because their CPU time is known only then.
            if client.poll() != 0:
                server.kill()
            server.wait(self._timeout)
        text = client.output()
        version = self.client.versions.get(self._tool.library, "")
        return RawMeasurement(
            tool=self._tool.name,
            test=self._tool.tests[key.op],
            value=value,
            version=self._tool.version(text) or (version and f"{self._tool.library} {version}"),
            transports=self._tool.transports(text, key, transports),
            others=contention_of(client, server) or 0.0,
        )

    def _serve(self, key: RowKey, count: int, warmup: int, transports: Sequence[str]) -> tuple[RunningProgram, int]:
        """Start the server on a free port and wait until it listens."""
        for _ in range(_PORTS):
            port = int(self.server.worker.call("free_port"))
            arguments = self._tool.server(key, count, warmup, port, transports)
            started = self.server.start(arguments, self._tool.environment)
            deadline = time.monotonic() + self._timeout
            while started.poll_within(_LOOK) is None and time.monotonic() < deadline:
                if started.listens(port):
                    return started, port
            if self._tool.taken not in started.output():
                break
        code = started.poll()
        started.kill()
        raise started.failure(f"did not listen within {self._timeout:g} s" if code is None else ended(code))

    def _read(self, client: RunningProgram, server: RunningProgram, block: int) -> float:
        """Return the rate of the last line of the tool's table; after ``LONGEST`` seconds, of an intermediate line."""
        start = time.monotonic()
        while True:
            code = client.poll_within(_LOOK)
            try:
                value = self._tool.read(client.output(), block)
            except ValueError as error:
                raise client.failure(f"printed output that cannot be read: {error}", _UNREADABLE) from None
            if code not in (None, 0):
                raise client.failure(f"{ended(code or 0)} against {self._address}")
            if code == 0 and value is None:
                raise client.failure("ended without printing a figure", _UNREADABLE)
            waited = time.monotonic() - start
            if value is not None and (code == 0 or waited > LONGEST):
                return value
            if server.poll() not in (None, 0):
                raise server.failure(f"{ended(server.poll() or 0)} while its client was connected to {self._address}")
            if waited > self._timeout:
                client.kill()
                raise client.failure(f"moved nothing within {self._timeout:g} s and was killed")
