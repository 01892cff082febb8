# SPDX-License-Identifier: Apache-2.0
"""Report a profile that expects nothing of any row of this run, and refuse to gate rows by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pytest_nixl.judge.profiles import Profile
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.default_profile import ONE_HOST, OVER_TCP
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run


def silence(profile: Profile) -> str:
    """Return a sentence if a profile expects nothing of any row, with the remedy; empty: it expects something."""
    if profile.expectations:
        return ""
    return (
        f"the profile {profile.name!r} has no [[expect]]: it describes the machine but expects nothing of a row, so "
        f"every row is NO-EXPECTATION; {how_to_learn(profile.name)}"
    )


def how_to_learn(name: str) -> str:
    """Return the remedy: the commands that create a profile from runs on machines that are known to be good.

    :param name: the name of the present profile.
    """
    file = f"{name}-learned"
    return (
        "learn one from three runs on machines that are known to be good, each with --benchmark-json=runN.json and "
        f"without --nixl-gate: `pytest-nixl profile learn run1.json run2.json run3.json --name {file} "
        f"--output {file}.toml`, then give --nixl-profile={file}.toml"
    )


def between_hosts(profile: Profile, run: Run, cluster: Cluster) -> Profile:
    """Return what judges this run: between hosts, a default profile for one host expects nothing of a row."""
    chosen = not run.settings.sources["profile"].startswith("default")
    if len(cluster.host_names) < 2 or chosen or profile.name not in (ONE_HOST, OVER_TCP):
        return profile
    run.record.note(
        f"the default profile, {profile.name}, is for one host, and the ranks are on {len(cluster.host_names)}: rows "
        f"are measured and not judged; {how_to_learn('this-cluster')}"
    )
    return replace(profile, expectations=())


def refuse_silence(profile: Profile, items: Iterable[pytest.Item]) -> None:
    """Refuse to gate rows by a profile that expects nothing of any row.

    :param items: the collected tests.
    :raises pytest.UsageError: if a test measures a row and the profile has no expectation.
    """
    if not profile.expectations and any(row_of(item) is not None for item in items):
        raise pytest.UsageError(f"--nixl-gate is refused: {silence(profile)}")
