# SPDX-License-Identifier: Apache-2.0
"""The doctor reports each fault that is put into the tree of a healthy p5.48xlarge (see ``trees.py``).

``test_doctor_real_faults.py`` tests the faults that can be caused on the machine that runs the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import profile as write_profile
from helpers.fake_sysfs import Tree, p5

from pytest_nixl import cli
from pytest_nixl.checks.doctor.catalogue import checks, examine, result_lines
from pytest_nixl.checks.doctor.check import Requirements, passed
from pytest_nixl.core.resource_limits import MEMORY_REMEDY
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict

BACKENDS = ("UCX", "LIBFABRIC")
FAIL, WARN, UNKNOWN = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN


@dataclass(frozen=True)
class Fault:
    """A fault of a host.

    :param make: puts the fault into the tree of a healthy host.
    :param check: the check that must report it.
    :param values: what the check's reason must contain: names, numbers and other values.
    """

    id: str
    make: Callable[[Tree], Any]
    check: str
    values: tuple[str, ...]
    verdict: Verdict = FAIL


def port(name: str, attribute: str, text: str) -> Callable[[Tree], None]:
    return lambda tree: tree.write(f"/sys/class/infiniband/{name}/ports/1/{attribute}", text)


def symbol_errors(tree: Tree, usual: int = 7) -> None:
    """Give each device a few errors of its link, and one of them many."""
    for place in tree.place("/sys/class/infiniband").iterdir():
        count = 8841 if place.name == "rdmap80s0" else usual
        tree.write(f"/sys/class/infiniband/{place.name}/ports/1/counters/symbol_error", count)


def nvml(change: Callable[[Any], Any]) -> Callable[[Tree], None]:
    return lambda tree: tree.change("nvml", change)


def answer(name: str, **values: Any) -> Callable[[Tree], None]:
    return lambda tree: tree.change(name, lambda found: found.update(values))


def nixl(**values: Any) -> Callable[[Tree], None]:
    return answer("nixl", **values)


def backend(name: str, **values: Any) -> Callable[[Tree], None]:
    return lambda tree: tree.change("nixl", lambda found: found["backends"][name].update(values))


def ucx_refuses(name: str) -> Callable[[Tree], None]:
    """UCX refuses the transport ``name`` with its usual message."""
    words = f"transport '{name}' is not available, please use one or more of: cma, cuda_copy, sm, srd, tcp, ud"
    return backend("UCX", error="nixlBackendError: NIXL_ERR_BACKEND", memories=[], said=[words])


def variable(name: str, value: str) -> Callable[[Tree], None]:
    return lambda tree: tree.variable(name, value)


def ucx_rdma(device: str, **values: Any) -> Callable[[Tree], None]:
    """UCX's libibverbs answers otherwise for a device."""
    return lambda tree: tree.change("nixl", lambda found: found["ucx_rdma"]["answers"][device].update(values))


def not_offered(device: str) -> Callable[[Tree], None]:
    return lambda tree: tree.change("nixl", lambda found: found["ucx_rdma"]["offered"].pop(device))


def not_listed(device: str) -> Callable[[Tree], None]:
    return both(not_offered(device), ucx_rdma(device, listed=False, shared_queues=None))


def both(*makers: Callable[[Tree], Any]) -> Callable[[Tree], None]:
    def make(tree: Tree) -> None:
        for maker in makers:
            maker(tree)

    return make


def without_efa(tree: Tree, name: str) -> None:
    tree.remove(f"/sys/class/infiniband/{name}")
    for node in tree.place("/sys/class/infiniband_verbs").iterdir():
        if (node / "ibdev").read_text().strip() == name:
            tree.remove(f"/sys/class/infiniband_verbs/{node.name}")


def limit(soft: int) -> Callable[[Tree], None]:
    line = f"Max locked memory         {soft}                {soft}                bytes     "
    return lambda tree: tree.write("/proc/self/limits", line)


def no_peermem(tree: Tree) -> None:
    tree.answer("dma_buf", {"supported": False})
    for place in list(tree.folder.glob("sys/devices/**/p2p")):
        tree.write(str(place.relative_to(tree.folder)), "NONE")


def pairs_of(status: str, *wanted: tuple[int, int]) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for pair in found["pairs"]:
            if (pair["one"], pair["other"]) in wanted:
                pair["status"] = status

    return change


