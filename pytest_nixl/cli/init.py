# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl init``: write a first profile, and files for CI, Slurm and Kubernetes, for the cluster of this host.

Their templates are filled by the facts of one node of the cluster.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from pytest_nixl.cli.doctor import refuse_unreadable_tree
from pytest_nixl.cli.run import Choice, choose
from pytest_nixl.core.redaction import redact
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import bundled_text, parse_profile
from pytest_nixl.model.transports import RDMA
from pytest_nixl.processes.supervisor import close_supervisor
from pytest_nixl.session.default_profile import read_product

if TYPE_CHECKING:
    from pytest_nixl.host.facts import Facts
    from pytest_nixl.host.rdma import RdmaDevice


MIB = 1 << 20
#: The image of the shipped files.
PLACEHOLDER = "registry.example/inference:latest"
#: The most CPU cores and memory that a pod requests.
_MOST_CPUS, _MOST_MEMORY = 32, 128 << 30
#: The huge pages that the manifest requests, in bytes.
_HUGE = 5120 * MIB
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
#: The form of an instance type of a cloud, as its nodes are labelled and their firmware reports it.
_INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
_REQUIRED = (
    "nixl-loads",
    "backend-loads",
    "etcd-answers",
    "metadata-by-etcd",
    "metadata-by-side-channel",
    "endpoints-well-formed",
    "bandwidth",
)
_REQUIRED_RDMA = ("plugin-libraries", "memlock", "rdma-devices", "rdma-ports", "uverbs-open")
_REQUIRED_GPU = ("gpus", "gpu-driver")
#: The line rate that is assumed for a card that does not report its own, in bytes per second: 1 Gb/s.
_ASSUMED_RATE = 125e6
#: The floor of blocks below 1 MiB, whose time is mostly latency, in bytes per second: 4 KiB take 4 ms.
_SMALL_FLOOR = 1e6

#: The CI systems for which there is a file.
CI_SYSTEMS = ("github", "gitlab")
_WHERE = {
    "github": "the jobs for GitHub Actions: copy it to .github/workflows/",
    "gitlab": "the jobs for GitLab: include it from .gitlab-ci.yml",
}
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


