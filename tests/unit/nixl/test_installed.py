# SPDX-License-Identifier: Apache-2.0
"""Which NIXL and torch are installed, and what to install. The packages are folders with the records of a wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_nixl.nixl import installed
from pytest_nixl.nixl.installed import (
    cuda_of_nixl,
    hidden_module,
    import_fault,
    nixl_packages,
    pip_command,
    release_of,
    torch_version,
    wheel_damage,
    wheel_for_torch,
)
from pytest_nixl.nixl.worker import nixl_api


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, the only one of this Python."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def install(folder: Path, *packages: str) -> None:
    for package in packages:
        name, _, version = package.partition("==")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def torch(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the versions of a torch, which a test writes."""
    (site / "torch").mkdir()
    spec = SimpleNamespace(origin=str(site / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else None)
    return site / "torch" / "version.py"


def test_all_packages_of_nixl_are_listed_and_the_first_folder_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-rocm6==1.4.0", "nixl-tools==9.0", "nixlbench==9.0")
    install(site, *(f"nixl-rocm6==1.4.{number}" for number in range(9, 0, -1)))
    install(site, "nixl-rocm-x==1.3.0", "nixl-cu14==", "nixl-==9.0", "nixl-cu==9.0", "nixl_CU99==1.2.0")
    install(tmp_path / "other", "nixl-cu12==1.4.0", "nixl-cu13==1.5.0")
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "other")])
    expected = {"nixl": "1.5.1", "nixl-cu12": "1.5.1", "nixl-rocm6": "1.4.0", "nixl-rocm-x": "1.3.0"}
    expected |= {"nixl-cu13": "1.5.0", "nixl-cu99": "1.2.0"}
    assert nixl_packages() == expected
    plugin = site / ".nixl_cu12.mesonpy.libs" / "plugins" / "libplugin_UCX.so"
    assert release_of(str(plugin)) == "1.5.1"
    assert release_of(str(site / ".nixl_cu13.mesonpy.libs" / "plugins" / "libplugin_UCX.so")) == ""


@pytest.mark.parametrize(
    ("module", "libraries", "expected"),
    [
        ("/site/nixl_cu12/_api.py", ["/lib/libcudart.so.13"], (12, "/site/nixl_cu12/_api.py")),
        ("/site/nixl/_api.py", ["/lib/libc.so.6", "/lib/libcudart.so.13.0.1", "/lib/libcudart.so.12"],
         (13, "/lib/libcudart.so.13.0.1")),
        ("/site/nixl/_api.py", ["/libs/libcudart-0a1b2c3d.so.12"], (12, "/libs/libcudart-0a1b2c3d.so.12")),
        ("/site/nixl/_api.py", ["/lib/my-libcudart.so.13", "/lib/libcudart.so.a"], None),
        ("/nixl_cu12/nixl/_api.py", [], None),
        ("/site/nixl_cu/_api.py", [], None),
    ],
)  # fmt: skip
def test_the_cuda_version_of_a_nixl_is_that_of_its_package_or_its_runtime(
    module: str, libraries: list[str], expected: tuple[int, str] | None
) -> None:
    assert cuda_of_nixl(module, libraries) == expected


