# SPDX-License-Identifier: Apache-2.0
"""Relations of what decides how an engine's NIXL moves bytes: the backend that it uses, and how torch allocates."""

from __future__ import annotations

from pytest_nixl.checks.connector.engine_fields import EngineSide
from pytest_nixl.checks.connector.relations import Mismatch, SidePair
from pytest_nixl.core.alloc_conf import expands_segments
from pytest_nixl.model.engine_backends import engine_backend

#: For each engine the field with its backends.
_BACKENDS = {"vLLM": "backends", "SGLang": "SGLANG_DISAGGREGATION_NIXL_BACKEND"}


def _used(side: EngineSide) -> tuple[set[str], str]:
    """Return the backends that an engine uses, and what sets them."""
    value, known = side.values.get(_BACKENDS.get(side.engine, "")), engine_backend(side.engine)
    if value is None or known is None or not value.is_known:
        return set(), ""
    return {name.strip().upper() for name in value.text.split(",") if name.strip()}, known.reads


def general_variable(pair: SidePair, field: str) -> Mismatch | None:
    """Judge NIXL_BACKEND, which no engine reads: it must not name another backend than the engine uses."""
    for side, value in zip((pair.prefill, pair.decode), pair.values(field), strict=True):
        used, reads = _used(side)
        if value.is_set and value.is_known and used and value.text.strip().upper() not in used:
            return Mismatch(
                f"{side.engine} does not read {field}, and uses {', '.join(sorted(used))}", f"set {reads} instead"
            )
    return None


def efa_devices(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the backend of a pod with EFA devices: NIXL's wheels bring UCX no provider for them."""
    for side, value in zip((pair.prefill, pair.decode), pair.values(field), strict=True):
        used, reads = _used(side)
        if value.is_set and used and "LIBFABRIC" not in used:
            names = ", ".join(sorted(used))
            return Mismatch(
                f"{side.engine} uses {names}, which NIXL's wheels bring without a provider for EFA: it takes TCP",
                f"set {reads}",
            )
    return None


def segments(pair: SidePair, field: str) -> Mismatch | None:
    """Judge how torch allocates GPU memory: UCX cannot share expandable segments by CUDA IPC."""
    if any(value.is_known and expands_segments(value.text) for value in pair.values(field)):
        return Mismatch("UCX moves the memory of expandable segments by TCP, 600 times slower, and says nothing")
    return None
