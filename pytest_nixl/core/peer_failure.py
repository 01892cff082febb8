# SPDX-License-Identifier: Apache-2.0
"""What to do if UCX has no transport left that notices a failed peer: NIXL then refuses UCX."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.words import named

_NO_HANDLER = "no peer failure handler"
#: UCX's warning about devices that it was told to use, with the devices that it has.
_NOT_AVAILABLE = re.compile(r"network devices? ('.*') (?:is|are) not available, please use one or more of: (.*)")
_TCP_DEVICE = re.compile(r"'([^']+)'\(tcp\)")


def peer_failure_remedy(log: str, environ: Mapping[str, str]) -> str:
    """Return what to do if UCX says that no transport handles the failure of a peer; empty if it does not say so.

    :param log: the stdout and stderr of the process that uses UCX.
    :param environ: the variables of that process.
    """
    if _NO_HANDLER not in log:
        return ""
    devices, transports = environ.get("UCX_NET_DEVICES", "all"), environ.get("UCX_TLS", "all")
    warning = _NOT_AVAILABLE.search(log)
    if devices not in ("", "all"):
        absent = re.findall("'([^']*)'", warning[1]) if warning else []
        there = [name for name in devices.split(",") if name not in absent]
        offered = _TCP_DEVICE.findall(warning[2]) if warning else []
        tcp = next((name for name in (*offered, *ask_addresses()) if name != "lo" and name not in there), "lo")
        value = shlex.quote(",".join([*there, tcp]))
        unknown = f"correct {named(absent)} in UCX_NET_DEVICES, and " if absent else ""
        return (
            f"{unknown}add a TCP device (`export UCX_NET_DEVICES={value}`), or unset UCX_NET_DEVICES: NIXL needs a "
            "transport that notices a failed peer"
        )
    if transports not in ("", "all"):
        return "add tcp to UCX_TLS, or unset UCX_TLS: NIXL needs a transport that notices a failed peer"
    return (
        "bring up a network interface with an address: NIXL needs a transport that notices a failed peer, such as TCP"
    )
