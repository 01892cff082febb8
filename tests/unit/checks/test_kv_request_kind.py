# SPDX-License-Identifier: Apache-2.0
"""The key of a row of requests for KV blocks says everything that two rows may differ in, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.checks.kv_cache.check import KvRequestKind
from pytest_nixl.model.kv_cache import KV_MODELS, KvModel, KvPlan, kv_model
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey

PLAN = KvPlan.of(kv_model("llama-3-8b"), tokens=1024)
KIND = KvRequestKind("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), (0, 1), "scattered-prepped", PLAN)
SPLIT = KvPlan.of(kv_model("llama-3-70b"), tokens=8192, tp=(4, 8))
OUR_MODEL = KvModel("/models/mine/config.json", 12, 16, 4, 64, "bf16", "/models/mine/config.json")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (KIND, "UCX/WRITE/DRAM:DRAM/32KiB/batch4096/depth1/0-1/kv=scattered-prepped,model=llama-3-8b,tokens=1024"),
        (
            replace(KIND, op="READ", ranks=(2, 3), method="contiguous-merged", requests=4, rate=12.5),
            "UCX/READ/DRAM:DRAM/32KiB/batch4096/depth1/2-3/"
            "kv=contiguous-merged,model=llama-3-8b,rate=12.5,requests=4,tokens=1024",
        ),
        (
            replace(KIND, plan=SPLIT),
            "UCX/WRITE/DRAM:DRAM/4KiB/batch81920/depth1/0-1/kv=scattered-prepped,model=llama-3-70b,tokens=8192,tp=4:8",
        ),
        (
            replace(KIND, plan=KvPlan.of(OUR_MODEL, tokens=16, tp=(2, 2)), settings=(("progress-thread", "on"),)),
            "UCX/WRITE/DRAM:DRAM/4KiB/batch24/depth1/0-1/"
            "kv=scattered-prepped,model=12layers-4heads-64,progress-thread=on,tokens=16,tp=2",
        ),
        (
            replace(KIND, memory=MemoryPair("VRAM", "VRAM"), devices=DevicePair(0, 3)),
            "UCX/WRITE/VRAM@0:VRAM@3/32KiB/batch4096/depth1/0-1/kv=scattered-prepped,model=llama-3-8b,tokens=1024",
        ),
    ],
)
def test_a_key_is_read_again_from_its_text(kind: KvRequestKind, text: str) -> None:
    assert str(kind.key) == text
    assert RowKey.parse(text) == kind.key
    assert kind.key.kv == kind.method


def test_every_model_of_the_table_is_named_by_it() -> None:
    for name, model in KV_MODELS.items():
        kind = replace(KIND, plan=KvPlan.of(model, tokens=64))
        assert dict(kind.key.variant)["model"] == name
