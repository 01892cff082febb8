# SPDX-License-Identifier: Apache-2.0
"""Fixtures for users' tests and our suites: settings, agents, links. Those for etcd are in ``etcd.fixtures``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.errors import NixlPluginError, NotApplicableError
from pytest_nixl.run import LinkParam, Run, asked_links
from pytest_nixl.settings import MemoryPair, Settings

if TYPE_CHECKING:
    from pytest_nixl.agent import NixlAgent
    from pytest_nixl.link import Link, Pairs


@pytest.fixture(scope="session")
def nixl_settings(pytestconfig: pytest.Config) -> Iterator[Settings]:
    """The settings of this run. While it is in use, SIGTERM ends pytest as Ctrl-C does: with fixtures torn down."""
    try:
        settings = Run.of(pytestconfig).settings
    except pytest.UsageError as error:
        raise NixlPluginError(str(error)) from None
    # Only the main thread may, and a handler that is somebody's own stays.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
    yield settings
    if ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    # A second one, while fixtures are torn down, ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pytest.exit("ended by SIGTERM", returncode=128 + number)


@pytest.fixture(scope="session")
def nixl_pairs(nixl_settings: Settings) -> Iterator[Pairs]:
    """The connected pairs of workers that links of this session share."""
    from pytest_nixl.keeper import keeper
    from pytest_nixl.link import Pairs
    from pytest_nixl.worker.places import Here

    pairs = Pairs((Here(keeper(), 0), Here(keeper(), 1)), nixl_settings)
    yield pairs
    pairs.close()


@pytest.fixture
def nixl_link(request: pytest.FixtureRequest, nixl_pairs: Pairs) -> Link:
    """A connected pair of agents in two workers, for each backend, operation and pair of memory types of the settings.

    ``measure(block)`` gives verified samples, ``move(block)`` moves and compares bytes once.
    """
    param: LinkParam = request.param
    require_memory(param.memory)
    return nixl_pairs.link(param.backend, param.op, param.memory)


def require_memory(memory: MemoryPair) -> None:
    """:raises NotApplicableError: where this machine or this version has no such memory."""
    if "VRAM" not in (memory.initiator, memory.target):
        return
    if not Path("/dev/nvidiactl").exists():
        raise NotApplicableError(f"{memory} needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)")
    raise NotApplicableError(f"{memory} needs GPU buffers, which this version of pytest-nixl does not make yet")


@pytest.fixture
def nixl_agent(nixl_settings: Settings) -> Iterator[NixlAgent]:
    """An agent with the first backend of the settings, in a worker of its own; ``.another()`` starts more.

    All of them end with the test.
    """
    from pytest_nixl.agent import Agents
    from pytest_nixl.keeper import keeper
    from pytest_nixl.worker.places import Here

    with Agents(Here(keeper()), nixl_settings) as agents:
        yield agents.start()


def require_image(settings: Settings) -> None:
    """:raises pytest.UsageError: where an etcd container is asked for and its image is neither there nor to be had."""
    if settings.etcd_server == "container":
        from pytest_nixl.etcd.container import ensure_image
        from pytest_nixl.etcd.errors import EtcdError

        try:
            ensure_image(settings.etcd_image)
        except EtcdError as error:
            raise pytest.UsageError(f"--nixl-etcd-server=container: {error.reason}") from None


def parametrize_links(metafunc: pytest.Metafunc, settings: Settings) -> None:
    """Give a test that uses ``nixl_link`` one parameter for each link of the settings."""
    metafunc.parametrize("nixl_link", asked_links(settings), ids=str, indirect=True)


def parametrize_values(
    metafunc: pytest.Metafunc, name: str, values: tuple[int, ...], show: Callable[[int], str]
) -> None:
    """Give a test that uses ``name`` one parameter for each value."""
    if name in metafunc.fixturenames:
        metafunc.parametrize(name, values, ids=show)
