# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl facts``: print the facts of this host as JSON or as the node information template, or record them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from pytest_nixl.cli.doctor import add_sources, gathered


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``pytest-nixl facts`` to the command's parsers."""
    facts = commands.add_parser("facts", help="print the facts of this host, record them, or compare those of several")
    how = facts.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print the node information template, filled in")
    how.add_argument(
        "--record", metavar="DIR", type=Path, help="write the files that were read to a new directory, for --root"
    )
    how.add_argument("--near", action="store_true", help="print which network cards are nearest to each GPU")
    how.add_argument("--output", metavar="FILE", type=Path, help="write JSON to a file")
    how.add_argument(
        "--compare", metavar="FACTS.json", type=Path, nargs="+",
        help="compare the files of --output of ranks 0, 1, …, in this order",
    )  # fmt: skip
    add_sources(facts)
    facts.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from pytest_nixl.core.redaction import hider
    from pytest_nixl.core.untrusted_file import write_regular
    from pytest_nixl.host.markdown import markdown, near_lines
    from pytest_nixl.host.recorded_tree import FactsRoot

    if arguments.compare:
        return _compare(arguments.compare)
    if arguments.record is not None and arguments.record.exists():
        raise ValueError(f"{arguments.record} already exists: give the name of a new directory")
    if arguments.record is not None and arguments.hwloc is not None:
        raise ValueError("--record cannot record the topology of --hwloc: give --near, --markdown or --output instead")
    root = FactsRoot(arguments.root)
    facts, _ = gathered(arguments, root)
    if arguments.record is not None:
        root.write(arguments.record, hider(os.environ))
        print(f"{arguments.record}: {len(root.files)} files and {len(root.answers)} answers; "
              f"judge it by `pytest-nixl doctor --root {arguments.record}`")  # fmt: skip
    elif arguments.near:
        for line in near_lines(facts):
            print(line)
    elif arguments.markdown:
        for line in markdown(facts):
            print(line)
    else:
        text = json.dumps(facts.plain(), indent=1)
        if arguments.output is None:
            print(text)
        else:
            write_regular(arguments.output, text + "\n")
    return 0


def _compare(paths: list[Path]) -> int:
    from pytest_nixl.checks.doctor.ranks import compare_hosts
    from pytest_nixl.host.facts import read_facts
    from pytest_nixl.model.verdicts import Outcome, outcome

    if len(paths) < 2:
        raise ValueError("one file cannot be compared: give the files of two ranks or more")
    findings = compare_hosts([read_facts(path) for path in paths])
    for finding in findings:
        print(finding.judgement)
    if not findings:
        print(f"the facts of {len(paths)} ranks agree")
    return int(any(outcome(each.judgement.verdict, gate=False) is Outcome.FAIL for each in findings))
