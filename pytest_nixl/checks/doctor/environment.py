# SPDX-License-Identifier: Apache-2.0
"""Variables: known, and not at odds with each other or with the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    has_rdma,
    named,
    not_applicable,
    passed,
    plural,
    warned,
)
from pytest_nixl.checks.doctor.network import devices_named
from pytest_nixl.host.facts import ETCD_VARIABLES, Facts
from pytest_nixl.model.verdicts import Judgement

#: Names that NIXL's libraries do not have in them: of nixlbench, of deployments, and ours.
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
)
#: Where no UCX was loaded that would tell its names.
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

#: Transports of UCX that leave the host by RDMA, and names that stand for some of them.
_RDMA_TLS = frozenset(
    {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc",
     "dc_x", "dc_mlx5", "srd", "gga", "gga_mlx5", "efa"}
)  # fmt: skip
#: Those of them that EFA has.
_EFA_TLS = frozenset({"ib", "ud", "ud_v", "ud_verbs", "srd", "efa"})
_GPU_TLS = frozenset(
    {"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc", "rocm_gdr", "ze", "ze_copy",
     "ze_ipc", "ze_gdr", "gaudi", "gaudi_gdr"}
)  # fmt: skip
#: What Dockerfiles call the places and versions of what they build: nobody is meant to read them later.
_OF_BUILDS = re.compile(r"_(?:DIR|HOME|PREFIX|PATH|ROOT|VERSION|VER|REF|REPO|URL|COMMIT|BRANCH|TAG|SRC)$")
_TRANSPORT_VARIABLE = re.compile(r"UCX_(RC|DC|UD|SRD)_(?:(?:VERBS|MLX5|GDA)_)?(\w+)")
#: Those within a host, which cannot carry NIXL alone, as they tell of no peer that failed.
_LOCAL_TLS = frozenset({"sm", "shm", "posix", "sysv", "cma", "knem", "xpmem", "self", "mm"})
_KNOWN_TLS = _RDMA_TLS | _GPU_TLS | _LOCAL_TLS | {"all", "tcp"}
#: UCX's own word about names that it cannot use.
_NOT_AVAILABLE = re.compile(r"transports? ('.*') (?:is|are) not available, please use one or more of: (.*)")
#: What libfabric's providers are called, utilities (after the ``;``) left out.
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


@check(
    "variables-known", "Is every variable that looks like NIXL's, UCX's or libfabric's one that they know?", image=True
)
def variables_known(facts: Facts, wanted: Requirements) -> Judgement:
    """A misspelt one has no effect, and nobody says so, or only in a line of the log."""
    steering, software = facts.environment.steering, facts.software
    strange: dict[str, str] = {}
    for name in steering:
        known = _known(name, facts)
        if known is None or name in known:
            continue
        if name.startswith("UCX_") and software.ucx_variables and name not in software.unused:
            continue  # UCX has read it: a part of it has names of its own
        of_a_build = _OF_BUILDS.search(name) is not None
        near = get_close_matches(name, known, n=1, cutoff=0.92 if of_a_build else 0.8)
        if near or not of_a_build:
            strange[name] = near[0] if near else ""
    misspelt = [f"{name} (did you mean {near}?)" for name, near in strange.items() if near]
    if misspelt:
        return failed(
            f"nothing reads {named(misspelt, 8)}", "correct the name, or unset it, in the deployment of every rank"
        )
    if strange:
        return warned(
            f"nothing that is loaded here reads {named(strange, 8)}",
            "unset it, or see whether its name is that of another release",
        )
    asked = [name for name in steering if _known(name, facts) is not None]
    return passed(f"{plural(len(asked), 'variable')}: {named(asked)}" if asked else "none is set")


def _known(name: str, facts: Facts) -> tuple[str, ...] | None:
    """The names among which a variable should be; None: nobody knows."""
    software = facts.software
    if name.startswith("UCX_"):
        return (*software.ucx_variables, *_of_families(software.ucx_variables)) or _UCX
    if name.startswith("NIXL_"):
        return (*software.nixl_variables, *_OTHER_NIXL)
    if name.startswith("FI_"):
        known = (*software.fabric_variables, *_FABRIC)
        family = "_".join(name.split("_")[:2]) + "_"
        # Of a provider that this libfabric was built without, no name is known but the common ones.
        ours = any(each.startswith(family) for each in software.fabric_variables) or not software.fabric_variables
        return known if ours or get_close_matches(name, known, n=1, cutoff=0.8) else None
    return None


def _of_families(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that stand for those of several transports: ``UCX_RC_TIMEOUT`` is of rc_verbs and rc_mlx5."""
    for name in names:
        match = _TRANSPORT_VARIABLE.match(name)
        if match:
            yield f"UCX_{match[1]}_{match[2]}"
            yield f"UCX_IB_{match[2]}"


