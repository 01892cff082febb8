# SPDX-License-Identifier: Apache-2.0
"""Learn a profile from runs on machines that are known to be good, as the text of a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core import units
from pytest_nixl.judge.floor_test import FEWEST_LAUNCHES, LearnedFloor, learn
from pytest_nixl.judge.profiles import parse_profile
from pytest_nixl.model.row_source import program_of

RUNS_FORM = "files written by the bandwidth suite with --benchmark-json or --benchmark-autosave, one for each run"


@dataclass(frozen=True)
class MeasuredRows:
    """One row of one run: its bandwidth in bytes per second, and the transports that carried its bytes."""

    bandwidth: float
    transports: tuple[str, ...]


def read_run(path: Path) -> dict[str, MeasuredRows]:
    """Return the rows of one run, by row key.

    :param path: a record of the bandwidth suite.
    :raises ValueError: if the file is not such a record, or has no row.
    """
    try:
        records = json.loads(path.read_text())["benchmarks"]
        rows = {
            str(record["extra_info"]["key"]): MeasuredRows(
                float(record["extra_info"]["GB/s"]) * 1e9, tuple(record["extra_info"]["transports"])
            )
            for record in records
            if "key" in record.get("extra_info", {}) and not program_of(str(record["extra_info"]["key"]))
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of a run ({type(error).__name__}: {error}): expected {RUNS_FORM}"
        ) from None
    if not rows:
        raise ValueError(f"{path} has no row of the bandwidth suite: expected {RUNS_FORM}")
    return rows


def learned_profile(name: str, paths: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the text of a profile, and one sentence for each run that was left out and each row without a floor.

    :param name: the profile's name.
    :param paths: the records of at least three runs.
    :raises ValueError: if there are too few runs, a file is not a record, or the runs have different rows.
    """
    if len(paths) < FEWEST_LAUNCHES:
        raise ValueError(f"{len(paths)} runs are too few to learn from: expected at least {FEWEST_LAUNCHES}")
    runs = [read_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if different := sorted(run.keys() ^ runs[0].keys()):
            raise ValueError(f"{path} and {paths[0]} have different rows: {different[0]} is in only one of them")
    floors = learn({key: [run[key].bandwidth for run in runs] for key in runs[0]})
    remarks = [remark for key, found in floors.items() for remark in _remarks(key, found, paths)]
    transports = {key: _names(runs, key) for key in floors}
    text = "\n".join(_lines(name, floors, transports, len(paths)))
    parse_profile(text.encode(), name)  # what is written must load
    return text, remarks


def _remarks(key: str, found: LearnedFloor, paths: Sequence[Path]) -> Iterator[str]:
    for number in found.outliers:
        yield f"{key}: {paths[number]} was left out, because it is far from the other runs"
    if found.floor is None:
        yield f"{key}: no floor, because fewer than {FEWEST_LAUNCHES} runs agree or their spread is too large"


def _names(runs: Sequence[Mapping[str, MeasuredRows]], key: str) -> tuple[str, ...]:
    """Return the transports that carried a row in any run, without their devices."""
    return tuple(dict.fromkeys(one.partition("/")[0] for run in runs for one in run[key].transports))


def _lines(
    name: str, floors: Mapping[str, LearnedFloor], transports: Mapping[str, tuple[str, ...]], runs: int
) -> Iterator[str]:
    yield "[profile]"
    yield f"name = {_quoted(name)}"
    yield f"summary = {_quoted(f'learned from {runs} runs')}"
    yield ""
    yield "[required]"
    yield 'checks = ["nixl-loads", "backend-loads", "bandwidth"]'
    for key, found in floors.items():
        if found.floor is None and not transports[key]:
            continue  # there is nothing to expect
        backend, op, memory, block, batch, depth, _ = key.split("/")
        yield ""
        yield "[[expect]]"
        yield f"backend = [{_quoted(backend)}]"
        yield f"op = [{_quoted(op)}]"
        # An expectation names the memory type, but no GPU number.
        yield f"memory = [{_quoted(re.sub('@[0-9]+', '', memory))}]"
        yield f"blocks = {_quoted(block)}"
        yield f"batch = [{batch.removeprefix('batch')}]"
        yield f"depth = [{depth.removeprefix('depth')}]"
        if found.floor is not None:
            yield f"floor = {_quoted(f'{found.floor / 1e9:.6g} GB/s')}"
        if transports[key]:
            yield f"transports = [{', '.join(map(_quoted, transports[key]))}]"
        yield f"source = {_quoted(_source(found))}"


def _source(found: LearnedFloor) -> str:
    used = found.runs - len(found.outliers)
    return (
        f"{used} of {found.runs} runs: median {units.gigabytes(found.median)} GB/s, median absolute deviation "
        f"{found.mad / 1e9:.3g} GB/s; floor = min(0.95 median, median - 5 MAD)"
    )


def _quoted(text: str) -> str:
    """Return a text as a TOML string, which is quoted like a JSON string."""
    return json.dumps(text, ensure_ascii=False)
