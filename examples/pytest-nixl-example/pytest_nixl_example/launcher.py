# SPDX-License-Identifier: Apache-2.0
"""A launcher: Flux, which sets PMI_RANK as well and would be taken for PMI."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nixl import LauncherPlacement


def flux(environ: Mapping[str, str]) -> LauncherPlacement | None:
    """Return where Flux has placed this process; None if another launcher has started it."""
    if "FLUX_TASK_RANK" not in environ or "FLUX_JOB_SIZE" not in environ:
        return None
    return LauncherPlacement(
        launcher="Flux",
        variable="FLUX_TASK_RANK",
        rank=int(environ["FLUX_TASK_RANK"]),
        ranks=int(environ["FLUX_JOB_SIZE"]),
        group=environ.get("FLUX_JOB_ID", ""),
    )
