# SPDX-License-Identifier: Apache-2.0
"""The infrastructure suite runs first, and a failed required check of it ends the run on every rank."""

from __future__ import annotations

import re
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import Finished, run
from helpers.cli_run import profile as write_profile

from pytest_nixl.session.preconditions import Preconditions
from pytest_nixl.session.run import LiveRecord

#: Nothing listens on port 1.
NOTHING = "http://127.0.0.1:1"
#: The rows come first on the command line.
SUITES = ("suites/bandwidth/test_bandwidth.py", "suites/infrastructure", "suites/uri_validation/test_deployment.py",
          "--nixl-blocks=64KiB")  # fmt: skip


def processor_seconds() -> float:
    """Return the seconds of CPU time that this process's ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ended(done: Finished) -> str:
    """Return the reason with which pytest stopped."""
    match = re.search(r"^!+ (the run ended because the check .*) !+$", done.output, re.MULTILINE)
    return match[1] if match else ""


@pytest.mark.long
def test_an_unreachable_etcd_ends_the_run_before_the_first_row() -> None:
    began, worked = time.monotonic(), processor_seconds()
    done = run(*SUITES, "--nixl-gate", env={"NIXL_ETCD_ENDPOINTS": NOTHING})
    # CPU time depends little on contention. The wall-clock limit shows that nothing waits for a deadline.
    assert processor_seconds() - worked < 30
    assert time.monotonic() - began < 300
    assert "the check 'etcd-answers' failed, which the profile 'loopback' requires" in ended(done)
    assert ended(done).endswith(f"etcd at {NOTHING}: connection refused, nothing listens there")
    assert done.verdicts == {}
    # The tests that did not run are one sentence.
    [last_line] = [line for line in done.output.splitlines() if line.startswith("NIXL gate: ")][-1:]
    assert re.search(
        r": FAIL, INTERRUPTED after \d+ of \d+ checks: the run ended because .*: \d+ tests did not run; ", last_line
    )
    assert done.output.count("MISSING whole-run:") == 1
    assert "NIXL gate: PASS" not in done.output
    assert done.code == 1


@pytest.mark.long
def test_every_rank_ends_with_the_code_of_a_run_that_ended_early(tmp_path: Path) -> None:
    """Two ranks, with a profile that requires RDMA devices, which this host does not have."""
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
    variables = {"MASTER_ADDR": "127.0.0.1", "NIXL_GROUP_TOKEN": "test"}
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(run, "--nixl-lease=120s", *options, f"--nixl-rank={rank}", env=variables, timeout=400)
            for rank in range(2)
        ]
        done = [rank.result() for rank in ranks]
    assert [process.code for process in done] == [1, 1], "\n".join(process.output for process in done)
    assert "the check 'rdma-devices'" in ended(done[0])
    assert done[0].verdicts == {}
    assert "MISSING: whole-run: the run ended because the check 'rdma-devices'" in done[1].output


#: Tests by name, in the order of the command line: suite, file and check.
ITEMS = {
    "row": ("bandwidth", "test_bandwidth.py", "bandwidth"),
    "cores": ("infrastructure", "test_machine.py", "cores"),
    "form": ("uri_validation", "test_deployment.py", "endpoints-well-formed"),
    "etcd": ("infrastructure", "test_etcd.py", "etcd-answers"),
    "health": ("uri_validation", "test_deployment.py", "endpoints-healthy"),
    "nixl": ("infrastructure", "test_nixl.py", "nixl-imports"),
    "other": ("uri_validation", "test_corpus.py", ""),
}


REQUIRED = ("etcd-answers", "nixl-imports", "endpoints-well-formed", "endpoints-healthy", "bandwidth")


@pytest.mark.parametrize(
    ("required", "unused", "order"),
    [
        (REQUIRED, "", "nixl etcd form health cores row other"),
        # The endpoint checks run early only if one of them is required, and the etcd only if it is.
        (("etcd-answers", "bandwidth"), "", "etcd cores nixl row form health other"),
        (("endpoints-healthy",), "", "form health cores etcd nixl row other"),
        *((REQUIRED, unused, " ".join(ITEMS)) for unused in ("used", "parallel", "usable")),
    ],
)
def test_what_the_profile_requires_runs_first(
    tmp_path: Path, required: tuple[str, ...], unused: str, order: str
) -> None:
    run = a_run(tmp_path, required)
    if unused:
        setattr(run.collected if unused == "used" else run, unused, unused == "parallel")
    tests = list(items())
    Preconditions(run).pytest_collection_modifyitems(cast(Any, SimpleNamespace()), tests)
    assert [item.nodeid for item in tests] == order.split()


def a_run(folder: Path, required: tuple[str, ...] = REQUIRED, *, keep_going: bool = False) -> Any:
    path = write_profile(folder / "p.toml", "floor = '1 KB/s'", required=str(list(required)))
    return SimpleNamespace(
        collected=SimpleNamespace(used=True), parallel=False, usable=True, record=LiveRecord(),
        settings=SimpleNamespace(profile=str(path), keep_going=keep_going),
    )  # fmt: skip


def items() -> Iterator[Any]:
    for name, (suite, file, check) in ITEMS.items():
        marker = SimpleNamespace(args=(check, "quick")) if check else None
        path = Path("suites", suite, file)
        yield SimpleNamespace(nodeid=name, path=path, get_closest_marker=lambda _, marker=marker: marker)


ALL = tuple(ITEMS)


@pytest.mark.parametrize(
    ("selected", "failed", "keep_going", "last", "check", "text"),
    [
        (ALL, "cores row", False, "other", "", ""),
        (ALL, "nixl etcd", False, "nixl", "nixl", "6 tests did not run; see above"),
        (ALL, "etcd", False, "etcd", "etcd-answers", "5 tests did not run; it does not answer"),
        (ALL, "form health", False, "health", "form", "3 tests did not run; see above"),
        (ALL, "etcd form", True, "other", "", ""),
        (("nixl", "row"), "nixl", False, "nixl", "nixl", "1 test did not run; see above"),
        (("nixl",), "nixl", False, "nixl", "", ""),
    ],
)
def test_only_a_required_check_that_fails_ends_the_run(
    tmp_path: Path, selected: tuple[str, ...], failed: str, keep_going: bool, last: str, check: str, text: str
) -> None:
    run, session = a_run(tmp_path, keep_going=keep_going), SimpleNamespace(shouldfail="")
    tests = [item for item in items() if item.nodeid in selected]
    plugin = Preconditions(run)
    plugin.pytest_collection_modifyitems(cast(Any, session), tests)
    ended = ""
    for ended in (item.nodeid for item in tests):
        report = SimpleNamespace(nodeid=ended, failed=ended in failed.split())
        if ended == "etcd":
            report.nixl_result = SimpleNamespace(check="etcd-answers", reason="it does not answer")
        plugin.pytest_runtest_logreport(cast(Any, report))
        plugin.pytest_runtest_logfinish(ended)
        if session.shouldfail:
            break
    assert ended == last
    reason = f"the run ended because the check {check!r} failed, which the profile {run.settings.profile!r} requires: "
    assert session.shouldfail == (f"{reason}{text}" if check else "")
    assert run.record.ended == session.shouldfail.partition("; ")[0]
