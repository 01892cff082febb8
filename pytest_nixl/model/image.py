# SPDX-License-Identifier: Apache-2.0
"""What a profile wants of the software of a host or a container image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nixl.model.version_range import VersionRange

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


NOTHING_WANTED = ImageRequirements()
