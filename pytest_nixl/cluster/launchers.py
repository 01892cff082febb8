# SPDX-License-Identifier: Apache-2.0
"""What each launcher calls a process's rank, how many there are, and where the first of them is."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry


@dataclass(frozen=True)
class LauncherPlacement:
    """What a launcher says of this process.

    :param launcher: its name, in words.
    :param variable: where the rank was read; it is named in messages.
    :param rank: from 0.
    :param ranks: how many; None: this launcher does not say.
    :param group: what all processes of one start have in common, and no other start has; empty: not said.
    :param first: the host of rank 0, as its peers can reach it; empty: not said.
    """

    launcher: str
    variable: str
    rank: int
    ranks: int | None = None
    group: str = ""
    first: str = ""


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher.

    :param rank: of the rank, :param ranks: of their number, the first that is set.
    :param group: all that together name the start.
    :param needs: variables without which it is not this launcher.
    """

    name: str
    rank: str
    ranks: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


# In a batch script of Slurm SLURM_PROCID is 0 and SLURM_NTASKS more than one, although no step was started: a step is
# what has SLURM_STEP_NUM_TASKS. Open MPI and PMI under Slurm's srun have both; Slurm's own numbers are the same.
_LAUNCHERS = (
    _Launcher("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",), ("SLURM_JOB_ID", "SLURM_STEP_ID"),
              ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), needs=("SLURM_STEP_NUM_TASKS",)),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("PMIX_NAMESPACE",)),
    _Launcher("PMI", "PMI_RANK", ("PMI_SIZE",), ("PMI_JOBID",)),
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",), ("MASTER_ADDR",), needs=("WORLD_SIZE",)),
    _Launcher("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
    _Launcher("a LeaderWorkerSet of Kubernetes", "LWS_WORKER_INDEX", ("LWS_GROUP_SIZE",), (), ("LWS_LEADER_ADDRESS",)),
)  # fmt: skip

#: Reads the environment of this process: where the launcher has placed it, or None if another one has started it.
Launcher = Callable[[Mapping[str, str]], "LauncherPlacement | None"]

_ORDINAL = re.compile(r".+-(\d+)")


def find_placement(
    environ: Mapping[str, str], hostname: Callable[[], str] = socket.gethostname
) -> LauncherPlacement | None:
    """Return what the launcher of this process says; None where none is known.

    :raises ValueError: for a rank or number that is none, or a rank that is not below the number: one sentence.
    """
    added = LAUNCHERS.extensions()
    # Those of other distributions come first: a launcher may set the variables of another one too, such as PMI_RANK.
    for name in (*added, *(name for name in LAUNCHERS if name not in added)):
        found = LAUNCHERS[name](environ)
        if found is not None:
            return found
    ordinal = _ORDINAL.fullmatch(hostname())
    if environ.get("KUBERNETES_SERVICE_HOST") and ordinal:
        return LauncherPlacement("a StatefulSet of Kubernetes", "the host's name", int(ordinal[1]))
    return None


def _placement(launcher: _Launcher, environ: Mapping[str, str]) -> LauncherPlacement | None:
    if not environ.get(launcher.rank) or not all(environ.get(name) for name in launcher.needs):
        return None
    rank = _number(launcher.rank, environ)
    size = next((name for name in launcher.ranks if environ.get(name)), None)
    ranks = _number(size, environ) if size else None
    if ranks is not None and rank >= ranks:
        raise ValueError(f"{launcher.rank}={rank} is not below {size}={ranks}: expected a rank from 0 to {ranks - 1}")
    # As keys may have it: Open MPI says "prterun-HOST-PID@1".
    group = re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(environ[name] for name in launcher.group if environ.get(name)))
    first = next((environ[name] for name in launcher.first if environ.get(name)), "")
    return LauncherPlacement(launcher.name, launcher.rank, rank, ranks, group, first_host(first))


def _number(name: str, environ: Mapping[str, str]) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", environ[name]):
        raise ValueError(f"{name}={environ[name]!r} is no whole number: expected what a launcher sets, or unset it")
    return int(environ[name])


def first_host(nodes: str) -> str:
    """Return the first host of a node list of Slurm: ``n[07-12,20],m1`` gives ``n07``; a plain name stays."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None  # every text begins with an empty name
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _accept(extension: Extension, loaded: Any) -> Launcher:
    if not callable(loaded):
        raise extension.fault("is not a function of the environment")

    def ask(environ: Mapping[str, str]) -> LauncherPlacement | None:
        found = extension.call(lambda: loaded(environ))
        if found is not None and not isinstance(found, LauncherPlacement):
            raise extension.fault(f"returned {type(found).__name__} instead of LauncherPlacement or None")
        return found

    return ask


#: By name: ours, and those that other distributions add.
LAUNCHERS: Registry[Launcher] = Registry(
    extensions.LAUNCHERS, {launcher.name: partial(_placement, launcher) for launcher in _LAUNCHERS}, _accept
)
