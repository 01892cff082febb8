# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl profile judge``: outputs of both ranks, with labels, colours, crashes, strangers, and any damage."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_nixl import cli
from pytest_nixl.checks.nixlbench.verdict import JudgedRun, judge_run
from pytest_nixl.judge.profiles import Profile, load_profile
from pytest_nixl.model.nixlbench_output import Trouble
from pytest_nixl.model.nixlbench_table import LONGEST_LINE, read_files, read_output
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
    ],
)  # fmt: skip
def test_a_floor_that_was_learned_under_other_conditions_judges_no_row_of_nixlbench(
    tmp_path: Path, output: str, learned: str, needed: str, options: str
) -> None:
    """Each transfer of nixlbench carries a notification, and its buffers are those of malloc; both take time."""
    run = judged(tmp_path, output, floor="100 GB/s", more=f"{learned}\n")
    assert verdicts(run) == [Verdict.NO_EXPECTATION] * 15
    expected = f"UCX WRITE DRAM:DRAM of 4KiB: the profile expects something of rows with {needed} only, and those of "
    assert run.results[0].reason.startswith(expected)
    assert f"pytest_nixl.suites.bandwidth --nixl-notify=each {options} --benchmark-json=FILE" in run.results[0].remedy


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


def test_an_unknown_transport_has_a_remedy_without_a_worker(tmp_path: Path) -> None:
    run = judged(tmp_path, NORMAL, more=accepted("cma"))
    assert verdicts(run) == [Verdict.UNKNOWN] * 15
    assert "worker" not in run.results[0].remedy
    assert run.results[0].remedy.startswith("Run nixlbench with UCX_PROTO_INFO=y ")


def test_a_write_whose_target_is_not_heard_is_not_passed(tmp_path: Path) -> None:
    run = judged(tmp_path, COMPARED)
    assert verdicts(run) == [Verdict.UNKNOWN] * 9
    assert "only the target compares the bytes of a WRITE" in run.results[0].reason
    assert "--nixlbench RANK0 --nixlbench RANK1" in run.results[0].remedy
    # A file that rank 0 printed a second time is not the target's.
    assert verdicts(judged(tmp_path, COMPARED, TARGET + ENDED)) == [Verdict.PASS] * 9
    assert verdicts(judged(tmp_path, TARGET + ENDED, COMPARED)) == [Verdict.PASS] * 9


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


def test_wrong_bytes_that_the_target_found_are_corrupt(tmp_path: Path) -> None:
    run = judged(tmp_path, COMPARED, f"{TARGET}Consistency check failed for iov 0:0\n")
    assert "CORRUPT nixlbench says: Consistency check failed for iov 0:0" in texts(run)


def test_a_read_is_compared_by_rank_0_itself(tmp_path: Path) -> None:
    read = re.sub("(Op type .*): WRITE", r"\1: READ", COMPARED)
    assert verdicts(judged(tmp_path, read)) == [Verdict.PASS] * 9


def test_the_command_takes_the_output_of_both_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile(tmp_path)
    for name, text in (("a", COMPARED), ("b", TARGET)):
        (tmp_path / name).write_text(text)
    arguments = ["profile", "judge", "--gate", "--nixlbench", str(tmp_path / "a")]
    assert cli.main([*arguments, str(tmp_path / "profile.toml")]) == 1
    (tmp_path / "b").write_text(TARGET + ENDED)
    assert cli.main([*arguments, "--nixlbench", str(tmp_path / "b"), str(tmp_path / "profile.toml")]) == 0
    assert capsys.readouterr().out.endswith("NIXL gate: PASS (9 PASS; 9 rows measured)\n")


def accepted(*transports: str) -> str:
    return f"transports = {list(transports)}\n"


def test_the_transport_is_what_ucx_printed(tmp_path: Path) -> None:
    run = judged(tmp_path, ASIO, more=accepted("cma"))
    assert verdicts(run) == [Verdict.PASS]
    [result] = run.results
    assert result.summary is not None
    assert result.summary.transports == ("cma/memory",)
    run = judged(tmp_path, ASIO, more=accepted("tcp"))
    assert verdicts(run) == [Verdict.WRONG_TRANSPORT]
    assert "went over cma/memory" in run.results[0].reason


@pytest.mark.parametrize(
    ("ceiling", "cards", "smaller"),
    [("10 GB/s", "", 10e9), ("10 GB/s", "200 Gb/s", 10e9), ("", "200 Gb/s", 25e9)],
)
def test_the_smaller_of_two_ceilings_is_reported(tmp_path: Path, ceiling: str, cards: str, smaller: float) -> None:
    more = f"ceiling = '{ceiling}'\n" if ceiling else ""
    more += f"[machine]\nnics = 1\nnic_rate = '{cards}'\nsource = 'made by a test'\n" if cards else ""
    summaries = [result.summary for result in judged(tmp_path, NORMAL, more=more).results]
    assert [summary.ceiling for summary in summaries if summary] == [smaller] * 15


