# SPDX-License-Identifier: Apache-2.0
"""How the command ends if something raises, what the doctor is asked, and what ``clean`` removes."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl import cli
from pytest_nixl.cli import clean, doctor
from pytest_nixl.core.errors import NixlPluginError


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


class Output(io.StringIO):
    """Standard output that cannot be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ": the program that was reading it has ended"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, " (No space left on device)"),
        (OSError(), 2, " (OSError)"),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, code: int, sentence: str
) -> None:
    monkeypatch.setattr(sys, "stdout", Output(error))
    discarded: list[bool] = []
    monkeypatch.setattr("pytest_nixl.core.terminal_output.discard_stdout", lambda: discarded.append(True))
    assert cli.main(["endpoint", "http://h:1"]) == code
    assert capsys.readouterr().err == f"pytest-nixl: standard output cannot be written{sentence}\n"
    assert discarded == [True]
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == (
        "pytest-nixl: standard output is closed: redirect it to a file, such as >answer.txt\n"
    )


class AskedError(Exception):
    """The facts would be gathered now."""


@pytest.mark.parametrize(
    ("arguments", "image", "transfer"),
    [
        ((), False, True),
        (("--no-transfer",), False, False),
        (("--image",), True, False),
        (("--root=.",), False, False),
        (("--root=.", "--image"), True, False),
    ],
)
def test_the_doctor_moves_bytes_on_this_host_only(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], image: bool, transfer: bool
) -> None:
    asked: list[object] = []

    def gathered(options: Any, root: Any, **how: object) -> Any:
        asked.append((options.root, root.live, how))
        raise AskedError

    monkeypatch.setattr(doctor, "gathered", gathered)
    with pytest.raises(AskedError):
        cli.main(["doctor", *arguments])
    root = "." if "--root=." in arguments else None
    assert asked == [(root, root is None, {"image": image, "transfer": transfer})]


@pytest.mark.parametrize(
    ("backend", "environ", "live", "image", "tried", "judged"),
    [
        (None, None, True, False, ("UCX",), ("UCX",)),
        (None, "POSIX", True, False, ("POSIX",), ("POSIX",)),
        ("libfabric,ucx", "POSIX", True, True, ("LIBFABRIC", "UCX"), ("LIBFABRIC", "UCX")),
        # A recorded tree has backends of its own, and no variable of this process.
        (None, "POSIX", False, False, ("UCX",), ("OBJ",)),
        ("POSIX", None, False, False, ("POSIX",), ("POSIX",)),
    ],
)
def test_facts_are_gathered_as_the_options_say(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, environ: str | None, live: bool, image: bool,
    tried: tuple[str, ...], judged: tuple[str, ...],
) -> None:  # fmt: skip
    asked: list[object] = []
    facts: Any = SimpleNamespace(software=SimpleNamespace(backends=[SimpleNamespace(name="OBJ")]))

    def gather(root: object, **how: object) -> Any:
        asked.append((root, how))
        return facts

    monkeypatch.setattr("pytest_nixl.host.facts.gather", gather)
    monkeypatch.delenv("NIXL_BACKEND", raising=False)
    if environ is not None:
        monkeypatch.setenv("NIXL_BACKEND", environ)
    options: Any = SimpleNamespace(backend=backend, etcd="URL", nixlbench="PATH", peer=["a"], side_channel=["b"])
    root: Any = SimpleNamespace(live=live, folder="TREE")
    assert doctor.gathered(options, root, image=image) == (facts, judged)
    reached: dict[str, object] = {"etcd": "", "peers": (), "side_channels": ()} if image else {
        "etcd": "URL", "peers": ["a"], "side_channels": ["b"]
    }  # fmt: skip
    assert asked == [(root, {"backends": tried, "nixlbench": "PATH", **reached})]


