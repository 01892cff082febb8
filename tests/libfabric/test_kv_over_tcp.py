# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks with LIBFABRIC over TCP: every way, and ten thousand descriptors compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from helpers.namespaces import Host, one_host, require_tools
from test_real_libfabric import DRAM

from pytest_nixl.checks.kv_cache.blocks import KvLayout
from pytest_nixl.checks.kv_cache.link import KvLink, KvTraffic
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: 157 blocks of 64 tensors are 10,048 descriptors.
LAYOUT, BLOCKS = KvLayout(tensors=64, blocks=320, block_bytes=512), 157


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    require_tools()
    with one_host() as namespace:
        yield namespace


@pytest.fixture(autouse=True)
def tools() -> None:
    require_tools()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_ten_thousand_descriptors_are_verified_over_tcp(
    host: Host, make_settings: Callable[..., Settings], op: str
) -> None:
    settings = make_settings()
    first, other = (LocalHost(supervisor(), rank, host.prefix) for rank in range(2))
    pair = Launch((first, other), settings, BACKENDS["LIBFABRIC"], DRAM, LAYOUT.size, regions=LAYOUT.tensors)
    with closing(pair):
        samples = KvLink(pair, LAYOUT, op, settings.timeout).measure(KvTraffic(BLOCKS), duration=0.0, least=2)
    assert samples.corruption is None
    assert samples.descriptors == 10_048
    assert samples.transports == ("tcp/veth0",)
