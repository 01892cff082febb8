# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite rank_race detects its fault."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.cli_run import NOT_BUSY, ROOT, Finished, run

pytestmark = pytest.mark.long

SUITE = "suites/rank_race"

#: A plugin that replaces the membership by the known race, with shorter timeouts, which none of its claims reaches.
SEEDS_OWN = """
from pytest_nixl.checks.rank_race import race, system_under_test
from pytest_nixl.checks.rank_race.claimants import Claimant

def start(function, arguments, changed=None):
    name = "helpers.race_functions:seeds_own" if ":membership" in function else function
    return Claimant(name, arguments, changed)

race.Claimant = system_under_test.Claimant = start

def pytest_collection_finish():
    from suites.rank_race import test_membership
    test_membership.SECONDS = 30.0
"""

#: A plugin that replaces the known race by a correct function.
SOUND = """
from pytest_nixl.checks.rank_race import race

race.KNOWN_BAD = "helpers.race_functions:create_without_token"
"""

CHECKS = {
    "test_simultaneous_claims": ("FAIL ranks-unique: rank 0 was given 2 times: to claimant 0 (",),
    "test_keys_of_a_dead_group": ("FAIL ranks-stale-keys: ", "nobody has rank "),
}

#: A plugin with leases that do not end. Only what never happens is awaited for a short time.
ENDLESS = """
def pytest_collection_finish():
    from pytest_nixl import wait_until
    from pytest_nixl.checks.rank_race.race import Race
    from suites.rank_race import test_membership
    test_membership.SECONDS, test_membership.LEASES, test_membership.LONG = 8.0, (600,), 15
    test_membership._wait_for_members = lambda etcd, prefix, count: wait_until(
        lambda: etcd.count_prefix(f"{prefix}members/") == count, f"{count} registrations", seconds=120)
    let_through = Race.let_through
    Race.let_through = lambda self, way, count, seconds: let_through(self, way, count, seconds=120)
"""
#: A plugin that makes a slow machine: the answer with a lease of 1 s comes when that lease has ended.
SLOW = """
import time

def pytest_configure():
    from pytest_nixl.etcd.proxy import ProxyClient
    release = ProxyClient.release
    def late(self, request):
        time.sleep(1.1 if request.method == "LeaseGrant" else 0)
        release(self, request)
    ProxyClient.release = late

def pytest_collection_finish():
    from suites.rank_race import test_membership
    test_membership.SECONDS = 30.0  # only what never happens is awaited for so long
"""
#: The same, with no longer leases.
TOO_SLOW = SLOW + "    test_membership.LEASES = (1,)\n"


def suite(tmp_path: Path, plugin: str, *tests: str) -> Finished:
    (tmp_path / "broken.py").write_text(plugin + NOT_BUSY)
    search = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT)])
    return run("-p", "broken", f"{SUITE}/test_membership.py", "-k", " or ".join(tests), env={"PYTHONPATH": search})


def test_each_check_detects_the_known_race(tmp_path: Path) -> None:
    done = suite(tmp_path, SEEDS_OWN, *CHECKS)
    for arguments in itertools.chain.from_iterable(CHECKS.values()):
        assert arguments in done.output
    assert "remedy: report this output: " in done.output
    assert "Traceback" not in done.output
    assert " PASS" not in done.output.rsplit("NIXL verdict", 1)[1]
    assert done.code == 1


def test_a_rank_that_stays_blocked_after_a_kill_is_detected(tmp_path: Path) -> None:
    done = suite(tmp_path, ENDLESS, "test_a_killed_claimant")
    assert "FAIL ranks-after-a-kill: " in done.output
    assert "has no rank in time" in done.output
    assert done.code == 1


def test_a_claimant_that_loses_its_lease_before_it_is_killed_gets_a_longer_one(tmp_path: Path) -> None:
    done = suite(tmp_path, SLOW, "test_a_killed_claimant")
    assert "INCONCLUSIVE" not in done.output
    assert done.code == 0, done.output


def test_a_claimant_that_loses_every_lease_before_it_is_killed_is_inconclusive(tmp_path: Path) -> None:
    done = suite(tmp_path, TOO_SLOW, "test_a_killed_claimant")
    text = "first-after-2: the claimant lost its lease of 1 s before it could be killed"
    assert f"INCONCLUSIVE ranks-after-a-kill: {text}" in done.output


