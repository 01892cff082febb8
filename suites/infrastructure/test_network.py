# SPDX-License-Identifier: Apache-2.0
"""Do interfaces, addresses and host names let the hosts reach each other?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("nics-up", level="quick")
def test_interfaces_are_up(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every interface that carries traffic is up."""
    verdict(ask("nics-up"))


@pytest.mark.nixl_check("nic-rate", level="quick")
def test_interfaces_have_the_rate_of_the_profile(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """No interface is slower than the profile says."""
    verdict(ask("nic-rate"))


@pytest.mark.nixl_check("mtu", level="quick")
def test_interfaces_of_one_kind_have_one_mtu(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """Interfaces of one kind have the same MTU."""
    verdict(ask("mtu"))


@pytest.mark.nixl_check("link-local", level="quick")
def test_agents_give_no_link_local_address(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """UCX agents advertise no address of 169.254.0.0/16."""
    verdict(ask("link-local"))


@pytest.mark.nixl_check("names-resolve", level="quick")
def test_names_resolve(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The host names in etcd's addresses resolve, also in a pod with hostNetwork."""
    verdict(ask("names-resolve"))


@pytest.mark.nixl_check("peer-reachable", level="quick")
def test_peers_are_reached(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The host reaches every other host."""
    verdict(ask("peer-reachable"))
