# SPDX-License-Identifier: Apache-2.0
"""Checks of environment variables: contradictions, and values that do not fit this host."""

from __future__ import annotations

import re
from difflib import get_close_matches

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    passed,
    warned,
)
from pytest_nixl.checks.doctor.network import devices_named
from pytest_nixl.core.words import named, plural
from pytest_nixl.host.cuda_visible import visible
from pytest_nixl.host.driver_questions import VISIBLE_DEVICES
from pytest_nixl.host.etcd import ETCD_VARIABLES
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.engine_backends import ALLOC_CONF, expands_segments
from pytest_nixl.model.verdicts import Judgement

#: The names of libfabric's providers, without utility providers (after the ``;``).
_PROVIDERS = (
    "efa",
    "efa-direct",
    "tcp",
    "sockets",
    "verbs",
    "cxi",
    "shm",
    "udp",
    "opx",
    "psm2",
    "psm3",
    "ucx",
    "usnic",
    "lnx",
    "hook_debug",
)


@check("devices-there", "Does this host have every network device that a variable names?")
def devices_there(facts: Facts, wanted: Requirements) -> Judgement:
    """The host has every network device that a variable names.

    Judge the devices in UCX_NET_DEVICES, FI_TCP_IFACE and FI_SOCKETS_IFACE.
    """
    asked = devices_named(facts)
    if not asked:
        return passed("no variable names a network device")
    here = [*(nic.name for nic in facts.network.nics), *(device.name for device in facts.rdma)]
    for variable, names in asked.items():
        lost = [name for name in names if name not in here and not re.search(r"[*?\[]", name)]
        if lost:
            near = get_close_matches(lost[0], here, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            return failed(
                f"{variable} names {named(lost)}, which this host lacks{hint}; it has {named(here, 8)}",
                f"correct {variable}, or unset it if the hosts have different devices",
            )
        loop = [nic.name for nic in facts.network.nics if nic.loopback and nic.name in names]
        if loop and variable.startswith("FI_"):
            return failed(
                f"{variable}={loop[0]}: libfabric cannot listen on loopback (fi_enable fails)",
                f"set {variable} to an interface that is up and is not loopback",
            )
    return passed("; ".join(f"{variable}={','.join(names)}" for variable, names in asked.items()))


@check("provider-there", "Does FI_PROVIDER name a provider that works on this host?")
def provider_there(facts: Facts, wanted: Requirements) -> Judgement:
    """FI_PROVIDER names a provider that works on this host.

    Judge FI_PROVIDER. Libfabric uses no other provider, so with a wrong name LIBFABRIC cannot be created.
    """
    text = facts.environment.get("FI_PROVIDER")
    if not text:
        return passed("FI_PROVIDER is not set: NIXL chooses the provider")
    if text.startswith("^"):
        shut = "efa" in text.removeprefix("^").split(",") and bool(facts.efa)
        if shut:
            return failed(f"FI_PROVIDER={text} excludes EFA, but this host has EFA", "unset FI_PROVIDER")
        return passed(f"FI_PROVIDER={text}")
    names = [part.partition(";")[0].strip() for part in text.split(",")]
    strange = [name for name in names if name.lower() not in _PROVIDERS and not name.startswith(("ofi_", "off_"))]
    if strange:
        near = get_close_matches(strange[0].lower(), _PROVIDERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return failed(
            f"FI_PROVIDER={text}: libfabric has no provider {named(strange)}{hint}", "correct or unset FI_PROVIDER"
        )
    if any(name.startswith("efa") for name in names) and not facts.efa:
        return failed(
            f"FI_PROVIDER={text}, but this host has no EFA",
            "unset FI_PROVIDER, or give the pod its EFA devices",
        )
    if "verbs" in names and not facts.rdma:
        return failed(f"FI_PROVIDER={text}, but this host has no RDMA device", "unset FI_PROVIDER")
    if facts.efa and not any(name.startswith("efa") for name in names):
        return failed(
            f"FI_PROVIDER={text} excludes EFA, but this host has EFA", "unset FI_PROVIDER, or set FI_PROVIDER=efa"
        )
    return passed(f"FI_PROVIDER={text}")


@check("namespace-plain", "Does NIXL_ETCD_NAMESPACE begin with a slash and end without one?", image=True)
def namespace_plain(facts: Facts, wanted: Requirements) -> Judgement:
    """NIXL_ETCD_NAMESPACE begins with a slash and ends without one.

    Judge the namespace. Keys are NAMESPACE/AGENT/…, so ranks whose namespaces differ by a slash never meet.
    """
    text = facts.environment.get("NIXL_ETCD_NAMESPACE")
    if not text:
        return passed(
            "NIXL_ETCD_NAMESPACE is not set: NIXL uses /nixl/agents/, so its keys contain two slashes in a row"
        )
    remedy = (
        "set the same value on every rank, which begins with a slash and ends without one: "
        "NIXL_ETCD_NAMESPACE=/nixl/agents"
    )
    if text.strip() != text or '"' in text or "'" in text:
        return failed(
            f"NIXL_ETCD_NAMESPACE={text!r} contains white space or quotes, which become part of every key", remedy
        )
    if text.endswith("/"):
        return warned(
            f"NIXL_ETCD_NAMESPACE={text} ends with a slash: etcd keeps it apart from {text.rstrip('/')}", remedy
        )
    if not text.startswith("/"):
        return warned(f"NIXL_ETCD_NAMESPACE={text} begins without a slash: etcd keeps it apart from /{text}", remedy)
    return passed(f"NIXL_ETCD_NAMESPACE={text}")


@check("variables-agree", "Do the variables agree with each other and with this host?")
def variables_agree(facts: Facts, wanted: Requirements) -> Judgement:
    """The variables do not contradict each other or this host.

    Judge variables that disable hardware of this host, and pairs of which one silently overrides the other.
    """
    get = facts.environment.get
    found: list[tuple[str, str]] = []
    first, second = (get(name) for name in ETCD_VARIABLES)
    if first and second and first.rstrip("/") != second.rstrip("/"):
        found.append(
            (
                f"{ETCD_VARIABLES[0]}={first} and {ETCD_VARIABLES[1]}={second} name different servers",
                f"unset {ETCD_VARIABLES[1]}, or set both to the same value",
            )
        )
    proxy = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if get(name)), "")
    if proxy and first and not _bypassed(first, get("no_grpc_proxy") or get("no_proxy") or get("NO_PROXY")):
        found.append(
            (
                f"{proxy} is set, so NIXL's gRPC connection to etcd goes through that proxy",
                "add etcd's host to no_proxy",
            )
        )
    if get("FI_EFA_USE_DEVICE_RDMA") == "0" and (facts.efa or wanted.efa):
        found.append(("FI_EFA_USE_DEVICE_RDMA=0 disables EFA's RDMA", "unset FI_EFA_USE_DEVICE_RDMA"))
    gpu = bool(facts.gpu.gpus) or wanted.has_gpus
    if gpu and get("FI_HMEM_DISABLE_P2P").lower() in ("1", "yes", "on", "true"):
        found.append(
            (
                f"FI_HMEM_DISABLE_P2P={get('FI_HMEM_DISABLE_P2P')} denies network cards access to GPU memory",
                "unset FI_HMEM_DISABLE_P2P",
            )
        )
    if gpu and get("UCX_IB_GPU_DIRECT_RDMA").lower() in ("n", "no", "0", "off"):
        found.append(
            (
                f"UCX_IB_GPU_DIRECT_RDMA={get('UCX_IB_GPU_DIRECT_RDMA')} denies network cards access to GPU memory",
                "unset UCX_IB_GPU_DIRECT_RDMA",
            )
        )
    for name in ALLOC_CONF:
        if gpu and expands_segments(get(name)):
            found.append((f"{name}={get(name)}: UCX moves such GPU memory by TCP, 600 times slower", f"unset {name}"))
    if gpu and (reason := _hidden_gpus(facts)):
        found.append((reason, f"unset {VISIBLE_DEVICES}, or set it to GPUs that `nvidia-smi -L` lists"))
    if facts.efa and (get("RDMAV_FORK_SAFE") or get("IBV_FORK_SAFE")):
        found.append(
            (
                "RDMAV_FORK_SAFE or IBV_FORK_SAFE is set, so EFA does not use huge pages",
                "unset RDMAV_FORK_SAFE and IBV_FORK_SAFE",
            )
        )
    plugins = get("NIXL_PLUGIN_DIR")
    if (
        plugins
        and facts.software.nixl.value
        and not any(backend.plugin.startswith(plugins) for backend in facts.software.backends)
    ):
        found.append(
            (f"NIXL_PLUGIN_DIR={plugins} has no plugin of a requested backend", "correct or unset NIXL_PLUGIN_DIR")
        )
    if found:
        return failed("; ".join(reason for reason, _ in found), "; ".join(dict.fromkeys(remedy for _, remedy in found)))
    return passed("the variables that are set do not contradict each other")


