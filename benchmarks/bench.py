# SPDX-License-Identifier: Apache-2.0
"""Measure each figure that is claimed five times, and print the median beside its bound and its peer.

* the time of a sweep: the whole command with 15 sizes from 4 KiB to 64 MiB, WRITE, and also READ, and the time that one
  more size adds, which is a sixth of what six add; what the rows differ by from sweep to sweep; beside both, what a
  nixlbench does with the same sizes, by ETCD, by ASIO, and by ASIO with buffers of 64 MiB, if ``--nixlbench`` names it;
* the ratio of the bandwidth that pytest-nixl measures to that of a bare NIXL loop with the same pattern of transfers;
* the same ratio for requests for KV blocks, with prepared descriptors of scattered blocks;
* the processor time that the installed but unused plugin adds to pytest with one trivial test, from a wheel, where
  bytecode can be kept and where it cannot;
* the time of ``pytest-nixl doctor``, which loads NIXL and makes a backend;
* the time of all suites at the levels ``quick`` and ``standard``;
* the time of ``pytest-nixl history`` of 1,000 and 10,000 runs;
* the time of 64 ranks that measure ``alltoall``, and of 1,024 simulated ranks;
* the time of README's second command in a fresh clone, with ``--tests``, because it takes minutes; or
  ``--second-command`` gives it.

``--write`` also writes the table of the measured figures to ``docs/explanation/claims.md``. ``--without=NAME`` leaves
one out, such as ``ranks``, whose 64 ranks take minutes; the table says so.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import nixlbench_sweep
import store
from figures import Figure, load, machine, table, write_table

import pytest_nixl

ROOT = Path(__file__).resolve().parents[1]
#: The page with the table of all figures.
CLAIMS = ROOT / "docs" / "explanation" / "claims.md"
#: The 30 rows; ``suites/bandwidth`` as a whole also compares NIXL with raw tools.
ROWS = "suites/bandwidth/test_bandwidth.py"
SWEEP = "4KiB..64MiB"
#: Sizes from the middle that a longer sweep has beside those, so many that their time exceeds what sweeps differ by.
MORE = ("48KiB", "96KiB", "192KiB", "384KiB", "768KiB", "1536KiB")
LONGER = ",".join((*(f"{4 << doubled}KiB" for doubled in range(15)), *MORE))
COMPARED = ("64KiB", "1MiB", "16MiB")
#: Tokens of a request for KV blocks, the time for which they are measured and the number of requests of the bare loop.
KV_TOKENS, KV_SECONDS, KV_REQUESTS = 1024, 2, 60
#: README's second command, which bootstraps tox, makes its environments, lints and tests.
TESTS = "python3 -m pip install -q -U --target .bootstrap tox && PYTHONPATH=.bootstrap python3 -m tox"
#: Variables of the tox that may have started this program, and of a Python's start: a fresh clone has none of them.
OURS = ("TOX_", "PYTHON", "VIRTUAL_ENV")
#: Bounds in seconds on two cores; of the unused plugin in milliseconds; of measured : bare loop, the least ratio.
QUICK, STANDARD, FIFTEEN, SWEPT, ADDED, DOCTOR, SECOND, UNUSED_MS, BARE = 3.5, 30, 2.5, 3.8, 0.2, 1, 360, 15, 0.97
#: The number of pairs of starts of pytest, without and with the plugin.
UNUSED_PAIRS = 20
#: Of a history of 1,000 runs and of `alltoall` of 64 ranks, in seconds; of what a row differs by, in percent.
HISTORY, ALLTOALL, SPREAD = 1, 200, 27


def pytest(*arguments: str, directory: Path = ROOT, writes_bytecode: bool = True) -> float:
    """Run pytest and return its wall time in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        # With this variable pytest rewrites the assertions of every plugin at each start, instead of once.
        env=environment if writes_bytecode else {**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 5):
        raise SystemExit(f"pytest {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def processor_time(*arguments: str, directory: Path, writes_bytecode: bool = True) -> float:
    """Run pytest and return the processor time that it and its children took, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    pytest(*arguments, directory=directory, writes_bytecode=writes_bytecode)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternate(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Call the measures in turn, forwards and backwards (ABBA), and return the values of each."""
    results: list[list[float]] = [[] for _ in measures]
    for repeat in range(repeats):
        order = list(enumerate(measures))
        for number, measure in order if repeat % 2 == 0 else reversed(order):
            results[number].append(measure())
    return results


def sweep(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time of the whole command with 15 and 30 rows and with more sizes, and the rows' spread."""
    ours: list[dict[int, float]] = []

    def writes() -> float:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "rows.json")
            taken = pytest(ROWS, "--nixl-op=WRITE", f"--nixl-blocks={SWEEP}", f"--benchmark-json={path}")
            records = json.loads(path.read_text())["benchmarks"]
        ours.append({record["extra_info"]["transfer_bytes"]: record["extra_info"]["GB/s"] for record in records})
        return taken

    fifteen, whole, more = alternate(
        options.repeats,
        writes,
        lambda: pytest(ROWS, f"--nixl-blocks={SWEEP}"),
        lambda: pytest(ROWS, f"--nixl-blocks={LONGER}"),
    )
    peers = {name: [nixlbench_sweep.sweep(options.nixlbench, *how) for _ in range(options.repeats)]
             for name, how in nixlbench_sweep.PEERS.items() if options.nixlbench}  # fmt: skip
    times = [f"{name} {median(seconds for seconds, _ in results):.1f} s" for name, results in peers.items()]
    apart = {name: nixlbench_sweep.spreads([rates for _, rates in results]) for name, results in peers.items()}
    yield Figure(
        f"15 rows ({SWEEP}), WRITE, verified", tuple(fifteen), "s", FIFTEEN,
        peer=f"nixlbench by {', '.join(times)}" if times else "",
    )  # fmt: skip
    yield Figure("30 rows: the same sizes, WRITE and READ, verified", tuple(whole), "s", SWEPT)
    added = tuple((longer - short) / len(MORE) for short, longer in zip(whole, more, strict=True))
    yield Figure("one more size, WRITE and READ", added, "s", ADDED, digits=2)
    own = nixlbench_sweep.spreads(ours)
    yield Figure(
        f"what a row differs by in {options.repeats} sweeps of the 15 rows, at most (at least {min(own):.0f} %)",
        (max(own),), "%", SPREAD, digits=0,
        peer=f"nixlbench by {', '.join(f'{name} {min(each):.0f} to {max(each):.0f} %' for name, each in apart.items())}"
        if apart else "",
    )  # fmt: skip


def history(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time of ``pytest-nixl history`` of 1,000 and 10,000 runs, with the index of an earlier command."""
    for count, bound in ((1_000, HISTORY), (10_000, math.inf)):
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate(store.records(count)):
                Path(folder, f"{number:06d}.json").write_text(text)
            time.sleep(5)  # the index contains only files that are at least a few seconds old
            store.timed("history", folder)
            taken = tuple(store.timed("history", folder) for _ in range(options.repeats))
        yield Figure(f"`pytest-nixl history` of {count:,} runs of 30 rows", taken, "s", bound, digits=2)


def ranks(_: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time of `alltoall` of 64 ranks with the real NIXL, and of a simulated group of 1,024, once each."""
    for name, bound, form, options in (
        ("64 ranks, each a pytest with the real NIXL: `alltoall`", ALLTOALL, r"64 ranks, alltoall: (\d+) s",
         ("--simulate=", "--schedules=alltoall", "--ranks=64")),
        ("1,024 simulated ranks: join, answer and leave", math.inf, r"1024 simulated ranks: .*, all ([\d.]+) s",
         ("--simulate=1024", "--schedules=")),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "scale.py"), *options], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        match = re.search(form, done.stdout)
        if done.returncode or match is None:
            raise SystemExit(f"scale.py {' '.join(options)} failed:\n{done.stdout}{done.stderr}")
        yield Figure(name, (float(match[1]),), "s", bound, digits=0)


def rows(op: str) -> list[dict[str, Any]]:
    """Measure some rows with pytest-nixl, and return their pytest-benchmark records."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.json")
        pytest("suites/bandwidth", f"--nixl-op={op}", f"--nixl-blocks={','.join(COMPARED)}", f"--benchmark-json={path}")
        records: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return records


def bare(op: str, records: Sequence[dict[str, Any]]) -> list[float]:
    """Measure the same rows with the bare loop, with as many transfers in a window; return bytes per second."""
    plan = []
    for record in records:
        size, rounds = record["extra_info"]["transfer_bytes"], record["stats"]["rounds"]
        plan.append(f"{size}:{record['extra_info']['transfers'] // rounds}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bare_loop.py"), op, *plan],
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rates:")]
    return [float(argument) for argument in line.split()[1:]]


def beside_bare_loop(options: argparse.Namespace) -> Iterator[Figure]:
    """Print the ratio of the bandwidth that pytest-nixl measures to that of the bare loop, for each row."""
    pooled: list[float] = []
    for op in ("WRITE", "READ"):
        ratios: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            records = rows(op)
            for record, rate in zip(records, bare(op, records), strict=True):
                ratios.setdefault(record["extra_info"]["key"], []).append(record["extra_info"]["GB/s"] * 1e9 / rate)
        for key, values in ratios.items():
            print(f"measured : bare loop, {key}: {median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
            pooled += values
    yield Figure(
        "measured bandwidth : that of a bare NIXL loop with the same pattern of transfers",
        tuple(pooled), "", BARE, at_least=True, digits=2,
    )  # fmt: skip


def kv_beside_bare_loop(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the ratio of the bandwidth of requests for KV blocks to that of a bare loop with the same requests."""
    for op in ("WRITE", "READ"):
        ours, remainder = alternate(options.repeats, partial(kv_row, op), partial(bare_kv, op))
        yield Figure(
            f"requests for KV blocks, {op} scattered-prepped, {KV_TOKENS} tokens : the same in a bare NIXL loop",
            tuple(one / other for one, other in zip(ours, remainder, strict=True)), "", BARE, at_least=True, digits=2,
        )  # fmt: skip


def kv_row(op: str) -> float:
    """Measure requests for scattered KV blocks with pytest-nixl, and return bytes per second."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.json")
        options = (f"--nixl-op={op}", f"--nixl-kv-tokens={KV_TOKENS}", f"--nixl-duration={KV_SECONDS}s")
        pytest("suites/kv_cache", *options, "-k", "scattered-prepped", f"--benchmark-json={path}")
        [record] = json.loads(path.read_text())["benchmarks"]
    return float(record["extra_info"]["GB/s"]) * 1e9


def bare_kv(op: str) -> float:
    """Measure the same requests with the bare loop; return bytes per second."""
    # 32 layers with K and V, 16 tokens of 8 heads of 128 elements of 2 bytes in a block, and twice the blocks.
    blocks = KV_TOKENS // 16
    shape = (64, 2 * blocks, 16 * 8 * 128 * 2, blocks, KV_REQUESTS)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bare_kv.py"), op, *map(str, shape)],
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rates:")]
    return float(line.split()[1])


def unused(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the processor time that the installed but unused plugin adds to pytest with one trivial test.

    It is measured from a wheel, where pytest can keep bytecode and where it cannot, as in images with
    ``PYTHONDONTWRITEBYTECODE=1`` or read-only site-packages. Other processes of the machine change the wall time of a
    start by several times what is measured.
    """
    package = Path(pytest_nixl.__file__).parent
    if package.is_relative_to(ROOT) and not package.is_relative_to(Path(sys.prefix)):
        raise SystemExit("the plugin is not installed from a wheel: run tox -e bench -- unused")
    compileall.compile_dir(package, quiet=2)  # as pip does in an image
    for writes, where in ((True, "kept"), (False, "not kept")):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "test_nothing.py").write_text("def test_nothing(): pass\n")
            start = partial(processor_time, directory=Path(directory), writes_bytecode=writes)
            start()
            without, with_ = alternate(UNUSED_PAIRS, partial(start, "-p", "no:nixl"), start)
        added = tuple((b - a) * 1000 for a, b in zip(without, with_, strict=True))
        peer = f"pytest without it: {median(without) * 1000:.0f} ms"
        name = f"processor time that the installed, unused plugin adds to a start of pytest, bytecode {where}"
        yield Figure(name, added, "ms", UNUSED_MS, peer=peer)


