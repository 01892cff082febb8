# SPDX-License-Identifier: Apache-2.0
"""The commands of a worker about traffic patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pytest_nixl.checks.pattern.worker.flows import FlowEndpoint, Gate, OutgoingFlow, StepPart, notification
from pytest_nixl.core.wire import Ref


class FlowCommands(ABC):
    """The commands ``flows_prepare``, ``flows_run``, ``flows_report`` and ``flows_release``."""

    _cancelled: Callable[[], bool]

    @abstractmethod
    def _keep(self, value: Any, kind: str) -> Ref: ...

    @abstractmethod
    def _get(self, ref: Ref) -> Any: ...

    def do_flows_prepare(self, agent: Ref, op: str, plugin: str, memory: list[str], flows: list[dict[str, Any]]) -> Ref:
        """Prepare the transfers that this rank posts.

        :param memory: the memory types of this rank and of its partners.
        :param flows: of each flow its ``number``, the name of the ``partner`` and the ``slots`` in flight: address,
            length and device here and there.
        """
        raw = self._get(agent)
        outgoing = []
        for flow in flows:
            tag = notification(flow["number"]) if op == "WRITE" else b""
            handles = []
            for here, there in flow["slots"]:
                local, remote = (
                    raw.get_xfer_descs([tuple(end)], kind) for end, kind in zip((here, there), memory, strict=True)
                )
                handles.append(raw.initialize_xfer(op, local, remote, flow["partner"], tag, backends=[plugin]))
            outgoing.append(OutgoingFlow(flow["number"], handles, tag))
        return self._keep(FlowEndpoint(raw, outgoing, self._cancelled), "flows")

    def do_flows_run(
        self,
        endpoint: Ref,
        run: int,
        everyone: dict[str, Any],
        steps: list[dict[str, Any] | None],
        own: list[int],
        patience: float,
    ) -> None:
        """Take part in steps; the arguments are those of :meth:`FlowEndpoint.run`."""
        found: FlowEndpoint = self._get(endpoint)
        parts = [None if step is None else StepPart(**{**step, "group": Gate(**step["group"])}) for step in steps]
        found.run(run, Gate(**everyone), parts, own, patience)

    def do_flows_report(self, endpoint: Ref) -> list[dict[str, Any] | None]:
        """Return what was measured in each step of the latest run; None for a step in which this rank rested."""
        found: FlowEndpoint = self._get(endpoint)
        return [
            None
            if step is None
            else {
                "windows": [
                    [number, [count for count, _ in each], [seconds for _, seconds in each]]
                    for number, each in step.windows.items()
                ],
                "others": step.others,
            }
            for step in found.measured
        ]

    def do_flows_release(self, endpoint: Ref) -> None:
        """Release the transfers."""
        self._get(endpoint).close()
