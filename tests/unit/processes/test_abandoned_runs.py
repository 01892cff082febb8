# SPDX-License-Identifier: Apache-2.0
"""What a killed run has left, and its removal. Engine and etcd are doubles, so that they refuse when a test says so."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.processes import leftovers
from pytest_nixl.processes.leftovers import (
    abandoned,
    by_place,
    clean_remote,
    remove,
    remove_run,
    watched,
    write_watched,
)

NUMBER = "0123456789ab"


def container(name: str = "c", *, expected: bool = False, **environment: str) -> dict[str, Any]:
    return {"kind": "container", "name": name, "environment": environment, "expected": expected}


def prefix(name: str = "/x/", host: str = "a", *, user: str = "", **more: Any) -> dict[str, Any]:
    endpoints = [["http", host, 2379, user, user and "secret"], ["https", "b", 2380, "", ""]]
    return {"kind": "prefix", "name": name, "endpoints": endpoints, "credentials": {}, **more}


class NotFoundError(Exception):
    """The engine's answer for a container that it does not have."""


class APIError(Exception):
    """Another refusal of the engine, by its status."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"refused\nwith\n{status_code}")
        self.status_code = status_code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What engine and etcd are asked. They refuse by the name: ``absent``, a status, or ``refused``."""
    log: list[object] = []

    def get(name: str) -> SimpleNamespace:
        log.append(name)
        if name == "absent" or (name == "late" and log.count(name) < 3):
            raise NotFoundError
        if name.isdecimal():
            raise APIError(int(name))
        return SimpleNamespace(remove=lambda **options: log.append(options))

    def from_env(**options: Any) -> SimpleNamespace:
        log.append(options)
        return SimpleNamespace(containers=SimpleNamespace(get=get))

    @contextmanager
    def connect(endpoints: Sequence[Any], **options: Any) -> Iterator[SimpleNamespace]:
        log.append(([(endpoint.scheme, endpoint.host, endpoint.port) for endpoint in endpoints], options))

        def delete_prefix(name: str) -> None:
            log.append(name)
            if name == "/refused/":
                raise ValueError("no quorum\nand more")

        yield SimpleNamespace(delete_prefix=delete_prefix)

    errors = SimpleNamespace(NotFound=NotFoundError, APIError=APIError)
    monkeypatch.setattr(leftovers, "docker", SimpleNamespace(from_env=from_env, errors=errors))
    monkeypatch.setattr("pytest_nixl.etcd.client.connect", connect)
    return log


ENGINE = {"environment": {}, "timeout": 5, "use_ssh_client": False}
MEMBERS = [("http", "a", 2379), ("https", "b", 2380)]
WHERE = "http://a:2379,https://b:2380"


@pytest.mark.parametrize(
    ("item", "requests", "remaining"),
    [
        (
            container("c", DOCKER_HOST="ssh://there"),
            [{**ENGINE, "environment": {"DOCKER_HOST": "ssh://there"}, "use_ssh_client": True}, "c",
             {"force": True, "v": True}], "",
        ),
        (container("late", expected=True), [ENGINE, *["late"] * 3, {"force": True, "v": True}], ""),
        (container("late"), [ENGINE, "late"], ""),
        (container("409"), [ENGINE, "409"], ""),
        (container("500"), [ENGINE, "500"],
         "the container 500 is left (refused): `docker rm --force --volumes 500`"),
        (prefix(credentials={"user": "u"}), [(MEMBERS, {"timeout": 3.0, "user": "u"}), "/x/"], ""),
        (prefix("/refused/", login=True), [(MEMBERS, {"timeout": 3.0}), "/refused/"],
         f"the keys below /refused/ are left in the etcd at {WHERE} (no quorum): "
         f"`etcdctl --endpoints={WHERE} del --prefix /refused/`; set ETCDCTL_USER=NAME:PASSWORD first"),
    ],
)  # fmt: skip
def test_what_cannot_be_removed_is_a_sentence_with_its_command(
    calls: list[object], item: dict[str, Any], requests: list[object], remaining: str
) -> None:
    assert clean_remote([item, container("next")]) == ([remaining] if remaining else [])
    assert calls == [*requests, ENGINE, "next", {"force": True, "v": True}], "the next one is tried in any case"


def test_items_of_one_etcd_or_engine_are_removed_together() -> None:
    items = [container("1"), prefix("/1/"), container("2", DOCKER_HOST="there"), container("3"), prefix("/3/")]
    assert [[item["name"] for item in group] for group in by_place(items)] == [["1", "3"], ["/1/", "/3/"], ["2"]]


def test_nothing_is_watched_if_the_file_is_absent_or_damaged(tmp_path: Path) -> None:
    """What is written is in ``test_supervisor.py``."""
    assert watched(str(tmp_path)) == {}
    (tmp_path / "watched.json").write_text("[")
    assert watched(str(tmp_path)) == {}
    write_watched(str(tmp_path / "absent"), {})


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", str(folder))
    return folder


