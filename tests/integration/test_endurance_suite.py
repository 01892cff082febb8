# SPDX-License-Identifier: Apache-2.0
"""The suite ``endurance`` with the real NIXL and etcd: healthy, with a leak, and with a bound of a profile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, Finished, run

from pytest_nixl.model.figure import FIGURE_KINDS

pytestmark = pytest.mark.long

SUITE = "suites/endurance"
#: The figures of this suite.
SUMMARY = {name for name, kind in FIGURE_KINDS.items() if "the suite endurance" in kind.remedy}
#: In pytest: fewer samples than the 24 of a user's run, which tests/unit/checks/test_endurance.py takes. An interval of
#: fewer slopes is wider, so that less is called growth.
FEWER = """
from pytest_nixl.checks.endurance import check

check.SAMPLES = {samples}
"""
#: Calls a function in each worker after its agent is made, to plant a leak. It leaks as much in each cycle, so that few
#: samples show it.
PLANT = """
from pytest_nixl.nixl.agent import NixlAgent

make = NixlAgent.within_each.__func__
def planted(cls, *arguments, **named):
    agents = make(cls, *arguments, **named)
    for agent in agents:
        agent.run("helpers.leak_functions:{function}", **{given!r})
    return agents
NixlAgent.within_each = classmethod(planted)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs."""
    return gpu_standin.build(tmp_path_factory.mktemp("driver"))


def planted(
    tmp_path: Path, function: str, *arguments: str, env: Mapping[str, str] = MappingProxyType({}), **given: str
) -> Finished:
    """Run checks with a leak in each worker, and with the variables of ``env``."""
    (tmp_path / "plant.py").write_text(FEWER.format(samples=8) + PLANT.format(function=function, given=given))
    path = f"{tmp_path}:{ROOT / 'tests'}"
    return run(
        SUITE, "--nixl-level=extended", "--nixl-etcd-server=embedded", "-p", "plant", *arguments,
        env={"PYTHONPATH": path, **env}, timeout=900,
    )  # fmt: skip


def test_nothing_grows_but_the_sockets_of_removed_agents(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    (tmp_path / "fewer.py").write_text(FEWER.format(samples=12))
    done = run(
        SUITE, "-v", "--nixl-level=extended", "--nixl-etcd-server=embedded", f"--benchmark-json={record}",
        plugins=["fewer"], env={"PYTHONPATH": str(tmp_path)}, timeout=900,
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "1 known limit of NIXL 1.5" in done.output
    assert "NIXL verdict: PASS (5 PASS; " in done.output
    recorded = json.loads(record.read_text())["benchmarks"]
    assert {figure["fullname"] for figure in recorded} == {
        f"cycle-time/UCX/{cycle}" for cycle in ("transfer", "connection", "registration", "publication", "agent")
    }
    further = {figure["name"] for each in recorded for figure in each["extra_info"]["figures"]}
    assert further | {"cycle-time"} == SUMMARY


def test_keys_that_stay_in_etcd_are_found(tmp_path: Path) -> None:
    done = planted(tmp_path, "keys", "-k", "publications")
    assert re.search(
        r"^FAIL endurance-publication: .*growth-etcd-keys \(UCX publication\): 0\.\d+, above its bound of 0\.02 \(",
        done.output,
        re.M,
    )
    assert done.code == 1


@pytest.mark.parametrize("memory", ["VRAM:VRAM", pytest.param("DRAM:DRAM", marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("leak", "verdict"),
    # Healthy is this cycle above, without a GPU.
    [pytest.param("nothing", "PASS", marks=pytest.mark.whole), ("kibibyte", "FAIL")],
)
def test_a_leak_of_agents_beside_a_gpu_is_told_from_that_of_ucx(
    memory: str, leak: str, verdict: str, driver: dict[str, str], tmp_path: Path
) -> None:
    """With a CUDA context, as beside VRAM, UCX keeps nothing more than without a GPU; without one it keeps 864 B."""
    done = planted(tmp_path, leak, "-k", "agents", f"--nixl-memory={memory}", env=driver, method="deregister_memory")
    assert f"NIXL verdict: {verdict} (1 {verdict}; " in done.output, done.output
    limit = {"VRAM:VRAM": "768 B", "DRAM:DRAM": "1.63 KB"}[memory]
    assert (f"above its bound of {limit}" in done.output) is (leak == "kibibyte"), done.output


def test_a_bound_of_a_profile_replaces_the_limit(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[profile]\nname = "test"\n[[bound]]\nfigure = "growth-descriptors"\ncycle = ["transfer"]\n'
        'at_most = "2"\nsource = "a test"\n'
    )
    for bound, verdict in ((f"--nixl-profile={profile}", "PASS"), ("-q", "FAIL")):
        done = planted(tmp_path, "descriptor", "-k", "transfers", bound, method="release_xfer_handle")
        assert f"NIXL verdict: {verdict} (1 {verdict}; " in done.output, done.output


def test_a_duration_lengthens_each_check(tmp_path: Path) -> None:
    (tmp_path / "fewer.py").write_text(FEWER.format(samples=3))  # they take far less than the duration
    done = run(
        SUITE, "-k", "registrations", "--nixl-level=extended", "--nixl-duration=3s", "--durations=1", plugins=["fewer"],
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.code == 0, done.output
    took = re.search(r"([\d.]+)s call +suites/endurance", done.output)
    assert took is not None
    assert float(took[1]) >= 3
