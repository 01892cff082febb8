# SPDX-License-Identifier: Apache-2.0
"""``-p helpers.long_leases``: a run of several ranks whose leases a busy machine need not refresh soon. A double.

A rank that gets no processor for the usual seconds of a lease is lost, which is right, and fails a healthy run.
"""

from __future__ import annotations

from functools import partial

import pytest

#: Seconds of the lease of a rank.
LEASE = 120


def pytest_configure() -> None:
    """Replace how a rank joins its group."""
    from pytest_nixl.cluster.joining import join

    pytest.MonkeyPatch().setattr("pytest_nixl.cluster.rank_session.join", partial(join, ttl=LEASE))
