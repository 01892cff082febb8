# SPDX-License-Identifier: Apache-2.0
"""A deadline missed on a busy host is INCONCLUSIVE; a wrong result fails on a busy host, too."""

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

from pytest_nixl.core.cpu_contention import HostLoad

pytestmark = pytest.mark.long

#: Four checks: late in the test, late in the setup, late with its own verdict, and wrong.
CHECKS = """
import pytest
from pytest_nixl.core.polling import wait_until

def late():
    wait_until(lambda: False, "what never comes", seconds=0.5)

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


#: Enough busy loops for a host to count as busy: they leave one processor of the two that a run needs.
ENOUGH = max(1, len(os.sched_getaffinity(0)) - 1)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep processors busy with processes that do not belong to the inner run."""
    with ExitStack() as stack:
        for _ in range(loops):
            stack.enter_context(spinning())
        yield


def verdicts(done: Finished) -> dict[str, str]:
    """Return the verdict of each check that did not pass, from the report at the end."""
    matches = re.findall(r"^(FAIL|ERROR|INCONCLUSIVE|WARN) ([a-z, -]+): ", done.output, re.MULTILINE)
    return {check: verdict for verdict, checks in matches for check in checks.split(", ")}


@pytest.fixture
def checks(tmp_path: Path) -> Callable[..., Finished]:
    """Run the four checks."""
    (tmp_path / "test_checks.py").write_text(CHECKS)
    (tmp_path / "idle.py").write_text(NOT_BUSY)
    return lambda *options: run("test_checks.py", *options, directory=tmp_path, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(
    "gate",
    [pytest.param((), marks=pytest.mark.whole), ("--nixl-gate",)],
    ids=["without-the-gate", "with-the-gate"],
)
def test_deadline_missed_on_a_busy_host_is_inconclusive(checks: Callable[..., Finished], gate: tuple[str, ...]) -> None:
    with busy(ENOUGH):
        done = checks("-k", "not wrong", *gate)
    assert verdicts(done) == {"late": "INCONCLUSIVE", "late-in-setup": "INCONCLUSIVE", "late-own": "WARN"}, done.output
    assert re.search(r"waited 0.5 s for what never comes; .* used \d+\.\d of this host's \d+ processors", done.output)
    assert done.code == (1 if gate else 0), done.output


def test_deadline_missed_on_an_idle_host_is_an_error_and_a_wrong_result_always_fails(
    checks: Callable[..., Finished],
) -> None:
    done = checks("-p", "idle")
    errors = dict.fromkeys(("late", "late-in-setup", "late-own"), "ERROR")
    assert verdicts(done) == {**errors, "wrong": "FAIL"}, done.output
    assert done.code == 1
    with busy(ENOUGH):
        done = checks("-k", "wrong")
    assert verdicts(done) == {"wrong": "FAIL"}, done.output
    assert done.code == 1


def test_cpu_time_of_a_process_and_its_children_is_its_own() -> None:
    load = HostLoad()
    spin = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)  # this child has ended
    with spinning():  # this child still runs
        end = time.process_time() + 0.4
        while time.process_time() < end:
            pass
        spent = load._read()[1] - load._start[1]
    assert spent >= 0.8, "the CPU time of both children is our own"


def test_cpu_time_of_other_processes_is_measured() -> None:
    # A grandchild whose parent has ended is no longer a descendant.
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


@pytest.mark.soak
@pytest.mark.whole
@pytest.mark.parametrize("repeat", repeats())
def test_all_suites_pass_with_four_busy_loops(repeat: int) -> None:
    with busy(4):
        done = run("suites", f"--rootdir={ROOT}", "--nixl-blocks=64KiB,1MiB", timeout=3600, fork=False)
    assert "NIXL verdict: " in done.output
    bad = [line for line in done.output.splitlines() if line.startswith(("FAIL ", "ERROR ", "CORRUPT ", "MISSING "))]
    assert not bad, done.output
    assert done.code == 0, done.output
