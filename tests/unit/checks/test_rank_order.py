# SPDX-License-Identifier: Apache-2.0
"""What the requests and the outcomes of claims prove: which claims overlapped, who waits, and which ranks are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl.checks.rank_race import race, system_under_test
from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.order import describe_order, overlap, read_too_late
from pytest_nixl.checks.rank_race.race import Race, is_late
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    CommandSubject,
    FunctionSubject,
    MembershipSubject,
    faults,
    owners_of_one_rank,
    read_outcome,
    remedy_for,
    waits_for_lock,
)
from pytest_nixl.etcd.proxy import Access, Request, State
from pytest_nixl.model.nixlbench_table import read_output

FIXTURES = Path(__file__).parents[3] / "fixtures" / "nixlbench"

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
        list of all keys, ``%`` for a write in a transaction, ``&`` for one that also reads the key, ``!`` for a lock,
        and ``-`` for the end of a lease.
    """
    methods = {"+": "Put", "=": "Range", "*": "Range", "%": "Txn", "&": "Txn", "!": "Lock", "-": "LeaseRevoke"}
    clients: dict[str, list[Request]] = {"a": [], "b": []}
    written: list[bytes] = []
    for sent, step in enumerate(steps.split(), 1):
        client, verb, key = step[0], step[1], f"/t/{step[2:]}".encode()
        written += [key] if verb in "+&" else []
        access = Access(key, b"/t0" if verb in "*-" else key + b"\0", verb in "+%-&")
        accesses = {"!": (), "&": (Access(key, access.end, False), access)}.get(verb, (access,))
        request = Request(client, sent, methods[verb], key.decode(), accesses, sent=sent)
        request.answer, request.answered = b" ".join(written) if verb in "*=" else b"", sent
        clients[client].append(request)
    return [SimpleNamespace(requests=requests) for requests in clients.values()]


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        ("b+b b* a+a a*", EARLY),
        ("b!l b+b b* a+a a*", EARLY.replace("without", "behind")),
        ("b+b b* a+a a!l", EARLY.replace("without", "behind")),
        ("b&b b* a&a a*", EARLY),
        ("b&b b* a&a b* a*", TOGETHER),
        ("b=x b+b b* a+a a*", EARLY),
        ("b+b b* a+a b* a*", TOGETHER),  # the first list is not the one that counts
        ("b+b b* a+a b*", ""),
        ("b+b a+a b* a=x", ""),  # only one of them listed the keys
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
        ("a=k a+k b=k", "b read '<T>/k' only after a had written it"),
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


def test_a_read_of_one_key_is_no_list_even_if_its_answer_names_none() -> None:
    clients = clients_of("b+k b=k a+k")
    for client in clients:
        for request in client.requests:
            request.answer = b""
    assert overlap(clients, ["b", "a"], {}) == ""


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
    requests += [Request("a", 3, "Range", "/l", (), State.SENT)]
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
        ("MemberLostError: x", True),
        ("LeaseLostError: x", True),
        ("JoinRefusedError: x", False),
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
        (
            [NO_RANK, {"rank": 0}, {"rank": 0}],
            True,
            [
                "rank 0 was given 2 times: to claimant 1 (h, pid 7) and claimant 2 (h, pid 7)",
                "nobody has rank 1 of 2",
                "claimant 0 (h, pid 7): MissingRanksError: x",
            ],
        ),
        ([{"rank": 0}, {"rank": 1}, NO_RANK], False, ["claimant 2 (h, pid 7): MissingRanksError: x"]),
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
    assert len(waits) == len(messages)
    assert all(0 < seconds <= 60 for seconds in waits)


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


KEY = "xferbench/g/barrier/0/"
BARRIER_ERROR = f"Error in barrier wait {KEY} rank 0 completed 1/2 ranks)"


