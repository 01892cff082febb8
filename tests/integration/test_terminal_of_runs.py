# SPDX-License-Identifier: Apache-2.0
"""The terminal of real runs: the cause of a failure comes first, and the command that repeats it runs as printed."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, environment, profile, run, undisturbed

BANDWIDTH = "suites/bandwidth/test_bandwidth.py"
DEPLOYMENT = "suites/uri_validation/test_deployment.py"
ENVIRONMENT = "suites/infrastructure/test_machine.py"
ONE_ROW = ("--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-duration=20ms")

#: Arguments and environment of a run with a fault, and what its cause is in the report's words.
PLANTED: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "wrong transport": ((BANDWIDTH, *ONE_ROW), {"UCX_TLS": "tcp"}, r"WRONG-TRANSPORT: UCX WRITE .* went over tcp/"),
    "slow": ((BANDWIDTH, *ONE_ROW, "--nixl-profile={slow}"), {}, r"FAIL: UCX WRITE .* the p99 latency of "),
    "dead etcd": (("suites/infrastructure/test_etcd.py", "--nixl-etcd=http://127.0.0.1:1"), {}, r"etcd.*127\.0\.0\.1"),
    "https": ((DEPLOYMENT, "--nixl-etcd=https://127.0.0.1:2379"), {}, r"https://127\.0\.0\.1:2379"),
    "unknown transport": (
        ("suites/infrastructure/test_machine.py",),
        {"UCX_TLS": "nonsense"},
        r"UCX_TLS=nonsense|'nonsense'",
    ),
}


def wrapped(lines: list[str], width: int = 80) -> int:
    """Return how many lines a terminal of this width shows."""
    return sum(max(1, math.ceil(len(line) / width)) for line in lines)


def by_package(argument: str) -> tuple[str, ...]:
    """Return an argument as a user types it who has no clone: with ``--pyargs`` and the module of a suite's file."""
    if not argument.startswith("suites/"):
        return (argument,)
    return ("--pyargs", f"pytest_nixl.{argument.removesuffix('.py').replace('/', '.')}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "is_clone"),
    # How a suite is named in the command does not depend on the fault: of a row and of a check it is asked once.
    [*((fault, True) for fault in PLANTED), ("wrong transport", False), ("https", False)],
)
def test_the_cause_is_in_the_first_five_lines_after_the_dots_and_its_repeat_command_runs(
    fault: str, is_clone: bool, tmp_path: Path
) -> None:
    options, env, cause = PLANTED[fault]
    directory = ROOT if is_clone else tmp_path
    slow = profile(tmp_path / "slow.toml", "p99 = '1 ns'")
    text = [option.replace("{slow}", slow) for option in options]
    arguments = text if is_clone else [part for argument in text for part in by_package(argument)]
    done = run(*arguments, "--nixl-backend=UCX", env=env, directory=directory, quiet=False)
    assert done.code == 1, done.output
    lines = done.output.splitlines()
    letters = re.compile(r"(\S+ )?[.sFE]+( +\[ *\d+%\])?")
    *_, dots = (number for number, line in enumerate(lines) if letters.fullmatch(line))
    title, *first = [line for line in lines[dots + 1 :] if line][:6]
    assert title.strip("= ") == "NIXL: what is wrong, and what to do", done.output
    assert re.search(cause, "\n".join(first)), done.output
    assert not re.search("= (?:FAILURES|ERRORS) =", done.output), "pytest does not repeat what the report says"
    [repeat, *_] = [line.partition("repeat: ")[2] for line in lines if line.strip().startswith("repeat: ")]
    program, *repeated = shlex.split(repeat)
    assert program == "pytest"
    if fault == "https":  # the program itself, of a clone and of an installed package
        executed = subprocess.run(
            [str(Path(sys.executable).with_name(program)), "-p", "no:cacheprovider", *repeated],
            cwd=directory, env=environment(**env), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        again = Finished(executed.returncode, executed.stdout + executed.stderr)
    else:
        again = run(*repeated, env=env, directory=directory, quiet=False)
    assert again.code == 1, again.output
    assert re.search(cause, again.output), again.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "most"),
    [
        # The parts and the table of the default run. The lines of dots, one for each file, are not counted.
        pytest.param(("--nixl-level=quick", "--nixl-blocks=4KiB..64MiB"), 38, id="quick"),
        pytest.param((), 45, id="default", marks=pytest.mark.whole),
    ],
)
@pytest.mark.alone  # beside other tests a row's windows may differ too much for PASS
def test_a_healthy_run_of_all_suites_fits_on_a_screen(options: tuple[str, ...], most: int) -> None:
    """A slow machine has a line for each row that takes 10 s, and the dots go on in the line after it."""
    done = run("--nixl-backend=UCX", *options, quiet=False, **undisturbed({"COLUMNS": "80"}))
    assert done.code == 0, done.output
    lines = done.output.splitlines()
    assert "NIXL verdict: PASS (" in done.output, done.output
    assert len(re.findall(r"^ *\d+[KM]iB +[\d.]", done.output, re.MULTILINE)) == 15, done.output
    progress = [line for line in lines if line.startswith("row ") or line == "still running..."]
    dots = [line for line in lines if re.search(r"\[ *\d+%\]$", line)]
    shown = [line for line in lines if line not in (*progress, *dots)]
    assert wrapped(shown) <= most + len(progress), done.output
    # Two of them are as long as the environment makes them. The default run leaves out one level, not two.
    longer = ("plugins: ", "pytest-nixl ", *(re.findall(r"^\d+ checks of level standard", done.output, re.MULTILINE)))
    assert [line for line in shown if len(line) > 80 and not line.startswith(longer)] == []
