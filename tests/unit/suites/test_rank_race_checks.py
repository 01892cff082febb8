# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``rank_race`` end as the claims demand, with doubles of the claimants."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.doubled_nixl import DoubledClock
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl.checks.rank_race.orders import TriedOrders
from pytest_nixl.checks.rank_race.race import Amplified
from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome
from pytest_nixl.core import polling
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement
from suites.rank_race import conftest, test_membership, test_nixlbench, test_this_run


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# Fixtures


def test_claimants_and_the_proxy_end_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, race_type = MagicMock(), MagicMock()
    monkeypatch.setattr(conftest, "EtcdProxy", proxy)
    monkeypatch.setattr(conftest, "Race", race_type)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    claimants = race_type.return_value.claimants = [MagicMock(), MagicMock()]
    server = SimpleNamespace(endpoint="http://a:1", server="server", client="client")
    with ExitStack() as stack:
        opened = value_of(conftest.race, stack, nixl_private_etcd=server)
        path = proxy.return_value.__enter__.return_value
        assert opened is race_type.return_value
        race_type.assert_called_once_with("server", "client", path, "/pytest-nixl/abababababababab/")
        proxy.assert_called_once_with("http://a:1")
        assert not any(claimant.close.called for claimant in claimants)
        proxy.return_value.__exit__.side_effect = lambda *_: [
            claimant.close.assert_called_once() for claimant in claimants
        ]
    proxy.return_value.__exit__.assert_called_once()


