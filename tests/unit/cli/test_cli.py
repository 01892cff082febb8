# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl`` judges recorded runs, and prints one sentence if it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import pytest

from pytest_nixl import cli
from pytest_nixl.judge.profiles import Profile, bundled_profiles, load_profile
from pytest_nixl.model.expectation import Machine

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


def nics(count: int, *, rate: float = 12.5e9) -> Machine:
    """Return a host with ``count`` NICs of ``rate`` bytes per second each, four of them for each GPU."""
    return Machine(
        count, rate, gpus=8, gpu="H100", nic_kind="efa", source="made by a test", nics_per_gpu=4 if count > 4 else None
    )


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
    """The command, run in this process with a profile and a machine that the test makes up."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def machine(self, machine: Machine) -> None:
        """Give every profile this machine. Unlike the machine in a file, it is not checked."""

        def profile_named(name: str) -> Profile:
            return replace(load_profile(name), machine=machine)

        self._monkeypatch.setattr("pytest_nixl.cli.profile.load_profile", profile_named)

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str) -> Ended:
        code = cli.main(arguments)
        out, err = self._capsys.readouterr()
        return Ended(code, out, err)

    def judge(self, output: str | Path, *arguments: str, profile: str = PROFILE) -> Ended:
        return self.run("profile", "judge", "--nixlbench", str(output), *arguments, self.file("profile.toml", profile))


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


HUNDRED_MEGABYTES = 100_000_000


def implausible_table() -> str:
    """Return a table with the implausible row that users reported: 100 MB, 284.98 GB/s, 0.26 us, UCX, two nodes."""
    text = P5.read_text().replace(": LIBFABRIC", ": UCX")
    for option in ("start", "max"):
        line = next(line for line in text.splitlines() if f"--{option}_block_size" in line)
        text = text.replace(line, f"{line.rpartition(': ')[0]}: {HUNDRED_MEGABYTES}")
    head, _, _ = text.partition("4096                1 ")
    return head + f"{HUNDRED_MEGABYTES}           1              284.980000     0.3   1.0 1.0 0.1 0.2 0.1 0.2\n"


def fixture(*names: str) -> str:
    return "".join((FIXTURES / "nixlbench" / name).read_text() for name in names)


REPORTED = (
    "IMPLAUSIBLE: UCX WRITE VRAM:VRAM of 100000000B: 285 GB/s (2280 Gb/s) is over the ceiling of 12.5 GB/s (100 Gb/s)"
)
ONE_CARD = (
    "46.9 GB/s (376 Gb/s) is over the ceiling of 12.5 GB/s (100 Gb/s), the line rate of the network cards that one GPU "
    "there reaches\n"
)
UNTIMED = P5_LOGGED.replace("46.948036      1429.4", "inf            0.0   ")
CORRUPT = f"{P5_LOGGED}Consistency check failed for iov 0:0\nConsistency check failed\n"
ERROR = "ERROR nixlbench: nixlbench says: "


@pytest.mark.parametrize(
    ("machine", "text", "changes", "code", "verdicts", "message"),
    [
        (nics(32), P5_LOGGED, {}, 0, "15 PASS", "NIXL verdict: PASS (15 PASS; 15 rows measured)\n"),
        # Rows of 1 MiB and more exceed the 12.5 GB/s of one card. The transport is not logged.
        (nics(1), P5.read_text(), {}, 1, "8 UNKNOWN, 7 IMPLAUSIBLE", ONE_CARD),
        # The expectations of the profile must not hide an implausible row.
        *((nics(1), implausible_table(), {"LIBFABRIC": backend, 'transports = ["efa"]': transports}, 1,
           "1 IMPLAUSIBLE", REPORTED)
          for backend in ("UCX", "LIBFABRIC") for transports in ('transports = ["srd", "rc"]', "")),
        (nics(32), P5.read_text(), {}, 0, "15 UNKNOWN", ""),
        (None, P5_LOGGED, {'["efa"]': '["tcp"]'}, 1, "15 WRONG-TRANSPORT", ""),
        (None, P5_LOGGED, {"0.1 GB/s": "0.3 GB/s"}, 1, "2 FAIL, 13 PASS", ""),
        (None, P5.read_text(), {'floor = "7.5 GB/s"': 'ceiling = "46 GB/s"'}, 1, "14 UNKNOWN, 1 IMPLAUSIBLE",
         "is over the ceiling of 46 GB/s (368 Gb/s) that the profile gives"),
        # From 32 MiB on, one part alone took longer than the limit for the whole transfer.
        (None, P5_LOGGED, {'floor = "7.5 GB/s"': 'floor = "7.5 GB/s"\np99 = "500 us"'}, 1,
         "8 PASS, 5 UNKNOWN, 2 FAIL",
         "the p99 latency of one part of the transfer, 747 us, is 149 % of the bound"),
        (None, fixture("01_normal.rank_a.out"), {}, 0, "15 NO-EXPECTATION", ""),
        (nics(1), fixture("06_posix_write.out"), {}, 0, "15 NO-EXPECTATION", "WRITE  DRAM:FILE"),
        # The cards of one GPU do not limit host memory.
        (nics(32, rate=1e8), fixture("01_normal.rank_a.out"), {}, 0, "15 NO-EXPECTATION", ""),
        (nics(1, rate=1e8), fixture("01_normal.rank_a.out"), {}, 1,
         "2 IMPLAUSIBLE, 1 NO-EXPECTATION, 12 IMPLAUSIBLE", ""),
        # Nor do cards limit a row within a host, or one that may have gone by a transport that the profile accepts.
        (nics(1, rate=1e6), fixture("20_asio.rank_a.out"), {}, 0, "1 NO-EXPECTATION", ""),
        (nics(1, rate=1e6), P5.read_text(), {'["efa"]': '["efa", "cuda_ipc"]'}, 0, "15 UNKNOWN", ""),
        (None, P5_LOGGED[:-100], {}, 1, "14 PASS, 1 MISSING",
         "MISSING LIBFABRIC/WRITE/VRAM:VRAM/64MiB/batch1/depth1/0-1"),
        (None, P5_LOGGED[:-100], {}, 1, "14 PASS, 1 MISSING", "the text ends within a line"),
        (None, UNTIMED, {}, 1, "14 PASS, 1 ERROR", ""),
        (None, CORRUPT, {}, 1, "15 PASS", "CORRUPT nixlbench: nixlbench says: Consistency check failed for iov 0:0"),
        (None, fixture("01_normal.rank_b.out"), {}, 1, "",
         "MISSING bandwidth: nixlbench printed no row: this is the output of rank 1"),
        (None, fixture("03_unresolvable_host.out", "03_unresolvable_host.err"), {}, 1, "",
         f"{ERROR}Failed to acquire lock: the target uri is not valid"),
        (None, fixture("04_etcd_down.err"), {}, 1, "", f"{ERROR}Failed to acquire lock: connections to all"),
        (None, fixture("09_alone.out", "09_alone.err"), {}, 1, "", f"{ERROR}Error in barrier wait"),
        (None, fixture("07_racy_same_rank.rank_a.out", "07_racy_same_rank.rank_b.out"), {}, 1, "",
         f"{ERROR}two processes registered as rank 0 of 2"),
    ],
)  # fmt: skip
def test_each_row_of_an_output_of_nixlbench_has_a_verdict(
    command: Command,
    machine: Machine | None,
    text: str,
    changes: dict[str, str],
    code: int,
    verdicts: str,
    message: str,
) -> None:
    profile = PROFILE
    for old, new in changes.items():
        profile = profile.replace(old, new)
    if machine is not None:
        command.machine(machine)
    ended = command.judge(command.file("run.out", text), profile=profile)
    assert (ended.code, ended.err) == (code, "")
    assert ended.verdicts() == verdicts
    assert message in ended.out
    assert ("    remedy: " in ended.out) >= message.startswith(("ERROR", "MISSING bandwidth"))
    strict = command.judge(command.file("run.out", text), "--gate", profile=profile)
    assert (strict.code, strict.verdicts()) == (int(text != P5_LOGGED or bool(code)), verdicts)
    assert strict.out.splitlines()[-1].startswith(f"NIXL gate: {'FAIL' if strict.code else 'PASS'} (")


@pytest.mark.parametrize(
    ("text", "profile", "code", "verdicts"),
    [
        (P5_LOGGED, "p5.48xlarge", 0, "15 PASS"),
        (P5.read_text(), "a10g-efa100", 1, "8 NO-EXPECTATION, 7 IMPLAUSIBLE"),
        (implausible_table(), "h100-hyperpod", 1, "1 IMPLAUSIBLE"),
    ],
)
def test_recorded_runs_are_judged_by_the_profiles_of_machines(
    command: Command, text: str, profile: str, code: int, verdicts: str
) -> None:
    ended = command.run("profile", "judge", "--nixlbench", command.file("run.out", text), profile)
    assert (ended.code, ended.verdicts()) == (code, verdicts)


def test_an_output_cut_off_at_any_line_never_passes(command: Command) -> None:
    command.machine(nics(32))
    lines = P5_LOGGED.splitlines(keepends=True)
    codes = [command.judge(command.file("cut.out", "".join(lines[:end]))).code for end in range(len(lines))]
    # The first five lines could come from any program. From the sixth on, it is incomplete output of nixlbench.
    assert codes == [2] * 6 + [1] * (len(lines) - 6)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "contains no output of nixlbench: expected the output of its rank 0"),
        (P5.read_text() * 2, "contains 2 tables: expected the output of one run"),
        ("Block Size (B)  Batch Size  B/W (GB/Sec)\n4096 1 1.0\n",
         "contains a table, but no configuration with backend, operation and memory types above it: "
         "expected the whole output of rank 0"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_run_is_refused_in_one_sentence(command: Command, text: str, fault: str) -> None:
    path = command.file("run.out", text)
    assert command.judge(path) == Ended(2, "", f"pytest-nixl: {path} {fault}\n")


def test_an_unreadable_file_is_refused_in_one_sentence(command: Command) -> None:
    missing = str(command.folder / "missing")
    sentence = f"pytest-nixl: {missing} cannot be read (No such file or directory)\n"
    assert command.judge(missing) == Ended(2, "", sentence)
    ended = command.judge(P5, profile="[profile]\n")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    ended = command.run("profile", "show", "nowhere")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("pytest-nixl: there is no profile 'nowhere': expected ")


#: Further tables of a profile, none of which concerns output of nixlbench.
MORE = (
    """
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
    command.machine(nics(32))
    first = 'floor = "0.1 GB/s"\nbatch = [1, 2]\nnotify = ["each"]\nraw = "0.5"'
    second = 'floor = "7.5 GB/s"\nceiling = "50 GB/s"\np50 = "2 ms"\np99 = "3 ms"'
    changed = PROFILE.replace('floor = "0.1 GB/s"', first).replace('floor = "7.5 GB/s"', second) + MORE
    path = command.file("rack.toml", changed)
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
    command.machine(nics(1))
    assert (
        "machine: 1 NIC of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs\n" in command.run("profile", "show", path).out
    )
    output = command.file("p5.out", P5_LOGGED)
    judged = [command.run("profile", "judge", "--nixlbench", output, command.file(name, text)).verdicts()
              for name, text in (("plain.toml", PROFILE), ("more.toml", PROFILE + MORE))]  # fmt: skip
    assert judged[0] == judged[1] != ""


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
