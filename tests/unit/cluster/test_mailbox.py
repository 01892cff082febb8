# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank to many through a real etcd: how many requests they need, their order, and what fails them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from helpers.etcd import Etcd, wait_until
from helpers.rank_group import RankGroup, rank_group

from pytest_nixl.cluster.messages import LARGEST, TOGETHER, Mailbox, MailError, Message, WorkerLine
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import connect

SIZE = 4
#: Messages to each rank, from as many threads.
MESSAGES = 25


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


def sized(size: int) -> dict[str, object]:
    """Return a message that has this many bytes when it is sent."""
    return {"worker": 1, "line": "x" * (size - len(b'{"worker":1,"line":""}'))}


def test_one_request_takes_messages_up_to_the_largest_size_and_a_larger_one_is_not_sent(
    etcd: Etcd, group: RankGroup
) -> None:
    half = LARGEST // 2 - 65 * group.members[0].values.sealed
    with group.client(0)() as counted:
        box = Mailbox(counted, group.members[0], handle=lambda *_: None, failed=lambda _: None)
        for messages, requests in (
            ({1: sized(LARGEST)}, 1), ({1: sized(half), 2: sized(half)}, 2), ({1: sized(half), 2: sized(half + 1)}, 4),
        ):  # fmt: skip
            box.send_each(messages)
            assert group.requests() == [requests, 0, 0, 0]
        with pytest.raises(MailError) as caught:
            box.send_each({1: line(3), 2: sized(LARGEST + 1)})
        assert group.requests() == [4, 0, 0, 0], "no other message of the call is sent"
        box.close()
    assert caught.value.reason == (
        f"a message of {LARGEST + 1} bytes to rank 2 is too large for etcd, which takes {LARGEST}"
    )
    assert caught.value.remedy == "read and write buffers in parts of at most half a megabyte"


def test_a_closed_mailbox_names_the_ranks_that_get_no_message(etcd: Etcd, group: RankGroup) -> None:
    with mailbox(etcd, group, 0) as box:
        box.close()
        with pytest.raises(MailError, match="a message to rank 1, 2 was not sent: this rank has left the group"):
            box.send_each({1: line(1), 2: line(2)})


def test_one_request_is_within_the_operations_that_etcd_accepts() -> None:
    assert TOGETHER <= 128
