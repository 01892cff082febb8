# SPDX-License-Identifier: Apache-2.0
"""The raw tool for each backend of NIXL: its arguments, its output, and a run of it between two ranks."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar

from pytest_nixl.core.units import MIB
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.nixl.backends.ucx import BACKEND
from pytest_nixl.processes.external_program import RunningProgram, Tool, contention_of
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_process import START_SECONDS, ended

_MB = 1_000_000

#: Target duration in seconds at NIXL's speed, and the duration after which the current result of a slow tool counts.
SECONDS, LONGEST = 0.15, 1.2
_FEWEST, _MOST = 8, 200_000
#: Number of attempts, because another process may take a free port in between; seconds between two polls.
_PORTS, _LOOK = 5, 0.02
_UNREADABLE = "report the version and the output of the tool to pytest-nixl"


class RawTool(ABC):
    """Arguments and output of a raw tool.

    :cvar name: the program.
    :cvar tests: its name of each operation.
    :cvar library: the library whose version a worker knows, if the tool does not print it.
    :cvar environment: variables for both sides; None unsets a variable.
    """

    name: ClassVar[str]
    tests: ClassVar[Mapping[str, str]]
    library: ClassVar[str]
    environment: ClassVar[Mapping[str, str | None]] = {}
    #: Its message if another process uses its port.
    taken = "Address already in use"

    @abstractmethod
    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Return the arguments of the target's side.

        :param key: the row to measure.
        :param count: number of blocks that the initiator moves.
        :param warmup: number of blocks before them.
        :param port: port on which it listens.
        :param transports: transports that carried NIXL's bytes.
        """

    @abstractmethod
    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Return the arguments of the initiator's side; ``address`` is that of the target."""

    @abstractmethod
    def read(self, text: str, block: int) -> float | None:
        """Return the bytes per second of the last line of the initiator's table; None if there is no line yet.

        :param text: output of the initiator's side.
        :param block: block size in bytes.
        :raises ValueError: if the figures contradict each other, so that their units are not the expected ones.
        """

    @abstractmethod
    def transports(self, text: str, key: RowKey, requested: Sequence[str]) -> tuple[str, ...]:
        """Return the transports that carried the bytes, from its output; empty if it prints none.

        :param requested: NIXL's transports, which the tool was given.
        """

    def version(self, text: str) -> str:
        """Return the version of the tool's library from its output; empty if it prints none."""
        return ""

    def can(self, help: str, memory: str) -> bool:
        """Whether the tool supports a type of memory, according to its help."""
        return memory == "DRAM"


