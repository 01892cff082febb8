# SPDX-License-Identifier: Apache-2.0
"""The command line of nixlbench: what a row asks for, what the user adds, and what a program's own help knows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.checks.nixlbench.table import LARGE_BLOCK
from pytest_nixl.core.units import MIB
from pytest_nixl.model.samples import RowKey

#: What the suite says itself, and by which option it is told.
_OURS = {
    "backend": "--nixl-backend",
    "op_type": "--nixl-op",
    "initiator_seg_type": "--nixl-memory",
    "target_seg_type": "--nixl-memory",
    "start_block_size": "--nixl-blocks",
    "max_block_size": "--nixl-blocks",
    "start_batch_size": "--nixl-batch",
    "max_batch_size": "--nixl-batch",
    "pipeline_depth": "--nixl-depth",
    "num_iter": "--nixl-iterations",
    "warmup_iter": "--nixl-warmup",
    "etcd_endpoints": "--nixl-etcd",
    "runtime_type": "--nixl-nixlbench-runtime",
}
#: What nobody may say: the groups and ports are new for each run, pairs are what is judged, and files hide flags.
_REFUSED = {
    "benchmark_group": "each run has a group of its own",
    "asio_address": "the ranks are told where to meet",
    "asio_port": "each run has a port of its own",
    "worker_type": "the rows are NIXL's",
    "scheme": "the rows are of pairs",
    **dict.fromkeys(("config_file", "flagfile", "fromenv", "tryfromenv", "undefok"), "flags are given one by one"),
    **dict.fromkeys(
        ("help", "helpfull", "helpmatch", "helpon", "helppackage", "helpshort", "helpxml", "version"), "it only prints"
    ),
}
_FLAG = re.compile(r"--?([a-z][a-z0-9_]*)(?:=(.*))?", re.DOTALL)
_IN_HELP = re.compile(r"^ {4}-([a-z][a-z0-9_]*) \(", re.MULTILINE)

#: nixlbench divides its iterations by threads, and above LARGE_BLOCK by 16: other counts it changes itself.
_STEP = 16
#: Bytes that a row is timed for at most, and transfers at least and at most: well under a second of most machines.
_BYTES, _FEWEST, _MOST = 1 << 30, 16, 1008


@dataclass(frozen=True)
class Meeting:
    """Where the two processes of a run meet: ``flags`` tell it to both.

    :param runtime: ``ETCD`` or ``ASIO``.
    """

    runtime: str
    flags: Mapping[str, str]


def parse_arguments(text: str) -> tuple[str, ...]:
    """Read what the user adds, each as ``--name=value``. :raises ValueError: in one sentence, where it cannot be."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words ({error})") from None
    given: dict[str, str | None] = {}
    name = ""
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is None:
            if not name or given[name] is not None:
                raise ValueError(f"{word!r} is no flag")
            given[name] = word
            continue
        name = match[1]
        if name in given:
            raise ValueError(f"--{name} is given twice")
        _refuse(name)
        given[name] = match[2]
    _check_processes(given)
    return tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in given.items())


def _refuse(name: str) -> None:
    if name in _OURS:
        raise ValueError(f"--{name} is the suite's own to say, as {_OURS[name]} tells it")
    if name in _REFUSED:
        raise ValueError(f"--{name} cannot be added: {_REFUSED[name]}")


def _check_processes(given: Mapping[str, str | None]) -> None:
    """:raises ValueError: where more than two processes would be wanted, or a count is none."""
    counts = {}
    for name in ("num_initiator_dev", "num_target_dev"):
        text = given.get(name, "1") or ""
        if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
            raise ValueError(f"--{name}={text} is no number of devices")
        counts[name] = int(text)
    if (given.get("mode") or "SG") != "MG" and max(counts.values()) > 1:
        raise ValueError(
            f"without --mode=MG each of the {sum(counts.values())} devices is a process of its own, and two are started"
        )


def label(more: Sequence[str]) -> str:
    """Return how rows name nixlbench with what the user adds: ``nixlbench[MG8x8]``.

    What is only a check of the bytes makes no other row.
    """
    said = {name_of(flag): flag.partition("=")[2] for flag in more}
    said.pop("check_consistency", None)
    counts = [said.pop(name, "1") for name in ("num_initiator_dev", "num_target_dev")]
    words = [f"MG{counts[0]}x{counts[1]}"] if said.pop("mode", "SG") == "MG" else []
    words += [f"{name}={value}" if value else name for name, value in said.items()]
    return f"nixlbench[{','.join(words)}]" if words else "nixlbench"


def known_flags(help_text: str) -> frozenset[str]:
    """Return the flags that a program's own ``--help`` tells of, without their dashes."""
    return frozenset(_IN_HELP.findall(help_text))


def name_of(flag: str) -> str:
    """Return the name of a flag as it stands on a command line."""
    match = _FLAG.fullmatch(flag)
    return match[1] if match else flag


def command(
    row: RowKey, backend: str, meeting: Meeting, *, iterations: int | None, warmup: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of both processes for one row.

    :param backend: NIXL's name of it.
    :param iterations: transfers to time; None: as many as take well under a second.
    :param warmup: transfers before these, at least.
    :param more: what the user adds.
    """
    said = {name_of(flag): flag.partition("=")[2] for flag in more}
    devices = max(int(said.get(name) or 1) for name in ("num_initiator_dev", "num_target_dev"))
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
    if "total_buffer_size" not in said:
        # The default is 8 GiB for each process. Whole MiB, so that any number of threads can share it.
        flags["total_buffer_size"] = str(-(-size * row.depth // MIB) * MIB * devices)
    return [*(f"--{name}={value}" for name, value in flags.items()), *more]


def _rounded(count: int) -> int:
    return -(-count // _STEP) * _STEP


def shown(path: str, arguments: Sequence[str]) -> str:
    """Return a command as it can be typed."""
    return shlex.join([Path(path).name or "nixlbench", *arguments])
