# SPDX-License-Identifier: Apache-2.0
"""A run leaves nothing behind, however it ends: no processes, keys, directories or shared memory."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, command, environment, eventually, repeats, run
from helpers.marked import MARK, marked

from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.long

#: The suites that a gate requires, without the slowest ones.
REQUIRED = (
    "suites/bandwidth", "suites/faults", "suites/infrastructure", "suites/metadata/test_exchange.py",
    "suites/rank_race/test_this_run.py", "suites/uri_validation", "suites/kv_cache", "suites/control_path",
)  # fmt: skip

#: A path in /dev/shm: its first part is the name of a segment.
_SEGMENT = re.compile("/dev/shm/([^/ \n]+)")
#: A path in a run directory, of which each supervisor has one open: the run has a directory of that name in /dev/shm.
_RUN = re.compile("/(pytest-nixl-[^/\n]+)/")

#: A test that reports when a link transfers bytes, an agent has published and a private etcd runs.
BUSY = """
import threading
import pytest

def test_busy(nixl_link, nixl_etcd, nixl_private_etcd, nixl_agent):
    nixl_etcd.client.put(nixl_etcd.prefix + "ours", b"1")
    agent = nixl_agent.another("published", listen_thread=True, environment={
        "NIXL_ETCD_ENDPOINTS": nixl_etcd.endpoint, "NIXL_ETCD_NAMESPACE": nixl_etcd.prefix.rstrip("/")})
    agent.send_local_metadata()
    while nixl_etcd.client.count_prefix(nixl_etcd.prefix) < 2:
        pass
    threading.Timer(0.3, lambda: print("\\nBUSY", flush=True)).start()
    nixl_link.measure(65536)
"""


@dataclass(frozen=True)
class Scene:
    """The surroundings of a run, in which everything that it leaves can be found."""

    directory: Path
    mark: str
    etcd: EmbeddedServer
    segments: frozenset[str]

    def start(self) -> subprocess.Popen[str]:
        """Start the busy test and wait until it prints BUSY."""
        (self.directory / "test_busy.py").write_text(BUSY)
        process = subprocess.Popen(
            [
                *command("-s", "--nixl-op=WRITE", "--nixl-duration=600s", f"--nixl-etcd={self.etcd.endpoint}"),
                "test_busy.py",
            ],
            cwd=self.directory,
            env=environment(TMPDIR=str(self.directory), **{MARK: self.mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if "BUSY" in line:
                return process
        raise AssertionError("".join(output))

    def left(self) -> list[str]:
        """Return what is left, one sentence each."""
        results = [f"process {pid}: {line}" for pid, line in marked(self.mark)]
        results += [f"directory {path}" for path in self.directory.glob("pytest-nixl*")]
        return [*results, *self.keys(), *_left_segments(self.segments)]

    def keys(self) -> list[str]:
        """Return the keys of runs in etcd, one sentence each."""
        with self.etcd.client() as client:
            return [f"key {key}" for key in client.get_prefix("/pytest-nixl/")]


def _segments() -> frozenset[str]:
    """Return the names of all POSIX and System V shared memory segments."""
    posix = {entry.name for entry in Path("/dev/shm").iterdir()}
    system_v = {f"sysv {line.split()[1]}" for line in _system_v()}
    return frozenset(posix | system_v)


def _system_v() -> list[str]:
    """Return a line for each System V segment, with its id second and the number of processes that have it seventh."""
    return Path("/proc/sysvipc/shm").read_text().splitlines()[1:]


def _left_segments(before: frozenset[str]) -> list[str]:
    """Return the segments that are new and that no living process or run has, one sentence each."""
    new = _segments() - before
    if not new:
        return []
    held = {f"sysv {line.split()[1]}" for line in _system_v() if int(line.split()[6])}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            paths = [os.readlink(link) for link in [path / "cwd", *(path / "fd").iterdir()]]
            held.update(_SEGMENT.findall("\n".join([(path / "maps").read_text(), *paths])))
            held.update(_RUN.findall("\n".join(paths)))
        except OSError:
            continue  # it ended in the meantime
    return [f"shared memory {name}" for name in sorted(new - held)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A directory, a mark, and an etcd that does not belong to the run."""
    etcd = EmbeddedServer.start(supervisor())
    with etcd.client() as client:
        client.put("/somebody/else", b"1")
        yield Scene(tmp_path, secrets.token_hex(8), etcd, _segments())
        assert client.get("/somebody/else") == b"1"
    etcd.discard()


