# SPDX-License-Identifier: Apache-2.0
"""Where an agent's process dies or stops: is that told by name and in time, and does the rest go on?"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Verdict, WorkerDiedError, WorkerError, WorkerHungError

from ..metadata.moving import write_and_compare
from .conftest import Couple

Decide = Callable[[Judgement], None]
REPORT = "this is a defect of pytest-nixl or of NIXL: report it, with what is printed here"
#: Seconds beyond its deadline that an answer may need on a busy host.
LATE = 60.0
#: Seconds after which a target that was stopped is given up.
PATIENCE = 2.0


@pytest.mark.nixl_check("fault-dead-target")
def test_a_target_that_dies_is_named_and_the_initiator_lives(couple: Couple, verdict: Decide) -> None:
    """The process of a target is killed: whoever asks it is told which one it was, and its partner still answers."""
    write_and_compare(couple.initiator, couple.target, couple.memory, couple.seconds)
    couple.target.worker.signal(signal.SIGKILL)
    error = _told(couple)
    found = [] if isinstance(error, WorkerDiedError) else [f"a dead target is told as {error!r}"]
    if couple.target.worker.name not in str(error) or "SIGKILL" not in str(error):
        found.append(f"{couple.target.worker.name} was ended by SIGKILL, and what is told is: {error}")
    if not couple.initiator.get_plugin_list():
        found.append(f"{couple.initiator.worker.name} does not answer beside a dead target")
    verdict(_concluded(found, f"told: {str(error).splitlines()[0]}"))


@pytest.mark.nixl_check("fault-stopped-target")
def test_a_target_that_stops_is_told_before_its_deadline_is_long_over(couple: Couple, verdict: Decide) -> None:
    """The process of a target is stopped: whoever waits for it gives up in time, and says that it was stopped."""
    couple.target.worker.timeout = PATIENCE
    couple.target.worker.signal(signal.SIGSTOP)
    started = time.monotonic()
    error = _told(couple)
    took = time.monotonic() - started
    found = [] if isinstance(error, WorkerHungError) else [f"a stopped target is told as {error!r}"]
    if "stopped by a signal" not in str(error):
        found.append(f"it was stopped by a signal, and what is told is: {error}")
    if took > PATIENCE + LATE:
        found.append(f"it took {took:.1f} s to be told, and the deadline is {PATIENCE:g} s")
    verdict(_concluded(found, f"told within its deadline: {str(error).splitlines()[0]}"))


@pytest.mark.nixl_check("fault-restarted-target")
def test_a_target_that_comes_back_under_its_name_is_written_to(couple: Couple, verdict: Decide) -> None:
    """A target is killed and started again under the same name: bytes reach the new one, and are right."""
    write_and_compare(couple.initiator, couple.target, couple.memory, couple.seconds)
    couple.target.worker.kill()
    again, memory = couple.another_target()
    write_and_compare(couple.initiator, again, memory, couple.seconds)
    verdict(Judgement(Verdict.PASS, f"{again.worker.name} was written to under the name of the one that was killed"))


def _told(couple: Couple) -> WorkerError | None:
    """Ask the target for something; return what is told of it instead."""
    try:
        couple.target.get_plugin_list()
    except WorkerError as error:
        return error
    return None


def _concluded(found: list[str], good: str) -> Judgement:
    return Judgement(Verdict.FAIL, "; ".join(found), REPORT) if found else Judgement(Verdict.PASS, good)
