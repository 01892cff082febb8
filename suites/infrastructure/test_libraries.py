# SPDX-License-Identifier: Apache-2.0
"""Are NIXL's libraries complete, and is each loaded only once?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("plugin-libraries", level="quick")
def test_nothing_is_missing_of_what_the_plugins_need(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """The host has every library and symbol version that the plugins of the requested backends need."""
    verdict(ask("plugin-libraries"))


@pytest.mark.nixl_check("libraries-once", level="quick")
def test_each_library_is_loaded_once(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """No process with NIXL has two copies of UCX, libfabric or another library."""
    verdict(ask("libraries-once"))


@pytest.mark.nixl_check("etcd-client-library", level="quick")
def test_nixl_has_its_client_library_of_etcd(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """NIXL was built with etcd, and loads its client library."""
    verdict(ask("etcd-client-library"))


@pytest.mark.nixl_check("etcd-client-patch", level="quick")
def test_the_client_library_takes_addresses_as_they_are(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """If the image has the patch that skips the validation of addresses, the library contains it."""
    verdict(ask("etcd-client-patch"))


@pytest.mark.nixl_check("nixlbench-starts", level="quick")
def test_nixlbench_starts(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """If nixlbench is installed, it starts."""
    verdict(ask("nixlbench-starts"))
