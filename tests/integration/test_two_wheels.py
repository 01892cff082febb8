# SPDX-License-Identifier: Apache-2.0
"""The doctor names the wheel of NIXL that is really loaded if two are installed, and judges its CUDA version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment
from helpers.copied_wheel import copy_wheel, link

pytestmark = pytest.mark.long

OTHER = {"nixl_cu12": "nixl_cu13", "nixl_cu13": "nixl_cu12"}


def stand_in(site: Path, module: str, other: str) -> None:
    """Add the wheel for another CUDA version: the files of the real one under another name.

    The real second wheel would be a download of 50 MB for each run of this test.
    """
    shutil.copytree(site / module, site / other, copy_function=link)
    for path in (site / other).glob("*.py"):
        text = path.read_text()
        path.unlink()
        path.write_text(text.replace(module, other))
    [records] = site.glob(f"{module}-*.dist-info")
    copied = site / records.name.replace(module, other)
    copied.mkdir()
    name, named = module.replace("_", "-"), other.replace("_", "-")
    (copied / "METADATA").write_text((records / "METADATA").read_text().replace(f"Name: {name}", f"Name: {named}", 1))
    (copied / "RECORD").write_text(f"{other}/_api.py,,\n")


def torch(site: Path, cuda: int) -> None:
    """Add a torch that says its CUDA version as a real one does, and that nobody must import."""
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('torch must not be imported')\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.9.0+cu{cuda}8'\ncuda: str = '{cuda}.8'\n")


def imported_first(folder: Path, cuda: int) -> None:
    """Let every Python process import a cuda-python of a CUDA version, as a package of the user may do."""
    (folder / "cuda" / "bindings").mkdir(parents=True)
    (folder / "cuda" / "bindings" / "__init__.py").write_text(f"__version__ = '{cuda}.0.0'\n")
    (folder / "sitecustomize.py").write_text("import cuda.bindings\n")


def verdict(*folders: Path) -> tuple[str, str, str]:
    """Return verdict, reason and remedy of nixl-cuda, with these folders first on Python's path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nixl.cli", "doctor", "--image", "--json"],
        env=environment(PYTHONPATH=path), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = {each["id"]: each for each in json.loads(done.stdout)["checks"]}
    one = found["nixl-cuda"]
    return one["verdict"], one["reason"], one["remedy"]


def test_loaded_wheel_is_named_and_fails_only_if_it_is_not_for_the_cuda_of_torch(tmp_path: Path) -> None:
    wheel = copy_wheel(tmp_path / "site")
    module = wheel.package.replace("-", "_")
    other = OTHER[module]
    stand_in(wheel.site, module, other)
    ours, theirs = int(module[-2:]), int(other[-2:])
    torch(wheel.site, ours)

    said, reason, _ = verdict(wheel.site)
    assert said == "PASS", reason
    assert f"{wheel.package} " in reason.partition(" is loaded")[0] + " "
    assert f"built for CUDA {ours} ({wheel.site / module / '_api.py'})" in reason
    assert f"installed, but not loaded: {other.replace('_', '-')} " in reason
    assert f"is built for CUDA {ours}.8" in reason

    # NIXL takes the CUDA version of a cuda-python that is already imported, and not that of torch.
    imported_first(tmp_path / "first", theirs)
    said, reason, remedy = verdict(tmp_path / "first", wheel.site)
    assert said == "FAIL", reason
    assert f"{other.replace('_', '-')} " in reason.partition(" is loaded")[0] + " "
    assert f"built for CUDA {theirs} ({wheel.site / other / '_api.py'})" in reason
    assert f"but torch 2.9.0+cu{ours}8 is built for CUDA {ours}.8 ({wheel.site / 'torch' / 'version.py'})" in reason
    assert "import torch before nixl" in remedy
