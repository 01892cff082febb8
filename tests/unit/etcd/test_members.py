# SPDX-License-Identifier: Apache-2.0
"""Which member of an etcd is asked, in which order and how long, and what a member's answers about itself mean.

The sessions are doubles, because only they can answer late, oddly and at once.
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import requests
from helpers.http_double import HttpDouble, answering

from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd import members as members_module
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_transport, printable, related, speaks_http, speaks_tls
from pytest_nixl.etcd.maintenance import Alarm, ListedMember, Maintenance, MemberStatus
from pytest_nixl.etcd.members import EtcdMembers

FIRST, SECOND, THIRD = (Endpoint("http", f"10.0.0.{number}", 2379) for number in (1, 2, 3))
HEADER = {"header": {"revision": "7"}}


class PlannedSession:
    """A session whose members answer as planned: with JSON, with a status and a text, or with an error.

    :param answers: by host, the answer of each request in turn; the last one for all further requests.
    """

    cert = None

    def __init__(self, **answers: list[object]) -> None:
        self._answers = answers
        #: The host, the path and the timeout of each request.
        self.asked: list[tuple[str, str, float]] = []

    def post(self, url: str, *, timeout: tuple[float, float], json: object, auth: object = None) -> Any:
        return self._answer(url, timeout[1])

    def get(self, url: str, *, timeout: tuple[float, float], auth: object) -> Any:
        return self._answer(url, timeout[1])

    def _answer(self, url: str, seconds: float) -> Any:
        host, _, path = url.removeprefix("http://10.0.0.").partition("/")
        self.asked.append((host[0], path, seconds))
        planned = self._answers[f"m{host[0]}"]
        answer = planned.pop(0) if len(planned) > 1 else planned[0]
        if isinstance(answer, Exception):
            raise answer
        status, text, reason = answer if isinstance(answer, tuple) else (200, json.dumps(answer), "OK")
        return SimpleNamespace(status_code=status, content=text.encode(), reason=reason, json=lambda: json.loads(text))


@pytest.fixture(autouse=True)
def nothing_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "_AVOIDED_MEMBERS", members_module._Avoided())


def of(session: PlannedSession, *endpoints: Endpoint, timeout: float = 5.0) -> EtcdMembers:
    return EtcdMembers(endpoints, cast(requests.Session, session), timeout=timeout, user="", password="")


def ask(members: EtcdMembers, *, repeatable: bool = True) -> Any:
    return members.post("/kv/range", {}, lambda answer: answer["header"]["revision"], repeatable=repeatable)


def hosts(session: PlannedSession) -> str:
    return "".join(host for host, _, _ in session.asked)


REFUSED = requests.exceptions.ConnectionError(ConnectionRefusedError(111, "Connection refused"))
LATE = requests.exceptions.ReadTimeout("Read timed out")


def test_the_member_that_answered_last_is_asked_first() -> None:
    session = PlannedSession(m1=[REFUSED], m2=[HEADER], m3=[HEADER])
    members = of(session, FIRST, SECOND, THIRD)
    assert members.last == FIRST
    assert [ask(members), ask(members)] == ["7", "7"]
    assert hosts(session) == "122"
    assert members.last == members.next() == SECOND


def test_a_member_that_failed_is_asked_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(members_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    members = of(PlannedSession(m1=[HEADER], m2=[HEADER]), FIRST, SECOND)
    members.avoid(FIRST)
    assert members.next() == SECOND
    now[0] = 119.9
    assert members.next() == SECOND
    now[0] = 120.0
    assert members.next() == FIRST
    members.avoid(FIRST)
    members.answered(FIRST)
    assert members.next() == FIRST
    # The only member is never avoided, whatever other clients say of it.
    alone = of(PlannedSession(m1=[HEADER]), FIRST)
    alone.avoid(FIRST)
    assert members.next() == FIRST


def test_all_clients_avoid_a_member_that_failed_until_it_answers() -> None:
    first, second = (
        of(PlannedSession(m1=[REFUSED, HEADER], m2=[HEADER]), FIRST, SECOND),
        of(PlannedSession(), FIRST, THIRD),
    )
    ask(first)
    assert second.next() == THIRD
    first.avoid(SECOND)
    ask(first)
    assert first.last == second.next() == FIRST
    with pytest.raises(EtcdError):
        ask(of(PlannedSession(m1=[{}]), FIRST, SECOND))
    assert second.next() == FIRST, "another client would get the same answer from another member"


def test_slow_members_are_asked_again_with_the_whole_time_and_others_are_not() -> None:
    session = PlannedSession(m1=[LATE, HEADER], m2=[REFUSED])
    assert ask(of(session, FIRST, SECOND)) == "7"
    assert [(host, seconds) for host, _, seconds in session.asked] == [("1", 1.5), ("2", 1.5), ("1", 5.0)]
    session = PlannedSession(m1=[LATE], m2=[LATE])
    with pytest.raises(EtcdError, match=r"no member of the etcd answered: http://10.0.0.1:2379: .*; http://10.0.0.2"):
        ask(of(session, FIRST, SECOND))
    assert hosts(session) == "1212"
    for seconds, endpoints in ((5.0, [FIRST]), (1.5, [FIRST, SECOND])):
        session = PlannedSession(m1=[LATE], m2=[LATE])
        with pytest.raises(EtcdError):
            ask(of(session, *endpoints, timeout=seconds))
        assert {seconds for _, _, seconds in session.asked} == {seconds}
        assert len(session.asked) == len(endpoints), "they had the whole time at first"


def test_a_request_that_is_not_repeatable_is_sent_again_only_if_it_was_not_sent() -> None:
    session = PlannedSession(m1=[REFUSED], m2=[HEADER])
    assert ask(of(session, FIRST, SECOND), repeatable=False) == "7"
    assert {seconds for _, _, seconds in session.asked} == {5.0}
    session = PlannedSession(m3=[LATE], m2=[HEADER])
    with pytest.raises(EtcdError) as caught:
        ask(of(session, THIRD, SECOND), repeatable=False)
    assert caught.value.cause == "timeout"
    assert hosts(session) == "3"


def test_members_that_fail_in_several_ways_have_no_common_cause() -> None:
    with pytest.raises(EtcdError) as caught:
        ask(of(PlannedSession(m1=[REFUSED], m2=[LATE, REFUSED]), FIRST, SECOND))
    assert caught.value.cause == "refused"
    assert caught.value.endpoint == f"{FIRST},{SECOND}"
    with pytest.raises(EtcdError) as caught:
        ask(of(PlannedSession(m1=[REFUSED], m2=[LATE]), FIRST, SECOND))
    assert caught.value.cause == "no-member"
    with pytest.raises(EtcdError) as first:
        ask(of(PlannedSession(m1=[REFUSED]), FIRST))
    assert caught.value.remedy == first.value.remedy


def test_each_member_answers_for_itself() -> None:
    status = {
        "header": {"cluster_id": "1", "member_id": "2"}, "version": "3.5.1", "leader": "2", "raftTerm": "4",
        "dbSize": "5", "dbSizeInUse": "6", "isLearner": True,
    }  # fmt: skip
    members = of(
        PlannedSession(m1=[REFUSED], m2=[status], m3=[{**status, "dbSizeQuota": "8", "version": "v" * 41}]),
        FIRST,
        SECOND,
        THIRD,
    )
    statuses = Maintenance(members).each_status()
    assert list(statuses) == [str(FIRST), str(SECOND), str(THIRD)]
    assert isinstance(statuses[str(FIRST)], EtcdError)
    assert statuses[str(SECOND)] == MemberStatus(1, 2, "3.5.1", 2, 4, 5, 6, None, True)
    third = statuses[str(THIRD)]
    assert isinstance(third, MemberStatus)
    assert (third.quota, third.version) == (8, "v" * 40 + "…")


def test_members_and_alarms_have_printable_names() -> None:
    listed = {**HEADER, "members": [{"ID": "9", "name": "a\x1b"}, {"ID": "10", "name": "b", "isLearner": True}]}
    listing = Maintenance(of(PlannedSession(m1=[listed]), FIRST)).listed()
    assert listing == (ListedMember(9, "a\\x1b", False), ListedMember(10, "b", True))
    alarms = {**HEADER, "alarms": [{"alarm": "NOSPACE", "memberID": "9"}, {"alarm": 2}, {"alarm": "x" * 61}]}
    assert Maintenance(of(PlannedSession(m1=[alarms]), FIRST)).alarms() == (
        Alarm("NOSPACE", 9), Alarm("CORRUPT", 0), Alarm("x" * 60 + "…", 0),
    )  # fmt: skip


def test_counters_are_the_finite_metrics_without_labels() -> None:
    page = '# HELP\netcd_a 1\netcd_b e-e\netcd_c 1e999\netcd_d{x="1"} 4\netcd_e 2.5e+06\ngo_f 1\n'
    page += " 1\n# etcd_g 1\netcd_h 1 9\n"
    session = PlannedSession(m1=[(200, page, "OK")])
    assert Maintenance(of(session, FIRST)).counters() == {"etcd_a": 1.0, "etcd_e": 2.5e6}
    assert session.asked == [("1", "metrics", 5.0)]
    for nothing in ((404, page, "Not Found"), REFUSED):
        assert Maintenance(of(PlannedSession(m1=[nothing]), FIRST)).metrics() == ""


@pytest.mark.parametrize("answer", [{}, {"header": 1}, [], {"header": {}}])
def test_an_answer_without_the_form_of_one_is_not_of_an_etcd(answer: Mapping[str, Any]) -> None:
    with pytest.raises(EtcdError, match="does not have the form of an etcd answer"):
        ask(of(PlannedSession(m1=[answer]), FIRST))


@pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ("[" * 100_000, "is nested too deeply")])
def test_an_answer_that_cannot_be_read_is_not_of_an_etcd(text: str, reason: str) -> None:
    with pytest.raises(EtcdError, match=f"its answer {reason}"):
        ask(of(PlannedSession(m1=[(200, text, "OK")]), FIRST))


class TokenServer(HttpDouble):
    """An etcd whose token is replaced after its second request. A double, because a real one takes seconds for it."""

    log: ClassVar[list[str]] = []

    def reply(self) -> None:
        body = json.loads(self.body())
        valid = f"token-{1 + (len(self.log) > 2)}"
        if self.path == "/v3/auth/authenticate":
            self.log.append(f"{body['name']} {body['password']}")
            self.answer(200, {"token": valid})
        else:
            sent = self.headers["Authorization"]
            self.log.append(f"{self.path} {sent}")
            self.answer(*((200, HEADER) if sent == valid else (401, {"code": 16, "message": "invalid auth token"})))


def test_a_token_is_used_until_an_etcd_rejects_it() -> None:
    TokenServer.log.clear()
    with answering(TokenServer) as port:
        with connect([Endpoint("http", "127.0.0.1", port)], user="bob", password="b") as client:
            for _ in range(4):
                assert client.get("/a") is None
    first, second = (f"/v3/kv/range token-{number}" for number in (1, 2))
    assert TokenServer.log == ["bob b", first, first, first, "bob b", second, second]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ({"etcdserver": "3.5.1"}, "3.5.1"), ({"etcdserver": "3" * 41}, f"\\b{'3' * 40}…"),
        ({"etcdserver": ""}, "'Not Found' to /v3"), ([], "'Not Found' to /v3"),
        (REFUSED, "'Not Found' to /v3"),
    ],
)  # fmt: skip
def test_an_etcd_without_a_gateway_is_told_from_another_server(version: object, message: str) -> None:
    session = PlannedSession(m1=[(404, "404 page not found", "Not Found"), version])
    with pytest.raises(EtcdError, match=message):
        ask(of(session, FIRST))
    refusal = json.dumps({"code": 14, "message": f"etcdserver: no leader {'x' * 60_000}"})
    with pytest.raises(EtcdError, match="it has no leader"):
        ask(of(PlannedSession(m1=[(503, refusal, "Service Unavailable")]), FIRST))
    session = PlannedSession(m1=[(500, "", "Internal Server Error")])
    with pytest.raises(EtcdError, match="it answers 'Internal Server Error' to /v3"):
        ask(of(session, FIRST))
    assert len(session.asked) == 1


def test_a_text_is_cut_only_if_it_is_too_long() -> None:
    assert printable("x" * 300) == "x" * 300
    assert printable("x" * 301) == "x" * 300 + "…"
    assert printable("a\n\x1bb", 20) == "a\\n\\x1bb"
    assert printable("\x1b" * 10, 8) == "\\x1b\\x1b…"


def test_a_port_where_nothing_listens_speaks_nothing() -> None:
    endpoint = Endpoint("http", "127.0.0.1", free_ports(1)[0])
    assert not speaks_tls(endpoint)
    assert not speaks_http(endpoint)


def test_wrapped_errors_come_by_their_distance_and_once() -> None:
    outer, cause, context, inner = (ValueError(name) for name in ("outer", "cause", "context", "inner"))
    outer.__cause__, outer.__context__, cause.__cause__, inner.__cause__ = cause, context, inner, outer
    assert list(related(outer)) == [outer, cause, context, inner]
    assert list(related(None)) == []


def named(name: str) -> Exception:
    """Return an error of a class that has this name."""
    error: Exception = type(name, (Exception,), {})("it failed")
    return error


def tls_error(alert: str) -> ssl.SSLError:
    """Return the error of a handshake that ended with this alert."""
    error = ssl.SSLError(1, f"[SSL] {alert}")
    error.reason = alert.upper().replace(" ", "_")
    return error


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "unresolved", "the name '127.0.0.1' does not resolve"),
        (named("NameResolutionError"), "unresolved", "does not resolve"),
        (ConnectionRefusedError(111, "no"), "refused", "nothing listens there"),
        (OSError("Connection refused"), "refused", "nothing listens there"),
        (named("ConnectTimeout"), "timeout", "no connection within 5 s"),
        (named("ReadTimeout"), "timeout", "no answer within 5 s"),
        (TimeoutError(), "timeout", "no answer within 5 s"),
        (OSError("invalid path: /no/file"), "bad-file", "certificate file does not exist"),
        (OSError(errno.ENETUNREACH, "no"), "unreachable", "no route"),
        (OSError(errno.EHOSTUNREACH, "no"), "unreachable", "no route"),
        (tls_error("tlsv13 alert certificate required"), "certificate-required", "it asks for a client certificate"),
        (tls_error("wrong version number"), "tls", "the TLS handshake failed (wrong version number)"),
        (tls_error(""), "tls", "the TLS handshake failed (connection ended)"),
        (named("BadStatusLine"), "", "it does not speak HTTP"),
        (OSError("it failed"), "closed", "without an answer"),
    ],
)
def test_the_cause_of_a_failure_is_found_within_what_wraps_it(error: Exception, cause: str, words: str) -> None:
    """Nothing listens on port 1, if it is asked at all."""
    for wrapped in (error, RuntimeError("an outer one", error)):
        explained = explain_transport(parse_endpoint("http://127.0.0.1:1"), wrapped, timeout=5.0, has_certificate=False)
        assert explained.cause == (cause or explained.cause)
        assert words in explained.reason