def missing(*words: str, versions: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [{"soname": word.split(",")[0].split(" ")[0], "versions": list(versions), "words": word} for word in words]


def xid(
    number: int, text: str = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
) -> Callable[[Tree], None]:
    line = f"NVRM: Xid (PCI:0000:53:00): {number}, {text}"
    return lambda tree: tree.answer("kernel_log", {"lines": [line]})


def recovery(action: str) -> Callable[[Tree], None]:
    return xid(154, f"GPU recovery action changed from 0x1 (GPU Reset Required) to {action}")


def cuda(init: int | None = 0, shown: int = 8, visible: str | None = None, **answer: Any) -> Callable[[Tree], None]:
    """Give the CUDA driver's answer, with the first GPUs of the host.

    :param init: the result of cuInit; None: there is none.
    :param shown: how many GPUs CUDA shows if it starts.
    :param visible: CUDA_VISIBLE_DEVICES.
    """

    def make(tree: Tree) -> None:
        gpus = json.loads(tree.place("/pytest-nixl/nvml.json").read_text())["gpus"]
        devices = [{"uuid": "", "pci": gpu["pci"]} for gpu in gpus[:shown]]
        given = {} if init is None else {"init": init, "devices": devices} if init == 0 else {"init": init}
        tree.answer("cuda_driver", {"node": True, **given, **answer})
        if visible is not None:
            tree.variable("CUDA_VISIBLE_DEVICES", visible)

    return make


def nvlinks(count: int, name: str = "", gpus: int = 8) -> Callable[[Any], None]:
    """Give each GPU this many active NVLinks, and another name."""

    def change(answer: Any) -> None:
        answer["gpus"] = [{**gpu, "nvlinks": count, "name": name or gpu["name"]} for gpu in answer["gpus"][:gpus]]

    return change


def mig(instances: int, *gpus: int) -> Callable[[Any], None]:
    """Let these GPUs be in MIG mode with this many instances each."""

    def change(answer: Any) -> None:
        for number in gpus:
            answer["gpus"][number].update(mig=True, instances=instances)

    return change


def bar1(size: int) -> Callable[[Any], None]:
    def change(answer: Any) -> None:
        for gpu in answer["gpus"]:
            gpu["bar1"] = size

    return change


def other_switch(tree: Tree) -> None:
    """Move GPU 0 to another PCI root."""
    tree.remove("/sys/bus/pci/devices/0000:53:00.0")
    tree.link("/sys/bus/pci/devices/0000:53:00.0", "/sys/devices/pci0000:00/0000:00:1e.0/0000:53:00.0")
    for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200"), ("numa_node", "0")):
        tree.write(f"/sys/devices/pci0000:00/0000:00:1e.0/0000:53:00.0/{name}", text)


def unbound(tree: Tree) -> None:
    [place] = tree.folder.glob("sys/devices/pci*/**/0000:4f:00.0")
    tree.remove(f"{place.relative_to(tree.folder)}/driver")
    without_efa(tree, "rdmap79s0")


FIVE = "/proc/driver/nvidia/version"
#: Results of cuInit, and what is said of each.
CUDA_CODES = (
    (46, ("compute mode",)), (100, ("CUDA_ERROR_NO_DEVICE",)), (101, ("CUDA_ERROR_INVALID_DEVICE",)),
    (802, ("fabric manager",)), (803, ("libcuda.so.1", "kernel's driver")), (804, ("forward compatibility",)),
    (805, ("MPS",)), (999, ("nvidia_uvm",)), (34, ("cuInit returned 34",)),
)  # fmt: skip
FAULTS = (
    # Locked and shared memory.
    Fault("memlock-64k", limit(65536), "memlock", ("64 KiB",)),
    Fault("memlock-8m", limit(8 << 20), "memlock", ("8 MiB", "/proc/self/limits")),
    Fault("memlock-finite", limit(16 << 30), "memlock", ("16 GiB",), WARN),
    Fault("shm-64m", answer("shm", size=64 << 20, free=64 << 20), "shm", ("/dev/shm", "64 MiB")),
    Fault("shm-full", answer("shm", size=8 << 30, free=1 << 20), "shm", ("/dev/shm", "8 GiB", "1 MiB")),
    Fault("shm-absent", lambda tree: tree.answer("shm", {"why": "No such file or directory"}), "shm",
          ("/dev/shm", "No such file")),
    Fault("shm-little", answer("shm", size=512 << 20, free=512 << 20), "shm", ("512 MiB",), WARN),
    Fault("huge-pages-none", lambda tree: tree.write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 0),
          "huge-pages", ("no huge pages",), WARN),
    Fault("huge-pages-spent", lambda tree: tree.write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0),
          "huge-pages", ("0 of 5128", "2 MiB"), WARN),
    # Processors.
    Fault("governor", lambda tree: tree.write("/sys/devices/system/cpu/cpufreq/policy3/scaling_governor", "powersave"),
          "cpu-governor", ("1 core of the 192", "3 (governor powersave of acpi-cpufreq", "policy3"), WARN),
    Fault("cores-of-node-0", lambda tree: tree.replace("/proc/self/status", "0-191", "0-40"), "numa-cores",
          ("cores 0-40 of NUMA node 0", "GPU 4 is at node 1", "GPU 7 is at node 1"), WARN),
    # RDMA devices.
    Fault("efa-missing", lambda tree: without_efa(tree, "rdmap79s0"), "rdma-devices",
          ("31 EFA devices", "32")),
    Fault("efa-none", lambda tree: tree.remove("/sys/class/infiniband"), "rdma-devices",
          ("0 EFA devices", "32", "none")),
    Fault("efa-without-driver", unbound, "rdma-devices", ("1 network card", "0000:4f:00.0")),
    Fault("port-down", port("rdmap80s0", "state", "1: DOWN"), "rdma-ports",
          ("1 of 32", "rdmap80s0 (DOWN)")),
    Fault("port-init", port("rdmap80s0", "state", "2: INIT"), "rdma-ports", ("rdmap80s0 (INIT)",)),
    Fault("link-errors", symbol_errors, "rdma-ports",
          ("the link of 1 of 32", "rdmap80s0 has counted 8841 symbol_error, and half of the others at most 7"), WARN),
    Fault("rate-low", port("rdmap81s0", "rate", "25 Gb/sec (1X EDR)"), "rdma-rate",
          ("1 RDMA device", "100 Gb/s", "rdmap81s0 at 25 Gb/s")),
    Fault("rate-odd", port("rdmap81s0", "rate", "200 Gb/sec (4X HDR)"), "rdma-rate",
          ("100 Gb/s", "rdmap81s0 at 200 Gb/s"), WARN),
    Fault("uverbs-closed", answer("uverbs", **{"/dev/infiniband/uverbs3": "Operation not permitted"}), "uverbs-open",
          ("1 of 32", "/dev/infiniband/uverbs3", "rdmap82s0", "Operation not permitted")),
    Fault("uverbs-absent", lambda tree: tree.answer("uverbs", {f"/dev/infiniband/uverbs{n}": "No such file or directory"
                                                             for n in range(32)}), "uverbs-open",
          ("32 of 32", "No such file or directory")),
    Fault("uverbs-module", lambda tree: tree.remove("/sys/class/infiniband_verbs"), "uverbs-open",
          ("ib_uverbs", "not loaded")),
    # From the devices to UCX. tests/machines makes those that soft-RoCE can have, and more.
    Fault("srq-none", not_offered("rdmap79s0"), "ucx-uses-rdma", ("1 of 32", "rdmap79s0: it has no shared receive")),
    Fault("kernel-abi", both(not_listed("rdmap79s0"), lambda tree: tree.change("nixl", lambda found: found[
          "ucx_rdma"]["other_abi"].update(rdmap79s0="Driver efa does not support the kernel ABI of 3"))),
          "ucx-uses-rdma", ("libibverbs says: Driver efa does not support the kernel ABI of 3",)),
    Fault("not-found", not_listed("rdmap79s0"), "ucx-uses-rdma",
          ("does not find its provider /usr/lib/x86_64-linux-gnu/libibverbs/libefa-rdmav34.so",)),
    Fault("not-opened", ucx_rdma("rdmap79s0", opened="Too many open files"), "ucx-uses-rdma",
          ("rdmap79s0: libibverbs cannot open it: Too many open files",)),
    Fault("no-module", lambda tree: tree.change("nixl", lambda found: found["ucx_rdma"].update(module="")),
          "ucx-uses-rdma", ("32 of 32", "no RDMA module (libuct_ib.so)")),
    Fault("module-excluded", both(variable("UCX_MODULES", "^ib"), lambda tree: tree.change("nixl", lambda found: found[
          "ucx_rdma"].update(module=""))), "ucx-uses-rdma", ("32 of 32", "UCX_MODULES=^ib keeps UCX from loading",)),
    Fault("node-closed", answer("uverbs", **{"/dev/infiniband/uverbs3": "Operation not permitted"}), "ucx-uses-rdma",
          ("1 of 32", "rdmap82s0: /dev/infiniband/uverbs3 cannot be opened: Operation not permitted")),
    Fault("not-active", both(not_offered("rdmap80s0"), port("rdmap80s0", "state", "1: DOWN")), "ucx-uses-rdma",
          ("1 of 32", "rdmap80s0: its port is DOWN")),
    Fault("gid-index", both(not_offered("rdmap79s0"), variable("UCX_IB_GID_INDEX", "7")), "ucx-uses-rdma",
          ("1 of 32", "rdmap79s0: UCX_IB_GID_INDEX=7 names no GID of it: it has 0")),
    Fault("gid-link-local", backend("UCX", said=["uct_iface_open(srd/rdmap79s0:1) failed: Address not valid"]),
          "ucx-uses-rdma", ("1 of 32", "rdmap79s0: its only GID is link-local (fe80:", "UCX says: Address not valid")),
    Fault("no-device-chosen", variable("UCX_NET_DEVICES", "enp71s0"), "ucx-uses-rdma",
          ("UCX_NET_DEVICES=enp71s0 leaves out every RDMA device: ",), WARN),
    Fault("no-device-chosen-by-port", variable("UCX_NET_DEVICES", "enp71s0:1"), "ucx-uses-rdma",
          ("UCX_NET_DEVICES=enp71s0:1 leaves out every RDMA device: ",), WARN),
    Fault("no-gid", both(not_offered("rdmap79s0"), port("rdmap79s0", "gids/0", "0000:0000:0000:0000:0000:0000:0000:0000"
          )), "ucx-uses-rdma", ("rdmap79s0: it has no GID",)),
    Fault("iwarp", both(not_offered("rdmap79s0"), lambda tree: tree.write("/sys/class/infiniband/rdmap79s0/node_type",
          "4: RNIC")), "ucx-uses-rdma", ("rdmap79s0: it speaks iWARP, which UCX does not",)),
    Fault("not-asked", lambda tree: tree.change("nixl", lambda found: found.update(ucx_rdma=None)), "ucx-uses-rdma",
          ("UCX was not asked",), UNKNOWN),
    # Interfaces, addresses, names.
    Fault("nic-down", lambda tree: tree.write("/sys/class/net/enp71s0/operstate", "down"), "nics-up",
          ("enp71s0 is down",)),
    Fault("mtu-odd", lambda tree: tree.write("/sys/class/net/enp72s0/mtu", 1500), "mtu",
          ("ena", "enp71s0 has 9001", "enp72s0 has 1500")),
    Fault("link-local-chosen", both(answer("addresses", enp72s0=["169.254.0.1/16"]),
                                    nixl(advertised=["169.254.0.1", "10.0.0.11"])), "link-local",
          ("link-local", "169.254.0.1")),
    Fault("link-local-only", both(answer("addresses", enp71s0=["169.254.0.1/16"]), nixl(advertised=[])), "link-local",
          ("link-local", "169.254.0.1/16 of enp71s0")),
    Fault("name-unknown", answer("etcd", names=[{"host": "etcd.default", "addresses": [],
                                                 "fault": "Name or service not known"}]), "names-resolve",
          ("etcd.default (Name or service not known)",)),
    Fault("host-network", lambda tree: tree.write("/var/run/secrets/kubernetes.io/serviceaccount/namespace", "bench"),
          "names-resolve", ("Services", "/etc/resolv.conf"), WARN),
    Fault("name-ipv6-only", answer("etcd", names=[{"host": "etcd.default", "addresses": ["fd00::1"], "fault": ""}]),
          "names-resolve", ("etcd.default", "IPv4")),
    Fault("peer-lost", answer("peers", **{"node-b": {"addresses": ["10.0.0.12"],
          "fault": "10.0.0.12 port 1: no answer"}}),
          "peer-reachable", ("1 of 1 host", "node-b: 10.0.0.12 port 1: no answer")),
    Fault("side-channel-closed", answer("side-channels", prefill={"fault": "prefill port 5600: connection refused"}),
          "side-channel", ("1 of 1 side channel", "prefill port 5600: connection refused")),
    # GPUs.
    Fault("gpu-missing", nvml(lambda found: found["gpus"].pop()), "gpus",
          ("7 GPUs", "8", "7 NVIDIA H100 80GB HBM3", "0000")),
    Fault("gpu-other-model", nvml(lambda found: found["gpus"][2].update(name="NVIDIA A100-SXM4-40GB")), "gpus",
          ("1 GPU", "H100", "NVIDIA A100-SXM4-40GB")),
    Fault("gpu-unusable", nvml(lambda found: found.update(gpus=found["gpus"][:7], unusable=[
          {"index": 7, "error": "GPU is lost"}])), "gpus", ("NVML cannot use 1 of 8 GPUs: GPU 7 (GPU is lost)",)),
    Fault("gpu-without-a-name", nvml(lambda found: found["gpus"][2].update(name="")), "gpus",
          ("the model of at least one is unknown",), UNKNOWN),
    Fault("gpu-no-driver", both(lambda tree: tree.remove("/proc/driver"), lambda tree: tree.answer("nvml",
          {"why": "no"})),
          "gpus", ("8 GPUs", "no NVIDIA driver")),
    Fault("driver-updated-under-us", nvml(lambda found: found.update(driver="550.54.15")), "gpu-driver",
          ("570.133.20", "550.54.15")),
    Fault("driver-mismatch", lambda tree: tree.answer("nvml",
          {"why": "NVML cannot be initialised: RM has detected an NVML/RM version mismatch."}), "gpu-driver",
          ("570.133.20", "NVML cannot be initialised: RM has detected an NVML/RM version mismatch.")),
    Fault("driver-too-old", both(nixl(nixl_package="nixl-cu13"), lambda tree: tree.replace(FIVE, "570.133.20",
          "550.54.15"),
                                 nvml(lambda found: found.update(driver="550.54.15", cuda="12.4"))), "gpu-driver",
          ("550.54.15", "12.4", "nixl-cu13", "CUDA 13")),
    Fault("nvml-missing", lambda tree: tree.answer("nvml", {"why": "NVML (libnvidia-ml.so.1) was not found"}),
          "gpu-driver", ("570.133.20", "NVML (libnvidia-ml.so.1) was not found"), UNKNOWN),
    *(Fault(f"cuda-{code}", cuda(code), "gpu-driver", ("CUDA does not start", *values)) for code, values in CUDA_CODES),
    Fault("mig-without-instances", nvml(mig(0, 3)), "gpus",
          ("GPU 3 (0000:", "in MIG mode without an instance")),
    Fault("mig-without-instances-anywhere", both(nvml(mig(0, *range(8))), cuda(100)), "gpus",
          ("GPU 0 (0000:53:00.0), GPU 1", "in MIG mode without an instance")),
    Fault("cuda-without-mig-instances", both(nvml(mig(0, *range(8))), cuda(100)), "gpu-driver",
          ("CUDA shows no GPU: all are in MIG mode and have no instance",)),
    Fault("mig", nvml(mig(2, 3)), "gpus", ("in MIG mode: GPU 3: CUDA gives a process one part",), WARN),
    Fault("cuda-fails-without-the-variable-too", cuda(100, visible="7", without_variable=802), "gpu-driver",
          ("CUDA_ERROR_SYSTEM_NOT_READY",)),
    Fault("cuda-silent", cuda(None, why="the CUDA driver does not answer: no answer within 20 s"), "gpu-driver",
          ("no answer within 20 s",)),
    Fault("libcuda-missing", cuda(None, library="libcuda.so.1: cannot open shared object file"), "ucx-cuda",
          ("libcuda.so.1: cannot open shared object file",)),
    Fault("cuda-shows-fewer", cuda(shown=7), "gpus", ("7 of the 8 GPUs", "GPU 7 (0000:")),
    Fault("ucx-without-cuda-runtime", backend("UCX", versions={"ucx_cuda_lacks": "libucm_cuda needs libcudart.so.12"}),
          "ucx-cuda", ("libucm_cuda needs libcudart.so.12", "UCX takes GPU memory for host memory")),
    Fault("p2p-off", nvml(pairs_of("the chipset does not support it", (0, 5), (5, 0))), "gpu-p2p",
          ("2 of 56", "GPU 0", "GPU 5", "the chipset does not support it")),
    Fault("nvlink-down", nvml(lambda found: found["gpus"][4].update(nvlinks=17)), "gpu-nvlink",
          ("1 GPU", "18", "GPU 4 has 17")),
    *(Fault(f"nvlinks-{count}", nvml(nvlinks(count)), "gpu-nvlink", ("8 GPUs", f"GPU 0 has {count} of 18"))
      for count in (0, 4, 12, 15)),
    Fault("p2p-off-with-nvlink", nvml(pairs_of("it is not supported", *permutations(range(8), 2))), "gpu-p2p",
          ("56 of 56", "it is not supported")),
    Fault("peermem-absent", no_peermem, "gpu-direct", ("nvidia_peermem", "no DMA-BUF")),
    Fault("peermem-unknown", both(no_peermem, lambda tree: tree.answer("dma_buf", {"why": "it did not answer"})),
          "gpu-direct", ("DMA-BUF", "it did not answer"), UNKNOWN),
    Fault("peermem-closed-modules", both(no_peermem, lambda tree: tree.answer("dma_buf", {"why": "it did not answer"}),
                                         lambda tree: tree.replace(FIVE, "Open ", "")),
          "gpu-direct", ("nvidia_peermem", "not the open ones")),
    Fault("gdrcopy-node", lambda tree: tree.remove("/dev/gdrdrv"), "gdrcopy", ("/dev/gdrdrv",),
          WARN),
    Fault("xid-79", xid(79), "gpu-xid", ("1 error", "Xid 79 of 0000:53:00 (the GPU has fallen off the bus)")),
    Fault("xid-31", xid(31), "gpu-xid", ("1 error", "Xid 31 of 0000:53:00"), WARN),
    *(Fault(f"xid-{number}", xid(number), "gpu-xid", ("1 error", f"Xid {number} of 0000:53:00 ({title})"))
      for number, title in ((62, "the GPU's internal microcontroller halted"), (144, "NVLink error"),
                            (149, "NVLink error"))),
    Fault("xid-121", xid(121), "gpu-xid", ("Xid 121 of 0000:53:00 (corrected errors of the link",), WARN),
    Fault("xid-149-nonfatal", xid(149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x004505c6 0x00000000)"), "gpu-xid",
          ("Xid 149 of 0000:53:00 (NVLink error)",), WARN),
    Fault("xid-154", recovery("0x2 (Node Reboot Required)"), "gpu-xid", ("Xid 154", ": 0x2 (Node Reboot Required)")),
    Fault("xid-154-none", recovery("0x0 (None)"), "gpu-xid", ("Xid 154", ": 0x0 (None)"), WARN),
    Fault("xid-unreadable", lambda tree: tree.answer("kernel_log", {"why": "the kernel's log cannot be read"}),
          "gpu-xid",
          ("the kernel's log cannot be read",), UNKNOWN),
    Fault("ecc-uncorrected", nvml(lambda found: found["gpus"][6].update(uncorrected=2)), "gpu-ecc", ("GPU 6 has 2",)),
    Fault("bar1-small", nvml(lambda found: found["gpus"][0].update(bar1=256 << 20)), "gpu-bar1",
          ("GPU 0: 256 MiB of 80 GiB",), WARN),
    Fault("persistence-off", nvml(lambda found: found["gpus"][1].update(persistence=False)), "gpu-persistence",
          ("GPU 1",), WARN),
    Fault("gpu-far-from-nics", other_switch, "gpu-nics",
          ("4", "GPU 0 has 0")),
    # NIXL and its libraries.
    Fault("nixl-absent", lambda tree: tree.answer("nixl", {"why": "NIXL cannot be loaded: No module named 'nixl'"}),
          "nixl-loads", ("No module named 'nixl'",)),
    Fault("backend-name", backend("LIBFABRIC", error="NIXL has no plugin LIBFABRIC: it has UCX", plugin=""),
          "backend-loads", ("LIBFABRIC", "NIXL has no plugin LIBFABRIC: it has UCX")),
    Fault("plugin-absent", backend("LIBFABRIC", plugin=""), "plugin-libraries",
          ("no plugin file", "LIBFABRIC")),
    Fault("library-absent", backend("UCX", error="nixlNotFoundError: NIXL_ERR_NOT_FOUND",
                                    missing=missing("libucp.so.0, which libplugin_UCX.so needs, was not found")),
          "plugin-libraries", ("libucp.so.0, which libplugin_UCX.so needs, was not found",)),
    Fault("symbol-version", backend("LIBFABRIC", error="no", missing=missing(
        "/usr/lib/libfabric.so.1 lacks the symbol version FABRIC_1.10 that libplugin_LIBFABRIC.so needs",
        versions=("FABRIC_1.10",))), "plugin-libraries",
          ("/usr/lib/libfabric.so.1", "FABRIC_1.10", "libplugin_LIBFABRIC.so")),
    Fault("two-libucs", lambda tree: tree.change("nixl",
          lambda found: found["libraries"].append("/opt/hpcx/libucs.so.0")),
          "libraries-once",
          ("2 copies of libucs", "/usr/local/ucx/lib/libucs.so.0.0.0", "/opt/hpcx/libucs.so.0")),
    Fault("two-libibverbs", lambda tree: tree.change("nixl",
          lambda found: found["libraries"].extend([
              "/opt/venv/nixl_cu12.libs/libibverbs-1de1263b.so.1", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"])),
          "libraries-once",
          ("libibverbs-1de1263b.so.1", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "139"), WARN),
    Fault("etcd-client-absent", nixl(etcd_client={"path": "", "patched": False}), "etcd-client-library",
          ("libetcd-cpp-api",)),
    Fault("nixlbench-library", answer("nixlbench", fault="error while loading shared libraries: libgflags.so.2.2"),
          "nixlbench-starts",
          ("/usr/local/bin/nixlbench", "error while loading shared libraries: libgflags")),
    # etcd.
    Fault("etcd-refused", answer("etcd", fault="etcd at http://etcd.default:2379: connection refused",
          remedy="start it"), "etcd-answers",
          ("http://etcd.default:2379", "connection refused")),
    Fault("etcd-old", answer("etcd", version="3.3.27"), "etcd-version", ("3.3.27", "3.4")),
    Fault("etcd-slow", answer("etcd", latency=0.35), "etcd-latency", ("350 ms",), WARN),
    Fault("etcd-too-slow", answer("etcd", latency=2.5), "etcd-latency", ("2.5e+03 ms",)),
    Fault("etcd-clock", answer("etcd", clock=-90.0), "etcd-clock", ("90 s behind",), WARN),
    # Variables.
    Fault("misspelt-ucx", both(variable("UCX_TSL", "rc"), nixl(unused={"UCX_TSL": "UCX_TLS"})), "variables-known",
          ("UCX_TSL (did you mean UCX_TLS?)",)),
    Fault("misspelt-fi", variable("FI_PROVIDERS", "efa"), "variables-known",
          ("FI_PROVIDERS (did you mean FI_PROVIDER?)",)),
    Fault("misspelt-nixl", variable("NIXL_ETCD_ENDPOINT", "http://e:1"), "variables-known",
          ("NIXL_ETCD_ENDPOINT (did you mean NIXL_ETCD_ENDPOINTS?)",)),
    Fault("ucx-tls-tcp", variable("UCX_TLS", "tcp,cuda_copy"), "transports-allowed",
          ("UCX_TLS=tcp,cuda_copy", "RDMA")),
    Fault("ucx-tls-not-ib", variable("UCX_TLS", "^ib"), "transports-allowed", ("UCX_TLS=^ib", "RDMA")),
    Fault("ucx-tls-rc", both(variable("UCX_TLS", "rc,cuda"), ucx_refuses("rc")), "transports-allowed",
          ("UCX_TLS=rc,cuda", "no device for rc")),
    Fault("ucx-tls-rc-unused", both(variable("UCX_TLS", "rc,cuda"), ucx_refuses("rc"), lambda tree: tree.change(
          "nixl", lambda found: found["ucx_rdma"]["offered"].clear())), "transports-allowed",
          ("UCX uses none of this host's RDMA devices (rdmap79s0", "ucx-uses-rdma says why")),
    Fault("ucx-tls-misspelt", variable("UCX_TLS", "rcc,cuda_copi,srd"), "transports-allowed",
          ("'rcc', 'cuda_copi'", "did you mean rc, cuda_copy?"), WARN),
    Fault("ucx-tls-empty", variable("UCX_TLS", ""), "transports-allowed", ("UCX_TLS=", "an empty list")),
    Fault("ucx-tls-no-cuda", variable("UCX_TLS", "ud,sm"), "transports-allowed",
          ("UCX_TLS=ud,sm", "cuda_copy and cuda_ipc"), WARN),
    Fault("ucx-tls-refused", both(variable("UCX_TLS", "ud,banana"), ucx_refuses("banana")), "transports-allowed",
          ("UCX_TLS=ud,banana allows no CUDA memory, but this host has an NVIDIA GPU, so NIXL refuses UCX",)),
    Fault("ucx-tls-not-refused", both(variable("UCX_TLS", "ud,banana,cuda"), backend("UCX", error="another cause")),
          "transports-allowed", ("contains names that UCX does not know: 'banana'",), WARN),
    Fault("ucx-tls-tcp-refused", both(variable("UCX_TLS", "tcp"), backend("UCX", error="it refuses")),
          "transports-allowed", ("UCX_TLS=tcp excludes every RDMA transport", "RDMA; and it allows no CUDA memory")),
    Fault("ucx-tls-tcp-not-created", both(variable("UCX_TLS", "tcp"), backend("UCX", error="it refuses")),
          "backend-loads", ("UCX cannot be created: it refuses; UCX_TLS=tcp excludes every RDMA transport",)),
    Fault("ucx-tls-no-cuda-old", both(variable("UCX_TLS", "ud,sm"), nixl(nixl="1.4.1"), backend("UCX", error="no")),
          "transports-allowed", ("UCX_TLS=ud,sm excludes cuda_copy and cuda_ipc",), WARN),
    Fault("ucx-device", variable("UCX_NET_DEVICES", "rdmap79s1:1"), "devices-there",
          ("UCX_NET_DEVICES", "rdmap79s1", "did you mean rdmap79s0?")),
    Fault("fi-provider", variable("FI_PROVIDER", "efaa"), "provider-there",
          ("FI_PROVIDER=efaa", "did you mean efa?")),
    Fault("fi-provider-tcp", variable("FI_PROVIDER", "tcp"), "provider-there", ("FI_PROVIDER=tcp", "EFA")),
    Fault("fi-provider-no-efa", both(variable("FI_PROVIDER", "efa"), lambda tree: tree.remove("/sys/class/infiniband")),
          "provider-there", ("FI_PROVIDER=efa", "no EFA")),
    Fault("namespace-slash", variable("NIXL_ETCD_NAMESPACE", "/nixl/agents/"), "namespace-plain",
          ("/nixl/agents/", "ends with a slash"), WARN),
    Fault("namespace-no-slash", variable("NIXL_ETCD_NAMESPACE", "nixl"), "namespace-plain",
          ("=nixl", "without a slash"), WARN),
    Fault("nixl-versions", lambda tree: tree.change("image", lambda found: found["packages"].update(
        {"nixl": "1.5.0", "nixl-cu13": "1.3.2"})), "nixl-packages-agree",
          ("nixl-cu12 1.5.0", "nixl-cu13 1.3.2", "nixl-cu12 1.5.0 is loaded")),
    Fault("nixl-ep", both(variable("VLLM_ALL2ALL_BACKEND", "nixl_ep"), answer("image", nixl_ep={
        "path": "/usr/local/nixl_ep_cu12", "why": "it is built for torch 2.11, and torch is 2.9.0"})),
          "nixl-packages-agree", ("VLLM_ALL2ALL_BACKEND=nixl_ep", "torch 2.11", "2.9.0")),
    Fault("engine-without-efa", variable("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX"), "engine-backend-fits",
          ("SGLANG_DISAGGREGATION_NIXL_BACKEND=UCX", "32 EFA devices", "LIBFABRIC", "SGLang")),
    Fault("expandable-segments", variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), "variables-agree",
          ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "600")),
    Fault("side-channel-elsewhere", variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.12"), "variables-agree",
          ("VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.12", "this one has 10.0.0.11")),
    Fault("telemetry-off", both(variable("NIXL_TELEMETRY_ENABLE", "n"), nixl(telemetry={
        "error": "nixlNoTelemetryError: NIXL_ERR_NO_TELEMETRY"})), "telemetry-in-process",
          ("NIXL_TELEMETRY_ENABLE=n", "1.5.0", "nixlNoTelemetryError")),
    Fault("telemetry-off-untried", both(variable("NIXL_TELEMETRY_ENABLE", "Off"), nixl(telemetry={})),
          "telemetry-in-process", ("NIXL_TELEMETRY_ENABLE=Off", "1.5.0")),
    Fault("telemetry-unread", nixl(telemetry={"error": "nixlBackendError: NIXL_ERR_BACKEND"}), "telemetry-in-process",
          ("nixlBackendError",), UNKNOWN),
    Fault("namespace-quoted", variable("NIXL_ETCD_NAMESPACE", '"/nixl"'), "namespace-plain", ('"/nixl"', "quotes")),
    Fault("two-etcds", both(variable("NIXL_ETCD_ENDPOINTS", "http://a:2379"), variable("ETCD_ENDPOINTS",
          "http://b:2379")),
          "variables-agree", ("NIXL_ETCD_ENDPOINTS=http://a:2379", "ETCD_ENDPOINTS=http://b:2379")),
    Fault("proxy", both(variable("NIXL_ETCD_ENDPOINTS", "http://a:2379"), variable("https_proxy", "http://proxy:3128")),
          "variables-agree", ("https_proxy", "gRPC")),
    Fault("efa-rdma-off", variable("FI_EFA_USE_DEVICE_RDMA", "0"), "variables-agree", ("FI_EFA_USE_DEVICE_RDMA=0",)),
    Fault("p2p-disabled", variable("FI_HMEM_DISABLE_P2P", "1"), "variables-agree",
          ("FI_HMEM_DISABLE_P2P=1",)),
    Fault("gpus-hidden", variable("CUDA_VISIBLE_DEVICES", ""), "variables-agree",
          ("CUDA_VISIBLE_DEVICES", "every GPU")),
    *(Fault(f"gpus-hidden-{visible}", cuda(code, visible=visible, without_variable=0), "variables-agree",
            (f"CUDA_VISIBLE_DEVICES={visible} ", *values))
      for visible, code, values in (
          ("8", 100, ("0 of this host's 8 GPUs", "'8'")), ("-1", 100, ("every GPU",)), ("8,0", 100, ("'8'",)),
          ("0,0", 101, ("twice (0)",)), ("nonsense", 100, ("'nonsense'",)), ("GPU-deadbeef", 100, ("'GPU-deadbeef'",)),
          ("MIG-deadbeef", 100, ("every GPU",)))),
    Fault("gpus-list-ends", cuda(shown=1, visible="0,8"), "variables-agree",
          ("CUDA_VISIBLE_DEVICES=0,8 shows 1 GPU", "'8'")),
    Fault("gpus-hidden-driver-not-asked", both(variable("CUDA_VISIBLE_DEVICES", "0,0"),
          lambda tree: tree.remove("/pytest-nixl/cuda_driver.json")), "variables-agree", ("twice (0)",)),
    Fault("gpu-direct-off", variable("UCX_IB_GPU_DIRECT_RDMA", "No"), "variables-agree",
          ("UCX_IB_GPU_DIRECT_RDMA=No ",)),
    Fault("fork-safe", variable("RDMAV_FORK_SAFE", "1"), "variables-agree", ("RDMAV_FORK_SAFE", "huge pages")),
)  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


