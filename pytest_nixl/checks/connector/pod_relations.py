# SPDX-License-Identifier: Apache-2.0
"""Relations of one engine with itself and its pod: ports that it opens, addresses that are its own, devices, GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from math import prod
from typing import NamedTuple

from pytest_nixl.checks.connector.containers import OPTIONS_OF
from pytest_nixl.checks.connector.engine_fields import EngineSide, older_than
from pytest_nixl.checks.connector.nixl_relations import OVER_TCP, transport_families, uses_ucx
from pytest_nixl.checks.connector.relations import (
    Mismatch,
    SidePair,
    is_loopback,
    is_unspecified,
    undecided,
    unknown_value,
)
from pytest_nixl.model.verdicts import Verdict

_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_LAST_PORT = (1 << 16) - 1
#: Variables that are ports of one engine, whatever engine it is.
_PORT_VARIABLES = (
    "DYN_SYSTEM_PORT",
    "DYN_FORWARDPASS_METRIC_PORT",
    "DYN_KVBM_METRICS_PORT",
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT",
    "NIXL_TELEMETRY_PROMETHEUS_PORT",
)
#: Resources of a pod that may be RDMA devices.
_RDMA_RESOURCE = re.compile(r"rdma|hca|infiniband|/ib|roce|mlnx|mellanox|sriov|/efa|/nic", re.IGNORECASE)
#: Names of RDMA devices as UCX_NET_DEVICES has them.
_RDMA_DEVICE = re.compile(r"(?:mlx[45]|bnxt_re|irdma|hns|qedr|rxe|rdmap|rocep|ibp|ionic|mana|efa)[\w.-]*(?::\d+)?")
_RDMA_TRANSPORTS = frozenset({"rc", "ud", "dc", "srd"})
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
#: Options that spread one engine over several hosts or say how much of it runs here.
_SEVERAL_HOSTS = frozenset(
    {
        "--nnodes",
        "-n",
        "--node-rank",
        "-r",
        "--headless",
        "--data-parallel-address",
        "-dpa",
        "--data-parallel-size-local",
        "-dpl",
        "--data-parallel-rank",
        "-dpn",
        "--data-parallel-start-rank",
        "-dpr",
        "--data-parallel-hybrid-lb",
        "--data-parallel-external-lb",
        "--data-parallel-backend",
        "--distributed-executor-backend",
        "--dist-init-addr",
    }
)


class OpenPort(NamedTuple):
    """Ports that one engine opens: from ``first`` to ``last``, both included.

    :param setting: the option or variable that sets them.
    """

    side: str
    setting: str
    first: int
    last: int

    def __str__(self) -> str:
        ports = str(self.first) if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.side}'s {self.setting} ({ports})"


def ports(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the ports of each engine, and of both if they share a host: no two may be the same."""
    opened: list[OpenPort] = []
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        try:
            opened += _open_ports(name, side)
        except ValueError as error:
            return Mismatch(str(error), "write a number from 1 to 65535")
    shared = [
        f"{first} and {second} share port {max(first.first, second.first)}"
        for first, second in combinations(opened, 2)
        if first.first <= second.last and second.first <= first.last and (pair.one_host or first.side == second.side)
    ]
    if not shared:
        return None
    where = "both sides are on one host, and " if pair.one_host else ""
    ranks = any(port.last > port.first for port in opened)
    return Mismatch(f"{where}{'; '.join(shared)}{'; each data-parallel rank opens a port' if ranks else ''}")


def readable_ports(side: EngineSide) -> list[OpenPort]:
    """Return the ports that one engine opens; none if one of them is not a port."""
    try:
        return list(_open_ports("", side))
    except ValueError:
        return []


def _open_ports(name: str, side: EngineSide) -> Iterator[OpenPort]:
    launch, environment = side.source.launch, side.source.launch.environment
    settings = ["--data-parallel-rpc-port", "--master-port", "--nccl-port"]
    if not side.dynamo and launch.has_options and launch.is_read:
        settings.append("--port")
    if side.values.get("--disaggregation-mode") and side.values["--disaggregation-mode"].text == "prefill":
        settings.append("--disaggregation-bootstrap-port")
    for setting in settings:
        value = side.values.get(setting)
        if value is not None and value.is_known and value.text:
            yield OpenPort(name, setting, *[_port(name, setting, value.text)] * 2)
    value = side.values.get(_SIDE_CHANNEL)
    if value is not None and value.is_known and side.values["connector kind"].text == "NIXL":
        first = _port(name, _SIDE_CHANNEL, value.text)
        yield OpenPort(name, _SIDE_CHANNEL, first, min(first + _side_channel_ports(side) - 1, _LAST_PORT))
    for setting in _PORT_VARIABLES:
        text = environment.get(setting, "")
        if text.isascii() and text.isdigit() and len(text) < 6 and int(text):
            yield OpenPort(name, setting, int(text), int(text))
    yield from _event_ports(name, side)


