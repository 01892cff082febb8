# SPDX-License-Identifier: Apache-2.0
"""Each plugin of NIXL's real wheel from which one library was removed is named with that library."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.copied_wheel import CopiedWheel, copy_wheel
from helpers.double_libraries import in_a_child

from pytest_nixl.core.plain import from_plain
from pytest_nixl.host import plugin_files, plugin_loader
from pytest_nixl.host.facts import gather
from pytest_nixl.host.plugin_files import (
    PluginFile,
    PluginsInAdvance,
    installed_libnixl,
    plugin_folder,
    plugin_name,
    remedies,
)
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.software import Lacking
from pytest_nixl.nixl.backends.driver_standin import shared_object

#: By plugin: a library that only this plugin needs, or that NIXL's own library does not load before it.
REMOVED = {
    "AZURE_BLOB": "libazure-storage-blobs-*.so*",
    "LIBFABRIC": "libnuma-*.so*",
    "UCX": "libucp-*.so*",
}
#: The plugins of the wheel that need nothing that the wheel lacks.
COMPLETE = ("AZURE_BLOB", "GUSLI", "OBJ", "POSIX", "UCX")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> CopiedWheel:
    return copy_wheel(tmp_path_factory.mktemp("wheel") / "site")


def loaded(wheel: CopiedWheel) -> dict[str, PluginFile]:
    return {file.name: file for file in load_plugins(str(wheel.plugins), str(wheel.library))}


def load_plugins(folder: str, library: str) -> list[PluginFile]:
    """Load each plugin of a folder. :param library: NIXL's library, which is loaded first; empty to load none."""
    with closing(PluginsInAdvance({})) as plugins:
        return [from_plain(PluginFile, plugin) for plugin in plugins.load(folder, library)]


@pytest.mark.long
def test_plugins_of_the_wheel_load_or_name_what_the_machine_lacks(wheel: CopiedWheel) -> None:
    plugin_files = loaded(wheel)
    assert {name for name, file in plugin_files.items() if not file.error} >= set(COMPLETE)
    for name, file in plugin_files.items():
        assert file.path == str(wheel.plugins / f"libplugin_{name}.so")
        assert bool(file.error) == bool(file.missing), file
        # Everything that NIXL's wheel should contain is there.
        assert [library.soname for library in file.missing if list(wheel.site.rglob(library.soname))] == []
    assert (
        "libcufile.so.0" in {library.soname for library in plugin_files["GDS"].missing} or not plugin_files["GDS"].error
    )


