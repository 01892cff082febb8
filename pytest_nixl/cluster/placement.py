# SPDX-License-Identifier: Apache-2.0
"""Where a process stands in a run: its rank, the number of ranks, their group and pairs, by options and launcher.

A launcher says in the environment which rank this process has, how many there are, and the host of rank 0.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.model.settings import Settings

#: Reads the environment of this process: where the launcher has placed it, or None if another one has started it.
ReadLauncher = Callable[[Mapping[str, str]], "LauncherPlacement | None"]
_ORDINAL = re.compile(r".+-(\d+)")
DEFAULT_GROUP = "default"


@dataclass(frozen=True)
class LauncherPlacement:
    """What a launcher says about this process.

    :param launcher: the name of the launcher in messages.
    :param variable: the variable from which the rank was read, for messages.
    :param rank: the rank of this process, from 0.
    :param ranks: the number of ranks; None if this launcher does not say.
    :param group: a name that all processes of one start share, and no other start has; empty if not known.
    :param first: the host of rank 0, as its peers can reach it; empty if not known.
    """

    launcher: str
    variable: str
    rank: int
    ranks: int | None = None
    group: str = ""
    first: str = ""


@dataclass(frozen=True)
class _LauncherVariables:
    """The environment variables of one launcher.

    :param name: the name of the launcher in messages.
    :param rank: the variable that holds the rank.
    :param ranks: variables that hold the number of ranks; the first one that is set counts.
    :param group: variables that together identify one start.
    :param first: variables that hold the host of rank 0; the first one that is set counts.
    :param needs: variables that must be set, or else it is not this launcher.
    """

    name: str
    rank: str
    ranks: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


# Only a Slurm step sets SLURM_STEP_NUM_TASKS. In a batch script without a step, SLURM_PROCID is 0 and SLURM_NTASKS may
# be more than one.
_SLURM = _LauncherVariables(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    needs=("SLURM_STEP_NUM_TASKS",),
)
_OPEN_MPI = _LauncherVariables("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("PMIX_NAMESPACE",))
_PMI = _LauncherVariables("PMI", "PMI_RANK", ("PMI_SIZE",), ("PMI_JOBID",))
_LAUNCHERS = (
    _SLURM,
    _OPEN_MPI,
    _PMI,
    _LauncherVariables(
        "torchrun", "RANK", ("WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",), ("MASTER_ADDR",), needs=("WORLD_SIZE",)
    ),
    _LauncherVariables("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX"),
    _LauncherVariables(
        "a LeaderWorkerSet of Kubernetes", "LWS_WORKER_INDEX", ("LWS_GROUP_SIZE",), (), ("LWS_LEADER_ADDRESS",)
    ),
)


def placement_by_launcher(
    environ: Mapping[str, str], hostname: Callable[[], str] = socket.gethostname
) -> LauncherPlacement | None:
    """Return what the launcher of this process says; None if no launcher is known.

    :param environ: the environment of this process.
    :param hostname: returns the host name, from which the rank in a StatefulSet is read.
    :raises ValueError: if a variable does not hold a number, or the rank is not below the number of ranks. The text is
        one sentence.
    """
    added = LAUNCHERS.extensions()
    # Those of other distributions come first: a launcher may set the variables of another one too, such as PMI_RANK.
    for name in (*added, *(name for name in LAUNCHERS if name not in added)):
        placement = LAUNCHERS[name](environ)
        if placement is not None:
            return placement
    ordinal = _ORDINAL.fullmatch(hostname())
    if environ.get("KUBERNETES_SERVICE_HOST") and ordinal:
        return LauncherPlacement("a StatefulSet of Kubernetes", "the host's name", int(ordinal[1]))
    return None


def _placement(launcher: _LauncherVariables, environ: Mapping[str, str]) -> LauncherPlacement | None:
    if not environ.get(launcher.rank) or not all(environ.get(name) for name in launcher.needs):
        return None
    rank = _number(launcher.rank, environ)
    size = next((name for name in launcher.ranks if environ.get(name)), None)
    ranks = _number(size, environ) if size else None
    if ranks is not None and rank >= ranks:
        raise ValueError(f"{launcher.rank}={rank} is not below {size}={ranks}: expected a rank from 0 to {ranks - 1}")
    # Replace characters that a group name may not have: Open MPI sets "prterun-HOST-PID@1".
    group = re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(environ[name] for name in launcher.group if environ.get(name)))
    first = next((environ[name] for name in launcher.first if environ.get(name)), "")
    return LauncherPlacement(launcher.name, launcher.rank, rank, ranks, group, first_host(first))


def _placement_in_slurm(environ: Mapping[str, str]) -> LauncherPlacement | None:
    """Return what Slurm says, or what MPI says if the two differ.

    Under ``srun``, MPI has the same numbers, if it has any. In a job of Slurm, ``mpirun`` starts one process on each
    other node by ``srun``, which starts the ranks: they inherit the variables of Slurm, which number those processes.
    """
    step = _placement(_SLURM, environ)
    if step is None:
        return None
    ranks = (placement for mpi in (_OPEN_MPI, _PMI) if (placement := _placement(mpi, environ)) is not None)
    return next(
        (placement for placement in ranks if (placement.rank, placement.ranks) != (step.rank, step.ranks)), step
    )


def _number(name: str, environ: Mapping[str, str]) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", environ[name]):
        raise ValueError(f"{name}={environ[name]!r} is not a non-negative integer: unset it if no launcher set it")
    return int(environ[name])


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``n07`` for ``n[07-12,20],m1``. A plain name is returned as it is."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None  # the pattern also matches the empty text
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _accept(extension: Extension, loaded: Any) -> ReadLauncher:
    if not callable(loaded):
        raise extension.fault("is not a function of the environment")

    def guarded(environ: Mapping[str, str]) -> LauncherPlacement | None:
        placement = extension.call(lambda: loaded(environ))
        if placement is not None and not isinstance(placement, LauncherPlacement):
            raise extension.fault(f"returned {type(placement).__name__} instead of LauncherPlacement or None")
        return placement

    return guarded


#: By name: ours, and those that other distributions add.
LAUNCHERS: Registry[ReadLauncher] = Registry(
    extensions.LAUNCHERS,
    {launcher.name: partial(_placement, launcher) for launcher in _LAUNCHERS} | {_SLURM.name: _placement_in_slurm},
    _accept,
)


@dataclass(frozen=True)
class Placement:
    """The number of ranks in a run, and the rank of this process.

    :param ranks: the number of ranks, 1 or more.
    :param rank: the rank of this process, from 0; None if the order of arrival decides it.
    :param group: the name of the group in which the ranks meet.
    :param source: the option or the launcher variable that these values come from, for messages.
    :param by_launcher: what the launcher says; None if no launcher is known.
    :param pairs: initiator and target rank of each pair that is measured.
    """

    ranks: int
    rank: int | None
    group: str
    source: str
    by_launcher: LauncherPlacement | None
    pairs: tuple[tuple[int, int], ...]

    @property
    def several(self) -> bool:
        """Whether the run has more than one rank."""
        return self.ranks > 1

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.ranks}" if self.rank is not None else f"one of {self.ranks} ranks"
        return f"{place} in group {self.group} ({self.source})"


#: A run of one rank.
ALONE = Placement(1, None, DEFAULT_GROUP, "the default", None, ((0, 1),))


def placement_of_run(settings: Settings, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return how many ranks the run has, and which rank this process is.

    :param environ: the environment, from which the launcher's variables are read.
    :raises pytest.UsageError: if options and launcher contradict each other, or if the launcher's variables are not
        valid and no option replaces them.
    """
    try:
        launched = placement_by_launcher(environ)
    except ValueError as error:
        if settings.ranks is None:
            raise pytest.UsageError(f"{error}; or give --nixl-ranks N and --nixl-rank R") from None
        launched = None
    ranks, rank, source = _ranks(settings, launched)
    if ranks == 1 and settings.ranks is None and launched is not None and launched.ranks is None:
        source = (
            f"{launched.launcher} sets {launched.variable} but not the number of ranks, and --nixl-ranks is not given"
        )
    try:
        pairs = settings.pairs.of(ranks)
    except ValueError as error:
        raise pytest.UsageError(f"--nixl-pairs={settings.pairs}: {error}") from None
    if settings.pattern is not None:
        try:
            settings.pattern.ranks_of(ranks)
        except ValueError as error:
            raise pytest.UsageError(f"--nixl-pattern={settings.pattern}: {error}") from None
    group = settings.group or (launched.group if launched is not None else "") or DEFAULT_GROUP
    return Placement(ranks, rank, group, source, launched, pairs)


def _ranks(settings: Settings, launched: LauncherPlacement | None) -> tuple[int, int | None, str]:
    if settings.ranks is None:
        if launched is None or not launched.ranks:
            return 1, None, "no launcher sets a number of ranks"
        return launched.ranks, launched.rank, f"{launched.launcher}: {launched.variable}"
    if settings.rank is not None or launched is None or settings.ranks == 1:
        return settings.ranks, settings.rank, "--nixl-ranks"
    if launched.ranks not in (None, settings.ranks):
        raise pytest.UsageError(
            f"--nixl-ranks={settings.ranks}, but {launched.launcher} started {launched.ranks} ranks: remove "
            "--nixl-ranks, or also give --nixl-rank R"
        )
    if launched.rank >= settings.ranks:
        raise pytest.UsageError(
            f"{launched.variable} says that this is rank {launched.rank}, but --nixl-ranks={settings.ranks} allows "
            f"ranks 0 to {settings.ranks - 1}: set --nixl-ranks to the number of processes that are started"
        )
    return settings.ranks, launched.rank, f"--nixl-ranks and {launched.launcher}: {launched.variable}"