@pytest.mark.parametrize(
    ("text", "rank", "outcome"),
    [
        ("first\nhostname vm\nlast\n\n", None, ClaimOutcome("a", None, "vm", 3, "last")),
        ("first\nlast", 1, ClaimOutcome("a", 1, "h", 3, "")),
        (f"{BARRIER_ERROR}\nlast", 0, ClaimOutcome("a", 0, "h", 3, BARRIER_ERROR, (KEY,))),
        ("", None, ClaimOutcome("a", None, "h", 3, "")),
    ],
)
def test_an_outcome_is_read_from_the_output_of_a_program(text: str, rank: int | None, outcome: ClaimOutcome) -> None:
    assert read_outcome("a", text, rank=rank, pid=3, host="h") == outcome


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (ClaimOutcome("a", 0, "h", 3), "a (h, pid 3): rank 0"),
        (ClaimOutcome("a", 0), "a (unknown host): rank 0"),
        (ClaimOutcome("a", None, "h", 3, "bad"), "a (h, pid 3): bad"),
        (ClaimOutcome("a", pid=3), "a (unknown host, pid 3): no rank"),
    ],
)
def test_an_outcome_is_described(outcome: ClaimOutcome, text: str) -> None:
    assert str(outcome) == text


CLIENT: Any = SimpleNamespace(name="claimant 3", endpoint="http://proxy:1", path=SimpleNamespace(changed="changed"))


@pytest.mark.parametrize(
    ("message", "ended", "outcome"),
    [
        (None, False, None),
        (None, True, ClaimOutcome("claimant 3", pid=7, error="its process ended without a message")),
        ({"rank": 0, "host": "h"}, False, ClaimOutcome("claimant 3", 0, "h", 7)),
        ({"rank": 1, "host": "h"}, True, ClaimOutcome("claimant 3", 1, "h", 7)),
        ({"kind": "E", "error": "x", "host": "h"}, True, ClaimOutcome("claimant 3", None, "h", 7, "E: x")),
    ],
)
def test_a_function_claims_through_its_proxy(
    message: Any, ended: bool, outcome: ClaimOutcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimant = MagicMock()
    claimant.return_value = MagicMock(message=message, ended=ended, pid=7)
    monkeypatch.setattr(system_under_test, "Claimant", claimant)
    subject = FunctionSubject("module:function")
    running = subject.start(CLIENT, "/g/", 2)
    arguments = {"endpoint": "http://proxy:1", "group": "/g/", "size": 2}
    claimant.assert_called_once_with("module:function", arguments, "changed")
    assert (subject.name, subject.keys("/g/"), running.outcome()) == ("module:function", "/g/", outcome)
    running.kill()
    assert claimant.return_value.mock_calls == [call.close()]


@pytest.mark.parametrize(
    ("options", "function", "arguments"),
    [
        ({}, "membership_with_barrier", {"endpoint": "http://etcd:1"}),
        (
            {"endpoint": "http://proxy:1", "function": "membership", "ttl": 4},
            "membership",
            {"endpoint": "http://proxy:1", "ttl": 4},
        ),
    ],
)
def test_a_race_starts_a_claimant_in_its_own_group(
    options: dict[str, Any], function: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    claimant = MagicMock()
    monkeypatch.setattr(race, "Claimant", claimant)
    nothing: Any = None
    opened = Race(cast(Any, SimpleNamespace(endpoint="http://etcd:1")), nothing, nothing, "/p/")
    assert opened.claim("g", 2, **options) is claimant.return_value
    functions = "pytest_nixl.checks.rank_race.functions"
    claimant.assert_called_once_with(f"{functions}:{function}", {"group": "/p/g/", "size": 2, **arguments})
    assert opened.claimants == [claimant.return_value]
    assert (type(opened.membership), opened.membership.name) == (MembershipSubject, f"{functions}:membership")
    assert (type(opened.known_bad), opened.known_bad.name) == (FunctionSubject, f"{functions}:read_modify_write")


def test_ranks_are_named_in_their_order_and_the_first_fault_has_the_remedy() -> None:
    outcomes = [ClaimOutcome(f"process {number}", rank) for number, rank in enumerate((9, 9, 1, 1))]
    assert [sentence.partition(" was")[0] for sentence in faults(outcomes, 2)[:2]] == ["rank 1", "rank 9"]
    assert faults(outcomes, 2)[2].startswith("rank 9 is outside a group of 2: process 0")
    full = ClaimOutcome("process 0", error="Rank 2 is greater than or equal to global size 2")
    waits = ClaimOutcome("process 1", error=BARRIER_ERROR)
    assert remedy_for([full, waits]).startswith("Keys of an earlier run are in etcd")
    assert remedy_for([waits, full]).startswith("Start every rank with")