@pytest.fixture
def tree(healthy: Tree) -> Iterator[Tree]:
    with healthy.changed() as tree:
        yield tree


@pytest.fixture(scope="module")
def wanted() -> Requirements:
    return Requirements(load_profile("p5.48xlarge"), BACKENDS)


def facts_of(tree: Tree) -> Facts:
    return gather(FactsRoot(tree.folder), backends=BACKENDS, environ={})


def verdicts(facts: Facts, wanted: Requirements) -> dict[str, Judgement]:
    return {id: check.judge(facts, wanted) for id, check in checks().items()}


def bad(judged: dict[str, Judgement]) -> Iterator[str]:
    return (id for id, one in judged.items() if one.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE))


#: The checks that do not apply to the healthy host, by its profile.
NOT_ASKED = {"image-versions", "nic-rate", "peer-reachable", "side-channel", "storage-queues", "transfers-arrive"}


def test_healthy_host_passes_every_check(healthy: Tree, wanted: Requirements) -> None:
    judged = verdicts(facts_of(healthy), wanted)
    assert list(bad(judged)) == []
    assert {id for id, one in judged.items() if one.verdict is Verdict.NOT_APPLICABLE} == NOT_ASKED


def test_one_cause_is_one_line_with_the_other_checks_below_it(tree: Tree, wanted: Requirements) -> None:
    tree.answer("nixl", {"why": "No module named 'nixl'"})
    answers = examine(facts_of(tree), wanted, gate=False)
    failing = [one.check.id for one in answers if one.judgement.reason == "No module named 'nixl'"]
    assert failing[:3] == ["nixl-loads", "backend-loads", "plugin-libraries"]
    told = [line.text for line in result_lines(answers)]
    [place] = [number for number, text in enumerate(told) if text.startswith("FAIL") and "named 'nixl'" in text]
    assert told[place].split()[:2] == ["FAIL", "nixl-loads"]
    assert told[place + 1].strip().startswith("remedy: ")
    assert told[place + 2].strip() == f"the same: {', '.join(failing[1:])}"
    assert f"{len(failing)} FAIL" in told[-1], "each of them is counted"


