# SPDX-License-Identifier: Apache-2.0
"""How the command ends if something raises, what the doctor is asked, what ``clean`` names, and which options fit."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl import cli
from pytest_nixl.cli import clean, doctor
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.processes.leftovers import write_watched


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Restore what Ctrl-C does."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "ended by Ctrl-C (SIGINT)"),
        (FileNotFoundError(2, "No such file", "a\nb"), 2, r"a\nb cannot be read (No such file)"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "Too many open files: a process may have "),
        (ValueError("one\ntwo hunter2"), 2, r"one\ntwo ***"),
        (NixlPluginError("one\x1b", "two\nthree"), 2, "one\\x1b\nremedy: two\nthree"),
    ],
    ids=["ctrl-c", "no-file", "no-descriptor", "a-value", "ours"],
)
def test_an_error_is_one_sentence_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, sentence: str
) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setattr("pytest_nixl.cli.endpoint.explain", fail)
    assert cli.main(["endpoint", "http://h:1"]) == code
    out, err = capsys.readouterr()
    assert (out, err.rstrip("\n")) == ("", f"pytest-nixl: {sentence}") or (
        sentence.endswith(" ") and err.startswith(f"pytest-nixl: {sentence}") and "; remedy: raise the limit" in err
    )
    assert (signal.getsignal(signal.SIGINT) is signal.SIG_DFL) is (code == 130)


@pytest.mark.parametrize(
    ("arguments", "tried", "judged", "reached", "transfer"),
    [
        ([], "POSIX", "POSIX", True, True),
        (["--no-transfer", "--backend=libfabric,ucx"], "LIBFABRIC,UCX", "LIBFABRIC,UCX", True, False),
        (["--image"], "POSIX", "POSIX", False, False),
        # A recorded tree has backends of its own, and no variable of this process.
        (["--root=."], "UCX", "OBJ", True, False),
        (["--root=.", "--backend=LIBFABRIC"], "LIBFABRIC", "LIBFABRIC", True, False),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_the_doctor_gathers_facts_moves_bytes_and_judges_as_its_options_say(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], tried: str, judged: str, reached: bool, transfer: bool,
    fails: bool,
) -> None:  # fmt: skip
    calls: list[object] = []

    class Proofs:
        def __init__(self, backends: object) -> None:
            calls.append(backends)

        def results(self, *, gpus: bool) -> str:
            calls.append(("results", gpus))
            return "proofs"

        def close(self) -> None:
            calls.append("closed")

    def gather(root: Any, **options: object) -> Any:
        calls.append((root.live, options))
        if fails:
            raise NixlPluginError("no facts")
        software = SimpleNamespace(backends=[SimpleNamespace(name="OBJ")])
        return SimpleNamespace(gpu=SimpleNamespace(gpus=["a GPU"]), software=software)

    def with_transfers(facts: Any, proofs: str) -> Any:
        calls.append(proofs)
        return facts

    def examine(facts: object, requirements: Any, *, gate: bool) -> list[Any]:
        calls.append((requirements.backends, requirements.image, gate))
        return []

    monkeypatch.setattr(doctor, "ProofsInAdvance", Proofs)
    monkeypatch.setattr(doctor, "close_supervisor", lambda: calls.append("supervisor closed"))
    monkeypatch.setattr("pytest_nixl.host.facts.gather", gather)
    monkeypatch.setattr("pytest_nixl.checks.doctor.transfers.with_transfers", with_transfers)
    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setenv("NIXL_BACKEND", "POSIX")
    sources = ["--etcd=URL", "--nixlbench=PATH", "--peer=a", "--side-channel=b"]
    assert cli.main(["doctor", *arguments, *sources]) == (2 if fails else 0)
    targets: dict[str, object] = {"etcd": "URL", "peers": ["a"], "side_channels": ["b"]}
    if not reached:
        targets = {"etcd": "", "peers": (), "side_channels": ()}
    backends = tuple(tried.split(","))
    facts = ("--root=." not in arguments, {"backends": backends, "nixlbench": "PATH", **targets})
    moved = [("results", True), "proofs"] if transfer and not fails else []
    examined = [] if fails else [(tuple(judged.split(",")), not reached, False)]
    begun, ended = ([backends], ["closed"]) if transfer else ([], [])
    assert calls == [*begun, facts, *moved, *ended, "supervisor closed", *examined]


def test_a_fault_of_ours_is_not_called_one_of_the_tree() -> None:
    with pytest.raises(KeyError), doctor.refuse_unreadable_tree(SimpleNamespace(live=True)):  # type: ignore[arg-type]
        raise KeyError("why")


URL, OTHER, READS = "http://127.0.0.1:1", "http://127.0.0.2:1", "\n  NIXL reads it: it contacts 127.0.0.1:1"


@pytest.mark.parametrize(
    ("texts", "code", "shown"),
    [
        ([URL, URL], 0, f"{URL}{READS}\n\n{URL}{READS}\n"),
        ([f" {URL}"], 0, f"' {URL}'{READS}\n  write {URL}\n"),
        ([f"{URL},{OTHER}"], 0, f"{URL},{OTHER}{READS} and 127.0.0.2:1\n  write {URL},{OTHER}; the KV benchmark "),
        ([URL, "https://127.0.0.1:1"], 1, f"{URL}{READS}\n\nhttps://127.0.0.1:1{READS}\n  NIXL-ETCD-HTTPS-PLAINTEXT: "),
        ([""], 1, "''\n  NIXL does not read it: it is empty, "),
    ],
)
def test_each_endpoint_is_shown_as_nixl_reads_it(
    texts: list[str], code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["endpoint", *texts]) == code
    assert capsys.readouterr().out.startswith(shown)


RECORD = "--yes removes keys, and needs a record of them: give --record FILE, the name of a new file"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        *((option, f"{option.partition('=')[0]} has no effect without --remove-dead: give both")
          for option in ("--agent=a", "--unchanged-since=0", "--yes", "--record=x")),
        ("--remove-dead --json", "--remove-dead prints no JSON: leave out --json; --record writes JSON"),
        ("--remove-dead --yes", RECORD),
        ("--remove-dead --record=x", "--record has nothing to record without --yes: give both"),
        ("--remove-dead --yes --record=x --agent=a",
         "--yes with --agent needs --unchanged-since REVISION, so that an agent that started again is kept: run the "
         "command without --yes, which prints it"),
        ("--remove-dead --yes --record=.", ". already exists: give --record the name of a new file"),
        ("--max-request-bytes=x", "'x' is not a size: expected "),
    ],
)  # fmt: skip
def test_options_of_etcd_that_do_not_fit_together_are_refused(
    capsys: pytest.CaptureFixture[str], options: str, refusal: str
) -> None:
    assert cli.main(["etcd", "http://127.0.0.1:1", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.partition(": expected ")[0].rstrip()) == (
        "",
        f"pytest-nixl: {refusal}".partition(": expected ")[0],
    )


def test_a_container_of_a_killed_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(clean, "abandoned", lambda folder: [str(tmp_path)])
    write_watched(str(tmp_path), {"nixl-1": {"kind": "container", "name": "c", "environment": {}, "expected": True}})
    assert cli.main(["clean", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove what a killed run left: {tmp_path}, nixl-1\n"
