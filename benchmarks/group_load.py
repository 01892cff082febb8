# SPDX-License-Identifier: Apache-2.0
"""What a group of ranks costs its etcd: the requests and bytes of each phase, for any number of ranks.

The counts follow from the code of pytest-nixl, and tests compare them with the requests of real groups. They hold if
no answer is lost, no lease has to be refreshed, and no rank waits for more than five seconds: :func:`kept` and
:func:`waited` say what is added for each second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pytest_nixl.cluster.group import TTL, Roster
from pytest_nixl.cluster.membership import FREQUENT_RANKS, MESSAGE_SECONDS, WATCH_SECONDS
from pytest_nixl.cluster.messages import TOGETHER
from pytest_nixl.etcd.transaction import REQUEST_LIMIT

#: The bytes of a seal and the space behind it.
_SEAL = 65
#: The digits of a process id, which differ between hosts.
_PID = 4_194_304
#: The commands that rank 0 sends to the worker of a rank for one window of a traffic pattern: run, and report.
_COMMANDS_OF_A_WINDOW = 2


@dataclass(frozen=True)
class PhaseLoad:
    """The requests of one phase.

    :param each: the requests of a rank.
    :param one: the requests of the rank with most of them: it completes the group, opens the barrier, or is rank 0.
    :param total: the requests of all ranks.
    """

    each: int
    one: int
    total: int

    def __add__(self, other: PhaseLoad) -> PhaseLoad:
        return PhaseLoad(self.each + other.each, self.one + other.one, self.total + other.total)


def joining(ranks: int, *, sealed: bool) -> PhaseLoad:
    """Return the requests with which all ranks join: a lease, the registration, and a watch for the roster.

    The rank that completes the group reads the members and writes the roster in place of the watch.

    :param sealed: whether the group has a token. Each rank then writes a second key.
    """
    requests = 3 + sealed
    return PhaseLoad(requests, requests + 1, requests * ranks + 1)


def barrier(ranks: int, *, sealed: bool) -> PhaseLoad:
    """Return the requests of one barrier: an arrival, and a watch for the gate. The last rank opens the gate instead.

    :param sealed: whether the group has a token. The last rank then reads the arrivals, to check their seals.
    """
    return PhaseLoad(2, 2 + sealed, 2 * ranks + sealed)


def serving(ranks: int) -> PhaseLoad:
    """Return the requests with which rank 0 and its peers start to exchange messages.

    Each reads and watches its mail, and the members that it needs: rank 0 all of them, a peer rank 0 and itself.
    """
    return PhaseLoad(4, 4, 4 * ranks)


def exchanges(ranks: int, count: int = 1) -> PhaseLoad:
    """Return the requests of rank 0's requests to all peers, one after another, and of their answers.

    One request to etcd writes up to 32 messages, or removes up to 32 that were read.

    :param count: how often rank 0 asks all peers.
    """
    peers = ranks - 1
    answers = count + count // TOGETHER
    requests = count * ceil(peers / TOGETHER) + count * peers // TOGETHER
    return PhaseLoad(answers, requests, peers * answers + requests)


def leaving(ranks: int) -> PhaseLoad:
    """Return the requests with which all ranks leave: each ends its lease, and looks whether it was the last one."""
    return PhaseLoad(2, 2, 2 * ranks)


def whole_run(ranks: int, count: int, *, sealed: bool) -> PhaseLoad:
    """Return the requests of a run: all ranks join, pass a barrier, exchange messages, pass another one, and leave.

    :param count: how often rank 0 asks all peers.
    """
    both = barrier(ranks, sealed=sealed) + barrier(ranks, sealed=sealed)
    return joining(ranks, sealed=sealed) + both + serving(ranks) + exchanges(ranks, count) + leaving(ranks)


def kept(ranks: int, ttl: int = TTL) -> float:
    """Return the requests per second of all ranks during a run: refreshes of their leases, and renewed watches.

    :param ttl: the seconds of a lease.
    """
    return ranks * (3 / ttl + 2 / WATCH_SECONDS)


def waited(ranks: int, ttl: int = TTL) -> float:
    """Return the requests per second of all ranks while they wait for the last one: refreshes, sentences, watches.

    For a sentence a rank reads all members, so that a rank of a large group says it less often.

    :param ttl: the seconds of a lease.
    """
    printed = MESSAGE_SECONDS * max(1.0, ranks / FREQUENT_RANKS)
    return ranks * (3 / ttl + 1 / printed + 1 / min(printed, ttl))


def roster_bytes(ranks: int, host: int = 16, *, sealed: bool = True) -> int:
    """Return the bytes of the roster, of which each rank receives one.

    :param host: the length of a host name.
    :param sealed: whether the group has a token.
    """
    members = [("0" * 16, "h" * host, _PID)] * ranks
    return len(Roster.value(TTL, members)) + _SEAL * sealed


def most_ranks(host: int = 16) -> int:
    """Return how many ranks the roster can name: it is one value, and etcd accepts a request of 1.5 MiB.

    :param host: the length of a host name.
    """
    empty = roster_bytes(0, host)
    return (REQUEST_LIMIT - 1024 - empty) // (roster_bytes(2, host) - roster_bytes(1, host))


def messages_of_a_window(ranks: int) -> int:
    """Return the messages of one window of a traffic pattern: to the worker of each peer, and its answers.

    One command starts the window at a rank, and one reads what it measured. Each is answered.
    """
    return 2 * _COMMANDS_OF_A_WINDOW * (ranks - 1)
