# SPDX-License-Identifier: Apache-2.0
"""The commands of a worker about traffic patterns."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypedDict

from pytest_nixl.checks.pattern.worker.flows import FlowEndpoint, Gate, OutgoingFlow, StepPart, notification
from pytest_nixl.core.strict import RefTo
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.worker_commands import (
    AgentRef,
    Cores,
    Count,
    Line,
    Name,
    Seconds,
    TransferCount,
    WindowSeconds,
    WorkerObjects,
)

FlowsRef: TypeAlias = Annotated[Ref, RefTo("flows")]
#: Address, length and device.
_Descriptor: TypeAlias = tuple[Count, Count, Count]


class PreparedFlow(TypedDict):
    """A flow to prepare: its number, the name of the partner, and here and there the memory of each slot in flight."""

    number: Count
    partner: Line
    slots: list[tuple[_Descriptor, _Descriptor]]


class GateFields(TypedDict):
    """The fields of :class:`Gate`."""

    coordinator: Line
    members: list[Line]


class StepFields(TypedDict):
    """The fields of :class:`StepPart`."""

    group: GateFields
    flows: list[Count]
    durations: list[Seconds]
    busy: Count


class StepReport(TypedDict):
    """What a rank measured in a step; ``windows`` has each flow's number, and transfers and seconds of each window."""

    windows: list[tuple[Count, list[TransferCount], list[WindowSeconds]]]
    contention: Cores


def flows_prepare(
    objects: WorkerObjects,
    agent: AgentRef,
    op: Name,
    plugin: Name,
    memory: tuple[Name, Name],
    flows: list[PreparedFlow],
) -> FlowsRef:
    """Prepare the transfers that this rank posts.

    :param memory: the memory types of this rank and of its partners.
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
    endpoint: FlowsRef,
    run: Count,
    everyone: GateFields,
    steps: list[StepFields | None],
    own: list[Count],
    timeout: Seconds,
) -> None:
    """Take part in steps; the arguments are those of :meth:`FlowEndpoint.run`."""
    flow_endpoint: FlowEndpoint = objects.get(endpoint)
    parts = [
        None if step is None else StepPart(Gate(**step["group"]), step["flows"], step["durations"], step["busy"])
        for step in steps
    ]
    flow_endpoint.run(run, Gate(**everyone), parts, own, timeout)


def flows_report(objects: WorkerObjects, endpoint: FlowsRef) -> list[StepReport | None]:
    """Return what was measured in each step of the latest run; None for a step in which this rank rested."""
    flow_endpoint: FlowEndpoint = objects.get(endpoint)
    return [
        None
        if step is None
        else {
            "windows": [
                (number, [count for count, _ in window_times], [seconds for _, seconds in window_times])
                for number, window_times in step.windows.items()
            ],
            "contention": step.contention,
        }
        for step in flow_endpoint.measured
    ]


def flows_release(objects: WorkerObjects, endpoint: FlowsRef) -> None:
    """Release the transfers."""
    objects.get(endpoint).close()