def test_what_is_good_is_one_line_of_counts_above_the_verdict(tree: Tree, wanted: Requirements) -> None:
    tree.write("/sys/class/infiniband/rdmap80s0/ports/1/state", "1: DOWN")
    results = examine(facts_of(tree), wanted, gate=False)
    shown = [line.text for line in result_lines(results, note="a note")]
    bad_ids = {result.check.id for result in results if result.judgement.verdict is Verdict.FAIL}
    assert {text.split()[1] for text in shown if text.startswith("FAIL")} <= bad_ids
    assert not [text for text in shown if text.startswith(("PASS", "NOT-APPLICABLE"))]
    assert re.fullmatch(r"passed: libraries \d+, .*RDMA \d.*; not applicable here: \d; -v lists .*", shown[-3])
    assert shown[-2] == "a note"
    assert shown[-1].startswith("NIXL doctor: FAIL (")
    every = [line.text for line in result_lines(results, every=True)]
    assert sum(text.startswith("PASS") for text in every) > 30
    assert not [text for text in every if text.startswith("passed: ")]


def test_healthy_host_passes_every_required_check(healthy: Tree, wanted: Requirements) -> None:
    judged = verdicts(facts_of(healthy), wanted)
    required = [judged[id] for id in wanted.profile.required if id in judged]
    assert len(required) > 10
    assert {one.verdict for one in required} == {Verdict.PASS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_is_reported_by_its_check(fault: Fault, tree: Tree, wanted: Requirements) -> None:
    fault.make(tree)
    judged = verdicts(facts_of(tree), wanted)
    assert judged[fault.check].verdict is fault.verdict
    reason = judged[fault.check].reason
    assert [value for value in fault.values if value not in reason] == [], reason
    assert judged[fault.check].remedy
    # Checks that the fault does not concern still pass.
    assert set(bad(judged)) <= {fault.check, *CONSEQUENCES.get(fault.id, ())}


@pytest.mark.parametrize(("ahead", "most"), [(0.0, 1), (2.4, 4), (-0.2, 2)])
def test_clocks_differ_by_no_more_than_is_said(ahead: float, most: int, tree: Tree, wanted: Requirements) -> None:
    """Etcd tells whole seconds, and the fact is the distance to the nearest end of its second."""
    answer("etcd", clock=ahead)(tree)
    judged = verdicts(facts_of(tree), wanted)["etcd-clock"]
    assert judged.reason == f"the clocks differ by at most {most} s"


@pytest.mark.parametrize(
    "make",
    [
        lambda tree: tree.remove("/pytest-nixl/cuda_driver.json"),
        cuda(shown=1, visible="0"),
        cuda(shown=2, visible="0,2,-1,1"),
        cuda(shown=1, visible="MIG-3f2b8a1e,MIG-4f2b8a1e"),
        cuda(100, node=False),
        cuda(None, node=False, library="libcuda.so.1: cannot open shared object file"),
    ],
)
def test_gpus_that_cuda_shows_on_purpose_are_no_fault(
    make: Callable[[Tree], None], tree: Tree, wanted: Requirements
) -> None:
    make(tree)
    assert list(bad(verdicts(facts_of(tree), wanted))) == []


@pytest.mark.parametrize("host", ["10.0.0.11", "127.0.0.1", "0.0.0.0", "node-b", ""])
def test_a_side_channel_may_listen_at_this_host(host: str, tree: Tree, wanted: Requirements) -> None:
    variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host)(tree)
    assert verdicts(facts_of(tree), wanted)["variables-agree"].verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (nvlinks(15), WARN),  # a profile without GPUs does not say that the host must have them
        (nvlinks(0, gpus=1), Verdict.PASS),  # a virtual machine with one of eight
        (nvlinks(12, "NVIDIA A100-SXM4-80GB"), Verdict.PASS),
        (nvlinks(4, "NVIDIA A100-SXM4-80GB"), WARN),
        (nvlinks(8, "NVIDIA A800-SXM4-80GB"), Verdict.PASS),
        (nvlinks(7, "NVIDIA A800-SXM4-80GB"), WARN),
        *((nvlinks(18, name), Verdict.PASS) for name in ("NVIDIA B200", "NVIDIA H20", "NVIDIA H200")),
        *((nvlinks(17, name), WARN) for name in ("NVIDIA B200", "NVIDIA H20", "NVIDIA H200")),
        (nvlinks(12, "NVIDIA H100 PCIe"), Verdict.PASS),
        (nvlinks(12, "NVIDIA H200 NVL"), Verdict.PASS),
    ],
)
def test_nvlinks_are_counted_against_those_of_the_model(
    change: Callable[[Any], None], verdict: Verdict, tree: Tree
) -> None:
    nvml(change)(tree)
    judged = verdicts(facts_of(tree), Requirements(load_profile("loopback"), BACKENDS))
    assert judged["gpu-nvlink"].verdict is verdict


