# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl init`` writes files for a cluster that pass the checks of the files that this project ships."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli_run import ROOT, environment
from helpers.fake_sysfs import Tree, p5
from helpers.manifests import disagreements, pods_of, read, validate

from pytest_nixl import cli
from pytest_nixl.judge.profiles import bundled_text, load_profile
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import OPTIONS

FILES = ("profile.toml", "github.yml", "pytest-nixl.sbatch", "indexed-job.yaml", "etcd.yaml", "results.yaml")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded facts of a p5.48xlarge, whose firmware does not say what it is."""
    return p5(tmp_path_factory.mktemp("p5") / "tree").folder


@pytest.fixture(scope="module")
def plain_node(node: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same host without GPU, RDMA device and huge pages."""
    tree = tmp_path_factory.mktemp("plain") / "tree"
    shutil.copytree(node, tree, symlinks=True)
    shutil.rmtree(tree / "sys/class/infiniband")
    shutil.rmtree(tree / "sys/kernel/mm/hugepages", ignore_errors=True)
    Tree(tree).answer("nvml", {"why": "no NVIDIA driver is loaded"})
    return tree


def written(folder: Path, root: Path, *options: str) -> Path:
    target = folder / "nixl"
    assert cli.main(["init", str(target), f"--root={root}", *options]) == 0
    return target


def check_manifests(folder: Path) -> list[dict[str, Any]]:
    """Validate every manifest by schemas and by what must agree in it, and return the pods of the ranks."""
    manifests = read(sorted(folder.glob("*.yaml")))
    for manifest in manifests:
        for document in manifest.documents:
            validate(document)
        assert disagreements(manifest) == []
    pods = [pod for manifest in manifests for document in manifest.documents for pod in pods_of(document)]
    return [pod.spec for pod in pods if pod.runs_ranks]


def container(spec: dict[str, Any]) -> dict[str, Any]:
    [main_container] = spec["containers"]
    assert isinstance(main_container, dict)
    return main_container


def row(backend: str, memory: str, block: int) -> RowKey:
    first, other = memory.split(":")
    return RowKey(backend, "READ", MemoryPair(first, other), block, 1, 1, (0, 1))


