# SPDX-License-Identifier: Apache-2.0
"""The supervisor: it cleans up when its last client is gone, however that client ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.etcd import (
    Etcd,
    environment,
    mentioning,
    running,
    running_etcd,
    separate_supervisor,
    turn_authentication_on,
    wait_until,
)

from pytest_nixl import cli
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.processes import supervisor as supervisor_module
from pytest_nixl.processes import supervisor_main
from pytest_nixl.processes.leftovers import remove_tree, watched, write_watched
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError, close_supervisor, supervisor

#: A client in a separate process. It prints what it has started, then waits to be ended or ends itself.
CLIENT = """
import json, os, signal, subprocess, sys, time
how = sys.argv[1]
from pytest_nixl.processes.supervisor import supervisor
own = supervisor()
mine = own.spawn(["sleep", "300"], log="mine.log")
watched = subprocess.Popen(["sleep", "300"], start_new_session=True)
own.watch_process(watched.pid)
forgotten = subprocess.Popen(["sleep", "300"], start_new_session=True)
own.watch_process(forgotten.pid)
own.unwatch_process(forgotten.pid)
forked = os.fork() if how == "fork" else 0
if how == "fork" and not forked:
    os.close(1)
    time.sleep(300)
print(json.dumps(dict(supervisor=own.pid, directory=str(own.directory), mine=mine, watched=watched.pid,
                      forgotten=forgotten.pid, forked=forked)), flush=True)
if how == "wait":
    try:
        # A signal that arrives before a sleep begins does not end it.
        for _ in range(3000):
            time.sleep(0.1)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture
def own_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorClient]:
    """A supervisor that this test may end."""
    with separate_supervisor(monkeypatch) as separate:
        yield separate


def client(how: str = "wait", **more: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a client; return its process and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, how], stdout=subprocess.PIPE, text=True, env=environment(**more)
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> None:
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def test_spawn_and_stop(own_client: SupervisorClient) -> None:
    pid = own_client.spawn(["sh", "-c", "echo out; echo err >&2; exec sleep 300"], log="it.log")
    assert own_client.alive(pid)
    assert own_client.how_ended(pid) == "running"
    wait_until(lambda: (own_client.directory / "it.log").read_text() == "out\nerr\n", 60, "the log has both")
    assert own_client.stop(pid) == "ended by SIGTERM"
    assert not own_client.alive(pid)
    assert own_client.stop(pid) == "ended by SIGTERM"


def test_a_stopped_process_ends_by_sigterm(own_client: SupervisorClient) -> None:
    pid = own_client.spawn(["sleep", "300"], log="it.log")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text(), 60, "it is stopped")
    assert own_client.stop(pid) == "ended by SIGTERM"


def test_the_end_of_a_process_is_described(own_client: SupervisorClient) -> None:
    failed = own_client.spawn(["sh", "-c", "exit 3"], log="a.log")
    killed = own_client.spawn(["sh", "-c", "kill -9 $$"], log="b.log")
    wait_until(lambda: not own_client.alive(failed) and not own_client.alive(killed), 60, "both have ended")
    assert own_client.how_ended(failed) == "ended with exit code 3"
    assert own_client.how_ended(killed) == "ended by SIGKILL"
    assert own_client.how_ended(1) == "was not started by this supervisor"


@pytest.mark.long
def test_stop_kills_a_group_that_ignores_sigterm(own_client: SupervisorClient) -> None:
    script = "trap '' TERM; sleep 300 & echo $!; wait"
    pid = own_client.spawn(["sh", "-c", script], log="stubborn.log")
    log = own_client.directory / "stubborn.log"
    wait_until(lambda: log.read_text().endswith("\n"), 60, "the grandchild is there")
    grandchild = int(log.read_text())
    start = time.monotonic()
    assert own_client.stop(pid) == "ended by SIGKILL"
    assert 1.9 < time.monotonic() - start < 60, "the script ends after 300 s"
    wait_until(lambda: not running(grandchild), 60, "the grandchild has ended")