@pytest.mark.parametrize(
    ("profile", "name", "verdict"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", Verdict.PASS),
        ("h100", "NVIDIA H100 PCIe", Verdict.PASS),
        ("h100", "NVIDIA L4", FAIL),
        ("h100", "NVIDIA H20", FAIL),
        ("h100", "NVIDIA H200", FAIL),
        ("h200", "NVIDIA H200", Verdict.PASS),
        ("h200", "NVIDIA GH200 480GB", FAIL),
    ],
)
def test_shipped_profile_of_a_gpu_accepts_no_other_model(profile: str, name: str, verdict: Verdict, tree: Tree) -> None:
    nvml(nvlinks(18, name, gpus=2))(tree)
    judged = verdicts(facts_of(tree), Requirements(load_profile(profile), ("UCX",)))
    assert judged["gpus"].verdict is verdict
    if verdict is FAIL:
        assert judged["gpus"].reason == f"2 GPUs not of the profile's model {profile.upper()}: {name}"
    else:
        assert set(bad(judged)) <= {"engine-backend-fits", "transports-allowed"}


@pytest.mark.parametrize(
    "make", [lambda tree: None, lambda tree: tree.remove("/dev/gdrdrv"), lambda tree: tree.remove("/sys/module/gdrdrv")]
)
def test_ucx_without_gdr_copy_does_not_use_gdrcopy(
    make: Callable[[Tree], None], tree: Tree, wanted: Requirements
) -> None:
    make(tree)
    nixl(ucx_variables=["UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL"])(tree)
    judged = verdicts(facts_of(tree), wanted)["gdrcopy"]
    assert (judged.verdict, judged.remedy) == (Verdict.NOT_APPLICABLE, "")
    assert judged.reason.startswith("this UCX has no gdr_copy, as in NIXL's wheels, or cannot load the libgdrapi.so.2")


