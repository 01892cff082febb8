# SPDX-License-Identifier: Apache-2.0
"""The recipes for CI: YAML of the form that each system reads, in which every command line is one of ours."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from inner import run_pytest
from records import KEY, record, write
from runs import ROOT

from pytest_nixl.options import OPTIONS

FOLDER = ROOT / "deploy" / "ci"


def load(name: str) -> dict[Any, Any]:
    found = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(found, dict)
    return found


def commands() -> list[str]:
    """Every command line of the recipes that runs pytest, as a shell would have it after folding."""
    github = [step["run"] for job in load("github.yml")["jobs"].values() for step in job["steps"] if "run" in step]
    gitlab = [line for job in load("gitlab.yml").values() if "script" in job for line in job["script"]]
    return [line for line in (*github, *gitlab) if "pytest " in line]


def test_the_recipe_for_github_is_a_workflow() -> None:
    workflow = load("github.yml")
    events = workflow[True]  # YAML 1.1 reads the word "on" so
    assert {"pull_request", "schedule"} <= set(events)
    assert set(workflow["jobs"]) == {"accept", "nightly"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "steps", "if", "timeout-minutes"} <= set(job)
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert workflow["concurrency"]["cancel-in-progress"] is False
    assert workflow["permissions"] == {"contents": "read"}


def test_the_recipe_for_gitlab_has_jobs_that_extend_what_is_there() -> None:
    recipe = load("gitlab.yml")
    jobs = {name: job for name, job in recipe.items() if "script" in job}
    assert set(jobs) == {"nixl acceptance", "nixl nightly"}
    for job in jobs.values():
        assert job["extends"] in recipe
        assert job["rules"]
    assert recipe[".nixl"]["artifacts"]["when"] == "always"
    assert recipe[".nixl"]["resource_group"]


def test_the_gate_and_the_nightly_run_are_what_they_are_called() -> None:
    gates = [line for line in commands() if "--nixl-gate" in line]
    nights = [line for line in commands() if "--nixl-baseline=" in line]
    assert len(gates) == len(nights) == 2
    assert not set(gates) & set(nights)
    assert all("--nixl-store=" in line for line in nights)


def options(line: str) -> list[str]:
    words = shlex.split(line.replace("$IMAGE", "registry/image:1"))
    return words[words.index("pytest") + 1 :]


@pytest.mark.parametrize("number", range(4))
def test_every_command_line_is_taken_by_pytest(pytester: pytest.Pytester, number: int) -> None:
    """With the paths of this machine in place of theirs: all settings are read, and the baseline is."""
    place = str(pytester.path)
    write(pytester.path / "nixl-baseline.json", record("nixl:1", {KEY: [1.0] * 5}))
    given = [re.sub(r"(?<==|,)(/out|/store|/repo/ci|/srv/nixl/store|out|ci)(?=/|$)", place, word)
             for word in options(commands()[number])]  # fmt: skip
    given = [re.sub(r",out/", f",{place}/", word) for word in given]
    known = {item.flag for item in OPTIONS}
    assert {word.partition("=")[0] for word in given if word.startswith("--nixl-")} <= known
    own = [
        word for word in given if word not in ("--pyargs", "-p", "no:cacheprovider") and not word.startswith("pytest_")
    ]
    pytester.makepyfile("def test_it(nixl_settings): print(nixl_settings.image)")
    result = run_pytest(pytester, "-s", *own)
    assert "registry/image:1" in result.stdout.str()
    result.assert_outcomes(passed=1)
    assert "ERROR" not in result.stderr.str()
