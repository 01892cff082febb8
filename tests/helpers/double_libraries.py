# SPDX-License-Identifier: Apache-2.0
"""Doubles of shared libraries that no process of pytest may load, and a child of this process that loads them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.needs import program


def build(folder: Path, sources: Mapping[str, str], *options: str) -> list[str]:
    """Build libraries, by their file names, and return their paths. The options come after the source."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / "x.c").write_text(source)
        command = [program("gcc"), "-shared", "-fPIC", "-w", "-o", str(folder / name), str(folder / "x.c")]
        subprocess.run([*command, *options], check=True)
    return [str(folder / name) for name in sources]


def in_a_child(libraries: list[str], function: Callable[[], Any]) -> Any:
    """Return what a function returns, as JSON values, in a child of this process that has loaded libraries."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            for library in libraries:
                ctypes.CDLL(library)
            os.write(writing, json.dumps(function()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)
