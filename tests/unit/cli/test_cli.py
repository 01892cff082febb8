# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl`` judges recorded runs, and prints one sentence if it cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
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


def test_a_run_whose_transport_is_logged_passes(command: Command) -> None:
    command.machine(nics(32))
    ended = command.judge(command.file("p5.out", P5_LOGGED), "--gate")
    assert (ended.code, ended.err) == (0, "")
    assert ended.verdicts() == ["PASS"] * 15
    assert ended.out.endswith("NIXL gate: PASS (15 PASS; 15 rows measured)\n")


def test_the_same_table_is_implausible_for_one_card(command: Command) -> None:
    command.machine(nics(1))
    ended = command.judge(P5)
    assert ended.code == 1
    # Rows of 1 MiB and more exceed the 12.5 GB/s of one card.
    assert ended.verdicts() == ["UNKNOWN"] * 8 + ["IMPLAUSIBLE"] * 7
    limit = "12.5 GB/s (100 Gb/s), the line rate of the network cards that one GPU there reaches"
    assert f"46.9 GB/s (376 Gb/s) is over the ceiling of {limit}\n" in ended.out


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


def test_the_transport_is_unknown_if_it_is_not_logged(command: Command) -> None:
    command.machine(nics(32))
    loose, strict = command.judge(P5), command.judge(P5, "--gate")
    assert (loose.code, strict.code) == (0, 1)
    assert loose.verdicts() == strict.verdicts() == ["UNKNOWN"] * 15


def test_a_transport_that_the_profile_does_not_accept_is_wrong(command: Command) -> None:
    ended = command.judge(command.file("p5.out", P5_LOGGED), profile=PROFILE.replace('["efa"]', '["tcp"]'))
    assert ended.code == 1
    assert ended.verdicts() == ["WRONG-TRANSPORT"] * 15


def test_rows_far_below_their_floor_fail(command: Command) -> None:
    ended = command.judge(command.file("p5.out", P5_LOGGED), profile=PROFILE.replace("0.1 GB/s", "0.3 GB/s"))
    assert ended.code == 1
    assert ended.verdicts() == ["FAIL"] * 2 + ["PASS"] * 13


def test_a_row_over_the_ceiling_of_the_profile_is_implausible(command: Command) -> None:
    ended = command.judge(P5, profile=PROFILE.replace('floor = "7.5 GB/s"', 'ceiling = "46 GB/s"'))
    assert ended.verdicts() == ["UNKNOWN"] * 14 + ["IMPLAUSIBLE"]
    assert "is over the ceiling of 46 GB/s (368 Gb/s) that the profile gives" in ended.out


def test_latency_limits_are_judged_if_the_table_has_the_figure(command: Command) -> None:
    bounded = PROFILE.replace('floor = "7.5 GB/s"', 'floor = "7.5 GB/s"\np99 = "500 us"')
    ended = command.judge(command.file("p5.out", P5_LOGGED), profile=bounded)
    # From 32 MiB on, one part alone took longer than the limit for the whole transfer.
    assert ended.verdicts() == ["PASS"] * 8 + ["UNKNOWN"] * 5 + ["FAIL"] * 2
    assert "the p99 latency of one part of the transfer, 747 us, is 149 % of the bound" in ended.out


def test_rows_without_an_expectation_have_their_own_verdict(command: Command) -> None:
    ended = command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out")
    assert (ended.code, ended.verdicts()) == (0, ["NO-EXPECTATION"] * 15)
    assert command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out", "--gate").code == 1


def test_rows_of_files_are_not_judged_by_the_network(command: Command) -> None:
    command.machine(nics(1))
    ended = command.judge(FIXTURES / "nixlbench" / "06_posix_write.out")
    assert ended.verdicts() == ["NO-EXPECTATION"] * 15
    assert "POSIX      WRITE  DRAM:FILE" in ended.out or "POSIX    WRITE  DRAM:FILE" in ended.out


def test_the_nics_of_one_gpu_do_not_limit_host_memory(command: Command) -> None:
    command.machine(nics(32, rate=1e8))
    assert command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out").verdicts() == ["NO-EXPECTATION"] * 15
    command.machine(nics(1, rate=1e8))
    assert "IMPLAUSIBLE" in command.judge(FIXTURES / "nixlbench" / "01_normal.rank_a.out").verdicts()


def test_the_nics_do_not_limit_a_row_within_a_host(command: Command) -> None:
    command.machine(nics(1, rate=1e6))
    asio = FIXTURES / "nixlbench" / "20_asio.rank_a.out"
    assert command.judge(asio).verdicts() == ["NO-EXPECTATION"]
    # A row whose transport is not known may have gone by a transport that the profile accepts.
    ended = command.judge(P5, profile=PROFILE.replace('["efa"]', '["efa", "cuda_ipc"]'))
    assert ended.verdicts() == ["UNKNOWN"] * 15


