# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``rank_race`` end as the claims demand, with doubles of the claimants."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.doubled_claims import APART, BAD, GOOD, RANKS, TWICE
from helpers.doubled_nixl import DoubledClock
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl.checks.rank_race.orders import TriedOrders
from pytest_nixl.checks.rank_race.race import Amplified
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.rank_race import conftest, test_nixlbench, test_this_run

# Fixtures


def test_claimants_and_the_proxy_end_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, race_type = MagicMock(), MagicMock()
    monkeypatch.setattr(conftest, "EtcdProxy", proxy)
    monkeypatch.setattr(conftest, "Race", race_type)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    claimants = race_type.return_value.claimants = [MagicMock(), MagicMock()]
    server = SimpleNamespace(endpoint="http://a:1", server="server", client="client")
    with ExitStack() as stack:
        assert value_of(conftest.race, stack, nixl_private_etcd=server) is race_type.return_value
        path = proxy.return_value.__enter__.return_value
        race_type.assert_called_once_with("server", "client", path, "/pytest-nixl/abababababababab/")
        proxy.assert_called_once_with("http://a:1")
        assert not any(claimant.close.called for claimant in claimants)
        proxy.return_value.__exit__.side_effect = lambda *_: [
            claimant.close.assert_called_once() for claimant in claimants
        ]
    proxy.return_value.__exit__.assert_called_once()


STORED = "--nixl-backend=POSIX,OBJ moves bytes to storage, and nixlbench then has no second rank"
NO_PROGRAM = "nixlbench is not on PATH, and --nixl-nixlbench PATH is not given"


@pytest.mark.parametrize(
    ("option", "on_path", "backends", "ending"),
    [
        ("/opt/bench", "/usr/bench", ("POSIX", "LIBFABRIC", "UCX"), "/opt/bench with LIBFABRIC"),
        ("", "/usr/bench", ("UCX",), "/usr/bench with UCX"),
        ("", None, ("UCX",), f"NotApplicableError: {NO_PROGRAM}"),
        ("", "/usr/bench", ("POSIX", "OBJ"), f"NotApplicableError: {STORED}"),
    ],
)
def test_nixlbench_is_that_of_the_option_or_of_the_path(
    option: str,
    on_path: str | None,
    backends: tuple[str, ...],
    ending: str,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conftest, "NixlbenchSubject", "{} with {}".format)
    monkeypatch.setattr(shutil, "which", {"nixlbench": on_path}.get)
    settings = make_settings(nixlbench=option, backend=backends)

    def conclude(verdict: Callable[[Judgement], None]) -> None:
        verdict(Judgement(Verdict.PASS, value_of(conftest.nixlbench, ExitStack(), nixl_settings=settings)))

    assert ending_of(conclude).removeprefix("PASS: ") == ending


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


# nixlbench

BAD_TEXT = "rank 0 twice; the cause; nobody has rank 1\nthe order"
TRIED = TriedOrders(7, True, RANKS, (), "", "the order of orders")
WRONG_ORDER = replace(TRIED, outcomes=TWICE, faults=("in this order",), cause="too early")
NO_OVERLAP = "the registrations of two processes did not overlap, and no lock separated them"
LOCKED = "a lock made one wait while the other wrote", "7 orders of their requests, for more there was no time"
UNIQUE = "PASS: two processes that registered at once got two ranks, 3 times: {}; and in {}"


@pytest.mark.parametrize(
    ("runs", "tried", "conclusion"),
    [
        ([GOOD] * 3, TRIED, UNIQUE.format("both wrote at once", "7 orders of their requests")),
        ([GOOD, GOOD, replace(GOOD, locked=True)], replace(TRIED, complete=False), UNIQUE.format(*LOCKED)),
        ([GOOD, replace(BAD, unmet="apart")], None, f"FAIL: {BAD_TEXT}"),
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
FINDING = "NIXLBENCH-RANK-TWICE"
ABSENT = f"{FINDING} False: each of 2 answers of both processes was lost once"
PRESENT = f"{FINDING} True: answer 2 of a process was lost: {BAD_TEXT}"
LATE = "INCONCLUSIVE: no rank was given twice, but there was time to lose 2 answers of each process only"


@pytest.mark.parametrize(
    ("first", "losses", "seconds", "conclusion", "remedy"),
    [
        (BAD, [], 0, f"NOT-APPLICABLE: {WITHOUT_LOSS}: see nixlbench-ranks-unique", ""),
        (APART, [], 0, f"INCONCLUSIVE: {NO_OVERLAP}: they were apart; no rank", test_nixlbench.NOT_TRIED),
        (GOOD, [LOSES, LOSES, GOOD, LOSES, GOOD, GOOD], 0, ABSENT, ""),
        (GOOD, [LOSES, LOSES, GOOD, replace(BAD, lost=True)], 0, PRESENT, ""),
        (GOOD, [BAD, LOSES], 0, f"FAIL: {WITHOUT_LOSS}: {BAD_TEXT}", "a remedy"),
        (GOOD, [LOSES] * 4, 100.0, LATE, "run it again on a host that is less busy"),
    ],
)
def test_a_lost_answer_gives_no_rank_twice(
    first: Amplified,
    losses: list[Amplified],
    seconds: float,
    conclusion: str,
    remedy: str,
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
    ends: list[tuple[str, str]] = []
    check: Any = test_nixlbench.test_nixlbench_gives_no_rank_twice_after_a_lost_answer
    check(
        "bench",
        SimpleNamespace(path="path", etcd="etcd"),
        lambda id, occurs, reason: ends.append((f"{id} {occurs}: {reason}", "")),
        lambda judgement: ends.append((f"{judgement.verdict.value}: {judgement.reason}", judgement.remedy)),
    )
    assert ends == [(conclusion, remedy)]
    first_call, *lossy_calls = calls
    assert first_call == call("path", "etcd", "bench", 2, group="race-lost-")
    processes = [(number % 2, number // 2 + 1) for number in range(len(losses))]
    assert lossy_calls == [
        call(
            "path", "etcd", "bench", 2, group=f"race-lost-{claimant}-{answer}-", seconds=20.0, loses=(claimant, answer)
        )
        for claimant, answer in processes
    ]
