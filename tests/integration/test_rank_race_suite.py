# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite rank_race detects its fault."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import nixlbench
from helpers.cli_run import NOT_BUSY, Finished, run

pytestmark = pytest.mark.long

MEMBERSHIP, NIXLBENCH = "suites/rank_race/test_membership.py", "suites/rank_race/test_nixlbench.py"

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
#: A plugin that makes a machine slow once: the answer with a lease of 1 s comes when that lease has ended.
SLOW = """
import time

def pytest_configure():
    from pytest_nixl.etcd.proxy import ProxyClient
    release = ProxyClient.release
    def late(self, request):
        time.sleep(1.1 if request.method == "LeaseGrant" and self.name.startswith("first-after-2") else 0)
        release(self, request)
    ProxyClient.release = late

def pytest_collection_finish():
    from suites.rank_race import test_membership
    test_membership.SECONDS = 30.0  # only what never happens is awaited for so long
"""


def membership(tests: str, fault: str) -> Finished:
    return run(MEMBERSHIP, "-k", tests, fault=fault + NOT_BUSY)


def test_each_check_detects_the_known_race_or_that_it_is_not_seen() -> None:
    done = membership("test_simultaneous_claims or test_keys_of_a_dead_group or known_race", SEEDS_OWN + SOUND)
    done.expect(
        1,
        "FAIL ranks-unique: rank 0 was given 2 times: to claimant 0 (",
        "FAIL ranks-stale-keys: ...nobody has rank ",  # of the dead group, too, if both claimed at once
        "ERROR rank-race-is-seen: the known race was not detected",
        "remedy: report this output: ",
        never=["Traceback", " PASS"],
    )


def test_a_claimant_that_loses_its_lease_before_it_is_killed_gets_a_longer_one() -> None:
    membership("test_a_killed_claimant", SLOW).expect(0, never=["INCONCLUSIVE"])


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in for nixlbench, as a program."""
    return str(nixlbench.standin(tmp_path_factory.mktemp("standin")))


def test_a_racing_nixlbench_is_reported_with_one_cause(standin: str) -> None:
    """No answer was lost, so that is not reported as a cause."""
    done = run(NIXLBENCH, "--nixl-level=extended", f"--nixl-nixlbench={standin}", env={"STANDIN_RACY": "1"})
    done.expect(
        1,
        "FAIL nixlbench-ranks-unique: rank 0 was given 2 times: to claimant 0 (",
        "keys in etcd: xferbench/race-1-",
        "claimant 0 and claimant 1 read 'xferbench/<group>//size' before any of them wrote it",
        "the order of requests:",
        "  1. claimant ",
        "claimant 1: Put(xferbench/<group>//size)",
        "remedy: Two processes got the same rank",
        "NOT-APPLICABLE nixlbench-lost-answer: this nixlbench gives a rank twice",
        never=["NIXLBENCH-RANK-TWICE"],
    )


def test_a_nixlbench_that_takes_its_rank_from_a_list_is_reported_with_its_cause(standin: str) -> None:
    """Both processes are listed whenever their first writes overlap. One that lists too early needs another order."""
    run(NIXLBENCH, f"--nixl-nixlbench={standin}", env={"STANDIN_LISTS": "1"}).expect(
        1,
        "FAIL nixlbench-ranks-unique: rank 0 was given 2 times: to claimant 0 (",
        "listed the keys under 'xferbench/<group>//announced/' before claimant "
        "... wrote one there, and took its rank by them, without etcd's lock",
    )


#: A plugin: after the loss of its third answer the first process waits without end, and is not waited for as long. It
#: also tries fewer orders: tests/unit/checks/test_rank_orders.py tries all.
ENDS_SOONER = """
from functools import partial

def pytest_collection_finish():
    from suites.rank_race import test_nixlbench
    test_nixlbench.RUNS = 1
    test_nixlbench.try_orders = partial(test_nixlbench.try_orders, budget=3.0)
    lose, seconds = test_nixlbench._lose, test_nixlbench.STEP
    def lose_sooner(nixlbench, race, claimant, answer):
        test_nixlbench.STEP = 2.0 if (claimant, answer) == (0, 3) else seconds
        return lose(nixlbench, race, claimant, answer)
    test_nixlbench._lose = lose_sooner
"""


def test_a_locking_nixlbench_passes_with_a_known_limit(standin: str) -> None:
    search = os.pathsep.join([str(Path(standin).parent), os.environ["PATH"]])
    assert shutil.which("nixlbench", path=search)
    done = run(NIXLBENCH, "--nixl-level=extended", fault=ENDS_SOONER, env={"PATH": search})
    done.expect(0, "1 known limit of NIXL", "NIXL verdict: PASS (2 PASS")