@pytest.mark.parametrize(
    ("transports", "limited"),
    [
        *((name, False) for name in ("cma", "knem", "posix", "shm", "sysv", "xpmem")),
        *((name, False) for name in ("cuda_copy", "cuda_ipc", "rocm_ipc", "self")),
        *((name, True) for name in ("tcp", "rc", "efa", "rocm_copy", "gdr_copy")),
        ("tcp,self", False),
    ],
)
def test_a_card_limits_no_row_that_may_stay_within_a_host(tmp_path: Path, transports: str, limited: bool) -> None:
    machine = "[machine]\nnics = 1\nnic_rate = '200 Gb/s'\nsource = 'made by a test'\n"
    summaries = [
        result.summary for result in judged(tmp_path, NORMAL, more=accepted(*transports.split(",")) + machine).results
    ]
    assert {summary.ceiling for summary in summaries if summary} == {25e9 if limited else 0.0}


@pytest.mark.parametrize("count", ["0", "-1", "1e3", "many", ""])
def test_a_row_of_an_unknown_number_of_transfers_counts_one(tmp_path: Path, count: str) -> None:
    results = judged(tmp_path, re.sub(r"(--num_iter=N.*: )160", rf"\g<1>{count}", NORMAL)).results
    assert {result.summary.transfers for result in results if result.summary} == {1}


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((), ""), ((2,), ", 2 ranks"), ((4, 2), ", 4 ranks"), ((2, 4), ", 4 ranks")]
)
def test_a_run_has_as_many_ranks_as_its_largest_group(tmp_path: Path, sizes: tuple[int, ...], ranks: str) -> None:
    text = NORMAL.replace("ETCD Runtime: Registered as rank 0 item 1 of 2\n", "")
    lines = (f"ETCD Runtime: Registered as rank {rank} item {rank + 1} of {size}\n" for rank, size in enumerate(sizes))
    notes = judged(tmp_path, text + "".join(lines)).notes
    assert f"nixlbench: UCX WRITE DRAM:DRAM{ranks}, --device_list=all" in notes


#: A row whose transfers take the same time each.
STEADY = ASIO.replace("36814.0 ", "4200.0  ")


@pytest.mark.parametrize("text", [STEADY, re.sub(r"(?m)^\[.*\n", "", STEADY)], ids=["with UCX's tables", "without"])
def test_a_row_at_a_sixth_of_its_floor_fails(tmp_path: Path, text: str) -> None:
    run = judged(tmp_path, text, floor="0.096 GB/s", more=accepted("cma"))
    assert verdicts(run) == [Verdict.FAIL]
    assert "17 % of the floor" in run.results[0].reason


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
def test_an_output_without_what_its_rows_should_be_is_not_judged(tmp_path: Path, text: str) -> None:
    """Each line between the segment type and the threads is printed by every release."""
    read = re.sub("(Op type .*): WRITE", r"\1: READ", text)
    assert set(verdicts(judged(tmp_path, read))) == {Verdict.PASS}
    whole = read.splitlines(keepends=True)
    first = next(number for number, line in enumerate(whole) if "(--initiator_seg_type" in line)
    last = next(number for number, line in enumerate(whole) if "(--num_threads" in line)
    refused = 0
    for number in range(first, last + 1):
        try:
            run = judged(tmp_path, "".join(whole[:number] + whole[number + 1 :]))
        except ValueError:
            refused += 1
            continue
        [result] = run.results
        [flag] = re.findall(r"\(--(\w+)", whole[number])
        assert (result.verdict, result.check) == (Verdict.INCONCLUSIVE, "nixlbench")
        assert result.reason.endswith(f"rows is judged: its configuration has no {flag}")
    assert refused == 3


@pytest.mark.parametrize("flag", ["runtime_type", "worker_type", "enable_pt", "device_list"])
def test_what_every_release_prints_first_is_there(tmp_path: Path, flag: str) -> None:
    [result] = judged(tmp_path, re.sub(rf"(?m)^.*--{flag}.*\n", "", P5)).results
    assert result.reason.endswith(f"its configuration has no {flag}")


@pytest.mark.parametrize("flag", ["reregister_mem", "pipeline_depth", "use_hugepages"])
def test_what_newer_releases_print_is_there_together(tmp_path: Path, flag: str) -> None:
    [result] = judged(tmp_path, re.sub(rf"(?m)^.*--{flag}.*\n", "", NORMAL)).results
    assert result.reason.endswith(f"its configuration has no {flag}")
    assert set(verdicts(judged(tmp_path, P5))) == {Verdict.PASS}  # an older release prints none of them


