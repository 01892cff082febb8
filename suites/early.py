# SPDX-License-Identifier: Apache-2.0
"""Run the parts of checks that mostly wait beside each other.

Such a check has its part that waits in a function, a scene, which its marker ``nixl_early`` names. The first test of a
package that uses the fixture ``early`` starts all scenes of the package that pytest selected, each in a thread. A
package ends when its scenes have ended, so that nothing runs beside a measurement of another package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from pytest_nixl import Run, between_agents, shake_hands

#: Runs a scene with some parameters and returns its result. It makes what the scene needs, and ends it.
Play = Callable[..., Any]


@contextmanager
def started_scenes(session: pytest.Session, package: str, play: Play, *parameters: str) -> Iterator[Play]:
    """Start the selected scenes of a package, and return a function that waits for a scene and returns its result.

    That function runs a scene that was not started with the same parameters.

    :param package: the name of the package whose modules define the scenes.
    """
    futures: dict[tuple[Any, ...], Future[Any]] = {}
    for scene in _selected(session, package) if _beside_each_other(session.config) else ():
        key, future = (scene, *parameters), Future[Any]()
        futures[key] = future
        # A daemon ends with pytest if pytest is interrupted. The supervisor ends the processes that it has started.
        threading.Thread(target=_work, args=(future, partial(play, scene, *parameters)), daemon=True).start()
    yield lambda *scene: futures[scene].result() if scene in futures else play(*scene)
    if not (session.shouldstop or session.shouldfail or session.exitstatus == pytest.ExitCode.INTERRUPTED):
        wait(futures.values())


def _selected(session: pytest.Session, package: str) -> Collection[Callable[..., Any]]:
    """Return the scenes of the tests that pytest selected, each once, in the order of the tests."""
    marked = (marker for item in session.items for marker in item.iter_markers("nixl_early"))
    scenes = dict.fromkeys(marker.kwargs["scene"] for marker in marked)
    return [scene for scene in scenes if scene.__module__.rpartition(".")[0] == package]


def _beside_each_other(config: pytest.Config) -> bool:
    """Whether scenes may run beside each other: not if many processes or spinning threads would delay each other.

    A debugger has the terminal for itself, and of several backends each is asked in its turn.
    """
    run = Run.of(config)
    settings = run.settings
    one = len(between_agents(settings.backend)) == len(settings.progress_thread) == 1
    alone = hasattr(config, "workerinput") or config.getoption("usepdb") or config.getoption("trace")
    return one and not (alone or settings.extended or run.in_cluster or shake_hands(settings.backend))


def _work(future: Future[Any], play: Callable[[], Any]) -> None:
    try:
        future.set_result(play())
    except BaseException as error:  # it is raised in the main thread
        future.set_exception(error)