def test_shipped_profile_of_a_gpu_expects_one(tree: Tree) -> None:
    nvml(lambda answer: answer.update(gpus=[], pairs=[]))(tree)
    judged = verdicts(facts_of(tree), Requirements(load_profile("h100"), ("UCX",)))["gpus"]
    assert (judged.verdict, judged.reason) == (FAIL, "the driver lists no GPU, and the profile's machine has one")
    assert "docker run --gpus all" in judged.remedy


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("NVML's Python package is not installed: run `pip install nvidia-ml-py`", "run `pip install nvidia-ml-py`"),
        ("NVML (libnvidia-ml.so.1) was not found", "give the container NVML"),
        ("NVML does not answer: Unknown Error", "follow the remedy of gpu-driver"),
        ("it was not recorded", "run `nvidia-smi -q`"),
    ],
)
def test_remedy_of_what_nvml_does_not_report_is_that_of_its_cause(
    why: str, remedy: str, tree: Tree, wanted: Requirements
) -> None:
    tree.answer("nvml", {"why": why})
    judged = verdicts(facts_of(tree), wanted)
    for id in ("gpu-ecc", "gpu-bar1", "gpu-persistence"):
        assert (judged[id].verdict, judged[id].remedy[: len(remedy)]) == (UNKNOWN, remedy)


