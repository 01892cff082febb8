# SPDX-License-Identifier: Apache-2.0
"""What each command says of itself in the reference, and how it reads its arguments."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.reference_pages import REFERENCE, generator

from pytest_nixl import cli


def test_the_page_of_the_commands_has_what_each_says_of_itself() -> None:
    assert (REFERENCE / "cli.md").read_text(encoding="utf-8") == generator().cli_page()


SOURCES: dict[str, Any] = {
    "root": None, "backend": None, "etcd": None, "peer": [], "side_channel": [], "nixlbench": ""
}  # fmt: skip
GIVEN_SOURCES: tuple[str, dict[str, Any]] = (
    "--root=R --backend=UCX --etcd=URL --peer=a --peer=b:1 --side-channel=c --side-channel=d:2 --nixlbench=PATH",
    {"root": "R", "backend": "UCX", "etcd": "URL", "peer": ["a", "b:1"], "side_channel": ["c", "d:2"],
     "nixlbench": "PATH"},
)  # fmt: skip
#: Of a command, with the arguments that it needs: what it reads from them, with the defaults of its options.
LEAST: dict[str, dict[str, Any]] = {
    "clean": {"etcd": None, "group": "", "dry_run": False},
    "compare A B": {"before": "A", "now": "B", "store": "", "max_regression": "5%", "gate": False},
    "connector A B": {
        "prefill": "A", "decode": "B", "one_host": False, "plugin_dir": None, "gate": False, "verbose": False,
        "json": False,
    },
    "doctor": {
        "profile": "loopback", "gate": False, "json": False, "verbose": False, "image": False, "transfer": True,
        **SOURCES,
    },
    "endpoint A B": {"endpoints": ["A", "B"]},
    "etcd": {
        "endpoints": None, "namespace": None, "max_request_bytes": "1.5MiB", "no_connect": False, "all": False,
        "json": False, "remove_dead": False, "agent": [], "unchanged_since": None, "yes": False, "record": None,
    },
    "explain": {"words": [], "kind": "", "reproduce": False, "all": False, "json": False},
    "facts": {"markdown": False, "record": None, "near": False, "output": None, "compare": None, **SOURCES},
    "history DIR": {"store": Path("DIR"), "row": "", "last": 0},
    "init": {
        "directory": Path("nixl"), "ci": "github", "image": "registry.example/inference:latest", "nodes": "2",
        "root": None,
    },
    "profile list": {},
    "profile show A": {"profile": "A"},
    "profile learn a.json b.json --name=N --output=FILE": {
        "runs": [Path("a.json"), Path("b.json")], "name": "N", "output": Path("FILE"), "like": None
    },
    "profile judge A --nixlbench=a": {"profile": "A", "nixlbench": [Path("a")], "gate": False},
    "report RUN a.html b.csv": {
        "run_": "RUN", "output": ["a.html", "b.csv"], "store": "", "baseline": "", "gate": False
    },
    "run": {
        "level": None, "named_level": None, "backend": None, "profile": None, "suite": [], "no_gate": False,
        "as_given": False, "print": False, "pytest_arguments": (),
    },
    "telemetry URL": {
        "url": "URL", "max_failed": None, "max_expired": None, "max_post_us": None, "max_transfer_us": None,
        "timeout": 10.0, "gate": False, "json": False,
    },
}  # fmt: skip
#: More arguments of one of these commands, and what is then read otherwise.
MORE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("clean", "--etcd=URL --group=G --dry-run", {"etcd": "URL", "group": "G", "dry_run": True}),
    ("compare A B", "--store=DIR --max-regression=1% --gate", {"store": "DIR", "max_regression": "1%", "gate": True}),
    ("connector A B", "--one-host --plugin-dir=DIR --gate -v --json",
     {"one_host": True, "plugin_dir": Path("DIR"), "gate": True, "verbose": True, "json": True}),
    ("doctor", f"--profile=P --gate --json --verbose --image --no-transfer {GIVEN_SOURCES[0]}",
     {"profile": "P", "gate": True, "json": True, "verbose": True, "image": True, "transfer": False,
      **GIVEN_SOURCES[1]}),
    ("doctor", "-v", {"verbose": True}),
    ("etcd", "URL --namespace=N --max-request-bytes=2MiB --no-connect --all --json",
     {"endpoints": "URL", "namespace": "N", "max_request_bytes": "2MiB", "no_connect": True, "all": True,
      "json": True}),
    ("etcd", "--remove-dead --agent=a --agent=b --unchanged-since=7 --yes --record=FILE",
     {"remove_dead": True, "agent": ["a", "b"], "unchanged_since": 7, "yes": True, "record": Path("FILE")}),
    ("explain", "a b --checks --all --json", {"words": ["a", "b"], "kind": "check", "all": True, "json": True}),
    ("explain", "--findings", {"kind": "finding"}),
    ("explain", "ID --reproduce", {"words": ["ID"], "reproduce": True}),
    ("facts", f"--markdown {GIVEN_SOURCES[0]}", {"markdown": True, **GIVEN_SOURCES[1]}),
    ("facts", "--record=DIR", {"record": Path("DIR")}),
    ("facts", "--near", {"near": True}),
    ("facts", "--output=FILE", {"output": Path("FILE")}),
    ("facts", "--compare a b", {"compare": [Path("a"), Path("b")]}),
    ("history DIR", "--row=TEXT --last=3", {"row": "TEXT", "last": 3}),
    ("init", "DIR --ci=gitlab --image=REF --nodes=3 --root=R",
     {"directory": Path("DIR"), "ci": "gitlab", "image": "REF", "nodes": "3", "root": "R"}),
    ("profile learn a.json b.json --name=N --output=FILE", "--like=L", {"like": "L"}),
    ("profile judge A --nixlbench=a", "--nixlbench=b --gate", {"nixlbench": [Path("a"), Path("b")], "gate": True}),
    ("report RUN a.html b.csv", "--store=DIR --baseline=A --gate", {"store": "DIR", "baseline": "A", "gate": True}),
    ("run", "quick --nixl-level=standard --backend=UCX --profile=P --suite=a --suite=b --no-gate --as-given --print",
     {"level": "quick", "named_level": "standard", "backend": "UCX", "profile": "P", "suite": ["a", "b"],
      "no_gate": True, "as_given": True, "print": True}),
    ("run", "--nixl-backend=UCX --nixl-profile=P", {"backend": "UCX", "profile": "P"}),
    ("telemetry URL",
     "--max-failed=0 --max-expired=2 --max-post-us=3 --max-transfer-us=4.5 --timeout=3600 --gate --json",
     {"max_failed": 0.0, "max_expired": 2.0, "max_post_us": 3.0, "max_transfer_us": 4.5, "timeout": 3600.0,
      "gate": True, "json": True}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "more", "changes"),
    [*((command, "", {}) for command in LEAST), *MORE],
    ids=lambda value: str(value)[:40],
)
def test_a_command_reads_its_arguments(command: str, more: str, changes: dict[str, Any]) -> None:
    arguments = f"{command} {more}".split()
    parser = argparse.ArgumentParser()
    import_module(f"pytest_nixl.cli.{arguments[0]}").add(parser.add_subparsers())
    values = vars(parser.parse_args(arguments))
    assert callable(values.pop("run"))
    assert values == {**LEAST[command], **changes}


@pytest.mark.parametrize(
    ("arguments", "of", "refusal"),
    [
        ("profile", "profile", "the following arguments are required: ACTION"),
        ("profile judge", "profile judge", "the following arguments are required: PROFILE, --nixlbench"),
        ("profile show", "profile show", "the following arguments are required: NAME|FILE"),
        ("profile learn a", "profile learn", "the following arguments are required: --name, --output"),
        ("x", "", "argument COMMAND: invalid choice: 'x'"),
        ("run slow", "run", "argument LEVEL: invalid choice: 'slow'"),
        ("run --nixl-level=slow", "run", "argument --nixl-level: invalid choice: 'slow'"),
        ("init --ci=jenkins", "init", "argument --ci: invalid choice: 'jenkins'"),
        ("facts --near --markdown", "facts", "argument --markdown: not allowed with argument --near"),
        ("explain --checks --findings", "explain", "argument --findings: not allowed with argument --checks"),
        ("etcd --unchanged-since=x", "etcd", "argument --unchanged-since: invalid int value: 'x'"),
        # Argparse of some Pythons makes an empty list of them.
        ("etcd URL --namespace=--", "", "argument --namespace: expected a value other than --"),
        ("compare A B --a=\n --b=\x1b", "", "unrecognized arguments: '--a=\\n' '--b=\\x1b'"),
        ("compare A B --a=four --b=two -c four -d=e one --f four five --q=h=four --i=j four", "",
         "unrecognized arguments: '--a=***' --b=two -c '***' -d=e one --f '***' five '--q=***' --i=j four"),
        ("telemetry URL --max-failed=-1", "telemetry", "argument --max-failed: '-1' is not a number from 0"),
        ("telemetry URL --max-expired=nan", "telemetry", "argument --max-expired: 'nan' is not a number from 0"),
        ("telemetry URL --max-post-us=inf", "telemetry", "argument --max-post-us: 'inf' is not a number from 0"),
        ("telemetry URL --max-transfer-us=\u0663", "telemetry",
         "argument --max-transfer-us: '\u0663' is not a number from 0"),
        (f"telemetry URL --max-failed={41 * 'x'}", "telemetry",
         f"argument --max-failed: '{40 * 'x'}' is not a number from 0"),
        *((f"telemetry URL --timeout={text}", "telemetry",
           f"argument --timeout: '{text[:40]}' is not a number of seconds up to 3600")
          for text in ("0", "3600.1", 41 * "0")),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments: str, of: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split(" "))
    out, err = capsys.readouterr()
    program = f"pytest-nixl {of}".strip()
    known = re.sub(r" \(choose from .*?\)", "", err)  # which Pythons write in two ways
    assert (ended.value.code, out, known) == (2, "", f"{program}: {refusal} (see {program} --help)\n")
