# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache: from a table of well-known models, or from a Hugging Face ``config.json``.

Every layer is counted as holding every token. Two kinds of layers hold less in some engines:

- Layers with a sliding window (``sliding_attention``: every second layer of GPT-OSS, with 128 tokens). kvbench counts
  them in full too, and so does vLLM when its hybrid KV cache manager is off. When it is on, such a layer keeps only the
  blocks of its window (https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/).
- Layers for multi-token prediction (``num_nextn_predict_layers``: one of DeepSeek-R1). They are not counted: an engine
  has them only if it decodes speculatively.

The file is untrusted: its size and every value that is read have limits, and every fault is one sentence.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_nixl.core.forms import KV_MODEL_FORM
from pytest_nixl.core.strict import Every, Number, OneOf, StrictError, Text, check, loads, shorten
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
