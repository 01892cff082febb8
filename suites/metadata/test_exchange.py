# SPDX-License-Identifier: Apache-2.0
"""Do two agents exchange metadata, whole or in parts, and can they then transfer bytes?"""

from __future__ import annotations

import pytest

from pytest_nixl import Agents, Settings, free_ports, wait_until

from .moving import registered, write_and_compare
from .namespace import Namespace, complaint, knows, registration

LOOPBACK = "127.0.0.1"


@pytest.mark.nixl_check("metadata-by-etcd", level="quick")
@pytest.mark.nixl_early
def test_an_agent_finds_another_through_etcd(namespace: Namespace) -> None:
    """One agent publishes its metadata; another fetches it by name, and writes to the agent."""
    publisher, finder = namespace.start("publisher", "finder")
    target = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    write_and_compare(finder, publisher, target, namespace.seconds)


@pytest.mark.nixl_check("metadata-by-side-channel", level="quick")
@pytest.mark.nixl_early
def test_an_agent_finds_another_by_a_side_channel(agents: Agents, nixl_settings: Settings) -> None:
    """Metadata that the test itself passes on works without etcd."""
    writer, owner = agents.start_each(["writer", "owner"], progress_thread=None)
    target = registered(owner)
    metadata = owner.get_agent_metadata()
    with owner.polled():
        assert writer.add_remote_agent(metadata) == owner.name
    write_and_compare(writer, owner, target, nixl_settings.timeout)


@pytest.mark.nixl_check("metadata-by-listener")
@pytest.mark.nixl_early
def test_an_agent_sends_its_metadata_to_another_that_listens(agents: Agents, nixl_settings: Settings) -> None:
    """An agent sends its metadata to another agent's port, fetches the other's metadata, and removes its own."""
    seconds = nixl_settings.timeout
    port, ours = free_ports(2)
    listener = agents.start("listener", listen_thread=True, listen_port=port, progress_thread=None)
    caller = agents.start("caller", listen_thread=True, listen_port=ours, progress_thread=None)
    target, source = registered(listener), registered(caller)

    def remedy() -> str:
        written = complaint(caller) or complaint(listener) or "nothing"
        return f"check whether {LOOPBACK}:{port} can be reached; NIXL wrote: {written}"

    caller.send_local_metadata(LOOPBACK, port)
    with caller.polled():
        wait_until(
            lambda: knows(listener, caller, source),
            f"{listener.name} to load the metadata that arrived at port {port}",
            seconds=seconds,
            remedy=remedy,
        )
    caller.fetch_remote_metadata(listener.name, LOOPBACK, port)
    with listener.polled():
        wait_until(
            lambda: knows(caller, listener, target),
            f"{caller.name} to load the metadata that it fetched from port {port}",
            seconds=seconds,
            remedy=remedy,
        )
    write_and_compare(caller, listener, target, seconds)
    caller.invalidate_local_metadata(LOOPBACK, port)
    wait_until(
        lambda: not knows(listener, caller),
        f"{listener.name} to forget {caller.name}, which removed its metadata",
        seconds=seconds,
        remedy=remedy,
    )


@pytest.mark.nixl_check("metadata-in-parts-by-etcd")
@pytest.mark.nixl_early
def test_an_agent_finds_the_parts_that_another_published_under_labels(namespace: Namespace) -> None:
    """With connections under one label and memory under another, an agent that fetched both knows only that memory."""
    publisher, finder = namespace.start("publisher", "finder")
    shared, private = registered(publisher), registered(publisher)
    namespace.publish_part(publisher, "connections", connections=True)
    namespace.publish_part(publisher, "memory", shared, connections=False)
    assert namespace.labels(publisher) == ["connections", "memory"], "a part was also published under another label"
    namespace.find(finder, publisher, label="connections")
    assert not knows(finder, publisher, shared), f"{finder.name} knows memory whose metadata it has not fetched"
    namespace.find(finder, publisher, shared, label="memory")
    assert not knows(finder, publisher, private), f"{finder.name} knows memory that was not published"
    write_and_compare(finder, publisher, shared, namespace.seconds)


@pytest.mark.nixl_check("metadata-in-parts-by-side-channel")
@pytest.mark.nixl_early
def test_an_agent_learns_of_memory_by_and_by(agents: Agents, nixl_settings: Settings) -> None:
    """Parts that the test passes on add up: connections with the first memory, then only the second memory."""
    writer, owner = agents.start_each(["writer", "owner"], progress_thread=None)
    first, second = registered(owner), registered(owner)
    part = owner.get_partial_agent_metadata(registration(owner, first), True)
    with owner.polled():
        writer.add_remote_agent(part)
    assert knows(writer, owner, first), "the memory of the loaded part is unknown"
    assert not knows(writer, owner, second), "memory is known although its part was not loaded"
    writer.add_remote_agent(owner.get_partial_agent_metadata(registration(owner, second), False))
    write_and_compare(writer, owner, first, nixl_settings.timeout)
    write_and_compare(writer, owner, second, nixl_settings.timeout)


@pytest.mark.nixl_check("metadata-update")
@pytest.mark.nixl_early
def test_an_agent_publishes_again_what_has_changed(namespace: Namespace) -> None:
    """A second fetch finds additional memory; connections can be published without memory."""
    publisher, finder = namespace.start("publisher", "finder")
    first = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, first)
    second = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, first, second)
    namespace.publish_part(publisher, "connections", connections=True)
    namespace.find(finder, publisher, first, second, label="connections")
    namespace.await_fetches(finder)
    for memory in (first, second):
        write_and_compare(finder, publisher, memory, namespace.seconds)
