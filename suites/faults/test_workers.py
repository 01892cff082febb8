# SPDX-License-Identifier: Apache-2.0
"""Check that a dead or stopped agent process is named in time, and that the other processes go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, NixlAgent, NixlError, Verdict, WorkerDiedError, WorkerError, WorkerHungError

from ..metadata.moving import write_and_compare
from .conftest import Couple, know_again

Decide = Callable[[Judgement], None]
REPORT = "this is a defect of pytest-nixl or of NIXL: report it with this output"
#: NIXL's error class for a target that is gone.
DISCONNECTED = "nixlRemoteDisconnectError"
#: Seconds beyond its deadline that an answer may take on a busy host.
LATE = 60.0
#: Seconds that a stopped target may take to answer.
PATIENCE = 2.0


@pytest.mark.nixl_check("fault-dead-target")
@pytest.mark.nixl_early
def test_a_target_that_dies_is_named_and_the_initiator_lives(couple: Couple, verdict: Decide) -> None:
    """Kill the process of a target: a request to it raises an error that names it, and the initiator still answers."""
    write_and_compare(couple.initiator, couple.target, couple.memory, couple.seconds)
    couple.target.worker.signal(signal.SIGKILL)
    error = _call_error(couple)
    faults = [] if isinstance(error, WorkerDiedError) else [f"a dead target is reported as {error!r}"]
    if couple.target.worker.name not in str(error) or "SIGKILL" not in str(error):
        faults.append(f"{couple.target.worker.name} was ended by SIGKILL, but the error says: {error}")
    if not couple.initiator.get_plugin_list():
        faults.append(f"{couple.initiator.worker.name} does not answer after the death of the target")
    verdict(_concluded(faults, f"reported: {str(error).splitlines()[0]}"))


@pytest.mark.nixl_check("fault-stopped-target")
@pytest.mark.nixl_early(waits=3)
def test_a_target_that_stops_is_told_before_its_deadline_is_long_over(couple: Couple, verdict: Decide) -> None:
    """Stop the process of a target: a request to it raises an error in time, and the error says that it is stopped."""
    couple.target.worker.timeout = PATIENCE
    couple.target.worker.signal(signal.SIGSTOP)
    started = time.monotonic()
    error = _call_error(couple)
    took = time.monotonic() - started
    faults = [] if isinstance(error, WorkerHungError) else [f"a stopped target is reported as {error!r}"]
    if "stopped by a signal" not in str(error):
        faults.append(f"{couple.target.worker.name} was stopped by a signal, but the error says: {error}")
    if took > PATIENCE + LATE:
        faults.append(f"the error came after {took:.1f} s, and the deadline is {PATIENCE:g} s")
    verdict(_concluded(faults, f"reported within the deadline: {str(error).splitlines()[0]}"))


@pytest.mark.nixl_check("fault-restarted-target")
@pytest.mark.nixl_early
def test_a_target_that_comes_back_under_its_name_is_written_to(couple: Couple, verdict: Decide) -> None:
    """Kill a target and start one of the same name: bytes are written to the new one, and are correct."""
    write_and_compare(couple.initiator, couple.target, couple.memory, couple.seconds)
    couple.target.worker.kill()
    again, memory = couple.another_target()
    verdict(
        come_back(couple.initiator, again, lambda: write_and_compare(couple.initiator, again, memory, couple.seconds))
    )


def come_back(initiator: NixlAgent, again: NixlAgent, write: Callable[[], None]) -> Judgement:
    """Make a target that came back known to the initiator, write to it, and return the verdict.

    Over some transports NIXL tells of the death of the former target only now. Then both are done once more.

    :param write: writes bytes to the target, and compares them there.
    """
    detail = ""
    for _ in range(2):
        try:
            know_again(initiator, again)
            write()
        except NixlError as error:
            if detail or error.type_name != DISCONNECTED:
                reason = (
                    f"{initiator.worker.name} gets {error.type_name} from NIXL when it writes to {again.worker.name}"
                )
                return Judgement(Verdict.FAIL, f"{reason}, which came back under the name of a killed one", REPORT)
            detail = f"; before that NIXL raised {DISCONNECTED} once, which tells of the killed one"
        else:
            break
    description = f"{again.worker.name} was written to under the name of the one that was killed{detail}"
    return Judgement(Verdict.PASS, description)


def _call_error(couple: Couple) -> WorkerError | None:
    """Send a request to the target, and return the error that it raises; None if it answers."""
    try:
        couple.target.get_plugin_list()
    except WorkerError as error:
        return error
    return None


def _concluded(faults: list[str], good: str) -> Judgement:
    return Judgement(Verdict.FAIL, "; ".join(faults), REPORT) if faults else Judgement(Verdict.PASS, good)
