# SPDX-License-Identifier: Apache-2.0
"""The circumstances of a run: facts of a host from the files of a folder, its image, and what two runs differ in."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nixl.core.plain import from_plain
from pytest_nixl.store import provenance
from pytest_nixl.store.provenance import Change, ImageIdentity, Provenance, changes, gather, image_of, other_machine

Host = Callable[[Mapping[str, str]], None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a function that writes the files of a host, from which the facts are read."""
    monkeypatch.setattr(provenance, "Path", lambda name: tmp_path / str(name).lstrip("/"))

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


#: A variable of each kind that explains a change.
STEERING = (
    "CUDA_VISIBLE_DEVICES", "FI_PROVIDER", "IBV_FORK_SAFE", "LD_LIBRARY_PATH", "LD_PRELOAD", "MLX5_SINGLE_THREADED",
    "NCCL_DEBUG", "NIXL_ETCD_NAMESPACE", "NVIDIA_VISIBLE_DEVICES", "UCX_TLS",
)  # fmt: skip
#: Others of these kinds, whose values may be secrets.
HIDDEN = ("MALLOC_X", "MLX4_X", "NIXL_TOKEN", "OMP_X", "RDMAV_X")
OTHERS = (
    "NIXL_IMAGE", "NIXL_IMAGE_DIGEST", "NIXL_PODINFO", "PATH", "MY_UCX_TLS", "MLX6_X", "UCXX", "LD_PRELOADED",
    "LD_LIBRARY_PATHS", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip


CARDS = ["mlx5_0:2", *(f"mlx5_{number}:1" for number in range(1, 8))]


def test_a_run_is_recorded_with_image_versions_environment_and_host(host: Host) -> None:
    network = "sys/class/net"
    host({
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: CPU of the test \nCPU part\t: 0xd40\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "", "proc/driver/nvidia/gpus/0000:02:00.0/information": "",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/2/state": "", **dict.fromkeys(
            (f"sys/class/infiniband/mlx5_{number}/ports/1/state" for number in (7, 3, 6, 2, 5, 4)), ""
        ), "sys/module/nvidia/version": "550.1\n",
        f"{network}/eth1/device": "", f"{network}/eth1/speed": "-1\n", f"{network}/lo/speed": "1\n",
        f"{network}/eth0/device": "", f"{network}/eth0/speed": "10000\n", f"{network}/eth2/device": "",
    })  # fmt: skip
    environ = dict.fromkeys((*OTHERS, *HIDDEN, *reversed(STEERING)), "v")
    environ |= {"NIXL_NODE_NAME": "node\x1b", "NIXL_ETCD_ENDPOINTS": "http://root:hunter2@h:1"}
    run = gather("image:1", {"ucx": "1.18", "nixl": "1.5.1"}, environ, ("node-a", "node-b"))
    assert run.plain() == {
        "image": {"reference": "image:1", "digest": "v", "source": "--nixl-image or NIXL_IMAGE"},
        "versions": {"nixl": "1.5.1", "ucx": "1.18", "kernel": platform.release(), "nvidia_driver": "550.1"},
        "environment": {**dict.fromkeys(STEERING, "v"), **dict.fromkeys(HIDDEN, "***"),
                        "NIXL_ETCD_ENDPOINTS": "http://***@h:1"},
        "host": {
            "name": "node\\x1b", "cpu": f"{platform.machine()} CPU of the test", "cores": os.cpu_count(), "gpus": 2,
            "nics": {**dict.fromkeys(CARDS, ""), "mlx5_1:1": "400 Gb/sec (4X NDR)", "eth0": "10000 Mb/s",
                     "eth1": "", "eth2": ""},
            "ranks": ["node-a", "node-b"],
        },
    }  # fmt: skip
    assert list(run.versions) == ["nixl", "ucx", "kernel", "nvidia_driver"]
    assert list(run.environment) == sorted((*STEERING, *HIDDEN, "NIXL_ETCD_ENDPOINTS"))
    assert list(run.host["nics"]) == [*CARDS, "eth0", "eth1", "eth2"]
    assert from_plain(Provenance, run.plain()) == run


@pytest.mark.parametrize(
    ("text", "model"),
    [(None, ""), ("processor: 0\n", ""), ("CPU part\t: 0xd40\ncpu: x\n", " 0xd40"), ("cpu\t\t: POWER9\n", " POWER9")],
)
def test_a_host_without_devices_has_the_name_of_its_machine(host: Host, text: str | None, model: str) -> None:
    host({} if text is None else {"proc/cpuinfo": text})
    run = gather("", {}, {})
    assert run.image == ImageIdentity()
    assert run.versions == {"kernel": platform.release()}
    assert run.host == {
        "name": platform.node(), "cpu": f"{platform.machine()}{model}", "cores": os.cpu_count(), "nics": {}, "gpus": 0
    }  # fmt: skip


