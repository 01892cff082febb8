# SPDX-License-Identifier: Apache-2.0
"""Versions of shared libraries, read from the names and files that their packages install."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from pytest_nixl.host import elf
from pytest_nixl.model.nixl_releases import PACKAGES

#: A version and where it was read, or an empty version and why it is unknown.
Version = tuple[str, str, str]
_CUDA_FILE = "/usr/local/cuda/version.json"
_EFA_FOLDERS = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")


def cuda(environ: Mapping[str, str], major: int, file: str = _CUDA_FILE) -> Version:
    """Return the version of the CUDA runtime that the loader finds, or of the toolkit.

    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param major: the major version for which NIXL is built.
    :param file: the file with the toolkit's versions.
    """
    libraries = _by_file_name(f"libcudart.so.{major}", environ)
    if libraries[0]:
        return libraries
    try:
        return str(json.loads(Path(file).read_text())["cuda"]["version"]), file, ""
    except (OSError, ValueError, KeyError, TypeError):
        return "", file, f"{libraries[2]}, and {file} does not say a version"


def gdrcopy(environ: Mapping[str, str]) -> Version:
    """Return the version of GDRCopy's library that the loader finds."""
    return _by_file_name("libgdrapi.so.2", environ)


def libfabric(environ: Mapping[str, str]) -> Version:
    """Return the release of the libfabric that the loader finds, from the file for pkg-config beside it."""
    path = elf.find("libfabric.so.1", _EFA_FOLDERS, environ)
    if path is None:
        return "", "libfabric.so.1", "the loader does not find libfabric.so.1"
    file = Path(path).parent / "pkgconfig" / "libfabric.pc"
    return _in_file(file, r"^Version:\s*(\S+)", f"{path} does not contain its release")


def ucx(environ: Mapping[str, str]) -> Version:
    """Return the version of the UCX that NIXL will load: of its wheel, else of the library that the loader finds.

    It is read from the library's file, because pytest's process never loads UCX.
    """
    specs = (find_spec(name.replace("-", "_")) for name in PACKAGES)
    folders = [f"{Path(spec.origin).parent}.libs" for spec in specs if spec is not None and spec.origin]
    paths = [str(path) for folder in folders for path in sorted(Path(folder).glob("libucp-*.so*"))]
    paths = paths or [path for path in [elf.find("libucp.so.0", (), environ)] if path is not None]
    versions: set[str] = set()
    for path in paths:
        try:
            versions |= _versions_in(path)
        except OSError as error:
            return "", path, f"{path} cannot be read ({error.strerror})"
    if not paths:
        return "", "libucp.so.0", "NIXL's wheel brings no UCX, and the loader does not find libucp.so.0"
    paths_text = ", ".join(paths)
    return (
        (versions.pop(), paths_text, "")
        if len(versions) == 1
        else ("", paths_text, f"{paths_text} does not tell its version")
    )


def etcd_client(path: str) -> Version:
    """Return the version of etcd-cpp-apiv3 from the file for CMake that it installs beside its library.

    :param path: the path of the loaded library; empty if there is none.
    """
    if not path:
        return "", "libetcd-cpp-api", "NIXL was built without etcd"
    file = Path(path).parent / "cmake" / "etcd-cpp-api" / "etcd-cpp-api-config-version.cmake"
    return _in_file(file, r'set\s*\(\s*PACKAGE_VERSION\s+"([^"]+)"', f"{path} does not contain its version")


@lru_cache
def _versions_in(path: str) -> frozenset[str]:
    """Return the texts of a file that are a version. Those of symbols, such as ``GLIBC_2.2.5``, are none."""
    content, versions = Path(path).read_bytes(), set()
    # A search that begins with a rare byte takes a fiftieth of the time of one that begins with a digit.
    for end in re.finditer(rb"\.[0-9]{1,3}\.[0-9]{1,3}(?=\0)", content):
        if start := re.search(rb"(?<![0-9._])[0-9]{1,2}$", content[max(0, end.start() - 3) : end.start()]):
            versions.add((start[0] + end[0]).decode())
    return frozenset(versions)


def _by_file_name(soname: str, environ: Mapping[str, str]) -> Version:
    path = elf.find(soname, (), environ)
    if path is None:
        return "", soname, f"the loader does not find {soname}"
    real = os.path.realpath(path)
    match = re.search(r"\.so\.(\d+\.\d[\d.]*)$", real)
    return (match[1], real, "") if match else ("", real, f"the name of {real} has no version")


def _in_file(file: Path, pattern: str, otherwise: str) -> Version:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError as error:
        return "", str(file), f"{otherwise}, and {file} cannot be read ({error.strerror})"
    return (match[1], str(file), "") if match else ("", str(file), f"{otherwise}, and {file} says none")
