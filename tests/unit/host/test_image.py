# SPDX-License-Identifier: Apache-2.0
"""What is installed, read from files: packages of NIXL, torch, versions of libraries, providers of libibverbs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.copied_wheel import installed_library

from pytest_nixl.host import library_versions
from pytest_nixl.host.image import ask_verbs
from pytest_nixl.nixl.backends.driver_standin import shared_object
from pytest_nixl.nixl.installed import constants, cuda_of_nixl, nixl_packages, torch_version

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


def with_torch(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise RuntimeError('torch must not be imported')")
    (folder / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return folder / "torch" / "version.py"


def test_version_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_torch(tmp_path, TORCH, monkeypatch)
    assert torch_version() == {"version": "2.9.0+cu128", "cuda": "12.8", "path": str(path)}
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TORCH.replace("'12.8'", "None"), ("2.9.0+cu128", "")),
        ("__version__ = '2.5'", ("2.5", "")),
        ("import os\n__version__ = os.environ['V']", None),
        ("this is not Python", None),
        ("", None),
    ],
)
def test_torch_without_cuda_or_without_a_version(
    text: str, expected: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_torch(tmp_path, text, monkeypatch)
    read = torch_version()
    assert (read and (read["version"], read["cuda"])) == (expected or {})


def test_constants_of_source_are_not_executed() -> None:
    assert constants("a = b = 1\nc: int\nd[0] = 2\nraise SystemExit") == {"a": 1, "b": 1}


def test_cuda_of_nixl_is_that_of_the_loaded_module() -> None:
    libraries = ["/usr/local/cuda/lib64/libcudart.so.13"]
    assert cuda_of_nixl("/site/nixl_cu12/_api.py", libraries) == (12, "/site/nixl_cu12/_api.py")
    for own_build in ("/opt/nixl/_api.py", "/build/nixl_cu12/nixl/_api.py"):
        assert cuda_of_nixl(own_build, libraries) == (13, libraries[0])
    assert cuda_of_nixl("/opt/nixl/_api.py", ["/usr/lib/libucp.so.0"]) is None


def test_every_installed_package_of_nixl_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = nixl_packages()
    for number, name in enumerate(("nixl_rocm", "nixl_rocm7_1", "nixl_CU99", "nixl_tools", "nixl_cu")):
        records = tmp_path / f"{name}-0.0.{number}.dist-info"
        records.mkdir()
        (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.{number}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nixl_packages() == {**before, "nixl-rocm": "0.0.0", "nixl-rocm7-1": "0.0.1", "nixl-cu99": "0.0.2"}


def test_versions_in_names_of_files(tmp_path: Path) -> None:
    cudart = library(tmp_path, "libcudart.so.12.8.90", "libcudart.so.12")
    gdrcopy = library(tmp_path, "libgdrapi.so.2.5", "libgdrapi.so.2")
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert library_versions.cuda(environ, 12) == ("12.8.90", str(cudart), "")
    assert library_versions.gdrcopy(environ) == ("2.5", str(gdrcopy), "")
    alone = library(tmp_path / "alone", "libgdrapi.so.2", "libgdrapi.so.2")
    version, source, reason = library_versions.gdrcopy({"LD_LIBRARY_PATH": str(alone.parent)})
    assert (version, source) == ("", str(alone))
    assert reason == f"the name of {alone} has no version"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"1.23.0\0", {"1.23.0"}),
        (b"\0x\0UCX 12.1.100\0", {"12.1.100"}),
        (b"GLIBC_2.2.5\0libucp.so.0.0.0\0v1234.5.6\0001.2.3 \0", set()),
    ],
)
def test_a_version_in_a_library_is_a_text_of_three_numbers(tmp_path: Path, content: bytes, expected: set[str]) -> None:
    path = tmp_path / "libucp.so.0"
    path.write_bytes(content)
    assert library_versions._versions_in(str(path)) == expected


def test_version_of_cuda_without_its_runtime_is_that_of_the_toolkit(tmp_path: Path) -> None:
    file = tmp_path / "version.json"
    version, _, reason = library_versions.cuda({}, 99, str(file))
    assert version == ""
    assert reason == f"the loader does not find libcudart.so.99, and {file} does not say a version"
    for text in ("{", "[]", '{"cuda": 3}'):
        file.write_text(text)
        assert library_versions.cuda({}, 99, str(file))[0] == ""
    file.write_text(json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.9.1"}}))
    assert library_versions.cuda({}, 99, str(file)) == ("12.9.1", str(file), "")


def test_version_of_libfabric_is_in_the_file_for_pkg_config(tmp_path: Path) -> None:
    path = library(tmp_path, "libfabric.so.1", "libfabric.so.1")
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert f"{path} does not contain its release" in library_versions.libfabric(environ)[2]
    file = tmp_path / "pkgconfig" / "libfabric.pc"
    file.parent.mkdir()
    file.write_text("Name: libfabric\nVersion: 2.3.1amzn1.0\nLibs: -lfabric\n")
    assert library_versions.libfabric(environ) == ("2.3.1amzn1.0", str(file), "")
    file.write_text("Name: libfabric\n")
    assert library_versions.libfabric(environ)[0] == ""


def test_version_of_the_etcd_client_is_in_the_file_for_cmake(tmp_path: Path) -> None:
    path = str(tmp_path / "libetcd-cpp-api-core.so")
    assert library_versions.etcd_client("")[2] == "NIXL was built without etcd"
    assert f"{path} does not contain its version" in library_versions.etcd_client(path)[2]
    file = tmp_path / "cmake" / "etcd-cpp-api" / "etcd-cpp-api-config-version.cmake"
    file.parent.mkdir(parents=True)
    file.write_text('# This is a basic version file\n\nset(PACKAGE_VERSION "0.15.4")\n')
    assert library_versions.etcd_client(path) == ("0.15.4", str(file), "")


def test_providers_of_libibverbs_have_their_number_in_their_name(tmp_path: Path) -> None:
    for name in ("libefa-rdmav34.so", "libmlx5-rdmav59.so", "libefa.so"):
        (tmp_path / name).touch()
    verbs = ask_verbs(["/usr/lib/libucp.so.0"], {}, [str(tmp_path)])
    assert [(provider["name"], provider["abi"]) for provider in verbs["providers"]] == [("efa", 34), ("mlx5", 59)]


def test_interface_number_of_a_real_libibverbs_is_read() -> None:
    path = str(installed_library("libibverbs-*.so*"))
    # The library's code has the same number in the name of the providers that it opens.
    [abi] = {verb["abi"] for verb in ask_verbs([path], {}, [])["libraries"]}
    assert f"lib%s-rdmav{abi}.so".encode() in Path(path).read_bytes()
    assert ask_verbs([__file__.replace(".py", "/libibverbs.so.1")], {}, []) == {"libraries": [], "providers": []}
