# SPDX-License-Identifier: Apache-2.0
"""What a worker may be asked for, the variables that only its own rank sets, and what its proof of a transfer says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.model.tools import not_from_other_ranks, own_variables
from pytest_nixl.model.transfer_proof import TransferProof
from pytest_nixl.model.worker_commands import WORKER_COMMANDS


def test_a_worker_has_commands_of_which_few_are_not_of_peers_or_not_answered() -> None:
    assert [name for name, command in WORKER_COMMANDS.items() if not command.peers] == ["run"]
    assert [name for name, command in WORKER_COMMANDS.items() if not command.answered] == ["cancel", "exit"]


def test_only_the_own_rank_sets_the_path_and_the_programs_of_a_worker() -> None:
    assert own_variables({"nixlbench": "/n", "fi_rma_bw": ""}, {"PATH": "/bin"}) == {
        "PATH": "/bin", "PYTEST_NIXL_TOOL_NIXLBENCH": "/n", "PYTEST_NIXL_TOOL_UCX_PERFTEST": None,
        "PYTEST_NIXL_TOOL_FI_RMA_BW": None, "PYTEST_NIXL_TOOL_FI_RMA_PINGPONG": None,
    }  # fmt: skip


def test_another_rank_sets_only_known_variables_and_unsets_those_of_the_libraries() -> None:
    assert not_from_other_ranks({"UCX_TLS": "rc", "FI_PROVIDER": "efa", "CUDA_VISIBLE_DEVICES": "0"}) == []
    assert not_from_other_ranks({"UCX_MODULES": "x", "PATH": "/x", "UCX_TLS": None}) == ["UCX_MODULES", "PATH"]
    unset = ["UCX_A", "FI_A", "NIXL_A", "ETCD_A", "CUDA_A", "_A", "MY_UCX_A", "UCX_a", "UCX_"]
    assert not_from_other_ranks(dict.fromkeys(unset)) == unset[5:]


PROOF = TransferProof("UCX", "DRAM:DRAM", "it went wrong", "set UCX_TLS=rc and FI_PROVIDER=efa")
TLS, OTHER = ("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "y")


@pytest.mark.parametrize(
    ("culprits", "together", "fault", "remedy"),
    [
        ((), (), "", ""),
        ((TLS,), (), "with UCX_TLS=tcp nothing can be moved; without it 64 KiB arrive", PROOF.remedy),
        ((TLS,), (OTHER,),
         "with UCX_TLS=tcp and UCX_NET_DEVICES=y together nothing can be moved; without UCX_TLS 64 KiB arrive",
         PROOF.remedy),
        ((TLS, OTHER), (),
         "with UCX_TLS=tcp and UCX_NET_DEVICES=y nothing can be moved; without UCX_TLS and UCX_NET_DEVICES 64 KiB "
         "arrive", "`unset UCX_TLS UCX_NET_DEVICES`"),
    ],
)  # fmt: skip
def test_a_proof_names_the_variables_that_keep_bytes_from_arriving(
    culprits: tuple[tuple[str, str], ...], together: tuple[tuple[str, str], ...], fault: str, remedy: str
) -> None:
    proof = replace(PROOF, culprits=culprits, together=together)
    assert (proof.steering_fault, proof.steering_remedy) == (fault, remedy)
    assert proof.variables == tuple(name for name, _ in culprits + together)
