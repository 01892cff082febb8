# SPDX-License-Identifier: Apache-2.0
"""``python torch_once.py FOLDER``: put torch there, where it is not there already.

NIXL before 1.4 imports it, and asks of what it is given whether it is one of its tensors, which nobody gives it here.
What torch itself declares is left out. Three quarters of a gigabyte and twenty seconds, so the environments of all
those releases share one copy.

Where the package index has it with CUDA only, which it does not load without, a module with an empty class of that name
is a double of it: what would take its place is gigabytes of CUDA.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
#: torch's own import needs the second one.
PACKAGES = (TORCH, "typing-extensions>=4.12")
DOUBLE = (
    '"""A double of torch: NIXL asks whether something is a tensor, and nothing is."""\n\n\nclass Tensor:\n    pass\n'
)


def install(folder: Path) -> None:
    """Install into a folder beside it, which then takes its name: one that exists is whole."""
    if folder.exists():
        return
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        if wants_cuda(_report()):
            print(f"{TORCH} is here with CUDA only: a double takes its place")
            making.mkdir(parents=True)
            (making / "torch.py").write_text(DOUBLE)
        else:
            _pip("--quiet", "--target", str(making), *PACKAGES)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def wants_cuda(report: dict[str, Any]) -> bool:
    """Whether what pip would install declares CUDA's libraries, or pip finds nothing to install."""
    found = [each["metadata"].get("requires_dist", []) for each in report["install"]]
    return not found or any(name.startswith(("nvidia-", "cuda-")) for names in found for name in names)


def _report() -> dict[str, Any]:
    try:
        text = _pip("--quiet", "--dry-run", "--ignore-installed", "--report", "-", TORCH)
    except subprocess.CalledProcessError:  # there is none for this Python
        return {"install": []}
    report: dict[str, Any] = json.loads(text)
    return report


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    install(Path(sys.argv[1]))
