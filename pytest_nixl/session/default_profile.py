# SPDX-License-Identifier: Apache-2.0
"""Choose the profile of a run that names none, by this host's devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.judge.profiles import bundled_profiles, load_profile

#: Profiles for two processes of one host: the usual one, and the one for LIBFABRIC over TCP.
ONE_HOST, OVER_TCP = "loopback", "tcp-loopback"
#: Directory in which Linux lists RDMA devices (also EFA), and the file with the type of a virtual machine.
RDMA_DEVICES, PRODUCT_NAME = "sys/class/infiniband", "sys/class/dmi/id/product_name"

#: The most bytes of that file. The kernel says that it has a page.
_LARGEST_NAME = 1 << 16
#: Profiles of one host with GPUs, each with the pattern of their model. A GH200 is not an H200: its host link differs.
GPU_PROFILES = {"b200": r"\bB200\b", "h200": r"\bH200\b", "h100": r"\bH100\b", "a100": r"\bA100\b"}


def gpu_profile(models: Sequence[str]) -> str:
    """Return the profile for transfers between GPUs of these models; empty if none comes with the plugin."""
    for name, pattern in GPU_PROFILES.items():
        if models and all(re.search(pattern, model) for model in models):
            return name
    return ""


def default_profile(backends: Sequence[str], root: Path = Path("/")) -> tuple[str, str]:
    """Return the name of a profile, and the reason for it; an empty reason: it is the usual default.

    :param backends: the backends of the run. UCX uses shared memory on one host, which ``loopback`` expects.
    :param root: the directory that contains ``sys``.
    """
    if tuple(backends) != ("LIBFABRIC",):
        return ONE_HOST, ""
    try:
        devices = sorted(entry.name for entry in (root / RDMA_DEVICES).iterdir())
    except OSError:
        devices = []
    if not devices:
        return OVER_TCP, "LIBFABRIC uses TCP, because this host has no RDMA device"
    product = read_product(root)
    if _expects(product, "LIBFABRIC"):
        return product, f"this host's product name is {product}"
    return ONE_HOST, (
        f"there is no profile for a host with {devices[0]}; learn one (pytest-nixl profile learn) and give it with "
        "--nixl-profile"
    )


def read_product(root: Path) -> str:
    """Return the type of a virtual machine; empty: there is none, or it cannot be read.

    :param root: the directory that contains ``sys``.
    """
    try:
        text = read_regular(root / PRODUCT_NAME, _LARGEST_NAME, "a name")
    except (OSError, ValueError):
        return ""
    return text.decode("utf-8", "replace").strip()


def _expects(name: str, backend: str) -> bool:
    """Whether a profile of this name comes with the plugin and has an expectation for this backend."""
    if name not in bundled_profiles():
        return False
    return any(item.backend is None or backend in item.backend for item in load_profile(name).expectations)