@pytest.mark.parametrize("fails", [False, True])
def test_bytes_are_moved_while_facts_are_gathered(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    calls: list[object] = []

    class Proofs:
        def __init__(self, backends: object) -> None:
            calls.append(backends)

        def results(self, *, gpus: bool) -> str:
            calls.append(("results", gpus))
            return "proofs"

        def close(self) -> None:
            calls.append("closed")

    def gather(root: object, **how: object) -> Any:
        if fails:
            raise NixlPluginError("no facts")
        software = SimpleNamespace(backends=[])
        return SimpleNamespace(gpu=SimpleNamespace(gpus=["a GPU"]), software=software)

    def with_transfers(facts: Any, proofs: str) -> Any:
        calls.append(proofs)
        return facts

    monkeypatch.setattr(doctor, "ProofsInAdvance", Proofs)
    monkeypatch.setattr(doctor, "close_supervisor", lambda: calls.append("supervisor closed"))
    monkeypatch.setattr("pytest_nixl.host.facts.gather", gather)
    monkeypatch.setattr("pytest_nixl.checks.doctor.transfers.with_transfers", with_transfers)
    options: Any = SimpleNamespace(backend="UCX", etcd="", nixlbench="", peer=[], side_channel=[])
    with pytest.raises(NixlPluginError) if fails else nullcontext():
        doctor.gathered(options, SimpleNamespace(live=True), transfer=True)  # type: ignore[arg-type]
    moved = [] if fails else [("results", True), "proofs"]
    assert calls == [("UCX",), *moved, "closed", "supervisor closed"]


@pytest.mark.parametrize("error", [KeyError("why"), AttributeError("x"), TypeError("y")])
def test_a_tree_of_another_form_is_refused_and_a_fault_of_ours_is_not(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=r"^TREE is not a tree") as refused,
        doctor.refuse_unreadable_tree(
            SimpleNamespace(live=False, folder="TREE")  # type: ignore[arg-type]
        ),
    ):
        raise error
    assert str(refused.value) == (
        f"TREE is not a tree that this version can read ({error!r}): record it again with `pytest-nixl facts --record "
        "DIR`"
    )
    with pytest.raises(type(error)), doctor.refuse_unreadable_tree(SimpleNamespace(live=True)):  # type: ignore[arg-type]
        raise error


def test_each_endpoint_is_shown_as_nixl_reads_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explain(text: str) -> Any:
        good = text in ("a", "b")
        note = SimpleNamespace(finding="F-ONE", text="it is ignored")
        nixl = SimpleNamespace(works=good or text == "noted", reason="because", notes=[note] if text == "noted" else [])
        rewrite, advice = text if good or text == "advised" else "x", "advice" if text == "advised" else ""
        return SimpleNamespace(
            text=text, nixl=nixl, findings=nixl.notes, rewrite=rewrite, advice=advice, remedy="write x"
        )

    monkeypatch.setattr("pytest_nixl.cli.endpoint.explain", explain)
    unread = "NIXL does not read it: because\n  write x"
    shown = {
        "a": "a\n  NIXL reads it: because", "b": "b\n  NIXL reads it: because", "advised": f"advised\n  {unread}",
        "noted": "noted\n  NIXL reads it: because\n  F-ONE: it is ignored\n  write x", " c": f"' c'\n  {unread}",
        "": f"''\n  {unread}",
    }  # fmt: skip
    for texts in (["a", "b"], ["a", "noted"], ["noted", "a"], ["advised"], [" c"], [""]):
        assert cli.main(["endpoint", *texts]) == (0 if texts == ["a", "b"] else 1)
        assert capsys.readouterr().out == "\n\n".join(shown[text] for text in texts) + "\n"


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


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_killed_runs_left_is_removed_and_what_remains_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, dry_run: bool
) -> None:
    items = {"nixl-1": {"kind": "container"}, "/keys": {"kind": "keys", "credentials": {"user": ""}}}
    removed: list[object] = []

    def remove(directory: str, watched: object) -> list[str]:
        removed.append((directory, watched))
        return ["a container stays", "and a key"] if directory == "/tmp/b" else []

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(clean, "abandoned", lambda folder: ["/tmp/a", "/tmp/b"] if folder == str(tmp_path) else [])
    monkeypatch.setattr(clean, "watched", lambda directory: items if directory == "/tmp/a" else {})
    monkeypatch.setattr(clean, "remove_run", remove)
    monkeypatch.setattr(clean, "etcdctl_credentials", lambda credentials: {**credentials, "user": "me"})
    for name in [name for name in os.environ if "ETCD" in name]:
        monkeypatch.delenv(name)
    assert cli.main(["clean", *["--dry-run"] * dry_run]) == (0 if dry_run else 1)
    of_a = "what a killed run left: /tmp/a, nixl-1, /keys\n"
    assert capsys.readouterr() == (
        (f"would remove {of_a}would remove what a killed run left: /tmp/b\n", "") if dry_run
        else (f"removed {of_a}a killed run left /tmp/b\n", "pytest-nixl: a container stays\npytest-nixl: and a key\n")
    )  # fmt: skip
    known = {**items, "/keys": {"kind": "keys", "credentials": {"user": "me"}}}
    assert removed == ([] if dry_run else [("/tmp/a", known), ("/tmp/b", {})])