@check("transports-allowed", "Does UCX_TLS leave UCX the transports that this host has?")
def transports_allowed(facts: Facts, wanted: Requirements) -> Judgement:
    """A list without RDMA on a host that has it, one that cannot carry NIXL, or a name that UCX does not know."""
    if "UCX" not in wanted.backends:
        return not_applicable("UCX is not requested")
    if "UCX_TLS" not in facts.environment.steering:
        return passed("UCX_TLS is not set: UCX chooses")
    text = facts.environment.get("UCX_TLS")
    tls = _Transports.of(text, facts)
    if not "".join(tls.names):
        return failed(f"UCX_TLS={text} names no transport: UCX refuses an empty list", "unset UCX_TLS")
    made = facts.software.backend("UCX")
    works = made is not None and not made.error and bool(made.memories)
    if has_rdma(facts, wanted):
        rdma = [name for name in tls.names if name in _RDMA_TLS or name == "all"]
        shut = tls.without and (
            {"ib", "all"} & set(rdma) or {"rc", "dc", "ud"} <= {name.partition("_")[0] for name in rdma}
        )
        if shut or (not tls.without and not rdma):
            return failed(
                f"UCX_TLS={text} leaves out every RDMA transport, and this host has RDMA{tls.meant()}",
                "unset UCX_TLS, or name rc, dc or ud (for EFA: srd), with cuda_copy and cuda_ipc for GPUs",
            )
    if not tls.carriers() and not works:
        strange, absent = tls.strange(), tls.absent()
        if strange or absent:
            told = " and ".join(filter(None, [
                f"UCX does not know {named(map(_asked, strange))}{tls.meant()}" if strange else "",
                f"this host has no device for {named(absent)}" if absent else "",
            ]))  # fmt: skip
            return failed(f"UCX_TLS={text} names nothing that can carry NIXL here: {told}", tls.remedy())
        return failed(
            f"UCX_TLS={text} {'leaves' if tls.without else 'names'} none that tells of a peer that failed: "
            "NIXL refuses such a UCX (NIXL_ERR_BACKEND)",
            "unset UCX_TLS, or do not shut out tcp" if tls.without else "add tcp, or unset UCX_TLS",
        )
    if tls.strange():
        return warned(
            f"UCX_TLS={text} has a name that UCX does not know: {named(map(_asked, tls.strange()))}{tls.meant()}",
            tls.remedy(),
        )
    gpu = bool(facts.gpu.gpus) and not tls.without and "all" not in tls.names
    if gpu and not any(name.startswith("cuda") for name in tls.names):
        return warned(
            f"UCX_TLS={text} leaves out cuda_copy and cuda_ipc, and this host has GPUs", "add cuda to UCX_TLS"
        )
    return passed(f"UCX_TLS={text}")


def _asked(name: str) -> str:
    return ascii(name)


