# SPDX-License-Identifier: Apache-2.0
"""The shipped CI recipes, run as written: they are green for a healthy subject, and red for a broken one.

``gitlab-ci-local`` reads and runs GitLab's files, and ``act`` those of GitHub Actions. Only variables change: those
that the recipes mark with "yours", and ``PYTEST_ADDOPTS``, which leaves one row of the level quick and the checks
that the profile requires. All others are made by CI's first command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import docker_standin
from helpers.cli_run import ROOT, Finished, environment, junit_suite, undisturbed
from helpers.needs import need_programs, program
from helpers.records import KEY, record

from pytest_nixl.store.provenance import host

pytestmark = pytest.mark.long

RECIPES = ROOT / "deploy" / "ci"
#: One row, and what the profile requires. The row is as on a machine where no other process uses its cores. Its figure
#: decides nothing: the baseline is far below or above it.
SHORT = (
    "--nixl-level=quick --nixl-blocks=64KiB --nixl-op=WRITE --nixl-duration=20ms -p helpers.no_contention "
    "-p helpers.short_launches -k 'test_bandwidth or loads or etcd_answers or finds_another or well_formed'"
)
#: GB/s of the row in the baseline: every run is faster than the first, and slower than the second.
SLOW, FAST = 1e-5, 1e5
REPORTS = {"junit.xml", "report.html", "rows.csv", "nixl.prom", "verdict.json"}
#: A stand-in for GitHub's action, which can be had from GitHub only: it copies what the action uploads.
UPLOAD = """
name: upload
description: a stand-in that copies files
inputs:
  name: {description: the name of the artifact, required: true}
  path: {description: a folder, required: true}
runs:
  using: composite
  steps:
    - shell: sh
      run: mkdir -p "$ARTIFACTS/${{ inputs.name }}" && cp -r "${{ inputs.path }}." "$ARTIFACTS/${{ inputs.name }}"
"""


@dataclass(frozen=True)
class Pipeline:
    """A repository with a shipped recipe, and what its runner needs.

    :param folder: the work tree.
    :param own: an empty folder beside it.
    """

    folder: Path
    own: Path

    def commit(self, files: dict[str, str], baseline: float) -> None:
        """Commit files and the baseline of the nightly job.

        :param baseline: GB/s of the row.
        """
        data = record("image:0", {KEY: [baseline] * 7})
        data["nixl"]["provenance"]["host"] = host({})
        for name, text in {**files, "ci/nixl-baseline.json": json.dumps(data)}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        for arguments in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message=recipe")):
            subprocess.run(["git", *arguments], cwd=self.folder, env=environment(HOME=str(self.own)), check=True)

    def run(self, *command: str, env: dict[str, str]) -> Finished:
        """Run a runner in the work tree, with the programs of this Python first on PATH."""
        done = subprocess.run(
            command, cwd=self.folder, env=environment(HOME=str(self.own), **env), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout)


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    need_programs("git")
    (tmp_path / "own").mkdir()
    (tmp_path / "project").mkdir()
    return Pipeline(tmp_path / "project", tmp_path / "own")


def subject() -> dict[str, str]:
    """Return the variables of an image: this Python, with what the tests need of the suites."""
    variables: dict[str, str] = undisturbed({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})["env"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"PATH": path, "PYTHONPATH": variables["PYTHONPATH"], "PYTEST_ADDOPTS": SHORT}


def next_step(folder: Path) -> str:
    """Return what a job's verdict.json tells the pipeline to do."""
    return str(json.loads((folder / "verdict.json").read_text())["next"])


