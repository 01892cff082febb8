# SPDX-License-Identifier: Apache-2.0
"""Plant a delay in the posts of an initiator's KV requests: NIXL itself cannot be made to need longer."""

from __future__ import annotations

from pathlib import Path

_PATCH = '''
import sys

if any(word.endswith("worker_main.py") or "/nixl/worker/" in word for word in sys.orig_argv):
    import time

    from pytest_nixl.checks.kv_cache.worker.requests import KvRequests

    class SlowAgent:
        """An agent whose posts last longer, by the number of their descriptors."""

        def __init__(self, agent):
            self._agent, self._counts = agent, {}

        def __getattr__(self, name):
            return getattr(self._agent, name)

        def make_prepped_xfer(self, op, here, local, *others):
            handle = self._agent.make_prepped_xfer(op, here, local, *others)
            self._counts[id(handle)] = len(local)
            return handle

        def transfer(self, handle, *others):
            count = self._counts.pop(id(handle), 0)
            state = self._agent.transfer(handle, *others)
            until = time.perf_counter() + count * PER_DESCRIPTOR + count * count * PER_PAIR
            while time.perf_counter() < until:
                pass
            return state

    start = KvRequests.__init__

    def slow(self, agent, *others, **named):
        start(self, SlowAgent(agent), *others, **named)

    KvRequests.__init__ = slow
'''


def slow_post(folder: Path, *, per_descriptor: float = 0.0, per_pair: float = 0.0) -> dict[str, str]:
    """Return the environment of a worker whose posts last longer.

    :param folder: gets the module that plants the delay.
    :param per_descriptor: seconds that each descriptor adds to a post.
    :param per_pair: seconds that each pair of descriptors adds, so that a post grows with the square of their number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = f"PER_DESCRIPTOR, PER_PAIR = {per_descriptor!r}, {per_pair!r}\n"
    (folder / "sitecustomize.py").write_text(values + _PATCH)
    return {"PYTHONPATH": str(folder)}
