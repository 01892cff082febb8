# SPDX-License-Identifier: Apache-2.0
"""Why UCX cannot use the transports or RDMA devices that it is told to: NIXL says only NIXL_ERR_BACKEND, or nothing."""

from __future__ import annotations

import os
import re
import resource
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.sentences import named

#: What to do about each cause. The doctor's check ucx-uses-rdma says the same.
PORT_REMEDY = "check the cable, the switch and the subnet manager (`ibstat`, `rdma link`)"
NODES_REMEDY = "give the container the device nodes (docker run --device=/dev/infiniband) and check their permissions"
MEMLOCK_REMEDY = "raise the limit: `ulimit -l unlimited`, docker run --ulimit memlock=-1, or the capability IPC_LOCK"
GID_INDEX_REMEDY = "unset UCX_IB_GID_INDEX: UCX then takes the best GID"
#: What names the causes that files of the kernel do not show, such as a provider that is missing.
ASK_DOCTOR = "run `pytest-nixl doctor`: its check ucx-uses-rdma names why UCX cannot use an RDMA device"
#: What to do if this host's device is usable, but the other agent does not answer.
PEER_REMEDY = "check that the other agent's process runs, and the port and the cable of its host (there: `rdma link`)"

_RDMA_TRANSPORTS = re.compile(r"(rc|ud|dc|ib|srd|gga|efa)\b|(rc|ud|dc|gga)_")
_CAP_IPC_LOCK = 14
#: The values of UCX_TLS for TCP; NIXL refuses the first on some hosts, see :func:`over_tcp`.
TCP_ALONE = ("tcp", "tcp,cuda_copy")
#: Names in UCX_TLS by which NIXL sees that it allows CUDA memory.
_CUDA_SUPPORT = ("all", "cuda", "cuda_copy")
#: Makers of virtual machines to which cards and GPUs are passed through.
_PASS_THROUGH = ("QEMU", "KubeVirt", "Red Hat", "OpenStack Foundation")
_PCI_ADDRESS = re.compile(r"/[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: UCX's line for each try to lock memory that the kernel refuses, and the number of them after which it will go on.
_REFUSED_LOCK = re.compile(r"ibv_reg_mr\(.*Please set max locked memory .*\(current: (.*?)\)")
_ENDLESS_TRIES = 100
#: UCX's last line if a device fails while UCX uses it.
_FAILED_DEVICE = re.compile(r"Fatal: \w+ completion.* with error on (\w+)/.*: Work Request Flushed Error")
#: Bytes that UCX locks when it opens a device: it asks for 6 MiB, and then for the buffers.
_LEAST_LOCKED = 16 << 20


def wants_rdma(environ: Mapping[str, str]) -> bool:
    """Return whether UCX_TLS names a transport of RDMA devices."""
    names = environ.get("UCX_TLS", "").split(",")
    return not names[0].startswith("^") and any(_RDMA_TRANSPORTS.match(name.lstrip("\\")) for name in names)


def transport_fault(environ: Mapping[str, str], root: str = "/") -> str:
    """Return that UCX_TLS allows no transport that NIXL can use between processes; empty if it allows one.

    NIXL needs a transport that reports a failed peer: tcp, or one of RDMA devices.

    :param environ: the variables of the process that uses UCX.
    :param root: where /sys is.
    """
    text = environ.get("UCX_TLS", "all")
    parts = [part.removeprefix("\\") for part in text.removeprefix("^").split(",") if not part.endswith(":aux")]
    names = {part.partition(":")[0] for part in parts}
    if text.startswith("^"):
        able = "all" not in names and ("tcp" not in names or (Path(root) / "sys/class/infiniband").is_dir())
    else:
        able = any(name in ("tcp", "all") or _RDMA_TRANSPORTS.match(name) for name in names)
    return "" if able else f"UCX_TLS={text} is set here, and allows no transport that NIXL can use between processes"


def over_tcp(root: str = "/") -> str:
    """Return the value of UCX_TLS for TCP that NIXL takes on this host; without a GPU UCX would warn of cuda_copy.

    :param root: where /sys is.
    """
    return TCP_ALONE[bool(_nvidia_gpus(Path(root) / "sys"))]


def allows_cuda(text: str) -> bool:
    """Return whether a value of UCX_TLS allows CUDA memory; else NIXL 1.5 refuses UCX on a host with an NVIDIA GPU."""
    names = [name.removeprefix("\\") for name in text.removeprefix("^").split(",")]
    return any(name in _CUDA_SUPPORT for name in names) is not text.startswith("^")


def cuda_remedy(text: str) -> str:
    """Return what to do about a value of UCX_TLS that allows no CUDA memory."""
    if text.startswith("^"):
        return "unset UCX_TLS, or do not exclude cuda or cuda_copy"
    return f"add cuda_copy to UCX_TLS (`export UCX_TLS={shlex.quote(f'{text},cuda_copy')}`), or unset UCX_TLS"


def cuda_fault(environ: Mapping[str, str], root: str = "/") -> tuple[str, str]:
    """Return that UCX_TLS allows no CUDA memory on a host with an NVIDIA GPU, and a remedy; else two empty texts.

    The GPU needs no driver: a pod without a GPU sees those of its host.

    :param environ: the variables of the process that uses UCX.
    :param root: where /sys is.
    """
    text, gpus = environ.get("UCX_TLS", "all"), _nvidia_gpus(Path(root) / "sys")
    if allows_cuda(text) or not gpus:
        return "", ""
    reason = f"UCX_TLS={text} is set here, and allows no CUDA memory, but this host has an NVIDIA GPU ({min(gpus)})"
    return reason, cuda_remedy(text)


def rdma_fault(environ: Mapping[str, str], root: str = "/") -> tuple[str, str]:
    """Return why the RDMA that UCX is told to use cannot be used now, and a remedy; two empty texts if it can.

    It reads a few files of the kernel: a port, a GID, a device node, the limit of locked memory.

    :param environ: the variables of the process that uses UCX.
    :param root: where /sys, /dev and /proc are.
    """
    if not wants_rdma(environ):
        return "", ""
    return next(_faults(environ, Path(root)), ("", ""))


def refused_locks(output: str) -> str:
    """Return that UCX tries for ever to lock memory, from what its process wrote; empty if it does not."""
    limits = _REFUSED_LOCK.findall(output)
    if len(limits) < _ENDLESS_TRIES:
        return ""
    return f"UCX has tried {len(limits)} times to lock memory for an RDMA device, and a process may lock {limits[-1]}"


def failed_device(output: str) -> str:
    """Return the RDMA device whose failure made UCX abort its process, from what the process wrote; empty if none.

    A device fails when its port or its network interface goes down, or when it is removed.
    """
    match = _FAILED_DEVICE.search(output)
    return match[1] if match is not None else ""


def passthrough_fault(environ: Mapping[str, str], root: str = "/") -> tuple[str, str]:
    """Return why a card of a virtual machine may fail to access GPU memory, and a remedy; two empty texts if not.

    Below one PCI switch, a card and a GPU that were passed through to a guest talk to each other past the IOMMU, which
    alone knows the guest's addresses, unless the card asks it for translations (ATS).

    :param environ: the variables of the process that uses UCX.
    :param root: where /sys is.
    """
    sys = Path(root) / "sys"
    if _read(sys / "class/dmi/id/sys_vendor") not in _PASS_THROUGH:
        return "", ""
    named = {part.partition(":")[0] for part in environ.get("UCX_NET_DEVICES", "all").split(",")}
    gpus = _nvidia_gpus(sys)
    cards = {path.name: str((path / "device").resolve()) for path in (sys / "class/infiniband").glob("*")}
    for card, place in sorted(cards.items()):
        gpu = next((name for name, path in sorted(gpus.items()) if _one_bridge(place, path)), None)
        if gpu is not None and ("all" in named or card in named):
            far_cards = [far_card for far_card, path in sorted(cards.items()) if not _one_bridge(path, gpus[gpu])]
            to = f"`export UCX_NET_DEVICES={far_cards[0]}:1`" if far_cards else "another host"
            return (
                f"this host is a guest of QEMU, and {card} and GPU {gpu} are under one PCI switch: if they were "
                "passed through without address translation (ATS), the card cannot access that GPU's memory",
                f"try {to}; if the row then passes, turn on ATS of the card (mlxconfig ATS_ENABLED=1) and ACS of the "
                "switch on the host",
            )
    return "", ""


def _nvidia_gpus(sys: Path) -> dict[str, str]:
    """Return the PCI address of each GPU of NVIDIA, and its path."""
    return {
        path.name: str(path.resolve())
        for path in (sys / "bus/pci/devices").glob("*")
        if _read(path / "vendor") == "0x10de" and _read(path / "class").startswith(("0x0302", "0x0300"))
    }


def _one_bridge(first: str, second: str) -> bool:
    """Return whether two PCI devices have a bridge above them in common."""
    return bool(_PCI_ADDRESS.search(os.path.commonpath([first, second])))


def _faults(environ: Mapping[str, str], root: Path) -> Iterator[tuple[str, str]]:
    folder = root / "sys/class/infiniband"
    existing = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not existing:
        yield "this host has no RDMA device", "check the driver (`rdma link`), or allow TCP: UCX_TLS=tcp,cuda_copy"
        return
    named = environ.get("UCX_NET_DEVICES", "all")
    chosen = {part.partition(":")[0] for part in named.split(",")}
    chosen_ports = {part for part in named.split(",") if ":" in part}
    devices = existing if named == "all" or named.startswith("^") else [name for name in existing if name in chosen]
    if not devices:
        yield (
            f"UCX_NET_DEVICES={named} names no RDMA device of this host, which has {', '.join(existing)}",
            f"unset UCX_NET_DEVICES, or set it to {existing[0]}:1",
        )
        return
    ports = {f"{name}:{port.name}" for name in devices for port in (folder / name / "ports").glob("*")}
    if ports and chosen_ports and not named.startswith("^") and not chosen_ports & ports:
        yield (
            f"UCX_NET_DEVICES={named} names no port of this host's RDMA devices, which have {', '.join(sorted(ports))}",
            f"unset UCX_NET_DEVICES, or set it to {min(ports)}",
        )
        return
    first_faults = [next(_of_device(folder / name, environ, root), None) for name in devices]
    faults = [fault for fault in first_faults if fault is not None]
    # UCX goes on with the devices that it can use, if it may choose.
    if faults and (len(faults) == len(first_faults) or named != "all"):
        yield faults[0]
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_LOCKED and not _may_lock(root):
        yield (
            f"this process may lock only {limit >> 10} KiB of memory, and RDMA locks what it registers",
            MEMLOCK_REMEDY,
        )


def _of_device(device: Path, environ: Mapping[str, str], root: Path) -> Iterator[tuple[str, str]]:
    nodes = (root / "sys/class/infiniband_verbs").glob("uverbs*")
    node = next((path for path in nodes if _read(path / "ibdev") == device.name), None)
    if node is None:
        yield f"the kernel has no uverbs node for {device.name}", "load its module on the host: `modprobe ib_uverbs`"
        return
    try:
        os.close(os.open(root / "dev/infiniband" / node.name, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        yield f"/dev/infiniband/{node.name} of {device.name} cannot be opened: {error.strerror}", NODES_REMEDY
    ports = sorted((device / "ports").glob("*"))
    states = {port: re.sub(r"\d+: ", "", _read(port / "state")) for port in ports}
    if states and not any(state in ("ACTIVE", "") for state in states.values()):
        port_states = " and ".join(f"port {port.name} is {state}" for port, state in states.items())
        yield f"{device.name}'s {port_states}", PORT_REMEDY
    for port in ports:
        yield from _of_gids(device, port, environ)


def _of_gids(device: Path, port: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    gids = {path.name: gid for path in (port / "gids").glob("*") if (gid := _read(path)).strip("0:")}
    index = environ.get("UCX_IB_GID_INDEX", "auto")
    interface = next(filter(None, (_read(port / "gid_attrs/ndevs" / gid) for gid in gids)), "its interface")
    remedy = f"give {interface} an address (`ip address add …`), and read `rdma link`"
    if not gids:
        yield f"{device.name}'s port {port.name} has no GID", remedy
    elif index.isdecimal() and index not in gids:
        has = ", ".join(sorted(gids, key=int))
        yield (
            f"UCX_IB_GID_INDEX={index} names no GID of {device.name}'s port {port.name}, which has {has}",
            GID_INDEX_REMEDY,
        )
    elif (
        all(gid.startswith("fe80:") for gid in gids.values())
        and os.path.isdir(f"/sys/class/net/{interface}")
        and not ask_addresses().get(interface)
    ):
        gid = next(iter(gids.values()))
        yield f"{device.name}'s port {port.name} has only a link-local GID ({gid}): {interface} has no address", remedy


def _may_lock(root: Path) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


_NO_HANDLER = "no peer failure handler"
#: UCX's warning about devices that it was told to use, with the devices that it has.
_NOT_AVAILABLE = re.compile(r"network devices? ('.*') \w+ not available, please use one or more of: (.*)")
_TCP_DEVICE = re.compile(r"'([^']+)'\(tcp\)")


def peer_failure_remedy(log: str, environ: Mapping[str, str]) -> str:
    """Return what to do if UCX says that no transport handles the failure of a peer; empty if it does not say so.

    :param log: the stdout and stderr of the process that uses UCX.
    :param environ: the variables of that process.
    """
    if _NO_HANDLER not in log:
        return ""
    devices, transports = environ.get("UCX_NET_DEVICES", "all"), environ.get("UCX_TLS", "all")
    warning = _NOT_AVAILABLE.search(log)
    if devices not in ("", "all"):
        absent = re.findall("'([^']*)'", warning[1]) if warning else []
        present = [name for name in devices.split(",") if name not in absent]
        offered = _TCP_DEVICE.findall(warning[2]) if warning else []
        tcp = next((name for name in (*offered, *ask_addresses()) if name != "lo" and name not in present), "lo")
        value = shlex.quote(",".join([*present, tcp]))
        lacking = f"this host has no {named(absent)}: " if absent else ""
        return (
            f"{lacking}unset UCX_NET_DEVICES, or set it to devices that are here, with a TCP device among them "
            f"(`export UCX_NET_DEVICES={value}`): NIXL needs a transport that notices a failed peer"
        )
    if transports not in ("", "all"):
        return "add tcp to UCX_TLS, or unset UCX_TLS: NIXL needs a transport that notices a failed peer"
    return (
        "bring up a network interface with an address: NIXL needs a transport that notices a failed peer, such as TCP"
    )
