# SPDX-License-Identifier: Apache-2.0
"""Checks of environment variables: their spelling, their values on this host, and contradictions between them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    has_rdma,
    not_applicable,
    passed,
    warned,
)
from pytest_nixl.checks.doctor.network import devices_named
from pytest_nixl.core.rdma_fault import TCP_ALONE, allows_cuda, cuda_remedy
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.host.driver_questions import VISIBLE_DEVICES
from pytest_nixl.host.etcd import ETCD_VARIABLES
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu import visible
from pytest_nixl.host.ucx_transports import UcxTransports
from pytest_nixl.model.engine_backends import ALLOC_CONF, expands_segments
from pytest_nixl.model.nixl_releases import refuses_no_cuda
from pytest_nixl.model.tools import LIBFABRIC_OFF, LIBFABRIC_ON
from pytest_nixl.model.transports import UCX_OF_RDMA, ucx_tls_allows
from pytest_nixl.model.verdicts import Judgement
from pytest_nixl.session.default_profile import ONE_HOST, OVER_TCP

#: The variable with the address at which vLLM's NIXL side channel listens.
SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
#: Variables of nixlbench, of deployments and of pytest-nixl, which NIXL's libraries do not contain.
_OTHER_NIXL = """
    NIXL_BACKEND NIXL_WORKER_TYPE NIXL_TARGET_SEG_TYPE NIXL_ETCD_ENDPOINTS NIXL_ETCD_NAMESPACE NIXL_PLUGIN_DIR
    NIXL_LOG_LEVEL NIXL_GROUP_TOKEN NIXL_IMAGE NIXL_PREFIX NIXL_VERSION NIXL_ROOT NIXL_HOME NIXL_TELEMETRY_ENABLE
    NIXL_TELEMETRY_DIR NIXL_TELEMETRY_EXPORTER NIXL_TELEMETRY_RUN_INTERVAL NIXL_TELEMETRY_BUFFER_SIZE
    NIXL_TELEMETRY_ENABLED_METRICS NIXL_TELEMETRY_HISTOGRAM_BUCKETS_US NIXL_TELEMETRY_MULTIPROC_DIR
    NIXL_TELEMETRY_PROMETHEUS_LOCAL NIXL_TELEMETRY_PROMETHEUS_PORT
"""
#: Used if no UCX was loaded, whose own list of variables is longer.
_UCX = """
    UCX_TLS UCX_NET_DEVICES UCX_LOG_LEVEL UCX_LOG_FILE UCX_PROTO_INFO UCX_MODULES UCX_MODULE_DIR
    UCX_IB_GPU_DIRECT_RDMA UCX_IB_GID_INDEX UCX_MAX_RNDV_RAILS UCX_MAX_EAGER_RAILS UCX_RNDV_SCHEME UCX_RNDV_THRESH
    UCX_MEMTYPE_CACHE UCX_WARN_UNUSED_ENV_VARS UCX_SOCKADDR_TLS_PRIORITY UCX_KEEPALIVE_INTERVAL
"""
_FABRIC = """
    FI_PROVIDER FI_PROVIDER_PATH FI_LOG_LEVEL FI_LOG_PROV FI_LOG_SUBSYS FI_LOG_INTERVAL FI_HMEM FI_HMEM_DISABLE_P2P
    FI_HMEM_CUDA_USE_GDRCOPY FI_FORK_UNSAFE FI_UNIVERSE_SIZE FI_MR_CACHE_MONITOR FI_MR_CACHE_MAX_SIZE
    FI_MR_CACHE_MAX_COUNT FI_EFA_USE_DEVICE_RDMA FI_EFA_ENABLE_SHM_TRANSFER FI_EFA_IFACE FI_EFA_FORK_SAFE
    FI_EFA_USE_HUGE_PAGE FI_EFA_TX_SIZE FI_EFA_RX_SIZE FI_TCP_IFACE FI_SOCKETS_IFACE FI_VERBS_IFACE
