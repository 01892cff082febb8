# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache, from a table or from a ``config.json``. Every fault of a file is one sentence."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.core.forms import KV_MODEL_FORM, KV_MODEL_NAMES
from pytest_nixl.core.strict import StrictError
from pytest_nixl.model.kv_cache import GENERIC, KV_DTYPES, KV_MODELS, MOST_CONFIG_BYTES, KvModel, KvPlan, kv_model
from pytest_nixl.model.settings import OPTIONS

#: The fields of published files that this reader looks at, by the preset that they have to equal.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    },
    # hidden_size / num_attention_heads is 64 here, so head_dim has to win.
    "qwen3-235b-a22b": {
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "hidden_size": 4096,
        "head_dim": 128, "torch_dtype": "bfloat16",
    },
    "deepseek-r1": {
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 2880,
        "head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip
LLAMA = PUBLISHED["llama-3-8b"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def write(path: Path, config: object) -> str:
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def without(*names: str, **other: object) -> dict[str, object]:
    """Return the config of Llama-3 8B without some fields and with other ones."""
    return {name: value for name, value in {**LLAMA, **other}.items() if name not in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_equals_the_published_file(path: Path, name: str) -> None:
    text = write(path, PUBLISHED[name])
    assert kv_model(text) == replace(KV_MODELS[name], name=text, source=text)


def test_help_names_every_preset_and_data_type() -> None:
    assert tuple(KV_MODELS) == KV_MODEL_NAMES
    assert next(item.form for item in OPTIONS if item.field == "kv_dtype") == " | ".join(("auto", *KV_DTYPES))


def test_a_name_is_found_in_any_case() -> None:
    assert kv_model(" generic ") is GENERIC
    assert kv_model("LLAMA-3-70B") is kv_model("llama-3-70b")


def test_the_shape_of_a_nested_text_model_is_read(path: Path) -> None:
    nested = {
        "torch_dtype": "float16",
        "vision_config": {"num_hidden_layers": 2},
        "text_config": without("torch_dtype"),
    }
    assert kv_model(write(path, nested)) == KvModel(str(path), 32, 32, 8, 128, "fp16", str(path))


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim", "dtype"),
    [
        pytest.param(without(num_key_value_heads=None, head_dim=None), 32, 128, "bf16", id="null"),
        pytest.param(without("hidden_size", head_dim=80), 8, 80, "bf16", id="head_dim"),
        pytest.param(without("torch_dtype"), 8, 128, "bf16", id="no-dtype"),
        pytest.param(without("torch_dtype", dtype="torch.float16"), 8, 128, "fp16", id="dtype"),
        pytest.param(without(torch_dtype="float32"), 8, 128, "bf16", id="float32"),
        pytest.param(without(kv_lora_rank=None, multi_query=False, index_topk=None), 8, 128, "bf16", id="not-mla"),
    ],
)
def test_fields_that_are_left_out_have_the_usual_meaning(
    path: Path, config: dict[str, object], kv_heads: int, head_dim: int, dtype: str
) -> None:
    model = kv_model(write(path, config))
    assert (model.kv_heads, model.head_dim, model.dtype, model.mla) == (kv_heads, head_dim, dtype, False)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (without("num_attention_heads"), "it has no field 'num_attention_heads'"),
        (without(num_hidden_layers=0), "num_hidden_layers is 0: expected an integer from 1 to 4096"),
        (without(num_key_value_heads=5), "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        (without(hidden_size=4097), "hidden_size 4097 is not a multiple of num_attention_heads 32"),
        (without("hidden_size"), "it has neither head_dim nor hidden_size"),
        (without(head_dim=10**6), "head_dim is 1000000: expected an integer from 1 to 65536"),
        (without(kv_lora_rank=512), "kv_lora_rank is given, but qk_rope_head_dim is not"),
        (without(torch_dtype="int3"), "torch_dtype is 'int3': expected one of bfloat16, float16, half, float32, float, "
         "float8_e4m3fn, float8_e5m2"),
        (without(layer_types=["full_attention"]), "layer_types has 1 items, but num_hidden_layers is 32"),
        (without(layer_types=["linear_attention"] * 32), "layer_types contains 'linear_attention': expected one of "
         "full_attention, sliding_attention, chunked_attention, attention"),
        (without(multi_query=True), "its field multi_query changes what the KV cache holds, and that is not supported"),
        ({"text_config": {"num_hidden_layers": -1, "num_attention_heads": 1}},
         "text_config.num_hidden_layers is -1: expected an integer from 1 to 4096"),
        ({"dtype": ["a"], "text_config": without("torch_dtype")}, "dtype is a list of 1: expected a text of at most 64 "
         "characters"),
        ([LLAMA], "it is a list of 1: expected an object"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused_in_one_sentence(path: Path, config: object, fault: str) -> None:
    text = write(path, config)
    with pytest.raises(ValueError, match=r"^model config") as caught:
        kv_model(text)
    assert str(caught.value) == f"model config {text!r} cannot be used: {fault}"
    assert not isinstance(caught.value, StrictError)


def test_a_file_that_is_not_a_config_is_refused_in_one_sentence(path: Path) -> None:
    large = b"{" + b" " * (MOST_CONFIG_BYTES - 1) + b"}"
    for data, fault in (
        (b"\xff\xfe", "it is not JSON"),
        (large, f"it has more than the maximum of {MOST_CONFIG_BYTES} bytes"),
        (large[1:], "it is not JSON"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"^model config '.*' cannot be used: {fault}") as caught:
            kv_model(str(path))
        assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)  # to open it would wait for a writer
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match=r"^model config '.* is not a file: expected "):
            kv_model(str(path))
    for endless in ("/proc/kmsg", "/proc/self/pagemap"):
        with pytest.raises(ValueError, match=r"is a stream that does not end|has more than 2 MiB|cannot be read"):
            kv_model(endless)
    with pytest.raises(ValueError, match=r"^there is no file '.*none\.json'"):
        kv_model(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"^there is no file"):
        kv_model("nul\0.json")


@pytest.mark.parametrize(
    ("text", "near"), [("gpt-oss", "gpt-oss-20b or gpt-oss-120b"), ("deepseek-ai/DEEPSEEK-R1", "deepseek-r1")]
)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=r"^there is no ") as caught:
        kv_model(text)
    assert f"(did you mean {near}" in str(caught.value)
    assert str(caught.value).endswith(f": expected {KV_MODEL_FORM}")


def test_the_page_lists_every_preset_with_its_bytes() -> None:
    page = (ROOT / "docs" / "how-to" / "kv-cache.md").read_text(encoding="utf-8")
    for model in KV_MODELS.values():
        shown = model.name if model is GENERIC else f"[{model.name}]({model.source})"
        heads = "MLA" if model.mla else model.kv_heads
        block = KvPlan.of(model, tokens=8192).block_bytes
        row = f"| {shown} | {model.layers} | {heads} | {model.head_dim} | {model.bytes_per_token} | {block} |"
        assert row in page.splitlines()
    assert str(KvPlan.of(kv_model("llama-3-70b"), tokens=8192, tp=(4, 8))) in page.splitlines()


def test_a_model_knows_the_bytes_of_its_elements() -> None:
    assert KV_DTYPES == {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}
