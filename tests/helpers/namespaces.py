# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: a network namespace each, which ends with the process that holds it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from helpers.cli_run import enter, eventually
from helpers.needs import lack, need_programs

_TOOLS = ("hostname", "ip", "nsenter", "setpriv", "ss", "tc", "unshare")
#: What a command is started with to be killed when the thread that starts it ends.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
#: What a command is started with, behind a host's prefix, to have all that it starts killed when it is.
ENDS_WITH_ALL = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
#: Files that differ between a host and this machine.
OWN_FILES = ("/etc/hosts", "/etc/nsswitch.conf", "/proc/stat")


def require_tools() -> None:
    """Skip where hosts cannot be made; in CI, where what is missing can be installed, fail."""
    need_programs(*_TOOLS, packages="hostname iproute2 util-linux", root=True)
    unshared = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if unshared.returncode:
        lack(f"network namespaces: {unshared.stderr.strip()}")


class Host:
    """A network namespace. It is gone with its holder, which ends with the process that made it.

    Its interfaces have no IPv6 addresses: libfabric fails on one that is still tentative.

    :param name: its hostname; empty: that of this machine.
    :param files: a folder with the files that it has in place of :data:`OWN_FILES`; None: it has this machine's.
    """

    def __init__(self, name: str = "", files: Path | None = None) -> None:
        self.name = name
        #: Of ``veth0``, where :func:`network` made it.
        self.address = ""
        # With a /sys of its own: UCX looks there for interfaces.
        steps = ["mount -t sysfs sysfs /sys"]
        if name:
            steps.append('hostname "$1"')
        if files is not None:
            steps += [f'mount --bind "$2/{Path(file).name}" {file}' for file in OWN_FILES]
        script = ["sh", "-c", " && ".join([*steps, "exec sleep infinity"]), "sh", name, str(files)]
        command = [*_ENDS_WITH_US, "unshare", "--net", "--uts", "--mount", *script]
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        assert eventually(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n")
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """What a command is started with to run here; the process is the command's own."""
        return enter(self.pid)

    def wait_for(self, device: str) -> None:
        """Wait until an interface carries: libfabric cannot listen on it before."""
        state = f"/sys/class/net/{device}/operstate"
        assert eventually(lambda: self.run("cat", state) == "up\n"), self.run("ip", "address")

    def run(self, *command: str) -> str:
        """Run a command here and return what it wrote."""
        done = subprocess.run([*self.prefix, *command], check=True, capture_output=True, text=True)
        return done.stdout

    def start(self, *command: str, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command here, which is killed when the thread that calls this ends.

        :param log: the file that gets all it writes.
        """
        with log.open("wb") as file:
            return subprocess.Popen(
                [*_ENDS_WITH_US, *self.prefix, *command],
                env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @contextlib.contextmanager
    def running(self, *command: str, log: Path, env: Mapping[str, str] | None = None) -> Iterator[None]:
        """Have a command run here until the block ends: then it is killed."""
        process = self.start(*command, log=log, env=env)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def listens(self, port: int) -> bool:
        """Whether somebody here listens on a TCP port."""
        return bool(self.run("ss", "-Hltn", f"sport = :{port}"))

    def counter(self, device: str, name: str) -> int:
        """Return a counter of one of its interfaces."""
        return int(self.run("cat", f"/sys/class/net/{device}/statistics/{name}"))

    def shape(self, device: str, rate: str) -> None:
        """Let an interface send no faster than ``rate``."""
        shape = ["tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
        self.run("tc", "qdisc", "replace", "dev", device, "root", *shape)

    def unshape(self, device: str) -> None:
        """Let an interface send as fast as it can."""
        self.run("tc", "qdisc", "delete", "dev", device, "root")

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
        first, other = hosts
        cable = ["ip", "link", "add", "veth0", "netns", str(first.pid), "type", "veth"]
        subprocess.run([*cable, "peer", "name", "veth0", "netns", str(other.pid)], check=True)
        for number, host in enumerate(hosts, 1):
            host.run("ip", "address", "add", f"10.99.0.{number}/24", "dev", "veth0")
            host.run("ip", "link", "set", "veth0", "addrgenmode", "none", "up")
            if rate:
                host.shape("veth0", rate)
        for host in hosts:
            host.wait_for("veth0")
        yield hosts
    finally:
        for host in hosts:
            host.close()


class Network:
    """Hosts on one switch: ``veth0`` of each, and a port of the switch that has the host's name."""

    def __init__(self, hosts: Sequence[Host], switch: Host) -> None:
        self.hosts = tuple(hosts)
        self._switch = switch

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @contextlib.contextmanager
    def shaped(self, rates: Mapping[str, str]) -> Iterator[None]:
        """Shape the cables of the hosts of these names to these rates, both ways, until the block ends."""
        with contextlib.ExitStack() as stack:
            for name, rate in rates.items():
                host = self[name]
                for end, device in ((host, "veth0"), (self._switch, host.name)):
                    end.shape(device, rate)
                    stack.callback(end.unshape, device)
            yield


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """Hosts of these names on one switch. Their addresses are 10.98.0.1 and so on; each finds the others by name.

    :param folder: for files of theirs.
    """
    addresses = {name: f"10.98.0.{number}" for number, name in enumerate(names, 1)}
    # A double: hosts that share one machine take processor time of each other's, and nodes of a cluster do not. In a
    # counter that stands still no row was disturbed by others.
    (folder / "stat").write_text(Path("/proc/stat").read_text())
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    # No name server is asked, which nobody there could reach: such a look-up takes 20 s to fail.
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(contextlib.closing(Host()))
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "addrgenmode", "none", "up")
        hosts = [stack.enter_context(contextlib.closing(Host(name, folder))) for name in names]
        for host in hosts:
            host.address = addresses[host.name]
            cable = ["ip", "link", "add", "veth0", "netns", str(host.pid), "type", "veth"]
            subprocess.run([*cable, "peer", "name", host.name, "netns", str(switch.pid)], check=True)
            switch.run("ip", "link", "set", host.name, "master", "switch", "addrgenmode", "none", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "veth0")
            host.run("ip", "link", "set", "veth0", "addrgenmode", "none", "up")
        for host in hosts:
            host.wait_for("veth0")
        yield Network(hosts, switch)


#: Slow enough that four links keep their rates on two cores with contention.
FAST, SLOW = "40mbit", "4mbit"


@contextlib.contextmanager
def four_cables() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts with four cables, ``card0`` to ``card3`` on each, shaped to 40 Mbit/s."""
    with contextlib.ExitStack() as stack:
        first, other = (stack.enter_context(contextlib.closing(Host())) for _ in range(2))
        for number in range(4):
            name = f"card{number}"
            cable = ["ip", "link", "add", name, "netns", str(first.pid), "type", "veth"]
            subprocess.run([*cable, "peer", "name", name, "netns", str(other.pid)], check=True)
            for last, host in enumerate((first, other), 1):
                host.run("ip", "address", "add", f"10.97.{number}.{last}/24", "dev", name)
                host.run("ip", "link", "set", name, "addrgenmode", "none", "up")
                host.shape(name, FAST)
        for host in (first, other):
            host.wait_for("card3")
        yield first, other
