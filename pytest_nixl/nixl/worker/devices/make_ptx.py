# SPDX-License-Identifier: Apache-2.0
"""Compile kernels.cu to kernels.ptx with nvcc: ``python -m pytest_nixl.nixl.worker.devices.make_ptx``."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCE, PTX = _FOLDER / "kernels.cu", _FOLDER / "kernels.ptx"
#: The oldest PTX version and target that the kernels need. Every driver since CUDA 10 loads them for GPUs since Volta.
_VERSION, _TARGET = "6.3", "sm_70"


def digest() -> str:
    """Return the SHA-256 of kernels.cu."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> None:
    """Compile, add the digest of the source, and lower nvcc's PTX version to the one that is needed."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as output:
        # The oldest target of current nvcc releases. A test checks the result with ptxas for the lowered target.
        subprocess.run(["nvcc", "-ptx", "-arch=compute_75", "-o", output.name, str(SOURCE)], check=True)
        text = Path(output.name).read_text()
    code = text[text.index(".version") :]
    code = re.sub(r"^\.version .*$", f".version {_VERSION}", code, flags=re.MULTILINE)
    code = re.sub(r"^\.target .*$", f".target {_TARGET}", code, flags=re.MULTILINE)
    head = "// SPDX-License-Identifier: Apache-2.0\n// Made of kernels.cu by make_ptx.py; its SHA-256 is\n"
    PTX.write_text(f"{head}// {digest()}\n\n{code}")


if __name__ == "__main__":
    main()
