#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for nixlbench with the same output, keys and messages, because no registry has a build of nixlbench.

It registers in a real etcd under etcd's lock, as released versions do, or meets its partner at a real port. With
``STANDIN_RACY`` it takes no lock, like one affected build. With ``STANDIN_LISTS`` it takes no lock, and its rank is its
place in the list of those that are there. It prints the recorded output of the real nixlbench 1.4.0
from ``fixtures/nixlbench``, with the values of its own flags. It moves no bytes.

``STANDIN_PLAY`` selects what it does after it has registered, and for which rank: ``wait`` (the default: for ever),
``normal``, ``killed:1``, ``late:1`` (killed after the row is printed) or ``inconsistent:1``. ``STANDIN_ONLY`` limits
that to one operation; others are then ``normal``.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest_nixl
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import encode

RECORDINGS = Path(pytest_nixl.__file__).parents[1] / "fixtures" / "nixlbench"
PLAY, _, WHOSE = os.environ.get("STANDIN_PLAY", "wait").partition(":")
if f"--op_type={os.environ.get('STANDIN_ONLY')}" not in sys.argv and "STANDIN_ONLY" in os.environ:
    PLAY = "normal"


def say(text: str) -> None:
    print(text, flush=True)


def complain(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


def recording(name: str) -> str:
    return (RECORDINGS / name).read_text()


class Etcd:
    """Registration and barriers of the ETCD runtime, with the keys of the real nixlbench."""

    def __init__(self, client: EtcdClient, group: str) -> None:
        self.client = client
        self.prefix = f"xferbench/{group}//"

    def register_by_list(self) -> int:
        """Announce a token, list the tokens, and take the place of the own one among them."""
        token = f"{self.prefix}announced/{secrets.token_hex(8)}"
        self.client.put(token, b"", self.client.lease(30))
        rank = sorted(self.client.get_prefix(f"{self.prefix}announced/")).index(token)
        self.client.put(f"{self.prefix}rank/{rank}", b"active", self.client.lease(30))
        say(f"ETCD Runtime: Registered as rank {rank} item {rank + 1} of 2")
        return rank

    def register(self) -> int:
        if "STANDIN_LISTS" in os.environ:
            return self.register_by_list()
        client, lease = self.client, self.client.lease(30)
        key, rank = "", 0
        if "STANDIN_RACY" not in os.environ:
            body = {"name": encode(f"{self.prefix}lock"), "lease": lease.id}
            key = client._members.post("/lock/lock", body, dict, repeatable=False)["key"]
        with suppress(EtcdError):  # no answer is read as "not there"
            rank = int(client.get(f"{self.prefix}size") or b"0")
        if rank >= 2:
            complain(f"Rank {rank} is greater than or equal to global size 2")
            client.delete_prefix(self.prefix)  # like the real one: also the keys of other processes
            complain("Failed to setup ETCD runtime")
            sys.exit(1)
        with suppress(EtcdError):
            client.put(f"{self.prefix}rank/{rank}", b"active", client.lease(30))
        with suppress(EtcdError):
            client.put(f"{self.prefix}size", str(rank + 1).encode())
        if key:
            # Release the lock and its lease at once.
            revoking = threading.Thread(target=lease.revoke)
            revoking.start()
            client._members.post("/lock/unlock", {"key": key}, dict)
            revoking.join()
        say(f"ETCD Runtime: Registered as rank {rank} item {rank + 1} of 2")
        return rank

    def barrier(self, name: str, rank: int) -> None:
        self.client.put(f"{self.prefix}barrier/{name}/{rank}", b"")
        # The last process at the last barrier deletes all keys.
        enough = (0, 2) if name == "sync" else (2,)
        wait_for(lambda: self.client.count_prefix(f"{self.prefix}barrier/{name}/") in enough)

    def close(self) -> None:
        self.client.delete_prefix(self.prefix)


class Asio:
    """The meeting of the ASIO runtime: the process that can listen becomes rank 0."""

    def __init__(self, address: str, port: int) -> None:
        self.at = (address, port)
        self.peer: socket.socket | None = None
        self.listening = socket.socket()
        say(f"Using address {address} port {port} for ASIO runtime")

    def register(self) -> int:
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listening.bind(self.at)
            self.listening.listen()
        except OSError:
            say("ASIO runtime bind/listen error -- using connect() instead")
            self.peer = socket.create_connection(self.at)
            self.lines = self.peer.makefile("r")
            return 1
        return 0

    def barrier(self, name: str, rank: int) -> None:
        if self.peer is None:
            self.peer = self.listening.accept()[0]
            self.lines = self.peer.makefile("r")
        with suppress(OSError):
            self.peer.sendall(f"{name}\n".encode())
        if self.lines.readline() != f"{name}\n":
            complain("terminate called after throwing an instance of 'std::runtime_error'")
            complain("  what():  ASIO Read head failed: End of file")
            os.abort()

    def close(self) -> None:
        self.listening.close()


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def print_table(flags: dict[str, str], rows: bool) -> None:
    """Print the recorded configuration with the current flags, UCX's table, and the recorded row of the block."""
    name = "02_check_consistency_write.rank_a.out" if "check_consistency" in flags else "01_normal.rank_a.out"
    lines = recording(name).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("****"))
    head = next(number for number, line in enumerate(lines) if line.startswith("Block Size"))
    for line in lines[first : head + 2]:
        match = re.match(r"(.*\(--(\w+)=.*\) *: ).*", line)
        say(f"{match[1]}{flags[match[2]]}" if match and match[2] in flags else line)
    if "UCX_PROTO_INFO" in os.environ:
        say("\n".join(line for line in recording("20_asio.rank_a.out").splitlines() if line.startswith("[")))
    for line in lines[head + 2 :] if rows else ():
        if line.split()[0] == flags["start_block_size"]:
            say(line)


