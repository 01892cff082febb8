# SPDX-License-Identifier: Apache-2.0
"""Known races are found every time and can be replayed; correct registrations stay correct."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import repeats
from helpers.etcd import Etcd, running, running_etcd, wait_until
from helpers.race_explorer import ExploredRun, Explorer

from pytest_nixl.checks.rank_race import race
from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.order import describe_order, overlap, read_too_late
from pytest_nixl.checks.rank_race.orders import try_orders
from pytest_nixl.checks.rank_race.race import Amplified, Race, amplify, is_late
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    CommandSubject,
    FunctionSubject,
    MembershipSubject,
    NixlbenchSubject,
    Running,
    Subject,
    faults,
    owners_of_one_rank,
    read_outcome,
    remedy_for,
    waits_for_lock,
)
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.proxy import Access, EtcdProxy, ProxyClient, Request, State
from pytest_nixl.model.nixlbench_table import read_output
from suites.rank_race.test_membership import Kill

#: For three clients of the membership: the number of orders, and the number of orders that are not equivalent.
ORDERS_OF_THREE = {"none": (90, 6), "losses": (3150, 120), "crashes": (11484, 216)}
FUNCTIONS, HELPERS = "pytest_nixl.checks.rank_race.functions", "helpers.race_functions"
FIXTURES = Path(__file__).parents[3] / "fixtures" / "nixlbench"
STANDIN = Path(__file__).parents[2] / "helpers" / "nixlbench_standin.py"


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture
def path(etcd: Etcd) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.url) as opened:
        yield opened


@pytest.fixture
def direct(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=60) as client:
        yield client
        assert client.get_prefix("") == {}, "every run cleans up after itself"


class Mixed(FunctionSubject):
    """A different function of ``helpers.race_functions`` for each claimant."""

    def __init__(self, *functions: str) -> None:
        super().__init__(functions[0])
        self._subjects = [FunctionSubject(f"{HELPERS}:{function}") for function in functions]

    def start(self, proxy_client: ProxyClient, group: str, size: int) -> Running:
        number = int(proxy_client.name.rpartition(" ")[2])
        return self._subjects[number % len(self._subjects)].start(proxy_client, group, size)


class TestOrders:
    """The second claimant claims after each step of the first one."""

    @pytest.mark.soak
    def test_a_rank_that_is_taken_from_a_list_too_early_is_found(self, path: EtcdProxy, direct: EtcdClient) -> None:
        """Claims that overlap do not show it, and neither does any order in which the first that started goes first."""
        subject = Mixed("announces_and_lists")
        together = amplify(path, direct, subject, 2, group="/o/")
        assert (together.met, together.faults) == (True, ())
        for _ in repeats():
            tried = try_orders(path, direct, subject, group="/o/")
            assert tried.faults[0].startswith("rank 0 was given 2 times: to claimant 0 (")
            assert re.fullmatch(
                "claimant [01] listed the keys under '<group>/tokens/' before claimant [01] wrote one there, and took "
                "its rank by them, without etcd's lock",
                tried.cause,
            )
            assert "Range(<group>/tokens/)" in tried.order

    @pytest.mark.parametrize(
        ("subject", "options", "faults", "complete", "least", "most"),
        [
            (Mixed("announces_and_lists_by_age"), {}, (), True, 8, 20),
            (Mixed("locked_read_modify_write"), {}, (), True, 6, 20),
            (Mixed("tries_again"), {}, (), True, 1, 20),
            # Only two claims that begin with a write change places.
            (Mixed("tries_again", "looks_and_tries_again"), {}, (), True, 1, 1),
            # The orders of one that polls end after a few polls, and those of membership when the first one waits.
            pytest.param(Mixed("announces_and_waits"), {}, (), True, 11, 19, marks=pytest.mark.long),
            (MembershipSubject(), {}, (), True, 1, 7),
            (Mixed("locked_read_modify_write"), {"budget": 0.0}, (), False, 1, 1),
            (Mixed("only_reads"), {"seconds": 2.0}, ("claimant 0 and claimant 1 had no rank after 2 s",), True, 1, 1),
        ],
    )
    def test_each_order_is_tried_until_none_is_left(
        self, path: EtcdProxy, direct: EtcdClient, subject: Subject, options: dict[str, float],
        faults: tuple[str, ...], complete: bool, least: int, most: int,
    ) -> None:  # fmt: skip
        done = try_orders(path, direct, subject, group="/o/", **options)
        assert (done.faults, done.twice) == (faults, False)
        assert done.complete == complete or faults
        assert least <= done.count <= most


EARLY = "b listed the keys under '/t/' before a wrote one there, and took its rank by them, without etcd's lock"
TOGETHER = (
    "a and b listed the keys under '/t/' after each of them had written one there, and took the same rank by their "
    "number"
)
READ = "a and b read '/t/k' before any of them wrote it, and {}"


@pytest.mark.parametrize(
    ("answer", "answered", "cause"),
    [
        (b"/t/b", 4, EARLY),  # the key of the other is not there
        (b"/t/a /t/b", 4, TOGETHER),  # etcd got the write first, although it was forwarded later
        (b'"L3QvYg=="', 4, EARLY),
        (b'"L3QvYQ==" "L3QvYg=="', 4, TOGETHER),
        (b"", 4, TOGETHER),  # a count, while the write was on its way
        (b"", 2, EARLY),  # a count that was answered before
    ],
)
def test_the_answer_says_which_of_two_requests_at_the_same_time_came_first(
    answer: bytes, answered: int, cause: str
) -> None:
    clients = clients_of("b+b b* a+a a*")
    listing = clients[1].requests[1]
    listing.answer, listing.answered = answer, answered
    listing.accesses = (Access(b"/t/b", b"/t/b\0", False), *listing.accesses)  # it reads its own key, too
    assert overlap(clients, ["a", "b"], {}) == cause


def clients_of(steps: str) -> list[Any]:
    """Return the clients a and b, whose requests reached etcd in this order.

    :param steps: of each request the client, the key, and between them ``+`` for a write, ``=`` for a read, ``*`` for a
        list of all keys, ``%`` for a write in a transaction, ``!`` for a lock, and ``-`` for the end of a lease.
    """
    methods = {"+": "Put", "=": "Range", "*": "Range", "%": "Txn", "!": "Lock", "-": "LeaseRevoke"}
    clients: dict[str, list[Request]] = {"a": [], "b": []}
    written: list[bytes] = []
    for sent, step in enumerate(steps.split(), 1):
        client, verb, key = step[0], step[1], f"/t/{step[2:]}".encode()
        written += [key] if verb == "+" else []
        access = Access(key, b"/t0" if verb in "*-" else key + b"\0", verb in "+%-")
        request = Request(client, sent, methods[verb], key.decode(), (access,) if verb != "!" else (), sent=sent)
        request.answer, request.answered = b" ".join(written) if verb in "*=" else b"", sent
        clients[client].append(request)
    return [SimpleNamespace(requests=requests) for requests in clients.values()]


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        ("b+b b* a+a a*", EARLY),
        ("b!l b+b b* a+a a*", EARLY.replace("without", "behind")),
        ("b=x b+b b* a+a a*", EARLY),
        ("b+b b* a+a b* a*", TOGETHER),  # the first list is not the one that counts
        ("b+b b* a+a b*", ""),
        ("a+a b* a+c b+b", ""),  # no key of its own was there when it listed them
        ("b+k a+k", ""),
        ("b+k b=k a+k a=k", ""),  # one key is no list
        ("a+k b+k a=k b=k", ""),
        ("a=k b=k a+k b+k", READ.format("none of them took etcd's lock")),
        ("a!l a=k b=k a+k b+k", READ.format("etcd's lock did not separate them")),
        ("a=k b=k a-k a+k b+k", READ.format("none of them took etcd's lock")),  # a lease deletes any key, or none
        ("a=k b=k a+k b=z", ""),
        ("a=k a+k b=k b+k", ""),
    ],
)
def test_two_claims_overlap_only_in_these_orders(steps: str, cause: str) -> None:
    assert overlap(clients_of(steps), ["b", "a"], {}) == cause
    assert overlap(clients_of(steps), ["b", "a"], {"/t/": "<T>/"}) == cause.replace("/t/", "<T>/")
    assert overlap(clients_of(steps), ["a"], {}) == "", "the other one has another rank"


@pytest.mark.parametrize(
    ("steps", "late"),
    [
        ("a=k a+k b=k b+k", "b read '<T>/k' only after a had written it"),
        ("b=k b+k a=k b=k", "a read '<T>/k' only after b had written it"),
        ("a=k b=k a+k b+k", ""),
        ("a=k b=k a+k b=k", ""),  # it read once more
        ("a+k a=k b=k b+k", ""),  # it wrote before it read: that it is there
        ("a=k a%k b=k b%k", ""),  # a transaction compares what it has read
        ("a=k a-k b=k b-k", ""),
    ],
)
def test_a_claim_that_read_after_another_wrote_proves_nothing(steps: str, late: str) -> None:
    assert read_too_late(clients_of(steps), {"/t/": "<T>/"}) == late


def test_the_order_of_requests_has_their_ends_and_is_cut() -> None:
    clients = clients_of("b+k a=x a*")
    clients[1].requests += [Request("b", 2, "Watch", "/t/w", sent=9), Request("b", 3, "Put", "/t/held")]
    clients[0].requests[0].state, clients[1].requests[0].state = State.ANSWER_LOST, State.UNANSWERED
    assert describe_order(clients, {"/t/": "<T>/"}).splitlines() == [
        "the order of requests:",
        "  1. b: Put(<T>/k), its connection ended before the answer",
        "  2. a: Range(<T>/x), its answer lost",
        "  3. a: Range(<T>/)",
    ]
    *_, last, more = describe_order(clients_of("a+k " * 43), {}).splitlines()
    assert (last, more) == ("  40. a: Put(/t/k)", "  and 3 more")


LEASE, LOST = ('{"ID":"26"}', State.ANSWERED), ("", State.ANSWER_LOST)


@pytest.mark.parametrize(
    ("leases", "lock", "keys", "waits"),
    [
        ([LEASE], None, ["/l/ff", "/l/1a"], False),
        ([LEASE], State.SENT, ["/l/ff", "/l/1a"], True),
        ([LEASE], State.ANSWERED, ["/l/ff", "/l/1a"], False),
        ([LEASE], State.SENT, ["/l/1a", "/l/ff"], False),
        ([LEASE], State.SENT, ["/lx/ff", "/l/1a"], False),
        ([LEASE], State.SENT, ["/l/ff", "/l/fe"], False),  # its key is not there yet
        ([LEASE, ('{"ID":"27"}', State.ANSWERED)], State.SENT, ["/l/1a", "/l/ff", "/l/1b"], False),
        ([LOST], State.SENT, ["/l/ff", "/l/1a"], True),  # one of these keys is its own
        ([LOST], State.SENT, ["/l/ff"], False),
        ([LOST, LEASE], State.SENT, ["/l/1a", "/l/ff"], False),
    ],
)
def test_a_client_waits_in_a_lock_behind_the_key_of_another(
    leases: list[tuple[str, State]], lock: State | None, keys: list[str], waits: bool
) -> None:
    requests = [Request("a", 1, "LeaseGrant", "", (), state, answer.encode()) for answer, state in leases]
    requests += [Request("a", 2, "Lock", "/l", (), lock)] if lock else []
    client: Any = SimpleNamespace(requests=requests)
    stored = dict.fromkeys(keys, b"")
    assert waits_for_lock(client, stored) == FunctionSubject("f").blocked(client, "g", stored) == waits
    assert CommandSubject(["x"], "(?P<rank>)").blocked(client, "g", stored) == waits


@pytest.mark.parametrize(
    ("method", "state", "accesses", "keys", "blocked"),
    [
        ("Watch", State.SENT, 1, {}, True),  # it waits for the roster
        ("Watch", State.SENT, 1, {"run/frozen": b"{}"}, False),
        ("Watch", State.ANSWERED, 1, {}, False),
        ("Put", State.SENT, 1, {}, False),
        ("Watch", State.SENT, 2, {}, False),
        # It waits for the rank of a member that died.
        *(("Watch", State.SENT, 2, {"run/frozen": b'{"members": [["x", 0], ["y", 1]]}', **dict.fromkeys(keys, b"")},
           blocked) for keys, blocked in ((("members/x", "members/y"), True), (("members/x",), False),
                                          (("members/y",), False))),
    ],
)  # fmt: skip
def test_membership_is_blocked_by_a_watch(
    method: str, state: State, accesses: int, keys: dict[str, bytes], blocked: bool
) -> None:
    watched = tuple(Access(b"%d" % place, b"", False) for place in range(accesses))
    requests = [Request("a", 1, "Put"), Request("a", 2, method, "", watched, state)]
    stored = {f"g/{name}": value for name, value in keys.items()}
    assert MembershipSubject().blocked(cast(Any, SimpleNamespace(requests=requests)), "g/", stored) == blocked
    assert not MembershipSubject().blocked(cast(Any, SimpleNamespace(requests=[])), "g/", stored)


@pytest.mark.parametrize(
    ("error", "late"),
    [
        ("has no rank in time", True),
        ("it has no rank in time", False),
        ("MissingRanksError: x", True),
        ("EtcdError: etcd at http://a:1: timeout, no answer", True),
        ("EtcdError: etcd at http://a:1: refused", False),
        ("RuntimeError: x: timeout, no answer", False),
    ],
)
def test_a_claim_that_met_only_a_timeout_is_late(error: str, late: bool) -> None:
    assert is_late(ClaimOutcome("claimant 0", error=error)) == late
    assert not is_late(ClaimOutcome("claimant 0", rank=0, error=error))


NO_RANK, BAD_RANK = {"kind": "MissingRanksError", "error": "x"}, {"kind": "RuntimeError", "error": "x"}


@pytest.mark.parametrize(
    ("messages", "proven", "sentences"),
    [
        ([{"rank": 1}, {"rank": 0}], True, []),
        ([{"rank": 0}, NO_RANK], False, ["nobody has rank 1 of 2", "claimant 1 (h, pid 7): MissingRanksError: x"]),
        ([None, {"rank": 0}], False, [
            "nobody has rank 1 of 2", "claimant 0 (unknown host, pid 7): has no rank in time"]),
        ([{"rank": 0}, BAD_RANK], True, ["nobody has rank 1 of 2", "claimant 1 (h, pid 7): RuntimeError: x"]),
        ([{"rank": 0}, {"rank": 0}, NO_RANK], True, [
            "rank 0 was given 2 times: to claimant 0 (h, pid 7) and claimant 1 (h, pid 7)", "nobody has rank 1 of 2",
            "claimant 2 (h, pid 7): MissingRanksError: x"]),
        ([{"rank": 2}, NO_RANK], True, ["rank 2 is outside a group of 2: claimant 0 (h, pid 7): rank 2",
                                        "nobody has rank 0, 1 of 2", "claimant 1 (h, pid 7): MissingRanksError: x"]),
    ],
)  # fmt: skip
def test_faults_that_are_only_late_prove_nothing(
    messages: list[dict[str, Any] | None], proven: bool, sentences: list[str]
) -> None:
    waits: list[float] = []
    claimants = [SimpleNamespace(pid=7, wait=waits.append, message=message and {"host": "h", **message})
                 for message in messages]  # fmt: skip
    listed = {"/p/g/": {"/p/g/key": b""}}
    opened = Race(cast(Any, None), cast(Any, SimpleNamespace(get_prefix=listed.get)), cast(Any, None), "/p/")
    expected = [*sentences, "keys in etcd: /p/g/key"] if sentences else []
    results = opened.faults(cast("list[Claimant]", claimants), 2, "g", 60)
    assert (results, opened.late) == ((expected, []) if proven else ([], expected))
    assert all(0 < seconds <= 60 for seconds in waits)


def test_claimants_of_a_race_are_one_group_under_its_prefix(path: EtcdProxy, direct: EtcdClient, etcd: Etcd) -> None:
    opened = Race(cast(Any, SimpleNamespace(endpoint=etcd.url)), direct, path, "/p/")
    proxied = path.client()
    try:
        claimants = [opened.claim("g", 2, endpoint=endpoint, ttl=60) for endpoint in ("", proxied.endpoint)]
        assert opened.claimants == claimants
        assert (opened.faults(claimants, 2, "g", 120), opened.late) == ([], [])
        assert direct.count_prefix("/p/g/members/") == 2
        assert any(request.method == "Txn" for request in proxied.requests)
    finally:
        for claimant in opened.claimants:
            claimant.close()
        direct.delete_prefix("/p/")


@pytest.mark.parametrize(("last", "reached"), [("Put", True), ("LeaseRevoke", False)])
def test_each_request_that_is_let_through_is_answered_before_the_next(last: str, reached: bool) -> None:
    """The proxy is a double, which keeps what is waited for."""
    requests = [Request("a", 1, "Range", state=State.HELD), Request("a", 2, last, state=State.HELD)]
    waits: list[tuple[str, float]] = []

    def wait(condition: Callable[[], Any], description: str, seconds: float) -> Any:
        waits.append((description.partition(":")[0], seconds))
        if description.startswith("the answer"):
            assert not condition()
            requests.pop(0).state = State.ANSWERED
        return condition() or None

    class Held:
        name = "a"
        held = property(lambda self: requests[:1])

        def release(self, request: Request) -> None:
            request.state = State.SENT

    opened = Race(cast(Any, None), cast(Any, None), cast(Any, SimpleNamespace(wait=wait)), "/")
    assert opened.let_through(cast(Any, Held()), 2, seconds=5) == reached
    first = [("a request of a", 5), ("the answer to a 1", 5), ("a request of a", 5)]
    assert waits == [*first, *([("the answer to a 2", 5)] if reached else [])]


class TestAmplified:
    @pytest.mark.soak
    @pytest.mark.parametrize("clients", [2, 3])
    def test_the_known_race_is_detected_every_time_and_membership_gives_each_rank_once(
        self, path: EtcdProxy, direct: EtcdClient, clients: int
    ) -> None:
        subject = FunctionSubject(f"{FUNCTIONS}:read_modify_write")
        for _ in repeats():
            done = amplify(path, direct, subject, clients, group="/r/")
            assert done.met
            assert done.faults[0].startswith(f"rank 0 was given {clients} times: to claimant 0 (")
            assert "keys in etcd: /r/" in done.faults[-1]
            done = amplify(path, direct, MembershipSubject(), 2 * clients, group="/r/")
            assert (done.met, done.faults) == (True, ())
            assert sorted(outcome.rank or 0 for outcome in done.outcomes) == list(range(2 * clients))

    @pytest.mark.parametrize(
        ("subject", "clients", "met"),
        [
            (Mixed("locked_read_modify_write"), 2, False),
            (Mixed("locked_read_modify_write"), 3, False),
            (Mixed("present_then_locked"), 2, True),
        ],
    )
    def test_a_lock_that_separates_claims_is_detected(
        self, path: EtcdProxy, direct: EtcdClient, subject: Subject, clients: int, met: bool
    ) -> None:
        done = amplify(path, direct, subject, clients, group="/r/")
        assert (done.met, done.locked, done.unmet, done.faults, done.lost) == (met, True, "", (), False)

    def test_the_order_of_requests_and_the_cause_are_reported(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = amplify(path, direct, FunctionSubject(f"{FUNCTIONS}:read_modify_write"), 2, group="/r/")
        assert done.cause == (
            "claimant 0 and claimant 1 read '<group>/size' before any of them wrote it, "
            "and none of them took etcd's lock"
        )
        assert not any(running(outcome.pid) for outcome in done.outcomes)
        title, *lines = done.order.splitlines()
        assert title == "the order of requests:"
        moves = [line.partition(". ")[2] for line in lines]
        assert sorted(moves) == sorted(
            f"claimant {number}: {request}"
            for number in (0, 1)
            for request in ("Range(<group>/size)", "LeaseGrant()", "Put(<group>/rank/0)", "Put(<group>/size)")
        )
        first_write = min(number for number, move in enumerate(moves) if "size" in move and "Put" in move)
        assert all(moves.index(f"claimant {number}: Range(<group>/size)") < first_write for number in (0, 1))

    def test_no_claimant_counts_before_the_write_of_another_that_was_held_with_its_own(
        self, path: EtcdProxy, direct: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a busy machine: time passes between the releases of two writes."""
        release = ProxyClient.release_if_held

        def released_late(client: ProxyClient, request: Request) -> bool:
            if request.method == "Put":
                time.sleep(0.3 * int(client.name.split()[-1]))
            return release(client, request)

        monkeypatch.setattr(ProxyClient, "release_if_held", released_late)
        done = amplify(path, direct, Mixed("announces_and_counts"), 2, group="/a/")
        assert done.faults[0].startswith("rank 1 was given 2 times: to claimant 0 (")
        assert done.cause == (
            "claimant 0 and claimant 1 listed the keys under '<group>/tokens/' after each of them had written one "
            "there, and took the same rank by their number"
        )

    @pytest.mark.parametrize("patient", [True, False])
    def test_a_race_behind_a_first_write_and_a_pause_is_detected_if_it_is_waited_for(
        self, path: EtcdProxy, direct: EtcdClient, monkeypatch: pytest.MonkeyPatch, patient: bool
    ) -> None:
        """A nixlbench without a lock that writes that it is there, and looks for its rank after a pause."""
        if not patient:
            monkeypatch.setattr(race, "NEXT_WRITE_SECONDS", 0.1)
        done = amplify(path, direct, Mixed("present_then_late", "present_then_early"), 2, group="/r/")
        unmet = "" if patient else "claimant 0 read '<group>/size' only after claimant 1 had written it"
        assert (done.met, done.locked, done.twice, done.unmet) == (True, False, patient, unmet)
        assert [fault.partition(" (")[0] for fault in done.faults[:1]] == [
            *["rank 0 was given 2 times: to claimant 0"] * patient
        ]

    def test_claims_of_which_one_ends_prove_nothing(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = amplify(path, direct, Mixed("tries_again", "ends"), 2, group="/r/")
        assert (done.met, done.locked, done.twice) == (False, False, False)
        assert re.fullmatch(
            r"claimant 1 ended before the claims could overlap: claimant 1 \(unknown host, pid \d+\): its process "
            "ended without a message",
            done.unmet,
        )

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("functions", "seconds", "unmet"),
        [
            (("asks_for_nothing",), 0.5, r"claimant 0 and claimant 1 sent no request to etcd within 0\.5 s"),
            (("only_reads",), 3.0, "; ".join(
                fr"claimant {number} neither wrote nor waited in a lock within 3 s; its last request: "
                r"Range\(<group>/size\)" for number in (0, 1))),
            (("only_reads", "tries_again"), 3.0, "claimant 0 neither wrote nor .*"),
        ],
    )  # fmt: skip
    def test_claims_that_cannot_overlap_prove_nothing(
        self, path: EtcdProxy, direct: EtcdClient, functions: tuple[str, ...], seconds: float, unmet: str
    ) -> None:
        done = amplify(path, direct, Mixed(*functions), 2, group="/r/", seconds=seconds)
        assert (done.met, done.locked, done.twice, done.faults) == (False, False, False, ())
        assert re.fullmatch(unmet, done.unmet)


