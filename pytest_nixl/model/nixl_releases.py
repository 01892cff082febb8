# SPDX-License-Identifier: Apache-2.0
"""The differences between NIXL releases. Pytest and the workers both use this module.

Every difference was measured with the release itself (``docs/reference/versions.md``), not taken from a
changelog. A version that cannot be parsed, such as that of an image's own build, counts as the newest.
"""

from __future__ import annotations

import re

#: The names of NIXL's packages; several may be installed at the same time.
PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
#: The oldest CUDA for which there is a package. Of a newer CUDA than this list knows there may be one.
_OLDEST_CUDA = 12
#: The default port of NIXL's listener.
USUAL_PORT = 8888
#: The variable that turns telemetry on or off, whatever agents ask for, and its values that turn it off.
TELEMETRY_VARIABLE = "NIXL_TELEMETRY_ENABLE"
TELEMETRY_OFF = ("n", "no", "off", "0", "false", "disable")
_NEWEST = (999,)


def numbers(version: str) -> tuple[int, ...]:
    """Parse a version: ``1.5.1`` gives ``(1, 5, 1)``; any other text gives a version newer than all releases."""
    match = re.match(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else _NEWEST


def wheel_for(cuda: int) -> str:
    """Return the package of NIXL that is built for a major version of CUDA; empty if there is none."""
    return f"nixl-cu{cuda}" if cuda >= _OLDEST_CUDA else ""


def imports_torch(version: str) -> bool:
    """Return whether ``import nixl`` fails without torch. From 1.4 on, NIXL uses torch only if already imported."""
    return numbers(version) < (1, 4)


def picks_a_free_port(version: str) -> bool:
    """Return whether a listener with port 0 gets a free port. Before 1.2 it gets :data:`USUAL_PORT`."""
    return numbers(version) >= (1, 2)


def says_that_a_port_is_taken(version: str) -> bool:
    """Return whether NIXL refuses an agent whose port is in use. Before 1.0 it creates one that no peer can reach."""
    return numbers(version) >= (1,)


def refuses_no_endpoints(version: str) -> bool:
    """Return whether NIXL refuses an empty ``NIXL_ETCD_ENDPOINTS``. Before 1.5 it creates an agent without etcd."""
    return numbers(version) >= (1, 5)


def refuses_no_cuda(version: str) -> bool:
    """Return whether NIXL refuses a UCX_TLS without CUDA memory on a host with an NVIDIA GPU. Before 1.5 it warns."""
    return numbers(version) >= (1, 5)


def sends_the_first_notification(version: str) -> bool:
    """Return whether LIBFABRIC sends the notification given with a new handle, and ignores that of ``transfer``."""
    return numbers(version) < (1,)


def has_sync_modes(version: str) -> bool:
    """Return whether an agent can be created with a thread synchronization mode."""
    return numbers(version) >= (1, 2)


def telemetry_off_raises(version: str) -> bool:
    """Return whether ``get_xfer_telemetry`` raises if the variable turns telemetry off that an agent asks for."""
    return numbers(version) >= (1, 4)


def takes_strided_descriptors(version: str) -> bool:
    """Return whether ``prep_xfer_dlist`` takes rows of address, length, device, stride and count."""
    return numbers(version) >= (1, 5)


def is_error(module: str) -> bool:
    """Return whether NIXL's error classes are in this module: ``nixl_cu12._bindings``, ``nixl._bindings``, …"""
    return "nixl" in module and module.endswith("_bindings")