def starter_file(name: str, values: Mapping[str, object]) -> str:
    """Return the text of a file, such as ``github.yml``, from its template.

    ``docs/generate.py`` fills the same templates for the files in ``deploy``.

    :param values: the variables of the templates, as :func:`template_values` returns them.
    """
    environment = jinja2.Environment(
        # Shell and GitHub's workflows use Jinja's own delimiters.
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<%=",
        variable_end_string="%>",
        comment_start_string="<%#",
        comment_end_string="%>",
        keep_trailing_newline=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["toml"] = json.dumps
    return environment.get_template(f"{name}.j2").render(values)


@dataclass(frozen=True)
class ClusterPlan:
    """What the files need to know.

    :param facts: the facts of one node.
    :param image: the image that is validated.
    :param nodes: the number of nodes.
    :param backend: the backend of rows between nodes.
    :param product: the product name in the node's firmware; empty: unknown.
    """

    facts: Facts
    image: str
    nodes: int
    backend: str
    product: str


def template_values(cluster: ClusterPlan, folder: Path) -> dict[str, object]:
    """Return the variables of the templates: what the node has, with one rank on each node.

    :param folder: the folder that gets the files, with the profile among them.
    """
    facts = cluster.facts
    memory = min(_MOST_MEMORY, (facts.host.memory.value or 4 << 30) // 2)
    return {
        "image": cluster.image,
        "nodes": cluster.nodes,
        "backend": cluster.backend,
        "memories": ",".join(row_memories(facts)),
        "gpus": len(facts.gpu.gpus),
        "efa": len(facts.efa),
        "script": folder / "pytest-nixl.sbatch",
        "learn_like": shlex.quote(str(folder / "profile.toml")),
        "profile_path": shlex.quote(str((folder / "profile.toml").resolve())),
        "container_image": "" if cluster.image == PLACEHOLDER else enroot_name(cluster.image),
        "pod_profile": "/profile/profile.toml",
        "mount_profile": True,
        "node_label": _node_label(cluster),
        "cpus": min(_MOST_CPUS, max((facts.host.cpus.value or 1) - 1, 1)),
        "memory": f"{memory // MIB}Mi",
        "shared_memory": f"{min(16 << 30, memory // 4) // MIB}Mi",
        "huge_pages": sum(pages.size * pages.total for pages in facts.host.huge_pages if pages.size == 2 * MIB)
        >= _HUGE,
    }


def enroot_name(image: str) -> str:
    """Return the name by which enroot finds an image: with ``#`` after the registry, if there is one.

    :param image: the name as Docker reads it, such as ``registry.example/inference:1.2``.
    """
    registry, slash, repository = image.partition("/")
    return (
        f"{registry}#{repository}"
        if slash and ("." in registry or ":" in registry or registry == "localhost")
        else image
    )


def _node_label(cluster: ClusterPlan) -> str:
    if _INSTANCE_TYPE.fullmatch(cluster.product):
        return f"node.kubernetes.io/instance-type: {cluster.product}"
    machine = cluster.facts.host.architecture.value or "x86_64"
    return f"kubernetes.io/arch: {_ARCHITECTURES.get(machine, machine)}"


def starter_profile(facts: Facts, backend: str, today: date) -> str:
    """Return the text of a profile for rows between two hosts like this one.

    :param backend: the backend, UCX or LIBFABRIC.
    """
    rates = _rates(facts)
    rate, origin = _rate(facts, rates)
    nearest = [len(near.own) for near in facts.near if near.own]
    gpus, reason = facts.gpu.gpus, cards_undescribed(facts)
    models = {gpu.name for gpu in gpus}
    hardware = (*(() if reason else _REQUIRED_RDMA), *(_REQUIRED_GPU if gpus else ()))
    values = {
        "backend": backend,
        "transports": transports(facts, backend),
        "memories": row_memories(facts),
        "required": [*_REQUIRED, *hardware],
        "undescribed": reason,
        "nics": 0 if reason else len(cards(facts)),
        "nic_rate": f"{rate * 8 / 1e9:g}",
        "nics_per_gpu": min(nearest) if gpus and len(nearest) == len(gpus) else 0,
        "efa": len(facts.efa),
        "gpus": len(gpus),
        "gpu": gpus[0].name if len(models) == 1 else "",
        "floors": (
            (
                "4KiB..1048575B",
                f"{min(_SMALL_FLOOR, rate / 10) / 1e9:.3g}",
                "a block below 1 MiB takes a time that is mostly latency; slower is broken",
            ),
            ("1MiB..1GiB", f"{rate / 10 / 1e9:.3g}", f"a tenth of {rate * 8 / 1e9:g} Gb/s, {origin}"),
        ),
        "today": str(today),
    }
    text = starter_file("profile.toml", values)
    parse_profile(text.encode(), "this-cluster")  # what is written must load
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
    return tuple(sorted(name for name in RDMA if name.startswith(("rc", "dc")))) if backend == "UCX" else ("verbs",)


def cards_undescribed(facts: Facts) -> str:
    """Return why a profile of this host says nothing of its network cards; empty: it does."""
    rates = _rates(facts)
    if not cards(facts):
        return "this node has no RDMA device"
    if not rates:
        return "no RDMA device of this node reports its rate"
    if len(rates) > 1:
        text = ", ".join(f"{rate * 8 / 1e9:g} Gb/s" for rate in sorted(rates))
        return f"the RDMA devices of this node have different rates ({text})"
    return ""


def describe_floors(facts: Facts) -> str:
    """Return what the floors of a host's first profile are made from."""
    rate, source = _rate(facts, _rates(facts))
    return f"sanity floors of {rate * 8 / 1e9:g} Gb/s, {source}"


def _rates(facts: Facts) -> set[float]:
    return {port.rate for device in cards(facts) for port in device.ports if port.rate is not None}


def _rate(facts: Facts, rates: set[float]) -> tuple[float, str]:
    """Return the line rate of one card, and what it is."""
    if rates:
        return min(rates), "the line rate of one RDMA device, as its driver reports it"
    default = facts.network.default.value
    nic = next((nic for nic in facts.nics if nic.name == default and nic.rate), None)
    if nic is not None and nic.rate:
        return nic.rate, f"the line rate of {nic.name}, as its driver reports it"
    return _ASSUMED_RATE, "which is assumed, because no network card reports its line rate"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    init = commands.add_parser(
        "init",
        help="write a first profile, a CI file, a Slurm job and Kubernetes manifests for the cluster of this host",
        description="Write a profile, a CI file, a Slurm job and a Kubernetes Job from the facts of this host. "
        "Run it on a node of the cluster. No file is overwritten. Change the lines that are marked with yours.",
    )
    init.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path("nixl"),
        help="where to write; it is created if it does not exist (default: nixl)",
    )
    init.add_argument("--ci", choices=CI_SYSTEMS, default=CI_SYSTEMS[0], help="the CI system (default: github)")
    init.add_argument(
        "--image", metavar="REF", default=PLACEHOLDER, help="the image to validate (default: a placeholder)"
    )
    init.add_argument("--nodes", metavar="N", default="2", help="the number of nodes of a run (default: 2)")
    init.add_argument("--root", metavar="DIR", help="read the node from a tree of `pytest-nixl facts --record DIR`")
    init.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.directory
    if not re.fullmatch(r"[1-9]\d{0,4}", arguments.nodes):
        raise ValueError(f"--nodes {arguments.nodes!r} is not a positive integer")
    if not _IMAGE.fullmatch(arguments.image):
        raise ValueError(f"--image {arguments.image!r} is not the name of an image: expected REPOSITORY[:TAG][@DIGEST]")
    if redact(arguments.image) != arguments.image:
        raise ValueError(
            f"--image {redact(arguments.image)!r} contains a user or a password, which the files would show: "
            "give the image without it, and log in to its registry"
        )
    names = (
        "profile.toml",
        f"{arguments.ci}.yml",
        "pytest-nixl.sbatch",
        "indexed-job.yaml",
        "etcd.yaml",
        "results.yaml",
    )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a directory: give the path of a new one")
    for name in names:
        if (folder / name).exists():
            raise ValueError(f"{folder / name} already exists, and nothing was written: give another directory")
    cluster, profile, reason = _examined(arguments)
    values = template_values(cluster, folder)
    texts = (profile, *(starter_file(name, values) for name in names[1:]))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, texts, strict=True):
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    backend = f"{cluster.backend}, {','.join(row_memories(cluster.facts))}"
    meanings = (
        f"what to expect of rows between two such nodes ({backend}; {reason})",
        _WHERE[arguments.ci],
        f"a Slurm job of {arguments.nodes} nodes{_container(arguments.image)}",
        f"a Job of {arguments.nodes} nodes",
        "the etcd in which its ranks meet",
        "the volume for its results",
    )
    for name, meaning in zip(names, meanings, strict=True):
        print(f"{folder / name}: {meaning}")
    print(f"next: grep -n yours {shlex.join(str(folder / name) for name in names[1:])}")
    print(
        f"then: pytest-nixl profile show {shlex.quote(str(folder / 'profile.toml'))}, and the commands at the top of "
        f"{folder / 'pytest-nixl.sbatch'} or {folder / 'indexed-job.yaml'}"
    )
    if reason := cards_undescribed(cluster.facts):
        lacks = "says nothing of network cards" if cluster.facts.gpu.gpus else "has no [machine]"
        print(
            f"the profile {lacks}, because {reason}: a device that is lost later is not noticed. On nodes that "
            "should have RDMA devices, run init on one that has them all, or write [machine] by hand"
        )
    return 0


def _container(image: str) -> str:
    return "" if image == PLACEHOLDER else ", in containers of pyxis"


def _examined(arguments: argparse.Namespace) -> tuple[ClusterPlan, str, str]:
    """Return the cluster that the node belongs to, the text of its profile, and the origin of that text."""
    tree = FactsRoot(arguments.root)
    root = Path(arguments.root or "/")
    try:
        with refuse_unreadable_tree(tree):
            facts = gather(tree, backends=(), etcd="")
            chosen = choose(facts, level="standard", environ={}, root=root)
    finally:
        close_supervisor()
    product = read_product(root)
    cluster = ClusterPlan(facts, arguments.image, int(arguments.nodes), chosen.backend.value, product)
    if chosen.profile.value == product:
        return cluster, bundled_text(product), f"a copy of the profile {Choice(product, chosen.profile.reason)}"
    return cluster, starter_profile(facts, chosen.backend.value, date.today()), describe_floors(facts)
