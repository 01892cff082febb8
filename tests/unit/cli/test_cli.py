# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl`` judges recorded runs, and prints one sentence if it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_nixl import cli
from pytest_nixl.judge.profiles import Profile, bundled_profiles, load_profile
from pytest_nixl.model.machine import Machine

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
P5 = FIXTURES / "efa-p5" / "nixlbench-rank0.out"
COUNTERS = tuple(str(FIXTURES / "efa-p5" / f"efa-counters-{when}.txt") for when in ("before", "after"))
RAILS = ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")

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

    def verdicts(self) -> list[str]:
        return [line.split()[-1] for line in self.out.splitlines() if line.startswith(("LIBFABRIC ", "UCX ", "POSIX "))]


class Command:
    """The command, run in this process with a profile and a machine that the test makes up."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def machine(self, machine: Machine) -> None:
        """Give every profile this machine. Unlike the machine in a file, it is not checked."""

        def found(name: str) -> Profile:
            return replace(load_profile(name), machine=machine)

        self._monkeypatch.setattr("pytest_nixl.cli.profile.load_profile", found)

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


def test_the_recorded_p5_run_passes_and_names_its_four_rails(command: Command) -> None:
    command.machine(nics(32))
    ended = command.judge(P5, "--gate", "--counters", *COUNTERS)
    assert (ended.code, ended.err) == (0, "")
    assert ended.verdicts() == ["PASS"] * 15
    assert "counters: 4 devices carried 11,592,663,040 bytes, exactly the payload\n" in ended.out
    for rail in RAILS:
        assert f"counters: {rail} of node-b carried 2,898,165,760 bytes\n" in ended.out
    assert "rdmap96s0" not in ended.out
    assert "node-a" not in ended.out
    assert (
        "utilisation: 46.9 GB/s (376 Gb/s) with blocks of 64MiB is 94 % of 50 GB/s (400 Gb/s), the line rate of the "
        "4 devices that carried it "
        "(rdmap79s0 of node-b, rdmap80s0 of node-b, rdmap81s0 of node-b, rdmap82s0 of node-b)\n"
    ) in ended.out
    assert "efa/rdmap79s0+efa/rdmap80s0+efa/rdmap81s0+efa/rdmap82s0" in ended.out
    assert ended.out.endswith("NIXL gate: PASS (16 PASS; 15 rows measured)\n")


@pytest.mark.parametrize("counters", [(), ("--counters", *COUNTERS)], ids=["table alone", "with counters"])
def test_the_same_table_is_implausible_for_one_rail(command: Command, counters: tuple[str, ...]) -> None:
    command.machine(nics(1))
    ended = command.judge(P5, *counters)
    assert ended.code == 1
    below = "PASS" if counters else "UNKNOWN"
    # Rows of 1 MiB and more exceed the 12.5 GB/s of one rail.
    assert ended.verdicts() == [below] * 8 + ["IMPLAUSIBLE"] * 7
    why = "the one network card that the profile knows, although 4 devices carried it"
    if not counters:
        why = "the network cards that one GPU there reaches"
    assert f"46.9 GB/s (376 Gb/s) is over the ceiling of 12.5 GB/s (100 Gb/s), the line rate of {why}\n" in ended.out


def test_counters_that_show_one_rail_make_the_table_implausible(command: Command) -> None:
    command.machine(nics(32))
    texts = []
    for path in COUNTERS:
        lines = Path(path).read_text().splitlines()
        kept = [line for line in lines if not line.startswith(RAILS[1:])]
        texts.append(command.file(Path(path).name, "\n".join(kept) + "\n"))
    ended = command.judge(P5, "--counters", *texts)
    assert ended.code == 1
    assert ended.verdicts() == ["UNKNOWN"] * 8 + ["IMPLAUSIBLE"] * 7
    assert "8,694,497,280 bytes" in ended.out
    assert "of 12.5 GB/s (100 Gb/s), the line rate of the device that carried it (rdmap79s0 of node-b)" in ended.out


HUNDRED_MEGABYTES = 100_000_000


def implausible_table() -> str:
    """Return a table with the implausible row that users reported: 100 MB, 284.98 GB/s, 0.26 us, UCX, two nodes."""
    text = P5.read_text().replace(": LIBFABRIC", ": UCX")
    for option in ("start", "max"):
        line = next(line for line in text.splitlines() if f"--{option}_block_size" in line)
        text = text.replace(line, f"{line.rpartition(': ')[0]}: {HUNDRED_MEGABYTES}")
    head, _, _ = text.partition("4096                1 ")
    return head + f"{HUNDRED_MEGABYTES}           1              284.980000     0.3   1.0 1.0 0.1 0.2 0.1 0.2\n"


@pytest.mark.parametrize("transports", ['transports = ["srd", "rc"]', ""])
@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
def test_the_reported_row_is_implausible_on_one_adapter(command: Command, transports: str, backend: str) -> None:
    command.machine(nics(1))
    profile = PROFILE.replace("LIBFABRIC", backend).replace('transports = ["efa"]', transports)
    ended = command.judge(command.file("seeds.out", implausible_table()), profile=profile)
    assert ended.code == 1
    # The expectations of the profile must not hide an implausible row.
    assert ended.verdicts() == ["IMPLAUSIBLE"]
    assert (
        "IMPLAUSIBLE: UCX WRITE VRAM:VRAM of 100000000B: 285 GB/s (2280 Gb/s) is over the ceiling of "
        "12.5 GB/s (100 Gb/s)"
    ) in ended.out


def test_the_transport_is_unknown_without_counters(command: Command) -> None:
    command.machine(nics(32))
    loose, strict = command.judge(P5), command.judge(P5, "--gate")
    assert (loose.code, strict.code) == (0, 1)
    assert loose.verdicts() == strict.verdicts() == ["UNKNOWN"] * 15
    assert "counters: none given, " in loose.out
    assert "utilisation" not in loose.out


def test_unchanged_counters_are_a_wrong_transport(command: Command) -> None:
    ended = command.judge(P5, "--counters", COUNTERS[0], COUNTERS[0])
    assert ended.code == 1
    assert "WRONG-TRANSPORT counters: no device carried it" in ended.out


@pytest.mark.parametrize(
    ("transports", "counters", "rows"),
    [
        ('["efa"]', "WRONG-TRANSPORT", "WRONG-TRANSPORT"),
        ('["efa", "efa-emulated"]', "PASS", "PASS"),
        ("", "WARN", "PASS"),
    ],
)
def test_a_write_without_rdma_bytes_is_emulated(command: Command, transports: str, counters: str, rows: str) -> None:
    # The recording with an unchanged RDMA counter: it stands for a run whose writes libfabric emulated by messages.
    before, after = (Path(path).read_text().splitlines() for path in COUNTERS)
    still = {line.split()[0]: line.split()[3] for line in before[1:7]}
    changed = [
        " ".join([*line.split()[:3], still[line.split()[0]], *line.split()[4:]]) if 0 < number < 7 else line
        for number, line in enumerate(after)
    ]
    wanted = f"transports = {transports}" if transports else ""
    texts = COUNTERS[0], command.file("after.txt", "\n".join(changed) + "\n")
    ended = command.judge(P5, "--counters", *texts, profile=PROFILE.replace('transports = ["efa"]', wanted))
    assert ended.verdicts() == [rows] * 15
    assert ended.code == int(rows != "PASS")
    assert "counters: WRITE was emulated by send and receive: 4 EFA devices" in ended.out
    assert (f"\n{counters} counters: WRITE was emulated" in ended.out) is (counters != "PASS")
    assert "efa-emulated/rdmap79s0+efa-emulated/rdmap80s0" in ended.out
    assert "counters: rdmap79s0 of node-b carried 2,898,743,384 bytes\n" in ended.out


def test_counters_that_decrease_are_named_and_prove_nothing(command: Command) -> None:
    ended = command.judge(P5, "--counters", *reversed(COUNTERS))
    assert ended.verdicts() == ["UNKNOWN"] * 15
    assert "UNKNOWN counters: no device carried it" in ended.out
    assert "counters: rdmap79s0 of node-b: rdma_write_bytes fell from 2677846915480 to 2674948749720" in ended.out


def test_a_transport_that_the_profile_does_not_accept_is_wrong(command: Command) -> None:
    ended = command.judge(P5, "--counters", *COUNTERS, profile=PROFILE.replace('["efa"]', '["tcp"]'))
    assert ended.code == 1
    assert ended.verdicts() == ["WRONG-TRANSPORT"] * 15


def test_a_row_below_its_floor_fails(command: Command) -> None:
    ended = command.judge(P5, "--counters", *COUNTERS, profile=PROFILE.replace("0.1 GB/s", "0.2 GB/s"))
    assert ended.code == 1
    assert ended.verdicts() == ["FAIL"] + ["PASS"] * 14


def test_a_row_over_the_ceiling_of_the_profile_is_implausible(command: Command) -> None:
    ended = command.judge(P5, profile=PROFILE.replace('floor = "7.5 GB/s"', 'ceiling = "46 GB/s"'))
    assert ended.verdicts() == ["UNKNOWN"] * 14 + ["IMPLAUSIBLE"]
    assert "is over the ceiling of 46 GB/s (368 Gb/s) that the profile gives" in ended.out


def test_latency_limits_are_judged_if_the_table_has_the_figure(command: Command) -> None:
    bounded = PROFILE.replace('floor = "7.5 GB/s"', 'floor = "7.5 GB/s"\np99 = "500 us"')
    ended = command.judge(P5, "--counters", *COUNTERS, profile=bounded)
    # From 32 MiB on, one part alone took longer than the limit for the whole transfer.
    assert ended.verdicts() == ["PASS"] * 8 + ["UNKNOWN"] * 5 + ["FAIL"] * 2
    assert "the p99 latency of one part of the transfer, 747 us, is 149 % of the bound" in ended.out


def test_rows_without_an_expectation_have_their_own_verdict(command: Command) -> None:
    ended = command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out")
    assert (ended.code, ended.verdicts()) == (0, ["NO-EXPECTATION"] * 15)
    assert command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out", "--gate").code == 1


def test_rows_of_files_are_not_judged_by_the_network(command: Command) -> None:
    command.machine(nics(1))
    ended = command.judge(FIXTURES / "nixlbench" / "06_posix_write.out", "--counters", *COUNTERS)
    assert ended.verdicts() == ["NO-EXPECTATION"] * 15
    assert "POSIX      WRITE  DRAM:FILE" in ended.out or "POSIX    WRITE  DRAM:FILE" in ended.out
    assert "POSIX moves bytes to storage" in ended.out


def test_the_nics_of_one_gpu_do_not_limit_host_memory(command: Command) -> None:
    command.machine(nics(32, rate=1e8))
    assert command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out").verdicts() == ["NO-EXPECTATION"] * 15
    command.machine(nics(1, rate=1e8))
    assert "IMPLAUSIBLE" in command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out").verdicts()


def test_the_ceiling_applies_to_the_sum_of_all_initiators(command: Command) -> None:
    # 4096 bytes: 0.056 GB/s of rank 0, 0.315 of both; (160 + 16) transfers of each of two initiators.
    command.machine(nics(1, rate=1e9 / 10))
    payload = 2 * (160 + 16) * (4096 + 8192 + 16384)
    before = command.file("before", "rdmap1s0 tx_bytes=0 rdma_write_bytes=0 rdma_read_bytes=0\n")
    after = command.file("after", f"rdmap1s0 tx_bytes={payload} rdma_write_bytes={payload} rdma_read_bytes=0\n")
    ended = command.judge(FIXTURES / "nixlbench" / "13_four_ranks.rank_a.out", "--counters", before, after)
    assert ended.verdicts() == ["IMPLAUSIBLE", "NO-EXPECTATION", "IMPLAUSIBLE"]
    assert "0.315 GB/s (2.52 Gb/s) of all initiators together is over the ceiling of 0.1 GB/s" in ended.out


@pytest.mark.parametrize(
    ("backend", "counter", "transport"),
    [
        ("LIBFABRIC", "rdmap1s0 tx_bytes={0} rdma_write_bytes={0} rdma_read_bytes=0", "efa/rdmap1s0"),
        ("UCX", "rdmap1s0 tx_bytes={0} rdma_write_bytes={0} rdma_read_bytes=0", "srd/rdmap1s0"),
        ("UCX", "eth0 tx_bytes={0} rx_bytes=0", "tcp/eth0"),
        # The counter of this adapter includes both RDMA and TCP.
        ("UCX", "mlx5_0 port_xmit_data={1} port_rcv_data=0", "unknown"),
    ],
)
def test_counters_show_the_transport_if_they_can(command: Command, backend: str, counter: str, transport: str) -> None:
    output = command.file("run.out", P5.read_text().replace(": LIBFABRIC", f": {backend}"))
    before = command.file("before", counter.format(0, 0) + "\n")
    after = command.file("after", counter.format(11_592_663_040, 11_592_663_040 // 4) + "\n")
    ended = command.judge(output, "--counters", before, after)
    assert "1 device carried 11,592,663,040 bytes, exactly the payload" in ended.out
    rows = [line.split() for line in ended.out.splitlines() if line.startswith(f"{backend} ")]
    assert [row[-2] for row in rows] == [transport] * 15


def test_rows_that_were_not_printed_are_missing(command: Command) -> None:
    text = P5.read_text()
    ended = command.judge(command.file("cut.out", text[:-100]), "--counters", *COUNTERS)
    assert ended.code == 1
    assert "MISSING LIBFABRIC/WRITE/VRAM:VRAM/64MiB/batch1/depth1/0-1" in ended.out
    assert "the text ends within a line" in ended.out
    assert "UNKNOWN counters: the table is incomplete" in ended.out
    assert ended.out.endswith("(1 MISSING, 15 UNKNOWN; 14 rows measured)\n")


def test_an_output_cut_off_at_any_line_never_passes(command: Command) -> None:
    command.machine(nics(32))
    lines = P5.read_text().splitlines(keepends=True)
    codes = [
        command.judge(command.file("cut.out", "".join(lines[:end])), "--counters", *COUNTERS).code
        for end in range(len(lines))
    ]
    # The first four lines could come from any program. From the fifth on, it is incomplete output of nixlbench.
    assert codes == [2] * 5 + [1] * (len(lines) - 5)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["01_normal.rank_b.out"], "MISSING bandwidth: nixlbench printed no row: this is the output of rank 1"),
        (["03_unresolvable_host.out", "03_unresolvable_host.err"],
         "ERROR nixlbench: nixlbench says: Failed to acquire lock: the target uri is not valid"),
        (["04_etcd_down.err"], "ERROR nixlbench: nixlbench says: Failed to acquire lock: connections to all"),
        (["09_alone.out", "09_alone.err"], "ERROR nixlbench: nixlbench says: Error in barrier wait"),
        (["07_racy_same_rank.rank_a.out", "07_racy_same_rank.rank_b.out"],
         "ERROR nixlbench: nixlbench says: two processes registered as rank 0 of 2"),
    ],
)  # fmt: skip
def test_a_run_that_failed_fails(command: Command, files: list[str], said: str) -> None:
    text = "".join((FIXTURES / "nixlbench" / name).read_text() for name in files)
    ended = command.judge(command.file("run.out", text))
    assert (ended.code, ended.err) == (1, "")
    assert said in ended.out
    assert "    remedy: " in ended.out


def test_a_failed_comparison_of_bytes_is_corrupt(command: Command) -> None:
    text = P5.read_text() + "Consistency check failed for iov 0:0\nConsistency check failed\n"
    ended = command.judge(command.file("run.out", text), "--counters", *COUNTERS)
    assert ended.code == 1
    assert "CORRUPT nixlbench: nixlbench says: Consistency check failed for iov 0:0" in ended.out


def test_an_infinite_bandwidth_is_an_error(command: Command) -> None:
    text = P5.read_text().replace("46.948036      1429.4", "inf            0.0   ")
    ended = command.judge(command.file("run.out", text), "--counters", *COUNTERS)
    assert ended.code == 1
    assert ended.verdicts() == ["PASS"] * 14 + ["ERROR"]


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
    assert command.judge(P5, "--counters", COUNTERS[0], missing) == Ended(2, "", sentence)
    ended = command.judge(P5, "--counters", COUNTERS[0], str(P5))
    assert ended.code == 2
    assert ended.err.startswith(f"pytest-nixl: {P5}, line 1: '/opt/nixlbench/bin/nixlbench' is ")
    ended = command.judge(P5, profile="[profile]\n")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    ended = command.run("profile", "show", "nowhere")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("pytest-nixl: there is no profile 'nowhere': expected ")


@pytest.mark.parametrize(
    "arguments",
    [(), ("profile",), ("profile", "judge"), ("profile", "judge", "loopback"), ("profile", "show"), ("x",),
     ("profile", "judge", "--nixlbench", "x", "--counters", "y", "loopback")],
)  # fmt: skip
def test_a_wrong_command_line_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pytest-nixl")


def test_a_profile_is_shown(command: Command) -> None:
    command.machine(nics(32))
    path = command.file(
        "rack.toml", PROFILE.replace('floor = "0.1 GB/s"', 'floor = "0.1 GB/s"\nbatch = [1, 2]\nraw = "0.5"')
    )
    assert command.run("profile", "show", path) == Ended(
        0,
        f"""rack: two nodes
