# SPDX-License-Identifier: Apache-2.0
"""The profile of a run that names none, and runs with a profile that expects nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import BANDWIDTH, run

from pytest_nixl.judge.profiles import bundled_profiles, load_profile
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.default_profile import PRODUCT_NAME, RDMA_DEVICES, default_profile, gpu_profile, read_product
from pytest_nixl.session.gate import profile_between_hosts, silent_profile
from pytest_nixl.session.run import LiveRecord


def host(root: Path, *devices: str, product: str = "") -> Path:
    """Return a stand-in for a host whose ``/sys`` lists these RDMA devices."""
    for device in devices:
        (root / RDMA_DEVICES / device).mkdir(parents=True)
    if product:
        (root / PRODUCT_NAME).parent.mkdir(parents=True)
        (root / PRODUCT_NAME).write_text(f"{product}\n")
    return root


@pytest.mark.timeout(120)
def test_a_recorded_name_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / PRODUCT_NAME).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / PRODUCT_NAME)
    assert read_product(tmp_path) == ""


@pytest.mark.parametrize(
    ("backends", "devices", "product", "name", "why"),
    [
        *((backends, ["rdmap0s0"], "p5.48xlarge", "loopback", "") for backends in ("UCX", "UCX LIBFABRIC")),
        ("LIBFABRIC", [], "p5.48xlarge", "tcp-loopback",
         "LIBFABRIC uses TCP, because this host has no RDMA device"),
        ("LIBFABRIC", ["rdmap0s0"], "p5.48xlarge", "p5.48xlarge", "this host's product name is p5.48xlarge"),
        *(("LIBFABRIC", ["mlx5_1", "mlx5_0"], product, "loopback",
           "there is no profile for a host with mlx5_0; learn one (pytest-nixl profile learn) and give it with "
           "--nixl-profile")
          for product in ("", "p4d.24xlarge", "../loopback")),
    ],
)  # fmt: skip
def test_a_run_that_names_no_profile_has_that_of_its_host(
    tmp_path: Path, backends: str, devices: list[str], product: str, name: str, why: str
) -> None:
    assert default_profile(tuple(backends.split()), host(tmp_path, *devices, product=product)) == (name, why)


@pytest.mark.parametrize(
    ("models", "profile"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "h100"), (["NVIDIA H200"], "h200"), (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA B200"] * 8, "b200"), (["NVIDIA GB200"], ""), (["NVIDIA GH200 480GB"], ""), ([], ""),
        (["NVIDIA H100", "NVIDIA H200"], ""), (["xH100"], ""), (["xA100"], ""), (["H1001"], ""), (["A1001"], ""),
        (["H2000"], ""), (["B2000"], ""),
    ],
)  # fmt: skip
def test_a_profile_for_gpus_is_of_one_model(models: list[str], profile: str) -> None:
    assert gpu_profile(models) == profile


def test_the_default_expects_no_transport_of_libfabric() -> None:
    accepted = {item.transports for item in load_profile("loopback").expectations if item.backend == ("LIBFABRIC",)}
    assert accepted == {None}


LEARN = (
    "learn one from three runs on machines that are known to be good, each with --benchmark-json=runN.json and without "
    "--nixl-gate: `pytest-nixl profile learn run1.json run2.json run3.json --name {0} --output {0}.toml`, then give "
    "--nixl-profile={0}.toml"
)


@pytest.mark.parametrize(
    ("name", "source", "hosts", "judged"),
    [
        ("loopback", "default", "aa", True),
        ("loopback", "default (no RDMA device)", "aab", False),
        ("tcp-loopback", "default", "ab", False),
        ("loopback", "option", "ab", True),
        ("p5.48xlarge", "default", "ab", True),
    ],
)
def test_a_default_profile_of_one_host_judges_no_row_between_two(
    name: str, source: str, hosts: str, judged: bool
) -> None:
    membership = SimpleNamespace(members=[SimpleNamespace(host=host) for host in hosts])
    cluster = Cluster([], cast(Any, SimpleNamespace(membership=membership)))
    run: Any = SimpleNamespace(settings=SimpleNamespace(sources={"profile": source}), record=LiveRecord())
    assert bool(profile_between_hosts(load_profile(name), run, cluster).expectations) is judged
    note = f"the default profile, {name}, is for one host, and the ranks are on 2: rows are measured and not judged; "
    assert run.record.notes == (() if judged else (f"{note}{LEARN.format('this-cluster-learned')}",))


def test_a_profile_that_expects_nothing_says_how_to_learn_one() -> None:
    assert silent_profile(load_profile("loopback")) == ""
    assert silent_profile(load_profile("p4d.24xlarge")) == (
        "the profile 'p4d.24xlarge' has no [[expect]]: it describes the machine but expects nothing of a row, so every "
        f"row is NO-EXPECTATION; {LEARN.format('p4d.24xlarge-learned')}"
    )


@pytest.mark.long
def test_the_gate_refuses_rows_with_a_profile_that_expects_nothing() -> None:
    done = run(BANDWIDTH, "--nixl-gate", "--nixl-profile=p4d.24xlarge")
    assert "ERROR: --nixl-gate is refused: the profile 'p4d.24xlarge' has no [[expect]]" in done.output
    assert "pytest-nixl profile learn run1.json run2.json run3.json" in done.output
    assert done.code == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_floor_without_a_measurement_is_called_a_sanity_floor(name: str) -> None:
    for item in load_profile(name).expectations:
        if item.floor is not None and ("not measured" in item.source or "line rate" in item.source):
            assert "a sanity floor" in item.source
