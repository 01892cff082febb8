# SPDX-License-Identifier: Apache-2.0
"""Read what nixlbench prints: its table, the configuration above it, and what it says when it fails.

Any text can be read, also one that was cut off anywhere: what a line says counts only once its end was printed, and a
row only if it has a number under each heading of its table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum

from pytest_nixl.units import MIB

#: Blocks larger than this are repeated ``large_blk_iter_ftr`` times less often.
LARGE_BLOCK = MIB

_HEADING = re.compile(r"(?P<name>.*?)(?: \((?P<unit>[^()]*)\))?")
_FIELDS = {
    "Block Size": "block",
    "Batch Size": "batch",
    "B/W": "bandwidth",
    "Aggregate B/W": "aggregate",
    "Network Util": "utilisation",
    "Avg Lat.": "latency_avg",
    "P99 Lat.": "latency_p99",
    "Avg Prep": "prep_avg",
    "P99 Prep": "prep_p99",
    "Avg Post": "post_avg",
    "P99 Post": "post_p99",
    "Avg Tx": "transfer_avg",
    "P99 Tx": "transfer_p99",
}
_UNITS = {
    "GB/Sec": Decimal(10**9), "GiB/Sec": Decimal(1 << 30), "MB/Sec": Decimal(10**6), "MiB/Sec": Decimal(MIB),
    "s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9"),
    "%": Decimal(1), "B": Decimal(1), None: Decimal(1),
}  # fmt: skip
_NEEDED = {"block", "batch", "bandwidth"}
_COUNT = re.compile(r"0*[1-9][0-9]{0,18}")
# Digits are bounded so that every number can be read; the C++ library prints the last three where it divided by zero.
_NUMBER = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?|-?inf|-?nan")

_FLAG = re.compile(r"\(--(\w+)")
_REGISTERED = re.compile(r".*\bRegistered as rank ([0-9]{1,9}) item ([0-9]{1,9}) of ([0-9]{1,9})")
_WARNING = re.compile(r"warning\b|W[0-9]{4} |\[[^]]*\].*\bUCX +WARN\b", re.IGNORECASE)
_FAILURE = re.compile(r"Failed\b|Error\b|Incorrect device list|E[0-9]{4} |\[[^]]*\].*\bUCX +(?:ERROR|FATAL)\b")
_CONNECTING = "Connecting to ETCD at "
_READY = "All processes are ready to proceed"


@dataclass(frozen=True)
class Row:
    """One line of the table. Bandwidths are bytes per second, times seconds; None: the table has no such column.

    :param bandwidth: of rank 0 alone.
    :param latency_avg: of one block: nixlbench divides the time of all transfers by their number and by the batch.
    :param aggregate: the sum over all initiators; only with more than two ranks.
    :param utilisation: per cent of 50 GB/s for each pair, whatever the machine has; only with more than two ranks.
    """

    block: int
    batch: int
    bandwidth: float
    latency_avg: float | None = None
    latency_p99: float | None = None
    prep_avg: float | None = None
    prep_p99: float | None = None
    post_avg: float | None = None
    post_p99: float | None = None
    transfer_avg: float | None = None
    transfer_p99: float | None = None
    aggregate: float | None = None
    utilisation: float | None = None


@dataclass(frozen=True)
class Configuration:
    """What nixlbench printed of its options: values by name of the flag, or by the words where there is no flag."""

    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The backend in capitals; empty: not printed."""
        return self.values.get("backend", "").upper()

    @property
    def op(self) -> str:
        """``WRITE`` or ``READ``; empty: not printed."""
        return self.values.get("op_type", "").upper()

    @property
    def initiator_memory(self) -> str:
        """``DRAM`` or ``VRAM``; empty: not printed."""
        return self.values.get("initiator_seg_type", "").upper()

    @property
    def target_memory(self) -> str:
        """``DRAM`` or ``VRAM``, also where the target is a file; empty: not printed."""
        return self.values.get("target_seg_type", "").upper()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that nixlbench was given; ``("all",)`` where it was given none."""
        return tuple(name for name in self.values.get("device_list", "").split(",") if name)

    def count(self, name: str) -> int | None:
        """Return a whole number above zero; None: not printed, or no such number."""
        text = self.values.get(name, "")
        return int(text) if _COUNT.fullmatch(text) else None

    def transfers(self, block: int) -> tuple[int, int] | None:
        """Return how many transfers of ``block`` are timed, and how many are made before; None: not printed."""
        timed, factor = self.count("num_iter"), self.count("large_blk_iter_ftr")
        warmup = 0 if self.values.get("warmup_iter") == "0" else self.count("warmup_iter")
        if timed is None or warmup is None or factor is None:
            return None
        return (timed // factor, warmup // factor) if block > LARGE_BLOCK else (timed, warmup)

    def payload(self, block: int, batch: int) -> int | None:
        """Return the bytes that all initiators move for one row, warm-up included; None: it cannot be told.

        It is known for pairs (``--scheme=pairwise``) only.
        """
        transfers, initiators = self.transfers(block), self.count("num_initiator_dev")
        if transfers is None or initiators is None or self.values.get("scheme") != "pairwise":
            return None
        return sum(transfers) * block * batch * initiators

    def planned(self) -> tuple[tuple[int, int], ...] | None:
        """Return block and batch of each row that the whole table has, in its order; None: not printed."""
        block, last_block = self.count("start_block_size"), self.count("max_block_size")
        batch, last_batch = self.count("start_batch_size"), self.count("max_batch_size")
        if block is None or last_block is None or batch is None or last_batch is None:
            return None
        return tuple((size, count) for size in _doubled(block, last_block) for count in _doubled(batch, last_batch))


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


@dataclass(frozen=True)
class Registration:
    """What a process was told when it registered: its rank, its place, and how many are expected."""

    rank: int
    item: int
    size: int


class Trouble(str, Enum):
    """What went wrong, as far as nixlbench's own words tell."""

    URI_NOT_VALID = "URI-NOT-VALID"
    LOCK_NOT_ACQUIRED = "LOCK-NOT-ACQUIRED"
    RANKS_MISSING = "RANKS-MISSING"
    STALE_GROUP = "STALE-GROUP"
    DUPLICATE_RANK = "DUPLICATE-RANK"
    INCONSISTENT = "INCONSISTENT"
    UNSUPPORTED_BACKEND = "UNSUPPORTED-BACKEND"
    OTHER = "OTHER"

    def __str__(self) -> str:
        return self.value


