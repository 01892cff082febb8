# SPDX-License-Identifier: Apache-2.0
"""The plugin together with xdist, rerunfailures, timeout, randomly, repeat, cov, asyncio and html."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, run
from helpers.pytester_run import run_pytest

from pytest_nixl.store.store import Store

ROW = (BANDWIDTH, "--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-duration=20ms")

FLAKY = """
import asyncio
from pathlib import Path

import pytest

COUNT = Path(__file__).with_name("count")

@pytest.mark.nixl_check("flaky")
@pytest.mark.MARK
def test_flaky(nixl_settings):
    attempt = len(COUNT.read_text()) if COUNT.exists() else 0
    COUNT.write_text("x" * (attempt + 1))
    assert attempt, "the planted fault"

@pytest.mark.nixl_check("steady")
@pytest.mark.asyncio
async def test_steady(nixl_settings):
    await asyncio.sleep(0)
"""


def test_rows_are_measured_with_all_plugins(tmp_path: Path) -> None:
    done = run(
        *ROW, "--count=2", "--timeout=300", "--cov=pytest_nixl", "--cov-report=", f"--html={tmp_path}/r.html",
        f"--nixl-store={tmp_path}/store", f"--junit-xml={tmp_path}/r.xml", env={"COVERAGE_FILE": f"{tmp_path}/cover"},
    )  # fmt: skip
    assert re.search(r"^NIXL verdict: \S.*; 2 rows measured\)$", done.output, re.M), done.output
    assert done.code == 0, done.output
    assert "2 measurements of 1 rows: the record has the last one of each row" in done.output
    assert "UCX : UCX" not in done.output
    (stored,), skipped = Store(tmp_path / "store").runs()
    assert (len(stored.rows), skipped) == (1, [])
    assert (tmp_path / "r.html").exists()


def test_rows_keep_their_order_and_their_names_when_they_are_shuffled(tmp_path: Path) -> None:
    """And JUnit's class names do not depend on where the suites are."""
    names = []
    for seed in ("no:randomly", "randomly"):
        file = tmp_path / f"{seed[:2]}.xml"
        done = run(
            BANDWIDTH,
            "--nixl-duration=20ms",
            "--nixl-blocks=64KiB,128KiB,256KiB",
            "-p",
            seed,
            "-v",
            f"--junit-xml={file}",
        )
        shown = re.findall(r"^UCX +(\S+) +DRAM:DRAM +(\S+)", done.output, re.M)
        names.append(shown)
        assert set(re.findall('classname="([^"]*)"', file.read_text())) == {
            "pytest_nixl.suites.bandwidth.test_bandwidth"
        }
    assert len(names[0]) >= 3
    assert names[0] == names[1]


def test_a_check_that_pytest_timeout_ended_has_a_remedy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import time, pytest\n@pytest.mark.nixl_check('mine')\ndef test_it(nixl_settings): time.sleep(60)"
    )
    done = run_pytest(pytester, "--timeout=0.5")
    done.stdout.fnmatch_lines(["FAIL mine: Timeout*", "    remedy: Give the test more time: --timeout=SECONDS*"])


def test_checks_run_in_parallel_and_in_any_order_with_all_plugins(tmp_path: Path) -> None:
    done = run(
        "suites/infrastructure/test_nixl.py", "-n", "2", "--timeout=300", "--reruns=1", f"--html={tmp_path}/r.html",
        "-p", "randomly",
    )  # fmt: skip
    assert "NIXL verdict: PASS" in done.output
    assert "INTERRUPTED" not in done.output
    assert done.code == 0, done.output


def test_a_row_that_fails_in_every_rerun_fails(tmp_path: Path) -> None:
    done = run(*ROW, "--reruns=1", "-v", env={"UCX_TLS": "tcp"})
    assert "INTERNALERROR" not in done.output
    assert "NIXL verdict: FAIL (1 WRONG-TRANSPORT; 1 row measured)" in done.output
    assert "1 failed, 1 rerun" in done.output
    assert done.code == 1


@pytest.mark.parametrize(
    ("mark", "arguments"),
    [("plain", ("--reruns=2",)), ("flaky(reruns=2)", ()), ("plain", ("--reruns=2", "-n", "2"))],
    ids=["option", "mark", "xdist"],
)
def test_a_rerun_that_passes_is_inconclusive(tmp_path: Path, mark: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY.replace("MARK", mark))
    done = run(str(tmp_path), "--nixl-op=WRITE", *arguments, directory=tmp_path)
    assert "NIXL verdict: PASS, with warnings (1 PASS, 1 INCONCLUSIVE; 0 rows measured)" in done.output
    assert "INCONCLUSIVE flaky: the first attempt was FAIL (the planted fault" in done.output
    assert "), and attempt 2 was PASS" in done.output
    assert done.code == 0


@pytest.mark.parametrize(
    ("mark", "arguments", "message"),
    [
        ("plain", ("--reruns=2",), "--nixl-gate is refused with --reruns: a failed check would be repeated"),
        ("plain", ("-o", "reruns=2"), "--nixl-gate is refused with reruns = 2 in the ini file"),
        ("flaky(reruns=2)", (), "test_flaky, which is marked flaky: it would be repeated until it passes"),
    ],
    ids=["option", "ini", "mark"],
)
def test_the_gate_refuses_reruns(tmp_path: Path, mark: str, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY.replace("MARK", mark))
    done = run(str(tmp_path), "--nixl-gate", *arguments, directory=tmp_path)
    assert message in done.output
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert not (tmp_path / "count").exists()
