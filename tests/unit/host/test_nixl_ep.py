# SPDX-License-Identifier: Apache-2.0
"""Whether NIXL's expert-parallel kernels fit torch: the real wheel beside a torch of which only the libraries exist."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from helpers.double_libraries import build

from pytest_nixl.host.image import ask_nixl_ep
from pytest_nixl.nixl.installed import nixl_packages

TORCH = {"version": "2.13.0+cu128", "cuda": "12.8"}


@pytest.fixture
def module() -> str:
    """Return the file of the installed wheel's module."""
    spec = importlib.util.find_spec("nixl_cu12")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "_api.py")


def needed(module: str) -> list[str]:
    """Return the symbols that the kernels for torch 2.13 need and that are torch's."""
    [path] = (Path(module).parent.parent / "nixl_ep_cu12").glob("nixl_ep_cpp_torch213.*.so")
    with path.open("rb") as stream:
        symbols = ELFFile(stream).get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        undefined = [symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"]
    return [name for name in undefined if name.startswith("_Z") and any(
        part in name for part in ("3c10", "2at", "5torch"))]  # fmt: skip


def torch_with(folder: Path, symbols: list[str]) -> dict[str, str]:
    """Build a library of torch that defines symbols, and return what is known of that torch."""
    source = "".join(f"void {name}(void) {{}}\n" for name in symbols)
    build(folder / "lib", {"libc10.so": source or "int nothing;"}, "-Wl,--hash-style=gnu")
    return {**TORCH, "path": str(folder / "version.py")}


def test_a_torch_fits_if_it_has_every_symbol(module: str, tmp_path: Path) -> None:
    names = needed(module)
    assert len(names) > 10
    path = str(Path(module).parent.parent / "nixl_ep_cu12")
    facts = ask_nixl_ep(module, torch_with(tmp_path / "a", names), ["nixl-cu12"])
    assert facts == {"path": path, "why": ""}
    facts = ask_nixl_ep(module, torch_with(tmp_path / "b", names[:-1]), ["nixl-cu12"])
    assert f"needs {names[-1]}, which torch 2.13.0+cu128 does not have" in facts["why"]


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    """The folder of the kernels of a package for ROCm, of which no wheel exists; a torch that lacks every symbol."""
    folder = tmp_path / "site" / "nixl_ep_rocm"
    folder.mkdir(parents=True)
    torch_with(tmp_path / "torch", ["_ZN3c105otherEv"])
    build(tmp_path / "torch" / "lib", {"libtorch.so": "void _ZN5torch5otherEv(void) {}"})
    return folder


def fault(folder: Path, version: str = "2.13.0+rocm") -> str:
    torch = {**TORCH, "version": version, "path": str(folder.parents[1] / "torch" / "version.py")}
    facts = ask_nixl_ep(str(folder.parent / "nixl_rocm" / "_api.py"), torch, ["nixl-rocm"])
    assert facts.pop("path") == str(folder)
    return facts.pop("why")


@pytest.mark.parametrize(
    ("symbol", "of_torch"),
    [
        ("_ZN3c104testEv", True),
        ("_ZN2at4testEv", True),
        ("_ZN5torch4testEv", True),
        ("_ZN3c105otherEv", False),  # torch has these, in two libraries
        ("_ZN5torch5otherEv", False),
        ("_ZN4acme4testEv", False),
        ("call_ZN3c10", False),
    ],
)
def test_only_symbols_of_torch_are_looked_for(rocm: Path, symbol: str, of_torch: bool) -> None:
    name = "nixl_ep_cpp_torch213.x.so"
    build(rocm, {name: f"void {symbol}(void); void calls(void) {{ {symbol}(); }}"})
    assert fault(rocm) == (f"{name} needs {symbol}, which torch 2.13.0+rocm does not have" if of_torch else "")
    shutil.rmtree(rocm.parents[1] / "torch" / "lib")
    assert fault(rocm) == ""


def test_a_module_for_one_release_of_torch_has_that_in_its_name(rocm: Path) -> None:
    for name in ("nixl_ep_cpp_torch213.so", "nixl_ep_cpp_torch2.so", "nixl_ep_cpp.so"):
        (rocm / name).write_text("text")
    assert fault(rocm, "2.9.1") == "it is built for torch 2.13, and torch is 2.9.1"
    assert fault(rocm) == ""  # a file that cannot be read says nothing


def test_a_torch_for_which_there_is_no_module_is_named(module: str) -> None:
    facts = ask_nixl_ep(module, {**TORCH, "version": "2.9.1", "path": "/torch/version.py"}, ["nixl-cu12"])
    assert facts["why"] == "it is built for torch 2.11, 2.12, 2.13, and torch is 2.9.1"


def test_without_torch_for_cuda_nothing_is_said(module: str) -> None:
    for torch in ({}, {**TORCH, "cuda": "", "path": "/torch/version.py"}):
        facts = ask_nixl_ep(module, torch, ["nixl-cu12"])
        assert (facts["why"], "torch is not installed" in facts["unknown"]) == ("", True)
    assert ask_nixl_ep("/opt/nixl/_api.py", TORCH, []) == {}


def test_a_file_that_two_packages_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in 1.0.1, whose wheels for CUDA 12 and 13 both have nixl_ep/nixl_ep_cpp.….so.
    (tmp_path / "nixl_ep").mkdir()
    (tmp_path / "nixl_ep" / "nixl_ep_cpp.so").touch()
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}-1.0.1.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.1.dist-info" / "METADATA").write_text(
            f"Name: {name.replace('_', '-')}\nVersion: 1.0.1\n"
        )
        (tmp_path / f"{name}-1.0.1.dist-info" / "RECORD").write_text("nixl_ep/nixl_ep_cpp.so,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = nixl_packages()
    assert (packages["nixl-cu12"], packages["nixl-cu13"]) == ("1.0.1", "1.0.1")
    facts = ask_nixl_ep(str(tmp_path / "nixl_cu13" / "_api.py"), TORCH, list(packages))
    assert "nixl-cu12 and nixl-cu13 install the same file" in facts["why"]
