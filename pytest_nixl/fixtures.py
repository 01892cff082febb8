# SPDX-License-Identifier: Apache-2.0
"""Fixtures for users' tests and our suites: settings, agents, links. Those for etcd are in ``etcd.fixtures``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import pytest

from pytest_nixl.errors import NixlPluginError
from pytest_nixl.run import LinkParam, Run, asked_links
from pytest_nixl.sigterm import sigterm_ends_in_order
from pytest_nixl.units import MIB

if TYPE_CHECKING:
    from pytest_nixl.agent import Buffer, NixlAgent
    from pytest_nixl.cluster.cluster import Cluster
    from pytest_nixl.link import Link, Pairs
    from pytest_nixl.settings import Settings


class MakeBuffer(Protocol):
    """What the fixture ``nixl_buffer`` is."""

    def __call__(
        self, agent: NixlAgent, size: int, memory: str = "DRAM", *, device: int = 0, register: bool = True
    ) -> Buffer:
        """Return ``size`` bytes in the worker of ``agent``.

        :param memory: ``DRAM`` or ``VRAM``.
        :param device: the GPU of ``VRAM``, as CUDA counts those that the worker sees.
        :param register: whether ``agent`` has it registered.
        """


@pytest.fixture(scope="session")
def nixl_settings(pytestconfig: pytest.Config) -> Iterator[Settings]:
    """The settings of this run. While it is in use, SIGTERM ends pytest as Ctrl-C does: with fixtures torn down."""
    try:
        settings = Run.of(pytestconfig).settings
    except pytest.UsageError as error:
        raise NixlPluginError(str(error)) from None
    with sigterm_ends_in_order():
        yield settings


@pytest.fixture(scope="session")
def nixl_cluster(nixl_settings: Settings, pytestconfig: pytest.Config) -> Cluster:
    """The ranks of this run, as places where workers start; with no cluster this host is both of two."""
    from pytest_nixl.cluster.cluster import Cluster

    return Cluster.of(Run.of(pytestconfig))


@pytest.fixture(scope="session")
def nixl_pairs(nixl_settings: Settings, nixl_cluster: Cluster) -> Iterator[Pairs]:
    """The connected pairs of workers that links of this session share."""
    from pytest_nixl.link import Pairs

    pairs = Pairs(nixl_cluster.places, nixl_settings)
    yield pairs
    pairs.close()


@pytest.fixture
def nixl_link(request: pytest.FixtureRequest, nixl_pairs: Pairs) -> Link:
    """A connected pair of agents in two workers, for each backend, operation and pair of memory types of the settings.

    ``measure(block)`` gives verified samples, ``move(block)`` moves and compares bytes once.
    """
    param: LinkParam = request.param
    return nixl_pairs.link(param.backend, param.op, param.memory, param.ranks, param.devices)


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


@pytest.fixture
def nixl_buffer() -> Iterator[MakeBuffer]:
    """Make registered memory in an agent's worker: ``nixl_buffer(agent, size)``, of a GPU with ``memory="VRAM"``.

    All of it is deregistered and given back when the test ends, also where it failed. A test whose worker has no such
    GPU is skipped with the reason.
    """
    with contextlib.ExitStack() as made:

        def make(
            agent: NixlAgent, size: int, memory: str = "DRAM", *, device: int = 0, register: bool = True
        ) -> Buffer:
            buffer = agent.allocate(size, memory, device=device)
            made.callback(_unless_ended, agent, buffer.free)
            if register:
                made.callback(_unless_ended, agent, partial(agent.deregister_memory, agent.register(buffer)))
            return buffer

        yield make


def _unless_ended(agent: NixlAgent, give_back: Callable[[], None]) -> None:
    """Give something back; with a worker that has ended it is gone already."""
    if agent.worker.alive:
        give_back()


@pytest.fixture
def gpu_buffer(nixl_agent: NixlAgent, nixl_buffer: MakeBuffer, nixl_settings: Settings) -> Buffer:
    """1 MiB of a GPU's memory in the worker of ``nixl_agent``, registered there; of the GPU that is the initiator's.

    A test is skipped with the reason where that worker has no GPU.
    """
    device = nixl_settings.devices.initiator if nixl_settings.devices else 0
    return nixl_buffer(nixl_agent, MIB, "VRAM", device=device)


def require_image(settings: Settings) -> None:
    """:raises pytest.UsageError: where an etcd container is asked for and its image is neither there nor to be had."""
    if settings.etcd_server == "container":
        from pytest_nixl.etcd.container import ensure_image
        from pytest_nixl.etcd.errors import EtcdError

        try:
            ensure_image(settings.etcd_image)
        except EtcdError as error:
            raise pytest.UsageError(f"--nixl-etcd-server=container: {error.reason}") from None


def parametrize_links(metafunc: pytest.Metafunc, run: Run) -> None:
    """Give a test that uses ``nixl_link`` one parameter for each link that is asked for."""
    metafunc.parametrize("nixl_link", asked_links(run.settings, run.asked), ids=str, indirect=True)


def parametrize_values(
    metafunc: pytest.Metafunc, name: str, values: tuple[int, ...], show: Callable[[int], str]
) -> None:
    """Give a test that uses ``name`` one parameter for each value."""
    if name in metafunc.fixturenames:
        metafunc.parametrize(name, values, ids=show)
