# SPDX-License-Identifier: Apache-2.0
"""What a profile wants of the software of a host or a container image."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: The software whose version a profile may want: the key in ``[versions]``, and its name in messages.
SOFTWARE = {
    "nixl": "NIXL",
    "ucx": "UCX",
    "libfabric": "libfabric",
    "etcd_cpp_api": "etcd-cpp-apiv3",
    "cuda": "the CUDA runtime",
    "torch": "torch",
    "gdrcopy": "GDRCopy",
    "efa_installer": "the EFA installer",
}


@dataclass(frozen=True)
class ImageRequirements:
    """What a profile wants of an image.

    :param plugins: the NIXL plugins that must load, such as ``UCX``; empty: those of the requested backends, which
        other checks judge.
    :param etcd_uri_patch: whether etcd's client library must have the patch that skips the validation of addresses;
        None: either will do.
    :param versions: the accepted versions, by the keys of :data:`SOFTWARE`.
    """

    plugins: tuple[str, ...] = ()
    etcd_uri_patch: bool | None = None
    versions: Mapping[str, VersionRange] = field(default_factory=dict)


NO_REQUIREMENTS = ImageRequirements()


VERSION_FORM = 'a version or its first numbers ("1.5"), or bounds (">=1.18, <2")'
_OPERATORS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_BOUND = re.compile(r"(>=|<=|>|<|)\s*(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class VersionRange:
    """Accepted versions.

    :param text: the text from which it was read.
    :param bounds: each an operator and numbers; an empty operator accepts all versions that begin with the numbers.
    """

    text: str
    bounds: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Read a range.

        :raises ValueError: the text is none.
        """
        bounds = []
        for part in text.split(","):
            match = _BOUND.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{part.strip()!r} is neither a version nor a bound: expected {VERSION_FORM}")
            bounds.append((match[1], tuple(map(int, match[2].split(".")))))
        return cls(text.strip(), tuple(bounds))

    def accepts(self, version: str) -> bool:
        """Return whether a version is accepted. Only its numbers count: ``2.9.0+cu128`` is ``2.9.0``.

        :raises ValueError: the version does not begin with a number.
        """
        match = re.match(r"v?(\d+(?:\.\d+)*)", version)
        if match is None:
            raise ValueError(f"{version!r} does not begin with a number")
        numbers = tuple(map(int, match[1].split(".")))
        return all(_holds(symbol, numbers, bound) for symbol, bound in self.bounds)


def _holds(symbol: str, numbers: tuple[int, ...], bound: tuple[int, ...]) -> bool:
    width = max(len(numbers), len(bound))
    padded = numbers + (0,) * (width - len(numbers))
    if not symbol:
        return padded[: len(bound)] == bound
    return _OPERATORS[symbol](padded, bound + (0,) * (width - len(bound)))
