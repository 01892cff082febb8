# SPDX-License-Identifier: Apache-2.0
"""Addresses of an etcd: how they are read, the errors for malformed ones, and that credentials are never shown."""

from __future__ import annotations

import pytest
from helpers.endpoints import LEAKY

from pytest_nixl.core.forms import ENDPOINTS_FORM
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoint", "printed"),
    [
        ("etcd:1", Endpoint("http", "etcd", 1), "http://etcd:1"),
        ("HTTP://h:65535", Endpoint("http", "h", 65535), "http://h:65535"),
        ("http://etcd-0.my_ns.svc.:2379", Endpoint("http", "etcd-0.my_ns.svc.", 2379), "http://etcd-0.my_ns.svc.:2379"),
        (f"{63 * 'a'}.b:1", Endpoint("http", f"{63 * 'a'}.b", 1), f"http://{63 * 'a'}.b:1"),
        ("[fe80::1%eth0]:2379", Endpoint("http", "fe80::1%eth0", 2379), "http://[fe80::1%eth0]:2379"),
        ("https://me:secret@h:2379", Endpoint("https", "h", 2379, "me", "secret"), "https://h:2379"),
        ("me@h:2379", Endpoint("http", "h", 2379, "me", ""), "http://h:2379"),
        ("http://m%40e:s%2Fe%3Ac%2Cr@h:1", Endpoint("http", "h", 1, "m@e", "s/e:c,r"), "http://h:1"),
        ("http://me:se:cret@h:1", Endpoint("http", "h", 1, "me", "se:cret"), "http://h:1"),
    ],
)
def test_an_endpoint_is_read_and_printed(text: str, endpoint: Endpoint, printed: str) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoints(text) == (endpoint,)
    assert str(endpoint) == printed
    assert parse_endpoint(printed) == Endpoint(endpoint.scheme, endpoint.host, endpoint.port)


def test_a_list_keeps_its_order_and_shows_no_credentials() -> None:
    endpoints = parse_endpoints("http://b:2,https://USER:SECRET@c:3")
    assert endpoints == (Endpoint("http", "b", 2), Endpoint("https", "c", 3, "USER", "SECRET"))
    assert repr(endpoints[1]) == "Endpoint(scheme='https', host='c', port=3)"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'' is empty"),
        (" http://h:1", "' http://h:1' has a space in it"),
        ("http://h:1\n", "'http://h:1\\n' has a space in it"),
        ("tcp://h:1", "'tcp://h:1' has the unknown scheme 'tcp'"),
        ("http://h:1/", "'http://h:1/' ends with a slash"),
        ("http://h:1/v3/kv", "'http://h:1/v3/kv' has the path '/v3/kv'"),
        ("h", "'h' names no port"),
        ("http://[::1]", "'http://[::1]' names no port"),
        ("http://:2379", "'http://:2379' is not HOST:PORT"),
        ("http://h:٢", "'http://h:٢' is not HOST:PORT"),
        ("http://h:1?x=2", "'http://h:1?x=2' is not HOST:PORT"),
        ("::1", "'::1' has an IPv6 address without brackets (http://[::1]:2379)"),
        *(
            (f"http://{host}:1", f"'http://{host}:1' has the host '{host}', which is neither a name nor an address")
            for host in ("[::g]", "[]", "a..b", f"{64 * 'a'}.b", f"b.{64 * 'a'}")
        ),
        ("http://h:0", "'http://h:0' has the port 0, which is not between 1 and 65535"),
        ("h:65536", "'h:65536' has the port 65536, which is not between 1 and 65535"),
        ("http://:secret@h:1", "'http://***@h:1' names no user before its @"),
    ],
)
def test_a_malformed_endpoint_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_endpoint(text)
    assert str(caught.value) == f"etcd endpoint {fault}: expected {ENDPOINTS_FORM}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a:1,b,c:3", "'b' names no port"),
        ("http://a:1,", "'' is empty"),
        ("http://user:hunter@b", "'http://***@b' names no port"),
        # The comma may belong to a password.
        ("http://user:hunter@a:1,b", "2 of 2 is malformed (not shown, because the list contains a user or password; "
         "write a comma in a password as %2C)"),
    ],
)  # fmt: skip
def test_the_malformed_member_is_named_or_counted_if_there_is_a_password(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_endpoints(text)
    assert str(caught.value) == f"etcd endpoint {fault}: expected {ENDPOINTS_FORM}"


@pytest.mark.parametrize("text", LEAKY)
def test_neither_a_message_nor_a_redacted_text_shows_a_user_or_a_password(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_endpoints(text)
    assert ENDPOINTS_FORM in str(caught.value)
    for shown in (str(caught.value), redact(text)):
        assert "USER" not in shown
        assert "SECRET" not in shown
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("u@h:1", "***@h:1"),
        ("http://u:p@a:1,http://v:q@b:2", "http://***@a:1,http://***@b:2"),
        ("http://u:p@a:1;http://v:q@b:2 http://w:r@c:3", "http://***@a:1;http://***@b:2 http://***@c:3"),
        ("a:1,http://u:p@b:2", "a:1,http://***@b:2"),
        ("cannot reach http://u:p@h:1 now\nsee mail", "cannot reach http://***@h:1 now\nsee mail"),
        *((text, text) for text in (
            "", "http://h:1", "http://a:1,https://b:2", "UCX,LIBFABRIC", "quay.io/coreos/etcd:v3.5.18",
            "quay.io/coreos/etcd@sha256:0123abc", "localhost:5000/etcd@sha256:0123abc", "etcd@sha256:0123abc",
            "./profile.toml",
        )),
    ],
)  # fmt: skip
def test_redacting_hides_only_credentials(text: str, shown: str) -> None:
    assert redact(text) == shown
