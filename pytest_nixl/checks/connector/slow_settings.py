# SPDX-License-Identifier: Apache-2.0
"""Variables of UCX and libfabric with which blocks arrive slowly, or not at all."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_nixl.checks.connector.nixl_relations import OVER_TCP, used_backends
from pytest_nixl.checks.connector.relations import Mismatch, SidePair
from pytest_nixl.model.verdicts import Verdict


class SlowSetting(NamedTuple):
    """A variable of a backend with values that let it work slowly.

    :param values: a regular expression of these values in lower case.
    :param slow: what the last line of the command says.
    """

    variable: str
    values: str
    backend: str
    effect: str
    slow: str


_OFF = "n|no|0|off|false"
_THROUGH_HOST = "KV goes through host memory: slow"
#: The variable with which UCX moves nothing.
_DISABLES = "UCX_PROTO_ENABLE"
SLOW_SETTINGS = (
    SlowSetting(_DISABLES, _OFF, "UCX", "every transfer of NIXL ends in NIXL_ERR_BACKEND", ""),
    SlowSetting("UCX_IB_GPU_DIRECT_RDMA", _OFF, "UCX", "network cards may not reach GPU memory", _THROUGH_HOST),
    SlowSetting(
        "UCX_RNDV_SCHEME",
        "am|(?:get|put)_ppln",
        "UCX",
        "UCX copies what goes by rendezvous through buffers",
        "KV is copied through buffers: slow",
    ),
    SlowSetting(
        "FI_PROVIDER",
        "(?:ofi_rxm;)?(?:tcp|sockets|udp|net)(?:;ofi_rx[md])?",
        "LIBFABRIC",
        f"libfabric uses no RDMA, so that {OVER_TCP}",
        OVER_TCP,
    ),
    SlowSetting("FI_EFA_USE_DEVICE_RDMA", _OFF, "LIBFABRIC", "EFA uses no RDMA", "KV goes without EFA's RDMA: slow"),
    SlowSetting(
        "FI_HMEM_DISABLE_P2P", "y|yes|1|on|true", "LIBFABRIC", "network cards may not reach GPU memory", _THROUGH_HOST
    ),
)


def slow_settings(pair: SidePair, field: str) -> Mismatch | None:
    """Warn of settings of UCX and libfabric with which blocks arrive slowly, or not at all."""
    reasons: list[str] = []
    names: list[str] = []
    for name, side in zip(("prefill", "decode"), pair.sides, strict=True):
        for setting in SLOW_SETTINGS:
            text = side.source.launch.environment.get(setting.variable, "").strip().lower()
            used = used_backends(side)[0] or {"UCX", "LIBFABRIC"}
            if setting.backend in used and re.fullmatch(setting.values, text):
                reasons.append(f"with {name}'s {setting.variable}={text} {setting.effect}")
                names.append(setting.variable)
    if not reasons:
        return None
    remedy = f"unset {' and '.join(dict.fromkeys(names))}"
    if _DISABLES in names:
        return Mismatch("; ".join(reasons), remedy)
    slow = next(setting.slow for setting in SLOW_SETTINGS if setting.variable == names[0])
    return Mismatch("; ".join(reasons), remedy, Verdict.WARN, slow)
