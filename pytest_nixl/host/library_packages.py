# SPDX-License-Identifier: Apache-2.0
"""Which package contains a shared library that was not found, and how to provide it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable

#: By a pattern of the soname: how to provide the library. ``{0}`` is the number in the soname.
_REMEDIES = (
    (r"libcuda\.so\.1|libnvidia-ml\.so\.1", "give the container the host's driver (`docker run --gpus all`)"),
    (
        r"libcudart\.so\.(\d+)",
        "install the CUDA {0} runtime (apt: cuda-cudart-{0}-*; pip: nvidia-cuda-runtime-cu12 or nvidia-cuda-runtime)",
    ),
    (r"libcufile(?:_rdma)?\.so\.\d+", "install cuFile (apt: libcufile-*; pip: nvidia-cufile-cu12 or nvidia-cufile)"),
    (r"libcuobjclient\.so\.\d+", "install NVIDIA cuObject, GPUDirect Storage for objects (libcuobjclient)"),
    (r"libdoca_telemetry_exporter\.so.*", "install NVIDIA DOCA (apt: doca-sdk-telemetry-exporter)"),
    (r"libdoca_gpunetio\.so.*", "install NVIDIA DOCA (apt: doca-sdk-gpunetio)"),
    (r"libdoca_\w+\.so.*", "install NVIDIA DOCA (apt: doca-sdk-verbs and doca-sdk-common)"),
    (r"libred_\w+\.so.*", "install the client of DDN Infinia, which has it in /opt/ddn/red/lib"),
    (r"libhf3fs\w*\.so.*", "install the client of 3FS (hf3fs_usrbio)"),
    (r"libgusli\w*\.so.*", "install GUSLI (libgusli_clnt)"),
    (r"libfabric\.so\.\d+", "install libfabric 1.18 or newer (EFA installer; apt: libfabric1)"),
    (r"libhwloc\.so\.15", "install hwloc (apt: libhwloc15)"),
    (r"libhwloc\.so\.\d+", "install hwloc (apt: libhwloc-dev)"),
    (r"libibverbs\.so\.1", "install the verbs library (apt: libibverbs1)"),
    (r"lib(?:mlx5|efa)\.so\.1", "install the verbs providers (apt: ibverbs-providers)"),
    (r"librdmacm\.so\.1", "install librdmacm (apt: librdmacm1)"),
    (r"libnuma\.so\.1", "install libnuma (apt: libnuma1)"),
    (r"libaio\.so\.1.*", "install libaio (apt: libaio1, or libaio1t64 on Ubuntu 24.04)"),
    (r"liburing\.so\.2", "install liburing (apt: liburing2)"),
    (r"libgdrapi\.so\.2", "install GDRCopy (apt: libgdrapi)"),
    (r"libuc[pstm]\.so\.\d+", "install the UCX that NIXL was built with"),
    (r"libaws-.*", "install the AWS SDK for C++ that NIXL was built with"),
    (r"libazure-.*", "install the Azure SDK for C++ that NIXL was built with"),
    (r"libetcd-cpp-api.*", "install etcd-cpp-apiv3 (libetcd-cpp-api)"),
    (r"lib(?:nixl\w*|serdes|stream|file_utils|obj_utils)\.so.*", "copy all libraries of NIXL's build into the image"),
)  # fmt: skip


def remedies(sonames: Iterable[str]) -> dict[str, str]:
    """Return how to provide each library: which installed package has it, or has lost it, or which one to install.

    :param sonames: the names of the libraries, such as ``libcufile.so.0``.
    """
    wanted = dict.fromkeys(sonames)
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions() if wanted else ():
        record = package.read_text("RECORD") or ""
        for soname in wanted:
            if soname in record and soname not in found and (said := _of_package(package, record, soname)):
                found[soname] = said
    return {soname: found.get(soname) or _known(soname) for soname in wanted}


def _of_package(package: importlib.metadata.Distribution, record: str, soname: str) -> str:
    listed = re.search(rf"^(?:.*/)?{re.escape(soname)}(?=,)", record, re.MULTILINE)
    if listed is None:
        return ""
    name, version = package.metadata["Name"], package.version
    path = os.path.abspath(str(package.locate_file(listed[0])))
    if os.path.exists(path):
        return f"add {os.path.dirname(path)} to LD_LIBRARY_PATH: {name} {version} has {soname} there"
    again = f"`pip install --force-reinstall --no-deps {name}=={version}`"
    return f"reinstall {name}, whose file {path} is missing: {again}"


def _known(soname: str) -> str:
    for pattern, words in _REMEDIES:
        if match := re.fullmatch(pattern, soname):
            return words.format(*match.groups())
    return f"install the package that has {soname} (`apt-file search {soname}` names it)"
