# SPDX-License-Identifier: Apache-2.0
"""The configuration of vLLM with its NixlConnector.

Sources: https://docs.vllm.ai/en/stable/features/nixl_connector_usage/ and, in vLLM's repository,
``vllm/config/kv_transfer.py``.
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

FIELDS = (
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
    values = read_fields(source.launch, FIELDS)
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
