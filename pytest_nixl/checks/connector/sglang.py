# SPDX-License-Identifier: Apache-2.0
"""The configuration of SGLang with prefill and decode apart.

Sources: https://docs.sglang.io/advanced_features/pd_disaggregation.html and, in SGLang's repository,
``python/sglang/srt/server_args.py`` and ``python/sglang/srt/environ.py``.
"""

from __future__ import annotations

from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import EngineField, FieldValue, read_fields

FIELDS = (
    EngineField("--model-path", ("--model-path", "--model")),
    EngineField("--revision", ("--revision",)),
    EngineField("--dtype", ("--dtype",), default="auto"),
    EngineField("--kv-cache-dtype", ("--kv-cache-dtype",), default="auto"),
    EngineField("--page-size", ("--page-size",)),
    EngineField("--tp-size", ("--tp-size", "--tensor-parallel-size", "--tp"), default="1"),
    EngineField("--pp-size", ("--pp-size", "--pipeline-parallel-size"), default="1"),
    EngineField("--dp-size", ("--dp-size", "--data-parallel-size", "--dp"), default="1"),
    EngineField("--enable-dp-attention", ("--enable-dp-attention",), default="false", switch=True),
    EngineField("--enable-hisparse", ("--enable-hisparse",), default="false", switch=True),
    EngineField("--disaggregation-mode", ("--disaggregation-mode",), default="null"),
    EngineField("--disaggregation-transfer-backend", ("--disaggregation-transfer-backend",), default="mooncake"),
    EngineField("--disaggregation-bootstrap-port", ("--disaggregation-bootstrap-port",), default="8998"),
    EngineField("--disaggregation-decode-tp", ("--disaggregation-decode-tp",)),
    EngineField("--disaggregation-decode-dp", ("--disaggregation-decode-dp",)),
    EngineField("--host", ("--host",), default="127.0.0.1"),
    EngineField("--port", ("--port",), default="30000"),
    EngineField("SGLANG_DISAGGREGATION_NIXL_BACKEND", variables=("SGLANG_DISAGGREGATION_NIXL_BACKEND",), default="UCX"),
)


def read_sglang(source: ConfiguredEngine) -> dict[str, FieldValue]:
    values = read_fields(source.launch, FIELDS)
    if source.launch.model and not values["--model-path"].is_set:
        values["--model-path"] = FieldValue(source.launch.model)
    return values