@pytest.mark.parametrize("line", ["Start block", "Max block", "Start batch", "Max batch"])
@pytest.mark.parametrize("gate", [False, True])
def test_a_cut_output_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, gate: bool) -> None:
    profile(tmp_path)
    path = tmp_path / "cut.out"
    path.write_text(re.sub(rf"(?m)^{line} .*\n", "", cut(NORMAL, 1)))
    command = ["profile", "judge", *(["--gate"] if gate else []), "--nixlbench", str(path)]
    assert cli.main([*command, str(tmp_path / "profile.toml")]) == gate
    out = capsys.readouterr().out
    assert ("NIXL gate: FAIL (" if gate else "NIXL verdict: INCONCLUSIVE (") in out


@pytest.mark.parametrize("text", [NORMAL, ASIO, P5, COMPARED], ids=["ETCD", "ASIO", "EFA", "compared"])
def test_a_prefix_of_an_output_does_not_pass(tmp_path: Path, text: str) -> None:
    for length in range(0, len(text.rstrip()), max(len(text) // 40, 1)):
        try:
            run = judged(tmp_path, text[:length])
        except ValueError:
            continue
        assert {Verdict.MISSING, Verdict.INCONCLUSIVE, Verdict.ERROR} & {result.verdict for result in run.results}


def test_a_row_that_the_configuration_does_not_have_is_refused(tmp_path: Path) -> None:
    row = NORMAL.splitlines(keepends=True)[-1]
    assert row.startswith("67108864 ")
    with pytest.raises(ValueError, match="a row of 128MiB with batch 1, which the configuration above it does not"):
        judged(tmp_path, NORMAL + row.replace("67108864 ", "134217728"))


def test_an_output_of_which_no_row_passed_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile(tmp_path, more='notify = ["last"]\n')
    (tmp_path / "whole.out").write_text(NORMAL)
    assert (
        cli.main(["profile", "judge", "--nixlbench", str(tmp_path / "whole.out"), str(tmp_path / "profile.toml")]) == 0
    )
    assert "NIXL verdict: INCONCLUSIVE (15 NO-EXPECTATION; 15 rows measured)" in capsys.readouterr().out


def test_a_row_twice_is_doubted_unless_it_is_the_same(tmp_path: Path) -> None:
    row = next(line for line in NORMAL.splitlines(keepends=True) if line.startswith("8192 "))
    same, other = NORMAL.replace(row, row * 2), NORMAL.replace(row, row + row.replace("0.545225", "1.090450"))
    assert verdicts(judged(tmp_path, same)) == [Verdict.PASS] * 15
    run = judged(tmp_path, other)
    assert verdicts(run) == [Verdict.PASS, Verdict.INCONCLUSIVE] + [Verdict.PASS] * 13
    [doubted] = [result for result in run.results if result.verdict is Verdict.INCONCLUSIVE]
    assert "was printed 2 times with different figures: 0.545 GB/s (4.36 Gb/s), 1.09 GB/s (8.72 Gb/s)" in doubted.reason
    assert Verdict.FAIL in verdicts(judged(tmp_path, other, floor="0.6 GB/s"))


@pytest.mark.parametrize("figure", ["-3.500000", "-0.000000", "-inf", "nan"])
def test_a_negative_row_is_an_error(tmp_path: Path, figure: str) -> None:
    run = judged(tmp_path, NORMAL.replace("0.545225", figure))
    assert verdicts(run) == [Verdict.PASS, Verdict.ERROR] + [Verdict.PASS] * 13
    assert "nixlbench printed a bandwidth of" in run.results[1].reason


def test_a_time_below_zero_is_an_error(tmp_path: Path) -> None:
    row = next(line for line in NORMAL.splitlines(keepends=True) if line.startswith("8192 "))
    run = judged(tmp_path, NORMAL.replace(row, row.replace(" 15.0 ", "-15.0 ")))
    assert verdicts(run) == [Verdict.PASS, Verdict.ERROR] + [Verdict.PASS] * 13
    assert "a time below zero" in run.results[1].reason


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
    run = judged(tmp_path, f"{line}\n")
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
    start = time.process_time()
    output = read_files([path])
    run = judge_run(output, profile(tmp_path))
    assert time.process_time() - start < 30
    assert [(row.block, row.bandwidth) for row in output.rows] == [(65536, 0.015982e9)]
    assert verdicts(run) == [Verdict.PASS]
    assert len(output.report) + sum(map(len, output.warnings)) < 4 * 20_000 * 120


def test_a_line_that_is_too_long_is_none_of_nixlbenchs(tmp_path: Path) -> None:
    long = "8192 1 9.0 1 1 1 1 1 1 1" + " " * LONGEST_LINE + "\n"
    path = tmp_path / "run.out"
    path.write_text(NORMAL.replace("8192 ", f"{long}8192 "))
    assert len(read_files([path]).rows) >= 15


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