@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 2, "KeyboardInterrupt"),
        # test_interrupted has how it ends; the test below, that nothing is left then.
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM", marks=pytest.mark.whole),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
    ids=["ctrl-c", "sigterm", "kill-9"],
)
def test_an_ended_run_leaves_nothing(scene: Scene, number: signal.Signals, code: int, text: str, repeat: int) -> None:
    process = scene.start()
    assert len(list(marked(scene.mark))) >= 6, "pytest, its supervisor, at least three workers and an etcd"
    assert scene.keys(), "keys of the run are in etcd"
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    assert text in output
    assert eventually(lambda: not scene.left()), scene.left()


@pytest.mark.alone  # beside other tests a row's windows may differ too much for PASS
@pytest.mark.parametrize(
    "suites", [pytest.param(("suites",), id="all", marks=pytest.mark.whole), pytest.param(REQUIRED, id="required")]
)
def test_a_passing_gate_leaves_nothing(scene: Scene, suites: tuple[str, ...]) -> None:
    done = run(
        *suites, f"--rootdir={ROOT}", "--nixl-gate", "--nixl-blocks=64KiB", f"--nixl-etcd={scene.etcd.endpoint}",
        # Otherwise a libibverbs of the host would be a second copy, which is a warning.
        env={"TMPDIR": str(scene.directory), MARK: scene.mark, "UCX_MODULES": "^ib"},
    )  # fmt: skip
    # Known defects of NIXL that do not occur on this machine are not warnings.
    assert re.search(
        r"^NIXL gate: PASS \(\d+ PASS(, \d+ NOT-APPLICABLE)?; 6 rows measured(; suites not selected: [\w, ]+)?\)$",
        done.output,
        re.M,
    ), done.output
    assert re.search(
        r"^\d+ known limits of NIXL \S+, seen only under conditions that the checks made: ", done.output, re.M
    )
    assert done.code == 0, done.output
    assert eventually(lambda: not scene.left()), scene.left()


