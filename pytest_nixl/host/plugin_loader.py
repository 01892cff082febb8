# SPDX-License-Identifier: Apache-2.0
"""Load each given plugin in a process of its own, and print what happened: a program, run by ``plugin_files``.

``python -m pytest_nixl.host.plugin_loader LIBNIXL PLUGIN...`` prints one line of JSON for each plugin. LIBNIXL is the
library of NIXL, which is loaded first as in a real process; it may be empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from pytest_nixl.host import elf

#: The time that loading one plugin may take, in seconds.
LOAD_SECONDS = 60
_PR_SET_PDEATHSIG = 1


def main(libnixl: str, plugins: list[str]) -> None:
    """Load the plugins, as many at a time as there are cores, and print the results in the order of the plugins.

    NIXL's library is loaded once, in a process from which the others are forked. If it ends that process, or starts a
    thread, which no fork survives, each of the others loads it.

    :param libnixl: the path of NIXL's library; empty to load none.
    :param plugins: the paths of the plugins.
    """
    # A constructor of a library may print to stdout.
    results = os.dup(1)
    os.dup2(2, 1)
    first = os.fork()
    if first == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it ends with this process
        signal.alarm(LOAD_SECONDS)
        _load_library(libnixl)
        signal.alarm(0)
        alone = len(os.listdir("/proc/self/task")) == 1
        if alone:
            _load_each("", plugins, results)
        os._exit(not alone)
    if os.waitpid(first, 0)[1]:
        _load_each(libnixl, plugins, results)


def _load_each(libnixl: str, plugins: list[str], results: int) -> None:
    waiting = iter(plugins)
    running = deque(_start(libnixl, plugin) for plugin in islice(waiting, len(os.sched_getaffinity(0))))
    while running:
        plugin, child, file = running.popleft()
        with file:
            _, status = os.waitpid(child, 0)
            file.seek(0)
            answer = file.read()
        running.extend(_start(libnixl, plugin) for plugin in islice(waiting, 1))
        loaded_answer: dict[str, Any] = json.loads(answer) if answer else {"error": _ended(status), "loaded": []}
        # Here and not in that process, because most plugins that lack something need the same libraries.
        missing = missing_libraries(plugin, loaded_answer["loaded"]) if answer and loaded_answer["error"] else []
        line = {"path": plugin, "error": loaded_answer["error"], "missing": missing}
        os.write(results, json.dumps(line).encode() + b"\n")


def _start(libnixl: str, plugin: str) -> tuple[str, int, BinaryIO]:
    """Start a process that loads a plugin; return the plugin, the process's id and the file of its answer."""
    # A file, because a process that a plugin leaves behind would keep a pipe open.
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    child = os.fork()
    if child == 0:
        signal.alarm(LOAD_SECONDS)  # the default action ends the process
        with contextlib.suppress(BaseException):
            file.write(json.dumps(load(libnixl, plugin)).encode())
            file.flush()
        os._exit(0)  # no destructor runs: some of them crash
    return plugin, child, file


def load(libnixl: str, plugin: str) -> dict[str, Any]:
    """Load a plugin as NIXL does, and return the loader's error and, with one, the libraries that it found loaded."""
    _load_library(libnixl)
    maps = Path("/proc/self/maps").read_text()
    try:
        ctypes.CDLL(plugin, os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        files = dict.fromkeys(re.findall(r"/\S.*", maps))
        return {"error": str(error), "loaded": [file for file in files if ".so" in file]}
    return {"error": "", "loaded": []}


def _load_library(libnixl: str) -> None:
    if libnixl:
        with contextlib.suppress(OSError):
            ctypes.CDLL(libnixl, os.RTLD_NOW | os.RTLD_LOCAL)


def missing_libraries(plugin: str, loaded: list[str]) -> list[dict[str, Any]]:
    """Return all libraries and symbol versions that a plugin lacks, not only the one in the loader's error."""
    try:
        lacking = elf.missing(plugin, os.environ, loaded)
    except (OSError, ValueError):  # the loader's error says it
        return []
    return [{"soname": lack.soname, "versions": list(lack.versions), "words": str(lack)} for lack in lacking]


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return f"it did not load within {LOAD_SECONDS} s"
    if os.WIFSIGNALED(status):
        return f"the process that loaded it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the process that loaded it ended with code {os.WEXITSTATUS(status)}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