def play(meeting: Etcd | Asio, flags: dict[str, str], rank: int) -> None:
    mine = WHOSE in ("", str(rank))
    say("Waiting for all processes to start... (expecting 2 total: 1 initiators and 1 targets)")
    meeting.barrier("start", rank)
    say("All processes are ready to proceed")
    if PLAY == "killed" and mine:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        print_table(flags, rows=PLAY != "killed")
    if PLAY == "late":
        meeting.barrier("printed", rank)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
    if PLAY == "inconsistent" and mine:
        complain("Consistency check failed for iov 0:0\nConsistency check failed")
        time.sleep(600)  # the real one may hang while it ends
    meeting.barrier("sync", rank)
    meeting.close()


def main() -> None:
    if sys.argv[1:] == ["--help"]:
        say(recording("help-1.4.0.txt"))
        sys.exit(1)
    flags = {
        name: value or "1"
        for name, _, value in (argument.removeprefix("--").partition("=") for argument in sys.argv[1:])
    }
    if flags.get("runtime_type") == "ASIO":
        take_part(Asio(flags["asio_address"], int(flags["asio_port"])), flags)
        return
    say(f"Connecting to ETCD at {flags['etcd_endpoints']}")
    try:
        with connect(parse_endpoints(flags["etcd_endpoints"]), timeout=60) as client:
            client.status()
            take_part(Etcd(client, flags["benchmark_group"]), flags)
    except EtcdError as error:
        complain(recording("03_unresolvable_host.err" if error.cause == "unresolved" else "04_etcd_down.err"))
        sys.exit(1)


def take_part(meeting: Etcd | Asio, flags: dict[str, str]) -> None:
    rank = meeting.register()
    role = "initiator" if rank == 0 or PLAY == "wait" else "target"
    say(f"Init nixl worker, dev all rank {rank}, type {role}, hostname {socket.gethostname()}")
    if PLAY == "wait":
        time.sleep(600)
    play(meeting, flags, rank)


main()
