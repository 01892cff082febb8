# SPDX-License-Identifier: Apache-2.0
"""The commands of a worker about traffic patterns."""

from __future__ import annotations

from typing import Any

from pytest_nixl.checks.pattern.worker.flows import FlowEndpoint, Gate, OutgoingFlow, StepPart, notification
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.worker_command import WorkerObjects


def flows_prepare(
    objects: WorkerObjects, agent: Ref, op: str, plugin: str, memory: list[str], flows: list[dict[str, Any]]
) -> Ref:
    """Prepare the transfers that this rank posts.

    :param memory: the memory types of this rank and of its partners.
    :param flows: of each flow its ``number``, the name of the ``partner`` and the ``slots`` in flight: address,
        length and device here and there.
    """
    raw = objects.get(agent)
    outgoing = []
    for flow in flows:
        message = notification(flow["number"]) if op == "WRITE" else b""
        handles = []
        for source, target in flow["slots"]:
            local, remote = (
                raw.get_xfer_descs([tuple(end)], kind) for end, kind in zip((source, target), memory, strict=True)
            )
            handles.append(raw.initialize_xfer(op, local, remote, flow["partner"], message, backends=[plugin]))
        outgoing.append(OutgoingFlow(flow["number"], handles, message))
    return objects.keep(FlowEndpoint(raw, outgoing, objects.cancelled), "flows")


def flows_run(
    objects: WorkerObjects,
    endpoint: Ref,
    run: int,
    everyone: dict[str, Any],
    steps: list[dict[str, Any] | None],
    own: list[int],
    timeout: float,
) -> None:
    """Take part in steps; the arguments are those of :meth:`FlowEndpoint.run`."""
    flow_endpoint: FlowEndpoint = objects.get(endpoint)
    parts = [None if step is None else StepPart(**{**step, "group": Gate(**step["group"])}) for step in steps]
    flow_endpoint.run(run, Gate(**everyone), parts, own, timeout)


def flows_report(objects: WorkerObjects, endpoint: Ref) -> list[dict[str, Any] | None]:
    """Return what was measured in each step of the latest run; None for a step in which this rank rested."""
    flow_endpoint: FlowEndpoint = objects.get(endpoint)
    return [
        None
        if step is None
        else {
            "windows": [
                [number, [count for count, _ in window_times], [seconds for _, seconds in window_times]]
                for number, window_times in step.windows.items()
            ],
            "contention": step.contention,
        }
        for step in flow_endpoint.measured
    ]


def flows_release(objects: WorkerObjects, endpoint: Ref) -> None:
    """Release the transfers."""
    objects.get(endpoint).close()
