# SPDX-License-Identifier: Apache-2.0
"""Are the variables known, and not at odds with each other or with the machine?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("variables-known")
def test_every_variable_is_known(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every variable that looks like NIXL's, UCX's or libfabric's is one that they know."""
    verdict(ask("variables-known"))


@pytest.mark.nixl_check("transports-allowed")
def test_ucx_may_use_the_transports_of_this_host(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """UCX_TLS leaves UCX the transports that this host has."""
    verdict(ask("transports-allowed"))


@pytest.mark.nixl_check("devices-there")
def test_named_devices_are_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every network device is there that a variable names."""
    verdict(ask("devices-there"))


@pytest.mark.nixl_check("provider-there")
def test_the_named_provider_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The provider is there that FI_PROVIDER names."""
    verdict(ask("provider-there"))


@pytest.mark.nixl_check("namespace-plain")
def test_the_namespace_is_plain(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """NIXL_ETCD_NAMESPACE begins with a slash, and ends without."""
    verdict(ask("namespace-plain"))


@pytest.mark.nixl_check("variables-agree")
def test_variables_agree(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """No two variables contradict each other, and none this host."""
    verdict(ask("variables-agree"))
