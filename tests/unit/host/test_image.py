# SPDX-License-Identifier: Apache-2.0
"""What is installed, read from files: packages of NIXL, torch, versions of libraries, providers of libibverbs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import double_libraries
from helpers.copied_wheel import installed_library

from pytest_nixl.host import library_versions
from pytest_nixl.host.image import ask_verbs
from pytest_nixl.nixl.backends.driver_standin import shared_object
from pytest_nixl.nixl.installed import constants, torch_version

#: The file of a real torch for CUDA 12.8, with other revisions.
TORCH = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.9.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = '0fabc3ba44823f257e70ce397d989c8de5e362c1'
hip: Optional[str] = None
xpu: Optional[str] = None
"""


def library(folder: Path, name: str, soname: str) -> Path:
    """Write a library, and a link from its soname as ldconfig makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(shared_object(soname, ["function"], 0, "x86_64"))
    if name != soname:
        (folder / soname).symlink_to(name)
    return path


def test_version_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "torch" / "version.py"
    path.parent.mkdir()
    path.with_name("__init__.py").write_text("raise RuntimeError('torch must not be imported')")
    path.write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_version() == {"version": "2.9.0+cu128", "cuda": "12.8", "path": str(path)}
    assert "torch" not in sys.modules


def test_constants_of_source_are_not_executed() -> None:
    assert constants("a = b = 1\nc: int\nd[0] = 2\nraise SystemExit") == {"a": 1, "b": 1}


def test_versions_in_names_of_files(tmp_path: Path) -> None:
    cudart = library(tmp_path, "libcudart.so.12.8.90", "libcudart.so.12")
    gdrcopy = library(tmp_path, "libgdrapi.so.2.5", "libgdrapi.so.2")
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert library_versions.cuda(environ, 12) == ("12.8.90", str(cudart), "")
    assert library_versions.gdrcopy(environ) == ("2.5", str(gdrcopy), "")
    for name in ("libgdrapi.so.2", "libgdrapi.so.2.5.debug", "libgdrapi.so."):
        alone = library(tmp_path / f"alone {name}", name, "libgdrapi.so.2")
        environ = {"LD_LIBRARY_PATH": str(alone.parent)}
        assert library_versions.gdrcopy(environ) == ("", str(alone), f"the name of {alone} has no version")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which the only one of NIXL is nixl-cu12, with a library of UCX."""
    for name in ("nixl_cu12", "nixl_cu12.libs", "lib"):
        (tmp_path / name).mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"1.23.0\0", "1.23.0"),
        (b"\0x\0UCX 12.1.100\0", "12.1.100"),
        (b"1.2.3\0 and again 1.2.3\0", "1.2.3"),
        (b"1.2.3\0 or 1.2.4\0", ""),
        (b"GLIBC_2.2.5\0libucp.so.0.0.0\0v1234.5.6\0001.2.3 \0001.2.3456\0", ""),
    ],
)
def test_the_version_of_ucx_is_the_only_text_of_three_numbers_in_its_library(
    site: Path, content: bytes, version: str
) -> None:
    path = site / "nixl_cu12.libs" / "libucp-0a1b2c3d.so.0.0.0"
    path.write_bytes(content)
    (path.parent / "libuct-0a1b2c3d.so.0.0.0").write_bytes(b"9.9.9\0")
    reason = "" if version else f"{path} does not tell its version"
    assert library_versions.ucx({}) == (version, str(path), reason)


def test_ucx_is_that_of_the_wheel_or_of_the_loader(site: Path) -> None:
    absent = "", "libucp.so.0", "NIXL's wheel brings no UCX, and the loader does not find libucp.so.0"
    assert library_versions.ucx({}) == absent
    path = library(site / "lib", "libucp.so.0", "libucp.so.0")
    with path.open("ab") as file:
        file.write(b"\x001.19.0\0")
    environ = {"LD_LIBRARY_PATH": str(path.parent)}
    assert library_versions.ucx(environ) == ("1.19.0", str(path), "")
    copies = [site / "nixl_cu12.libs" / f"libucp-{number}.so.0" for number in (1, 2)]
    for copy in copies:
        copy.write_bytes(b"1.21.0\0")
    assert library_versions.ucx(environ) == ("1.21.0", f"{copies[0]}, {copies[1]}", "")
    unreadable = site / "nixl_cu12.libs" / "libucp-3.so.0"
    unreadable.mkdir()
    assert library_versions.ucx(environ) == ("", str(unreadable), f"{unreadable} cannot be read (Is a directory)")


def test_version_of_cuda_without_its_runtime_is_that_of_the_toolkit(tmp_path: Path) -> None:
    file = tmp_path / "version.json"
    reason = f"the loader does not find libcudart.so.99, and {file} does not say a version"
    assert library_versions.cuda({}, 99, str(file)) == ("", str(file), reason)
    for text in ("{", "[]", '{"cuda": 3}'):
        file.write_text(text)
        assert library_versions.cuda({}, 99, str(file)) == ("", str(file), reason)
    file.write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.9.1"}}))
    assert library_versions.cuda({}, 99, str(file)) == ("12.9.1", str(file), "")


