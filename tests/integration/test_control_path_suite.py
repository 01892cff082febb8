# SPDX-License-Identifier: Apache-2.0
"""The suite control_path with the real NIXL: healthy, and each judgement with the fault that it is for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli_run import Finished, run

from pytest_nixl.checks.control_path.check import find_all
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.figure import FIGURE_KINDS
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.long

SUITE = "suites/control_path"
GROWTH, PUBLISHED = f"{SUITE}/test_control_path.py", f"{SUITE}/test_published.py"
#: The figures of this suite.
SUMMARY = {name for name, kind in FIGURE_KINDS.items() if "the suite control_path" in kind.remedy}

#: In a worker: each registration takes 0.4 ms more than the one before it in its round, and a single one 60 ms.
#: A double of a NIXL with a quadratic cost, and of a slow one. In pytest: lets the workers run it.
SLOWER = """
import time
from pytest_nixl.checks.control_path import check as control_path, worker
from pytest_nixl.checks.control_path.check import ControlPath

class Slower:
    def __init__(self, agent):
        self.agent, self.calls = agent, 0

    def register_memory(self, *arguments):
        registered = self.agent.register_memory(*arguments)
        self.calls += 1
        time.sleep(4e-4 * self.calls)
        return registered

    def deregister_memory(self, registered):
        self.calls = 0
        self.agent.deregister_memory(registered)

def accumulate(agent, **arguments):
    return worker.accumulate(Slower(agent), **arguments)

class Late(Slower):
    def register_memory(self, *arguments):
        time.sleep(60e-3)
        return self.agent.register_memory(*arguments)

def register(agent, **arguments):
    return worker.register(Late(agent), **arguments)

request = ControlPath._request

def planted(self, function, agent, **arguments):
    if function not in ("accumulate", "register"):
        return request(self, function, agent, **arguments)
    return agent.worker.request(
        "run", seconds=60, agent=agent.ref, function=f"fault:{function}", arguments=arguments
    )

ControlPath._request = planted
"""


def shown(done: Finished) -> set[str]:
    """Return the names of the figures in the table of the terminal."""
    return {line.split()[0] for line in done.output.splitlines() if line.split()[:1] and line.split()[0] in SUMMARY}


#: In pytest: agents publish and find each other in one round instead of three, each of which has up to 16 new agents.
ONE_ROUND = """
def pytest_collection_finish():
    from suites.control_path import test_published
    test_published.ROUNDS = 1
"""


def test_every_figure_of_the_suite_is_measured_recorded_and_reported(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    options = ("--nixl-level=extended", "--nixl-etcd-server=embedded", f"--benchmark-json={record}")
    done = run("-v", SUITE, *options, "-W", "error", fault=ONE_ROUND)
    done.expect(0, "NIXL verdict: PASS (9 PASS; ")
    assert shown(done) == SUMMARY
    recorded = json.loads(record.read_text())["benchmarks"]
    timed = {benchmark["extra_info"]["figure"]["name"] for benchmark in recorded}
    further = {benchmark["name"] for each in recorded for benchmark in each["extra_info"].get("figures", ())}
    assert timed | further == SUMMARY
    assert further == {"metadata-size", "notification-rate"}
    assert {"registration/UCX/256/4KiB", "publish-to-found/UCX/2", "publish-to-found/UCX/16"} <= {
        benchmark["fullname"] for benchmark in recorded
    }
    assert all(benchmark["stats"]["min"] > 0 for benchmark in recorded)


def test_a_bound_of_the_control_path_fails_its_check_alone(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[profile]\nname = "test"\n[[bound]]\nfigure = "metadata-size"\ncount = [256]\nat_most = "100"\n'
        'source = "a test"\n[[bound]]\nfigure = "metadata-size"\ncount = [16]\nat_most = "1 MB"\nsource = "a test"\n'
    )
    run(GROWTH, f"--nixl-profile={profile}", "-k", "metadata or created").expect(
        1,
        "FAIL metadata-size: metadata-size (UCX count 256): ... KB, above its bound of 100 B (",
        "NIXL verdict: FAIL (1 PASS, 1 FAIL; ",
    )


def test_without_pytest_benchmark_the_figures_are_reported_and_judged() -> None:
    done = run(GROWTH, "-k", "created", plugins=["no:benchmark"], quiet=False)
    assert shown(done.expect(0, "NIXL verdict: PASS (1 PASS; ")) == {"agent-creation"}


# Beside other tests the first calls may take as long as the last ones, and the verdict is PASS.
@pytest.mark.alone
def test_registration_that_becomes_slower_with_each_call_is_found(tmp_path: Path) -> None:
    """So is a delay above a bound: a healthy registration takes microseconds."""
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[profile]\nname = "test"\n[[bound]]\nfigure = "registration"\ncount = [1]\nsize = ["1MiB"]\n'
        'at_most = "30 ms"\nsource = "a test"\n'
    )
    done = run(GROWTH, "-k", "slower or deregistered", f"--nixl-profile={profile}", fault=SLOWER)
    done.expect(
        1,
        "NIXL verdict: FAIL (2 FAIL; ",
        "FAIL registration-growth: registration becomes slower with each repeat: ... the last takes at least "
        "... times as long as the first, and the limit is 3 times",
        "remedy: Run the check again with another release of NIXL",
        "FAIL registration: registration (UCX count 1 1MiB): ... ms, above its bound of 30 ms (",
    )


#: In pytest: 40,000 regions, and a line in a file for each wait of the check: how it ended, and for what it waited.
MANY_COUNTED = """
import os
import pytest_nixl
from pytest_nixl.checks.control_path import check as control_path

