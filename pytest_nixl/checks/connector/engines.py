# SPDX-License-Identifier: Apache-2.0
"""The configuration of vLLM with its NixlConnector, of SGLang with prefill and decode apart, and what Dynamo adds.

Sources: https://docs.vllm.ai/en/stable/features/nixl_connector_usage/,
https://docs.sglang.io/advanced_features/pd_disaggregation.html, and in the repositories: vLLM's
``vllm/config/kv_transfer.py``; SGLang's ``python/sglang/srt/server_args.py`` and ``python/sglang/srt/environ.py``;
Dynamo's ``components/src/dynamo/common/configuration/groups/runtime_args.py`` and
``components/src/dynamo/vllm/backend_args.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import EngineField, FieldValue, bounded, json_option, read_fields
from pytest_nixl.model.nixl_releases import TELEMETRY_VARIABLE

#: The connectors that use NIXL: the default one is the same as NixlPullConnector.
NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")

#: The connectors that contain others: vLLM's, and Dynamo's of one for offloading and one for the transfer.
_WRAPPERS = ("MultiConnector", "PdConnector")

_VLLM = (
    EngineField("--model", ("--model",)),
    EngineField("--revision", ("--revision",)),
    EngineField("--dtype", ("--dtype",), default="auto"),
    EngineField("--kv-cache-dtype", ("--kv-cache-dtype",), default="auto"),
    EngineField("--block-size", ("--block-size",)),
    EngineField("--tensor-parallel-size", ("--tensor-parallel-size", "-tp"), default="1"),
    EngineField("--data-parallel-size", ("--data-parallel-size", "-dp"), default="1"),
    EngineField("--attention-backend", ("--attention-backend",), ("VLLM_ATTENTION_BACKEND",)),
    EngineField(
        "--disable-hybrid-kv-cache-manager", ("--disable-hybrid-kv-cache-manager",), default="false", switch=True
    ),
    EngineField("--port", ("--port",), default="8000"),
    EngineField(TELEMETRY_VARIABLE, variables=(TELEMETRY_VARIABLE,)),
    EngineField("VLLM_KV_CACHE_LAYOUT", variables=("VLLM_KV_CACHE_LAYOUT",), default="HND"),
    EngineField("VLLM_NIXL_SIDE_CHANNEL_HOST", variables=("VLLM_NIXL_SIDE_CHANNEL_HOST",), default="localhost"),
    EngineField("VLLM_NIXL_SIDE_CHANNEL_PORT", variables=("VLLM_NIXL_SIDE_CHANNEL_PORT",), default="5600"),
)


def read_vllm(source: ConfiguredEngine) -> dict[str, FieldValue]:
    """Return the fields of vLLM. :raises ValueError: if an option that must be JSON is not."""
    values = read_fields(source.launch, _VLLM)
    if source.launch.model and not values["--model"].is_set:
        values["--model"] = FieldValue(source.launch.model)
    if source.launch.dynamo and not values["VLLM_NIXL_SIDE_CHANNEL_HOST"].is_set:
        # dynamo.vllm sets the variable to the host's address: ensure_side_channel_host.
        values["VLLM_NIXL_SIDE_CHANNEL_HOST"] = FieldValue("", is_set=False)
    given = {**dict(_transfer(source)), **dict(_speculative(source))}
    return values | {name: bounded(name, value) for name, value in given.items()}


def _transfer(source: ConfiguredEngine) -> Iterator[tuple[str, FieldValue]]:
    """Yield the fields of ``--kv-transfer-config``. In a MultiConnector or PdConnector, that of NIXL counts."""
    given = json_option(source, "--kv-transfer-config")
    readable = bool(given) or source.launch.has_options
    if not given and source.launch.dynamo and "nixl" in source.launch.options.get("--connector", ()):
        given = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}  # dynamo.vllm before --kv-transfer-config
    extra = _object(given.get("kv_connector_extra_config"))
    nested = extra.get("connectors")
    wrapper = str(given.get("kv_connector"))
    wraps = wrapper in _WRAPPERS and isinstance(nested, list)
    yield "wrapping connector", FieldValue(wrapper if wraps else "", is_set=wraps, is_readable=readable)
    if wraps and isinstance(nested, list):
        inner = [each for each in nested if isinstance(each, dict) and each.get("kv_connector") in NIXL_CONNECTORS]
        given = {**given, **(inner[0] if inner else {})}
        extra = _object(given.get("kv_connector_extra_config"))
    for name, default in (("kv_connector", ""), ("kv_role", ""), ("engine_id", ""), ("kv_buffer_device", "cuda")):
        yield name, _text(given.get(name), default, readable)
    yield "enable_permute_local_kv", _text(given.get("enable_permute_local_kv"), "false", readable)
    yield "enable_cross_layers_blocks", _text(extra.get("enable_cross_layers_blocks"), "false", readable)
    yield "enforce_handshake_compat", _text(extra.get("enforce_handshake_compat"), "true", readable)
    backends = extra.get("backends")
    listed = ",".join(map(str, backends)) if isinstance(backends, list) else backends
    yield "backends", _text(listed, "UCX", readable)


def _speculative(source: ConfiguredEngine) -> Iterator[tuple[str, FieldValue]]:
    given = json_option(source, "--speculative-config")
    for name in ("method", "model"):
        yield f"speculative {name}", _text(given.get(name), "none", source.launch.has_options)


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object, default: str, readable: bool) -> FieldValue:
    if value is None or value == "":
        return FieldValue(default, is_set=False, is_readable=readable)
    return FieldValue(str(value).lower() if isinstance(value, bool) or value in ("True", "False") else str(value))


_SGLANG = (
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
    values = read_fields(source.launch, _SGLANG)
    if source.launch.model and not values["--model-path"].is_set:
        values["--model-path"] = FieldValue(source.launch.model)
    return values


#: The field that says whether a worker does prefill or decode.
ROLE = "worker role"

_DYNAMO = (
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
    values = read_fields(source.launch, _DYNAMO)
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
