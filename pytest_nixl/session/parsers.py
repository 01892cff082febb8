# SPDX-License-Identifier: Apache-2.0
"""The parsers that options name. Each raises a :class:`ValueError` of one sentence for a bad text."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_nixl.cluster.group import LEAST_LEASE, MOST_LEASE
from pytest_nixl.core import units
from pytest_nixl.core.extensions import REPORT_FORMATS
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.agent_options import BackendParameter, parse_parameters
from pytest_nixl.model.kv_cache import KV_DTYPES, MOST_BLOCK_TOKENS, MOST_TOKENS, MOST_TP
from pytest_nixl.model.memory import OPS, MemoryPair
from pytest_nixl.model.settings import LEVELS, MOST_LAUNCHES, RAW_TOOLS, REPORT_ENDINGS, AlternateImage
from pytest_nixl.nixl.backends import BACKENDS, UNSUPPORTED
from pytest_nixl.session.options import report_ending

if TYPE_CHECKING:
    from pytest_nixl.etcd_servers import rank0
    from pytest_nixl.nixl import s3_server
    from pytest_nixl.nixl.worker import s3
else:  # few runs have these options
    rank0 = lazy_module("pytest_nixl.etcd_servers.rank0")
    s3_server = lazy_module("pytest_nixl.nixl.s3_server")
    s3 = lazy_module("pytest_nixl.nixl.worker.s3")

#: The largest accepted numbers. A larger number is a typing error, and a worker would run out of memory.
MOST_KV_REQUESTS, LEAST_KV_RATE, MOST_KV_RATE = 1024, 0.001, 1e6
MOST_BATCH, MOST_DEPTH, MOST_ITERATIONS, MOST_RANKS = 1_000_000, 65_536, 100_000_000, 65_536
#: The longest accepted time in seconds: a week.
LONGEST = 7 * 86_400.0


def parse_backends(text: str) -> tuple[str, ...]:
    """Parse a list of backend names. :raises ValueError: if a backend is not supported."""
    names = tuple(part.strip() for part in text.split(","))
    backends = list(BACKENDS)
    for name in names:
        if name.upper() in backends:
            BACKENDS[name.upper()]  # refuses one of another distribution that cannot be loaded
        else:
            reason = UNSUPPORTED.get(name.upper())
            raise ValueError(f"{name!r} is not a supported backend{(reason and f': {reason}') or ''}")
    return _unique(tuple(name.upper() for name in names))


def parse_ops(text: str) -> tuple[str, ...]:
    """Parse a list of operations. :raises ValueError: if one is unknown or named twice."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name.upper() not in OPS:
            raise ValueError(f"{name!r} is not an operation")
    return _unique(tuple(name.upper() for name in names))


def parse_memories(text: str) -> tuple[MemoryPair, ...]:
    """Parse a list of pairs of memory types. :raises ValueError: if one is invalid or named twice."""
    return _unique(tuple(MemoryPair.parse(part) for part in text.split(",")))


def parse_target_memory(text: str) -> tuple[MemoryPair, ...]:
    """Parse NIXL_TARGET_SEG_TYPE, which gives the target's memory type only; the initiator's is then DRAM."""
    return parse_memories(f"DRAM:{text}")


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    return values


def _count(text: str, most: int) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text.strip()):
        raise ValueError(f"{text.strip()!r} is not a positive integer")
    return _at_most(text, most)


def _at_most(text: str, most: int) -> int:
    """Parse digits. Count them first, because Python refuses to convert very long numbers."""
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        shown = digits if len(digits) <= 30 else f"{digits[:30]}… ({len(digits)} digits)"
        raise ValueError(f"{shown} is more than the maximum of {most}")
    return int(digits)


def _parse_up_to(most: int) -> Callable[[str], int]:
    return lambda text: _count(text, most)


def _several(most: int) -> Callable[[str], tuple[int, ...]]:
    return lambda text: _unique(tuple(_count(part, most) for part in text.split(",")))


#: Each parses an integer from 1 to its maximum, or a list of them.
parse_batch, parse_depth = _several(MOST_BATCH), _several(MOST_DEPTH)
parse_kv_block_tokens, parse_kv_requests = _parse_up_to(MOST_BLOCK_TOKENS), _parse_up_to(MOST_KV_REQUESTS)
parse_kv_tokens, parse_ranks = _parse_up_to(MOST_TOKENS), _parse_up_to(MOST_RANKS)
#: Parses the time after which etcd ends the lease of a rank.
parse_lease = units.whole_seconds(LEAST_LEASE, MOST_LEASE)


