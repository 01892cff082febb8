# SPDX-License-Identifier: Apache-2.0
"""Fill the templates of CI files, Slurm job and manifests for a cluster, by the facts of one of its nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

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
    return environment.get_template(f"{name}.j2").render(values)


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
        "memories": ",".join(cluster.memories),
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
    registry, slash, rest = image.partition("/")
    return f"{registry}#{rest}" if slash and ("." in registry or ":" in registry or registry == "localhost") else image


def _node_label(cluster: ClusterPlan) -> str:
    if _INSTANCE_TYPE.fullmatch(cluster.product):
        return f"node.kubernetes.io/instance-type: {cluster.product}"
    machine = cluster.facts.host.architecture.value or "x86_64"
    return f"kubernetes.io/arch: {_ARCHITECTURES.get(machine, machine)}"
