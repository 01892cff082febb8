# SPDX-License-Identifier: Apache-2.0
"""Does etcd answer, fast enough, with a supported version and a correct clock?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import EtcdFixture, Judgement

from .conftest import OF_ETCD, check_parameters


@pytest.mark.nixl_check("etcd-answers", level="quick")
def test_etcd_answers(nixl_etcd: EtcdFixture) -> None:
    """A key is written, read back, and deleted with its prefix."""
    nixl_etcd.client.put(nixl_etcd.prefix + "key", b"value")
    assert nixl_etcd.client.get(nixl_etcd.prefix + "key") == b"value"
    assert nixl_etcd.client.delete_prefix(nixl_etcd.prefix) == 1


@pytest.mark.parametrize("check", check_parameters(OF_ETCD))
def test_etcd(check: str, ask_etcd: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A check of ``pytest-nixl doctor``, on the etcd of this run."""
    verdict(ask_etcd(check))
