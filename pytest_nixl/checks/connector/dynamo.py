# SPDX-License-Identifier: Apache-2.0
"""The configuration that Dynamo adds to the engine that it runs.

Sources, in Dynamo's repository: ``components/src/dynamo/common/configuration/groups/runtime_args.py``,
``components/src/dynamo/vllm/backend_args.py``.
"""

from __future__ import annotations

from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import EngineField, FieldValue, read_fields

#: The field that says whether a worker does prefill or decode.
ROLE = "worker role"

FIELDS = (
    EngineField("--namespace", ("--namespace",), ("DYN_NAMESPACE",), "dynamo"),
    EngineField("--endpoint", ("--endpoint",), ("DYN_ENDPOINT",)),
    EngineField("--discovery-backend", ("--discovery-backend",), ("DYN_DISCOVERY_BACKEND",), "etcd"),
    EngineField("--request-plane", ("--request-plane",), ("DYN_REQUEST_PLANE",), "tcp"),
    EngineField("--response-plane", ("--response-plane",), ("DYN_RESPONSE_PLANE",), "tcp"),
    EngineField("--event-plane", ("--event-plane",), ("DYN_EVENT_PLANE",)),
    EngineField("ETCD_ENDPOINTS", variables=("ETCD_ENDPOINTS",)),
    EngineField("NATS_SERVER", variables=("NATS_SERVER",)),
)
_ROLES = (
    EngineField("mode", ("--disaggregation-mode",), ("DYN_VLLM_DISAGGREGATION_MODE",)),
    EngineField("prefill", ("--is-prefill-worker",), ("DYN_VLLM_IS_PREFILL_WORKER",), switch=True),
    EngineField("decode", ("--is-decode-worker",), ("DYN_VLLM_IS_DECODE_WORKER",), switch=True),
)
_TRUE = frozenset({"true", "1", "yes", "on"})


def read_dynamo(source: ConfiguredEngine) -> dict[str, FieldValue]:
    values = read_fields(source.launch, FIELDS)
    if source.launch.engine == "vLLM":  # SGLang's --disaggregation-mode is SGLang's own option
        values[ROLE] = _role(source)
    endpoint = values["--endpoint"].text
    if endpoint.startswith("dyn://"):
        values["--namespace"] = FieldValue(endpoint.removeprefix("dyn://").partition(".")[0])
    return values


def _role(source: ConfiguredEngine) -> FieldValue:
    given = read_fields(source.launch, _ROLES)
    for role in ("prefill", "decode"):
        if given[role].text.lower() in _TRUE:
            return FieldValue(role)
    mode = given["mode"]
    # A worker without a role was the decode worker before --is-decode-worker and --disaggregation-mode.
    return mode if mode.is_set else FieldValue("", is_set=False, is_readable=mode.is_readable)