def level(name: str, repeats: int, bound: float) -> Iterator[Figure]:
    """Measure the time of all suites at a level."""
    taken = tuple(pytest("suites", "--nixl-backend=UCX", f"--nixl-level={name}") for _ in range(repeats))
    yield Figure(f"all suites, `--nixl-level {name}`", taken, "s", bound)


def doctor(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time of the whole command ``pytest-nixl doctor``."""
    taken = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest_nixl.cli", "doctor"], capture_output=True, text=True, check=False
        )
        taken.append(time.perf_counter() - start)
        if "NIXL doctor: " not in done.stdout:
            raise SystemExit(f"pytest-nixl doctor failed:\n{done.stdout}{done.stderr}")
    yield Figure("`pytest-nixl doctor`", tuple(taken), "s", DOCTOR, digits=2)


def second_command(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure the time of README's second command, or read it: seconds, or a file of ``--junit-xml``."""
    taken = [seconds_of(text) for text in options.second_command]
    if options.tests:
        taken.append(time_of_a_clone())
    if taken:
        yield Figure("README's second command", tuple(taken), "s", SECOND, digits=0)
    else:
        print("README's second command: not measured; --tests measures it in a fresh clone, in some minutes")


def time_of_a_clone(command: str = TESTS, root: Path = ROOT) -> float:
    """Run README's second command in a fresh clone of what is committed, and return its wall time in seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    with tempfile.TemporaryDirectory() as directory:
        clone = Path(directory, "clone")
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(root), str(clone)], check=True)
        start = time.perf_counter()
        done = subprocess.run(
            ["sh", "-c", command], cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{command} failed after {taken:.0f} s:\n{done.stdout[-20000:]}")
    return taken


def seconds_of(text: str) -> float:
    """Return seconds from a number, or from the times of the test suites in a file of ``--junit-xml``."""
    if not Path(text).is_file():
        return float(text)
    return sum(float(suite.get("time", "0")) for suite in ElementTree.parse(text).getroot().iter("testsuite"))


FIGURES: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "quick": lambda options: level("quick", options.repeats, QUICK),
    "standard": lambda options: level("standard", min(options.repeats, 3), STANDARD),
    "sweep": sweep,
    "history": history,
    "ranks": ranks,
    "bare": beside_bare_loop,
    "kv": kv_beside_bare_loop,
    "unused": unused,
    "doctor": doctor,
    "second": second_command,
}


def measured(options: argparse.Namespace, failed: list[str] | None = None) -> Iterator[Figure]:
    """Yield the requested figures, each as soon as it is measured.

    :param failed: gets the name of each figure that could not be measured; None: the first ends the program.
    """
    for name in options.figures or [figure for figure in FIGURES if figure not in options.without]:
        try:
            for figure in FIGURES[name](options):
                print(figure, flush=True)
                yield figure
        except SystemExit as error:
            if failed is None:
                raise
            failed.append(name)
            print(f"{name}: not measured: {error}", flush=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="how often each figure is measured (default: 5)")
    parser.add_argument("--write", nargs="?", type=Path, const=CLAIMS, help="write the table to this file")
    parser.add_argument(
        "--nixlbench",
        default="",
        metavar="PATH",
        help="a nixlbench, whose sweeps of 15 sizes are measured beside ours: by ETCD each takes minutes",
    )
    parser.add_argument("--second-command", action="append", default=[], metavar="SECONDS|JUNIT",
                        help="the time of README's second command, or its file of --junit-xml")  # fmt: skip
    parser.add_argument("--tests", action="store_true",
                        help="measure README's second command, which takes minutes, in a fresh clone")  # fmt: skip
    parser.add_argument("--without", action="append", default=[], metavar="FIGURE", choices=tuple(FIGURES),
                        help="a figure that is not measured, and is named so in the table")  # fmt: skip
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(FIGURES)} (default: all)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"{unknown[0]!r} is not a figure: expected {', '.join(FIGURES)}")
    if options.write and options.figures:
        parser.error("--write needs every figure: do not name some")
    return options


def main() -> None:
    """Print every figure, and write the table."""
    options = parsed()
    print(f"{machine()}; medians of {options.repeats}; {load()}", flush=True)
    failed: list[str] = []
    results = list(measured(options, failed))
    text = table(results, without=options.without)
    print(f"\n{text}")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}; the reasons are above")
    if options.write:
        write_table(options.write, text)


if __name__ == "__main__":
    main()
