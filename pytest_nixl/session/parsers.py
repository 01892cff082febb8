# SPDX-License-Identifier: Apache-2.0
"""What options may be, and how their text is read: a bad one is a :class:`ValueError` of one sentence."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import Any

from pytest_nixl.core import units
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.model.memory import OPS, MemoryPair
from pytest_nixl.model.settings import MOST_LAUNCHES, RAW_TOOLS, AlternateImage

ETCD_SERVERS = ("auto", "external", "container", "embedded")
DEFAULT_ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.18"

#: The most that can be asked for: more is a slip of the finger, and would end in a worker that has no memory.
MOST_BATCH, MOST_DEPTH, MOST_ITERATIONS, MOST_RANKS = 1_000_000, 65_536, 100_000_000, 65_536
#: The longest time that a setting may be, in seconds: a week.
LONGEST = 7 * 86_400.0


NIXLBENCH_RUNTIMES = ("auto", "ETCD", "ASIO")
NIXLBENCH_ARGUMENTS_FORM = (
    "flags of nixlbench as they are typed, such as '--mode=MG --num_initiator_dev=8 --num_target_dev=8'"
)

REPORT_ENDINGS = (".html", ".csv", ".prom")


def parse_backends(text: str) -> tuple[str, ...]:
    """Read names of backends. :raises ValueError: where one is none that can be driven."""
    from pytest_nixl.nixl.backends import BACKENDS, UNSUPPORTED

    names = tuple(part.strip() for part in text.split(","))
    known = list(BACKENDS)
    for name in names:
        if name.upper() in known:
            BACKENDS[name.upper()]  # refuses one of another distribution that cannot be loaded
        else:
            why = UNSUPPORTED.get(name.upper())
            raise ValueError(f"{name!r} is no backend that this version can drive{(why and f': {why}') or ''}")
    return _unique(tuple(name.upper() for name in names))


def parse_ops(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name.upper() not in OPS:
            raise ValueError(f"{name!r} is no operation")
    return _unique(tuple(name.upper() for name in names))


def parse_memories(text: str) -> tuple[MemoryPair, ...]:
    return _unique(tuple(MemoryPair.parse(part) for part in text.split(",")))


def parse_target_memory(text: str) -> tuple[MemoryPair, ...]:
    """NIXL_TARGET_SEG_TYPE names the target's memory only; the initiator's is then DRAM."""
    return parse_memories(f"DRAM:{text}")


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    return values


def counts_up_to(most: int) -> Callable[[str], tuple[int, ...]]:
    """Return what reads a list of whole numbers from 1 to ``most``."""
    return lambda text: _unique(tuple(_count(part, most) for part in text.split(",")))


def _count(text: str, most: int) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text.strip()):
        raise ValueError(f"{text.strip()!r} is not a whole number above zero")
    return _at_most(text, most)


def _at_most(text: str, most: int) -> int:
    """Read digits; they are counted first, since Python refuses to read very many."""
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        shown = digits if len(digits) <= 30 else f"{digits[:30]}… ({len(digits)} digits)"
        raise ValueError(f"{shown} is more than {most}, the most that can be asked for")
    return int(digits)


def parse_ranks(text: str) -> int | None:
    return _count(text, MOST_RANKS)


def parse_rank(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()):
        raise ValueError(f"{text.strip()!r} is no whole number")
    return int(text)


def parse_group(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ValueError(f"{text!r} is no name of 1 to 64 characters")
    return text


def parse_token(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


def parse_listen(text: str) -> str:
    from pytest_nixl.etcd_servers.rank0 import ListenAddress

    return str(ListenAddress.parse(text))


def parse_iterations(text: str) -> int | None:
    return None if text == "auto" else _count(text, MOST_ITERATIONS)


def parse_warmup(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ValueError(f"{text.strip()!r} is no whole number")
    return _at_most(text, MOST_ITERATIONS)


def parse_seconds(text: str) -> float:
    seconds = units.parse_time(text, default_unit="s")
    if seconds > LONGEST:
        raise ValueError(f"{text.strip()!r} is more than {LONGEST / 3600:g} h, the longest time that can be asked for")
    return seconds


def parse_timeout(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return seconds


def parse_etcd(text: str) -> str:
    parse_endpoints(text)
    return text


def parse_user(text: str) -> str:
    name, _, password = text.partition(":")
    if not name or not password:
        raise ValueError("the name or the password is missing (what was given is not shown)")
    return text


def parse_program(text: str) -> str:
    if not os.path.isfile(text) or not os.access(text, os.X_OK):
        raise ValueError(f"{text!r} is no file that can be executed")
    return text


def parse_nixlbench_arguments(text: str) -> tuple[str, ...]:
    from pytest_nixl.session.nixlbench_flags import parse_arguments

    return parse_arguments(text)


def parse_raw_tools(text: str) -> str:
    parse_directory(text)
    if not any(os.access(os.path.join(text, name), os.X_OK) for name in RAW_TOOLS):
        raise ValueError(f"{text!r} has none of them that can be executed")
    return text


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of them")
        return text

    return parse


def parse_file(text: str) -> str:
    if not os.path.isfile(text):  # Path.is_file raises where a name is too long or a directory is closed to us
        raise ValueError(f"there is no file {text!r}")
    return text


def parse_directory(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError(f"there is no directory {text!r}")
    return text


def parse_image(text: str) -> str:
    if not text or text != text.strip() or any(c.isspace() for c in text):
        raise ValueError(f"{text!r} is no image reference")
    return text


def parse_validated_image(text: str) -> str:
    """What is validated goes into every record and report: a user or password before its registry does not."""
    return redact(parse_image(text))


def parse_profile(text: str) -> str:
    from pytest_nixl.judge.profiles import load_profile

    load_profile(text)
    return text


def parse_compared_image(text: str) -> AlternateImage:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no command ({error})") from None
    if len(words) < 2:
        raise ValueError(f"{text!r} names no command after the image")
    return AlternateImage(parse_image(words[0]), tuple(words[1:]))


def parse_min_launches(text: str) -> int | None:
    if text == "auto":
        return None
    return _count(text, MOST_LAUNCHES)


def parse_baseline(text: str) -> str:
    return text if os.path.exists(text) else parse_image(text)


def parse_store(text: str) -> str:
    if not text or (os.path.exists(text) and not os.path.isdir(text)):
        raise ValueError(f"{text!r} is no directory")
    return text


def parse_reports(text: str) -> tuple[str, ...]:
    """Read paths of reports, separated by commas. :raises ValueError: where an ending or a directory is none."""
    from pytest_nixl.core.extensions import REPORT_FORMATS

    paths = _unique(tuple(part.strip() for part in text.split(",")))
    endings = (*REPORT_ENDINGS, *REPORT_FORMATS.extensions(REPORT_ENDINGS))
    for path in paths:
        if os.path.splitext(path)[1] not in endings:
            raise ValueError(f"{path!r} ends with none of {', '.join(endings)}")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"there is no directory {os.path.dirname(path)!r}")
    return paths


def parse_yes_no(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false", "1", "0", ""):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")
