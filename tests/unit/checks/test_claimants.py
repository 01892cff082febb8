# SPDX-License-Identifier: Apache-2.0
"""A claimant is a process that announces its rank, waits, and leaves; what it says is heard."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.etcd import running

from pytest_nixl.checks.rank_race.claimants import Claimant

#: Seconds that no claimant takes.
SECONDS = 120.0


@pytest.fixture
def start() -> Iterator[Callable[..., Claimant]]:
    """Start claimants, which end with the test."""
    with ExitStack() as stack:

        def start(function: str, arguments: dict[str, Any], **options: Any) -> Claimant:
            claimant = Claimant(f"helpers.race_functions:{function}", arguments, **options)
            stack.callback(claimant.close)
            return claimant

        yield start


def test_a_claimant_keeps_its_rank_until_it_may_go_on(start: Callable[..., Claimant]) -> None:
    program, threads, before = sys.modules["__main__"], set(threading.enumerate()), time.monotonic()
    changed = threading.Condition()
    claimant = start("announces", {"ranks": [4, 5]}, changed=changed)
    assert sys.modules["__main__"] is program
    message = claimant.wait(SECONDS)
    assert message is not None
    assert (message["rank"], set(message)) == (4, {"rank", "host"})
    assert before < claimant.heard < time.monotonic()
    assert running(claimant.pid)
    assert claimant.wait_for(lambda message: message["rank"] == 5, 0.0) == message
    claimant.go_on()
    assert claimant.wait_for(lambda message: message["rank"] == 5, SECONDS) == {**message, "rank": 5}
    claimant.go_on()
    assert claimant.wait_until_ended(SECONDS)
    assert claimant.ended
    claimant.go_on()  # nobody hears it
    claimant.close()
    assert set(threading.enumerate()) <= threads


def test_a_claimant_that_fails_reports_its_error(start: Callable[..., Claimant]) -> None:
    claimant = start("announces", {"ranks": [], "error": "it failed"})
    message = claimant.wait(SECONDS)
    assert message is not None
    assert (message["error"], message["kind"], set(message)) == ("it failed", "ValueError", {"error", "kind", "host"})
    assert claimant.wait_until_ended(SECONDS)


def test_a_claimant_that_is_killed_has_ended(start: Callable[..., Claimant]) -> None:
    claimant = start("announces", {"ranks": [1]})
    claimant.wait(SECONDS)
    assert not claimant.wait_until_ended(0.0)
    claimant.kill()
    assert claimant.ended
    assert not running(claimant.pid)
    assert claimant.wait_for(lambda _: False, SECONDS) == claimant.message
    claimant.kill()
