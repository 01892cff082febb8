# SPDX-License-Identifier: Apache-2.0
"""The command that installs an extra works for a pytest-nixl that no index has."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path

import pytest

from pytest_nixl.core.extras import own_version, pip_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
EXTRAS = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_command_names_every_package_of_the_extra_and_not_this_one(extra: str) -> None:
    command = pip_install(extra)
    assert command.startswith("pip install ")
    assert "pytest-nixl" not in command
    assert len(shlex.split(command)) == len(["pip", "install", *EXTRAS[extra]])
    names = {requirement.partition(";")[0].split("[")[0].rstrip("<>=0123456789.,") for requirement in EXTRAS[extra]}
    assert names
    assert all(name in command for name in names), command


def test_only_packages_of_the_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        "scipy>=1; extra == 'compare'",
        "x; extra == 'other'",
        'y[z]>2 ; python_version > "3" and extra=="compare"',
    ]
    listed += ["compare", "z; my_extra == 'compare'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: listed if name == "pytest-nixl" else None)
    assert pip_install("compare") == "pip install 'scipy>=1' 'y[z]>2'"


def test_without_metadata_the_extra_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert pip_install("compare") == "pip install 'pytest-nixl[compare]'"
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert own_version() == "from a clone"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.0 of {name}")
    assert own_version() == "1.0 of pytest-nixl"
