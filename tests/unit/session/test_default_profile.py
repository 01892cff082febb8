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
        *((backends, ["rdmap0s0"], "p5.48xlarge", "loopback", "") for backends in ("UCX", "UCX LIBFABRIC", "POSIX")),
        ("LIBFABRIC", [], "p5.48xlarge", "tcp-loopback", "no RDMA device"),
        ("LIBFABRIC", ["rdmap0s0"], "p5.48xlarge", "p5.48xlarge", "this host's product name is p5.48xlarge"),
        *(("LIBFABRIC", ["mlx5_0"], product, "loopback", "mlx5_0")
          for product in ("", "p4d.24xlarge", "../loopback", "no-such-machine")),
    ],
)  # fmt: skip
def test_a_run_that_names_no_profile_has_that_of_its_host(
    tmp_path: Path, backends: str, devices: list[str], product: str, name: str, why: str
) -> None:
    chosen, reason = default_profile(tuple(backends.split()), host(tmp_path, *devices, product=product))
    assert chosen == name
    assert why in reason
    assert bool(why) is bool(reason)


@pytest.mark.parametrize(
    ("models", "profile"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "h100"), (["NVIDIA H200"], "h200"), (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA B200"] * 8, "b200"), (["NVIDIA GB200"], ""), (["NVIDIA GH200 480GB"], ""), ([], ""),
        (["NVIDIA H100", "NVIDIA H200"], ""), (["NVIDIA H200", "NVIDIA H100"], ""), (["H1001", "B2000"], ""),
        (["xH100", "xB200"], ""), (["xA100"], ""), (["A1001"], ""), (["H2000"], ""), (["B2000"], ""),
    ],
)  # fmt: skip
def test_a_profile_for_gpus_is_of_one_model(models: list[str], profile: str) -> None:
    assert gpu_profile(models) == profile


def test_the_default_expects_no_transport_of_libfabric() -> None:
    accepted = {item.transports for item in load_profile("loopback").expectations if item.backend == ("LIBFABRIC",)}
    assert accepted == {None}


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
    assert [f"{name}, is for one host, and the ranks are on 2:" in note for note in run.record.notes] == [True] * (
        not judged
    )


@pytest.mark.long
def test_the_header_shows_the_reason_for_the_default() -> None:
    done = run("--collect-only", "-vv", "suites/infrastructure/test_etcd.py", "--nixl-backend=LIBFABRIC")
    name, reason = default_profile(("LIBFABRIC",))
    assert f"  --nixl-profile={name} (default: {reason})" in done.output
    done = run("--collect-only", "-vv", "suites/infrastructure/test_etcd.py", "--nixl-backend=UCX")
    assert "  --nixl-profile=loopback (default)" in done.output


SILENT = [name for name in bundled_profiles() if not load_profile(name).expectations]


def test_some_profiles_expect_nothing() -> None:
    assert "p4d.24xlarge" in SILENT


@pytest.mark.long
@pytest.mark.parametrize("name", [SILENT[0], *(pytest.param(name, marks=pytest.mark.whole) for name in SILENT[1:])])
def test_a_profile_that_expects_nothing_is_reported_in_the_header(name: str) -> None:
    assert silent_profile(load_profile(name)).startswith(f"the profile {name!r} has no [[expect]]")
    done = run("suites/infrastructure/test_etcd.py", "--collect-only", f"--nixl-profile={name}")
    assert f"the profile {name!r} has no [[expect]]" in done.output
    assert "pytest-nixl profile learn" in done.output


@pytest.mark.long
@pytest.mark.parametrize("selection", [BANDWIDTH, "suites"])
def test_the_gate_refuses_rows_with_a_profile_that_expects_nothing(selection: str) -> None:
    done = run(selection, "--nixl-gate", "--nixl-profile=p4d.24xlarge")
    assert "ERROR: --nixl-gate is refused: the profile 'p4d.24xlarge' has no [[expect]]" in done.output
    assert "pytest-nixl profile learn run1.json run2.json run3.json" in done.output
    assert done.code == pytest.ExitCode.USAGE_ERROR


@pytest.mark.long
def test_the_gate_judges_the_machine_with_a_profile_that_expects_nothing_of_rows() -> None:
    """Such a profile still has required checks and hardware, which this host does not have."""
    done = run("suites/infrastructure/test_machine.py", "-k", "rdma", "--nixl-gate", "--nixl-profile=p4d.24xlarge")
    assert "is refused" not in done.output
    assert "NIXL gate: FAIL" in done.output
    assert done.code == 1


@pytest.mark.parametrize("name", [name for name in bundled_profiles() if name not in SILENT])
def test_every_floor_without_a_measurement_is_called_a_sanity_floor(name: str) -> None:
    for item in load_profile(name).expectations:
        if item.floor is not None and ("not measured" in item.source or "line rate" in item.source):
            assert "a sanity floor" in item.source
