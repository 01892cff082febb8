# SPDX-License-Identifier: Apache-2.0
"""Do two agents learn of each other, whole or in parts, and can they then move bytes?"""

from __future__ import annotations

import pytest

from pytest_nixl import Agents, Settings, free_ports, wait_until

from .moving import registered, write_and_compare
from .namespace import Namespace, complaint, knows, registration

HERE = "127.0.0.1"


@pytest.mark.nixl_check("metadata-by-etcd")
def test_an_agent_finds_another_through_etcd(namespace: Namespace) -> None:
    """What one agent publishes, another fetches by name, and writes to."""
    publisher, finder = namespace.start("publisher", "finder")
    target = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    write_and_compare(finder, publisher, target, namespace.seconds)


@pytest.mark.nixl_check("metadata-by-side-channel")
def test_an_agent_finds_another_by_a_side_channel(agents: Agents, nixl_settings: Settings) -> None:
    """Metadata that is carried by hand serves as well: no etcd is needed."""
    writer, owner = agents.start_each(["writer", "owner"], progress_thread=None)
    target = registered(owner)
    assert writer.add_remote_agent(owner.get_agent_metadata()) == owner.name
    write_and_compare(writer, owner, target, nixl_settings.timeout)


@pytest.mark.nixl_check("metadata-by-listener")
def test_an_agent_sends_its_metadata_to_another_that_listens(agents: Agents, nixl_settings: Settings) -> None:
    """An agent sends its metadata to another one's port, asks there for the other's, and withdraws: with no etcd."""
    seconds = nixl_settings.timeout
    port, ours = free_ports(2)
    listener = agents.start("listener", listen_thread=True, listen_port=port, progress_thread=None)
    caller = agents.start("caller", listen_thread=True, listen_port=ours, progress_thread=None)
    target, source = registered(listener), registered(caller)

    def remedy() -> str:
        return f"see whether {HERE}:{port} can be reached; NIXL wrote: {complaint(caller) or complaint(listener)}"

    caller.send_local_metadata(HERE, port)
    wait_until(lambda: knows(listener, caller, source), f"{listener.name} to load what came at port {port}",
               seconds=seconds, remedy=remedy)  # fmt: skip
    caller.fetch_remote_metadata(listener.name, HERE, port)
    wait_until(lambda: knows(caller, listener, target), f"{caller.name} to load what it asked for at port {port}",
               seconds=seconds, remedy=remedy)  # fmt: skip
    write_and_compare(caller, listener, target, seconds)
    caller.invalidate_local_metadata(HERE, port)
    wait_until(lambda: not knows(listener, caller), f"{listener.name} to forget {caller.name}, which withdrew",
               seconds=seconds, remedy=remedy)  # fmt: skip


@pytest.mark.nixl_check("metadata-in-parts-by-etcd")
def test_an_agent_finds_the_parts_that_another_published_under_labels(namespace: Namespace) -> None:
    """Connections under one label, some memory under another: who fetched both reaches that memory and no other."""
    publisher, finder = namespace.start("publisher", "finder")
    shared, private = registered(publisher), registered(publisher)
    namespace.publish_part(publisher, "connections", connections=True)
    namespace.publish_part(publisher, "memory", shared, connections=False)
    assert namespace.labels(publisher) == ["connections", "memory"], "a part was published under another label too"
    namespace.find(finder, publisher, label="connections")
    assert not knows(finder, publisher, shared), f"{finder.name} knows memory of which it was told nothing"
    namespace.find(finder, publisher, shared, label="memory")
    assert not knows(finder, publisher, private), f"{finder.name} knows memory that was not published"
    write_and_compare(finder, publisher, shared, namespace.seconds)


@pytest.mark.nixl_check("metadata-in-parts-by-side-channel")
def test_an_agent_learns_of_memory_by_and_by(agents: Agents, nixl_settings: Settings) -> None:
    """Parts that are carried by hand add up: connections with the first memory, then the second memory alone."""
    writer, owner = agents.start_each(["writer", "owner"], progress_thread=None)
    first, second = registered(owner), registered(owner)
    writer.add_remote_agent(owner.get_partial_agent_metadata(registration(owner, first), True))
    assert knows(writer, owner, first), "the memory of the part that was loaded is not known"
    assert not knows(writer, owner, second), "memory is known of which no part was loaded"
    writer.add_remote_agent(owner.get_partial_agent_metadata(registration(owner, second), False))
    write_and_compare(writer, owner, first, nixl_settings.timeout)
    write_and_compare(writer, owner, second, nixl_settings.timeout)


@pytest.mark.nixl_check("metadata-update")
def test_an_agent_publishes_again_what_has_changed(namespace: Namespace) -> None:
    """More memory is found by fetching again; connections alone can be published without any of it."""
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
