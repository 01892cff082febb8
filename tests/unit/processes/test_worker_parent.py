# SPDX-License-Identifier: Apache-2.0
"""Workers are forked from one process, and are as executed ones are; where they would differ, they are executed."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers.cli_run import environment, eventually
from helpers.process_parent import parent_of
from helpers.pytester_run import run_pytest

from pytest_nixl.model.tools import RUN_DIRECTORY
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes import worker_parent
from pytest_nixl.processes.hosts import LocalProcess
from pytest_nixl.processes.supervisor import close_supervisor, supervisor
from pytest_nixl.processes.worker_parent import (
    BLAS_THREADS,
    FORK,
    close_parent,
    fork_worker,
    parent_of_workers,
)
from pytest_nixl.processes.worker_process import Worker

Start = Callable[..., Worker]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a worker; all end with the test."""
    started: list[Worker] = []

    def start() -> Worker:
        process = LocalProcess(supervisor(), 0, "worker", {})
        started.append(Worker(process, rank=0, role="tool", timeout=120))
        return started[-1]

    yield start
    for agent in started:
        if not agent._ended:
            agent.kill()


@pytest.fixture
def own_supervisor() -> Iterator[None]:
    """A supervisor, and so a parent of workers, of this test alone."""
    close_parent()
    close_supervisor()
    yield
    close_parent()
    close_supervisor()


def forked(worker: Worker) -> bool:
    assert worker.versions["pid"] == worker.pid
    return parent_of(worker.pid) == parent_of_workers()


def test_a_forked_worker_has_what_an_executed_one_has(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_NIXL_TEST", "first")
    first = agents.start("first")
    monkeypatch.delenv("PYTEST_NIXL_TEST")
    monkeypatch.chdir(tmp_path)
    second = agents.start("second", environment={"PYTEST_NIXL_OTHER": "second", "HOME": None})
    pids = [agent.worker.pid for agent in (first, second)]
    assert all(forked(agent.worker) for agent in (first, second))
    assert [os.getsid(pid) for pid in pids] == pids
    assert [os.readlink(f"/proc/{pid}/cwd") == str(tmp_path) for pid in pids] == [False, True]
    assert [os.readlink(f"/proc/{pid}/fd/0") for pid in pids] == ["/dev/null"] * 2
    logs = [[os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)] for pid in pids]
    assert logs[0][0] == logs[0][1] != logs[1][0] == logs[1][1]
    run_directory = {RUN_DIRECTORY: str(supervisor().directory)}
    names = ["PYTEST_NIXL_TEST", "PYTEST_NIXL_OTHER", "HOME", *run_directory]
    executed, other = (agent.run("helpers.agent_functions:surroundings", names=names) for agent in (first, second))
    of_first = {"PYTEST_NIXL_TEST": "first", "HOME": os.environ["HOME"], **run_directory}
    assert executed["python"] == executed["libc"] == of_first
    assert other["python"] == other["libc"] == {"PYTEST_NIXL_OTHER": "second", **run_directory}
    assert executed["address"] != other["address"]


def test_the_kernel_ends_workers_before_the_process_that_reports_it(agents: Agents) -> None:
    forked_worker = agents.start("forked").worker
    assert forked(forked_worker)
    executed = LocalProcess(supervisor(), 0, "initiator", {})
    try:
        pids = ("self", forked_worker.pid, executed.pid)
        scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids]
        assert scores[0] < scores[1] == scores[2] == 1000
    finally:
        executed.kill()


@pytest.mark.usefixtures("own_supervisor")
def test_a_parent_that_was_started_early_forks_the_first_worker(start: Start) -> None:
    early = worker_parent.prepare(supervisor(), os.environ)
    assert early is not None
    assert parent_of(start().pid) == early.pid


#: A double of the kernel's refusal, because root's processes are not limited in number.
REFUSED_FORK = """
import errno, os
real = os.fork
def fork():
    if os.path.exists({flag!r}):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return real()
os.fork = fork
"""


@pytest.mark.usefixtures("own_supervisor")
def test_a_run_ends_the_parent_that_it_started_early(pytester: pytest.Pytester) -> None:
    """The run is of this process, as those of other plugins' tests are: nothing of it is left when it has ended."""
    pytester.makepyfile("def test_it(nixl_agent): pass")
    assert run_pytest(pytester, "-k", "no_such_test", in_process=True).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert parent_of_workers() == 0
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    assert not [pid for child in children for pid in child if str(worker_parent.SCRIPT) in command_line(pid)]


