# SPDX-License-Identifier: Apache-2.0
"""Build the command line of nixlbench from a row and the user's extra flags, and read the flags of its ``--help``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.units import MIB
from pytest_nixl.model.nixlbench_output import LARGE_BLOCK
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.session.nixlbench_flags import name_of

_IN_HELP = re.compile(r"^ {4}-([a-z][a-z0-9_]*) \(", re.MULTILINE)

#: Counts must be multiples of this: nixlbench divides its iterations by threads, and above LARGE_BLOCK by 16.
_STEP = 16
#: Default size of a row: bytes at most, transfers at least and at most. Most machines need well under a second.
_BYTES, _FEWEST, _MOST = 1 << 30, 16, 1008


@dataclass(frozen=True)
class Meeting:
    """How the two processes of a run find each other.

    :param runtime: ``ETCD`` or ``ASIO``.
    :param flags: flags for both processes, without dashes.
    """

    runtime: str
    flags: Mapping[str, str]


def label(more: Sequence[str]) -> str:
    """Return the name of nixlbench with the user's flags for row keys, such as ``nixlbench[MG8x8]``.

    ``--check_consistency`` does not change the name, because it only checks the bytes.
    """
    flags = {name_of(flag): flag.partition("=")[2] for flag in more}
    flags.pop("check_consistency", None)
    counts = [flags.pop(name, "1") for name in ("num_initiator_dev", "num_target_dev")]
    parts = [f"MG{counts[0]}x{counts[1]}"] if flags.pop("mode", "SG") == "MG" else []
    parts += [f"{name}={value}" if value else name for name, value in flags.items()]
    return f"nixlbench[{','.join(parts)}]" if parts else "nixlbench"


def known_flags(help_text: str) -> frozenset[str]:
    """Return the flags that the text of ``--help`` lists, without dashes."""
    return frozenset(_IN_HELP.findall(help_text))


def command(
    row: RowKey, backend: str, meeting: Meeting, *, iterations: int | None, warmup: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of both processes for one row.

    :param backend: NIXL's name of the backend.
    :param meeting: how the processes find each other.
    :param iterations: number of timed transfers; None for a number that takes well under a second.
    :param warmup: least number of transfers before them.
    :param more: the user's extra flags.
    """
    extra_flags = {name_of(flag): flag.partition("=")[2] for flag in more}
    devices = max(int(extra_flags.get(name) or 1) for name in ("num_initiator_dev", "num_target_dev"))
    size = row.block * row.batch
    timed = iterations or max(_FEWEST, min(_MOST, _BYTES // size))
    factor = _STEP if row.block > LARGE_BLOCK else 1
    flags = {
        **meeting.flags,
        "backend": backend,
        "op_type": row.op,
        "initiator_seg_type": row.memory.initiator,
        "target_seg_type": row.memory.target,
        "start_block_size": str(row.block),
        "max_block_size": str(row.block),
        "start_batch_size": str(row.batch),
        "max_batch_size": str(row.batch),
        "num_iter": str(_rounded(timed) * factor),
        "warmup_iter": str(_rounded(max(1, warmup)) * factor),
    }
    if row.depth > 1:
        flags["pipeline_depth"] = str(row.depth)
    if "total_buffer_size" not in extra_flags:
        # The default is 8 GiB per process. Use whole MiB, so that any number of threads can share it.
        flags["total_buffer_size"] = str(-(-size * row.depth // MIB) * MIB * devices)
    return [*(f"--{name}={value}" for name, value in flags.items()), *more]


def _rounded(count: int) -> int:
    return -(-count // _STEP) * _STEP


def command_text(path: str, arguments: Sequence[str]) -> str:
    """Return a command as a user can type it."""
    return shlex.join([Path(path).name or "nixlbench", *arguments])
