# SPDX-License-Identifier: Apache-2.0
"""The copies of libibverbs, and the providers that each of them accepts: ``libefa-rdmav34.so`` fits only ABI 34."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.host import elf

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
