# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks: the valid values of their fields, and the mailbox in etcd that keeps their order.

A message is one key, ``…/mail/RECEIVER/SENDER/NUMBER``. It is attached to the sender's lease, so that unread messages
are removed with it. Messages to different receivers that wait at the same time are written by one request. The
receiver watches its keys, reads them in the order in which they were written, and deletes them. It accepts each number
of a sender once, so that an old message that is written again is ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from pytest_nixl.cluster.group import PID, SIZE
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import Every, Form, Number, OneOf, StrictError, Text, check, loads
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import delete, put, txn
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.model.conclusion import MOST_FIGURES

_NUMBER = Number(0, 1 << 53, whole=True)
_NAME = Text(64, "[a-z][a-z0-9_]*")
_LINE = Text(1 << 20)
_CODE = OneOf((None, Number(-128, 255, whole=True)))

_VALUE = Number(-1e300, 1e300)
_FIGURE = {
    "check": Text(256),
    "name": Text(256),
    "labels": Every(Text(256), keys=True),
    "value": _VALUE,
    "unit": Text(64),
    "at_most": OneOf((None, _VALUE)),
    "at_least": OneOf((None, _VALUE)),
    "verdict": Text(16),
}

#: The part of ``verdict.json`` that is the same for every rank; empty if the run did not start.
_CONCLUSION = OneOf(
    (
        {},
        {
            "verdict": Text(16),
            "gate": bool,
            "warnings": _NUMBER,
            "interrupted": Text(),
            "checks": Every(_NUMBER, keys=True),
            "rows": _NUMBER,
            "failing": Every({name: Text() for name in ("check", "row", "verdict", "reason", "remedy")}, most=1024),
            "known_limits": Every(Text(256), most=1024),
            "failing_left_out": _NUMBER,
            "figures": Every(_FIGURE, most=MOST_FIGURES),
        },
    )
)
#: The arguments and the answer of each request of rank 0 to a peer. Tests may add requests that are not listed here.
REQUESTS: Mapping[str, tuple[Form, Form]] = {
    "start": ({"worker": _NUMBER, "role": _NAME, "environment": Every(OneOf((None, Text(1 << 15))), keys=True)}, PID),
    "kill": ({"worker": _NUMBER}, _CODE),
    "state": ({"worker": _NUMBER}, Text(255)),
    "output": ({"worker": _NUMBER}, Text()),
    "signal": ({"worker": _NUMBER, "signal": Number(1, 64, whole=True)}, None),
    "end": (
        {"code": Number(0, 255, whole=True), "verdict": Text(), "refusal": Text(), "verdict_fields": _CONCLUSION},
        None,
    ),
    "command": ({}, Text()),
    "address": ({}, Text(255, r"[0-9A-Za-z.:%_-]+")),
    "facts": ({"peers": Every(Text(255))}, Every(Any, keys=True)),
    "devices": ({}, Every(Any, keys=True)),
    "claim": ({"group": Text(128), "size": SIZE, "seconds": Number(0, 86_400)}, _NUMBER),
    "last_words": ({}, Every(Text(), keys=True)),
}

Message: TypeAlias = "PeerRequest | WorkerLine | PeerAnswer | WorkerEnded | PeerLeft"
#: The largest message in bytes: etcd accepts 1.5 MiB a request, and the gateway's base64 adds a third.
LARGEST = 1 << 20
#: The number of messages that one request writes, and that one deletes. etcd accepts 128 operations of a request.
TOGETHER = 32
#: The end of a key after the receiver: the sender and the number.
_PLACE = re.compile(r"([0-9]{6})/([0-9]{12})")
Handler = Callable[[int, Message], None]


@dataclass(frozen=True)
class PeerRequest:
    """A request of rank 0 to a peer.

    :param request: the name of the request.
    :param number: identifies the request; the answer repeats it.
    :param arguments: JSON values by name.
    """

    request: str
    number: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerLine:
    """A line that is written to a worker, or by one."""

    worker: int
    line: str