def command_line(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.usefixtures("own_supervisor")
def test_a_parent_that_cannot_fork_now_ends_no_worker(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(REFUSED_FORK.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    worker = start()
    assert forked(worker)
    flag.touch()
    assert not forked(start())
    flag.unlink()
    assert worker.alive
    assert forked(start())


def test_an_interrupted_request_leaves_the_next_answers_right(start: Start) -> None:
    first = start()
    assert forked(first)
    parent = parent_of_workers()
    os.kill(parent, signal.SIGSTOP)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGALRM, previous)
        os.kill(parent, signal.SIGCONT)
    workers = [start() for _ in range(2)]
    assert all(forked(worker) for worker in workers)
    codes = {}
    for agent in (first, *workers):
        agent.signal(signal.SIGSEGV)
        codes[agent.pid] = agent._process.wait(60)
    assert set(codes.values()) == {-11}
    # The worker that nobody knows has ended.
    assert eventually(lambda: not living_children(parent))


@pytest.mark.usefixtures("own_supervisor")
def test_a_parent_that_does_not_answer_is_ended_and_the_worker_executed(start: Start) -> None:
    assert forked(start())
    parent = parent_of_workers()
    assert worker_parent._current is not None
    worker_parent._current._channel.settimeout(0.5)
    os.kill(parent, signal.SIGSTOP)
    worker = start()
    assert parent_of(worker.pid) == os.getpid()
    assert worker.versions["pid"] == worker.pid
    assert eventually(lambda: not Path(f"/proc/{parent}").exists())


def living_children(pid: int) -> list[int]:
    """Return the children of a process that are no zombies."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if "zombie" not in Path(f"/proc/{child}/status").read_text()]


def limit(kind: int, most: int, undo: ExitStack) -> None:
    """Change a limit of this process until the end of the test."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    undo.callback(resource.setrlimit, kind, (soft, hard))


def mask(undo: ExitStack) -> None:
    """Change the mode of new files of this process until the end of the test."""
    previous = os.umask(0o077)
    undo.callback(os.umask, previous)
    os.umask(0o027 if previous == 0o077 else 0o077)


def preload(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the loader load a library first, also in a parent of workers that is started then."""
    patch.setenv(name, "libm.so.6")
    close_parent()


def refused(pid: int) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda patch, _: patch.setattr(os, "pidfd_open", refused), ("environ", "")),
        (lambda patch, _: preload(patch, "LD_PRELOAD"), ("environ", "LD_PRELOAD=libm.so.6\0")),
        (lambda patch, _: preload(patch, "LD_AUDIT"), ("environ", "LD_AUDIT=libm.so.6\0")),
        (lambda patch, _: patch.setenv(FORK, "0"), ("environ", f"{FORK}=0\0")),
        (lambda patch, _: patch.setenv(BLAS_THREADS, "2"), ("environ", f"{BLAS_THREADS}=2\0")),
        (lambda _, undo: mask(undo), ("status", "Umask:\t00")),
        (lambda _, undo: limit(resource.RLIMIT_AS, 1 << 40, undo), ("limits", f"{1 << 40}")),
        (lambda _, undo: limit(resource.RLIMIT_STACK, 4 << 20, undo), ("limits", f"{4 << 20}")),
    ],
    ids=["no descriptors of processes", "LD_PRELOAD", "LD_AUDIT", "comparison", "threads", "umask", "address space",
         "stack"],
)  # fmt: skip
def test_what_a_forked_worker_would_not_have_needs_an_executed_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch, ExitStack], None],
    shown: tuple[str, str],
) -> None:  # fmt: skip
    assert forked(start())
    with ExitStack() as undo, monkeypatch.context() as patch:
        change(patch, undo)
        worker = start()
        assert worker.versions["pid"] == worker.pid
        assert parent_of(worker.pid) == os.getpid()
        file, text = shown
        assert text in Path(f"/proc/{worker.pid}/{file}").read_text()


def _ignores_ends_of_children(pid: int) -> bool:
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGCHLD - 1) & 1)


@pytest.mark.usefixtures("own_supervisor")
def test_ignored_ends_of_children_lose_no_exit_code(start: Start) -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        first, other = start(), start()
        assert forked(first)
        first.signal(signal.SIGKILL)
        assert first._process.wait(60) == -9
        assert other.alive
        # A forked worker ignores them again in its first instructions, which a busy machine may not have run yet.
        assert eventually(lambda: _ignores_ends_of_children(other.pid))
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_a_new_folder_of_modules_is_found(agents: Agents, tmp_path: Path) -> None:
    late = tmp_path / "late"
    agents.start("before")
    late.mkdir()
    (late / "a_late_module.py").write_text("def answer(agent): return 7")
    agent = agents.start("after", environment={"PYTEST_NIXL_TEST": "1"})
    assert forked(agent.worker)
    agent.run("helpers.agent_functions:search", folder=str(late))
    assert agent.run("a_late_module:answer") == 7


def test_each_variable_that_is_read_first_forbids_a_fork(start: Start, tmp_path: Path) -> None:
    assert forked(start())
    environment = {BLAS_THREADS: "1", **os.environ}
    names = ("LD_BIND_NOW", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "PYTHONHASHSEED", "OPENBLAS_CORETYPE", "LC_ALL",
             "GOTO_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NPY_PROMOTION_STATE",
             "NUMPY_MADVISE_HUGEPAGE", "LANG", "LANGUAGE", "LOCPATH", "TZ")  # fmt: skip
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "log").open("wb") as log:
        for name in names:
            assert fork_worker(supervisor(), theirs, log, {**environment, name: "another"}) is None, name
        worker = fork_worker(supervisor(), theirs, log, {**environment, "MY_LD_BIND_NOW": "another"})
        assert worker is not None
        worker.kill()
        worker.wait()


def test_the_end_of_a_forked_worker_is_known(start: Start) -> None:
    worker = start()
    assert forked(worker)
    process = worker._process
    assert process.wait(0) is None
    worker.signal(signal.SIGSEGV)
    assert process.wait(60) == -11
    assert not worker.alive
    worker.signal(signal.SIGKILL)  # nobody else gets it
    assert process.wait() == -11


@pytest.mark.usefixtures("own_supervisor")
def test_workers_end_with_their_parent_and_the_next_are_executed(start: Start) -> None:
    worker = start()
    assert forked(worker)
    os.kill(parent_of_workers(), signal.SIGKILL)
    assert worker._process.wait(60) == -9
    assert not forked(start())


def test_a_parent_with_threads_does_not_fork(
    own_supervisor: None, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    worker = start()
    threads = len(os.listdir(f"/proc/{parent_of_workers()}/task"))
    assert forked(worker) == (threads == 1)
    assert os.cpu_count() == 1 or threads > 1


@pytest.mark.usefixtures("own_supervisor")
def test_the_parent_ends_with_the_supervisor(start: Start) -> None:
    worker = start()
    assert forked(worker)
    first = parent_of_workers()
    worker.close()
    close_supervisor()
    assert eventually(
        lambda: not Path(f"/proc/{first}").exists() or "zombie" in Path(f"/proc/{first}/status").read_text()
    )
    assert forked(start())
    assert parent_of_workers() != first


#: Starts a worker in a thread that ends, prints the process ids, and waits.
SCRIPT = """
import threading, sys
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalProcess
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_parent import parent_of_workers
from pytest_nixl.processes.worker_process import Worker
found = []
def start():
    found.append(Worker(LocalProcess(supervisor(), 0, "worker", {}), rank=0, role="tool", timeout=60))
thread = threading.Thread(target=start)
thread.start()
thread.join()
assert found[0].versions["pid"] == found[0].pid
print(found[0].pid, parent_of_workers(), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_process_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        pids = [int(number) for number in killed.stdout.readline().split()]
        assert len(pids) == 2
        killed.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_forked_copy_of_pytest_does_not_keep_the_parent(start: Start) -> None:
    assert forked(start())
    theirs, ours = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        theirs.sendall(b"%d" % parent_of_workers())
        os._exit(0)
    os.waitpid(pid, 0)
    assert ours.recv(10) == b"0"
    for copy in (theirs, ours):
        with suppress(OSError):
            copy.close()
    assert forked(start())
