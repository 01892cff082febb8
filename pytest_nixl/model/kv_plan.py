# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank and a decode rank transfer for one request: how many blocks, of how many bytes.

A paged KV cache is one tensor for K and one for V in each layer (MLA: one tensor), cut into blocks of a fixed number of
tokens. A transfer has one descriptor for each block of each tensor. Tensor parallelism (TP) splits the heads of each
block, so that a rank's block is smaller; it does not change the number of blocks.

**TP as vLLM does it** (``get_num_kv_heads`` and ``verify_with_parallel_config`` in its ``vllm/config/model.py``): TP
divides the attention heads. It also divides the KV heads, or else it is a multiple of them and each rank has a copy of
one head. MLA is not split: every rank holds the whole latent vector of every token. If prefill and decode differ in TP,
one size is a multiple of the other (``tp_ratio`` of its NIXL connector). A block of the side with more heads then is
several pieces of the other side, each contiguous, because heads come before tokens in a block: the connector requires
the layout HND (``get_required_kvcache_layout``).

**kvbench** (``benchmark/kvbench`` of github.com/ai-dynamo/nixl, commit 8770b655a6b17b5cdf7d2b56b6e0be5392496df5) plans
the same bytes, with these differences. ``tests/unit/model/test_kv_plan.py`` holds its figures.

- Its IO of the access pattern ``layer`` is K and V of a block together: ``tensors_per_layer * block_bytes`` here. Its
  pattern ``block`` is one IO for all layers. Here K and V of a layer are separate tensors.
- It divides MLA by TP (``get_io_size`` in ``models/deepseek_r1.py``). A rank of vLLM holds, and transfers, all of it.
- It divides by TP even if that leaves less than one head (``models/qwen3.py``: 4 KV heads at TP 8).
- Its batch counts the IOs of all TP ranks (``get_batch_size`` in ``models/utils.py`` divides the bytes of all ranks by
  the IO of one rank). Here the counts are those of one rank.
- It rounds up once, after layers and requests were multiplied. A request really ends with a partly filled block, which
  is transferred whole, in each tensor.
- For GQA it takes the size of an element from ``model_quant_mode``, the weights, and not from ``kvcache_quant_mode``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.core.units import format_size
from pytest_nixl.model.kv_model import KV_DTYPES, KvModel

#: The largest accepted numbers. A larger number is a typing error.
MOST_TOKENS, MOST_BLOCK_TOKENS, MOST_TP = 16_777_216, 65_536, 4096


def format_tp(tp: tuple[int, int]) -> str:
    """Print the tensor-parallel sizes of prefill and decode as an option has them: ``1:2``, or ``2`` if equal."""
    return f"{tp[0]}:{tp[1]}" if tp[0] != tp[1] else str(tp[0])