def make_run(folder: Path, name: str = f"pytest-nixl-{NUMBER}", *, mode: int = 0o700, owner: str = "") -> Path:
    """Make a run directory with a file in a folder; its owner's file has its name."""
    (folder / name / "data").mkdir(parents=True)
    (folder / name / "data" / "file").touch()
    (folder / name / "owner").write_text(owner or name)
    (folder / name).chmod(mode)
    return folder / name


def make_empty(folder: Path, name: str, *, age: float = 3600.0, entry: str = "") -> Path:
    """Make a directory without an owner's file that is as old as a number of seconds."""
    (folder / name).mkdir(mode=0o700)
    if entry:
        (folder / name / entry).touch()
    os.utime(folder / name, (time.time() - age,) * 2)
    return folder / name


def test_abandoned_are_the_private_directories_of_runs_whose_supervisor_has_ended(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    expected = {make_run(runs), make_run(runs, "pytest-nixl-any")}
    living = make_run(runs, "pytest-nixl-living")
    make_run(runs, "pytest-nixl-open", mode=0o750)
    make_run(runs, "other")
    (runs / "pytest-nixl-link").symlink_to(next(iter(expected)))
    (runs / "pytest-nixl-file").touch()
    expected.add(make_empty(runs, "pytest-nixl-ba9876543210"))
    expected.add(make_empty(runs, "pytest-nixl-aa9876543210-7"))
    make_empty(runs, "pytest-nixl-ca9876543210", age=0.0)
    make_empty(runs, "pytest-nixl-da9876543210", entry="data")
    make_empty(runs, "pytest-nixl-ga9876543210")
    make_empty(runs, "pytest-nixl-ea98765432100")
    make_run(shm, f"pytest-nixl-{NUMBER}")
    expected.add(make_run(shm, "pytest-nixl-shm"))
    with (living / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert {Path(path) for path in abandoned(str(runs))} == expected
        assert remove_run(str(living)) == []
        assert (living / "data" / "file").exists()
    assert {Path(path).parent for path in abandoned(str(tmp_path / "absent"))} == {shm}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert abandoned(str(runs)) == [], "those of another user"


def test_a_run_is_removed_with_its_shared_memory_and_what_cannot_be_stays_written_down(
    tmp_path: Path, shm: Path, calls: list[object]
) -> None:
    directory = make_run(tmp_path)
    segments, other = make_run(shm), make_run(shm, "other")
    items = {"c": container("500"), "gone": container("c"), "p": prefix("/refused/")}
    write_watched(str(directory), items)
    (directory / "log").touch()
    secret = {"p": prefix("/x/", user="u"), "mine": container("500")}
    sentence = "the container 500 is left (refused): `docker rm --force --volumes 500`"
    assert remove_run(str(directory), secret) == [sentence, sentence]
    assert calls.count("/x/") == 1, "with the password of the client"
    assert "/refused/" not in calls
    assert not directory.exists()
    assert not segments.exists()
    assert other.exists()
    [renamed] = tmp_path.glob("pytest-nixl-*")
    assert renamed.name == f"{directory.name}-{os.getpid()}"
    assert sorted(path.name for path in renamed.iterdir()) == ["owner", "watched.json"]
    assert json.loads((renamed / "watched.json").read_text()) == {"c": items["c"]}
    (renamed / "watched.json").write_text(json.dumps({"c": container("absent")}))
    assert remove_run(str(renamed)) == []
    assert not list(tmp_path.glob("pytest-nixl-*"))


def test_a_directory_without_an_owner_is_removed_if_it_is_an_empty_one_of_a_run(tmp_path: Path, shm: Path) -> None:
    empty, other = make_empty(tmp_path, f"pytest-nixl-{NUMBER}"), make_empty(tmp_path, "pytest-nixl-notes")
    stranger, inside = make_run(tmp_path, "stranger"), make_run(shm, "stranger")
    for directory in (empty, other, stranger, tmp_path / "absent"):
        assert remove_run(str(directory)) == []
    assert [path.exists() for path in (empty, other, stranger, inside)] == [False, True, False, True]


def test_a_directory_is_removed_again_while_processes_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rmdir, failures = os.rmdir, [OSError("busy")]

    def refuse(path: str) -> None:
        if failures:
            raise failures.pop(0)
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", refuse)
    remove(str(make_run(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(leftovers, "REMOVE_SECONDS", 0.1)
    failures[:] = [OSError("busy")] * 99
    remove(str(make_run(tmp_path)))
    assert capsys.readouterr().err == f"supervisor: {tmp_path}/pytest-nixl-{NUMBER}: busy\n"
