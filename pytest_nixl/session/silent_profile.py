# SPDX-License-Identifier: Apache-2.0
"""A profile that expects nothing of any row: it says so, and no gate judges rows by it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_nixl.judge.profiles import Profile
from pytest_nixl.session.run import row_of


def silence(profile: Profile) -> str:
    """Say that a profile expects nothing, and how to learn one that does; empty: it expects something."""
    if profile.expectations:
        return ""
    return (
        f"the profile {profile.name!r} has no [[expect]]: it knows the machine and expects nothing of a row, so "
        f"that every row is NO-EXPECTATION; {how_to_learn(profile.name)}"
    )


def how_to_learn(name: str) -> str:
    """The commands that make a profile from runs on a machine that is known to be good."""
    file = f"{name}-learned"
    return (
        "learn one from three runs on machines that are known to be good, each with --benchmark-json=runN.json and "
        f"without --nixl-gate: `pytest-nixl profile learn run1.json run2.json run3.json --name {file} "
        f"--output {file}.toml`, then give --nixl-profile={file}.toml"
    )


def refuse_silence(profile: Profile, items: Iterable[pytest.Item]) -> None:
    """:raises pytest.UsageError: where a gate would judge rows by a profile that expects nothing of any."""
    if not profile.expectations and any(row_of(item) is not None for item in items):
        raise pytest.UsageError(f"--nixl-gate is refused: {silence(profile)}")
