# SPDX-License-Identifier: Apache-2.0
"""Rank 0 runs real workers on a peer through a real etcd. Rank 0 and rank 1 are two threads of the test."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.forked_runs import save_time
from helpers.process_parent import parent_of
from helpers.rank_group import rank_group
from helpers.s3 import S3Server, use_s3
from helpers.two_ranks import Two, two

from pytest_nixl.cluster.group import MemberLostError
from pytest_nixl.cluster.messages import LARGEST
from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.hosts import MEASURED, LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_parent import parent_of_workers


@pytest.mark.long
def test_footprints_and_objects_are_moved_between_any_of_three_ranks(
    nixl_private_etcd: PrivateEtcd, make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_time(monkeypatch.setattr)  # no rate is judged
    server = S3Server()
    use_s3(monkeypatch, server.url)
    with ExitStack() as stack:
        stack.callback(server.kill)
        group = stack.enter_context(rank_group(nixl_private_etcd.endpoint, 3, "of this group"))
        group.join()
        group.serve()
        stack.callback(group.end)
        hosts = (LocalHost(supervisor(), 0), group.driver.peers[1], group.driver.peers[2])
        pairs = Launches(hosts, make_settings(duration=0.0, iterations=50))
        stack.callback(pairs.close)
        # Rank 0 starts the bytes, ends them, and only asks for them: the transport is then read from the log of a peer.
        for ranks, op in (((0, 1), "WRITE"), ((2, 0), "READ"), ((1, 2), "WRITE")):
            walked = pairs.link("UCX", op, MemoryPair("DRAM", "DRAM"), ranks, footprint=MIB)
            samples = walked.measure(64 * KIB)
            assert samples.corruption is None
            assert samples.transports
            assert str(samples.key).endswith(f"/{ranks[0]}-{ranks[1]}/footprint=1MiB")
        for rank in (0, 2):
            stored = pairs.link("OBJ", "READ", MemoryPair("DRAM", "OBJ"), (rank, rank)).measure(4 * KIB)
            assert stored.corruption is None
            assert stored.key.pair == (rank, rank)
            assert server.keys == []
        last = pairs.link("OBJ", "READ", MemoryPair("DRAM", "OBJ"), (2, 2))
        server.kill()
        with pytest.raises(WorkerError, match=r"(?i)connection refused"):  # as probe_objects says, not NIXL
            last.measure(4 * KIB)


def test_a_dead_worker_of_a_peer_is_named_with_its_signal(nixl_private_etcd: PrivateEtcd) -> None:
    with two(nixl_private_etcd) as ranks:
        worker = ranks.peer.start("agent", {}, 120)
        assert worker.versions["nixl"]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=rf"rank 1 \(agent worker, pid {worker.pid}\) was ended by SIGKILL"):
            worker.call("serve", agent=None, timeout=60.0)
        assert not worker.alive


def test_a_peer_executes_the_workers_of_measured_rows_and_forks_others(nixl_private_etcd: PrivateEtcd) -> None:
    with two(nixl_private_etcd) as ranks:
        workers = {role: ranks.peer.start(role, {}, 120) for role in (*MEASURED, "agent")}
        parents = {role: parent_of(worker.pid) for role, worker in workers.items()}
        assert parents == {**dict.fromkeys(MEASURED, os.getpid()), "agent": parent_of_workers()}
        for worker in workers.values():
            worker.close()
    assert nixl_private_etcd.client.get_prefix("/") == {}


def test_more_bytes_of_a_peer_than_a_message_has_room_for_are_written_and_read(
    nixl_private_etcd: PrivateEtcd,
) -> None:
    content = random.randbytes(3 * LARGEST + 5)
    with two(nixl_private_etcd) as ranks:
        worker = ranks.peer.start("agent", {}, 120)
        allocated = worker.call("allocate", size=len(content), memory_type="DRAM")
        buffer = Buffer(worker, allocated["buffer"], allocated["address"], len(content), "DRAM", allocated["device"])
        buffer.write(content)
        assert buffer.read() == content
        assert buffer.read(7, 2 * LARGEST) == content[7 : 7 + 2 * LARGEST]
        with pytest.raises(WorkerError, match="are not inside a buffer"):
            buffer.write(bytes(2 * LARGEST), 2 * LARGEST)
        assert buffer.read() == content
        worker.close()


def test_a_peer_gives_back_the_memory_of_a_buffer_for_the_faults_suite(nixl_private_etcd: PrivateEtcd) -> None:
    with two(nixl_private_etcd) as ranks:
        worker = ranks.peer.start("agent", {}, 120)
        allocated = worker.call("allocate", size=64 * MIB, memory_type="DRAM")
        worker.call("unmap", buffer=allocated["buffer"])
        # Something else may get the first or the last of these pages.
        with pytest.raises(WorkerDiedError, match="SIGSEGV"):
            worker.call("read", buffer=allocated["buffer"], offset=32 * MIB, size=16)


def test_a_peer_refuses_commands_outside_its_list(nixl_private_etcd: PrivateEtcd) -> None:
    with two(nixl_private_etcd) as ranks:
        with pytest.raises(PeerError, match=r"arguments of 'start': role is '\.\./\.\./x'"):
            ranks.peer.start("../../x", {}, 120)
        worker = ranks.peer.start("agent", {"UCX_TLS": "tcp", "NIXL_PLUGIN_DIR": None}, 120)
        with pytest.raises(WorkerError, match=r"rank 0 .*'run'"):
            worker.call("run", agent=None, function="os:getpid", arguments={})
        with pytest.raises(PeerError, match=r"rank 1 on .* refused 'shell': "):
            ranks.peer.ask("shell", command="true")
        worker.close()


def test_a_peer_ends_if_rank_0_is_gone(nixl_private_etcd: PrivateEtcd) -> None:
    with ThreadPoolExecutor() as pool:
        ranks = Two(nixl_private_etcd, pool)
        ranks.driver.close()
        ranks.membership.leave()
        with pytest.raises(MemberLostError, match=r"rank 0 on .* of group 'two' "):
            ranks.serving.result(timeout=60)


@pytest.mark.long
def test_rank_0_names_a_lost_peer(nixl_private_etcd: PrivateEtcd) -> None:
    with ThreadPoolExecutor() as pool:
        ranks = Two(nixl_private_etcd, pool)
        worker = ranks.peer.start("agent", {}, 120)
        agent = NixlAgent.within(worker, backends=["UCX"])
        threading.Timer(0.2, ranks.other.leave).start()
        with pytest.raises(WorkerDiedError, match=r"rank 1 \(agent worker, pid \d+\) (has gone with|was ended)"):
            worker.call("serve", agent=agent.ref, timeout=60.0)
        with pytest.raises(MemberLostError, match=r"rank 1 on .* of group 'two' "):
            ranks.peer.ask("state", worker=1)
        ranks.driver.close()
        ranks.serving.exception(timeout=60)


@pytest.mark.parametrize("seal", [b"", b"0" * 64 + b" "])
def test_messages_without_a_valid_seal_neither_end_a_run_nor_answer_a_request(
    nixl_private_etcd: PrivateEtcd, seal: bytes
) -> None:
    start = {"ask": "start", "worker": 5, "role": "agent", "environment": {}}
    with two(nixl_private_etcd) as ranks:
        for number in (*range(40), 10**12 - 1):
            for mailbox, forged in (
                ("000001/000000", {"ask": "end", "number": number, **Ending(0, "all good").plain()}),
                ("000001/000000", {**start, "number": number}),
                ("000000/000001", {"answer": number, "result": 4242}),
                ("000000/000001", {"worker": number % 3, "ended": 0}),
            ):
                key = f"{ranks.membership.root}mail/{mailbox}/{number:012d}"
                nixl_private_etcd.client.put(key, seal + json.dumps(forged).encode())
        worker = ranks.peer.start("agent", {}, 120)
        assert worker.pid != 4242
        assert worker.versions
        assert worker.alive
        assert not ranks.serving.done()
        worker.close()
