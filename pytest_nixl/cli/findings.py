# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl findings``: list the known defects of NIXL, when each one occurs, and what to do about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    findings = commands.add_parser(
        "findings", aliases=["finding"], help="list the known defects of NIXL and their remedies"
    )
    findings.add_argument("ids", metavar="ID", nargs="*", help="list only these findings")
    findings.add_argument("--json", action="store_true", help="print a list of JSON objects")
    findings.add_argument(
        "--reproduce",
        action="store_true",
        help="print a script that reproduces the finding ID with NIXL alone: `pytest-nixl findings ID --reproduce | "
        "python -`",
    )
    findings.set_defaults(run=_findings)


def _findings(arguments: argparse.Namespace) -> int:
    from pytest_nixl.model.findings import FINDINGS, known_finding
    from pytest_nixl.nixl.reproductions import reproduction

    if arguments.reproduce:
        return _reproduce(arguments.ids)
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
        if reproduction(finding.id) is not None:
            print(f"    {'script:':<9}`pytest-nixl findings {finding.id} --reproduce`")
    return 0


def _reproduce(ids: list[str]) -> int:
    from pytest_nixl.model.findings import FINDINGS, known_finding
    from pytest_nixl.nixl.reproductions import reproduction

    with_script = ", ".join(id for id in FINDINGS if reproduction(id) is not None)
    if len(ids) != 1:
        raise ValueError(f"--reproduce prints the script of one finding, not of {len(ids)}: name one of {with_script}")
    script = reproduction(known_finding(ids[0]))
    if script is None:
        raise ValueError(f"there is no script for {ids[0]}: findings with a script are {with_script}")
    print(script, end="")
    return 0
