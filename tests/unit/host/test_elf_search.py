# SPDX-License-Identifier: Apache-2.0
"""Which file is found for a soname, compared with the real dynamic loader: RPATH, RUNPATH and LD_LIBRARY_PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import double_libraries

from pytest_nixl.host.elf import dependencies, missing, read_elf

#: Prints the folder of the library ``libdep.so`` that a process has after it loaded another one; empty: it has none.
LOADED = """
import ctypes, os, re, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError:
    print()
else:
    files = re.findall(r"(/\\S*libdep\\.so)$", open("/proc/self/maps").read(), re.M)
    print(os.path.basename(os.path.dirname(files[0])))
"""
#: The kind of the list in ``libtop.so``, which needs ``libmid.so``, and in that one, which needs ``libdep.so``; the
#: folder of LD_LIBRARY_PATH; and the folder where the loader of glibc finds ``libdep.so``.
CASES = {
    "rpath comes before the variable": ("none", "RPATH", "variable", "mid"),
    "runpath comes after the variable": ("none", "RUNPATH", "variable", "variable"),
    "runpath without the variable": ("none", "RUNPATH", "", "mid"),
    "rpath is inherited": ("RPATH", "none", "variable", "top"),
    "rpath is inherited after the own one": ("RPATH", "RPATH", "variable", "mid"),
    "rpath is not inherited by what has a runpath": ("RPATH", "RUNPATH", "", "mid"),
    "runpath is not inherited": ("RUNPATH", "none", "variable", "variable"),
    "nothing is found by an inherited runpath": ("RUNPATH", "none", "", ""),
}


def build(library: Path, kind: str, *needs: Path, folders: str = "") -> Path:
    """Build a library with a list of folders.

    :param kind: ``RPATH``, ``RUNPATH`` or ``none``.
    """
    tags = {"RPATH": "--disable-new-dtags", "RUNPATH": "--enable-new-dtags"}
    listed = [f"-Wl,{tags[kind]}", f"-Wl,-rpath,{folders}"] if kind in tags else []
    name = library.stem.removeprefix("lib")
    flags = [f"-Wl,-soname,{library.name}", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    source = f"int {name}(void) {{ return 1; }}"
    double_libraries.build(library.parent, {library.name: source}, *flags, *listed, *map(str, needs))
    return library


@pytest.mark.parametrize("case", CASES)
def test_a_library_is_found_where_the_loader_finds_it(tmp_path: Path, case: str) -> None:
    of_top, of_mid, variable, expected = CASES[case]
    library, *_ = [build(tmp_path / folder / "libdep.so", "none") for folder in ("top", "mid", "variable")]
    # Found by the RPATH or RUNPATH of libtop.so, which always leads to the folder of libmid.so.
    mid = build(tmp_path / "both" / "libmid.so", of_mid, library, folders=str(tmp_path / "mid"))
    top = build(
        tmp_path / "libtop.so", of_top if of_top != "none" else "RUNPATH", mid,
        folders="$ORIGIN/both" + (":$ORIGIN/top" if of_top != "none" else ""),
    )  # fmt: skip
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / variable) if variable else ""}
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(top)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
    [resolved] = [file for _, soname, file in dependencies(str(top), environ) if soname == "libdep.so"]
    assert os.path.basename(os.path.dirname(resolved or "")) == expected
    assert [dependency.soname for dependency in missing(str(top), environ)] == ([] if expected else ["libdep.so"])


def test_a_runpath_replaces_the_rpath_of_one_file(tmp_path: Path) -> None:
    lists = {
        kind: read_elf(str(build(tmp_path / kind / "liblist.so", kind, folders="$ORIGIN/x::/y/../z:${ORIGIN}")))
        for kind in ("RPATH", "RUNPATH", "none")
    }
    folders = {kind: (f"{tmp_path}/{kind}/x", "/z", f"{tmp_path}/{kind}") for kind in lists}
    assert (lists["RPATH"].rpath, lists["RPATH"].runpath) == (folders["RPATH"], ())
    assert (lists["RUNPATH"].rpath, lists["RUNPATH"].runpath) == ((), folders["RUNPATH"])
    assert (lists["none"].rpath, lists["none"].runpath) == ((), ())
