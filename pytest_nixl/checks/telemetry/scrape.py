# SPDX-License-Identifier: Apache-2.0
"""Read a Prometheus endpoint once, with a deadline, and refuse what is not metrics with one sentence."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import requests

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.metrics_text import MOST_TEXT, MetricSample, read_metrics
from pytest_nixl.core.redaction import redact
from pytest_nixl.core.strict import StrictError, printable
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.etcd.bounded_http import BoundedSession
from pytest_nixl.etcd.errors import related

_CHUNK = 1 << 16
_FORM = "give it as http://HOST:PORT/metrics"


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
