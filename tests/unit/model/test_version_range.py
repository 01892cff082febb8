# SPDX-License-Identifier: Apache-2.0
"""Which versions a range accepts."""

from __future__ import annotations

import pytest

from pytest_nixl.model.expectation import VersionRange


@pytest.mark.parametrize(
    ("text", "version", "accepted"),
    [
        ("1.5", "1.5.1", True),
        ("1.5", "1.5", True),
        ("1.5", "1.50", False),
        ("1.5.0", "1.5", True),
        ("1.5.1", "1.5", False),
        ("2", "2.9.0+cu128", True),
        (">=1.18", "1.18", True),
        (">=1.18", "1.9", False),
        (">=1.18, <2", "1.22.0", True),
        (">=1.18,<2", "2.0", False),
        ("<2", "2.0.0", False),
        (">2", "2.0", False),
        (">2", "2.0.1", True),
        ("<= 2.1", "2.1.0", True),
        ("2.1", "2.1.0amzn3.0", True),
        ("1", "v1.2", True),
    ],
)
def test_range_accepts(text: str, version: str, accepted: bool) -> None:
    assert VersionRange.parse(text).accepts(version) is accepted


def test_a_range_is_read_into_its_bounds() -> None:
    bounds = ((">=", (1, 18)), ("<", (2,)), ("", (3, 0)))
    assert VersionRange.parse(" >= 1.18, <2,3.0 ") == VersionRange(">= 1.18, <2,3.0", bounds)


@pytest.mark.parametrize("text", ["", "latest", "==1", "1.", "1,", "~=1.2", ">=", "1.x"])
def test_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a version nor a bound"):
        VersionRange.parse(text)


def test_version_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'of no package' does not begin with a number"):
        VersionRange.parse("1").accepts("of no package")
