# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl profile judge``: outputs of both ranks, with labels, colours, crashes, strangers, and any damage."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_nixl import cli
from pytest_nixl.checks.nixlbench.verdict import JudgedRun, judge_run
from pytest_nixl.judge.profiles import Profile, load_profile
from pytest_nixl.model.nixlbench_output import Trouble
from pytest_nixl.model.nixlbench_table import read_files, read_output
from pytest_nixl.model.verdicts import Verdict

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
RECORDINGS = FIXTURES / "nixlbench"
COMPARED = (RECORDINGS / "02_check_consistency_write.rank_a.out").read_text()
NORMAL = (RECORDINGS / "01_normal.rank_a.out").read_text()
TARGET = (RECORDINGS / "01_normal.rank_b.out").read_text()
ASIO = (RECORDINGS / "20_asio.rank_a.out").read_text()
P5 = (FIXTURES / "efa-p5" / "nixlbench-rank0.out").read_text()
#: What a shell adds to an output.
ENDED = "exit code 0\n"
REFUSED = "Rank 2 is greater than or equal to global size 2\nFailed to setup ETCD runtime\n"

PROFILE = """
[profile]
name = "here"
[[expect]]
backend = ["UCX", "LIBFABRIC", "POSIX"]
floor = "{floor}"
source = "made by a test"
"""


def profile(folder: Path, floor: str = "0.001 GB/s", more: str = "") -> Profile:
    path = folder / "profile.toml"
    path.write_text(PROFILE.format(floor=floor) + more)
    return load_profile(str(path))


