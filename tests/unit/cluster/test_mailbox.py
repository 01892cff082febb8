# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank to many through a real etcd: how many requests they need, their order, and what fails them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from helpers.etcd import Etcd, running_etcd, wait_until
from helpers.rank_group import RankGroup, rank_group

from pytest_nixl.cluster.messages import TOGETHER, Mailbox, MailError, Message, WorkerLine
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import connect

SIZE = 4
#: Messages to each rank, from as many threads.
MESSAGES = 25


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture(params=["", "t"], ids=["open", "sealed"])
def group(etcd: Etcd, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """A group that has joined, and leaves."""
    with rank_group(etcd.url, SIZE, request.param) as members:
        members.join()
        members.barrier()
        members.count_again()
        yield members
        members.leave()


@contextmanager
def mailbox(etcd: Etcd, group: RankGroup, rank: int, read: list[Message] | None = None) -> Iterator[Mailbox]:
    """Yield the mailbox of a rank. Only with ``read`` it receives messages."""
    failures: list[NixlPluginError] = []
    into: list[Message] = [] if read is None else read
    with connect([etcd.endpoint], timeout=60) as client:
        box = Mailbox(
            client,
            group.members[rank],
            handle=lambda sender, message: into.append(message),
            failed=failures.append,
        )
        if read is not None:
            box.open()
        yield box
        box.close()
    assert not failures


def line(worker: int) -> dict[str, object]:
    return {"worker": worker, "line": "x"}


def test_messages_to_several_ranks_are_one_request(etcd: Etcd, group: RankGroup) -> None:
    with group.client(0)() as counted:
        box = Mailbox(counted, group.members[0], handle=lambda *_: None, failed=lambda _: None)
        box.send_each({rank: line(rank) for rank in range(1, SIZE)})
        assert group.requests() == [1, 0, 0, 0]
        box.send(1, line(9))
        assert group.requests() == [2, 0, 0, 0]
        box.close()
    with connect([etcd.endpoint], timeout=60) as client:
        mail = client.get_prefix(f"{group.members[0].root}mail/")
    assert [key[-26:] for key in mail] == [
        f"{receiver:06d}/000000/{number:012d}" for receiver, number in ((1, 0), (1, 1), (2, 0), (3, 0))
    ]


def test_each_rank_reads_the_messages_of_many_threads_in_order_and_once(etcd: Etcd, group: RankGroup) -> None:
    read: dict[int, list[Message]] = {rank: [] for rank in range(1, SIZE)}
    with (
        mailbox(etcd, group, 1, read[1]), mailbox(etcd, group, 2, read[2]), mailbox(etcd, group, 3, read[3]),
        mailbox(etcd, group, 0) as box, ThreadPoolExecutor(SIZE) as pool,
    ):  # fmt: skip
        start = threading.Barrier(SIZE)

        def send(rank: int) -> None:
            start.wait(60)
            for number in range(MESSAGES):
                box.send(rank, line(number))

        def send_to_all() -> None:
            start.wait(60)
            for number in range(MESSAGES):
                box.send_each({rank: line(MESSAGES + number) for rank in range(1, SIZE)})

        for future in [*(pool.submit(send, rank) for rank in range(1, SIZE)), pool.submit(send_to_all)]:
            future.result(120)
        wait_until(
            lambda: all(len(messages) == 2 * MESSAGES for messages in read.values()), 60, f"all messages: {read}"
        )
        with connect([etcd.endpoint], timeout=60) as client:
            mail = f"{group.members[0].root}mail/"
            prefixes = [f"{mail}{rank:06d}/" for rank in read]
            wait_until(
                lambda: all(len(client.get_prefix(future)) < TOGETHER for future in prefixes), 60, "most to be deleted"
            )
    for messages in read.values():
        numbers = [message.worker for message in messages if isinstance(message, WorkerLine)]
        assert [number for number in numbers if number < MESSAGES] == list(range(MESSAGES))
        assert [number for number in numbers if number >= MESSAGES] == list(range(MESSAGES, 2 * MESSAGES))


def test_a_request_that_etcd_refuses_fails_the_messages_in_it_and_no_others(etcd: Etcd, group: RankGroup) -> None:
    read: list[Message] = []
    half = "x" * (700 << 10)
    with mailbox(etcd, group, 1, read), mailbox(etcd, group, 0) as box:
        # Together they are too large for one request, and etcd gets two.
        box.send_each({1: {"worker": 1, "line": half}, 2: {"worker": 2, "line": half}})
        with pytest.raises(MailError, match=r"a message of \d+ bytes to rank 2 is too large for etcd"):
            box.send_each({1: line(3), 2: {"worker": 4, "line": half + half}})
        box.send(1, line(5))
        wait_until(lambda: len(read) == 2, 60, "both messages")
    assert [message.worker for message in read if isinstance(message, WorkerLine)] == [1, 5]


def test_a_closed_mailbox_names_the_ranks_that_get_no_message(etcd: Etcd, group: RankGroup) -> None:
    with mailbox(etcd, group, 0) as box:
        box.close()
        with pytest.raises(MailError, match="a message to rank 1, 2 was not sent: this rank has left the group"):
            box.send_each({1: line(1), 2: line(2)})


def test_one_request_is_within_the_operations_that_etcd_accepts() -> None:
    assert TOGETHER <= 128