"""
#: Variables of a proxy in the order in which gRPC looks for them; it reads none in capitals.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
#: Suffixes of variables that Dockerfiles use for folders and versions; no program reads them later.
_OF_BUILDS = re.compile(r"_(?:DIR|HOME|PREFIX|PATH|ROOT|VERSION|VER|REF|REPO|URL|COMMIT|BRANCH|TAG|SRC)$")
_TRANSPORT_VARIABLE = re.compile(r"UCX_(RC|DC|UD|SRD)_(?:VERBS_|MLX5_|GDA_)?(\w+)")


@check("variables-known", "Does NIXL, UCX or libfabric know every variable that starts with their prefix?", image=True)
def variables_known(facts: Facts, expected: Requirements) -> Judgement:
    """NIXL, UCX and libfabric know every variable that starts with their prefix."""
    steering, software = facts.environment.steering, facts.software
    strange: dict[str, str] = {}
    for name in steering:
        names = _known(name, facts)
        if names is None or name in names:
            continue
        if name.startswith("UCX_") and software.ucx_variables and name not in software.unused:
            continue  # UCX has read it: some of its modules have variables that its list lacks
        of_a_build = _OF_BUILDS.search(name) is not None
        near = get_close_matches(name, names, n=1, cutoff=0.92 if of_a_build else 0.8)
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
    checked = [name for name in steering if _known(name, facts) is not None]
    return passed(f"{plural(len(checked), 'variable')}: {named(checked)}" if checked else "no variable is set")


def _known(name: str, facts: Facts) -> tuple[str, ...] | None:
    """Return the names that a variable may have; None if they are unknown."""
    software = facts.software
    if name.startswith("UCX_"):
        return (*software.ucx_variables, *_of_families(software.ucx_variables)) or tuple(_UCX.split())
    if name.startswith("NIXL_"):
        return (*software.nixl_variables, *_OTHER_NIXL.split())
    if name.startswith("FI_"):
        names = (*software.fabric_variables, *_FABRIC.split())
        family = "_".join(name.split("_")[:2]) + "_"
        # This libfabric lists no variables of providers that it was built without.
        ours = (
            any(fabric_variable.startswith(family) for fabric_variable in software.fabric_variables)
            or not software.fabric_variables
        )
        return names if ours or get_close_matches(name, names, n=1, cutoff=0.8) else None
    return None


def _of_families(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that set a value for several transports: ``UCX_RC_TIMEOUT`` is for rc_verbs and rc_mlx5."""
    for name in names:
        match = _TRANSPORT_VARIABLE.match(name)
        if match:
            yield f"UCX_{match[1]}_{match[2]}"
            yield f"UCX_IB_{match[2]}"


