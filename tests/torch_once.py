# SPDX-License-Identifier: Apache-2.0
"""``python torch_once.py FOLDER``: put torch there, where it is not there already.

NIXL before 1.4 imports it, and uses it for tensors that nobody gives it here: what torch itself declares is left out.
Three quarters of a gigabyte and twenty seconds, so the environments of all those releases share one copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: torch's own import needs the second one.
PACKAGES = ("torch==2.13.0", "typing-extensions>=4.12")


def install(folder: Path) -> None:
    """Install into a folder beside it, which then takes its name: one that exists is whole."""
    if folder.exists():
        return
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(making), *PACKAGES]
    try:
        subprocess.run(command, check=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