@pytest.mark.parametrize(
    ("option", "on_path", "backends", "expected"),
    [
        ("/opt/bench", "/usr/bench", ("POSIX", "LIBFABRIC", "UCX"), ("/opt/bench", "LIBFABRIC")),
        ("", "/usr/bench", ("UCX",), ("/usr/bench", "UCX")),
        ("", None, ("UCX",), "NotApplicableError: nixlbench is not on PATH, and --nixl-nixlbench PATH is not given"),
        (
            "",
            "/usr/bench",
            ("POSIX", "OBJ"),
            "NotApplicableError: --nixl-backend=POSIX,OBJ moves bytes to storage, and "
            "nixlbench then has no second rank",
        ),
    ],
)
def test_nixlbench_is_that_of_the_option_or_of_the_path(
    option: str,
    on_path: str | None,
    backends: tuple[str, ...],
    expected: Any,
    make_settings: Callable[..., Settings],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = MagicMock()
    monkeypatch.setattr(conftest, "NixlbenchSubject", subject)
    monkeypatch.setattr(shutil, "which", {"nixlbench": on_path}.get)
    settings = make_settings(nixlbench=option, backend=backends)

    def make() -> None:
        assert value_of(conftest.nixlbench, stack, nixl_settings=settings) is subject.return_value

    ending = ending_of(make)
    if isinstance(expected, str):
        assert ending == expected
    else:
        subject.assert_called_once_with(*expected)


# The ranks of this run

WRONG_RANKS = "FAIL: 2 simultaneous claims did not give each rank once: rank 0 on a got {}, rank 1 on b got {}"


@pytest.mark.parametrize(
    ("several", "answers", "conclusion"),
    [
        (False, [], "NOT-APPLICABLE: this run has one rank"),
        (True, [[0, 1], [1, 0], [0, 1]], "PASS: 2 ranks claimed at once, 3 times, and each rank was given once"),
        (True, [[0, 1], [1, 1]], WRONG_RANKS.format(1, 1)),
        (True, [[0, 2]], WRONG_RANKS.format(0, 2)),
    ],
)
def test_each_rank_of_a_run_gets_a_rank(
    several: bool, answers: list[list[int]], conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["first", "second", "third"])
    monkeypatch.setattr(secrets, "token_hex", lambda count: f"{next(tokens)} {count}")
    ask = MagicMock(side_effect=answers)
    cluster = SimpleNamespace(several=several, ranks=2, names=["rank 0 on a", "rank 1 on b"], ask=ask)
    check = test_this_run.test_the_ranks_of_this_run_get_a_rank_each
    assert conclusion_of(check, nixl_cluster=cluster, nixl_settings=SimpleNamespace(timeout=30.0)) == conclusion
    groups = ["first 8", "second 8", "third 8"][: len(answers)]
    assert ask.mock_calls == [call("claim", group=group, size=2, seconds=15.0) for group in groups]


# Membership under faults


class DoubledRace:
    """A race whose claimants make registrations at once, and whose requests pass as ``passes`` says.

    :param passes: whether the claimant of a group makes the requests; True unless a group is named.
    :param faults: the faults of the ranks of a group.
    :ivar delays: the seconds from the kill in a group until all its ranks are there.
    """

    def __init__(self, clock: DoubledClock, passes: dict[str, bool], faults: dict[str, list[str]]) -> None:
        self.clock, self._passes, self._faults = clock, passes, faults
        self.prefix, self.busy = "/p/", ""
        self.late: list[str] = []
        self.calls: list[Any] = []
        self.members: dict[str, int] = {}
        self.killed_at: dict[str, float] = {}
        self.delays: dict[str, float] = {}
        self.path, self.etcd, self.load = self, self, self
        self.known_bad, self.membership = "known bad", "membership"

    def words(self) -> str:
        return self.busy

    def client(self, group: str) -> Any:
        def hold(matches: Callable[[Any], bool]) -> None:
            methods = ("Range", "Put", "LeaseRevoke", "LeaseKeepAliveOnce")
            self.calls.append(("hold", [m for m in methods if matches(SimpleNamespace(method=m))]))

        return SimpleNamespace(
            endpoint=f"proxy of {group}", hold=hold, cut=lambda: self.calls.append("cut"), group=group
        )

    def claim(self, group: str, size: int, **options: Any) -> Any:
        name = f"claimant {sum(call[0] == 'claim' for call in self.calls)}"
        self.calls.append(("claim", group, size, options))
        self.clock.sleep(0.25)  # it takes a while to start a process
        self.clock.after(0.5, lambda: self.members.update({f"/p/{group}/members/": 1}))
        return SimpleNamespace(
            heard=0.0, kill=lambda: self._end("kill", name, group), close=lambda: self._end("close", name, group)
        )

    def _end(self, how: str, name: str, group: str) -> None:
        self.clock.sleep(0.25)
        self.calls.append((how, name))
        self.killed_at[group] = self.clock.now

    def count_prefix(self, prefix: str) -> int:
        self.calls.append(("count", prefix))
        return sum(count for key, count in self.members.items() if key.startswith(prefix))

    def let_through(self, client: Any, count: int, *, seconds: float) -> bool:
        self.calls.append(("let through", client.group, count, seconds))
        return self._passes.get(client.group, True)

    def faults(self, claimants: Any, size: int, group: str, seconds: float) -> list[str]:
        self.calls.append(("faults", len(claimants), size, group, round(seconds, 3)))
        self.clock.sleep(10)
        last, *others = claimants if group.startswith("first") else reversed(claimants)
        last.heard = self.killed_at.get(group, 0.0) + self.delays.get(group, 2.0)
        for claimant in others:
            claimant.heard = last.heard - 0.5
        return list(self._faults.get(group, []))


@pytest.fixture
def make_race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(passes: dict[str, bool] | None = None, faults: dict[str, list[str]] | None = None) -> DoubledRace:
        clock = DoubledClock()
        monkeypatch.setattr(polling, "time", clock)
        monkeypatch.setattr(test_membership, "time", clock)
        return DoubledRace(clock, passes or {}, faults or {})

    return make


HELD = ("hold", ["Range", "Put", "LeaseRevoke"])
VICTIM: dict[str, Any] = {"endpoint": "proxy of g", "function": "membership", "ttl": 4}


@pytest.mark.parametrize(
    ("first", "reached", "expected"),
    [
        (
            True,
            True,
            [
                ("count", "/p/g/members/"),
                HELD,
                ("claim", "g", 2, VICTIM),
                ("let through", "g", 3, 120.0),
                "cut",
                ("kill", "claimant 0"),
                ("claim", "g", 2, {"ttl": 20}),
                ("claim", "g", 2, {"ttl": 20}),
            ],
        ),
        (
            True,
            False,
            [
                ("count", "/p/g/members/"),
                HELD,
                ("claim", "g", 2, VICTIM),
                ("let through", "g", 3, 120.0),
                "cut",
                ("kill", "claimant 0"),
            ],
        ),
        (
            False,
            True,
            [
                ("claim", "g", 2, {"ttl": 20}),
                ("count", "/p/g/members/"),
                HELD,
                ("claim", "g", 2, VICTIM),
                ("let through", "g", 3, 120.0),
                "cut",
                ("kill", "claimant 1"),
                ("claim", "g", 2, {"ttl": 20}),
            ],
        ),
        (
            False,
            False,
            [
                ("claim", "g", 2, {"ttl": 20}),
                ("count", "/p/g/members/"),
                HELD,
                ("claim", "g", 2, VICTIM),
                ("let through", "g", 3, 120.0),
                "cut",
                ("kill", "claimant 1"),
                ("close", "claimant 0"),
            ],
        ),
    ],
    ids=["first", "first that lost its lease", "last", "last that lost its lease"],
)
def test_a_claimant_is_killed_after_some_requests_and_others_claim_all_ranks(
    make_race: Callable[..., Any], first: bool, reached: bool, expected: list[Any]
) -> None:
    race = make_race({"g": reached})
    kill = test_membership.kill_after(race, "g", 3, 4, first=first)
    counts = ("count", "/p/g/members/")
    assert [step for at, step in enumerate(race.calls) if step != counts or race.calls[at - 1] != counts] == expected
    if not reached:
        assert kill is None
        return
    assert kill is not None
    assert (kill.group, kill.ttl, len(kill.claimants), kill.at) == ("g", 4, 2, race.killed_at["g"])


def test_a_registration_that_never_comes_is_named(make_race: Callable[..., Any]) -> None:
    race = make_race()
    race.clock.after = lambda *_: None
    kill: Any = test_membership.kill_after
    ending = ending_of(lambda: kill(race, "g", 1, 1, first=False))
    assert ending == "LateError: waited 120 s for 1 registrations"


CASES = [f"first-after-{number}" for number in range(3)] + [f"last-after-{number}" for number in range(5)]
SLOW = "WARN: all ranks were claimed again, but only after {} s, with a lease of {} s"
KILLS = "PASS: killed at 8 points; all ranks claimed after at most {} s"
BUSY = "other processes used 3.0 of this host's 2 processors during the test"


LOST = {f"last-after-3-lease-{ttl}": False for ttl in (1, 4)}


@pytest.mark.parametrize(
    ("passes", "faults", "late", "busy", "delays", "conclusion"),
    [
        ({}, {}, [], "", {}, KILLS.format("2.0")),
        ({**LOST, "first-after-0-lease-1": False}, {}, [], "", {}, KILLS.format("2.0")),
        (
            {f"last-after-1-lease-{ttl}": False for ttl in (1, 4, 16)},
            {},
            [],
            "",
            {},
            "INCONCLUSIVE: last-after-1: the claimant lost its lease of 16 s before it could be killed",
        ),
        (
            {},
            {"first-after-0-lease-1": ["bad", "worse"], "last-after-4-lease-1": ["wrong"]},
            ["x"],
            BUSY,
            {"first-after-1-lease-1": 9.0},
            "FAIL: first-after-0-lease-1: bad; first-after-0-lease-1: worse; last-after-4-lease-1: wrong",
        ),
        ({}, {}, [], "", {"first-after-0-lease-1": 4.1}, SLOW.format("4.1", 1)),
        ({}, {}, [], "", {"last-after-4-lease-1": 4.1}, SLOW.format("4.1", 1)),
        ({}, {}, [], "", {"first-after-0-lease-1": 3.9}, KILLS.format("3.9")),
        ({}, {}, [], "", {"last-after-4-lease-1": 3.9}, KILLS.format("3.9")),
        # A group with a lease of 16 s may take longer than one with a lease of 1 s.
        (LOST, {}, [], "", {"last-after-3-lease-16": 18.9}, KILLS.format("18.9")),
        (LOST, {}, [], "", {"last-after-3-lease-16": 19.1}, SLOW.format("19.1", 16)),
        ({}, {}, ["x", "y"], BUSY, {}, f"WARN: undecided: no rank was wrong, but x; y; {BUSY}"),
        ({}, {}, ["x", "y"], "", {}, "FAIL: x; y"),
    ],
)
def test_ranks_after_a_kill_are_judged(
    make_race: Callable[..., Any],
    passes: dict[str, bool],
    faults: dict[str, list[str]],
    late: list[str],
    busy: str,
    delays: dict[str, float],
    conclusion: str,
) -> None:
    race = make_race(passes, faults)
    race.late, race.busy, race.delays = late, busy, delays
    check = test_membership.test_a_killed_claimant_blocks_nobody_longer_than_its_lease
    assert conclusion_of(check, race=race) == conclusion
    groups = [
        (f"{case}-lease-{ttl}", int(case[-1]))
        for case in CASES
        for ttl in (1, 4, 16)
        if ttl == 1 or not passes.get(f"{case}-lease-{ttl // 4}", True)
    ]
    decided = not conclusion.startswith("INCONCLUSIVE")
    tried = groups if decided else groups[: groups.index(("last-after-1-lease-16", 1)) + 1]
    killed = [group for group, _ in groups if passes.get(group, True)]
    waits = [120.0 - 10 * number for number in range(8)]
    assert [step[1:3] for step in race.calls if step[0] == "let through"] == tried
    assert [step[1:] for step in race.calls if step[0] == "faults"] == (
        [(2, 2, group, wait) for group, wait in zip(killed, waits, strict=True)] if decided else []
    )


# Overlapping claims

RANKS = (ClaimOutcome("claimant 0", 0), ClaimOutcome("claimant 1", 1))
TWICE = (ClaimOutcome("claimant 0", 0), ClaimOutcome("claimant 1", 0))
GOOD = Amplified(RANKS, (), False, True, False, "", "", "the order", 1.0)
BAD = replace(GOOD, outcomes=TWICE, faults=("rank 0 twice", "nobody has rank 1"), cause="the cause")
APART = replace(GOOD, unmet="they were apart", faults=("no rank",))
BAD_TEXT = "rank 0 twice; the cause; nobody has rank 1\nthe order"


@pytest.mark.parametrize(
    ("done", "conclusion"),
    [
        (BAD, "PASS: rank 0 twice; the cause\nthe order"),
        (GOOD, "ERROR: the known race was not detected"),
    ],
)
def test_the_known_race_is_to_be_detected(done: Amplified, conclusion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amplify = MagicMock(return_value=done)
    monkeypatch.setattr(test_membership, "amplify", amplify)
    race = SimpleNamespace(path="path", etcd="etcd", known_bad="known bad", prefix="/p/")
    assert conclusion_of(test_membership.test_the_known_race_is_detected, race=race) == conclusion
    amplify.assert_called_once_with("path", "etcd", "known bad", 2, group="/p/")


@pytest.mark.parametrize(
    ("done", "busy", "conclusion"),
    [
        (GOOD, BUSY, "PASS: 8 claims that overlapped got 8 ranks"),
        (BAD, BUSY, "FAIL: rank 0 twice; nobody has rank 1"),
        (replace(BAD, unmet="apart"), BUSY, "FAIL: rank 0 twice; nobody has rank 1"),
        (APART, "", "FAIL: the claims did not overlap: they were apart"),
        (APART, BUSY, f"WARN: undecided: no rank was wrong, but the claims did not overlap: they were apart; {BUSY}"),
        (replace(GOOD, faults=("no rank",)), BUSY, "FAIL: no rank"),
    ],
)
def test_overlapping_claims_are_judged(
    make_race: Callable[..., Any], done: Amplified, busy: str, conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amplify, race = MagicMock(return_value=done), make_race()
    race.busy = busy
    monkeypatch.setattr(test_membership, "amplify", amplify)
    check = test_membership.test_simultaneous_claims_give_each_rank_once
    assert conclusion_of(check, race=race, claimants=8) == conclusion
    amplify.assert_called_once_with(race, race, "membership", 8, group="/p/")


@pytest.mark.parametrize(
    ("faults", "conclusion"),
    [
        ({}, "PASS: a new group started although a dead group had left 1 keys"),
        ({"again": ["bad"]}, "FAIL: bad; bad"),
    ],
)
def test_a_group_starts_after_a_dead_one_of_the_same_name(
    make_race: Callable[..., Any], faults: dict[str, list[str]], conclusion: str
) -> None:
    race = make_race(faults=faults)
    race._end = lambda how, name, group: race.calls.append((how, name))
    check = test_membership.test_keys_of_a_dead_group_do_not_affect_the_next_group
    assert conclusion_of(check, race=race) == conclusion
    claims = {ttl: [("claim", "again", 2, {"ttl": ttl})] * 2 for ttl in (4, 20)}
    judged = ("faults", 2, 2, "again", 120.0)
    kills = [("kill", "claimant 0"), ("kill", "claimant 1")]
    assert race.calls == [*claims[4], judged, *kills, ("count", "/p/"), *claims[20], judged]


@pytest.mark.parametrize(
    ("check", "patched", "remedy"),
    [
        (
            test_membership.test_the_known_race_is_detected,
            GOOD,
            "report this output: it shows a defect of pytest-nixl's membership",
        ),
        (
            test_membership.test_simultaneous_claims_give_each_rank_once,
            BAD,
            "report this output: it shows a defect of pytest-nixl's membership",
        ),
        (
            test_membership.test_simultaneous_claims_give_each_rank_once,
            APART,
            "report this output: it shows a defect of pytest-nixl's membership",
        ),
    ],
)
def test_a_fault_of_the_membership_is_to_be_reported(
    make_race: Callable[..., Any],
    check: Callable[..., None],
    patched: Amplified,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_membership, "amplify", lambda *_, **__: patched)
    judgements: list[Judgement] = []
    arguments: dict[str, Any] = {"claimants": 2} if patched is not GOOD else {}
    check(race=make_race(), verdict=judgements.append, **arguments)
    assert [judgement.remedy for judgement in judgements] == [remedy]


# nixlbench

TRIED = TriedOrders(7, True, RANKS, (), "", "the order of orders")
WRONG_ORDER = replace(TRIED, outcomes=TWICE, faults=("in this order",), cause="too early")
NO_OVERLAP = "the registrations of two processes did not overlap, and no lock separated them"
UNIQUE = "PASS: two processes that registered at once got two ranks, 3 times: {}; and in {}"


@pytest.mark.parametrize(
    ("runs", "tried", "conclusion"),
    [
        ([GOOD] * 3, TRIED, UNIQUE.format("both wrote at once", "7 orders of their requests")),
        (
            [GOOD, GOOD, replace(GOOD, locked=True)],
            replace(TRIED, complete=False),
            UNIQUE.format(
                "a lock made one wait while the other wrote", "7 orders of their requests, for more there was no time"
            ),
        ),
        ([GOOD, BAD], None, f"FAIL: {BAD_TEXT}"),
        ([replace(BAD, unmet="apart")], None, f"FAIL: {BAD_TEXT}"),
        ([replace(GOOD, faults=("no rank",))], None, "FAIL: no rank\nthe order"),
        ([GOOD, APART], None, f"INCONCLUSIVE: {NO_OVERLAP}: they were apart; no rank"),
        ([GOOD] * 3, WRONG_ORDER, "FAIL: in this order; too early\nthe order of orders"),
    ],
)
def test_two_processes_of_nixlbench_get_two_ranks(
    runs: list[Amplified], tried: TriedOrders | None, conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amplify, orders = MagicMock(side_effect=runs), MagicMock(return_value=tried)
    monkeypatch.setattr(test_nixlbench, "amplify", amplify)
    monkeypatch.setattr(test_nixlbench, "try_orders", orders)
    remedy = MagicMock(return_value="a remedy")
    monkeypatch.setattr(test_nixlbench, "remedy_for", remedy)
    judgements: list[Judgement] = []
    check: Any = test_nixlbench.test_two_nixlbench_processes_that_start_at_once_get_two_ranks
    check("bench", SimpleNamespace(path="path", etcd="etcd"), judgements.append)
    (judgement,) = judgements
    assert f"{judgement.verdict.value}: {judgement.reason}" == conclusion
    assert amplify.mock_calls == [
        call("path", "etcd", "bench", 2, group=f"race-{number}-") for number in range(1, len(runs) + 1)
    ]
    assert orders.mock_calls == [call("path", "etcd", "bench", group="race-order-")] * (tried is not None)
    if conclusion.startswith("FAIL"):
        remedy.assert_called_once_with((tried or runs[-1]).outcomes)
    assert judgement.remedy == {"F": "a remedy", "I": test_nixlbench.NOT_TRIED, "P": ""}[conclusion[0]]


LOSES = replace(GOOD, lost=True)
WITHOUT_LOSS = "this nixlbench gives a rank twice although no answer of etcd was lost"


@pytest.mark.parametrize(
    ("first", "losses", "seconds", "conclusion", "remedy"),
    [
        (BAD, [], 0, f"NOT-APPLICABLE: {WITHOUT_LOSS}: see nixlbench-ranks-unique", ""),
        (APART, [], 0, f"INCONCLUSIVE: {NO_OVERLAP}: they were apart; no rank", test_nixlbench.NOT_TRIED),
        (
            GOOD,
            [LOSES, LOSES, GOOD, LOSES, GOOD, GOOD],
            0,
            "NIXLBENCH-RANK-TWICE does not occur: each of 2 answers of both processes was lost once",
            None,
        ),
        (
            GOOD,
            [LOSES, LOSES, GOOD, replace(BAD, lost=True)],
            0,
            f"NIXLBENCH-RANK-TWICE occurs: answer 2 of a process was lost: {BAD_TEXT}",
            None,
        ),
        (GOOD, [BAD, LOSES], 0, f"FAIL: {WITHOUT_LOSS}: {BAD_TEXT}", "a remedy"),
        (
            GOOD,
            [LOSES] * 4,
            100.0,
            "INCONCLUSIVE: no rank was given twice, but there was time to lose 2 answers of each process only",
            "run it again on a host that is less busy",
        ),
    ],
)
def test_a_lost_answer_gives_no_rank_twice(
    first: Amplified,
    losses: list[Amplified],
    seconds: float,
    conclusion: str,
    remedy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, runs = DoubledClock(), iter([first, *losses])
    calls: list[Any] = []

    def amplify(*arguments: Any, **options: Any) -> Amplified:
        calls.append(call(*arguments, **options))
        clock.sleep(seconds / 2 if options.get("loses") else 1000)
        return next(runs)

    monkeypatch.setattr(test_nixlbench, "amplify", amplify)
    monkeypatch.setattr(test_nixlbench, "time", clock)
    monkeypatch.setattr(test_nixlbench, "remedy_for", lambda outcomes: "a remedy" if outcomes == TWICE else "another")
    ends: list[Any] = []
    check: Any = test_nixlbench.test_nixlbench_gives_no_rank_twice_after_a_lost_answer
    race = SimpleNamespace(path="path", etcd="etcd")
    check("bench", race, lambda id, occurs, reason: ends.append((id, occurs, reason)), ends.append)
    (end,) = ends
    if remedy is None:
        id, occurs, reason = end
        assert f"{id} {'occurs' if occurs else 'does not occur'}: {reason}" == conclusion
    else:
        assert (f"{end.verdict.value}: {end.reason}", end.remedy) == (conclusion, remedy)
    assert calls == [
        call("path", "etcd", "bench", 2, group="race-lost-"),
        *(
            call(
                "path",
                "etcd",
                "bench",
                2,
                group=f"race-lost-{number % 2}-{number // 2 + 1}-",
                seconds=20.0,
                loses=(number % 2, number // 2 + 1),
            )
            for number in range(len(losses))
        ),
    ]
