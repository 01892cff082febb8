# SPDX-License-Identifier: Apache-2.0
"""``nixl_ep``, the expert-parallel kernels in NIXL's wheels: can they be imported with the installed torch?

Nothing is imported: the names of the module's files say for which torch each is built, and the symbols that a file
needs are looked up in torch's libraries.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_FLAVOUR = re.compile(r"nixl_(cu\d+|rocm)")
_BUILT_FOR = re.compile(r"nixl_ep_cpp_torch(\d)(\d+)\.")
#: Parts of the mangled names of torch's C++ symbols: the namespaces c10, at and torch.
_OF_TORCH = re.compile(r"^_Z\w*?(?:3c10|2at|5torch)")


def ask_nixl_ep(module: str, torch: Mapping[str, Any], packages: Sequence[str]) -> dict[str, str]:
    """Return the folder of ``nixl_ep`` and why it cannot be imported; empty if there is none.

    :param module: the file of the loaded module of NIXL, such as ``…/nixl_cu12/_api.py``.
    :param torch: what :func:`pytest_nixl.nixl.installed.torch_version` returned.
    :param packages: the names of the installed packages of NIXL.
    """
    flavour = _FLAVOUR.fullmatch(Path(module).parent.name)
    if flavour is None:
        return {}
    site = Path(module).parent.parent
    folder = next(
        (candidate for candidate in (site / f"nixl_ep_{flavour[1]}", site / "nixl_ep") if _modules(candidate)), None
    )
    if folder is None:
        return {}
    if folder.name == "nixl_ep" and len(owners := list(_owners(packages))) > 1:
        return {
            "path": str(folder),
            "why": f"{' and '.join(owners)} install the same file, so the last one replaced it",
        }
    if not torch.get("cuda"):
        return {"path": str(folder), "why": "", "unknown": "torch is not installed, or is built without CUDA"}
    return {"path": str(folder), "why": _fault(_modules(folder), torch["version"], Path(torch["path"]).parent / "lib")}


def _modules(folder: Path) -> list[Path]:
    return sorted(folder.glob("nixl_ep_cpp*.so"))


def _owners(packages: Sequence[str]) -> Iterator[str]:
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.distribution(name).files or ()
            if any(file.parent.name == "nixl_ep" and file.suffix == ".so" for file in files):
                yield name


def _fault(modules: Sequence[Path], version: str, libraries: Path) -> str:
    from elftools.common.exceptions import ELFError

    release = tuple(version.split(".")[:2])
    built = {match.groups(): path for path in modules if (match := _BUILT_FOR.match(path.name))}
    if built and release not in built:
        return f"it is built for torch {', '.join('.'.join(torch) for torch in built)}, and torch is {version}"
    path = built.get(release, modules[0])
    try:
        missing = _unresolved(path, sorted([*libraries.glob("libtorch*.so"), *libraries.glob("libc10*.so")]))
    except (OSError, ELFError):
        return ""
    return f"{path.name} needs {missing}, which torch {version} does not have" if missing else ""


def _unresolved(path: Path, libraries: Sequence[Path]) -> str:
    """Return the first symbol of torch that a file needs and no library defines; empty if there is none."""
    # pyelftools takes long to import, and most hosts have no torch with CUDA.
    from elftools.elf.elffile import ELFFile
    from elftools.elf.hash import GNUHashSection
    from elftools.elf.sections import SymbolTableSection

    with contextlib.ExitStack() as stack:
        tables = []
        for library in libraries:
            section = ELFFile(stack.enter_context(library.open("rb"))).get_section_by_name(".gnu.hash")
            if isinstance(section, GNUHashSection):
                tables.append(section)
        symbols = ELFFile(stack.enter_context(path.open("rb"))).get_section_by_name(".dynsym")
        if not tables or not isinstance(symbols, SymbolTableSection):
            return ""
        for symbol in symbols.iter_symbols():
            if symbol["st_shndx"] != "SHN_UNDEF" or symbol["st_info"]["bind"] != "STB_GLOBAL":
                continue
            if _OF_TORCH.match(symbol.name) and not any(table.get_symbol(symbol.name) for table in tables):
                return str(symbol.name)
    return ""