def judged(folder: Path, *texts: str, floor: str = "0.001 GB/s", more: str = "") -> JudgedRun:
    """Judge a run whose ranks printed these texts, each in a file of its own."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"rank{number}.out")
        paths[-1].write_text(text)
    return judge_run(read_files(paths), profile(folder, floor, more))


def verdicts(run: JudgedRun) -> list[Verdict]:
    """The verdict of each row."""
    return [result.verdict for result in run.results if result.check == "bandwidth"]


def texts(run: JudgedRun, check: str = "nixlbench") -> list[str]:
    return [f"{result.verdict} {result.reason}" for result in run.results if result.check == check]


#: Transfers to a file carry no notification.
STORED = (RECORDINGS / "06_posix_write.out").read_text()
HUGE_PAGES = NORMAL.replace("Use hugepages (--use_hugepages=[0,1])                       : 0", "(--use_hugepages) : 1")


@pytest.mark.parametrize(
    ("output", "learned", "needed", "options"),
    [
        (NORMAL, 'notify = ["last"]', "notify = last and huge pages", "--nixl-pages=base"),
        (NORMAL, 'notify = ["each"]', "notify = each and huge pages", "--nixl-pages=base"),
        (NORMAL, 'notify = ["last"]\npages = ["base"]', "notify = last and base pages", "--nixl-pages=base"),
        (NORMAL, 'pages = ["huge"]', "notify = each and huge pages or notify = last and huge pages",
         "--nixl-pages=base"),
        (HUGE_PAGES, 'notify = ["each"]\npages = ["base"]', "notify = each and base pages", "--nixl-pages=huge"),
        (P5, 'notify = ["last"]', "notify = last", ""),
    ],
)  # fmt: skip
def test_a_floor_that_was_learned_under_other_conditions_judges_no_row_of_nixlbench(
    tmp_path: Path, output: str, learned: str, needed: str, options: str
) -> None:
    """Each transfer of nixlbench carries a notification, and its buffers are those of malloc; both take time."""
    run = judged(tmp_path, output, floor="100 GB/s", more=f"{learned}\n")
    assert verdicts(run) == [Verdict.NO_EXPECTATION] * 15
    row = "LIBFABRIC WRITE VRAM:VRAM" if output == P5 else "UCX WRITE DRAM:DRAM"
    pages = options.replace("--nixl-pages=", " and ") + " pages" * bool(options)
    assert run.results[0].reason == (
        f"{row} of 4KiB: the profile expects something of rows with {needed} only, and those of nixlbench have "
        f"notify = each{pages}, which takes another time"
    )
    assert run.results[0].remedy == (
        "Learn a profile (pytest-nixl profile learn) from three runs of `pytest --pyargs pytest_nixl.suites.bandwidth "
        f"{' '.join(filter(None, ('--nixl-notify=each', options)))} --benchmark-json=FILE`."
    )


@pytest.mark.parametrize(
    ("output", "learned"),
    [
        (NORMAL, 'notify = ["each"]\npages = ["base"]\n'),
        (NORMAL, ""),
        (HUGE_PAGES, 'notify = ["each"]\npages = ["huge"]\n'),
        (HUGE_PAGES, 'notify = ["each"]\n'),
        (STORED, 'notify = ["last"]\npages = ["base"]\n'),
    ],
)
def test_a_floor_of_the_same_notifications_and_pages_judges_nixlbench(
    tmp_path: Path, output: str, learned: str
) -> None:
    assert verdicts(judged(tmp_path, output, more=learned)) == [Verdict.PASS] * 15
    assert set(verdicts(judged(tmp_path, output, floor="100 GB/s", more=learned))) == {Verdict.FAIL}


@pytest.mark.parametrize("end", ["", "Consistency check fai", "exit code 0", "exit code 139\n", "Exit status: 1\n"])
def test_a_write_is_not_passed_without_the_word_of_its_target_that_it_compared(tmp_path: Path, end: str) -> None:
    run = judged(tmp_path, COMPARED + ENDED, TARGET + end)
    assert verdicts(run) == [Verdict.UNKNOWN] * 9
    ending = "rank 1 ended with exit code 1" if end.endswith("\n") else "the output of rank 1 has no exit code"
    assert f"only the target compares the bytes of a WRITE, and {ending}" in run.results[0].reason
    assert 'echo "exit code $?" >> FILE' in run.results[0].remedy
    # An output of both ranks, one after the other: each exit code belongs to the rank above it.
    assert verdicts(judged(tmp_path, COMPARED + ENDED + TARGET + end)) == [Verdict.UNKNOWN] * 9
    assert verdicts(judged(tmp_path, COMPARED + TARGET + ENDED)) == [Verdict.PASS] * 9


@pytest.mark.parametrize(
    ("printed", "depth", "verdict"),
    [("0.265866", 1, Verdict.PASS), ("2.5", 1, Verdict.PASS), ("2.8", 1, Verdict.INCONCLUSIVE),
     ("2.8", 8, Verdict.PASS), ("28", 8, Verdict.INCONCLUSIVE), ("0.025", 1, Verdict.INCONCLUSIVE)],
)  # fmt: skip
def test_a_bandwidth_that_contradicts_its_own_latency_is_doubted(
    tmp_path: Path, printed: str, depth: int, verdict: Verdict
) -> None:
    text = re.sub(r"(Pipeline depth .*): 1", rf"\1: {depth}", NORMAL.replace("0.265866", printed))
    run = judged(tmp_path, text)
    assert verdicts(run) == [verdict] + [Verdict.PASS] * 14
    if verdict is Verdict.INCONCLUSIVE:
        assert f"nixlbench printed {float(printed):g} GB/s, at which a block takes " in run.results[0].reason
        assert " us, but an Avg Lat. of 15.4 us" in run.results[0].reason


#: What a profile says of a machine with one card, of 2 or 200 Gb/s.
CARD = "[machine]\nnics = 1\nnic_rate = '{}'\nsource = 'made by a test'\n"
SLOW_CARD, FAST_CARD = CARD.format("2 Gb/s"), CARD.format("200 Gb/s")
KEY = "the row UCX/WRITE/DRAM:DRAM/8KiB/batch1/depth1/0-1"
LINE = next(line for line in NORMAL.splitlines(keepends=True) if line.startswith("8192 "))
#: A row whose transfers take the same time each.
STEADY = ASIO.replace("36814.0 ", "4200.0  ")


#: An output that expects two targets: by its own words, or by its options alone.
EXPECTED = (("and 1 targets", "and 2 targets"), (r"(?m)^Waiting for all .*\n", ""))


def changed(name: str, value: str, text: str = NORMAL) -> str:
    """The output with another value of an option."""
    new, count = re.subn(rf"(?m)^(.*\(--{name}[ =].*: ).*$", rf"\g<1>{value}", text)
    assert count == 1
    return new


def accepted(*transports: str) -> str:
    return f"transports = {list(transports)}\n"


OVER = "0.545 GB/s (4.36 Gb/s) is over the ceiling of"
UNUSABLE = "Do not use this figure: the clock stopped before the bytes were delivered, or other devices carried them."
LATE = "the p99 latency of one part of the transfer,"
AGAIN = "Run it again with a larger --num_iter."
UNKNOWN = "it is unknown whether they were right"
OUTPUTS = (
    "Give the output of each rank, its stdout and its stderr in one file (nixlbench ... > FILE 2>&1): pytest-nixl "
)


def row(text: str) -> str:
    """NORMAL with another second row."""
    return NORMAL.replace(LINE, text)


def columns(place: int, value: str) -> str:
    """NORMAL with another value in a column of its second row."""
    words = LINE.split()
    return row(" ".join([*words[:place], value, *words[place + 1 :]]) + "\n")


@pytest.mark.parametrize(
    ("outputs", "more", "verdict", "reason", "remedy"),
    [
        ([NORMAL], "", "PASS", "0.545 GB/s (4.36 Gb/s) is 54522 % of the floor of 0.001 GB/s (0.008 Gb/s)", ""),
        *(([NORMAL], f"{more}{SLOW_CARD}", "IMPLAUSIBLE",
           f"{OVER} 0.25 GB/s (2 Gb/s), the line rate of the network cards that one GPU there reaches", UNUSABLE)
          for more in ("", accepted("rc"))),
        ([NORMAL], accepted("rc") + "ceiling = '0.5 GB/s'\n", "IMPLAUSIBLE",
         f"{OVER} 0.5 GB/s (4 Gb/s) that the profile gives", UNUSABLE),
        ([NORMAL], accepted("rc") + "ceiling = '0.6 GB/s'\n", "UNKNOWN",
         "the transport that carried the bytes is not known, and the profile accepts only rc",
         "Run nixlbench with UCX_PROTO_INFO=y (LIBFABRIC: NIXL_LOG_LEVEL=info) and without UCX_LOG_FILE, so that "),
        ([NORMAL], "p50 = '20 us'\np99 = '27 us'\n", "UNKNOWN",
         "the profile bounds p50 and p99, but nixlbench prints no percentiles of whole transfers",
         "Measure this row with pytest --nixl-backend, or judge by a profile without latency bounds."),
        *(([columns(place, "34.0")], "p99 = '33 us'\n", "FAIL", f"{LATE} 34 us, is 103 % of the bound on the whole",
           "Check that the machine is idle ") for place in (7, 9)),
        *(([columns(2, value)], "", "ERROR", f"nixlbench printed a bandwidth of {figure} GB/s, which is", AGAIN)
          for value, figure in (("-3.5", "-3.5"), ("-0.0", "-0"), ("inf", "inf"), ("nan", "nan"))),
        *(([columns(place, "-1.0")], "", "ERROR", "nixlbench printed a time below zero: the clock of its host was set ",
           "Run it again.") for place in range(3, 10)),
        ([row(LINE * 2)], "", "PASS", "0.545 GB/s (4.36 Gb/s) is 54522 % of the floor", ""),
        ([row(LINE + LINE.replace("0.545225", "1.090450"))], "", "INCONCLUSIVE",
         f"{KEY} was printed 2 times with different figures: 0.545 GB/s (4.36 Gb/s), 1.09 GB/s (8.72 Gb/s)",
         "Give the unchanged output of one run: "),
        ([row(LINE + LINE.replace("0.545225", "-1.00000"))], "", "ERROR", "nixlbench printed a bandwidth of -1", AGAIN),
        ([COMPARED], "", "UNKNOWN",
         f"{KEY}: only the target compares the bytes of a WRITE, whose output is missing: {UNKNOWN}", OUTPUTS),
        *(([re.sub(*edit, text) for text in (changed("num_target_dev", "2", COMPARED), TARGET + ENDED)], "", "UNKNOWN",
           f"{KEY}: only 2 targets compare the bytes of a WRITE, and the output of only 1 is here: it", OUTPUTS)
          for edit in EXPECTED),
        ([COMPARED, TARGET + ENDED], "", "PASS", "0.0278 GB/s (0.223 Gb/s) is 2784 % of the floor", ""),
        ([TARGET + ENDED, COMPARED], "", "PASS", "0.0278 GB/s (0.223 Gb/s) is 2784 % of the floor", ""),
        ([changed("op_type", "READ", COMPARED)], "", "PASS", "UCX READ DRAM:DRAM of 8KiB: 0.0278 GB/s", ""),
        ([changed("backend", "POSIX", COMPARED)], "", "PASS", "POSIX WRITE DRAM:FILE of 8KiB: 0.0278 GB/s", ""),
    ],
)  # fmt: skip
def test_a_row_has_a_verdict_a_reason_and_a_remedy(
    tmp_path: Path, outputs: list[str], more: str, verdict: str, reason: str, remedy: str
) -> None:
    run = judged(tmp_path, *outputs, more=more)
    result = run.results[1]
    assert (result.verdict.value, result.check) == (verdict, "bandwidth")
    assert result.reason.removeprefix("UCX WRITE DRAM:DRAM of 8KiB: ").startswith(reason)
    assert result.remedy.startswith(remedy)
    assert bool(result.remedy) is bool(remedy)
    if "--op_type" in outputs[0] and verdict in ("ERROR", "INCONCLUSIVE"):
        assert verdicts(run) == [Verdict.PASS, result.verdict] + [Verdict.PASS] * 13


@pytest.mark.parametrize(
    ("output", "more", "verdict", "reason"),
    [
        (ASIO, accepted("cma"), "PASS", "0.016 GB/s (0.128 Gb/s) over cma/memory is 1598 % of the floor of 0.001 GB/s"),
        (ASIO, accepted("tcp"), "WRONG-TRANSPORT", "went over cma/memory, but the profile accepts only tcp"),
        (ASIO, accepted("tcp") + "ceiling = '0.01 GB/s'\n", "WRONG-TRANSPORT", "went over cma/memory, but the "),
        (ASIO, CARD.format("0.1 Gb/s"), "PASS", "0.016 GB/s (0.128 Gb/s) over cma/memory is 1598 % of the floor of"),
        (re.sub(r"cma/memory( *)", r"tcp/eth0\1  ", ASIO), CARD.format("0.1 Gb/s"), "IMPLAUSIBLE", "0.016 GB/s "),
        (STEADY, accepted("cma"), "FAIL", "0.016 GB/s (0.128 Gb/s) is 17 % of the floor of 0.096 GB/s"),
        (re.sub(r"(?m)^\[.*\n", "", STEADY), accepted("cma"), "FAIL", "0.016 GB/s (0.128 Gb/s) is 17 % of the floor"),
    ],
)  # fmt: skip
def test_a_transport_is_what_ucx_printed(tmp_path: Path, output: str, more: str, verdict: str, reason: str) -> None:
    floor = "0.096 GB/s" if verdict == "FAIL" else "0.001 GB/s"
    [result] = judged(tmp_path, output, floor=floor, more=more).results
    assert result.verdict.value == verdict
    assert result.reason.startswith(f"UCX WRITE DRAM:DRAM of 64KiB: {reason}")


@pytest.mark.parametrize(
    ("output", "more", "figures"),
    [
        (NORMAL, "", (0.0, 160)),
        (NORMAL, "ceiling = '10 GB/s'\n", (10e9, 160)),
        (NORMAL, f"ceiling = '10 GB/s'\n{FAST_CARD}", (10e9, 160)),
        (NORMAL, FAST_CARD, (25e9, 160)),
        (NORMAL, FAST_CARD.replace("nics = 1", "nics = 2"), (0.0, 160)),
        (STORED, FAST_CARD, (0.0, 160)),
        *((NORMAL, accepted(name) + FAST_CARD, (0.0, 160))
          for name in ("cma", "knem", "posix", "shm", "sysv", "xpmem", "cuda_copy", "cuda_ipc", "rocm_ipc", "self")),
        *((NORMAL, accepted(name) + FAST_CARD, (25e9, 160)) for name in ("tcp", "rc", "efa", "rocm_copy", "gdr_copy")),
        (NORMAL, accepted("tcp", "self") + FAST_CARD, (0.0, 160)),
        *((changed("num_iter", count), "", (0.0, 1)) for count in ("0", "-1", "1e3", "many", "")),
    ],
)  # fmt: skip
def test_a_row_has_a_ceiling_and_a_number_of_transfers(
    tmp_path: Path, output: str, more: str, figures: tuple[float, int]
) -> None:
    summaries = [result.summary for result in judged(tmp_path, output, more=more).results[:9]]
    assert [(summary.ceiling, summary.transfers) for summary in summaries if summary] == [figures] * 9


UNCHECKED = "nixlbench: the received bytes were not checked (--check_consistency=0)"
WARNING = "W1121 12:17:26.816886    9729 ucx_enums.cpp:58] Unexpected UCX error: Input/output error"


@pytest.mark.parametrize(
    ("outputs", "notes"),
    [
        ([NORMAL], ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=all", UNCHECKED]),
        ([NORMAL.replace("Registered as rank", "rank")], ["UCX WRITE DRAM:DRAM, --device_list=all", UNCHECKED]),
        *(([NORMAL.replace("item 1 of 2", f"item 1 of {size}"), TARGET.replace("item 2 of 2", f"item 2 of {other}")],
           ["UCX WRITE DRAM:DRAM, 4 ranks, --device_list=all", UNCHECKED]) for size, other in ((2, 4), (4, 2))),
        ([changed("device_list", "mlx5_0,mlx5_1")],
         ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=mlx5_0,mlx5_1", UNCHECKED]),
        ([STORED], ["POSIX WRITE DRAM:FILE, --device_list=all", UNCHECKED]),
        ([COMPARED], ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=all",
                      "only the target compares the bytes of a WRITE, whose output is missing"]),
        ([COMPARED, TARGET],
         ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=all",
          "only the target compares the bytes of a WRITE, and the output of rank 1 has no exit code"]),
        ([COMPARED, TARGET + ENDED], ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=all"]),
        ([NORMAL.replace("Block Size", f"{WARNING}\nBlock Size", 1)],
         ["UCX WRITE DRAM:DRAM, 2 ranks, --device_list=all", UNCHECKED, WARNING]),
    ],
)  # fmt: skip
def test_a_run_is_described_by_notes(tmp_path: Path, outputs: list[str], notes: list[str]) -> None:
    assert judged(tmp_path, *outputs).notes == tuple(f"nixlbench: {note.removeprefix('nixlbench: ')}" for note in notes)


RANK_0 = "Judge the output of rank 0, with stdout and stderr in one file (nixlbench ... > FILE 2>&1)."


def test_an_output_without_rows_is_missing(tmp_path: Path) -> None:
    def missing(text: str) -> list[tuple[str, str, str]]:
        return [(result.verdict.value, result.reason, result.remedy) for result in judged(tmp_path, text).results]

    alone = "nixlbench printed no row: this is the output of rank 1, but rank 0 prints the table"
    assert missing(TARGET) == [("MISSING", alone, RANK_0)]
    assert missing((RECORDINGS / "09_alone.out").read_text()) == [("MISSING", "nixlbench printed no row", RANK_0)]
    killed = missing((RECORDINGS / "21_target_killed.rank_a.out").read_text())
    reason = "UCX WRITE DRAM:DRAM of 64MiB: nixlbench was to print this row, but did not: the text ends "
    assert killed[:2] == [("MISSING", f"{reason}before it", RANK_0), ("MISSING", "nixlbench printed no row", RANK_0)]
    assert missing(cut(NORMAL, 14) + "6710")[14:] == [("MISSING", f"{reason}within a line", RANK_0)]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("x\n", "contains no output of nixlbench: expected the output of its rank 0"),
        (NORMAL * 2, "contains 2 tables: expected the output of one run"),
        *((re.sub(rf"(?m)^.*\(--{flag}=.*\n", "", NORMAL), "contains a table, but no configuration with backend, "
           "operation and memory types above it: expected the whole output of rank 0")
          for flag in ("backend", "op_type", "initiator_seg_type", "target_seg_type")),
        *((NORMAL + row, f"contains a row of {name}, which the configuration above it does not have: expected the "
           "unchanged output of one run")
          for row, name in ((LINE.replace("8192 ", "134217728 "), "128MiB with batch 1"),
                            (LINE.replace(" 1 ", " 2 ", 1), "8KiB with batch 2"))),
    ],
)  # fmt: skip
def test_an_output_that_is_not_of_one_run_is_refused(tmp_path: Path, output: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        judged(tmp_path, output)


@pytest.mark.parametrize(
    ("flags", "output", "lacking"),
    [
        *((flag, text, flag) for text in (P5, NORMAL) for flag in (
            "runtime_type", "worker_type", "enable_pt", "device_list", "scheme", "mode", "check_consistency",
            "total_buffer_size", "num_initiator_dev", "num_target_dev", "start_block_size", "max_block_size",
            "start_batch_size", "max_batch_size", "num_iter", "warmup_iter", "large_blk_iter_ftr", "num_threads")),
        # Newer releases print these together, older ones none of them.
        *((flag, NORMAL, flag) for flag in ("reregister_mem", "pipeline_depth", "use_hugepages")),
        ("scheme|num_iter|num_threads", NORMAL, "scheme, num_iter and num_threads"),
    ],
)  # fmt: skip
def test_an_output_that_lacks_options_is_not_judged(tmp_path: Path, flags: str, output: str, lacking: str) -> None:
    run = judged(tmp_path, re.sub(rf"(?m)^.*\(--(?:{flags})[ =].*\n", "", output))
    reason = f"the output is incomplete, and none of its 15 rows is judged: its configuration has no {lacking}"
    assert [(result.verdict, result.reason) for result in run.results] == [(Verdict.INCONCLUSIVE, reason)]
    assert run.results[0].remedy.startswith("Judge the whole output of rank 0 as nixlbench printed it, with stdout ")


def test_the_command_fails_what_it_cannot_prove_only_with_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(*outputs: str, gate: bool = True) -> tuple[int, str]:
        arguments = ["profile", "judge", *(["--gate"] if gate else [])]
        for number, text in enumerate(outputs):
            (tmp_path / f"{number}.out").write_text(text)
            arguments += ["--nixlbench", str(tmp_path / f"{number}.out")]
        code = cli.main([*arguments, str(tmp_path / "profile.toml")])
        return code, capsys.readouterr().out.splitlines()[-1]

    profile(tmp_path)
    assert judge(COMPARED)[0] == judge(COMPARED, TARGET)[0] == 1
    assert judge(COMPARED, TARGET + ENDED) == (0, "NIXL gate: PASS (9 PASS; 9 rows measured)")
    for line in ("Start block", "Max block", "Start batch", "Max batch"):
        text = re.sub(rf"(?m)^{line} .*\n", "", cut(NORMAL, 1))
        assert judge(text)[0] == 1
        assert judge(text, gate=False) == (0, "NIXL verdict: INCONCLUSIVE (1 INCONCLUSIVE; 0 rows measured)")
    profile(tmp_path, more='notify = ["last"]\n')
    assert judge(NORMAL, gate=False) == (0, "NIXL verdict: INCONCLUSIVE (15 NO-EXPECTATION; 15 rows measured)")


def slowed(block: int, factor: float = 10.0, text: str = P5) -> str:
    """The output with a bandwidth that is so much lower, and times that are so much longer."""

    def longer(match: re.Match[str]) -> str:
        first, *times = match[0].split()[2:]
        return " ".join(
            [f"{block} 1", f"{float(first) / factor:.6f}", *(f"{float(time_) * factor:.1f}" for time_ in times)]
        )

    return re.sub(rf"(?m)^{block} .*$", longer, text)


def test_a_row_that_other_processes_may_have_slowed_down_is_inconclusive(tmp_path: Path) -> None:
    """The load of a recorded run is not known."""
    run = judged(tmp_path, ASIO, floor="0.096 GB/s")
    assert verdicts(run) == [Verdict.INCONCLUSIVE]
    assert "the slowest hundredth of its transfers took 9 times as long as the average" in run.results[0].reason
    assert run.results[0].remedy.startswith("Run nixlbench again on a quiet machine")
    for block, place in ((4096, 0), (1048576, 8), (67108864, 14)):
        run = judged(tmp_path, slowed(block, 1000), floor="0.1 GB/s")
        assert verdicts(run) == [Verdict.INCONCLUSIVE if row == place else Verdict.PASS for row in range(15)]
        assert "the rows next to it do not confirm that" in run.results[place].reason


def test_rows_that_are_slow_one_after_the_other_fail(tmp_path: Path) -> None:
    text = slowed(1048576, 1000, slowed(2097152, 1000))
    run = judged(tmp_path, text, floor="0.1 GB/s")
    assert [place for place, verdict in enumerate(verdicts(run)) if verdict is Verdict.FAIL] == [8, 9]
    # The transfers of one of them take very different times, while those of its neighbours are steadily slow.
    uneven = slowed(524288, 1000, text).replace("70000.0", "9999999.0")
    assert uneven != slowed(524288, 1000, text)
    run = judged(tmp_path, uneven, floor="0.1 GB/s")
    assert [place for place, verdict in enumerate(verdicts(run)) if verdict is Verdict.FAIL] == [7, 8, 9]


@pytest.mark.parametrize(
    ("places", "share", "verdict"),
    [
        ((7, 8), 0.7, Verdict.FAIL),
        ((7, 8), 0.9, Verdict.INCONCLUSIVE),
        ((6, 8), 0.7, Verdict.INCONCLUSIVE),
        (range(7), 0.97, Verdict.INCONCLUSIVE),
        (range(8), 0.97, Verdict.FAIL),
    ],
)
def test_other_rows_confirm_that_a_row_is_slow(
    tmp_path: Path, places: Sequence[int], share: float, verdict: Verdict
) -> None:
    """Each row is one average of a run whose load is not known."""
    text = P5
    for block, bandwidth in (re.findall(r"(?m)^(\d+) +1 +([\d.]+)", P5)[place] for place in places):
        text = slowed(int(block), float(bandwidth) / (share * 0.1), text)
    run = judged(tmp_path, text, floor="0.1 GB/s")
    assert verdicts(run) == [verdict if place in places else Verdict.PASS for place in range(15)]


@pytest.mark.parametrize("text", [NORMAL, ASIO, P5, COMPARED], ids=["ETCD", "ASIO", "EFA", "compared"])
def test_a_prefix_of_an_output_does_not_pass(tmp_path: Path, text: str) -> None:
    for length in range(0, len(text.rstrip()), max(len(text) // 40, 1)):
        try:
            run = judged(tmp_path, text[:length])
        except ValueError:
            continue
        assert {Verdict.MISSING, Verdict.INCONCLUSIVE, Verdict.ERROR} & {result.verdict for result in run.results}


def cut(text: str, rows: int) -> str:
    """The output up to so many rows."""
    lines = text.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith("4096 "))
    return "".join(lines[: first + rows])


def test_a_stranger_in_the_group_is_told(tmp_path: Path) -> None:
    lost = "nixlbench: peer rank 1 key missing (or etcd error) -- peer may have died\n"
    run = judged(tmp_path, cut(NORMAL, 3) + lost, TARGET, REFUSED)
    assert any("ERROR nixlbench says: Rank 2 is greater" in line and "deleted the keys" in line for line in texts(run))
    assert any("after 3 of 15 rows: nixlbench: peer rank 1 key missing" in line for line in texts(run))
    # Without the stranger's own words.
    run = judged(tmp_path, cut(NORMAL, 3) + lost, TARGET)
    [last_line] = texts(run)
    assert last_line.startswith(
        "ERROR nixlbench lost one of its ranks, or the key of a rank, in the row UCX/WRITE/DRAM:DRAM/32KiB/"
    )
    # A fourth process takes the rank of one whose keys the third has deleted.
    fourth = TARGET.replace("rank 1 item 2", "rank 0 item 1").replace("rank 1, type target", "rank 0, type initiator")
    run = judged(tmp_path, NORMAL, TARGET, REFUSED, fourth)
    assert any(
        "two processes registered as rank 0 of 2: the second process joined after" in line for line in texts(run)
    )


def test_two_files_of_one_rank_are_two_processes_of_that_rank(tmp_path: Path) -> None:
    outputs = [(RECORDINGS / f"07_racy_same_rank.rank_{process}.out").read_text() for process in "ab"]
    assert texts(judged(tmp_path, *outputs)) == ["ERROR nixlbench says: two processes registered as rank 0 of 2"]


def labelled(texts: Sequence[str], form: str) -> str:
    """Both ranks' lines in turn, as a launcher labels them."""
    lines = [[form.format(rank) + line for line in text.splitlines(keepends=True)] for rank, text in enumerate(texts)]
    mixed = []
    for number in range(max(map(len, lines))):
        mixed += [line[number] for line in lines if number < len(line)]
    return "".join(mixed)


