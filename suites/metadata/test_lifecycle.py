# SPDX-License-Identifier: Apache-2.0
"""What do agents learn of others that come, withdraw, end, and come back?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Buffer, NixlAgent, NixlError, WorkerHungError, shake_hands

from .moving import registered, write_and_compare
from .namespace import Namespace, comes_true, complaint, knows

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient
    from suites.conftest import FindingFixture

#: How much later than usual, in seconds, metadata is that had to wait for another agent's: NIXL waits 5 s.
HELD_UP = 2.0
#: How long, in seconds, what takes some hundredths of a second is given where not to happen is an answer too.
NOTICED = 5.0
#: How long, in seconds, a first WRITE to an agent may take that was forgotten and found again.
RECONNECTED = 20.0


@pytest.mark.nixl_check("metadata-invalidation")
def test_what_an_agent_withdraws_the_others_forget(
    namespace: Namespace, way: ProxyClient, agent_backend: str, finding: FindingFixture
) -> None:
    """The keys go from etcd, who had fetched them forgets the agent, and finds it when it publishes again."""
    (publisher,), (finder,) = namespace.start("publisher"), namespace.reached_by(way.endpoint).start("finder")
    target = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    namespace.await_watch(way, finder, publisher)
    publisher.invalidate_local_metadata()
    namespace.await_gone(publisher)
    namespace.await_forgotten(finder, publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    if not shake_hands([agent_backend]):
        write_and_compare(finder, publisher, target, namespace.seconds)
        return
    refused = _why_not_reached_again(namespace, finder, publisher, target)
    finding(
        "LIBFABRIC-NO-RECONNECT",
        bool(refused),
        f"{publisher.name} withdrew and published again, {finder.name} fetched it again, and a WRITE to it "
        + (f"came to nothing: {refused}" if refused else "arrived"),
    )


@pytest.mark.nixl_check("metadata-of-a-later-agent")
def test_an_agent_is_found_that_publishes_after_it_was_looked_for(namespace: Namespace, way: ProxyClient) -> None:
    """A fetch that comes before the agent watches for its key, and loads it when it is there."""
    publisher, finder = namespace.reached_by(way.endpoint).start("publisher", "finder")
    target = registered(publisher)
    finder.fetch_remote_metadata(publisher.name)
    namespace.await_search(way, finder, publisher)
    namespace.publish(publisher)
    namespace.await_found(finder, publisher, target)
    write_and_compare(finder, publisher, target, namespace.seconds)


@pytest.mark.nixl_check("metadata-fetches-in-turn")
def test_a_fetch_of_a_missing_agent_does_not_delay_the_next(namespace: Namespace, finding: FindingFixture) -> None:
    """Who fetches an agent that is not there finds the next one at once, and the missing one when it has come."""
    publisher, finder = namespace.start("publisher", "finder")
    present, missing = publisher.beside("present"), publisher.beside("missing")
    namespace.publish(publisher)
    namespace.publish(present)
    usual = _seconds_to_find(namespace, finder, publisher)
    finder.fetch_remote_metadata(missing.name)
    held_up = _seconds_to_find(namespace, finder, present)
    namespace.await_fetches(finder)
    namespace.publish(missing)
    namespace.find(finder, missing)
    finding(
        "NIXL-ETCD-SERIAL-FETCH",
        held_up > usual + HELD_UP,
        f"an agent whose metadata was in etcd was found after {held_up:.1f} s behind a fetch of one that was not, and "
        f"after {usual:.1f} s without",
    )


@pytest.mark.nixl_check("metadata-of-a-dead-agent")
def test_an_agent_that_has_ended_is_not_published_any_more(
    namespace: Namespace, agent_backend: str, finding: FindingFixture
) -> None:
    """The metadata of an agent that was killed, or deleted, is gone from etcd, or has a lease and will go."""
    killed, finder = namespace.start("killed", "finder")
    deleted = finder.beside("deleted")
    for agent in (killed, deleted):
        registered(agent)
        namespace.publish(agent)
    killed.worker.kill()
    deleted.delete()
    stale = [agent.name for agent in (killed, deleted) if namespace.client.lease_of(namespace.key(agent)) == 0]
    finder.fetch_remote_metadata(killed.name)
    if shake_hands([agent_backend]):
        finder.worker.timeout = RECONNECTED
    try:
        namespace.await_fetches(finder)
        loaded = "loads it all the same" if knows(finder, killed) else f"cannot load it: {complaint(finder)}"
    except WorkerHungError:
        # LIBFABRIC sends its handshake to the dead again and again, and holds the agent's lock (ai-dynamo/nixl#2196).
        if not shake_hands([agent_backend]):
            raise
        loaded = f"does not answer any more: not within {RECONNECTED:g} s"
    finding(
        "NIXL-ETCD-STALE-KEY",
        bool(stale),
        f"the metadata of {' and '.join(stale) or 'neither'} is still there and has no lease; who fetches that of the "
        f"killed one {loaded}",
    )


@pytest.mark.nixl_check("metadata-of-a-restarted-agent")
def test_an_agent_that_was_restarted_is_found_by_those_who_knew_it(
    namespace: Namespace, finding: FindingFixture
) -> None:
    """Who fetches its successor of the same name reaches that one, at the latest after removing the first."""
    before, finder = namespace.start("restarted", "finder")
    registered(before)
    namespace.publish(before)
    namespace.find(finder, before)
    before.worker.kill()
    (after,) = namespace.start("restarted")
    target = registered(after)
    namespace.publish(after)
    finder.fetch_remote_metadata(after.name)
    namespace.await_fetches(finder)
    why = complaint(finder)
    refused = not _reaches(namespace, finder, after, target)
    if refused:
        finder.remove_remote_agent(after.name)
        namespace.find(finder, after, target)
        write_and_compare(finder, after, target, namespace.seconds)
    finding(
        "NIXL-ETCD-RESTART-REFUSED",
        refused,
        f"the second fetch left it with the dead agent, and one after remove_remote_agent reached the new one: {why}"
        if refused
        else "who knew the agent reached its successor after fetching it again",
    )


@pytest.mark.nixl_check("metadata-of-one-name-twice")
def test_two_agents_of_one_name_are_kept_apart_or_refused(namespace: Namespace, finding: FindingFixture) -> None:
    """The second one to publish replaces the first's metadata, and the first withdraws the second's: or it is told."""
    first, second = namespace.start("twin", "twin")
    namespace.publish(first)
    try:
        second.send_local_metadata()
    except NixlError as error:
        finding("NIXL-ETCD-DUPLICATE-NAME", False, f"the second agent was told: {error.reason}")
        return
    key, metadata = namespace.key(second), second.get_agent_metadata()
    replaced = comes_true(lambda: namespace.client.get(key) == metadata, seconds=NOTICED)
    assert replaced, f"the second agent's metadata is not under {key}, and it was told of nothing: {complaint(second)}"
    first.invalidate_local_metadata()
    namespace.await_gone(first)
    finding(
        "NIXL-ETCD-DUPLICATE-NAME",
        True,
        "the second agent's metadata replaced the first one's with no error at either, and when the first withdrew, "
        "the second was gone from etcd",
    )


@pytest.mark.nixl_check("metadata-of-deregistered-memory")
def test_deregistered_memory_is_forgotten_by_who_fetches_again(namespace: Namespace, finding: FindingFixture) -> None:
    """Who fetches anew what an agent published since does not know it, at the latest after removing the agent."""
    publisher, finder = namespace.start("publisher", "finder")
    kept, given_away = registered(publisher), publisher.allocate_asked(1 << 16)
    registration = publisher.register(given_away)
    namespace.publish(publisher)
    namespace.find(finder, publisher, kept, given_away)
    publisher.deregister_memory(registration)
    namespace.publish(publisher)
    namespace.find(finder, publisher, kept)
    namespace.await_fetches(finder)
    still_known = knows(finder, publisher, given_away)
    finder.remove_remote_agent(publisher.name)
    namespace.find(finder, publisher, kept)
    assert not knows(finder, publisher, given_away), "memory that is not published is known after remove_remote_agent"
    finding(
        "NIXL-DEREGISTERED-KNOWN",
        still_known,
        f"after its owner deregistered it and published anew, fetching again left it "
        f"{'known' if still_known else 'unknown'} to the finder",
    )


def _seconds_to_find(namespace: Namespace, finder: NixlAgent, owner: NixlAgent) -> float:
    started = time.monotonic()
    namespace.find(finder, owner)
    return time.monotonic() - started


def _why_not_reached_again(namespace: Namespace, writer: NixlAgent, owner: NixlAgent, target: Buffer) -> str:
    """Return why bytes do not reach an agent that was forgotten once; empty: they do.

    Who does not answer for :data:`RECONNECTED` waits for a handshake, and is ended.
    """
    writer.worker.timeout = RECONNECTED
    try:
        write_and_compare(writer, owner, target, namespace.seconds)
    except WorkerHungError:
        return f"the call did not return within {RECONNECTED:g} s"
    except NixlError as error:
        return error.reason
    return ""


def _reaches(namespace: Namespace, writer: NixlAgent, owner: NixlAgent, target: Buffer) -> bool:
    """Whether bytes can be written to memory of another agent, as far as NIXL's errors tell."""
    try:
        write_and_compare(writer, owner, target, namespace.seconds)
    except NixlError:
        return False
    return True
