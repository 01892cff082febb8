# SPDX-License-Identifier: Apache-2.0
"""Checks of NIXL, its plugins, and the libraries that they need."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed, unknown, warned
from pytest_nixl.checks.doctor.resources import SECCOMP_REMEDY, shm
from pytest_nixl.checks.doctor.variables import devices_there, transports_allowed
from pytest_nixl.core.rdma_fault import peer_failure_remedy
from pytest_nixl.core.resource_limits import MEMORY_REMEDY, REMEDIES_OF_LIMITS
from pytest_nixl.core.sentences import named
from pytest_nixl.host.devices import Topology
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.software import BackendFacts, Lacking
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Libraries that the host's driver provides when a container starts; no image contains them.
OF_THE_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
READ_LOG = "run it again with NIXL_LOG_LEVEL=info and UCX_LOG_LEVEL=info and read the log"
_ENDED_BEFORE = "the process that loaded NIXL ended before its libraries were read"
#: By a pattern of what UCX says while it is created: what to do.
_REMEDIES_BY_LOG = (
    (r"scandir\(/sys", "mount sysfs, from which UCX takes the interfaces: `mount -t sysfs sysfs /sys`"),
    (os.strerror(errno.ENOMEM), MEMORY_REMEDY),
    (
        f"number of files that could be opened|{os.strerror(errno.EMFILE)}",
        "raise the limit of open files where the ranks start: `ulimit -n 65536`",
    ),
)
#: Libraries with global state: a process with two copies works with two separate states.
_ONCE = (
    "libucs",
    "libucp",
    "libuct",
    "libucm",
    "libfabric",
    "libnixl",
    "libetcd-cpp-api-core",
    "libcudart",
)
#: The UCX in NIXL's wheels has its own copies of these, and its EFA module also loads the system's copies.
_CRASH_AT_THE_END = ("libibverbs", "libnl")


def settings_of_files(facts: Facts) -> str:
    """Return a clause with the settings that UCX reads from files, where no variable shows them."""
    files = (f"{', '.join(settings)} from {file}" for file, settings in facts.ucx_files.items())
    return f"UCX reads {named(files)}"


def remedy_of_files(facts: Facts) -> str:
    """Return what to do about these files if UCX does not work."""
    return f"correct {named(facts.ucx_files)}, or move it away, and run it again"


def not_loaded(facts: Facts, expected: Requirements) -> Judgement | None:
    """Return the verdict of a NIXL that cannot be loaded; None if it was loaded."""
    nixl = facts.software.nixl
    if nixl.value is not None:
        return None
    for proof in facts.transfers:
        if proof.culprits:
            return failed(f"{nixl.why}; {proof.steering_fault}", proof.steering_remedy)
        if not proof.fault and facts.software.nixl_remedy not in REMEDIES_OF_LIMITS:
            remedy = facts.software.nixl_remedy or "run it again on a less busy host"
            return unknown(f"{nixl.why}; but two other processes have loaded it", remedy)
    remedy = facts.software.nixl_remedy or "install NIXL for this Python: `pip install --no-deps nixl nixl-cu12`"
    if "not recorded" in nixl.why:
        return unknown(f"NIXL: {nixl.why}", "record the tree again")
    # A worker's remedy may refer to lines that a failed test prints, and the doctor does not.
    return failed(nixl.why, READ_LOG if " below" in remedy else remedy)


@check("nixl-loads", "Can NIXL be loaded and create an agent?", image=True, unless=not_loaded)
def nixl_loads(facts: Facts, expected: Requirements) -> Judgement:
    """Judge whether NIXL loads in a separate process."""
    software = facts.software
    ucx = f", UCX {software.ucx.value}" if software.ucx.value else ""
    folder = os.path.dirname(software.nixl_file.value or "")
    return passed(f"{software.nixl_package.value} {software.nixl.value}{ucx}, in {folder}")


@check("backend-loads", "Can every requested backend be created?", image=True, unless=not_loaded)
def backend_loads(facts: Facts, expected: Requirements) -> Judgement:
    """Judge whether each backend can be created and supports host memory."""
    created = []
    for name in expected.backends:
        backend = facts.software.backend(name)
        if backend is None:
            return unknown(f"creating {name} was not tried", f"add --backend={name}")
        if backend.error and expected.image and any(lack.soname in OF_THE_DRIVER for lack in backend.missing):
            if len(backend.missing) > 1:
                continue  # plugin-libraries says what else is missing
            created.append(f"{name} needs {backend.missing[0].soname}, which comes with the host's driver")
            continue
        if backend.error:
            return _not_created(backend, facts, expected)
        if not any("DRAM" in memory for memory in backend.memories):
            return failed(
                f"{name} was created, but supports {named(backend.memories) or 'no memory'}, not host memory (DRAM)",
                "run it again with NIXL_LOG_LEVEL=info and read the log",
            )
        created.append(f"{name} supports {named(backend.memories)}")
    return passed("; ".join(created) or "none of the requested backends can be created on a build machine")


def _not_created(backend: BackendFacts, facts: Facts, expected: Requirements) -> Judgement:
    """Return why a backend cannot be created, and the remedy of what knows the cause."""
    log, follows = "\n".join(backend.said), ""
    missing = f" ({named(lack.words for lack in backend.missing)})" if backend.missing else ""
    log_clause = f"; UCX says: {'; '.join(backend.said[:4])}" if backend.said else ""
    no_plugin = "set NIXL_PLUGIN_DIR to the plugin folder of this NIXL build, or unset it"
    remedy = backend.remedy or (READ_LOG if backend.plugin else no_plugin)
    peer_failure = peer_failure_remedy(log, facts.environment.steering)
    if log:
        remedy_by_log = next((text for pattern, text in _REMEDIES_BY_LOG if re.search(pattern, log)), "")
        allowed = "transports-allowed lists the values that UCX_TLS may have on this host"
        if "Operation not permitted" in log and facts.storage_queues.seccomp.value:
            remedy_by_log = SECCOMP_REMEDY.format(call="the system call that UCX names")
        of_limits = backend.remedy if backend.remedy in REMEDIES_OF_LIMITS else ""
        remedy = of_limits or remedy_by_log or backend.remedy or peer_failure or f"correct what UCX names; {allowed}"
    if backend.name == "UCX":
        devices, memory = devices_there(facts, expected), shm(facts, expected)
        if devices.verdict is Verdict.FAIL and "UCX_NET_DEVICES" in devices.reason:
            follows, remedy = "follows from devices-there: ", peer_failure or devices.remedy
        elif memory.verdict is Verdict.FAIL and re.search("shm_open|Shared memory", log):
            follows, remedy = "follows from shm: ", memory.remedy
        if not (backend.said or backend.missing or backend.remedy):
            tls = transports_allowed(facts, expected)
            if tls.verdict is Verdict.FAIL:
                log_clause, remedy = f"; {tls.reason}", tls.remedy
            elif choice := _near_cards(facts):
                log_clause, remedy = f"; {choice[0]}", choice[1]
        if facts.ucx_files and not follows:
            log_clause, remedy = f"{log_clause}; {settings_of_files(facts)}", remedy_of_files(facts)
    return failed(f"{follows}{backend.name} cannot be created: {backend.error}{missing}{log_clause}", remedy)


def _near_cards(facts: Facts) -> tuple[str, str] | None:
    """Return which RDMA devices UCX uses though they are near no GPU, and the value without them; None if none are.

    Cards for management or storage can keep UCX from being created (ai-dynamo/dynamo#10852).
    """
    if facts.environment.get("UCX_NET_DEVICES") not in ("", "all"):
        return None
    topology = Topology.of(facts.gpu, facts.rdma)
    far = {nic.name for nic in topology.idle()}
    near = [nic.name for nic in topology.nics if nic.name not in far]
    if not far or not near:
        return None
    devices = {device.name: device for device in facts.rdma}
    ports = [f"{name}:{next((port.number for port in devices[name].ports), 1)}" for name in near]
    verb = "is" if len(far) == 1 else "are"
    return (
        f"UCX uses all {len(topology.nics)} RDMA devices, and {named(sorted(far))} {verb} near no GPU",
        f"if those cards do not carry KV, leave them out: `export UCX_NET_DEVICES={','.join(ports)}`",
    )


@check(
    "plugin-libraries",
    "Does this host have every library that the plugins of the requested backends need?",
    image=True,
    unless=not_loaded,
)
def plugin_libraries(facts: Facts, expected: Requirements) -> Judgement:
    """The host has every library and symbol version that the plugins of the requested backends need."""
    lacking: list[Lacking] = []
    without: list[str] = []
    for name in expected.backends:
        backend = facts.software.backend(name)
        if backend is None:
            return unknown(f"the libraries of {name} were not examined", f"add --backend={name}")
        if not backend.plugin:
            without.append(name)
        lacking += [lack for lack in backend.missing if not (expected.image and lack.soname in OF_THE_DRIVER)]
    if without:
        return failed(
            f"NIXL has no plugin file for {named(without)}: it has {named(facts.software.plugins, 12)}",
            _remedy_of(without, facts)
            or "set NIXL_PLUGIN_DIR to the plugin folder of this NIXL build, or build NIXL with that backend",
        )
    if lacking:
        remedy = "install what is missing, or add its folder to LD_LIBRARY_PATH"
        if any(lack.versions for lack in lacking):
            remedy = (
                "install the library version that the plugin needs, or a NIXL that was linked with the installed one"
            )
        if any(lack.soname in OF_THE_DRIVER for lack in lacking):
            remedy += "; libcuda.so.1 comes with the host's driver (docker run --gpus all, the NVIDIA device plugin)"
        return failed(named((lack.words for lack in lacking), 6), _remedy_of(expected.backends, facts) or remedy)
    return passed(f"the plugins of {named(expected.backends)} find all libraries that they need")


def _remedy_of(names: Sequence[str], facts: Facts) -> str:
    """Return the remedy of the first of these backends that has one."""
    backends = filter(None, map(facts.software.backend, names))
    return next((backend.remedy for backend in backends if backend.remedy and not backend.memories), "")


@check("libraries-once", "Does a process with NIXL load each library only once?", image=True, unless=not_loaded)
def libraries_once(facts: Facts, expected: Requirements) -> Judgement:
    """No process with NIXL has two copies of UCX, libfabric or another library."""
    if not facts.software.libraries:
        return unknown(_ENDED_BEFORE, "follow the other remedies")
    copies = facts.software.copies()
    remedy = (
        "keep one copy: unset LD_PRELOAD, remove the other copy's folder from LD_LIBRARY_PATH, or uninstall the "
        "package that contains it"
    )
    grave = {name: paths for name, paths in copies.items() if name in _ONCE}
    if grave:
        listing = "; ".join(f"{len(paths)} copies of {name}: {', '.join(paths)}" for name, paths in grave.items())
        return failed(f"a process with NIXL has {listing}", remedy)
    if copies:
        listing = "; ".join(f"{name}: {', '.join(paths)}" for name, paths in copies.items())
        if any(name.startswith(_CRASH_AT_THE_END) for name in copies):
            listing += ", which crashes Python at exit (exit code 139)"
            remedy = (
                "set UCX_MODULES=^ib if this host has no RDMA; otherwise end the process with os._exit, or use a NIXL "
                "that was built on this image"
            )
        return warned(f"a process with NIXL has more than one copy of {listing}", remedy)
    return passed(f"one copy of each of NIXL's {len(facts.software.libraries)} libraries and dependencies")


@check("etcd-client-library", "Does NIXL load its client library of etcd?", image=True, unless=not_loaded)
def etcd_client_library(facts: Facts, expected: Requirements) -> Judgement:
    """NIXL was built with etcd, and loads its client library."""
    client = facts.software.etcd_client
    if client.value is None and not facts.software.libraries:
        return unknown(_ENDED_BEFORE, "follow the other remedies")
    if client.value is None:
        return failed(
            f"NIXL loads no libetcd-cpp-api: {client.why}",
            "build NIXL where etcd-cpp-apiv3 is installed, and copy libetcd-cpp-api*.so into the image",
        )
    return passed(client.value)


@check(
    "etcd-client-patch",
    "Does that library skip the validation of addresses (ETCD_CPP_API_DISABLE_URI_VALIDATION)?",
    image=True,
)
def etcd_client_patch(facts: Facts, expected: Requirements) -> Judgement:
    """If the image has the patch that skips the validation of addresses, the library contains it."""
    patched = facts.software.etcd_client_patched
    if patched.value is None:
        return not_applicable(f"NIXL has no client library of etcd: {patched.why}")
    if patched.value:
        return passed(f"{patched.source} has ETCD_CPP_API_DISABLE_URI_VALIDATION")
    return not_applicable(
        f"{patched.source} is not patched: it needs http://HOST:PORT, and host names that resolve to IPv4"
    )


@check("nixlbench-starts", "Does nixlbench start?", image=True)
def nixlbench_starts(facts: Facts, expected: Requirements) -> Judgement:
    """If nixlbench is installed, it starts."""
    path, fault = facts.software.nixlbench, facts.software.nixlbench_fault
    if path.value is None:
        return not_applicable(f"{path.why}; nixlbench is optional")
    if fault:
        return failed(
            f"{path.value} does not start: {fault}",
            "install the library that the message names, or add its folder to LD_LIBRARY_PATH",
        )
    return passed(path.value)
