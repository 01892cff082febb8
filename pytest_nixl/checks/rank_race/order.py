# SPDX-License-Identifier: Apache-2.0
"""Describe the order in which requests reached etcd, and why two clients got the same rank."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_nixl.etcd.proxy import Access, ProxyClient, Request, State

#: Maximum number of requests that are shown. A registration has at most ten.
SHOWN = 40


def sent_requests(clients: Sequence[ProxyClient]) -> list[Request]:
    """Return the requests of all clients in the order of forwarding to etcd, without streams."""
    sent = [request for client in clients for request in client.requests if request.sent and not request.stream]
    return sorted(sent, key=lambda request: request.sent)


def describe_order(clients: Sequence[ProxyClient], names: Mapping[str, str]) -> str:
    """Return the order of the requests, one per line.

    :param clients: the clients.
    :param names: replacements for parts of keys that differ from run to run.
    """
    requests = sent_requests(clients)
    lines = [
        f"  {number}. {request.client}: {request.label(names)}{_end(request)}"
        for number, request in enumerate(requests[:SHOWN], 1)
    ]
    more = [f"  and {len(requests) - SHOWN} more"] if len(requests) > SHOWN else []
    return "\n".join(["the order of requests:", *lines, *more])


def _end(request: Request) -> str:
    if request.state is State.ANSWER_LOST:
        return ", its answer lost"
    return ", its connection ended before the answer" if request.state is State.UNANSWERED else ""


def overlap(clients: Sequence[ProxyClient], owners: Collection[str], names: Mapping[str, str]) -> str:
    """Return one sentence if two clients took one rank by what they read too early, or listed; else an empty string.

    Such an overlap explains why both took the same rank, without a lost answer.

    :param clients: the clients.
    :param owners: names of the clients that took the same rank.
    :param names: replacements for parts of keys that differ from run to run.
    """
    requests = [request for request in sent_requests(clients) if request.client in owners]
    for key in _read_and_written(requests):
        first_write = min(request.sent for request in requests if _touches(request, key, write=True))
        readers = [
            owner
            for owner in sorted(owners)
            if any(
                request.client == owner and request.sent < first_write and _touches(request, key, write=False)
                for request in requests
            )
            and any(request.client == owner and _touches(request, key, write=True) for request in requests)
        ]
        if len(readers) > 1:
            locked = any(request.method == "Lock" for request in requests)
            lock = "etcd's lock did not separate them" if locked else "none of them took etcd's lock"
            return f"{' and '.join(readers)} read {_name(key, names)!r} before any of them wrote it, and {lock}"
    return _listed_too_early(requests, names) or _counted_together(requests, names)


def _listed_too_early(requests: Sequence[Request], names: Mapping[str, str]) -> str:
    """Return one sentence if a client listed keys, its own among them, before another client wrote its own there."""
    for listing in requests:
        for keys in listing.accesses:
            if keys.write or keys.end == keys.start + b"\0":
                continue
            writes = [request for request in requests if any(_writes_in(access, keys) for access in request.accesses)]
            before = any(write.client == listing.client and write.sent < listing.sent for write in writes)
            later = next(
                (write for write in writes if write.client != listing.client and _was_listed_before(listing, write)),
                None,
            )
            listed_again = later is not None and any(
                request.client == listing.client and request.sent > later.sent and keys in request.accesses
                for request in requests
            )
            if before and later is not None and not listed_again:
                lock = "behind" if any(request.method == "Lock" for request in requests) else "without"
                return (
                    f"{listing.client} listed the keys under {_name(keys, names)!r} before {later.client} wrote one "
                    f"there, and took its rank by them, {lock} etcd's lock"
                )
    return ""


def _counted_together(requests: Sequence[Request], names: Mapping[str, str]) -> str:
    """Return one sentence if each client wrote a key and then listed the keys of all; otherwise an empty string."""
    clients = {request.client for request in requests}
    for keys in (access for request in requests for access in request.accesses):
        if keys.write or keys.end == keys.start + b"\0":
            continue
        first_write: dict[str, int] = {}
        for request in requests:
            if any(_writes_in(access, keys) for access in request.accesses):
                first_write.setdefault(request.client, request.sent)
        last_write = max(first_write.values(), default=0)
        listed = {
            request.client
            for request in requests
            if keys in request.accesses and max(request.sent, request.answered) > last_write
        }
        if len(clients) > 1 and first_write.keys() == clients == listed:
            return (
                f"{' and '.join(sorted(clients))} listed the keys under {_name(keys, names)!r} after each of them had "
                "written one there, and took the same rank by their number"
            )
    return ""


def _was_listed_before(listing: Request, write: Request) -> bool:
    """Whether keys were listed before another client wrote one of them.

    Two requests that wait for their answers at the same time may reach etcd in either order: the keys in the answer say
    in which. An answer that only counts keys does not, and proves nothing then.
    """
    written, prefix = write.key.encode(), listing.key.encode()
    if written and (written in listing.answer or base64.b64encode(written) in listing.answer):
        return False
    whole = prefix[: len(prefix) // 3 * 3]  # what base64 encodes alike whatever follows
    has_keys = any(text and text in listing.answer for text in (prefix, base64.b64encode(whole)))
    return write.sent > (listing.sent if has_keys else listing.answered)


def _writes_in(access: Access, keys: Access) -> bool:
    return access.write and access.end == access.start + b"\0" and keys.start <= access.start < keys.end


def read_too_late(clients: Sequence[ProxyClient], names: Mapping[str, str]) -> str:
    """Return one sentence if a client read and wrote a key before another one read it; otherwise an empty string.

    These two claims did not overlap, so that good ranks prove nothing. Writes in a transaction are left out, because it
    compares what it has read.

    :param clients: the clients.
    :param names: replacements for parts of keys that differ from run to run.
    """
    requests = [request for request in sent_requests(clients) if request.method in ("Range", "Put", "DeleteRange")]
    for key in _read_and_written(requests):
        first_read: dict[str, int] = {}
        for request in requests:
            if _touches(request, key, write=False):
                first_read.setdefault(request.client, request.sent)
        first = next(request for request in requests if _touches(request, key, write=True))
        late = [client for client, read in first_read.items() if client != first.client and read > first.sent]
        if late and first_read.get(first.client, first.sent) < first.sent:
            return f"{' and '.join(late)} read {_name(key, names)!r} only after {first.client} had written it"
    return ""


def _read_and_written(requests: Sequence[Request]) -> Iterator[Access]:
    """Yield the single keys (not ranges) that these requests both read and write."""
    written = {access.start for request in requests for access in request.accesses if access.write}
    for request in requests:
        for access in request.accesses:
            if not access.write and access.end == access.start + b"\0" and access.start in written:
                yield access


def _name(key: Access, names: Mapping[str, str]) -> str:
    name = key.start.decode(errors="replace")
    for part, replacement in names.items():
        name = name.replace(part, replacement)
    return name


def _touches(request: Request, key: Access, *, write: bool) -> bool:
    return request.method != "LeaseRevoke" and any(
        access.write == write and access.start <= key.start < access.end for access in request.accesses
    )