LABELS = {
    "etc/podinfo/labels": 'app="x"\npytest-nixl/image="of a label"\n',
    "etc/podinfo/annotations": 'a b="c"\n'
    'pytest-nixl/image="pod:\\"1\\"\\\\"\npytest-nixl/image-digest="sha256:33"\nz="" \nx pytest-nixl/image="other"\n',
}
OPTION, POD = "--nixl-image or NIXL_IMAGE", "downward API"


@pytest.mark.parametrize(
    ("reference", "environ", "files", "image"),
    [
        ("a:1@sha256:11", {"NIXL_IMAGE_DIGEST": "sha256:22"}, LABELS, ImageIdentity("a:1", "sha256:11", OPTION)),
        ("a:1", {}, LABELS, ImageIdentity("a:1", "sha256:33", OPTION)),
        ("", {}, LABELS, ImageIdentity('pod:"1"\\', "sha256:33", POD)),
        ("", {"NIXL_IMAGE_DIGEST": "sha256:22"}, LABELS, ImageIdentity('pod:"1"\\', "sha256:22", POD)),
        ("", {}, {"etc/podinfo/labels": 'x-pytest-nixl/image="a:1"\npytest-nixl/image="a:1"x\n'}, ImageIdentity()),
        ("", {"NIXL_PODINFO": "/else"}, {**LABELS, "else/labels": 'pytest-nixl/image="b:1"'},
         ImageIdentity("b:1", "", POD)),
        ("", {"NIXL_IMAGE_DIGEST": "sha256:22"}, {}, ImageIdentity("", "sha256:22")),
    ],
)  # fmt: skip
def test_the_image_is_that_of_the_settings_or_else_of_the_pod(
    host: Host, reference: str, environ: dict[str, str], files: dict[str, str], image: ImageIdentity
) -> None:
    host(files)
    assert image_of(reference, environ) == image


def test_an_image_is_shown_with_the_begin_of_its_digest() -> None:
    assert str(ImageIdentity("a:1", f"sha256:{'0123456789' * 4}")) == "a:1 (012345678901)"
    assert str(ImageIdentity("", "sha256:11")) == "unnamed image (11)"


BEFORE = Provenance(
    ImageIdentity("a:1", f"sha256:{'1' * 64}"), {"nixl": "1.4.0", "ucx": "1.18"},
    {"UCX_TLS": "tcp", "UCX_A": "1", "(level)": "quick"},
    {"cpu": "Xeon", "cores": 8, "nics": {"eth0": "1000 Mb/s", "eth1": ""}, "gpus": 0, "ranks": ["a", "b"]},
)  # fmt: skip
NOW = Provenance(
    ImageIdentity("a:2", f"sha256:{'1' * 12}{'2' * 52}"), {"nixl": "1.5.1", "python": "3.12", "ucx": "1.18"},
    {"UCX_TLS": "rc", "UCX_B": "2", "(level)": "standard"},
    {"cpu": "EPYC", "cores": 16, "nics": {}, "gpus": 0, "ranks": ["a", "c"]},
)  # fmt: skip


def test_every_difference_between_two_runs_is_told_the_image_first() -> None:
    assert [(change.what, str(change), change.variable) for change in changes(BEFORE, NOW)] == [
        ("image", "image: a:1 -> a:2", ""),
        ("versions nixl", "versions nixl: 1.4.0 -> 1.5.1", ""),
        ("environment UCX_TLS", "UCX_TLS=rc is set in this run, and was tcp before", "UCX_TLS"),
        ("environment UCX_A", "UCX_A=1 was set before, and is not set in this run", "UCX_A"),
        ("environment (level)", "environment (level): quick -> standard", ""),
        ("host cpu", "host cpu: Xeon -> EPYC", ""),
        ("host cores", "host cores: 8 -> 16", ""),
        ("host nics eth0", "host nics eth0: 1000 Mb/s -> not recorded", ""),
        ("host ranks", "host ranks: a, b -> a, c", ""),
        ("versions python", "versions python: not recorded -> 3.12", ""),
        ("environment UCX_B", "UCX_B=2 is set in this run, and was not set before", "UCX_B"),
    ]
    # The digest counts up to its twelfth digit.
    other = replace(BEFORE, image=ImageIdentity("a:1", f"sha256:{'1' * 11}2"))
    assert changes(BEFORE, other) == [Change("image digest", f"sha256:{'1' * 12}", f"sha256:{'1' * 11}2")]


def test_two_hosts_are_of_another_kind_by_each_fact_that_both_have() -> None:
    assert other_machine(BEFORE, replace(NOW, host={**NOW.host, "gpus": 8})) == [
        Change("cpu", "Xeon", "EPYC"),
        Change("cores", "8", "16"),
        Change("nics", "eth0 1000 Mb/s, eth1", "none"),
        Change("gpus", "0", "8"),
    ]
    assert other_machine(BEFORE, Provenance()) == other_machine(Provenance(), NOW) == []
