# SPDX-License-Identifier: Apache-2.0
"""Plant a delay in the registrations that the suite control_path times: NIXL itself cannot be made to need longer."""

from __future__ import annotations

from pathlib import Path

_PATCH = '''
import sys

if any(word.endswith("worker_main.py") or "/nixl/worker/" in word for word in sys.orig_argv):
    import time

    from pytest_nixl.checks.control_path import worker as control_path

    class SlowAgent:
        """An agent whose registrations last longer, by the number of their regions."""

        def __init__(self, agent):
            self._agent = agent

        def __getattr__(self, name):
            return getattr(self._agent, name)

        def register_memory(self, regions, *others):
            registered = self._agent.register_memory(regions, *others)
            until = time.perf_counter() + len(regions) * PER_REGION
            while time.perf_counter() < until:
                pass
            return registered

    register = control_path.register

    def slow(agent, **arguments):
        return register(SlowAgent(agent), **arguments)

    control_path.register = slow
'''


def slow_registration(folder: Path, *, per_region: float = 0.0) -> dict[str, str]:
    """Return the environment of a worker whose registrations last longer.

    :param folder: gets the module that plants the delay.
    :param per_region: seconds that each region adds to a registration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"PER_REGION = {per_region!r}\n{_PATCH}")
    return {"PYTHONPATH": str(folder)}