def _port(name: str, setting: str, text: str) -> int:
    """Return a port. :raises ValueError: if it is not one."""
    if text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) <= _LAST_PORT:
        return int(text)
    raise ValueError(f"{name}'s {setting} is not a port")


def _side_channel_ports(side: EngineSide) -> int:
    """Return how many ports vLLM's handshake opens on this host: one a data-parallel rank; before 0.12.0, one a GPU."""
    options = side.source.launch.options
    local = next((options[name][-1] for name in ("--data-parallel-size-local", "-dpl") if options.get(name)), "")
    sizes = [local or side.values["--data-parallel-size"].text]
    if older_than(side, "vllm", "0.12.0"):
        sizes.append(side.values["--tensor-parallel-size"].text)
    return max(_product(sizes), 1)


def _product(sizes: Iterable[str]) -> int:
    """Return the product of the sizes; one that is not a number counts as 1."""
    return prod(int(size) for size in sizes if size.isascii() and size.isdigit())


def _event_ports(name: str, side: EngineSide) -> Iterator[OpenPort]:
    for text in side.source.launch.options.get("--kv-events-config", ())[-1:]:
        try:
            events = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(events, dict) or events.get("enable_kv_cache_events") is False:
            return
        for key in ("endpoint", "replay_endpoint"):
            match = re.fullmatch(r"tcp://[^/]*:(\d{1,5})", str(events.get(key)))
            if match is not None and 0 < int(match[1]) <= _LAST_PORT:
                yield OpenPort(name, f"--kv-events-config {key}", int(match[1]), int(match[1]))


