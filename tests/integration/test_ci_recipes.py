# SPDX-License-Identifier: Apache-2.0
"""Check the CI recipes: what must agree in them and with the page.

``test_ci_runners.py`` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli_run import BANDWIDTH, ROOT, WITHOUT, Finished, environment, undisturbed
from helpers.etcd import engine_image
from helpers.shipped_commands import JUDGED, arguments_of_pytest

FOLDER = ROOT / "deploy" / "ci"


def load(name: str) -> dict[Any, Any]:
    document = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(document, dict)
    return document


GITHUB = ("github.yml", "github-rdma.yml")
#: The recipes that compare.
FILES = ("github.yml", "gitlab.yml")


def commands(workflows: Sequence[str] = GITHUB) -> list[str]:
    """Return every command line of the recipes that runs pytest, as the shell gets it."""
    github = [
        step["run"] for name in workflows for job in load(name)["jobs"].values() for step in job["steps"]
        if "run" in step
    ]  # fmt: skip
    gitlab = [line for job in load("gitlab.yml").values() if "script" in job for line in job["script"]]
    # A comparison is a function, because it may be made twice.
    return [line.removeprefix("judge() { ").partition(";")[0] for line in (*github, *gitlab) if JUDGED in line]


def test_the_recipe_without_a_card_gives_the_container_an_rdma_device_that_it_may_use() -> None:
    [job] = load("github-rdma.yml")["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[0].startswith("sudo modprobe rdma_rxe || ")
    assert steps[1].startswith("sudo rdma link add rxe0 type rxe netdev ")
    arguments = shlex.split(steps[2])
    assert {"--device", "/dev/infiniband", "--ulimit", "memlock=-1", "UCX_NET_DEVICES=rxe0:1"} <= set(arguments)
    # The page has the same command for a runner without containers.
    page = (ROOT / "docs" / "how-to" / "rdma-without-a-card.md").read_text()
    command = next(line for line in page.splitlines() if "--nixl-profile=soft-roce" in line)
    ours = {"-p", "no:cacheprovider", "--nixl-backend=UCX", "--nixl-image=$IMAGE"}
    typed = [
        argument
        for argument in ["pytest", *arguments_of_pytest(arguments)]
        if argument not in ours and "=/out/" not in argument
    ]
    assert shlex.split(command) == ["UCX_TLS=rc,ud,self", "UCX_NET_DEVICES=rxe0:1", *typed]


def test_every_job_is_a_gate_and_changes_and_nights_are_compared_with_the_same_baseline() -> None:
    compared = [line for line in commands() if "--nixl-baseline=" in line]
    assert len(compared) == 4
    assert len(commands()) == 9
    assert all("--nixl-gate" in line and "/verdict.json" in line for line in commands())
    assert len([line for line in compared if "--nixl-store=" in line]) == 2, "only nights are in the history"
    assert len(judged()) == 4
    assert len(set(judged())) == 1, "what the next test shows of one job is so of all"
    # The exit code of the others is that of pytest.
    alone = [line.split()[-1].rpartition("/")[2] for line in commands() if line not in compared]
    assert set(alone) == {"junit.xml"}
    # The record of a run has another name than the baseline, so that nobody takes the one for the other.
    assert all("ci/nixl-baseline.json" in line and "out/record.json" in line for line in compared)


def judged() -> list[str]:
    """Return the last line of each job that compares."""
    return re.findall(r"^ *(judge \|\| .*)$", "".join((FOLDER / name).read_text() for name in FILES), re.MULTILINE)


@pytest.mark.parametrize(
    ("answers", "comparisons", "code"),
    [
        (["accept", "accept"], 1, 0),
        (["retry", "accept"], 2, 0),
        (["retry", "retry", "accept"], 2, 1),
        (["retry", "reject", "accept"], 2, 1),
        (["reject", "accept"], 1, 1),
        (["review", "accept"], 1, 1),
    ],
)
def test_a_comparison_is_made_once_more_only_if_it_says_retry(
    tmp_path: Path, answers: list[str], comparisons: int, code: int
) -> None:
    """The line as a runner's shell executes it, with comparisons that say one word after the other."""
    (tmp_path / "out").mkdir()
    (tmp_path / "words").write_text("\n".join(answers) + "\n")
    judge = """judge() {
        word=$(head -n 1 words); sed -i 1d words; echo made
        echo "\\"next\\": \\"$word\\"," > out/verdict.json
        [ "$word" = accept ]
    }
    """
    done = subprocess.run(
        ["sh", "-e", "-c", judge + judged()[0]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("made") == comparisons, done.stderr
    assert done.returncode == code
    assert (f'"next": "{answers[comparisons - 1]}",' in done.stdout) is bool(code)


def github_containers() -> list[list[str]]:
    """Return the options of ``docker run`` in each command line of the recipe for GitHub."""
    lines = [line for line in commands(["github.yml"]) if line.startswith("docker run ")]
    return [shlex.split(line[: line.index(JUDGED)])[2:] for line in lines]


def added_capabilities(options: list[str]) -> list[str]:
    return [value for option, value in pairwise(options) if option == "--cap-add"]


def measure_in_a_container(capabilities: list[str]) -> Finished:
    """Measure one row in a container that uses the programs of this machine instead of those of an image."""
    image = engine_image()
    import docker

    places = {"/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", sys.prefix, sys.base_prefix, str(ROOT)}
    variables = {
        name: value for name, value in environment().items() if name in ("PATH", "LANG", "LC_ALL", "PYTHONPATH")
    }
    variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables.get("PATH", os.defpath)))
    command = [sys.executable, "-m", "pytest", *WITHOUT, "--benchmark-quiet", BANDWIDTH,
               "--nixl-blocks=64KiB", "--nixl-op=WRITE"]  # fmt: skip
    engine = docker.from_env(timeout=300)
    container = None
    try:
        container = engine.containers.create(
            image, command, network_mode="host", ipc_mode="host", cap_add=capabilities, working_dir=str(ROOT),
            volumes={place: {"bind": place, "mode": "ro"} for place in places if Path(place).is_dir()},
            tmpfs={"/scratch": "exec"}, environment={**variables, "TMPDIR": "/scratch", "HOME": "/scratch"},
        )  # fmt: skip
        container.start()
        code = container.wait(timeout=300)["StatusCode"]
        return Finished(code, container.logs().decode(errors="replace"))
    finally:
        if container is not None:
            container.remove(force=True)
        engine.close()


