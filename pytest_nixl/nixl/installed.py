# SPDX-License-Identifier: Apache-2.0
"""Python packages of NIXL and torch, found without importing them."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_nixl.model.nixl_releases import PACKAGES, wheel_for

_MODULE = re.compile(r"/nixl_cu(\d+)/[^/]+$")
#: The folder of a package of NIXL for one CUDA version, for ROCm or for all; other names that begin so are not NIXL.
_DISTRIBUTION = re.compile(r"(?P<name>nixl(?:[_-](?:cu\d+|rocm\w*))?)-(?P<version>[^-]+)\.dist-info", re.IGNORECASE)
_RUNTIME = re.compile(r"libcudart(?:-[0-9a-f]{8})?\.so\.(\d+)")


def nixl_packages() -> dict[str, str]:
    """Return the versions of all installed packages of NIXL, by name. Only one of them is loaded."""
    packages: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(Path(folder or ".").glob("nixl*.dist-info")):
            if match := _DISTRIBUTION.fullmatch(path.name):
                # As for an import, the first folder counts.
                packages.setdefault(match["name"].lower().replace("_", "-"), match["version"])
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.setdefault(name, importlib.metadata.version(name))
    return packages


def cuda_of_nixl(module: str, libraries: Sequence[str]) -> tuple[int, str] | None:
    """Return the CUDA major version for which a loaded NIXL is built, and where that was read; None if unknown.

    :param module: the file of the loaded module, such as ``…/nixl_cu12/_api.py``.
    :param libraries: the paths of the loaded libraries; a build of one's own has no CUDA version in its module's path.
    """
    if match := _MODULE.search(module):
        return int(match[1]), module
    for path in libraries:
        if match := _RUNTIME.match(os.path.basename(path)):
            return int(match[1]), path
    return None


def torch_version() -> dict[str, Any]:
    """Return torch's version, its CUDA version (empty: built without) and the file that says so; empty without torch.

    The file is read and not executed. NIXL itself reads the same file to choose among its packages.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return {}
    if spec is None or not spec.origin:
        return {}
    path = Path(spec.origin).parent / "version.py"
    try:
        values = constants(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return {}
    version, cuda = values.get("__version__"), values.get("cuda")
    if not isinstance(version, str):
        return {}
    return {"version": version, "cuda": cuda if isinstance(cuda, str) else "", "path": str(path)}


def wheel_for_torch() -> str:
    """Return the package that NIXL loads beside the installed torch, such as ``nixl-cu13``; empty without one."""
    cuda = torch_version().get("cuda", "").partition(".")[0]
    return wheel_for(int(cuda)) if cuda.isdecimal() else ""


def pip_command() -> str:
    """Return the command that installs the NIXL which this Python can load."""
    wheel, version = wheel_for_torch() or "nixl-cu12", nixl_packages().get("nixl")
    return f"pip install --no-deps {wheel}=={version}" if version else f"pip install --no-deps nixl {wheel}"


def constants(source: str) -> dict[str, Any]:
    """Return the constants that Python source assigns to names at its top level.

    :raises SyntaxError: it is not Python.
    """
    constant_values: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        targets = list(statement.targets) if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                constant_values[target.id] = value.value
    return constant_values
