# SPDX-License-Identifier: Apache-2.0
"""Relations of what NIXL, UCX and libfabric read on both sides, and variables with which blocks arrive slowly."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_nixl.checks.connector.engine_fields import EngineSide, named_releases, older_than, release_of
from pytest_nixl.checks.connector.relations import Mismatch, SidePair, equal, is_loopback, undecided, unknown_value
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.host.ucx_transports import UcxTransports
from pytest_nixl.model.engine_backends import engine_backend, expands_segments
from pytest_nixl.model.nixl_releases import PACKAGES, TELEMETRY_OFF, numbers, telemetry_off_raises
from pytest_nixl.model.tools import LIBFABRIC_OFF, LIBFABRIC_ON
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import suppose

#: NIXL's plugins that move bytes between two agents, and those that only reach storage.
BETWEEN_AGENTS = frozenset({"UCX", "LIBFABRIC", "MOONCAKE", "UCCL", "GPUNETIO"})
STORAGE = frozenset({"POSIX", "GDS", "GDS_MT", "OBJ", "GUSLI", "HF3FS", "INFINIA", "AZURE_BLOB"})
_RDMA = frozenset({"rc", "ud", "dc", "srd"})
#: What is left if UCX_TLS excludes rc, ud and dc: TCP, and what hardly any host's UCX has.
_TCP = frozenset({"tcp", "srd", "gga"})
#: What the last line says if no transport but TCP is left between the engines.
OVER_TCP = "all KV goes over TCP: slow"
_OVER_UD = "all KV goes by UD's messages: slow"
#: For each engine the field with its backends.
_BACKENDS = {"vLLM": "backends", "SGLang": "SGLANG_DISAGGREGATION_NIXL_BACKEND"}


def image(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the images: the same tag or digest, because both decide the release of the engine and of NIXL."""
    prefill, decode = (side.source.image for side in (pair.prefill, pair.decode))
    if prefill == decode and (not prefill or _tag(prefill) not in ("", "latest")):
        return None
    if unknown := unknown_value(pair, field):
        return unknown
    if prefill == decode:
        return undecided("a tag that moves may have given them different releases", "name one release of the image")
    if _tag(prefill) == _tag(decode) and ("@" in prefill or _name(prefill) == _name(decode)):
        return None
    if _name(prefill) == _name(decode):
        return Mismatch("they must have the same release of the engine and of NIXL")
    return undecided("they may have different releases of the engine and of NIXL")


def _tag(text: str) -> str:
    """Return what follows the name of an image: its digest, else its tag, else nothing."""
    last = text.rpartition("/")[2]
    return last.rpartition("@")[2] if "@" in last else last.partition(":")[2]


def _name(text: str) -> str:
    return re.sub(r"[@:].*", "", text.rpartition("/")[2])


def backends(pair: SidePair, field: str) -> Mismatch | None:
    """Judge NIXL's backends: known, built in, able to reach another agent, and one of them on both sides."""
    if unknown := unknown_value(pair, field):
        return unknown
    sides = [{name.strip() for name in value.text.split(",") if name.strip()} for value in pair.values(field)]
    known = BETWEEN_AGENTS | STORAGE | (pair.plugins or frozenset())
    for name in sorted(sides[0] | sides[1]):
        if pair.plugins is not None and name not in pair.plugins:
            has = ", ".join(sorted(pair.plugins)) or "none"
            return Mismatch(f"{name} is not built in: the folder of NIXL's plugins has {has}")
        if name not in known:
            meant = name.upper() if name.upper() in known else ""
            return Mismatch(f"no release of NIXL has a backend {name}", f"write {meant}" if meant else "")
    for side in sides:
        if not side & BETWEEN_AGENTS and side <= STORAGE:
            return Mismatch(f"{', '.join(sorted(side)) or 'none'} reaches storage only, and not another agent")
    if not sides[0] & sides[1]:
        return Mismatch("they must have a backend in common")
    return None


