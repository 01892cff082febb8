# SPDX-License-Identifier: Apache-2.0
"""How much longer a transfer takes with telemetry: launches with and without it in turn, and their ratio.

The value of a launch is the median of its transfers. Launches alternate, so that what else the machine does makes both
sides slower alike, and widens the interval of the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from pytest_nixl.checks.telemetry.exporters import NO_EXPORTER
from pytest_nixl.checks.telemetry.measured_agents import MeasuredAgents
from pytest_nixl.measure.interleaved import take_turns
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import Host

#: The operation, the number and the block size of the transfers of a launch. Each has four blocks. They are small,
#: because telemetry costs the same for a transfer of any size.
OP, TRANSFERS, BLOCK = "WRITE", 2000, 4096
#: The launches of each side, and the index among the sorted ratios of their pairs at which the interval begins; it ends
#: as far from the last. If telemetry cost nothing, it would be above 1 with a probability of 12/252, and so below 1.
LAUNCHES, _END = 5, 4

#: Returns the median seconds of a transfer in a new launch.
Launch = Callable[[], float]


def measure_overhead(host: Host, settings: Settings, exporter: str, folder: Path) -> tuple[Figure, ...]:
    """Launch agents without and with telemetry in turn, and return the figures of :func:`overhead_figures`.

    :param host: where the agents run.
    :param settings: those of the run, with one backend.
    :param exporter: the exporter of the agents that have telemetry.
    :param folder: an empty folder.
    :raises NotApplicableError: this NIXL has no such exporter.
    :raises WorkerError: an agent cannot be started, or a transfer fails.
    """
    without, with_exporter = (
        partial(_launch, host, settings, exporter_name, folder) for exporter_name in (NO_EXPORTER, exporter)
    )
    return overhead_figures(settings.backend[0], exporter, *in_turn(without, with_exporter))


def _launch(host: Host, settings: Settings, exporter: str, folder: Path) -> float:
    launch_folder = folder / f"launch-{sum(1 for _ in folder.iterdir())}"
    launch_folder.mkdir()
    with Agents(host, settings) as agents:
        return median(MeasuredAgents(agents, exporter, launch_folder).time_transfers(OP, TRANSFERS, BLOCK))


def in_turn(first: Launch, second: Launch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Make :data:`LAUNCHES` launches of each side, and return their seconds."""
    return take_turns(
        lambda: (first(),),
        lambda: (second(),),
        lambda launches, new: launches + new,
        lambda launches, _: len(launches) < LAUNCHES,
    )


def overhead_figures(
    backend: str, exporter: str, without: Sequence[float], with_exporter: Sequence[float]
) -> tuple[Figure, ...]:
    """Return the time of a transfer without and with telemetry, their ratio and the ends of its 90 % interval.

    The ratio is that of Hodges and Lehmann: the median of the ratios of all pairs of launches.

    :param without: the seconds of each launch without telemetry; ``with_exporter`` of each with it.
    :raises ValueError: another number of launches than :data:`LAUNCHES`.
    """
    if len(without) != LAUNCHES or len(with_exporter) != LAUNCHES:
        raise ValueError(f"{len(without)} launches against {len(with_exporter)}: expected {LAUNCHES} of each")
    ratios = sorted(seconds_with / other for other in without for seconds_with in with_exporter)
    least, most = ratios[_END], ratios[-1 - _END]
    times = ((NO_EXPORTER, without), (exporter, with_exporter))
    values = (
        ("telemetry-overhead", median(ratios)),
        ("telemetry-overhead-least", least),
        ("telemetry-overhead-most", most),
    )
    return (
        *(
            Figure.of("telemetry-transfer", median(launches), {"backend": backend, "exporter": name}, tuple(launches))
            for name, launches in times
        ),
        *(Figure.of(name, value, {"backend": backend, "exporter": exporter}) for name, value in values),
    )