@dataclass(frozen=True)
class KvPlan:
    """The transfer of one request's KV cache, per rank. Make one with :meth:`of`, which checks the values.

    :param tokens: number of tokens of the request.
    :param tp: tensor-parallel sizes of the prefill side and the decode side.
    :param block_tokens: tokens per block.
    :param dtype: data type of the cache, one of :data:`~pytest_nixl.model.kv_model.KV_DTYPES`.
    """

    model: KvModel
    tokens: int
    tp: tuple[int, int]
    block_tokens: int
    dtype: str

    @classmethod
    def of(
        cls,
        model: KvModel,
        *,
        tokens: int,
        tp: tuple[int, int] = (1, 1),
        block_tokens: int = 16,
        dtype: str | None = None,
    ) -> KvPlan:
        """Return the plan of one request.

        :param tokens: number of tokens of the request.
        :param tp: tensor-parallel sizes of the prefill side and the decode side.
        :param block_tokens: tokens per block.
        :param dtype: data type of the cache; None: the model's.
        :raises ValueError: if a number is out of range, or a tensor-parallel size does not split the model's heads.
            The text of the error is one sentence.
        """
        _check_range("number of tokens", tokens, MOST_TOKENS)
        _check_range("number of tokens per block", block_tokens, MOST_BLOCK_TOKENS)
        for size in tp:
            _check_range("tensor-parallel size", size, MOST_TP)
            _check_split(model, size)
        if max(tp) % min(tp):
            raise ValueError(
                f"the tensor-parallel sizes {tp[0]} and {tp[1]} do not fit together: expected one to be a multiple of "
                "the other"
            )
        if dtype is not None and dtype not in KV_DTYPES:
            raise ValueError(f"{dtype!r} is not a data type of a KV cache: expected one of {', '.join(KV_DTYPES)}")
        return cls(model, tokens, tp, block_tokens, dtype or model.dtype)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.model.layers

    @property
    def tensors_per_layer(self) -> int:
        """Number of tensors of each layer: 2 (K and V), or 1 for MLA."""
        return self.model.tensors_per_layer

    @property
    def blocks(self) -> int:
        """Number of blocks of each tensor. The last one may be partly filled; it is transferred whole."""
        return -(-self.tokens // self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tensor on one rank of the prefill side."""
        return self._block_bytes(self.tp[0])

    @property
    def decode_block_bytes(self) -> int:
        """Bytes of one block of one tensor on one rank of the decode side."""
        return self._block_bytes(self.tp[1])

    @property
    def descriptors(self) -> int:
        """Number of blocks of all tensors of one rank. On the side with larger blocks each is :attr:`pieces` parts."""
        return self.layers * self.tensors_per_layer * self.blocks

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that one rank of the prefill side holds for the request."""
        return self.descriptors * self.block_bytes

    @property
    def pieces(self) -> int:
        """Number of pieces that one block of the side with larger blocks is for the other side; 1 if they are equal."""
        sizes = self.block_bytes, self.decode_block_bytes
        return max(sizes) // min(sizes)

    @property
    def piece_bytes(self) -> int:
        """Bytes that one descriptor of a pair of ranks moves: a block of the side with smaller blocks."""
        return min(self.block_bytes, self.decode_block_bytes)

    def pieces_of(self, op: str) -> tuple[int, int]:
        """Return the number of pieces of a block of the initiator and of the target; one of the two is 1.

        :param op: ``WRITE`` (the initiator is the prefill side) or ``READ`` (it is the decode side).
        """
        prefill, decode = self.block_bytes // self.piece_bytes, self.decode_block_bytes // self.piece_bytes
        return (prefill, decode) if op == "WRITE" else (decode, prefill)

    def _block_bytes(self, tp: int) -> int:
        heads = max(1, self.model.kv_heads // tp)  # MLA has one
        return self.block_tokens * heads * self.model.head_dim * KV_DTYPES[self.dtype]

    def __str__(self) -> str:
        split = ""
        if self.pieces > 1:
            sent = self.block_bytes > self.decode_block_bytes
            split = f" ({self.pieces} pieces each)" if sent else f" ({self.pieces} fill a block of the decode side)"
        return (
            f"{self.tokens} tokens of {self.model} in {self.dtype}, TP {format_tp(self.tp)}: {self.layers} layers x "
            f"{self.tensors_per_layer} x {self.blocks} blocks = {self.descriptors} descriptors of "
            f"{format_size(self.block_bytes)}{split}, {format_size(self.bytes_per_rank)} per prefill rank"
        )


def _check_range(name: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise ValueError(f"the {name} is {number}: expected an integer from 1 to {most}")


def _splits(model: KvModel, tp: int) -> bool:
    """Whether each of ``tp`` ranks gets as many heads as every other."""
    kv_heads = tp if model.mla else model.kv_heads
    return model.query_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _check_split(model: KvModel, tp: int) -> None:
    if not _splits(model, tp):
        heads = f"{model.query_heads} attention heads" + ("" if model.mla else f" and {model.kv_heads} KV heads")
        fit = ", ".join(str(size) for size in range(1, model.query_heads + 1) if _splits(model, size))
        raise ValueError(
            f"tensor-parallel size {tp} does not split the {heads} of {model} evenly: expected one of {fit}"
        )
