# SPDX-License-Identifier: Apache-2.0
"""What nixlbench printed: its configuration, the rows of its table, and the failures that it reports."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pytest_nixl.core import units
from pytest_nixl.core.units import MIB
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey

#: For blocks larger than this (bytes), nixlbench divides its iterations by ``large_blk_iter_ftr``.
LARGE_BLOCK = MIB

#: Backends whose target is storage and not memory of a rank, although nixlbench prints a segment type.
STORAGE = {
    "GDS": "FILE",
    "GDS_MT": "FILE",
    "POSIX": "FILE",
    "HF3FS": "FILE",
    "GUSLI": "BLK",
    "OBJ": "OBJ",
    "AZURE_BLOB": "OBJ",
    "INFINIA": "OBJ",
}

#: How far the printed bandwidth and ``Avg Lat.`` may differ, and by how many seconds the latter is rounded.
_TENFOLD, _ROUNDED = 10, 0.05e-6

#: What nixlbench prints above each table, by flag. Without one of these the configuration is incomplete.
_ALWAYS_PRINTED = (
    "runtime_type",
    "worker_type",
    "backend",
    "enable_pt",
    "device_list",
    "initiator_seg_type",
    "target_seg_type",
    "scheme",
    "mode",
    "op_type",
    "check_consistency",
    "total_buffer_size",
    "num_initiator_dev",
    "num_target_dev",
    "start_block_size",
    "max_block_size",
    "start_batch_size",
    "max_batch_size",
    "num_iter",
    "warmup_iter",
    "large_blk_iter_ftr",
    "num_threads",
)
#: The first and the last block and batch of a table.
_SWEEP = ("start_block_size", "max_block_size", "start_batch_size", "max_batch_size")
#: What releases since May 2026 also print; older ones print none of these.
_PRINTED_TOGETHER = ("reregister_mem", "pipeline_depth", "use_hugepages")

#: A positive integer.
COUNT = re.compile(r"0*[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class NixlbenchRow:
    """One row of the table. Bandwidths are bytes per second, times are seconds. None if the table has no such column.

    :param block: bytes of one block.
    :param batch: blocks per transfer.
    :param bandwidth: bandwidth of rank 0 alone.
    :param latency_avg: time per block: nixlbench divides the time of all transfers by their number and by the batch.
    :param aggregate: sum over all initiators; only with more than two ranks.
    :param utilisation: per cent of 50 GB/s per pair, on any machine; only with more than two ranks.
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

    @property
    def spread(self) -> float:
        """How many times longer the slowest hundredth of the transfers took than the average; 0 if not printed."""
        slowest = max((time for time in (self.post_p99, self.transfer_p99) if time is not None), default=0.0)
        average = (self.post_avg or 0.0) + (self.transfer_avg or 0.0)
        return slowest / average if average > 0 else 0.0