class UcxPerftest(RawTool):
    """``ucx_perftest`` of UCX.

    Its MB are 2^20 bytes (``perftest_run.c`` divides by 1024.0 * 1024.0). Its times are microseconds per message.
    ``ucp_put_bw`` keeps the given number of puts in flight, each until the sender may reuse its memory. At the end it
    flushes, and the server acknowledges the last byte, so the time includes all deliveries (``ucp_tests.cc``,
    ``run_stream_uni``). ``ucp_get`` completes a message when its bytes have arrived.
    """

    name = "ucx_perftest"
    tests: ClassVar = {"WRITE": "ucp_put_bw", "READ": "ucp_get"}
    library = "ucx"
    #: Let UCX print its version and its transports in the output, even if the user's UCX_LOG_FILE names a file.
    environment: ClassVar = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": None}
    _memory: ClassVar = {"DRAM": "host", "VRAM": "cuda"}
    # [thread 0]  148  183.362  6792.494  6792.494  147.22  147.22  147  147; or with "Final:" or nothing in front
    _line = re.compile(
        r"^(?:\[thread \d+\]|Final:)?\s*\d+\s+[\d.]+\s+[\d.]+\s+(?P<overall>[\d.]+)\s+[\d.]+\s+(?P<mb>[\d.]+)"
        r"\s+\d+\s+\d+\s*$",
        re.MULTILINE,
    )
    _version = re.compile(r"UCX\s+INFO\s+Version (\S+)")
    # ep_cfg[0]: rma(sysv/memory posix/memory); or rma_am if put and get are emulated by active messages
    _lanes = re.compile(r"ep_cfg\[\d+\]:.*?\brma(?:_am)?\(([^)]*)\)")

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        return ["-p", str(port)]  # the client sends everything else to the server

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        memory = f"{self._memory[key.memory.initiator]},{self._memory[key.memory.target]}"
        size = ["-s", str(key.block), "-n", str(count), "-w", str(warmup), "-O", str(key.depth)]
        return [address, "-p", str(port), "-t", self.tests[key.op], *size, "-m", memory]

    def read(self, text: str, block: int) -> float | None:
        lines = list(self._line.finditer(text))
        if not lines:
            return None
        seconds = float(lines[-1]["overall"]) / 1e6
        if seconds <= 0:
            raise ValueError(f"the time per message is 0: {lines[-1][0].strip()!r}")
        value, printed_rate = block / seconds, float(lines[-1]["mb"]) * MIB
        # Allow for rounding: it prints 2 decimals of MB/s and 3 of microseconds.
        if abs(value - printed_rate) > 0.02 * value + 0.01 * MIB + value * 0.0005e-6 / seconds:
            raise ValueError(
                f"contradictory figures: {block} bytes in {lines[-1]['overall']} us are not {lines[-1]['mb']} MB/s of "
                "2^20 bytes"
            )
        return value

    def version(self, text: str) -> str:
        match = self._version.search(text)
        return f"UCX {match[1]}" if match else ""

    def transports(self, text: str, key: RowKey, requested: Sequence[str]) -> tuple[str, ...]:
        # Not every version prints the table of protocols; the last endpoint's lanes are printed by all.
        lanes = self._lanes.findall(text)[-1:]
        return BACKEND.transports(text, key.op, key.block) or tuple(dict.fromkeys("".join(lanes).split()))

    def can(self, help: str, memory: str) -> bool:
        return re.search(rf"^\s+{self._memory[memory]} - ", help, re.MULTILINE) is not None


class FiRmaBw(RawTool):
    """``fi_rma_bw`` of libfabric's fabtests, for DRAM only.

    Its MB are 10^6 bytes (``shared.c``, ``show_perf``: bytes per microsecond). For WRITE it runs ``writedata``, only
    from the client to the server. Its ``read`` goes both ways at once, and each side reports what it has read itself.
    ``-U`` (FI_DELIVERY_COMPLETE) requests delivery; without it, a write completes as soon as it has left the sender.
    """

    name = "fi_rma_bw"
    tests: ClassVar = {"WRITE": "writedata", "READ": "read"}
    library = "libfabric"
    # bytes   iters   total       time     MB/sec    usec/xfer   Mxfers/sec
    # 64k     1k      62m        0.05s   1318.27      49.71       0.02
    _line = re.compile(
        r"^(?P<size>\d+)(?P<unit>[kmg]?)\s+\S+\s+\S+\s+[\d.]+s\s+(?P<mb>[\d.]+)\s+(?P<us>[\d.]+)\s+[\d.]+\s*$",
        re.MULTILINE,
    )

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        (provider,) = self.transports("", key, transports)
        size, window = ["-S", str(key.block), "-I", str(count), "-w", str(warmup)], ["-W", str(key.depth)]
        return ["-p", provider, "-e", "rdm", "-o", self.tests[key.op], *size, *window, "-U", f"-E={port}"]

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        return [*self.server(key, count, warmup, port, transports), address]

    def read(self, text: str, block: int) -> float | None:
        lines = list(self._line.finditer(text))
        if not lines:
            return None
        last = lines[-1]
        size, microseconds, printed_rate = (
            int(last["size"]) * {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[last["unit"]],
            float(last["us"]),
            float(last["mb"]) * _MB,
        )
        if microseconds > 1 and abs(size / microseconds * 1e6 - printed_rate) > 0.02 * printed_rate + 0.01 * _MB:
            raise ValueError(
                f"contradictory figures: {size} bytes in {microseconds:g} us are not {last['mb']} MB/s of 10^6 bytes"
            )
        return printed_rate

    def transports(self, text: str, key: RowKey, requested: Sequence[str]) -> tuple[str, ...]:
        # It uses the provider that it was given, and prints none. If NIXL's is unknown: every host has tcp.
        return (requested[0].partition("/")[0] if requested else "tcp",)


RAW_TOOLS: dict[str, RawTool] = {"UCX": UcxPerftest(), "LIBFABRIC": FiRmaBw()}


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
