# SPDX-License-Identifier: Apache-2.0
"""Pack the file for a machine with a GPU and no network from the packages of this machine, and run it.

It runs in a Python without any package, in a network namespace with loopback only. Without a GPU, rows that need one
are not applicable and say why. Its GPUs are those of a stand-in for the driver.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from runpy import run_path
from types import MappingProxyType
from xml.etree import ElementTree

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, environment
from helpers.namespaces import network, require_tools

pytestmark = pytest.mark.long

GPU = ROOT / "deploy" / "gpu"
MIB = 1 << 20
#: For runs whose figures decide nothing: the folder of these doubles, and the options that load them.
TESTS = {"PYTHONPATH": str(ROOT / "tests")}
QUICKLY = ("-p", "helpers.no_contention", "-p", "helpers.short_launches")


def _nixl() -> str:
    for name in ("nixl-cu12", "nixl-cu13"):
        try:
            return f"{name}=={version(name)}"
        except PackageNotFoundError:
            continue
    raise AssertionError("NIXL is not installed")


def pack(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GPU / "pack.py"), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed file, with fast compression."""
    path = tmp_path_factory.mktemp("packed") / "carried.pyz"
    done = pack(str(path), "--preset=0", f"--nixl={_nixl()}")
    assert done.returncode == 0, done.stderr
    assert f"for Python {sys.version_info[0]}.{sys.version_info[1]}, {_nixl()}, source " in done.stdout
    return path


