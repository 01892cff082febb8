# SPDX-License-Identifier: Apache-2.0
"""Facts that are read from the kernel's files: each row has files, and the whole fact with where it was read."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_sysfs import Asking, root_of

from pytest_nixl.host.facts import read_environment, read_ucx_files
from pytest_nixl.host.network import Nic, read_network
from pytest_nixl.host.pci import PciDevice, read_pci
from pytest_nixl.host.rdma import Port, RdmaDevice, read_rdma
from pytest_nixl.host.recorded_tree import NOT_RECORDED, Fact, FactsRoot
from pytest_nixl.host.system import (
    FrequencyPolicy,
    HugePages,
    Memlock,
    Numa,
    Shm,
    read_cores,
    read_host,
    read_storage_queues,
)

Files = Mapping[str, Any]
SILENT = {"why": "it did not answer"}

CGROUP, CONF = "/proc/1/cgroup", "/etc/os-release"
LIMITS, STATUS, MEMORY = "/proc/self/limits", "/proc/self/status", "/proc/meminfo"
NODES = "/sys/devices/system/node"
PAGES = "/sys/kernel/mm/hugepages"
SHM = "statvfs of /dev/shm"
NO_GROUP = "/.dockerenv, /run/.containerenv, /proc/1/cgroup"


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("name", {"/proc/sys/kernel/hostname": "node-a"}, Fact("node-a", "/proc/sys/kernel/hostname")),
        ("kernel", {}, Fact(None, "/proc/sys/kernel/osrelease", "it cannot be read")),
        ("system", {CONF: 'MY_PRETTY_NAME=x\nPRETTY_NAME="Ubuntu 22"', "/usr/lib/os-release": "y"},
         Fact("Ubuntu 22", CONF)),
        ("system", {"/usr/lib/os-release": "PRETTY_NAME=Alpine 3"}, Fact("Alpine 3", "/usr/lib/os-release")),
        ("system", {CONF: "MY_PRETTY_NAME=x"}, Fact(None, CONF, "it has no such line")),
        ("system", {}, Fact(None, CONF, "it cannot be read")),
        ("container", {"/.dockerenv": "", CGROUP: "0::/kubepods"}, Fact("docker", "/.dockerenv")),
        ("container", {"/run/.containerenv": ""}, Fact("podman", "/run/.containerenv")),
        ("container", {CGROUP: "0::/kubepods.slice/x"}, Fact("kubernetes", CGROUP)),
        *(("container", {CGROUP: f"0::/{kind}/x"}, Fact(kind, CGROUP)) for kind in ("docker", "containerd", "crio")),
        ("container", {CGROUP: "0::/lxc.payload"}, Fact("lxc", CGROUP)),
        ("container", {CGROUP: "0::/init.scope"}, Fact("no", NO_GROUP)),
        ("processor", {"/proc/cpuinfo": "x: 1\nmodel name\t: EPYC 7R13"}, Fact("EPYC 7R13", "/proc/cpuinfo")),
        ("cpus", {"/sys/devices/system/cpu/online": "0-3,8"}, Fact(5, "/sys/devices/system/cpu/online")),
        ("memory", {MEMORY: "MemTotal: 4 kB\nMemAvailable: 3 kB"}, Fact(4096, MEMORY)),
        ("available", {MEMORY: "MemTotal: 4 kB\nMemAvailable: 3 kB"}, Fact(3072, MEMORY)),
        ("memory", {MEMORY: "HighMemTotal: 4 kB\nMemTotal: 4 kB more"}, Fact(None, MEMORY, "it has no such line")),
        (
            "numa",
            {
                f"{NODES}/node10/cpulist": "4-7", f"{NODES}/node10/meminfo": "MemTotal:  kB",
                f"{NODES}/node2/meminfo": "Node 2 MemTotal: 2 kB\nNode 2 MemFree: 1",
                f"{NODES}/node2/cpulist": "0-3", f"{NODES}/nodex/cpulist": "9", f"{NODES}/possible": "0-1",
            },
            (Numa(2, "0-3", 2048, f"{NODES}/node2"), Numa(10, "4-7", None, f"{NODES}/node10")),
        ),
        (
            "huge_pages",
            {
                f"{PAGES}/hugepages-2048kB/nr_hugepages": 9, f"{PAGES}/hugepages-2048kB/free_hugepages": 4,
                f"{PAGES}/hugepages-1048576kB/nr_hugepages": 1, f"{PAGES}/hugepages-64kB/free_hugepages": 1,
                f"{PAGES}/other/nr_hugepages": 1, f"{PAGES}/hugepages-kB/nr_hugepages": 1,
            },
            (
                HugePages(2 << 20, 9, 4, f"{PAGES}/hugepages-2048kB"),
                HugePages(1 << 30, 1, 0, f"{PAGES}/hugepages-1048576kB"),
            ),
        ),
        ("memlock", {LIMITS: "No Max locked memory  1  2  bytes\nMax locked memory  65536  unlimited  bytes"},
         Fact(Memlock(65536, None, privileged=False), LIMITS)),
        ("memlock", {LIMITS: "Max x 1 2\nMax locked memory  unlimited  7  bytes", STATUS: "CapEff:\t0000000000004000"},
         Fact(Memlock(None, 7, privileged=True), LIMITS)),
        ("memlock", {LIMITS: "Max locked memory  1  2  bytes", STATUS: "NoCapEff:\t4000\nCapEff:\t000000000000bfff"},
         Fact(Memlock(1, 2, privileged=False), LIMITS)),
        ("memlock", {LIMITS: "Max locked memory  1  2  bytes", STATUS: "CapEff:\t4000 x\nCapEff:\t"},
         Fact(Memlock(1, 2, privileged=False), LIMITS)),
        ("memlock", {LIMITS: "Max locked memory  7  \nMax x  1  2"},
         Fact(None, LIMITS, "it has no limit of locked memory")),
        ("ptrace_scope", {"/proc/sys/kernel/yama/ptrace_scope": 2}, Fact(2, "/proc/sys/kernel/yama/ptrace_scope")),
        ("ptrace_scope", {"/proc/sys/kernel/yama/ptrace_scope": "x"},
         Fact(None, "/proc/sys/kernel/yama/ptrace_scope", "it cannot be read")),
        ("shm", {}, Fact(Shm(7, 5), SHM)),
        ("architecture", {}, Fact("arm", "uname")),
    ],
)  # fmt: skip
def test_a_fact_of_the_host_is_read_from_its_file(name: str, files: Files, expected: object, tmp_path: Path) -> None:
    root = root_of(tmp_path / "tree", files, shm={"size": 7, "free": 5}, machine={"architecture": "arm"})
    assert getattr(read_host(root), name) == expected


def test_what_the_host_does_not_answer_is_unknown(tmp_path: Path) -> None:
    host = read_host(root_of(tmp_path / "tree", {}, shm=SILENT, machine=SILENT))
    assert (host.shm, host.architecture) == (
        Fact(None, SHM, "it did not answer"),
        Fact(None, "uname", "it did not answer"),
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FileNotFoundError(2, "No such file"), Fact[Shm](None, SHM, "No such file")),
        (SimpleNamespace(f_flag=os.ST_RDONLY), Fact[Shm](None, SHM, "it is mounted read-only")),
        (SimpleNamespace(f_flag=0, f_frsize=512, f_blocks=8, f_bavail=3), Fact(Shm(4096, 1536), SHM)),
    ],
    ids=["absent", "read-only", "writable"],
)
def test_shared_memory_is_a_fact_or_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, expected: Fact[Shm]
) -> None:
    """The answer of the kernel is a double: no other process may lose its /dev/shm."""
    root_of(tmp_path, {})

    def statvfs(path: str) -> Any:
        assert path == "/dev/shm"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert read_host(Asking(tmp_path, "shm")).shm == expected


def test_the_queues_of_this_host_are_tried_if_their_numbers_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root_of(tmp_path, {})
    calls = read_storage_queues(Asking(tmp_path, "storage-queues")).calls.value
    assert calls is not None
    assert set(calls) == {"io_setup", "io_uring_setup"}
    assert set(calls.values()) <= {"EFAULT", "EINVAL", "ENOSYS", "EPERM"}
    monkeypatch.setattr(platform, "machine", lambda: "odd")
    unknown = read_storage_queues(Asking(tmp_path, "storage-queues")).calls
    reason = "the numbers of the system calls of odd are not known"
    assert unknown == Fact(None, "io_setup and io_uring_setup", reason)


def test_the_policies_of_cores_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    place = "/sys/devices/system/cpu/cpufreq"
    files = {
        f"{place}/policy10/scaling_governor": "performance", f"{place}/policy10/affected_cpus": "10 11",
        f"{place}/policy2/scaling_governor": "powersave", f"{place}/policy2/affected_cpus": "2",
        f"{place}/policy2/scaling_driver": "intel_pstate", f"{place}/policy2/energy_performance_preference": "power",
        f"{place}/policy3/affected_cpus": "3", f"{place}/policyx/scaling_governor": "x",
        f"{place}/policy12/scaling_governor": "performance",
        STATUS: "NoCpus_allowed_list:\t9\nCpus_allowed_list:\t8 x\nCpus_allowed_list:\t0-7\nMems_allowed_list:\t0",
    }  # fmt: skip
    cores = read_cores(root_of(tmp_path / "tree", files))
    assert cores.allowed == Fact("0-7", STATUS)
    assert cores.policies == (
        FrequencyPolicy("2", "powersave", "intel_pstate", "power", f"{place}/policy2"),
        FrequencyPolicy("10,11", "performance", "", "", f"{place}/policy10"),
        FrequencyPolicy("", "performance", "", "", f"{place}/policy12"),
    )


def test_the_queues_for_storage_are_read(tmp_path: Path) -> None:
    numbers: Files = {"kernel/io_uring_disabled": 1, "fs/aio-max-nr": 100, "fs/aio-nr": 7}
    files = {f"/proc/sys/{name}": value for name, value in numbers.items()}
    root = root_of(tmp_path / "a", {**files, STATUS: "NoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1"},
                   storage_queues={"io_setup": "EPERM"})  # fmt: skip
    queues = read_storage_queues(root)
    assert [queues.uring_disabled, queues.aio_max, queues.aio_used] == [
        Fact(value, path) for path, value in files.items()
    ]
    assert (queues.seccomp, queues.calls) == (
        Fact(2, STATUS),
        Fact({"io_setup": "EPERM"}, "io_setup and io_uring_setup"),
    )
    unknown = read_storage_queues(root_of(tmp_path / "b", {STATUS: "Name:\tx"}))
    assert (unknown.seccomp, unknown.calls) == (
        Fact(None, STATUS, "it has no line Seccomp"),
        Fact(None, "io_setup and io_uring_setup", NOT_RECORDED),
    )


NET = "/sys/class/net"
ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
CARD = "/sys/devices/pci0000:00/0000:00:01.0/0000:47:00.0"


def test_an_interface_is_read_with_its_device(tmp_path: Path) -> None:
    files = {
        f"{NET}/eth0/operstate": "up", f"{NET}/eth0/mtu": 9001, f"{NET}/eth0/type": 1, f"{NET}/eth0/speed": 100000,
        f"{NET}/eth0/device": f"->{CARD}", f"{CARD}/driver": "->/sys/bus/pci/drivers/ena",
        f"{NET}/eth10/operstate": "down", f"{NET}/eth10/speed": -1, f"{NET}/eth9/operstate": "",
        f"{NET}/eth9/speed": 0, f"{NET}/lo/speed": (1 << 32) - 1,
        f"{NET}/lo/operstate": "unknown", f"{NET}/lo/type": 772, f"{NET}/bonding_masters": "",
    }  # fmt: skip
    network = read_network(root_of(tmp_path / "tree", files, addresses={"eth0": ["10.0.0.1/8"], "x": ["1.1.1.1/8"]}))
    assert network.nics == (
        Nic("eth0", "up", 9001, 12.5e9, ("10.0.0.1/8",), False, False, "ena", "0000:47:00.0", f"{NET}/eth0"),
        Nic("eth9", "unknown", None, None, (), True, False, "", "", f"{NET}/eth9"),
        Nic("eth10", "down", None, None, (), True, False, "", "", f"{NET}/eth10"),
        Nic("lo", "unknown", None, None, (), True, True, "", "", f"{NET}/lo"),
    )


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        (None, Fact(None, "/proc/net/route", "it cannot be read")),
        (ROUTES, Fact(None, "/proc/net/route", "it has no default route")),
        (
            f"{ROUTES}short\t00000000\t0\ne0\t0000000A\t0\t1\t0\t0\t0\t000000FF\ne1\t00000000\t0\t1\t0\t0\t0\t00000080\n"
            "e2\t00000000\t0\t3\t0\t0\t1\t00000000\ne3\t00000000\t0\t3\t0\t0\t9\t00000000",
            Fact("e2", "/proc/net/route"),
        ),
    ],
)
def test_the_interface_of_the_default_route_is_the_first(
    routes: str | None, expected: Fact[str], tmp_path: Path
) -> None:
    root = root_of(tmp_path / "tree", {} if routes is None else {"/proc/net/route": routes})
    assert read_network(root).default == expected


def test_the_resolver_is_read(tmp_path: Path) -> None:
    text = "# nameserver 9.9.9.9\nnameserver 10.0.0.2\nnameserver fd00::2\n\nsearch a.b c\noptions ndots:5"
    network = read_network(root_of(tmp_path / "a", {"/etc/resolv.conf": text}))
    assert network.nameservers == Fact(("10.0.0.2", "fd00::2"), "/etc/resolv.conf")
    assert network.search == Fact(("a.b", "c"), "/etc/resolv.conf")
    assert read_network(root_of(tmp_path / "b", {})).search == Fact(None, "/etc/resolv.conf", "it cannot be read")


IB = "/sys/class/infiniband"


def test_an_rdma_device_is_read_with_its_ports(tmp_path: Path) -> None:
    port = f"{IB}/mlx5_0/ports/1"
    files = {
        f"{port}/state": "4: ACTIVE", f"{port}/rate": "100 Gb/sec (4X EDR)", f"{port}/link_layer": "Ethernet",
        f"{port}/gids/0": "fe80:0000::1", f"{port}/gids/1": "0000:0000::0000", f"{port}/gids/2": "2001:db8::1",
        f"{port}/gid_attrs/ndevs/0": "eth0", f"{port}/gid_attrs/ndevs/1": "eth1", f"{port}/gid_attrs/ndevs/2": "eth0",
        f"{port}/counters/symbol_error": 7, f"{port}/counters/port_rcv_errors": 0, f"{port}/counters/port_rcv_data": 9,
        f"{port}/hw_counters/rx_icrc_encapsulated": 3, f"{IB}/mlx5_0/ports/2/rate": "2.5 Gb/sec (1X SDR)",
        f"{IB}/mlx5_0/node_type": "4: RNIC", f"{IB}/mlx5_0/device": f"->{CARD}", f"{CARD}/vpd": "x SW_MNG x",
        f"{CARD}/driver": "->/sys/bus/pci/drivers/mlx5_core", f"{CARD}/numa_node": 1, f"{CARD}/p2p": "NVIDIA",
        f"{IB}/hfi/node_type": "1: CA", "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0",
        "/sys/class/infiniband_verbs/abi_version": 6, f"{IB}/rxe0/ports/1/state": "",
    }  # fmt: skip
    device = RdmaDevice(
        "mlx5_0", "mlx5",
        (
            Port(1, "ACTIVE", 12.5e9, "Ethernet", {"0": "fe80:0000::1", "2": "2001:db8::1"}, ("eth0",),
                 {"port_rcv_errors": 0, "symbol_error": 7, "rx_icrc_encapsulated": 3}),
            Port(2, "", 312.5e6, "", {}, ()),
        ),
        "/dev/infiniband/uverbs3", "Permission denied", 1, "0000:47:00.0", CARD, "NVIDIA", f"{IB}/mlx5_0",
        manages_nvlink=True, iwarp=True,
    )  # fmt: skip
    other = RdmaDevice("rxe0", "rxe", (Port(1, "", None, "", {}, ()),), "", "", 0, "", "", "", f"{IB}/rxe0")
    root = root_of(tmp_path / "a", files, uverbs={"/dev/infiniband/uverbs3": "Permission denied"})
    assert read_rdma(root) == (device, other)
    assert (device.rate, device.active, device.errors("symbol_error")) == (12.5e9, True, 7)
    [untried, _] = read_rdma(root_of(tmp_path / "b", files, uverbs={}))
    assert untried.closed == "it was not tried"


@pytest.mark.parametrize(
    ("name", "driver", "kind"),
    [
        ("rocep23s0", "mlx5_core", "mlx5"), ("mlx5_0", "", "mlx5"), ("rdmap79s0", "", "efa"), ("ibp1s0", "efa", "efa"),
        ("efa_0", "x", "efa"), ("rxe0", "", "rxe"), ("mana_0", "mana", "mana"), ("bnxt_re0", "bnxt_en", "bnxt_re"),
        ("rocep1s0", "ice", "irdma"), ("rocep1s0", "idpf", "irdma"), ("iwp1s0", "i40e", "irdma"),
        ("qedr0", "qede", "qedr"), ("hns_0", "hns_roce_hw_v2", "hns"), ("hfi1_0", "hfi1", "hfi1verbs"),
        ("bnxt_re0", "", "bnxt_re"), ("rocep1s0", "irdma", "irdma"),
    ],
)  # fmt: skip
def test_the_kind_of_an_rdma_device_is_its_provider(tmp_path: Path, name: str, driver: str, kind: str) -> None:
    files = {f"{IB}/{name}/ports/1/state": "4: ACTIVE", f"{IB}/{name}/device": f"->{CARD}"}
    files |= {f"{CARD}/driver": f"->/sys/bus/pci/drivers/{driver}"} if driver else {}
    assert [device.kind for device in read_rdma(root_of(tmp_path / "tree", files, uverbs={}))] == [kind]


@pytest.mark.parametrize(
    ("vendor", "device", "family", "kind"),
    [
        ("0x10de", "0x2330", "0x030200", "gpu"), ("0x10de", "0x1eb8", "0x030000", "gpu"),
        ("0x10de", "0x22a3", "0x068000", ""), ("0x1d0f", "0xefa1", "0x020000", "efa"),
        ("0x1d0f", "0xefa4", "0x020000", "efa"), ("0x1d0f", "0xec20", "0x020000", ""),
        ("0x15b3", "0x101d", "0x020700", "mlx"), ("0x15b3", "0x1979", "0x060400", ""),
        ("0x8086", "0x1", "0x020000", ""),
    ],
)  # fmt: skip
def test_devices_of_the_bus_are_gpus_and_cards_with_rdma(
    tmp_path: Path, vendor: str, device: str, family: str, kind: str
) -> None:
    place = "/sys/bus/pci/devices/0000:47:00.0"
    files = {place: f"->{CARD}", f"{CARD}/vendor": vendor, f"{CARD}/device": device, f"{CARD}/class": family}
    files |= {f"{CARD}/driver": "->/sys/bus/pci/drivers/d"}
    expected = (PciDevice("0000:47:00.0", kind, device, CARD, "d", 0, place),) if kind else ()
    assert read_pci(root_of(tmp_path / "tree", files)) == expected


def test_the_image_is_that_of_the_first_variable_or_of_podmans_file(tmp_path: Path) -> None:
    podman = root_of(
        tmp_path / "tree", {"/run/.containerenv": 'base_image="a"\nimage="b" c\nimage="quay.io/x:1"\nid="2"'}
    )
    names = "PYTEST_NIXL_IMAGE", "NIXL_IMAGE", "CONTAINER_IMAGE", "IMAGE"
    for number, name in enumerate(names):
        environment = read_environment(FactsRoot(), {name: "a:1", **dict.fromkeys(names[number + 1 :], "b:1")})
        assert environment.image == Fact("a:1", f"environment {name}")
    assert read_environment(podman).image == Fact("quay.io/x:1", "/run/.containerenv")
    absent = Fact[str](None, f"environment {', '.join(names)}", "no variable names the image")
    assert read_environment(root_of(tmp_path / "other", {})).image == absent


def test_the_settings_in_files_of_ucx_are_read(tmp_path: Path) -> None:
    for name, text in {
        "given": "UCX_TLS=rc  \n\n# UCX_NO=1\n UCX_X = 1\n\tUCX_LOG=a b\n", "home": "UCX_A=1", "etc/ucx": "UCX_B=2",
        "empty": "# nothing",
    }.items():  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "ucx.conf").write_text(text)
    (tmp_path / "lib").mkdir()
    environ = {"UCX_CONFIG_DIR": str(tmp_path / "given"), "HOME": str(tmp_path / "home")}
    libraries = [str(tmp_path / "lib" / "libucs-1.so.0"), str(tmp_path / "empty" / "libucp.so.0")]
    files = read_ucx_files(FactsRoot(), environ, libraries)
    assert {name: listed for name, listed in files.items() if name.startswith(str(tmp_path))} == {
        str(tmp_path / "etc/ucx/ucx.conf"): ("UCX_B=2",),
        str(tmp_path / "given/ucx.conf"): ("UCX_TLS=rc", "UCX_LOG=a b"),
        str(tmp_path / "home/ucx.conf"): ("UCX_A=1",),
    }
    assert read_ucx_files(root_of(tmp_path / "tree", {}), environ, []) == {}


def test_names_are_in_their_natural_order_and_numbers_in_any_base(tmp_path: Path) -> None:
    root = root_of(tmp_path / "tree", {f"/a/eth{number}": "0x1f" for number in (10, 9, 1)})
    assert root.entries("/a") == ("eth1", "eth9", "eth10")
    assert (root.number("/a/eth1"), root.number("/a/eth2")) == (31, None)
    assert (root.exists("/a/eth1"), root.exists("/a/eth2")) == (True, False)
    with pytest.raises(ValueError, match=f"'{tmp_path}/none' is not a folder: expected one that `pytest-nixl facts"):
        FactsRoot(tmp_path / "none")
