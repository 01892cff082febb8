# SPDX-License-Identifier: Apache-2.0
"""The facts of an image: what was asked of its files, and how each answer becomes a fact with its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.copied_wheel import installed_library
from helpers.fake_sysfs import Asking, Tree

from pytest_nixl.host.elf import DeviceCode, device_code
from pytest_nixl.host.image import ImageFacts, VerbsLibrary, VerbsProvider, read_image
from pytest_nixl.host.plugin_files import PluginFile, PluginsInAdvance
from pytest_nixl.host.recorded_tree import NOT_RECORDED, Fact, FactsRoot
from pytest_nixl.host.software import Lacking, Software, read_software
from pytest_nixl.nixl.installed import nixl_packages, torch_version

TORCH = "/t/version.py"
LACKS = "libx.so, which libplugin_UCX.so needs, was not found"
MISSING = {"soname": "libx.so", "versions": [], "words": LACKS}
PLUGIN = {
    **{"name": "UCX", "path": "/p/libplugin_UCX.so", "error": "no"},
    **{"missing": [MISSING], "remedies": {"libx.so": "r"}},
}
ANSWER: dict[str, Any] = {
    "plugin_folder": "/p",
    "plugins": [PLUGIN],
    "packages": {"nixl-cu12": "1.5.1"},
    "nixl_ep": {"path": "/n/nixl_ep", "why": "it does not fit"},
    "torch": {"version": "2.9.0+cu128", "cuda": "12.8", "path": TORCH},
    "versions": {
        "cuda": ["12.8.90", "/c", ""],
        "gdrcopy": ["", "/g", "it is not there"],
        "libfabric": ["2.1", "/f", ""],
    },
    "device_code": [{"path": "/p/libplugin_GPUNETIO.so", "cubins": [90], "ptx": [80]}],
    "verbs": {
        "libraries": [{"path": "/v", "abi": 34}],
        "providers": [{"name": "efa", "abi": 34, "path": "/e", "library": "/v"}],
    },
}
#: What a worker answers of a backend that it created, besides the plugin.
BACKEND: dict[str, Any] = {"missing": [], "error": "", "remedy": "", "memories": [], "versions": {}}


def image(folder: Path, answer: Any, **nixl: Any) -> tuple[ImageFacts, Software]:
    """Return the facts of an image of a recorded tree, and those of its software.

    :param answer: what was asked of its files; None: nothing was.
    :param nixl: what a worker answered.
    """
    tree = Tree(folder)
    tree.answer("nixl", nixl)
    if answer is not None:
        tree.answer("image", answer)
    root = FactsRoot(folder)
    software = read_software(root, (), worker=None)
    return read_image(root, software, {}, PluginsInAdvance({})), software


def test_every_answer_about_an_image_is_a_fact(tmp_path: Path) -> None:
    nixl = {"nixl": "1.5.1", "nixl_module": "/s/nixl_cu12/_api.py", "ucx": "1.21", "backends": {}}
    facts, software = image(tmp_path, ANSWER, **nixl)
    lacking = Lacking("libx.so", (), LACKS)
    versions = {
        "cuda": Fact("12.8.90", "/c"),
        "gdrcopy": Fact[str](None, "/g", "it is not there"),
        "libfabric": Fact("2.1", "/f"),
        "nixl": software.nixl,
        "ucx": software.ucx,
        "efa_installer": software.efa_installer,
        "torch": Fact("2.9.0+cu128", TORCH),
    }
    assert facts == ImageFacts(
        plugins=Fact((PluginFile("UCX", "/p/libplugin_UCX.so", "no", (lacking,), {"libx.so": "r"}),), "/p"),
        nixl_packages={"nixl-cu12": "1.5.1"},
        nixl_cuda=Fact(12, "/s/nixl_cu12/_api.py"),
        torch=Fact("2.9.0+cu128", TORCH),
        torch_cuda=Fact("12.8", TORCH),
        nixl_ep=Fact(False, "/n/nixl_ep", "it does not fit"),
        versions=versions,
        device_code=(DeviceCode("/p/libplugin_GPUNETIO.so", (90,), (80,)),),
        verbs=(VerbsLibrary("/v", 34),),
        providers=(VerbsProvider("efa", 34, "/e", "/v"),),
    )
    # The libfabric that a worker has loaded counts more than what its package says.
    backend = {**BACKEND, "plugin": "", "versions": {"libfabric": "2.3"}}
    loaded, software = image(tmp_path / "loaded", ANSWER, **{**nixl, "backends": {"LIBFABRIC": backend}})
    assert (software.libfabric.value, loaded.versions["libfabric"]) == ("2.3", software.libfabric)
    assert replace(loaded, versions=versions) == facts


def test_what_an_image_does_not_have_is_unknown_with_its_reason(tmp_path: Path) -> None:
    torch, no_kernels = "torch/version.py", "nixl_ep"
    no_cuda = "neither the loaded module nor a loaded libcudart says it"
    unasked, _ = image(tmp_path / "unasked", None)
    assert unasked.torch == unasked.torch_cuda == Fact(None, torch, NOT_RECORDED)
    assert unasked.nixl_ep == Fact(None, no_kernels, NOT_RECORDED)
    assert unasked.nixl_cuda == Fact(None, "the loaded module", no_cuda)
    empty, _ = image(tmp_path / "empty", {}, nixl_module="/opt/nixl/_api.py")
    assert empty.torch == empty.torch_cuda == Fact(None, torch, "torch is not installed")
    assert empty.nixl_ep == Fact(None, no_kernels, "the loaded NIXL has no nixl_ep")
    assert empty.nixl_cuda == Fact(None, "/opt/nixl/_api.py", no_cuda)
    unjudged, _ = image(tmp_path / "unjudged", {"nixl_ep": {"path": "/n", "why": "", "unknown": "there is no torch"}})
    assert unjudged.nixl_ep == Fact(None, "/n", "there is no torch")


class Plugins:
    """A double that is asked for the plugins of a folder, because loading them takes a second."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def load(self, folder: str, library: str) -> list[dict[str, Any]]:
        self.asked.append((folder, library))
        return [{"name": "X", "path": f"{folder}/libplugin_X.so", "error": "", "missing": [], "remedies": {}}]


