# SPDX-License-Identifier: Apache-2.0
"""What engines read: the backend of NIXL that each uses, and the variable of torch's allocator of GPU memory."""

from __future__ import annotations

import re
from typing import NamedTuple

#: The variable that pytest-nixl and recipes of deployments read. No engine does.
GENERAL_VARIABLE = "NIXL_BACKEND"


class EngineBackend(NamedTuple):
    """Where one engine reads its backend.

    :param variable: the environment variable; empty if it reads none.
    :param reads: what sets the backend, as users write it.
    :param default: its backend if nothing sets one.
    """

    engine: str
    variable: str
    reads: str
    default: str
    source: str


ENGINE_BACKENDS = (
    EngineBackend("vLLM", "", 'kv_connector_extra_config {"backends": ["LIBFABRIC"]}', "UCX", "vllm#41814"),
    EngineBackend(
        "SGLang",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC",
        "UCX",
        "SGLang python/sglang/srt/environ.py",
    ),
    EngineBackend(
        "TensorRT-LLM",
        "TRTLLM_NIXL_KVCACHE_BACKEND",
        "TRTLLM_NIXL_KVCACHE_BACKEND=LIBFABRIC",
        "UCX",
        "https://nvidia.github.io/TensorRT-LLM/features/disagg-serving.html",
    ),
    # No release reads a variable: python/ray/experimental/rdt/nixl_tensor_transport.py (select_backend), up to 2.60.0.
    EngineBackend("Ray", "", "LIBFABRIC by itself if the host has EFA", "LIBFABRIC with EFA, else UCX", "ray#62339"),
    EngineBackend(
        "LMCache",
        "LMCACHE_NIXL_BACKENDS",
        'nixl_backends: ["LIBFABRIC"] in its configuration',
        "UCX",
        "LMCache lmcache/v1/config.py",
    ),
    EngineBackend("ModelExpress", "MX_NIXL_BACKEND", "MX_NIXL_BACKEND=LIBFABRIC", "UCX", "modelexpress#259"),
)


def engine_backend(engine: str) -> EngineBackend | None:
    """Return where an engine reads its backend; None if that is not known."""
    return next((backend for backend in ENGINE_BACKENDS if backend.engine == engine), None)


#: The variable's names in torch: the older one, and that of newer releases.
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expands_segments(text: str) -> bool:
    """Return whether torch allocates GPU memory that CUDA IPC cannot share (ai-dynamo/nixl#1754)."""
    return re.search(r"(?:^|,)\s*expandable_segments\s*:\s*true\b", text, re.IGNORECASE) is not None
