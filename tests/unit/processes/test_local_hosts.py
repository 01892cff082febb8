# SPDX-License-Identifier: Apache-2.0
"""How the process of a worker is started on this host. It is a double: ``test_worker_parent.py`` has real ones."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.etcd import wait_until

from pytest_nixl.model.tools import RUN_DIRECTORY
from pytest_nixl.processes import hosts
from pytest_nixl.processes.hosts import LocalHost, LocalProcess
from pytest_nixl.processes.supervisor import SupervisorError
from pytest_nixl.processes.worker_parent import BLAS_THREADS, SCRIPT

SEGMENTS = "UCX_POSIX_DIR"


class Started:
    """A process that was started, and what is done with it."""

    def __init__(self, log: list[Any], argv: list[str], options: dict[str, Any]) -> None:
        self.log, self.argv, self.options = log, argv, options
        self.pid, self.code = 77, cast("int | None", None)
        self.far_end = [os.dup(descriptor) for descriptor in options.get("pass_fds", ())]

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        self.log.append(("wait", timeout))
        if self.code is None:
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        return self.code

    def kill(self) -> None:
        self.log.append("kill")
        self.code = -9

    def send_signal(self, number: int) -> None:
        self.log.append(("signal", number))


class Scene:
    """A supervisor, and the start of processes. :ivar error: what the start of a process raises."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.shared_memory = directory, "/dev/shm/run"
        self.log: list[Any] = []
        self.error = cast("OSError | None", None)
        self.processes: list[Started] = []
        self.opened: list[LocalProcess] = []

    def watch_process(self, pid: int) -> None:
        self.log.append(("watch", pid))

    def unwatch_process(self, pid: int) -> None:
        self.log.append(("unwatch", pid))

    def execute(self, argv: list[str], **options: Any) -> Started:
        if self.error is not None:
            raise self.error
        self.processes.append(Started(self.log, argv, options))
        return self.processes[-1]

    def fork(self, supervisor: object, channel: Any, log: Any, environment: dict[str, str]) -> Started:
        assert supervisor is self
        return self.execute(["forked"], env=environment, pass_fds=[channel.fileno()], stdout=log)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    opened_scene = Scene(tmp_path)
    popen = {**vars(subprocess), "Popen": opened_scene.execute}
    monkeypatch.setattr(hosts, "subprocess", SimpleNamespace(**popen))
    monkeypatch.setattr(hosts, "fork_worker", opened_scene.fork)
    monkeypatch.setattr(hosts, "let_end_first", lambda pid: opened_scene.log.append(("ends first", pid)))
    for name in (SEGMENTS, BLAS_THREADS):
        monkeypatch.delenv(name, raising=False)
    yield opened_scene
    for process in opened_scene.opened:
        process.channel.close()
    for descriptor in (descriptor for process in opened_scene.processes for descriptor in process.far_end):
        os.close(descriptor)


def start(scene: Scene, role: str, *, prefix: tuple[str, ...] = (), **environment: str | None) -> LocalProcess:
    scene.opened.append(LocalProcess(cast(Any, scene), 2, role, environment, prefix))
    return scene.opened[-1]


