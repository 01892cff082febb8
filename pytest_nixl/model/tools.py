# SPDX-License-Identifier: Apache-2.0
"""Programs of other projects that a worker may start, and the variables that only a worker's own rank sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pytest_nixl.model.memory import HOST, MemoryPair

#: The programs that a worker starts, each with a remedy if it is missing.
TOOLS = {
    "nixlbench": "use one of NIXL's images, which contain it, or set --nixl-nixlbench to its path",
    "ucx_perftest": "give its directory with --nixl-raw-tools-dir=DIR; docs/how-to/raw-tools.md says how to unpack one",
    "fi_rma_bw": "build libfabric's fabtests, and set --nixl-raw-tools-dir to the directory of the program",
    "fi_rma_pingpong": "build libfabric's fabtests, and set --nixl-raw-tools-dir to the directory of the program",
}

#: The variable by which a worker knows the private directory of the run, which the supervisor removes.
RUN_DIRECTORY = "PYTEST_NIXL_RUN_DIRECTORY"
#: The variable that forbids a stand-in for the CUDA driver: ``never``.
DRIVER_STANDIN = "PYTEST_NIXL_DRIVER_STANDIN"


def variable(tool: str) -> str:
    """Return the name of the variable with a program's path."""
    return f"PYTEST_NIXL_TOOL_{tool.upper()}"


def own_variables(
    paths: Mapping[str, str], environ: Mapping[str, str] = os.environ, memory: Sequence[MemoryPair] = (HOST,)
) -> dict[str, str | None]:
    """Return the variables that only a worker's own rank may set: the paths of programs, and what GPU memory forbids.

    :param paths: the paths that options name, by program.
    :param environ: this rank's environment variables.
    :param memory: the memory types that the run asks for.
    """
    found = {"PATH": environ.get("PATH"), **{variable(tool): paths.get(tool) or None for tool in TOOLS}}
    if any("VRAM" in (pair.initiator, pair.target) for pair in memory):
        found[DRIVER_STANDIN] = "never"
    return found
