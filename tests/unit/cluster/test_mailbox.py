# SPDX-License-Identifier: Apache-2.0
"""Messages of one rank to many: how many requests they need, their order, which are read, and what fails them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.etcd import Etcd, wait_until
from helpers.rank_group import rank_group

from pytest_nixl.cluster.group import Member
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.messages import LARGEST, TOGETHER, Mailbox, MailError, Message, WorkerLine
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.transaction import KeyValue, decode
from pytest_nixl.etcd.watch import Watched, WatchEvent

ROOT = "/pytest-nixl/groups/g/"
SIZE = 4
#: Messages to each rank, from as many threads.
MESSAGES = 25


MEMBERS = [Member(rank, f"token-{rank}", f"host-{rank}", 1) for rank in range(3)]


class Mail:
    """The mailbox of rank 0 of three, its client and its membership: doubles that keep what is sent and read."""

    def __init__(self) -> None:
        self.deleted: list[int] = []
        self.sent: list[list[str]] = []
        self.interrupted: list[BaseException] = []
        self.read: list[tuple[int, str]] = []
        self.failures: list[NixlPluginError] = []
        #: The mail that comes: the end of each key, and its value; or the error that ends the reading.
        self.mail: list[tuple[str, bytes] | Callable[[], None]] = []
        self.values = GroupValues(ROOT)
        membership = SimpleNamespace(
            root=ROOT, rank=0, members=MEMBERS, values=self.values, lease=SimpleNamespace(id=7), follow=self.follow,
            retry=self.retry,
        )  # fmt: skip
        self.box = Mailbox(
            cast(EtcdClient, self), cast(Any, membership), handle=self.handle, failed=self.failures.append
        )

    def retry(self, ask: Callable[[], object], *_: object) -> object:
        if self.interrupted:
            raise self.interrupted.pop()
        return ask()

    def handle(self, sender: int, message: Message) -> None:
        assert isinstance(message, WorkerLine)
        self.read.append((sender, message.line))

    def transaction(self, transaction: dict[str, Any], *, repeatable: bool = False) -> None:
        if repeatable:  # a message may be written again after a lost answer
            puts = [part["request_put"] for part in transaction["success"]]
            assert {put["lease"] for put in puts} == {7}
            self.sent.append([decode(put["key"]).decode().removeprefix(f"{ROOT}mail/") for put in puts])
            return
        self.deleted.append(sum("request_delete_range" in part for part in transaction["success"]))

    def follow(self, client: object, watched: Watched, *, closed: object) -> Iterator[WatchEvent]:
        assert (client, watched) == (self, Watched(f"{ROOT}mail/000000/", 1, prefix=True))
        for mail in self.mail:
            if callable(mail):
                mail()
            else:
                item = KeyValue(f"{ROOT}mail/000000/{mail[0]}", mail[1], 1, 1, 1)
                yield WatchEvent(item, deleted=False)
                yield WatchEvent(KeyValue(item.key, b"", 0, 1, 0), deleted=True)

    def read_all(self, *mail: tuple[str, bytes] | Callable[[], None]) -> None:
        """Let the mailbox read this mail, and nothing more."""
        self.mail = list(mail)
        before = set(threading.enumerate())
        self.box.open()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)


def sized(size: int) -> dict[str, Any]:
    """Return a message that has this many bytes when it is sent."""
    return {"worker": 1, "line": "x" * (size - len(b'{"worker":1,"line":""}'))}


def line_of(size: int) -> bytes:
    """Return such a message as it would be sent, if it were not too large."""
    return json.dumps(sized(size), separators=(",", ":")).encode()


def test_a_message_is_read_once_and_up_to_the_largest_size() -> None:
    mail = Mail()
    numbers = ((0, LARGEST), (0, 100), (1, LARGEST + 1), (1, 101), (1, 100), (3, 102), (2, 100))
    strange = ("000003/000000000000", "000002/x", "000002", "000002/", "/000000000000")
    wrong = (b"[" * 100_000, b'{"ask": ["x"]}', b'{"answer": {}}', b"\xff")
    mail.read_all(
        *((f"000001/{number:012d}", line_of(size)) for number, size in numbers),
        *((f"000001/{number:012d}", value) for number, value in enumerate(wrong, 4)),
        ("000002/000000000001", line_of(103)),
        *((key, line_of(100)) for key in strange),
    )
    assert mail.read == [(sender, sized(size)["line"]) for sender, size in ((1, LARGEST), (1, 101), (1, 102), (2, 103))]
    ignored = {key.removeprefix(f"{ROOT}mail/000000/"): reason for key, reason in mail.values.ignored.items()}
    assert list(ignored) == [*(f"000001/{number:012d}" for number in (1, 4, 5, 6, 7)), *strange]
    assert {ignored[key] for key in strange} == {"it is not the key of a message from a rank of this group"}


def test_a_thread_that_is_interrupted_leaves_its_messages_to_the_next_one() -> None:
    mail = Mail()
    mail.interrupted.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        mail.box.send(1, sized(100))
    mail.box.send_each({1: sized(100), 2: sized(100)})
    first, second, other = "000001/000000/000000000000", "000001/000000/000000000001", "000002/000000/000000000000"
    assert mail.sent == [[first, other], [second]]
    mail.interrupted.append(NixlPluginError("etcd is gone"))
    with pytest.raises(NixlPluginError, match="etcd is gone"):
        mail.box.send(1, sized(100))
    assert len(mail.sent) == 2


def test_a_mailbox_deletes_what_it_has_read_once() -> None:
    mail = Mail()
    mail.read_all(*((f"000001/{number:012d}", line_of(100)) for number in range(2 * TOGETHER + 1)))
    assert (len(mail.read), mail.deleted) == (2 * TOGETHER + 1, [TOGETHER, TOGETHER])
    assert mail.values.ignored == {}


@pytest.mark.parametrize("closed", [False, True])
def test_a_mailbox_that_cannot_be_read_says_so_unless_it_is_closed(closed: bool) -> None:
    mail, error = Mail(), NixlPluginError("etcd is gone")

    def fail() -> None:
        if closed:
            mail.box.close()
        raise error

    mail.read_all(fail)
    assert mail.failures == ([] if closed else [error])


def test_messages_of_one_request_have_the_largest_size_together_and_a_larger_one_is_not_sent() -> None:
    mail, half = Mail(), LARGEST // 2
    for messages, requests in (
        ({1: sized(LARGEST)}, 1), ({1: sized(half), 2: sized(half)}, 2), ({1: sized(half), 2: sized(half + 1)}, 4),
    ):  # fmt: skip
        mail.box.send_each(messages)
        assert len(mail.sent) == requests
    with pytest.raises(MailError) as caught:
        mail.box.send_each({1: sized(100), 2: sized(LARGEST + 1)})
    assert len(mail.sent) == 4, "no other message of the call is sent"
    assert caught.value.reason == (
        f"a message of {LARGEST + 1} bytes to rank 2 is too large for etcd, which takes {LARGEST}"
    )
    assert caught.value.remedy == "read and write buffers in parts of at most half a megabyte"
    mail.box.close()
    with pytest.raises(MailError, match="a message to rank 1, 2 was not sent: this rank has left the group"):
        mail.box.send_each({1: sized(100), 2: sized(100)})


def test_each_rank_reads_the_messages_of_many_threads_in_order_and_once(etcd: Etcd) -> None:
    """The first one is the largest that a real etcd has to take."""
    read: dict[int, list[Message]] = {rank: [] for rank in range(SIZE)}
    failures: list[NixlPluginError] = []
    with rank_group(etcd.url, SIZE, "t") as group, ThreadPoolExecutor(SIZE) as pool, ExitStack() as stack:
        group.join()
        group.barrier()
        boxes = [
            Mailbox(
                stack.enter_context(connect([etcd.endpoint], timeout=60)),
                member,
                handle=lambda sender, message, rank=member.rank: read[rank].append(message),  # type: ignore[misc]
                failed=failures.append,
            )
            for member in group.members
        ]
        for box in boxes[1:]:
            box.open()
        start = threading.Barrier(SIZE)

        def send(rank: int) -> None:
            start.wait(60)
            for number in range(MESSAGES):
                boxes[0].send(rank, {"worker": number, "line": "x"})

        def send_to_all() -> None:
            start.wait(60)
            for number in range(MESSAGES, 2 * MESSAGES):
                boxes[0].send_each({rank: {"worker": number, "line": "x"} for rank in range(1, SIZE)})

        boxes[0].send(1, sized(LARGEST))
        for future in [*(pool.submit(send, rank) for rank in range(1, SIZE)), pool.submit(send_to_all)]:
            future.result(120)
        wait_until(
            lambda: [len(read[rank]) for rank in range(SIZE)] == [0, 2 * MESSAGES + 1, 2 * MESSAGES, 2 * MESSAGES],
            60,
            f"all messages: {read}",
        )
        for box in boxes:
            box.close()
        group.leave()
    assert not failures
    assert read[1].pop(0) == WorkerLine(**sized(LARGEST))
    for messages in list(read.values())[1:]:
        numbers = [message.worker for message in messages if isinstance(message, WorkerLine)]
        assert [number for number in numbers if number < MESSAGES] == list(range(MESSAGES))
        assert [number for number in numbers if number >= MESSAGES] == list(range(MESSAGES, 2 * MESSAGES))
