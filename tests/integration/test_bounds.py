# SPDX-License-Identifier: Apache-2.0
"""The lowest versions that are declared are those that ``tox -e lowest`` tests."""

from __future__ import annotations

import importlib.metadata
import os
import re

import pytest
from helpers.minimum_versions import PYPROJECT, lowest, project


def test_every_dependency_declares_a_lowest_version() -> None:
    pins = lowest(project())
    assert all(re.match(r"[A-Za-z0-9._-]+==[0-9.]+( *;.*)?$", pin) for pin in pins)
    names = {pin.partition("==")[0] for pin in pins}
    assert {"pytest", "pytest-benchmark", "numpy", "requests", "scipy"} <= names


@pytest.mark.parametrize("text", ["pytest", "pytest~=8.2", "pytest>=8,<10", "pytest==8.2"])
def test_a_dependency_without_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write NAME>=VERSION, so that VERSION is tested"):
        lowest({"dependencies": [text], "optional-dependencies": {"compare": []}})


def test_pytest_wants_the_version_that_is_declared() -> None:
    [pin] = [pin for pin in lowest(project()) if pin.startswith("pytest==")]
    assert f'minversion = "{pin.partition("==")[2]}"' in PYPROJECT.read_text()


@pytest.mark.skipif(os.environ.get("TOX_ENV_NAME") != "lowest", reason="the lowest versions are those of tox -e lowest")
def test_the_lowest_versions_are_what_is_installed() -> None:
    for pin in lowest(project()):
        name, version = pin.partition(";")[0].strip().split("==")
        results = importlib.metadata.version(name)
        parts = results.split(".")
        expected = version.split(".")
        assert parts[: len(expected)] == expected, f"{name} {results} is installed, and {version} is declared"