def parse_rank(text: str) -> int:
    """Parse a rank. :raises ValueError: if it is not an integer from 0 to 999,999."""
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()):
        raise ValueError(f"{text.strip()!r} is not a non-negative integer of at most 6 digits")
    return int(text)


def parse_group(text: str) -> str:
    """Check the name of a group. :raises ValueError: if it has characters other than those allowed, or too many."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ValueError(f"{text!r} is not a valid name")
    return text


def parse_token(text: str) -> str:
    """Check the shared secret of a group. :raises ValueError: if it is empty."""
    if not text.strip():
        raise ValueError("the token is empty")
    return text


def parse_listen(text: str) -> str:
    """Check the address at which rank 0 serves an etcd. :raises ValueError: if it is not ``ADDR:PORT``."""
    return str(rank0.ListenAddress.parse(text))


def parse_kv_tp(text: str) -> tuple[int, int]:
    """Parse tensor-parallel sizes: ``2``, or ``PREFILL:DECODE``. :raises ValueError: if one is not 1 to 4096."""
    prefill, _, decode = text.partition(":")
    return _count(prefill, MOST_TP), _count(decode if ":" in text else prefill, MOST_TP)


def parse_kv_dtype(text: str) -> str | None:
    """Parse the data type of a KV cache; return None for ``auto``. :raises ValueError: if it is unknown."""
    if text not in ("auto", *KV_DTYPES):
        raise ValueError(f"{text!r} is not one of the choices")
    return None if text == "auto" else text


def parse_kv_rate(text: str) -> float | None:
    """Parse requests for KV blocks each second; return None for ``auto``. :raises ValueError: if it is neither."""
    if text.strip() == "auto":
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(/s)?", text.strip()):
        raise ValueError(f"{text.strip()!r} is not a number of requests each second")
    rate = float(text.partition("/")[0])
    if not LEAST_KV_RATE <= rate <= MOST_KV_RATE:
        raise ValueError(f"{text.strip()!r} is not between {LEAST_KV_RATE:g}/s and {MOST_KV_RATE:.0f}/s")
    return rate


def parse_iterations(text: str) -> int | None:
    """Parse the least number of timed transfers; return None for ``auto``. :raises ValueError: if it is neither."""
    return None if text == "auto" else _count(text, MOST_ITERATIONS)


def parse_warmup(text: str) -> int:
    """Parse the number of transfers before the clock starts. :raises ValueError: if it is not an integer from 0 on."""
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ValueError(f"{text.strip()!r} is not a non-negative integer")
    return _at_most(text, MOST_ITERATIONS)


def parse_seconds(text: str) -> float:
    """Parse a time in seconds; a bare number is seconds. :raises ValueError: if it is not a time, or over a week."""
    seconds = units.parse_time(text, default_unit="s")
    if seconds > LONGEST:
        raise ValueError(f"{text.strip()!r} is more than the maximum of {LONGEST / 3600:g} h")
    return seconds


def parse_timeout(text: str) -> float:
    """Parse a time limit in seconds. :raises ValueError: as :func:`parse_seconds`, and for zero."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return seconds


def parse_etcd(text: str) -> str:
    """Check a list of etcd endpoints. :raises ValueError: if one of them is invalid."""
    parse_endpoints(text)
    return text


def parse_user(text: str) -> str:
    """Check a user and password. :raises ValueError: if one is missing; the message does not show the value."""
    name, _, password = text.partition(":")
    if not name or not password:
        raise ValueError("the name or the password is missing (the value is not shown)")
    return text


def parse_program(text: str) -> str:
    """Check the path of a program. :raises ValueError: if it is not an executable file."""
    if not os.path.isfile(text) or not os.access(text, os.X_OK):
        raise ValueError(f"{text!r} is not an executable file")
    return text


def parse_raw_tools(text: str) -> str:
    """Check the directory of the raw tools. :raises ValueError: if it contains none of them."""
    parse_directory(text)
    if not any(os.access(os.path.join(text, name), os.X_OK) for name in RAW_TOOLS):
        raise ValueError(f"directory {text!r} has no executable raw tool")
    return text