class TestGitLab:
    """The jobs run in a shell instead of in a container of ``$IMAGE``, with the variables that the image would have."""

    def run(self, pipeline: Pipeline, source: str, baseline: float) -> Finished:
        runner = program("gitlab-ci-local")
        need_programs("rsync")
        recipe = (RECIPES / "gitlab.yml").read_text()
        pipeline.commit({"nixl.yml": recipe, ".gitlab-ci.yml": "include:\n  - local: nixl.yml\n"}, baseline)
        arguments = (f"CI_PIPELINE_SOURCE={source}", f"STORE={pipeline.own}/store")
        options = [f"--variable={argument}" for argument in arguments]
        return pipeline.run(runner, "--force-shell-executor", *options, env=subject())

    def artifacts(self, pipeline: Pipeline, *jobs: str) -> dict[str, Path]:
        """Return the folder of each job that has artifacts."""
        results = {
            path.parent.name: path for path in (pipeline.folder / ".gitlab-ci-local" / "artifacts").glob("*/out")
        }
        assert results.keys() == {job.replace(" ", "IA") for job in jobs}, "the program's word for a space"
        for folder in results.values():
            assert {path.name for path in folder.iterdir()} >= REPORTS
            assert junit_suite(folder / "junit.xml").findall("testcase")
        return results

    def test_the_jobs_of_a_merge_request_pass_on_a_healthy_subject(self, pipeline: Pipeline) -> None:
        done = self.run(pipeline, "merge_request_event", SLOW)
        assert done.code == 0, done.output
        assert "NIXL gate: PASS (" in done.output
        assert "nixl nightly" not in done.output
        assert done.output.count("= test session starts =") == 3, "only what may pass is judged twice"
        results = self.artifacts(pipeline, "nixl image", "nixl acceptance", "nixl regression")
        assert {next_step(folder) for folder in results.values()} == {"accept"}

    def test_the_nightly_job_fails_if_it_is_slower_than_the_baseline(self, pipeline: Pipeline) -> None:
        """A job that passes is judged once in every change, and test_ci_recipes.py executes the line that judges."""
        done = self.run(pipeline, "schedule", FAST)
        assert done.code == 1, done.output
        assert "NIXL gate: FAIL (" in done.output
        assert "REGRESSED" in done.output
        assert "nixl acceptance" not in done.output
        [folder] = self.artifacts(pipeline, "nixl nightly").values()
        assert (folder / "record.json").exists()
        assert next_step(folder) == "reject"
        assert done.output.count("= test session starts =") == 1, "only what may pass is judged twice"
        assert '"next": "reject",' in done.output
        assert list((pipeline.own / "store").rglob("*.json"))


class TestGitHub:
    """The jobs' program ``docker`` is :mod:`helpers.docker_standin`, whose broken image lets UCX use TCP only."""

    def run(self, pipeline: Pipeline, event: str, baseline: float, image: str = "healthy") -> Finished:
        runner = program("act")
        need_programs("unshare", root=True)
        pipeline.commit({".github/workflows/nixl.yml": (RECIPES / "github.yml").read_text()}, baseline)
        programs, action = pipeline.own / "bin", pipeline.own / "upload"
        for folder in (programs, action):
            folder.mkdir()
        (action / "action.yml").write_text(UPLOAD)
        variables = {"HOME": str(pipeline.own), **subject()}
        docker_standin.install(programs, {"healthy": variables, "broken": {**variables, "UCX_TLS": "tcp"}})
        given = {"IMAGE": image, "STORE": f"{pipeline.own}/store", "ARTIFACTS": str(pipeline.own / "artifacts")}
        return pipeline.run(
            runner, event, "--platform=self-hosted=-self-hosted", "--platform=ubuntu-latest=-self-hosted",
            "--strict", "--no-cache-server", "--container-daemon-socket=-",
            "--action-offline-mode", f"--action-cache-path={pipeline.own}/cache",
            f"--local-repository=actions/upload-artifact@v4={action}",
            *(f"--env={name}={value}" for name, value in given.items()),
            env={"PATH": os.pathsep.join((str(programs), os.environ["PATH"]))},
        )  # fmt: skip

    def artifacts(self, pipeline: Pipeline, *names: str) -> dict[str, Path]:
        """Return the folder of each artifact."""
        results = {path.name: path for path in (pipeline.own / "artifacts").iterdir()}
        assert results.keys() == set(names)
        for folder in results.values():
            assert {path.name for path in folder.iterdir()} >= {*REPORTS, "summary.md"}
            assert junit_suite(folder / "junit.xml").findall("testcase")
        return results

    def test_the_jobs_of_a_pull_request_pass_on_a_healthy_image(self, pipeline: Pipeline) -> None:
        done = self.run(pipeline, "pull_request", SLOW)
        assert done.code == 0, done.output
        assert "NIXL gate: PASS (" in done.output
        assert "nightly regression" not in done.output
        assert done.output.count("= test session starts =") == 3, "only what may pass is judged twice"
        results = self.artifacts(pipeline, "nixl-image", "nixl-acceptance", "nixl-regression")
        assert {next_step(folder) for folder in results.values()} == {"accept"}

    def test_the_acceptance_job_fails_on_a_broken_image(self, pipeline: Pipeline) -> None:
        done = self.run(pipeline, "pull_request", SLOW, "broken")
        assert done.code == 1, done.output
        assert "WRONG-TRANSPORT" in done.output
        assert "NIXL gate: FAIL (" in done.output
        results = self.artifacts(pipeline, "nixl-image", "nixl-acceptance")
        assert {next_step(folder) for folder in results.values()} == {"reject"}
