# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl`` judges recorded runs, and prints one sentence if it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nixl import cli
from pytest_nixl.judge.profiles import bundled_profiles, load_profile

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
P5 = FIXTURES / "efa-p5" / "nixlbench-rank0.out"
#: The same output as with NIXL_LOG_LEVEL=info.
P5_LOGGED = "I0523 1 libfabric_rail_manager.cpp:232] Created 4 rails using provider=efa\n" + P5.read_text()

PROFILE = """
[profile]
name = "rack"
summary = "two nodes"

[[expect]]
backend = ["LIBFABRIC"]
op = ["WRITE"]
memory = ["VRAM:VRAM"]
blocks = "4KiB..512KiB"
floor = "0.1 GB/s"
transports = ["efa"]
source = "half of what was recorded"

[[expect]]
backend = ["LIBFABRIC"]
op = ["WRITE"]
memory = ["VRAM:VRAM"]
blocks = "1MiB..1GiB"
floor = "7.5 GB/s"
transports = ["efa"]
source = "half of what was recorded"
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process. Return its exit code, and what it printed on stdout and stderr."""
    return lambda *arguments: (cli.main(arguments), *capsys.readouterr())


def file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def edited(changes: dict[str, str]) -> str:
    """Return the profile with other texts in it."""
    text = PROFILE
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


UNRESOLVED = "".join((FIXTURES / "nixlbench" / f"03_unresolvable_host.{name}").read_text() for name in ("out", "err"))


@pytest.mark.parametrize(
    ("text", "profile", "code", "message", "conclusion"),
    [
        (P5_LOGGED, {}, 0, " efa ", "PASS (15 PASS; 15 rows measured)"),
        (P5.read_text(), "a10g-efa100", 1, "the ceiling of 12.5 GB/s (100 Gb/s)",
         "FAIL (7 IMPLAUSIBLE, 8 NO-EXPECTATION; 15 rows measured)"),
        (P5_LOGGED, {"0.1 GB/s": "0.3 GB/s"}, 1, "the floor of 0.3 GB/s",
         "FAIL (13 PASS, 2 FAIL; 15 rows measured)"),
        (UNRESOLVED, {}, 1, "ERROR nixlbench: nixlbench says: Failed to acquire lock: the target uri is not valid",
         "FAIL (1 ERROR, 1 MISSING; 0 rows measured)"),
    ],
)  # fmt: skip
def test_an_output_of_nixlbench_is_judged_by_a_profile(
    run: Run, tmp_path: Path, text: str, profile: str | dict[str, str], code: int, message: str, conclusion: str
) -> None:
    name = profile if isinstance(profile, str) else file(tmp_path / "profile.toml", edited(profile))
    ended, out, err = run("profile", "judge", "--nixlbench", file(tmp_path / "run.out", text), name)
    assert (ended, out.splitlines()[-1], err) == (code, f"NIXL verdict: {conclusion}", "")
    assert message in out
    assert ("    remedy: " in out) >= message.startswith("ERROR")


def test_an_output_of_two_runs_is_refused_in_one_sentence(run: Run, tmp_path: Path) -> None:
    path = file(tmp_path / "run.out", P5.read_text() * 2)
    sentence = f"pytest-nixl: {path} contains 2 tables: expected the output of one run\n"
    assert run("profile", "judge", "--nixlbench", path, "loopback") == (2, "", sentence)


#: Further tables of a profile.
MORE = (
    """
[machine]
nics = 32
nic_rate = "100 Gb/s"
nics_per_gpu = 4
nic_kind = "efa"
gpus = 8
gpu = "H100"
source = "made by a test"

[required]
checks = ["nixl-loads", "bandwidth"]

[image]
plugins = ["UCX", "LIBFABRIC"]
etcd_uri_patch = false

[versions]
nixl = ">=1.0"
ucx = ">=1.19"

[[bound]]
figure = "kv-request-p50"
op = ["READ"]
tokens = [8192]
at_most = "50 ms"
at_least = "1 ms"
source = "our service level"

[[accept]]
id = "NIXL-ETCD-STALE-KEY"
reason = "no agent dies here"
expires = 2999-01-31

[[reference]]
backend = "UCX"
op = "READ"
memory = "VRAM:VRAM"
blocks = "1MiB"
bandwidth = "280 GB/s"
latency = "0.230 ms"
plausible = false
note = "expected, not measured"
source = """
    + '"""a page\n\n  \nand another"""'
    + """

[[reference]]
p50 = "3 us"
p99 = "4 us"
source = "a log"
"""
)


def test_a_profile_is_shown_with_every_table(run: Run, tmp_path: Path) -> None:
    first = 'floor = "0.1 GB/s"\nbatch = [1, 2]\nnotify = ["each"]\nraw = "0.5"'
    second = 'floor = "7.5 GB/s"\nceiling = "50 GB/s"\np50 = "2 ms"\np99 = "3 ms"'
    text = edited({'floor = "0.1 GB/s"': first, 'floor = "7.5 GB/s"': second}) + MORE
    path = file(tmp_path / "rack.toml", text)
    assert run("profile", "show", path) == (
        0,
        f"""rack: two nodes
from {path}
required checks: nixl-loads, bandwidth
machine: 32 NICs of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs, 4 of the NICs for each GPU
    source: made by a test
plugins that must load: UCX, LIBFABRIC
etcd's client library must not skip the validation of addresses
versions: NIXL >=1.0; UCX >=1.19

LIBFABRIC WRITE VRAM:VRAM 4KiB..512KiB batch 1,2 notify each pages huge
    at least 0.1 GB/s (0.8 Gb/s), over efa, raw: at least 50 % of what the raw tool moves
    source: half of what was recorded

LIBFABRIC WRITE VRAM:VRAM 1MiB..1GiB
    at least 7.5 GB/s (60 Gb/s), at most 50 GB/s (400 Gb/s), p50 at most 2000 us, p99 at most 3000 us, over efa
    source: half of what was recorded

kv-request-p50 of any backend, op READ, any memory, any way, any model, tokens 8192
    at most 50 ms, at least 1 ms
    source: our service level
accepted until 2999-01-31: NIXL-ETCD-STALE-KEY: no agent dies here

for reference only: UCX READ VRAM:VRAM 1MiB: 280 GB/s (2240 Gb/s), latency 230 us (implausible)
    expected, not measured
    source: a page
    source: and another

for reference only: any backend any operation any memory: p50 3 us, p99 4 us
    source: a log
""",
        "",
    )
    single = MORE.replace("nics = 32", "nics = 1").replace("nics_per_gpu = 4\n", "")
    _, shown, _ = run("profile", "show", file(tmp_path / "single.toml", PROFILE + single))
    assert "machine: 1 NIC of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs\n" in shown


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_bundled_profile_is_shown(run: Run, name: str) -> None:
    code, out, err = run("profile", "show", name)
    assert (code, err) == (0, "")
    profile = load_profile(name)
    assert out.startswith(f"{name}: {profile.summary}\nfrom {name}.toml of pytest-nixl\n")
    assert out.count("\nfor reference only: ") == len(profile.references)
    assert ("\nmachine: " in out) is (profile.machine is not None)


@pytest.mark.long
def test_the_command_runs_as_a_program_and_reports_a_closed_pipe_in_one_sentence() -> None:
    command = [sys.executable, "-m", "pytest_nixl", "profile", "show", "loopback"]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.startswith(
        "loopback:"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=300)
    finally:
        os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr.count(b"\n") == 1  # one sentence, and no traceback
