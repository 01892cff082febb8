# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: a network namespace each, which ends with the process that holds it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT, eventually


def require_tools() -> None:
    """Skip where hosts cannot be made; in CI, where what is missing can be installed, fail."""
    missing = [name for name in ("gcc", "ip", "tc", "nsenter", "unshare", "setpriv") if shutil.which(name) is None]
    why = ""
    if os.geteuid():
        why = "needs root, to make network namespaces"
    elif missing:
        why = f"needs {', '.join(missing)} (Debian: gcc libc6-dev iproute2 util-linux)"
    else:
        made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
        if made.returncode:
            why = f"needs network namespaces: {made.stderr.strip()}"
    if why and os.environ.get("CI"):
        pytest.fail(f"CI is set, and this test {why}")
    if why:
        pytest.skip(f"this test {why}")


class Host:
    """A network namespace. It is gone with its holder, which ends with the process that made it.

    Its interfaces have no IPv6 addresses: libfabric fails on one that is still tentative.
    """

    def __init__(self) -> None:
        # With a /sys of its own: UCX looks there for interfaces.
        script = "mount -t sysfs sysfs /sys && exec sleep infinity"
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        assert eventually(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """What a command is started with to run here."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", f"--wd={ROOT}"]

    def wait_for(self, device: str) -> None:
        """Wait until an interface carries: libfabric cannot listen on it before."""
        state = f"/sys/class/net/{device}/operstate"
        assert eventually(lambda: self.run("cat", state) == "up\n"), self.run("ip", "address")

    def run(self, *command: str) -> str:
        """Run a command here and return what it wrote."""
        done = subprocess.run([*self.prefix, *command], check=True, capture_output=True, text=True)
        return done.stdout

    def counter(self, device: str, name: str) -> int:
        """Return a counter of one of its interfaces."""
        return int(self.run("cat", f"/sys/class/net/{device}/statistics/{name}"))

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@contextlib.contextmanager
def one_host() -> Iterator[Host]:
    """A host with an interface ``veth0`` that is up and is not loopback."""
    host = Host()
    try:
        host.run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        host.run("ip", "address", "add", "10.99.0.1/24", "dev", "veth0")
        for name in ("veth0", "veth1"):
            host.run("ip", "link", "set", name, "addrgenmode", "none", "up")
        host.wait_for("veth0")
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def two_hosts(rate: str = "") -> Iterator[tuple[Host, Host]]:
    """Two hosts, 10.99.0.1 and 10.99.0.2, joined by a cable: ``veth0`` of each, shaped to ``rate`` both ways."""
    hosts = Host(), Host()
    try:
        one, other = hosts
        cable = ["ip", "link", "add", "veth0", "netns", str(one.pid), "type", "veth"]
        subprocess.run([*cable, "peer", "name", "veth0", "netns", str(other.pid)], check=True)
        for number, host in enumerate(hosts, 1):
            host.run("ip", "address", "add", f"10.99.0.{number}/24", "dev", "veth0")
            host.run("ip", "link", "set", "veth0", "addrgenmode", "none", "up")
            if rate:
                shape = ["tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
                host.run("tc", "qdisc", "add", "dev", "veth0", "root", *shape)
        for host in hosts:
            host.wait_for("veth0")
        yield hosts
    finally:
        for host in hosts:
            host.close()
