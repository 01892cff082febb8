# SPDX-License-Identifier: Apache-2.0
"""The links of a session: launches are made when first needed, and reused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.measure.launch import Launch, Variables
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import LAST, RowKey, row_variant
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import NixlAbsentError


class Launches:
    """The launches of a session, which are made when first needed and reused while they are healthy.

    Those of two ranks are ended before those of two other ranks start, so that only two ranks use memory.

    :param hosts: the hosts on which workers can start, by rank.
    :param settings: the settings of the run.
    """

    def __init__(self, hosts: Sequence[Host], settings: Settings) -> None:
        self._hosts = hosts
        self._settings = settings
        #: Each launch after the arguments with which it was made.
        self._launches: list[tuple[dict[str, Any], Launch]] = []
        #: Why none can be made with some arguments.
        self._refused: list[tuple[dict[str, Any], NotApplicableError]] = []
        #: Why NIXL cannot be loaded on one of two ranks: no further worker is started there.
        self._absent: dict[tuple[int, int], NixlAbsentError] = {}

    def link(
        self,
        backend: str,
        op: str,
        memory: MemoryPair,
        ranks: tuple[int, int] = (0, 1),
        devices: DevicePair | None = None,
        agent_options: AgentOptions | None = None,
        footprint: int = 0,
    ) -> Link:
        """Return a link, with new workers if those of an earlier test have ended.

        :param op: ``WRITE`` or ``READ``.
        :param memory: the memory types of initiator and target.
        :param ranks: the ranks of initiator and target.
        :param devices: the GPUs of the ends in VRAM; None for those of ``--nixl-devices``.
        :param agent_options: how the agents are created; None for the first of the settings.
        :param footprint: the bytes of each buffer that the transfers of a row walk; 0: every transfer of a row has the
            same bytes.
        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        options = agent_options or self._settings.agents[0]
        return self._links([self._row(backend, op, memory, ranks, options, devices, footprint)], options)[0]

    def link_of(self, row: RowKey, ranks: tuple[int, int]) -> Link:
        """Return a link between two ranks that measures rows like ``row``, with agents as that row had them.

        :raises NotApplicableError: an end does not have this memory.
        :raises ValueError: no option of this run makes such agents.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        plugin = BACKENDS[row.backend].PLUGIN
        for options in self._settings.agents:
            if options.variant(row.backend, plugin) == row.agent_variant:
                return self._links([replace(row, pair=ranks)], options)[0]
        raise ValueError(f"this run makes no agents as the row {row} had them")

    def together(self, backend: str, op: str, memory: MemoryPair, pairs: Sequence[tuple[int, int]]) -> list[Link]:
        """Return one link for each pair of ranks, for use at the same time.

        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        options = self._settings.agents[0]
        return self._links([self._row(backend, op, memory, ranks, options) for ranks in pairs], options)

    def between_devices(
        self,
        backend: str,
        op: str,
        memory: MemoryPair,
        devices: Sequence[DevicePair],
        ranks: tuple[int, int] = (0, 1),
        variables: Sequence[Variables] = (),
    ) -> list[Link]:
        """Return one link for each pair of GPUs of two ranks, for use at the same time.

        For host memory there is also one link per pair; the devices are then only numbers.

        :param variables: for each pair, additional environment variables of its two workers.
        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        options = self._settings.agents[0]
        row = self._row(backend, op, memory, ranks, options)
        return self._links([replace(row, devices=pair) for pair in devices], options, variables, alone=True)

    def replace(self, launch: Launch) -> Launch:
        """End a launch, and return a new one that is made like it."""
        launch.close()
        return self._launch(next(arguments for arguments, kept_launch in self._launches if kept_launch is launch))

    def close(self) -> None:
        """End all workers."""
        self._end(lambda _: True)

    def _row(
        self,
        backend: str,
        op: str,
        memory: MemoryPair,
        ranks: tuple[int, int],
        options: AgentOptions,
        devices: DevicePair | None = None,
        footprint: int = 0,
    ) -> RowKey:
        """Return the key of a row as these settings measure it; those to storage have one rank and no notification."""
        requested = (devices or self._settings.devices) if memory.on_gpu else None
        notify, plugin = self._settings.notify, BACKENDS[backend].PLUGIN
        if BACKENDS[backend].STORAGE:
            ranks, notify = (ranks[0], ranks[0]), LAST
        pages = self._settings.pages if "DRAM" in (memory.initiator, memory.target) else ""
        variant = row_variant(options.variant(backend, plugin), footprint, notify, pages)
        return RowKey(backend, op, memory, self._settings.blocks[0], pair=ranks, devices=requested, variant=variant)

    def _links(
        self, rows: Sequence[RowKey], options: AgentOptions, variables: Sequence[Variables] = (), *, alone: bool = False
    ) -> list[Link]:
        """Return links of which these are rows, after the launches have ended that would disturb them.

        :param alone: whether every other launch ends.
        """
        blocks = self._settings.blocks
        counts = {batch * depth for batch in self._settings.batch for depth in self._settings.depth}
        largest, *smaller = sorted({block * count for block in blocks for count in counts}, reverse=True)
        link_arguments = [
            {
                "hosts": (self._hosts[row.pair[0]], self._hosts[row.pair[1]]),
                "backend": BACKENDS[row.backend],
                "memory": row.memory,
                "capacity": max(largest, row.footprint),
                "alignment": math.gcd(*blocks),
                "devices": row.devices,
                "variables": row_variables,
                "agent_options": options,
                "pages": row.pages,
                # The transfers of a row with a footprint walk the whole buffer.
                "smaller": () if row.footprint else tuple(smaller),
            }
            for row, row_variables in zip(rows, variables or [({}, {})] * len(rows), strict=True)
        ]
        alone = alone or bool(options.progress_thread)  # it takes CPU time also while its agents are idle

        def disturbs(made: dict[str, Any]) -> bool:
            together = ("hosts", "agent_options", "capacity")  # the buffers of a footprint are large
            alike = any(all(made[name] == arguments[name] for name in together) for arguments in link_arguments)
            return made not in link_arguments and (alone or not alike)

        self._end(disturbs)
        return [
            Link(self.replace, self._healthy(arguments, row.pair), row, self._settings)
            for arguments, row in zip(link_arguments, rows, strict=True)
        ]

    def _healthy(self, requested: dict[str, Any], ranks: tuple[int, int]) -> Launch:
        """Return the launch that was made with these arguments, or a new one if there is none or its workers ended."""
        for arguments, error in self._refused:
            if arguments == requested:
                raise error
        if ranks in self._absent:
            raise self._absent[ranks]
        launch = next((kept_launch for arguments, kept_launch in self._launches if arguments == requested), None)
        if launch is not None and launch.healthy:
            return launch
        if launch is not None:
            launch.kill()
        try:
            return self._launch(requested)
        except NotApplicableError as error:  # the answer would be the same next time
            self._refused.append((requested, error))
            raise
        except NixlAbsentError as error:
            self._absent[ranks] = error
            raise

    def _launch(self, requested: dict[str, Any]) -> Launch:
        launch = Launch(settings=self._settings, **requested)
        self._launches = [
            (arguments, kept_launch) for arguments, kept_launch in self._launches if arguments != requested
        ]
        self._launches.append((requested, launch))
        return launch

    def _end(self, disturbs: Callable[[dict[str, Any]], bool]) -> None:
        for arguments, launch in [launch for launch in self._launches if disturbs(launch[0])]:
            self._launches.remove((arguments, launch))
            launch.close()
