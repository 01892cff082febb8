# SPDX-License-Identifier: Apache-2.0
"""How many ranks a run has and which one this process is: the variables of each launcher, and options against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from pytest_nixl.cluster.placement import (
    ALONE,
    LauncherPlacement,
    _accept,
    first_host,
    placement_by_launcher,
    placement_of_run,
)
from pytest_nixl.core.extensions import LAUNCHERS, Extension, ExtensionError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing

MakeSettings = Callable[..., Settings]
MPI = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "job 7"}
JOB = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({}, {}, "one of 1 ranks in group default (no launcher sets a number of ranks)"),
        ({}, MPI, "rank 2 of 3 in group job-7 (PMI: PMI_RANK)"),
        ({"group": "mine"}, MPI, "rank 2 of 3 in group mine (PMI: PMI_RANK)"),
        ({}, JOB, "one of 1 ranks in group default (an Indexed Job of Kubernetes sets JOB_COMPLETION_INDEX but not the "
         "number of ranks, and --nixl-ranks is not given)"),
        ({"ranks": 2}, JOB, "rank 1 of 2 in group default (--nixl-ranks and an Indexed Job of Kubernetes: "
         "JOB_COMPLETION_INDEX)"),
        ({"ranks": 3}, MPI, "rank 2 of 3 in group job-7 (--nixl-ranks and PMI: PMI_RANK)"),
        ({"ranks": 4, "rank": 0}, MPI, "rank 0 of 4 in group job-7 (--nixl-ranks)"),
        ({"ranks": 2}, {}, "one of 2 ranks in group default (--nixl-ranks)"),
        ({"ranks": 2, "rank": 1}, {}, "rank 1 of 2 in group default (--nixl-ranks)"),
        # A run of one rank is not a part of what the launcher started.
        ({"ranks": 1}, MPI, "one of 1 ranks in group job-7 (--nixl-ranks)"),
        ({"ranks": 1}, {"PMI_RANK": "one"}, "one of 1 ranks in group default (--nixl-ranks)"),
    ],
)  # fmt: skip
def test_options_come_before_the_variables_of_a_launcher(
    make_settings: MakeSettings, options: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    placement = placement_of_run(make_settings(**options), environ)
    assert str(placement) == message
    assert placement.several is (placement.ranks > 1)
    assert placement.pairs == (
        ((0, 1),) if placement.ranks < 3 else tuple((i, (i + 1) % placement.ranks) for i in range(placement.ranks))
    )


def test_a_run_without_options_and_launcher_has_one_rank(make_settings: MakeSettings) -> None:
    assert replace(placement_of_run(make_settings(), {}), source=ALONE.source) == ALONE


@pytest.mark.parametrize(
    ("options", "environ", "fault"),
    [
        ({}, {"PMI_RANK": "one"}, r"^PMI_RANK='one' is not .*; or give --nixl-ranks N and --nixl-rank R$"),
        ({}, {**MPI, "PMI_RANK": "3"}, r"^PMI_RANK=3 is not below PMI_SIZE=3: .*; or give --nixl-ranks N and"),
        ({"ranks": 2}, MPI, r"^--nixl-ranks=2, but PMI started 3 ranks: remove --nixl-ranks, or also give"),
        ({"ranks": 4}, MPI, r"^--nixl-ranks=4, but PMI started 3 ranks"),
        ({"ranks": 2}, {"JOB_COMPLETION_INDEX": "2"},
         r"^JOB_COMPLETION_INDEX says that this is rank 2, but --nixl-ranks=2 allows ranks 0 to 1: set --nixl-ranks"),
        ({"pairs": RankPairing.parse("0:3")}, MPI,
         r"^--nixl-pairs=0:3: 0:3 names a rank that is not in the range 0 to 2$"),
        ({"pattern": PatternChoice.parse("incast:4")}, MPI, r"^--nixl-pattern=incast:4: it has 4 ranks, but the run"),
    ],
)  # fmt: skip
def test_what_contradicts_the_launcher_is_refused(
    make_settings: MakeSettings, options: dict[str, Any], environ: dict[str, str], fault: str
) -> None:
    with pytest.raises(pytest.UsageError, match=fault):
        placement_of_run(make_settings(**options), environ)


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[07-10]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-n1-5@1"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "TORCHELASTIC_RUN_ID": "abc"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SLURM, LauncherPlacement("Slurm", "SLURM_PROCID", 3, 4, "17-0", "n07")),
        # A step with the variables of MPI: srun started this rank if the numbers are the same, and else mpirun.
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, LauncherPlacement("Slurm", "SLURM_PROCID", 3, 4, "17-0", "n07")),
        ({**SLURM, **OPEN_MPI}, LauncherPlacement("Open MPI", "OMPI_COMM_WORLD_RANK", 1, 2, "prterun-n1-5-1")),
        ({**SLURM, "PMI_RANK": "7", "PMI_SIZE": "8"}, LauncherPlacement("PMI", "PMI_RANK", 7, 8)),
        (OPEN_MPI, LauncherPlacement("Open MPI", "OMPI_COMM_WORLD_RANK", 1, 2, "prterun-n1-5-1")),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, LauncherPlacement("PMI", "PMI_RANK", 2, 3)),
        (TORCHRUN, LauncherPlacement("torchrun", "RANK", 0, 8, "abc", "10.0.0.1")),
        ({"JOB_COMPLETION_INDEX": "5"}, LauncherPlacement("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", 5)),
        (
            {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "lws-0.lws.ns"},
            LauncherPlacement("a LeaderWorkerSet of Kubernetes", "LWS_WORKER_INDEX", 1, 2, "", "lws-0.lws.ns"),
        ),
        # The first of several that are set, in this order.
        ({"PMI_RANK": "2", "PMI_SIZE": "3", **TORCHRUN}, LauncherPlacement("PMI", "PMI_RANK", 2, 3)),
        ({**TORCHRUN, "JOB_COMPLETION_INDEX": "5"}, LauncherPlacement("torchrun", "RANK", 0, 8, "abc", "10.0.0.1")),
        (
            {"JOB_COMPLETION_INDEX": "5", "LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"},
            LauncherPlacement("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", 5),
        ),
        # A batch script without a step: its SLURM_PROCID is not a rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}, None),
        ({"RANK": "3"}, None),
        ({}, None),
    ],
)
def test_each_launcher_is_read_by_its_own_variables(
    environ: dict[str, str], expected: LauncherPlacement | None
) -> None:
    assert placement_by_launcher(environ, hostname=lambda: "somewhere-7") == expected


def test_the_ordinal_of_a_stateful_set_is_in_its_pods_name() -> None:
    kubernetes = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    placement = placement_by_launcher(kubernetes, hostname=lambda: "nixl-check-12")
    assert placement == LauncherPlacement("a StatefulSet of Kubernetes", "the host's name", 12)
    for name in ("nixl-check-x7", "nixl-check-", "nixl-check-7.svc", "-7", "7", ""):
        assert placement_by_launcher(kubernetes, hostname=partial(str, name)) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_PROCID": "three"}, "^SLURM_PROCID='three' "),
        ({**SLURM, "SLURM_PROCID": "4"}, "^SLURM_PROCID=4 .* SLURM_STEP_NUM_TASKS=4: .* 0 to 3"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "-2"}, "^OMPI_COMM_WORLD_SIZE='-2' "),
    ],
)
def test_an_invalid_variable_is_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement_by_launcher(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("n[07-12,20],m1", "n07"),
        ("n[5,9]-ib", "n5-ib"),
        ("n[a]-ib", "n"),
        ("a,b", "a"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


class TestOfAnotherDistribution:
    """A launcher that an entry point adds. The entry point is a double, so that nothing need be installed."""

    EXTENSION = Extension(LAUNCHERS, "mine", EntryPoint("mine", "package:ask", LAUNCHERS.group))

    def test_its_answer_is_believed_if_it_has_the_form_of_one(self) -> None:
        answer = LauncherPlacement("mine", "MY_RANK", 3)
        assert _accept(self.EXTENSION, lambda environ: answer if environ else None)({"MY_RANK": "3"}) is answer
        assert _accept(self.EXTENSION, lambda environ: None)({}) is None
        with pytest.raises(ExtensionError, match=r"\(package:ask\) returned int instead of LauncherPlacement or None"):
            _accept(self.EXTENSION, lambda environ: 3)({})

    def test_what_is_no_function_is_refused(self) -> None:
        with pytest.raises(ExtensionError, match=r"the launcher 'mine' .*is not a function of the environment"):
            _accept(self.EXTENSION, 3)
