# SPDX-License-Identifier: Apache-2.0
"""What NIXL did with each fault, by backend and release: the records of real runs, and the tables made from them.

``docs/record_faults.py`` writes the records, and ``docs/generate.py`` makes the page ``faults.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_nixl.checks.faults.misuse import KINDS, NEVER_DONE, MisuseEnding, MisuseOutcome
from pytest_nixl.checks.faults.scene import FaultOutcome

RECORDS = Path(__file__).resolve().parent / "reference" / "fault-runs.jsonl"
#: The releases of NIXL that the page compares.
RELEASES = ("1.0.1", "1.4.1", "1.5.0", "1.5.1")
#: The backends, each with the value of ``UCX_TLS`` that the check sets, and their names in the tables.
BACKENDS = {
    ("UCX", ""): "UCX over cma (one host)",
    ("UCX", "tcp"): "UCX over tcp",
    ("LIBFABRIC", ""): "LIBFABRIC over tcp",
}
#: What was tried in a machine with an RDMA device in software, with some of the faults and releases.
RDMA = {("UCX", "rc,self"): "UCX over rc (soft-RoCE)", ("UCX", "ud,self"): "UCX over ud (soft-RoCE)"}
#: The names of the backends of a misuse, which does not depend on the transport.
MISUSED = {("UCX", ""): "UCX", ("LIBFABRIC", ""): "LIBFABRIC"}
NOT_RUN = "not run"
_OPS = ("WRITE", "READ", "")
_TOLD = re.compile(r"send_notif returned (\d+) times(?: and then (?:raised (\w+)|(not)))?")
_ENDS = re.compile(r"\w+ (\w+) with \d+ of \d+ transfers in flight, which end as (.+)")


@dataclass(frozen=True)
class FaultRun:
    """One fault or misuse that was made with a release of NIXL, and what followed.

    :param date: the day, as ``2026-11-22``.
    :param machine: the operating system, architecture and number of processors.
    :param transports: the value of ``UCX_TLS`` that the check set; empty: none.
    :param misuse: whether it is a misuse; otherwise a fault of transfers in flight.
    :param id: a key of ``FAULTS`` or of ``KINDS``.
    :param op: ``WRITE`` or ``READ``; empty for a misuse.
    :param found: the fields of the outcome that the page shows.
    """

    date: str
    machine: str
    nixl: str
    backend: str
    transports: str
    misuse: bool
    id: str
    op: str
    found: Mapping[str, Any]

    @classmethod
    def of_fault(cls, date: str, machine: str, outcome: FaultOutcome) -> FaultRun:
        """Return the record of a fault of transfers in flight."""
        names = ("seconds", "survivor", "wrong_bytes", "changed", "unended", "lost_requests")
        fields: dict[str, Any] = {"said": outcome.answer} if outcome.answer else {}
        fields |= {name: value for name in names if (value := getattr(outcome, name)) or name == "wrong_bytes"}
        fields["seconds"] = round(outcome.seconds, 2)
        about = outcome.nixl, outcome.backend, outcome.transports
        return cls(date, machine, *about, False, outcome.fault, outcome.op, fields)

    @classmethod
    def of_misuse(cls, date: str, machine: str, outcome: MisuseOutcome) -> FaultRun:
        """Return the record of a misuse."""
        fields = {"ending": outcome.ending.value, "said": outcome.error, "wrong_bytes": outcome.wrong_bytes}
        if outcome.after:
            fields["after"] = outcome.after
        return cls(date, machine, outcome.nixl, outcome.backend, "", True, outcome.kind.id, "", fields)

    @property
    def key(self) -> tuple[object, ...]:
        """What a later record of the same replaces."""
        return (self.nixl, self.backend, self.transports, self.misuse, self.id, _OPS.index(self.op))

    @property
    def cell(self) -> str:
        """What followed, as the text of a table's cell."""
        return ", ".join(_misuse(self.id, self.found) if self.misuse else _fault(self.found))


def read_runs(path: Path = RECORDS) -> list[FaultRun]:
    """Return the records.

    :raises ValueError: a line has another form.
    """
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            run = FaultRun(**json.loads(line))
            text = run.cell
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path.name}, line {number}: {error!r}") from None
        if not text or run.op not in _OPS or (run.backend, run.transports) not in BACKENDS | RDMA:
            raise ValueError(f"{path.name}, line {number}: {run.backend} {run.transports} {run.op} is not on the page")
        runs.append(run)
    return runs


def add_runs(new: Iterable[FaultRun], path: Path = RECORDS) -> None:
    """Add records; each replaces an earlier one of the same fault, backend, release and operation."""
    runs_by_key = {run.key: run for run in (read_runs(path) if path.exists() else [])}
    runs_by_key.update((run.key, run) for run in new)
    ordered = sorted(runs_by_key.values(), key=lambda run: tuple(map(str, run.key)))
    path.write_text("".join(f"{json.dumps(asdict(run))}\n" for run in ordered), encoding="utf-8")


