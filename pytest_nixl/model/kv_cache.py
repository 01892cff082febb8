# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache, and what a prefill and a decode rank transfer of it for one request.

Every layer is counted as holding every token. Two kinds of layers hold less in some engines:

- Layers with a sliding window (``sliding_attention``: every second layer of GPT-OSS, with 128 tokens). kvbench counts
  them in full too, and so does vLLM when its hybrid KV cache manager is off. When it is on, such a layer keeps only the
  blocks of its window (https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/).
- Layers for multi-token prediction (``num_nextn_predict_layers``: one of DeepSeek-R1). They are not counted: an engine
  has them only if it decodes speculatively.

The file is untrusted: its size and every value that is read have limits, and every fault is one sentence.

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

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_nixl.core.forms import KV_MODEL_FORM
from pytest_nixl.core.strict import Every, Number, OneOf, StrictError, Text, check, loads, shorten
from pytest_nixl.core.units import format_size
from pytest_nixl.core.untrusted_file import open_regular

#: Bytes of one element by data type.
KV_DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
#: The data type of a KV cache by the data type of the weights. A config without one means float32, and vLLM converts
#: float32 weights to 16 bits (``_resolve_auto_dtype`` in its ``vllm/config/model.py``).
_OF_WEIGHTS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "bf16",
    "float": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}

#: Maximum size of a ``config.json`` in bytes. Those of the models below have less than 5000.
MOST_CONFIG_BYTES = 1 << 20
_MOST_LAYERS, _MOST_HEADS, _MOST_ELEMENTS = 4096, 4096, 65_536

#: Values of ``layer_types`` that mean: this layer holds K and V of its tokens.
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
#: Fields of a ``config.json`` that change what the cache holds, in a way that is not computed here: sparse attention
#: with an index (DeepSeek-V3.2), layers without attention (Qwen3-Next, Jamba, Nemotron-H), layers that share or
#: compress their K and V (Gemma 3n, DeepSeek-V4), and other spellings of the number of heads (Falcon, ChatGLM).
_UNSUPPORTED = (
    "index_topk",
    "full_attention_interval",
    "attn_layer_period",
    "attn_type_list",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "block_configs",
    "num_kv_shared_layers",
    "compress_ratios",
    "cross_attention_layers",
    "multi_query",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)

#: The largest accepted numbers. A larger number is a typing error.
MOST_TOKENS, MOST_BLOCK_TOKENS, MOST_TP = 16_777_216, 65_536, 4096


def _optional(most: int) -> OneOf:
    return OneOf((None, Number(1, most, whole=True)))


_FIELDS = {
    "num_hidden_layers": Number(1, _MOST_LAYERS, whole=True),
    "num_attention_heads": Number(1, _MOST_HEADS, whole=True),
    "num_key_value_heads?": _optional(_MOST_HEADS),
    "head_dim?": _optional(_MOST_ELEMENTS),
    "hidden_size?": _optional(1 << 19),
    "kv_lora_rank?": _optional(_MOST_ELEMENTS),
    "qk_rope_head_dim?": _optional(_MOST_ELEMENTS),
    "layer_types?": OneOf((None, Every(Text(64), most=_MOST_LAYERS))),
    "dtype?": OneOf((None, Text(64))),
    "torch_dtype?": OneOf((None, Text(64))),
    "*": Any,
}


@dataclass(frozen=True)
class KvModel:
    """The shape of a model's KV cache.

    :param name: the name in the table, or the path of the ``config.json`` as it was given.
    :param layers: number of layers that hold a cache.
    :param query_heads: number of attention heads; a tensor-parallel size has to divide it.
    :param kv_heads: number of heads in each of K and V; 1 for MLA.
    :param head_dim: elements per head; for MLA ``kv_lora_rank`` + ``qk_rope_head_dim``, the elements per token.
    :param dtype: data type of the cache, one of :data:`KV_DTYPES`.
    :param source: where the shape is from: the address or the path of a ``config.json``.
    :param mla: whether a layer holds one latent vector per token (multi-head latent attention) instead of K and V.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    source: str
    mla: bool = False

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return KV_DTYPES[self.dtype]

    @property
    def tensors_per_layer(self) -> int:
        """Number of tensors that a layer registers: K and V, or the one of MLA."""
        return 1 if self.mla else 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, without tensor parallelism."""
        return self.layers * self.tensors_per_layer * self.kv_heads * self.head_dim * self.dtype_bytes

    def __str__(self) -> str:
        return self.name


def _published(
    name: str, repository: str, layers: int, query_heads: int, kv_heads: int, head_dim: int, *, mla: bool = False
) -> KvModel:
    source = f"https://huggingface.co/{repository}/blob/main/config.json"
    return KvModel(name, layers, query_heads, kv_heads, head_dim, "bf16", source, mla)


#: What is measured without a model: the shape of Llama-3 8B, as an example of usual size.
GENERIC = KvModel("generic", 32, 32, 8, 128, "bf16", "the shape of llama-3-8b")

