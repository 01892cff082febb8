# SPDX-License-Identifier: Apache-2.0
"""NIXL, its plugins, and the libraries that they need."""

from __future__ import annotations

import os

from pytest_nixl.checks.doctor.check import Requirements, check, failed, named, not_applicable, passed, unknown, warned
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.software import Lacking
from pytest_nixl.model.verdicts import Judgement

#: They come with the host's driver when a container is started, and no image has them.
_OF_THE_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
#: Two of one of these in a process have two states, and each knows half of what happens.
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
#: The UCX of NIXL's wheels brings its own, and its EFA module loads the system's beside it.
_CRASH_AT_THE_END = ("libibverbs", "libnl")


def _absent(facts: Facts) -> Judgement | None:
    """Why nothing of NIXL can be told, or None where it was loaded."""
    nixl = facts.software.nixl
    if nixl.value is not None:
        return None
    remedy = (
        facts.software.nixl_remedy or "install NIXL where this Python finds it (pip install --no-deps nixl nixl-cu12)"
    )
    if "not recorded" in nixl.why:
        return unknown(f"NIXL: {nixl.why}", "record the tree again")
    return failed(nixl.why, remedy)


@check("nixl-loads", "Can NIXL be loaded, and does it make an agent?", image=True)
def nixl_loads(facts: Facts, wanted: Requirements) -> Judgement:
    """In a process of its own."""
    absent = _absent(facts)
    if absent is not None:
        return absent
    software = facts.software
    ucx = f", UCX {software.ucx.value}" if software.ucx.value else ""
    folder = os.path.dirname(software.nixl_file.value or "")
    return passed(f"{software.nixl_package.value} {software.nixl.value}{ucx}, of {folder}")


@check("backend-loads", "Can every requested backend be made?", image=True)
def backend_loads(facts: Facts, wanted: Requirements) -> Judgement:
    """And does it move host memory?"""
    absent = _absent(facts)
    if absent is not None:
        return absent
    made = []
    for name in wanted.backends:
        found = facts.software.backend(name)
        if found is None:
            return unknown(f"whether {name} can be made was not tried", f"give --backend {name}")
        if found.error and wanted.image and any(each.soname in _OF_THE_DRIVER for each in found.missing):
            if len(found.missing) > 1:
                continue  # plugin-libraries says what else is missing
            made.append(f"{name} needs {found.missing[0].soname}, which comes with the host's driver")
            continue
        if found.error:
            missing = f" ({named(each.words for each in found.missing)})" if found.missing else ""
            said = f"; it says: {'; '.join(found.said[:4])}" if found.said else ""
            remedy = found.remedy or _remedy(found.plugin)
            if found.said and not found.remedy:
                remedy = "mend what its own line names; transports-allowed tells which names UCX_TLS may have here"
            return failed(f"{name} cannot be made: {found.error}{missing}{said}", remedy)
        if not any("DRAM" in memory for memory in found.memories):
            return failed(
                f"{name} was made, and moves {named(found.memories) or 'nothing'}: no host memory",
                "look at its own lines: NIXL_LOG_LEVEL=info",
            )
        made.append(f"{name} moves {named(found.memories)}")
    return passed("; ".join(made) or "no backend is requested that can be made while an image is built")


def _remedy(plugin: str) -> str:
    if not plugin:
        return "point NIXL_PLUGIN_DIR at the plugins of this build of NIXL, or unset it"
    return "run it once more with NIXL_LOG_LEVEL=info and UCX_LOG_LEVEL=info: they tell why"


