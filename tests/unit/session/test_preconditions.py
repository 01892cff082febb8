# SPDX-License-Identifier: Apache-2.0
"""The infrastructure runs first, and a check of it that must hold ends the run, on every rank."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import time
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, command, environment, run
from helpers.cli_run import profile as write_profile

#: Nothing listens on port 1.
NOTHING = "http://127.0.0.1:1"
SUITES = ("suites", "--nixl-blocks=64KiB")


def processor_seconds() -> float:
    """Seconds of processor time that this process's ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ended(done: Finished) -> str:
    """The reason for which pytest says that it stopped."""
    found = re.search(r"^!+ (the run ended at the check .*) !+$", done.output, re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("gate", [(), ("--nixl-gate",)], ids=["plain", "gate"])
def test_an_etcd_that_is_not_there_ends_the_run_before_the_first_row(gate: tuple[str, ...]) -> None:
    began, worked = time.monotonic(), processor_seconds()
    done = run(*SUITES, *gate, env={"NIXL_ETCD_ENDPOINTS": NOTHING})
    # Ten seconds of a quiet machine: on a busy one the same work takes longer, and nothing may wait for a deadline.
    assert processor_seconds() - worked < 10
    assert time.monotonic() - began < 300
    assert "the check 'etcd-answers', which the profile 'loopback' requires" in ended(done)
    assert ended(done).endswith(f"etcd at {NOTHING}: connection refused, nothing listens there")
    assert done.verdicts == {}
    # What did not run is one sentence, under the gate too.
    [told] = [line for line in done.output.splitlines() if re.match(r"NIXL (verdict|gate): ", line)][-1:]
    assert re.search(r": FAIL, INTERRUPTED after \d+ of \d+ checks: the run ended at .*: \d+ tests did not run; ", told)
    assert done.output.count("MISSING whole-run:") == len(gate)
    assert "NIXL gate: PASS" not in done.output
    assert done.code == 1


def test_an_etcd_that_never_answers_ends_the_run_before_the_first_row() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = run(*SUITES, env={"NIXL_ETCD_ENDPOINTS": f"http://127.0.0.1:{silent.getsockname()[1]}"}, timeout=300)
    assert "the check 'etcd-answers'" in ended(done)
    assert done.verdicts == {}


def test_an_endpoint_that_only_nixl_cannot_read_ends_the_run_before_the_first_row(tmp_path: Path) -> None:
    """An etcd that our own client reaches is not yet one that NIXL reaches."""
    required = write_profile(tmp_path / "p.toml", "floor = '1 KB/s'", required="['endpoints-well-formed']")
    done = run(*SUITES, f"--nixl-profile={required}", env={"NIXL_ETCD_ENDPOINTS": f"{NOTHING}/"})
    assert "the check 'endpoints-well-formed'" in ended(done)
    assert "FAIL endpoints-healthy" in done.output  # the other checks of the endpoints say what else is wrong
    assert done.verdicts == {}
    assert done.code == 1


def test_keep_going_measures_the_rows_all_the_same() -> None:
    done = run("suites/infrastructure/test_etcd.py", "suites/bandwidth/test_bandwidth.py", "--nixl-blocks=64KiB",
               "--nixl-keep-going", env={"NIXL_ETCD_ENDPOINTS": NOTHING})  # fmt: skip
    assert ended(done) == ""
    assert set(done.verdicts) == {"WRITE 64KiB", "READ 64KiB"}
    assert "ERROR etcd-answers" in done.output
    assert done.code == 1


def test_a_check_that_is_not_required_ends_nothing(tmp_path: Path) -> None:
    required = write_profile(tmp_path / "p.toml", "floor = '1 KB/s'", required="['bandwidth']")
    done = run("suites/infrastructure/test_etcd.py", "suites/bandwidth/test_bandwidth.py", "--nixl-blocks=64KiB",
               f"--nixl-profile={required}", env={"NIXL_ETCD_ENDPOINTS": NOTHING})  # fmt: skip
    assert ended(done) == ""
    assert set(done.verdicts) == {"WRITE 64KiB", "READ 64KiB"}


def test_a_required_check_that_is_the_last_test_ends_nothing() -> None:
    done = run("suites/infrastructure/test_etcd.py::test_etcd_answers", env={"NIXL_ETCD_ENDPOINTS": NOTHING})
    assert ended(done) == ""
    assert "ERROR etcd-answers" in done.output
    assert done.code == 1


def test_infrastructure_runs_first_and_what_is_required_of_it_before_the_rest() -> None:
    done = run("suites", "--collect-only", "-q", "-p", "no:randomly")
    files = [line.partition("::")[0] for line in done.output.splitlines() if line.startswith("suites/")]
    tests = [line for line in done.output.splitlines() if line.startswith("suites/")]
    names = [test.rpartition("::")[2] for test in tests]
    assert names[:4] == [
        "test_etcd_answers", "test_nixl_loads", "test_every_requested_backend_loads", "test_endpoints_are_well_formed",
    ]  # fmt: skip
    endpoints = [file for file in files[3:] if file == "suites/uri_validation/test_deployment.py"]
    assert files[3 : 3 + len(endpoints)] == endpoints
    folders = [file.split("/")[1] for file in files[3 + len(endpoints) :]]
    count = folders.count("infrastructure")
    assert count > 20
    assert set(folders[:count]) == {"infrastructure"}
    # All else is where it was: links vary slowest.
    assert folders[count:] == sorted(folders[count:])


def test_every_rank_ends_with_the_code_of_a_run_that_ended_early(tmp_path: Path) -> None:
    """Two ranks, and hardware that the profile wants and this host lacks: no card carries bytes for NIXL."""
    required = tmp_path / "p.toml"
    required.write_text(
        '[profile]\nname = "test"\n[required]\nchecks = ["rdma-devices"]\n'
        '[machine]\nnics = 4\nnic_rate = "100 Gb/s"\nnic_kind = "efa"\nsource = "made by a test"\n'
        '[[expect]]\nfloor = "1 KB/s"\nsource = "made by a test"\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    options = [*SUITES, f"--nixl-profile={required}", "--nixl-gate", "--nixl-ranks=2", f"--nixl-group=early-{port}",
               f"--nixl-etcd-listen=127.0.0.1:{port}"]  # fmt: skip
    variables = environment(MASTER_ADDR="127.0.0.1", NIXL_GROUP_TOKEN="test")
    ranks = [
        subprocess.Popen(
            command(*options, f"--nixl-rank={rank}"),
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    done = [Finished(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    assert [each.code for each in done] == [1, 1], "\n".join(each.output for each in done)
    assert "the check 'rdma-devices'" in ended(done[0])
    assert done[0].verdicts == {}
    assert "MISSING: whole-run: the run ended at the check 'rdma-devices'" in done[1].output