@pytest.mark.parametrize(
    ("text", "version", "wheel"),
    [
        ("__version__ = '2.11.0'\ncuda: str = '13.0'\n", {"version": "2.11.0", "cuda": "13.0"}, "nixl-cu13"),
        ("__version__ = '2.11.0+cpu'\ncuda = None\n", {"version": "2.11.0+cpu", "cuda": ""}, ""),
        ("__version__ = '2.11.0'\ncuda = '12.8'\n", {"version": "2.11.0", "cuda": "12.8"}, "nixl-cu12"),
        ("__version__ = '2.11.0'\ncuda = '12.8.1'\n", {"version": "2.11.0", "cuda": "12.8.1"}, "nixl-cu12"),
        ("__version__ = '2.11.0'\ncuda = '11.8'\n", {"version": "2.11.0", "cuda": "11.8"}, ""),
        ("__version__ = '2.5'\n", {"version": "2.5", "cuda": ""}, ""),
        ("import os\n__version__ = os.environ['V']\n", {}, ""),
        ("cuda = '13.0'\n", {}, ""),
        ("def (", {}, ""),
        (None, {}, ""),
    ],
)
def test_the_version_of_torch_is_read_and_not_executed(
    torch: Path, text: str | None, version: dict[str, str], wheel: str
) -> None:
    if text is not None:
        torch.write_text(text)
    assert torch_version() == ({**version, "path": str(torch)} if version else {})
    assert wheel_for_torch() == wheel


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_a_torch_that_cannot_be_searched_is_not_there(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuse(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(importlib.util, "find_spec", refuse)
    assert torch_version() == {}


@pytest.mark.parametrize(
    ("packages", "cuda", "command"),
    [
        ([], "", "pip install --no-deps nixl nixl-cu12"),
        ([], "13.0", "pip install --no-deps nixl nixl-cu13"),
        (["nixl==1.5.1"], "", "pip install --no-deps nixl-cu12==1.5.1"),
        (["nixl==1.5.1", "nixl-cu12==1.5.1"], "13.0", "pip install --no-deps nixl-cu13==1.5.1"),
        (["nixl==1.5.1", "nixl-cu12==1.5.1"], "", "pip install --force-reinstall --no-deps nixl-cu12==1.5.1"),
        (["nixl==1.5.1", "nixl-cu12==1.4.0"], "", "pip install --no-deps nixl-cu12==1.5.1"),
        (["nixl-cu12==1.5.1"], "", "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"),
    ],
)
def test_the_command_installs_what_is_missing_of_the_same_release(
    site: Path, torch: Path, packages: list[str], cuda: str, command: str
) -> None:
    torch.write_text(f"__version__ = '2'\ncuda = {cuda!r}\n")
    install(site, *packages)
    assert pip_command() == command


NOEXEC = (
    "raise the limits of memory (`ulimit -v unlimited; ulimit -d unlimited`), or install NIXL where programs may be "
    "executed, on a file system that is mounted without noexec"
)


@pytest.mark.parametrize(
    ("error", "damaged", "expected"),
    [
        (ImportError("x.so: failed to map segment from shared object"), False,
         ("the kernel refuses to map it", NOEXEC)),
        (ModuleNotFoundError("no", name="numpy.core.x"), False,
         ("NIXL imports the module numpy", "run `pip install numpy`")),
        (ModuleNotFoundError("no", name="nixl_cu12._bindings"), False, ("", "")),
        (ImportError("no", name="numpy"), False, ("", "")),
        (ModuleNotFoundError("no", name="numpy"), True,
         ("{site}/nixl_cu12/b.so (and 1 more) of nixl-cu12 1.5.1 is missing or damaged",
          "install it again: `pip install --force-reinstall --no-deps nixl-cu12==1.5.1`")),
    ],
)  # fmt: skip
def test_an_import_that_fails_has_a_cause_and_a_remedy(
    site: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, damaged: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(installed, "hidden_module", lambda error: None)
    install(site, "nixl-cu12==1.5.1")
    (site / "nixl_cu12").mkdir()
    for name, size in (("a.py", 3), ("b.so", 4 + damaged), ("c.so.1", 0 if damaged else 5), ("d.txt", 9), ("f.sox", 9)):
        (site / "nixl_cu12" / name).write_bytes(bytes(size))
    names = {"a.py": 3, "b.so": 4, "c.so.1": 5, "d.txt": 1, "e.so": "", "f.sox": 1}
    record = site / "nixl_cu12-1.5.1.dist-info" / "RECORD"
    record.write_text("".join(f"nixl_cu12/{name},sha256=x,{size}\n" for name, size in names.items()))
    monkeypatch.setattr(installed, "PACKAGES", ())
    assert import_fault(error) == tuple(part.format(site=site) for part in expected)
    assert (wheel_damage() is not None) is damaged
    assert importlib.metadata.version("nixl-cu12") == "1.5.1"


@pytest.mark.parametrize("shadow", ["module_of_test.py", "module_of_test/__init__.py"])
def test_a_file_that_hides_an_installed_module_is_named_with_it(site: Path, tmp_path: Path, shadow: str) -> None:
    install(site, "acme==1.2")
    (site / "acme-1.2.dist-info" / "RECORD").write_text("x.py,,\nmodule_of_test.py,,\n")
    (site / "module_of_test.py").touch()
    error = ModuleNotFoundError(name="module_of_test.inner.x")
    assert hidden_module(error) is None
    hiding = tmp_path / "own" / shadow
    hiding.parent.mkdir(parents=True)
    hiding.touch()
    sys.path.insert(0, str(tmp_path / "own"))
    reason = f"{hiding} hides the module module_of_test of acme 1.2 ({site / 'module_of_test.py'})"
    remedy = f"rename {hiding}, or take {tmp_path / 'own'} out of PYTHONPATH and do not start in it"
    assert hidden_module(error) == (reason, remedy)
    (site / "module_of_test.py").unlink()
    assert hidden_module(error) is None


def test_the_loaded_nixl_is_the_package_that_installed_its_module(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl_api.installed() == ("nixl", "of no package")
    install(site, "nixl==1.5.0", "nixl-cu12==1.5.1", "nixl-cu13==1.4.0")
    assert nixl_api.installed() == ("nixl-cu13", "1.4.0")
    for name in ("nixl_cu12", "nixl_cu13"):
        (site / name).mkdir()
        (site / name / "_api.py").touch()
        version = "1.5.1" if name == "nixl_cu12" else "1.4.0"
        record = site / f"{name}-{version}.dist-info" / "RECORD"
        record.write_text(f"{name}/gone/_api.py,,\n{name}/__init__.py,,\n{name}/_api.py,,\n")
    for file, package in (
        (site / "nixl_cu12" / "_api.py", ("nixl-cu12", "1.5.1")),
        (site / "nixl_cu13" / "_api.py", ("nixl-cu13", "1.4.0")),
        (site / "acme.dist-info", ("nixl-cu13", "1.4.0")),  # an image's own build: the first package
    ):
        monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(__file__=str(file)))
        file.touch()
        assert nixl_api.installed() == package
