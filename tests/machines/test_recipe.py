# SPDX-License-Identifier: Apache-2.0
"""The recipe deploy/ci/github-rdma.yml in a machine: its own commands, on a runner whose kernel has soft-RoCE."""

from __future__ import annotations

import shlex

import pytest
import yaml
from machine import PROJECT, Machine, MakeMachine

pytest_plugins = ["machine_fixtures"]
pytestmark = pytest.mark.soak

RECIPE = PROJECT / "deploy" / "ci" / "github-rdma.yml"
#: Doubles: root needs no sudo, and the kernel of the machine has loaded its modules, whose files are not there.
SUDO = 'sudo() { if [ "$1" = modprobe ]; then test -d "/sys/module/$2"; else "$@"; fi; }'


def steps() -> list[str]:
    """Return the commands that load the module, add the device, and validate the image."""
    [job] = yaml.safe_load(RECIPE.read_text())["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step][:3]


def in_place_of_docker(step: str) -> str:
    """Return what a step runs in its container, with the variables that it gives the container."""
    words = shlex.split(step)
    command = words[words.index("pytest") :]
    variables = [words[number + 1] for number, word in enumerate(words) if word == "-e" and "=" in words[number + 1]]
    kept = [variable for variable in variables if variable.startswith("UCX_")]
    return shlex.join(["env", *kept, *command]).replace("'--nixl-image=$IMAGE'", "--nixl-image=image:1")


@pytest.fixture(scope="module")
def runner(make_machine: MakeMachine) -> Machine:
    """A machine with a default interface, and the RDMA libraries that an image has."""
    machine = make_machine("runner").booted()
    machine.check(
        "install_rdma && ip link add uplink type veth peer name other && ip link set other up && ip link set uplink up "
        "&& ip address add 10.96.0.1/24 dev uplink && ip route add default dev uplink"
    )
    load, add, _ = steps()
    machine.check(f"{SUDO}\n{load}\n{add}\nuntil rdma link | grep ACTIVE; do sleep 0.2; done")
    return machine


def test_recipe_fails_if_the_image_cannot_open_the_device(runner: Machine) -> None:
    # NIXL's wheel has a libibverbs of its own, in which Debian's provider does not register.
    done = runner.run(f'cd "$PROJECT" && {in_place_of_docker(steps()[2])} -q --nixl-timeout=300s', 1500)
    print(done.output)
    assert done.code == 1
    assert "FAIL ucx-uses-rdma: " in done.output
    assert "another copy than" in done.output


def test_recipe_passes_if_the_image_can(runner: Machine) -> None:
    runner.check("one_libibverbs")
    done = runner.run(f'cd "$PROJECT" && {in_place_of_docker(steps()[2])} -q --nixl-timeout=300s', 1500)
    print(done.output)
    assert done.code == 0
    assert "rc_verbs/rxe0:1" in done.output
    assert "NIXL gate: PASS (" in done.output
