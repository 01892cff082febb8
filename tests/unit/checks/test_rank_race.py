# SPDX-License-Identifier: Apache-2.0
"""Known races are found every time and can be replayed; correct registrations stay correct."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.cli_run import repeats
from helpers.etcd import Etcd, running, wait_until
from helpers.race_explorer import ExploredRun, Explorer

from pytest_nixl.checks.rank_race.orders import try_orders
from pytest_nixl.checks.rank_race.race import Amplified, amplify
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    CommandSubject,
    FunctionSubject,
    MembershipSubject,
    NixlbenchSubject,
    Subject,
)
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.proxy import EtcdProxy

#: For three clients of the membership: the number of orders, and the number of orders that are not equivalent.
ORDERS_OF_THREE = {"none": (90, 6), "losses": (3150, 120), "crashes": (11484, 216)}
FUNCTIONS, HELPERS = "pytest_nixl.checks.rank_race.functions", "helpers.race_functions"
FIXTURES = Path(__file__).parents[3] / "fixtures" / "nixlbench"
STANDIN = Path(__file__).parents[2] / "helpers" / "nixlbench_standin.py"


@pytest.fixture
def path(etcd: Etcd) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.url) as opened:
        yield opened


@pytest.fixture
def direct(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=60) as client:
        yield client
        assert client.get_prefix("") == {}, "every run cleans up after itself"


def test_each_order_of_the_membership_is_tried(path: EtcdProxy, direct: EtcdClient) -> None:
    """The second claimant claims after each step of the first one."""
    done = try_orders(path, direct, MembershipSubject(), group="/o/")
    assert (done.faults, done.twice, done.complete) == ((), False, True)
    assert 1 <= done.count <= 7


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


@pytest.mark.long
def test_a_claimant_ends_with_a_killed_parent() -> None:
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
