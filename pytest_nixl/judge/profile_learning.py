# SPDX-License-Identifier: Apache-2.0
"""Learn a profile from runs on machines that are known to be good, as the text of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_nixl.core import units
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.judge.floors import FEWEST_LAUNCHES, LearnedFloor, learn
from pytest_nixl.judge.profiles import Profile, parse_profile
from pytest_nixl.model.expectation import Machine
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.record_reader import LARGEST, OURS

#: A floor below this share of the median is one that a clear loss passes.
_LOW = 0.75
#: What a run says against a row: a profile that was learned from it would expect what is wrong.
_AGAINST = (Verdict.CORRUPT, Verdict.IMPLAUSIBLE, Verdict.WRONG_TRANSPORT)
#: What every learned profile requires.
_REQUIRED = ("nixl-loads", "backend-loads", "bandwidth")
RUNS_FORM = "files written by the bandwidth suite with --benchmark-json or --benchmark-autosave, one for each run"


@dataclass(frozen=True)
class MeasuredRow:
    """One row of one run: its bandwidth in bytes per second, and the transports that carried its bytes.

    :param verdict: what that run said against it: CORRUPT, IMPLAUSIBLE, WRONG-TRANSPORT; empty if none of these.
    """

    bandwidth: float
    transports: tuple[str, ...]
    verdict: str = ""


def read_run(path: Path) -> dict[RowKey, MeasuredRow]:
    """Return the rows of one run that pytest-nixl itself measured.

    :param path: a record of the bandwidth suite.
    :raises ValueError: if the file is not such a record, has no row, or has a row with corrupt bytes.
    """
    text = read_regular(path, LARGEST, RUNS_FORM)
    try:
        record = json.loads(text)
        extras = [
            benchmark["extra_info"] for benchmark in record["benchmarks"] if "key" in benchmark.get("extra_info", {})
        ]
        results = record.get(OURS, {}).get("results", [])
        against = {str(result.get("row")): result["verdict"] for result in results if result["verdict"] in _AGAINST}
        rows = {
            RowKey.parse(key): MeasuredRow(float(extra["GB/s"]) * 1e9, tuple(extra["transports"]), against.get(key, ""))
            for extra in extras
            for key in [str(extra["key"])]
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a record of a run ({type(error).__name__}: {error}): expected {RUNS_FORM}"
        ) from None
    blocks = {key: row for key, row in rows.items() if not (key.program or key.kv or key.pattern)}
    rows = _of_one_variant(blocks, path)
    if not rows:
        raise ValueError(f"{path} has no row of the bandwidth suite: expected {RUNS_FORM}")
    if corrupt := [key for key, row in rows.items() if row.verdict == Verdict.CORRUPT]:
        raise ValueError(f"{path} has corrupt bytes in {corrupt[0]}: a profile is learned from good runs only")
    return rows


def _of_one_variant(rows: Mapping[RowKey, MeasuredRow], path: Path) -> dict[RowKey, MeasuredRow]:
    """Return the rows without a variant; if all have one, all of them.

    An expectation applies to a row whatever its variant is, so floors are learned from rows of one variant only.

    :raises ValueError: the rows have several variants, and none is the default.
    """
    plain = {key: row for key, row in rows.items() if not key.variant}
    if not plain and len(variants := sorted({key.variant_text for key in rows})) > 1:
        raise ValueError(
            f"{path} has rows of several variants ({'; '.join(variants)}), and floors are learned from one: expected "
            "records of runs with one value of --nixl-progress-thread"
        )
    return plain or dict(rows)


def learned_profile(name: str, paths: Sequence[Path], like: Profile | None = None) -> tuple[str, list[str]]:
    """Return the text of a profile, and one sentence for each run that was left out and each row without a floor.

    :param name: the profile's name.
    :param paths: the records of at least three runs.
    :param like: the profile whose machine and required checks the new one has, too; None: none.
    :raises ValueError: if there are too few runs, a file is not a record, or the runs have different rows.
    """
    if len(paths) < FEWEST_LAUNCHES:
        raise ValueError(f"{len(paths)} runs are too few to learn from: expected at least {FEWEST_LAUNCHES}")
    runs = [read_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if different := sorted(map(str, run.keys() ^ runs[0].keys())):
            have, lack = (path, paths[0]) if different[0] in map(str, run) else (paths[0], path)
            raise ValueError(
                f"{path} and {paths[0]} have different rows: {different[0]} is in {have} and not in {lack}: expected "
                "runs with the same options"
            )
    pairs = len(runs[0])
    runs = [_slowest_pairs(run) for run in runs]
    floors = learn({key: [run[key].bandwidth for run in runs] for key in runs[0]})
    transports = {key: _names(runs, key) for key in floors}
    remarks = [remark for key, floor_rows in floors.items() for remark in _remarks(key, floor_rows, paths)]
    remarks += _doubts(paths, runs, transports)
    if pairs > len(floors):
        remarks.append(
            "an expectation is for all pairs of ranks and GPUs: each row is learned from the slowest pair of each run"
        )
    if without := [floor_rows for floor_rows in floors.values() if floor_rows.floor is None]:
        remarks.append(
            f"{len(without)} OF {len(floors)} ROWS HAVE NO FLOOR, and will pass however slow they are: make more "
            "runs on quiet machines and learn from all of them, or write these floors by hand"
        )
    text = "\n".join(_lines(name, floors, transports, len(paths), like))
    parse_profile(text.encode(), name)  # what is written must load
    return text, remarks


def _slowest_pairs(run: Mapping[RowKey, MeasuredRow]) -> dict[RowKey, MeasuredRow]:
    """Return for each row, whatever its ranks and GPUs, the bandwidth of its slowest pair, over the transports of all.

    An expectation names neither ranks nor GPUs.
    """
    slowest: dict[RowKey, MeasuredRow] = {}
    for key, row in run.items():
        same = replace(key, pair=(0, 1), devices=None)
        other = slowest.get(same, row)
        slowest[same] = MeasuredRow(
            min(row.bandwidth, other.bandwidth),
            tuple(dict.fromkeys((*other.transports, *row.transports))),
            other.verdict or row.verdict,
        )
    return slowest


def _remarks(key: RowKey, learned: LearnedFloor, paths: Sequence[Path]) -> Iterator[str]:
    for number in learned.outliers:
        yield f"{key}: {paths[number]} was left out, because it is far from the other runs"
    if learned.floor is None:
        yield f"{key}: no floor, because fewer than {FEWEST_LAUNCHES} runs agree or their spread is too large"
    elif learned.floor < _LOW * learned.median:
        share = f"{100 * learned.floor / learned.median:.0f} %"
        yield (
            f"{key}: its floor of {units.gigabytes(learned.floor)} GB/s is only {share} of the median "
            f"of {units.gigabytes(learned.median)} GB/s, because the runs differ: a loss down to it passes. "
            "Learn from runs on a quiet machine, or write a floor by hand"
        )


def _doubts(
    paths: Sequence[Path],
    runs: Sequence[Mapping[RowKey, MeasuredRow]],
    transports: Mapping[RowKey, tuple[str, ...]],
) -> Iterator[str]:
    """Yield one sentence for each run and each verdict that speaks against rows of it, which are learned from."""
    for path, run in zip(paths, runs, strict=True):
        for verdict in (Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE):
            if keys := [key for key, row in run.items() if row.verdict == verdict]:
                accepted = " and ".join(dict.fromkeys(name for key in keys for name in transports[key]))
                yield (
                    f"{path}: {len(keys)} of {len(run)} rows had the verdict {verdict}, such as {keys[0]}; this "
                    f"profile expects the same, over {accepted or 'any transport'}: if that is wrong, measure again"
                )


def _names(runs: Sequence[Mapping[RowKey, MeasuredRow]], key: RowKey) -> tuple[str, ...]:
    """Return the transports that carried a row in any run, without their devices."""
    return tuple(dict.fromkeys(transport.partition("/")[0] for run in runs for transport in run[key].transports))


def _lines(
    name: str,
    floors: Mapping[RowKey, LearnedFloor],
    transports: Mapping[RowKey, tuple[str, ...]],
    runs: int,
    like: Profile | None,
) -> Iterator[str]:
    yield "[profile]"
    yield f"name = {_quoted(name)}"
    yield f"summary = {_quoted(f'learned from {runs} runs')}"
    yield ""
    yield "[required]"
    required = _REQUIRED if like is None else tuple(dict.fromkeys((*_REQUIRED, *like.required)))
    yield f"checks = [{', '.join(map(_quoted, required))}]"
    if like is not None and like.machine is not None:
        yield ""
        yield from _machine(like.machine)
    for key, floor in floors.items():
        if floor.floor is None and not transports[key]:
            continue  # there is nothing to expect
        yield ""
        yield "[[expect]]"
        yield f"backend = [{_quoted(key.backend)}]"
        yield f"op = [{_quoted(key.op)}]"
        # An expectation names the memory type, but no GPU number.
        yield f"memory = [{_quoted(str(key.memory))}]"
        yield f"blocks = {_quoted(units.format_size(key.block))}"
        yield f"batch = [{key.batch}]"
        yield f"depth = [{key.depth}]"
        yield f"notify = [{_quoted(key.notify)}]"
        if key.pages:
            yield f"pages = [{_quoted(key.pages)}]"
        if floor.floor is not None:
            yield f"floor = {_quoted(f'{floor.floor / 1e9:.6g} GB/s')}"
        if transports[key]:
            yield f"transports = [{', '.join(map(_quoted, transports[key]))}]"
        yield f"source = {_quoted(_source(floor))}"


def _machine(machine: Machine) -> Iterator[str]:
    yield "[machine]"
    if machine.nics:
        yield f"nics = {machine.nics}"
        yield f"nic_rate = {_quoted(f'{machine.nic_rate * 8 / 1e9:.9g} Gb/s')}"
    for key, value in (("nics_per_gpu", machine.nics_per_gpu), ("gpus", machine.gpus)):
        if value is not None:
            yield f"{key} = {value}"
    for key, text in (("nic_kind", machine.nic_kind), ("gpu", machine.gpu)):
        if text:
            yield f"{key} = {_quoted(text)}"
    if machine.scaling is not None:
        yield f"scaling = {_quoted(f'{100 * machine.scaling:.9g}%')}"
    yield f"source = {_quoted(machine.source)}"


def _source(learned: LearnedFloor) -> str:
    used = learned.runs - len(learned.outliers)
    return (
        f"{used} of {learned.runs} runs: median {units.gigabytes(learned.median)} GB/s, median absolute deviation "
        f"{learned.mad / 1e9:.3g} GB/s; floor = min(0.95 median, median - 5 MAD)"
    )


def _quoted(text: str) -> str:
    """Return a text as a TOML string, which is quoted like a JSON string."""
    return json.dumps(text, ensure_ascii=False)
