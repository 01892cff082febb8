# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl facts``: print the facts of this host as JSON or as the node information template, or record them."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_nixl.checks.doctor.ranks import compare_hosts
from pytest_nixl.cli.doctor import add_sources, gathered
from pytest_nixl.core.redaction import hider
from pytest_nixl.core.units import gigabits
from pytest_nixl.core.untrusted_file import write_regular
from pytest_nixl.host.devices import DESCRIPTIONS, Topology
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.rdma import RdmaDevice, network_cards
from pytest_nixl.host.recorded_tree import ANSWERS_FOLDER, Fact, FactsRoot
from pytest_nixl.model.verdicts import Outcome, outcome

_UNKNOWN = "unknown"


def markdown(facts: Facts) -> Iterator[str]:
    """Yield the lines of the template; an unknown value is printed with its reason."""
    software, gpu = facts.software, facts.gpu
    yield "Node:"
    yield f"- Hostname: {_text(facts.host.name)}"
    yield f"- IP Address: {_address(facts)}"
    yield f"- GPUs: {_gpus(facts)}"
    yield f"- Network: {_network(facts)}"
    yield f"- OS: {_text(facts.host.system)}"
    yield f"- CUDA: {_text(gpu.cuda)}"
    yield f"- Role: {_role(facts)}"
    yield f"- Kernel: {_text(facts.host.kernel)} ({_text(facts.host.architecture)})"
    yield f"- Container: {_text(facts.host.container)}"
    yield f"- CPUs: {_text(facts.host.cpus)} ({_text(facts.host.processor)}), {len(facts.host.numa)} NUMA nodes"
    yield f"- GPU driver: {_text(gpu.driver)}"
    yield f"- NIXL: {_text(software.nixl)}; UCX: {_text(software.ucx)}; libfabric: {_text(software.libfabric)}"
    yield f"- EFA installer: {_text(software.efa_installer)}"
    yield f"- etcd: {_text(facts.etcd.version)}"
    yield f"- Image: {_text(facts.environment.image)}"


def _text(fact: Fact[str] | Fact[int]) -> str:
    return str(fact.value) if fact.value is not None else f"{_UNKNOWN} ({fact.why})"


def _address(facts: Facts) -> str:
    nics = sorted(facts.network.nics, key=lambda nic: nic.name != facts.network.default.value)
    addresses = [text.partition("/")[0] for nic in nics for text in nic.routable()]
    return addresses[0] if addresses else f"{_UNKNOWN} (no interface has an IPv4 address that other hosts can reach)"


def _gpus(facts: Facts) -> str:
    models = Counter(gpu.name for gpu in facts.gpu.gpus)
    return ", ".join(f"{count}x {name}" for name, count in models.items()) or "none"


def _network(facts: Facts) -> str:
    if facts.rdma:
        kinds = Counter((device.kind, device.rate) for device in facts.rdma)
        return ", ".join(f"{count}x {_kind(kind)}{_rate(rate)}" for (kind, rate), count in kinds.items())
    nics = facts.nics or tuple(nic for nic in facts.network.nics if nic.name == facts.network.default.value)
    return ", ".join(f"{nic.name} ({nic.driver or 'virtual'}){_rate(nic.rate)}" for nic in nics) or "none"


def _kind(kind: str) -> str:
    return {"efa": "EFA", "mlx": "InfiniBand or RoCE (mlx5)"}.get(kind, kind)


def _rate(rate: float | None) -> str:
    return f" ({gigabits(rate)} Gbps)" if rate else ""


def _role(facts: Facts) -> str:
    for name in (
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "RANK",
        "JOB_COMPLETION_INDEX",
        "LWS_WORKER_INDEX",
    ):
        if name in facts.environment.launcher:
            rank = facts.environment.launcher[name]
            return f"rank {rank} ({'initiator' if rank == '0' else 'target'}; {name})"
    return f"{_UNKNOWN} (no launcher has set a rank)"


