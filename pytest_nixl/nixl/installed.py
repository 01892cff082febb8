# SPDX-License-Identifier: Apache-2.0
"""Python packages of NIXL and torch, found without importing them."""

from __future__ import annotations

import ast
import contextlib
import csv
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
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


def release_of(plugin: str) -> str:
    """Return the version of the package of NIXL in whose folder a plugin is; empty if it is in none.

    :param plugin: the path, such as ``…/site-packages/.nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so``.
    """
    folder = Path(plugin).parent.parent
    for path in folder.parent.glob(f"{folder.name.lstrip('.').partition('.')[0]}-*.dist-info"):
        if match := _DISTRIBUTION.fullmatch(path.name):
            return match["version"]
    return ""


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
    """Return the command that installs the NIXL which this Python can load, also if it is installed and broken."""
    wheel, packages = wheel_for_torch() or "nixl-cu12", nixl_packages()
    version = packages.get("nixl") or packages.get(wheel)
    if version is None:
        return f"pip install --no-deps nixl {wheel}"
    needed = wheel if "nixl" in packages else f"nixl=={version} {wheel}"
    again = "--force-reinstall " if packages.get(wheel) == version and "nixl" in packages else ""
    return f"pip install {again}--no-deps {needed}=={version}"


def import_fault(error: BaseException) -> tuple[str, str]:
    """Return why NIXL cannot be imported although it may be installed, and what to do; two empty texts if unknown.

    :param error: what the import raised.
    """
    if fault := hidden_module(error) or wheel_damage():
        return fault
    if "failed to map segment" in str(error):
        return (
            "the kernel refuses to map it",
            "raise the limits of memory (`ulimit -v unlimited; ulimit -d unlimited`), or install NIXL where programs "
            "may be executed, on a file system that is mounted without noexec",
        )
    name = error.name if isinstance(error, ModuleNotFoundError) else ""
    module = (name or "").partition(".")[0]
    if module and not module.startswith("nixl"):
        return f"NIXL imports the module {module}", f"run `pip install {module}`"
    return "", ""


def hidden_module(error: BaseException) -> tuple[str, str] | None:
    """Return that a file hides a module that an import needs, and what to do; None if no file does.

    :param error: what the import raised.
    """
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    modules = [name.partition(".")[0] for name in ("nixl", *frames, str(getattr(error, "name", None) or ""))]
    names = [name for name in dict.fromkeys(modules) if name and name not in sys.stdlib_module_names]
    return next(filter(None, map(_shadow, names)), None)


def wheel_damage() -> tuple[str, str] | None:
    """Return that files of code which a package of NIXL has installed are missing or damaged, and what to do."""
    for name in nixl_packages():
        package = importlib.metadata.distribution(name)
        damaged = list(_damaged(package))
        if damaged:
            more = f" (and {len(damaged) - 1} more)" if damaged[1:] else ""
            return (
                f"{damaged[0]}{more} of {name} {package.version} is missing or damaged",
                f"install it again: `pip install --force-reinstall --no-deps {name}=={package.version}`",
            )
    return None


def _damaged(package: importlib.metadata.Distribution) -> Iterator[str]:
    """Yield the files of code of a package that are not there, or have another size than its list of files says."""
    # Not ``package.files``, which leaves out missing files from Python 3.12 on.
    for name, _, size in csv.reader((package.read_text("RECORD") or "").splitlines()):
        path = os.path.abspath(str(package.locate_file(name)))
        is_code = size and re.search(r"\.py$|\.so\b", name)
        if is_code and not (os.path.isfile(path) and os.path.getsize(path) == int(size)):
            yield path


def _shadow(module: str) -> tuple[str, str] | None:
    """Return that another file is imported as a module than the one that a package has installed, and what to do."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    file = spec.origin if spec is not None else None
    if file is None or not os.path.exists(file):
        return None
    listed = re.compile(rf"^{re.escape(module)}(?:/__init__)?\.(?:py|[^/,]*so)(?=,)", re.MULTILINE)
    providers = {
        os.path.abspath(str(package.locate_file(match[0]))): package
        for package in importlib.metadata.distributions()
        if (match := listed.search(package.read_text("RECORD") or ""))
    }
    installed = {path: package for path, package in providers.items() if os.path.exists(path)}
    if not installed or any(os.path.samefile(path, file) for path in installed):
        return None
    path, package = next(iter(installed.items()))
    folder = os.path.dirname(os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file)
    return (
        f"{file} hides the module {module} of {package.metadata['Name']} {package.version} ({path})",
        f"rename {file}, or take {folder} out of PYTHONPATH and do not start in it",
    )


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
