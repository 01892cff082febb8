# SPDX-License-Identifier: Apache-2.0
"""The rank of this process, as read from the variables of each launcher."""

from __future__ import annotations

from functools import partial
from importlib.metadata import EntryPoint

import pytest

from pytest_nixl.cluster.placement import LauncherPlacement, _accept, first_host, placement_by_launcher
from pytest_nixl.core.extensions import LAUNCHERS, Extension, ExtensionError

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
