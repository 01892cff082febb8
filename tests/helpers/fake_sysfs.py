# SPDX-License-Identifier: Apache-2.0
"""Write recorded trees of hosts that the tests do not have, by hand from documented formats and real topologies.

The positions of GPUs, EFA devices, interfaces, bridges and NUMA nodes come from hwloc's export of a real instance in
``fixtures/topology``. The content of the kernel's files follows its documentation: ``Documentation/ABI`` for sysfs and
``proc(5)`` for procfs. The answers of NVML, of a worker with NIXL and of etcd are written by hand in the form of
``pytest-nixl facts --record``. A test compares that form with a recorded tree of the machine that runs the tests.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.hwloc import read_hwloc
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.recorded_tree import ANSWERS_FOLDER, FactsRoot

TOPOLOGY = Path(__file__).resolve().parents[2] / "fixtures" / "topology"
GPU_MEMORY = 80 << 30
VERBS = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
_NVIDIA = "10de"


class Tree:
    """A recorded tree that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._undo: list[Callable[[], object]] | None = None

    def copy(self, folder: Path) -> Tree:
        """Copy the tree, so that a test can put a fault into the copy."""
        shutil.copytree(self.folder, folder, symlinks=True, copy_function=os.link)
        return Tree(folder)

    @contextmanager
    def changed(self) -> Iterator[Tree]:
        """Let a test change the tree by its methods, which takes a tenth of a copy's time, and then undo that."""
        self._undo = []
        try:
            yield self
        finally:
            for undo in reversed(self._undo):
                undo()
            self._undo = None

    def place(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def write(self, path: str, text: str | int) -> None:
        place = self._absent(path)
        place.write_text(f"{text}\n")

    def replace(self, path: str, old: str, new: str) -> None:
        """Replace a text in a file, which must contain it."""
        text = self.place(path).read_text()
        assert old in text
        self.write(path, text.replace(old, new).rstrip("\n"))

    def link(self, path: str, target: str) -> None:
        place = self._absent(path)
        self._folder(self.place(target))
        place.symlink_to(os.path.relpath(self.place(target), place.parent))

    def remove(self, path: str) -> None:
        place = self.place(path)
        if self._undo is not None:
            aside = self.folder.with_name(f"{self.folder.name}-{len(self._undo)}")
            place.rename(aside)
            self._undo.append(partial(aside.rename, place))
        elif place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()

    def _absent(self, path: str) -> Path:
        """Return a place that a file or a link may take: its folder exists, and nothing is there any more."""
        place = self.place(path)
        self._folder(place.parent)
        if os.path.lexists(place):
            self.remove(path)  # the file may be a hard link to that of the copied tree
        if self._undo is not None:
            self._undo.append(place.unlink)
        return place

    def _folder(self, place: Path) -> None:
        if not place.is_dir():
            self._folder(place.parent)
            place.mkdir()
            if self._undo is not None:
                self._undo.append(place.rmdir)

    def answer(self, name: str, value: Any) -> None:
        self.write(f"/{ANSWERS_FOLDER}/{name}.json", json.dumps(value))

    def change(self, name: str, how: Callable[[Any], None]) -> None:
        """Change an answer in place."""
        value = json.loads(self.place(f"/{ANSWERS_FOLDER}/{name}.json").read_text())
        how(value)
        self.answer(name, value)

    def variable(self, name: str, value: str) -> None:
        """Set an environment variable of the tree."""
        self.change("environment", lambda found: found["steering"].update({name: value}))


def root_of(folder: Path, files: Mapping[str, Any], **answers: Any) -> FactsRoot:
    """Write a tree of files; a text that begins with ``->`` is a link. The named questions have these answers."""
    tree = Tree(folder)
    folder.mkdir(exist_ok=True)
    for path, text in files.items():
        if str(text).startswith("->"):
            tree.link(path, str(text)[2:])
        else:
            tree.write(path, text)
    for name, value in answers.items():
        tree.answer(name.replace("_", "-") if name == "storage_queues" else name, value)
    return FactsRoot(folder)


class Asking(FactsRoot):
    """A recorded tree in which one question is asked as on this machine."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name = name

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        if name != self._name:
            return super().ask(name, question)
        self.answers[name] = question()
        return self.answers[name]


def build(folder: Path, topology: str, *, gpu: str, rate: str) -> Tree:
    """Write the tree of a healthy host.

    :param topology: the name of a file in ``fixtures/topology``.
    :param gpu: the model of its GPUs.
    :param rate: the rate of each EFA device in the form of sysfs, such as ``100 Gb/sec (4X EDR)``.
    """
    tree = Tree(folder)
    _host(tree)
    gpus: list[str] = []
    nics: list[str] = []
    efa: list[str] = []
    for device in read_hwloc(TOPOLOGY / f"{topology}.xml"):
        path = device.path
        tree.write(f"{path}/vendor", f"0x{device.vendor}")
        tree.write(f"{path}/device", f"0x{device.device}")
        tree.write(f"{path}/class", f"0x{device.family}00")
        tree.write(f"{path}/numa_node", device.numa)
        tree.link(f"/sys/bus/pci/devices/{device.address}", path)
        if device.vendor == _NVIDIA and device.family == "0302":
            tree.link(f"{path}/driver", "/sys/bus/pci/drivers/nvidia")
            gpus.append(device.address)
        if device.fabric.startswith("rdmap"):
            _rdma(tree, device.fabric, path, len(efa), rate)
            efa.append(device.fabric)
        for name in device.others:
            if name.startswith(("enp", "ens", "eth")):
                _nic(tree, name, path)
                nics.append(name)
    _answers(tree, gpus, efa, nics, gpu)
    return tree


def p5(folder: Path) -> Tree:
    """Write the tree of a healthy p5.48xlarge with 8 H100 and 32 EFA devices of 100 Gb/s."""
    return build(folder, "p5.48xl", gpu="NVIDIA H100 80GB HBM3", rate="100 Gb/sec (4X EDR)")


def read_tree(tree: Tree) -> Facts:
    """Return the facts in a tree."""
    return gather(FactsRoot(tree.folder), backends=(), etcd="", environ={})


@cache
def facts_of(topology: str) -> Facts:
    """Return the facts of a healthy host.

    :param topology: the name of a file in ``fixtures/topology``.
    """
    with TemporaryDirectory() as folder:
        return read_tree(build(Path(folder) / "tree", topology, gpu="GPU", rate="100 Gb/sec (4X EDR)"))


def _host(tree: Tree) -> None:
    tree.write("/etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"')
    tree.write("/etc/resolv.conf", "nameserver 10.0.0.2\nsearch ec2.internal")
    tree.write("/proc/sys/kernel/hostname", "node-a")
    tree.write("/proc/sys/kernel/osrelease", "6.8.0-1030-aws")
    tree.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 7R13 Processor")
    tree.write("/proc/meminfo", "MemTotal:       2097152000 kB\nMemAvailable:   2000000000 kB")
    tree.write("/proc/self/limits", "Max locked memory         unlimited            unlimited            bytes     ")
    tree.write("/proc/self/status", "Name:\tpython\nCapEff:\t00000000a80425fb\nCpus_allowed_list:\t0-191")
    tree.write("/proc/1/cgroup", "0::/init.scope")
    tree.write(
        "/proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "enp71s0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0",
    )
    tree.write(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 11.4.0",
    )
    tree.write("/sys/devices/system/cpu/online", "0-191")
    for node in (0, 1):
        tree.write(f"/sys/devices/system/node/node{node}/cpulist", f"{node * 48}-{node * 48 + 47}")
        tree.write(f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       1048576000 kB")
    for core in range(4):
        policy = f"/sys/devices/system/cpu/cpufreq/policy{core}"
        tree.write(f"{policy}/affected_cpus", core)
        tree.write(f"{policy}/scaling_driver", "acpi-cpufreq")
        tree.write(f"{policy}/scaling_governor", "performance")
    tree.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 5128)
    tree.write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 5000)
    for module in ("efa", "ib_uverbs", "nvidia", "gdrdrv"):
        tree.write(f"/sys/module/{module}/initstate", "live")
    tree.write("/dev/gdrdrv", "")
    tree.write("/opt/amazon/efa_installed_packages", "# EFA installer version: 1.43.2\n# Debug packages installed: no")


def _rdma(tree: Tree, name: str, path: str, number: int, rate: str) -> None:
    tree.link(f"{path}/driver", "/sys/bus/pci/drivers/efa")
    tree.write(f"{path}/p2p", "NVIDIA")
    port = f"/sys/class/infiniband/{name}/ports/1"
    tree.write(f"{port}/state", "4: ACTIVE")
    tree.write(f"{port}/rate", rate)
    tree.write(f"{port}/link_layer", "Unspecified")
    tree.write(f"{port}/gids/0", f"fe80:0000:0000:0000:0000:0000:0000:{number + 1:04x}")
    tree.link(f"/sys/class/infiniband/{name}/device", path)
    tree.write(f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", name)


def _nic(tree: Tree, name: str, path: str) -> None:
    tree.link(f"{path}/driver", "/sys/bus/pci/drivers/ena")
    for attribute, value in (("operstate", "up"), ("mtu", 9001), ("type", 1)):
        tree.write(f"/sys/class/net/{name}/{attribute}", value)
    tree.link(f"/sys/class/net/{name}/device", path)


def _answers(tree: Tree, gpus: list[str], efa: list[str], nics: list[str], model: str) -> None:
    tree.answer("machine", {"architecture": "x86_64"})
    tree.answer("shm", {"size": 1 << 40, "free": 1 << 40})
    tree.answer("storage-queues", {"io_setup": "EFAULT", "io_uring_setup": "EFAULT"})
    tree.write("/proc/sys/kernel/io_uring_disabled", 0)
    tree.write("/proc/sys/fs/aio-max-nr", 65536)
    tree.write("/proc/sys/fs/aio-nr", 0)
    tree.answer("addresses", {nics[0]: ["10.0.0.11/16"]} if nics else {})
    tree.answer("uverbs", {f"/dev/infiniband/uverbs{number}": "" for number in range(len(efa))})
    tree.answer("kernel_log", {"lines": []})
    tree.answer("dma_buf", {"supported": True})
    tree.answer(
        "cuda_driver",
        {"init": 0, "devices": [{"uuid": "", "pci": pci} for pci in gpus], "dma_buf": True, "node": True},
    )
    tree.answer("peers", {})
    tree.answer("side-channels", {})
    tree.answer("ucx_files", {})
    tree.answer("nixlbench", {"path": "/usr/local/bin/nixlbench"})
    tree.answer("environment", {"steering": {}, "launcher": {}, "image": {}})
    tree.answer(
        "nvml",
        {
            "driver": "570.133.20",
            "cuda": "12.8",
            "gpus": [
                {"index": index, "name": model, "pci": address, "memory": GPU_MEMORY, "ecc": True, "uncorrected": 0,
                 "bar1": 128 << 30, "persistence": True, "nvlinks": 18}
                for index, address in enumerate(gpus)
            ],
            "pairs": [
                {"one": number, "other": other, "status": "ok"}
                for number in range(len(gpus)) for other in range(len(gpus)) if number != other
            ],
        },
    )  # fmt: skip
    plugins = "/usr/local/nixl/lib/x86_64-linux-gnu/plugins"
    backend = {
        "missing": [],
        "release": "",
        "error": "",
        "remedy": "",
        "memories": ["DRAM_SEG", "VRAM_SEG"],
        "versions": {},
    }
    tree.answer(
        "nixl",
        {
            "pid": 1, "python": "3.12.3", "host": "node-a", "nixl": "1.5.0", "nixl_package": "nixl-cu12",
            "nixl_module": "/usr/local/lib/python3.12/dist-packages/nixl_cu12/_api.py",
            "plugins": ["LIBFABRIC", "UCX"],
            "backends": {
                "LIBFABRIC": {**backend, "plugin": f"{plugins}/libplugin_LIBFABRIC.so",
                              "versions": {"libfabric": "2.3", "libfabric_path": "/opt/amazon/efa/lib/libfabric.so.1"}},
                "UCX": {**backend, "plugin": f"{plugins}/libplugin_UCX.so", "said": []},
            },
            "libraries": ["/usr/local/nixl/lib/libnixl.so", "/usr/local/ucx/lib/libucp.so.0.0.0",
                          "/usr/local/ucx/lib/libucs.so.0.0.0", "/opt/amazon/efa/lib/libfabric.so.1.28.0",
                          "/usr/local/lib/libetcd-cpp-api-core.so"],
            "ucx": "1.21.0", "unused": {},
            "ucx_variables": ["UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "UCX_GDR_COPY_BW"],
            "fabric_variables": ["FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"],
            "nixl_variables": ["NIXL_PLUGIN_DIR", "NIXL_LOG_LEVEL"],
            "advertised": ["10.0.0.11"], "telemetry": {"bytes": 4096},
            "ucx_rdma": {
                "module": "/usr/local/ucx/lib/ucx/libuct_ib.so.0.0.0", "libibverbs": VERBS,
                "offered": {name: ["srd", "ud_verbs"] for name in efa},
                "answers": {
                    name: {"listed": True, "opened": "", "registered": "", "shared_queues": 0} for name in efa
                },
                "other_abi": {},
            },
            "etcd_client": {"path": "/usr/local/lib/libetcd-cpp-api-core.so", "patched": True},
        },
    )  # fmt: skip
    tree.answer(
        "image",
        {
            "plugin_folder": plugins,
            "plugins": [
                {"name": name, "path": f"{plugins}/libplugin_{name}.so", "error": "", "missing": [], "remedies": {}}
                for name in ("LIBFABRIC", "UCX")
            ],
            "packages": {"nixl-cu12": "1.5.0"},
            "nixl_ep": {"path": "/usr/local/lib/python3.12/dist-packages/nixl_ep_cu12", "why": ""},
            "torch": {"version": "2.9.0+cu128", "cuda": "12.8", "path": "/usr/local/lib/torch/version.py"},
            "versions": {
                "cuda": ["12.8.90", "/usr/local/cuda/lib64/libcudart.so.12.8.90", ""],
                "gdrcopy": ["2.5", "/usr/lib/x86_64-linux-gnu/libgdrapi.so.2.5", ""],
                "libfabric": ["2.3.1", "/opt/amazon/efa/lib/pkgconfig/libfabric.pc", ""],
                "etcd_cpp_api": ["0.15.4", "/usr/local/lib/cmake/etcd-cpp-api/etcd-cpp-api-config-version.cmake", ""],
            },
            "device_code": [{"path": f"{plugins}/libplugin_GPUNETIO.so", "cubins": [90, 100], "ptx": []}],
            "verbs": {
                "libraries": [{"path": VERBS, "abi": 34}],
                "providers": [{"name": "efa", "abi": 34, "library": VERBS,
                               "path": "/usr/lib/x86_64-linux-gnu/libibverbs/libefa-rdmav34.so"}],
            },
        },
    )  # fmt: skip
    tree.answer(
        "etcd",
        {
            "endpoints": "http://etcd.default:2379", "source": "NIXL_ETCD_ENDPOINTS",
            "names": [{"host": "etcd.default", "addresses": ["172.20.32.220"], "fault": ""}],
            "version": "3.5.18", "latency": 0.002, "clock": 0.0,
        },
    )  # fmt: skip