control_path.regions_of = lambda plan: 40_000
wait = pytest_nixl.wait_until

def counted(condition, what, **options):
    try:
        found = wait(condition, what, **options)
    except BaseException as error:
        ended = type(error).__name__
        raise
    else:
        ended = f"met by {found}"
        return found
    finally:
        with open(os.environ["WAITS"], "a") as file:
            print(f"{ended}: {what}", file=file)

pytest_nixl.wait_until = counted
"""


def test_metadata_of_40000_regions_is_refused_by_etcd_and_reported(tmp_path: Path) -> None:
    # A double only for the number: NIXL, its metadata and etcd are real.
    waits = tmp_path / "waits.txt"
    options = ("-k", "fits", "--nixl-etcd-server=embedded")
    run(PUBLISHED, *options, fault=MANY_COUNTED, env={"WAITS": str(waits)}).expect(
        1,
        "FAIL NIXL-ETCD-OVERSIZE: metadata that exceeds etcd's request limit is not published; NIXL reports nothing, "
        "and peers may load a stale entry: metadata of 40000 regions (1.76 MB) exceeds etcd's request limit of "
        "1.5 MiB: etcd still has the ... B of an earlier publication; on stderr NIXL wrote: ...request is too large",
        "remedy: start etcd with --max-request-bytes=16777216",
        "about: pytest-nixl explain NIXL-ETCD-OVERSIZE",
    )
    # No wait ended at its deadline: the second was met by NIXL's line about the refusal.
    published, refused = waits.read_text().splitlines()
    assert re.fullmatch(r"met by True: .* to publish its metadata under .*", published)
    assert re.fullmatch(
        r"met by .*request is too large.*: etcd to have the metadata of 40000 regions under .*, or to refuse it",
        refused,
    )


def test_nixl_finds_at_the_second_fetch_what_was_published_after_it_gave_up_the_first(
    nixl_private_etcd: PrivateEtcd, make_settings: Callable[..., Settings]
) -> None:
    env = {"NIXL_ETCD_ENDPOINTS": nixl_private_etcd.endpoint, "NIXL_ETCD_NAMESPACE": "/late"}
    with Agents(LocalHost(supervisor()), make_settings(timeout=60.0)) as agents:
        names = ("finder", "late")
        finder, late = agents.start_each(names, environment=env, listen_thread=True, progress_thread=None)
        timer = threading.Timer(7.5, late.send_local_metadata)
        timer.start()
        assert find_all(finder, [late], 60) == []
        timer.join()
        assert "Failed to fetch metadata from etcd for agent: late" in finder.worker.output()
