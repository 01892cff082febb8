# SPDX-License-Identifier: Apache-2.0
"""Check of the spelling of environment variables, against the names that libraries and programs know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    passed,
    warned,
)
from pytest_nixl.core.words import named, plural
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

#: Variables of nixlbench, of deployments and of pytest-nixl, which NIXL's libraries do not contain.
_OTHER_NIXL = (
    "NIXL_BACKEND",
    "NIXL_WORKER_TYPE",
    "NIXL_TARGET_SEG_TYPE",
    "NIXL_ETCD_ENDPOINTS",
    "NIXL_ETCD_NAMESPACE",
    "NIXL_PLUGIN_DIR",
    "NIXL_LOG_LEVEL",
    "NIXL_GROUP_TOKEN",
    "NIXL_IMAGE",
    "NIXL_PREFIX",
    "NIXL_VERSION",
    "NIXL_ROOT",
    "NIXL_HOME",
    "NIXL_TELEMETRY_ENABLE",
    "NIXL_TELEMETRY_DIR",
    "NIXL_TELEMETRY_EXPORTER",
    "NIXL_TELEMETRY_RUN_INTERVAL",
    "NIXL_TELEMETRY_BUFFER_SIZE",
    "NIXL_TELEMETRY_ENABLED_METRICS",
    "NIXL_TELEMETRY_HISTOGRAM_BUCKETS_US",
    "NIXL_TELEMETRY_MULTIPROC_DIR",
    "NIXL_TELEMETRY_PROMETHEUS_LOCAL",
    "NIXL_TELEMETRY_PROMETHEUS_PORT",
)
#: Used if no UCX was loaded, whose own list of variables is longer.
_UCX = (
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "UCX_LOG_LEVEL",
    "UCX_LOG_FILE",
    "UCX_PROTO_INFO",
    "UCX_MODULES",
    "UCX_MODULE_DIR",
    "UCX_IB_GPU_DIRECT_RDMA",
    "UCX_IB_GID_INDEX",
    "UCX_MAX_RNDV_RAILS",
    "UCX_MAX_EAGER_RAILS",
    "UCX_RNDV_SCHEME",
    "UCX_RNDV_THRESH",
    "UCX_MEMTYPE_CACHE",
    "UCX_WARN_UNUSED_ENV_VARS",
    "UCX_SOCKADDR_TLS_PRIORITY",
    "UCX_KEEPALIVE_INTERVAL",
)
_FABRIC = (
    "FI_PROVIDER",
    "FI_PROVIDER_PATH",
    "FI_LOG_LEVEL",
    "FI_LOG_PROV",
    "FI_LOG_SUBSYS",
    "FI_LOG_INTERVAL",
    "FI_HMEM",
    "FI_HMEM_DISABLE_P2P",
    "FI_HMEM_CUDA_USE_GDRCOPY",
    "FI_FORK_UNSAFE",
    "FI_UNIVERSE_SIZE",
    "FI_MR_CACHE_MONITOR",
    "FI_MR_CACHE_MAX_SIZE",
    "FI_MR_CACHE_MAX_COUNT",
    "FI_EFA_USE_DEVICE_RDMA",
    "FI_EFA_ENABLE_SHM_TRANSFER",
    "FI_EFA_IFACE",
    "FI_EFA_FORK_SAFE",
    "FI_EFA_USE_HUGE_PAGE",
    "FI_EFA_TX_SIZE",
    "FI_EFA_RX_SIZE",
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "FI_VERBS_IFACE",
)
#: Suffixes of variables that Dockerfiles use for folders and versions; no program reads them later.
_OF_BUILDS = re.compile(r"_(?:DIR|HOME|PREFIX|PATH|ROOT|VERSION|VER|REF|REPO|URL|COMMIT|BRANCH|TAG|SRC)$")
_TRANSPORT_VARIABLE = re.compile(r"UCX_(RC|DC|UD|SRD)_(?:(?:VERBS|MLX5|GDA)_)?(\w+)")


@check("variables-known", "Does NIXL, UCX or libfabric know every variable that starts with their prefix?", image=True)
def variables_known(facts: Facts, wanted: Requirements) -> Judgement:
    """NIXL, UCX and libfabric know every variable that starts with their prefix.

    Judge the names of variables. A misspelt variable has no effect, and at most one log line says so.
    """
    steering, software = facts.environment.steering, facts.software
    strange: dict[str, str] = {}
    for name in steering:
        known = _known(name, facts)
        if known is None or name in known:
            continue
        if name.startswith("UCX_") and software.ucx_variables and name not in software.unused:
            continue  # UCX has read it: some of its modules have variables that its list lacks
        of_a_build = _OF_BUILDS.search(name) is not None
        near = get_close_matches(name, known, n=1, cutoff=0.92 if of_a_build else 0.8)
        if near or not of_a_build:
            strange[name] = near[0] if near else ""
    misspelt = [f"{name} (did you mean {near}?)" for name, near in strange.items() if near]
    if misspelt:
        return failed(
            f"no program reads {named(misspelt, 8)}", "correct or unset the variable in the deployment of every rank"
        )
    if strange:
        return warned(
            f"no library that is loaded reads {named(strange, 8)}",
            "unset it, or check in which release it exists",
        )
    asked = [name for name in steering if _known(name, facts) is not None]
    return passed(f"{plural(len(asked), 'variable')}: {named(asked)}" if asked else "no variable is set")


def _known(name: str, facts: Facts) -> tuple[str, ...] | None:
    """Return the names that a variable may have; None if they are unknown."""
    software = facts.software
    if name.startswith("UCX_"):
        return (*software.ucx_variables, *_of_families(software.ucx_variables)) or _UCX
    if name.startswith("NIXL_"):
        return (*software.nixl_variables, *_OTHER_NIXL)
    if name.startswith("FI_"):
        known = (*software.fabric_variables, *_FABRIC)
        family = "_".join(name.split("_")[:2]) + "_"
        # This libfabric lists no variables of providers that it was built without.
        ours = (
            any(fabric_variable.startswith(family) for fabric_variable in software.fabric_variables)
            or not software.fabric_variables
        )
        return known if ours or get_close_matches(name, known, n=1, cutoff=0.8) else None
    return None


def _of_families(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that set a value for several transports: ``UCX_RC_TIMEOUT`` is for rc_verbs and rc_mlx5."""
    for name in names:
        match = _TRANSPORT_VARIABLE.match(name)
        if match:
            yield f"UCX_{match[1]}_{match[2]}"
            yield f"UCX_IB_{match[2]}"
