# SPDX-License-Identifier: Apache-2.0
"""Facts of an etcd: its address, whether it answers, how fast, and how far its clock is ahead."""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_sysfs import root_of

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.host.etcd import EtcdFacts, Name, client_of, etcdctl_credentials, read_etcd
from pytest_nixl.host.recorded_tree import Fact, FactsRoot

VARIABLE = "NIXL_ETCD_ENDPOINTS"


@pytest.mark.parametrize(
    ("endpoints", "fault", "remedy"),
    [
        (
            "http://u:p@127.0.0.1:1/",
            "",
            f"set {VARIABLE} to http://***@127.0.0.1:1: NIXL publishes nothing with the other",
        ),
        (
            "http://a:1 , http://b:2/",
            "",
            f"set {VARIABLE} to http://a:1,http://b:2: NIXL publishes nothing with the other",
        ),
        ("http://127.0.0.1", "", f"correct {VARIABLE}: NIXL publishes nothing with it"),
        ("http://127.0.0.1:1", "it is closed", "open it"),
    ],
)
def test_an_etcd_that_does_not_answer_is_a_fault_with_its_remedy(endpoints: str, fault: str, remedy: str) -> None:
    def refuse() -> Any:
        raise NixlPluginError("it is closed", "open it")

    etcd = read_etcd(FactsRoot(), endpoints, VARIABLE, refuse)
    assert (etcd.endpoints.source, etcd.remedy) == (VARIABLE, remedy)
    assert etcd.fault == fault if fault else etcd.fault.startswith("etcd endpoint ")
    assert "u:p" not in str(etcd)
    where = f"the etcd at {etcd.endpoints.value}"
    assert (etcd.version, etcd.latency, etcd.clock) == (Fact(None, where, etcd.fault),) * 3


