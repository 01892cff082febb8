# SPDX-License-Identifier: Apache-2.0
"""Every shipped command line judges what it measures: by a gate, and by a profile that has a figure for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from helpers.pytester_run import parse_config
from helpers.shipped_commands import Command, shipped

from pytest_nixl.cluster.placement import ALONE
from pytest_nixl.judge.profiles import Profile, bundled_profiles, load_profile
from pytest_nixl.model.settings import Settings
from pytest_nixl.session.requested_links import requested_links
from pytest_nixl.session.settings import read_settings

COMMANDS = shipped()
#: A user's own test asserts what it measures.
OWN = ("test_mine.py", "test_ported.py", "test_cookbook.py")
MEASURING = [command for command in COMMANDS if command.measures and not command.learns and command.words[0] not in OWN]
#: Options that say which rows are measured and by what they are judged.
OF_ROWS = ("backend", "op", "memory", "devices", "blocks", "batch", "depth", "profile")


def is_learned(command: Command) -> bool:
    """Whether the profile is a file that the user learns."""
    name = command.option("profile")
    return name is not None and name not in bundled_profiles()


def read(pytester: pytest.Pytester, command: Command) -> Settings:
    options = {name: value for name in OF_ROWS if (value := command.option(name)) is not None}
    if is_learned(command):
        del options["profile"]
    config = parse_config(pytester, *(f"--nixl-{name}={value}" for name, value in options.items()))
    return read_settings(config, dict(command.variables))


def judged(settings: Settings, profile: Profile) -> tuple[dict[str, bool], list[str]]:
    """By backend, operation and memory whether a row of them has a figure; and the rows that nothing is said of."""
    figures: dict[str, bool] = {}
    unexpected = []
    for link in requested_links(settings, ALONE):
        name = f"{link.backend} {link.op} {link.memory}"
        figures[name] = False
        for block, batch, depth in product(settings.blocks, settings.batch, settings.depth):
            key = replace(link, block=block, batch=batch, depth=depth)
            item = profile.expectation(key)
            if item is None:
                unexpected.append(str(key))
            elif any(figure is not None for figure in (item.floor, item.p50, item.p99)):
                figures[name] = True
    return figures, unexpected


def test_every_kind_of_file_has_command_lines_that_measure() -> None:
    folders = (command.file.rpartition("/")[0] for command in MEASURING)
    results = Counter("docs" if folder.startswith("docs/") else folder for folder in folders)
    assert {"deploy/kubernetes", "deploy/slurm", "deploy/mpi", "deploy/ci", "deploy/docker", "docs", ""} <= set(results)
    assert results["deploy/kubernetes"] == 5
    assert sum(count for folder, count in results.items() if folder.startswith("deploy/overlays/")) == 4
    assert results["deploy/ci"] == 9
    assert results["deploy/mpi"] == 2
    assert results["docs"] > 10


def test_each_has_a_gate() -> None:
    """Without one it measures, and passes whatever it measures."""
    assert [str(command) for command in MEASURING if command.option("gate") is None] == []


def test_each_profile_has_a_figure_for_each_kind_of_row(pytester: pytest.Pytester) -> None:
    faults = []
    for command in MEASURING:
        settings = read(pytester, command)
        if is_learned(command):
            faults += [] if "pytest-nixl profile learn" in command.text else [f"{command}: how is its profile made?"]
            continue
        figures, unexpected = judged(settings, load_profile(settings.profile))
        faults += [f"{command}: {settings.profile} has no figure for {name}" for name in figures if not figures[name]]
        faults += [f"{command}: {settings.profile} expects nothing of {row}" for row in unexpected]
        faults += [] if figures else [f"{command} measures nothing"]
    assert faults == []


def test_what_a_profile_is_learned_from_is_recorded() -> None:
    learning = [command for command in COMMANDS if command.learns]
    assert learning
    assert [str(command) for command in learning if "--benchmark-json" not in " ".join(command.words)] == []
