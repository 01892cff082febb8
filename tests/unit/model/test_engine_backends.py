# SPDX-License-Identifier: Apache-2.0
"""What engines read of their environment."""

from __future__ import annotations

import pytest

from pytest_nixl.model.engine_backends import ENGINE_BACKENDS, engine_backend, expands_segments


@pytest.mark.parametrize(
    ("text", "expands"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments : true", True),
        ("expandable_segments:true,x:1", True),
        ("expandable_segments:False", False),
        ("expandable_segments:trueish", False),
        ("not_expandable_segments:True", False),
        ("x:1 expandable_segments:True", False),
        ("", False),
    ],
)
def test_the_setting_of_torchs_allocator_is_a_part_of_a_list(text: str, expands: bool) -> None:
    assert expands_segments(text) is expands


def test_an_engine_is_known_by_its_name() -> None:
    assert [engine_backend(backend.engine) for backend in ENGINE_BACKENDS] == list(ENGINE_BACKENDS)
    assert engine_backend("vllm") is None
    assert {backend.engine: (backend.variable, backend.default) for backend in ENGINE_BACKENDS} == {
        "vLLM": ("", "UCX"),
        "SGLang": ("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX"),
        "TensorRT-LLM": ("TRTLLM_NIXL_KVCACHE_BACKEND", "UCX"),
        "Ray": ("", "LIBFABRIC with EFA, else UCX"),
        "LMCache": ("LMCACHE_NIXL_BACKENDS", "UCX"),
        "ModelExpress": ("MX_NIXL_BACKEND", "UCX"),
    }
