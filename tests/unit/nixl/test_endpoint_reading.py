# SPDX-License-Identifier: Apache-2.0
"""How hosts and ports of NIXL_ETCD_ENDPOINTS are read and resolved. The resolvers are doubles with known addresses."""

from __future__ import annotations

import socket

import pytest

from pytest_nixl.nixl import endpoint_reading
from pytest_nixl.nixl.endpoint_reading import (
    INVALID,
    is_short_number,
    quoted,
    read_as_nixl,
    read_port,
    suppose,
)

AF_INET, AF_INET6 = socket.AF_INET, socket.AF_INET6


#: A text as a port; None: gRPC refuses it.
PORTS = {"65535": 65535, " \t2379": 2379, **dict.fromkeys(("++1", "65536", "123456"))}
#: Whether only the C library reads a text as an address.
SHORT_NUMBERS = {"127.1": True, "0X7F.1": True, "x7": False, "1a": False, "0y7": False}
QUOTED = {"é\n": "'\\xe9\\n'", "a" * 200: f"'{'a' * 200}'", "a" * 201: f"'{'a' * 200}...'"}


def test_a_part_of_a_value_is_read_and_quoted() -> None:
    assert {text: read_port(text) for text in PORTS} == PORTS
    assert {text: is_short_number(text) for text in SHORT_NUMBERS} == SHORT_NUMBERS
    assert {text: quoted(text) for text in QUOTED} == QUOTED


def test_a_name_is_supposed_to_resolve_if_it_is_well_formed() -> None:
    assert suppose("a_b.c-d.", "1", AF_INET) == ("192.0.2.1",)
    refused = [*[(host, "1", AF_INET) for host in ("a..b", "1.2.3.4.5")], ("h", "x", AF_INET), ("h", "1", AF_INET6)]
    assert [suppose(*arguments) for arguments in refused] == [()] * len(refused)


def test_the_c_library_is_asked_for_bytes_and_an_address_has_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    found = [("127.0.0.1", 1), ("fe80::1", 1, 0, 2), ("fe80::2%lo", 1, 0, 2), ("fe80::3", 1, 0, 9), ("::1", 1, 0, 0)]

    def getaddrinfo(*values: object) -> list[tuple[object, ...]]:
        asked.append(values)
        return [(AF_INET, 0, 0, "", address) for address in found]

    def if_indextoname(index: int) -> str:
        if index == 9:
            raise OSError("it is gone")
        return f"eth{index}"

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "if_indextoname", if_indextoname)
    addresses = ("127.0.0.1", "fe80::1%eth2", "fe80::2%lo", "fe80::3%9", "::1")
    assert endpoint_reading.resolve("h\udc80", "1", AF_INET) == addresses
    assert endpoint_reading.resolve_numeric("h\ud800é", "2", AF_INET6) == addresses
    stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP)
    numeric = (b"h?\xc3\xa9", b"2", AF_INET6, *stream, socket.AI_NUMERICHOST)
    assert asked == [(b"h\x80", b"1", AF_INET, *stream, 0), numeric]
    monkeypatch.undo()
    assert endpoint_reading.resolve("a\0b", "1", AF_INET) == ()


#: IPv4 and IPv6 addresses of some hosts; NIXL's client has room for 15 characters.
RESOLVED = {
    "v4": (("10.0.0.1", "10.0.0.2"), ()),
    "short": ((), ("2001:db8:123::1", "2001:db8:1234::1")),
    "long": ((), ("2001:db8:1234::1",)),
}
TOO_LONG = "resolves only to IPv6 addresses that are too long for the buffer of NIXL's client"
SKIPPED = "is an IPv6 address, which NIXL skips if another member has an IPv4 address"


@pytest.mark.parametrize(
    ("text", "contacts", "reason", "notes"),
    [
        ("short:1", "[2001:db8:123::1]:1", "it contacts [2001:db8:123::1]:1", []),
        ("long:1", "", f"'long:1' {TOO_LONG}; NIXL reports only {INVALID!r}", []),
        ("short:1;v4:2,long:3,", "10.0.0.1:2 10.0.0.2:2", "it contacts 10.0.0.1:2 and 10.0.0.2:2",
         [f"'short:1' without a message: it {SKIPPED}", f"'long:3' without a message: it {TOO_LONG}"]),
    ],
)  # fmt: skip
def test_an_address_is_read_from_each_member_that_resolves(
    text: str, contacts: str, reason: str, notes: list[str]
) -> None:
    def resolver(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
        return RESOLVED[host][family is AF_INET6]

    reading = read_as_nixl(text, resolver)
    assert (reading.reason, reading.works) == (reason, bool(contacts))
    assert list(map(str, reading.contacts)) == contacts.split()
    assert [note.text for note in reading.notes] == [f"NIXL skips {note}" for note in notes]
