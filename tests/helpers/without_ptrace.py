# SPDX-License-Identifier: Apache-2.0
"""Run a command with a container's default seccomp filter and capabilities: without SYS_PTRACE and without cma.

``python without_ptrace.py [--keep-calls | --call=NUMBER] COMMAND …``; ``--keep-calls`` removes only the capability,
``--call`` forbids this system call instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 24, 38, 22, 2
CAP_SYS_PTRACE = 19
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
#: process_vm_readv and process_vm_writev.
CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]


def instructions(calls: Sequence[int]) -> bytes:
    """A classic BPF program that loads the number of the system call, compares it and returns."""
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0)]
    program += [(equal, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    program += [(give, 0, 0, ALLOW), (give, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    command = sys.argv[1:]
    if os.geteuid() == 0:
        assert libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0, ctypes.get_errno()
    if command[0] == "--keep-calls":
        command = command[1:]
    else:
        calls: Sequence[int] = CALLS
        if command[0].startswith("--call="):
            calls, command = [int(command[0].partition("=")[2])], command[1:]
        code = instructions(calls)
        held = ctypes.create_string_buffer(code, len(code))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held)), 16)
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, ctypes.get_errno()
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
    os.execvp(command[0], command)


main()
