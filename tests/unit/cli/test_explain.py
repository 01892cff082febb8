# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain`` reads logs, looks words up and lists checks; ``profile list`` and ``--version``."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, WITHOUT, environment

from pytest_nixl import __version__, cli
from pytest_nixl.cli import explain
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.session.selection import check_ids_by_suite


def test_every_check_of_the_suites_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--checks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    checks = [(check["suite"], check["id"]) for check in listed]
    assert sorted(checks) == sorted((suite, id) for suite, ids in check_ids_by_suite().items() for id in ids)
    assert all(check["proves"].endswith(".") for check in listed)


@pytest.mark.long
def test_the_printed_command_runs_that_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--checks", "shm"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    command = shlex.split(line.partition("run it: ")[2])
    done = subprocess.run(
        [sys.executable, "-m", *command, "--collect-only", "-q", *WITHOUT], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "test_machine[shm]" in done.stdout
    assert "1 test collected" in done.stdout


def test_each_profile_is_listed_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= set(bundled_profiles())
    [p4d] = [line for line in lines if line.startswith("p4d.24xlarge ")]
    assert p4d.endswith("(expects nothing of rows yet)")
    [loopback] = [line for line in lines if line.startswith("loopback ")]
    assert loopback.endswith("two processes of one host, host memory")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pytest-nixl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["nixl_err_backend"], ["error NIXL_ERR_BACKEND", "do:     `pytest-nixl doctor --backend UCX`"]),
        (["target", "uri", "is", "not"], ["error the target uri is not valid"]),
        (["VRAM-AS-HOST-MEMORY"], ["finding VRAM-AS-HOST-MEMORY", "remedy: "]),
        (["shm"], ["check shm", "proves: /dev/shm is larger", "fault `/dev/shm` has 64 MiB"]),
        (["--", "--nixl-gate"], ["option --nixl-gate"]),
        (
            ["Handshake with 127.0.0.1:5600 failed"],
            ["error Handshake with … failed", "doctor --side-channel=PREFILL_HOST:5600"],
        ),
        (["handshake"], ["error NIXL transfer failure: handshake_failed", "doctor --side-channel=PREFILL_HOST:5600"]),
    ],
)
def test_a_word_is_explained_by_what_comes_with_the_package(
    arguments: list[str], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments]) == 0
    printed = capsys.readouterr().out
    assert [text for text in sentences if text not in printed] == []


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["explain", *arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


def test_no_entry_prints_a_link_of_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "the bucket or container is missing"]) == 0
    assert "; Object storage (docs/how-to/object-storage.md#faults) lists the messages" in capsys.readouterr().out
    assert [line for entry in explain._entries() for line in (*entry.names, *entry.lines) if "](" in line] == []


def test_whole_words_come_before_longer_ones_and_parts_of_words_only_if_there_is_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    titles = explained(capsys, "--all", "hang")
    assert "check ranks-leader-change" not in titles, "the hang of change"
    assert "finding LIBFABRIC-NOTIFICATION-HANGS" in titles
    assert explained(capsys, "mtu")[0] == "check mtu", "its own id is before the faults that name it"
    assert "error NIXL compatibility hash mismatch" in explained(capsys, "ompatib")
    line = "ERROR 11-25 worker.py:88] Remote NIXL agent engine ID mismatch. Expected a, received b."
    assert explained(capsys, line) == ["error Remote NIXL agent engine ID mismatch"], "a whole line of a log"


LOG = """\
INFO 11-20 10:00:01 [core.py:12] the secret is hunter2
[1763600001.1] [pod-a:211:0]  parser.c:2036 UCX  WARN  unused environment variable: UCX_SERVICE_PORT
nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND
nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND
[1.1] [pod:211:0]  ucp_context.c:12 UCX WARN transports 'rc','ud' are not available, please use one or more of: tcp
"""


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make a text the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_log_is_explained_cause_first_without_an_echo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.log"
    file.write_text(LOG)
    assert cli.main(["explain", str(file)]) == 0
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert heads[0] == "line 5: transports … not available, please use one or more of"
    assert heads[1] == "line 3, 2 times: NIXL_ERR_BACKEND"
    assert heads[2].startswith("also seen, harmless: unused environment variable (UCX does not read")
    assert len(heads) == 3
    assert "hunter2" not in out
    for arguments in (["-"], []):
        feed(monkeypatch, LOG)
        assert cli.main(["explain", *arguments]) == 0
        assert capsys.readouterr().out == out


