# SPDX-License-Identifier: Apache-2.0
"""Every answer of the doctor, in whole, about a small host: two GPUs, four EFA devices and two network interfaces.

A row of ``STATES`` makes one state of the host, and ``doctor_answers.toml`` has what the doctor then says differently
than of the healthy host: the verdict, the reason and the remedy of each such check, by ``STATE.CHECK``. A state that
has no line there is healthy, too. ``test_doctor_real_faults.py`` makes the faults that can be caused on this machine.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_sysfs import TOPOLOGY, Tree, build

from pytest_nixl import cli
from pytest_nixl.checks.doctor.catalogue import any_failed, by_cause, checks, examine, plain_results, result_lines
from pytest_nixl.checks.doctor.check import CheckResult, Requirements
from pytest_nixl.checks.doctor.transfers import with_transfers
from pytest_nixl.core.resource_limits import MEMORY_REMEDY, PROCESSES_REMEDY
from pytest_nixl.core.texts import parse_texts
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import NOT_RECORDED, FactsRoot
from pytest_nixl.judge.profiles import load_profile, parse_profile
from pytest_nixl.model.transfer_proof import TransferProof
from pytest_nixl.model.verdicts import Judgement, Outcome, Verdict

Make = Callable[[Tree], Any]

MACHINE = """
[machine]
nics = 4
nic_rate = "100 Gb/s"
nic_kind = "efa"
nics_per_gpu = 2
gpus = 2
gpu = "H100"
source = "-"
"""
TCP_MACHINE = MACHINE.replace("efa", "tcp").replace("nics_per_gpu = 2\n", "")
IB_MACHINE = MACHINE.replace('"efa"', '"rc"')
#: The PCI addresses of the small host; GPU 0, and the first two EFA devices, are at NUMA node 0, the others at node 1.
ADDRESSES = "47:00.0 48:00.0 4f:00.0 50:00.0 53:00.0 93:00.0 94:00.0 97:00.0"
GPU_0, GPU_1 = "0000:53:00.0", "0000:97:00.0"
EFA = ("rdmap79s0", "rdmap80s0", "rdmap147s0", "rdmap148s0")
PLUGINS = "/usr/local/nixl/lib/x86_64-linux-gnu/plugins"


@dataclass(frozen=True)
class State:
    """A state of the host, and what the doctor is asked about it.

    :param profile: the tables of the profile; a name without a line: that of one of ours.
    :param transfers: what came of transfers.
    :param after: the state that is changed, and with whose answers these are compared; empty: the healthy one.
    """

    make: tuple[Make, ...]
    profile: str = MACHINE
    backends: tuple[str, ...] = ("UCX", "LIBFABRIC")
    image: bool = False
    transfers: tuple[TransferProof, ...] = ()
    after: str = ""

    @property
    def requirements(self) -> Requirements:
        return _requirements(self.profile, self.backends, self.image)

    @property
    def usual(self) -> State:
        """The state that this one is compared with: the same questions about the host without the change."""
        if not self.make and not self.transfers:
            return State(())
        before = STATES[self.after].make if self.after else ()
        return replace(self, make=before, transfers=(), after="")


@cache
def _requirements(profile: str, backends: tuple[str, ...], image: bool) -> Requirements:
    if "\n" not in profile:
        return Requirements(load_profile(profile), backends, image)
    text = f'[profile]\nname = "small"\n{profile}'
    return Requirements(parse_profile(text.encode(), "p.toml"), backends, image)


def state(*make: Make, **values: Any) -> State:
    return State(make, **values)


def write(path: str, text: str | int) -> Make:
    return lambda tree: tree.write(path, text)


def all_of(*makes: Make) -> Make:
    def make(tree: Tree) -> None:
        for change in makes:
            change(tree)

    return make


def remove(*paths: str) -> Make:
    return all_of(*(lambda tree, path=path: tree.remove(path) for path in paths))


def answer(name: str, **values: Any) -> Make:
    """Change values of an answer."""
    return lambda tree: tree.change(name, lambda entry: entry.update(values))


def in_answer(name: str, change: Callable[[Any], Any]) -> Make:
    return lambda tree: tree.change(name, change)


def silent(name: str, reason: str) -> Make:
    """Let a question have no answer."""
    return lambda tree: tree.answer(name, {"why": reason})


nixl, image = partial(answer, "nixl"), partial(answer, "image")


def backend(name: str, **values: Any) -> Make:
    return lambda tree: tree.change("nixl", lambda entry: entry["backends"][name].update(values))


def refused(name: str = "UCX", **values: Any) -> Make:
    """NIXL cannot create a backend."""
    return backend(name, **{"error": "NIXL_ERR_BACKEND", "memories": [], **values})


def variables(**values: str) -> Make:
    return answer("environment", steering=values)


def versions(**values: list[str]) -> Make:
    return lambda tree: tree.change("image", lambda entry: entry["versions"].update(values))


def gpu(number: int | None = None, **values: Any) -> Make:
    """Change what NVML says of a GPU; None: of both."""

    def change(entry: Any) -> None:
        for place in entry["gpus"] if number is None else [entry["gpus"][number]]:
            place.update(values)

    return lambda tree: tree.change("nvml", change)


def gpus(*numbers: int, **values: Any) -> Make:
    """Let NVML list only some of the GPUs."""
    return lambda tree: tree.change(
        "nvml", lambda entry: entry.update(gpus=[entry["gpus"][number] for number in numbers], pairs=[], **values)
    )


def pairs(first: str, second: str) -> Make:
    """Say whether GPU 0 can read the memory of GPU 1, and GPU 1 that of GPU 0."""
    return answer("nvml", pairs=[{"one": 0, "other": 1, "status": first}, {"one": 1, "other": 0, "status": second}])


def cuda(init: int | None = 0, *shown: str, **values: Any) -> Make:
    """Give the CUDA driver's answer.

    :param init: the result of cuInit; None: there is none.
    :param shown: the addresses of the GPUs that CUDA shows.
    """
    devices = {"devices": [{"uuid": "", "pci": pci} for pci in shown]} if init == 0 else {}
    return lambda tree: tree.answer(
        "cuda_driver", {"node": True, **({} if init is None else {"init": init}), **devices, **values}
    )


def xid(number: int, text: str = "pid=7, GPU has fallen off the bus.", pci: str = "0000:53:00") -> str:
    return f"NVRM: Xid (PCI:{pci}): {number}, {text}"


def kernel_log(*lines: str) -> Make:
    return lambda tree: tree.answer("kernel_log", {"lines": list(lines)})


def port(name: str, **attributes: str | int) -> Make:
    """Write files of a device's port; ``__`` is a slash."""
    place = f"/sys/class/infiniband/{name}/ports/1"
    return all_of(*(write(f"{place}/{key.replace('__', '/')}", text) for key, text in attributes.items()))


def errors(counter: str, count: int, usual: int = 0) -> Make:
    """Let the ports of the devices count errors: the second device one number, the others another."""
    return all_of(*(port(name, **{counter: count if name == EFA[1] else usual}) for name in EFA))


def closed(fault: str, *numbers: int) -> Make:
    return answer("uverbs", **{f"/dev/infiniband/uverbs{number}": fault for number in numbers})


def ucx(**values: Any) -> Make:
    """Change what UCX says of the RDMA devices."""
    return lambda tree: tree.change("nixl", lambda entry: entry["ucx_rdma"].update(values))


def device(name: str, *, offered: bool = True, **values: Any) -> Make:
    """Change what UCX's libibverbs says of a device."""

    def change(entry: Any) -> None:
        entry["ucx_rdma"]["answers"][name].update(values)
        if not offered:
            del entry["ucx_rdma"]["offered"][name]

    return lambda tree: tree.change("nixl", change)


def verbs(*libraries: tuple[str, int], providers: tuple[tuple[str, int, str], ...]) -> Make:
    """Give the copies of libibverbs with their interfaces, and the providers with that and their copy."""
    return image(
        verbs={
            "libraries": [{"path": path, "abi": abi} for path, abi in libraries],
            "providers": [
                {"name": name, "abi": abi, "library": library, "path": f"/providers/lib{name}-rdmav{abi}.so"}
                for name, abi, library in providers
            ],
        }
    )