@dataclass(frozen=True)
class PeerAnswer:
    """The answer of a peer to one request.

    :param number: the number of the request.
    :param result: a JSON value.
    :param error: why the peer refuses or failed; None if it did neither.
    :param remedy: what to do about the error.
    """

    number: int
    result: Any
    error: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class WorkerEnded:
    """The news that a worker of a peer has ended.

    :param worker: the number of the worker.
    :param code: its exit code, negative for a signal; None if it is not known.
    """

    worker: int
    code: int | None


@dataclass(frozen=True)
class PeerLeft:
    """The news that a peer leaves before the run is over.

    :param reason: what ended it, such as ``Ctrl-C (SIGINT)``.
    """

    reason: str


#: The form of each message, and what it is, by the field that tells it from the others.
_MESSAGES: Mapping[str, tuple[Form, Callable[..., Message]]] = {
    "ask": (
        {"ask": _NAME, "number": _NUMBER, "*": Any},
        lambda ask, number, **arguments: PeerRequest(ask, number, arguments),
    ),
    "error": (
        {"answer": _NUMBER, "error": Text(), "remedy?": Text()},
        lambda answer, error, remedy="": PeerAnswer(answer, None, error, remedy),
    ),
    "answer": ({"answer": _NUMBER, "result": Any}, lambda answer, result: PeerAnswer(answer, result)),
    "ended": ({"worker": _NUMBER, "ended": _CODE}, lambda worker, ended: WorkerEnded(worker, ended)),
    "left": ({"left": Text(256)}, lambda left: PeerLeft(left)),
    "line": ({"worker": _NUMBER, "line": _LINE}, WorkerLine),
}


def read_message(plain: Any) -> Message:
    """Return the message in a JSON value.

    :raises StrictError: if the value is not a message.
    """
    if not isinstance(plain, dict):
        raise StrictError("it is not a message: expected a JSON object")
    form, make = next((_MESSAGES[name] for name in _MESSAGES if name in plain), _MESSAGES["line"])
    check(form, plain)
    return make(**plain)