def test_of_many_causes_the_first_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.log"
    errors = ("BACKEND", "NOT_FOUND", "REMOTE_DISCONNECT", "INVALID_PARAM", "MISMATCH", "NO_TELEMETRY", "UNKNOWN",
              "REPOST_ACTIVE", "NOT_SUPPORTED")  # fmt: skip
    file.write_text("\n".join(f"NIXL_ERR_{error}" for error in errors))
    heads = explained(capsys, str(file))
    assert len(heads) == 9
    assert heads[-1] == "and 1 more: --all prints them"
    assert len(explained(capsys, "--all", str(file))) == 9


def test_several_logs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = tmp_path / "prefill.log", tmp_path / "decode.log"
    prefill.write_text("NIXL_ERR_BACKEND\n")
    decode.write_text(LOG)
    heads = explained(capsys, str(prefill), str(decode))
    assert heads[0].startswith(f"{decode}: line 5: transport")
    assert heads[1] == f"{prefill}: line 1: NIXL_ERR_BACKEND"


def test_only_harmless_messages_are_said_to_be_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.log"
    file.write_text(LOG.splitlines()[1])
    [line] = explained(capsys, str(file))
    assert line.startswith("seen, harmless: unused environment variable (")


def test_json_has_the_line_and_the_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.log"
    file.write_text(LOG)
    assert cli.main(["explain", "--json", str(file)]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["kind"], entry["line"], entry["count"]) for entry in entries] == [
        ("error", 5, 1), ("error", 3, 2), ("error", 2, 1),
    ]  # fmt: skip
    assert entries[0]["checks"][0] == "transports-allowed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("INFO the secret is hunter2\n" * 5, "nothing is known of this log of 5 lines"),
        ("no end of line", "nothing is known of this log of 1 line"),
        ("", "the log is empty"),
    ],
)
def test_a_log_of_which_nothing_is_known_is_one_sentence(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, text)
    assert cli.main(["explain", "-"]) == 2
    assert capsys.readouterr() == ("", f"pytest-nixl: {message}\n")


def test_many_entries_are_counted_unless_all_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = explained(capsys, "UCX"), explained(capsys, "--all", "UCX")
    assert short[:-1] == whole[: len(short) - 1]
    assert short[-1] == f"and {len(whole) - len(short) + 1} more: give more words, or --all"


def test_commands_name_the_suites_as_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "NIXL_ERR_NOT_FOUND"]) == 0
    assert "`pytest suites/metadata`" in capsys.readouterr().out
    inside = Path(explain.__file__).parents[1] / "suites"
    monkeypatch.setattr(explain, "suites_folder", lambda: inside)
    assert cli.main(["explain", "NIXL_ERR_NOT_FOUND"]) == 0
    out = capsys.readouterr().out
    assert "`pytest --pyargs pytest_nixl.suites.metadata`" in out
    assert "pytest suites/" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["xyzzy"], "no entry matches: give the line as it was printed, or one word of it, --checks or --findings"),
        (["memlick"], "no entry matches: did you mean memlock?"),
        (["Nixl_Err_Bakcend"], "no entry matches: did you mean nixl_err_backend?"),
        (["NIXL", "compatibility", "hash", "mismach"], "no entry matches: give the line as it"),
        (["FlashInfer", "is", "not", "installed"], "no entry matches: "),
        (["OSError: [Errno 12] Cannot allocate memory"], "no entry matches: "),
        (["--checks", "NIXL_ERR_BACKEND"], "no entry matches: "),
        (["hunter2 " * 30], "nothing is known of these words"),
        (["absent.log"], "there is no file of this name"),
        ([" "], "the word is empty: "),
    ],
)
def test_a_word_that_no_entry_matches_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pytest-nixl: {message}")
    assert printed.err.count("\n") == 1