def test_variables_are_added_and_removed(own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = own_client.spawn(["sh", "-c", "echo $ADDED-${HOME-gone}"], log="e.log", env={"ADDED": "yes", "HOME": None})
    wait_until(lambda: not own_client.alive(pid), 60, "it has ended")
    assert (own_client.directory / "e.log").read_text() == "yes-gone\n"


def test_a_missing_program_is_named(own_client: SupervisorClient) -> None:
    with pytest.raises(SupervisorError, match=r"could not spawn /nowhere/it: No such file or directory"):
        own_client.spawn(["/nowhere/it"], log="x.log")
    assert own_client.alive(own_client.spawn(["sleep", "300"], log="x.log")), "the supervisor continues after that"


def test_a_log_outside_of_the_run_directory_is_refused(own_client: SupervisorClient) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        own_client.spawn(["true"], log="../x.log")


def test_the_run_directory_is_private(own_client: SupervisorClient) -> None:
    assert own_client.directory.stat().st_mode & 0o777 == 0o700


def test_close_cleans_up_and_a_new_supervisor_can_be_started(
    own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_nixl.processes.supervisor.CLEAN_SECONDS", 60.0)  # on a busy machine
    pid = own_client.spawn(["sleep", "300"], log="x.log")
    (own_client.directory / "folder" / "deeper").mkdir(parents=True)
    close_supervisor()
    assert not own_client.directory.exists()
    assert not running(pid)
    assert not running(own_client.pid)
    with pytest.raises(SupervisorError, match="is closed"):
        own_client.alive(pid)
    assert supervisor().directory != own_client.directory


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM", "end"])
def test_nothing_is_left_behind(how: str) -> None:
    process, has = client("end" if how == "end" else "wait")
    if how != "end":
        process.send_signal(getattr(signal, how))
    end(process)
    wait_until(lambda: not Path(has["directory"]).exists(), 60, "the run directory has gone")
    assert not running(has["mine"])
    # It is not a child of the supervisor, which can kill it but not wait for it.
    wait_until(lambda: not running(has["watched"]), 60, "the watched process has ended")
    wait_until(lambda: not mentioning(has["directory"]), 60, "the supervisor has ended")
    assert running(has["forgotten"]), "a process that is no longer watched is not killed"
    os.kill(has["forgotten"], signal.SIGKILL)


def test_ctrl_c_does_not_reach_the_supervisor_or_its_children(own_client: SupervisorClient) -> None:
    pid = own_client.spawn(["sleep", "300"], log="x.log")
    assert len({os.getsid(0), os.getsid(own_client.pid), os.getsid(pid)}) == 3
    os.kill(own_client.pid, signal.SIGINT)
    assert own_client.alive(pid)


def test_children_die_with_a_killed_supervisor(own_client: SupervisorClient) -> None:
    pid = own_client.spawn(["sleep", "300"], log="x.log")
    shared_memory = Path(own_client.shared_memory)
    os.kill(own_client.pid, signal.SIGKILL)
    wait_until(lambda: not running(pid), 60, "the child has died with its supervisor")
    with pytest.raises(SupervisorError, match="has ended"):
        own_client.alive(pid)
    assert not own_client.directory.exists()
    assert not shared_memory.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_killed_supervisor_leaves_no_directory(number: signal.Signals, tmp_path: Path) -> None:
    process, has = client(TMPDIR=str(tmp_path))
    os.kill(has["supervisor"], number)
    wait_until(lambda: not running(has["mine"]), 60, "the child has died with its supervisor")
    process.send_signal(signal.SIGINT)
    end(process)
    wait_until(lambda: not any(tmp_path.iterdir()), 60, "the run directory has gone")
    assert not Path("/dev/shm", Path(has["directory"]).name).exists()
    forget(has)


def forget(has: dict[str, Any]) -> None:
    """End the processes of a client that nothing else ends."""
    for name in ("watched", "forgotten"):
        if running(has[name]):
            os.kill(has[name], signal.SIGKILL)


@pytest.fixture
def abandoned_run(tmp_path: Path) -> dict[str, Any]:
    """A run that was killed together with its supervisor, in a directory for temporary files of its own."""
    process, has = client(TMPDIR=str(tmp_path))
    for pid in (has["supervisor"], process.pid):
        os.kill(pid, signal.SIGKILL)
    end(process)
    wait_until(lambda: not running(has["supervisor"]), 60, "the supervisor has ended")
    forget(has)
    assert Path(has["directory"]).is_dir()
    assert Path("/dev/shm", Path(has["directory"]).name).is_dir()
    return has


def test_the_next_run_removes_what_a_killed_one_left(abandoned_run: dict[str, Any], tmp_path: Path) -> None:
    process, living = client(TMPDIR=str(tmp_path))
    mine = Path(living["directory"])
    wait_until(lambda: list(tmp_path.iterdir()) == [mine], 60, "the directory of the killed run has gone")
    assert not Path("/dev/shm", Path(abandoned_run["directory"]).name).exists()
    other, next_client = client("end", TMPDIR=str(tmp_path))
    end(other)
    forget(next_client)
    wait_until(lambda: list(tmp_path.iterdir()) == [mine], 60, "the other run has ended")
    assert (mine / "owner").exists(), "a run that lives keeps its directory"
    process.kill()
    end(process)
    forget(living)
    wait_until(lambda: not any(tmp_path.iterdir()), 60, "the run directories have gone")


@pytest.mark.alone  # whoever cleans this host removes it
def test_shared_memory_of_a_killed_run_is_removed_without_its_run_directory(
    abandoned_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remove_tree(abandoned_run["directory"])
    shared_memory = Path("/dev/shm", Path(abandoned_run["directory"]).name)
    cli.main(["clean"])
    assert f"removed what a killed run left: {shared_memory}\n" in capsys.readouterr().out
    assert not shared_memory.exists()


@pytest.mark.alone
def test_an_empty_directory_of_a_run_killed_while_it_removed_its_files_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new = (Path(f"/dev/shm/pytest-nixl-{os.urandom(6).hex()}") for _ in range(2))
    other = tmp_path / "pytest-nixl-notes"
    an_hour_ago = time.time() - 3600
    try:
        for folder in (old, new, other):
            folder.mkdir(mode=0o700)
            if folder is not new:  # that one may be of a supervisor that starts
                os.utime(folder, (an_hour_ago, an_hour_ago))
        assert cli.main(["clean"]) == 0
        assert f"removed what a killed run left: {old}\n" in capsys.readouterr().out
        assert [folder.exists() for folder in (old, new, other)] == [False, True, True]
    finally:
        for folder in (old, new):
            with suppress(FileNotFoundError):
                folder.rmdir()


def test_the_owner_of_a_directory_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = os.unlink

    def unlink(path: str) -> None:
        order.append(Path(path).name)
        original(path)

    monkeypatch.setattr(os, "unlink", unlink)
    folder = tmp_path / "run"
    (folder / "data").mkdir(parents=True)
    for name in ("a", "owner", "z", "data/b"):
        (folder / name).touch()
    remove_tree(str(folder))
    assert sorted(order) == ["a", "b", "owner", "z"]
    assert order[-1] == "owner"


def test_a_stopped_supervisor_cleans_up_after_its_client(tmp_path: Path) -> None:
    process, has = client(TMPDIR=str(tmp_path))
    os.kill(has["supervisor"], signal.SIGSTOP)
    process.kill()
    end(process)
    wait_until(lambda: not any(tmp_path.iterdir()), 60, "the run directory has gone")
    wait_until(lambda: not running(has["supervisor"]), 60, "the supervisor has ended")
    forget(has)


def test_a_directory_of_another_program_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "pytest-nixl-notes").mkdir(mode=0o700)
    (tmp_path / "pytest-nixl-open").mkdir()
    (tmp_path / "pytest-nixl-open" / "owner").write_text("pytest-nixl-open")
    (tmp_path / "pytest-nixl-open").chmod(0o755)
    process, has = client("end", TMPDIR=str(tmp_path))
    end(process)
    forget(has)
    others = ["pytest-nixl-notes", "pytest-nixl-open"]
    wait_until(lambda: not Path(has["directory"]).exists(), 60, "its own directory has gone")
    assert sorted(path.name for path in tmp_path.iterdir()) == others


#: A client that watches a prefix of an etcd, in which a key is. It is killed together with its supervisor, or alone.
WATCHER = """
import json, os, signal, sys, time
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.processes.supervisor import SupervisorError, supervisor
url, user, password, both = sys.argv[1:]
own, endpoints = supervisor(), parse_endpoints(url)
own.watch_prefix("/bob/forgotten/", endpoints, user=user, password=password)
own.unwatch_prefix("/bob/forgotten/", endpoints)
own.watch_prefix("/bob/ours/", endpoints, user=user, password=password)
with connect(endpoints, user=user, password=password) as etcd:
    etcd.put("/bob/ours/a", b"1")
    etcd.put("/bob/forgotten/a", b"1")
os.kill(own.pid, signal.SIGKILL)
if both:
    os.waitpid(own.pid, 0)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    own.alive(1)
except SupervisorError as error:
    print(error)
"""


def keys_left(etcd: Etcd, folder: Path, *, password: str = "", both: bool) -> tuple[list[str], str]:
    """Run WATCHER; return the keys that the etcd has afterwards, and what it printed."""
    argv = [sys.executable, "-c", WATCHER, etcd.url, "root" if password else "", password, "yes" if both else ""]
    done = subprocess.run(
        argv, env=environment(TMPDIR=str(folder)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (-signal.SIGKILL if both else 0), done.stderr
    return keys(etcd, password), done.stdout


def keys(etcd: Etcd, password: str = "") -> list[str]:
    with connect([etcd.endpoint], user="root" if password else "", password=password, timeout=60) as client:
        return sorted(client.get_prefix("/bob/"))


def test_a_client_removes_its_keys_if_its_supervisor_is_killed(tmp_path: Path) -> None:
    with running_etcd() as etcd:
        turn_authentication_on(etcd.url)
        keys, output = keys_left(etcd, tmp_path, password="pw", both=False)
        assert keys == ["/bob/forgotten/a"]
        assert "has ended" in output
        assert "are left" not in output
    assert not any(tmp_path.iterdir())


def test_a_client_names_the_keys_that_it_cannot_remove(own_client: SupervisorClient) -> None:
    [port] = free_ports(1)
    own_client.watch_prefix("/ours/", parse_endpoints(f"http://127.0.0.1:{port}"))
    os.kill(own_client.pid, signal.SIGKILL)
    with pytest.raises(SupervisorError) as raised:
        own_client.alive(1)
    where = f"http://127.0.0.1:{port}"
    assert f"the keys below /ours/ are left in the etcd at {where} (" in raised.value.detail
    assert raised.value.detail.endswith(f"`etcdctl --endpoints={where} del --prefix /ours/`")
    [remaining] = own_client.directory.parent.glob(f"{own_client.directory.name}-*")
    remove_tree(str(remaining))


def test_the_next_run_removes_the_keys_of_a_killed_one(tmp_path: Path) -> None:
    with running_etcd() as etcd:
        assert keys_left(etcd, tmp_path, both=True)[0] == ["/bob/forgotten/a", "/bob/ours/a"]
        process, has = client(TMPDIR=str(tmp_path))
        wait_until(lambda: keys(etcd) == ["/bob/forgotten/a"], 60, "the keys have gone")
        wait_until(lambda: len(list(tmp_path.iterdir())) == 1, 60, "the directory has gone")
        process.kill()
        end(process)
        forget(has)


def test_clean_removes_the_keys_of_a_killed_run_with_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_etcd() as etcd:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        turn_authentication_on(etcd.url)
        keys_left(etcd, tmp_path, password="pw", both=True)
        [directory] = tmp_path.iterdir()
        assert "pw" not in (directory / "watched.json").read_text()
        assert cli.main(["clean", "--dry-run"]) == 0
        assert capsys.readouterr().out == (
            f"would remove what a killed run left: {directory}, prefix /bob/ours/ {etcd.url}\n"
        )
        assert cli.main(["clean"]) == 1
        out, err = capsys.readouterr()
        assert out == f"a killed run left {directory}\n"
        assert f"pytest-nixl: the keys below /bob/ours/ are left in the etcd at {etcd.url} (" in err
        assert "; set ETCDCTL_USER" in err
        assert not (directory / "supervisor.log").exists()
        monkeypatch.setenv("ETCDCTL_USER", "root:pw")
        assert cli.main(["clean"]) == 0
        assert "removed what a killed run left: " in capsys.readouterr().out
        assert keys(etcd, "pw") == ["/bob/forgotten/a"]
    assert not any(tmp_path.iterdir())
    assert cli.main(["clean"]) == 0
    assert capsys.readouterr().out == "nothing to remove on this host\n"


@pytest.mark.parametrize("secret_of", ["endpoint", "credentials", ""])
def test_what_is_written_down_has_no_password_and_says_whether_one_is_needed(tmp_path: Path, secret_of: str) -> None:
    users = {name: ("bob", "Sw0rdfish") if name == secret_of else ("", "") for name in ("endpoint", "credentials")}
    credentials = dict(zip(("user", "password"), users["credentials"], strict=True))
    endpoints = [["http", "etcd-0", 2379, "", ""], ["http", "etcd-1", 2379, *users["endpoint"]]]
    prefix = {"kind": "prefix", "name": "/ours/", "endpoints": endpoints, "credentials": {**credentials, "cacert": "c"}}
    container = {"kind": "container", "name": "etcd", "environment": {"DOCKER_HOST": "x"}, "expected": True}
    write_watched(str(tmp_path), {"a": prefix, "b": container})
    empty = {"user": "", "password": "", "cacert": "c"}
    hidden = {**prefix, "credentials": empty, "endpoints": [[*endpoint[:3], "", ""] for endpoint in endpoints]}
    assert watched(str(tmp_path)) == {"a": {**hidden, "login": bool(secret_of)}, "b": container}
    write_watched(str(tmp_path), watched(str(tmp_path)))
    assert watched(str(tmp_path))["a"]["login"] is bool(secret_of)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_the_supervisor_cleans_up_on_sigterm_or_sigquit(number: signal.Signals) -> None:
    process, has = client()
    os.kill(has["supervisor"], number)
    wait_until(lambda: not Path(has["directory"]).exists(), 60, "the run directory has gone")
    assert not running(has["mine"])
    # It is not a child of the supervisor, which can kill it but not wait for it.
    wait_until(lambda: not running(has["watched"]), 60, "the watched process has ended")
    os.kill(has["forgotten"], signal.SIGKILL)
    process.kill()
    end(process)


def test_a_forked_child_does_not_keep_the_supervisor_alive() -> None:
    process, has = client("fork")
    end(process)
    wait_until(lambda: not Path(has["directory"]).exists(), 60, "the supervisor cleans up despite a forked child")
    assert running(has["forked"]), "the forked child must outlive its parent in this test"
    for name in ("forked", "forgotten"):
        os.kill(has[name], signal.SIGKILL)


def test_a_long_run_directory_path_works(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    process, has = client("end", TMPDIR=str(long))
    end(process)
    assert has["directory"].startswith(str(long))
    wait_until(lambda: not any(long.iterdir()), 60, "the run directory has gone")
    os.kill(has["forgotten"], signal.SIGKILL)


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    while len(folder) < 4080:  # with the name of a run directory it is longer than PATH_MAX
        folder += "/" + "x" * min(200, 4080 - len(folder))
    os.makedirs(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with pytest.raises(SupervisorError) as caught, separate_supervisor(monkeypatch):
        pass
    assert f": {folder}/pytest-nixl-" in caught.value.reason
    assert caught.value.reason.endswith(": File name too long")
    assert "\n" not in caught.value.reason


def test_a_directory_with_a_line_break_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "line\nbreak").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "line\nbreak"))
    with pytest.raises(SupervisorError, match=r"/line\\nbreak', has a line break in its name") as caught:
        supervisor_module._start()
    assert caught.value.remedy == "set TMPDIR to a directory without one"
    assert list((tmp_path / "line\nbreak").iterdir()) == []


def test_a_reused_pid_is_not_killed() -> None:
    """A pid cannot be reused on purpose, so the supervisor's record of the first process is faked."""
    bystander = subprocess.Popen(["sleep", "300"])
    started = supervisor_main.start_time(bystander.pid)
    assert started is not None
    record = supervisor_main.Supervisor.__new__(supervisor_main.Supervisor)
    record.watched = {bystander.pid: str(int(started) - 1)}
    record.kill_watched()
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.3)
    record.watched[bystander.pid] = started
    record.kill_watched()
    assert bystander.wait(60) == -signal.SIGKILL
    assert supervisor_main.start_time(bystander.pid) is None


def test_a_process_that_has_ended_is_not_watched(own_client: SupervisorClient) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not own_client.watch_process(ended.pid)
    assert own_client.watch_process(os.getppid())
    own_client.unwatch_process(os.getppid())
