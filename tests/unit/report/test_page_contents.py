# SPDX-License-Identifier: Apache-2.0
"""Everything that the page of a run says, in its order: each heading, sentence, row and mark."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from typing import Any

from helpers.records import key, record
from helpers.small_report import BARE_ROW, HOST, READ_ROW, WRITE_ROW, small_report

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.page import page
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import parse_recorded

READ_NAME = "UCX READ DRAM:VRAM 64KiB batch8 depth4 ranks 2-5 notify=each"
#: Attributes that a reader or the page's script sees, and classes that only say how a cell is broken.
SEEN, PLAIN = re.compile(r'(?:class|id|data-[a-z]+)="([^"]*)"'), re.compile(r"\b(?:wrap|text|id|scroll)\b *")
#: What is drawn, or the same on each page.
LEFT_OUT = re.compile(
    r'<section id="(?:bandwidth|latency)">.*?</section>|<(nav|thead|form|button|svg)\b.*?</\1>', re.DOTALL
)
#: Elements of a line. All others begin or end one.
INLINE = ("a", "b", "i", "span", "code", "td", "th", "small", "strong", "dt", "dd")


def outline(text: str) -> list[str]:
    """Return the lines of a page without its drawings; what marks an element stands in brackets before its words."""
    body = LEFT_OUT.sub("", text[text.index("<body>") : text.rindex("<script>")]).replace("\n", " ")
    body = re.sub("<b class=word>(.*?)</b>", r"\1", body)

    def mark(element: re.Match[str]) -> str:
        closing, tag, attributes = element.groups()
        cell = " | " if tag in ("td", "dd") and not closing else ""
        marks = PLAIN.sub("", " ".join(SEEN.findall(attributes))).strip()
        return ("" if tag in INLINE else "\n") + cell + (f"[{marks}] " if marks else "")

    lines = html.unescape(re.sub(r"<(/?)(\w+)([^>]*)>", mark, body)).split("\n")
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_page_of_a_run_that_is_compared() -> None:
    assert outline(page(small_report())) == [
        "NIXL verdict",
        "[verdict fail] FAIL",
        "[number] -29.3 % all rows together against reg/nixl:1 (121212121212)",
        f"[number] 2.00 × its floor {READ_NAME} at 1 GB/s, the lowest of 2 rows",
        "FAIL too slow",
        "FAIL slow, too",
        "[next] Next: reject: do what the first remedy says, then repeat its command",
        "[command] Look at 100 %.",
        "[about]",
        'image | reg/"a"|\\nb* c:2 (121212121212)',
        "hosts | n-a",
        "measured | 2026-03-09 03:00 UTC",
        "checks | 2 PASS, 2 FAIL, 1 INCONCLUSIVE, 1 WARN, 1 NOT-APPLICABLE",
        "rows | 3 measured",
        "against | reg/nixl:1 (121212121212)",
        "[against]",
        "Against reg/nixl:1 (121212121212)",
        "[soft] The run is REGRESSED. All rows together: -29.3 % (between -30.7 % and -27.9 %), 5 "
        "launches against 5, p = 0.004. The band shows changes that count as unchanged, up to 5 % in "
        "each direction; the bar is a 90 % interval.",
        "[changes]",
        'image: reg/nixl:1 -> reg/"a"|\\nb* c:2',
        "versions ucx: 1.19.0 -> 1.20.0",
        f"| [fail] REGRESSED | {READ_NAME} | [fail] -50.0 % [-51.0, -49.0] | [bar] | 2 | 1 | 5:5 | 0.004",
        "| [pass] UNCHANGED | UCX WRITE DRAM:DRAM 4KiB | [pass] +0.0 % [-2.0, +2.0] | [bar] | 2 | 2 | "
        "5:5 | 0.77",
        "[findings]",
        "Findings",
        "[soft] Every result that is not good, with its reason and remedy, the most severe first.",
        "[card fail]",
        "FAIL: [check-a,b:c] a,b:c [check-bandwidth] bandwidth",
        "too slow",
        "slow, too",
        "What to do",
        "[command] Look at 100 %.",
        "[command] pytest r",
        "[command] pytest-nixl explain bandwidth",
        "[card warn]",
        "WARN: [check-etcd-uri] etcd-uri",
        "a | and <b> *_`[end]\\",
        "What to do",
        "[command] Leave it out.",
        "[card warn]",
        "INCONCLUSIVE: [finding-NIXL-ETCD-HTTPS-PLAINTEXT] NIXL-ETCD-HTTPS-PLAINTEXT",
        "no lease",
        "[command] pytest-nixl explain NIXL-ETCD-HTTPS-PLAINTEXT",
        "[rows]",
        "Rows",
        "[soft] Every row, the worst first; one without figures was not measured.",
        "[sortable]",
        f"[row-{READ_ROW} FAIL UCX DRAM:VRAM 2 5] | [fail] FAIL | UCX READ DRAM:VRAM 64KiB batch8 depth4 "
        "ranks 2-5 notify=each | [1000000000.0] 1 | [500000000.0] 0.5 | [9000000000.0] 9 | [1.5e-06] 1.5 "
        "µs | [4e-06] 4 µs | rc/mlx5_0:1+tcp/eth0",
        f"[row-{WRITE_ROW} FAIL UCX DRAM:DRAM 0 1] | [fail] FAIL | UCX WRITE DRAM:DRAM 4KiB | "
        "[2000000000.0] 2 | [500000000.0] 0.5 | [9000000000.0] 9 | [1.5e-06] 1.5 µs | [4e-06] 4 µs | "
        "rc/mlx5_0:1+tcp/eth0",
        f"[row-{BARE_ROW} – LIBFABRIC DRAM:DRAM 0 1] | [soft] – | LIBFABRIC WRITE DRAM:DRAM 1MiB | "
        "[4000000000.0] 4 | [0.0] no floor | [0.0] – | [5e-07] 500 ns | [0.0] – | unknown",
        "[checks]",
        "Checks",
        "[soft] Every check and what it found, in the order of the run.",
        "[WARN] | [warn] WARN | etcd-uri | a | and <b> *_`[end]\\",
        "[PASS] | [pass] PASS | NIXL-ETCD-STALE-KEY | no lease",
        "[PASS] | [pass] PASS | registration | –",
        "[INCONCLUSIVE] | [warn] INCONCLUSIVE | NIXL-ETCD-HTTPS-PLAINTEXT | no lease",
        "What does not apply here: 1 reason",
        "no GPU [soft] (gpus)",
        "[nixl]",
        "NIXL and raw",
        "[soft] The same blocks over the same transport without NIXL: a low raw bandwidth is a slow "
        "fabric, a low ratio is a loss in NIXL. At depth 1 NIXL waits for each block, which alone makes "
        "small blocks slow.",
        f"| {READ_NAME} | 1.9 | 4 | 0.47 | ucx_perftest (ucp_get_bw, UCX 1.18) | rc/mlx5_0:1+tcp/eth0",
        "[figures]",
        "Figures",
        "[soft] Times, sizes and rates of single steps, such as a registration, with the profile's bound "
        "if it has one.",
        "| PASS | registration | UCX count 1 size 4096 | 1 ms | -",
        "| PASS | registration | UCX count 1 size 8192 | 2 ms | -",
        "| PASS | registration | UCX count 1 size 4096 | 3 ms | -",
        "[known]",
        "Known limits of NIXL",
        "[soft] Seen, and not a fault of this machine.",
        "1 defect of NIXL that was seen only on processes that the suites started. None affects this "
        "deployment.",
        "[finding-NIXL-ETCD-STALE-KEY] | NIXL-ETCD-STALE-KEY | no lease |",
        "[provenance]",
        "Provenance and what changed",
        "[soft] The differences from reg/nixl:1 (121212121212) come first.",
        '[changed] | image | reg/nixl:1 | reg/"a"|\\nb* c:2',
        "[changed] | versions ucx | 1.19.0 | 1.20.0",
        "| image digest | sha256:121212121212 | sha256:121212121212",
        "| versions nixl | 1.5.1 | 1.5.1",
        "| host name | n-a | n-a",
        "| host cpu | a CPU | a CPU",
        "| host cores | 8 | 8",
        "| host gpus | 0 | 0",
    ]  # fmt: skip


def test_the_page_of_a_gate_between_three_ranks() -> None:
    """Two of four rows were not measured, and nothing is compared."""
    good, slow, lost, other = (RowKey.parse(key("64MiB", "WRITE", pair)) for pair in ("0-1", "1-0", "2-0", "2-1"))
    measured = RowSummary(6e9, 1e-6, 1e-6, 1, 0.0, 0.0, ())
    died = "rank 2 died: see `dmesg -T`, or --nixl-log-dir (rank 3 waited)"
    results = (
        Result("dead-target", "d", Verdict.ERROR, died, "Run `a --b` (--c).", lost, finding="NIXL-DEAD-TARGET-CRASHES"),
        Result("bandwidth", "m", Verdict.MISSING, "", row=other),
        Result("bandwidth", "g", Verdict.PASS, row=good, summary=measured),
        Result("bandwidth", "h", Verdict.NO_EXPECTATION, "nothing is expected", "Give a floor.", slow, measured),
        Result("gpus", "u", Verdict.NOT_APPLICABLE, "no GPU", row=RowKey.parse(key("4KiB"))),
        Result("gpus", "u", Verdict.NOT_APPLICABLE, "", finding="NIXL-X"),
        Result("gpus", "u", Verdict.NOT_APPLICABLE, "no GPU"),
        *(Result("ranks", "r", Verdict.FAIL, f"the ranks of pranks 9: rank {n}", "Ask.", repeat=f"pytest {n}")
          for n in range(6)),
    )  # fmt: skip
    host: dict[str, Any] = {**HOST, "name": "", "ranks": ["a", "b", "a"], "nics": {"eth0": "1 Gb/s"}}
    data = record("", {str(good): [12.0], str(slow): [6.0]}, results=results, **host)
    run = replace(parse_recorded(data, "run.json"), notes=("a note",))
    text = page(RunReport(run, gate=True, chosen={"level": "quick"}))
    assert re.findall(r'data-backend="" data-memory="" data-rank="([^"]*)"', text) == list("012345")
    assert outline(text) == [
        "NIXL gate",
        "[verdict fail] FAIL",
        "ERROR rank 2 died: see dmesg -T, or --nixl-log-dir (rank 3 waited)",
        "MISSING UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/2-1",
        "NO-EXPECTATION nothing is expected",
        "FAIL the ranks of pranks 9: rank 0 (and 5 more like it, below)",
        "[next] Next: reject: do what the first remedy says, then repeat its command",
        "[command] Run a --b (--c).",
        "[about]",
        "level | quick",
        "image | unnamed image",
        "hosts | a, b",
        "measured | 2026-03-02 03:00 UTC",
        "checks | 1 PASS, 6 FAIL, 1 ERROR, 1 MISSING, 1 NO-EXPECTATION, 3 NOT-APPLICABLE",
        "rows | 2 measured, 2 not",
        "[findings]",
        "Findings",
        "[soft] Every result that is not good, with its reason and remedy, the most severe first.",
        "[card fail]",
        "ERROR: [finding-NIXL-DEAD-TARGET-CRASHES] NIXL-DEAD-TARGET-CRASHES",
        "rank 2 died: see dmesg -T, or --nixl-log-dir (rank 3 waited)",
        "What to do",
        "[command] Run a --b (--c).",
        "[command] pytest-nixl explain NIXL-DEAD-TARGET-CRASHES --reproduce | python -",
        "[command] pytest-nixl explain NIXL-DEAD-TARGET-CRASHES",
        "[card fail]",
        "MISSING: [check-bandwidth] bandwidth",
        "UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/2-1",
        "[command] pytest-nixl explain bandwidth",
        "[card fail]",
        "NO-EXPECTATION: [check-bandwidth-2] bandwidth",
        "nothing is expected",
        "What to do",
        "[command] Give a floor.",
        "[command] pytest-nixl explain bandwidth",
        "[card fail]",
        "FAIL: [check-ranks] ranks",
        *(f"the ranks of pranks 9: rank {n}" for n in range(6)),
        "What to do",
        "[command] Ask.",
        "[command] pytest 0",
        "[ranks]",
        "Ranks and links",
        "[soft] Delivered bandwidth in GB/s from each initiator (down) to each target (across). The "
        "slowest link is framed.",
        "[charts]",
        "[card]",
        "UCX WRITE DRAM:DRAM of 64MiB",
        "from 0 | [cell] – | [cell] 12eth0",
        "from 1 | [cell slow] 6eth0 | [cell] –",
        "from 2 | [cell] ERROR | [cell] MISSING",
        "[soft] slowest: rank 1 to rank 0, 6 GB/s, 50 % of the fastest",
        "[rows]",
        "Rows",
        "[soft] Every row, the worst first; one without figures was not measured.",
        "[sortable]",
        "[row-UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/2-0 ERROR UCX DRAM:DRAM 2 0] | [fail] ERROR | UCX "
        "WRITE DRAM:DRAM 64MiB ranks 2-0 | [0.0] – | [0.0] – | [0.0] – | [0.0] – | [0.0] – | –",
        "[row-UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/2-1 MISSING UCX DRAM:DRAM 2 1] | [fail] MISSING | "
        "UCX WRITE DRAM:DRAM 64MiB ranks 2-1 | [0.0] – | [0.0] – | [0.0] – | [0.0] – | [0.0] – | –",
        "[row-UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/1-0 NO-EXPECTATION UCX DRAM:DRAM 1 0] | [fail] "
        "NO-EXPECTATION | UCX WRITE DRAM:DRAM 64MiB ranks 1-0 | [6000000000.0] 6 | [0.0] no floor | "
        "[0.0] – | [1.0922666666666666e-05] 10.9 µs | [2.7306666666666664e-05] 27.3 µs | tcp/eth0",
        "[row-UCX/WRITE/DRAM:DRAM/64MiB/batch1/depth1/0-1 PASS UCX DRAM:DRAM 0 1] | [pass] PASS | UCX "
        "WRITE DRAM:DRAM 64MiB | [12000000000.0] 12 | [0.0] no floor | [0.0] – | [5.461333333333333e-06] "
        "5.46 µs | [1.3653333333333332e-05] 13.7 µs | tcp/eth0",
        "[checks]",
        "Checks",
        "[soft] Every check and what it found, in the order of the run.",
        "[ERROR UCX DRAM:DRAM 2 0 3] | [fail] ERROR | NIXL-DEAD-TARGET-CRASHES | UCX WRITE DRAM:DRAM "
        "64MiB ranks 2-0: rank 2 died: see dmesg -T, or --nixl-log-dir (rank 3 waited)",
        "[MISSING UCX DRAM:DRAM 2 1] | [fail] MISSING | bandwidth | UCX WRITE DRAM:DRAM 64MiB ranks 2-1: "
        "–",
        *(f"[FAIL {n}] | [fail] FAIL | ranks | the ranks of pranks 9: rank {n}" for n in range(6)),
        "What does not apply here: 2 reasons",
        "no GPU [soft] (UCX WRITE DRAM:DRAM 4KiB, gpus)",
        "NIXL-X [soft] (NIXL-X)",
        "[provenance]",
        "Provenance and what changed",
        "[soft] The circumstances in which this run was measured.",
        "| host cpu | a CPU",
        "| host cores | 8",
        "| host nics eth0 | 1 Gb/s",
        "| host gpus | 0",
        "| host ranks | a, b, a",
        "[soft] a note",
    ]  # fmt: skip