@pytest.fixture(scope="module")
def small(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same file without packages, which takes no time to unpack. Its pytest is a double that ends with code 4."""
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w:xz") as archive:
        double = "import sys\nprint('given', *sys.argv)\nsys.exit(4)\n"
        for name, text in (("source/pytest.py", double), ("numpy/x", "")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    path = tmp_path_factory.mktemp("small") / "carried.pyz"
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(path, "w") as target:
        for name in ("__main__.py", "manifest.json"):
            target.writestr(name, source.read(name))
        target.writestr("tree.tar.xz", tree.getvalue())
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with no package, not even pip."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    listed = [str(python), "-c", "import importlib.metadata as m; print(len(list(m.distributions())))"]
    assert subprocess.run(listed, env=_alone(), cwd="/", capture_output=True, text=True, check=True).stdout == "0\n"
    return python


def _alone() -> dict[str, str]:
    """The variables of this machine without what leads to its packages."""
    return {
        name: value for name, value in environment().items() if not name.startswith(("PYTHON", "VIRTUAL", "PYTEST"))
    }


def run(
    python: Path, carried: Path, *arguments: str, env: Mapping[str, str] = MappingProxyType({}), tree: str = 'exec "$@"'
) -> subprocess.CompletedProcess[str]:
    """Run it with no network but loopback, with the variables of ``env``, and after the script ``tree``."""
    script = f"ip link set lo up\n{tree}"
    namespaces = ["unshare", "--net", "--mount", "--propagation", "private"]
    command = [*namespaces, "sh", "-c", script, "sh", str(python), str(carried), *arguments]
    return subprocess.run(
        command, env={**_alone(), **env}, cwd=carried.parent, capture_output=True, text=True, timeout=600, check=False
    )


def test_it_is_small_enough_and_carries_what_it_says(packed: Path) -> None:
    assert packed.stat().st_size <= 64 * MIB
    with zipfile.ZipFile(packed) as archive:
        assert archive.namelist() == ["__main__.py", "manifest.json", "tree.tar.xz"]
        assert archive.read("__main__.py") == (GPU / "run.py").read_bytes()


@pytest.mark.parametrize(
    ("packed", "torch", "driver", "used"),
    [
        ([12, 13], 12, 13, 12),
        ([12, 13], 13, 13, 13),
        ([12, 13], None, 13, 13),
        ([12, 13], None, 12, 12),
        ([12, 13], None, None, 12),
        ([13], None, 12, 13),
    ],
)
def test_the_nixl_is_used_that_nixl_chooses_beside_pytorch_or_that_fits_the_driver(
    packed: list[int], torch: int | None, driver: int | None, used: int
) -> None:
    assert run_path(str(GPU / "run.py"))["nixl_for"](packed, torch, driver) == used


@pytest.mark.parametrize(
    ("version", "cuda"), [("cuda = '12.9'\n", 12), ("cuda: str | None = None\n", None), (None, None)]
)
def test_the_cuda_of_pytorch_is_read_from_its_version(
    version: str | None, cuda: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    if version is not None:
        (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_path(str(GPU / "run.py"))["torch_cuda"]() == cuda


def test_beside_a_pytorch_for_another_cuda_it_says_what_to_pack(small: Path, bare: Path, tmp_path: Path) -> None:
    require_tools()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text("cuda: str | None = '99.0'\n")
    done = run(bare, small, "--out", str(tmp_path / "out"), env={"PYTHONPATH": str(tmp_path)})
    have = _nixl().partition("==")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        f"carried.pyz: this file has {have}, but PyTorch on this machine is built for CUDA 99, and beside it NIXL "
        "loads only nixl-cu99: pack the file again with pack.py --download --nixl nixl-cu99\n"
    )


def test_it_runs_without_a_network_and_without_any_package(packed: Path, bare: Path, tmp_path: Path) -> None:
    require_tools()
    out = tmp_path / "out"
    before = set(Path("/tmp").glob("pytest-nixl-gpu-*"))
    options = ["-k", "test_bandwidth", "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-memory=DRAM:DRAM,DRAM:VRAM"]
    done = run(bare, packed, "--out", str(out), "--only", "near,pytest-gpu", "--", *options, *QUICKLY, env=TESTS)
    assert done.returncode == 1, "memory of a GPU was asked for by name"
    assert "no GPU has a known position on the PCI bus" in (out / "near.txt").read_text()
    output = (out / "pytest-gpu.txt").read_text()
    assert output in done.stdout
    assert "(2 PASS, 1 MISSING, 2 NOT-APPLICABLE; 2 rows" in output  # one row is cold
    assert "DRAM:VRAM needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)" in output
    summary = json.loads((out / "summary.json").read_text())
    assert [(stage["stage"], stage["exit"]) for stage in summary["stages"]] == [("near", 0), ("pytest-gpu", 1)]
    assert (summary["gpus"], summary["profile"]) == ([], "loopback")
    assert "numpy: carried" in summary["libraries"]
    files = {f"pytest-gpu.{ending}" for ending in ("html", "csv", "xml", "json", "txt")}
    assert files | {"store", "near.txt", "summary.json"} == {path.name for path in out.iterdir()}
    assert set(Path("/tmp").glob("pytest-nixl-gpu-*")) == before


@pytest.mark.parametrize(
    "chosen",
    [
        # The imports of the other checks are made. Two GPUs at once are measured in test_vram_suites.py.
        pytest.param(("-k", "infrastructure or test_bandwidth or test_the_first_transfer"), id="gpus-and-rows"),
        pytest.param((), id="all", marks=pytest.mark.whole),
    ],
)
def test_every_stage_runs_with_gpus(
    packed: Path, bare: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, chosen: tuple[str, ...]
) -> None:
    """So that with a GPU, nothing but the GPU is new. All that it needs is what it carries.

    The stage of GPUs runs at level standard, and with one block size: at level extended it takes three times as long.
    """
    require_tools()
    links = {"STANDIN_NVLINKS": "18", "STANDIN_LINK_RATE": "999999"}
    driver = {**gpu_standin.build(tmp_path_factory.mktemp("driver")), **links}
    out = tmp_path / "out"
    options = ["--nixl-level=standard", "--nixl-blocks=16KiB", "--nixl-op=WRITE", "--nixl-duration=10ms", *chosen]
    done = run(
        bare, packed, "--out", str(out), "--", *options, *QUICKLY, env={**driver, **TESTS}, tree=gpu_standin.DRIVER_TREE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    exits = {stage["stage"]: stage["exit"] for stage in summary["stages"]}
    stages = ("driver", "near", "facts", "recorded", "doctor", "pytest-host", "pytest-gpu", "pytest-engine",
              "pytest-pair-0-1", "pytest-pair-1-0", "driver-after")  # fmt: skip
    assert exits == dict.fromkeys(stages, 0), done.stdout
    assert "cuda.bindings.driver: carried" in summary["libraries"]
    assert any(
        re.fullmatch(r"CUDA runtime: .*/fallback/libcudart\.so\.12", library) for library in summary["libraries"]
    )
    assert re.search(
        r"^WRITE, GB/s    to 0    to 1\nfrom GPU 0        - +\d\S*\nfrom GPU 1  +\d\S* +-$", done.stdout, re.M
    )
    assert re.search(
        r"^carried by      to 0    to 1\nfrom GPU 0        -  NVLink\nfrom GPU 1   NVLink       -$", done.stdout, re.M
    )
    assert "== nvidia-smi nvlink -e" in (out / "driver.txt").read_text()
    output = (out / "pytest-gpu.txt").read_text()
    by = {"VRAM:VRAM": "cuda_ipc/cuda", "DRAM:VRAM": "tcp/lo", "VRAM:DRAM": "tcp/lo"}
    for memory, transport in by.items():
        assert re.search(rf"^UCX +WRITE +{memory} .* {transport} ", output, re.MULTILINE), output
    assert re.search(r"^PASS +gpus +1 Stand-in 0, 1 Stand-in 1$", (out / "doctor.txt").read_text(), re.MULTILINE)
    # Nothing is left out for want of a GPU, a driver or one of its libraries.
    reasons = [skipped.get("message", "") for skipped in ElementTree.parse(out / "pytest-gpu.xml").iter("skipped")]
    assert [reason for reason in reasons if re.search("no GPU|two GPUs|no NVIDIA driver|no VRAM|NVML", reason)] == [], (
        output
    )
    for check in ("vram-known", "ucx-cuda", "gpu-driver", "gpu-p2p"):
        assert check in (out / "pytest-gpu.xml").read_text()


def test_the_exit_code_of_pytest_is_the_exit_code_of_the_file(small: Path, bare: Path, tmp_path: Path) -> None:
    require_tools()
    done = run(bare, small, "--out", str(tmp_path / "out"), "--only", "pytest-host", "--", "--nixl-op=PUSH")
    assert done.returncode == 4, done.stderr
    assert re.search(r"^given .* --nixl-op=PUSH$", done.stdout, re.MULTILINE)


def test_an_unknown_stage_is_refused(packed: Path, bare: Path, tmp_path: Path) -> None:
    done = subprocess.run([str(bare), str(packed), "--only", "gpu"], env=_alone(), cwd=tmp_path, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert "--only=gpu " in done.stderr
    assert "near, facts, recorded, doctor, pytest-host, pytest-gpu" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_python_is_refused_in_one_sentence(packed: Path, bare: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pyz"
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(other, "w") as target:
        target.writestr("__main__.py", source.read("__main__.py"))
        target.writestr("manifest.json", json.dumps({"python": "3.9", "nixl": "nixl-cu12==1.5.1", "source": "0"}))
    done = subprocess.run([str(bare), str(other), "--out", str(tmp_path / "out")], env=_alone(), capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for part in ("other.pyz: ", "CPython 3.9", f"cpython {version}: ", "python3.9", f"pack.py --python {version}"):
        assert part in sentence


def test_a_file_that_is_too_large_names_its_largest_parts() -> None:
    sizes = "collections.Counter(nixl=30 << 20, numpy=50 << 20)"
    for size, fault in ((MIB, ""), (MIB + 1, "the largest parts: numpy 50.0 MiB, nixl 30.0 MiB")):
        text = f"import collections, pack; pack.check_size({size}, {sizes}, {MIB})"
        done = subprocess.run([sys.executable, "-c", text], cwd=GPU, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == bool(fault)
        assert fault in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--python=twelve",), "--python=twelve is not a version of Python: "),
        (("--nixl=nixl",), "--nixl=nixl is not a package of NIXL: "),
        (("--without=ucx",), "--without=ucx: expected numpy or cuda or etcd"),
        (("--limit=much",), "argument --limit"),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = pack("never.pyz", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_another_version_of_nixl_than_the_installed_one_is_refused() -> None:
    done = pack("never.pyz", f"--nixl={_nixl()}.99")
    assert done.returncode == 1
    assert f"--nixl={_nixl()}.99" in done.stderr
    assert "--download" in done.stderr


def test_one_command_on_two_hosts_measures_between_their_gpus(
    packed: Path, bare: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require_tools()
    driver = gpu_standin.build(tmp_path_factory.mktemp("driver"))
    options = ["--only=pytest-hosts-gpu", "--", "--nixl-blocks=16KiB", "--nixl-memory=VRAM:VRAM", "--nixl-op=WRITE",
               "-k", "test_bandwidth", "--nixl-duration=10ms", *QUICKLY]  # fmt: skip
    env = {**_alone(), **driver, **TESTS, "NIXL_GROUP_TOKEN": "secret"}
    with network(tmp_path, "gpu-a", "gpu-b") as cabled:
        shown = ["unshare", "--mount", "--propagation", "private", "sh", "-c", gpu_standin.DRIVER_TREE, "sh"]
        logs = [tmp_path / f"host-{rank}" for rank in range(2)]
        processes = [
            host.start(
                *shown, str(bare), str(packed), f"--out={log}.out", "--hosts=gpu-a,gpu-b", *options, log=log, env=env
            )
            for host, log in zip(cabled.hosts, logs, strict=True)
        ]
        codes = [process.wait(timeout=300) for process in processes]
    first, second = (log.read_text() for log in logs)
    assert codes == [0, 0], first + second
    assert re.search(r"^UCX +WRITE +VRAM:VRAM +16KiB .* NO-EXPECTATION$", first, re.MULTILINE), first


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (["--hosts=gpu-a"], {}, "--hosts=gpu-a: expected two hosts"),
        (["--hosts=198.51.100.1,198.51.100.2"], {}, "`export NIXL_GROUP_TOKEN=some-secret` on both"),
        (["--hosts=198.51.100.1,198.51.100.2"], {"NIXL_GROUP_TOKEN": "x"}, "neither is an address of this host"),
        (["--hosts=127.0.0.1,127.0.0.2"], {"NIXL_GROUP_TOKEN": "x"}, "both are addresses of this host"),
    ],
)
def test_hosts_that_cannot_be_told_apart_are_refused(
    small: Path, bare: Path, tmp_path: Path, options: list[str], env: dict[str, str], message: str
) -> None:
    done = subprocess.run([str(bare), str(small), *options], env={**_alone(), **env}, cwd=tmp_path,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("direct", [False, True], ids=["without-peermem", "with-peermem"])
def test_between_two_hosts_gpus_are_reached_by_rdma_alone(direct: bool, tmp_path: Path) -> None:
    module = tmp_path / "nvidia_peermem"
    if direct:
        module.mkdir()
    script = run_path(str(GPU / "run.py"))
    script["stages"].__globals__["PEERMEM"] = (str(module),)
    stages = {stage.name: stage for stage in script["stages"]("h100", "out", [], 2, ["gpu-a", "gpu-b"], 1)}
    by_dma_buf = {name: stage.environment.get("UCX_CUDA_COPY_DMABUF") for name, stage in stages.items()
                  if stage.environment.get("UCX_TLS") == "rc,cuda"}  # fmt: skip
    assert by_dma_buf == {
        "pytest-hosts-dma-buf": "yes",
        **({"pytest-hosts-peermem": "no"} if direct else {}),
        "pytest-hosts-small-notified": "try",
        "pytest-hosts-small": "try",
    }
    assert {"--nixl-notify=each", "--nixl-blocks=4KiB"} <= set(stages["pytest-hosts-small-notified"].command)
    assert {"--nixl-notify=last", "--nixl-blocks=4KiB"} <= set(stages["pytest-hosts-small"].command)
    assert stages["doctor"].command[-2:] == ["--peer", "gpu-a"]
