# SPDX-License-Identifier: Apache-2.0
"""Install torch into a folder: ``python torch_for_nixl.py [--stand-in] FOLDER``.

NIXL before 1.4 imports torch and checks whether arguments are torch's tensors, which the tests never pass. Torch's own
dependencies are not installed.

Torch has 750 MB and takes 20 s to install. With ``--stand-in``, or if the package index has only a torch for CUDA,
which needs gigabytes of CUDA libraries, a stand-in is written instead: a module with an empty class ``Tensor``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
#: Importing torch needs the second package.
PACKAGES = (TORCH, "typing-extensions>=4.12")
DOUBLE = '"""A stand-in for torch, because NIXL only checks for tensors."""\n\n\nclass Tensor:\n    pass\n'


def install(folder: Path, *, stand_in: bool) -> None:
    """Install torch or its stand-in. Nothing is done if ``folder`` has one."""
    if (folder / "torch.py").exists() or (folder / "torch").exists():
        return
    if stand_in or wants_cuda(_report()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "torch.py").write_text(DOUBLE)
    else:
        _pip("--quiet", "--target", str(folder), *PACKAGES)


def wants_cuda(report: dict[str, Any]) -> bool:
    """Return whether the torch that pip would install needs CUDA's libraries, or pip finds none."""
    results = [entry["metadata"].get("requires_dist", []) for entry in report["install"]]
    return not results or any(name.startswith(("nvidia-", "cuda-")) for names in results for name in names)


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
    install(Path(sys.argv[-1]), stand_in="--stand-in" in sys.argv)
