# SPDX-License-Identifier: Apache-2.0
"""The commands that install pytest-nixl in a running pod: they replace and hide nothing of the image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "how-to" / "slow-engine.md"


def commands(folder: Path, python: str) -> str:
    """Return the lines of the page that run in the container, with places of this machine."""
    match = re.search(r"<<'END'\n(.*?)^END$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    text = match[1].replace("/tmp/check", f"{folder}/check").replace("/tmp/pytest_nixl-", f"{folder}/pytest_nixl-")
    # The tests need no package index. This Python has pytest-nixl already, which no image has: it is installed again.
    text = text.replace(" install ", " install --no-index --no-deps --ignore-installed --quiet ")
    return re.sub(r"^python3 ", f"{python} ", text, flags=re.MULTILINE)


def test_the_environment_sees_the_packages_of_the_image_and_replaces_none(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pytest_nixl", "suites", "docs", "fixtures"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True, timeout=300)
    subprocess.run(
        ["sh", "-e", "-c", commands(tmp_path, sys.executable)], cwd=tmp_path, env=environment(), check=True, timeout=300
    )
    inner = tmp_path / "check" / "bin" / "python"
    script = "import nixl_cu12, numpy, pytest_nixl; print(nixl_cu12.__file__, numpy.__file__, pytest_nixl.__file__)"
    runs = [subprocess.run([python, "-c", script], cwd=tmp_path, env=environment(), check=True, capture_output=True,
                           text=True).stdout.split() for python in (sys.executable, str(inner))]  # fmt: skip
    assert runs[0][:2] == runs[1][:2], "NIXL and numpy are those of the image"
    assert runs[1][2].startswith(str(tmp_path / "check"))
    done = subprocess.run(
        [tmp_path / "check/bin/pytest-nixl", "doctor", "--image", "-v"], cwd=tmp_path, env=environment(), check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert re.search(r"^PASS +nixl-loads +nixl-cu12 ", done.stdout, re.MULTILINE), done.stdout + done.stderr
