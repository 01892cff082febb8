# SPDX-License-Identifier: Apache-2.0
"""Does etcd answer, soon enough, and is it one that serves?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import EtcdFixture, Judgement


@pytest.mark.nixl_check("etcd-answers")
def test_etcd_answers(nixl_etcd: EtcdFixture) -> None:
    """A key that is written is read back, and deleted with its prefix."""
    nixl_etcd.client.put(nixl_etcd.prefix + "key", b"value")
    assert nixl_etcd.client.get(nixl_etcd.prefix + "key") == b"value"
    assert nixl_etcd.client.delete_prefix(nixl_etcd.prefix) == 1


@pytest.mark.nixl_check("etcd-version")
def test_etcd_is_new_enough(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The etcd is of 3.4 or newer."""
    verdict(ask_etcd("etcd-version"))


@pytest.mark.nixl_check("etcd-latency")
def test_etcd_answers_soon(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The etcd answers within a tenth of a second."""
    verdict(ask_etcd("etcd-latency"))


@pytest.mark.nixl_check("etcd-clock")
def test_the_clock_of_etcd_is_ours(ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The clocks of the etcd and of this host agree."""
    verdict(ask_etcd("etcd-clock"))
