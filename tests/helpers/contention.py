# SPDX-License-Identifier: Apache-2.0
"""A process that keeps a core busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinning() -> Iterator[int]:
    """Keep a core busy by another process; it has begun when this is entered."""
    with subprocess.Popen(
        # It ends with this process, however that ends.
        [sys.executable, "-c", f"import os\nprint(flush=True)\nwhile os.getppid() == {os.getpid()}: pass"],
        stdout=subprocess.PIPE,
    ) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            yield busy.pid
        finally:
            busy.kill()