def lacks(*sonames: str, versions: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [{"soname": name, "versions": list(versions), "words": f"{name}, which x needs"} for name in sonames]


def plugin(name: str, *sonames: str, error: str = "not found", versions: tuple[str, ...] = ()) -> Make:
    """Add a plugin's file that cannot be loaded."""
    remedies = {soname: f"install {soname}" for soname in sonames[:1]}
    missing, path = lacks(*sonames, versions=versions), f"{PLUGINS}/libplugin_{name}.so"
    file = {"name": name, "path": path, "error": error, "remedies": remedies, "missing": missing}
    return in_answer("image", lambda entry: entry["plugins"].append(file))


def _device_folder(tree: Tree, name: str) -> str:
    place = (tree.folder / f"sys/class/infiniband/{name}/device").resolve()
    return f"/{place.relative_to(tree.folder.resolve())}"


def without(*names: str) -> Make:
    """Let the kernel have no such EFA devices."""
    verbs = (f"/sys/class/infiniband_verbs/uverbs{EFA.index(name)}" for name in names)
    return remove(*(f"/sys/class/infiniband/{name}" for name in names), *verbs)


def unbound(name: str) -> Make:
    return lambda tree: tree.remove(f"{_device_folder(tree, name)}/driver")


def p2p(text: str, *names: str) -> Make:
    """Say how EFA's driver gives its devices access to GPU memory."""

    def make(tree: Tree) -> None:
        for name in names:
            tree.write(f"{_device_folder(tree, name)}/p2p", text)

    return make


def off_bus(*addresses: str) -> Make:
    return remove(*(f"/sys/bus/pci/devices/{address}" for address in addresses))


def moved(root: str, numa: int) -> Make:
    """Put GPU 0 below another root of the PCI bus, at a NUMA node."""
    place = f"/sys/devices/{root}/0000:00:1e.0/{GPU_0}"
    attributes = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": str(numa)}
    bus = f"/sys/bus/pci/devices/{GPU_0}"
    files = (write(f"{place}/{name}", text) for name, text in attributes.items())
    return all_of(off_bus(GPU_0), lambda tree: tree.link(bus, place), *files)


def loopback(tree: Tree) -> None:
    for attribute, text in (("operstate", "unknown"), ("mtu", 65536), ("type", 772)):
        tree.write(f"/sys/class/net/lo/{attribute}", text)


def cores(listed: str) -> Make:
    """Let this process use some cores."""
    return write("/proc/self/status", f"Cpus_allowed_list:\t{listed}")


def status(**values: str | int) -> Make:
    """Change lines of the status of this process."""
    lines = {"CapEff": "00000000a80425fb", "Cpus_allowed_list": "0-95", **values}
    return write("/proc/self/status", "\n".join(f"{name}:\t{value}" for name, value in lines.items()))


#: What the calls that set up a queue answer.
queues = partial(answer, "storage-queues")


def governor(core: int, driver: str = "acpi-cpufreq", preference: str = "") -> Make:
    """Let a core save power."""
    place = f"/sys/devices/system/cpu/cpufreq/policy{core}"
    files = {"scaling_governor": "powersave", "scaling_driver": driver, "energy_performance_preference": preference}
    return all_of(*(write(f"{place}/{name}", text) for name, text in files.items() if text or "driver" in name))


def connectx(*names: str, driver: str = "mlx5_core", node_type: str = "1: CA") -> Make:
    """Put other cards into the places of the EFA devices, the first of which are near GPU 0."""

    def make(tree: Tree) -> None:
        folders = [_device_folder(tree, name) for name in EFA]
        without(*EFA)(tree)
        for folder in folders:
            tree.remove(f"{folder}/driver")
            tree.remove(f"{folder}/vendor")
        for number, (name, folder) in enumerate(zip(names, folders, strict=False)):
            tree.write(f"{folder}/vendor", "0x15b3")
            tree.link(f"{folder}/driver", f"/sys/bus/pci/drivers/{driver}")
            tree.link(f"/sys/class/infiniband/{name}/device", folder)
            tree.write(f"/sys/class/infiniband/{name}/node_type", node_type)
            port(name, state="4: ACTIVE", rate="100 Gb/sec (4X EDR)", gids__0=f"fe80:0000::{number + 1}")(tree)
            tree.write(f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        answers = {name: {"listed": True, "opened": "", "registered": "", "shared_queues": 0} for name in names}
        ucx(offered={name: ["rc_mlx5"] for name in names}, answers=answers)(tree)

    return make


LIMIT = "Max locked memory         {0}                {0}                bytes     "
UVERBS_GONE = "No such file or directory"
IB = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
LIMITS, KERNEL, URING = "/proc/self/limits", "/proc/sys/kernel/osrelease", "/proc/sys/kernel/io_uring_disabled"
OF_NIXL = "libucs libucp libuct libucm libfabric libnixl libetcd-cpp-api-core libcudart"
NO_DEVICES = (without(*EFA), nixl(ucx_rdma=None))
NO_DMA_BUF = (answer("dma_buf", supported=False), p2p("NONE", *EFA))
NO_EP = {"path": "/ep", "why": "it is built for torch 2.11"}
TWO_WHEELS = {"nixl-cu12": "1.5.0", "nixl-cu13": "1.5.0"}
CUDA_13 = nixl(nixl_package="nixl-cu13", nixl_module="/lib/nixl_cu13/_api.py")
GPUNETIO = MACHINE + '[image]\nplugins = ["GPUNETIO"]'
POD = write("/var/run/secrets/kubernetes.io/serviceaccount/namespace", "bench")
UNRESOLVED = answer("etcd", names=[{"host": "etcd.default", "addresses": [], "fault": "Name or service not known"}])
UCX_CONF = answer("ucx_files", **{"/etc/ucx/ucx.conf": ["UCX_TLS=rc", "UCX_X=1"]})
SMALL_SHM = answer("shm", size=64 << 20, free=64 << 20)
PROTO = (("UCX_PROTO_ENABLE", "n"),)
REFUSED, LOST = "NIXL_ERR_BACKEND", "No module named 'nixl'"
MOVED = TransferProof("UCX", "DRAM:DRAM", transports=("cma/memory",), libraries=("/opt/nixl/libucp-b39b3ed9.so.0.0.0",))

STATES = {
    "healthy": state(),
    "of-an-image": state(image=True),
    "without-a-profile": state(profile="loopback"),
    "of-tcp-cards": state(profile=TCP_MACHINE),
    "bare": state(*NO_DEVICES, gpus(), cuda(100, node=False), off_bus(GPU_0, GPU_1), profile="loopback"),
    "without-rdma": state(*NO_DEVICES, profile="loopback"),
    "with-ucx-alone": state(backends=("UCX",)),
    "with-libfabric-alone": state(backends=("LIBFABRIC",)),
    # the whole host
    "little-is-recorded": state(
        silent("shm", NOT_RECORDED), silent("uverbs", NOT_RECORDED), silent("etcd", NOT_RECORDED),
        silent("kernel_log", "the kernel's log cannot be read"), remove("/proc/self/limits"),
        in_answer("nvml", lambda entry: entry.pop("pairs")),
    ),
    "much-is-absent": state(
        silent("shm", UVERBS_GONE), write("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 0),
        remove("/sys/devices/system/cpu/cpufreq"), silent("nixlbench", "nixlbench is not on PATH"),
        remove("/sys/module/gdrdrv"), lambda tree: tree.answer("addresses", {}), remove("/proc/net/route"),
        image(packages={}), verbs(providers=()), nixl(etcd_client={"path": "", "patched": False}),
        image(device_code=[]),
    ),
    "many-faults": state(
        answer("shm", size=8 << 30, free=(64 << 20) - 1),
        write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0),
        answer("nixlbench", fault="error while loading shared libraries: libgflags.so.2.2"), remove("/dev/gdrdrv"),
        answer("nvml", driver="550.54.15"), write("/sys/class/net/enp72s0/mtu", 1500), port(EFA[1], state="1: DOWN"),
        gpu(1, nvlinks=17, state={"fabric": "has not started"}), backend("UCX", release="1.4.0"),
        governor(1), governor(3), answer("addresses", enp72s0=["169.254.0.1/16"]), kernel_log(xid(79)),
        in_answer("nixl", lambda entry: entry["libraries"].append("/opt/libucs.so.0")),
    ),
    "faults-of-another-host": state(
        answer("shm", size=(1 << 30) - 1, free=64 << 20), port(EFA[0], state="2: INIT"), port(EFA[3], state="1: DOWN"),
        port(EFA[2], rate="25 Gb/sec (1X EDR)"), UNRESOLVED,
        gpu(0, state={"slowed": ["hardware slowdown", "hardware power brake"]}),
        backend("UCX", versions={"ucx_cuda_lacks": "libucm_cuda needs libcudart.so.12"}),
        pairs("ok", "the chipset does not support it"), gpu(1, state={"fabric": "has not started"}),
        kernel_log(xid(31)), gpu(uncorrected=None, ecc=False), gpu(1, bar1=40 << 30),
        nixl(libraries=["/a/libibverbs-1de1263b.so.1", "/b/libibverbs.so.1", "/a/libz.so.1"]),
        image(packages={"nixl-cu12": "1.5.0", "nixl-cu13": "1.5.0", "nixl": "1.5.0"}), variables(FI_TCP_IFACE="zzz"),
    ),
    "nothing-to-complain-of": state(
        backend("UCX", release="1.5.0"),
        lambda tree: tree.write(f"/sys/class/infiniband/{EFA[1]}/ports/2/state", "1: DOWN"),
        errors("counters__symbol_error", 1999, usual=200), port(EFA[0], gid_attrs__ndevs__0="enp71s0"),
        gpu(bar1=80 << 30), backend("UCX", said=["uct_iface_open(srd/rdmap9s0:1) failed: Busy"]),
        moved("pci0000:44", 0), variables(NIXL_ETCD_ENDPOINTS="http://a:2379", ETCD_ENDPOINTS="http://a:2379/"),
    ),
    # libraries: NIXL and its backends
    "nixl-absent": state(silent("nixl", LOST)),
    "nixl-absent-with-remedy": state(lambda tree: tree.answer("nixl", {"why": "it ends", "remedy": "mend it"})),
    "nixl-absent-with-lines": state(
        lambda tree: tree.answer("nixl", {"why": "it ends", "remedy": "read the lines below"}),
    ),
    "nixl-not-recorded": state(silent("nixl", NOT_RECORDED)),
    "nixl-absent-once": state(silent("nixl", LOST), transfers=(MOVED,)),
    "nixl-absent-once-by-a-limit": state(
        lambda tree: tree.answer("nixl", {"why": "no thread", "remedy": PROCESSES_REMEDY}), transfers=(MOVED,)
    ),
    "nixl-absent-by-a-variable": state(
        silent("nixl", LOST),
        transfers=(replace(MOVED, fault="it ends", culprits=(("LD_PRELOAD", "/x.so"),)), MOVED),
    ),
    "nixl-absent-in-transfers-too": state(silent("nixl", LOST), transfers=(replace(MOVED, fault="it ends"),)),
    "nixl-without-ucx": state(nixl(ucx="")),
    "nixl-before-its-libraries-were-read": state(nixl(libraries=[], etcd_client={"path": "", "patched": False})),
    "etcd-client-not-patched": state(nixl(etcd_client={"path": "/usr/lib/libetcd-cpp-api.so", "patched": False})),
    "backend-not-tried": state(backends=("UCX", "LIBFABRIC", "POSIX")),
    "backend-without-dram": state(backend("UCX", memories=["VRAM_SEG", "FILE_SEG"])),
    "backend-without-memory": state(backend("LIBFABRIC", memories=[])),
    "backend-error": state(refused()),
    "backend-error-with-remedy": state(refused("LIBFABRIC", remedy="mend it")),
    "backend-error-of-both": state(refused(), refused("LIBFABRIC", remedy="mend it")),
    "backend-error-without-plugin": state(refused("LIBFABRIC", plugin=""), nixl(plugins=["UCX"])),
    "backends-without-plugin": state(
        nixl(plugins=["GDS"]), backend("LIBFABRIC", plugin=""),
        backend("UCX", plugin="", error="NIXL has no such plugin"),
    ),
    "backend-libraries-missing": state(refused(missing=lacks("libucp.so.0", "libucs.so.0"))),
    "backend-libraries-missing-with-remedy": state(refused(missing=lacks("libucp.so.0"), remedy="mend it")),
    "backend-library-missing-but-works": state(backend("UCX", missing=lacks("libx.so.1"), remedy="mend it")),
    "backend-versions-missing": state(refused("LIBFABRIC", missing=lacks("libfabric.so.1", versions=("FABRIC_1.10",)))),
    "backend-driver-library-missing": state(refused(missing=lacks("libcuda.so.1"))),
    "backend-driver-library-missing-in-image": state(refused(missing=lacks("libcuda.so.1")), image=True),
    "backend-nvml-missing-in-image": state(refused(missing=lacks("libnvidia-ml.so.1")), image=True),
    "backend-two-libraries-missing-in-image": state(refused(missing=lacks("libcuda.so.1", "libx.so.1")), image=True),
    "backend-library-missing-in-image": state(refused(missing=lacks("libx.so.1")), image=True),
    "all-backends-of-image-lack-two": state(
        refused(missing=lacks("libcuda.so.1", "libx.so.1")), image=True, backends=("UCX",),
    ),
    "ucx-says-one-line": state(refused(said=["odd"])),
    "ucx-says-five-lines": state(refused(said=["a", "b", "c", "d", "e"], remedy="mend it")),
    "ucx-says-no-sysfs": state(refused(said=["scandir(/sys/class/net) failed"])),
    "ucx-says-no-memory": state(refused(said=["odd", "mmap: Cannot allocate memory"], remedy="mend it")),
    "ucx-says-many-files": state(refused(said=["Too many open files"], remedy="mend it")),
    "ucx-says-many-files-in-other-words": state(refused(said=["number of files that could be opened"])),
    "ucx-says-many-files-and-memory-is-limited": state(refused(said=["Too many open files"], remedy=MEMORY_REMEDY)),
    "ucx-says-not-permitted-with-seccomp": state(
        write("/proc/self/status", "Seccomp:\t2\nCpus_allowed_list:\t0-95"),
        refused(said=["mbind: Operation not permitted"]),
    ),
    "ucx-says-not-permitted-without-seccomp": state(
        write("/proc/self/status", "Seccomp:\t0\nCpus_allowed_list:\t0-95"),
        refused(said=["mbind: Operation not permitted"]),
    ),
    "ucx-says-no-peer-failure": state(refused(said=["x - no peer failure handler"])),
    "ucx-says-no-shared-memory": state(SMALL_SHM, refused(said=["shm_open() failed: No space"])),
    "ucx-says-no-shared-memory-in-other-words": state(SMALL_SHM, refused(said=["Shared memory error"])),
    "ucx-says-nothing-of-little-shared-memory": state(SMALL_SHM, refused(said=["odd"])),
    "ucx-refused-with-files": state(refused(said=["odd"]), UCX_CONF),
    "ucx-refused-for-a-device": state(variables(UCX_NET_DEVICES="mlx5_9:1"), refused(said=["no such device"])),
    "ucx-refused-for-a-device-with-files": state(variables(UCX_NET_DEVICES="mlx5_9:1"), refused(), UCX_CONF),
    "libfabric-refused-beside-a-device": state(variables(UCX_NET_DEVICES="mlx5_9:1"), refused("LIBFABRIC")),
    "ucx-refused-near-cards": state(refused(), after="gpu-missing"),
    "ucx-refused-near-cards-that-are-chosen": state(
        variables(UCX_NET_DEVICES="rdmap79s0:1"), refused(), after="gpu-missing",
    ),
    "ucx-refused-near-one-card-too-many": state(without(EFA[3]), refused(), after="gpu-missing"),
    "two-of-each-library": state(nixl(libraries=[f"/{copy}/{name}.so" for name in OF_NIXL.split() for copy in "ab"])),
    "two-libnl": state(nixl(libraries=["/a/libnl-route-3-3ad497a3.so.200", "/b/libnl-route-3.so.200"])),
    "two-libz": state(nixl(libraries=["/a/libz.so.1", "/b/libz.so.1"]), transfers=(MOVED,)),
    # image: versions, plugins, code for GPUs
    "image-not-recorded": state(silent("image", NOT_RECORDED)),
    "plugins-unknown": state(image(plugin_folder="")),
    "plugins-unwanted": state(
        plugin("GDS", "libcudart.so.12", "libcufile.so.0"), plugin("X", error="undefined symbol: y"),
        in_answer("image", lambda entry: entry["plugins"].reverse()),
    ),
    "plugins-wanted": state(
        plugin("GDS", "libcudart.so.12", "libcufile.so.0"),
        plugin("Mooncake", "libglog.so.0", versions=("G_2", "G_3")),
        plugin("X", error="undefined symbol: y"),
        profile=MACHINE + '[image]\nplugins = ["UCX", "GDS", "MOONCAKE", "X", "HF3FS"]',
    ),
    "plugin-lacks-a-library-and-a-version": state(
        plugin("GPUNETIO", "libx.so.1"),
        in_answer("image", lambda entry: entry["plugins"][-1]["missing"].extend(lacks("liby.so.1", versions=("Y_2",)))),
        profile=GPUNETIO,
    ),
    "plugins-wanted-load": state(profile=MACHINE + '[image]\nplugins = ["UCX", "LIBFABRIC"]'),
    "plugin-within-nixl": state(
        nixl(plugins=["LIBFABRIC", "UCX", "HF3FS"]), profile=MACHINE + '[image]\nplugins = ["HF3FS"]',
    ),
    "plugin-that-a-worker-created": state(
        in_answer("image", lambda entry: entry["plugins"].pop(0)), plugin("LIBFABRIC", "libfabric.so.1"),
        profile=MACHINE + '[image]\nplugins = ["LIBFABRIC"]',
    ),
    "plugin-that-no-worker-created": state(
        in_answer("image", lambda entry: entry["plugins"].pop(0)), plugin("LIBFABRIC", "libfabric.so.1"),
        refused("LIBFABRIC"), profile=MACHINE + '[image]\nplugins = ["LIBFABRIC"]',
    ),
    "plugin-without-the-driver": state(plugin("GPUNETIO", "libcuda.so.1"), profile=GPUNETIO),
    "plugin-without-the-driver-in-image": state(plugin("GPUNETIO", "libcuda.so.1"), profile=GPUNETIO, image=True),
    "two-wheels-of-two-versions": state(image(packages={"nixl-cu12": "1.5.0", "nixl-cu13": "1.3.2"})),
    "kernels-that-do-not-fit": state(image(nixl_ep=NO_EP)),
    "kernels-that-are-used": state(
        image(nixl_ep=NO_EP, packages=TWO_WHEELS),
        variables(VLLM_ALL2ALL_BACKEND="Nixl_EP"),
    ),
    "other-kernels-are-used": state(image(nixl_ep=NO_EP), variables(VLLM_ALL2ALL_BACKEND="deepep")),
    "cuda-of-nixl-unknown": state(nixl(nixl_package="nixl", nixl_module="/opt/nixl/nixl/_api.py")),
    "cuda-of-nixl-by-its-runtime": state(
        nixl(nixl_package="nixl", nixl_module="/opt/nixl/nixl/_api.py", libraries=["/cuda/libcudart.so.13"])
    ),
    **{
        f"cuda-{number}-torch-{torch}-driver-{driver}": state(
            nixl(nixl_package=f"nixl-cu{number}", nixl_module=f"/lib/nixl_cu{number}/_api.py"),
            image(torch={"version": "2", "cuda": torch, "path": "t"} if torch != "none" else {}),
            answer("nvml", cuda=driver),
        )
        for number, torch, driver in (
            (12, "13.0", "12.9"), (13, "13.0", "12.9"), (13, "12.8", "12.9"), (12, "11.8", "12.9"),
            (12, "12.8", "11.8"),
            (12, "none", "11.8"), (13, "none", "12.4"), (13, "13.0", "13.0"), (12, "", "12.9"),
        )
    },
    "cuda-13-torch-12-with-both-wheels": state(CUDA_13, image(packages={"nixl-cu13": "1.5.0", "nixl-cu12": "1.5.0"})),
    "cuda-13-in-image-without-torch": state(CUDA_13, image(torch={}), image=True),
    "versions-wanted": state(
        profile=MACHINE + '[versions]\nnixl = "1.5"\nucx = ">=1.20, <2"\nlibfabric = ">=1.18"\n'
        'etcd_cpp_api = "0.15.4"\ncuda = "12"\ntorch = "2.9"\ngdrcopy = "2"\nefa_installer = ">=1.40"\n'
        '[image]\netcd_uri_patch = true'
    ),
    "versions-not-fitting": state(
        versions(gdrcopy=["", "libgdrapi.so.2", "it is not found"]),
        profile=MACHINE + '[versions]\nnixl = "1.4"\nucx = ">=1.22"\nlibfabric = "<2"\netcd_cpp_api = "0.15.5"\n'
        'cuda = "12.9"\ntorch = "2.10"\ngdrcopy = "2.4"\nefa_installer = ">1.43.2"\n[image]\netcd_uri_patch = false',
    ),
    "versions-not-readable": state(
        versions(gdrcopy=["", "libgdrapi.so.2", "it is not found"], cuda=["new", "/cuda", ""]),
        nixl(etcd_client={"path": "", "patched": False}),
        profile=MACHINE + '[versions]\ncuda = "12"\ngdrcopy = "2"\nnixl = "1"\n[image]\netcd_uri_patch = true',
    ),
    "version-not-recorded": state(
        in_answer("image", lambda entry: entry["versions"].pop("cuda")), profile=MACHINE + '[versions]\ncuda = "12"'
    ),
    "patch-missing": state(
        nixl(etcd_client={"path": "/c.so", "patched": False}), profile=MACHINE + "[image]\netcd_uri_patch = true",
    ),
    "verbs-of-another-interface": state(verbs((IB, 59), providers=(("efa", 34, IB),))),
    "verbs-of-another-interface-and-a-fitting-one": state(
        verbs((IB, 59), ("/wheel/ib.so", 34), providers=(("efa", 34, "/wheel/ib.so"),)), ucx(libibverbs="/wheel/ib.so")
    ),
    "verbs-of-another-interface-in-use": state(
        verbs((IB, 59), ("/wheel/ib.so", 34), providers=(("efa", 34, "/wheel/ib.so"),)), ucx(libibverbs=IB)
    ),
    "verbs-of-another-interface-and-no-profile": state(
        verbs((IB, 59), providers=(("efa", 34, IB),)), profile="loopback"
    ),
    "verbs-linked-to-another-copy": state(verbs((IB, 34), providers=(("efa", 34, "/wheel/ib.so"),))),
    "verbs-with-two-providers": state(verbs((IB, 34), providers=(("efa", 59, IB), ("efa", 34, IB)))),
    "verbs-without-provider": state(verbs((IB, 34), providers=(("mlx5", 34, IB),))),
    "verbs-of-connectx-with-its-provider": state(
        verbs((IB, 34), providers=(("mlx5", 34, IB),)), profile=IB_MACHINE, after="connectx"
    ),
    "verbs-of-connectx": state(verbs((IB, 34), providers=(("efa", 34, IB),)), profile=IB_MACHINE, after="connectx"),
    "code-for-another-gpu": state(gpu(name="NVIDIA L40S"), profile='[image]\nplugins = ["GPUNETIO"]\n'),
    "code-for-another-gpu-unwanted": state(gpu(0, name="NVIDIA L40S"), profile="[image]\n"),
    "code-by-the-capability": state(gpu(name="NVIDIA Voodoo", capability=100), profile="[image]\n"),
    "code-by-another-capability": state(gpu(capability=120), profile='[image]\nplugins = ["GPUNETIO"]\n'),
    "code-for-a-gpu-without-name": state(gpu(name="", capability=90), profile="[image]\n"),
    "code-for-an-unknown-gpu": state(gpu(name="NVIDIA Voodoo"), profile="[image]\n"),
    "code-for-the-profiles-gpu": state(profile=GPUNETIO, image=True),
    "code-for-another-gpu-of-the-profile": state(
        profile=MACHINE.replace("H100", "A100") + '[image]\nplugins = ["GPUNETIO"]', image=True,
    ),
    "code-without-a-known-gpu": state(profile="[image]\n", image=True),
    # resources
    **{
        f"memlock-{name}": state(write("/proc/self/limits", LIMIT.format(soft)))
        for name, soft in (("64k", 65536), ("least", 512 << 20), ("finite", 16 << 30), ("little-less", (512 << 20) - 1))
    },
    "memlock-privileged": state(
        write("/proc/self/limits", LIMIT.format(65536)),
        write("/proc/self/status", "CapEff:\t0000000000004000\nCpus_allowed_list:\t0-95"),
    ),
    "shm-default": state(SMALL_SHM),
    "shm-default-of-a-laptop": state(SMALL_SHM, profile="loopback", after="bare"),
    "shm-enough": state(answer("shm", size=1 << 30, free=64 << 20)),
    "huge-pages-of-two-sizes": state(
        write("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0),
        write("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", 2),
        write("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", 1),
    ),
    **{
        f"queues-{name}": state(*make, backends=("UCX", "LIBFABRIC", "POSIX"))
        for name, make in (
            ("uring-disabled", [write(URING, 2)]),
            ("uring-disabled-unasked", [write(URING, 1), queues(io_uring_setup="")]),
            ("uring-disabled-for-others", [write(URING, 1), queues(io_uring_setup="EPERM")]),
            ("uring-allowed", [write(URING, 1)]),
            ("uring-forbidden-by-seccomp", [status(Seccomp=2), queues(io_uring_setup="EPERM")]),
            ("uring-forbidden-by-a-module", [status(Seccomp=0), queues(io_uring_setup="EACCES")]),
            ("uring-hidden", [status(Seccomp=2), queues(io_uring_setup="ENOSYS")]),
            ("uring-absent", [queues(io_uring_setup="ENOSYS")]),
            ("uring-locks", [write(KERNEL, "5.11.22-generic"), write(LIMITS, LIMIT.format((8 << 20) - 1))]),
            ("uring-locks-less", [write(KERNEL, "5.11.22-generic"), write(LIMITS, LIMIT.format(8 << 20))]),
            ("uring-locks-nothing", [write(KERNEL, "5.12.0"), write(LIMITS, LIMIT.format(65536))]),
            ("uring-locks-unlimited", [write(KERNEL, "4.18.0")]),
            ("uring-locks-as-root", [write(KERNEL, "5.4"), write(LIMITS, LIMIT.format(65536)), status(CapEff="4000")]),
            ("uring-of-an-unknown-kernel", [write(KERNEL, "odd"), write(LIMITS, LIMIT.format(65536))]),
            ("aio-forbidden", [status(Seccomp=2), queues(io_setup="EPERM")]),
            ("aio-absent", [queues(io_setup="ENOSYS")]),
            ("aio-reserved", [write("/proc/sys/fs/aio-nr", 65536 - 1023)]),
            ("aio-nearly-reserved", [write("/proc/sys/fs/aio-nr", 65536 - 1024)]),
            ("aio-unknown", [remove("/proc/sys/fs/aio-nr")]),
            ("both-forbidden", [write(URING, 2), queues(io_setup="EACCES")]),
            ("not-recorded", [remove("/pytest-nixl/storage-queues.json")]),
        )
    },
    # Of intel_pstate and amd-pstate-epp, powersave is the usual governor, and the preference decides.
    **{
        f"governor-{driver or 'none'}-{preference or 'none'}": state(
            governor(0, driver, preference)
        )
        for driver, preference in (
            ("acpi-cpufreq", ""), ("", ""), ("intel_pstate", "power"), ("intel_pstate", "balance_power"),
            ("amd-pstate-epp", "balance_power"), ("intel_pstate", "balance_performance"), ("intel_pstate", "default"),
        )
    },
    "governor-of-a-core-of-others": state(governor(0), cores("1-95")),
    "governors-of-no-core-of-this-process": state(cores("48-95")),
    "cores-unknown": state(write("/proc/self/status", "CapEff:\t0000000000000000")),
    "cores-of-node-0": state(cores("0-40")),
    "cores-of-node-1": state(cores("48-95")),
    "cores-of-no-node": state(cores("100-120")),
    "cores-of-node-0-and-its-gpu": state(cores("0-40"), after="gpu-missing"),
    "cores-of-node-0-and-its-visible-gpu": state(cores("0-40"), variables(CUDA_VISIBLE_DEVICES="0"), cuda(0, GPU_0)),
    "cores-of-node-0-without-gpus": state(cores("0-40"), after="gpu-none-listed"),
    "cores-of-node-0-with-cards-of-node-1": state(cores("0-40"), without(*EFA[:2]), after="gpu-missing"),
    "cores-of-one-node": state(remove("/sys/devices/system/node/node1")),
    # rdma
    "efa-one-missing": state(without(EFA[0])),
    "efa-none": state(*NO_DEVICES),
    "efa-too-many": state(profile=MACHINE.replace("nics = 4", "nics = 3")),
    "efa-unbound": state(unbound(EFA[0]), without(EFA[0])),
    "efa-unbound-whatever-is-expected": state(unbound(EFA[0]), without(EFA[0]), profile="loopback"),
    "connectx": state(connectx("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), profile=IB_MACHINE),
    "connectx-unbound": state(unbound("mlx5_0"), profile=IB_MACHINE, after="connectx"),
    "broadcom": state(
        connectx("bnxt_re0", "bnxt_re1", "bnxt_re2", "bnxt_re3", driver="bnxt_en"),
        verbs((IB, 34), providers=(("bnxt_re", 34, IB), ("mlx5", 34, IB))), device("bnxt_re0", listed=False),
        profile=IB_MACHINE,
    ),
    "connectx-beside-efa": state(profile=IB_MACHINE),
    "both-ports-down": state(
        port(EFA[1], state="1: DOWN"),
        lambda tree: tree.write(f"/sys/class/infiniband/{EFA[1]}/ports/2/state", "3: ARMED"),
    ),
    **{
        f"errors-{count}-{counter}": state(errors(f"{folder}__{counter}", count))
        for folder, counter, least in (
            ("counters", "link_downed", 10), ("counters", "link_error_recovery", 10),
            ("counters", "local_link_integrity_errors", 100), ("counters", "port_rcv_errors", 1000),
            ("counters", "symbol_error", 1000), ("hw_counters", "rx_icrc_encapsulated", 100),
        )
        for count in (least, least - 1)
    },
    "errors-ten-times-as-many": state(errors("counters__symbol_error", 2000, usual=200)),
    "errors-of-two-counters": state(errors("counters__symbol_error", 8841), errors("counters__port_rcv_errors", 2000)),
    "errors-of-most": state(*(port(name, counters__symbol_error=9000) for name in EFA[1:])),
    "errors-of-two-devices": state(without(EFA[2], EFA[3]), port(EFA[0], counters__symbol_error=9000)),
    "errors-of-three-devices": state(port(EFA[1], counters__symbol_error=9000), after="efa-one-missing"),
    "rate-high": state(port(EFA[2], rate="200 Gb/sec (4X HDR)")),
    "rate-low-without-a-profile": state(port(EFA[2], rate="25 Gb/sec (1X EDR)"), profile="loopback"),
    "rate-nearly-reached": state(*(port(name, rate="99.95 Gb/sec (4X EDR)") for name in EFA)),
    "rate-unknown": state(*(port(name, rate="") for name in EFA)),
    "uverbs-closed": state(closed("Operation not permitted", 1)),
    "uverbs-absent": state(closed(UVERBS_GONE, 0, 1, 2, 3)),
    "uverbs-module-absent": state(remove("/sys/class/infiniband_verbs")),
    # rdma: from the devices to UCX. tests/machines makes those that soft-RoCE can have.
    "ucx-without-module": state(ucx(module="")),
    "ucx-without-module-by-a-variable": state(ucx(module=""), variables(UCX_MODULES="^ib")),
    "ucx-not-asked": state(nixl(ucx_rdma=None)),
    "ucx-does-not-list-of-another-abi": state(
        device(EFA[0], offered=False, listed=False), ucx(other_abi={EFA[0]: "Driver efa does not support ABI 3"})
    ),
    "ucx-does-not-list-without-provider": state(
        device(EFA[0], offered=False, listed=False), verbs((IB, 34), providers=(("mlx5", 34, IB), ("irdma", 34, IB)))
    ),
    "ucx-does-not-list-without-any-provider": state(
        device(EFA[0], offered=False, listed=False), verbs((IB, 34), providers=()),
    ),
    "ucx-does-not-list-of-another-interface": state(
        device(EFA[0], offered=False, listed=False), verbs((IB, 59), providers=(("efa", 34, IB),))
    ),
    "ucx-does-not-list-of-another-copy": state(
        device(EFA[0], offered=False, listed=False), verbs((IB, 34), providers=(("efa", 34, "/wheel/ib.so"),))
    ),
    "ucx-does-not-list": state(device(EFA[0], offered=False, listed=False)),
    "ucx-does-not-list-two": state(
        device(EFA[0], offered=False, listed=False), device(EFA[2], offered=False, opened="Too many open files")
    ),
    "ucx-cannot-open": state(device(EFA[0], opened="Too many open files")),
    "ucx-cannot-register": state(
        device(EFA[0], registered="Cannot allocate memory"), write("/proc/self/limits", LIMIT.format(1 << 30)),
    ),
    "ucx-cannot-register-without-limit": state(device(EFA[0], registered="Cannot allocate memory")),
    "ucx-has-an-interface-elsewhere": state(port(EFA[0], gid_attrs__ndevs__0="eth7")),
    "ucx-offers-without-a-cause": state(device(EFA[0], offered=False, shared_queues=1)),
    "ucx-offers-without-shared-queues": state(device(EFA[0], offered=False)),
    "ucx-says-why-not": state(
        device(EFA[0], shared_queues=1), port(EFA[0], gids__0="2001:0db8::1"),
        backend("UCX", said=["uct_iface_open(srd/rdmap79s0:1) failed: Address not valid"]),
    ),
    "ucx-says-why-not-of-a-link-local-gid": state(
        backend("UCX", said=["odd", "uct_iface_open(srd/rdmap79s0:1) failed: Address not valid"])
    ),
    "ucx-says-why-not-of-a-gid-of-an-interface": state(
        port(EFA[0], gid_attrs__ndevs__0="enp71s0"),
        backend("UCX", said=["uct_iface_open(srd/rdmap79s0:1) failed: Address not valid"]),
    ),
    "ucx-offers-not-the-iwarp": state(
        device(EFA[0], offered=False), write(f"/sys/class/infiniband/{EFA[0]}/node_type", "4: RNIC"),
    ),
    "ucx-offers-not-what-is-down": state(device(EFA[0], offered=False), port(EFA[0], state="1: DOWN")),
    "ucx-offers-not-the-gid-index": state(device(EFA[0], offered=False), variables(UCX_IB_GID_INDEX="7")),
    "ucx-offers-not-another-gid-index": state(device(EFA[0], offered=False), variables(UCX_IB_GID_INDEX="0")),
    "ucx-offers-not-without-gid-at-an-index": state(
        device(EFA[0], offered=False), port(EFA[0], gids__0="0000:0000::0000"), variables(UCX_IB_GID_INDEX="7")
    ),
    "ucx-says-why-not-of-two-gids": state(
        port(EFA[0], gids__1="2001:0db8::1"), device(EFA[0], shared_queues=1),
        backend("UCX", said=["uct_iface_open(srd/rdmap79s0:1) failed: Address not valid"]),
    ),
    "ucx-offers-not-without-gid": state(device(EFA[0], offered=False), port(EFA[0], gids__0="0000:0000::0000")),
    "ucx-leaves-out-all": state(variables(UCX_NET_DEVICES="enp71s0:1")),
    "ucx-leaves-out-all-without-port": state(variables(UCX_NET_DEVICES="enp71s0,enp72s0")),
    "ucx-leaves-out-some": state(variables(UCX_NET_DEVICES="enp71s0,rdmap79s0:1")),
    # network
    "nic-down": state(write("/sys/class/net/enp71s0/operstate", "down")),
    "nic-in-an-unknown-state": state(write("/sys/class/net/enp71s0/operstate", "unknown")),
    "nic-down-that-carries-nothing": state(write("/sys/class/net/enp72s0/operstate", "down")),
    "nic-down-that-is-named": state(
        write("/sys/class/net/enp72s0/operstate", "lowerlayerdown"), variables(UCX_NET_DEVICES="enp72s0,rdmap79s0:1")
    ),
    "nic-rates": state(
        *(write(f"/sys/class/net/enp{n}s0/speed", s) for n, s in ((71, 100000), (72, 99950))), profile=TCP_MACHINE,
    ),
    "nic-rate-low": state(
        *(write(f"/sys/class/net/enp{n}s0/speed", s) for n, s in ((71, 100000), (72, 25000))), profile=TCP_MACHINE,
    ),
    "mtu-of-an-interface-that-is-down": state(
        write("/sys/class/net/enp72s0/mtu", 1500), write("/sys/class/net/enp72s0/operstate", "down")
    ),
    "link-local-advertised": state(
        answer("addresses", enp72s0=["169.254.0.1/16"]), nixl(advertised=["169.254.0.1", "10.0.0.11"])
    ),
    "link-local-alone": state(
        lambda tree: tree.answer("addresses", {"enp71s0": ["169.254.0.1/16"]}), nixl(advertised=[]),
    ),
    "link-local-not-asked": state(answer("addresses", enp72s0=["169.254.0.1/16"]), nixl(advertised=[])),
    "name-unknown-without-server": state(UNRESOLVED, write("/etc/resolv.conf", "search ec2.internal")),
    "name-in-a-pod-with-the-nodes-resolver": state(POD),
    "name-in-a-pod-by-its-variable": state(
        in_answer("environment", lambda entry: entry["launcher"].update(KUBERNETES_SERVICE_HOST="10.96.0.1"))
    ),
    "name-unknown-in-a-pod-with-the-nodes-resolver": state(POD, UNRESOLVED),
    "name-in-a-pod": state(
        POD,
        write("/etc/resolv.conf", "nameserver 10.96.0.10\nsearch bench.svc.cluster.local svc.cluster.local"),
    ),
    "name-of-ipv6-only": state(answer("etcd", names=[{"host": "etcd.default", "addresses": ["fd00::1"], "fault": ""}])),
    "name-of-two-addresses": state(
        answer("etcd", names=[{"host": "etcd.default", "addresses": ["fd00::1", "10.0.0.5"], "fault": ""}])
    ),
    "name-is-an-address": state(answer("etcd", names=[
        {"host": host, "addresses": [], "fault": "not asked"} for host in ("10.0.0.5", "fd00::1", "::ffff:10.0.0.5")
    ])),
    "peer-lost": state(answer("peers", **{
        "node-b": {"addresses": ["10.0.0.12"], "fault": "10.0.0.12 port 1: no answer"},
        "node-c": {"addresses": ["10.0.0.13"], "fault": ""},
    })),
    "peer-reached": state(answer("peers", **{"node-c": {"addresses": ["10.0.0.13"], "fault": ""}})),
    **{
        f"side-channel-{name}": state(answer("side-channels", prefill={"fault": fault}, decode={"fault": ""}))
        for name, fault in (
            ("refused", "prefill port 5600: connection refused"), ("dropped", "prefill port 5600: no answer"),
            ("silent", "prefill port 5600: no greeting of ZMQ"), ("unknown", "Name or service not known"), ("good", ""),
        )
    },
    # gpu
    "gpu-missing": state(gpus(0), cuda(0, GPU_0)),
    "gpu-missing-on-the-bus": state(gpus(0), cuda(0, GPU_0), off_bus(GPU_1)),
    "gpu-not-given": state(gpus(0, unusable=[{"index": 1, "error": "Insufficient Permissions"}]), cuda(0, GPU_0)),
    "gpu-not-given-any": state(gpus(unusable=[{"index": 1, "error": "Insufficient Permissions"}]), cuda(0)),
    "gpu-lost": state(gpus(0, unusable=[{"index": 1, "error": "GPU is lost"}]), cuda(0, GPU_0)),
    "gpus-lost": state(gpus(unusable=[{"index": 0, "error": "GPU is lost"}, {"index": 1, "error": "odd"}]), cuda(0)),
    "gpu-on-the-bus-alone": state(gpus(), cuda(0), profile="[image]\n"),
    "gpu-lost-without-remedy": state(gpus(0, unusable=[{"index": 1, "error": "odd"}]), cuda(0, GPU_0)),
    "gpu-none-listed": state(gpus(), cuda(0), profile="h100"),
    "gpu-none": state(gpus(), cuda(100, node=False), off_bus(GPU_0, GPU_1), profile="[image]\n"),
    "gpu-without-driver": state(remove("/proc/driver"), silent("nvml", "no"), cuda(None)),
    "gpu-of-another-model": state(gpu(1, name="NVIDIA A100-SXM4-40GB", nvlinks=18)),
    "gpu-without-a-name": state(gpu(1, name="")),
    "gpu-without-a-name-or-model": state(gpu(1, name=""), profile=MACHINE.replace('gpu = "H100"\n', "")),
    "gpus-not-shown": state(cuda(0, GPU_0)),
    "gpus-not-shown-and-not-expected": state(cuda(0, GPU_0), profile="loopback"),
    "gpus-not-shown-by-a-variable": state(cuda(0, GPU_0), variables(CUDA_VISIBLE_DEVICES="0")),
    "gpus-prohibited": state(gpu(1, state={"compute_mode": "prohibited"})),
    "gpus-exclusive": state(gpu(1, state={"compute_mode": "exclusive process"})),
    "gpus-exclusive-with-mps": state(
        gpu(state={"compute_mode": "exclusive process"}), variables(CUDA_MPS_PIPE_DIRECTORY="/tmp/mps")
    ),
    "gpus-exclusive-with-the-usual-mps": state(
        gpu(state={"compute_mode": "exclusive process"}), write("/tmp/nvidia-mps/control", "")
    ),
    "mig-without-instances": state(gpu(1, mig=True, instances=0)),
    "mig-without-instances-and-not-expected": state(gpu(1, mig=True, instances=0), profile="loopback"),
    "mig-without-instances-anywhere": state(gpu(mig=True, instances=0), cuda(100)),
    "mig": state(gpu(1, mig=True, instances=2), pairs("ok", "ok")),
    "mig-of-the-first-gpu": state(gpu(0, mig=True, instances=2), cuda(0, GPU_1)),
    "mig-and-no-peer-to-peer": state(
        gpu(1, mig=True, instances=2), pairs("it is not supported", "it is not supported"),
    ),
    "driver-mismatch": state(
        silent("nvml", "NVML cannot be initialised: RM has detected an NVML/RM version mismatch."),
    ),
    "driver-silent": state(silent("nvml", "NVML does not answer: Unknown Error")),
    "driver-too-old": state(CUDA_13, answer("nvml", cuda="12.4"), image(torch={})),
    "driver-of-cuda-11": state(answer("nvml", cuda="11.8"), image(torch={})),
    "driver-new": state(answer("nvml", cuda="13.0")),
    "nvml-missing": state(silent("nvml", "NVML (libnvidia-ml.so.1) was not found")),
    "nvml-package-missing": state(
        silent("nvml", "NVML's Python package is not installed: run `pip install nvidia-ml-py`"),
    ),
    **{f"cuda-code-{code}": state(cuda(code)) for code in (46, 100, 101, 802, 803, 804, 805, 999, 34)},
    "cuda-code-of-the-fabric": state(
        cuda(802), gpu(1, state={"fabric": "is in progress"}), answer("nvml", confidential=True),
    ),
    "cuda-no-device-in-a-container": state(cuda(100, node=False)),
    "cuda-fails-without-the-variable-too": state(cuda(100, without_variable=802), variables(CUDA_VISIBLE_DEVICES="7")),
    "cuda-silent": state(cuda(None, why="the CUDA driver does not answer: no answer within 20 s")),
    "cuda-not-loaded": state(cuda(None, library="libcuda.so.1: cannot open shared object file")),
    "cuda-not-loaded-in-a-container": state(
        cuda(None, library="libcuda.so.1: cannot open shared object file", node=False),
    ),
    "ucx-cuda-of-a-worker": state(backend("UCX", versions={"cuda_runtime": "/torch/lib/libcudart.so.12"})),
    "ucx-cuda-unknown": state(backend("UCX", plugin="")),
    **{
        f"model-{profile}-{name.replace(' ', '-')}": state(gpu(name=f"NVIDIA {name}"), profile=profile)
        for profile, name in (
            ("h100", "H100 PCIe"), ("h100", "L4"), ("h100", "H20"), ("h100", "H200"), ("h200", "GH200 480GB"),
            ("h200", "H200"),
        )
    },
    # gpu_health
    "p2p-off-with-nvlink": state(pairs("it is not supported", "it is not supported")),
    "p2p-off-with-nvlink-of-one": state(
        pairs("it is not supported", "it is not supported"), gpu(0, nvlinks=0), gpu(1, nvlinks=None)
    ),
    "p2p-off-with-nvlink-of-the-first": state(
        pairs("it is not supported", "it is not supported"), gpu(1, nvlinks=None)
    ),
    "p2p-off-without-nvlink": state(pairs("it is not supported", "it is not supported"), gpu(nvlinks=None)),
    "p2p-off-without-nvlink-in-two-ways": state(
        pairs("it is not supported", "the driver does not know"), gpu(nvlinks=None),
    ),
    **{
        f"nvlink-{links}-of-{name.replace(' ', '-')}": state(
            gpu(name=f"NVIDIA {name}", nvlinks=links), profile="loopback"
        )
        for name, links in (
            ("H100 80GB HBM3", 15), ("A100-SXM4-80GB", 12), ("A100-SXM4-80GB", 11), ("A800-SXM4-80GB", 8),
            ("A800-SXM4-80GB", 7), ("B200", 18), ("B200", 17), ("H20", 18), ("H20", 17), ("H200", 18), ("H200", 17),
            ("H100 PCIe", 12), ("H200 NVL", 12),
        )
    },
    "nvlink-15-expected": state(gpu(nvlinks=15)),
    "nvlink-0-of-one-gpu": state(gpu(nvlinks=0), profile="loopback", after="gpu-missing"),
    "direct-by-peermem": state(*NO_DMA_BUF, write("/sys/module/nvidia_peermem/refcnt", 1)),
    "direct-by-efa": state(answer("dma_buf", supported=False)),
    "direct-by-efa-in-small-letters": state(answer("dma_buf", supported=False), p2p("nvidia", *EFA)),
    "direct-by-efa-of-some": state(answer("dma_buf", supported=False), p2p("NONE", EFA[0])),
    "direct-by-efa-but-the-last": state(answer("dma_buf", supported=False), p2p("NONE", EFA[3])),
    "direct-by-nothing": state(*NO_DMA_BUF),
    "direct-unknown": state(*NO_DMA_BUF, silent("dma_buf", "it did not answer")),
    "direct-of-closed-modules": state(
        *NO_DMA_BUF, silent("dma_buf", "it did not answer"),
        lambda tree: tree.replace("/proc/driver/nvidia/version", "Open ", ""),
    ),
    "gdrcopy-not-of-this-ucx": state(remove("/dev/gdrdrv"), nixl(ucx_variables=["UCX_TLS", "UCX_NET_DEVICES"])),
    "gdrcopy-of-an-unknown-ucx": state(remove("/dev/gdrdrv"), nixl(ucx_variables=[])),
    "gdrcopy-of-no-ucx": state(remove("/dev/gdrdrv"), nixl(ucx_variables=["UCX_TLS"]), backends=("LIBFABRIC",)),
    "xid-two-grave": state(kernel_log(xid(79), xid(62, "x", "0000:97:00"), "NVRM: odd")),
    "xid-121": state(kernel_log(xid(121))),
    "xid-31-and-121": state(kernel_log(xid(31), xid(121), xid(13))),
    "xid-31-and-79": state(kernel_log(xid(31), xid(79))),
    "xid-121-and-149-nonfatal": state(kernel_log(xid(121), xid(149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 09"))),
    "xid-149-nonfatal": state(kernel_log(xid(149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 09"))),
    "xid-149": state(kernel_log(xid(149, "NETIR_BER_EVENT Fatal XC0 i0 Link 09"))),
    "xid-154-node-reboot": state(
        kernel_log(xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)"))
    ),
    "xid-154-none": state(
        kernel_log(xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")),
    ),
    "gpu-with-faults": state(gpu(1, uncorrected=2, bar1=(40 << 30) - 1, persistence=False)),
    "ecc-remap-failed": state(gpu(1, state={"remap_failed": True})),
    "ecc-remap-pending": state(gpu(1, state={"remap_pending": True})),
    "gpus-that-report-little": state(gpu(uncorrected=None, bar1=None, persistence=None, nvlinks=None)),
    "ecc-of-one": state(gpu(0, uncorrected=None)),
    "nics-fewer": state(profile=MACHINE.replace("nics_per_gpu = 2", "nics_per_gpu = 3")),
    "nics-fewer-with-idle-ones": state(moved("pci0000:00", 0)),
    "nics-on-another-root": state(moved("pci0000:00", 0), profile="loopback"),
    "nics-far": state(moved("pci0000:00", 0), without(*EFA[:2]), profile="loopback"),
    "nics-far-in-a-profile-of-a-gpu": state(moved("pci0000:00", 0), without(*EFA[:2]), profile="h100"),
    "nics-far-from-one-card": state(moved("pci0000:00", 0), without(*EFA[:3]), profile="loopback"),
    "nics-far-but-all-there": state(
        moved("pci0000:00", 0), without(*EFA[:2]),
        profile=MACHINE.replace("nics = 4", "nics = 2").replace("nics_per_gpu = 2\n", ""),
    ),
    "nics-unplaced": state(moved("pci0000:00", -1), profile="loopback"),
    "nics-without-paths": state(remove("/sys/bus/pci/devices/" + GPU_0, "/sys/bus/pci/devices/" + GPU_1)),
    # etcd
    "etcd-none": state(silent("etcd", "no etcd address is given")),
    "etcd-refused": state(
        answer("etcd", fault="etcd at http://etcd.default:2379: connection refused", remedy="start it"),
    ),
    **{
        f"etcd-{fact}-{value}": state(answer("etcd", **{fact: value}))
        for fact, values in (
            ("version", ("3.3.27", "3.4.0", "4.0.0", "3.x", ".5", "new")),
            ("latency", (0.0999, 0.1, 0.9999, 1.0, None)),
            ("clock", (5.0, -5.0, 5.6, -90.0, 2.4, -0.2, None)),
        )
        for value in values
    },
    # variables
    "variables-misspelt": state(
        variables(UCX_TSL="rc", FI_PROVIDERS="efa", NIXL_ETCD_ENDPOINT="http://e:1", UCX_OLD="1"),
        nixl(unused={"UCX_TSL": "UCX_TLS", "UCX_OLD": ""}),
    ),
    "variables-unknown": state(
        variables(UCX_OLD="1", NIXL_BUILD_SRC_2="1", NIXL_ODD_="1"), nixl(unused={"UCX_OLD": ""})
    ),
    "variables-of-modules": state(
        variables(UCX_OF_A_MODULE="1", UCX_TLS="rc,srd,cuda", FI_PROVIDER="efa", LD_LIBRARY_PATH="/x"),
    ),
    "variables-of-builds": state(
        variables(**{f"NIXL_BUILD_{end}": "1" for end in ["DIR", "HOME", "PREFIX", "PATH", "ROOT", "VERSION", "VER"]}),
    ),
    "variables-of-more-builds": state(
        variables(**{f"NIXL_BUILD_{end}": "1" for end in ["REF", "REPO", "URL", "COMMIT", "BRANCH", "TAG", "SRC"]}),
    ),
    "variables-of-builds-misspelt": state(variables(NIXL_PLUGINS_DIR="/x")),
    "variables-of-families": state(
        nixl(ucx_variables=[f"UCX_{name}_OF_IT" for name in ("RC_VERBS", "DC_MLX5", "UD_GDA", "SRD", "GGA")],
             unused={f"UCX_{name}_OF_IT": "" for name in ("IB", "RC", "DC", "UD", "SRD")}),
        variables(**{f"UCX_{name}_OF_IT": "1" for name in ("IB", "RC", "DC", "UD", "SRD")}),
    ),
    "variables-of-the-family-of-srd": state(
        nixl(ucx_variables=["UCX_SRD_OF_IT"], unused={"UCX_IB_OF_IT": ""}), variables(UCX_IB_OF_IT="1")
    ),
    "variables-of-no-family": state(
        nixl(ucx_variables=["UCX_GGA_OF_IT", "UCX_RC_VERBS_ON_IT"], unused={"UCX_IB_OF_IT": "", "UCX_XX_YY": ""}),
        variables(UCX_IB_OF_IT="1", UCX_XX_YY="1"),
    ),
    "variables-of-this-nixl": state(
        variables(NIXL_NEW_THING="1", FI_EFA_NEW="1", UCX_NEW="1"),
        nixl(nixl_variables=["NIXL_NEW_THING"], fabric_variables=["FI_EFA_NEW", "FI_HMEM"], ucx_variables=["UCX_NEW"]),
    ),
    "variables-of-the-first-provider": state(
        variables(FI_EFA_ODD="1"), nixl(fabric_variables=["FI_EFA_X", "FI_HMEM"])
    ),
    "variables-without-ucx": state(variables(UCX_PROTO_INFO="y", UCX_PROTO_INFOS="y"), nixl(ucx_variables=[])),
    "variables-of-another-provider": state(variables(FI_CXI_X="1", FI_OPX_Y="2")),
    "variables-of-a-provider": state(variables(FI_EFA_X="1")),
    "variables-without-libfabric": state(variables(FI_CXI_X="1"), nixl(fabric_variables=[])),
    **{
        f"tls-{name}": state(variables(UCX_TLS=text))
        for name, text in (
            ("empty", ""), ("commas", "^,"), ("tcp", "tcp,cuda_copy"), ("not-ib", "^ib"), ("not-all", "^all"),
            ("not-rc-dc-ud", "^rc,dc,ud_verbs"), ("not-rc-dc", "^rc,dc"), ("not-rc-ud", "^rc,ud"),
            ("not-dc-ud", "^dc,ud"), ("all", "all"), ("srd", "srd,cuda"),
            ("without-cuda", "ud,sm"), ("not-tcp", "^tcp"), ("misspelt", "rcc,cuda_copi,srd"), ("odd", "srd,odd,cuda"),
        )
    },
    **{
        f"tls-{name}-refused": state(variables(UCX_TLS=text), refused(said=lines))
        for name, text, lines in (
            ("tcp", "tcp", []), ("without-cuda", "ud,sm", []), ("not-cuda", "^cuda", []), ("odd", "odd,cuda", []),
            ("misspelt", "rcc,cuda", []), ("sm", "^tcp,ib", []),
            ("rc", "rc,cuda", ["transport 'rc' is not available, please use one or more of: ud, tcp, sm, srd, dc"]),
            ("rc-odd", "rc,odd", ["transports 'rc','odd' are not available, please use one or more of: tcp, srd"]),
        )
    },
    **{
        f"tls-{name}-refused-without-rdma": state(
            variables(UCX_TLS=text), refused(), profile="loopback", after="without-rdma"
        )
        for name, text in (("not-tcp", "^tcp"), ("sm", "sm,cuda"), ("rc", "rc,cuda"), ("auxiliary", "tcp:aux,cuda"))
    },
    "tls-refused-by-an-older-nixl": state(variables(UCX_TLS="ud,sm"), refused(), nixl(nixl="1.4.1")),
    "tls-refused-without-gpu": state(variables(UCX_TLS="ud,sm"), refused(), profile="loopback", after="bare"),
    "tls-rc-and-no-device-used": state(
        variables(UCX_TLS="rc,cuda"), ucx(offered={}),
        refused(said=["transport 'rc' is not available, please use one or more of: tcp, sm"]),
    ),
    "tls-not-of-the-profile": state(variables(UCX_TLS="ib,cuda,tcp"), profile="loopback"),
    "tls-not-of-the-profile-over-tcp": state(
        variables(UCX_TLS="tcp,cuda_copy"), profile="loopback", after="without-rdma",
    ),
    "tls-of-the-profile": state(variables(UCX_TLS="tcp,cuda_copy"), profile="tcp-loopback", after="without-rdma"),
    "tls-not-of-another-profile": state(
        variables(UCX_TLS="ib,cuda,tcp"),
        profile=MACHINE + '[[expect]]\nbackend = ["UCX"]\nop = ["WRITE"]\nmemory = ["DRAM:DRAM"]\nblocks = "4KiB"\n'
        'transports = ["cma"]\nsource = "-"',
    ),
    "device-absent": state(variables(UCX_NET_DEVICES="rdmap79s1:1,enp71s0")),
    "device-pattern": state(variables(UCX_NET_DEVICES="rdmap*,mlx5_[01],enp7?s0")),
    "device-list-with-blanks": state(variables(UCX_NET_DEVICES="enp71s0, , rdmap79s0:1 ")),
    "device-all": state(variables(UCX_NET_DEVICES="all")),
    "device-excluded": state(variables(UCX_NET_DEVICES="^rdmap79s0")),
    "device-loopback": state(loopback, variables(FI_SOCKETS_IFACE="lo")),
    "device-loopback-of-ucx": state(loopback, variables(UCX_NET_DEVICES="lo,rdmap79s0:1")),
    # libfabric compares without regard to case and skips empty names, but a blank is a part of a name.
    **{
        f"provider-{value.replace(' ', '_')}": state(variables(FI_PROVIDER=value))
        for value in (
            "efaa", "efaa,zzz", "zzz", "tcp",
            "EFA", "tcp,Efa", "efa;ofi_rxd,tcp", "efa-direct,OFI_RXM", ",efa,", "^efa",
            "^tcp,EFA",
            "^tcp", "^tcp, efa", "^efa-direct", "tcp, efa", ",", "off_x,efa", "verbs,efa",
        )
    },
    **{
        f"provider-{value}-without-rdma": state(variables(FI_PROVIDER=value), profile="loopback", after="without-rdma")
        for value in ("efa", "tcp,EFA", "verbs", "tcp,Verbs;ofi_rxm", "tcp", "^efa")
    },
    "provider-verbs-with-connectx": state(variables(FI_PROVIDER="verbs"), profile=IB_MACHINE, after="connectx"),
    **{
        f"namespace-{name}": state(variables(NIXL_ETCD_NAMESPACE=text))
        for name, text in (
            ("good", "/nixl/agents"), ("ends-with-a-slash", "/nixl/"), ("without-a-slash", "nixl"),
            ("quoted", '"/nixl"'),
            ("quoted-once", "'/nixl"), ("blank", "/nixl "),
        )
    },
    "agree-two-etcds": state(variables(NIXL_ETCD_ENDPOINTS="http://a:2379", ETCD_ENDPOINTS="http://b:2379")),
    "agree-second-etcd-alone": state(variables(ETCD_ENDPOINTS="http://b:2379")),
    "agree-plugins-of-one-backend": state(
        variables(NIXL_PLUGIN_DIR=PLUGINS), backend("UCX", plugin="/other/libplugin_UCX.so")
    ),
    "agree-many-faults": state(variables(
        NIXL_ETCD_ENDPOINTS="http://a:2379", https_proxy="http://proxy:3128", FI_EFA_USE_DEVICE_RDMA="No",
        FI_HMEM_DISABLE_P2P="ON", UCX_IB_GPU_DIRECT_RDMA="off", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        RDMAV_FORK_SAFE="1", NIXL_PLUGIN_DIR="/none", VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.12", CUDA_VISIBLE_DEVICES="",
        PYTORCH_ALLOC_CONF="a:1,expandable_segments:true",
    )),
    "agree-the-same-without-devices": state(
        variables(FI_EFA_USE_DEVICE_RDMA="0", FI_HMEM_DISABLE_P2P="1", UCX_IB_GPU_DIRECT_RDMA="n",
                  CUDA_VISIBLE_DEVICES="", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", RDMAV_FORK_SAFE="1",
                  IBV_FORK_SAFE="1"),
        profile="loopback", after="bare",
    ),
    "agree-good-values": state(variables(
        FI_EFA_USE_DEVICE_RDMA="1", FI_HMEM_DISABLE_P2P="0", UCX_IB_GPU_DIRECT_RDMA="try", NIXL_PLUGIN_DIR=PLUGINS,
        PYTORCH_CUDA_ALLOC_CONF="my_expandable_segments:True", VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.11",
    )),
    **{
        f"agree-gpu-direct-{value}": state(variables(UCX_IB_GPU_DIRECT_RDMA=value)) for value in ("n", "No", "0")
    },
    "agree-ibv-fork-safe": state(variables(IBV_FORK_SAFE="1")),
    "agree-plugins-without-nixl": state(variables(NIXL_PLUGIN_DIR="/none"), silent("nixl", LOST)),
    **{
        f"agree-side-channel-{host}": state(variables(VLLM_NIXL_SIDE_CHANNEL_HOST=host))
        for host in ("127.0.0.1", "0.0.0.0", "::1", "::", "node-b", "fe80::9")
    },
    "agree-side-channel-without-addresses": state(
        variables(VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.12"), lambda tree: tree.answer("addresses", {})
    ),
    "agree-preload": state(nixl(unused={"LD_PRELOAD": "/x.so (no such file)"})),
    **{
        f"agree-visible-{visible or 'empty'}": state(
            cuda(code, without_variable=0), variables(CUDA_VISIBLE_DEVICES=visible)
        )
        for visible, code in (
            ("8", 100), ("-1", 100), ("", 100), ("8,0", 100), ("0,0", 101), ("nonsense", 100), ("GPU-deadbeef", 100),
            ("MIG-deadbeef", 100),
        )
    },
    **{
        f"agree-visible-{visible}-shows-{len(shown)}": state(cuda(0, *shown), variables(CUDA_VISIBLE_DEVICES=visible))
        for visible, shown in (
            ("0,8", (GPU_0,)), ("0,-1,1", (GPU_0,)), ("MIG-1,MIG-2", (GPU_0,)), ("0,1,", (GPU_0, GPU_1)), ("8,0", ()),
        )
    },
    "agree-visible-twice-not-asked": state(
        remove("/pytest-nixl/cuda_driver.json"), variables(CUDA_VISIBLE_DEVICES="0,0"),
    ),
    "agree-visible-uuid-not-asked": state(
        remove("/pytest-nixl/cuda_driver.json"), variables(CUDA_VISIBLE_DEVICES="GPU-1"),
    ),
    "agree-visible-0-not-asked": state(remove("/pytest-nixl/cuda_driver.json"), variables(CUDA_VISIBLE_DEVICES="0")),
    "agree-visible-fails-in-another-way": state(cuda(802, without_variable=802), variables(CUDA_VISIBLE_DEVICES="0")),
    # engine
    **{
        f"telemetry-{name}": state(*make)
        for name, make in (
            ("unset-untried", [nixl(telemetry={})]),
            ("off", [variables(NIXL_TELEMETRY_ENABLE="n"), nixl(telemetry={"error": "nixlNoTelemetryError: x"})]),
            ("off-untried", [variables(NIXL_TELEMETRY_ENABLE="Off"), nixl(telemetry={})]),
            ("off-untried-before-1.4", [variables(NIXL_TELEMETRY_ENABLE="off"), nixl(telemetry={}, nixl="1.3.0")]),
            ("on", [variables(NIXL_TELEMETRY_ENABLE="y")]),
            ("on-with-a-folder", [variables(NIXL_TELEMETRY_ENABLE="y", NIXL_TELEMETRY_DIR="/t")]),
            ("on-with-an-exporter", [variables(NIXL_TELEMETRY_ENABLE="y", NIXL_TELEMETRY_EXPORTER="prometheus")]),
            ("unread", [nixl(telemetry={"error": "nixlBackendError: NIXL_ERR_BACKEND"})]),
            ("not-a-bool", [variables(NIXL_TELEMETRY_ENABLE="odd"), silent("nixl", "Conversion to bool failed: odd")]),
            ("not-a-bool-of-another", [silent("nixl", "Conversion to bool failed: odd")]),
            ("without-its-plugin", [silent("nixl", "x: Failed to load telemetry plugin: y")]),
            ("without-its-exporter", [silent("nixl", "x: Failed to create telemetry exporter 'z'")]),
        )
    },
    **{
        f"engine-{name}": state(variables(**values), backends=backends)
        for name, backends, values in (
            ("without-efa", ("UCX", "LIBFABRIC"), {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX"}),
            ("fits", ("UCX", "LIBFABRIC"), {"TRTLLM_NIXL_KVCACHE_BACKEND": "libfabric",
                                            "MX_NIXL_BACKEND": "UCX, LIBFABRIC"}),
            ("of-lmcache", ("UCX", "LIBFABRIC"), {"LMCACHE_NIXL_BACKENDS": "UCX"}),
            ("not-validated", ("UCX",), {"TRTLLM_NIXL_KVCACHE_BACKEND": "LIBFABRIC"}),
        )
    },
    "engine-without-any-efa": state(variables(MX_NIXL_BACKEND="UCX"), profile="loopback", after="without-rdma"),
    # transfers
    "transfers": state(transfers=(MOVED, TransferProof("LIBFABRIC", "VRAM:DRAM", transports=("efa", "shm")))),
    "transfers-of-libfabric": state(
        transfers=(TransferProof("LIBFABRIC", "DRAM:DRAM", libraries=("/opt/libfabric.so.1", "/opt/libucp.so.0")),)
    ),
    "transfers-with-two-libucp": state(transfers=(replace(MOVED, libraries=(*MOVED.libraries, "/opt/libucp.so.0")),)),
    "transfers-of-files": state(transfers=(TransferProof("POSIX", "DRAM:FILE"),)),
    "transfer-fails-by-a-variable": state(
        transfers=(MOVED, TransferProof("UCX", "DRAM:DRAM", REFUSED, "read it", culprits=PROTO))
    ),
    **{
        f"transfer-fails-by-{name}": state(transfers=(MOVED, TransferProof("UCX", "DRAM:DRAM", REFUSED, **values)))
        for name, values in (
            ("two-variables", {"culprits": (("UCX_TLS", "a"), ("UCX_X", "b")), "remedy": "change UCX_TLS"}),
            ("variables-together", {"culprits": PROTO, "together": (("UCX_TLS", "tcp"),)}),
            ("a-variable-with-a-remedy", {"culprits": (("UCX_TLS", "cma"),), "remedy": "add tcp to UCX_TLS"}),
        )
    },
    "transfer-fails": state(
        transfers=(TransferProof("UCX", "VRAM:VRAM", REFUSED, "mend it", obstacle="no ptrace"), MOVED),
    ),
    "transfer-fails-bare": state(
        transfers=(TransferProof("LIBFABRIC", "DRAM:DRAM", REFUSED, "read the lines below", bare="too"),),
    ),
    "transfer-fails-without-remedy": state(transfers=(TransferProof("LIBFABRIC", "DRAM:DRAM", REFUSED),)),
    "transfer-fails-with-files": state(
        answer("ucx_files", **{"/a/ucx.conf": ["UCX_TLS=rc"], "/b/ucx.conf": ["UCX_X=1", "UCX_Y=2"]}),
        transfers=(TransferProof("UCX", "DRAM:DRAM", REFUSED, bare="too"),),
    ),
    "transfer-of-libfabric-fails-with-files": state(
        answer("ucx_files", **{"/a/ucx.conf": ["UCX_TLS=rc"]}),
        transfers=(TransferProof("LIBFABRIC", "DRAM:DRAM", REFUSED, "mend it"),),
    ),
    "transfer-late": state(transfers=(TransferProof("UCX", "DRAM:DRAM", "no answer", late=True),)),
    "transfer-not-by-a-copy": state(
        transfers=(replace(MOVED, transports=("tcp/lo",), obstacle="seccomp forbids process_vm_readv"),),
        profile="loopback",
    ),
    "transfer-not-by-a-copy-but-accepted": state(
        transfers=(replace(MOVED, transports=("posix/memory",), obstacle="seccomp forbids process_vm_readv"),),
        profile="loopback",
    ),
    "transfer-not-by-a-copy-with-any-transport": state(
        transfers=(replace(MOVED, transports=("tcp/lo",), obstacle="seccomp forbids process_vm_readv"),)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Write the tree of the small host: a p5.48xlarge with the devices of ``ADDRESSES``."""
    folder = tmp_path_factory.mktemp("host")
    topology = ElementTree.parse(TOPOLOGY / "p5.48xl.xml")
    for parent in topology.iter():
        for item in list(parent):
            if item.get("type") == "PCIDev" and item.attrib["pci_busid"].removeprefix("0000:") not in ADDRESSES:
                parent.remove(item)
    topology.write(folder / "host.xml")
    tree = build(folder / "tree", str(folder / "host"), gpu="NVIDIA H100 80GB HBM3", rate="100 Gb/sec (4X EDR)")
    tree.replace("/proc/self/status", "0-191", "0-95")
    return tree


#: By state, and then by the checks that say the same.
EXPECTED = parse_texts(Path(__file__).with_name("doctor_answers.toml").read_text(encoding="utf-8"))
_USUAL: dict[State, dict[str, list[str]]] = {}


def answers_of(healthy: Tree, case: State) -> dict[str, list[str]]:
    """Return what each check says of a state."""
    with healthy.changed() as tree:
        for make in (*(STATES[case.after].make if case.after else ()), *case.make):
            make(tree)
        facts = gather(FactsRoot(tree.folder), backends=case.backends, environ={})
    if case.transfers:
        facts = with_transfers(facts, case.transfers)
    judged = {id: check.judge(facts, case.requirements) for id, check in checks().items()}
    return {id: [str(judgement.verdict), judgement.reason, judgement.remedy] for id, judgement in judged.items()}


@pytest.mark.parametrize("name", STATES)
def test_the_doctor_says_what_differs_from_a_healthy_host(name: str, healthy: Tree) -> None:
    case = STATES[name]
    if case.usual not in _USUAL:
        _USUAL[case.usual] = answers_of(healthy, case.usual)
    usual = {} if name == "healthy" else _USUAL[case.usual]
    expected = {id: answer for ids, answer in EXPECTED.get(name, {}).items() for id in ids.split()}
    answers = answers_of(healthy, case)
    # A check that passes as before may name more or fewer devices and variables, which other states prove.
    passes = {id for id, answer in answers.items() if answer[0] == usual.get(id, [""])[0] == "PASS"} - expected.keys()
    assert {id: answer for id, answer in answers.items() if answer != usual.get(id) and id not in passes} == expected


def test_every_check_has_a_fault_and_every_answer_a_state() -> None:
    assert EXPECTED.keys() - STATES.keys() == set()
    good = ("PASS", "NOT-APPLICABLE")
    faults = {
        id
        for lines in EXPECTED.values()
        for ids, answer in lines.items()
        if answer[0] not in good
        for id in ids.split()
    }
    assert set(checks()) - faults == {"etcd-client-patch"}, "it never fails"


#: Of each check: its verdict, reason and remedy, what the verdict means for the exit code, and whether it is required.
RESULTS = [
    CheckResult(checks()[id], Judgement(verdict, reason, remedy), result, required)
    for id, verdict, reason, remedy, result, required in (
        ("shm", Verdict.PASS, "much", "", Outcome.PASS, False),
        ("rdma-ports", Verdict.FAIL, "it is down", "mend it", Outcome.FAIL, False),
        ("gpus", Verdict.WARN, "slow", "cool it", Outcome.WARN, True),
        ("rdma-rate", Verdict.FAIL, "it is down", "mend it", Outcome.FAIL, True),
        ("memlock", Verdict.PASS, "any", "", Outcome.PASS, True),
        ("nic-rate", Verdict.NOT_APPLICABLE, "no cards", "", Outcome.SKIP, False),
        ("gpu-p2p", Verdict.NOT_APPLICABLE, "one GPU", "follow gpus", Outcome.FAIL, True),
        ("rdma-devices", Verdict.FAIL, "it is down", "mend it", Outcome.FAIL, False),
        ("nixl-cuda", Verdict.PASS, "12", "", Outcome.PASS, False),
    )
]
BAD_LINES = [
    ("FAIL            rdma-ports    it is down", Outcome.FAIL),
    ("                              remedy: mend it", None),
    ("                              the same: rdma-rate, rdma-devices", Outcome.FAIL),
    ("WARN            gpus          slow", Outcome.WARN),
    ("                              remedy: cool it", None),
    ("NOT-APPLICABLE  gpu-p2p       one GPU; the profile requires it", Outcome.FAIL),
    ("                              remedy: follow gpus", None),
]
COUNTS = "3 PASS, 3 FAIL, 1 WARN, 2 NOT-APPLICABLE"


def test_what_is_not_good_is_printed_above_the_counts_and_the_verdict() -> None:
    assert [(line.text, line.outcome) for line in result_lines(RESULTS, note="a note")] == [
        *BAD_LINES,
        ("passed: resources 2, versions 1; not applicable here: 2; -v lists each check with its reason", None),
        ("a note", None),
        (f"NIXL doctor: FAIL ({COUNTS})", Outcome.FAIL),
    ]


def test_every_result_is_printed_if_it_is_asked_for() -> None:
    assert [(line.text, line.outcome) for line in result_lines(RESULTS, every=True)] == [
        ("PASS            shm           much", Outcome.PASS),
        *BAD_LINES[:5],
        ("PASS            memlock       any", Outcome.PASS),
        ("NOT-APPLICABLE  nic-rate      no cards", Outcome.SKIP),
        *BAD_LINES[5:],
        ("PASS            nixl-cuda     12", Outcome.PASS),
        (f"NIXL doctor: FAIL ({COUNTS})", Outcome.FAIL),
    ]


def test_results_that_are_all_good_are_two_lines() -> None:
    good = [RESULTS[5], RESULTS[0]]
    assert [(line.text, line.outcome) for line in result_lines(good)] == [
        ("passed: resources 1; not applicable here: 1; -v lists each check with its reason", None),
        ("NIXL doctor: PASS (1 NOT-APPLICABLE, 1 PASS)", Outcome.PASS),
    ]
    assert next(iter(result_lines(good[:1]))).text.startswith("passed: none; not applicable here: 1; ")
    assert (any_failed(RESULTS), any_failed(good)) == (True, False)


def failing(id: str, reason: str, remedy: str = "mend it", verdict: Verdict = Verdict.FAIL) -> CheckResult:
    return CheckResult(checks()[id], Judgement(verdict, reason, remedy), Outcome.FAIL, required=False)


def lost(backend: str, *names: str) -> TransferProof:
    """A transfer that fails because of variables."""
    return TransferProof(backend, "DRAM:DRAM", REFUSED, culprits=tuple((name, "x") for name in names))


BACKEND, TELEMETRY = (
    failing("backend-loads", "UCX cannot be created: x"),
    failing("telemetry-in-process", "it is unread"),
)
UNREAD = failing("telemetry-in-process", "it is unread", verdict=Verdict.UNKNOWN)
TLS, TRANSFER = (
    failing("transports-allowed", "UCX_TLS=x is bad"),
    failing("transfers-arrive", "UCX: nothing can be moved"),
)
SHM, OTHER = failing("shm", "it is small"), failing("transfers-arrive", "LIBFABRIC: nothing can be moved")
FOLLOWING = failing("backend-loads", "follows from shm: UCX cannot be created: x", "enlarge it")


@pytest.mark.parametrize(
    ("transfers", "results", "expected"),
    [
        # What no check knows stays as it is.
        ([], [BACKEND], "backend-loads"),
        ([], [BACKEND, SHM, TELEMETRY], "backend-loads shm telemetry-in-process"),
        ([lost("LIBFABRIC")], [BACKEND, OTHER], "backend-loads transfers-arrive"),
        ([lost("UCX", "UCX_TL")], [BACKEND, TLS, TRANSFER], "transfers-arrive <backend-loads transports-allowed"),
        # A check that an attempt names precedes it, and its words stay.
        ([], [FOLLOWING, RESULTS[0], SHM], "shm backend-loads RESULT"),
        ([], [FOLLOWING, replace(SHM, judgement=Judgement(Verdict.WARN, "it is small"))], "backend-loads shm"),
        # So does a check that names a variable without which bytes arrive, in its reason or its remedy.
        ([lost("UCX", "UCX_TLS")], [BACKEND, SHM, TLS, UNREAD, TRANSFER],
         "transports-allowed <backend-loads shm <telemetry-in-process <transfers-arrive"),
        ([lost("UCX", "X", "UCX_TLS")], [TRANSFER, failing("devices-there", "d", "unset UCX_TLS")],
         "devices-there <transfers-arrive"),
        ([lost("UCX", "UCX_TLS")], [OTHER, TLS], "transfers-arrive transports-allowed"),
        # If none does, the transfer that names the variable precedes the others of its backend.
        ([lost("UCX", "X")], [BACKEND, SHM, TELEMETRY, TRANSFER],
         "transfers-arrive <backend-loads shm <telemetry-in-process"),
        ([lost("UCX")], [TELEMETRY, BACKEND, TRANSFER], "backend-loads <telemetry-in-process <transfers-arrive"),
        ([lost("UCX")], [TELEMETRY, TRANSFER], "transfers-arrive <telemetry-in-process"),
    ],
)  # fmt: skip
def test_the_check_that_knows_the_cause_precedes_what_follows_from_it(
    transfers: list[TransferProof], results: list[CheckResult], expected: str, healthy: Tree
) -> None:
    """In ``expected``, ``<`` is before a check that says that it follows from the first one."""
    facts = replace(gather(FactsRoot(healthy.folder), backends=(), etcd="", environ={}), transfers=tuple(transfers))
    ordered = by_cause(results, facts)
    ids = expected.replace("RESULT", "shm").split()
    assert [result.check.id for result in ordered] == [id.lstrip("<") for id in ids]
    cause = ids[0]
    for result, id in zip(ordered, ids, strict=True):
        before = next(
            same
            for same in results
            if same.check is result.check and same.judgement.verdict is result.judgement.verdict
        )
        reason, remedy = before.judgement.reason, before.judgement.remedy
        if id.startswith("<"):
            reason, remedy = f"follows from {cause}: {reason}", f"follow the remedy of {cause}"
        assert (result.judgement.reason, result.judgement.remedy) == (reason, remedy)


def test_the_doctor_puts_effects_after_their_cause(healthy: Tree) -> None:
    with healthy.changed() as tree:
        variables(UCX_NET_DEVICES="mlx5_99:1")(tree)
        refused(said=["x - no peer failure handler"])(tree)
        facts = gather(FactsRoot(tree.folder), backends=("UCX",), environ={})
    facts = with_transfers(facts, (lost("UCX", "UCX_NET_DEVICES"),))
    results = examine(facts, Requirements(load_profile("loopback"), ("UCX",)), gate=False)
    failed = [(result.check.id, result.judgement) for result in results if result.judgement.verdict is Verdict.FAIL]
    assert [id for id, _ in failed] == ["devices-there", "backend-loads", "transfers-arrive"]
    assert all(judgement.reason.startswith("follows from devices-there: ") for _, judgement in failed[1:])
    assert failed[2][1].remedy == "follow the remedy of devices-there"


OF_IMAGES = """
    nixl-loads backend-loads plugin-libraries libraries-once etcd-client-library etcd-client-patch nixlbench-starts
    nixl-plugins nixl-cuda image-versions verbs-providers gpu-code nixl-packages-agree variables-known namespace-plain
    telemetry-in-process
"""


def test_the_checks_of_a_host_and_of_an_image_are_asked_as_the_gate_wants(healthy: Tree) -> None:
    required = '[required]\nchecks = ["nic-rate", "shm"]\n'
    facts = gather(FactsRoot(healthy.folder), backends=("UCX", "LIBFABRIC"), environ={})
    by_gate = {
        gate: examine(facts, state(profile=required + MACHINE).requirements, gate=gate) for gate in (True, False)
    }
    results = {result.check.id: (result.judgement.verdict, result.outcome, result.required) for result in by_gate[True]}
    assert list(results) == list(checks())
    assert {id for id, (_, _, is_required) in results.items() if is_required} == {"nic-rate", "shm"}
    assert results["nic-rate"] == (Verdict.NOT_APPLICABLE, Outcome.FAIL, True)
    assert results["image-versions"] == (Verdict.NOT_APPLICABLE, Outcome.SKIP, False)
    assert (any_failed(by_gate[True]), any_failed(by_gate[False])) == (True, False)
    requirements = state(profile=required + MACHINE, image=True).requirements
    of_image = examine(facts, requirements, gate=True)
    assert [result.check.id for result in of_image] == OF_IMAGES.split()
    plain = plain_results(facts, requirements, of_image[:1])
    assert plain == {
        "verdict": "PASS", "host": "node-a", "profile": "small", "backends": ["UCX", "LIBFABRIC"], "image": True,
        "checks": [{
            "id": "nixl-loads", "question": "Can NIXL be loaded and create an agent?", "verdict": "PASS",
            "reason": "nixl-cu12 1.5.0, UCX 1.21.0, in /usr/local/lib/python3.12/dist-packages/nixl_cu12", "remedy": "",
            "required": False,
        }],
    }  # fmt: skip
    failure = plain_results(facts, requirements, RESULTS[-3:])
    assert failure["verdict"] == "FAIL"
    assert tuple(failure["checks"][0].values()) == (
        "gpu-p2p", "Can every GPU read every other's memory?", "NOT-APPLICABLE", "one GPU", "follow gpus", True
    )  # fmt: skip


@pytest.mark.parametrize(("profile", "noted"), [("loopback", True), ("p5.48xlarge", False)])
def test_the_doctor_says_that_a_profile_without_a_machine_misses_no_device(
    healthy: Tree, profile: str, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", f"--root={healthy.folder}", f"--profile={profile}"])
    note = "not noticed by the profile loopback: a GPU or an RDMA device that is missing."
    assert (note in capsys.readouterr().out) is noted