def test_an_undetected_known_race_is_an_error(tmp_path: Path) -> None:
    done = suite(tmp_path, SOUND, "known_race")
    assert "ERROR rank-race-is-seen: the known race was not detected" in done.output
    assert done.code == 1


@pytest.fixture
def standin(tmp_path: Path) -> str:
    """The stand-in for nixlbench, as a program."""
    program = tmp_path / "nixlbench"
    text = (ROOT / "tests" / "helpers" / "nixlbench_standin.py").read_text()
    program.write_text(text.replace("#!/usr/bin/env python3", f"#!{sys.executable}", 1))
    program.chmod(0o755)
    return str(program)


def test_a_racing_nixlbench_is_reported_with_one_cause(standin: str) -> None:
    done = run(
        f"{SUITE}/test_nixlbench.py", "--nixl-level=extended", f"--nixl-nixlbench={standin}", env={"STANDIN_RACY": "1"}
    )
    assert "FAIL nixlbench-ranks-unique: rank 0 was given 2 times: to claimant 0 (" in done.output
    assert "keys in etcd: xferbench/race-1-" in done.output
    assert "claimant 0 and claimant 1 read 'xferbench/<group>//size' before any of them wrote it" in done.output
    assert "the order of requests:\n  1. claimant " in done.output
    assert "claimant 1: Put(xferbench/<group>//size)" in done.output
    assert "remedy: Two processes got the same rank" in done.output
    # No answer was lost, so that is not reported as a cause.
    assert "NIXLBENCH-RANK-TWICE" not in done.output
    assert "NOT-APPLICABLE nixlbench-lost-answer: this nixlbench gives a rank twice" in done.output
    assert done.code == 1


def test_a_nixlbench_that_takes_its_rank_from_a_list_is_reported_with_its_cause(standin: str) -> None:
    """Both processes are listed whenever their first writes overlap. One that lists too early needs another order."""
    done = run(f"{SUITE}/test_nixlbench.py", f"--nixl-nixlbench={standin}", env={"STANDIN_LISTS": "1"})
    assert "FAIL nixlbench-ranks-unique: rank 0 was given 2 times: to claimant 0 (" in done.output
    assert "listed the keys under 'xferbench/<group>//announced/' before claimant " in done.output
    assert "wrote one there, and took its rank by them, without etcd's lock" in done.output
    assert done.code == 1


def test_a_nixlbench_that_does_not_register_is_inconclusive() -> None:
    done = run(f"{SUITE}/test_nixlbench.py", "--nixl-level=extended", "--nixl-nixlbench=/bin/true")
    assert "INCONCLUSIVE nixlbench-ranks-unique: the registrations of two processes did not overlap" in done.output
    assert "claimant 0 ended before the claims could overlap" in done.output
    assert "(2 INCONCLUSIVE; 0 rows measured)" in done.output


def test_a_locking_nixlbench_passes_with_a_known_limit(standin: str) -> None:
    search = os.pathsep.join([str(Path(standin).parent), os.environ["PATH"]])
    assert shutil.which("nixlbench", path=search)
    done = run(f"{SUITE}/test_nixlbench.py", "--nixl-level=extended", env={"PATH": search})
    assert "1 known limit of NIXL" in done.output
    assert "NIXL verdict: PASS (2 PASS" in done.output
    assert done.code == 0


def test_a_search_that_had_no_time_for_each_answer_is_inconclusive(standin: str, tmp_path: Path) -> None:
    (tmp_path / "hurried.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_call(item):\n"
        "    item.module.SECONDS = 0.0\n"
    )
    done = run(
        f"{SUITE}/test_nixlbench.py", "--nixl-level=extended", f"--nixl-nixlbench={standin}", "-k", "lost_answer",
        plugins=("hurried",), env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    text = "INCONCLUSIVE nixlbench-lost-answer: no rank was given twice, but there was time to lose 1 answers of each"
    assert text in done.output


def test_without_nixlbench_its_checks_are_not_applicable() -> None:
    done = run(f"{SUITE}/test_nixlbench.py", "--nixl-level=extended", env={"PATH": "/nowhere"})
    both = "nixlbench-ranks-unique, nixlbench-lost-answer"
    assert f"NOT-APPLICABLE {both}: nixlbench is not on PATH" in done.output
    assert "NIXL verdict: NOTHING CHECKED" in done.output
    assert done.code == 1
