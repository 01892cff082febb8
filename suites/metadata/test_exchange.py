# SPDX-License-Identifier: Apache-2.0
"""Do two agents learn of each other, and can they then move bytes?"""

from __future__ import annotations

import pytest

from pytest_nixl.agent import Buffer, NixlAgent
from pytest_nixl.etcd.fixtures import EtcdFixture
from pytest_nixl.settings import Settings
from pytest_nixl.waiting import wait_until

SIZE = 64 << 10


@pytest.mark.nixl_check("metadata-by-etcd")
def test_an_agent_finds_another_through_etcd(
    etcd_agents: tuple[NixlAgent, NixlAgent], nixl_etcd: EtcdFixture, nixl_settings: Settings
) -> None:
    """What one agent publishes, another fetches by name, and writes to."""
    publisher, finder = etcd_agents
    target = _registered(publisher)
    publisher.send_local_metadata()
    key = f"{nixl_etcd.prefix}{publisher.name}/metadata"
    wait_until(
        lambda: nixl_etcd.client.get(key),
        f"{publisher.worker.name} to publish its metadata under {key}: NIXL reported no error to Python",
        seconds=nixl_settings.timeout,
        remedy=lambda: f"read what NIXL wrote: {_complaint(publisher) or 'nothing'}",
    )
    finder.fetch_remote_metadata(publisher.name)
    wait_until(
        lambda: finder.check_remote_metadata(publisher.name),
        f"{finder.worker.name} to load the metadata of {publisher.name} that is in etcd under {key}",
        seconds=nixl_settings.timeout,
        remedy=lambda: "compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both, slash for slash",
    )
    _write_and_compare(finder, publisher, target, nixl_settings.timeout)


@pytest.mark.nixl_check("metadata-by-side-channel")
def test_an_agent_finds_another_by_a_side_channel(nixl_agent: NixlAgent, nixl_settings: Settings) -> None:
    """Metadata that is carried by hand serves as well: no etcd is needed."""
    other = nixl_agent.another()
    target = _registered(other)
    assert nixl_agent.add_remote_agent(other.get_agent_metadata()) == other.name
    _write_and_compare(nixl_agent, other, target, nixl_settings.timeout)


def _registered(agent: NixlAgent) -> Buffer:
    buffer = agent.allocate(SIZE)
    agent.register(buffer)
    return buffer


def _write_and_compare(writer: NixlAgent, owner: NixlAgent, target: Buffer, seconds: float) -> None:
    source = _registered(writer)
    source.fill(seed=1).result()
    target.fill(seed=1, inverted=True).result()
    local = writer.get_xfer_descs([source.descriptor()], "DRAM")
    remote = writer.get_xfer_descs([target.descriptor()], "DRAM")
    handle = writer.initialize_xfer("WRITE", local, remote, owner.name, b"written")
    state = writer.transfer(handle)
    wait_until(
        lambda: state == "DONE" or writer.check_xfer_state(handle) == "DONE",
        f"a WRITE of {SIZE} bytes from {writer.name} to {owner.name}",
        seconds=seconds,
    )
    wait_until(
        lambda: b"written" in [message for messages in owner.update_notifs().values() for message in messages],
        f"the notification of that WRITE at {owner.name}",
        seconds=seconds,
    )
    wrong = target.compare(seed=1)
    assert wrong is None, f"the bytes that arrived at {owner.name} are not those that were sent: {wrong}"


def _complaint(agent: NixlAgent) -> str:
    """The last line of a worker that speaks of etcd."""
    lines = [line for line in agent.worker.output().splitlines() if "etcd" in line.lower()]
    return lines[-1] if lines else ""
