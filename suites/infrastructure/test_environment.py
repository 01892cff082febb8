# SPDX-License-Identifier: Apache-2.0
"""Are the environment variables spelled correctly, and do they agree with each other and with this host?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("variables-known", level="quick")
def test_every_variable_is_known(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """NIXL, UCX and libfabric know every variable that starts with their prefix."""
    verdict(ask("variables-known"))


@pytest.mark.nixl_check("transports-allowed", level="quick")
def test_ucx_may_use_the_transports_of_this_host(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """UCX_TLS allows the transports that this host supports."""
    verdict(ask("transports-allowed"))


@pytest.mark.nixl_check("devices-there", level="quick")
def test_named_devices_are_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The host has every network device that a variable names."""
    verdict(ask("devices-there"))


@pytest.mark.nixl_check("provider-there", level="quick")
def test_the_named_provider_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """FI_PROVIDER names a provider that works on this host."""
    verdict(ask("provider-there"))


@pytest.mark.nixl_check("namespace-plain", level="quick")
def test_the_namespace_is_plain(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """NIXL_ETCD_NAMESPACE begins with a slash and ends without one."""
    verdict(ask("namespace-plain"))


@pytest.mark.nixl_check("variables-agree", level="quick")
def test_variables_agree(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The variables do not contradict each other or this host."""
    verdict(ask("variables-agree"))
