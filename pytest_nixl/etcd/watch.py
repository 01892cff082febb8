# SPDX-License-Identifier: Apache-2.0
"""Watch keys of an etcd: every change in order, also if a connection breaks or a member dies."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, error_at, explain_answer, not_etcd, printable
from pytest_nixl.etcd.members import ATTEMPT_SECONDS, MALFORMED, OF_ONE_MEMBER, EtcdMembers
from pytest_nixl.etcd.transaction import KeyValue, encode, items, key_range, number

if TYPE_CHECKING:
    import requests

    from pytest_nixl.etcd import bounded_http
else:  # a run without an etcd does not need requests
    requests = lazy_module("requests")
    bounded_http = lazy_module("pytest_nixl.etcd.bounded_http")

#: Seconds that one watch connection lasts with several members: otherwise a stopped member would go unnoticed.
_WATCHED = 3.0


@dataclass(frozen=True)
class Watched:
    """One key to watch, or (with ``prefix``) every key that starts with it. See :func:`watch`."""

    key: str
    #: The first revision whose events are sent.
    since: int
    prefix: bool = False
    #: Whether to receive deletions only.
    deletions: bool = False

    def payload(self, number: int, revision: int) -> dict[str, Any]:
        """Return the watch request in the gateway's JSON form."""
        keys: dict[str, Any] = dict(key_range(self.key)) if self.prefix else {"key": encode(self.key)}
        filters = {"filters": ["NOPUT"]} if self.deletions else {}
        return {**keys, **filters, "start_revision": revision, "watch_id": number}

    def after(self, event: WatchEvent) -> Watched:
        """Return what to watch after this event."""
        same = event.item.key.startswith(self.key) if self.prefix else event.item.key == self.key
        return replace(self, since=max(self.since, event.item.mod_revision + 1)) if same else self


@dataclass(frozen=True)
class WatchEvent:
    """A key was written or deleted. For a deletion, ``item`` holds only the key and the revision."""

    item: KeyValue
    deleted: bool


def watch(members: EtcdMembers, *watched: Watched, seconds: float) -> Iterator[WatchEvent]:
    """Watch keys as :meth:`.EtcdClient.watch` says."""
    deadline = time.monotonic() + seconds
    failures = 0
    revisions = {number: item.since for number, item in enumerate(watched, 1)}
    while (remaining := deadline - time.monotonic()) > 0:
        member = members.next()
        try:
            for number, event in _watch_once(members, member, watched, revisions, remaining, failures):
                yield event
                revisions[number], failures = event.item.mod_revision + 1, 0
                if deadline - time.monotonic() < remaining / 2:
                    break  # the time limit of a connection is fixed at its start: open one with a shorter limit
            members.answered(member)
        except EtcdError as error:
            if error.cause not in OF_ONE_MEMBER:
                raise
            failures += 1
            members.avoid(member)
            time.sleep(min(0.02 * failures, 0.5, max(0.0, deadline - time.monotonic())))


@contextlib.contextmanager
def anew_if_compacted() -> Iterator[None]:
    """Take no notice if etcd has compacted away the revision from which a watch goes on.

    An etcd that compacts every few minutes does this to a watch that had no event since then. What follows must read
    the state of the keys, and watch from there.
    """
    try:
        yield
    except EtcdError as error:
        if error.cause != "compacted":
            raise


def _watch_once(
    members: EtcdMembers,
    member: Endpoint,
    watched: Sequence[Watched],
    revisions: Mapping[int, int],
    seconds: float,
    failures: int,
) -> Iterator[tuple[int, WatchEvent]]:
    """Watch over one connection: for ``seconds``, or for at most ``_WATCHED`` if there are several members."""
    first = seconds
    if len(members.all) > 1:
        # etcd confirms a watch at once. A member that does not is slow or stopped: allow more time per failure.
        first = min(seconds, members.timeout, ATTEMPT_SECONDS * (1 + failures))
        seconds = min(seconds, _WATCHED)
    connecting = min(members.timeout, first)
    body = "\n".join(json.dumps({"create_request": item.payload(n, revisions[n])}) for n, item in enumerate(watched, 1))
    try:
        answer = members.session.post(f"{member}/v3/watch", data=body, stream=True, timeout=(connecting, first))
    except (requests.RequestException, OSError, ValueError) as error:
        raise members.explain(member, error, first) from error
    with contextlib.closing(answer):
        try:
            if answer.status_code != 200:
                raise members.explain_refusal(member, answer.content, answer.reason)
            bounds = bounded_http.bounds_of(answer)
            bounds.allow(seconds)
            start = bytearray()
            for part in answer.iter_content(chunk_size=1 << 16):
                head, *lines = part.split(b"\n")
                start += head
                for line in lines:
                    if start:
                        yield from _events(member, bytes(start))
                        bounds.next_message()
                    start = bytearray(line)
            # A server that is not an etcd may end its answer without a newline. Part of a message is ignored.
            if _whole(bytes(start)):
                yield from _events(member, bytes(start))
        except requests.ConnectionError as error:
            # requests reports a read timeout this way: the watch is fine, there was just no event.
            if "Read timed out" in str(error):
                return
            raise members.explain(member, error, seconds) from error
        except (requests.RequestException, OSError) as error:
            raise members.explain(member, error, seconds) from error
    raise error_at(member, "closed", "the server ended the watch")


def _ended(member: Endpoint, error: Any) -> EtcdError:
    """Make the error for a watch that the server ended; an etcd that shuts down sends a message to each watch.

    Its number is named ``grpc_code`` up to etcd 3.5, and ``code`` from 3.6 on.
    """
    explained = explain_answer(member, json.dumps(error))
    if explained is not None and explained.cause != "other":
        return explained
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str) or not isinstance(error.get("grpc_code", error.get("code")), int):
        return not_etcd(member, "its answer is not a watch")
    return error_at(member, "closed", f"the server ended the watch: {printable(message)}")


def _events(member: Endpoint, line: bytes) -> list[tuple[int, WatchEvent]]:
    """Read one message of a watch."""
    try:
        message = json.loads(line)
        result = message.get("result")
        if result is None:
            raise _ended(member, message["error"])
        if "compact_revision" in result:
            raise error_at(member, "compacted", "the requested revision was compacted away")
        if result.get("canceled"):
            reason = printable(str(result.get("cancel_reason", "")))
            raise error_at(member, "closed", f"the server ended the watch: {reason}")
        return [
            (number(result, "watch_id", None), WatchEvent(KeyValue.of(event["kv"]), event.get("type") == "DELETE"))
            for event in items(result, "events")
        ]
    except MALFORMED as error:
        raise not_etcd(member, "its answer to a watch does not have the form of an etcd answer") from error


def _whole(line: bytes) -> bool:
    """Whether ``line`` is complete JSON, and not just the first part of a message."""
    try:
        json.loads(line)
    except ValueError:
        return False
    except RecursionError:
        pass  # refused later, when it is read
    return True
