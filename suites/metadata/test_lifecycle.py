# SPDX-License-Identifier: Apache-2.0
"""Do agents learn of other agents that start, remove their metadata, end, and restart?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Buffer, NixlAgent, NixlError, WorkerHungError, shake_hands

from .moving import registered, write_and_compare
from .namespace import Namespace, complaint, knows

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient
    from suites.conftest import FindingFixture

#: A fetch that takes this much longer than usual has waited for another agent's metadata (NIXL waits 5 s), in seconds.
HELD_UP = 2.0
#: The deadline of a call that waits for a handshake: so many times as long as the same took before, and at least so
#: many seconds. LIBFABRIC itself waits for 60 s.
_TIMES_AS_LONG, _HANDSHAKE_SECONDS = 10, 5.0
_SILENT = "NIXL wrote nothing"


@pytest.mark.nixl_check("metadata-invalidation")
@pytest.mark.nixl_early
def test_what_an_agent_withdraws_the_others_forget(
    namespace: Namespace, proxy_client: ProxyClient, agent_backend: str, finding: FindingFixture
) -> None:
    """After a removal, an agent that had fetched the metadata forgets the owner, and finds it after it publishes."""
    (publisher,), (finder,) = namespace.start("publisher"), namespace.reached_by(proxy_client.endpoint).start("finder")
    target = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    start = time.monotonic()
    if shake_hands([agent_backend]):
        write_and_compare(finder, publisher, target, namespace.seconds)
    usual = time.monotonic() - start
    namespace.await_watch(proxy_client, finder, publisher)
    publisher.invalidate_local_metadata()
    namespace.await_gone(publisher)
    namespace.await_forgotten(finder, publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    if not shake_hands([agent_backend]):
        write_and_compare(finder, publisher, target, namespace.seconds)
        return
    refused = _unreached_reason(namespace, finder, publisher, target, _handshake_deadline(usual))
    finding(
        "LIBFABRIC-NO-RECONNECT",
        bool(refused),
        f"{publisher.name} removed its metadata and published again, {finder.name} fetched it again, and a WRITE to it "
        + (f"failed: {refused}" if refused else "arrived"),
    )


@pytest.mark.nixl_check("metadata-of-a-later-agent")
@pytest.mark.nixl_early
def test_an_agent_is_found_that_publishes_after_it_was_looked_for(
    namespace: Namespace, proxy_client: ProxyClient
) -> None:
    """A fetch before the agent publishes watches for its key, and loads the metadata when it is published."""
    publisher, finder = namespace.reached_by(proxy_client.endpoint).start("publisher", "finder")
    target = registered(publisher)
    finder.fetch_remote_metadata(publisher.name)
    namespace.await_watch(proxy_client, finder, publisher, "metadata", "which is not there yet")
    namespace.publish(publisher)
    namespace.await_loaded(finder, publisher, target)
    write_and_compare(finder, publisher, target, namespace.seconds)


def fetch_behind_missing(namespace: Namespace) -> tuple[bool, str]:
    """Return whether a fetch of a missing agent delays the next fetch, and what was seen."""
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
    return held_up > usual + HELD_UP, (
        f"an agent with metadata in etcd was found {held_up:.1f} s after a fetch of a missing agent, and in "
        f"{usual:.1f} s without such a fetch"
    )


@pytest.mark.nixl_check("metadata-fetches-in-turn")
@pytest.mark.nixl_early(waits=5)
def test_a_fetch_of_a_missing_agent_does_not_delay_the_next(namespace: Namespace, finding: FindingFixture) -> None:
    """A fetch of a missing agent does not delay the next fetch, and finds the missing agent when it publishes."""
    finding("NIXL-ETCD-SERIAL-FETCH", *fetch_behind_missing(namespace))


@pytest.mark.nixl_check("metadata-of-a-dead-agent")
@pytest.mark.nixl_early
def test_an_agent_that_has_ended_is_not_published_any_more(
    namespace: Namespace, agent_backend: str, finding: FindingFixture
) -> None:
    """The metadata of a killed or deleted agent is removed from etcd, or has a lease that will end."""
    killed, finder = namespace.start("killed", "finder")
    deleted, living = finder.beside("deleted"), finder.beside("living")
    namespace.publish(living)
    usual = _seconds_to_find(namespace, finder, living)
    for agent in (killed, deleted):
        registered(agent)
        namespace.publish(agent)
    killed.worker.kill()
    deleted.delete()
    stale = [agent.name for agent in (killed, deleted) if namespace.client.lease_of(namespace.key(agent)) == 0]
    finder.fetch_remote_metadata(killed.name)
    if shake_hands([agent_backend]):
        finder.worker.timeout = _handshake_deadline(usual)
    try:
        namespace.await_fetches(finder)
        loaded = "loads it" if knows(finder, killed) else f"cannot load it: {complaint(finder) or _SILENT}"
    except WorkerHungError:
        # LIBFABRIC repeats its handshake to the dead agent, and holds the agent's lock (ai-dynamo/nixl#2196).
        if not shake_hands([agent_backend]):
            raise
        loaded = f"does not answer within {finder.worker.timeout:.1f} s, and found a living one in {usual:.1f} s"
    finding(
        "NIXL-ETCD-STALE-KEY",
        bool(stale),
        f"the metadata of {' and '.join(stale) or 'neither'} is still in etcd without a lease; an agent that fetches "
        f"that of the killed agent {loaded}",
    )


@pytest.mark.nixl_check("metadata-of-a-restarted-agent")
@pytest.mark.nixl_early
def test_an_agent_that_was_restarted_is_found_by_those_who_knew_it(
    namespace: Namespace, finding: FindingFixture
) -> None:
    """An agent that fetches the successor of the same name reaches it, at the latest after remove_remote_agent."""
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
    reason = complaint(finder)
    refused = bool(_unreached_reason(namespace, finder, after, target))
    if refused:
        finder.remove_remote_agent(after.name)
        namespace.find(finder, after, target)
        write_and_compare(finder, after, target, namespace.seconds)
    finding(
        "NIXL-ETCD-RESTART-REFUSED",
        refused,
        f"after a second fetch the finder still had the dead agent, and reached the new one only after "
        f"remove_remote_agent: {reason or _SILENT}"
        if refused
        else "the finder reached the restarted agent after fetching it again",
    )


@pytest.mark.nixl_check("metadata-of-one-name-twice")
@pytest.mark.nixl_early
def test_two_agents_of_one_name_are_kept_apart_or_refused(namespace: Namespace, finding: FindingFixture) -> None:
    """The second agent to publish gets an error. Otherwise it replaces the first agent's metadata, and the first agent
    removes the second's.
    """
    first, second = namespace.start("twin", "twin")
    namespace.publish(first)
    try:
        second.send_local_metadata()
    except NixlError as error:
        finding("NIXL-ETCD-DUPLICATE-NAME", False, f"the second agent got an error: {error.reason}")
        return
    namespace.await_key(second, "metadata", second.get_agent_metadata())
    first.invalidate_local_metadata()
    namespace.await_gone(first)
    finding(
        "NIXL-ETCD-DUPLICATE-NAME",
        True,
        "the second agent's metadata replaced the first agent's without an error, and when the first agent removed its "
        "metadata, that of the second was removed from etcd",
    )


@pytest.mark.nixl_check("metadata-of-deregistered-memory")
@pytest.mark.nixl_early
def test_deregistered_memory_is_forgotten_by_who_fetches_again(namespace: Namespace, finding: FindingFixture) -> None:
    """An agent that fetches the owner's new metadata forgets the memory, at the latest after remove_remote_agent."""
    publisher, finder = namespace.start("publisher", "finder")
    kept_memory, given_away = registered(publisher), publisher.allocate_asked(1 << 16)
    registration = publisher.register(given_away)
    namespace.publish(publisher)
    namespace.find(finder, publisher, kept_memory, given_away)
    publisher.deregister_memory(registration)
    namespace.publish(publisher)
    namespace.find(finder, publisher, kept_memory)
    namespace.await_fetches(finder)
    still_known = knows(finder, publisher, given_away)
    finder.remove_remote_agent(publisher.name)
    namespace.find(finder, publisher, kept_memory)
    assert not knows(finder, publisher, given_away), (
        "memory that is not published is still known after remove_remote_agent"
    )
    finding(
        "NIXL-DEREGISTERED-KNOWN",
        still_known,
        f"after its owner deregistered it and published again, and the finder fetched again, the memory is "
        f"{'known' if still_known else 'unknown'} to the finder",
    )


def _seconds_to_find(namespace: Namespace, finder: NixlAgent, owner: NixlAgent) -> float:
    started = time.monotonic()
    namespace.find(finder, owner)
    return time.monotonic() - started


def _handshake_deadline(usual: float) -> float:
    """Return for how many seconds to wait for a handshake.

    :param usual: how long a call that includes one took just before, on this host with its load.
    """
    return max(_HANDSHAKE_SECONDS, _TIMES_AS_LONG * usual)


def _unreached_reason(
    namespace: Namespace, writer: NixlAgent, owner: NixlAgent, target: Buffer, handshake_seconds: float | None = None
) -> str:
    """Return why bytes do not reach an agent that was found again; empty if they do.

    :param handshake_seconds: a writer that does not answer for so long waits for a handshake, and is ended; None: a
        worker's own deadline applies, and a late answer is an error.
    """
    writer.worker.timeout = handshake_seconds or writer.worker.timeout
    try:
        write_and_compare(writer, owner, target, namespace.seconds)
    except WorkerHungError:
        if handshake_seconds is None:
            raise
        return f"the call did not return within {handshake_seconds:.1f} s"
    except NixlError as error:
        return error.reason
    return ""