@pytest.mark.long
def test_the_files_of_a_node_with_efa(node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, node, "--image=registry/vllm:7", "--nodes=4")
    assert {path.name for path in folder.iterdir()} == set(FILES)
    output = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in output[:6]] == [str(folder / name) for name in FILES]
    assert output[6].startswith("next: grep -n yours ")
    [spec] = check_manifests(folder)
    rank = container(spec)
    assert rank["image"] == "registry/vllm:7"
    assert {"--nixl-ranks=4", "--nixl-backend=LIBFABRIC", "--nixl-memory=DRAM:DRAM,VRAM:VRAM"} < set(rank["args"])
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert rank["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    profile = load_profile(str(folder / "profile.toml"))
    assert profile.machine is not None
    assert (profile.machine.nics, profile.machine.nic_rate, profile.machine.gpus) == (32, 12.5e9, 8)
    for memory in ("DRAM:DRAM", "VRAM:VRAM"):
        for block, floor in ((4096, 1e6), (64 << 20, 1.25e9)):
            expected = profile.expectation(row("LIBFABRIC", memory, block))
            assert expected is not None
            assert expected.floor == pytest.approx(floor)
    assert "--gpus all" in (folder / "github.yml").read_text()


def test_the_files_of_a_node_without_devices(
    plain_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, plain_node, "--ci=gitlab")
    [spec] = check_manifests(folder)
    rank = container(spec)
    assert {"--nixl-ranks=2", "--nixl-backend=UCX", "--nixl-memory=DRAM:DRAM"} < set(rank["args"])
    assert not [name for name in rank["resources"]["limits"] if "/" in name or name.startswith("hugepages")]
    profile = load_profile(str(folder / "profile.toml"))
    expected = profile.expectation(row("UCX", "DRAM:DRAM", 1 << 20))
    assert expected is not None
    assert expected.transports == ("tcp",)
    assert profile.machine is None
    assert "the profile has no [machine], because this node has no RDMA device: " in capsys.readouterr().out
    assert not {"gpus", "rdma-devices"} & set(profile.required)


def test_the_slurm_job_has_the_image_as_enroot_names_it(plain_node: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, plain_node, "--image=registry.example/vllm:7", "--nodes=7")
    script, like = folder / "pytest-nixl.sbatch", folder / "profile.toml"
    text = script.read_text()
    assert "\nimage=${CONTAINER_IMAGE-registry.example#vllm:7} " in text
    assert "\n#SBATCH --nodes=7 " in text
    assert "\n#SBATCH --gpus-per-node=0 " in text
    assert '--nixl-memory=DRAM:DRAM"' in text
    assert f"\nprofile=${{PROFILE-{like}}} " in text
    assert "deploy/slurm" not in text
    assert f"\n#   PROFILE= sbatch --nodes=2 {script} " in text, "without PROFILE= the job judges"
    assert f"\n#   pytest-nixl profile learn nixl-*/run.json --name ours --like {like} " in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("system", ["github", "gitlab"])
def test_the_ci_file_differs_from_the_shipped_one_in_image_and_gpus_only(
    plain_node: Path, tmp_path: Path, system: str
) -> None:
    text = (written(tmp_path, plain_node, f"--ci={system}", "--image=registry/vllm:7") / f"{system}.yml").read_text()
    assert yaml.safe_load(text)
    assert "gpu]" not in text
    assert "--gpus" not in text
    shipped = (ROOT / "deploy" / "ci" / f"{system}.yml").read_text()
    restored = text.replace("registry/vllm:7", "registry.example/inference:latest").replace(
        "tags: [nixl]", "tags: [gpu]"
    )
    assert restored == shipped.replace(" --gpus all", "").replace("[self-hosted, gpu]", "[self-hosted]")
    known_flags = {item.flag for item in OPTIONS}
    assert {argument.partition("=")[0] for argument in re.findall(r"--nixl-\S+", text)} <= known_flags


@pytest.mark.long
def test_an_instance_with_a_profile_gets_a_copy_of_it(node: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(node, tree, symlinks=True)
    (tree / "sys/class/dmi/id").mkdir(parents=True)
    (tree / "sys/class/dmi/id/product_name").write_text("p5.48xlarge\n")
    folder = written(tmp_path, tree)
    assert (folder / "profile.toml").read_text() == bundled_text("p5.48xlarge")
    [spec] = check_manifests(folder)
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}


def test_no_file_is_overwritten_and_none_is_added(
    plain_node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "etcd.yaml").write_text("mine\n")
    assert cli.main(["init", str(tmp_path / "nixl"), f"--root={plain_node}"]) == 2
    assert capsys.readouterr().err == (
        f"pytest-nixl: {tmp_path / 'nixl' / 'etcd.yaml'} already exists, and nothing was written: "
        "give another directory\n"
    )
    assert [path.name for path in (tmp_path / "nixl").iterdir()] == ["etcd.yaml"]
    assert (tmp_path / "nixl" / "etcd.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes=0"], "--nodes '0' is not a positive integer"),
        (["--image=two words"], "--image 'two words' is not the name of an image: expected "),
        (["--root=nowhere"], "'nowhere' is not a folder: expected "),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", str(tmp_path / "nixl"), *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"pytest-nixl: {message}")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "nixl").exists()


@pytest.mark.long
def test_this_host_gets_files_and_the_next_command_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nixl.cli", "init", "files here"], cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check_manifests(tmp_path / "files here")
    [following] = [line.removeprefix("next: ") for line in done.stdout.splitlines() if line.startswith("next: ")]
    shown = subprocess.run(shlex.split(following), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0
    assert "files here/indexed-job.yaml:" in shown.stdout
