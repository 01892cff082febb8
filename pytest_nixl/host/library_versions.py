# SPDX-License-Identifier: Apache-2.0
"""Versions of shared libraries, read from the names and files that their packages install."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_nixl.host import elf

#: A version and where it was read, or an empty version and why it is unknown.
Found = tuple[str, str, str]
_CUDA_FILE = "/usr/local/cuda/version.json"
_EFA_FOLDERS = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")


def cuda(environ: Mapping[str, str], major: int, file: str = _CUDA_FILE) -> Found:
    """Return the version of the CUDA runtime that the loader finds, or of the toolkit.

    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param major: the major version for which NIXL is built.
    :param file: the file with the toolkit's versions.
    """
    found = _by_file_name(f"libcudart.so.{major}", environ)
    if found[0]:
        return found
    try:
        return str(json.loads(Path(file).read_text())["cuda"]["version"]), file, ""
    except (OSError, ValueError, KeyError, TypeError):
        return "", file, f"{found[2]}, and {file} does not say a version"


def gdrcopy(environ: Mapping[str, str]) -> Found:
    """Return the version of GDRCopy's library that the loader finds."""
    return _by_file_name("libgdrapi.so.2", environ)


def libfabric(environ: Mapping[str, str]) -> Found:
    """Return the release of the libfabric that the loader finds, from the file for pkg-config beside it."""
    path = elf.find("libfabric.so.1", _EFA_FOLDERS, environ)
    if path is None:
        return "", "libfabric.so.1", "the loader does not find libfabric.so.1"
    file = Path(path).parent / "pkgconfig" / "libfabric.pc"
    return _in_file(file, r"^Version:\s*(\S+)", f"{path} does not contain its release")


def etcd_client(path: str) -> Found:
    """Return the version of etcd-cpp-apiv3 from the file for CMake that it installs beside its library.

    :param path: the path of the loaded library; empty if there is none.
    """
    if not path:
        return "", "libetcd-cpp-api", "NIXL was built without etcd"
    file = Path(path).parent / "cmake" / "etcd-cpp-api" / "etcd-cpp-api-config-version.cmake"
    return _in_file(file, r'set\s*\(\s*PACKAGE_VERSION\s+"([^"]+)"', f"{path} does not contain its version")


def _by_file_name(soname: str, environ: Mapping[str, str]) -> Found:
    path = elf.find(soname, (), environ)
    if path is None:
        return "", soname, f"the loader does not find {soname}"
    real = os.path.realpath(path)
    match = re.search(r"\.so\.(\d+\.\d[\d.]*)$", real)
    return (match[1], real, "") if match else ("", real, f"the name of {real} has no version")


def _in_file(file: Path, pattern: str, otherwise: str) -> Found:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError as error:
        return "", str(file), f"{otherwise}, and {file} cannot be read ({error.strerror})"
    return (match[1], str(file), "") if match else ("", str(file), f"{otherwise}, and {file} says none")
