# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl endpoint``: how NIXL, its KV benchmark and etcdctl read an endpoint, and what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pytest_nixl.nixl.endpoint_readers import EndpointReading, Explanation, explain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``pytest-nixl endpoint`` to the command's parsers."""
    endpoint = commands.add_parser(
        "endpoint",
        help="say how NIXL, its KV benchmark and etcdctl read an etcd endpoint",
        description="Say how each of the three reads an endpoint, or a list of them, as it stands in "
        "NIXL_ETCD_ENDPOINTS, and what to write instead. Names are looked up; nothing is connected to. Exits with 1 "
        "where NIXL does not read one, or leaves out encryption, credentials or a member of it.",
    )
    endpoint.add_argument("endpoints", metavar="URL", nargs="+", help="the text, quoted where it has a space in it")
    endpoint.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    explanations = [explain(text) for text in arguments.endpoints]
    print("\n\n".join("\n".join(_lines(item)) for item in explanations))
    return int(not all(item.nixl.works and not item.findings for item in explanations))


def _lines(explanation: Explanation) -> Iterator[str]:
    yield explanation.text if explanation.text.strip() == explanation.text != "" else repr(explanation.text)
    for reading in explanation.readings:
        yield from _reading(reading)
    if explanation.rewrite != explanation.text or explanation.advice:
        yield f"  {explanation.remedy}"


def _reading(reading: EndpointReading) -> Iterator[str]:
    yield f"  {reading.reader:<13} {'reads it' if reading.works else 'does not read it'}: {reading.why}"
    for note in reading.notes:
        yield f"  {'':<13} {note.finding + ': ' if note.finding else ''}{note.text}"
