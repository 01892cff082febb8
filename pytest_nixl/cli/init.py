# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl init``: write a first profile, and files for CI, Slurm and Kubernetes, for the cluster of this host."""

from __future__ import annotations

import argparse
import re
import shlex
from datetime import date
from pathlib import Path

from pytest_nixl.cli.doctor import refuse_unreadable_tree
from pytest_nixl.cli.run_choice import Choice, choose
from pytest_nixl.cli.starter_files import (
    PLACEHOLDER,
    ClusterPlan,
    cards_undescribed,
    describe_floors,
    row_memories,
    starter_file,
    starter_profile,
    template_values,
)
from pytest_nixl.core.redaction import redact
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import bundled_text
from pytest_nixl.processes.supervisor import close_supervisor
from pytest_nixl.session.default_profile import read_product

#: The CI systems for which there is a file.
CI_SYSTEMS = ("github", "gitlab")
_WHERE = {
    "github": "the jobs for GitHub Actions: copy it to .github/workflows/",
    "gitlab": "the jobs for GitLab: include it from .gitlab-ci.yml",
}
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


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
