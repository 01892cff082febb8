# SPDX-License-Identifier: Apache-2.0
"""What the repository itself holds."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys

import pytest
from helpers.cli_run import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone, or git is not installed"
)
def test_nothing_that_a_command_writes_is_tracked() -> None:
    """A tracked file that .gitignore names is changed by our own commands: .venv once was."""
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--ignored", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""


def test_ci_runs_each_environment_of_the_matrix_once() -> None:
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "tox.ini")
    lines = (line.partition("=") for line in read["tox"]["labels"].split("\n") if "=" in line)
    labels = {name.strip(): value.replace(" ", "").split(",") for name, _, value in lines}
    parts = ("beside", "long")
    assert sorted(name for part in parts for name in labels[part]) == sorted(labels["full"])
    assert not set(labels["soak"]) & set(labels["full"])
    assert "soak" in labels["soak"], "tests that CI leaves out"
    commands = (ROOT / ".ci" / "run").read_text()
    assert all(f"tox -m {part} " in commands for part in parts)


def test_the_wheel_has_each_package_of_the_clone() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    ours = [ROOT / "pytest_nixl", ROOT / "suites"]
    folders = {file.parent.relative_to(ROOT) for top in ours for file in top.rglob("*.py")}
    inside = {
        ".".join(("pytest_nixl", *folder.parts) if folder.parts[0] == "suites" else folder.parts) for folder in folders
    }
    files = {name for name in document["packages"] if not name.startswith("pytest_nixl.docs")}
    assert sorted(inside) == sorted(files)


def test_the_wheel_and_the_image_have_each_file_of_texts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(project["tool"]["setuptools"]["package-data"]["pytest_nixl.docs"])
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pytest_nixl").rglob("*.py"))
    read = {f"{name}.toml" for name in re.findall(r'(?:Entries|shipped_text)\("([\w-]+)"', sources)}
    copied = set(re.findall(r"docs/reference/([\w-]+\.toml)", (ROOT / "deploy/docker/Dockerfile").read_text()))
    assert read == packaged == copied