def _write(devices: Iterable[RdmaDevice]) -> str:
    """Return a clause with the UCX_NET_DEVICES that names the active ports of devices; empty: they have none."""
    numbers = {
        device.name: [port.number for port in device.ports if port.state in ("ACTIVE", "")] if device.ports else [1]
        for device in devices
        if not device.closed
    }
    ports = [f"{name}:{number}" for name, active in numbers.items() for number in active]
    return f"; UCX_NET_DEVICES={','.join(ports)}" if ports else ""


def near_lines(facts: Facts) -> Iterator[str]:
    """Yield a line for each GPU with its nearest network cards, and one for the cards that are near no GPU."""
    topology = Topology.of(facts.gpu, facts.rdma)
    placed = {gpu.name: gpu for gpu in topology.gpus}
    for near in facts.near:
        gpu = placed[str(near.gpu)]
        lacks = "no network card" if facts.rdma else "this host has no RDMA device"
        cards = f"{', '.join(near.devices)} ({DESCRIPTIONS[near.how]})" if near.devices else lacks
        sole = f"; when all GPUs are used, only: {', '.join(near.own)}" if 0 < len(near.own) < len(near.devices) else ""
        write = _write(device for device in facts.rdma if device.name in (near.own or near.devices))
        yield f"GPU {near.gpu} ({gpu.pci}, {gpu.node}): {cards}{sole}{write}"
    if not facts.near:
        yield f"no GPU has a known position on the PCI bus{_write(network_cards(facts.rdma))}"
    idle = [f"{nic.name} ({nic.node})" for nic in topology.idle()]
    if idle and facts.near:
        yield f"near no GPU: {', '.join(idle)}"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    facts = commands.add_parser("facts", help="print the facts of this host, record them, or compare those of several")
    how = facts.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print the node information template, filled in")
    how.add_argument(
        "--record", metavar="DIR", type=Path, help="write the files that were read to a new directory, for --root"
    )
    how.add_argument(
        "--near",
        action="store_true",
        help="print which network cards are nearest to each GPU, and the UCX_NET_DEVICES that names them",
    )
    how.add_argument("--output", metavar="FILE", type=Path, help="write JSON to a file")
    how.add_argument(
        "--compare",
        metavar="DIR",
        type=Path,
        nargs="+",
        help="compare the trees of --record of ranks 0, 1, …, in this order",
    )
    add_sources(facts)
    facts.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        return _compare(arguments)
    if arguments.record is not None and arguments.record.exists():
        raise ValueError(f"{arguments.record} already exists: give the name of a new directory")
    root = FactsRoot(arguments.root)
    facts, _ = gathered(arguments, root)
    if arguments.record is not None:
        root.write(arguments.record, hider(os.environ))
        print(
            f"{arguments.record}: {len(root.files)} files and {len(root.answers)} answers; "
            f"judge it by `pytest-nixl doctor --root {arguments.record}`"
        )
    elif arguments.near:
        for line in near_lines(facts):
            print(line)
    elif arguments.markdown:
        for line in markdown(facts):
            print(line)
    else:
        text = json.dumps(facts.plain(), indent=1)
        if arguments.output is None:
            print(text)
        else:
            write_regular(arguments.output, text + "\n")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    paths: list[Path] = arguments.compare
    if len(paths) < 2:
        raise ValueError("one host cannot be compared: give the recorded trees of two ranks or more")
    for path in paths:
        # Nothing is known of a host without recorded answers, and two such hosts would agree.
        if not (path / ANSWERS_FOLDER).is_dir():
            raise ValueError(f"{path} is not a recorded tree: expected one that `pytest-nixl facts --record` wrote")
    findings = compare_hosts([gathered(arguments, FactsRoot(path))[0] for path in paths])
    for finding in findings:
        print(finding.judgement)
    if not findings:
        print(f"the facts of {len(paths)} ranks agree")
    return int(any(outcome(finding.judgement.verdict, gate=False) is Outcome.FAIL for finding in findings))
