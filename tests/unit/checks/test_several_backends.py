# SPDX-License-Identifier: Apache-2.0
"""One agent with several backends, with the real NIXL, and with the faults that the check is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.checks.metadata.several_backends import (
    BackendUse,
    add_storage,
    backends_of,
    judge_uses,
    use_each,
)
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError

BOTH = ("UCX", "POSIX")
Pair = tuple[NixlAgent, NixlAgent]


@pytest.fixture
def pair(make_settings: Callable[..., Settings]) -> Iterator[Pair]:
    """An initiator with UCX and POSIX, and a target with UCX."""
    with Agents(LocalHost(supervisor()), make_settings()) as agents:
        initiator, target = agents.start_each(
            ["initiator", "target"], environment={"UCX_PROTO_INFO": "y"}, progress_thread=None
        )
        add_storage(initiator)
        yield initiator, target


def test_bytes_go_to_an_agent_by_one_backend_and_to_a_file_by_another(pair: Pair) -> None:
    uses = use_each(*pair, BOTH, directory="", seconds=120)
    assert [(use.chosen, use.used, str(use.memory), use.wrong) for use in uses] == [
        ("UCX", "UCX", "DRAM:DRAM", None),
        ("POSIX", "POSIX", "DRAM:FILE", None),
    ]
    assert all(use.transports for use in uses)


def test_a_backend_that_cannot_move_the_bytes_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # NIXL does not take another backend instead of the chosen one.
    start: Any = NixlAgent.initialize_xfer

    def other(self: NixlAgent, *arguments: Any, **_: Any) -> Any:
        return start(self, *arguments, backends=["POSIX"])

    monkeypatch.setattr(NixlAgent, "initialize_xfer", other)
    with pytest.raises(NixlError, match="NIXL_ERR_NOT_FOUND"):
        use_each(*pair, ["UCX"], directory="", seconds=120)


WRITE = BackendUse("UCX", "UCX", MemoryPair("DRAM", "DRAM"), ("tcp", "cma"), None)
FILE = BackendUse("POSIX", "UCX", MemoryPair("DRAM", "FILE"), (), None)
WRONG = {"wrong_bytes": 1, "total_bytes": 8, "offset": 3, "expected": 1, "found": 2}


@pytest.mark.parametrize(
    ("uses", "judged"),
    [
        ([WRITE, replace(FILE, used="POSIX")],
         Judgement(Verdict.PASS, "an agent with UCX and POSIX: DRAM:DRAM by UCX over tcp+cma; DRAM:FILE by POSIX")),
        *((uses, Judgement(
            Verdict.FAIL, f"an agent with {names}: NIXL uses UCX for a transfer DRAM:FILE for which POSIX "
            "was chosen",
            "Report it at https://github.com/ai-dynamo/nixl/issues with NIXL's release; until it is fixed, create one "
            "agent for each backend."))
          for uses, names in (([WRITE, FILE], "UCX and POSIX"), ([FILE, WRITE], "POSIX and UCX"))),
        ([replace(WRITE, wrong=WRONG), FILE], Judgement(
            Verdict.CORRUPT, "an agent with UCX and POSIX: 1 of 8 bytes of DRAM:DRAM by UCX over tcp+cma are wrong, "
            "the first at offset 3: expected 0x01, found 0x02",
            "Do not use an agent with UCX and POSIX: create one agent for each backend, and keep the workers' logs.")),
        # Wrong bytes count before a wrong backend.
        ([FILE, replace(WRITE, wrong=WRONG)], Judgement(
            Verdict.CORRUPT, "an agent with POSIX and UCX: 1 of 8 bytes of DRAM:DRAM by UCX over tcp+cma are wrong, "
            "the first at offset 3: expected 0x01, found 0x02",
            "Do not use an agent with POSIX and UCX: create one agent for each backend, and keep the workers' logs.")),
    ],
)  # fmt: skip
def test_wrong_bytes_and_another_backend_than_the_chosen_one_are_named(
    uses: list[BackendUse], judged: Judgement
) -> None:
    assert judge_uses(uses) == judged


def test_an_agent_has_every_requested_backend_and_the_one_for_files() -> None:
    assert backends_of(("POSIX", "UCX", "LIBFABRIC")) == ("UCX", "LIBFABRIC", "POSIX")
    assert backends_of(("UCX",)) == BOTH
