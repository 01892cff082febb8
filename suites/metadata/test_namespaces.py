# SPDX-License-Identifier: Apache-2.0
"""Do namespaces separate deployments, and do all agents of one deployment use the same namespace?"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Agents, EtcdFixture, Judgement, NotApplicableError, PrivateEtcd, Settings, Verdict
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import judge_published

from .moving import registered, write_and_compare
from .namespace import DEFAULT, DOCUMENTED, Namespace

if TYPE_CHECKING:
    from suites.conftest import FindingFixture


@pytest.mark.nixl_check("metadata-namespaces-apart")
@pytest.mark.nixl_early
def test_agents_of_one_name_in_two_namespaces_do_not_meet(namespace: Namespace) -> None:
    """Each finder reaches the agent in its own namespace, although the other namespace has one of the same name."""
    both = [namespace.part("one"), namespace.part("two")]
    owners = [owner for part in both for owner in part.start("same")]
    targets = [registered(owner) for owner in owners]
    for part, owner in zip(both, owners, strict=True):
        part.publish(owner)
    for part, owner, target in zip(both, owners, targets, strict=True):
        (finder,) = part.start("finder")
        part.find(finder, owner, target)
        # The bytes are compared in this namespace's worker. The other worker would not have received them.
        write_and_compare(finder, owner, target, part.seconds)
    owners[0].invalidate_local_metadata()
    both[0].await_gone(owners[0])
    assert both[1].labels(owners[1]) == ["metadata"], (
        "metadata that was removed in one namespace is also missing in the other"
    )


@pytest.mark.nixl_check("metadata-default-namespace")
@pytest.mark.nixl_early
def test_the_default_namespace_is_the_documented_one(
    nixl_private_etcd: PrivateEtcd, agents: Agents, nixl_settings: Settings, finding: FindingFixture
) -> None:
    """An agent without NIXL_ETCD_NAMESPACE and one with the documented default publish under the same prefix."""
    server = nixl_private_etcd
    unset, documented = (
        Namespace(agents, server.client, server.endpoint, name, nixl_settings.timeout) for name in (None, DOCUMENTED)
    )
    (unset_agent,), (documented_agent,) = unset.start("one"), documented.start("other")
    documented.publish(documented_agent)
    unset.publish_anywhere(unset_agent)
    finding(
        "NIXL-ETCD-NAMESPACE-SLASH",
        server.client.get(documented.key(unset_agent)) is None,
        f"in etcd are {', '.join(sorted(server.client.get_prefix('/')))}",
    )


@pytest.mark.nixl_check("metadata-by-several-endpoints")
@pytest.mark.nixl_early
def test_agents_meet_through_a_list_of_endpoints_of_which_one_is_dead(namespace: Namespace) -> None:
    """NIXL uses the member that answers, although the first one in the list does not."""
    with socket.socket() as nobody:
        nobody.bind(
            ("127.0.0.1", 0)
        )  # bound but not listening: connections are refused, and no other process can use the port
        listed = namespace.reached_by(f"http://127.0.0.1:{nobody.getsockname()[1]},{namespace.endpoint}")
        publisher, finder = listed.start("publisher", "finder")
        target = registered(publisher)
        listed.publish(publisher)
        listed.find(finder, publisher, target)
        write_and_compare(finder, publisher, target, listed.seconds)


@pytest.mark.nixl_check("namespace-well-formed")
def test_the_namespace_of_this_deployment_cannot_split_it(verdict: Callable[[Judgement], None]) -> None:
    """NIXL_ETCD_NAMESPACE is not set, or set to a value that cannot be confused with the default."""
    verdict(judge_namespace(os.environ.get("NIXL_ETCD_NAMESPACE")))


@pytest.mark.nixl_check("namespace-keys")
def test_the_keys_in_the_etcd_of_this_deployment_are_sound(
    nixl_settings: Settings, nixl_etcd: EtcdFixture, verdict: Callable[[Judgement], None]
) -> None:
    """The deployment's etcd has no split namespace, no agent twice, and no metadata that is oversize or unusable."""
    if nixl_etcd.server.kind != "external" or not nixl_settings.etcd or nixl_settings.etcd_listen:
        raise NotApplicableError("this run has an etcd of its own: --nixl-etcd names no etcd of a deployment")
    # Agents of this run publish under other namespaces, so that what is read here is the deployment's alone.
    name = os.environ.get("NIXL_ETCD_NAMESPACE", DEFAULT)
    if not name.strip("/"):
        raise NotApplicableError(
            f"NIXL_ETCD_NAMESPACE={name!r} names no namespace, so the keys of agents cannot be told from others",
            "set NIXL_ETCD_NAMESPACE to a name that begins with a slash, or unset it",
        )
    namespace = NamespaceName(name)
    verdict(judge_published(nixl_etcd.client, namespace, nixl_etcd.endpoint))


def judge_namespace(name: str | None) -> Judgement:
    """Return the verdict on a deployment's NIXL_ETCD_NAMESPACE; None means that it is not set."""
    if name is None:
        return Judgement(Verdict.PASS, f"NIXL_ETCD_NAMESPACE is not set: agents publish under {DEFAULT}/<agent>/")
    if name.rstrip("/") == DOCUMENTED and name != DEFAULT:
        reason = (
            f"NIXL_ETCD_NAMESPACE={name}: agents publish under {name}/<agent>/, but agents without the variable under "
            f"{DEFAULT}/<agent>/, so they never find each other, although NIXL's documentation calls both the same"
        )
        return Judgement(Verdict.WARN, reason, "set NIXL_ETCD_NAMESPACE for every agent of the deployment, or for none")
    if not name.startswith("/"):
        reason = f"NIXL_ETCD_NAMESPACE={name!r} does not begin with a slash: keys are {name}/<agent>/"
        remedy = f"set NIXL_ETCD_NAMESPACE=/{name}" if name else "unset NIXL_ETCD_NAMESPACE"
        return Judgement(Verdict.WARN, reason, f"{remedy}: tools and roles that know NIXL's keys expect a slash")
    return Judgement(Verdict.PASS, f"agents publish under {name}/<agent>/")
