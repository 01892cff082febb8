# SPDX-License-Identifier: Apache-2.0
"""The suite ``endurance`` with the real NIXL and etcd: healthy, with a leak, and with a bound of a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from helpers import gpu_standin
from helpers.cli_run import Finished, in_workers, run

from pytest_nixl.model.figure import FIGURE_KINDS

pytestmark = pytest.mark.long

SUITE = "suites/endurance"
#: The figures of this suite.
SUMMARY = {name for name, kind in FIGURE_KINDS.items() if "the suite endurance" in kind.remedy}
#: In pytest: fewer samples than the 24 of a user's run, which tests/unit/checks/test_endurance.py takes. An interval of
#: fewer slopes is wider, so that less is called growth.
FEWER = """
from pytest_nixl.checks.endurance import check

check.SAMPLES = 8
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs."""
    return gpu_standin.build(tmp_path_factory.mktemp("driver"))


def planted(function: str, *arguments: str, env: Mapping[str, str] = MappingProxyType({}), **given: str) -> Finished:
    """Run checks with a leak in each worker, and with the variables of ``env``.

    It leaks as much in each cycle, so that few samples show it.
    """
    leak = in_workers((f"helpers.leak_functions:{function}", given))
    return run(
        SUITE, "--nixl-level=extended", "--nixl-etcd-server=embedded", *arguments,
        fault=FEWER + leak, env=env,
    )  # fmt: skip


def test_nothing_grows_but_the_sockets_of_removed_agents(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    done = run(
        SUITE, "-v", "--nixl-level=extended", "--nixl-etcd-server=embedded", f"--benchmark-json={record}",
        fault=FEWER,
    )  # fmt: skip
    done.expect(0, "1 known limit of NIXL 1.5", "NIXL verdict: PASS (5 PASS; ")
    recorded = json.loads(record.read_text())["benchmarks"]
    assert {figure["fullname"] for figure in recorded} == {
        f"cycle-time/UCX/{cycle}" for cycle in ("transfer", "connection", "registration", "publication", "agent")
    }
    further = {figure["name"] for each in recorded for figure in each["extra_info"]["figures"]}
    assert further | {"cycle-time"} == SUMMARY


def test_keys_that_stay_in_etcd_are_found() -> None:
    growth = "growth-etcd-keys (UCX publication): ..., above its bound of 0.02 ("
    planted("keys", "-k", "publications").expect(1, f"FAIL endurance-publication: ...{growth}")


@pytest.mark.parametrize("memory", ["VRAM:VRAM", pytest.param("DRAM:DRAM", marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("leak", "verdict"),
    # Healthy is this cycle above, without a GPU.
    [pytest.param("nothing", "PASS", marks=pytest.mark.whole), ("kibibyte", "FAIL")],
)
def test_a_leak_of_agents_beside_a_gpu_is_told_from_that_of_ucx(
    memory: str, leak: str, verdict: str, driver: dict[str, str]
) -> None:
    """With a CUDA context, as beside VRAM, UCX keeps nothing more than without a GPU; without one it keeps 864 B."""
    done = planted(leak, "-k", "agents", f"--nixl-memory={memory}", env=driver, method="deregister_memory")
    done.expect(verdict == "FAIL", f"NIXL verdict: {verdict} (1 {verdict}; ")
    limit = {"VRAM:VRAM": "768 B", "DRAM:DRAM": "1.63 KB"}[memory]
    assert (f"above its bound of {limit}" in done.output) is (leak == "kibibyte"), done.output


def test_a_bound_of_a_profile_replaces_the_limit(tmp_path: Path) -> None:
    """Without it the same leak fails: tests/unit/checks/test_endurance.py."""
    profile = tmp_path / "p.toml"
    profile.write_text(
        '[profile]\nname = "test"\n[[bound]]\nfigure = "growth-descriptors"\ncycle = ["transfer"]\n'
        'at_most = "2"\nsource = "a test"\n'
    )
    options = ("-k", "transfers", f"--nixl-profile={profile}")
    done = planted("descriptor", *options, method="release_xfer_handle")
    done.expect(0, "growth-descriptors ...UCX transfer ... 1  at most 2", "NIXL verdict: PASS (1 PASS; ")
