# SPDX-License-Identifier: Apache-2.0
"""The flags that a user may add to nixlbench's command line, and why others are refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

#: Flags that the suite sets itself, and the option that controls each.
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


#: Flags that a user must not add, and why.
_REFUSED = {
    "benchmark_group": "the suite makes a new group for each run",
    "asio_address": "the suite chooses the address where the ranks meet",
    "asio_port": "the suite chooses a new port for each run",
    "worker_type": "the suite measures NIXL only",
    "scheme": "the suite measures pairs only",
    **dict.fromkeys(("config_file", "flagfile", "fromenv", "tryfromenv", "undefok"), "give each flag by itself"),
    **dict.fromkeys(
        ("help", "helpfull", "helpmatch", "helpon", "helppackage", "helpshort", "helpxml", "version"), "it only prints"
    ),
}


_FLAG = re.compile(r"--?([a-z][a-z0-9_]*)(?:=(.*))?", re.DOTALL)


def parse_arguments(text: str) -> tuple[str, ...]:
    """Read the user's extra flags; return each as ``--name=value``.

    :raises ValueError: if a flag is malformed, given twice or not allowed; the message is one sentence.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be split into words ({error})") from None
    flags: dict[str, str | None] = {}
    name = ""
    for argument in arguments:
        match = _FLAG.fullmatch(argument)
        if match is None:
            if not name or flags[name] is not None:
                raise ValueError(f"{argument!r} is not a flag")
            flags[name] = argument
            continue
        name = match[1]
        if name in flags:
            raise ValueError(f"--{name} is given twice")
        _refuse(name)
        flags[name] = match[2]
    _check_processes(flags)
    return tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in flags.items())


def _refuse(name: str) -> None:
    if name in _OURS:
        raise ValueError(f"--{name} is set by the suite: use {_OURS[name]} instead")
    if name in _REFUSED:
        raise ValueError(f"--{name} cannot be added: {_REFUSED[name]}")


def _check_processes(flags: Mapping[str, str | None]) -> None:
    """Check the device counts. :raises ValueError: if one is malformed, or they need more than two processes."""
    counts = {}
    for name in ("num_initiator_dev", "num_target_dev"):
        text = flags.get(name, "1") or ""
        if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
            raise ValueError(f"--{name}={text} is not a number of devices")
        counts[name] = int(text)
    if (flags.get("mode") or "SG") != "MG" and max(counts.values()) > 1:
        raise ValueError(
            f"without --mode=MG the {sum(counts.values())} devices need one process each, but the suite starts two"
        )


def name_of(flag: str) -> str:
    """Return the name of a command line flag, without dashes and value."""
    match = _FLAG.fullmatch(flag)
    return match[1] if match else flag