@pytest.fixture
def explorer(path: EtcdProxy, direct: EtcdClient) -> Callable[..., Explorer]:
    def make(subject: Subject | str, clients: int = 2, fault: str = "none") -> Explorer:
        subject = FunctionSubject(subject) if isinstance(subject, str) else subject
        return Explorer(path, direct, subject, clients, group="/r/", **{fault: True} if fault != "none" else {})

    return make


#: CI runs only some of the orders with a fault; the soak test runs all.
FAULTS = ["none", *(pytest.param(kind, marks=pytest.mark.whole) for kind in ("losses", "crashes"))]


@pytest.mark.long
class TestExplored:
    def test_the_known_race_is_found_and_replayed(self, explorer: Callable[..., Explorer]) -> None:
        exploring = explorer(f"{FUNCTIONS}:read_modify_write")
        report = exploring.explore()
        # Four requests each: 70 orders, of which only the two that let one client finish first are good.
        assert (report.orders, report.run, report.bad_orders, report.stopped) == (70, 6, 68, "")
        assert str(report).startswith(
            f"{FUNCTIONS}:read_modify_write, 2 clients: 70 orders, 6 run, 64 pruned (they only swap requests that "
            "share no key or only read); 4 of those run are bad, and stand for 68;"
        )
        for bad in report.bad:
            assert bad.faults[0].startswith("rank 0 was given 2 times: to client 0 (")
            again = exploring.replay(bad.seed)
            assert again.events == bad.events
            assert again.faults[-1] == bad.faults[-1] == "keys in etcd: <group>/rank/0, <group>/size"
        text = report.bad[0].describe()
        assert "  1. client 0: Range(<group>/size)\n  2. client 0: LeaseGrant()\n" in text
        assert f"seed {report.bad[0].seed}" in text

    @pytest.mark.parametrize(
        ("function", "fault", "until"),
        [
            ("create_without_token", "nobody has rank ", lambda run: True),
            ("locked_read_modify_write", "rank 0 was given 2 times", lambda run: run.twice),
        ],
    )
    def test_a_claim_that_is_wrong_only_after_a_lost_answer_is_found(
        self, explorer: Callable[..., Explorer], function: str, fault: str, until: Callable[[ExploredRun], bool]
    ) -> None:
        sound = explorer(f"{HELPERS}:{function}").explore()
        assert (sound.bad, sound.stopped) == ((), "")
        report = explorer(f"{HELPERS}:{function}", fault="losses").explore(until=until)
        assert report.bad[-1].faults[0].startswith(fault)
        assert ", its answer lost" in report.bad[-1].describe()
        assert report.stopped.startswith("at the first bad order")

    @pytest.mark.parametrize(
        ("fault", "least"),
        [("none", 6), ("losses", 100), pytest.param("crashes", 250, marks=pytest.mark.whole)],
    )
    def test_membership_survives_every_order_of_two_clients(
        self, explorer: Callable[..., Explorer], fault: str, least: int
    ) -> None:
        report = explorer(MembershipSubject(), fault=fault).explore(seconds=600)
        print(report)
        assert (report.bad, report.stopped) == ((), "")
        assert report.orders >= least

    def test_membership_survives_a_crash_in_orders_chosen_by_chance(self, explorer: Callable[..., Explorer]) -> None:
        report = explorer(MembershipSubject(), fault="crashes").explore(runs=12, seconds=600, by_chance=True)
        assert (report.run, report.bad) == (12, ())

    @pytest.mark.soak
    @pytest.mark.parametrize("fault", FAULTS)
    def test_membership_survives_the_orders_of_three_clients(
        self, explorer: Callable[..., Explorer], fault: str
    ) -> None:
        report = explorer(MembershipSubject(), 3, fault).explore(runs=20 * len(repeats()), seconds=600)
        print(report)
        assert report.bad == ()
        if fault == "none" or not report.stopped:
            assert (report.orders, report.run, report.stopped) == (*ORDERS_OF_THREE[fault], "")
        else:
            assert report.run >= 12

    @pytest.mark.soak
    @pytest.mark.parametrize("fault", ["none", "losses"])
    def test_a_rank_requested_twice_is_refused_in_every_order(
        self, explorer: Callable[..., Explorer], fault: str
    ) -> None:
        exploring = explorer(MembershipSubject(f"{HELPERS}:wants_rank_0"), fault=fault)
        report = exploring.explore(runs=(50 if fault == "none" else 15) * len(repeats()), seconds=600)
        print(report)
        if fault == "none":
            assert report.stopped == ""
        assert len(report.bad) == report.run >= 12, "no client gets a rank"
        for run in report.bad:
            [sentence] = {outcome.error for outcome in run.outcomes}
            assert sentence.startswith("JoinRefusedError: group "), run.describe()
            assert "rank 0 is requested twice, by of-" in sentence
            assert "keys in etcd" not in run.faults[-1], run.describe()