#: The first that is found in a line tells its trouble.
_TROUBLES = (
    (re.compile(r"the target uri is not valid"), Trouble.URI_NOT_VALID),
    (re.compile(r"Failed to acquire lock\b"), Trouble.LOCK_NOT_ACQUIRED),
    (re.compile(r"Error in barrier wait .* rank [0-9]+ completed [0-9]+/[0-9]+ ranks"), Trouble.RANKS_MISSING),
    (re.compile(r"Rank [0-9]+ is greater than or equal to global size [0-9]+"), Trouble.STALE_GROUP),
    (re.compile(r"Consistency check failed"), Trouble.INCONSISTENT),
    (re.compile(r"Unsupported NIXLBench backend"), Trouble.UNSUPPORTED_BACKEND),
    (_FAILURE, Trouble.OTHER),
)

REMEDIES = {
    Trouble.URI_NOT_VALID: "Give nixlbench an etcd endpoint of the form http://HOST:PORT whose host resolves to IPv4 "
    "there, without a path or a slash at its end.",
    Trouble.LOCK_NOT_ACQUIRED: "See that etcd answers at the endpoint from where nixlbench runs "
    "(etcdctl --endpoints URL endpoint health), then run it again.",
    Trouble.RANKS_MISSING: "See that every rank is started with the same etcd and the same --benchmark_group, and read "
    "what the missing ones printed; give each run a group of its own.",
    Trouble.STALE_GROUP: "Keys of an earlier run are in etcd, or a process too many was started: give each run a "
    "--benchmark_group of its own; where none is running, etcdctl del --prefix xferbench clears them.",
    Trouble.DUPLICATE_RANK: "Two processes were given one rank, so that the run cannot start: use a nixlbench whose "
    "registration takes the etcd lock, start it again in a new --benchmark_group.",
    Trouble.INCONSISTENT: "Trust no transfer on this path: keep both ranks' output, and run it again with "
    "--check_consistency=1 over another backend or transport.",
    Trouble.UNSUPPORTED_BACKEND: "Name the backend in capitals, such as LIBFABRIC, and see nixlbench --help.",
    Trouble.OTHER: "Read what both ranks printed before this line.",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A line in which nixlbench says what went wrong."""

    trouble: Trouble
    text: str

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.trouble]


@dataclass(frozen=True)
class Output:
    """What one text of nixlbench says.

    :param tables: how many tables it has; two or more are several runs in one text.
    :param endpoint: the etcd that it went to; empty: none was printed.
    :param ready: whether all ranks had met.
    :param unfinished: what stands after the last end of a line: it may be cut off, and nothing was read from it.
    """

    rows: tuple[Row, ...] = ()
    configuration: Configuration = field(default_factory=Configuration)
    registrations: tuple[Registration, ...] = ()
    warnings: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    tables: int = 0
    endpoint: str = ""
    ready: bool = False
    unfinished: str = ""

    @property
    def recognised(self) -> bool:
        """Whether anything in it is nixlbench's."""
        known = any(fault.trouble is not Trouble.OTHER for fault in self.faults)
        said = self.tables or self.configuration.values or self.registrations or self.endpoint or self.ready
        return bool(said or known)


def read_output(text: str) -> Output:
    """Read what nixlbench printed: the output of one rank, or of several after each other. It never raises."""
    *lines, unfinished = text.split("\n")
    rows: list[Row] = []
    values: dict[str, str] = {}
    registrations: list[Registration] = []
    waiting: set[tuple[int, int]] = set()
    warnings: list[str] = []
    faults: list[Fault] = []
    columns: tuple[tuple[str, Decimal], ...] = ()
    tables, endpoint, ready, configuring = 0, "", False, False
    for line in (line.rstrip() for line in lines):
        if line == "NIXLBench Configuration":
            configuring = True
        elif line.startswith("-----"):
            configuring = False
        elif heading := _headings(line):
            columns, tables, configuring = heading, tables + 1, False
        elif _WARNING.match(line):
            warnings.append(line)
        elif configuring:
            values.update(_option(line))
        elif columns and (row := _row(line, columns)):
            rows.append(row)
        elif match := _REGISTERED.fullmatch(line):
            one = Registration(int(match[1]), int(match[2]), int(match[3]))
            registrations.append(one)
            if (one.rank, one.size) in waiting:
                faults.append(
                    Fault(Trouble.DUPLICATE_RANK, f"two processes registered as rank {one.rank} of {one.size}")
                )
            waiting.add((one.rank, one.size))
        elif line == _READY:
            # Ranks met: the next that registers is of another run.
            ready = True
            waiting.clear()
        elif fault := _fault(line):
            faults.append(fault)
        elif line.startswith(_CONNECTING):
            endpoint = line.removeprefix(_CONNECTING).strip()
    return Output(
        rows=tuple(rows),
        configuration=Configuration(values),
        registrations=tuple(registrations),
        warnings=tuple(warnings),
        faults=tuple(faults),
        tables=tables,
        endpoint=endpoint,
        ready=ready,
        unfinished=unfinished,
    )


def _headings(line: str) -> tuple[tuple[str, Decimal], ...]:
    """Return the field and the factor of each column; nothing where the line does not head a table."""
    if not line.startswith("Block Size"):
        return ()
    columns = []
    for text in re.split(r" {2,}", line):
        match = _HEADING.fullmatch(text)
        name, unit = (match["name"], match["unit"]) if match else (text, None)
        known = name in _FIELDS and unit in _UNITS
        columns.append((_FIELDS[name] if known else "", _UNITS[unit] if known else Decimal(1)))
    return tuple(columns) if {name for name, _ in columns} >= _NEEDED else ()


def _row(line: str, columns: tuple[tuple[str, Decimal], ...]) -> Row | None:
    words = line.split()
    if len(words) != len(columns) or not all(_NUMBER.fullmatch(word) for word in words):
        return None
    named = {name: (word, factor) for (name, factor), word in zip(columns, words, strict=True) if name}
    block, batch = named.pop("block")[0], named.pop("batch")[0]
    if not _COUNT.fullmatch(block) or not _COUNT.fullmatch(batch):
        return None
    figures = {name: float(Decimal(word) * factor) for name, (word, factor) in named.items()}
    return Row(block=int(block), batch=int(batch), **figures)


def _option(line: str) -> Iterator[tuple[str, str]]:
    """Yield an option as nixlbench prints it: ``Op type (--op_type=[READ,WRITE])    : WRITE``."""
    words, colon, value = line.partition(": ")
    if not colon:
        words, colon, value = line.removesuffix(":"), line[-1:], ""
    if colon.strip() == ":":
        flag = _FLAG.search(words)
        yield (flag[1] if flag else words.strip().lower().replace(" ", "_")), value.strip()


def _fault(line: str) -> Fault | None:
    for pattern, trouble in _TROUBLES:
        if pattern.search(line) if trouble is not Trouble.OTHER else pattern.match(line):
            return Fault(trouble, line)
    return None
