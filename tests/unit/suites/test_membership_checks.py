# SPDX-License-Identifier: Apache-2.0
"""The checks of pytest-nixl's own membership end as the claims demand, with doubles of the claimants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.doubled_claims import APART, BAD, GOOD
from helpers.doubled_nixl import DoubledClock
from helpers.suite_calls import conclusion_of, ending_of

from pytest_nixl.checks.rank_race.race import Amplified
from pytest_nixl.core import polling
from pytest_nixl.model.verdicts import Judgement
from suites.rank_race import test_membership

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
UNTIL_THE_KILL = [
    ("count", "/p/g/members/"),
    HELD,
    ("claim", "g", 2, VICTIM),
    ("let through", "g", 3, 120.0),
    "cut",
]
OTHER: Any = ("claim", "g", 2, {"ttl": 20})


@pytest.mark.parametrize(
    ("first", "reached", "expected"),
    [
        (True, True, [*UNTIL_THE_KILL, ("kill", "claimant 0"), OTHER, OTHER]),
        (True, False, [*UNTIL_THE_KILL, ("kill", "claimant 0")]),
        (False, True, [OTHER, *UNTIL_THE_KILL, ("kill", "claimant 1"), OTHER]),
        (False, False, [OTHER, *UNTIL_THE_KILL, ("kill", "claimant 1"), ("close", "claimant 0")]),
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
    ("check", "patched"),
    [
        (test_membership.test_the_known_race_is_detected, GOOD),
        (test_membership.test_simultaneous_claims_give_each_rank_once, BAD),
        (test_membership.test_simultaneous_claims_give_each_rank_once, APART),
    ],
)
def test_a_fault_of_the_membership_is_to_be_reported(
    make_race: Callable[..., Any],
    check: Callable[..., None],
    patched: Amplified,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_membership, "amplify", lambda *_, **__: patched)
    judgements: list[Judgement] = []
    arguments: dict[str, Any] = {"claimants": 2} if patched is not GOOD else {}
    check(race=make_race(), verdict=judgements.append, **arguments)
    remedy = "report this output: it shows a defect of pytest-nixl's membership"
    assert [judgement.remedy for judgement in judgements] == [remedy]
