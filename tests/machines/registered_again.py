# SPDX-License-Identifier: Apache-2.0
"""Runs in a machine: an agent registers a page, then 16 pages that end with it; another loads the metadata of both.

``python registered_again.py`` prints ``loaded``, or what the second load raised, and a third one after
``remove_remote_agent``. Arguments: ``unmapped``, the page was unmapped and mapped again in between, as memory that was
freed is, so that its registration is another one; ``removed``, ``remove_remote_agent`` is called before the second
load.
"""

from __future__ import annotations

import ctypes
import os
import sys

from pytest_nixl.nixl.worker import nixl_api

PAGE, PAGES = 4096, 16
#: PROT_READ and PROT_WRITE; MAP_PRIVATE and MAP_ANONYMOUS, at the given address.
READ_WRITE, ANONYMOUS, FIXED = 3, 0x22, 0x10


def mapped(address: int, size: int) -> int:
    """Return the address of new memory, every page of which is there; address 0: anywhere."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mapping: int = libc.mmap(address, size, READ_WRITE, ANONYMOUS | (FIXED if address else 0), -1, 0)
    ctypes.memset(mapping, 1, size)
    return mapping


def main(arguments: list[str]) -> None:
    """Register, export and load twice."""
    nixl_api.load()
    first, other = (nixl_api.make_agent(name, progress_thread=False) for name in ("one", "other"))
    for agent in (first, other):
        agent.create_backend("UCX")
    start = mapped(0, PAGES * PAGE)
    pages = [(start + number * PAGE, PAGE, 0, "") for number in range(PAGES)]
    registered = first.register_memory(pages[-1:], "DRAM")
    other.add_remote_agent(first.get_agent_metadata())
    first.deregister_memory(registered)
    if "unmapped" in arguments:
        mapped(pages[-1][0], PAGE)
    first.register_memory(pages, "DRAM")
    if "removed" in arguments:
        other.remove_remote_agent("one")
    for _ in range(2):
        try:
            other.add_remote_agent(first.get_agent_metadata())
        except Exception as error:
            print(type(error).__name__, flush=True)
            other.remove_remote_agent("one")
        else:
            print("loaded", flush=True)
            break
    os._exit(0)  # its end is not what is tried


if __name__ == "__main__":
    main(sys.argv[1:])