@pytest.mark.parametrize(
    ("prefix", "shared", "own_variables", "expected"),
    [
        ((), "/dev/shm/run", {}, {SEGMENTS: "/dev/shm/run", BLAS_THREADS: "1"}),
        ((), "", {}, {BLAS_THREADS: "1"}),
        ((), "/dev/shm/run", {SEGMENTS: "/mine", BLAS_THREADS: "4"}, {SEGMENTS: "/mine", BLAS_THREADS: "4"}),
        (("nsenter", "--net=x"), "/dev/shm/run", {}, {BLAS_THREADS: "1"}),
    ],
)
def test_a_worker_is_executed_with_the_variables_of_its_rank_and_of_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, prefix: tuple[str, ...], shared: str, own_variables: dict[str, str],
    expected: dict[str, str],
) -> None:  # fmt: skip
    for name, value in {"GONE": "1", "STAYS": "2", **own_variables}.items():
        monkeypatch.setenv(name, value)
    scene.shared_memory = shared
    host = LocalHost(cast(Any, scene), 2, prefix, {"OWN": "3"})
    worker = host.start("initiator", {"GONE": None, "A": "4", "OWN": "of the test"}, 7.0, 9.0)
    assert (worker.rank, worker.role, worker.pid) == (2, "initiator", 77)
    assert (worker.timeout, worker.start_timeout) == (7.0, 9.0)
    [process] = scene.processes
    descriptor = process.options["pass_fds"][0]
    assert process.argv == [*prefix, sys.executable, str(SCRIPT), str(descriptor), str(os.getpid())]
    names = {"GONE", "STAYS", "A", "OWN", RUN_DIRECTORY, SEGMENTS, BLAS_THREADS}
    variables = {name: value for name, value in process.options["env"].items() if name in names}
    assert variables == {"STAYS": "2", "A": "4", "OWN": "3", RUN_DIRECTORY: str(scene.directory), **expected}
    assert process.options["env"]["PATH"] == os.environ["PATH"]
    assert (process.options["stdin"], process.options["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert process.options["start_new_session"] is True
    assert scene.log == [("ends first", 77), ("watch", 77)], "it is not forked"
    worker.kill()


@pytest.mark.parametrize(
    ("role", "parent", "prefix", "forks"),
    [
        ("agent", 0, (), True),
        ("initiator", 5, (), False),
        ("target", 5, (), False),
        ("flows", 5, (), False),
        ("facts", 0, (), False),
        ("facts", 5, (), True),
        ("agent", 5, ("nsenter",), False),
    ],
)
def test_only_a_worker_whose_figures_do_not_count_is_forked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, role: str, parent: int, prefix: tuple[str, ...], forks: bool
) -> None:
    monkeypatch.setattr(hosts, "parent_of_workers", lambda: parent)
    start(scene, role, prefix=prefix)
    assert (scene.processes[0].argv == ["forked"]) is forks


def test_workers_have_logs_of_their_own_whose_lines_are_read_whole(scene: Scene) -> None:
    processes = [start(scene, role) for role in ("initiator", "target", "initiator")]
    names = ["rank2-initiator-0.log", "rank2-target-0.log", "rank2-initiator-1.log"]
    assert [process.log for process in processes] == [scene.directory / name for name in names]
    processes[2].log.write_bytes(b"one\n\xfftwo\n")
    assert [process.output() for process in processes] == ["", "", "one\n\ufffdtwo\n"]
    assert [started.options["stdout"].name for started in scene.processes] == [
        str(process.log) for process in processes
    ]


def test_a_process_is_killed_once_and_no_longer_watched(scene: Scene) -> None:
    process = start(scene, "initiator")
    assert (process.here, process.pid, process.alive, process.wait(0.5)) == (True, 77, True, None)
    process.signal(signal.SIGUSR1)
    process.kill()
    assert (process.alive, process.wait(), process.channel.fileno()) == (False, -9, -1)
    process.kill()
    kill = [("wait", None), ("unwatch", 77)]
    assert scene.log == [
        ("ends first", 77), ("watch", 77), ("wait", 0.5), ("signal", signal.SIGUSR1), "kill", *kill, ("wait", None),
        *kill,
    ]  # fmt: skip


def test_the_state_of_a_process_is_that_of_the_kernel(scene: Scene) -> None:
    process = start(scene, "initiator")
    child = subprocess.Popen(["sleep", "300"])
    scene.processes[0].pid = child.pid
    for number, state in ((0, "sleeping"), (signal.SIGSTOP, "stopped by a signal"), (signal.SIGKILL, "dead")):
        os.kill(child.pid, number)
        wait_until(lambda state=state: process.state() == state, 60, state)  # type: ignore[misc]
    child.wait()
    assert process.state() == "gone"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EPERM])
def test_a_host_that_gives_too_little_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(hosts, "file_fault", lambda error: (f"fault {error.errno}", "end others"))
    error = scene.error = OSError(number, os.strerror(number))
    with pytest.raises(OSError if number == errno.EPERM else SupervisorError) as caught:
        start(scene, "initiator")
    if isinstance(caught.value, SupervisorError):
        assert caught.value.reason == f"a worker cannot be started: fault {number}"
        assert caught.value.remedy == "end others"
    else:
        assert caught.value is error
    assert scene.log == []


def test_a_log_that_cannot_be_made_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "file_fault", lambda error: (f"{Path(error.filename).name}: fault", "make room"))
    scene.directory /= "absent"
    with pytest.raises(SupervisorError) as caught:
        start(scene, "initiator")
    assert caught.value.reason == "the log of a worker cannot be made: rank2-initiator-0.log: fault"
    assert (caught.value.remedy, scene.processes) == ("make room", [])