def test_checks_that_miss_the_gpus_of_the_profile_refer_to_their_remedy(tree: Tree, wanted: Requirements) -> None:
    nvml(lambda found: found.update(gpus=[], pairs=[]))(tree)
    facts, ids = facts_of(tree), ("gpu-p2p", "gpu-nvlink", "gdrcopy")
    of_profile = verdicts(facts, wanted)
    assert {of_profile[id].remedy for id in ids} == {"follow the remedy of gpus"}
    assert {of_profile[id].verdict for id in ids} == {Verdict.NOT_APPLICABLE}
    without = verdicts(facts, Requirements(load_profile("loopback"), BACKENDS))
    assert {without[id].remedy for id in ids} == {""}


def test_remedy_of_a_missing_fabric_manager(tree: Tree, wanted: Requirements) -> None:
    cuda(802)(tree)
    assert "`systemctl status nvidia-fabricmanager`" in verdicts(facts_of(tree), wanted)["gpu-driver"].remedy


def test_smaller_set_of_gpus_than_the_profile_has_is_named(tree: Tree, wanted: Requirements) -> None:
    cuda(shown=4, visible="0,1,2,3")(tree)
    judged = verdicts(facts_of(tree), wanted)["gpus"]
    assert judged == passed("8 NVIDIA H100 80GB HBM3; CUDA_VISIBLE_DEVICES=0,1,2,3 shows 4 of them to this process")


@pytest.mark.parametrize(
    ("size", "start"),
    [
        (48 << 30, "BAR1 covers at least half of the memory: GPU 0: 48 GiB of 80 GiB, GPU 1: 48 GiB of 80 GiB, "),
        (80 << 30, "BAR1 of 8 GPUs is as large as the memory"),
    ],
)
def test_size_of_bar1_is_said(size: int, start: str, tree: Tree, wanted: Requirements) -> None:
    nvml(bar1(size))(tree)
    judged = verdicts(facts_of(tree), wanted)["gpu-bar1"]
    assert (judged.verdict, judged.reason[: len(start)]) == (Verdict.PASS, start)


@pytest.mark.parametrize("usual", [900, 20000])
def test_errors_that_most_links_have_are_not_one_devices(usual: int, tree: Tree, wanted: Requirements) -> None:
    symbol_errors(tree, usual)
    assert verdicts(facts_of(tree), wanted)["rdma-ports"].verdict is Verdict.PASS


OF_IMAGES = ("gpu-code", "image-versions", "nixl-cuda", "nixl-plugins", "verbs-providers")
#: Other checks that a fault makes fail.
CONSEQUENCES = {
    "ucx-tls-rc": {"backend-loads"},
    "ucx-tls-refused": {"backend-loads"},
    "ucx-tls-not-refused": {"backend-loads"},
    "ucx-tls-tcp-refused": {"backend-loads"},
    "ucx-tls-tcp-not-created": {"transports-allowed"},
    "ucx-tls-no-cuda-old": {"backend-loads"},
    "ucx-tls-rc-unused": {"backend-loads", "ucx-uses-rdma"},
    "efa-missing": {"gpu-nics"},
    "efa-without-driver": {"gpu-nics"},
    "node-closed": {"uverbs-open"},
    "not-active": {"rdma-ports"},
    "uverbs-closed": {"ucx-uses-rdma"},
    "uverbs-absent": {"ucx-uses-rdma"},
    "uverbs-module": {"ucx-uses-rdma"},
    "efa-none": {"ucx-uses-rdma", "rdma-ports", "rdma-rate", "uverbs-open", "gpu-nics"},
    "fi-provider-no-efa": {"ucx-uses-rdma", "rdma-devices", "rdma-ports", "rdma-rate", "uverbs-open", "gpu-nics"},
    "mig-without-instances-anywhere": {"gpu-driver"},
    "cuda-without-mig-instances": {"gpus"},
    "gpu-no-driver": {"gpu-driver", "gpu-p2p", "gpu-ecc", "gpu-bar1", "gpu-persistence", "gpu-direct", "gpu-nics"},
    "nvml-missing": {"gpus", "gpu-p2p", "gpu-ecc", "gpu-bar1", "gpu-persistence", "gpu-direct", "gpu-nics"},
    "driver-mismatch": {"gpus", "gpu-p2p", "gpu-ecc", "gpu-bar1", "gpu-persistence", "gpu-direct", "gpu-nics"},
    "libcuda-missing": {"gpu-driver"},
    "nixl-absent": {
        "backend-loads",
        "plugin-libraries",
        "libraries-once",
        "etcd-client-library",
        "nixl-cuda",
        "nixl-plugins",
        "ucx-cuda",
        "ucx-uses-rdma",
    },
    "backend-name": {"plugin-libraries"},
    "library-absent": {"backend-loads"},
    "symbol-version": {"backend-loads"},
    "etcd-refused": {"etcd-version", "etcd-latency", "etcd-clock"},
    "link-local-only": {"nics-up"},
}


def test_cards_without_a_driver_are_reported_whatever_the_profile_expects(tree: Tree) -> None:
    """A host that has lost all its RDMA devices has none that a profile without [machine] could miss."""
    unbound(tree)
    tree.remove("/sys/class/infiniband")
    found = verdicts(facts_of(tree), Requirements(load_profile("loopback"), BACKENDS))["rdma-devices"]
    assert found.verdict is Verdict.FAIL
    assert found.reason == "no driver is bound to 1 network card (0000:4f:00.0)"


def test_libraries_that_nobody_has_read_are_unknown(tree: Tree) -> None:
    nixl(libraries=[], etcd_client={"path": "", "patched": False})(tree)
    judgement = verdicts(facts_of(tree), Requirements(load_profile("loopback"), BACKENDS))["etcd-client-library"]
    assert judgement.verdict is Verdict.UNKNOWN, judgement.reason