@check("transports-allowed", "Does UCX_TLS allow the transports that this host supports?")
def transports_allowed(facts: Facts, expected: Requirements) -> Judgement:
    """UCX_TLS allows the transports that this host supports."""
    if "UCX" not in expected.backends:
        return not_applicable("UCX is not requested")
    if "UCX_TLS" not in facts.environment.steering:
        return passed("UCX_TLS is not set: UCX chooses its transports")
    text = facts.environment.get("UCX_TLS")
    tls = UcxTransports.of(text, facts)
    if not "".join(tls.names):
        return failed(f"UCX_TLS={text} names no transport, and UCX refuses an empty list", "unset UCX_TLS")
    ucx = facts.software.backend("UCX")
    works = ucx is not None and not ucx.error and bool(ucx.memories)
    # NIXL looks at the PCI bus: the host of a pod without a GPU, or without a driver, counts.
    refused = (
        not works
        and not allows_cuda(text)
        and any(device.kind == "gpu" for device in facts.pci)
        and refuses_no_cuda(facts.software.nixl.value or "")
    )
    no_cuda = "allows no CUDA memory, but this host has an NVIDIA GPU, so NIXL refuses UCX (NIXL_ERR_BACKEND)"
    if has_rdma(facts, expected):
        rdma = [name for name in tls.names if name in UCX_OF_RDMA or name == "all"]
        shut = tls.without and (
            {"ib", "all"} & set(rdma) or {"rc", "dc", "ud"} <= {name.partition("_")[0] for name in rdma}
        )
        if shut or (not tls.without and not rdma):
            return failed(
                f"UCX_TLS={text} excludes every RDMA transport, but this host has RDMA{tls.meant()}"
                f"{f'; and it {no_cuda}' if refused else ''}",
                "unset UCX_TLS, or add rc, dc or ud (for EFA: srd), and cuda_copy and cuda_ipc for GPUs",
            )
    if not tls.carriers() and not works:
        strange, absent = tls.strange(), tls.absent()
        if strange or absent:
            listing = " and ".join(
                filter(
                    None,
                    [
                        f"UCX does not know {named(map(ascii, strange))}{tls.meant()}" if strange else "",
                        tls.without_device(absent) if absent else "",
                    ],
                )
            )
            return failed(
                f"UCX_TLS={text} names no transport that can carry NIXL on this host: {listing}", tls.remedy()
            )
        return failed(
            f"UCX_TLS={text} {'leaves' if tls.without else 'names'} no transport that reports a failed peer, "
            "so NIXL refuses UCX (NIXL_ERR_BACKEND)",
            "unset UCX_TLS, or do not exclude tcp" if tls.without else "add tcp to UCX_TLS, or unset UCX_TLS",
        )
    if refused:
        return failed(f"UCX_TLS={text} {no_cuda}", cuda_remedy(text))
    if tls.strange():
        return warned(
            f"UCX_TLS={text} contains names that UCX does not know: {named(map(ascii, tls.strange()))}{tls.meant()}",
            tls.remedy(),
        )
    gpu = bool(facts.gpu.gpus) and not tls.without and "all" not in tls.names
    if gpu and not any(name.startswith("cuda") for name in tls.names):
        return warned(f"UCX_TLS={text} excludes cuda_copy and cuda_ipc, but this host has GPUs", "add cuda to UCX_TLS")
    profile = expected.profile.name
    for name in expected.profile.transports("UCX"):
        if not ucx_tls_allows(text, name):
            only = f" ({profile} is for two processes of one host, and judges no transfer to another host)"
            return warned(
                f"UCX_TLS={text} allows none of the transports that the profile {profile} accepts for rows "
                f"of UCX ({', '.join(name)}): these rows would be WRONG-TRANSPORT"
                f"{only if profile in (ONE_HOST, OVER_TCP) else ''}",
                "unset UCX_TLS, or give the profile of this machine with --nixl-profile "
                "(pytest-nixl doctor: --profile)" + (": tcp-loopback" if text in TCP_ALONE else ""),
            )
    return passed(f"UCX_TLS={text}")


#: The names of libfabric's providers, without utility providers (after the ``;``).
_PROVIDERS = """
    efa efa-direct tcp sockets verbs cxi shm udp opx psm2 psm3 ucx usnic lnx hook_debug
"""


