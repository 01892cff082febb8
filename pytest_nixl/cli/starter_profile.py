# SPDX-License-Identifier: Apache-2.0
"""Write a first profile of the nodes of a cluster from the facts of one of them, with sanity floors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING

from pytest_nixl.judge.profiles import parse_profile
from pytest_nixl.model.transports import RDMA

if TYPE_CHECKING:
    from pytest_nixl.host.facts import Facts
    from pytest_nixl.host.rdma import RdmaDevice

_REQUIRED = ("nixl-loads", "backend-loads", "etcd-answers", "metadata-by-etcd", "metadata-by-side-channel",
             "endpoints-well-formed", "bandwidth")  # fmt: skip
_REQUIRED_RDMA = ("plugin-libraries", "memlock", "rdma-devices", "rdma-ports", "uverbs-open")
_REQUIRED_GPU = ("gpus", "gpu-driver")
#: The line rate that is assumed for a card that does not report its own, in bytes per second: 1 Gb/s.
_ASSUMED_RATE = 125e6
#: The floor of blocks below 1 MiB, whose time is mostly latency, in bytes per second: 4 KiB take 4 ms.
_SMALL_FLOOR = 1e6
#: The least share of the bandwidth of each GPU alone that all GPUs keep together, where each has a network card.
_SCALING = "25%"


def starter_profile(name: str, facts: Facts, backend: str, today: date) -> str:
    """Return the text of a profile for rows between two hosts like this one.

    :param name: the name of the profile.
    :param facts: the facts of one host.
    :param backend: the backend, UCX or LIBFABRIC.
    """
    text = "\n".join(_lines(name, facts, backend, today)) + "\n"
    parse_profile(text.encode(), name)  # what is written must load
    return text


def row_memories(facts: Facts) -> tuple[str, ...]:
    """Return the pairs of memory types that the profile expects: GPU memory only over RDMA."""
    return ("DRAM:DRAM", "VRAM:VRAM") if facts.gpu.gpus and cards(facts) else ("DRAM:DRAM",)


def cards(facts: Facts) -> tuple[RdmaDevice, ...]:
    """Return the RDMA devices that move data: EFA if there is any."""
    return facts.efa or tuple(device for device in facts.rdma if not device.manages_nvlink)


def transports(facts: Facts, backend: str) -> tuple[str, ...]:
    """Return the transports that the profile accepts between two hosts."""
    if not cards(facts):
        return ("tcp",)
    if facts.efa:
        # Not every instance with EFA has RDMA write. There libfabric makes it of messages (emulated).
        return ("efa", "srd", "efa-emulated") if backend == "LIBFABRIC" else ("srd",)
    return tuple(sorted(one for one in RDMA if one.startswith(("rc", "dc")))) if backend == "UCX" else ("verbs",)


def undescribed(facts: Facts) -> str:
    """Return why a profile of this host says nothing of its devices; empty: it has a table ``[machine]``."""
    found, rates = cards(facts), _rates(facts)
    if not found:
        return "this node has no RDMA device"
    if not rates:
        return "no RDMA device of this node reports its rate"
    if len(rates) > 1:
        told = ", ".join(f"{rate * 8 / 1e9:g} Gb/s" for rate in sorted(rates))
        return f"the RDMA devices of this node have different rates ({told})"
    return ""


def _rates(facts: Facts) -> set[float]:
    return {port.rate for device in cards(facts) for port in device.ports if port.rate is not None}


def _lines(name: str, facts: Facts, backend: str, today: date) -> Iterator[str]:
    found = cards(facts)
    rates = _rates(facts)
    rate, origin = _rate(facts, rates)
    yield "# Expected between two hosts like the one on which `pytest-nixl init` ran. The floors are sanity floors:"
    yield "# a row below is broken, but a row above need not be fast. Learn floors: `pytest-nixl profile learn`."
    yield ""
    yield "[profile]"
    yield f"name = {json.dumps(name)}"
    names = transports(facts, backend)
    over = "rc or dc" if "rc" in names else names[0]
    yield f"summary = {json.dumps(f'two hosts, {backend} over {over}, sanity floors')}"
    yield ""
    yield "[required]"
    why = undescribed(facts)
    described = not why
    hardware = (*_REQUIRED_RDMA, *(_REQUIRED_GPU if facts.gpu.gpus else ())) if described else ()
    required = [*_REQUIRED, *hardware]
    yield f"checks = {json.dumps(required)}"
    yield ""
    if why:
        yield f"# There is no [machine], because {why}."
    else:
        yield from _machine(facts, found, rates.pop(), today)
    memories = json.dumps(list(row_memories(facts)))
    accepted = json.dumps(list(names))
    whole = f"floor: a tenth of {rate * 8 / 1e9:g} Gb/s, {origin}."
    small = "floor: a block below 1 MiB takes a time that is mostly latency; slower is broken."
    for blocks, floor, why in (
        ("4KiB..1048575B", min(_SMALL_FLOOR, rate / 10), small),
        ("1MiB..1GiB", rate / 10, whole),
    ):
        yield ""
        yield "[[expect]]"
        yield f"backend = {json.dumps([backend])}"
        yield 'op = ["WRITE", "READ"]'
        yield f"memory = {memories}"
        yield f"blocks = {json.dumps(blocks)}"
        yield f'floor = "{floor / 1e9:.3g} GB/s"'
        yield f"transports = {accepted}"
        yield f"source = {json.dumps(f'{why} Written by pytest-nixl init on {today}.')}"


def _rate(facts: Facts, rates: set[float]) -> tuple[float, str]:
    """Return the line rate of one card, and what it is."""
    if rates:
        return min(rates), "the line rate of one RDMA device, as its driver reports it"
    default = facts.network.default.value
    nic = next((each for each in facts.nics if each.name == default and each.rate), None)
    if nic is not None and nic.rate:
        return nic.rate, f"the line rate of {nic.name}, as its driver reports it"
    return _ASSUMED_RATE, "which is assumed, because no network card reports its line rate"


def _machine(facts: Facts, found: Sequence[RdmaDevice], rate: float, today: date) -> Iterator[str]:
    gpus = facts.gpu.gpus
    yield "[machine]"
    yield f"nics = {len(found)}"
    yield f'nic_rate = "{rate * 8 / 1e9:g} Gb/s"'
    yield f'nic_kind = "{"efa" if facts.efa else "rc"}"'
    own = [len(near.own) for near in facts.near if near.own]
    shared = len(gpus) > len(found)
    if gpus and len(own) == len(gpus):
        yield f"nics_per_gpu = {min(own)}"
    if len(gpus) > 1 and not shared:
        yield f'scaling = "{_SCALING}"  # of all GPUs together: a sanity floor, too'
    if gpus:
        yield f"gpus = {len(gpus)}"
        yield f"gpu = {json.dumps(gpus[0].name)}"
    yield f"source = {json.dumps(f'the facts of one host on {today} (pytest-nixl facts)')}"
