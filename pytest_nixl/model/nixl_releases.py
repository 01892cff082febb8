# SPDX-License-Identifier: Apache-2.0
"""What differs between releases of NIXL: the one place that knows, for pytest's side and for the workers.

Each release was run (``docs/reference/versions.md``); nothing is taken from a changelog. A build whose version cannot
be read, as an image's own may have, is taken for the newest.
"""

from __future__ import annotations

import re

#: What the packages that carry NIXL are called; several may be installed at a time.
PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
#: The port of NIXL's listener where none is chosen.
USUAL_PORT = 8888
_NEWEST = (999,)


def numbers(version: str) -> tuple[int, ...]:
    """Return ``(1, 5, 1)`` of ``1.5.1``, and something newer than all of them of what is no version."""
    match = re.match(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else _NEWEST


def imports_torch(version: str) -> bool:
    """Whether ``import nixl`` fails without torch, which 1.4 and newer look for only once somebody else imported it."""
    return numbers(version) < (1, 4)


def picks_a_free_port(version: str) -> bool:
    """Whether a listener with port 0 gets a port of its own; before 1.2 it gets :data:`USUAL_PORT`, as all do."""
    return numbers(version) >= (1, 2)


def says_that_a_port_is_taken(version: str) -> bool:
    """Whether an agent whose port is taken is refused; before 1.0 it is made, and nobody reaches it."""
    return numbers(version) >= (1,)


def refuses_no_endpoints(version: str) -> bool:
    """Whether it makes no agent where ``NIXL_ETCD_ENDPOINTS`` is set and empty; before 1.5: one without an etcd."""
    return numbers(version) >= (1, 5)


def sends_the_first_notification(version: str) -> bool:
    """Whether LIBFABRIC sends the notification that a handle was made with, and ignores one given to ``transfer``."""
    return numbers(version) < (1,)


def is_error(module: str) -> bool:
    """Whether a class of this module is one of NIXL's errors: ``nixl_cu12._bindings``, ``nixl._bindings``, …"""
    return "nixl" in module and module.endswith("_bindings")