@pytest.mark.long
def test_containers_of_the_github_recipe_let_ucx_copy_between_processes() -> None:
    options, *remainder = github_containers()
    assert options[options.index("--ipc") + 1] == options[options.index("--network") + 1] == "host"
    assert [added_capabilities(container) for container in remainder] == [added_capabilities(options)] * 3
    done = measure_in_a_container(added_capabilities(options))
    assert set(done.verdicts) == {"WRITE 64KiB"}, done.output
    assert "WRONG-TRANSPORT" not in done.output
    assert "cma/memory" in done.output


def test_a_container_that_forbids_cma_names_the_missing_capability() -> None:
    """Container engines have different filters: either cma is used, or the missing capability is named."""
    done = measure_in_a_container([])
    assert set(done.verdicts) == {"WRITE 64KiB"}, done.output
    named = "lacks the capability SYS_PTRACE" in done.output and "--cap-add SYS_PTRACE" in done.output
    assert named is (done.verdicts["WRITE 64KiB"] == "WRONG-TRANSPORT")
    assert named is not ("cma/memory" in done.output)


@pytest.mark.long
def test_the_first_screen_of_the_page_records_judges_and_fails_on_purpose(tmp_path: Path) -> None:
    """As it is printed, but with one row. Of figures, only those of the second run decide, and any verdict is right."""
    text = (ROOT / "docs/how-to/ci.md").read_text(encoding="utf-8")
    match = re.search(r"```console\n(gate\(\) .*?)```", text, re.DOTALL)
    assert match is not None
    step = "cp verdict.json $((n += 1)).json\n"
    script = re.sub(r"(gate; echo .*\n)", rf"\1{step}", match[1]).replace("=64KiB,1MiB ", "=64KiB ")
    variables = {**undisturbed({})["env"], "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    plugins = "-p helpers.no_contention -p helpers.short_launches"
    one_row = "--nixl-level=quick --nixl-op=WRITE --nixl-duration=20ms -k test_bandwidth"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
        env=environment(**variables, PYTEST_ADDOPTS=f"{plugins} {one_row}"),
    )  # fmt: skip
    codes = re.findall(r"^exit code (\d)$", done.stdout, re.MULTILINE)
    steps = [json.loads((tmp_path / f"{number}.json").read_text())["next"] for number in (1, 2, 3)]
    assert (codes[0], steps[0]) == ("1", "review"), done.stdout
    assert (tmp_path / "nixl-baseline.json").exists()
    # Other programs may disturb the second run so that it proves nothing, or is slower.
    assert (codes[1], steps[1]) in (("0", "accept"), ("1", "retry"), ("1", "reject")), done.stdout
    assert (codes[2], steps[2]) == ("1", "reject"), done.stdout
    assert "UCX_TLS=tcp,cuda_copy is set in this run, and was not" in done.stdout.rpartition("WRONG-TRANSPORT")[0]
