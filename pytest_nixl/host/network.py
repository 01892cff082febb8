# SPDX-License-Identifier: Apache-2.0
"""Facts of network interfaces, of the hosts and engines that this host reaches, and of who listens on a port."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.forms import HOST_NAME
from pytest_nixl.core.redaction import hide_command
from pytest_nixl.core.strict import printable
from pytest_nixl.host.pci import address_of
from pytest_nixl.host.recorded_tree import Fact, FactsRoot

_NET = "/sys/class/net"
_LOOPBACK_TYPE = 772

_PROC = Path("/proc")
#: The state of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"
_MOST_OF_COMMAND = 200
PEER_FORM = "HOST or HOST:PORT (any port, because a refused connection shows that the host is reached)"
#: vLLM listens here by ZMQ over TCP; VLLM_NIXL_SIDE_CHANNEL_PORT is another port.
SIDE_CHANNEL_PORT = 5600
SIDE_CHANNEL_FORM = f"HOST or HOST:PORT (default: {SIDE_CHANNEL_PORT}, as VLLM_NIXL_SIDE_CHANNEL_PORT)"
#: Why a side channel does not answer.
REFUSED, DROPPED, SILENT = "connection refused", "no answer", "no greeting of ZMQ"
#: ZMTP: a ZMQ socket sends these bytes at once when a connection is made; eight bytes of padding lie between them.
_GREETING_FIRST, _GREETING_TENTH = 0xFF, 0x7F
#: The default port. No program listens there: a refused connection is the answer.
_PEER_PORT = 1
_CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class Nic:
    """A network interface.

    :param state: the kernel's state: ``up``, ``down``, ``lowerlayerdown``, ``unknown``.
    :param mtu: its MTU in bytes; None if unknown.
    :param rate: its line rate in bytes per second; None if its driver does not report one.
    :param addresses: its addresses with prefix lengths, such as ``10.0.0.11/16``.
    :param virtual: whether it belongs to no device (bridges, veth pairs, loopback).
    :param pci: the PCI address of its device; empty if it has none.
    """

    name: str
    state: str
    mtu: int | None
    rate: float | None
    addresses: tuple[str, ...]
    virtual: bool
    loopback: bool
    driver: str
    pci: str
    source: str

    def link_local(self) -> tuple[str, ...]:
        """Return its link-local IPv4 addresses, which other hosts cannot reach."""
        addresses = (ipaddress.ip_interface(text) for text in self.addresses)
        return tuple(str(address) for address in addresses if address.version == 4 and address.is_link_local)

    def routable(self) -> tuple[str, ...]:
        """Return its IPv4 addresses that other hosts may reach."""
        addresses = (ipaddress.ip_interface(text) for text in self.addresses)
        return tuple(
            str(address)
            for address in addresses
            if address.version == 4 and not (address.is_link_local or address.is_loopback)
        )


@dataclass(frozen=True)
class Network:
    """The network of a host.

    :param default: the name of the interface with the default route.
    :param nameservers: the name servers in /etc/resolv.conf.
    :param search: the search domains in /etc/resolv.conf.
    """

    nics: tuple[Nic, ...]
    default: Fact[str]
    nameservers: Fact[tuple[str, ...]]
    search: Fact[tuple[str, ...]]


def read_network(root: FactsRoot) -> Network:
    answer = root.ask("addresses", ask_addresses)
    resolver = root.read("/etc/resolv.conf")
    return Network(
        nics=tuple(
            _nic(root, name, answer.get(name, []))
            for name in root.entries(_NET)
            if root.read(f"{_NET}/{name}/operstate") is not None
        ),
        default=_default_interface(root),
        nameservers=_resolver_values(resolver, "nameserver"),
        search=_resolver_values(resolver, "search"),
    )


def _nic(root: FactsRoot, name: str, addresses: list[str]) -> Nic:
    place = f"{_NET}/{name}"
    speed = root.number(f"{place}/speed")  # in Mb/s; -1 or an error if it is unknown
    device = root.resolve(f"{place}/device")
    driver = (root.resolve(f"{device}/driver") or "").rpartition("/")[2] if device else ""
    return Nic(
        name=name,
        state=root.read(f"{place}/operstate") or "unknown",
        mtu=root.number(f"{place}/mtu"),
        rate=speed * 1e6 / 8 if speed is not None and 0 < speed < 1 << 31 else None,
        addresses=tuple(addresses),
        virtual=device is None,
        loopback=root.number(f"{place}/type") == _LOOPBACK_TYPE,
        driver=driver,
        pci=address_of(device),
        source=place,
    )


def _default_interface(root: FactsRoot) -> Fact[str]:
    path = "/proc/net/route"
    text = root.read(path)
    if text is None:
        return Fact(None, path, "it cannot be read")
    rows = [line.split() for line in text.splitlines()[1:]]
    names = [row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"]
    return Fact.read(next(iter(names), None), path, "it has no default route")


def _resolver_values(text: str | None, keyword: str) -> Fact[tuple[str, ...]]:
    path = "/etc/resolv.conf"
    if text is None:
        return Fact(None, path, "it cannot be read")
    lines = [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [keyword]]
    return Fact(tuple(name for names in lines for name in names), path)


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port.

    :param command: its command line without secrets, or its name if it has none.
    :param parent: the pid of its parent; 0 if that is unknown.
    """

    pid: int
    command: str
    parent: int = 0

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


