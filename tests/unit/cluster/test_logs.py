# SPDX-License-Identifier: Apache-2.0
"""The last lines of a rank's worker logs, as they are sent to the other ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.cluster.logs import LARGEST, FinishedRank, keep, last_words, verdict_of_ending
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.conclusion import verdict_fields
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.supervisor import supervisor

TABLE = "[17.95] [node-1:1149 :0]   |  1..65528 | zero-copy  | tcp/veth0  |\n"


def test_last_words_are_the_last_unusual_lines_without_secrets(make_settings: Any) -> None:
    settings = make_settings(group_token="open sesame", etcd_user="bob:swordfish")
    first, second = (supervisor().directory / f"rank1-{role}-0.log" for role in ("initiator", "target"))
    try:
        lines = [*(f"line {number}" for number in range(99)), "open sesame, swordfish", "http://u:pw@h:1"]
        first.write_text("\n".join(lines) + "\n" + TABLE * 99)
        second.write_text(TABLE)
        texts = last_words(supervisor(), settings)
    finally:
        first.unlink()
        second.unlink()
    assert texts[second.name] == ""
    last_lines = texts[first.name].splitlines()
    assert len(last_lines) == 20
    assert last_lines[0] == "line 81"
    assert last_lines[-2:] == ["***, ***", "http://***@h:1"]


def finished(settings: Any, directory: Path, *faults: NixlPluginError) -> FinishedRank:
    """Return a rank whose workers' logs are in this directory."""
    return cast(
        FinishedRank,
        SimpleNamespace(
            settings=settings, rank=1, faults=list(faults), supervisor=SimpleNamespace(directory=directory),
            membership=SimpleNamespace(size=2, group="g"),
        ),
    )  # fmt: skip


def test_the_logs_and_the_verdict_of_a_rank_are_kept_without_secrets(make_settings: Any, tmp_path: Path) -> None:
    workers, log_dir = tmp_path / "workers", tmp_path / "kept" / "rank-1"
    workers.mkdir()
    log_dir.mkdir(parents=True)
    (log_dir / "of-the-last-run.log").write_text("old")
    (workers / "one.log").write_text("swordfish" + "x" * LARGEST)
    (workers / "two.log").write_bytes(b"open sesame \xff")
    settings = make_settings(group_token="open sesame", etcd_user="bob:swordfish", log_dir=str(tmp_path / "kept"))
    rank = finished(settings, workers, NixlPluginError("swordfish is gone"))
    assert keep(rank, Ending(1, "NIXL gate: FAIL open sesame", "", {}), []) == log_dir
    assert sorted(path.name for path in log_dir.iterdir()) == ["one.log", "two.log", "verdict.json"]
    assert (log_dir / "one.log").read_text() == "x" * LARGEST
    assert (log_dir / "two.log").read_text() == "*** \ufffd"
    verdict = json.loads((log_dir / "verdict.json").read_text())
    assert (verdict["rank"], verdict["ranks"], verdict["group"], verdict["exit_code"]) == (1, 2, "g", 1)
    assert (verdict["text"], verdict["fault"]) == ("NIXL gate: FAIL ***", "*** is gone")
    assert keep(rank, Ending(2, "", "open sesame", {}), ["rank 0 is gone"]) == log_dir
    assert (log_dir / "group.txt").read_text() == "rank 0 is gone\n"
    assert json.loads((log_dir / "verdict.json").read_text())["text"] == "***"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [("", "INTERRUPTED: exit code 3"), ("rank 0 is gone\nread its log", "INTERRUPTED: rank 0 is gone")],
)
def test_a_rank_that_was_told_no_verdict_has_the_first_line_of_its_end(verdict: str, text: str) -> None:
    assert verdict_of_ending(Ending(3, verdict, "", {}))["interrupted"] == text


@pytest.mark.parametrize("name", ["group.txt", "verdict.json.part"])
def test_a_fifo_among_the_files_is_not_waited_for(make_settings: Any, tmp_path: Path, name: str) -> None:
    workers, log_dir = tmp_path / "workers", tmp_path / "kept" / "rank-1"
    workers.mkdir()
    log_dir.mkdir(parents=True)
    os.mkfifo(log_dir / name)
    rank = finished(make_settings(log_dir=str(tmp_path / "kept")), workers)
    with pytest.raises(NixlPluginError, match=rf"rank-1 could not be written: .*/{name} is a FIFO"):
        keep(rank, Ending(1, "", "", {}), ["rank 0 is gone"])


def test_a_directory_that_cannot_be_written_is_named(make_settings: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NixlPluginError, match="could not be written: Not a directory") as caught:
        keep(finished(make_settings(log_dir=str(tmp_path / "file")), tmp_path), Ending(0, "", "", {}), [])
    assert caught.value.remedy == "name a directory that every rank can write to"
    assert keep(finished(make_settings(log_dir=""), tmp_path), Ending(0, "", "", {}), []) is None


def test_only_known_fields_of_another_ranks_verdict_are_kept() -> None:
    failed = Result("x", "x", Verdict.MISSING, "why", "how")
    plain = verdict_fields([failed], gate=True)
    assert verdict_of_ending(Ending(1, "text", verdict_fields={**plain, "path": "/etc/passwd"})) == plain
    assert verdict_of_ending(Ending(1, "text", verdict_fields=plain))["failing"][0]["remedy"] == "how"
    for bad in ({}, {"verdict": "GREEN"}, {"verdict": ["PASS"]}):
        assert verdict_of_ending(Ending(1, "rank 0 is gone", verdict_fields=bad))["verdict"] == "INTERRUPTED"
    assert verdict_of_ending(Ending(4, refusal="no"))["verdict"] == "REFUSED"
