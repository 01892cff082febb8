# SPDX-License-Identifier: Apache-2.0
"""The doctor names the wheel of NIXL that is really loaded if two are installed, and judges its CUDA version."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment
from helpers.copied_wheel import copy_wheel, link
from helpers.needs import lack

pytestmark = pytest.mark.long


def add_other(site: Path) -> str:
    """Add the real wheel for CUDA 13, which tox installs in a folder of its own; return the name of its module."""
    folder = os.environ.get("PYTEST_NIXL_CU13", "")
    if not folder:
        lack("the wheel nixl-cu13 in the folder PYTEST_NIXL_CU13: run tox -e runs")
    shutil.copytree(folder, site, copy_function=link, dirs_exist_ok=True)
    return "nixl_cu13"


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


def test_wheels_of_two_versions_are_named(tmp_path: Path) -> None:
    wheel = copy_wheel(tmp_path / "site")
    other = add_other(wheel.site)
    # Two real wheels; only the version that one of them says of itself is another one.
    [info] = wheel.site.glob(f"{other}-*.dist-info")
    info = info.rename(info.with_name(f"{other}-1.3.2.dist-info"))
    text = (info / "METADATA").read_text()
    (info / "METADATA").unlink()  # it is a link to the other wheel's file
    (info / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", "Version: 1.3.2", text))
    record = (info / "RECORD").read_text()
    (info / "RECORD").unlink()
    (info / "RECORD").write_text(re.sub(r"-[0-9.]+\.dist-info/", "-1.3.2.dist-info/", record))
    output, reason, remedy, failed = verdict(wheel.site, check="nixl-packages-agree")
    assert (output, failed) == ("FAIL", ["nixl-packages-agree"]), reason
    assert f"{other.replace('_', '-')} 1.3.2" in reason
    assert reason.endswith(f"; {other.replace('_', '-')} 1.3.2 is loaded")
    assert "pip install --no-deps" in remedy


def verdict(*folders: Path, check: str = "nixl-cuda") -> tuple[str, str, str, list[str]]:
    """Return verdict, reason and remedy of a check, and which checks fail, with these folders first on the path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nixl.cli", "doctor", "--image", "--json"],
        env=environment(PYTHONPATH=path), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    results = {load["id"]: load for load in json.loads(done.stdout)["checks"]}
    result = results[check]
    failed = [entry["id"] for entry in results.values() if entry["verdict"] == "FAIL"]
    assert done.returncode == bool(failed)
    return result["verdict"], result["reason"], result["remedy"], failed


def test_loaded_wheel_is_named_and_fails_only_if_it_is_not_for_the_cuda_of_torch(tmp_path: Path) -> None:
    wheel = copy_wheel(tmp_path / "site")
    module = wheel.package.replace("-", "_")
    other = add_other(wheel.site)
    assert module == "nixl_cu12"
    ours, theirs = int(module[-2:]), int(other[-2:])
    torch(wheel.site, ours)

    output, reason, _, failed = verdict(wheel.site)
    assert (output, failed) == ("PASS", []), reason
    assert f"{wheel.package} " in reason.partition(" is loaded")[0] + " "
    assert f"built for CUDA {ours} ({wheel.site / module / '_api.py'})" in reason
    assert f"installed, but not loaded: {other.replace('_', '-')} " in reason
    assert f"is built for CUDA {ours}.8" in reason

    # NIXL takes the CUDA version of a cuda-python that is already imported, and not that of torch.
    imported_first(tmp_path / "first", theirs)
    output, reason, remedy, failed = verdict(tmp_path / "first", wheel.site)
    assert (output, failed) == ("FAIL", ["nixl-cuda"]), reason
    assert f"{other.replace('_', '-')} " in reason.partition(" is loaded")[0] + " "
    assert f"built for CUDA {theirs} ({wheel.site / other / '_api.py'})" in reason
    assert f"but torch 2.9.0+cu{ours}8 is built for CUDA {ours}.8 ({wheel.site / 'torch' / 'version.py'})" in reason
    assert "import torch before nixl" in remedy
