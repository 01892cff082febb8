# SPDX-License-Identifier: Apache-2.0
"""Adapt the shipped CI files, Slurm job and manifests to a cluster, by the facts of one of its nodes."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.host.facts import Facts

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


def templates_folder() -> Path:
    """Return the folder of the shipped files: the wheel has it inside the package, a clone beside the package.

    :raises ValueError: they are not installed.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "deploy", package.parent / "deploy"):
        if (folder / "kubernetes").is_dir():
            return folder
    raise ValueError(f"there are no templates in {package / 'deploy'}: install pytest-nixl whole")


def template(name: str) -> str:
    """Return the text of a shipped file, such as ``ci/github.yml``."""
    return (templates_folder() / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class ClusterPlan:
    """What the files need to know.

    :param facts: the facts of one node.
    :param image: the image that is validated.
    :param nodes: the number of nodes.
    :param backend: the backend of rows between nodes.
    :param memories: the pairs of memory types to measure.
    :param product: the product name in the node's firmware; empty: unknown.
    """

    facts: Facts
    image: str
    nodes: int
    backend: str
    memories: tuple[str, ...]
    product: str


def ci_file(name: str, cluster: ClusterPlan) -> str:
    """Return the file for a CI system.

    :param name: ``github`` or ``gitlab``.
    """
    text = _replaced(template(f"ci/{name}.yml"), PLACEHOLDER, cluster.image, 1)
    if cluster.facts.gpu.gpus:
        return text
    if name == "github":
        return _replaced(_replaced(text, " --gpus all", "", 3), "[self-hosted, gpu]", "[self-hosted]", 3)
    return _replaced(text, "tags: [gpu]", "tags: [nixl]", 1)


def slurm_job(cluster: ClusterPlan, folder: Path) -> str:
    """Return the batch script of Slurm with one rank on each node.

    :param folder: the folder that gets it, with the profile beside it.
    """
    name = "pytest-nixl.sbatch"
    text = _replaced(template(f"slurm/{name}"), f"deploy/slurm/{name}", str(folder / name), 2)
    text = _replaced(text, "--like nixl/profile.toml", f"--like {shlex.quote(str(folder / 'profile.toml'))}", 1)
    text = _replaced(text, "#SBATCH --nodes=2 ", f"#SBATCH --nodes={cluster.nodes} ", 1)
    text = _replaced(text, "--gpus-per-node=8 ", f"--gpus-per-node={len(cluster.facts.gpu.gpus)} ", 1)
    text = _replaced(text, "--nixl-backend=UCX ", f"--nixl-backend={cluster.backend} ", 1)
    text = _replaced(text, "--nixl-memory=VRAM:VRAM,DRAM:DRAM", f"--nixl-memory={','.join(cluster.memories)}", 1)
    profile = shlex.quote(str((folder / "profile.toml").resolve()))
    text = _replaced(text, "profile=${PROFILE-} ", f"profile=${{PROFILE-{profile}}} ", 1)
    if cluster.image == PLACEHOLDER:
        return text
    return _replaced(text, "image=${CONTAINER_IMAGE-} ", f"image=${{CONTAINER_IMAGE-{enroot_name(cluster.image)}}} ", 1)


def enroot_name(image: str) -> str:
    """Return the name by which enroot finds an image: with ``#`` after the registry, if there is one.

    :param image: the name as Docker reads it, such as ``registry.example/inference:1.2``.
    """
    registry, slash, rest = image.partition("/")
    return f"{registry}#{rest}" if slash and ("." in registry or ":" in registry or registry == "localhost") else image


def job(cluster: ClusterPlan) -> str:
    """Return the manifest of an Indexed Job with one rank on each node."""
    facts = cluster.facts
    text = _replaced(template("kubernetes/indexed-job.yaml"), PLACEHOLDER, cluster.image, 2)
    for field in ("completions: ", "parallelism: ", "--nixl-ranks="):
        text = _replaced(text, f"{field}2  # yours", f"{field}{cluster.nodes}  # yours", 1)
    text = _replaced(text, "--nixl-backend=LIBFABRIC", f"--nixl-backend={cluster.backend}", 1)
    text = _replaced(text, "--nixl-profile=p5.48xlarge", "--nixl-profile=/profile/profile.toml", 1)
    text = _replaced(text, "--nixl-memory=VRAM:VRAM,DRAM:DRAM", f"--nixl-memory={','.join(cluster.memories)}", 1)
    text = re.sub(r"\n *# This profile has measured floors[^\n]*", "", text)
    text = _replaced(text, "node.kubernetes.io/instance-type: p5.48xlarge", _selector(cluster), 1)
    text = _resources(text, facts)
    text = _replaced(
        text,
        "#   kubectl apply -f etcd.yaml",
        "#   kubectl create configmap nixl-profile --from-file=profile.toml\n#   kubectl apply -f etcd.yaml",
        1,
    )
    text = _replaced(
        text,
        "          volumeMounts:\n",
        "          volumeMounts:\n            - name: profile\n              mountPath: /profile\n",
        1,
    )
    return _replaced(
        text,
        "      volumes:\n",
        "      volumes:\n        - name: profile\n          configMap:\n            name: nixl-profile\n",
        1,
    )


def _selector(cluster: ClusterPlan) -> str:
    if _INSTANCE_TYPE.fullmatch(cluster.product):
        return f"node.kubernetes.io/instance-type: {cluster.product}"
    machine = cluster.facts.host.architecture.value or "x86_64"
    return f"kubernetes.io/arch: {_ARCHITECTURES.get(machine, machine)}"


def _resources(text: str, facts: Facts) -> str:
    """Request what the node has: cores, memory, huge pages, GPUs and EFA devices."""
    cpus = min(_MOST_CPUS, max((facts.host.cpus.value or 1) - 1, 1))
    memory = min(_MOST_MEMORY, (facts.host.memory.value or 4 << 30) // 2)
    shared = min(16 << 30, memory // 4)
    text = _replaced(text, 'cpu: "32"', f'cpu: "{cpus}"', 1)
    text = _replaced(text, "memory: 128Gi", f"memory: {memory // MIB}Mi", 1)
    text = _replaced(text, "sizeLimit: 16Gi", f"sizeLimit: {shared // MIB}Mi", 1)
    huge = sum(pages.size * pages.total for pages in facts.host.huge_pages if pages.size == 2 * MIB)
    if huge < _HUGE:
        text = _without(text, r" *hugepages-2Mi: 5120Mi\n")
        text = _without(text, r" *- name: hugepages\n *mountPath: [^\n]*\n")
        text = _without(text, r" *- name: hugepages\n *emptyDir:\n *medium: HugePages-2Mi\n")
    for resource, shipped, count in (
        ("nvidia.com/gpu", 8, len(facts.gpu.gpus)),
        ("vpc.amazonaws.com/efa", 32, len(facts.efa)),
    ):
        line = f' *{re.escape(resource)}: "{shipped}"  # yours\n'
        if count:
            text = _replaced(text, f'{resource}: "{shipped}"', f'{resource}: "{count}"', 1)
        else:
            text = _without(text, line)
    return text


def _replaced(text: str, old: str, new: str, count: int) -> str:
    """Replace a text that occurs exactly this often, so that a changed template is noticed."""
    if text.count(old) != count:
        raise ValueError(f"the template has {old!r} {text.count(old)} times, not {count}: install pytest-nixl again")
    return text.replace(old, new)


def _without(text: str, pattern: str) -> str:
    """Remove the one place that matches."""
    shorter, count = re.subn(pattern, "", text)
    if count != 1:
        raise ValueError(f"the template has {pattern!r} {count} times, not once: install pytest-nixl again")
    return shorter
