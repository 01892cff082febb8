# SPDX-License-Identifier: Apache-2.0
"""Read the keys of an etcd in pages, and keep of each value only what it says: of NIXL's metadata, its beginning.

NIXL writes ``nixlSerDes|`` and then fields: tag, length (8 bytes, little-endian), bytes, ``|``. The first are ``Agent``
and ``Conns``, the number of backends; then for each backend ``t``, its name, and ``c``, its connection info, which only
that backend can read. Mooncake's is the text ``IP:PORT``. UCX packs its addresses in a form of its own, which differs
between releases, so that no address is read from it.

A page begins small and grows as long as the values are small, so that neither etcd nor this process needs much memory
for it. If a page is too large or too slow, a smaller one is read.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import MOST_SECONDS, EtcdClient, Pager
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import KeyPage, KeyValue

_BEGIN, _END = b"nixlSerDes|", b"|"
_LENGTH = 8
#: The most backends of an agent that are read.
_MOST_BACKENDS = 64
_ADDRESS = re.compile(rb"(?P<host>[0-9.]{7,15}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})\0*")

#: The most keys, and the most bytes of values, that are read of one prefix.
MOST_KEYS, MOST_BYTES = 500_000, 1 << 30
#: The largest page, the first page with values, and the number of bytes that a page with values aims at.
_PAGE, _FIRST_PAGE, _PAGE_BYTES = 1000, 16, 4 << 20
#: The most bytes of a short value that are kept, such as the size of a group of nixlbench.
_SHORT = 64


@dataclass(frozen=True)
class AgentMetadata:
    """What can be read from the metadata of an agent.

    :param fault: why no agent can load it; empty if nothing is wrong with it as far as it was read.
    :param agent: the name in it; empty if it was not read.
    :param backends: the names of its backends, as far as they were read.
    :param addresses: IP address and port of its backends, where their connection info is such a text.
    """

    fault: str
    agent: str = ""
    backends: tuple[str, ...] = ()
    addresses: tuple[tuple[str, int], ...] = ()


class _TruncatedError(ValueError):
    """A field is longer than what follows."""


class _OtherTagError(ValueError):
    """Another field follows."""


def read_metadata(value: bytes) -> AgentMetadata:
    """Read the value of a key with metadata. Any bytes are accepted."""
    if not value:
        return AgentMetadata("it is empty")
    if not value.startswith(_BEGIN):
        begin = "it is shorter than" if _BEGIN.startswith(value) else "it does not begin with"
        return AgentMetadata(f"{begin} 'nixlSerDes|', so it is not metadata of NIXL")
    name, backends, addresses = "", [], []
    place = len(_BEGIN)
    try:
        field, place = _field(value, place, b"Agent")
        name = field.decode(errors="surrogateescape")
        field, place = _field(value, place, b"Conns")
        for _ in range(min(int.from_bytes(field[:_LENGTH], "little"), _MOST_BACKENDS)):
            field, place = _field(value, place, b"t")
            backends.append(field[:64].decode(errors="replace"))
            field, place = _field(value, place, b"c")
            addresses += _address(field)
    except _TruncatedError:
        return AgentMetadata(f"it is truncated: a field goes beyond its end at byte {len(value)}", name)
    except _OtherTagError:
        if not name:
            return AgentMetadata("it does not begin with the name of an agent")
        # Another release may write other fields. The name is all that is known then.
    fault = "" if value.endswith(_END) else f"it is truncated: no '|' follows its last field, at byte {len(value)}"
    return AgentMetadata(fault, name, tuple(backends), tuple(addresses))


def _field(value: bytes, place: int, tag: bytes) -> tuple[bytes, int]:
    """Return the bytes of the field at ``place``, and the place of the next field."""
    if not value.startswith(tag, place):
        raise _TruncatedError if tag.startswith(value[place:]) else _OtherTagError
    start = place + len(tag) + _LENGTH
    end = start + int.from_bytes(value[start - _LENGTH : start], "little")
    if end >= len(value):
        raise _TruncatedError
    return value[start:end], end + 1


def _address(info: bytes) -> list[tuple[str, int]]:
    """Return the address that a connection info consists of, in a list; an empty list if it is something else."""
    match = _ADDRESS.fullmatch(info)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return []
    try:
        host = ipaddress.ip_address(match["host"].decode().strip("[]"))
    except ValueError:
        return []
    return [(str(host), int(match["port"]))]


@dataclass(frozen=True)
class SurveyedKey:
    """A key without its value.

    :param size: the bytes of key and value together, as etcd's limit counts them; None if the value was not read.
    :param short: the value if it has at most 64 bytes; otherwise None.
    :param metadata: what was read from the value.
    """

    key: str
    create_revision: int
    mod_revision: int
    version: int
    lease: int
    size: int | None = None
    short: bytes | None = None
    metadata: AgentMetadata | None = None

    @classmethod
    def of(cls, item: KeyValue) -> SurveyedKey:
        """Return the facts of a key that was read without its value."""
        return cls(item.key, item.create_revision, item.mod_revision, item.version, item.lease)


@dataclass(frozen=True)
class SurveyedKeys:
    """The keys under a prefix, sorted by key.

    :param revision: revision of the etcd before the first of them was read.
    """

    keys: tuple[SurveyedKey, ...]
    revision: int


def pages(
    client: EtcdClient, prefix: str, *, keys_only: bool = False, deadline: float | None = None
) -> Iterator[KeyPage]:
    """Yield the keys that start with ``prefix`` in pages, sorted by key.

    :param deadline: as for :class:`Pager`.
    :raises EtcdError: if etcd does not answer, or one key alone is larger than an answer may be.
    """
    after, limit = "", _PAGE if keys_only else _FIRST_PAGE
    pager = Pager(client, prefix, keys_only=keys_only, deadline=deadline)
    while True:
        try:
            page = pager.read(after, limit)
        except EtcdError as error:
            if limit == 1 or not (error.cause == "timeout" or "larger than" in error.reason):
                raise
            limit = max(1, limit // 8)
            continue
        yield page
        if not page.more or not page.items:
            return
        after = page.items[-1].key
        size = sum(len(item.key) + len(item.value) for item in page.items)
        limit = max(1, min(_PAGE, 4 * limit, _PAGE_BYTES * len(page.items) // max(1, size)))


def survey(
    client: EtcdClient, prefix: str, *, values: bool, matches: Callable[[str], bool] = lambda key: True
) -> SurveyedKeys:
    """Read the keys under a prefix.

    :param values: whether to read sizes and values, too.
    :param matches: whether a key is kept; keys that are not are counted in no result.
    :raises NixlPluginError: if there are too many keys.
    """
    keys_by_name: dict[str, SurveyedKey] = {}
    revision = 0
    deadline = time.monotonic() + MOST_SECONDS
    for page in pages(client, prefix, keys_only=True, deadline=deadline):
        revision = revision or page.revision
        keys_by_name |= {item.key: SurveyedKey.of(item) for item in page.items if matches(item.key)}
        if len(keys_by_name) > MOST_KEYS:
            raise NixlPluginError(
                f"etcd has more than {MOST_KEYS:,} keys under {prefix}",
                "give --namespace NAME to look at one namespace of it",
            )
    if values and keys_by_name:
        keys_by_name = _with_values(client, prefix, keys_by_name, deadline)
    return SurveyedKeys(tuple(keys_by_name.values()), revision)


def _with_values(
    client: EtcdClient, prefix: str, keys_by_name: dict[str, SurveyedKey], deadline: float
) -> dict[str, SurveyedKey]:
    """Return the keys with what their values say. Keys that have gone meanwhile are left out, new ones too.

    The sizes of keys for which there is no time, or whose values are too many bytes, stay unknown.
    """
    read: dict[str, SurveyedKey] = {}
    budget = MOST_BYTES
    try:
        for page in pages(client, prefix, deadline=deadline):
            read |= {item.key: _judged(item) for item in page.items if item.key in keys_by_name}
            budget -= sum(len(item.value) for item in page.items)
            if budget < 0:
                return {**keys_by_name, **read}
    except EtcdError as error:
        if error.cause != "endless":
            raise
        return {**keys_by_name, **read}
    return read


def _judged(item: KeyValue) -> SurveyedKey:
    return replace(
        SurveyedKey.of(item),
        size=len(item.key.encode(errors="surrogateescape")) + len(item.value),
        short=item.value if len(item.value) <= _SHORT else None,
        metadata=read_metadata(item.value),
    )