from {path}
required checks: none
machine: 32 NICs of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs, 4 of the NICs for each GPU
    source: made by a test

LIBFABRIC WRITE VRAM:VRAM 4KiB..512KiB batch 1,2
    at least 0.1 GB/s (0.8 Gb/s), over efa, raw: at least 50 % of what the raw tool moves
    source: half of what was recorded

LIBFABRIC WRITE VRAM:VRAM 1MiB..1GiB
    at least 7.5 GB/s (60 Gb/s), over efa
    source: half of what was recorded
""",
        "",
    )


def test_the_bounds_of_a_profile_are_shown_and_do_not_concern_output_of_nixlbench(command: Command) -> None:
    bound = (
        '\n[[bound]]\nfigure = "kv-request-p50"\nop = ["READ"]\ntokens = [8192]\nat_most = "50 ms"\n'
        'source = "our service level"\n'
    )
    path = command.file("rack.toml", PROFILE + bound)
    shown = command.run("profile", "show", path).out
    assert shown.endswith(
        "\nkv-request-p50 of any backend, op READ, any memory, any way, any model, tokens 8192\n    at most 50 ms\n"
        "    source: our service level\n"
    )
    judged = [
        command.run("profile", "judge", "--nixlbench", str(P5), "--counters", *COUNTERS, name)
        for name in (path, command.file("plain.toml", PROFILE))
    ]
    assert judged[0].verdicts() == judged[1].verdicts() != []


def test_the_recorded_p5_run_passes_with_the_bundled_profile(command: Command) -> None:
    ended = command.run("profile", "judge", "--gate", "--nixlbench", str(P5), "--counters", *COUNTERS, "p5.48xlarge")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("NIXL gate: PASS (16 PASS; 15 rows measured)\n")


def test_the_recorded_p5_run_is_implausible_with_the_profile_of_one_rail(command: Command) -> None:
    ended = command.run("profile", "judge", "--nixlbench", str(P5), "--counters", *COUNTERS, "a10g-efa100")
    assert ended.code == 1
    assert ended.verdicts().count("IMPLAUSIBLE") == 7


def test_the_reported_row_is_implausible_with_the_profile_of_its_machine(command: Command) -> None:
    ended = command.run(
        "profile", "judge", "--nixlbench", command.file("seeds.out", implausible_table()), "h100-hyperpod"
    )
    assert (ended.code, ended.verdicts()) == (1, ["IMPLAUSIBLE"])


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_bundled_profile_is_shown(command: Command, name: str) -> None:
    ended = command.run("profile", "show", name)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{name}: ")
    profile = load_profile(name)
    assert ended.out.count("\nfor reference only: ") == len(profile.references)
    assert ("\nmachine: " in ended.out) is (profile.machine is not None)


def test_the_default_profile_is_shown(command: Command) -> None:
    ended = command.run("profile", "show", "loopback")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("loopback: two processes of one host, host memory\nfrom loopback.toml of pytest-nixl\n")
    assert "UCX WRITE,READ DRAM:DRAM 4KiB..1048575B\n    at least 0.06 GB/s (0.48 Gb/s), at most 640 GB/s" in ended.out


@pytest.mark.long
def test_the_command_runs_as_a_program_and_reports_a_closed_pipe_in_one_sentence() -> None:
    command = [sys.executable, "-m", "pytest_nixl.cli", "profile", "show", "loopback"]
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
