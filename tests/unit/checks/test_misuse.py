# SPDX-License-Identifier: Apache-2.0
"""Misuse of the real NIXL is judged by what NIXL does: with a call that has no defect, the same check passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.faults.misuse import (
    DEFECTIVE,
    KINDS,
    SURVIVED,
    MisuseEnding,
    MisuseOutcome,
    judge_misuses,
    misuse,
    misuse_reason,
)
from pytest_nixl.checks.faults.worker import misuse as worker_misuse
from pytest_nixl.checks.faults.worker.misuse import MISUSES, STALLS, carry_out
from pytest_nixl.model.findings import FINDINGS, judge_finding
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.worker.peer_scene import MOVED, PEER, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError

#: The functions that replace the defective calls, by their misuse.
WITHOUT_DEFECT = {
    "duplicate-descriptor": "refuse_duplicates",
    "released-handle": "refuse_released_handles",
    "deregistered-source": "refuse_deregistered_source",
    "cut-metadata": "refuse_cut_metadata",
}


@pytest.fixture
def agent(nixl_settings: Settings) -> Iterator[NixlAgent]:
    """An agent in a worker of its own."""
    with Agents(LocalHost(supervisor()), nixl_settings) as agents:
        yield agents.start(progress_thread=None)


def outcome(id: str, ending: MisuseEnding, error: str = "", wrong: int | None = 0) -> MisuseOutcome:
    """Return an outcome of UCX."""
    return MisuseOutcome(KINDS[id], "UCX", "1.5.1", ending, error, wrong)


def test_the_worker_can_carry_out_every_misuse_and_no_other() -> None:
    assert set(MISUSES) == set(KINDS)
    # UCX does not have the defect of the one that is left: tests/libfabric has it.
    assert {*WITHOUT_DEFECT, "released-in-flight"} == {kind.id for kind in DEFECTIVE}


def test_refused_and_accepted_misuses_pass() -> None:
    judgement = judge_misuses(
        [
            outcome("unknown-agent", MisuseEnding.REFUSED, "nixlNotFoundError"),
            outcome("empty-transfer", MisuseEnding.ACCEPTED),
        ]
    )
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason == (
        "NIXL 1.5.1 with UCX moves correct bytes after each: refused: unknown-agent; accepted: empty-transfer"
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (outcome("empty-transfer", MisuseEnding.CRASHED, "was ended by SIGSEGV", None),
         "a transfer has 0 bytes: crashed (was ended by SIGSEGV)"),
        (outcome("unknown-agent", MisuseEnding.ACCEPTED),
         "a transfer is prepared to an unknown agent: accepted, but only an error is right"),
        (outcome("empty-region", MisuseEnding.ACCEPTED, "", 7),
         "a region of 0 bytes is registered: accepted; 7 bytes of the next transfer are wrong"),
        (replace(outcome("empty-region", MisuseEnding.ACCEPTED), after="PROC"),
         "a region of 0 bytes is registered: accepted; after that, a transfer to the peer stays PROC"),
    ],
)  # fmt: skip
def test_one_bad_outcome_fails_among_good_ones(bad: MisuseOutcome, reason: str) -> None:
    judgement = judge_misuses([outcome("released-twice", MisuseEnding.ACCEPTED), bad])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == f"NIXL 1.5.1 with UCX: {reason}"
    assert bad.kind.label in judgement.remedy


def test_calls_on_bytes_or_agents_that_are_not_there_fail_if_they_are_accepted() -> None:
    assert {id for id in KINDS if outcome(id, MisuseEnding.ACCEPTED).fault} == {
        "beyond-own-region", "beyond-peers-region", "different-lengths", "unknown-agent",
        "notification-to-unknown-agent", "index-out-of-range", "cut-metadata",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 0.5, None])
def test_an_answer_of_another_form_is_an_error_and_no_outcome(wrong: object) -> None:
    """The worker is a double. Two transfers that are never done end before it misses its own deadline."""
    requests: list[Any] = []
    answer = {"raised": "", "after": "", "wrong_bytes": wrong}

    def request(command: str, **keywords: Any) -> Any:
        requests.append(keywords["arguments"])
        return SimpleNamespace(result=lambda: answer)

    agent: Any = SimpleNamespace(
        ref=1, worker=SimpleNamespace(name="rank 0", timeout=6.0, versions={}, request=request)
    )
    with pytest.raises(WorkerError, match=r"rank 0 sent a wrong answer to released-twice: .*wrong_bytes"):
        misuse(agent, KINDS["released-twice"], "UCX")
    assert [(arguments["misuse"], arguments["backend"], arguments["seconds"] < 6.0 / 2) for arguments in requests] == [
        ("released-twice", "UCX", True)
    ]


@pytest.mark.parametrize("id", WITHOUT_DEFECT)
def test_a_nixl_without_the_defect_passes_the_same_check(agent: NixlAgent, id: str) -> None:
    agent.run(f"helpers.misuse_functions:{WITHOUT_DEFECT[id]}")
    outcome = misuse(agent, KINDS[id], "UCX")
    assert (outcome.ending, outcome.error, outcome.wrong_bytes) == (MisuseEnding.REFUSED, "nixlInvalidParamError", 0)
    judgement = judge_finding(
        FINDINGS[KINDS[id].finding], occurs=bool(outcome.fault), reason=misuse_reason(outcome), affects=False,
        acceptance=None, today=date(2026, 11, 22),
    )  # fmt: skip
    assert (judgement.verdict, judgement.known_limit) == (Verdict.PASS, False)
    assert f"with UCX of NIXL {outcome.nixl}, {KINDS[id].label}: refused (nixlInvalidParamError), and the next" in (
        judgement.reason
    )


@pytest.mark.parametrize("id", ["duplicate-descriptor", "released-handle"])
def test_a_crash_of_the_real_nixl_is_an_outcome(agent: NixlAgent, id: str) -> None:
    outcome = misuse(agent, KINDS[id], "UCX")
    assert (outcome.ending, outcome.error, outcome.wrong_bytes) == (MisuseEnding.CRASHED, "was ended by SIGSEGV", None)
    assert outcome.fault == f"{KINDS[id].label}: crashed (was ended by SIGSEGV)"


@pytest.mark.parametrize("id", ["posted-twice", "beyond-peers-region", "released-in-flight"])
def test_a_misuse_of_larger_buffers_does_no_harm_to_the_real_nixl(agent: NixlAgent, id: str) -> None:
    outcome = misuse(agent, KINDS[id], "UCX")
    assert outcome.ending in (MisuseEnding.REFUSED, MisuseEnding.ACCEPTED)
    assert (outcome.fault, outcome.wrong_bytes) == ("", 0)


def test_cut_metadata_of_the_real_nixl_spoils_its_agent(agent: NixlAgent) -> None:
    outcome = misuse(agent, KINDS["cut-metadata"], "UCX")
    assert (outcome.ending, outcome.error) == (MisuseEnding.REFUSED, "nixlNotFoundError")
    after = "; after that, NIXL refuses a transfer to the peer (nixlInvalidParamError)"
    assert outcome.fault == f"{KINDS['cut-metadata'].label}: refused (nixlNotFoundError){after}"
    assert misuse_reason(outcome).endswith(f"refused (nixlNotFoundError){after}")


def test_a_new_crash_is_caught(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:crash", method="send_notif")
    outcome = misuse(agent, KINDS["notification-to-unknown-agent"], "UCX")
    assert outcome.fault == "a notification is sent to an unknown agent: crashed (was ended by SIGSEGV)"


def test_a_transfer_that_must_be_refused_is_caught_if_it_is_accepted(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:accept_every_transfer")
    outcome = misuse(agent, KINDS["different-lengths"], "UCX")
    assert "accepted, but only an error is right" in outcome.fault
    assert outcome.wrong_bytes == SIZE - 1024, "of what did not arrive, no byte is right by chance"


def test_wrong_bytes_after_a_misuse_are_caught(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:spoil")
    assert misuse(agent, KINDS["released-twice"], "UCX").fault.endswith("; 1 bytes of the next transfer are wrong")


@pytest.mark.parametrize("method", ["add_remote_agent", "transfer"])
def test_a_failed_preparation_is_an_error_and_no_outcome(agent: NixlAgent, method: str) -> None:
    agent.run("helpers.misuse_functions:refuse", method=method)
    with pytest.raises(NixlError, match="nixlInvalidParamError"):
        misuse(agent, KINDS["released-twice"], "UCX")


def test_every_kind_has_a_different_id() -> None:
    assert len(KINDS) == len(SURVIVED) + len(DEFECTIVE)


class WatchingAgent:
    """An agent that notes each wrong call and does nothing else. It is a double: no NIXL notices all of them."""

    def __init__(self, **peers: WatchingAgent) -> None:
        self._peers = peers
        self.faults: list[str] = []
        self.removed: list[str] = []
        self.regions: list[range] = []
        #: The regions of the peers when their metadata was added.
        self._loaded: dict[str, list[range]] = {}
        self._handles: dict[object, list[range]] = {}
        self._in_flight: set[object] = set()
        self.done = 0

    def get_reg_descs(self, listed: Sequence[tuple[int, int, int, str]], memory: str) -> list[range]:
        return [range(address, address + size) for address, size, _, _ in listed]

    def get_xfer_descs(self, listed: Sequence[tuple[int, int, int]], memory: str) -> list[range]:
        return [range(address, address + size) for address, size, _ in listed]

    def register_memory(self, regions: list[range]) -> list[range]:
        for region in regions:
            self._note(not region, "an empty region")
            self._note(region in self.regions, "registered twice")
            self._note(overlap([*set(self.regions), region]) and region not in self.regions, "overlapping regions")
            self.regions.append(region)
        return regions

    def deregister_memory(self, regions: list[range]) -> None:
        self._note(len(set(regions)) < len(regions), "named twice")
        for region in set(regions):
            self._note(region not in self.regions, "not registered")
            if region in self.regions:
                self.regions.remove(region)

    def initialize_xfer(self, op: str, local: list[range], remote: list[range], peer: str, token: bytes) -> object:
        self._note(not all([*local, *remote]), "an empty transfer")
        self._note([*map(len, local)] != [*map(len, remote)], "different lengths")
        self._note(overlap(local) and overlap(remote), "overlapping descriptors")
        self._note(not held(self.regions, local), "own memory is not registered")
        self._note(peer not in self._loaded, "unknown agent")
        self._note(peer in self._loaded and not held(self._loaded[peer], remote), "the peer's memory is not registered")
        self._handles[handle := object()] = local
        self._note(len(self._handles) == 10_000, "10,000 handles")
        return handle

    def transfer(self, handle: object) -> None:
        self._note(handle not in self._handles, "posted after it was released")
        self._note(handle in self._in_flight, "posted in flight")
        self._note(not held(self.regions, self._handles.get(handle, [])), "posted after its memory was deregistered")
        self._in_flight.add(handle)

    def check_xfer_state(self, handle: object) -> str:
        self._in_flight.remove(handle)
        self.done += 1
        return "DONE"

    def release_xfer_handle(self, handle: object) -> None:
        self._note(handle in self._in_flight, "released in flight")
        self._note(handle not in self._handles, "released twice")
        self._handles.pop(handle, None)

    def remove_remote_agent(self, peer: str) -> None:
        self.removed.append(peer)

    def send_notif(self, peer: str, message: bytes) -> None:
        self._note(peer not in self._peers, "unknown agent")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"": [MOVED]}

    def prep_xfer_dlist(self, peer: str, listed: Sequence[tuple[int, int, int]], memory: str) -> list[range]:
        blocks = self.get_xfer_descs(listed, memory)
        self._note(not held(self._loaded[peer] if peer else self.regions, blocks), "memory is not registered")
        return blocks

    def make_prepped_xfer(
        self, op: str, local: list[range], local_indices: list[int], remote: list[range], remote_indices: list[int]
    ) -> None:
        for listed, chosen in ((local, local_indices), (remote, remote_indices)):
            self._note(max(chosen) >= len(listed), f"descriptor {max(chosen)} of {len(listed)}")

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> None:
        self._note(metadata != b"metadata", f"metadata without {8 - len(metadata)} byte")
        self._loaded = {name: list(peer.regions) for name, peer in self._peers.items()}

    def _note(self, wrong: bool, fault: str) -> None:
        self.faults += [fault] if wrong else []


def held(regions: Sequence[range], parts: Sequence[range]) -> bool:
    return all(any(part[0] in region and part[-1] in region for region in regions) for part in parts if part)


def overlap(parts: Sequence[range]) -> bool:
    return any(first.start < second.stop and second.start < first.stop for first, second in combinations(parts, 2))


@pytest.mark.parametrize(
    ("id", "faults", "registered", "done"),
    [
        ("registered-twice", ["registered twice"], 0, 0),
        ("deregistered-twice", ["not registered"], 0, 0),
        ("empty-region", ["an empty region"], 0, 0),
        ("overlapping-regions", ["overlapping regions"], 0, 1),
        ("beyond-own-region", ["own memory is not registered", "posted after its memory was deregistered"], 1, 1),
        ("beyond-peers-region", ["the peer's memory is not registered"], 1, 1),
        ("different-lengths", ["different lengths"], 1, 1),
        ("empty-transfer", ["an empty transfer"], 1, 1),
        ("overlapping-transfer", ["overlapping descriptors"], 1, 1),
        ("unknown-agent", ["unknown agent"], 1, 0),
        ("notification-to-unknown-agent", ["unknown agent"], 0, 0),
        ("index-out-of-range", ["descriptor 1 of 1"], 1, 0),
        ("posted-twice", ["posted in flight"], 1, 1),
        ("released-twice", ["released twice"], 1, 1),
        ("handles-kept", ["10,000 handles"], 1, 1),
        ("duplicate-descriptor", ["named twice"], 0, 0),
        ("released-handle", ["posted after it was released"], 1, 2),
        ("released-in-flight", ["released in flight"] * 5, 2, 5),
        ("deregistered-source", ["posted after its memory was deregistered"], 0, 1),
        ("cut-metadata", ["metadata without 1 byte"], 0, 0),
    ],
)
def test_each_misuse_makes_its_wrong_call_and_no_other(id: str, faults: list[str], registered: int, done: int) -> None:
    peer = WatchingAgent()
    agent = WatchingAgent(**{PEER: peer})
    scene: Any = PeerScene.__new__(PeerScene)
    vars(scene).update(agent=agent, peer=peer, seconds=60.0, _buffers=[])
    scene.source, scene.target = scene.buffer(), scene.buffer()
    peer.register_memory(scene.regions(scene.target))
    agent.add_remote_agent(peer.get_agent_metadata())
    steps = MISUSES[id](scene)
    next(steps)
    assert agent.faults == [], "the preparation is right"
    assert agent.removed == (["nobody"] if id == "unknown-agent" else [])
    assert list(steps) == []
    assert (agent.faults, len(agent.regions), agent.done) == (faults, registered, done)
    assert peer.faults == []


@pytest.mark.parametrize(("id", "backend"), [STALLS, ("released-in-flight", "UCX"), ("released-twice", "LIBFABRIC")])
def test_a_deadline_that_passes_is_an_outcome_of_the_known_stall_only(
    id: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late() -> int:
        raise StepTimeoutError("not finished")

    monkeypatch.setattr(worker_misuse, "PeerScene", lambda *_: SimpleNamespace(wrong_bytes=late))
    monkeypatch.setitem(MISUSES, id, lambda _: iter([None]))
    if (id, backend) == STALLS:
        assert carry_out(None, id, backend, 1.0) == {"raised": "", "after": "PROC", "wrong_bytes": 0}
    else:
        with pytest.raises(StepTimeoutError):
            carry_out(None, id, backend, 1.0)
