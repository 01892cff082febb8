# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the CUDA driver: when there is one, what it contains, and who is told."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.model.tools import DRIVER_STANDIN, RUN_DIRECTORY, own_variables
from pytest_nixl.nixl.backends import driver_standin, libfabric, with_driver_standin
from pytest_nixl.nixl.backends.driver_standin import bound_functions, real_driver, refusal, write_standin
from pytest_nixl.nixl.backends.libfabric import PLUGIN
from pytest_nixl.nixl.backends.libraries import DRIVER, FABRIC, Finder, LibraryError, find_plugin, locate

#: The functions of the CUDA driver that the LIBFABRIC plugin of NIXL 1.0 to 1.5.1 binds.
BOUND = {"cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes"}


@pytest.fixture
def plugin() -> str:
    """The LIBFABRIC plugin of the installed NIXL."""
    path = find_plugin(os.environ, "", PACKAGES, PLUGIN)
    assert path is not None
    return path


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without an NVIDIA driver, whatever this machine has."""
    empty = tmp_path / "root"
    empty.mkdir()
    monkeypatch.setattr(driver_standin, "_ROOT", str(empty))


def nothing(**environ: str) -> Finder:
    """A search that finds no library."""
    return Finder(environ, lambda: "", lambda package: (), ())


@pytest.mark.parametrize(
    "file", ["dev/nvidiactl", "dev/nvidia0", "dev/dxg", "dev/nvhost-gpu", "dev/nvgpu", "proc/driver/nvidia/version"]
)
def test_host_with_a_driver_gets_no_stand_in(tmp_path: Path, file: str) -> None:
    assert real_driver(str(tmp_path)) == ""
    assert refusal({}, root=str(tmp_path), machine="x86_64") == ""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    assert f"has an NVIDIA driver ({tmp_path}/{file})" in refusal({}, root=str(tmp_path), machine="x86_64")


def test_a_variable_and_another_processor_forbid_the_stand_in(tmp_path: Path) -> None:
    assert f"{DRIVER_STANDIN}=never" in refusal({DRIVER_STANDIN: "never"}, root=str(tmp_path), machine="x86_64")
    assert refusal({}, root=str(tmp_path), machine="ppc64le").endswith("on ppc64le")
    assert refusal({}, root=str(tmp_path), machine="aarch64") == ""


@pytest.mark.parametrize("pair", ["VRAM:DRAM", "DRAM:VRAM", "VRAM:VRAM", "VRAM:FILE"])
def test_gpu_memory_forbids_the_stand_in_in_every_worker(pair: str) -> None:
    assert own_variables({}, memory=(HOST, MemoryPair.parse(pair)))[DRIVER_STANDIN] == "never"
    assert DRIVER_STANDIN not in own_variables({}, memory=(HOST, MemoryPair("DRAM", "FILE")))


def test_functions_are_those_that_the_real_plugin_binds(plugin: str, tmp_path: Path) -> None:
    assert set(bound_functions([plugin])) == BOUND
    path = write_standin(str(tmp_path), plugin)
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "driver = ctypes.CDLL('libcuda.so.1')\n"
        "print({getattr(driver, name)(0) for name in sys.argv[2:]}, hasattr(driver, 'cuMemAlloc_v2'))\n"
    )
    names = [*BOUND, "cuInit", "cuDriverGetVersion"]
    command = [sys.executable, "-c", script, path, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("{100} False\n", "")


@pytest.mark.long
def test_workers_of_a_run_share_one_file(plugin: str, tmp_path: Path) -> None:
    first = write_standin(str(tmp_path), plugin)
    written = os.stat(first).st_ino
    assert write_standin(str(tmp_path), plugin) == first
    assert os.stat(first).st_ino == written
    assert os.listdir(tmp_path) == [os.path.basename(first)]


def test_changed_plugins_get_another_file(tmp_path: Path) -> None:
    plugin = tmp_path / "libplugin_X.so"
    written = []
    for text, modified in (("a", 1), ("a", 1), ("ab", 1), ("ab", 2)):
        plugin.write_text(text)
        os.utime(plugin, (modified, modified))
        written.append(write_standin(str(tmp_path), str(plugin)))
    (tmp_path / "libplugin_Y.so").write_text("a")
    written.append(write_standin(str(tmp_path), str(plugin)))
    assert [written.index(path) for path in written] == [0, 0, 2, 3, 4]


def test_missing_driver_is_replaced_in_the_directory_of_the_run(plugin: str, tmp_path: Path, no_driver: None) -> None:
    run = tmp_path / "run"
    run.mkdir()
    [path], recorded = locate(nothing(**{RUN_DIRECTORY: str(run)}), DRIVER, "libcuda.so.1", plugin)
    assert Path(path).parent == run
    assert recorded == {driver_standin.RECORDED: driver_standin.VALUE}


def test_named_driver_wins_and_a_wrong_name_is_not_replaced(plugin: str, tmp_path: Path, no_driver: None) -> None:
    mine = tmp_path / "mine.so"
    mine.touch()
    named = nothing(PYTEST_NIXL_LIBCUDA=str(mine), **{RUN_DIRECTORY: str(tmp_path)})
    assert locate(named, DRIVER, "libcuda.so.1", plugin) == ([str(mine)], {})
    with pytest.raises(LibraryError, match=r"^PYTEST_NIXL_LIBCUDA=/no/file "):
        locate(
            nothing(PYTEST_NIXL_LIBCUDA="/no/file", **{RUN_DIRECTORY: str(tmp_path)}), DRIVER, "libcuda.so.1", plugin
        )


def test_driver_that_only_the_loader_finds_is_used(plugin: str, no_driver: None) -> None:
    assert locate(nothing(), DRIVER, "libc.so.6", plugin) == (["libc.so.6"], {})


def test_no_other_library_is_replaced_and_a_refusal_is_said(plugin: str, tmp_path: Path, no_driver: None) -> None:
    with pytest.raises(LibraryError, match=r"needs libfabric\.so\.1"):
        locate(nothing(**{RUN_DIRECTORY: str(tmp_path)}), FABRIC, "libfabric.so.1", plugin)
    with pytest.raises(LibraryError, match=r"needs libcuda\.so\.9.*; no stand-in .*=never"):
        locate(nothing(**{RUN_DIRECTORY: str(tmp_path), DRIVER_STANDIN: "never"}), DRIVER, "libcuda.so.9", plugin)
    with pytest.raises(LibraryError, match=r"needs libcuda\.so\.9"):
        locate(nothing(), DRIVER, "libcuda.so.9", plugin)


def test_directory_that_cannot_hold_it_is_named_with_a_remedy(plugin: str, no_driver: None) -> None:
    with pytest.raises(LibraryError, match=r"^the stand-in for libcuda\.so\.1 in /no/folder ") as caught:
        locate(nothing(**{RUN_DIRECTORY: "/no/folder"}), DRIVER, "libcuda.so.9", plugin)
    assert "TMPDIR" in caught.value.remedy


@pytest.mark.skipif(bool(Finder({}).found(DRIVER, "libcuda.so.1")), reason="this machine has the CUDA driver's library")
def test_header_names_the_backends_that_get_it(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The plugin of NIXL 1.5.1 fits no libfabric, so that its missing libraries are not looked for.
    assert with_driver_standin(("UCX", "LIBFABRIC"), {}) in ((), ("LIBFABRIC",))
    monkeypatch.setattr(libfabric, "UNRELEASED", (9, 9))
    assert with_driver_standin(("UCX", "LIBFABRIC"), {}) == ("LIBFABRIC",)
    assert with_driver_standin(("UCX",), {}) == ()
    assert with_driver_standin(("LIBFABRIC",), {DRIVER_STANDIN: "never"}) == ()
    assert with_driver_standin(("LIBFABRIC",), {"PYTEST_NIXL_LIBCUDA": "/any"}) == ()


def test_damaged_plugin_is_one_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "libplugin_ANY.so"
    damaged.write_bytes(b"\x7fELF\x02\x01\x01 libcuda.so.1")
    with pytest.raises(ValueError, match=rf"^{damaged} is damaged"):
        write_standin(str(tmp_path), str(damaged))


def test_processor_of_this_machine_is_supported() -> None:
    assert refusal({}, root="/no/root", machine="") == "" or platform.machine() not in ("x86_64", "aarch64")