def test_rows_that_were_not_printed_are_missing(command: Command) -> None:
    ended = command.judge(command.file("cut.out", P5_LOGGED[:-100]))
    assert ended.code == 1
    assert "MISSING LIBFABRIC/WRITE/VRAM:VRAM/64MiB/batch1/depth1/0-1" in ended.out
    assert "the text ends within a line" in ended.out
    assert ended.out.endswith("(14 PASS, 1 MISSING; 14 rows measured)\n")


def test_an_output_cut_off_at_any_line_never_passes(command: Command) -> None:
    command.machine(nics(32))
    lines = P5_LOGGED.splitlines(keepends=True)
    codes = [command.judge(command.file("cut.out", "".join(lines[:end]))).code for end in range(len(lines))]
    # The first five lines could come from any program. From the sixth on, it is incomplete output of nixlbench.
    assert codes == [2] * 6 + [1] * (len(lines) - 6)


@pytest.mark.parametrize(
    ("files", "message"),
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
def test_a_run_that_failed_fails(command: Command, files: list[str], message: str) -> None:
    text = "".join((FIXTURES / "nixlbench" / name).read_text() for name in files)
    ended = command.judge(command.file("run.out", text))
    assert (ended.code, ended.err) == (1, "")
    assert message in ended.out
    assert "    remedy: " in ended.out


def test_a_failed_comparison_of_bytes_is_corrupt(command: Command) -> None:
    text = P5_LOGGED + "Consistency check failed for iov 0:0\nConsistency check failed\n"
    ended = command.judge(command.file("run.out", text))
    assert ended.code == 1
    assert "CORRUPT nixlbench: nixlbench says: Consistency check failed for iov 0:0" in ended.out


def test_an_infinite_bandwidth_is_an_error(command: Command) -> None:
    text = P5_LOGGED.replace("46.948036      1429.4", "inf            0.0   ")
    ended = command.judge(command.file("run.out", text))
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
    ended = command.judge(P5, profile="[profile]\n")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    ended = command.run("profile", "show", "nowhere")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("pytest-nixl: there is no profile 'nowhere': expected ")


@pytest.mark.parametrize(
    "arguments",
    [("profile",), ("profile", "judge"), ("profile", "judge", "loopback"), ("profile", "show"), ("x",)],
)
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
        "rack.toml",
        PROFILE.replace('floor = "0.1 GB/s"', 'floor = "0.1 GB/s"\nbatch = [1, 2]\nnotify = ["each"]\nraw = "0.5"'),
    )
    assert command.run("profile", "show", path) == Ended(
        0,
        f"""rack: two nodes
from {path}
required checks: none
machine: 32 NICs of 12.5 GB/s (100 Gb/s) each (efa), 8 H100 GPUs, 4 of the NICs for each GPU
    source: made by a test

LIBFABRIC WRITE VRAM:VRAM 4KiB..512KiB batch 1,2 notify each pages huge
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
        command.run("profile", "judge", "--nixlbench", command.file("p5.out", P5_LOGGED), name)
        for name in (path, command.file("plain.toml", PROFILE))
    ]
    assert judged[0].verdicts() == judged[1].verdicts() != []


def test_the_recorded_p5_run_passes_with_the_bundled_profile(command: Command) -> None:
    path = command.file("p5.out", P5_LOGGED)
    ended = command.run("profile", "judge", "--gate", "--nixlbench", path, "p5.48xlarge")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("NIXL gate: PASS (15 PASS; 15 rows measured)\n")


def test_the_recorded_p5_run_is_implausible_with_the_profile_of_one_rail(command: Command) -> None:
    ended = command.run("profile", "judge", "--nixlbench", str(P5), "a10g-efa100")
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


def test_two_dashes_as_a_value_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse of some Pythons makes an empty list of them."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["etcd", "http://127.0.0.1:1", "--namespace=--"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "pytest-nixl: argument --namespace: expected a value other than -- (see pytest-nixl --help)\n"
    )


@pytest.mark.parametrize("arguments", [("history", "no such\nfolder"), ("compare", "--unknown=\n")])
def test_a_refusal_is_one_line_whatever_the_words_are(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as error:  # what argparse refuses
        code = int(error.code or 0)
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_python_m_runs_the_command() -> None:
    command = [sys.executable, "-m", "pytest_nixl", "explain", "--findings", "--json"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("command", "least"), [((), 10), (("profile",), 4)])
def test_each_command_says_what_it_does(
    command: tuple[str, ...], least: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    listed = capsys.readouterr().out.partition("positional arguments:\n")[2].partition("\n\n")[0]
    texts = re.findall(r"^    \w+(.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    assert len(texts) >= least
    assert [text for text in texts if len(text.split()) < 3] == []
