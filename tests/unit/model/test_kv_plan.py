# SPDX-License-Identifier: Apache-2.0
"""Blocks, bytes and descriptors of a KV cache, compared with the plans that kvbench makes for the same models.

The figures of kvbench are data from github.com/ai-dynamo/nixl at commit 8770b655a6b17b5cdf7d2b56b6e0be5392496df5:

- ``PLANNED``: computed by its ``BaseModelArch.get_io_size`` and ``get_batch_size`` (``benchmark/kvbench/models``) from
  ``benchmark/kvbench/examples/model_*.yaml``, with one request of 8192 tokens, pages of 16 tokens, the access pattern
  ``layer`` and its default data type fp8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.model.kv_cache import GENERIC, KV_MODELS, KvModel, KvPlan, format_tp

#: By preset: bytes per token, and for TP 1 and TP 8 the bytes of one IO and the number of IOs.
PLANNED = {
    "llama-3-8b": (65_536, (32_768, 16_384), (4096, 131_072)),
    "llama-3-70b": (163_840, (32_768, 40_960), (4096, 327_680)),
    "qwen3-8b": (73_728, (32_768, 18_432), (4096, 147_456)),
    "qwen3-235b-a22b": (96_256, (16_384, 48_128), (2048, 385_024)),
    "deepseek-r1": (35_136, (9216, 31_232), (1152, 249_856)),
    "gpt-oss-20b": (24_576, (16_384, 12_288), (2048, 98_304)),
    "gpt-oss-120b": (36_864, (16_384, 18_432), (2048, 147_456)),
}


def plan(name: str, *, tokens: int = 8192, **options: Any) -> KvPlan:
    """Return a plan in the data type that kvbench assumes."""
    return KvPlan.of(KV_MODELS[name], tokens=tokens, dtype="fp8", **options)


def io_bytes(planned: KvPlan) -> int:
    """Return the bytes of what kvbench calls an IO of the access pattern ``layer``: K and V of one block."""
    return planned.tensors_per_layer * planned.block_bytes


@pytest.mark.parametrize("name", PLANNED)
def test_kvbench_plans_the_same_blocks_counts_and_bytes(name: str) -> None:
    per_token, (size, count), _ = PLANNED[name]
    ours = plan(name)
    assert (io_bytes(ours), ours.decode_block_bytes) == (size, ours.block_bytes)
    assert ours.layers * ours.blocks == ours.descriptors // ours.tensors_per_layer == count
    assert ours.bytes_per_rank == size * count == 8192 * per_token
    assert replace(KV_MODELS[name], dtype="fp8").bytes_per_token == per_token


@pytest.mark.parametrize("name", sorted(PLANNED.keys() - {"deepseek-r1", "qwen3-235b-a22b"}))
def test_kvbench_plans_the_same_for_8_ranks_but_counts_all_of_them(name: str) -> None:
    size, count = PLANNED[name][2]
    ours = plan(name, tp=(8, 8))
    assert io_bytes(ours) == size
    assert 8 * ours.descriptors // ours.tensors_per_layer == count


def test_what_every_rank_holds_is_not_split_though_kvbench_divides_it() -> None:
    """Every rank of vLLM holds the whole latent vector of MLA, and one head of 4 KV heads at TP 8."""
    single, eight = plan("deepseek-r1"), plan("deepseek-r1", tp=(8, 8))
    assert (eight.block_bytes, eight.descriptors) == (8 * PLANNED["deepseek-r1"][2][0], single.descriptors)
    assert io_bytes(plan("qwen3-235b-a22b", tp=(8, 8))) == 2 * PLANNED["qwen3-235b-a22b"][2][0]


def test_a_partly_filled_block_counts_as_one() -> None:
    assert plan("deepseek-r1", tokens=10_000, block_tokens=256).descriptors * 10 == 61 * 40 * 10 == 24_400
    assert [plan("llama-3-8b", tokens=tokens).blocks for tokens in (1, 16, 17)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("name", "tp", "prefill", "decode", "pieces"),
    [
        ("llama-3-8b", (1, 2), 16_384, 8192, 2),
        ("llama-3-8b", (2, 1), 8192, 16_384, 2),
        ("llama-3-8b", (8, 32), 2048, 2048, 1),  # 32 ranks have a copy of one head each
        ("llama-3-8b", (2, 32), 8192, 2048, 4),
        ("qwen3-235b-a22b", (8, 2), 2048, 4096, 2),
        ("deepseek-r1", (1, 16), 9216, 9216, 1),
    ],
)
def test_different_sizes_of_the_sides_split_the_larger_block(
    name: str, tp: tuple[int, int], prefill: int, decode: int, pieces: int
) -> None:
    ours = plan(name, tp=tp)
    assert (ours.block_bytes, ours.decode_block_bytes, ours.pieces) == (prefill, decode, pieces)
    assert ours.piece_bytes == min(prefill, decode)
    parts = (pieces, 1) if prefill > decode else (1, pieces)
    assert (ours.pieces_of("WRITE"), ours.pieces_of("READ")) == (parts, parts[::-1])
    assert ours.descriptors == plan(name).descriptors
    assert ours.bytes_per_rank == ours.descriptors * prefill


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tokens": 0}, "the number of tokens is 0: expected an integer from 1 to 16777216"),
        ({"tokens": 1 << 40}, "the number of tokens is 1099511627776: expected an integer from 1 to 16777216"),
        ({"block_tokens": 0}, "the number of tokens per block is 0: expected an integer from 1 to 65536"),
        ({"tp": (0, 1)}, "the tensor-parallel size is 0: expected an integer from 1 to 4096"),
        ({"tp": (1, 5000)}, "the tensor-parallel size is 5000: expected an integer from 1 to 4096"),
        ({"tp": (3, 1)}, "tensor-parallel size 3 does not split the 32 attention heads and 8 KV heads of generic "
         "evenly: expected one of 1, 2, 4, 8, 16, 32"),
        ({"dtype": "int3"}, "'int3' is not a data type of a KV cache: expected one of bf16, fp16, fp32, fp8, int8"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_one_sentence(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=r"expected") as caught:
        KvPlan.of(GENERIC, **{"tokens": 8192, **options})
    assert str(caught.value) == fault


def test_sizes_of_which_neither_is_a_multiple_of_the_other_are_refused() -> None:
    model = KvModel("of 12 heads", 2, 12, 12, 64, "bf16", "made up")
    with pytest.raises(ValueError, match=r"^the tensor-parallel sizes 2 and 3 do not fit together: expected"):
        KvPlan.of(model, tokens=1, tp=(2, 3))


def test_a_plan_is_printed_with_its_counts() -> None:
    assert str(plan("deepseek-r1", tokens=1000, tp=(2, 2))) == (
        "1000 tokens of deepseek-r1 in fp8, TP 2: 61 layers x 1 x 63 blocks = 3843 descriptors of 9KiB, "
        "34587KiB per prefill rank"
    )
    assert "descriptors of 8KiB (2 pieces each), " in str(plan("llama-3-8b", tp=(2, 4)))
    assert "descriptors of 4KiB (2 fill a block of the decode side), " in str(plan("llama-3-8b", tp=(4, 2)))
    assert (format_tp((4, 4)), format_tp((4, 8))) == ("4", "4:8")