def check_ask(request: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a request.

    :param request: the name of the request; unknown names are not checked.
    :raises StrictError: if an argument is missing, unknown or has a wrong value.
    """
    if request in REQUESTS:
        check(REQUESTS[request][0], dict(arguments))


def check_answer(request: str, result: Any) -> None:
    """Check the answer of a peer to a request.

    :param request: the name of the request; unknown names are not checked.
    :raises StrictError: if the answer has a wrong form.
    """
    if request in REQUESTS:
        check(REQUESTS[request][1], result)


class MailError(NixlPluginError):
    """A message could not be sent."""


@dataclass(eq=False)
class _Outgoing:
    """A message that is to be written.

    :param written: whether it was written, or failed.
    :param error: why it could not be written; None if it was.
    """

    rank: int
    key: str
    value: bytes
    written: bool = False
    error: NixlPluginError | None = None


class Mailbox:
    """Sends messages of one rank, and receives messages to it after :meth:`open`.

    :param client: a client that nothing else uses, because a watch is always open on it.
    :param membership: the membership of this rank; it must outlive the mailbox.
    :param handle: called with the sender's rank and each message, in a thread of the mailbox. Keys that are not
        messages from a rank of this group are not passed on; :attr:`GroupValues.ignored` names them.
    :param failed: called with the error that ended the reading: etcd was away for longer than the lease lasts.
    """

    def __init__(
        self,
        client: EtcdClient,
        membership: Membership,
        *,
        handle: Handler,
        failed: Callable[[NixlPluginError], None],
    ) -> None:
        self._client = client
        self._membership = membership
        self._mail = f"{membership.root}mail/"
        self._own = f"{self._mail}{membership.rank:06d}/"
        self._handle = handle
        self._failed = failed
        self._sent: Counter[int] = Counter()
        #: The messages that no request has taken yet, in order.
        self._waiting: list[_Outgoing] = []
        self._queueing = threading.Lock()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        #: The number of the last message that was read, by sender.
        self._last: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name=f"mail of rank {membership.rank}", daemon=True)

    def open(self) -> None:
        """Start to receive messages."""
        self._reader.start()

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message.

        :param rank: the receiver.
        :param message: JSON values.
        :raises MailError: if the message is too large, or the mailbox is closed.
        :raises EtcdError: if etcd does not answer.
        :raises LeaseLostError: if the lease has ended.
        """
        self.send_each({rank: message})

    def send_each(self, messages: Mapping[int, dict[str, Any]]) -> None:
        """Send messages to several ranks, up to 32 of them with one request. Parameters and errors as :meth:`send`.

        :param messages: the message to each rank.
        """
        texts = {rank: _text(rank, message) for rank, message in messages.items()}
        with self._queueing:
            if self._closed.is_set():
                ranks = ", ".join(map(str, texts))
                raise MailError(f"a message to rank {ranks} was not sent: this rank has left the group")
            outgoing = [self._outgoing(rank, text) for rank, text in texts.items()]
            self._waiting += outgoing
        with self._sending:
            while not all(letter.written for letter in outgoing):  # else another thread has written them
                self._write(self._next_to_write())
        for letter in outgoing:
            if letter.error is not None:
                raise letter.error

    def _outgoing(self, rank: int, text: bytes) -> _Outgoing:
        key = f"{self._mail}{rank:06d}/{self._membership.rank:06d}/{self._sent[rank]:012d}"
        self._sent[rank] += 1
        members = self._membership.members
        sender, receiver = members[self._membership.rank], members[rank]
        return _Outgoing(rank, key, self._membership.values.message(key, text, sender, receiver))

    def _next_to_write(self) -> list[_Outgoing]:
        """Take the next messages from the queue: at most one to each rank.

        A rank reads its messages in the order of their revisions, and a request has one revision.
        """
        taken: dict[int, _Outgoing] = {}
        size = 0
        with self._queueing:
            for message in self._waiting:
                size += len(message.value)
                if taken and (len(taken) == TOGETHER or size > LARGEST):
                    break
                taken.setdefault(message.rank, message)
            self._waiting = [message for message in self._waiting if taken.get(message.rank) is not message]
        return list(taken.values())

    def _write(self, messages: list[_Outgoing]) -> None:
        # Every message has its own key, so that writing it again after a lost answer changes nothing.
        lease = self._membership.lease
        writing = txn([], [put(message.key, message.value, lease) for message in messages])
        try:
            self._membership.retry(lambda: self._client.transaction(writing, repeatable=True))
        except NixlPluginError as error:
            for message in messages:
                message.error = error
        except BaseException:
            # This thread was interrupted. Another one writes the messages of the others.
            with self._queueing:
                self._waiting = messages + self._waiting
            raise
        for message in messages:
            message.written = True

    def close(self) -> None:
        """Stop sending and receiving."""
        with self._sending, self._queueing:
            self._closed.set()

    def _read(self) -> None:
        """Read the messages that wait, and then those that come, until the mailbox is closed."""
        read: list[str] = []
        mail = Watched(self._own, 1, prefix=True)
        try:
            for event in self._membership.follow(self._client, mail, closed=self._closed):
                if not event.deleted:
                    self._take(event.item.key, event.item.value)
                    read.append(event.item.key)
                if len(read) >= TOGETHER:
                    deletion = txn([], [delete(key) for key in read])
                    self._membership.retry(partial(self._client.transaction, deletion))
                    read.clear()
        except NixlPluginError as error:
            if not self._closed.is_set():
                self._failed(error)

    def _take(self, key: str, value: bytes) -> None:
        values, members = self._membership.values, self._membership.members
        place = _PLACE.fullmatch(key[len(self._own) :])
        if place is None or not 0 <= int(place[1]) < len(members):
            values.ignore(key, "it is not the key of a message from a rank of this group")
            return
        sender, number = int(place[1]), int(place[2])
        try:
            text = values.read_message(key, value, members[sender], members[self._membership.rank])
            if number <= self._last.get(sender, -1):
                return  # read before, or written again after a lost answer
            message = read_message(loads(text, most=LARGEST))
        except StrictError as error:
            values.ignore(key, str(error))
            return
        self._last[sender] = number
        self._handle(sender, message)


def _text(rank: int, message: dict[str, Any]) -> bytes:
    """Return a message as it is sent.

    :raises MailError: if it is too large.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        raise MailError(
            f"a message of {len(text)} bytes to rank {rank} is too large for etcd, which takes {LARGEST}",
            "read and write buffers in parts of at most half a megabyte",
        )
    return text