def own_address(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the address that each engine tells the other: one that can be reached, and its own."""
    values = [value for value in pair.values(field) if value.is_known]
    if not pair.one_host and any(is_unspecified(value.text) for value in values):
        return Mismatch("it is told to the other side, so it must be an address to which that can connect")
    if not pair.one_host and any(is_loopback(value.text) for value in values):
        return Mismatch("the sides are on different hosts, so neither may be a loopback address")
    for name, side, other, other_name in (
        ("prefill", pair.prefill, pair.decode, "decode"),
        ("decode", pair.decode, pair.prefill, "prefill"),
    ):
        value = side.values[field]
        if not value.is_set or not value.is_known:
            continue
        resources = side.source.resources
        if resources is not None and resources.replicas > 1:
            return Mismatch(f"{resources.replicas} replicas of {name} cannot all have one address")
        listens = other.values.get("--host")
        own_host = side.values.get("--host")
        if (
            not pair.one_host
            and listens is not None
            and listens.is_set
            and listens.text == value.text
            and own_host is not None
            and own_host.text != value.text
        ):
            return Mismatch(f"{name} tells {other_name}'s address (its --host), and not its own")
    return None


def net_devices(pair: SidePair, field: str) -> Mismatch | None:
    """Judge whether the devices that UCX may use fit the transports that it may use, and whether RDMA is left."""
    over_tcp = []
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        devices, allowed = side.values["UCX_NET_DEVICES"], side.values["UCX_TLS"]
        if not devices.is_set or not devices.is_known or not allowed.is_known:
            continue
        names = [part.strip() for part in devices.text.split(",") if part.strip()]
        if names == ["lo"] and not pair.one_host:
            return Mismatch("the sides are on different hosts, which the device lo does not connect")
        listed = transport_families(allowed.text)
        is_decided = listed == {"tcp"} or not uses_ucx(side) or _lacks_rdma(side)
        if names and all(map(_is_interface, names)) and not is_decided:
            over_tcp.append(name)
        if allowed.text.startswith("^") or not names or "all" in names:
            continue
        local = {"sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"} & set(allowed.text.split(","))
        are_rdma = [bool(_RDMA_DEVICE.fullmatch(part)) for part in names]
        if pair.one_host and local:
            continue
        if listed == {"tcp"} and all(are_rdma):
            return Mismatch(
                f"{name} allows tcp alone, which cannot use {', '.join(names)}",
                "add rc to UCX_TLS, or name a network interface such as eth0",
            )
        if listed and listed <= _RDMA_TRANSPORTS and not any(are_rdma) and all(map(_is_interface, names)):
            return Mismatch(
                f"{name} allows RDMA alone, for which {', '.join(names)} is not a device",
                "name an RDMA device such as mlx5_0:1, or add tcp to UCX_TLS",
            )
    if over_tcp and not pair.one_host:
        sides = " and ".join(over_tcp)
        reason = f"{sides} {'name' if len(over_tcp) > 1 else 'names'} network interfaces alone, so that {OVER_TCP}"
        return Mismatch(
            reason, f"add the RDMA devices with their ports, such as mlx5_0:1, on {sides}", Verdict.WARN, OVER_TCP
        )
    return None


def _is_interface(device: str) -> bool:
    return re.fullmatch(r"(?:eth|en[opsxP]|bond|team|br|lo|net|hsn|ib\d)[\w.@-]*", device) is not None


def _lacks_rdma(side: EngineSide) -> bool:
    """Return whether a container is known to get no RDMA device."""
    resources = side.source.resources
    if resources is None or resources.sees_devices:
        return False
    return not any(map(_RDMA_RESOURCE.search, resources.requests))


def rdma_devices(pair: SidePair, field: str) -> Mismatch | None:
    """Judge whether a pod that allows RDMA alone gets an RDMA device of its node."""
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        allowed, devices = side.values["UCX_TLS"], side.values["UCX_NET_DEVICES"]
        if not _lacks_rdma(side):
            continue
        families = transport_families(allowed.text) if allowed.is_set and allowed.is_known else frozenset()
        names = [part.strip() for part in devices.text.split(",")] if devices.is_set and devices.is_known else []
        needs = (
            f"UCX_TLS={allowed.text}"
            if families and families <= _RDMA_TRANSPORTS and allowed.text[:1] != "^"
            else f"UCX_NET_DEVICES={devices.text}"
            if names and all(map(_RDMA_DEVICE.fullmatch, names))
            else ""
        )
        if needs:
            reason = f"{needs} needs an RDMA device, and the container of {name} requests none"
            return Mismatch(reason, "", Verdict.WARN)
    return None


def gpus(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the GPUs that an engine's sizes need against those that its pod requests."""
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        resources = side.source.resources
        if resources is None or resources.several_nodes or _SEVERAL_HOSTS & set(side.source.launch.options):
            continue
        resource = next((resource for resource in _GPUS if resource in resources.requests), "")
        needed = _needed_gpus(side)
        if resource and needed > resources.requests[resource]:
            return Mismatch(
                f"the sizes of {name} need {needed} GPUs, and its container requests {resource}: "
                f"{resources.requests[resource]}"
            )
    return None


def _needed_gpus(side: EngineSide) -> int:
    names = {
        "vLLM": (
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--data-parallel-size",
            "--prefill-context-parallel-size",
        ),
        "SGLang": ("--tp-size", "--pp-size"),
    }.get(side.engine, ())
    return _product(side.values[name].text for name in names)


def metadata_stores(pair: SidePair, field: str) -> Mismatch | None:
    """Judge NIXL's other place for metadata: the same on both sides, not loopback, and without an etcd."""
    values, in_etcd = pair.values(field), pair.values("NIXL_ETCD_ENDPOINTS")
    for name, value, etcd in zip(("prefill", "decode"), values, in_etcd, strict=True):
        if etcd.is_set and value.is_set:
            return Mismatch(f"{name} also sets NIXL_ETCD_ENDPOINTS, and NIXL accepts one of the two")
    if not any(value.is_set for value in values):
        return None
    remedy = f"give both sides the same {field}"
    if not all(value.is_set for value in values):
        if any(etcd.is_set for etcd in in_etcd):
            return Mismatch("one side publishes its metadata there, and the other in etcd", remedy)
        return undecided("only one side can publish its metadata there", remedy)
    if not pair.one_host and any(value.is_known and is_loopback(value.text.rpartition(":")[0]) for value in values):
        return Mismatch("the sides are on different hosts, so neither may be a loopback address", remedy)
    if values[0].text == values[1].text:
        return None
    return unknown_value(pair, field) or Mismatch("they must be equal", remedy)


def options_files(pair: SidePair, field: str) -> Mismatch | None:
    """Report options that stand in a file which could not be read."""
    for name, side in (("prefill", pair.prefill), ("decode", pair.decode)):
        for unread in side.source.unread:
            if unread.startswith(OPTIONS_OF):
                return undecided(f"the {unread} ({name}) were not read, so that its other options are not compared")
    return None


def engines(pair: SidePair, field: str) -> Mismatch | None:
    """Judge whether the options of both engines are known here."""
    launchers = [side.source.launch.launcher or side.engine for side in pair.sides if not side.source.launch.is_read]
    if launchers:
        names = " and ".join(dict.fromkeys(launchers))
        return undecided(
            f"the options of {names} are not known here: model, sizes, ports and backends were not read",
            f"compare them by the documentation of {names}",
        )
    prefill, decode = pair.values(field)
    return None if prefill.text == decode.text else Mismatch("they must be equal")