@pytest.mark.parametrize("form", ["{}: ", " {}: ", "[1,{}]<stdout>: ", "[1,{}]<stderr>:"])
def test_a_launchers_labels_tell_the_ranks_apart(tmp_path: Path, form: str) -> None:
    run = judged(tmp_path, labelled([COMPARED, TARGET + ENDED], form))
    assert verdicts(run) == [Verdict.PASS] * 9
    wrong = f"{TARGET}Consistency check failed for iov 0:0\n"
    assert "CORRUPT nixlbench says: Consistency check failed for iov 0:0" in texts(
        judged(tmp_path, labelled([COMPARED, wrong], form))
    )


def test_colours_and_carriage_returns_are_left_out(tmp_path: Path) -> None:
    coloured = "".join(f"\x1b[1;32m{line}\x1b[0m\r\n" for line in ASIO.splitlines())
    assert judged(tmp_path, coloured, more=accepted("cma")) == judged(tmp_path, ASIO, more=accepted("cma"))
    titled = NORMAL.replace("\n", "\n\x1b]0;a title\x07")
    assert judged(tmp_path, titled) == judged(tmp_path, NORMAL)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR: unknown command line flag 'blocks'",
        "ERROR: illegal value 'x' specified for uint64 flag 'num_iter'",
        "Invalid value for --asio_port: 70000 (must be <= 65535)",
        "Invalid op type: write. Must be one of [READ, WRITE]",
        "Invalid runtime: MPI",
        "Incorrect buffer size configuration for Initiator(max_block_size * max_batch_size) is > (total_buffer_size",
        "Total_buffer_size must be divisible by the product of num_threads and num_initiator_dev, next such value is 8",
        "num_iter must be >= 1",
        "VRAM not supported without CUDA, ROCm or Neuron",
        "Incorrect device list mlx5_0,mlx5_1 provided for pairwise scheme 2# devices",
        "storage backend should be always an initiator",
    ],
)
def test_a_refused_command_line_is_told(tmp_path: Path, line: str) -> None:
    assert [fault.trouble for fault in read_output(f"{line}\n").faults] == [Trouble.REFUSED]
    run = judged(tmp_path, f"{line}\n" * 2)
    assert texts(run) == [f"ERROR nixlbench says: {line}"]
    assert "nixlbench --help" in run.results[-1].remedy


