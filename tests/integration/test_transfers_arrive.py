# SPDX-License-Identifier: Apache-2.0
"""Runs of the doctor and the suites on a host where nothing can be moved, for a reason that is made here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers.cli_run import run, run_command
from helpers.contention import spinning
from helpers.needs import need_programs

pytestmark = pytest.mark.long

#: Variables that steer NIXL and harm nobody.
HARMLESS = {"UCX_LOG_LEVEL": "warn", "UCX_RNDV_THRESH": "8k", "NIXL_LOG_LEVEL": "warn", "UCX_MODULES": "^ib"}
ARRIVE = "transfers-arrive"
WITHOUT_PTRACE = (sys.executable, str(Path(__file__).parents[1] / "helpers/without_ptrace.py"))


def doctor(
    *arguments: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str, str]]:
    """Run the doctor, and return verdict, reason and remedy of each check in the order of the report."""
    done = run_command("doctor", "--json", *arguments, env={**HARMLESS, **(env or {})}, prefix=prefix)
    assert done.returncode in (0, 1), done.stderr
    return {load["id"]: (load["verdict"], load["reason"], load["remedy"]) for load in json.loads(done.stdout)["checks"]}


def test_bytes_arrive_on_a_healthy_host_also_while_others_keep_it_busy() -> None:
    with spinning(), spinning():
        report = doctor("--backend=POSIX,UCX")
    verdict, reason, remedy = report[ARRIVE]
    assert (verdict, remedy) == ("PASS", ""), reason
    assert {verdict for verdict, _, _ in report.values()} == {"PASS", "NOT-APPLICABLE"}
    assert reason.startswith("POSIX: 64 KiB each way")
    # The file of the library is the one that a process had loaded which moved bytes.
    assert Path(reason.rpartition(" by ")[2]).name.startswith("libucp")
    assert Path(reason.rpartition(" by ")[2]).is_file()


def test_variables_with_which_nothing_can_be_moved_are_named_and_the_check_that_knows_one_comes_first() -> None:
    """A run names a single one, below."""
    report = doctor(env={"UCX_PROTO_ENABLE": "n", "UCX_NET_DEVICES": "mlx5_77:1"})
    assert (
        "with UCX_NET_DEVICES=mlx5_77:1 and UCX_PROTO_ENABLE=n nothing can be moved; "
        "without UCX_NET_DEVICES and UCX_PROTO_ENABLE 64 KiB arrive"
    ) in report[ARRIVE][1]
    failed = [id for id, (verdict, _, _) in report.items() if verdict == "FAIL"]
    assert failed == ["devices-there", "backend-loads", ARRIVE]
    assert "mlx5_77" in report["devices-there"][1]
    assert all(report[id][1].startswith("follows from devices-there: ") for id in failed[1:])
    assert "with a TCP device among them" in report["backend-loads"][2]


def test_filter_of_system_calls_that_forbids_a_copy_between_processes_is_named() -> None:
    verdict, reason, remedy = doctor(prefix=WITHOUT_PTRACE)[ARRIVE]
    assert verdict == "WARN"
    assert "a seccomp filter (the container's) forbids process_vm_readv" in reason
    assert "SYS_PTRACE" in remedy
    assert doctor(prefix=(*WITHOUT_PTRACE, "--keep-calls"))[ARRIVE][0] == "PASS"


def test_host_on_which_nothing_can_be_moved_without_any_variable_either_is_the_cause() -> None:
    need_programs("unshare", root=True)
    report = doctor(prefix=["unshare", "--net"])
    verdict, reason, _ = report[ARRIVE]
    assert verdict == "FAIL"
    assert "without any variable that steers NIXL either, so this host is the cause" in reason
    assert "bring up a network interface" in report["backend-loads"][2]


def test_run_of_which_no_transfer_succeeds_names_the_variable() -> None:
    options = ("--nixl-level=quick", "--nixl-blocks=4096", "--nixl-op=WRITE")
    failed = run("suites/bandwidth/test_bandwidth.py", *options, env={**HARMLESS, "UCX_PROTO_ENABLE": "n"})
    assert failed.code == 1
    assert "with UCX_PROTO_ENABLE=n nothing can be moved; without it 64 KiB arrive" in failed.output
    assert "remedy: `unset UCX_PROTO_ENABLE`" in failed.output
