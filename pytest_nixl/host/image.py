# SPDX-License-Identifier: Apache-2.0
"""Facts of the software in a host's file system or a container image, read without creating a NIXL agent."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.hash import GNUHashSection
from elftools.elf.sections import SymbolTableSection

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.host import elf, library_versions
from pytest_nixl.host.elf import DeviceCode, device_code
from pytest_nixl.host.plugin_files import PluginFile, PluginsInAdvance, libnixl, plugin_folder
from pytest_nixl.host.recorded_tree import Fact, FactsRoot
from pytest_nixl.host.software import Software
from pytest_nixl.nixl.installed import cuda_of_nixl, nixl_packages, torch_version


@dataclass(frozen=True)
class ImageFacts:
    """The installed software.

    :param plugins: NIXL's plugin files; the source is their folder.
    :param nixl_packages: the versions of all installed packages of NIXL, by name.
    :param nixl_cuda: the CUDA major version for which the loaded NIXL is built.
    :param torch: the version of torch.
    :param torch_cuda: the CUDA version for which torch is built.
    :param nixl_ep: whether the expert-parallel kernels in NIXL's wheel can be imported with this torch.
    :param versions: the versions of other software, by the keys of ``[versions]`` of a profile.
    :param device_code: the CUDA code in plugin files; those without any are left out.
    :param verbs: the copies of libibverbs that NIXL loads, or the one of the system.
    :param providers: the providers of libibverbs.
    """

    plugins: Fact[tuple[PluginFile, ...]]
    nixl_packages: dict[str, str]
    nixl_cuda: Fact[int]
    torch: Fact[str]
    torch_cuda: Fact[str]
    nixl_ep: Fact[bool]
    versions: dict[str, Fact[str]]
    device_code: tuple[DeviceCode, ...]
    verbs: tuple[VerbsLibrary, ...]
    providers: tuple[VerbsProvider, ...]


def read_image(
    root: FactsRoot, software: Software, environ: Mapping[str, str], plugins: PluginsInAdvance
) -> ImageFacts:
    """Read the facts of the installed software.

    :param root: this machine, or a recorded tree, for which nothing is loaded.
    :param software: what a worker with NIXL has loaded.
    :param environ: the environment variables.
    :param plugins: loads the plugins.
    """
    answer = root.ask("image", lambda: _ask(software, environ, plugins))
    reason = answer.get("why", "")
    module = software.nixl_file.value or ""
    cuda = cuda_of_nixl(module, [library.path for library in software.libraries])
    torch, verbs = answer.get("torch", {}), answer.get("verbs", {})
    other = reason or (f"{torch['path']} says that it is built without CUDA" if torch else "torch is not installed")
    where = torch.get("path", "torch/version.py")
    versions = {
        key: Fact.read(version or None, source, absent)
        for key, (version, source, absent) in answer.get("versions", {}).items()
    }
    folder = answer.get("plugin_folder", "")
    release = software.libfabric if software.libfabric.value else versions.get("libfabric", software.libfabric)
    torch_fact = Fact[str].read(torch.get("version"), where, reason or "torch is not installed")
    return ImageFacts(
        plugins=Fact(from_plain(tuple[PluginFile, ...], answer["plugins"]), folder)
        if folder
        else Fact(None, "the folder of NIXL's plugins", reason or "there is no such folder beside NIXL's library"),
        nixl_packages=dict(answer.get("packages", {})),
        nixl_cuda=Fact(*cuda)
        if cuda
        else Fact(None, module or "the loaded module", "neither the loaded module nor a loaded libcudart says it"),
        torch=torch_fact,
        torch_cuda=Fact.read(torch.get("cuda") or None, where, other),
        nixl_ep=_nixl_ep(answer.get("nixl_ep", {}), reason),
        versions={
            **versions,
            "nixl": software.nixl,
            "ucx": software.ucx,
            "libfabric": release,
            "efa_installer": software.efa_installer,
            "torch": torch_fact,
        },
        device_code=from_plain(tuple[DeviceCode, ...], answer.get("device_code", [])),
        verbs=from_plain(tuple[VerbsLibrary, ...], verbs.get("libraries", [])),
        providers=from_plain(tuple[VerbsProvider, ...], verbs.get("providers", [])),
    )


def _ask(software: Software, environ: Mapping[str, str], plugins: PluginsInAdvance) -> dict[str, Any]:
    libraries = [library.path for library in software.libraries]
    used = next((os.path.dirname(backend.plugin) for backend in software.backends if backend.plugin), "")
    folder = plugin_folder(environ, libraries) or used
    cuda = cuda_of_nixl(software.nixl_file.value or "", libraries)
    return {
        "plugin_folder": folder,
        "packages": (packages := nixl_packages()),
        "torch": (torch := torch_version()),
        "nixl_ep": ask_nixl_ep(software.nixl_file.value or "", torch, list(packages)),
        "versions": {
            "cuda": library_versions.cuda(environ, cuda[0] if cuda else 12),
            "gdrcopy": library_versions.gdrcopy(environ),
            "libfabric": library_versions.libfabric(environ),
            "etcd_cpp_api": library_versions.etcd_client(software.etcd_client.value or ""),
        },
        "device_code": _device_code(folder),
        "verbs": ask_verbs(libraries, environ),
        # Last, because the others are found while plugins are loaded.
        "plugins": plugins.load(folder, libnixl(libraries)) if os.path.isdir(folder) else [],
    }


def _device_code(folder: str) -> list[dict[str, Any]]:
    codes = []
    for path in sorted(Path(folder).glob("libplugin_*.so")) if folder else ():
        with contextlib.suppress(OSError, ValueError):  # nixl-plugins says why the file cannot be loaded
            code = device_code(str(path))
            codes += [to_plain(code)] if code is not None else []
    return codes


def _nixl_ep(answer: Mapping[str, str], reason: str) -> Fact[bool]:
    if not answer:
        return Fact(None, "nixl_ep", reason or "the loaded NIXL has no nixl_ep")
    if answer.get("unknown"):
        return Fact(None, answer["path"], answer["unknown"])
    return Fact(not answer["why"], answer["path"], answer["why"])


_FLAVOUR = re.compile(r"nixl_(cu\d+|rocm)")
_BUILT_FOR = re.compile(r"nixl_ep_cpp_torch(\d)(\d+)\.")
#: Parts of the mangled names of torch's C++ symbols: the namespaces c10, at and torch.
_OF_TORCH = re.compile(r"_Z\w*?(?:3c10|2at|5torch)")


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


_FOLDERS = ("/usr/lib/*/libibverbs", "/usr/lib64/libibverbs", "/usr/lib/libibverbs", "/usr/local/lib*/libibverbs")
_PROVIDER = re.compile(r"lib(\w+)-rdmav(\d+)\.so")
_ABI = re.compile(r"IBVERBS_PRIVATE_(\d+)")
_BUNDLED = re.compile(r"lib(mlx5|efa)(?:-[0-9a-f]{8})?\.so(?:\.|$)")
_NAME = re.compile(r"libibverbs(?:-[0-9a-f]{8})?\.so(?:\.|$)")


@dataclass(frozen=True)
class VerbsLibrary:
    """A copy of libibverbs.

    :param abi: the number of its interface to providers, from its symbol version ``IBVERBS_PRIVATE_NN``.
    """

    path: str
    abi: int


@dataclass(frozen=True)
class VerbsProvider:
    """A provider of libibverbs, such as ``efa`` in ``libefa-rdmav34.so``.

    :param abi: the number in its name.
    :param library: the copy of libibverbs that it links to, and in which it registers; empty if it finds none.
    """

    name: str
    abi: int
    path: str
    library: str = ""


def ask_verbs(libraries: Sequence[str], environ: Mapping[str, str], folders: Sequence[str] = _FOLDERS) -> Any:
    """Return the copies of libibverbs and all providers, as JSON values.

    :param libraries: the paths of the loaded libraries; without libibverbs, the copy that the loader finds is taken.
    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param folders: patterns of the folders of providers.
    """
    copies = [path for path in libraries if _NAME.match(os.path.basename(path))]
    if not copies and (library := elf.find("libibverbs.so.1", (), environ)):
        copies = [library]
    folders = [*folders, *(f"{os.path.dirname(path)}/libibverbs" for path in copies)]
    files = sorted({path for folder in folders for path in glob.glob(f"{folder}/lib*-rdmav*.so")})
    providers = [(match, path) for path in files if (match := _PROVIDER.fullmatch(os.path.basename(path)))]
    return {
        "libraries": [{"path": path, "abi": abi} for path in copies if (abi := _abi(path))],
        "providers": [
            *(
                {"name": match[1], "abi": int(match[2]), "path": path, "library": _linked(path, environ)}
                for match, path in providers
            ),
            *_bundled(libraries, copies),
        ],
    }


def _linked(path: str, environ: Mapping[str, str]) -> str:
    """Return the copy of libibverbs that the loader finds for a provider; empty if there is none."""
    try:
        file = elf.read_elf(path)
    except (OSError, ValueError):
        return ""
    soname = next((name for name in file.needed if _NAME.match(name)), "")
    return elf.find(soname, file.runpath, environ) or "" if soname else ""


def _bundled(libraries: Sequence[str], copies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the loaded providers that nothing searches: a wheel's libmlx5 links to the wheel's libibverbs."""
    providers = []
    for path in libraries:
        match = _BUNDLED.match(os.path.basename(path))
        copy = next((copy for copy in copies if os.path.dirname(copy) == os.path.dirname(path)), "")
        if match and copy and (abi := _abi(copy)):
            providers.append({"name": match[1], "abi": abi, "path": path, "library": copy})
    return providers


def _abi(path: str) -> int:
    """Return the number of a library's interface to providers; 0 if it has none."""
    try:
        defined = elf.read_elf(path).defined
    except (OSError, ValueError):
        return 0
    return max((int(match[1]) for version in defined if (match := _ABI.fullmatch(version))), default=0)