def _hidden_gpus(facts: Facts) -> str:
    """Return the entry of CUDA_VISIBLE_DEVICES that hides GPUs which the variable asks for; empty if there is none.

    The driver's answer decides, if there is one. A list that is shorter than the host's is no fault.
    """
    text = facts.environment.values.get(VISIBLE_DEVICES)
    if text is None:
        return ""
    if text.strip() in ("", "-1"):
        return f"{VISIBLE_DEVICES}={text} hides every GPU"
    cuda, predicted = facts.gpu.cuda_driver, visible(facts.gpu.gpus, facts.environment.values)
    entries = [entry.strip() for entry in text.rstrip(", ").split(",")]
    by_uuid = text.startswith(("GPU-", "MIG-"))
    if cuda.without_variable == 0:
        return predicted.why if not predicted.gpus else f"{VISIBLE_DEVICES}={text} hides every GPU"
    if cuda.init == 0:
        shown = len(cuda.devices)
    elif cuda.init is None and facts.gpu.gpus and not by_uuid:
        shown = len(predicted.gpus)
    else:
        return ""
    # CUDA shows one MIG instance at most, and -1 ends a list on purpose.
    if shown >= len(entries) or text.startswith("MIG-") or entries[shown].startswith("-"):
        return ""
    if not predicted.gpus:
        return predicted.why
    return (
        f"{VISIBLE_DEVICES}={text} shows {plural(shown, 'GPU')}: the list ends at {entries[shown]!r}, which matches no "
        "GPU of this host"
    )


def _bypassed(endpoints: str, exempt: str) -> bool:
    hosts = re.findall(r"(?://|^|,)(?:[^/,@]*@)?([^:/,@]+):\d+", endpoints)
    parts = [part.strip().lstrip("*.") for part in exempt.split(",") if part.strip()]
    return "*" in exempt or all(any(host == part or host.endswith(f".{part}") for part in parts) for host in hosts)