@check("plugin-libraries", "Is every library there that the plugins of the requested backends need?", image=True)
def plugin_libraries(facts: Facts, wanted: Requirements) -> Judgement:
    """With the versions of symbols that they ask for, and what those need in turn."""
    absent = _absent(facts)
    if absent is not None:
        return absent
    lacking: list[Lacking] = []
    without: list[str] = []
    for name in wanted.backends:
        found = facts.software.backend(name)
        if found is None:
            return unknown(f"what {name} needs was not looked at", f"give --backend {name}")
        if not found.plugin:
            without.append(name)
        lacking += [each for each in found.missing if not (wanted.image and each.soname in _OF_THE_DRIVER)]
    if without:
        return failed(
            f"NIXL has no plugin file for {named(without)}: it has {named(facts.software.plugins, 12)}",
            "point NIXL_PLUGIN_DIR at the plugins of this build of NIXL, or build it with that backend",
        )
    if lacking:
        remedy = "install what is missing, or add its folder to LD_LIBRARY_PATH"
        if any(each.versions for each in lacking):
            remedy = (
                "install the version that the plugin was linked to, or a NIXL that was linked to the one that is there"
            )
        if any(each.soname in _OF_THE_DRIVER for each in lacking):
            remedy += "; libcuda.so.1 comes with the host's driver (docker run --gpus all, the NVIDIA device plugin)"
        return failed(named((each.words for each in lacking), 6), remedy)
    return passed(f"nothing is missing of what the plugins of {named(wanted.backends)} need")


@check("libraries-once", "Is each library loaded once?", image=True)
def libraries_once(facts: Facts, wanted: Requirements) -> Judgement:
    """A second copy comes by LD_PRELOAD, LD_LIBRARY_PATH, or another package that brings its own."""
    absent = _absent(facts)
    if absent is not None:
        return absent
    copies = facts.software.copies()
    remedy = (
        "leave one: unset LD_PRELOAD, take the folder of the other out of LD_LIBRARY_PATH, or remove the package that "
        "brings it"
    )
    grave = {name: paths for name, paths in copies.items() if name in _ONCE}
    if grave:
        told = "; ".join(f"{len(paths)} copies of {name}: {', '.join(paths)}" for name, paths in grave.items())
        return failed(f"a process with NIXL has {told}", remedy)
    if copies:
        told = "; ".join(f"{name}: {', '.join(paths)}" for name, paths in copies.items())
        if any(name.startswith(_CRASH_AT_THE_END) for name in copies):
            told += ", which crashes interpreters when they end (exit code 139)"
            remedy = (
                "set UCX_MODULES=^ib where there is no RDMA; else have the process leave by os._exit, or use a NIXL "
                "that was built on this image"
            )
        return warned(f"a process with NIXL has more than one copy of {told}", remedy)
    return passed(f"one copy of each of the {len(facts.software.libraries)} that NIXL is made of and stands on")


@check("etcd-client-library", "Is the library there by which NIXL talks to etcd?", image=True)
def etcd_client_library(facts: Facts, wanted: Requirements) -> Judgement:
    """Where NIXL was built without, its agents exchange metadata by side channel only."""
    absent = _absent(facts)
    if absent is not None:
        return absent
    client = facts.software.etcd_client
    if client.value is None:
        return failed(
            f"no libetcd-cpp-api is loaded with NIXL: {client.why}",
            "build NIXL where etcd-cpp-apiv3 is installed, and copy libetcd-cpp-api*.so into the image",
        )
    return passed(client.value)


@check(
    "etcd-client-patch",
    "Does that library take addresses as they are (ETCD_CPP_API_DISABLE_URI_VALIDATION)?",
    image=True,
)
def etcd_client_patch(facts: Facts, wanted: Requirements) -> Judgement:
    """The patch of the library that does not check addresses: images are built with it on purpose, or not at all."""
    patched = facts.software.etcd_client_patched
    if patched.value is None:
        return not_applicable(f"there is no client library that could have it: {patched.why}")
    if patched.value:
        return passed(f"{patched.source} has ETCD_CPP_API_DISABLE_URI_VALIDATION")
    return not_applicable(f"{patched.source} is not patched: it wants http://HOST:PORT, and names that resolve to IPv4")


@check("nixlbench-starts", "Does nixlbench start?", image=True)
def nixlbench_starts(facts: Facts, wanted: Requirements) -> Judgement:
    """It prints its help."""
    path, fault = facts.software.nixlbench, facts.software.nixlbench_fault
    if path.value is None:
        return not_applicable(f"{path.why}, and nothing here needs it")
    if fault:
        return failed(
            f"{path.value} does not start: {fault}", "install what it names, or add its folder to LD_LIBRARY_PATH"
        )
    return passed(path.value)
