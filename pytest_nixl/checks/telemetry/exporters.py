# SPDX-License-Identifier: Apache-2.0
"""The exporters of NIXL's telemetry: how an agent is told to use one, and where its counts are read."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nixl.checks.telemetry.scrape import ScrapeError, scrape
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.metrics_text import MetricSample
from pytest_nixl.core.strict import StrictError, printable

BUFFER, PROMETHEUS, PROMETHEUS_MP = "BUFFER", "prometheus", "prometheus_mp"
EXPORTERS = (BUFFER, PROMETHEUS, PROMETHEUS_MP)
#: In place of an exporter: the agents have no telemetry.
NO_EXPORTER = "none"
#: The variables of telemetry. A worker of these checks has no other value of them than the check gives.
VARIABLES = (
    "NIXL_TELEMETRY_ENABLE",
    "NIXL_TELEMETRY_EXPORTER",
    "NIXL_TELEMETRY_DIR",
    "NIXL_TELEMETRY_MULTIPROC_DIR",
    "NIXL_TELEMETRY_PROMETHEUS_PORT",
    "NIXL_TELEMETRY_PROMETHEUS_LOCAL",
    "NIXL_TELEMETRY_ENABLED_METRICS",
    "NIXL_TELEMETRY_BUFFER_SIZE",
    "NIXL_TELEMETRY_RUN_INTERVAL",
    "NIXL_TELEMETRY_HISTOGRAM_BUCKETS_US",
)
#: The interval at which NIXL exports, in milliseconds.
_INTERVAL = 50
_ERROR = "agent_err_"
#: The version of the event buffer that is read.
VERSION = 4
#: Positions of the next write and read, version, expected version, number of places in the ring, and its mask.
_HEADER = struct.Struct("<QQIIQQ")
#: The type of an event, seven bytes that NIXL does not write, and the value.
_EVENT = struct.Struct("<B7xQ")
_MOST_PLACES = 1 << 20
#: The metrics by the number of their type, spelled as NIXL spells them.
EVENTS = (
    "agent_tx_bytes",
    "agent_rx_bytes",
    "agent_tx_requests_num",
    "agent_rx_requests_num",
    "agent_memory_registered",
    "agent_memory_deregistered",
    "agent_xfer_time",
    "agent_xfer_post_time",
    "agent_err_not_posted",
    "agent_err_invalid_param",
    "agent_err_backend",
    "agent_err_not_found",
    "agent_err_mismatch",
    "agent_err_not_allowed",
    "agent_err_repost_active",
    "agent_err_unknown",
    "agent_err_not_supported",
    "agent_err_remote_disconnect",
    "agent_err_canceled",
    "agent_err_no_telemetry",
    "agent_telemetry_events_dropped",
)


class UnreadableTelemetryError(Exception):
    """The telemetry of an agent cannot be read. The message is one sentence."""


@dataclass(frozen=True)
class TelemetrySink:
    """Where the agents of one check leave their telemetry.

    :param exporter: one of :data:`EXPORTERS`, or :data:`NO_EXPORTER`.
    :param folder: an empty folder for files.
    :param ports: the port of each agent's endpoint, by the agent's name.
    :param seconds: the deadline of one reading.
    """

    exporter: str
    folder: Path
    ports: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 10.0

    def variables(self, agent: str) -> dict[str, str | None]:
        """Return the variables of the worker of an agent; None unsets one."""
        variables: dict[str, str | None] = dict.fromkeys(VARIABLES)
        if self.exporter == NO_EXPORTER:
            return variables
        variables |= {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_RUN_INTERVAL": str(_INTERVAL)}
        if self.exporter == BUFFER:
            # NIXL 1.4 has no exporter of this name: it uses the buffer if there is a folder and no exporter.
            return variables | {"NIXL_TELEMETRY_DIR": str(self.folder)}
        variables |= {
            "NIXL_TELEMETRY_EXPORTER": self.exporter,
            "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(self.ports[agent]),
        }
        return variables | (
            {"NIXL_TELEMETRY_MULTIPROC_DIR": str(self.folder)} if self.exporter == PROMETHEUS_MP else {}
        )

    def place(self, agent: str) -> str:
        """Return where the counts of an agent are read: a URL or a file."""
        if self.exporter == BUFFER:
            return str(self.folder / agent)
        return f"http://127.0.0.1:{self.ports[agent]}/metrics"

    def spelled(self, metric: str) -> str:
        """Return how this exporter spells a metric, such as ``agent_tx_bytes_total`` for ``agent_tx_bytes``."""
        if self.exporter == BUFFER:
            return metric
        if metric.startswith(_ERROR):
            return f'agent_errors_total{{status="{metric.removeprefix(_ERROR)}"}}'
        return f"{metric}_total"

    def counts(self, agent: str) -> dict[str, float]:
        """Return what has been exported for an agent until now, by metric as ``BUFFER`` spells it.

        Histograms keep the exporter's own spelling, such as ``agent_xfer_time_us_count``.

        :raises UnreadableTelemetryError: there is nothing of the agent, or it cannot be read.
        :raises NotApplicableError: the file has a format that the plugin does not read.
        """
        place = self.place(agent)
        if self.exporter == BUFFER:
            try:
                return read_event_buffer(Path(place).read_bytes())
            except OSError as error:
                raise UnreadableTelemetryError(f"{place} cannot be read ({error.strerror})") from None
            except StrictError as error:
                raise UnreadableTelemetryError(f"{place} is not an event buffer: {error}") from None
        try:
            samples = scrape(place, self.seconds)
        except ScrapeError as error:
            raise UnreadableTelemetryError(error.reason) from None
        return _counts_of(agent, samples, place)


def _counts_of(agent: str, samples: Sequence[MetricSample], place: str) -> dict[str, float]:
    """Return the counters and histogram sums of one agent. Series that differ only in other labels are added."""
    agent_samples = [sample for sample in samples if sample.labels.get("agent_name") == agent]
    if not agent_samples:
        other_agents = sorted({sample.labels["agent_name"] for sample in samples if "agent_name" in sample.labels})
        has = (
            f"it has those of {', '.join(map(printable, other_agents))}" if other_agents else "it has those of no agent"
        )
        raise UnreadableTelemetryError(f"{place} has no metrics of agent {agent}: {has}")
    counts: dict[str, float] = {}
    for each in agent_samples:
        name = each.name.removesuffix("_total")
        if name == "agent_errors":
            name = _ERROR + each.labels.get("status", "")
        elif name == each.name and not name.endswith(("_us_count", "_us_sum")):
            continue  # a gauge or a histogram's bucket
        counts[name] = counts.get(name, 0) + each.value
    return counts


def read_event_buffer(data: bytes) -> dict[str, float]:
    """Return the sum of the values of each metric's events in a file of the exporter BUFFER.

    The layout is that of NIXL's own reader (``examples/python/telemetry_reader.py``, version 4; NIXL 1.4.1 to 1.5.1
    write it): a header, then a ring of events. NIXL adds an event for each registration and each error, and four for
    each transfer.

    :param data: the content of the file, of which nothing has been read by another reader.
    :raises NotApplicableError: another version of the format.
    :raises StrictError: it is not such a file.
    """
    if len(data) < _HEADER.size:
        raise StrictError(f"it has {len(data)} bytes: expected a header of {_HEADER.size}")
    end, start, version, _, places, mask = _HEADER.unpack_from(data)
    if version != VERSION:
        raise NotApplicableError(f"this NIXL writes version {version} of the event buffer: pytest-nixl reads {VERSION}")
    if not 0 < places <= _MOST_PLACES or mask != places - 1 or places & mask or max(end, start) >= places:
        raise StrictError(f"its header has {places} places, mask {mask}, and positions {start} to {end}")
    if len(data) != _HEADER.size + places * _EVENT.size:
        raise StrictError(f"it has {len(data)} bytes: expected {_HEADER.size + places * _EVENT.size}")
    sums: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
    for place in range(start, end if end >= start else end + places):
        kind, value = _EVENT.unpack_from(data, _HEADER.size + (place & mask) * _EVENT.size)
        if kind >= len(EVENTS):
            raise StrictError(f"an event has the unknown type {kind}")
        sums[EVENTS[kind]] += value
    return {name: float(value) for name, value in sums.items()}