def test_versions_of_libfabric_and_of_the_etcd_client_are_in_files_of_their_packages(tmp_path: Path) -> None:
    fabric, etcd = library(tmp_path, "libfabric.so.1", "libfabric.so.1"), tmp_path / "libetcd-cpp-api-core.so"
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    rows: list[tuple[Callable[[], library_versions.Version], Path, str, str, str]] = [
        (
            lambda: library_versions.libfabric(environ),
            tmp_path / "pkgconfig" / "libfabric.pc",
            f"{fabric} does not contain its release",
            "Name: libfabric\nMy Version: 1\nVersion: 2.3.1amzn1.0\nLibs: -lfabric\n",
            "2.3.1amzn1.0",
        ),
        (
            lambda: library_versions.etcd_client(str(etcd)),
            tmp_path / "cmake" / "etcd-cpp-api" / "etcd-cpp-api-config-version.cmake",
            f"{etcd} does not contain its version",
            '# This is a basic version file\n\nset(PACKAGE_VERSION "0.15.4")\n',
            "0.15.4",
        ),
    ]
    for read, file, lack, text, version in rows:
        assert read() == ("", str(file), f"{lack}, and {file} cannot be read (No such file or directory)")
        file.parent.mkdir(parents=True)
        file.write_text("# nothing")
        assert read() == ("", str(file), f"{lack}, and {file} says none")
        file.write_text(text)
        assert read() == (version, str(file), "")
    assert library_versions.etcd_client("") == ("", "libetcd-cpp-api", "NIXL was built without etcd")


#: The symbol versions of a libibverbs; the last have no number.
VERSIONS = "IBVERBS_1.0 IBVERBS_PRIVATE_9 IBVERBS_PRIVATE_34 IBVERBS_PRIVATE_ MY_IBVERBS_PRIVATE_99"


def build(path: Path, *options: str, versions: str = "") -> Path:
    """Build a library that defines symbol versions."""
    names, script = versions.split(), path.with_suffix(".map")
    path.parent.mkdir(exist_ok=True)
    script.write_text("\n".join(f"{name} {{ global: f{number}; }};" for number, name in enumerate(names)))
    options = ("-Wl,--no-as-needed", *options, *([f"-Wl,--version-script={script}"] if names else []))
    source = "".join(f"int f{number}(void) {{ return 1; }}\n" for number in range(len(names) + 1))
    double_libraries.build(path.parent, {path.name: source}, *options)
    return path


def test_the_copies_of_libibverbs_and_their_providers_are_read(tmp_path: Path) -> None:
    soname = "-Wl,-soname,libibverbs.so.1"
    copy = build(tmp_path / "wheel" / "libibverbs-0a1b2c3d.so.1.14", soname, versions=VERSIONS)
    other = build(tmp_path / "other" / "libibverbs.so", soname, versions="IBVERBS_1.0")
    bare = build(tmp_path / "bare" / "libibverbs.so", soname, versions="IBVERBS_PRIVATE_7")
    system = build(tmp_path / "system" / "libibverbs.so.1", soname, versions="IBVERBS_PRIVATE_59")
    providers = tmp_path / "providers"
    runpath = f"-Wl,-rpath,{system.parent}"
    linked = build(providers / "libefa-rdmav34.so", str(system), runpath)
    alone = build(tmp_path / "wheel" / "libibverbs" / "libmlx5-rdmav59.so")
    for name in ("libefa-rdmav.so", "lib-rdmav34.so", "libefa.so", "libefa-rdmav34.so.1", "libtext-rdmav7.so"):
        (providers / name).write_text("text")
    names = (
        "libmlx5-0a1b2c3d.so.1.2",
        "libefa.so",
        "libmlx5.software",
        "libmlx4.so",
        "lib-0a1b2c3d.so.1",
        "libibverbs.sox",
    )
    loaded = [str(tmp_path / "wheel" / name) for name in names]
    loaded += [
        str(copy),
        str(tmp_path / "system" / "libmlx5.so.1"),
        str(other),
        str(other.parent / "libefa.so.1"),
        str(bare),
    ]
    verbs = ask_verbs(loaded, {}, [str(providers)])
    own, bundled = {"path": str(copy), "abi": 34}, {"abi": 34, "library": str(copy)}
    assert verbs == {
        "libraries": [own, {"path": str(bare), "abi": 7}],
        "providers": [
            {"name": "efa", "abi": 34, "path": str(linked), "library": str(system)},
            {"name": "text", "abi": 7, "path": str(providers / "libtext-rdmav7.so"), "library": ""},
            {"name": "mlx5", "abi": 59, "path": str(alone), "library": ""},
            {"name": "mlx5", "path": loaded[0], **bundled},
            {"name": "efa", "path": loaded[1], **bundled},
        ],
    }
    # Without a loaded libibverbs, the one of the loader counts.
    environ = {"LD_LIBRARY_PATH": str(system.parent)}
    assert ask_verbs(["/usr/lib/libucp.so.0"], environ, []) == {
        "libraries": [{"path": str(system), "abi": 59}],
        "providers": [],
    }


def test_interface_number_of_a_real_libibverbs_is_read() -> None:
    path = str(installed_library("libibverbs-*.so*"))
    # The library's code has the same number in the name of the providers that it opens.
    [abi] = {verb["abi"] for verb in ask_verbs([path], {}, [])["libraries"]}
    assert f"lib%s-rdmav{abi}.so".encode() in Path(path).read_bytes()
    assert ask_verbs([__file__.replace(".py", "/libibverbs.so.1")], {}, []) == {"libraries": [], "providers": []}
