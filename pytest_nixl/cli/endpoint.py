# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl endpoint``: show how NIXL reads an endpoint, and what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pytest_nixl.nixl.endpoint_explanation import Explanation, explain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    endpoint = commands.add_parser(
        "endpoint",
        help="show how NIXL reads an etcd endpoint",
        description="Show how NIXL reads an endpoint, or a list of endpoints as in NIXL_ETCD_ENDPOINTS, and what to "
        "write instead. The command looks up host names but connects to nothing, and needs no NIXL. It exits with 1 if "
        "NIXL cannot read an endpoint, or ignores its encryption, its credentials or one of its members.",
    )
    endpoint.add_argument("endpoints", metavar="URL", nargs="+", help="an endpoint or a list, quoted if it has spaces")
    endpoint.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    explanations = [explain(text) for text in arguments.endpoints]
    print("\n\n".join("\n".join(_lines(item)) for item in explanations))
    return int(not all(item.nixl.works and not item.findings for item in explanations))


def _lines(explanation: Explanation) -> Iterator[str]:
    yield explanation.text if explanation.text.strip() == explanation.text != "" else repr(explanation.text)
    reading = explanation.nixl
    yield f"  NIXL {'reads it' if reading.works else 'does not read it'}: {reading.reason}"
    for note in reading.notes:
        yield f"  {note.finding}: {note.text}"
    if explanation.rewrite != explanation.text or explanation.advice:
        yield f"  {explanation.remedy}"
