# SPDX-License-Identifier: Apache-2.0
"""Do transfers work without etcd, and how do agents react when etcd cannot be reached?"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import NixlAgent, NixlError, wait_until

from .moving import registered, write_and_compare
from .namespace import Namespace, comes_true, complaint, knows

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient
    from suites.conftest import FindingFixture

TRANSFERS = 25
#: The time for an agent to learn of a removal, in seconds. It takes some 10 ms, and on a busy machine 2 s.
NOTICED = 5.0


@pytest.mark.nixl_check("data-path-without-etcd")
@pytest.mark.nixl_early
def test_transfers_do_not_touch_etcd(namespace: Namespace, proxy_client: ProxyClient) -> None:
    """Transfers send no request through the proxy to etcd that both agents use, and continue while it is cut."""
    publisher, finder = namespace.reached_by(proxy_client.endpoint).start("publisher", "finder")
    target = registered(publisher)
    namespace.publish(publisher)
    namespace.find(finder, publisher, target)
    assert proxy_client.requests, "the agents found each other, but the proxy to etcd counted no request"
    namespace.await_watch(proxy_client, finder, publisher)  # it begins a moment after the metadata is loaded
    write_and_compare(finder, publisher, target, namespace.seconds)  # connects
    requests_before = len(proxy_client.requests)
    for _ in range(TRANSFERS):
        write_and_compare(finder, publisher, target, namespace.seconds)
    new_requests = proxy_client.requests[requests_before:]
    assert not new_requests, (
        f"{TRANSFERS} transfers made {len(new_requests)} requests to etcd: {', '.join(map(str, new_requests[:3]))}"
    )
    proxy_client.cut()
    for _ in range(TRANSFERS):
        write_and_compare(finder, publisher, target, namespace.seconds)


@pytest.mark.nixl_check("metadata-while-etcd-is-away")
@pytest.mark.nixl_early(waits=2)
def test_an_agent_is_told_that_nothing_was_published(
    namespace: Namespace, proxy_client: ProxyClient, finding: FindingFixture
) -> None:
    """Publishing is an error while etcd cannot be reached, and succeeds when etcd is back."""
    (publisher,) = namespace.reached_by(proxy_client.endpoint).start("publisher")
    namespace.publish(publisher)
    proxy_client.cut()
    registered(publisher)
    try:
        publisher.send_local_metadata()
    except NixlError as error:
        silent, description = False, f"raised an error: {error.reason}"
    else:
        # A request that still waits for etcd is no failure; it is one when NIXL logs that it gave up.
        silent = comes_true(lambda: bool(complaint(publisher)), seconds=NOTICED)
        description = f"returned like after a success; NIXL wrote {complaint(publisher) or 'nothing'}"
    proxy_client.restore()
    _publish_repeatedly(namespace, publisher)
    finding("NIXL-ETCD-SILENT-FAILURE", silent, f"with etcd cut off, send_local_metadata() {description}")


def fetch_after_cut(namespace: Namespace, proxy_client: ProxyClient) -> tuple[bool, str]:
    """Return whether fetches stay stuck after a fetch with etcd cut off, and what was seen."""
    (publisher,), (finder,) = namespace.start("publisher"), namespace.reached_by(proxy_client.endpoint).start("finder")
    namespace.publish(publisher)
    proxy_client.cut()
    finder.fetch_remote_metadata(publisher.name)
    wait_until(
        lambda: complaint(finder),
        f"{finder.worker.name} to log that it cannot fetch while it is cut off from etcd",
        seconds=namespace.seconds,
        remedy=lambda: "it has logged nothing: its request was answered before the cut, or its log has another form",
    )
    requests_before = len(proxy_client.requests)
    proxy_client.restore()

    def has_fetched() -> bool:
        finder.fetch_remote_metadata(publisher.name)
        return comes_true(lambda: knows(finder, publisher), seconds=0.5)

    back = comes_true(has_fetched, seconds=NOTICED)
    finder.worker.kill()  # it would not end otherwise
    return not back, (
        f"after a fetch with etcd cut off, fetches {'succeed again' if back else 'did not succeed'} with etcd back: "
        f"{len(proxy_client.requests) - requests_before} requests in {NOTICED:g} s; NIXL wrote: {complaint(finder)}"
    )


@pytest.mark.nixl_check("metadata-fetch-after-etcd-was-away")
@pytest.mark.nixl_early(waits=5)
def test_an_agent_fetches_again_when_etcd_is_back(
    namespace: Namespace, proxy_client: ProxyClient, finding: FindingFixture
) -> None:
    """A fetch fails while etcd cannot be reached, and the next fetch succeeds when etcd is back."""
    finding("NIXL-ETCD-FETCH-STUCK", *fetch_after_cut(namespace, proxy_client))


def withdraw_after_cut(namespace: Namespace, proxy_client: ProxyClient) -> tuple[bool, str]:
    """Return whether an agent that was cut off from etcd misses a removal, and what was seen."""
    (publisher,), (finder,) = namespace.start("publisher"), namespace.reached_by(proxy_client.endpoint).start("finder")
    namespace.publish(publisher)
    namespace.find(finder, publisher)
    namespace.await_watch(proxy_client, finder, publisher)
    proxy_client.cut()
    proxy_client.restore()
    _publish_repeatedly(
        namespace, finder
    )  # waits until it reaches etcd again, because an earlier fetch would never end
    publisher.invalidate_local_metadata()
    namespace.await_gone(publisher)
    forgotten = comes_true(lambda: not knows(finder, publisher), seconds=NOTICED)
    return not forgotten, (
        "etcd could not be reached for a moment, and the finder reaches it again; metadata that was removed since, it "
        + ("forgot" if forgotten else f"still has {NOTICED:g} s later")
    )


@pytest.mark.nixl_check("metadata-invalidation-after-etcd-was-away")
@pytest.mark.nixl_early(waits=5)
def test_what_is_withdrawn_after_etcd_was_away_is_forgotten(
    namespace: Namespace, proxy_client: ProxyClient, finding: FindingFixture
) -> None:
    """An agent whose connection to etcd was cut and restored still learns of removals."""
    finding("NIXL-ETCD-WATCH-LOST", *withdraw_after_cut(namespace, proxy_client))


def _publish_repeatedly(namespace: Namespace, agent: NixlAgent) -> None:
    """Publish until etcd has the key: NIXL tries only once, and its connection is not restored immediately."""
    metadata = agent.get_agent_metadata()

    def published() -> bool:
        with suppress(NixlError):  # a NIXL that reports a failure does so until its connection is back
            agent.send_local_metadata()
        return comes_true(lambda: namespace.client.get(namespace.key(agent)) == metadata, seconds=0.5)

    wait_until(
        published,
        f"{agent.worker.name} to publish again after etcd is back",
        seconds=namespace.seconds,
        remedy=lambda: (
            f"restart the agent: its etcd client does not reconnect; NIXL wrote: {complaint(agent) or 'nothing'}"
        ),
    )
