# SPDX-License-Identifier: Apache-2.0
"""Read the output of nixlbench: its table, the configuration above it, and its error messages.

Any text can be read, even if it is cut off. A line counts only if it is complete, and a row only if it has a number
under each heading of its table.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

from pytest_nixl.core.units import MIB
from pytest_nixl.core.untrusted_file import open_regular
from pytest_nixl.model.nixlbench_output import (
    COUNT,
    Configuration,
    Fault,
    NixlbenchOutput,
    NixlbenchRegistration,
    NixlbenchRow,
    Trouble,
)

#: The most bytes of a file with the output of a run. A run prints kilobytes, and UCX with all its logs megabytes.
_LARGEST = 1 << 30

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
# The number of digits is limited so that every number can be read. C++ prints inf and nan for a division by zero.
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?|-?inf|-?nan")
_WARNS = frozenset("wW[")

_FLAG = re.compile(r"\(--(\w+)")
_REGISTERED = re.compile(r".* Registered as rank ([0-9]{1,9}) item ([0-9]{1,9}) of ([0-9]{1,9})")
_WARNING = re.compile(r"warning\b|W[0-9]{4} |\[[^]]{0,200}\].*\bUCX +WARN\b", re.IGNORECASE)
_FAILURE = re.compile(r"Failed\b|Timeout waiting for |Error\b|E[0-9]{4} |\[[^]]*\].*\bUCX +(?:ERROR|FATAL)\b")
_ROLE = re.compile(r"Init nixl worker, dev \S{1,100} rank ([0-9]{1,9}), type (initiator|target)\b")
_EXPECTED = re.compile(
    r"Waiting for all processes to start\.\.\. \(expecting [0-9]{1,9} total: "
    r"([0-9]{1,9}) initiators and ([0-9]{1,9}) targets\)"
)
#: The line that a shell adds to the output of a process: ``echo "exit code $?"``.
_EXIT = re.compile(r"exit (?:code|status):? ([0-9]{1,3})", re.IGNORECASE)
#: Messages of other processes when a rank, or its key, is gone.
_LOST = re.compile(r"nixlbench: (?:peer rank [0-9]+ key missing|peer liveness check failed|keepalive )")
#: Messages of a process, its C library, UCX or the launcher about a crash. A build of 1.4.0 also crashes at exit.
_CRASH = re.compile(
    r"Caught signal [0-9]+|\bSegmentation fault\b|^terminate called after|^double free or corruption|^free\(\): |"
    r"^malloc\(\): |^corrupted |\*\*\* stack smashing|"
    r"^(?:srun|slurmstepd): error: .*(?:Killed|Aborted|signal|[Oo]ut of memory)|"
    r"^(?:Aborted|Killed|Bus error|Illegal instruction|Floating point exception)\b|\bcore dumped\b|"
    r"exited on signal [0-9]+|\b[Oo]om-kill"
)
#: Messages with which nixlbench or its flag parser refuses a command line.
_REFUSAL = re.compile(
    r"ERROR: (?:unknown command line flag|illegal value|flag ')|Incorrect (?:buffer size|device list)|"
    r"Invalid (?:value for --|configuration for NIXL|POSIX API|OBJ S3|op type|randomize_|GUSLI|buffer size|"
    r"segment type|runtime: |total )|Unsupported (?:worker type|configuration for|mem type)|"
    r"Total_buffer_size must be|(?:num_iter|pipeline_depth|iter_factor) must be|storage backend should|"
    r"NVSHMEM worker requested|VMM is not supported|VRAM not supported|CUDA_FABRIC is not supported|"
    r"Byte-aligned randomization|--\w+ is disabled for nixlbench|NIXL Device API (?:requires|support)|"
    r"prepared_xfer is incompatible|Unknown storage backend|Failed to (?:parse device list|load config file)|"
    r"Error: (?:Consistency check is not supported|Number of|GUSLI backend requires|descriptor count|number of buffers)"
)
#: A line without any of these is ignored. This check skips most lines of a log quickly.
_TELLING = (
    "egistered as rank", "All processes", "Init nixl", "Waiting for all", "nixlbench", "Connecting to", "rail",
    "fabric_attr", "pytest-nixl", "uri is not", "ailed", "rror", "ERROR", "FATAL", "Timeout", "greater than",
    "nsupported", "Invalid", "Incorrect", "must be", "should", "not supported", "requested", "incompatible", "Unknown",
    "Device API", "signal", "fault", "terminate called", "double free", "free(): ", "malloc(): ", "corrupted ",
    "smashing", "Aborted", "Killed", "Illegal", "exception", "core dumped", "om-kill", "exit", "Exit", "mutex: ",
)  # fmt: skip
_GLOG = re.compile(r"E[0-9]{4} ")
_CONNECTING = "Connecting to ETCD at "
_READY = "All processes are ready to proceed"


#: The first pattern that a line matches decides its kind of failure.
_TROUBLES = (
    (re.compile(r"the target uri is not valid"), Trouble.URI_NOT_VALID),
    (re.compile(r"mutex: session is expired"), Trouble.LOCK_EXPIRED),
    (re.compile(r"Failed to acquire lock\b"), Trouble.LOCK_NOT_ACQUIRED),
    (re.compile(r"Error in barrier wait .* rank [0-9]+ completed [0-9]+/[0-9]+ ranks"), Trouble.RANKS_MISSING),
    (re.compile(r"Rank [0-9]+ is greater than or equal to global size [0-9]+"), Trouble.STALE_GROUP),
    (re.compile(r"Consistency check failed"), Trouble.INCONSISTENT),
    (re.compile(r"Unsupported NIXLBench backend"), Trouble.UNSUPPORTED_BACKEND),
    (_REFUSAL, Trouble.REFUSED),
    (_FAILURE, Trouble.OTHER),
)

#: These patterns must match at the start of a line.
_AT_THE_START = {Trouble.REFUSED, Trouble.OTHER}


def read_output(text: str) -> NixlbenchOutput:
    """Parse the output of one rank, or of several ranks one after the other. Never raises."""
    *lines, unfinished = text.split("\n")
    reader = _Reader()
    for line in lines:
        reader.line(_plain(line[:LONGEST_LINE]).rstrip())
    return reader.output(unfinished)


def read_files(paths: Sequence[Path]) -> NixlbenchOutput:
    """Parse the output of the ranks of one run from one or more files, without loading the files into memory.

    Lines with a rank label of ``srun --label`` or ``mpirun --tag-output`` are parsed per rank. Colours and control
    characters are removed.

    :raises ValueError: if a file is not a regular file, or too large.
    :raises OSError: if a file cannot be read.
    """
    outputs: list[NixlbenchOutput] = []
    for path in paths:
        readers: dict[str, _Reader] = {}
        unfinished: dict[str, str] = {}
        with open_regular(path, _LARGEST, "the output of nixlbench") as file:
            for text, ended in _lines(file):
                label, line = _unlabelled(_plain(text))
                if label not in readers:
                    if len(readers) == _MOST_LABELS:
                        continue
                    readers[label] = _Reader()
                if ended:
                    readers[label].line(line.rstrip())
                else:
                    unfinished[label] = line
        outputs += [reader.output(unfinished.get(label, "")) for label, reader in readers.items()]
    return _merged(outputs) if outputs else NixlbenchOutput()


#: Limits: characters that are read of a line (lines of nixlbench are shorter), rank labels per file, and per output
#: rows, other notable lines, and lines of transport reports.
LONGEST_LINE = 4096
_MOST_LABELS, _MOST_ROWS, _MOST_LINES, _MOST_REPORTED = 4096, 5000, 200, 20_000

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_LABEL = re.compile(r" *(?:([0-9]{1,7}): |\[[0-9]{1,9},([0-9]{1,7})\]<std(?:out|err|diag)>: ?)")


def _lines(file: BinaryIO) -> Iterator[tuple[str, bool]]:
    """Yield each line without its line break and cut to ``LONGEST_LINE``, and whether the line is complete."""
    begun = False  # whether the next part belongs to a line that was already yielded
    while line := file.readline(LONGEST_LINE):
        ended = line.endswith(b"\n")
        if not begun:
            yield line.decode(errors="replace").removesuffix("\n"), ended or len(line) == LONGEST_LINE
        begun = not ended


def _plain(line: str) -> str:
    """Remove colours and control characters."""
    if line.isprintable():
        return line
    return "".join(filter(str.isprintable, _COLOUR.sub("", line).replace("\t", " ")))


def _unlabelled(line: str) -> tuple[str, str]:
    match = _LABEL.match(line)
    return (match[1] or match[2], line[match.end() :]) if match else ("", line)


def _merged(outputs: Sequence[NixlbenchOutput]) -> NixlbenchOutput:
    """Merge the outputs of several ranks of one run."""
    if len(outputs) == 1:
        return outputs[0]
    main = next((output for output in outputs if output.tables), outputs[0])
    registrations = [registration for output in outputs for registration in output.registrations]
    faults = [fault for output in outputs for fault in output.faults]
    occurrences = Counter((registration.rank, registration.size) for registration in registrations)
    already = {fault.text for fault in faults}
    for (rank, size), count in occurrences.items():
        fault = _duplicate(rank, size)
        if count > 1 and fault.text not in already:
            faults.append(fault)
    return NixlbenchOutput(
        rows=tuple(row for output in outputs for row in output.rows)[:_MOST_ROWS],
        configuration=main.configuration,
        registrations=tuple(registrations),
        warnings=tuple(dict.fromkeys(text for output in outputs for text in output.warnings)),
        faults=tuple(faults),
        tables=sum(output.tables for output in outputs),
        endpoint=main.endpoint or next((output.endpoint for output in outputs if output.endpoint), ""),
        ready=any(output.ready for output in outputs),
        unfinished=main.unfinished,
        roles=frozenset().union(*(output.roles for output in outputs)),
        expected=main.expected or next((output.expected for output in outputs if output.expected), {}),
        report=main.report,
        crashes=tuple(text for output in outputs for text in output.crashes),
        losses=tuple(text for output in outputs for text in output.losses),
        endings=frozenset().union(*(output.endings for output in outputs)),
    )


def _duplicate(rank: int, size: int) -> Fault:
    return Fault(Trouble.DUPLICATE_RANK, f"two processes registered as rank {rank} of {size}")


class _Reader:
    """Parses one output line by line, and keeps only the results."""

    def __init__(self) -> None:
        self._rows: list[NixlbenchRow] = []
        self._values: dict[str, str] = {}
        self._registrations: list[NixlbenchRegistration] = []
        self._waiting: set[tuple[int, int]] = set()
        self._warnings: dict[str, None] = {}
        self._faults: list[Fault] = []
        self._columns: tuple[tuple[str, Decimal], ...] = ()
        self._tables, self._endpoint, self._ready, self._configuring = 0, "", False, False
        self._roles: set[tuple[int, str]] = set()
        self._rank: int | None = None
        self._endings: dict[int, int] = {}
        self._expected: dict[str, int] = {}
        self._report: deque[str] = deque(maxlen=_MOST_REPORTED)
        self._crashes: list[str] = []
        self._losses: list[str] = []

    def line(self, line: str) -> None:
        """Parse one complete line."""
        if not line:
            return
        if line[0] == "[" and ("|" in line or "+--" in line):
            self._report.append(line)
        elif line == "NIXLBench Configuration":
            self._configuring = True
        elif line.startswith("-----"):
            self._configuring = False
        elif line.startswith("Block Size") and (heading := _headings(line)):
            self._columns, self._tables, self._configuring = heading, self._tables + 1, False
        elif line[0] in _WARNS and (line[0] != "[" or "WARN" in line) and _WARNING.match(line):
            if len(self._warnings) < _MOST_LINES:
                self._warnings[line] = None
        elif self._configuring:
            if len(self._values) < _MOST_LINES:
                self._values.update(_option(line))
        elif self._columns and (row := _row(line, self._columns)):
            if len(self._rows) < _MOST_ROWS:
                self._rows.append(row)
        else:
            self._told(line)

    def _told(self, line: str) -> None:
        for marker in _TELLING:
            if marker in line:
                break
        else:
            if line[0] != "E" or not _GLOG.match(line):
                return
        if " Registered as rank " in line and (match := _REGISTERED.fullmatch(line)):
            self._registered(NixlbenchRegistration(int(match[1]), int(match[2]), int(match[3])))
        elif line == _READY:
            # All ranks have met, so the next registration belongs to another run.
            self._ready = True
            self._waiting.clear()
        elif match := _ROLE.match(line):
            self._rank = int(match[1])
            self._roles.add((self._rank, match[2]))
            self._endings.pop(self._rank, None)  # another run
        elif match := _EXIT.fullmatch(line):
            if self._rank is not None:
                self._endings[self._rank] = int(match[1])
        elif match := _EXPECTED.match(line):
            self._expected = {"initiator": int(match[1]), "target": int(match[2])}
        elif _LOST.match(line):
            _keep(self._losses, line)
        elif _CRASH.search(line):
            _keep(self._crashes, line)
        elif fault := _fault(line):
            if len(self._faults) < _MOST_LINES:
                self._faults.append(fault)
        elif line.startswith(_CONNECTING):
            self._endpoint = line.removeprefix(_CONNECTING).strip()
        elif "rail" in line or "fabric_attr" in line or line.startswith("pytest-nixl: interface"):
            self._report.append(line)

    def _registered(self, registration: NixlbenchRegistration) -> None:
        if len(self._registrations) >= _MOST_ROWS:
            return
        self._registrations.append(registration)
        if (registration.rank, registration.size) in self._waiting and len(self._faults) < _MOST_LINES:
            self._faults.append(_duplicate(registration.rank, registration.size))
        self._waiting.add((registration.rank, registration.size))

    def output(self, unfinished: str) -> NixlbenchOutput:
        """Return the result. ``unfinished`` is the text after the last line break."""
        return NixlbenchOutput(
            rows=tuple(self._rows),
            configuration=Configuration(self._values),
            registrations=tuple(self._registrations),
            warnings=tuple(self._warnings),
            faults=tuple(self._faults),
            tables=self._tables,
            endpoint=self._endpoint,
            ready=self._ready,
            unfinished=unfinished,
            roles=frozenset(self._roles),
            expected=self._expected,
            report="\n".join(self._report),
            crashes=tuple(self._crashes),
            losses=tuple(self._losses),
            endings=frozenset(self._endings.items()),
        )


def _keep(texts: list[str], text: str) -> None:
    if len(texts) < _MOST_LINES and text not in texts:
        texts.append(text)


def _headings(line: str) -> tuple[tuple[str, Decimal], ...]:
    """Return the field and the unit factor of each column; empty if the line is not the heading of a table."""
    columns = []
    for text in re.split(r" {2,}", line):
        name, _, unit = text[:-1].partition(" (") if text.endswith(")") else (text, "", None)
        recognised = name in _FIELDS and unit in _UNITS
        columns.append((_FIELDS[name] if recognised else "", _UNITS[unit] if recognised else Decimal(1)))
    return tuple(columns) if {name for name, _ in columns} >= _NEEDED else ()


def _row(line: str, columns: tuple[tuple[str, Decimal], ...]) -> NixlbenchRow | None:
    cells = line.split()
    if len(cells) != len(columns) or not all(_NUMBER.fullmatch(cell) for cell in cells):
        return None
    named = {name: (cell, factor) for (name, factor), cell in zip(columns, cells, strict=True) if name}
    block, batch = named.pop("block")[0], named.pop("batch")[0]
    if not COUNT.fullmatch(block) or not COUNT.fullmatch(batch):
        return None
    figures = {name: float(Decimal(cell) * factor) for name, (cell, factor) in named.items()}
    return NixlbenchRow(block=int(block), batch=int(batch), **figures)


def _option(line: str) -> Iterator[tuple[str, str]]:
    """Yield flag and value of a configuration line, such as ``Op type (--op_type=[READ,WRITE])    : WRITE``."""
    label, colon, value = line.partition(": ")
    if not colon:
        label, colon, value = line.removesuffix(":"), line[-1:], ""
    if colon.strip() == ":":
        flag = _FLAG.search(label)
        yield (flag[1] if flag else label.strip().lower().replace(" ", "_")), value.strip()


def _fault(line: str) -> Fault | None:
    for pattern, trouble in _TROUBLES:
        if pattern.match(line) if trouble in _AT_THE_START else pattern.search(line):
            return Fault(trouble, line)
    return None