def asked(tree: Path, environ: dict[str, str], **nixl: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what is asked of the files of this host, and of which folders the plugins."""
    plugins: Any = Plugins()
    Tree(tree).answer("nixl", nixl)
    root = Asking(tree, "image")
    read_image(root, read_software(root, (), worker=None), environ, plugins)
    answer: dict[str, Any] = root.answers["image"]
    return answer, plugins.asked


def test_the_files_of_this_host_are_asked(tmp_path: Path) -> None:
    folder, tree, cuda = tmp_path / "plugins", tmp_path / "tree", tmp_path / "lib"
    for path in (folder, cuda):
        path.mkdir()
    real = installed_library("libplugin_GPUNETIO.so")
    (folder / "libplugin_GPUNETIO.so").symlink_to(real)
    (folder / "libplugin_A.so").write_text("text with .nv_fatbin")
    (folder / "libplugin_Z.so").write_text("text")
    (folder / "libx.so").symlink_to(real)
    for name, content in (("libetcd-cpp-api.so", ""), ("libcudart.so.13.1.2", "")):
        (cuda / name).write_text(content)
    cmake = cuda / "cmake" / "etcd-cpp-api" / "etcd-cpp-api-config-version.cmake"
    cmake.parent.mkdir(parents=True)
    cmake.write_text('set(PACKAGE_VERSION "0.15.4")')
    libraries = [str(tmp_path / "libnixl.so"), str(cuda / "libcudart.so.13")]
    client = {"path": str(cuda / "libetcd-cpp-api.so"), "patched": False}
    answer, folders = asked(tree, {"PATH": "/bin"}, nixl_module="/x/_api.py", libraries=libraries, etcd_client=client)
    code = device_code(str(real))
    assert code is not None
    versions = answer.pop("versions")
    assert answer == {
        "plugin_folder": str(folder),
        "packages": nixl_packages(),
        "torch": torch_version(),
        "nixl_ep": {},
        "device_code": [{"path": f"{folder}/libplugin_GPUNETIO.so", "cubins": [*code.cubins], "ptx": [*code.ptx]}],
        "verbs": answer["verbs"],
        "plugins": Plugins().load(str(folder), ""),
    }
    assert folders == [(str(folder), libraries[0])]
    assert versions["etcd_cpp_api"] == ("0.15.4", str(cmake), "")
    assert "libcudart.so.13" in versions["cuda"][2]
    assert versions.keys() == {"cuda", "gdrcopy", "libfabric", "etcd_cpp_api"}


def test_the_folder_of_the_plugins_is_that_of_the_variable_or_of_a_created_backend(tmp_path: Path) -> None:
    backends = {"A": {**BACKEND, "plugin": ""}, "B": {**BACKEND, "plugin": f"{tmp_path}/libplugin_B.so"}}
    used, folders = asked(tmp_path / "a", {}, backends=backends)
    assert (used["plugin_folder"], folders) == (str(tmp_path), [(str(tmp_path), "")])
    named, folders = asked(tmp_path / "b", {"NIXL_PLUGIN_DIR": "/no/such"}, backends=backends)
    assert (named["plugin_folder"], named["plugins"], folders) == ("/no/such", [], [])
    none, folders = asked(tmp_path / "c", {})
    assert (none["plugin_folder"], none["plugins"], none["device_code"], folders) == ("", [], [], [])
