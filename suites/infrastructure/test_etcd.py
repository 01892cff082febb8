# SPDX-License-Identifier: Apache-2.0
"""Does etcd answer?"""

from __future__ import annotations

import pytest

from pytest_nixl.etcd.fixtures import EtcdFixture


@pytest.mark.nixl_check("etcd-answers")
def test_etcd_answers(nixl_etcd: EtcdFixture) -> None:
    """A key that is written is read back, and deleted with its prefix."""
    nixl_etcd.client.put(nixl_etcd.prefix + "key", b"value")
    assert nixl_etcd.client.get(nixl_etcd.prefix + "key") == b"value"
    assert nixl_etcd.client.delete_prefix(nixl_etcd.prefix) == 1