def port_holder(port: int, proc: Path = _PROC) -> PortHolder | None:
    """Return the process that listens on a port on any address.

    :param proc: the folder of the processes.
    :returns: None if nobody does in this network namespace, or the process belongs to a user whose descriptors this
        process may not see.
    """
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(proc / "net" / table, port)}
    if not sockets:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if any(link in sockets for link in _descriptors(folder / "fd")):
            return PortHolder(int(folder.name), command_of(folder), parent_of(folder))
    return None


def _inodes(table: Path, port: int) -> list[str]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    fields = (line.split() for line in lines)
    return [
        field[9] for field in fields if len(field) > 9 and field[3] == _LISTENS and field[1].endswith(f":{port:04X}")
    ]


def _descriptors(folder: Path) -> list[str]:
    descriptors = []
    try:
        for entry in os.scandir(folder):
            try:
                descriptors.append(os.readlink(entry.path))
            except OSError:
                continue
    except OSError:  # the process has ended, or belongs to another user
        pass
    return descriptors


def parent_of(folder: Path) -> int:
    """Return the pid of a process's parent; 0 if that is unknown."""
    try:
        match = re.search(r"^PPid:\s*([0-9]+)", (folder / "status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def command_of(folder: Path) -> str:
    """Return the command line of a process without secrets, or its name; ``folder`` is its folder in /proc."""
    try:
        arguments = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
        name = (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process that has ended"
    command = hide_command(" ".join(arguments)) if arguments != [""] else name
    return printable(command if len(command) <= _MOST_OF_COMMAND else f"{command[:_MOST_OF_COMMAND]}…").replace(
        "\n", " "
    )


@dataclass(frozen=True)
class ReachedPeer:
    """Another host and its addresses; ``fault`` says why it is not reached, and is empty if it is."""

    name: str
    addresses: tuple[str, ...]
    fault: str


def read_peers(root: FactsRoot, names: Sequence[str]) -> tuple[ReachedPeer, ...]:
    """Try to reach each host.

    :param names: the hosts, as ``HOST`` or ``HOST:PORT``.
    :raises ValueError: a name does not have this form.
    """
    for name in names:
        _host_and_port(name)
    answers = root.ask("peers", lambda: {name: _ask_peer(name) for name in names})
    return tuple(
        ReachedPeer(name, tuple(answer["addresses"]), answer["fault"])
        for name, answer in answers.items()
        if name != "why"
    )


def read_side_channels(root: FactsRoot, names: Sequence[str]) -> tuple[ReachedPeer, ...]:
    """Try whether ZMQ answers at the side channel of each engine.

    :param names: the side channels, as ``HOST`` or ``HOST:PORT``.
    :raises ValueError: a name does not have this form.
    """
    for name in names:
        _host_and_port(name, SIDE_CHANNEL_FORM, SIDE_CHANNEL_PORT)
    answers = root.ask("side-channels", lambda: {name: _ask_side_channel(name) for name in names})
    return tuple(ReachedPeer(name, (), answer["fault"]) for name, answer in answers.items() if name != "why")


def _host_and_port(name: str, form: str = PEER_FORM, default: int = _PEER_PORT) -> tuple[str, int]:
    match = re.fullmatch(rf"({HOST_NAME}|\[[0-9a-fA-F:.]+\])(?::(\d{{1,5}}))?", name)
    if match is None:
        kind = "peer" if form == PEER_FORM else "side channel"
        raise ValueError(f"{kind} {name!r} cannot be parsed: expected {form}")
    return match[1].strip("[]"), int(match[2] or default)


def _ask_side_channel(name: str) -> dict[str, str]:
    """Connect, and read the first bytes that a ZMQ socket sends: a stopped process accepts, and sends nothing."""
    host, port = _host_and_port(name, SIDE_CHANNEL_FORM, SIDE_CHANNEL_PORT)
    try:
        trying = socket.create_connection((host, port), _CONNECT_SECONDS)
    except socket.gaierror as error:
        return {"fault": f"its name does not resolve ({error.strerror})"}
    except ConnectionRefusedError:
        return {"fault": f"{host} port {port}: {REFUSED}, so no engine listens there"}
    except TimeoutError:
        return {"fault": f"{host} port {port}: {DROPPED} within {_CONNECT_SECONDS:.0f} s"}
    except OSError as error:
        return {"fault": f"{host} port {port}: {error.strerror or error}"}
    with trying:
        try:
            reply = trying.recv(10)
        except OSError:
            reply = b""
    greeted = len(reply) == 10 and reply[0] == _GREETING_FIRST and reply[9] == _GREETING_TENTH
    return {
        "fault": "" if greeted else f"{host} port {port}: connected, but {SILENT} came within {_CONNECT_SECONDS:.0f} s"
    }


def _ask_peer(name: str) -> dict[str, Any]:
    host, port = _host_and_port(name)
    try:
        entries = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "fault": f"its name does not resolve ({error.strerror or error})"}
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    with socket.socket(entries[0][0], socket.SOCK_STREAM) as trying:
        trying.settimeout(_CONNECT_SECONDS)
        try:
            code = trying.connect_ex(entries[0][4])
        except TimeoutError:
            code = errno.ETIMEDOUT
    if code in (0, errno.ECONNREFUSED):
        return {"addresses": addresses, "fault": ""}
    reason = (
        f"no answer within {_CONNECT_SECONDS:.0f} s" if code in (errno.EAGAIN, errno.ETIMEDOUT) else os.strerror(code)
    )
    return {"addresses": addresses, "fault": f"{addresses[0]} port {port}: {reason}"}
