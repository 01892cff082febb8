# SPDX-License-Identifier: Apache-2.0
"""An etcd of our own as a child of the supervisor, on loopback unless it is told to listen elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.binary import etcd_binary
from pytest_nixl.processes.supervisor import SupervisorClient

#: Seconds from the start to ready.
READY_SECONDS = 90.0
#: How often another process may take a port between our choosing and etcd's binding it.
PORT_TRIES = 5
#: Lines of its log that an error shows.
LOG_LINES = 12

_HOST = "127.0.0.1"
_CRASHES = ("panic: ", "fatal error: ", "SIG")


@dataclass
class EmbeddedServer:
    """A process of our own; it ends with the test run, whatever becomes of that."""

    supervisor: SupervisorClient
    program: str
    version: str
    name: str
    client_port: int
    peer_port: int
    pid: int
    shared: bool = False
    kind: str = "embedded"
    #: Whether we ended it ourselves, and so it is no defect that it is not there.
    stopped: bool = False
    #: The IPv4 address that it listens on for clients; 0.0.0.0 for all that this host has.
    host: str = _HOST
    #: The host in its URL.
    reached_at: str = _HOST
    #: What it asks for; empty where it asks for nothing. Never print the password.
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def start(cls, supervisor: SupervisorClient, shared: bool = False, *, more_remedies: str = "") -> EmbeddedServer:
        """Start one on free ports and wait until it is ready.

        :raises ExecutableMissingError: where there is no etcd program.
        :raises EtcdError: where it does not come up; with the last lines of its log.
        """
        program = etcd_binary(more_remedies=more_remedies)
        version, flags = _describe_program(program)
        for attempt in range(PORT_TRIES):
            name = f"etcd-{secrets.token_hex(4)}"
            client_port, peer_port = free_ports(2)
            server = cls(supervisor, program, version, name, client_port, peer_port, pid=0, shared=shared)
            try:
                server._run(flags)
            except EtcdError as error:
                if "address already in use" not in error.detail or attempt == PORT_TRIES - 1:
                    raise
            else:
                return server
        raise AssertionError("the last attempt returns or raises")

    @property
    def endpoint(self) -> str:
        """Its URL, as ``NIXL_ETCD_ENDPOINTS`` wants it."""
        return f"http://{self.reached_at}:{self.client_port}"

    @property
    def log(self) -> Path:
        """Its log file; it goes with the run directory."""
        return self.supervisor.directory / f"{self.name}.log"

    def describe(self) -> str:
        """Say what it is, in a few words."""
        return f"embedded etcd {self.version}, pid {self.pid}, at {self.endpoint}"

    def why_dead(self) -> str | None:
        """Return None while it is up, else how it ended, with the last lines of its log."""
        if self.supervisor.alive(self.pid):
            return None
        return f"{self.describe()}, {self.supervisor.how_ended(self.pid)}\n{self._last_lines()}"

    def why_silent(self) -> str | None:
        """Return None while nothing keeps it from answering, else :meth:`why_dead`, or that somebody has stopped it."""
        if (why := self.why_dead()) is not None:
            return why
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "Tt":
                return f"{self.describe()}, is stopped by a signal: kill -CONT {self.pid}"
        return None

    def client(self) -> EtcdClient:
        """Return a new client of it."""
        return connect(parse_endpoints(self.endpoint), **self.credentials)

    @property
    def credentials(self) -> dict[str, Any]:
        """What :func:`~pytest_nixl.etcd.client.connect` takes beside the endpoint."""
        return {"user": self.user, "password": self.password}

    def attachment(self) -> dict[str, Any]:
        """Return what another process of this run needs to :meth:`attach`."""
        names = ("program", "version", "name", "client_port", "peer_port", "pid", "host", "reached_at", "user",
                 "password")  # fmt: skip
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @classmethod
    def attach(cls, supervisor: SupervisorClient, attachment: dict[str, Any]) -> EmbeddedServer:
        """Return the server that another process of this run has started."""
        values = {name: value for name, value in attachment.items() if name != "kind"}
        return cls(supervisor, **values, shared=True)

    def stop(self) -> None:
        """End it (SIGTERM, after 2 s SIGKILL). Its data stays until the end of the run: see :meth:`restart`."""
        self.stopped = True
        self.supervisor.stop(self.pid)

    def kill(self) -> None:
        """End it at once by SIGKILL, and wait until it has ended."""
        self.stopped = True
        self.supervisor.signal(self.pid, signal.SIGKILL)
        self.supervisor.stop(self.pid)

    def restart(self) -> None:
        """Start it again, on the same port and with the same data; stop it first where it is up."""
        self.supervisor.stop(self.pid)
        self._run(_describe_program(self.program)[1])
        self.stopped = False

    def listen_at(self, host: str, port: int, reached_at: str) -> None:
        """Start it again with the same data, where other hosts reach it; its peer port stays on loopback.

        :param host: an IPv4 address of this host, or 0.0.0.0 for all of them.
        :param reached_at: what others call this host.
        """
        self.host, self.client_port, self.reached_at = host, port, reached_at
        self.restart()

    def discard(self) -> None:
        """End it, and remove its data and its log: it cannot be started again."""
        self.stop()
        shutil.rmtree(self._data, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    @property
    def _data(self) -> Path:
        return self.supervisor.directory / f"{self.name}.data"

    def _run(self, flags: tuple[str, ...]) -> None:
        peer = f"http://{_HOST}:{self.peer_port}"
        arguments = {
            "name": self.name,
            "data-dir": str(self._data),
            "listen-client-urls": f"http://{self.host}:{self.client_port}",
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"{self.name}={peer}",
            "initial-cluster-token": self.name,
            # A single member has nobody to wait for: ready in a tenth of a second instead of a second or two.
            "heartbeat-interval": "10",
            "election-timeout": "100",
            # By default a password takes it 0.1 s of CPU, for each of many ranks at once; ours are random anyway.
            "bcrypt-cost": "4",
            "log-level": "warn",
        }
        argv = [self.program, *(f"--{key}={value}" for key, value in arguments.items()), *flags]
        # etcd refuses to start where a variable of its own and an option say two things.
        environment = dict.fromkeys(name for name in os.environ if name.startswith("ETCD_"))
        self.pid = self.supervisor.spawn(argv, log=self.log.name, env=environment, shared=self.shared)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not healthy(self.endpoint):
            if not self.supervisor.alive(self.pid):
                raise EtcdError(
                    f"the embedded etcd {self.version} at {self.endpoint} did not start: "
                    f"{self.supervisor.how_ended(self.pid)}",
                    "see its log; or use one that runs already, --nixl-etcd URL",
                    self._last_lines(),
                    cause="not-started",
                    endpoint=self.endpoint,
                )
            if time.monotonic() > deadline:
                lines = self._last_lines()
                self.supervisor.stop(self.pid)
                raise EtcdError(
                    f"the embedded etcd {self.version} at {self.endpoint} was not ready within {READY_SECONDS:g} s",
                    "see its log; or use one that runs already, --nixl-etcd URL",
                    lines,
                    cause="not-started",
                    endpoint=self.endpoint,
                )
            time.sleep(0.01)

    def _last_lines(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        if not lines:
            return "its log is empty"
        # A crash of a Go program is told first, and hundreds of lines of stacks and registers follow.
        crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASHES)), None)
        if crash is None:
            return "\n".join(["the last lines of its log:", *lines[-LOG_LINES:]])
        return "\n".join(["its log, from its crash on:", *lines[crash : crash + LOG_LINES]])


@lru_cache(maxsize=8)
def _describe_program(program: str) -> tuple[str, tuple[str, ...]]:
    """Return the version, and the flags of it that we want and that not every version has."""
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EtcdError(
            f"{program} is no etcd that runs here: {error}",
            "put a working etcd first on PATH, or take it off PATH",
            cause="no-program",
        ) from None
    version = text.split("\n", 1)[0].removeprefix("etcd Version:").strip()
    numbers = [int(part) for part in version.split("-")[0].split(".")[:2] if part.isdecimal()]
    return version, ("--unsafe-no-fsync",) if numbers >= [3, 5] else ()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind((_HOST, 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=1.0) as answer:
            return bool(json.load(answer).get("health") == "true")
    except (OSError, ValueError, urllib.error.URLError):
        return False
