# SPDX-License-Identifier: Apache-2.0
"""The profile of a run that names none: what is here, as far as this host tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

#: Two processes of one host: what is expected where nothing tells more.
ONE_HOST, OVER_TCP = "loopback", "tcp-loopback"
#: Where Linux lists RDMA devices, EFA among them, and where a virtual machine finds the name of its kind.
RDMA_DEVICES, PRODUCT_NAME = "sys/class/infiniband", "sys/class/dmi/id/product_name"


def default_profile(backends: Sequence[str], root: Path = Path("/")) -> tuple[str, str]:
    """Return the name of a profile, and in a few words why it is that one; no words: nothing here speaks for another.

    :param backends: the backends of the run. UCX takes shared memory on one host, which ``loopback`` expects.
    :param root: the directory below which ``/sys`` is looked for.
    """
    if tuple(backends) != ("LIBFABRIC",):
        return ONE_HOST, ""
    try:
        devices = sorted(entry.name for entry in (root / RDMA_DEVICES).iterdir())
    except OSError:
        devices = []
    if not devices:
        return OVER_TCP, "LIBFABRIC goes over TCP, because this host has no RDMA device"
    try:
        product = (root / PRODUCT_NAME).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        product = ""
    if _expects(product, "LIBFABRIC"):
        return product, f"this host says that it is a {product}"
    return ONE_HOST, f"no profile is known of a host with {devices[0]}; learn one, and name it with --nixl-profile"


def _expects(name: str, backend: str) -> bool:
    """Whether a profile of this name comes with the plugin and expects something of this backend."""
    from pytest_nixl.judge.profiles import bundled_profiles, load_profile

    if name not in bundled_profiles():
        return False
    return any(item.backend is None or backend in item.backend for item in load_profile(name).expectations)
