# SPDX-License-Identifier: Apache-2.0
"""The supervisor in this process, with its real client in a thread. ``test_supervisor.py`` has it as a process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.etcd import running, wait_until

from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.processes import leftovers, supervisor_main
from pytest_nixl.processes.leftovers import watched
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError
from pytest_nixl.processes.supervisor_main import Supervisor, describe_status, start_time

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

Steps = Callable[[SupervisorClient], object]
Supervise = Callable[[Steps], Path]


@pytest.fixture
def shm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which killed runs of others are."""
    folder = tmp_path_factory.mktemp("shm")
    for module in (leftovers, supervisor_main):
        monkeypatch.setattr(module, "SHARED_MEMORY", str(folder))
    return folder


@pytest.fixture
def process_state(shm: Path) -> Iterator[None]:
    """Restore the signals, stdout and stderr of this process, which a supervisor changes."""
    numbers = (signal.SIGCHLD, signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    copies = {number: os.dup(number) for number in (1, 2)}
    yield
    signal.set_wakeup_fd(-1)
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


@pytest.fixture
def supervise(tmp_path: Path, process_state: None) -> Supervise:
    """Return a function that runs a supervisor while its client does some steps; it returns the run directory."""

    def run(steps: Steps) -> Path:
        ours, theirs = socket.socketpair()
        ready, tell = os.pipe()
        started = Supervisor(str(tmp_path), tell, theirs)
        with os.fdopen(ready, "rb") as pipe:
            directory = Path(os.fsdecode(pipe.read().removeprefix(b"ready ").removesuffix(b"\n")))
        errors: list[BaseException] = []

        def use() -> None:
            ours.settimeout(60.0)
            client = SupervisorClient(directory, ours)
            try:
                steps(client)
            except BaseException as error:
                errors.append(error)
            finally:
                client.close()

        thread = threading.Thread(target=use)
        thread.start()
        try:
            started.run()
        finally:
            thread.join()
            started.selector.close()
        for error in errors:
            raise error
        return directory

    return run


def read(path: Path) -> str:
    """Return the first line of a log when it is complete."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), 60, "the first line of the log")
    return path.read_text()


def test_a_run_has_two_private_directories_that_its_supervisor_owns_and_removes(
    supervise: Supervise, shm: Path
) -> None:
    def steps(client: SupervisorClient) -> None:
        assert client.shared_memory == str(shm / client.directory.name)
        for directory in (client.directory, Path(client.shared_memory)):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert (directory / "owner").read_text() == client.directory.name
        os.write(1, b"out\n")
        os.write(2, b"error\n")
        assert (client.directory / "supervisor.log").read_text() == "out\nerror\n"

    assert not supervise(steps).exists()
    assert list(shm.iterdir()) == []


def test_stop_kills_a_stopped_group_that_ignores_sigterm(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_main, "TERMINATE_SECONDS", 0.2)
    script = "trap '' TERM; sleep 300 & echo $!; wait; wait"

    def steps(client: SupervisorClient) -> None:
        pids = [client.spawn(["sh", "-c", script], log=f"{number}.log") for number in range(2)]
        children = [int(read(client.directory / f"{number}.log")) for number in range(2)]
        assert stat.S_IMODE((client.directory / "0.log").stat().st_mode) == 0o600
        os.kill(pids[0], signal.SIGSTOP)
        assert client.stop(pids[0]) == "ended by SIGKILL"
        wait_until(lambda: not running(children[0]), 60, "the end of its child")
        assert client.alive(pids[1])
        assert running(children[1])
        assert (client.stop(1), client.signal(1, signal.SIGCONT)) == (None, False), "others are not its own"

    supervise(steps)


def test_every_spawned_process_is_asked_to_end_with_the_run(
    supervise: Supervise, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("asked")
    script = "trap 'echo end > $0; exit' TERM; echo ready; while true; do sleep 0.05; done"

    def steps(client: SupervisorClient) -> None:
        for number in range(3):
            client.spawn(["sh", "-c", script, str(folder / f"{number}")], log=f"{number}.log")
            assert read(client.directory / f"{number}.log") == "ready\n"

    supervise(steps)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]


def test_the_rest_of_a_group_is_killed_when_its_leader_has_ended(supervise: Supervise) -> None:
    def steps(client: SupervisorClient) -> None:
        leader = client.spawn(["sh", "-c", "sleep 300 & echo $!"], log="it.log")
        child = int(read(client.directory / "it.log"))
        wait_until(lambda: not client.alive(leader), 60, "the end of the leader")
        wait_until(lambda: not running(child), 60, "the end of its child")

    supervise(steps)


def test_watched_processes_are_killed_with_their_groups_at_the_end(supervise: Supervise) -> None:
    processes = [
        subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=leads)
        for leads in (True, True, False)
    ]
    children = [int(process.stdout.readline()) for process in processes if process.stdout]

    def steps(client: SupervisorClient) -> None:
        assert [client.watch_process(process.pid) for process in processes] == [True] * 3
        client.unwatch_process(processes[1].pid)
        assert not client.watch_process((1 << 22) + 1), "there is no such process"

    try:
        supervise(steps)
        wait_until(lambda: not any(map(running, (processes[0].pid, processes[2].pid, children[0]))), 60, "their end")
        assert running(processes[1].pid)
        assert running(children[2]), "a process that leads no group ends alone"
    finally:
        for pid in (processes[1].pid, *children):
            os.kill(pid, signal.SIGKILL) if running(pid) else None
        for process in processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_containers_and_prefixes_are_removed_by_a_process_for_each_place(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("removed")
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://there:1")
    first, other = (parse_endpoints(f"http://{host}:2379") for host in "ab")

    def remove(items: list[dict[str, Any]]) -> list[str]:
        (folder / f"{os.getpid()}").write_text(json.dumps([os.getpgid(0) == os.getpid(), items]))
        return []

    monkeypatch.setattr(supervisor_main, "clean_remote", remove)

    def steps(client: SupervisorClient) -> None:
        client.watch_container("c", expected=True)
        client.watch_container("forgotten")
        client.watch_prefix("/x/", first, user="u", password="p", cacert="ca.pem", cert="cert", key="key")
        client.watch_prefix("/x/", other)
        client.watch_prefix("/forgotten/", first)
        client.unwatch_container("forgotten")
        client.unwatch_prefix("/forgotten/", first)
        keys = ["container c", "prefix /x/ http://a:2379", "prefix /x/ http://b:2379"]
        assert list(watched(str(client.directory))) == keys

    supervise(steps)
    removed = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert all(leads for leads, _ in removed)
    items = sorted(([item["kind"], item["name"], item.get("endpoints")] for _, [item] in removed), key=str)
    assert items == [
        ["container", "c", None],
        ["prefix", "/x/", [["http", "a", 2379, "", ""]]],
        ["prefix", "/x/", [["http", "b", 2379, "", ""]]],
    ]
    [container] = [item for _, [item] in removed if item["kind"] == "container"]
    names = {"DOCKER_HOST": "tcp://there:1", **{name: os.environ[name] for name in ("HOME", "PATH")}}
    assert (container["expected"], container["environment"]) == (True, names)
    [credentials] = [
        item["credentials"] for _, [item] in removed if item.get("endpoints") == [["http", "a", 2379, "", ""]]
    ]
    files = {"cacert": "ca.pem", "cert": "cert", "key": "key"}
    paths = {name: os.path.abspath(file) for name, file in files.items()}
    assert credentials == {"user": "u", "password": "p", **paths}


def test_what_hangs_while_it_removes_a_container_is_killed(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    file = shm.parent / "pid"

    def hang(items: list[dict[str, Any]]) -> None:
        file.write_text(f"{os.getpid()}\n")
        threading.Event().wait()

    monkeypatch.setattr(supervisor_main, "CLEAN_SECONDS", 1.0)
    monkeypatch.setattr(supervisor_main, "clean_remote", hang)
    directory = supervise(lambda client: client.watch_container("c"))
    assert not directory.exists()
    pid = int(read(file))
    wait_until(lambda: not running(pid), 60, "the end of what hangs")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_a_supervisor_but_sighup_does_not_and_its_client_says_so(
    supervise: Supervise, number: signal.Signals
) -> None:
    def steps(client: SupervisorClient) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        if number == signal.SIGHUP:
            assert not client.alive(1)
            return
        with pytest.raises(SupervisorError) as caught:
            for _ in range(1000):  # it may read one more request first
                client.alive(1)
        reason = f"the supervisor of this run (pid {os.getpid()}) has ended: "
        assert caught.value.reason.startswith(reason)
        assert "find out what killed it (for example `dmesg | grep -i oom`)" in caught.value.remedy
        with pytest.raises(SupervisorError, match="this connection to the supervisor is closed"):
            client.alive(1)

    assert not supervise(steps).exists()


@pytest.mark.usefixtures("process_state")
def test_a_supervisor_that_cannot_own_its_directories_removes_them(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    ours, theirs = socket.socketpair()
    ready, tell = os.pipe()
    with ours, theirs, pytest.raises(OSError, match="no locks"):
        Supervisor(str(tmp_path), tell, theirs)
    os.close(ready)
    os.close(tell)
    assert [*tmp_path.iterdir(), *shm.iterdir()] == []


def test_a_signal_without_a_name_has_its_number() -> None:
    assert describe_status(40) == "ended by signal 40"


def test_a_process_is_identified_by_the_time_of_its_start(tmp_path: Path) -> None:
    program = tmp_path / "a) 1 (b"  # its name is in the line that has the time
    program.symlink_to(shutil.which("sleep") or "/bin/sleep")
    process = subprocess.Popen([program, "300"])
    wait_until(lambda: "a) 1 (b" in Path(f"/proc/{process.pid}/stat").read_text(), 60, "its execution")
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert start_time(process.pid) == fields[19] != start_time(os.getpid())
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(process.pid) is None, "a zombie has ended"
    process.wait()
    assert start_time(process.pid) is None
