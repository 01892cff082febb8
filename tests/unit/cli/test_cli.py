# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl`` judges recorded runs, and prints one sentence if it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
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


@dataclass(frozen=True)
class Ended:
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str

    def verdicts(self) -> str:
        """Return the verdicts of the rows in their order, such as ``2 FAIL, 13 PASS``."""
        rows = [line.split()[-1] for line in self.out.splitlines() if line.startswith(("LIBFABRIC ", "UCX ", "POSIX "))]
        return ", ".join(f"{len([*alike])} {verdict}" for verdict, alike in groupby(rows))


class Command:
    """The command, run in this process with files that the test makes up."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = tmp_path
        self._capsys = capsys

    def file(self, name: str, text: str) -> str:
        path = self._folder / name
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str) -> Ended:
        code = cli.main(arguments)
        out, err = self._capsys.readouterr()
        return Ended(code, out, err)


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def edited(changes: dict[str, str]) -> str:
    """Return the profile with other texts in it."""
    text = PROFILE
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


UNRESOLVED = "".join((FIXTURES / "nixlbench" / f"03_unresolvable_host.{name}").read_text() for name in ("out", "err"))


@pytest.mark.parametrize(
    ("text", "profile", "code", "verdicts", "message"),
    [
        (P5_LOGGED, {}, 0, "15 PASS", "NIXL verdict: PASS (15 PASS; 15 rows measured)\n"),
        (P5.read_text(), "a10g-efa100", 1, "8 NO-EXPECTATION, 7 IMPLAUSIBLE", "the ceiling of 12.5 GB/s (100 Gb/s)"),
        (P5_LOGGED, {"0.1 GB/s": "0.3 GB/s"}, 1, "2 FAIL, 13 PASS", ""),
        (UNRESOLVED, {}, 1, "",
         "ERROR nixlbench: nixlbench says: Failed to acquire lock: the target uri is not valid"),
    ],
)  # fmt: skip
def test_each_row_of_an_output_of_nixlbench_has_a_verdict(
    command: Command, text: str, profile: str | dict[str, str], code: int, verdicts: str, message: str
) -> None:
    name = profile if isinstance(profile, str) else command.file("profile.toml", edited(profile))
    ended = command.run("profile", "judge", "--nixlbench", command.file("run.out", text), name)
    assert (ended.code, ended.verdicts(), ended.err) == (code, verdicts, "")
    assert message in ended.out
    assert ("    remedy: " in ended.out) >= message.startswith("ERROR")


def test_an_output_of_two_runs_is_refused_in_one_sentence(command: Command) -> None:
    path = command.file("run.out", P5.read_text() * 2)
    ended = command.run("profile", "judge", "--nixlbench", path, "loopback")
    assert ended == Ended(2, "", f"pytest-nixl: {path} contains 2 tables: expected the output of one run\n")


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


def test_a_profile_is_shown_with_every_table(command: Command) -> None:
    first = 'floor = "0.1 GB/s"\nbatch = [1, 2]\nnotify = ["each"]\nraw = "0.5"'
    second = 'floor = "7.5 GB/s"\nceiling = "50 GB/s"\np50 = "2 ms"\np99 = "3 ms"'
    text = edited({'floor = "0.1 GB/s"': first, 'floor = "7.5 GB/s"': second}) + MORE
    path = command.file("rack.toml", text)
    assert command.run("profile", "show", path) == Ended(
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
    shown = command.run("profile", "show", command.file("single.toml", PROFILE + single)).out
    assert "machine: 1 NIC of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs\n" in shown


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_bundled_profile_is_shown(command: Command, name: str) -> None:
    ended = command.run("profile", "show", name)
    assert (ended.code, ended.err) == (0, "")
    profile = load_profile(name)
    assert ended.out.startswith(f"{name}: {profile.summary}\nfrom {name}.toml of pytest-nixl\n")
    assert ended.out.count("\nfor reference only: ") == len(profile.references)
    assert ("\nmachine: " in ended.out) is (profile.machine is not None)


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
