# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the endpoints of the deployment, and the corpus of values with recorded results of real programs."""

from __future__ import annotations

import pytest

from pytest_nixl import Settings

from .corpus import Entry, load_corpus
from .deployment import Deployment, is_set_and_empty


@pytest.fixture
def deployment(request: pytest.FixtureRequest, nixl_settings: Settings) -> Deployment:
    """The endpoints that the deployment gives to NIXL; if it gives none, those of this run's etcd."""
    given = nixl_settings.etcd or is_set_and_empty(nixl_settings)
    return Deployment.of(nixl_settings, "" if given else request.getfixturevalue("nixl_etcd").endpoint)


@pytest.fixture
def corpus() -> tuple[Entry, ...]:
    """Every recorded value."""
    return load_corpus()
