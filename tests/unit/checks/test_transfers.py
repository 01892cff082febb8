# SPDX-License-Identifier: Apache-2.0
"""The verdict on transfers that were tried, and the order of results by cause. test_transfers_arrive.py makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.fake_sysfs import p5

from pytest_nixl.checks.doctor.catalogue import examine
from pytest_nixl.checks.doctor.check import CheckResult, Requirements
from pytest_nixl.checks.doctor.transfers import transfers_arrive, with_transfers
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.transfer_proof import TransferProof
from pytest_nixl.model.verdicts import Verdict

REQUIREMENTS = Requirements(load_profile("loopback"), ("UCX",))
UCP = "/opt/nixl/libucp-b39b3ed9.so.0.0.0"
MOVED = TransferProof("UCX", "DRAM:DRAM", transports=("cma/memory",), libraries=(UCP,))
REFUSED = "NIXL reported nixlBackendError (NIXL_ERR_BACKEND)"
PROTO = (("UCX_PROTO_ENABLE", "n"),)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return gather(FactsRoot(p5(tmp_path_factory.mktemp("p5") / "tree").folder), backends=("UCX",))


def devices(host: Facts, value: str) -> Facts:
    """Return the facts of a host whose UCX refuses this value of UCX_NET_DEVICES."""
    environment = replace(host.environment, steering={**host.environment.steering, "UCX_NET_DEVICES": value})
    backends = tuple(
        replace(backend, error=REFUSED, memories=(), said=("x - no peer failure handler",))
        if backend.name == "UCX"
        else backend
        for backend in host.software.backends
    )
    return replace(host, environment=environment, software=replace(host.software, backends=backends))


def results(facts: Facts) -> list[CheckResult]:
    return [answer for answer in examine(facts, REQUIREMENTS, gate=False) if answer.judgement.verdict is Verdict.FAIL]


@pytest.mark.parametrize(
    ("proof", "sentence", "remedy"),
    [
        (
            TransferProof("UCX", "DRAM:DRAM", REFUSED, culprits=(("UCX_TLS", "a"), ("UCX_X", "b"))),
            "with UCX_TLS=a and UCX_X=b nothing can be moved; without UCX_TLS and UCX_X 64 KiB arrive",
            "`unset UCX_TLS UCX_X`",
        ),
        (
            TransferProof("UCX", "DRAM:DRAM", REFUSED, culprits=PROTO, together=(("UCX_TLS", "tcp"),)),
            "with UCX_PROTO_ENABLE=n and UCX_TLS=tcp together nothing can be moved; "
            "without UCX_PROTO_ENABLE 64 KiB arrive",
            "`unset UCX_PROTO_ENABLE`",
        ),
        (
            TransferProof("UCX", "DRAM:DRAM", REFUSED, "add tcp to UCX_TLS", culprits=(("UCX_TLS", "cma"),)),
            "with UCX_TLS=cma nothing can be moved; without it 64 KiB arrive",
            "add tcp to UCX_TLS",
        ),
        (
            TransferProof("UCX", "DRAM:DRAM", REFUSED, "r", bare="also", obstacle="process_vm_readv is forbidden"),
            "without any variable that steers NIXL either, so this host is the cause: process_vm_readv is forbidden",
            "r",
        ),
    ],
)
def test_fault_names_its_variables_or_the_host(host: Facts, proof: TransferProof, sentence: str, remedy: str) -> None:
    judgement = transfers_arrive(with_transfers(host, (MOVED, proof)), REQUIREMENTS)
    assert (judgement.verdict, judgement.remedy) == (Verdict.FAIL, remedy)
    assert sentence in judgement.reason


def test_libraries_are_those_of_the_processes_that_moved_the_bytes(host: Facts) -> None:
    moved = with_transfers(host, (MOVED,)).software.libraries
    assert [library_file.path for library_file in moved if library_file.name == "libucp"] == [UCP]
    other_libraries = [library for library in host.software.libraries if library.name != "libucp"]
    assert [library_file for library_file in moved if library_file.name != "libucp"] == other_libraries != []


def test_check_that_knows_the_variable_precedes_what_follows_from_it(host: Facts) -> None:
    wrong = devices(host, "mlx5_99:1")
    fault = TransferProof("UCX", "DRAM:DRAM", REFUSED, culprits=(("UCX_NET_DEVICES", "mlx5_99:1"),))
    failed = results(with_transfers(wrong, (fault,)))
    assert [answer.check.id for answer in failed] == ["devices-there", "backend-loads", "transfers-arrive"]
    assert all(answer.judgement.reason.startswith("follows from devices-there: ") for answer in failed[1:])
    assert "with a TCP device among them" in failed[1].judgement.remedy
    assert failed[2].judgement.remedy == "follow the remedy of devices-there"


def test_backend_follows_from_its_variable_also_without_a_transfer(host: Facts) -> None:
    failed = results(devices(host, "mlx5_99:1"))
    assert [answer.check.id for answer in failed] == ["devices-there", "backend-loads"]
    assert failed[1].judgement.reason.startswith("follows from devices-there: ")


def test_backend_that_fails_for_another_reason_follows_from_nothing(host: Facts) -> None:
    backends = tuple(replace(backend, error=REFUSED, memories=()) for backend in host.software.backends)
    broken = replace(host, software=replace(host.software, backends=backends))
    fault = TransferProof("LIBFABRIC", "DRAM:DRAM", REFUSED, culprits=(("FI_PROVIDER", "tcp"),))
    failed = {answer.check.id: answer.judgement.reason for answer in results(with_transfers(broken, (fault,)))}
    assert failed["backend-loads"].startswith("UCX cannot be created")


def test_transfers_that_name_the_variable_precede_the_telemetry_that_fails_with_them(host: Facts) -> None:
    software = replace(host.software, telemetry=replace(host.software.telemetry, value=None, why=REFUSED))
    fault = TransferProof("UCX", "DRAM:DRAM", REFUSED, culprits=PROTO)
    answers = examine(with_transfers(replace(host, software=software), (fault,)), REQUIREMENTS, gate=False)
    ids = [answer.check.id for answer in answers]
    assert ids.index("transfers-arrive") == ids.index("telemetry-in-process") - 1
    telemetry = answers[ids.index("telemetry-in-process")].judgement
    assert telemetry.reason.startswith("follows from transfers-arrive: ")