@dataclass(frozen=True)
class Configuration:
    """The options that nixlbench printed: values by flag, or by the printed words if there is no flag."""

    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The backend in capitals; empty if not printed."""
        return self.values.get("backend", "").upper()

    @property
    def op(self) -> str:
        """``WRITE`` or ``READ``; empty if not printed."""
        return self.values.get("op_type", "").upper()

    @property
    def initiator_memory(self) -> str:
        """``DRAM`` or ``VRAM``; empty if not printed."""
        return self.values.get("initiator_seg_type", "").upper()

    @property
    def target_memory(self) -> str:
        """``DRAM`` or ``VRAM``, even if the target is a file; empty if not printed."""
        return self.values.get("target_seg_type", "").upper()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that nixlbench was given; ``("all",)`` if it was given none."""
        return tuple(name for name in self.values.get("device_list", "").split(",") if name)

    def count(self, name: str) -> int | None:
        """Return an option that is a positive integer; None if it was not printed or is something else."""
        text = self.values.get(name, "")
        return int(text) if COUNT.fullmatch(text) else None

    def key(self, block: int, batch: int) -> RowKey:
        """Return the key of the row with ``batch`` blocks of ``block`` bytes."""
        return RowKey(
            backend=self.backend,
            op=self.op,
            memory=MemoryPair(self.initiator_memory, STORAGE.get(self.backend, self.target_memory)),
            block=block,
            batch=batch,
            depth=self.count("pipeline_depth") or 1,
        )

    def transfers(self, block: int) -> tuple[int, int] | None:
        """Return the numbers of timed and of warm-up transfers of ``block`` bytes; None if not printed."""
        timed, factor = self.count("num_iter"), self.count("large_blk_iter_ftr")
        warmup = 0 if self.values.get("warmup_iter") == "0" else self.count("warmup_iter")
        if timed is None or warmup is None or factor is None:
            return None
        return (timed // factor, warmup // factor) if block > LARGE_BLOCK else (timed, warmup)

    def contradiction(self, row: NixlbenchRow) -> str:
        """Return in words how the bandwidth of a row contradicts its ``Avg Lat.`` at least tenfold; else nothing.

        nixlbench computes both from the same time. Transfers that overlap may be counted in one of the two only.
        """
        if row.latency_avg is None or not 0 < row.bandwidth < math.inf:
            return ""
        overlap = math.prod(self.count(name) or 1 for name in ("pipeline_depth", "num_threads", "num_initiator_dev"))
        least, most = row.latency_avg - _ROUNDED, row.latency_avg + _ROUNDED
        took = row.block / row.bandwidth
        if least / (_TENFOLD * overlap) < took < most * _TENFOLD * overlap:
            return ""
        return (
            f"nixlbench printed {row.bandwidth / 1e9:g} GB/s, at which a block takes {units.microseconds(took)} us, "
            f"but an Avg Lat. of {units.microseconds(row.latency_avg)} us"
        )

    def lacking(self) -> tuple[str, ...]:
        """Return the flags of the options that nixlbench prints in each run, and that this output does not have."""
        printed = set(self.values)
        newer = printed & {*_PRINTED_TOGETHER, "prepared_xfer"}
        expected = (*_ALWAYS_PRINTED, *(_PRINTED_TOGETHER if newer else ()))
        if self.planned() is None:
            printed -= {flag for flag in _SWEEP if self.count(flag) is None}
        return tuple(flag for flag in expected if flag not in printed)

    def planned(self) -> tuple[tuple[int, int], ...] | None:
        """Return block and batch of each row of the complete table, in order; None if not printed."""
        block, last_block, batch, last_batch = map(self.count, _SWEEP)
        if block is None or last_block is None or batch is None or last_batch is None:
            return None
        return tuple((size, count) for size in _doubled(block, last_block) for count in _doubled(batch, last_batch))


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


@dataclass(frozen=True)
class NixlbenchRegistration:
    """The registration of a process: its rank, its position, and the expected number of processes."""

    rank: int
    item: int
    size: int


class Trouble(str, Enum):
    """The kind of a failure, according to the message of nixlbench."""

    URI_NOT_VALID = "URI-NOT-VALID"
    LOCK_EXPIRED = "LOCK-EXPIRED"
    LOCK_NOT_ACQUIRED = "LOCK-NOT-ACQUIRED"
    RANKS_MISSING = "RANKS-MISSING"
    STALE_GROUP = "STALE-GROUP"
    DUPLICATE_RANK = "DUPLICATE-RANK"
    INCONSISTENT = "INCONSISTENT"
    UNSUPPORTED_BACKEND = "UNSUPPORTED-BACKEND"
    REFUSED = "REFUSED"
    OTHER = "OTHER"

    def __str__(self) -> str:
        return self.value


REMEDIES = {
    Trouble.URI_NOT_VALID: "Give nixlbench an etcd endpoint of the form http://HOST:PORT, without a path or a final "
    "slash, whose host resolves to an IPv4 address on nixlbench's host.",
    Trouble.LOCK_EXPIRED: "The lease of nixlbench's lock ended before it was this process's turn: etcd heard nothing "
    "from it for too long. Start fewer processes on its host, check that etcd answers quickly (etcdctl --endpoints URL "
    "endpoint health), then run it again in a new --benchmark_group.",
    Trouble.LOCK_NOT_ACQUIRED: "Check from nixlbench's host that etcd answers at the endpoint "
    "(etcdctl --endpoints URL endpoint health), then run it again.",
    Trouble.RANKS_MISSING: "Start every rank with the same etcd and the same --benchmark_group, use a new group for "
    "each run, and read what the missing ranks printed.",
    Trouble.STALE_GROUP: "Keys of an earlier run are in etcd, or too many processes were started: use a new "
    "--benchmark_group for each run; if no run is active, etcdctl del --prefix xferbench deletes the old keys.",
    Trouble.DUPLICATE_RANK: "Two processes got the same rank, so the run cannot start: use a nixlbench whose "
    "registration takes the etcd lock, and start it again in a new --benchmark_group.",
    Trouble.INCONSISTENT: "Do not trust transfers over this transport: keep the output of both ranks, and run again "
    "with --check_consistency=1 over another backend or transport.",
    Trouble.UNSUPPORTED_BACKEND: "Write the backend in capitals, such as LIBFABRIC; nixlbench --help lists them.",
    Trouble.REFUSED: "Correct nixlbench's command line on every rank (nixlbench --help), then run it again.",
    Trouble.OTHER: "Read what both ranks printed before this line.",
}


@dataclass(frozen=True)
class Fault:
    """A line of output in which nixlbench reports a failure."""

    trouble: Trouble
    text: str

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.trouble]


@dataclass(frozen=True)
class NixlbenchOutput:
    """The parsed output of nixlbench.

    :param rows: rows of its tables.
    :param configuration: options that it printed.
    :param registrations: ranks that registered.
    :param warnings: warning lines.
    :param faults: lines that report a failure.
    :param tables: number of tables; two or more mean several runs in one text.
    :param endpoint: the etcd that it connected to; empty if none was printed.
    :param ready: whether all ranks had met.
    :param unfinished: text after the last line break. It may be cut off and is not parsed.
    :param roles: rank and role (``initiator`` or ``target``) of each process with output in the text.
    :param expected: expected number of processes per role; empty if not printed.
    :param report: lines in which UCX or libfabric report their transports.
    :param crashes: lines that report a crash, from the process or its launcher.
    :param losses: lines in which a process reports that another process, or its key in etcd, is gone.
    :param endings: rank and exit code of each process whose output ends with the line ``exit code N`` of its shell.
    """

    rows: tuple[NixlbenchRow, ...] = ()
    configuration: Configuration = field(default_factory=Configuration)
    registrations: tuple[NixlbenchRegistration, ...] = ()
    warnings: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    tables: int = 0
    endpoint: str = ""
    ready: bool = False
    unfinished: str = ""
    roles: frozenset[tuple[int, str]] = frozenset()
    expected: Mapping[str, int] = field(default_factory=dict)
    report: str = ""
    crashes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    endings: frozenset[tuple[int, int]] = frozenset()

    @property
    def recognised(self) -> bool:
        """Whether the text contains any output of nixlbench."""
        named_fault = any(fault.trouble is not Trouble.OTHER for fault in self.faults)
        printed = self.tables or self.configuration.values or self.registrations or self.endpoint
        return bool(printed or named_fault or self.ready or self.roles)
