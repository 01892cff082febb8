# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a group, through its etcd: JSON, in order, and nobody else's.

A message is one key under ``…/mail/RECEIVER/SENDER/NUMBER``, with the sender's lease: what is not read any more goes
with that. The receiver watches, reads in the order in which they were written, and deletes what it has read.
It takes each number once: an old message that is written again is not read again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.messages import Message, read_message
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import StrictError, loads
from pytest_nixl.etcd.client import EtcdClient, Watched
from pytest_nixl.etcd.transaction import TransactionResult, delete, get_prefix, txn

#: Bytes of one message's text: etcd takes 1.5 MiB a request, of which the gateway's base64 needs a third.
LARGEST = 1 << 20
#: Messages that are read before they are deleted, together: it is one request for all of them.
_DELETED_TOGETHER = 32
#: Seconds for which one watch waits; then the next one is opened.
_WATCH = 20.0
#: What follows the receiver in a key: the sender and the number.
_PLACE = re.compile(r"([0-9]{6})/([0-9]{12})")

Handler = Callable[[int, Message], None]


class MailError(NixlPluginError):
    """A message could not be sent."""


class Mailbox:
    """One rank's messages; they are read once it is opened.

    :param client: of its own: a watch is always open on it.
    :param membership: the place in the group whose messages these are; it outlives them.
    :param handle: called with the sender's rank and each message, in a thread of this mailbox's own. What is no message
        of a rank of this group is not handled; :attr:`GroupValues.ignored` names its key.
    :param failed: called with what ended the reading: the etcd was gone for longer than the lease lives.
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
        self._sending = threading.Lock()
        self._closed = threading.Event()
        #: By sender, the number of the last message that was read.
        self._last: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, name=f"mail of rank {membership.rank}", daemon=True)

    def open(self) -> None:
        """Begin to read: whoever handles messages can use this mailbox now."""
        self._reader.start()

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message.

        :raises MailError: where it is too large, or the mailbox is closed.
        :raises EtcdError: where the etcd does not answer, or :class:`FencedError` where the lease has ended.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > LARGEST:
            raise MailError(
                f"a message of {len(text)} bytes to rank {rank} is too large for etcd, which takes {LARGEST}",
                "read and write buffers in parts of half a megabyte",
            )
        with self._sending:
            if self._closed.is_set():
                raise MailError(f"a message to rank {rank} was not sent: this rank has left the group")
            key = f"{self._mail}{rank:06d}/{self._membership.rank:06d}/{self._sent[rank]:012d}"
            members = self._membership.members
            sender, receiver = members[self._membership.rank], members[rank]
            value = self._membership.values.message(key, text, sender, receiver)
            # A key of its own: to write it once more, after an answer that was lost, changes nothing.
            self._membership.insist(lambda: self._client.put(key, value, self._membership.lease))
            self._sent[rank] += 1

    def close(self) -> None:
        """Read and send no more."""
        with self._sending:
            self._closed.set()

    def _read(self) -> None:
        read: list[str] = []
        try:
            waiting = txn([], [get_prefix(self._own)])
            done = TransactionResult.of(self._membership.insist(lambda: self._client.transaction(waiting)))
            since = done.revision + 1
            for item in sorted(done.found(0).items, key=lambda item: item.create_revision):
                self._take(item.key, item.value)
                read.append(item.key)
            while not self._closed.is_set():
                for event in self._client.watch(Watched(self._own, since, prefix=True), seconds=_WATCH):
                    since = event.item.mod_revision + 1
                    if self._closed.is_set():
                        return
                    if not event.deleted:
                        self._take(event.item.key, event.item.value)
                        read.append(event.item.key)
                    if len(read) >= _DELETED_TOGETHER:
                        read = self._delete(read)
        except NixlPluginError as error:
            if not self._closed.is_set():
                self._failed(error)

    def _take(self, key: str, value: bytes) -> None:
        values, members = self._membership.values, self._membership.members
        place = _PLACE.fullmatch(key[len(self._own) :])
        if place is None or not 0 <= int(place[1]) < len(members):
            values.ignore(key, "it is the key of no message from a rank of this group")
            return
        sender, number = int(place[1]), int(place[2])
        try:
            text = values.read_message(key, value, members[sender], members[self._membership.rank])
            if number <= self._last.get(sender, -1):
                return  # written once more, after an answer that was lost; or by somebody who kept it
            message = read_message(loads(text, most=LARGEST))
        except StrictError as error:
            values.ignore(key, str(error))
            return
        self._last[sender] = number
        self._handle(sender, message)

    def _delete(self, read: list[str]) -> list[str]:
        """Delete what was read, in as many requests as etcd wants for it; return what is left: nothing."""
        for first in range(0, len(read), _DELETED_TOGETHER):
            deletion = txn([], [delete(key) for key in read[first : first + _DELETED_TOGETHER]])
            self._membership.insist(partial(self._client.transaction, deletion))
        return []
