# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

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


def name_of(flag: str) -> str:
    """Return the name of a flag as it stands on a command line."""
    match = _FLAG.fullmatch(flag)
    return match[1] if match else flag