#: The models that are known by name. The weights of all of them are bfloat16 outside of quantised experts.
KV_MODELS = {
    model.name: model
    for model in (
        GENERIC,
        _published("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, 32, 8, 128),
        _published("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, 64, 8, 128),
        _published("qwen3-8b", "Qwen/Qwen3-8B", 36, 32, 8, 128),
        _published("qwen3-14b", "Qwen/Qwen3-14B", 40, 40, 8, 128),
        _published("qwen3-32b", "Qwen/Qwen3-32B", 64, 64, 8, 128),
        _published("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, 32, 4, 128),
        _published("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, 64, 4, 128),
        _published("deepseek-r1", "deepseek-ai/DeepSeek-R1", 61, 128, 1, 512 + 64, mla=True),
        _published("gpt-oss-20b", "openai/gpt-oss-20b", 24, 64, 8, 64),
        _published("gpt-oss-120b", "openai/gpt-oss-120b", 36, 64, 8, 64),
    )
}


def kv_model(text: str) -> KvModel:
    """Return the model that an option names.

    :param text: a name of :data:`KV_MODELS` in any case, or the path of a ``config.json``. Nothing is downloaded.
    :raises ValueError: if it is neither. The text of the error is one sentence.
    """
    model = KV_MODELS.get(text.strip().lower())
    if model is not None:
        return model
    if os.path.exists(text):
        return _read_config(text)
    path = "/" in text or text.endswith(".json")
    last = os.path.basename(text).lower()[:60]  # of a repository such as Qwen/Qwen3-8B
    near = [last] if last in KV_MODELS else get_close_matches(last, KV_MODELS, n=2, cutoff=0.7)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ValueError(f"there is no {'file' if path else 'model'} {text!r}{hint}: expected {KV_MODEL_FORM}")


def _read_config(path: str) -> KvModel:
    if not os.path.isfile(path):
        raise ValueError(f"model config {path!r} is not a file: expected {KV_MODEL_FORM}")
    try:
        with open_regular(Path(path), 2 * MOST_CONFIG_BYTES, KV_MODEL_FORM) as file:
            data = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"model config {path!r} cannot be read ({error.strerror})") from None
    try:
        if len(data) > MOST_CONFIG_BYTES:
            raise StrictError(f"it has more than the maximum of {MOST_CONFIG_BYTES} bytes")
        return _of_config(loads(data, most=MOST_CONFIG_BYTES), path)
    except StrictError as error:
        raise ValueError(f"model config {path!r} cannot be used: {error}") from None


def _of_config(config: Any, path: str) -> KvModel:
    """Return the shape that a decoded ``config.json`` describes. :raises StrictError: if it describes none."""
    check({"text_config?": OneOf((None, {"*": Any})), "*": Any}, config)
    # A model for text and images describes the part with the KV cache in text_config.
    text = config.get("text_config") or config
    for field in _UNSUPPORTED:
        if text.get(field):
            raise StrictError(f"its field {field} changes what the KV cache holds, and that is not supported")
    check(_FIELDS, text, "it" if text is config else "text_config")
    layers, query_heads = text["num_hidden_layers"], text["num_attention_heads"]
    _check_layer_types(text.get("layer_types"), layers)
    dtype = _dtype(text, config)
    rank, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    if rank is not None:
        if rope is None:
            raise StrictError("kv_lora_rank is given, but qk_rope_head_dim is not")
        return KvModel(path, layers, query_heads, 1, rank + rope, dtype, path, mla=True)
    kv_heads = text.get("num_key_value_heads") or query_heads
    if query_heads % kv_heads:
        raise StrictError(f"num_attention_heads {query_heads} is not a multiple of num_key_value_heads {kv_heads}")
    return KvModel(path, layers, query_heads, kv_heads, _head_dim(text), dtype, path)


def _head_dim(text: dict[str, Any]) -> int:
    head_dim, hidden, heads = text.get("head_dim"), text.get("hidden_size"), text["num_attention_heads"]
    if head_dim is None:
        if hidden is None:
            raise StrictError("it has neither head_dim nor hidden_size")
        head_dim, remainder = divmod(hidden, heads)
        if remainder:
            raise StrictError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return int(head_dim)


def _check_layer_types(kinds: list[str] | None, layers: int) -> None:
    if kinds is None:
        return
    if len(kinds) != layers:
        raise StrictError(f"layer_types has {len(kinds)} items, but num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in _ATTENTION:
            raise StrictError(f"layer_types contains {shorten(kind)}: expected one of {', '.join(_ATTENTION)}")


def _dtype(text: dict[str, Any], config: dict[str, Any]) -> str:
    fields = ((holder, name) for holder in (text, config) for name in ("dtype", "torch_dtype"))
    name, value = next(((name, holder[name]) for holder, name in fields if holder.get(name) is not None), ("", ""))
    if not name:
        return "bf16"
    check(Text(64), value, name)
    dtype = _OF_WEIGHTS.get(value.removeprefix("torch."))
    if dtype is None:
        raise StrictError(f"{name} is {shorten(value)}: expected one of {', '.join(_OF_WEIGHTS)}")
    return dtype


def format_tp(tp: tuple[int, int]) -> str:
    """Print the tensor-parallel sizes of prefill and decode as an option has them: ``1:2``, or ``2`` if equal."""
    return f"{tp[0]}:{tp[1]}" if tp[0] != tp[1] else str(tp[0])


@dataclass(frozen=True)
class KvPlan:
    """The transfer of one request's KV cache, per rank. Make one with :meth:`of`, which checks the values.

    :param tokens: number of tokens of the request.
    :param tp: tensor-parallel sizes of the prefill side and the decode side.
    :param block_tokens: tokens per block.
    :param dtype: data type of the cache, one of :data:`~pytest_nixl.model.kv_cache.KV_DTYPES`.
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
