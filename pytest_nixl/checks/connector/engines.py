# SPDX-License-Identifier: Apache-2.0
"""The configuration of vLLM with its NixlConnector, of SGLang with prefill and decode apart, and what Dynamo adds.

Sources: https://docs.vllm.ai/en/stable/features/nixl_connector_usage/,
https://docs.sglang.io/advanced_features/pd_disaggregation.html, and in the repositories: vLLM's
``vllm/config/kv_transfer.py``; SGLang's ``python/sglang/srt/server_args.py`` and ``python/sglang/srt/environ.py``;
Dynamo's ``components/src/dynamo/common/configuration/groups/runtime_args.py`` and
``components/src/dynamo/vllm/backend_args.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import EngineField, FieldValue, bounded, json_option, read_fields
from pytest_nixl.model.nixl_releases import TELEMETRY_VARIABLE

#: The connectors that use NIXL: the default one is the same as NixlPullConnector.
NIXL_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
NIXL, LMCACHE, UNREAD = "NIXL", "LMCache", "unread"
#: What carries the blocks of each connector whose demands are known here.
_KINDS = {
    **dict.fromkeys(NIXL_CONNECTORS, NIXL),
    **dict.fromkeys(("LMCacheConnector", "LMCacheConnectorV1", "LMCacheMPConnector"), LMCACHE),
}
#: vLLM's connectors that do not use NIXL: vllm/distributed/kv_transfer/kv_connector/factory.py.
OTHER_CONNECTORS = frozenset(
    {
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MoRIIOConnector",
        "P2pNcclConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "DecodeBenchConnector",
        "ExampleConnector",
        "SharedStorageConnector",
        "DynamoConnector",
    }
)

#: The connectors that contain others: vLLM's, and Dynamo's of one for offloading and one for the transfer.
_WRAPPERS = ("MultiConnector", "PdConnector")
#: Where the classes of connectors stand that are not vLLM's own and are known here.
_KNOWN_MODULES = ("kvbm.", "lmcache.", "vllm.")
#: The speculative methods whose state is transferred: use_eagle() in vllm/config/speculative.py.
_HIDDEN_STATE_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
#: Parts of a draft model's name by which vLLM chooses the method if none is given: __post_init__ there.
_METHODS_BY_MODEL = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}

VLLM_FIELDS = (
    EngineField("--model", ("--model",)),
    EngineField("--revision", ("--revision",)),
    EngineField("--dtype", ("--dtype",), default="auto"),
    EngineField("--kv-cache-dtype", ("--kv-cache-dtype",), default="auto"),
    EngineField("--block-size", ("--block-size",)),
    EngineField("--tensor-parallel-size", ("--tensor-parallel-size", "-tp"), default="1"),
    EngineField("--pipeline-parallel-size", ("--pipeline-parallel-size", "-pp"), default="1"),
    EngineField("--data-parallel-size", ("--data-parallel-size", "-dp"), default="1"),
    EngineField("--decode-context-parallel-size", ("--decode-context-parallel-size", "-dcp"), default="1"),
    EngineField("--prefill-context-parallel-size", ("--prefill-context-parallel-size", "-pcp"), default="1"),
    EngineField(
        "--disable-hybrid-kv-cache-manager", ("--disable-hybrid-kv-cache-manager",), default="false", switch=True
    ),
    EngineField("--host", ("--host",)),
    EngineField("--port", ("--port",), default="8000"),
    EngineField("--data-parallel-rpc-port", ("--data-parallel-rpc-port", "-dpp")),
    EngineField("--master-port", ("--master-port",)),
    EngineField(TELEMETRY_VARIABLE, variables=(TELEMETRY_VARIABLE,)),
    EngineField("PYTHONHASHSEED", variables=("PYTHONHASHSEED",)),
    EngineField("LMCACHE_CONFIG_FILE", variables=("LMCACHE_CONFIG_FILE",)),
    EngineField("LMCACHE_CHUNK_SIZE", variables=("LMCACHE_CHUNK_SIZE",), default="256"),
    EngineField("LMCACHE_NIXL_BACKENDS", variables=("LMCACHE_NIXL_BACKENDS",), default="UCX"),
    EngineField("VLLM_ATTENTION_BACKEND", variables=("VLLM_ATTENTION_BACKEND",)),
    EngineField("VLLM_SSM_CONV_STATE_LAYOUT", variables=("VLLM_SSM_CONV_STATE_LAYOUT",), default="SD"),
    EngineField("VLLM_KV_CACHE_LAYOUT", variables=("VLLM_KV_CACHE_LAYOUT",), default="HND"),
    EngineField("VLLM_NIXL_SIDE_CHANNEL_HOST", variables=("VLLM_NIXL_SIDE_CHANNEL_HOST",), default="localhost"),
    EngineField("VLLM_NIXL_SIDE_CHANNEL_PORT", variables=("VLLM_NIXL_SIDE_CHANNEL_PORT",), default="5600"),
)
#: Keys of kv_connector_extra_config that are numbers of seconds, with their defaults.
_SECONDS = {"kv_lease_duration": "30", "decoder_kv_blocks_ttl": "480", "engine_ttl": "3600"}


def read_vllm(source: ConfiguredEngine) -> dict[str, FieldValue]:
    """Return the fields of vLLM. :raises ValueError: if an option that must be JSON is not."""
    values = read_fields(source.launch, VLLM_FIELDS)
    if source.launch.model and not values["--model"].is_set:
        values["--model"] = FieldValue(source.launch.model)
    if (source.launch.dynamo or source.launch.launcher) and not values["VLLM_NIXL_SIDE_CHANNEL_HOST"].is_set:
        # dynamo.vllm and Ray Serve set it to the host's address: ensure_side_channel_host, _set_side_channel_host.
        values["VLLM_NIXL_SIDE_CHANNEL_HOST"] = FieldValue("", is_set=False)
    for name in ("LMCACHE_CHUNK_SIZE", "LMCACHE_NIXL_BACKENDS"):
        text = re.sub(r"[\[\]'\"\s]", "", values[name].text)
        in_file = values["LMCACHE_CONFIG_FILE"].is_set and not values[name].is_set
        values[name] = replace(values[name], text=text, is_readable=values[name].is_readable and not in_file)
    given = {**dict(_transfer(source)), **dict(_speculative(source)), **dict(_attention(source))}
    return values | {name: bounded(name, value) for name, value in given.items()}


def _transfer(source: ConfiguredEngine) -> Iterator[tuple[str, FieldValue]]:
    """Yield the fields of ``--kv-transfer-config``. In a MultiConnector or PdConnector, that of NIXL counts."""
    given = json_option(source, "--kv-transfer-config")
    readable = bool(given) or source.launch.has_options
    listed = " ".join(source.launch.options.get("--connector", ())[-1:]) or source.launch.environment.get(
        "DYN_CONNECTOR", ""
    )
    if source.launch.dynamo:
        yield "--connector", _text(listed, "", source.launch.has_options)
    if not given and source.launch.dynamo and "nixl" in listed.replace(",", " ").split():
        given = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}  # dynamo.vllm before --kv-transfer-config
    extra = _object(given.get("kv_connector_extra_config"))
    wrapper, connectors = str(given.get("kv_connector")), extra.get("connectors")
    nested = connectors if wrapper in _WRAPPERS and isinstance(connectors, list) else None
    wraps = nested is not None
    yield "kv_transfer_config", _text(" ".join(sorted(map(str, given))), "", readable)
    yield "wrapping connector", FieldValue(wrapper if wraps else "", is_set=wraps, is_readable=readable)
    inner = [part for part in nested or () if isinstance(part, dict)]
    names = [str(part.get("kv_connector")) for part in inner]
    unread = [
        name for part, name in zip(inner, names, strict=True) if _kind(part) == UNREAD and name not in OTHER_CONNECTORS
    ]
    yield "unread connectors", FieldValue(", ".join(unread), is_set=bool(unread), is_readable=readable)
    uses_kvbm = "DynamoConnector" in (*names, wrapper) or "kvbm" in listed
    yield "KVBM", _text("true" if uses_kvbm else None, "false", readable)
    if wraps:
        inner.sort(key=lambda part: (NIXL, LMCACHE, UNREAD).index(_kind(part)))
        given = {**given, "kv_connector_extra_config": {}, **(inner[0] if inner else {})}
        extra = _object(given.get("kv_connector_extra_config"))
    yield "connector kind", _text(_kind(given) if given.get("kv_connector") else None, "", readable)
    for name in ("kv_connector", "kv_connector_module_path", "kv_role", "engine_id", "kv_buffer_device"):
        yield name, _text(given.get(name), "", readable)
    yield "kv_connector_extra_config", _text(" ".join(sorted(map(str, extra))), "", readable)
    yield "enable_permute_local_kv", _text(given.get("enable_permute_local_kv"), "false", readable)
    yield "enable_cross_layers_blocks", _text(extra.get("enable_cross_layers_blocks"), "false", readable)
    yield "enforce_handshake_compat", _text(extra.get("enforce_handshake_compat"), "true", readable)
    yield "bidirectional_kv_xfer", _text(extra.get("bidirectional_kv_xfer"), "false", readable)
    for name, default in _SECONDS.items():
        yield name, _text(extra.get(name), default, readable)
    backends = extra.get("backends")
    joined = ",".join(map(str, backends)) if isinstance(backends, list) else backends
    yield "backends", _text(joined, "UCX", readable)


def _kind(transfer: dict[str, object]) -> str:
    """Return what carries the blocks of a connector: NIXL, LMCache, or something that is not read here."""
    module = str(transfer.get("kv_connector_module_path") or "vllm.")
    return _KINDS.get(str(transfer.get("kv_connector")), UNREAD) if module.startswith(_KNOWN_MODULES) else UNREAD


def _speculative(source: ConfiguredEngine) -> Iterator[tuple[str, FieldValue]]:
    """Yield the speculative settings that count: those of a method whose state is transferred."""
    given = {
        **json_option(source, "-sc"),
        **json_option(source, "--speculative-config"),
        **{
            key: source.launch.options[option][-1]
            for key, option in (("method", "--spec-method"), ("model", "--spec-model"))
            if source.launch.options.get(option)
        },
    }
    model = str(given.get("model") or "").lower()
    method = str(
        given.get("method") or next((_METHODS_BY_MODEL[part] for part in _METHODS_BY_MODEL if part in model), "")
    )
    given["method"] = "mtp" if method.endswith("_mtp") else method
    counts = given["method"] in _HIDDEN_STATE_METHODS
    for name in ("method", "model", "revision"):
        yield f"speculative {name}", _text(given.get(name) if counts else None, "none", source.launch.has_options)


def _attention(source: ConfiguredEngine) -> Iterator[tuple[str, FieldValue]]:
    """Yield the attention backend: an option, or a key of another one."""
    settings = {**json_option(source, "-ac"), **json_option(source, "--attention-config")}
    named = source.launch.options.get("--attention-backend", ())
    yield "--attention-backend", _text(named[-1] if named else settings.get("backend"), "", source.launch.has_options)


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object, default: str, readable: bool) -> FieldValue:
    if value is None or value == "":
        return FieldValue(default, is_set=False, is_readable=readable)
    return FieldValue(str(value).lower() if isinstance(value, bool) or value in ("True", "False") else str(value))


#: How long SGLang's decode side waits (300 s), and how often it asks for prefill's health (5 s, twice).
DECODE_WAITS = (
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
)
_POLICY = "--disaggregation-decode-allocation-policy"
_PARAMETERS = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
SGLANG_FIELDS = (
    EngineField("--model-path", ("--model-path", "--model")),
    EngineField("--revision", ("--revision",)),
    EngineField("--dtype", ("--dtype",), default="auto"),
    EngineField("--kv-cache-dtype", ("--kv-cache-dtype",), default="auto"),
    EngineField("--page-size", ("--page-size",)),
    EngineField("--tp-size", ("--tp-size", "--tensor-parallel-size", "--tp"), default="1"),
    EngineField("--pp-size", ("--pp-size", "--pipeline-parallel-size"), default="1"),
    EngineField("--dp-size", ("--dp-size", "--data-parallel-size", "--dp"), default="1"),
    EngineField("--enable-dp-attention", ("--enable-dp-attention",), default="false", switch=True),
    EngineField("--disaggregation-mode", ("--disaggregation-mode",), default="null"),
    EngineField("--disaggregation-transfer-backend", ("--disaggregation-transfer-backend",), default="mooncake"),
    EngineField("--disaggregation-bootstrap-port", ("--disaggregation-bootstrap-port",), default="8998"),
    EngineField("--disaggregation-ib-device", ("--disaggregation-ib-device",)),
    EngineField(_POLICY, (_POLICY,), default="early"),
    EngineField("--attn-cp-size", ("--attn-cp-size", "--attention-context-parallel-size"), default="1"),
    EngineField("--dcp-size", ("--dcp-size", "--decode-context-parallel-size"), default="1"),
    EngineField("--nccl-port", ("--nccl-port",)),
    EngineField("--disable-hybrid-swa-memory", ("--disable-hybrid-swa-memory",), default="false", switch=True),
    EngineField("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", variables=("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",)),
    *(EngineField(variable, variables=(variable,)) for variable in DECODE_WAITS),
    EngineField("SGLANG_DSV4_KV_LAYOUT", variables=("SGLANG_DSV4_KV_LAYOUT",), default="v4"),
    EngineField("SGLANG_DISAGG_STAGING_BUFFER", variables=("SGLANG_DISAGG_STAGING_BUFFER",), default="false"),
    EngineField(_PARAMETERS, variables=(_PARAMETERS,), default="{}"),
    EngineField("--host", ("--host",), default="127.0.0.1"),
    EngineField("--port", ("--port",), default="30000"),
    EngineField("SGLANG_DISAGGREGATION_NIXL_BACKEND", variables=("SGLANG_DISAGGREGATION_NIXL_BACKEND",), default="UCX"),
)


def read_sglang(source: ConfiguredEngine) -> dict[str, FieldValue]:
    values = read_fields(source.launch, SGLANG_FIELDS)
    if source.launch.model and not values["--model-path"].is_set:
        values["--model-path"] = FieldValue(source.launch.model)
    return values


#: The field that says whether a worker does prefill or decode.
ROLE = "worker role"

DYNAMO_FIELDS = (
    EngineField("--namespace", ("--namespace",), ("DYN_NAMESPACE",), "dynamo"),
    EngineField("--endpoint", ("--endpoint",), ("DYN_ENDPOINT",)),
    EngineField("--discovery-backend", ("--discovery-backend",), ("DYN_DISCOVERY_BACKEND",), "etcd"),
    EngineField("--request-plane", ("--request-plane",), ("DYN_REQUEST_PLANE",), "tcp"),
    EngineField("--response-plane", ("--response-plane",), ("DYN_RESPONSE_PLANE",), "tcp"),
    EngineField("--event-plane", ("--event-plane",), ("DYN_EVENT_PLANE",)),
    EngineField("ETCD_ENDPOINTS", variables=("ETCD_ENDPOINTS",)),
    EngineField("NATS_SERVER", variables=("NATS_SERVER",)),
    EngineField("DYN_KVBM_DISK_CACHE_GB", variables=("DYN_KVBM_DISK_CACHE_GB",)),
)
ROLE_FIELDS = (
    EngineField("mode", ("--disaggregation-mode",), ("DYN_VLLM_DISAGGREGATION_MODE",)),
    EngineField("prefill", ("--is-prefill-worker",), ("DYN_VLLM_IS_PREFILL_WORKER",), switch=True),
    EngineField("decode", ("--is-decode-worker",), ("DYN_VLLM_IS_DECODE_WORKER",), switch=True),
)
_TRUE = frozenset({"true", "1", "yes", "on"})


def read_dynamo(source: ConfiguredEngine) -> dict[str, FieldValue]:
    values = read_fields(source.launch, DYNAMO_FIELDS)
    if source.launch.engine == "vLLM":  # SGLang's --disaggregation-mode is SGLang's own option
        values[ROLE] = _role(source)
    endpoint = values["--endpoint"].text
    if endpoint.startswith("dyn://"):
        values["--namespace"] = FieldValue(endpoint.removeprefix("dyn://").partition(".")[0])
    return values


def _role(source: ConfiguredEngine) -> FieldValue:
    given = read_fields(source.launch, ROLE_FIELDS)
    for role in ("prefill", "decode"):
        if given[role].text.lower() in _TRUE:
            return FieldValue(role)
    mode = given["mode"]
    # A worker without a role was the decode worker before --is-decode-worker and --disaggregation-mode.
    return mode if mode.is_set else FieldValue("", is_set=False, is_readable=mode.is_readable)
