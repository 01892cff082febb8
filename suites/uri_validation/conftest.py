# SPDX-License-Identifier: Apache-2.0
"""The fixture with the endpoints of the deployment."""

from __future__ import annotations

import pytest

from pytest_nixl import Settings
from pytest_nixl.checks.endpoints.deployment import Deployment, is_set_and_empty


@pytest.fixture
def deployment(request: pytest.FixtureRequest, nixl_settings: Settings) -> Deployment:
    """The endpoints that the deployment gives to NIXL; if it gives none, those of this run's etcd."""
    endpoints = nixl_settings.etcd or is_set_and_empty(nixl_settings)
    return Deployment.of(nixl_settings, "" if endpoints else request.getfixturevalue("nixl_etcd").endpoint)
