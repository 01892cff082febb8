# SPDX-License-Identifier: Apache-2.0
"""Load is not a fault of the subject: what is only late on a busy host fails nobody's run, and what is wrong does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers.cli_run import NOT_BUSY, ROOT, Finished, repeats, run
from helpers.contention import spinning

from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome
from pytest_nixl.core.host_load import HostLoad
from suites.rank_race.race import is_late

#: Four checks that end in the four ways that concern load.
CHECKS = """
import pytest
from pytest_nixl.core.polling import wait_until

def late():
    wait_until(lambda: False, "what never comes", seconds=2)

@pytest.fixture
def slow():
    late()

@pytest.mark.nixl_check("late")
def test_late():
    late()

@pytest.mark.nixl_check("late-in-setup")
def test_late_in_setup(slow):
    pass

@pytest.mark.nixl_check("late-own", own=True)
def test_late_own():
    late()

@pytest.mark.nixl_check("wrong")
def test_wrong():
    late_is_not_all_that_is_wrong = True
    try:
        late()
    except Exception:
        assert not late_is_not_all_that_is_wrong
"""


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep processors busy by processes that are none of an inner run's."""
    with ExitStack() as stack:
        for _ in range(loops):
            stack.enter_context(spinning())
        yield


def verdicts(done: Finished) -> dict[str, str]:
    """What each check came to that did not pass, as the report at the end has it."""
    told = re.findall(r"^(FAIL|ERROR|INCONCLUSIVE|WARN) ([a-z, -]+): ", done.output, re.MULTILINE)
    return {check: verdict for verdict, checks in told for check in checks.split(", ")}


@pytest.fixture
def checks(tmp_path: Path) -> Callable[..., Finished]:
    """Run the four checks."""
    (tmp_path / "test_checks.py").write_text(CHECKS)
    (tmp_path / "idle.py").write_text(NOT_BUSY)
    return lambda *options: run("test_checks.py", *options, directory=tmp_path, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("gate", [(), ("--nixl-gate",)], ids=["without-the-gate", "with-the-gate"])
def test_a_missed_deadline_on_a_busy_host_is_inconclusive(
    checks: Callable[..., Finished], gate: tuple[str, ...]
) -> None:
    with busy(2 * len(os.sched_getaffinity(0))):
        done = checks("-k", "not wrong", *gate)
    assert verdicts(done) == {"late": "INCONCLUSIVE", "late-in-setup": "INCONCLUSIVE", "late-own": "WARN"}, done.output
    assert "waited 2 s for what never comes; other processes used " in done.output
    assert "processors meanwhile" in done.output
    assert "remedy: stop other processes on this host" in done.output
    assert done.code == (1 if gate else 0), done.output


def test_what_is_late_on_an_idle_host_is_an_error_and_what_is_wrong_always_fails(
    checks: Callable[..., Finished],
) -> None:
    done = checks("-p", "idle")
    errors = dict.fromkeys(("late", "late-in-setup", "late-own"), "ERROR")
    assert verdicts(done) == {**errors, "wrong": "FAIL"}, done.output
    assert done.code == 1
    with busy(2 * len(os.sched_getaffinity(0))):
        done = checks("-k", "wrong")
    assert verdicts(done) == {"wrong": "FAIL"}, done.output
    assert done.code == 1


def test_what_a_process_and_its_children_take_is_not_others() -> None:
    load = HostLoad()
    spin = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)  # it has ended, and was waited for
    with spinning():  # and this one lives
        end = time.process_time() + 1
        while time.process_time() < end:
            pass
        spent = load._read()[1] - load._start[1]
    assert spent >= 2, "both are our own"


def test_what_others_take_is_told() -> None:
    # A grandchild whose parent has ended is nobody's here.
    spin = "import os\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\nwhile True: pass"
    started = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    try:
        started.wait()
        load = HostLoad()
        time.sleep(2)
        assert load.others() > 0.1, "a loop gets some of a processor, however busy the host is"
    finally:
        os.kill(pid, 9)
        started.stdout.close()


@pytest.mark.parametrize(
    ("error", "late"),
    [
        ("has no rank in time", True),
        ("MissingRanksError: waited 120 s for rank 1", True),
        ("FencedError: this member of group 'g' lost its lease", True),
        ("EtcdError: etcd at http://h:1: timeout, no answer within 5 s", True),
        ("EtcdError: etcd at http://h:1: connection refused, nothing listens there", False),
        ("RefusedError: group 'g' has all its members", False),
        ("IndexError: list index out of range", False),
    ],
)
def test_a_claim_that_is_late_is_told_from_one_that_is_wrong(error: str, late: bool) -> None:
    assert is_late(ClaimOutcome("claimant 0", error=error)) is late
    assert not is_late(ClaimOutcome("claimant 0", rank=0, error=error))


@pytest.mark.soak
@pytest.mark.whole
@pytest.mark.parametrize("repeat", repeats())
def test_all_suites_beside_four_busy_loops_fail_nothing(repeat: int) -> None:
    with busy(4):
        done = run("suites", f"--rootdir={ROOT}", "--nixl-blocks=64KiB,1MiB", timeout=3600)
    assert "NIXL verdict: " in done.output
    bad = [line for line in done.output.splitlines() if line.startswith(("FAIL ", "ERROR ", "CORRUPT ", "MISSING "))]
    assert not bad, done.output
    assert done.code == 0, done.output