@check("devices-there", "Does this host have every network device that a variable names?")
def devices_there(facts: Facts, expected: Requirements) -> Judgement:
    """The host has every network device that a variable names."""
    by_variable = devices_named(facts)
    if not by_variable:
        return passed("no variable names a network device")
    present = [*(nic.name for nic in facts.network.nics), *(device.name for device in facts.rdma)]
    for variable, names in by_variable.items():
        lost = [name for name in names if name not in present and not re.search(r"[*?\[]", name)]
        if lost:
            near = get_close_matches(lost[0], present, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            return failed(
                f"{variable} names {named(lost)}, which this host lacks{hint}; it has {named(present, 8)}",
                f"correct {variable}, or unset it if the hosts have different devices",
            )
        loop = [nic.name for nic in facts.network.nics if nic.loopback and nic.name in names]
        if loop and variable.startswith("FI_"):
            return failed(
                f"{variable}={loop[0]}: libfabric cannot listen on loopback (fi_enable fails)",
                f"set {variable} to an interface that is up and is not loopback",
            )
    return passed("; ".join(f"{variable}={','.join(names)}" for variable, names in by_variable.items()))


@check("provider-there", "Does FI_PROVIDER name a provider that works on this host?")
def provider_there(facts: Facts, expected: Requirements) -> Judgement:
    """FI_PROVIDER names a provider that works on this host."""
    text = facts.environment.get("FI_PROVIDER")
    if not text:
        return passed("FI_PROVIDER is not set: NIXL chooses the provider")
    # libfabric compares names without regard to case and skips empty ones, but a blank is a part of a name.
    if text.startswith("^"):
        shut = "efa" in text.removeprefix("^").lower().split(",") and bool(facts.efa)
        if shut:
            return failed(f"FI_PROVIDER={text} excludes EFA, but this host has EFA", "unset FI_PROVIDER")
        return passed(f"FI_PROVIDER={text}")
    names = [part.partition(";")[0] for part in text.split(",") if part]
    chosen = [name.lower() for name in names]
    known = _PROVIDERS.split()
    strange = [name for name in names if name.lower() not in known and not name.lower().startswith(("ofi_", "off_"))]
    if strange:
        near = get_close_matches(strange[0].lower(), known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return failed(
            f"FI_PROVIDER={text}: libfabric has no provider {named(strange)}{hint}", "correct or unset FI_PROVIDER"
        )
    if any(name.startswith("efa") for name in chosen) and not facts.efa:
        return failed(
            f"FI_PROVIDER={text}, but this host has no EFA",
            "unset FI_PROVIDER, or give the pod its EFA devices",
        )
    if "verbs" in chosen and not facts.rdma:
        return failed(f"FI_PROVIDER={text}, but this host has no RDMA device", "unset FI_PROVIDER")
    if facts.efa and not any(name.startswith("efa") for name in chosen):
        return failed(
            f"FI_PROVIDER={text} excludes EFA, but this host has EFA", "unset FI_PROVIDER, or set FI_PROVIDER=efa"
        )
    return passed(f"FI_PROVIDER={text}")


@check("namespace-plain", "Does NIXL_ETCD_NAMESPACE begin with a slash and end without one?", image=True)
def namespace_plain(facts: Facts, expected: Requirements) -> Judgement:
    """NIXL_ETCD_NAMESPACE begins with a slash and ends without one."""
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
def variables_agree(facts: Facts, expected: Requirements) -> Judgement:
    """The variables do not contradict each other or this host."""
    get = facts.environment.get
    first, second = (get(name) for name in ETCD_VARIABLES)
    proxy, around_proxy = _proxy_of_etcd(facts)
    gpu = bool(facts.gpu.gpus) or expected.has_gpus
    hidden = _hidden_gpus(facts) if gpu else ""
    plugins, backends = get("NIXL_PLUGIN_DIR"), facts.software.backends
    without_plugin = (
        plugins and facts.software.nixl.value and not any(backend.plugin.startswith(plugins) for backend in backends)
    )
    denied = "denies network cards access to GPU memory"
    p2p, direct = get("FI_HMEM_DISABLE_P2P"), get("UCX_IB_GPU_DIRECT_RDMA")
    efa_rdma = get("FI_EFA_USE_DEVICE_RDMA")
    own_addresses = [str(ipaddress.ip_interface(text).ip) for nic in facts.network.nics for text in nic.addresses]
    # Whether it is so, the reason, and the remedy.
    faults = [
        (first and second and first.rstrip("/") != second.rstrip("/"),
         f"{ETCD_VARIABLES[0]}={first} and {ETCD_VARIABLES[1]}={second} name different servers",
         f"unset {ETCD_VARIABLES[1]}, or set both to the same value"),
        (proxy, f"{proxy} is set, so NIXL's gRPC connection to etcd goes through that proxy", around_proxy),
        (efa_rdma.lower() in LIBFABRIC_OFF and (facts.efa or expected.efa),
         f"FI_EFA_USE_DEVICE_RDMA={efa_rdma} disables EFA's RDMA", "unset FI_EFA_USE_DEVICE_RDMA"),
        (gpu and p2p.lower() in LIBFABRIC_ON,
         f"FI_HMEM_DISABLE_P2P={p2p} {denied}", "unset FI_HMEM_DISABLE_P2P"),
        (gpu and direct.lower() in ("n", "no", "0", "off"),
         f"UCX_IB_GPU_DIRECT_RDMA={direct} {denied}", "unset UCX_IB_GPU_DIRECT_RDMA"),
        *((gpu and expands_segments(get(name)),
           f"{name}={get(name)}: UCX moves such GPU memory by TCP, 600 times slower", f"unset {name}")
          for name in ALLOC_CONF),
        (hidden, hidden, f"unset {VISIBLE_DEVICES}, or set it to GPUs that `nvidia-smi -L` lists"),
        (facts.efa and (get("RDMAV_FORK_SAFE") or get("IBV_FORK_SAFE")),
         "RDMAV_FORK_SAFE or IBV_FORK_SAFE is set, so EFA does not use huge pages",
         "unset RDMAV_FORK_SAFE and IBV_FORK_SAFE"),
        (without_plugin,
         f"NIXL_PLUGIN_DIR={plugins} has no plugin of a requested backend", "correct or unset NIXL_PLUGIN_DIR"),
        (own_addresses and _foreign(get(SIDE_CHANNEL_HOST), own_addresses),
         f"{SIDE_CHANNEL_HOST}={get(SIDE_CHANNEL_HOST)} is an address of another host (this one has "
         f"{named(own_addresses)}), so vLLM cannot listen there",
         f"set {SIDE_CHANNEL_HOST} to the address of this host or pod (fieldRef: status.podIP)"),
    ]  # fmt: skip
    reasons = [reason for fault, reason, _ in faults if fault]
    if reasons:
        return failed("; ".join(reasons), "; ".join(dict.fromkeys(remedy for fault, _, remedy in faults if fault)))
    if ignored := facts.software.unused.get("LD_PRELOAD"):
        return warned(f"the loader ignores a file of LD_PRELOAD: {ignored}", "correct or unset LD_PRELOAD")
    return passed("the variables that are set do not contradict each other")


def _foreign(host: str, own_addresses: Sequence[str]) -> bool:
    """Return whether a host is the address of another host; a name may be this host's."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or str(address) in own_addresses)


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


def _proxy_of_etcd(facts: Facts) -> tuple[str, str]:
    """Return the variable of the proxy through which NIXL connects to etcd, and the remedy; two empty texts: none.

    NIXL's client resolves the names of etcd's members, and gives their IPv4 addresses to gRPC as one text. gRPC takes
    the first variable that is set, also if it is empty, and speaks to proxies of ``http`` only.
    """
    values = facts.environment.values
    variable = next((name for name in _PROXIES if name in values), "")
    if not values.get(variable, "").lower().startswith("http://"):
        return "", ""
    members = _members(values.get(ETCD_VARIABLES[0], ""), facts)
    exempting = "no_grpc_proxy" if "no_grpc_proxy" in values else "no_proxy"
    target = members[0][0] if len(members) == 1 else ",".join(f"{host}:{port}" for host, port in members)
    if not members or _is_exempt(target, values.get(exempting, "")):
        return "", ""
    remedy = (
        "run `export grpc_proxy=` where the ranks start: empty, it means no proxy to gRPC, which NIXL uses for etcd"
    )
    if len(members) > 1:
        return variable, f"{remedy}; {exempting} exempts no etcd of several addresses"
    return variable, f"{remedy}; or add etcd's address ({target}) to {exempting}, without a port"


def _members(endpoints: str, facts: Facts) -> list[tuple[str, int]]:
    """Return the addresses and ports of etcd's members; a name of which no address is known stands for itself."""
    ipv4 = {name.host: [address for address in name.addresses if ":" not in address] for name in facts.etcd.names}
    try:
        parsed = parse_endpoints(endpoints)
    except ValueError:
        return []  # etcd-answers says so
    return [(host, member.port) for member in parsed for host in ipv4.get(member.host) or [member.host]]


def _is_exempt(target: str, entries: str) -> bool:
    """Return whether gRPC connects to a target without a proxy: an entry is its end, or a subnet that contains it.

    ``*``, ``[::1]`` and ``10.0.0.5:2379`` are no end of an address.
    """
    for entry in map(str.strip, filter(None, entries.split(","))):
        if target.lower().endswith(entry.lower()):
            return True
        with suppress(ValueError):
            if "/" in entry and ipaddress.ip_address(target) in ipaddress.ip_network(entry, strict=False):
                return True
    return False