@pytest.mark.parametrize("plugin", REMOVED)
def test_plugin_is_named_with_the_library_that_was_removed(
    plugin: str, wheel: CopiedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = wheel.copy(tmp_path / "site", plugin)
    soname = copy.remove(REMOVED[plugin])
    monkeypatch.syspath_prepend(str(copy.site))
    [file] = loaded(copy).values()
    assert file.name == plugin
    assert file.error
    assert soname in {library.soname for library in file.missing}
    assert soname in file.words
    # The wheel's own list of files says whose library it is.
    assert copy.package in file.remedies[soname]
    assert "pip install --force-reinstall" in file.remedies[soname]


def test_every_plugin_that_cannot_be_loaded_is_tried_in_a_process_of_its_own(
    wheel: CopiedWheel, tmp_path: Path
) -> None:
    copy = wheel.copy(tmp_path / "site", "POSIX")
    (copy.plugins / "libplugin_TEXT.so").write_text("not a library" * 100)
    (copy.plugins / "libplugin_EMPTY.so").touch()
    plugin_files = loaded(copy)
    assert list(plugin_files) == ["EMPTY", "POSIX", "TEXT"]
    assert not plugin_files["POSIX"].error
    assert "invalid ELF header" in plugin_files["TEXT"].words
    assert "file too short" in plugin_files["EMPTY"].words


#: By soname: what provides it if no installed package has it.
KNOWN = {
    "libnvidia-ml.so.1": "give the container the host's driver (`docker run --gpus all`)",
    "libcudart.so.13": "install the CUDA 13 runtime (apt: cuda-cudart-13-*; pip: nvidia-cuda-runtime-cu12 or "
    "nvidia-cuda-runtime)",
    "libcufile_rdma.so.1": "install cuFile (apt: libcufile-*; pip: nvidia-cufile-cu12 or nvidia-cufile)",
    "libdoca_telemetry_exporter.so.2": "install NVIDIA DOCA (apt: doca-sdk-telemetry-exporter)",
    "libdoca_gpunetio.so.2": "install NVIDIA DOCA (apt: doca-sdk-gpunetio)",
    "libdoca_verbs.so.2": "install NVIDIA DOCA (apt: doca-sdk-verbs and doca-sdk-common)",
    "libhwloc.so.15": "install hwloc (apt: libhwloc15)",
    "libhwloc.so.5": "install hwloc (apt: libhwloc-dev)",
    "libaio.so.1t64": "install libaio (apt: libaio1, or libaio1t64 on Ubuntu 24.04)",
    "libnixl_build.so": "copy all libraries of NIXL's build into the image",
    "libodd.so.7": "install the package that has libodd.so.7 (`apt-file search libodd.so.7` names it)",
}


def test_known_libraries_have_a_remedy_and_others_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert remedies(KNOWN) == KNOWN


def package(site: Path, name: str, *files: str) -> None:
    """Install a package of which only the records exist."""
    records = site / f"{name}-2.0.dist-info"
    records.mkdir(parents=True)
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (records / "RECORD").write_text("".join(f"{file},sha256=a,7\n" for file in files))


def test_the_package_that_has_a_library_or_has_lost_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    package(tmp_path, "acme", "acme.libs/notlibx.so.1", "acme.libs/libx.so.1", "liby.so", "libz.so.1")
    package(tmp_path, "other", "other.libs/libx.so.1.2", "other.libs/libz.so")
    (tmp_path / "acme.libs").mkdir()
    (tmp_path / "acme.libs" / "libx.so.1").touch()
    assert remedies(["libx.so.1", "liby.so", "libz.so"]) == {
        "libx.so.1": f"add {tmp_path}/acme.libs to LD_LIBRARY_PATH: acme 2.0 has libx.so.1 there",
        "liby.so": f"reinstall acme, whose file {tmp_path}/liby.so is missing: "
        "`pip install --force-reinstall --no-deps acme==2.0`",
        "libz.so": f"reinstall other, whose file {tmp_path}/other.libs/libz.so is missing: "
        "`pip install --force-reinstall --no-deps other==2.0`",
    }


def test_the_library_that_an_import_of_nixl_will_load_is_known_if_one_package_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed_libnixl() == []
    package(tmp_path, "nixl", "nixl/__init__.py")
    package(tmp_path, "nixl_cu12", ".a/libnixl.so", ".a/libnixl_build.so", ".a/plugins/libnixl-0a1b2c3d.so")
    assert installed_libnixl() == [f"{tmp_path}/.a/libnixl.so", f"{tmp_path}/.a/plugins/libnixl-0a1b2c3d.so"]
    package(tmp_path, "nixl_cu13", ".b/libnixl.so")
    assert installed_libnixl() == []


OWN = Lacking("liba.so", (), "liba.so, which libplugin_X.so needs, was not found")
OTHER = Lacking("libb.so", ("B_1",), "/b/libb.so lacks the symbol version B_1 that liba.so needs")
SECOND = Lacking("libc.so", (), "libc.so, which libplugin_X.so needs, was not found")


@pytest.mark.parametrize(
    ("missing", "without", "remaining", "error", "text"),
    [
        ((OWN, OTHER, SECOND), (), (OWN, OTHER, SECOND), "no", f"lacks liba.so, libc.so; {OTHER.words}"),
        ((OWN, OTHER), ("liba.so",), (OTHER,), "no", OTHER.words),
        ((OWN, OTHER), ("libb.so", "liba.so"), (), "", ""),
        ((), ("liba.so",), (), "no", "no"),
    ],
)
def test_a_plugin_names_what_it_lacks_itself_and_what_other_libraries_lack(
    missing: tuple[Lacking, ...], without: tuple[str, ...], remaining: tuple[Lacking, ...], error: str, text: str
) -> None:
    file = PluginFile("X", "/p/libplugin_X.so", "no", missing, {"liba.so": "r"}).without(without)
    assert file == PluginFile("X", "/p/libplugin_X.so", error, remaining, {"liba.so": "r"})
    assert file.words == text


def test_the_name_of_a_plugin_is_that_of_its_file() -> None:
    names = {"/p/libplugin_UCX_MO.so": "UCX_MO", "/p/libplugin_.so": "libplugin_.so", "/libplugin_A.so/odd": "odd"}
    assert {path: plugin_name(path) for path in names} == names


def test_variable_replaces_the_folder_of_the_plugins(tmp_path: Path) -> None:
    libraries = ["/usr/lib/libucp.so.0", str(tmp_path / "libnixl-0a1b2c3d.so")]
    assert plugin_folder({}, libraries) == ""
    (tmp_path / "nixl").mkdir()
    assert plugin_folder({}, libraries) == str(tmp_path / "nixl")
    (tmp_path / "plugins").mkdir()
    assert plugin_folder({}, libraries) == str(tmp_path / "plugins")
    assert plugin_folder({"NIXL_PLUGIN_DIR": "/plugins"}, libraries) == "/plugins"
    assert plugin_folder({}, libraries[:1]) == ""
    assert load_plugins(os.devnull, "") == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plugin that no loader reads."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "libplugin_TEXT.so").write_text("not a library" * 100)
    return tmp_path / "plugins"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose plugins were loaded, in order."""
    folders: list[str] = []
    real = plugin_files.PluginLoading.__init__

    def init(self: plugin_files.PluginLoading, folder: str, library: str) -> None:
        folders.append(folder)
        real(self, folder, library)

    monkeypatch.setattr(plugin_files.PluginLoading, "__init__", init)
    return folders


def test_plugins_that_are_loaded_in_advance_are_loaded_once(folder: Path, started: list[str]) -> None:
    library = str(folder.parent / "libnixl.so")
    with closing(PluginsInAdvance({})) as plugins:
        plugins.start([library])
        assert started == [str(folder)]
        [loaded_plugin] = plugins.load(str(folder), library)
    assert "invalid ELF header" in loaded_plugin["error"]
    assert started == [str(folder)]


def test_plugins_of_another_folder_than_that_in_advance_are_loaded(
    folder: Path, tmp_path: Path, started: list[str]
) -> None:
    (tmp_path / "other").mkdir()
    with closing(PluginsInAdvance({"NIXL_PLUGIN_DIR": str(tmp_path / "other")})) as plugins:
        plugins.start([])
        assert [plugin["name"] for plugin in plugins.load(str(folder), "")] == ["TEXT"]
    assert started == [str(tmp_path / "other"), str(folder)]


def test_nothing_is_loaded_in_advance_without_a_folder(tmp_path: Path, started: list[str]) -> None:
    with closing(PluginsInAdvance({})) as plugins:
        plugins.start([str(tmp_path / "libnixl.so")])
    assert started == []


def test_plugins_of_the_installed_nixl_are_loaded_once_while_nixl_is(started: list[str]) -> None:
    facts = gather(FactsRoot(), environ={})
    assert started == [facts.image.plugins.source]


def test_a_plugin_is_loaded_after_nixls_library(tmp_path: Path) -> None:
    for name in ("libnixl.so", "libplugin_GOOD.so"):
        (tmp_path / name).write_bytes(shared_object(name, ["function"], 0, platform.machine()))
    good, text = str(tmp_path / "libplugin_GOOD.so"), tmp_path / "libplugin_TEXT.so"
    text.write_text("not a library" * 100)
    assert plugin_loader.missing_libraries(str(text), []) == []

    def load() -> list[dict[str, Any]]:
        loads = (("", good), (str(text), good), (str(tmp_path / "libnixl.so"), str(text)))
        return [plugin_loader.load(library, plugin) for library, plugin in loads]

    *loaded, answer = in_a_child([], load)
    assert loaded == [{"error": "", "loaded": []}] * 2
    assert answer["error"] == f"{text}: invalid ELF header"
    assert {str(tmp_path / "libnixl.so"), good} <= set(answer["loaded"])
    assert all(".so" in path and os.path.isabs(path) for path in answer["loaded"])
    assert len(set(answer["loaded"])) == len(answer["loaded"])


# A double of NIXL's library, because no release does this when it is loaded.
@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "invalid ELF header"),
        ("os.abort()", "the process that loaded it was ended by SIGABRT"),
    ],
)
def test_each_plugin_is_tried_if_nixl_cannot_be_loaded_once_for_all(does: str, error: str, folder: Path) -> None:
    shutil.copy(folder / "libplugin_TEXT.so", folder / "libplugin_OTHER.so")
    plugins = [str(path) for path in sorted(folder.iterdir())]
    code = (
        "import os, threading, time\n"
        "from pytest_nixl.host import plugin_loader\n"
        f"plugin_loader._load_library = lambda library: {does}\n"
        f"plugin_loader.main('libnixl.so', {plugins!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [attempt["path"] for attempt in attempts] == plugins
    assert all(error in attempt["error"] for attempt in attempts)


def test_loading_ends_with_its_owner(folder: Path) -> None:
    loading = plugin_files.PluginLoading(str(folder), "")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    loading.close()
    ended = before - set(children.read_text().split())
    assert len(ended) == 1
