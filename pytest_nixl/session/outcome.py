# SPDX-License-Identifier: Apache-2.0
"""End a test as its verdict demands: pass, warn, skip or fail."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.model.verdicts import Judgement, Outcome, outcome

if TYPE_CHECKING:
    from pytest_nixl.judge.profiles import Profile

#: The judgement of a test, on its item, for the report and the gate.
JUDGEMENT = pytest.StashKey[Judgement]()


class NixlWarning(UserWarning):
    """A verdict that does not fail a test without ``--nixl-gate``, but that a person should read."""


def check_of(item: pytest.Item) -> str | None:
    """Return the id of the check that a test makes, from its marker ``nixl_check``; None: it makes none."""
    marker = item.get_closest_marker("nixl_check")
    return str(marker.args[0]) if marker is not None and marker.args else None


def is_own(item: pytest.Item) -> bool:
    """Whether a test checks pytest-nixl itself (``own=True`` in its marker). A missed deadline does not fail it."""
    marker = item.get_closest_marker("nixl_check")
    return marker is not None and bool(marker.kwargs.get("own"))


def conclude(item: pytest.Item, judgement: Judgement, profile: Profile, *, gate: bool) -> None:
    """Pass, warn, skip or fail the running test by its verdict; return only if the test passes.

    :param gate: whether ``--nixl-gate`` is given.
    """
    item.stash[JUDGEMENT] = judgement
    required = check_of(item) in profile.required
    result = outcome(judgement.verdict, gate=gate, required=required)
    if result is Outcome.FAIL:
        pytest.fail(str(judgement), pytrace=False)
    if result is Outcome.SKIP:
        pytest.skip(judgement.reason)
    if result is Outcome.WARN:
        warnings.warn(NixlWarning(str(judgement)), stacklevel=2)