CRASH = "[node-a:4711 :0:4711] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))\n"


@pytest.mark.parametrize(
    "cause",
    [CRASH, "srun: error: node-a: task 0: Segmentation fault (core dumped)\n", "double free or corruption (out)\n",
     "terminate called after throwing an instance of 'std::bad_alloc'\n", "Killed\n"],
)  # fmt: skip
def test_a_crash_names_its_row_and_its_cause(tmp_path: Path, cause: str) -> None:
    run = judged(tmp_path, cut(NORMAL, 4) + cause)
    assert texts(run) == [
        "ERROR nixlbench crashed in the row UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1, after 4 of 15 rows: "
        + cause.strip()
    ]
    assert verdicts(run) == [Verdict.PASS] * 4 + [Verdict.MISSING] * 11
    # Once all rows are there it is a note.
    run = judged(tmp_path, NORMAL + cause)
    assert (texts(run), verdicts(run)) == ([], [Verdict.PASS] * 15)
    assert (
        "nixlbench: after its last row, UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/0-1, so the figures are not affected: "
        + cause.strip()
    ) in run.notes


def test_a_crash_after_rows_of_two_batches_names_the_last_row(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^(\d+ +)1( .*)$", r"\g<0>\n\g<1>2\2", changed("max_batch_size", "2"))
    assert len(verdicts(judged(tmp_path, text))) == 30
    last = "UCX/WRITE/DRAM:DRAM/64MiB/batch2/depth1/0-1"
    note = f"nixlbench: after its last row, {last}, so the figures are not affected: {CRASH.strip()}"
    assert note in judged(tmp_path, text + CRASH).notes
    # Without a limit of its table the run may have had further rows.
    assert f"ERROR nixlbench crashed after the row {last}: {CRASH.strip()}" in texts(
        judged(tmp_path, re.sub(r"(?m)^(.*--max_batch_size.*: )2$", r"\1x", text) + CRASH)
    )


@pytest.mark.parametrize(
    "filler",
    [
        "[1795263438.149358] [vm:9447 :0]   | 0..inf | zero-copy | cma/memory                               |\n",
        "[1795263438.149358] [vm:9447 :0]   mm_ep.c:12  UCX  DEBUG a line of which there are very many indeed\n",
        "8192                1              0.545225       15.0           7.0            7.0            6.6\n",
        "W1121 12:17:26.816886    9729 ucx_enums.cpp:58] Unexpected UCX error: Input/output error\n",
        "x" * 99_999 + "\n",
        "x" * 100_000,
        "ETCD Runtime: " * 10,
    ],
    ids=["UCX's tables", "a log", "rows that are cut", "warnings", "long lines", "one line", "one line of words"],
)
def test_a_large_recording_is_read_in_a_stream(tmp_path: Path, filler: str) -> None:
    """20 MB; 100 MB take five times as long, as each line is looked at once (``benchmarks/recordings.py``)."""
    head, row, tail = ASIO.partition("65536               1 ")
    path = tmp_path / "large.out"
    with path.open("w") as file:
        file.write(head)
        for _ in range(20_000_000 // len(filler)):
            file.write(filler)
        file.write(f"\n{row}{tail}")
    output = read_files([path])
    run = judge_run(output, profile(tmp_path))
    assert [(row.block, row.bandwidth) for row in output.rows] == [(65536, 0.015982e9)]
    assert verdicts(run) == [Verdict.PASS]
    assert len(output.report) + sum(map(len, output.warnings)) < 4 * 20_000 * 120


TEXTS = [NORMAL, COMPARED, ASIO, P5, TARGET, REFUSED, labelled([COMPARED, TARGET], "{}: "), cut(NORMAL, 4) + CRASH,
         (RECORDINGS / "13_four_ranks.rank_a.out").read_text(), (RECORDINGS / "06_posix_write.out").read_text(),
         (RECORDINGS / "21_target_killed.rank_a.out").read_text()]  # fmt: skip
PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["\n", "\0", "\x1b[2J", "\x1b", ": ", "1" * 30, "-", "inf", "nan", "0", "1e9", "4096 1 -1 0 0 0 0 0 0 0\n", "|",
         "[a] | b | c | d |\n", "18446744073709551616", "0..inf", "\ud800", "\u202e", "7: ", "[1,9]<stdout>: ", REFUSED,
         "All processes are ready to proceed\n", "NIXLBench Configuration\n", "Num iter (--num_iter=N) : 0\n",
         "Backend (--backend=[x]) : OBJ\n", "Op type (--op_type=[x]) : ERASE\n",
         "Max block size (--max_block_size=N): 1\n",
         "Large block iter factor (--large_blk_iter_ftr=N) : 9999999999999999999\n",
         "Pipeline depth (--pipeline_depth=N): 0\n"]
    ),
)  # fmt: skip
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 400), PIECES), max_size=6)


@pytest.mark.long
@settings(max_examples=int(os.environ.get("PYTEST_NIXL_EXAMPLES", "150")), deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(runs=st.lists(st.tuples(st.sampled_from(TEXTS), EDITS), min_size=1, max_size=3))
def test_a_damaged_recording_is_judged_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[tuple[str, list[tuple[float, int, str]]]]
) -> None:
    """Never a traceback, and nothing on the terminal that it would act on."""
    arguments = ["profile", "judge", "--gate"]
    for number, (text, edits) in enumerate(runs):
        for where, length, piece in edits:
            place = int(where * len(text))
            text = text[:place] + piece + text[place + length :]
        path = tmp_path / f"rank{number}.out"
        path.write_bytes(text.encode(errors="surrogatepass"))
        arguments += ["--nixlbench", str(path)]
    profile(tmp_path, more=accepted("cma", "tcp", "efa"))
    code = cli.main([*arguments, str(tmp_path / "profile.toml")])
    out, err = capsys.readouterr()
    assert (code, err.count("\n")) in ((0, 0), (1, 0), (2, 1))
    assert all(char.isprintable() or char == "\n" for char in out + err)
    (out + err).encode()