def missing_runs(runs: Iterable[FaultRun], faults: Iterable[str]) -> list[str]:
    """Return each fault or misuse of a backend, a release and an operation that was not recorded.

    :param faults: the ids of the faults of transfers in flight.
    """
    expected = {
        (release, *backend, False, fault, _OPS.index(op))
        for fault in faults for backend in BACKENDS for release in RELEASES for op in ("WRITE", "READ")
    }  # fmt: skip
    expected |= {
        (release, *backend, True, id, _OPS.index("")) for id in KINDS for backend in MISUSED for release in RELEASES
    }
    return sorted(" ".join(map(str, key)) for key in expected - {run.key for run in runs})


def rows_of(
    runs: Sequence[FaultRun], backend: tuple[str, str], *, misuse: bool, ids: Iterable[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each fault with the cells of all releases.

    :param backend: a key of :data:`BACKENDS`.
    """
    ours = [run for run in runs if (run.backend, run.transports) == backend and run.misuse is misuse]
    for id in ids:
        cells = []
        for release in RELEASES:
            of_release = sorted((run for run in ours if run.id == id and run.nixl == release), key=lambda run: run.key)
            cells.append(_together({run.op: run for run in of_release}))
        yield id, cells


def merged_rows(rows: Iterable[tuple[str, list[str], str]]) -> list[list[str]]:
    """Merge the rows of one fault that differ only in the backend and in times; the longer times stay.

    :param rows: backend, the cells of all releases, and what to do.
    :return: the cells of each row of the page.
    """
    merged: list[tuple[list[str], list[str], str]] = []
    for backend, cells, remedy in rows:
        for names, variants, same in merged:
            if same == remedy and [_timeless(cell) for cell in cells] == [_timeless(cell) for cell in variants]:
                names.append(backend)
                variants[:] = [max(pair, key=_seconds) for pair in zip(variants, cells, strict=True)]
                break
        else:
            merged.append(([backend], list(cells), remedy))
    return [[_listed(names), *cells, remedy] for names, cells, remedy in merged]


def _listed(names: Sequence[str]) -> str:
    return "all" if len(names) == len(BACKENDS) else ", ".join(names)


def _timeless(text: str) -> str:
    return re.sub(r" in [\d.]+ s", "", text)


def _seconds(text: str) -> float:
    return max(map(float, re.findall(r" in ([\d.]+) s", text)), default=0.0)


def _together(by_op: Mapping[str, FaultRun]) -> str:
    """Return one text for all operations, or one for each if they differ in more than the time."""
    if not by_op:
        return NOT_RUN
    texts = {op: run.cell for op, run in by_op.items()}
    if len(set(map(_timeless, texts.values()))) == 1 and len(by_op) != 1:
        return max(texts.values(), key=_seconds)
    return "; ".join(f"{op}: {text}" if op else text for op, text in texts.items())


def _fault(found: Mapping[str, Any]) -> Iterator[str]:
    answer = found["said"]
    if match := _TOLD.fullmatch(answer):
        yield f"told, `{match[2]}`" if match[2] else "**never returns**" if match[3] else "lost without an error"
    elif match := _ENDS.fullmatch(answer):
        ends = [f"`{end.split()[-1]}`" for end in match[2].split(", ") if end != "none is asked for"]
        act = "returns" if match[1] == "returned" else f"raises `{match[1]}`"
        yield act
        if ends:
            yield f"transfers end as {' or '.join(ends)}"
    elif answer == "PROC":
        yield "**not told**, `PROC`"
    elif answer == "DONE":
        yield "transfers go on"
    elif answer == "the target is not told":
        yield "target not told" if found.get("changed") else "target not told, memory unchanged"
    elif re.fullmatch(r"\w+", answer):
        yield f"told in {found['seconds']:.2f} s, `{answer}`"
    elif "survivor" not in found:
        yield answer
    if found.get("unended"):
        yield f"**{found['unended']} transfers do not end**"
    if found.get("changed"):
        yield "**bytes are written after that**"
    if found.get("lost_requests"):
        yield "**the first fetch is lost**"
    if found.get("survivor") and "never" not in found["said"] and "then not" not in found["said"]:
        yield f"**the survivor {found['survivor']}**"
    elif found["wrong_bytes"]:
        yield "**the next transfer has wrong bytes**"


def _misuse(id: str, found: Mapping[str, Any]) -> Iterator[str]:
    ending, answer = MisuseEnding(found["ending"]), found["said"]
    if ending is MisuseEnding.CRASHED:
        yield f"**{answer.removeprefix('was ended by ')}**"
    elif ending is MisuseEnding.REFUSED:
        yield f"refused, `{answer}`"
    else:
        yield "**accepted**" if KINDS[id].must_refuse else "accepted"
    if found.get("after") == NEVER_DONE:
        yield f"**the next transfer to the peer stays `{NEVER_DONE}`**"
    elif found.get("after"):
        yield f"**a transfer to the peer is refused after that, `{found['after']}`**"
    elif found["wrong_bytes"]:
        yield "**the next transfer has wrong bytes**"
