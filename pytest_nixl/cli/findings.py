# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl findings``: list the known defects of NIXL, when each one occurs, and what to do about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``pytest-nixl findings`` to the command's parsers."""
    findings = commands.add_parser("findings", help="list the known defects of NIXL and their remedies")
    findings.add_argument("ids", metavar="ID", nargs="*", help="list only these findings")
    findings.add_argument("--json", action="store_true", help="print a list of JSON objects")
    findings.set_defaults(run=_findings)


def _findings(arguments: argparse.Namespace) -> int:
    from pytest_nixl.model.findings import FINDINGS, known_finding

    chosen = [FINDINGS[known_finding(id)] for id in arguments.ids] or list(FINDINGS.values())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in chosen], indent=2))
        return 0
    for finding in chosen:
        print(finding.id)
        for name, text in (
            ("what", finding.title), ("seen in", finding.seen), ("met if", finding.met_by), ("remedy", finding.remedy),
        ):  # fmt: skip
            print(f"    {name + ':':<9}{text}")
    return 0
