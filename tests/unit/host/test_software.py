# SPDX-License-Identifier: Apache-2.0
"""The software of a host: what a worker answered, what UCX, the loader and libibverbs write, and nixlbench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.fake_sysfs import Tree

from pytest_nixl.host.recorded_tree import NOT_RECORDED, Fact, FactsRoot
from pytest_nixl.host.software import (
    BackendFacts,
    Lacking,
    LoadedLibrary,
    Software,
    library,
    read_software,
    two_of_ucx,
    ucx_warnings,
    unused_variables,
)
from pytest_nixl.host.ucx_rdma import UcxRdma, VerbsAnswer, other_abi

WORKER, BENCH, TRANSFER = "a worker that loaded NIXL", "/bin/nixlbench", "get_xfer_telemetry() of a transfer by UCX"
INSTALLER = "/opt/amazon/efa_installed_packages"
ETCD = "/n/libetcd-cpp-api.so"
MISSING = {"soname": "libx.so", "versions": ["X_1"], "words": "libx.so is missing"}
UCX = {
    "plugin": "/p/libplugin_UCX.so",
    "missing": [MISSING],
    "error": "it failed",
    "remedy": "repair it",
    "memories": ["DRAM"],
    "said": ["odd"],
    "release": "1.5.1",
    "versions": {"cuda_runtime": "/c/libcudart.so.12", "libfabric": ""},
}
POSIX = {"plugin": "", "missing": [], "error": "", "remedy": "", "memories": [], "versions": {"libfabric": "2.3"}}
ANSWER = {
    "python": "3.12.3",
    "nixl": "1.5.1",
    "nixl_package": "nixl-cu12",
    "nixl_module": "/n/_api.py",
    "remedy": "install it",
    "ucx": "1.21.0",
    "plugins": ["UCX", "POSIX"],
    "backends": {"UCX": UCX, "POSIX": POSIX},
    "libraries": ["/a/libucs-14c218c5.so.0", "/b/libucs.so.0", "/a/libucp.so.0"],
    "unused": {"UCX_A": "UCX_B"},
    "ucx_variables": ["UCX_TLS"],
    "fabric_variables": ["FI_PROVIDER"],
    "nixl_variables": ["NIXL_LOG_LEVEL"],
    "advertised": ["10.0.0.1"],
    "telemetry": {"bytes": 4096},
    "etcd_client": {"path": ETCD, "patched": False},
    "ucx_rdma": {
        "module": "/u/libuct_ib.so",
        "libibverbs": "/u/libibverbs.so.1",
        "offered": {"mlx5_0": ["rc"]},
        "answers": {"mlx5_0": {"listed": True, "opened": "", "registered": "no", "shared_queues": 7}},
        "other_abi": {"uverbs0": "old"},
    },
}


def software(folder: Path, text: str, **answers: Any) -> Software:
    """Return the software of a recorded tree. :param text: the file of the EFA installer."""
    tree = Tree(folder)
    tree.write(INSTALLER, text)
    for name, answer in answers.items():
        tree.answer(name, answer)
    return read_software(FactsRoot(folder), (), worker=None)


def test_every_answer_of_a_worker_is_a_fact(tmp_path: Path) -> None:
    text = "# EFA installer version: 1.43.2\n# Debug packages installed: no"
    facts = software(tmp_path, text, nixl=ANSWER, nixlbench={"path": BENCH, "fault": "it stops"})
    ucx = BackendFacts(
        name="UCX",
        plugin="/p/libplugin_UCX.so",
        missing=(Lacking("libx.so", ("X_1",), "libx.so is missing"),),
        error="it failed",
        remedy="repair it",
        memories=("DRAM",),
        said=("odd",),
        release="1.5.1",
        cuda_runtime="/c/libcudart.so.12",
    )
    posix = BackendFacts("POSIX", "", (), "", "", ())
    libraries = (("libucs", "/a/libucs-14c218c5.so.0"), ("libucs", "/b/libucs.so.0"), ("libucp", "/a/libucp.so.0"))
    verbs = {"mlx5_0": VerbsAnswer(listed=True, opened="", registered="no", shared_queues=7)}
    assert facts == Software(
        python=Fact("3.12.3", WORKER),
        nixl=Fact("1.5.1", WORKER),
        nixl_package=Fact("nixl-cu12", WORKER),
        nixl_file=Fact("/n/_api.py", WORKER),
        nixl_remedy="install it",
        ucx=Fact("1.21.0", WORKER),
        libfabric=Fact("2.3", WORKER),
        efa_installer=Fact("1.43.2", INSTALLER),
        etcd_client=Fact(ETCD, WORKER),
        etcd_client_patched=Fact(False, ETCD),
        plugins=("UCX", "POSIX"),
        backends=(ucx, posix),
        libraries=tuple(LoadedLibrary(name, path) for name, path in libraries),
        unused={"UCX_A": "UCX_B"},
        ucx_variables=("UCX_TLS",),
        fabric_variables=("FI_PROVIDER",),
        nixl_variables=("NIXL_LOG_LEVEL",),
        advertised=("10.0.0.1",),
        nixlbench=Fact(BENCH, BENCH),
        nixlbench_fault="it stops",
        telemetry=Fact(4096, TRANSFER),
        ucx_rdma=UcxRdma("/u/libuct_ib.so", "/u/libibverbs.so.1", {"mlx5_0": ("rc",)}, verbs, {"uverbs0": "old"}),
    )
    assert [facts.backend(name) for name in ("POSIX", "GDS", "UCX")] == [posix, None, ucx]
    assert facts.copies() == {"libucs": ("/a/libucs-14c218c5.so.0", "/b/libucs.so.0")}


def empty(absent: str, ucx: str, fabric: str, etcd: str, bench: str, transfer: str = "") -> Software:
    """Return a software of which nothing is known.

    :param absent: why; the others are the reasons for one fact each.
    """
    return Software(
        python=Fact(None, WORKER, absent),
        nixl=Fact(None, WORKER, absent),
        nixl_package=Fact(None, WORKER, absent),
        nixl_file=Fact(None, WORKER, absent),
        nixl_remedy="",
        ucx=Fact(None, WORKER, ucx),
        libfabric=Fact(None, WORKER, fabric),
        efa_installer=Fact(None, INSTALLER, "it is not installed"),
        etcd_client=Fact(None, WORKER, etcd),
        etcd_client_patched=Fact(None, WORKER, etcd),
        plugins=(),
        backends=(),
        libraries=(),
        unused={},
        ucx_variables=(),
        fabric_variables=(),
        nixl_variables=(),
        advertised=(),
        nixlbench=Fact(None, "PATH", bench),
        nixlbench_fault="",
        telemetry=Fact(None, TRANSFER, transfer or "no transfer was tried"),
        ucx_rdma=None,
    )


def test_what_a_worker_did_not_answer_is_unknown_with_its_reason(tmp_path: Path) -> None:
    nothing = software(tmp_path / "a", "# EFA installer version:\n# Debug packages installed: no")
    assert nothing == empty(*[NOT_RECORDED] * 5)
    absent = {"why": "nixlbench is not on PATH"}
    without = software(
        tmp_path / "b",
        "",
        nixlbench=absent,
        nixl={"ucx": "", "etcd_client": {"path": "", "patched": False}, "telemetry": {"error": "it ended"}},
    )
    assert without == empty(
        "", "UCX was not loaded", "libfabric was not loaded", "NIXL was built without etcd", absent["why"], "it ended"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/nixl_cu12.libs/libucs-14c218c5.so.0.0.0", "libucs"),
        ("/usr/lib/libucs.so.0", "libucs"),
        ("/a/libgrpc++-95c57f84.so.1.73.0", "libgrpc++"),
        ("/a/libnl-route-3-3ad497a3.so.200.26.0", "libnl-route-3"),
        ("/a/libetcd-cpp-api-core-ca3e2c47.so", "libetcd-cpp-api-core"),
        ("/a/libplugin_UCX.so", "libplugin_UCX"),
        ("/a/libx.software.so", "libx.software"),
        ("/a/mylibucs-14c218c5.so.0", "mylibucs-14c218c5"),
        ("/a/-14c218c5.so", "-14c218c5"),
    ],
)
def test_library_is_named_without_hash_and_version(path: str, name: str) -> None:
    assert library(path) == LoadedLibrary(name, path)


@pytest.mark.parametrize(
    ("names", "twice"),
    [
        *(
            ((f"/a/{name}-14c218c5.so.0", f"/b/{name}.so.0", "/a/libx.so"), True)
            for name in ("libucs", "libucp", "libuct")
        ),
        (("/a/libucm.so.0", "/b/libucm.so.0", "/a/libucs.so.0", "/a/libucp.so.0", "/a/libuct.so.0"), False),
    ],
)
def test_a_process_with_two_copies_of_ucx_is_recognised(names: tuple[str, ...], twice: bool) -> None:
    assert two_of_ucx(names) is twice


LOADER = "ERROR: ld.so: object '{}' from {} cannot be preloaded{}: ignored.\n"


@pytest.mark.parametrize(
    ("log", "unused"),
    [
        ("[1.5] [vm:3 :0]  parser.c:2578 UCX  WARN  unused environment variable: UCX_A\n", {"UCX_A": ""}),
        (
            "x\n[1.5] [vm:3 :0]  p.c:2 UCX  WARN  unused environment variables: UCX_A; UCX_TLSS (maybe: UCX_TLS?)\ny\n"
            "[1.5] [vm:3 :0]  p.c:2 UCX WARN unused environment variables: odd; UCX_B (maybe: UCX_C?); UCX_D (set)",
            {"UCX_A": "", "UCX_TLSS": "UCX_TLS", "UCX_B": "UCX_C", "UCX_D": ""},
        ),
        ("[1.5] [vm:3 :0]  p.c:2 UCX  INFO  unused environment variables: UCX_A\n", {}),
        (LOADER.format("/a b.so", "LD_PRELOAD", " (wrong ELF class)"), {"LD_PRELOAD": "/a b.so (wrong ELF class)"}),
        (LOADER.format("/a.so", "LD_AUDIT", " (x)"), {}),
    ],
    ids=["one", "two lines", "no warning", "preload", "another variable of the loader"],
)
def test_variables_that_nothing_uses_are_read_from_the_log(log: str, unused: dict[str, str]) -> None:
    assert unused_variables(log) == unused


def test_warnings_of_ucx_are_read_once_each_without_time_and_place() -> None:
    texts = (
        " WARN  it is slow",
        " ERROR no device  ",
        " WARN  it is slow",
        " INFO  well",
        "  WARN  unused environment variable: X",
    )
    log = "".join(f"[1.5] [vm:3 :0]  ib.c:25 UCX {text}\n" for text in texts)
    log += "x [1.5] [vm:3 :0]  ib.c:25 UCX  WARN  quoted\n[1.5] ib.c:25 UCX  WARN  without a host\n"
    assert ucx_warnings(log) == ["it is slow", "no device"]


def test_what_libibverbs_says_of_each_device_is_read() -> None:
    text = "Driver {} does not support the kernel ABI of 3 (supports 1 to 1)"
    log = "".join(
        f"{start} {text.format(name)} for device {device}\n"
        for start, name, device in (
            ("libibverbs: Warning:", "efa", "/sys/class/infiniband_verbs/uverbs0"),
            ("libibverbs: Warning:", "mlx5", "/sys/class/infiniband_verbs/uverbs1"),
            ("libibverbs: Warning:", "mlx5", "/"),
            ("another: Warning:", "mlx5", "/sys/class/infiniband_verbs/uverbs2"),
        )
    )
    log += "libibverbs: Warning:  for device /sys/class/infiniband_verbs/uverbs4\n"
    log += "libibverbs: Warning: Driver rxe is odd for device /sys/class/infiniband_verbs/uverbs3\n"
    assert other_abi(log) == {"uverbs0": text.format("efa"), "uverbs1": text.format("mlx5")}


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("[ $1 = --help ] && echo 'etcd_endpoints'; exit 1", ""),
        ("echo 'etcd' >&2", ""),
        ("echo help; echo etcd >&2; exit 2", "etcd"),
        ("echo '  libx.so: no such file  '; exit 1", "libx.so: no such file"),
        ("echo out; echo first >&2; echo last >&2; exit 127", "last"),
        ("exit 3", "it exited with code 3 and no output"),
        ("read line || exit 4", "it exited with code 4 and no output"),
    ],
)
def test_a_nixlbench_that_does_not_start_has_its_last_line_as_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, fault: str
) -> None:
    path = tmp_path / "nixlbench"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for requested in ("", str(path)):
        facts = read_software(FactsRoot(), (), requested, worker=None)
        assert (facts.nixlbench, facts.nixlbench_fault) == (Fact(str(path), str(path)), fault)
    other = str(tmp_path / "other")
    absent = read_software(FactsRoot(), (), other, worker=None)
    assert (absent.nixlbench, absent.nixlbench_fault) == (Fact(other, other), "No such file or directory")


def test_without_nixlbench_on_path_that_is_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = read_software(FactsRoot(), (), worker=None)
    assert (facts.nixlbench, facts.nixlbench_fault) == (Fact(None, "PATH", "nixlbench is not on PATH"), "")