@dataclass(frozen=True)
class _Transports:
    """What UCX_TLS says, as UCX reads it: names with their case and white space, behind a ``^`` those to leave out.

    :param names: without the backslash that asks for a transport of just that name, and without ``:aux``.
    :param auxiliary: those of them that may only set up connections.
    :param has_rdma: whether this host has RDMA devices; ``efa_only``: and all of them are EFA.
    :param refused: names that UCX itself said it cannot use; ``offered``: what it said it can.
    """

    without: bool
    names: tuple[str, ...]
    auxiliary: frozenset[str]
    has_rdma: bool
    efa_only: bool
    has_gpu: bool
    refused: frozenset[str]
    offered: frozenset[str]

    @classmethod
    def of(cls, text: str, facts: Facts) -> _Transports:
        parts = [part.removeprefix("\\") for part in text.removeprefix("^").split(",")]
        names = [part.partition(":")[0] for part in parts]
        made = facts.software.backend("UCX")
        refused: set[str] = set()
        offered: set[str] = set()
        for match in filter(None, map(_NOT_AVAILABLE.search, made.said if made is not None else ())):
            refused |= set(re.findall("'([^']*)'", match[1]))
            offered |= set(re.split(", *", match[2]))
        return cls(
            without=text.startswith("^"),
            names=tuple(name for name in names if name),
            auxiliary=frozenset(part.partition(":")[0] for part in parts if part.endswith(":aux")),
            has_rdma=bool(facts.rdma) or bool(offered & _RDMA_TLS),
            efa_only=bool(facts.rdma) and all(device.kind == "efa" for device in facts.rdma),
            has_gpu=bool(facts.gpu.gpus),
            refused=frozenset(refused),
            offered=frozenset(offered),
        )

    def strange(self) -> list[str]:
        """Return the names that no UCX has."""
        return [name for name in self.names if name not in _KNOWN_TLS and name not in self.offered]

    def absent(self) -> list[str]:
        """Return the names for which this host has no device, or that this UCX says it cannot use."""
        return [name for name in self.names if name in _KNOWN_TLS and not self._here(name)]

    def _here(self, name: str) -> bool:
        if name in self.refused:
            return False
        if name in _RDMA_TLS:
            return self.has_rdma and (not self.efa_only or name in _EFA_TLS)
        return self.has_gpu if name in _GPU_TLS else True

    def carriers(self) -> list[str]:
        """Return what is left that can carry NIXL by itself: tcp, or RDMA on a host that has it."""
        able = {"tcp", *(_RDMA_TLS if self.has_rdma else ())}
        if self.without:
            return sorted(able - set(self.names)) if "all" not in self.names else []
        usable = [name for name in self.names if name not in self.auxiliary and self._here(name)]
        return [name for name in usable if name in able or name == "all"]

    def meant(self) -> str:
        """Return the names that are probably meant instead of those that UCX does not know, in words."""
        known = sorted(self.offered | _KNOWN_TLS)
        found = {}
        for name in self.strange():
            near = get_close_matches(re.sub(r"\s", "", name).lower(), known, n=1, cutoff=0.6)
            if near:
                found[name] = near[0]
        return f" (did you mean {named(found.values())}?)" if found else ""

    def remedy(self) -> str:
        """Say what to write."""
        carry = sorted(self.offered & (_RDMA_TLS | {"tcp"})) or ["tcp"]
        return f"correct UCX_TLS, or unset it; what carries NIXL here: {named(carry, 12)}"


@check("devices-there", "Is every network device there that a variable names?")
def devices_there(facts: Facts, wanted: Requirements) -> Judgement:
    """UCX_NET_DEVICES, FI_TCP_IFACE and the like."""
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
                f"{variable} names {named(lost)}, which this host has not{hint}: it has {named(here, 8)}",
                f"correct {variable}, or unset it where hosts differ",
            )
        loop = [nic.name for nic in facts.network.nics if nic.loopback and nic.name in names]
        if loop and variable.startswith("FI_"):
            return failed(
                f"{variable}={loop[0]}: libfabric does not listen on loopback (fi_enable fails)",
                "name an interface that is up and is not loopback",
            )
    return passed("; ".join(f"{variable}={','.join(names)}" for variable, names in asked.items()))


