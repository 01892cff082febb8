# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run with the raw agent in a worker, most of which fail in some way."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any


def describe(agent: Any, *, word: str) -> dict[str, Any]:
    """Return facts that show that the function runs with the raw agent in another process."""
    return {"name": agent.name, "word": word, "pid": os.getpid(), "type": type(agent).__name__}


def variable(agent: Any, *, name: str) -> str | None:
    """Return a variable of the worker's environment."""
    return os.environ.get(name)


def give_bytes(agent: Any) -> bytes:
    """Return bytes, which JSON cannot express."""
    return b"\x00\xff"


def give_object(agent: Any) -> object:
    """Return an object that cannot be sent to pytest."""
    return object()


def raise_error(agent: Any) -> None:
    """Raise an exception like a function of a user."""
    raise ValueError("the user's own fault")


def crash(agent: Any) -> None:
    """Crash the process by an access to address zero."""
    ctypes.string_at(0)


def leave(agent: Any, *, code: int) -> None:
    """Exit the process like a library that calls exit()."""
    os._exit(code)


def hang(agent: Any) -> None:
    """Never return."""
    while True:
        time.sleep(60)


def ucx_fatal(agent: Any, words: str = "a fatal error made by a test") -> None:
    """Let the loaded UCX abort the process with its function for fatal errors."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "/libucs-" in line or "/libucs.so" in line)
    fatal = ctypes.CDLL(library).ucs_fatal_error_message
    fatal(b"test.c", 1, b"test", words.encode())


def empty_list(agent: Any) -> None:
    """Request an empty descriptor list from NIXL's own method, which fails."""
    agent.get_reg_descs([], "DRAM")


def surroundings(agent: Any, *, names: list[str]) -> dict[str, Any]:
    """Return variables as Python and as libraries see them, and where new memory is mapped."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    results = {name: libc.getenv(name.encode()) for name in names}
    # More than fits between what the parent of workers has mapped, which is the same in all of them.
    buffer = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return {
        "python": {name: os.environ[name] for name in names if name in os.environ},
        "libc": {name: value.decode() for name, value in results.items() if value is not None},
        "address": address,
    }


def search(agent: Any, *, folder: str) -> None:
    """Let this process search for modules in a folder."""
    sys.path.append(folder)
