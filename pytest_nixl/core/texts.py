# SPDX-License-Identifier: Apache-2.0
"""The texts that stand in files beside the code: findings, remedies, faults of checks, errors by their text.

The doctor and the workers read the errors of GPUs from one table: results of CUDA, texts of NVML, Xids.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: For errors that no table has.
OTHER_REMEDY = "run `nvidia-smi` and `dmesg` on the host; reboot it"


def text_file(name: str) -> str:
    """Return a file of texts: the wheel has it in the package, a clone in ``docs``.

    :param name: its name without ``.toml``.
    """
    package = Path(__file__).parents[1]
    inside = package / "docs" / f"{name}.toml"
    path = inside if inside.is_file() else package.parent / "docs" / "reference" / f"{name}.toml"
    return path.read_text(encoding="utf-8")


def with_plain_links(text: str) -> str:
    """Return a text for a terminal: ``[name](../how-to/gpu.md)`` becomes ``name (docs/how-to/gpu.md)``."""

    def plain(match: re.Match[str]) -> str:
        name, url = match.groups()
        return f"{name} ({url if '://' in url else posixpath.normpath(f'docs/reference/{url}')})"

    return re.sub(r"\[([^\[\]]+)\]\((https?://[^()\s]+|[\w./-]+\.md(?:#[\w-]+)?)\)", plain, text)


def parse_texts(text: str) -> dict[str, Any]:
    """Return what a file of texts contains."""
    document: dict[str, Any] = tomllib.loads(text)
    return document


class Entries(Mapping[str, T]):
    """The entries of a file of texts by their ids, read when the first is needed.

    :param file: its name without ``.toml``.
    :param form: what makes an entry of its id and its fields.
    :param section: the table of the file with the entries; empty: the file has no others.
    """

    def __init__(self, file: str, form: Callable[..., T], section: str = "") -> None:
        self._file, self._form, self._section = file, form, section

    @cached_property
    def _entries(self) -> dict[str, T]:
        document = parse_texts(text_file(self._file))
        entries = document[self._section] if self._section else document
        return {name: self._form(name, **fields) for name, fields in entries.items()}

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class GpuError:
    """A known error of a GPU.

    :param id: its number in CUDA, its Xid number, or a part of NVML's text of it.
    :param remedy: what to do, as an imperative.
    :param title: what it is; empty: NVML's text says so.
    :param corrected: whether the hardware corrects it, so that it is no reason to stop using the GPU.
    """

    id: str
    remedy: str
    title: str = ""
    corrected: bool = False


#: Results of the CUDA driver's functions, by their number.
CUDA_ERRORS = Entries("gpu-errors", GpuError, "cuda")
NVML_ERRORS = Entries("gpu-errors", GpuError, "nvml")
#: Errors that a program cannot cause.
XIDS = Entries("gpu-errors", GpuError, "xid")
