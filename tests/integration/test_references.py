# SPDX-License-Identifier: Apache-2.0
"""References to objects of workers, with real NIXL: another worker refuses them, and so does theirs after a release."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.worker_errors import NixlError, WorkerError

#: The class of NIXL, or our noun, for each object to which a test has references.
HANDLE, PREPARED, PLACES, REGISTERED, BUFFER = (
    "nixl_xfer_handle", "nixl_prepped_dlist_handle", "nixlXferDList", "nixlRegDList", "buffer",
)  # fmt: skip
#: A function for ``run``.
SIZE = f"{__name__}:size_of"
USES: dict[str, tuple[str, Callable[[NixlAgent, Any], object]]] = {
    "transfer": (HANDLE, lambda agent, ref: agent.transfer(ref)),
    "check_xfer_state": (HANDLE, lambda agent, ref: agent.check_xfer_state(ref)),
    "estimate_xfer_cost": (HANDLE, lambda agent, ref: agent.estimate_xfer_cost(ref)),
    "get_xfer_telemetry": (HANDLE, lambda agent, ref: agent.get_xfer_telemetry(ref)),
    "query_xfer_backend": (HANDLE, lambda agent, ref: agent.query_xfer_backend(ref)),
    "release_xfer_handle": (HANDLE, lambda agent, ref: agent.release_xfer_handle(ref)),
    "release_dlist_handle": (PREPARED, lambda agent, ref: agent.release_dlist_handle(ref)),
    "make_prepped_xfer": (PREPARED, lambda agent, ref: agent.make_prepped_xfer("WRITE", ref, [0], ref, [0])),
    "initialize_xfer": (PLACES, lambda agent, ref: agent.initialize_xfer("WRITE", ref, ref, agent.name)),
    "get_xfer_descs": (PLACES, lambda agent, ref: agent.get_xfer_descs(ref)),
    "get_serialized_descs": (PLACES, lambda agent, ref: agent.get_serialized_descs(ref)),
    "prep_xfer_dlist": (PLACES, lambda agent, ref: agent.prep_xfer_dlist("", ref)),
    "check_remote_metadata": (PLACES, lambda agent, ref: agent.check_remote_metadata("a", ref)),
    "register_memory": (REGISTERED, lambda agent, ref: agent.register_memory(ref)),
    "deregister_memory": (REGISTERED, lambda agent, ref: agent.deregister_memory(ref)),
    "query_memory": (REGISTERED, lambda agent, ref: agent.query_memory(ref, "UCX")),
    "get_reg_descs": (REGISTERED, lambda agent, ref: agent.get_reg_descs(ref)),
    "get_partial_agent_metadata": (REGISTERED, lambda agent, ref: agent.get_partial_agent_metadata(ref)),
    "send_partial_agent_metadata": (
        REGISTERED,
        lambda agent, ref: agent.send_partial_agent_metadata(ref, ip_addr="127.0.0.1", port=9),
    ),
    "register": (BUFFER, lambda agent, ref: agent.worker.call("register", agent=agent.ref, buffer=ref)),
    "read": (BUFFER, lambda agent, ref: agent.worker.call("read", buffer=ref, offset=0, size=8)),
    "run": (BUFFER, lambda agent, ref: agent.worker.call("run", agent=agent.ref, function=SIZE, arguments={"it": ref})),
    "forget": (BUFFER, lambda agent, ref: agent.worker.call("forget", objects=[ref])),
    "get_agent_metadata": ("agent", lambda agent, ref: NixlAgent(agent.worker, ref, agent.name).get_agent_metadata()),
}


def size_of(agent: Any, it: Any) -> int:
    return int(it.size)


class Objects:
    """An agent ``name`` with one object of each kind; the objects of all such agents have the same numbers."""

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self.buffer: Buffer = agent.allocate(4096)
        registered = agent.register(self.buffer)
        places = agent.get_xfer_descs([self.buffer.descriptor(0, 64)], "DRAM")
        prepared = agent.prep_xfer_dlist("", places)
        remote = agent.prep_xfer_dlist(agent.name, places)
        handle = agent.make_prepped_xfer("WRITE", prepared, [0], remote, [0])
        self.refs = {
            BUFFER: self.buffer.ref, REGISTERED: registered, PLACES: places, PREPARED: prepared, HANDLE: handle,
            "agent": agent.ref,
        }  # fmt: skip


def test_an_object_of_another_worker_is_refused_before_anything_is_sent(agents: Agents) -> None:
    native, foreign = (Objects(agent) for agent in agents.start_each(["b", "a"], backends=["UCX"]))
    b = native.agent
    b.worker.signal(signal.SIGSTOP)  # so that a request would end at its deadline
    for use, (kind, call) in USES.items():
        assert foreign.refs[kind].number == native.refs[kind].number, "by its number it would be an object of b"
        with pytest.raises(WorkerError) as caught:
            call(b, foreign.refs[kind])
        assert caught.value.reason == (
            f"{use!r} of agent 'b' ({b.worker.name}) was given a {kind} of agent 'a' ({foreign.agent.worker.name}), "
            "and an object can be used only in its own worker"
        )
    b.worker.signal(signal.SIGCONT)
    # A successor gets the numbers of the agent that has ended.
    foreign.agent.close()
    successor = Objects(agents.start("a", backends=["UCX"])).agent
    for kind, call in USES.values():
        with pytest.raises(WorkerError, match=r"was given a .* of agent 'a' \(.*, which has ended\), and an object"):
            call(successor, foreign.refs[kind])
    assert successor.worker.alive


def test_an_object_that_was_released_is_refused_by_its_worker(agents: Agents) -> None:
    agent = agents.start("a", backends=["UCX"])
    for use, (kind, call) in USES.items():
        if kind not in (HANDLE, PREPARED, BUFFER) or use in ("release_xfer_handle", "release_dlist_handle", "forget"):
            continue
        objects = Objects(agent)
        agent.release_xfer_handle(objects.refs[HANDLE])
        agent.release_dlist_handle(objects.refs[PREPARED])
        agent.deregister_memory(objects.refs[REGISTERED])
        objects.buffer.free()
        with pytest.raises(WorkerError, match=rf"this {kind} is no longer there: it was released, freed or deleted"):
            call(agent, objects.refs[kind])
    # NIXL ignores a second release.
    agent.release_xfer_handle(objects.refs[HANDLE])
    agent.release_dlist_handle(objects.refs[PREPARED])
    objects.buffer.free()


@pytest.mark.parametrize("forged", ["kind", "number"])
def test_a_reference_of_another_kind_or_number_is_refused_by_the_worker(agents: Agents, forged: str) -> None:
    objects = Objects(agents.start("a", backends=["UCX"]))
    for use, (kind, call) in USES.items():
        for other, ref in objects.refs.items():
            if kind == other:
                continue
            takes_it = use in ("run", "forget") or (use, other) == ("get_serialized_descs", REGISTERED)
            # What the pipe brings is not to be trusted: it may claim another kind or a number of no object.
            claims = [Ref(10_000, kind), Ref(0, kind)]
            if forged == "kind":
                claims = [Ref(ref.number, kind), *([] if takes_it else [ref])]
            for claim in claims:
                with pytest.raises(WorkerError, match="refused") as caught:
                    call(objects.agent, claim)
                assert kind in caught.value.reason, (use, other)
    assert objects.agent.transfer(objects.refs[HANDLE]) in ("DONE", "PROC")


def test_two_agents_of_one_worker_share_memory_and_descriptor_lists(agents: Agents) -> None:
    first = agents.start("a", backends=["UCX"])
    second = first.beside("b")
    buffer = first.allocate(4096)
    buffer.fill(1).result()
    first.register(buffer)
    second.register(buffer)
    second.add_remote_agent(first.get_agent_metadata())
    places = first.get_xfer_descs([buffer.descriptor(0, 64)], "DRAM")
    target = first.get_xfer_descs([buffer.descriptor(64, 64)], "DRAM")
    handle = second.initialize_xfer("WRITE", places, target, "a")
    assert second.transfer(handle) in ("DONE", "PROC")
    while second.check_xfer_state(handle) == "PROC":
        pass
    assert buffer.read(64, 64) == buffer.read(0, 64)
    assert second.run(SIZE, it=buffer) == 4096
    # A user's data class of references may be copied.
    assert first.get_serialized_descs(copy.deepcopy(places)) == first.get_serialized_descs(places)


def test_a_key_error_of_nixl_has_its_words(agents: Agents) -> None:
    objects = Objects(agents.start("a", backends=["UCX"]))
    places = objects.refs[PLACES]
    with pytest.raises(NixlError, match=r"^NIXL reported KeyError \('MOVE'\) .* during 'initialize_xfer' of") as caught:
        objects.agent.initialize_xfer("MOVE", places, places, "a")
    assert caught.value.type_name == "KeyError"


def test_numpy_arrays_and_scalars_are_descriptors(agents: Agents) -> None:
    agent = agents.start("a", backends=["UCX"])
    address = agent.allocate(4096).address
    rows = np.array([[address, 64, 0], [address + 64, 64, 0]], dtype=np.uint64)
    registered = agent.register_memory(rows, "DRAM")
    lists = [agent.get_xfer_descs(descs, "DRAM") for descs in (rows, [tuple(row) for row in rows], rows.tolist())]
    serialized = [agent.get_serialized_descs(descriptors) for descriptors in lists]
    assert serialized[0] == serialized[1] == serialized[2]
    prepared = agent.prep_xfer_dlist("", rows, "DRAM")
    remote = agent.prep_xfer_dlist("a", rows, "DRAM")
    handle = agent.make_prepped_xfer("WRITE", prepared, np.array([0]), remote, np.array([1]))
    assert agent.transfer(handle) in ("DONE", "PROC")
    agent.release_xfer_handle(handle)
    agent.deregister_memory(registered)


def test_an_agent_says_what_it_is_and_can_be_parametrized_with_backends(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("nixl_agent", ["POSIX", ["UCX", "POSIX"]], indirect=True)
        def test_backends(nixl_agent):
            has = nixl_agent.get_backend_mem_types("POSIX")
            print(repr(nixl_agent))
            nixl_agent.close()
            print(repr(nixl_agent))
    """)
    result = run_pytest(pytester, "-s", "--nixl-backend=UCX")
    result.assert_outcomes(passed=2)
    for backends in ("POSIX", "UCX, POSIX"):
        start = f"*<NixlAgent 'rank0-agent-*' created with {backends} in rank 0 (agent worker, pid *)"
        result.stdout.fnmatch_lines([f"{start}>", f"{start}, which has ended>"])