def parse_level(text: str) -> str:
    """Parse the name or the number of a level. :raises ValueError: if it is neither."""
    numbers = {str(number): name for number, name in enumerate(LEVELS, 1)}
    name = numbers.get(text.strip(), text.strip().lower())
    if name not in LEVELS:
        raise ValueError(f"{text!r} is not a level")
    return name


def parse_file(text: str) -> str:
    """Check the path of a file. :raises ValueError: if it is not an existing file."""
    if not os.path.isfile(text):  # Path.is_file raises if a name is too long or a directory is not readable
        raise ValueError(f"there is no file {text!r}")
    return text


def parse_directory(text: str) -> str:
    """Check the path of a directory. :raises ValueError: if it does not exist."""
    if not os.path.isdir(text):
        raise ValueError(f"there is no directory {text!r}")
    return text


def parse_image(text: str) -> str:
    """Check an image reference. :raises ValueError: if it is empty or contains a space."""
    if not text or text != text.strip() or any(c.isspace() for c in text):
        raise ValueError(f"{text!r} is not an image reference")
    return text


def parse_validated_image(text: str) -> str:
    """Parse an image reference and redact a user and password in it: every record and report shows it."""
    return redact(parse_image(text))


def parse_profile(text: str) -> str:
    """Check the name or path of a profile by loading it. :raises ValueError: if it cannot be loaded."""
    load_profile(text)
    return text


def parse_compared_image(text: str) -> AlternateImage:
    """Parse another image and its command. :raises ValueError: if one of the two is missing or invalid."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a command ({error})") from None
    if len(arguments) < 2:
        raise ValueError(f"{text!r} has no command after the image")
    return AlternateImage(parse_image(arguments[0]), tuple(arguments[1:]))


def parse_min_launches(text: str) -> int | None:
    """Parse the least number of launches; return None for ``auto``. :raises ValueError: if it is not 1 to 7."""
    return None if text == "auto" else _count(text, MOST_LAUNCHES)


def parse_baseline(text: str) -> str:
    """Check a baseline: any existing path, else an image reference. :raises ValueError: if it is neither."""
    return text if os.path.exists(text) else parse_image(text)


def parse_store(text: str) -> str:
    """Check the path of a directory that may not exist yet. :raises ValueError: if it is another kind of file."""
    if not text or (os.path.exists(text) and not os.path.isdir(text)):
        raise ValueError(f"{text!r} is not a directory")
    return text


def parse_reports(text: str) -> tuple[str, ...]:
    """Parse paths of reports, separated by commas.

    The directory of a report is created when the report is written, as that of ``--junit-xml`` is.

    :raises ValueError: if a path has an unknown ending or its directory cannot be created.
    """
    paths = _unique(tuple(part.strip() for part in text.split(",")))
    endings = (*REPORT_ENDINGS, *REPORT_FORMATS.extensions(REPORT_ENDINGS))
    for path in paths:
        if not report_ending(os.path.basename(path), endings):
            raise ValueError(f"{path!r} does not end with one of {', '.join(endings)}")
        folder = os.path.abspath(os.path.dirname(path))
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder):
            raise ValueError(f"{path!r} cannot be written, because {folder!r} is not a directory")
    return paths


def parse_yes_no(text: str) -> bool:
    """Parse ``yes``, ``no``, ``true``, ``false``, ``1``, ``0``; empty is False. :raises ValueError: for any other."""
    if text.lower() not in ("yes", "no", "true", "false", "1", "0", ""):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")


def parse_backend_params(text: str) -> tuple[BackendParameter, ...]:
    """Parse parameters of backends. :raises ValueError: if one is malformed or named twice, or a backend is unknown."""
    parameters = parse_parameters(text)
    for parameter in parameters:
        parse_backends(parameter.backend)
    return parameters


def parse_s3(text: str) -> str:
    """Parse the URL of an S3 server, ``embedded`` or ``container[:IMAGE]``. :raises ValueError: it is none of them."""
    if text in (s3_server.EMBEDDED, s3_server.CONTAINER):
        return text
    kind, colon, image = text.partition(":")
    if kind == s3_server.CONTAINER and colon:
        return f"{kind}:{parse_image(image)}"
    if "@" in text:
        raise ValueError("the URL has a user (not shown): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    try:
        scheme, address = s3.parse_server(text)
    except ValueError:
        raise ValueError(f"{text!r} is not the URL of an S3 server") from None
    return f"{scheme}://{address}"