#: A test that starts workers until it is ended.
STARTING = """
def test_starting(nixl_agent):
    while True:
        for agent in nixl_agent._siblings.start_each([None, None]):
            agent.worker.kill()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "kill-9"])
@pytest.mark.parametrize("repeat", repeats())
def test_a_run_ended_while_workers_start_leaves_nothing(tmp_path: Path, number: signal.Signals, repeat: int) -> None:
    # After the run directory exists, the supervisor and the workers start.
    chance = random.Random(f"{number} {repeat}")
    moments = [chance.uniform(*between) for between in ((0, 0.03), (0.03, 0.5), (0.5, 2))]
    mark, segments = secrets.token_hex(8), _segments()
    (tmp_path / "test_starting.py").write_text(STARTING)
    waiting = []
    for moment in moments:
        folder = tmp_path / f"{moment:.4f}"
        folder.mkdir()
        waiting.append((moment, folder, subprocess.Popen(
            [*command("-s", "--nixl-etcd-server=embedded"), "test_starting.py"],
            cwd=tmp_path, env=environment(TMPDIR=str(folder), **{MARK: mark}), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )))  # fmt: skip
    processes = [process for _, _, process in waiting]
    visited: dict[Path, float] = {}
    while waiting:
        for each in tuple(waiting):
            moment, folder, process = each
            assert process.poll() is None, "the run ended by itself"
            if folder not in visited and any(folder.glob("pytest-nixl*")):
                visited[folder] = time.monotonic()
            if folder in visited and time.monotonic() >= visited[folder] + moment:
                process.send_signal(number)
                waiting.remove(each)
        time.sleep(0.001)
    for process in processes:
        assert process.wait(300) != 0

    def left() -> list[str]:
        results = [f"process {pid}: {line}" for pid, line in marked(mark)]
        results += [f"directory {path}" for path in tmp_path.glob("*/pytest-nixl*")]
        return results + _left_segments(segments)

    assert eventually(lambda: not left(), 60), left()


def test_shared_memory_of_ucx_is_removed_with_the_run(tmp_path: Path) -> None:
    """A worker killed between creating and unlinking a segment leaves a file. The test creates such a file."""
    (tmp_path / "agent_places.py").write_text(
        "import os\n"
        "def look(agent):\n"
        "    folder = os.environ['UCX_POSIX_DIR']\n"
        "    open(os.path.join(folder, 'ucx_shm_posix_left'), 'x').close()\n"
        "    with open('/proc/self/maps') as maps:\n"
        "        return [folder, folder in maps.read()]\n"
    )
    (tmp_path / "test_left.py").write_text(
        "def test_left(nixl_agent):\n"
        "    folder, mapped = nixl_agent.run('agent_places:look')\n"
        "    assert mapped, 'UCX makes its segments elsewhere'\n"
        "    nixl_agent.worker.kill()\n"
        "    open('folder', 'w').write(folder)\n"
    )
    done = run("test_left.py", directory=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done.output
    folder = Path((tmp_path / "folder").read_text())
    assert folder.parent == Path("/dev/shm")
    assert eventually(lambda: not folder.exists())


def test_a_failed_test_leaves_nothing(scene: Scene) -> None:
    (scene.directory / "test_fails.py").write_text(
        "def test_fails(nixl_link, nixl_etcd, nixl_private_etcd, nixl_agent):\n"
        "    nixl_etcd.client.put(nixl_etcd.prefix + 'ours', b'1')\n"
        "    nixl_private_etcd.kill()\n"
        "    nixl_agent.run('os:abort')\n"
    )
    done = run(
        "test_fails.py", "--nixl-op=WRITE", f"--nixl-etcd={scene.etcd.endpoint}", directory=scene.directory,
        env={"TMPDIR": str(scene.directory), MARK: scene.mark},
    )  # fmt: skip
    assert done.code == 1
    assert eventually(lambda: not scene.left()), scene.left()


@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
def test_a_dying_etcd_fails_only_the_test_that_uses_it(tmp_path: Path, repeat: int) -> None:
    (tmp_path / "test_dying.py").write_text(
        "import os\n"
        "def test_before(nixl_etcd):\n"
        "    nixl_etcd.client.put(nixl_etcd.prefix + 'a', b'1')\n"
        "def test_dies(nixl_etcd):\n"
        "    nixl_etcd.server.kill()\n"
        "    nixl_etcd.client.put(nixl_etcd.prefix + 'a', b'1')\n"
        "def test_link(nixl_link):\n"
        "    assert nixl_link.move(4096) is None\n"
        "def test_after(nixl_etcd):\n"
        "    nixl_etcd.client.put(nixl_etcd.prefix + 'a', b'1')\n"
    )
    done = run(
        "test_dying.py", "--nixl-etcd-server=embedded", "--nixl-op=WRITE", "-rA", "--nixl-timeout=20s",
        directory=tmp_path,
    )  # fmt: skip
    assert "FAILED test_dying.py::test_dies" in done.output
    for name in ("test_before", "test_link[UCX-WRITE-DRAM:DRAM]", "test_after"):
        assert f"PASSED test_dying.py::{name}" in done.output
    assert "refused the connection" in done.output or "SIGKILL" in done.output, done.output
    assert "Traceback" not in done.output
