# SPDX-License-Identifier: Apache-2.0
"""The exporters of NIXL's telemetry: how an agent is told to use one, and how its counts are read once."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import requests

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.metrics_text import MOST_TEXT, MetricSample, read_metrics
from pytest_nixl.core.redaction import redact
from pytest_nixl.core.strict import StrictError, printable
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.etcd.bounded_http import BoundedSession
from pytest_nixl.etcd.errors import related

_CHUNK = 1 << 16
_FORM = "give it as http://HOST:PORT/metrics"

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


class ScrapeError(NixlPluginError):
    """An endpoint did not answer with metrics."""


def metrics_url(text: str) -> str:
    """Return the URL of an endpoint; without a path, ``/metrics`` is meant, and without a scheme ``http://``.

    :raises ScrapeError: it is not the URL of a Prometheus endpoint.
    """
    shown = printable(redact(text))
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ScrapeError(f"{shown!r} is not a URL ({error})", _FORM) from None
    if parts.scheme not in ("http", "https"):
        raise ScrapeError(f"{shown!r} has the scheme {parts.scheme!r}: expected http or https", _FORM)
    if not host or port == 0 or any(not character.isprintable() or character.isspace() for character in text):
        raise ScrapeError(f"{shown!r} is not the URL of a host", _FORM)
    if parts.username is not None or parts.password is not None:
        raise ScrapeError(f"{shown!r} contains a user: NIXL, vLLM and Dynamo ask for none", "remove it from the URL")
    return parts._replace(path=parts.path if parts.path not in ("", "/") else "/metrics", fragment="").geturl()


def scrape(url: str, seconds: float) -> list[MetricSample]:
    """Return the samples of an endpoint.

    :param url: as :func:`metrics_url` returns it.
    :param seconds: the deadline of the connection, and of the whole answer.
    :raises ScrapeError: it cannot be reached, or what it answers is not metrics.
    """
    shown = printable(redact(url))
    try:
        with BoundedSession() as session:
            data = _read(session, url, seconds)
    except requests.exceptions.ConnectTimeout:
        reason = f"{shown} accepted no connection within {seconds:g} s"
        raise ScrapeError(reason, "check host, port and firewall") from None
    except (requests.exceptions.RequestException, OSError, ValueError) as error:
        causes = [*related(error)]
        if any(isinstance(cause, (requests.exceptions.Timeout, TimeoutError)) for cause in causes):
            reason = f"{shown} did not complete its answer within {seconds:g} s"
            raise ScrapeError(reason, "check that this is the port of the metrics, or give --timeout") from None
        message = next(
            (cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror), str(causes[-1])
        )
        reason = f"{shown} cannot be read: {printable(redact(message))}"
        raise ScrapeError(reason, "check that the process runs, and its port") from None
    return _parse(data, f"what {shown} answers")


def read_page(path: Path) -> list[MetricSample]:
    """Return the samples of a file. :raises ScrapeError: it is not metrics. :raises OSError: it cannot be read."""
    return _parse(read_regular(path, MOST_TEXT, "a page of metrics"), printable(str(path)))


def _parse(data: bytes, source: str) -> list[MetricSample]:
    try:
        return read_metrics(data)
    except StrictError as error:
        reason = f"{source} is not Prometheus metrics: {printable(str(error))}"
        raise ScrapeError(reason, "give the URL of the metrics") from None


def _read(session: BoundedSession, url: str, seconds: float) -> bytes:
    shown = printable(redact(url))
    headers = {"Accept": "text/plain;version=0.0.4"}
    with session.get(url, headers=headers, timeout=(seconds, seconds), stream=True) as answer:
        if answer.status_code != 200:
            raise ScrapeError(
                f"{shown} answers with HTTP status {answer.status_code}",
                "check the path: /metrics is usual",
            )
        data = bytearray()
        for chunk in answer.iter_content(_CHUNK):
            data += chunk
            if len(data) > MOST_TEXT:
                raise ScrapeError(
                    f"the answer of {shown} has more than {MOST_TEXT >> 20} MiB",
                    "give the URL of the metrics",
                )
        return bytes(data)


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
