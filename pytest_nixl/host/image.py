# SPDX-License-Identifier: Apache-2.0
"""Facts of the software in a host's file system or a container image, read without creating a NIXL agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nixl.core.plain import to_plain
from pytest_nixl.host import library_versions
from pytest_nixl.host.device_code import DeviceCode, device_code
from pytest_nixl.host.fact import Fact
from pytest_nixl.host.nixl_ep import ask_nixl_ep
from pytest_nixl.host.plugin_files import PluginFile, PluginsInAdvance, libnixl, plugin_folder
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.software import Software
from pytest_nixl.host.verbs_providers import VerbsLibrary, VerbsProvider, ask_verbs
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
    versions = {key: _version(*each) for key, each in answer.get("versions", {}).items()}
    release = software.libfabric if software.libfabric.value else versions.get("libfabric", software.libfabric)
    torch_fact = Fact(torch["version"], where) if torch else Fact[str](None, where, reason or "torch is not installed")
    return ImageFacts(
        plugins=_plugins(answer),
        nixl_packages=dict(answer.get("packages", {})),
        nixl_cuda=Fact(*cuda)
        if cuda
        else Fact(None, module or "the loaded module", "neither the loaded module nor a loaded libcudart says it"),
        torch=torch_fact,
        torch_cuda=Fact(torch["cuda"], where) if torch.get("cuda") else Fact(None, where, other),
        nixl_ep=_nixl_ep(answer.get("nixl_ep", {}), reason),
        versions={
            **versions,
            "nixl": software.nixl,
            "ucx": software.ucx,
            "libfabric": release,
            "efa_installer": software.efa_installer,
            "torch": torch_fact,
        },
        device_code=tuple(
            DeviceCode(each["path"], tuple(each["cubins"]), tuple(each["ptx"]))
            for each in answer.get("device_code", ())
        ),
        verbs=tuple(VerbsLibrary(**each) for each in verbs.get("libraries", ())),
        providers=tuple(VerbsProvider(**each) for each in verbs.get("providers", ())),
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


def _nixl_ep(found: Mapping[str, str], why: str) -> Fact[bool]:
    if not found:
        return Fact(None, "nixl_ep", why or "the loaded NIXL has no nixl_ep")
    if found.get("unknown"):
        return Fact(None, found["path"], found["unknown"])
    return Fact(not found["why"], found["path"], found["why"])


def _version(value: str, source: str, why: str) -> Fact[str]:
    return Fact(value, source) if value else Fact(None, source, why)


def _plugins(found: Mapping[str, Any]) -> Fact[tuple[PluginFile, ...]]:
    folder = found.get("plugin_folder", "")
    if not folder:
        return Fact(
            None, "the folder of NIXL's plugins", found.get("why") or "there is no such folder beside NIXL's library"
        )
    return Fact(tuple(PluginFile.of(each) for each in found["plugins"]), folder)