class Client:
    """A client whose answers take these seconds of a clock that the test sets."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.now = list(seconds), 100.0

    def status(self) -> None:
        self.now += self._seconds.pop(0)

    def version(self) -> str:
        return "3.5.18"


def test_the_answers_of_an_etcd_are_read_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "no etcd address is given"
    unknown = Fact[Any](None, "the etcd at no address", nothing)
    assert read_etcd(FactsRoot(), "", "") == EtcdFacts(Fact(None, "", nothing), (), unknown, unknown, unknown, "", "")
    client = Client(7, 0.5, 0.125, 9, 0.25, 0.375)  # the first also connects
    monkeypatch.setattr(time, "perf_counter", lambda: client.now)
    given = "https://127.0.0.1:1,https://[::1]:2,https://127.0.0.1:3"
    where = f"the etcd at {given}"
    assert read_etcd(FactsRoot(), given, "given", lambda: client) == EtcdFacts(
        endpoints=Fact(given, "given"),
        names=(Name("127.0.0.1", ("127.0.0.1",), ""), Name("::1", ("::1",), "")),
        version=Fact("3.5.18", where),
        latency=Fact(0.375, where),
        clock=Fact(None, where, "it does not report its time"),
        fault="",
        remedy="",
    )
    answer = {"endpoints": "http://e:1", "source": "s", "clock": -2.0, "latency": 0.5, "version": "3"}
    root = root_of(tmp_path / "tree", {}, etcd={**answer, "fault": "f", "remedy": "r"})
    recorded = read_etcd(root, "http://other:1", "x")
    of = "the etcd at http://e:1"
    assert recorded == EtcdFacts(Fact("http://e:1", "s"), (), Fact("3", of), Fact(0.5, of), Fact(-2.0, of), "f", "r")


def test_a_host_that_does_not_resolve_is_named() -> None:
    host = f"{63 * 'a'}.invalid"
    etcd = read_etcd(FactsRoot(), f"http://{host}:1", "x", lambda: Client(*[0] * 6))
    [name] = etcd.names
    assert (name.host, name.addresses, name.fault != "") == (host, (), True)


def test_each_address_of_a_host_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(0, 0, 0, "", (address, 0)) for address in ("fd00::2", "10.0.0.2", "fd00::2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: entries)
    etcd = read_etcd(FactsRoot(), "https://e:1,https://f:1,https://e:2", "x", lambda: Client(*[0] * 6))
    assert etcd.names == tuple(Name(host, ("fd00::2", "10.0.0.2"), "") for host in "ef")


@contextlib.contextmanager
def reporting(date: str | None) -> Iterator[tuple[int, list[str]]]:
    """Serve answers with a date; give the port, and what each client did: it connected, and asked for a path."""
    paths: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def setup(self) -> None:
            paths.append("connected")
            super().setup()

        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response_only(200)
            if date is not None:
                self.send_header("Date", date)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, paths
        server.shutdown()
        thread.join()


DATE = email.utils.formatdate(1_000_000, usegmt=True)


@pytest.mark.parametrize(
    ("date", "now", "ahead"),
    [
        (DATE, 1_000_000.0, 0.0),
        (DATE, 1_000_000.75, 0.0),
        (DATE, 1_000_001.0, 0.0),
        (DATE, 1_000_003.5, -2.5),
        (DATE, 999_990.25, 9.75),
        ("yesterday", 1_000_000.0, None),
        (None, 1_000_000.0, None),
    ],
)
def test_the_clock_of_etcd_is_compared_within_the_second_that_it_reports(
    monkeypatch: pytest.MonkeyPatch, date: str | None, now: float, ahead: float | None
) -> None:
    monkeypatch.setattr(time, "time", lambda: now)
    with reporting(date) as (port, paths):
        for scheme, expected in (("http", ahead), ("https", None)):
            members = f"{scheme}://127.0.0.1:{port},{scheme}://127.0.0.1:9"  # the clock is that of the first
            etcd = read_etcd(FactsRoot(), members, "x", lambda: Client(*[0] * 6))
            reason = "" if expected is not None else "it does not report its time"
            assert etcd.clock == Fact(expected, f"the etcd at {members}", reason)
            assert paths == ["connected", "/version"]


def test_a_client_has_the_credentials_of_etcdctl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACERT", "CERT", "KEY", "USER", "PASSWORD"):
        monkeypatch.delenv(f"ETCDCTL_{name}", raising=False)
    monkeypatch.setenv("ETCDCTL_USER", "u:p")
    monkeypatch.setattr("pytest_nixl.etcd.client.connect", lambda members, **options: ([*map(str, members)], options))
    credentials = {"cacert": "", "cert": "", "key": "", "user": "u", "password": "p"}
    client: Any = client_of("http://a:1,http://b:2", "x", 7)
    assert client == (["http://a:1", "http://b:2"], {**credentials, "timeout": 7})
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("ETCD_ENDPOINTS", raising=False)
    with pytest.raises(NixlPluginError) as refused:
        client_of(None, "give --etcd")
    assert (refused.value.reason, refused.value.remedy) == ("no etcd is given", f"give --etcd, or set {VARIABLE}")
    for name in ("ETCD_ENDPOINTS", VARIABLE):  # the second counts more
        monkeypatch.setenv(name, f"http://{name.lower().replace('_', '-')}:3")
        client = client_of("", "x")
        assert client == ([f"http://{name.lower().replace('_', '-')}:3"], {**credentials, "timeout": 3})


@pytest.mark.parametrize(
    ("variables", "defaults", "changes"),
    [
        ({}, None, {}),
        (
            {"ETCDCTL_CACERT": "c", "ETCDCTL_CERT": "d", "ETCDCTL_KEY": "k"},
            None,
            {"cacert": "c", "cert": "d", "key": "k"},
        ),
        ({"ETCDCTL_USER": "u:p:q", "ETCDCTL_PASSWORD": "x"}, None, {"user": "u", "password": "p:q"}),
        ({"ETCDCTL_USER": "u", "ETCDCTL_PASSWORD": "x"}, None, {"user": "u", "password": "x"}),
        ({"ETCDCTL_USER": "u"}, {"user": "v", "key": "k"}, {"user": "u", "key": "k"}),
    ],
)
def test_credentials_are_those_of_etcdctl(
    variables: dict[str, str],
    defaults: dict[str, str] | None,
    changes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CACERT", "CERT", "KEY", "USER", "PASSWORD"):
        monkeypatch.delenv(f"ETCDCTL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    empty = {} if defaults else dict.fromkeys(("cacert", "cert", "key", "user", "password"), "")
    assert etcdctl_credentials(defaults) == {**empty, **changes}