class TestCommands:
    """Programs whose output names their rank. nixlbench is a stand-in here, because no registry has a build of it."""

    @pytest.fixture
    def command(self) -> list[str]:
        return [sys.executable, str(STANDIN), "--etcd_endpoints={endpoint}", "--benchmark_group={group}"]

    def test_a_command_with_a_race_is_detected(
        self, path: EtcdProxy, direct: EtcdClient, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = CommandSubject(command, r"as rank (?P<rank>\d+)", prefix="xferbench/{group}/")
        done = amplify(path, direct, subject, 2, group="c-")
        assert (done.faults, done.locked) == ((), True)
        monkeypatch.setenv("STANDIN_RACY", "1")
        done = amplify(path, direct, subject, 2, group="c-")
        host = os.uname().nodename
        assert done.faults[0].startswith(f"rank 0 was given 2 times: to claimant 0 ({host}, pid ")
        assert "keys in etcd: xferbench/c-" in done.faults[-1]

    @pytest.mark.long
    @pytest.mark.soak
    @pytest.mark.parametrize("racy", [True, False], ids=["racy", "locked"])
    def test_late_processes_still_overlap(
        self, etcd: Etcd, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, racy: bool
    ) -> None:
        """One or both of two processes start up to 30 s late: every run still overlaps, or shows the lock."""
        if racy:
            monkeypatch.setenv("STANDIN_RACY", "1")
        runs = len(repeats())
        delays = [(3.0, 3.0), (3.5, 0.0)] if runs == 1 else [late(number, runs) for number in range(runs)]

        def run(delay: tuple[float, float]) -> Amplified:
            first, second = map(str, delay)
            # The process that can make the folder is the first.
            sleep = ["sh", "-c", 'mkdir "$1" 2>/dev/null && sleep "$2" || sleep "$3"; shift 3; exec "$@"', "late"]
            arguments = [*sleep, f"{tmp_path}/{{group}}", first, second, *command]
            subject = CommandSubject(arguments, r"as rank (?P<rank>\d+)", prefix="xferbench/{group}/")
            with EtcdProxy(etcd.url) as path, connect([etcd.endpoint], timeout=60) as direct:
                return amplify(path, direct, subject, 2, group="c-")

        with ThreadPoolExecutor(8) as pool:
            for delay, done in zip(delays, pool.map(run, delays), strict=True):
                assert done.unmet == "", delay
                assert (done.twice, done.met, done.locked) == (racy, racy, not racy), delay
                assert bool(done.cause) == racy, delay
                assert bool(done.faults) == racy, (delay, done.faults)

    @pytest.mark.parametrize(
        ("subject", "rank", "error"),
        [
            (CommandSubject(["printf", "x\\nas rank 1\\nmore"], r"as rank (?P<rank>\d+)"), 1, ""),
            (CommandSubject(["printf", "as rank 1"], r"as rank (?P<rank>\d+)"), None, "as rank 1"),  # maybe of 12
            (CommandSubject(["echo", "{endpoint} {group} {size}"], "(?P<rank>^1)"), None, "ENDPOINT g 2"),
            (NixlbenchSubject("echo", "LIBFABRIC"), None,
             "--backend=LIBFABRIC --runtime_type=ETCD --etcd_endpoints=ENDPOINT --benchmark_group=g "
             "--total_buffer_size=4096 --start_block_size=4096 --max_block_size=4096 --num_iter=16 --warmup_iter=16"),
        ],
    )  # fmt: skip
    def test_a_command_gets_its_etcd_and_group_and_names_its_rank_in_a_whole_line(
        self, path: EtcdProxy, subject: CommandSubject, rank: int | None, error: str
    ) -> None:
        client = path.client("claimant 3")
        claim = subject.start(client, "g/", 2)
        path.wait(lambda: claim.outcome() is not None, "its end", seconds=60)
        claim.kill()
        outcome = claim.outcome()
        assert outcome is not None
        assert outcome.pid > 0
        expected = error.replace("ENDPOINT", client.endpoint)
        assert outcome == ClaimOutcome("claimant 3", rank, os.uname().nodename, outcome.pid, expected)
        assert NixlbenchSubject("x").keys("g/") == "xferbench/g/"
        assert CommandSubject(["a b", "c"], "(?P<rank>)").name == "'a b' c"

    def test_bad_patterns_and_programs_are_refused(self, path: EtcdProxy) -> None:
        with pytest.raises(ValueError, match=r"\(\?P<rank>…\)"):
            CommandSubject(["x"], "rank")
        with pytest.raises(ValueError, match="is not a regular expression"):
            CommandSubject(["x"], "(")
        with pytest.raises(NixlPluginError, match="nowhere/nixlbench cannot be started: No such file"):
            NixlbenchSubject("/nowhere/nixlbench").start(path.client(), "g/", 2)


def late(number: int, runs: int) -> tuple[float, float]:
    """Return by how many seconds (0 to 30) the first and the second process start late."""
    delay = 30.0 * number / (runs - 1)
    return ((delay, delay), (delay, 0.0), (0.0, delay))[number % 3]


def claim(name: str, text: str) -> ClaimOutcome:
    registrations = read_output(text).registrations
    return read_outcome(name, text, rank=registrations[0].rank if registrations else None)


def recorded(case: str, *ranks: str) -> list[ClaimOutcome]:
    """Return the claims in the recorded output of the real nixlbench 1.4.0."""
    files = [[FIXTURES / f"{case}{rank}.{kind}" for kind in ("out", "err")] for rank in ranks]
    texts = ["".join(file.read_text() for file in pair if file.exists()) for pair in files]
    return [claim(f"process {number}", text) for number, text in enumerate(texts)]


NORMAL = recorded("01_normal", ".rank_a", ".rank_b")
#: The line is a message of nixlbench. There is no complete recording of such a run.
THIRD = claim("process 2", "Rank 2 is greater than or equal to global size 2\n")
BARRIER = "xferbench/{}/barrier/start_barrier/0/"


@pytest.mark.parametrize(
    ("outcomes", "keys", "descriptions", "remedy"),
    [
        (NORMAL, [], [], "Two processes got the same rank"),
        (recorded("07_racy_same_rank", ".rank_a", ".rank_b"), [], [
            "rank 0 was given 2 times: to process 0 (vm) and process 1 (vm)",
            "nobody has rank 1 of 2",
            f"process 0 said: Error in barrier wait {BARRIER.format('g07')} rank 0 completed 1/2 ranks)",
            f"keys in etcd: {BARRIER.format('g07')}"], "Start every rank with"),
        (recorded("09_alone", ""), ["b", "a"], [
            "nobody has rank 1 of 2",
            f"process 0 said: Error in barrier wait {BARRIER.format('g09')} rank 0 completed 1/2 ranks)",
            f"keys in etcd: a, b, {BARRIER.format('g09')}"], "Start every rank with"),
        ([*NORMAL, THIRD], ["xferbench/g/size"], [
            "process 2 (unknown host): Rank 2 is greater than or equal to global size 2",
            "keys in etcd: xferbench/g/size"], "Keys of an earlier run are in etcd"),
        ([ClaimOutcome(f"process {number}", rank) for number, rank in enumerate((3, 0, 1, -1, 3))], [], [
            "rank 3 was given 2 times: to process 0 (unknown host) and process 4 (unknown host)",
            "rank -1 is outside a group of 2: process 3 (unknown host): rank -1",
            "rank 3 is outside a group of 2: process 0 (unknown host): rank 3"], "Two processes got the same rank"),
        ([ClaimOutcome("a", 0, error="it ended"), ClaimOutcome("b", host="h", pid=3)], [], [
            "nobody has rank 1 of 2", "b (h, pid 3): no rank", "a said: it ended"], "Two processes got the same rank"),
    ],
)  # fmt: skip
def test_each_fault_of_the_ranks_is_reported(
    outcomes: list[ClaimOutcome], keys: list[str], descriptions: list[str], remedy: str
) -> None:
    assert faults(outcomes, 2, keys) == descriptions
    duplicates = [description for description in descriptions if " times: " in description]
    twice = {name for description in duplicates for name in re.findall(r"(?:to|and) (process \d)", description)}
    assert owners_of_one_rank(outcomes) == twice
    assert read_outcome("a", "hostname  vm", rank=0, host="h").host == "h"
    assert remedy_for(outcomes)[: len(remedy)] == remedy


def test_the_time_after_a_kill_ends_with_the_last_rank_and_not_when_the_check_looks() -> None:
    claimants = [SimpleNamespace(heard=103.0), SimpleNamespace(heard=102.0)]
    assert Kill("group", 1, cast("list[Claimant]", claimants), at=100.0).seconds == 3.0


@pytest.mark.long
class TestClaimants:
    def test_a_claimant_reports_its_error_and_when_and_leaves_no_thread(self) -> None:
        threads = set(threading.enumerate())
        before = time.monotonic()
        claimant = Claimant("time:sleep", {})  # it takes no argument of that name
        assert claimant.wait(60) is not None
        after = time.monotonic()
        assert claimant.message is not None
        assert claimant.message["kind"] == "TypeError"
        assert claimant.wait_until_ended(60)
        assert before < claimant.heard < after
        claimant.close()
        assert set(threading.enumerate()) <= threads

    def test_a_claimant_ends_with_a_killed_parent(self) -> None:
        code = (
            "import time\n"
            "from pytest_nixl.checks.rank_race.claimants import Claimant\n"
            "if __name__ == '__main__':\n"
            "    c = Claimant('helpers.race_functions:asks_for_nothing', dict(endpoint='', group='', size=1))\n"
            "    print(c.pid, flush=True)\n"
            "    time.sleep(600)\n"
        )
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.stdout.close()
        assert running(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(lambda: not running(pid), 60, "the claimant has ended")