@pytest.mark.parametrize(("profile", "said"), [("loopback", True), ("p5.48xlarge", False)])
def test_the_doctor_says_that_a_profile_without_a_machine_misses_no_device(
    healthy: Tree, profile: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", f"--root={healthy.folder}", f"--profile={profile}"])
    note = "not noticed by the profile loopback: a GPU or an RDMA device that is missing."
    assert (note in capsys.readouterr().out) is said


def test_ucx_tls_is_judged_by_the_profile_that_judges_the_rows(tree: Tree, tmp_path: Path) -> None:
    """A value that this host supports still makes every row WRONG-TRANSPORT if the profile accepts other transports."""
    variable("UCX_TLS", "ib,cuda,tcp")(tree)
    facts = facts_of(tree)

    def judged(profile: str) -> Judgement:
        return verdicts(facts, Requirements(load_profile(profile), BACKENDS))["transports-allowed"]

    warned = judged("loopback")
    assert warned.verdict is Verdict.WARN
    assert warned.reason == (
        "UCX_TLS=ib,cuda,tcp allows none of the transports that the profile loopback accepts for rows of UCX "
        "(cma, posix, sysv): these rows would be WRONG-TRANSPORT "
        "(loopback is for two processes of one host, and judges no transfer to another host)"
    )
    assert "--nixl-profile" in warned.remedy
    assert judged("tcp-loopback").verdict is Verdict.PASS
    other = judged(write_profile(tmp_path / "other.toml", "transports = ['cma']"))
    assert other.reason.endswith(" of UCX (cma): these rows would be WRONG-TRANSPORT")
    assert other.remedy.endswith("(pytest-nixl doctor: --profile)")
    variable("UCX_TLS", "tcp,cuda_copy")(tree)
    tree.remove("/sys/class/infiniband")
    facts = facts_of(tree)
    assert judged("loopback").remedy.endswith("(pytest-nixl doctor: --profile): tcp-loopback")


@pytest.mark.parametrize(
    ("value", "has_efa", "verdict"),
    [
        *(
            (value, True, Verdict.PASS)
            for value in ("efa", "EFA", "tcp,Efa", "efa;ofi_rxd,tcp", "efa-direct,OFI_RXM", ",efa,")
        ),
        *((value, True, FAIL) for value in ("tcp", "^efa", "^tcp,EFA", "tcp, efa", "efa, tcp", ",", "efa,tpc")),
        *((value, True, Verdict.PASS) for value in ("^tcp", "^tcp, efa", "^efa-direct")),
        *((value, False, FAIL) for value in ("efa", "tcp,EFA", "verbs", "tcp,Verbs;ofi_rxm")),
        *((value, False, Verdict.PASS) for value in ("", "tcp", "^efa", "tcp,sockets;ofi_rxm")),
    ],
)
def test_a_list_of_providers_is_read_as_libfabric_reads_it(
    value: str, has_efa: bool, verdict: Verdict, tree: Tree, wanted: Requirements
) -> None:
    """Letters may be small or capital, but a blank is a part of the name."""
    variable("FI_PROVIDER", value)(tree)
    if not has_efa:
        tree.remove("/sys/class/infiniband")
    judgement = checks()["provider-there"].judge(facts_of(tree), wanted)
    assert judgement.verdict is verdict, judgement.reason


#: How the names of variables end that no program reads, because a Dockerfile uses them.
ENDS_OF_BUILDS = "DIR HOME PREFIX PATH ROOT VERSION VER REF REPO URL COMMIT BRANCH TAG SRC"
UCX_TRANSPORTS = ("RC_VERBS", "RC_MLX5", "RC_GDA", "DC_MLX5", "UD_VERBS", "UD_MLX5", "SRD")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        *((f"NIXL_BUILD_{end}", Verdict.PASS) for end in ENDS_OF_BUILDS.split()),
        ("NIXL_BUILD_SRC_2", WARN),
        ("UCX_BUILD_SRC", Verdict.PASS),
        ("NIXL_ETCD_ENDPOINT", FAIL),
        # Names that set a value for several transports of UCX.
        *((f"UCX_IB_OF_{name}", Verdict.PASS) for name in UCX_TRANSPORTS),
        *((f"UCX_{name.partition('_')[0]}_OF_{name}", Verdict.PASS) for name in UCX_TRANSPORTS),
        ("UCX_RC_OF_SRD", FAIL),
        ("UCX_IB_OF_GGA", FAIL),
    ],
)
def test_a_variable_is_known_by_its_name_or_family(
    name: str, verdict: Verdict, tree: Tree, wanted: Requirements
) -> None:
    ucx = [f"UCX_{transport}_OF_{transport}" for transport in (*UCX_TRANSPORTS, "GGA")]
    nixl(ucx_variables=ucx, unused={name: ""})(tree)
    variable(name, "1")(tree)
    judgement = checks()["variables-known"].judge(facts_of(tree), wanted)
    assert judgement.verdict is verdict, judgement.reason


@pytest.mark.parametrize(
    ("lines", "remedy", "start"),
    [
        ([], "do this", "do this"),
        (["odd"], "do this", "do this"),
        (["odd"], "", "correct what UCX names"),
        (["odd", "mmap: Cannot allocate memory"], "do this", MEMORY_REMEDY),
        (["Too many open files", "odd"], "do this", "raise the limit of open files"),
        (["Too many open files"], MEMORY_REMEDY, MEMORY_REMEDY),
    ],
)
def test_the_remedy_of_a_backend_is_that_of_what_knows_most(
    lines: list[str], remedy: str, start: str, tree: Tree, wanted: Requirements
) -> None:
    backend("LIBFABRIC", error="it refuses", memories=[], said=lines, remedy=remedy)(tree)
    judgement = checks()["backend-loads"].judge(facts_of(tree), wanted)
    assert judgement.remedy.startswith(start), judgement.remedy


@pytest.mark.parametrize(
    ("versions", "install"),
    [
        ((), "what is missing"),
        (("A_1", ""), "the library"),
        (("", "A_1"), "the library"),
        (("", ""), "what is missing"),
    ],
)
@pytest.mark.parametrize("driver", [True, False])
def test_the_remedy_of_missing_libraries_is_that_of_all(
    versions: tuple[str, ...], install: str, driver: bool, tree: Tree, wanted: Requirements
) -> None:
    lacks = missing("libcuda.so.1, which x needs" if driver else "libx.so.0, which x needs")
    lacks += [lack for name in versions for lack in missing("liby.so.0", versions=tuple(filter(None, [name])))]
    backend("UCX", error="no", missing=lacks)(tree)
    remedy = checks()["plugin-libraries"].judge(facts_of(tree), wanted).remedy
    assert remedy.startswith(f"install {install}")
    assert ("comes with the host's driver" in remedy) is driver


def test_the_transports_that_ucx_tls_may_have_are_in_order(tree: Tree, wanted: Requirements) -> None:
    words = "transport 'rc' is not available, please use one or more of: ud, tcp, sm, srd, ud_verbs, dc_mlx5, cma, dc"
    backend("UCX", error="no", memories=[], said=[words])(tree)
    variable("UCX_TLS", "rc,cuda")(tree)
    remedy = checks()["transports-allowed"].judge(facts_of(tree), wanted).remedy
    assert remedy.endswith("can carry NIXL on this host: dc, dc_mlx5, srd, tcp, ud, ud_verbs"), remedy


def test_a_namespace_that_only_begins_with_a_slash_passes(tree: Tree, wanted: Requirements) -> None:
    variable("NIXL_ETCD_NAMESPACE", "/nixl/agents")(tree)
    assert verdicts(facts_of(tree), wanted)["namespace-plain"].verdict is Verdict.PASS


def test_every_check_has_a_fault() -> None:
    # nic-rate applies only without RDMA and has its own test below; etcd-client-patch never fails. Those of images
    # judge by what a profile wants: test_doctor_image.py makes their faults.
    # test_storage_queues.py makes those of storage-queues, test_transfers_arrive.py those of transfers-arrive.
    untested = set(checks()) - {fault.check for fault in FAULTS}
    assert untested == {"nic-rate", "etcd-client-patch", "storage-queues", "transfers-arrive", *OF_IMAGES}


def test_interface_below_the_rate_of_the_profile_fails(tree: Tree, tmp_path: Path) -> None:
    profile = tmp_path / "tcp.toml"
    profile.write_text(
        '[profile]\nname = "tcp"\n[machine]\nnics = 1\nnic_rate = "100 Gb/s"\nnic_kind = "tcp"\nsource = "-"'
    )
    for nic in tree.place("/sys/class/net").iterdir():
        tree.write(f"/sys/class/net/{nic.name}/speed", 25000 if nic.name == "enp72s0" else 100000)
    judged = verdicts(facts_of(tree), Requirements(load_profile(str(profile)), BACKENDS))
    assert judged["nic-rate"].verdict is FAIL
    assert "100 Gb/s" in judged["nic-rate"].reason
    assert "enp72s0 at 25 Gb/s" in judged["nic-rate"].reason


def test_backend_that_no_engine_will_use_is_named(tree: Tree) -> None:
    profile = load_profile("p5.48xlarge")
    ucx = verdicts(facts_of(tree), Requirements(profile, ("UCX",)))["engine-backend-fits"]
    assert ucx.verdict is WARN
    assert (
        "32 EFA devices, for which NIXL's wheels bring no provider but LIBFABRIC's, but UCX is validated" in ucx.reason
    )
    tree.variable("TRTLLM_NIXL_KVCACHE_BACKEND", "LIBFABRIC")
    other = verdicts(facts_of(tree), Requirements(profile, ("UCX",)))["engine-backend-fits"]
    assert "TensorRT-LLM uses LIBFABRIC, but UCX is validated here" in other.reason
    right = verdicts(facts_of(tree), Requirements(profile, BACKENDS))["engine-backend-fits"]
    assert (right.verdict, right.reason) == (Verdict.PASS, "TensorRT-LLM uses LIBFABRIC, as validated")
