# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: The programs that a worker starts, and what brings each.
TOOLS = {
    "nixlbench": "NIXL's own images have it; name another one by --nixl-nixlbench",
    "ucx_perftest": "give its directory with --nixl-raw-tools-dir=DIR; docs/how-to/raw-tools.md says how to unpack one",
    "fi_rma_bw": "build libfabric's fabtests, and name the directory that has it by --nixl-raw-tools-dir",
    "fi_rma_pingpong": "build libfabric's fabtests, and name the directory that has it by --nixl-raw-tools-dir",
}


def variable(tool: str) -> str:
    """Return the name of the variable that tells a worker where a program is."""
    return f"PYTEST_NIXL_TOOL_{tool.upper()}"


def own_variables(paths: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the variables of a worker that only its own rank may say: where programs are.

    :param paths: of those that an option names, by their names.
    """
    return {"PATH": environ.get("PATH"), **{variable(tool): paths.get(tool) or None for tool in TOOLS}}
