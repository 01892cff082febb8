# SPDX-License-Identifier: Apache-2.0
"""Does etcd answer, fast enough, with a supported version and a correct clock?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import EtcdFixture, Judgement


@pytest.mark.nixl_check("etcd-answers", level="quick")
def test_etcd_answers(nixl_etcd: EtcdFixture) -> None:
    """A key is written, read back, and deleted with its prefix."""
    nixl_etcd.client.put(nixl_etcd.prefix + "key", b"value")
    assert nixl_etcd.client.get(nixl_etcd.prefix + "key") == b"value"
    assert nixl_etcd.client.delete_prefix(nixl_etcd.prefix) == 1


@pytest.mark.nixl_check("etcd-version", level="quick")
def test_etcd_is_new_enough(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The version of etcd is 3.4 or newer."""
    verdict(ask_etcd("etcd-version"))


@pytest.mark.nixl_check("etcd-latency", level="quick")
def test_etcd_answers_soon(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Etcd answers within a tenth of a second."""
    verdict(ask_etcd("etcd-latency"))


@pytest.mark.nixl_check("etcd-clock", level="quick")
def test_the_clock_of_etcd_is_ours(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The clocks of etcd's host and of this host agree."""
    verdict(ask_etcd("etcd-clock"))