def nixl_releases(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the installed releases: equal, and NIXL's not older than the engine demands."""
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        releases = named_releases(side)
        version = next((releases[package] for package in PACKAGES if package in releases), "1.5.0")
        needs_newer = release_of(side, "vllm") and not older_than(side, "vllm", "0.33.0")
        if needs_newer and numbers(version) < numbers("1.5.0"):
            reason = f"vLLM from 0.33.0 on ends at its start with NIXL before 1.5.0, and {name} has {version}"
            return Mismatch(reason, "install NIXL 1.5.0 or later on both sides")
    return equal()(pair, field)


def namespace(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the prefix of NIXL's keys in etcd, which is used as it is written."""
    prefill, decode = pair.values(field)
    if prefill.text == decode.text:
        return None
    if unknown := unknown_value(pair, field):
        return unknown
    if prefill.text.rstrip("/") == decode.text.rstrip("/"):
        return Mismatch("they differ by a slash, and must be equal to the letter")
    return Mismatch("they must be equal")


def nixl_endpoints(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the etcd that NIXL is given: readable for NIXL, and the same on both sides."""
    for value in pair.values(field):
        if value.is_known and value.is_set:
            explained = explain(value.text, suppose)
            if not explained.nixl.works:
                return Mismatch(f"NIXL cannot read {explained.text}: {explained.nixl.reason}", explained.remedy)
        elif any(side.source.launch.environment.get(field) == "" for side in (pair.prefill, pair.decode)):
            return Mismatch("NIXL creates no agent if it is set but empty", f"unset {field}, or give it an address")
    if any(value.is_set for value in pair.values("NIXL_TCPSTORE_ENDPOINT")):
        return None
    if sum(value.is_set for value in pair.values(field)) == 1:
        return undecided("only one side can publish its metadata in etcd")
    return endpoints(pair, field)


def endpoints(pair: SidePair, field: str) -> Mismatch | None:
    """Judge addresses of an etcd or a NATS server that must be the same on both sides, however they are spelled."""
    prefill, decode = pair.values(field)
    if not prefill.is_set and not decode.is_set:
        return None
    if unknown := unknown_value(pair, field) if prefill.text != decode.text else None:
        return unknown
    if not (prefill.is_set and decode.is_set):
        return Mismatch("they must be equal")
    found = [_members(value.text) for value in (prefill, decode)]
    hosts = {member.host for members in found for member in members if isinstance(member, Endpoint)}
    if not pair.one_host and any(map(is_loopback, hosts)):
        return Mismatch("the sides are on different hosts, so neither may be a loopback address")
    if prefill.text == decode.text:
        return None
    server = "NATS server" if field == "NATS_SERVER" else "etcd"
    remedy = "write the same text on both sides"
    if found[0] == found[1]:
        return Mismatch(f"these are two spellings of the same {server}", remedy, Verdict.WARN)
    if _perhaps_same(*found):
        return undecided(f"a short and a full name may be the same {server}", remedy)
    return Mismatch("they must be equal")


def discovery_endpoints(pair: SidePair, field: str) -> Mismatch | None:
    """Judge Dynamo's etcd, which only discovery by etcd uses."""
    used = any(value.text == "etcd" or not value.is_known for value in pair.values("--discovery-backend"))
    return endpoints(pair, field) if used else None


def nats_endpoints(pair: SidePair, field: str) -> Mismatch | None:
    """Judge Dynamo's NATS server, which only a plane over NATS uses; before 1.0.0 each did."""
    planes = [value.text for plane in ("--request-plane", "--event-plane") for value in pair.values(plane)]
    used = "nats" in planes or any(older_than(side, "ai-dynamo", "1.0.0") for side in pair.sides)
    return endpoints(pair, field) if used else None


def _members(text: str) -> frozenset[Endpoint | str]:
    found: set[Endpoint | str] = set()
    for part in filter(None, re.split("[,;]", text.strip())):
        try:
            read = parse_endpoint(part.strip().rstrip("/").removeprefix("nats://").removeprefix("tls://"))
            found.add(Endpoint(read.scheme, read.host.lower().rstrip("."), read.port))
        except ValueError:
            found.add(part)
    return frozenset(found)


def _perhaps_same(prefill: frozenset[Endpoint | str], decode: frozenset[Endpoint | str]) -> bool:
    """Return whether all members may be the same: one name is the other's beginning, as in etcd and etcd.default."""
    pairs = zip(sorted(prefill, key=str), sorted(decode, key=str), strict=False)
    return len(prefill) == len(decode) and all(
        isinstance(one, Endpoint)
        and isinstance(other, Endpoint)
        and one.port == other.port
        and (f"{one.host}.".startswith(f"{other.host}.") or f"{other.host}.".startswith(f"{one.host}."))
        for one, other in pairs
    )


def transports(pair: SidePair, field: str) -> Mismatch | None:
    """Judge UCX_TLS by the doctor's rules, and whether a transport between hosts is allowed on both sides."""
    if not any(map(uses_ucx, pair.sides)):
        return None
    carriers, without_cuda, limiting = [], False, []
    for name, value, memory in zip(
        ("prefill", "decode"), pair.values(field), pair.values("kv_buffer_device"), strict=True
    ):
        if not value.is_known:
            return unknown_value(pair, field)
        if not value.is_set:
            carriers.append({*_RDMA, "tcp"})
            continue
        allowed = _allowed(value.text)
        if strange := allowed.strange():
            return Mismatch(f"UCX does not know {strange[0]!a}{allowed.meant()}")
        carriers.append(_families(allowed.carriers()))
        on_gpu = memory.text != "cpu" and not allowed.without
        without_cuda |= on_gpu and not any(name == "all" or name.startswith("cuda") for name in allowed.names)
        if allowed.without and carriers[-1] <= _TCP:
            carriers[-1] &= {"tcp"}
        if carriers[-1] in ({"tcp"}, {"ud"}):
            limiting.append(name)
        if not carriers[-1]:
            return Mismatch("each must allow a transport that can carry NIXL, such as tcp or rc")
    common = carriers[0] & carriers[1]
    if not common:
        return Mismatch("they must allow a transport between hosts in common")
    slow = {frozenset({"tcp"}): OVER_TCP, frozenset({"ud"}): _OVER_UD}.get(frozenset(common), "")
    slow = "" if pair.one_host else slow
    reasons = [
        *([f"together they allow no RDMA, so that {slow}"] if slow else []),
        *(["without cuda_copy and cuda_ipc UCX takes GPU memory for host memory"] if without_cuda else []),
    ]
    if not reasons:
        return None
    remedy = f"unset UCX_TLS on {limiting[0] if len(limiting) == 1 else 'both sides'}"
    remedy = remedy if slow else "unset UCX_TLS, or add cuda to it, on both sides"
    return Mismatch("; ".join(reasons), remedy, Verdict.WARN, slow)


def _allowed(text: str) -> UcxTransports:
    parts = [part.removeprefix("\\") for part in text.removeprefix("^").split(",")]
    return UcxTransports(
        without=text.startswith("^"),
        names=tuple(filter(None, (part.removesuffix(":aux") for part in parts))),
        auxiliary=frozenset(part.removesuffix(":aux") for part in parts if part.endswith(":aux")),
        has_rdma=True,
        efa_only=False,
        has_gpu=True,
        refused=frozenset(),
        offered=frozenset(),
    )


def transport_families(text: str) -> frozenset[str]:
    """Return the families of transports that a value of UCX_TLS allows between hosts: tcp, rc, ud, dc, srd."""
    return frozenset(_families(_allowed(text).carriers()))


def _families(names: list[str]) -> set[str]:
    """Return the transports that can talk to each other: rc_mlx5 to rc_verbs, but not rc to ud."""
    found: set[str] = set()
    for name in names:
        found |= {"all": {*_RDMA, "tcp"}, "ib": set(_RDMA), "efa": {"srd", "ud"}}.get(name, {name.partition("_")[0]})
    return found


def telemetry(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the variable that turns telemetry off: vLLM then fails each request whose blocks it has received."""
    for side, value in zip((pair.prefill, pair.decode), pair.values(field), strict=True):
        named = named_releases(side)
        version = next((named[name] for name in PACKAGES if name in named), "")
        if value.is_known and value.text.strip().lower() in TELEMETRY_OFF and telemetry_off_raises(version):
            return Mismatch(
                "with telemetry off, NIXL 1.4.0 and later raise an error after each transfer, and vLLM fails it"
            )
    return None


def used_backends(side: EngineSide) -> tuple[set[str], str]:
    """Return the backends that an engine uses, and what sets them."""
    value, known = side.values.get(_BACKENDS.get(side.engine, "")), engine_backend(side.engine)
    if value is None or known is None or not value.is_known:
        return set(), ""
    return {name.strip().upper() for name in value.text.split(",") if name.strip()}, known.reads


def uses_ucx(side: EngineSide) -> bool:
    """Return whether an engine may use UCX: its backends are not known, or UCX is one of them."""
    used, _ = used_backends(side)
    return not used or "UCX" in used


def general_variable(pair: SidePair, field: str) -> Mismatch | None:
    """Judge NIXL_BACKEND, which no engine reads: it must not name another backend than the engine uses."""
    for side, value in zip((pair.prefill, pair.decode), pair.values(field), strict=True):
        used, reads = used_backends(side)
        if value.is_set and value.is_known and used and value.text.strip().upper() not in used:
            return Mismatch(
                f"{side.engine} does not read {field}, and uses {', '.join(sorted(used))}", f"set {reads} instead"
            )
    return None


def efa_devices(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the backend of a pod with EFA devices: NIXL's wheels bring UCX no provider for them."""
    for side, value in zip((pair.prefill, pair.decode), pair.values(field), strict=True):
        used, reads = used_backends(side)
        if value.is_set and used and "LIBFABRIC" not in used:
            names = ", ".join(sorted(used))
            return Mismatch(
                f"{side.engine} uses {names}, which NIXL's wheels bring without a provider for EFA: it takes TCP",
                f"set {reads}",
            )
    return None


def segments(pair: SidePair, field: str) -> Mismatch | None:
    """Judge how torch allocates GPU memory: UCX cannot share expandable segments by CUDA IPC."""
    if any(value.is_known and expands_segments(value.text) for value in pair.values(field)):
        return Mismatch("UCX moves the memory of expandable segments by TCP, 600 times slower, and says nothing")
    return None


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
    SlowSetting(
        "FI_EFA_USE_DEVICE_RDMA",
        "|".join(LIBFABRIC_OFF),
        "LIBFABRIC",
        "EFA uses no RDMA",
        "KV goes without EFA's RDMA: slow",
    ),
    SlowSetting(
        "FI_HMEM_DISABLE_P2P",
        "|".join(LIBFABRIC_ON),
        "LIBFABRIC",
        "network cards may not reach GPU memory",
        _THROUGH_HOST,
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