@check("provider-there", "Is the provider there that FI_PROVIDER names?")
def provider_there(facts: Facts, wanted: Requirements) -> Judgement:
    """Libfabric then has no other, and LIBFABRIC cannot be made."""
    text = facts.environment.get("FI_PROVIDER")
    if not text:
        return passed("FI_PROVIDER is not set: NIXL chooses")
    if text.startswith("^"):
        shut = "efa" in text.removeprefix("^").split(",") and bool(facts.efa)
        if shut:
            return failed(f"FI_PROVIDER={text} shuts out EFA, which this host has", "unset FI_PROVIDER")
        return passed(f"FI_PROVIDER={text}")
    names = [part.partition(";")[0].strip() for part in text.split(",")]
    strange = [name for name in names if name.lower() not in _PROVIDERS and not name.startswith(("ofi_", "off_"))]
    if strange:
        near = get_close_matches(strange[0].lower(), _PROVIDERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return failed(
            f"FI_PROVIDER={text}: there is no provider {named(strange)}{hint}", "correct FI_PROVIDER, or unset it"
        )
    if any(name.startswith("efa") for name in names) and not facts.efa:
        return failed(
            f"FI_PROVIDER={text}, and there is no EFA on this host",
            "unset FI_PROVIDER, or give the pod its EFA devices",
        )
    if "verbs" in names and not facts.rdma:
        return failed(f"FI_PROVIDER={text}, and there is no RDMA device on this host", "unset FI_PROVIDER")
    if facts.efa and not any(name.startswith("efa") for name in names):
        return failed(f"FI_PROVIDER={text} shuts out EFA, which this host has", "unset FI_PROVIDER, or make it efa")
    return passed(f"FI_PROVIDER={text}")


@check("namespace-plain", "Has NIXL_ETCD_NAMESPACE a slash before it, and none behind?", image=True)
def namespace_plain(facts: Facts, wanted: Requirements) -> Judgement:
    """Keys are NAMESPACE/AGENT/…, slash for slash: ranks whose namespaces differ by one never meet."""
    text = facts.environment.get("NIXL_ETCD_NAMESPACE")
    if not text:
        return passed("NIXL_ETCD_NAMESPACE is not set: NIXL takes /nixl/agents/, whose keys have two slashes")
    remedy = "set it on every rank alike, best as /nixl/agents: begun with a slash, and ended without"
    if text.strip() != text or '"' in text or "'" in text:
        return failed(f"NIXL_ETCD_NAMESPACE={text!r} has white space or quotes in it, which are a part of it", remedy)
    if text.endswith("/"):
        return warned(
            f"NIXL_ETCD_NAMESPACE={text} ends with a slash: it is another one than {text.rstrip('/')}", remedy
        )
    if not text.startswith("/"):
        return warned(f"NIXL_ETCD_NAMESPACE={text} begins without a slash: it is another one than /{text}", remedy)
    return passed(f"NIXL_ETCD_NAMESPACE={text}")


@check("variables-agree", "Are the variables not at odds with each other or with this host?")
def variables_agree(facts: Facts, wanted: Requirements) -> Judgement:
    """Settings that undo what the machine was bought for, or of which one wins without a word."""
    get = facts.environment.get
    found: list[tuple[str, str]] = []
    first, second = (get(name) for name in ETCD_VARIABLES)
    if first and second and first.rstrip("/") != second.rstrip("/"):
        found.append(
            (f"{ETCD_VARIABLES[0]}={first} and {ETCD_VARIABLES[1]}={second} name two", "set one, or both alike")
        )
    proxy = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if get(name)), "")
    if proxy and first and not _bypassed(first, get("no_grpc_proxy") or get("no_proxy") or get("NO_PROXY")):
        found.append(
            (f"{proxy} is set, and gRPC, by which NIXL talks to etcd, honours it", "add the etcd's host to no_proxy")
        )
    if get("FI_EFA_USE_DEVICE_RDMA") == "0" and (facts.efa or wanted.efa):
        found.append(("FI_EFA_USE_DEVICE_RDMA=0 switches EFA's RDMA off", "unset it"))
    gpu = bool(facts.gpu.gpus) or wanted.gpus > 0
    if gpu and get("FI_HMEM_DISABLE_P2P").lower() in ("1", "yes", "on", "true"):
        found.append(
            (f"FI_HMEM_DISABLE_P2P={get('FI_HMEM_DISABLE_P2P')} keeps network cards from GPU memory", "unset it")
        )
    if gpu and get("UCX_IB_GPU_DIRECT_RDMA").lower() in ("n", "no", "0", "off"):
        found.append(
            (f"UCX_IB_GPU_DIRECT_RDMA={get('UCX_IB_GPU_DIRECT_RDMA')} keeps network cards from GPU memory", "unset it")
        )
    if gpu and "CUDA_VISIBLE_DEVICES" in facts.environment.steering and get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found.append(("CUDA_VISIBLE_DEVICES hides every GPU", "unset it, or name the GPUs"))
    if facts.efa and (get("RDMAV_FORK_SAFE") or get("IBV_FORK_SAFE")):
        found.append(("RDMAV_FORK_SAFE or IBV_FORK_SAFE is set, with which EFA does without huge pages", "unset it"))
    plugins = get("NIXL_PLUGIN_DIR")
    if (
        plugins
        and facts.software.nixl.value
        and not any(each.plugin.startswith(plugins) for each in facts.software.backends)
    ):
        found.append((f"NIXL_PLUGIN_DIR={plugins} has no plugin of a requested backend", "correct it, or unset it"))
    if found:
        return failed("; ".join(reason for reason, _ in found), "; ".join(dict.fromkeys(remedy for _, remedy in found)))
    return passed("no two that are set contradict each other")


def _bypassed(endpoints: str, exempt: str) -> bool:
    hosts = re.findall(r"(?://|^|,)(?:\*\*\*@)?([^:/,@]+):\d+", endpoints)
    parts = [part.strip().lstrip("*.") for part in exempt.split(",") if part.strip()]
    return "*" in exempt or all(any(host == part or host.endswith(f".{part}") for part in parts) for host in hosts)
