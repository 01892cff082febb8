# SPDX-License-Identifier: Apache-2.0
"""Known races are found every time and can be replayed; correct registrations stay correct."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import repeats
from helpers.etcd import Etcd, running, running_etcd, wait_until
from helpers.race_events import DivergenceError, RequestEvent
from helpers.race_explorer import DepthFirst, ExploredRun, Explorer, RandomScheduler, linear_extensions

from pytest_nixl.checks.rank_race import race
from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.order import overlap
from pytest_nixl.checks.rank_race.orders import _POLLS, TriedOrders, try_orders
from pytest_nixl.checks.rank_race.race import Amplified, Race, amplify
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    CommandSubject,
    FunctionSubject,
    MembershipSubject,
    NixlbenchSubject,
    Running,
    faults,
    read_outcome,
    remedy_for,
)
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.proxy import Access, EtcdProxy, ProxyClient, Request
from pytest_nixl.etcd.proxy.client import ProxiedConnection
from pytest_nixl.etcd.proxy.proxy import ProxyLateError
from pytest_nixl.model.nixlbench_table import read_output
from suites.rank_race.test_membership import Kill

#: For three clients of the membership: the number of orders, and the number of orders that are not equivalent.
ORDERS_OF_THREE = {"none": (90, 6), "losses": (3150, 120), "crashes": (11484, 216)}
FUNCTIONS = "pytest_nixl.checks.rank_race.functions"
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


def orders(path: EtcdProxy, direct: EtcdClient, function: str, **options: float) -> TriedOrders:
    return try_orders(path, direct, FunctionSubject(function), group="/o/", **options)


class TestOrders:
    """The second claimant claims after each step of the first one."""

    @pytest.mark.soak
    def test_a_rank_that_is_taken_from_a_list_too_early_is_found(self, path: EtcdProxy, direct: EtcdClient) -> None:
        """Claims that overlap do not show it, and neither does any order in which the first that started goes first."""
        together = amplify(path, direct, FunctionSubject("helpers.race_functions:announces_and_lists"), 2, group="/o/")
        assert (together.met, together.faults) == (True, ())
        for _ in repeats():
            tried = orders(path, direct, "helpers.race_functions:announces_and_lists")
            assert tried.faults[0].startswith("rank 0 was given 2 times: to claimant 0 (")
            assert re.fullmatch(
                "claimant [01] listed the keys under '<group>/tokens/' before claimant [01] wrote one there, and took "
                "its rank by them, without etcd's lock",
                tried.cause,
            )
            assert "Range(<group>/tokens/)" in tried.order

    @pytest.mark.parametrize(
        ("function", "count"),
        [("announces_and_lists_by_age", 8), ("locked_read_modify_write", 6), ("tries_again", 1)],
    )
    def test_a_correct_claim_is_right_in_every_order(
        self, path: EtcdProxy, direct: EtcdClient, function: str, count: int
    ) -> None:
        done = orders(path, direct, f"helpers.race_functions:{function}")
        assert (done.faults, done.complete, done.twice) == ((), True, False)
        assert done.count >= count

    @pytest.mark.long
    def test_the_orders_of_one_that_polls_end_after_a_few_polls(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = orders(path, direct, "helpers.race_functions:announces_and_waits")
        assert (done.faults, done.complete) == ((), True)
        assert 2 * _POLLS < done.count < 4 * _POLLS

    def test_the_orders_of_membership_end_when_the_first_one_waits(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = try_orders(path, direct, MembershipSubject(), group="/o/")
        assert (done.faults, done.complete) == ((), True)
        assert done.count < 8

    def test_only_two_claims_that_begin_with_a_write_change_places(self, path: EtcdProxy, direct: EtcdClient) -> None:
        subject = Mixed("helpers.race_functions:tries_again", "helpers.race_functions:looks_and_tries_again")
        done = try_orders(path, direct, subject, group="/o/")
        assert (done.faults, done.complete, done.count) == ((), True, 1)

    def test_orders_without_time_are_counted(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = orders(path, direct, "helpers.race_functions:locked_read_modify_write", budget=0.0)
        assert (done.count, done.complete, done.faults) == (1, False, ())

    def test_a_claimant_without_a_rank_is_reported(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = orders(path, direct, "helpers.race_functions:only_reads", seconds=2.0)
        assert done.faults == ("claimant 0 and claimant 1 had no rank after 2 s",)


@pytest.fixture
def explorer(path: EtcdProxy, direct: EtcdClient) -> Callable[..., Explorer]:
    def make(function: str, clients: int = 2, **options: bool) -> Explorer:
        return Explorer(path, direct, FunctionSubject(function), clients, group="/r/", **options)

    return make


def finds_twice(run: ExploredRun) -> bool:
    return run.twice


class Mixed(FunctionSubject):
    """A different function for each claimant."""

    def __init__(self, *functions: str) -> None:
        super().__init__(functions[0])
        self._subjects = [FunctionSubject(function) for function in functions]

    def start(self, proxy_client: ProxyClient, group: str, size: int) -> Running:
        return self._subjects[int(proxy_client.name.rpartition(" ")[2])].start(proxy_client, group, size)


EARLY = "b listed the keys under '/t/' before a wrote one there, and took its rank by them, without etcd's lock"
TOGETHER = "a and b listed the keys under '/t/' after each of them had written one there, and took the same rank by"


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
    def write(key: bytes) -> tuple[Access, ...]:
        return (Access(key, key + b"\0", True),)

    listed = (Access(b"/t/", b"/t0", False),)
    first = [
        Request("b", 1, "Put", "/t/b", write(b"/t/b"), sent=1, answered=1),
        Request("b", 2, "Range", "/t/", listed, answer=answer, sent=2, answered=answered),
    ]
    second = [
        Request("a", 1, "Put", "/t/a", write(b"/t/a"), sent=3, answered=3),
        Request("a", 2, "Range", "/t/", listed, answer=b"/t/a /t/b", sent=4, answered=4),
    ]
    clients: Any = [SimpleNamespace(requests=first), SimpleNamespace(requests=second)]
    assert overlap(clients, ["a", "b"], {}).startswith(cause)


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        ("b+b b* a+a a*", EARLY),
        ("b+b b* a+a b* a*", TOGETHER),  # the first list is not the one that counts
        ("b+b b* a+a b*", ""),
        ("a+a b* a+c b+b", ""),  # no key of its own was there when it listed them
        ("b+k b=k a+k a=k", ""),  # one key is no list
        ("a+k b+k a=k b=k", ""),
        ("a=k b=k a+k b+k", "a and b read '/t/k' before any of them wrote it, and none of them took etcd's lock"),
        ("a=k a+k b=k b+k", ""),
    ],
)
def test_two_claims_overlap_only_in_these_orders(steps: str, cause: str) -> None:
    clients: dict[str, list[Request]] = {"a": [], "b": []}
    written: list[bytes] = []
    for sent, step in enumerate(steps.split(), 1):
        client, verb, key = step[0], step[1], f"/t/{step[2:]}".encode()
        written += [key] if verb == "+" else []
        access = Access(key, b"/t0" if verb == "*" else key + b"\0", verb == "+")
        method, answer = ("Put", b"") if verb == "+" else ("Range", b" ".join(written))
        clients[client].append(Request(client, sent, method, key.decode(), (access,), answer=answer, sent=sent))
    for request in clients["a"] + clients["b"]:
        request.answered = request.sent
    proxies: Any = [SimpleNamespace(requests=requests) for requests in clients.values()]
    text = overlap(proxies, ["a", "b"], {})
    assert text[: len(cause) or None] == cause


class TestAmplified:
    @pytest.mark.soak
    @pytest.mark.parametrize("clients", [2, 3])
    def test_the_known_race_is_detected_every_time(self, path: EtcdProxy, direct: EtcdClient, clients: int) -> None:
        subject = FunctionSubject(f"{FUNCTIONS}:read_modify_write")
        for _ in repeats():
            done = amplify(path, direct, subject, clients, group="/r/")
            assert done.met
            assert done.faults[0].startswith(f"rank 0 was given {clients} times: to claimant 0 (")
            assert "keys in etcd: /r/" in done.faults[-1]

    @pytest.mark.soak
    @pytest.mark.parametrize("clients", [2, 8])
    def test_membership_gives_each_rank_once(self, path: EtcdProxy, direct: EtcdClient, clients: int) -> None:
        for _ in repeats():
            done = amplify(path, direct, MembershipSubject(), clients, group="/r/")
            assert done.met
            assert done.faults == ()
            assert sorted(outcome.rank or 0 for outcome in done.outcomes) == list(range(clients))

    @pytest.mark.parametrize("clients", [2, 3])
    def test_a_lock_that_separates_claims_is_detected(self, path: EtcdProxy, direct: EtcdClient, clients: int) -> None:
        subject = FunctionSubject("helpers.race_functions:locked_read_modify_write")
        done = amplify(path, direct, subject, clients, group="/r/")
        assert (done.met, done.locked, done.unmet, done.faults) == (False, True, "", ())

    def test_the_order_of_requests_and_the_cause_are_reported(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = amplify(path, direct, FunctionSubject(f"{FUNCTIONS}:read_modify_write"), 2, group="/r/")
        assert done.cause == (
            "claimant 0 and claimant 1 read '<group>/size' before any of them wrote it, "
            "and none of them took etcd's lock"
        )
        lines = done.order.splitlines()
        assert lines[0] == "the order of requests:"
        moves = [line.partition(". ")[2] for line in lines[1:]]
        assert sorted(moves) == sorted(
            f"claimant {number}: {request}"
            for number in (0, 1)
            for request in ("Range(<group>/size)", "LeaseGrant()", "Put(<group>/rank/0)", "Put(<group>/size)")
        )
        first_write = min(number for number, move in enumerate(moves) if "size" in move and "Put" in move)
        assert all(moves.index(f"claimant {number}: Range(<group>/size)") < first_write for number in (0, 1))

    def test_a_rank_by_the_number_of_keys_has_its_cause_named(self, path: EtcdProxy, direct: EtcdClient) -> None:
        done = amplify(path, direct, FunctionSubject("helpers.race_functions:announces_and_counts"), 2, group="/a/")
        assert done.faults[0].startswith("rank 1 was given 2 times: to claimant 0 (")
        assert done.cause == (
            "claimant 0 and claimant 1 listed the keys under '<group>/tokens/' after each of them had written one "
            "there, and took the same rank by their number"
        )

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
        done = amplify(path, direct, FunctionSubject("helpers.race_functions:announces_and_counts"), 2, group="/a/")
        assert done.faults[0].startswith("rank 1 was given 2 times: to claimant 0 (")

    def test_a_race_behind_a_first_write_and_a_pause_is_detected(self, path: EtcdProxy, direct: EtcdClient) -> None:
        """A nixlbench without a lock that writes that it is there, and looks for its rank after a pause."""
        helpers = "helpers.race_functions:present_then_"
        subject = Mixed(f"{helpers}late", f"{helpers}early")
        done = amplify(path, direct, subject, 2, group="/r/")
        assert (done.met, done.locked, done.twice, done.unmet) == (True, False, True, "")
        assert done.faults[0].startswith("rank 0 was given 2 times: to claimant 0 (")

    def test_a_claim_that_looked_for_its_rank_after_another_had_it_proves_nothing(
        self, path: EtcdProxy, direct: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(race, "_NEXT_WRITE_SECONDS", 0.1)
        helpers = "helpers.race_functions:present_then_"
        subject = Mixed(f"{helpers}late", f"{helpers}early")
        done = amplify(path, direct, subject, 2, group="/r/")
        assert (done.met, done.locked, done.faults) == (True, False, ())
        assert done.unmet == "claimant 0 read '<group>/size' only after claimant 1 had written it"

    def test_a_lock_behind_a_first_write_is_detected(self, path: EtcdProxy, direct: EtcdClient) -> None:
        subject = FunctionSubject("helpers.race_functions:present_then_locked")
        done = amplify(path, direct, subject, 2, group="/r/")
        assert (done.met, done.locked, done.unmet, done.faults) == (True, True, "", ())

    @pytest.mark.long
    def test_claims_that_cannot_overlap_prove_nothing(self, path: EtcdProxy, direct: EtcdClient) -> None:
        # One claimant ends before its first request.
        subject = Mixed(f"{FUNCTIONS}:read_modify_write", "helpers.race_functions:ends")
        done = amplify(path, direct, subject, 2, group="/r/")
        assert (done.met, done.locked, done.twice) == (False, False, False)
        assert done.unmet.startswith("claimant 1 ended before the claims could overlap: claimant 1 (")
        # The claimants live, but send no request.
        silent = FunctionSubject("helpers.race_functions:asks_for_nothing")
        done = amplify(path, direct, silent, 2, group="/r/", seconds=0.5)
        assert (done.met, done.locked, done.twice, done.faults) == (False, False, False, ())
        assert done.unmet.startswith("claimant 0 and claimant 1 ")
        assert "0.5 s" in done.unmet
        # The claimants only read.
        done = amplify(path, direct, FunctionSubject("helpers.race_functions:only_reads"), 2, group="/r/", seconds=3.0)
        assert (done.met, done.locked, done.twice, done.faults) == (False, False, False, ())
        assert "claimant 1 neither wrote nor waited in a lock within 3 s; its last request: Range(" in done.unmet


@pytest.mark.long
class TestExplored:
    def test_the_known_race_is_found_and_replayed(self, explorer: Callable[..., Explorer]) -> None:
        exploring = explorer(f"{FUNCTIONS}:read_modify_write")
        report = exploring.explore()
        # Four requests each: 70 orders, of which only the two that let one client finish first are good.
        assert (report.orders, report.run, report.bad_orders, report.stopped) == (70, 6, 68, "")
        assert report.pruned == 64
        assert str(report).startswith(f"{FUNCTIONS}:read_modify_write, 2 clients: 70 orders, 6 run, 64 pruned ")
        assert "4 of those run are bad, and stand for 68;" in str(report)
        for bad in report.bad:
            assert bad.faults[0].startswith("rank 0 was given 2 times: to client 0 (")
            again = exploring.replay(bad.seed)
            assert again.events == bad.events
            assert again.faults[-1] == bad.faults[-1] == "keys in etcd: <group>/rank/0, <group>/size"
        text = report.bad[0].describe()
        assert "  1. client 0: Range(<group>/size)\n  2. client 0: LeaseGrant()\n" in text
        assert f"seed {report.bad[0].seed}" in text

    def test_a_claim_without_token_fails_after_a_lost_answer(self, explorer: Callable[..., Explorer]) -> None:
        function = "helpers.race_functions:create_without_token"
        assert not explorer(function).explore().bad
        report = explorer(function, losses=True).explore(until=lambda run: True)
        assert report.bad[0].faults[0].startswith("nobody has rank ")
        assert ", its answer lost" in report.bad[0].describe()
        assert report.stopped.startswith("at the first bad order")
        assert ": at least " in str(report)

    def test_a_lock_fails_only_after_a_lost_answer(self, explorer: Callable[..., Explorer]) -> None:
        function = "helpers.race_functions:locked_read_modify_write"
        sound = explorer(function).explore()
        assert (sound.bad, sound.stopped) == ((), "")
        assert sound.run >= 2
        report = explorer(function, losses=True).explore(until=finds_twice)
        assert report.bad[-1].twice
        assert report.bad[-1].faults[0].startswith("rank 0 was given 2 times")

    @pytest.mark.parametrize(
        ("fault", "least"),
        [("none", 6), ("losses", 100), pytest.param("crashes", 250, marks=pytest.mark.whole)],
    )
    def test_membership_survives_every_order_of_two_clients(
        self, path: EtcdProxy, direct: EtcdClient, fault: str, least: int
    ) -> None:
        options = {fault: True} if fault != "none" else {}
        exploring = Explorer(path, direct, MembershipSubject(), 2, group="/r/", **options)
        report = exploring.explore(seconds=600)
        print(report)
        assert report.bad == ()
        assert report.stopped == ""
        assert report.orders >= least

    def test_membership_survives_a_crash_in_orders_chosen_by_chance(self, path: EtcdProxy, direct: EtcdClient) -> None:
        exploring = Explorer(path, direct, MembershipSubject(), 2, group="/r/", crashes=True)
        report = exploring.explore(runs=12, seconds=600, by_chance=True)
        assert (report.run, report.bad) == (12, ())

    @pytest.mark.soak
    @pytest.mark.parametrize(
        "fault", ["none", *(pytest.param(kind, marks=pytest.mark.whole) for kind in ("losses", "crashes"))]
    )
    def test_membership_survives_the_orders_of_three_clients(
        self, path: EtcdProxy, direct: EtcdClient, fault: str
    ) -> None:
        options = {fault: True} if fault != "none" else {}
        exploring = Explorer(path, direct, MembershipSubject(), 3, group="/r/", **options)
        # CI runs only some of the orders with a fault; the soak test runs all.
        report = exploring.explore(runs=20 * len(repeats()), seconds=600)
        print(report)
        assert report.bad == ()
        if fault == "none" or not report.stopped:
            assert (report.orders, report.run, report.stopped) == (*ORDERS_OF_THREE[fault], "")
        else:
            assert report.run >= 12

    @pytest.mark.soak
    @pytest.mark.parametrize("fault", ["none", "losses"])
    def test_a_rank_requested_twice_is_refused_in_every_order(
        self, path: EtcdProxy, direct: EtcdClient, fault: str
    ) -> None:
        options = {fault: True} if fault != "none" else {}
        subject = MembershipSubject("helpers.race_functions:wants_rank_0")
        # CI runs only some of the orders with a lost answer; the soak test runs all.
        exploring = Explorer(path, direct, subject, 2, group="/r/", **options)
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

    def test_a_subject_that_does_not_repeat_itself_is_reported(self, explorer: Callable[..., Explorer]) -> None:
        with pytest.raises(DivergenceError, match="after the same 0 events a client"):
            explorer("helpers.race_functions:changes_its_mind").explore()

    def test_seeds_are_checked_and_replayed(self, explorer: Callable[..., Explorer]) -> None:
        exploring = explorer(f"{FUNCTIONS}:read_modify_write")
        good = exploring.replay(f"2:0.0.0.0.1.1.1.1@{_check(exploring)}")
        assert good.faults == ()
        for text in ("", "nonsense", "3:0.1@00000000"):
            with pytest.raises(ValueError, match="is not a seed for 2 clients"):
                exploring.replay(text)
        with pytest.raises(DivergenceError, match="leads to other requests"):
            exploring.replay("2:0.0.0.0.1.1.1.1@00000000")
        with pytest.raises(DivergenceError, match=r"step 1 of seed .* is 2, .*client 0: Range"):
            exploring.replay("2:2@00000000")
        with pytest.raises(DivergenceError, match="has ended, but client 0: Put"):
            exploring.replay("2:0.0@00000000")

    def test_a_request_cancelled_after_its_choice_is_tolerated(
        self, path: EtcdProxy, direct: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a chosen request is cancelled before it is forwarded, the explorer looks again."""
        cut_off: list[RequestEvent] = []

        def cutting(choose: Callable[..., RequestEvent | None], times: int) -> Callable[..., RequestEvent | None]:
            def choose_late(*arguments: Any) -> RequestEvent | None:
                event = choose(*arguments)
                if event is not None and len(cut_off) < times:
                    # The client reconnects, so the chosen request is no longer held.
                    path.clients[event.client].cut()
                    path.clients[event.client].restore()
                    cut_off.append(event)
                return event

            return choose_late

        subject = FunctionSubject("helpers.race_functions:tries_again")
        monkeypatch.setattr(RandomScheduler, "choose", cutting(RandomScheduler.choose, 4))
        report = Explorer(path, direct, subject, 2, group="/r/", losses=True).explore(runs=3, by_chance=True)
        assert len(cut_off) == 4
        assert (report.run, report.bad) == (3, ())
        # A systematic exploration cannot handle such a client, and reports it.
        monkeypatch.setattr(DepthFirst, "choose", cutting(DepthFirst.choose, 5))
        with pytest.raises(DivergenceError, match=r"by its own clock: client \d: Txn") as raised:
            Explorer(path, direct, subject, 2, group="/r/").explore()
        assert "timeout" in raised.value.remedy

    def test_a_lock_request_that_reaches_etcd_late(
        self, path: EtcdProxy, direct: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lock request may reach etcd late. Until then its queue is empty, which is not an error."""
        send = ProxyClient.send_on

        def send_late(
            self: ProxyClient, request: Request, link: ProxiedConnection, forward: Callable[[], None]
        ) -> None:
            if request.method == "Lock":
                self.path.later(0.15, lambda: send(self, request, link, forward))
            else:
                send(self, request, link, forward)

        monkeypatch.setattr(ProxyClient, "send_on", send_late)
        subject = FunctionSubject("helpers.race_functions:locked_read_modify_write")
        report = Explorer(path, direct, subject, 1, group="/r/", losses=True).explore()
        assert any(event.label.startswith("Lock(") and event.fault for run in report.bad for event in run.events)

    def test_a_client_that_ends_silently_is_reported(self, explorer: Callable[..., Explorer]) -> None:
        report = explorer("helpers.race_functions:ends").explore()
        assert report.run == 1
        assert any("its process ended" in fault for fault in report.bad[0].faults)


def _check(exploring: Explorer) -> str:
    """Return the checksum of the order in which client 0 ends before client 1 begins."""
    with pytest.raises(DivergenceError) as caught:
        exploring.replay("2:0.0.0.0.1.1.1.1@00000000")
    return caught.value.reason.rsplit("@", 1)[1]


class TestCounting:
    """Compare the computed number of equivalent orders with a full enumeration."""

    @pytest.mark.parametrize("seed", range(12))
    def test_equivalent_orders_are_counted_correctly(self, seed: int) -> None:
        chance = random.Random(seed)
        keys = [b"a", b"b", b"c"]
        events = []
        for number in range(6):
            key = chance.choice(keys)
            access = Access(key, key + b"\0", write=chance.random() < 0.5)
            events.append(RequestEvent(chance.randrange(3), "", f"event {number}", 1, 0, (access,)))
        assert linear_extensions(events, {}) == _equivalent(events)


def _equivalent(events: Sequence[RequestEvent]) -> int:
    def keeps(order: Sequence[RequestEvent]) -> bool:
        place = {event: number for number, event in enumerate(order)}
        return all(
            place[first] < place[second]
            for first, second in itertools.combinations(events, 2)
            if first.dependent(second, {})
        )

    return sum(keeps(order) for order in itertools.permutations(events))


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

    def test_bad_patterns_and_programs_are_refused(self, path: EtcdProxy) -> None:
        with pytest.raises(ValueError, match=r"\(\?P<rank>…\)"):
            CommandSubject(["x"], "rank")
        with pytest.raises(ValueError, match="is not a regular expression"):
            CommandSubject(["x"], "(")
        with pytest.raises(NixlPluginError, match="nowhere/nixlbench cannot be started: No such file"):
            NixlbenchSubject("/nowhere/nixlbench").start(path.client(), "g/", 2)


def test_a_request_that_is_let_through_must_be_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with EtcdProxy(f"http://127.0.0.1:{silent.getsockname()[1]}") as path:
            proxy_client = path.client()
            proxy_client.hold()
            host, _, port = proxy_client.endpoint.removeprefix("http://").rpartition(":")
            with socket.create_connection((host, int(port))) as claimant:
                claimant.sendall(b"POST /v3/kv/put HTTP/1.1\r\nHost: etcd\r\nContent-Length: 2\r\n\r\n{}")
                path.wait(lambda: proxy_client.held, "a request", seconds=60)
                race_scene = Race(cast(Any, None), cast(Any, None), path, "/")
                with pytest.raises(ProxyLateError, match=r"^waited 0.1 s for the answer to "):
                    race_scene.let_through(proxy_client, 1, seconds=0.1)


def late(number: int, runs: int) -> tuple[float, float]:
    """Return by how many seconds (0 to 30) the first and the second process start late."""
    delay = 30.0 * number / (runs - 1)
    return ((delay, delay), (delay, 0.0), (0.0, delay))[number % 3]


class TestRecorded:
    """Recorded output of the real nixlbench 1.4.0."""

    @staticmethod
    def claim(name: str, text: str) -> ClaimOutcome:
        registrations = read_output(text).registrations
        return read_outcome(name, text, rank=registrations[0].rank if registrations else None)

    @classmethod
    def read(cls, case: str, *ranks: str) -> list[ClaimOutcome]:
        texts = []
        for rank in ranks:
            files = [FIXTURES / f"{case}{rank}.{kind}" for kind in ("out", "err")]
            texts.append("".join(file.read_text() for file in files if file.exists()))
        return [cls.claim(f"process {number}", text) for number, text in enumerate(texts)]

    def test_a_duplicate_rank_is_reported(self) -> None:
        outcomes = self.read("07_racy_same_rank", ".rank_a", ".rank_b")
        descriptions = faults(outcomes, 2)
        assert descriptions == [
            "rank 0 was given 2 times: to process 0 (vm) and process 1 (vm)",
            "nobody has rank 1 of 2",
            "process 0 said: Error in barrier wait xferbench/g07/barrier/start_barrier/0/ rank 0 completed 1/2 ranks)",
            "keys in etcd: xferbench/g07/barrier/start_barrier/0/",
        ]

    def test_a_missing_rank_is_reported(self) -> None:
        [outcome] = outcomes = self.read("09_alone", "")
        assert (outcome.rank, outcome.host) == (0, "vm")
        assert faults(outcomes, 2) == [
            "nobody has rank 1 of 2",
            "process 0 said: Error in barrier wait xferbench/g09/barrier/start_barrier/0/ rank 0 completed 1/2 ranks)",
            "keys in etcd: xferbench/g09/barrier/start_barrier/0/",
        ]
        assert "same etcd and the same --benchmark_group" in remedy_for(outcomes)

    def test_a_refused_third_rank_is_reported(self) -> None:
        # The line is a message of nixlbench. There is no complete recording of such a run.
        good = self.read("01_normal", ".rank_a", ".rank_b")
        third = self.claim("process 2", "Rank 2 is greater than or equal to global size 2\n")
        outcomes = [*good, third]
        assert faults(good, 2) == []
        assert faults(outcomes, 2, ["xferbench/g/size"]) == [
            "process 2 (unknown host): Rank 2 is greater than or equal to global size 2",
            "keys in etcd: xferbench/g/size",
        ]
        assert "etcdctl del --prefix xferbench" in remedy_for(outcomes)

    def test_a_rank_outside_the_group_is_reported_with_its_owner(self) -> None:
        outcomes = [read_outcome(f"process {number}", "", rank=rank) for number, rank in enumerate((0, 1, 2, -1))]
        assert faults(outcomes, 2) == [
            "rank -1 is outside a group of 2: process 3 (unknown host): rank -1",
            "rank 2 is outside a group of 2: process 2 (unknown host): rank 2",
        ]


def test_the_time_after_a_kill_ends_with_the_last_rank_and_not_when_the_check_looks() -> None:
    claimants = [SimpleNamespace(heard=103.0), SimpleNamespace(heard=102.0)]
    assert Kill("group", 1, cast("list[Claimant]", claimants), at=100.0).seconds == 3.0


@pytest.mark.long
class TestClaimants:
    def test_a_claimant_reports_its_error_and_when(self) -> None:
        before = time.monotonic()
        claimant = Claimant("time:sleep", {})  # it takes no argument of that name
        assert claimant.wait(60) is not None
        after = time.monotonic()
        assert claimant.message is not None
        assert claimant.message["kind"] == "TypeError"
        assert claimant.wait_until_ended(60)
        assert before < claimant.heard < after

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

    def test_no_thread_remains(self) -> None:
        before = set(threading.enumerate())
        claimant = Claimant("helpers.race_functions:ends", {"endpoint": "", "group": "", "size": 1})
        assert claimant.wait_until_ended(60)
        claimant.close()
        assert set(threading.enumerate()) <= before


def test_random_orders_place_the_fault_at_each_depth_in_turn() -> None:
    chance = RandomScheduler()

    def run() -> list[str]:
        moves: list[str] = []
        for depth in range(4):
            enabled = [RequestEvent(0, "", "a", depth), RequestEvent(1, "", "b", depth)]
            if not any("l" in move for move in moves):
                enabled += [RequestEvent(0, "l", "a", depth), RequestEvent(1, "l", "b", depth)]
            moves.append(chance.choose(depth, enabled, {}).move)
        chance.advance()
        return moves

    faults = [next(depth for depth, move in enumerate(run()) if "l" in move) for _ in range(8)]
    assert faults == [0, 1, 2, 3, 0, 1, 2, 3]
