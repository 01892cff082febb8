# SPDX-License-Identifier: Apache-2.0
"""The rules: each field of the two sides, how it must be related, the remedy, and where the engine says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pytest_nixl.checks.connector import engine_relations, nixl_relations
from pytest_nixl.checks.connector.engines import ROLE
from pytest_nixl.checks.connector.relations import (
    Relation,
    different,
    equal,
    free_port,
    only,
    prefill_listens,
    reachable,
)
from pytest_nixl.core.alloc_conf import ALLOC_CONF
from pytest_nixl.model.engine_backends import GENERAL_VARIABLE
from pytest_nixl.model.nixl_releases import TELEMETRY_VARIABLE


class ConfigurationLayer(str, Enum):
    """The layers in the order in which to correct them."""

    INFRASTRUCTURE = "infrastructure"
    NIXL = "NIXL"
    CONNECTOR = "connector"


@dataclass(frozen=True)
class ConnectorRule:
    """A rule about one field.

    :param engine: the engine that has the field; empty for all, ``Dynamo`` for engines that Dynamo runs.
    :param field: the name of the field.
    :param requirement: what must hold, for the reference.
    :param remedy: what to do if it does not hold.
    :param source: where that is said: a file of the engine's repository, or a page of ours.
    :param direct: whether the rule holds only without Dynamo.
    """

    layer: ConfigurationLayer
    engine: str
    field: str
    requirement: str
    relation: Relation
    remedy: str
    source: str
    direct: bool = False


_SPELLINGS: Mapping[str, str] = {"half": "float16", "float": "float32"}

_TLS = "docs/reference/checks.md (transports-allowed)"
_DEVICES = "inferred: lo reaches this host only"
_CACHE = "inferred: the model decides the values in the cache, and SGLang does not compare it"
_REVISION = "inferred: weights decide the values in the cache, and vLLM compares only the model's name"
_ENGINE = "inferred: each engine has a handshake of its own"
_BUFFER = "inferred from vLLM kv_connector/v1/nixl/base_worker.py (add_remote_agent)"
_ENGINE_ID = "inferred from vLLM vllm/config/kv_transfer.py (a UUID by default)"
_ARGS = "inferred from SGLang python/sglang/srt/server_args.py"
_PORT = "inferred: two servers cannot listen on one port"
_USAGE = "https://docs.vllm.ai/en/stable/features/nixl_connector_usage/"
_MATRIX = "https://docs.vllm.ai/en/stable/features/nixl_connector_compatibility/"
_HASH = "vLLM kv_connector/v1/nixl/metadata.py (compute_nixl_compatibility_hash)"
_HANDSHAKE = "vLLM kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake)"
_NIXL_ETCD = "NIXL src/core/nixl_etcd_metadata_backend.cpp"
_CONN = "SGLang python/sglang/srt/disaggregation/common/conn.py (try_ensure_parallel_info)"
_PD = "https://docs.sglang.io/advanced_features/pd_disaggregation.html"
_NIXL_CONN = "SGLang python/sglang/srt/disaggregation/nixl/conn.py"
_EFA = "https://github.com/ray-project/ray/pull/62339, aws-samples/awsome-inference#72"
_GENERAL = "https://github.com/vllm-project/vllm/issues/41814"
_SEGMENTS = "https://github.com/ai-dynamo/nixl/issues/1754"
_TELEMETRY = "docs/reference/findings.md (NIXL-TELEMETRY-OFF-RAISES)"
_RUNTIME = "inferred from Dynamo components/src/dynamo/common/configuration/groups/runtime_args.py"


def _dtype(text: str) -> str:
    return _SPELLINGS.get(text, text)


def _same(layer: ConfigurationLayer, engine: str, field: str, source: str, relation: Relation | None = None,
          remedy: str = "") -> ConnectorRule:  # fmt: skip
    remedy = remedy or f"give both sides the same {field}"
    return ConnectorRule(layer, engine, field, "equal", relation or equal(), remedy, source)


_INFRASTRUCTURE, _NIXL, _CONNECTOR = ConfigurationLayer

RULES: tuple[ConnectorRule, ...] = (
    _same(_INFRASTRUCTURE, "", "engine", _ENGINE, remedy="run the same engine on both sides"),
    _same(_INFRASTRUCTURE, "", "image", _MATRIX, nixl_relations.image,
          "run both sides from the same image"),
    _same(_INFRASTRUCTURE, "", "installed releases", "docs/reference/versions.md",
          remedy="install the same release of the engine and of NIXL on both sides"),
    ConnectorRule(_INFRASTRUCTURE, "", "UCX_TLS", "a common transport", nixl_relations.transports,
                  "unset UCX_TLS on both sides, or write the same transports", _TLS),
    ConnectorRule(_INFRASTRUCTURE, "", "UCX_NET_DEVICES", "not lo", nixl_relations.net_devices,
                  "unset UCX_NET_DEVICES, or name a device of the network between the hosts", _DEVICES),
    ConnectorRule(_INFRASTRUCTURE, "", "NIXL_ETCD_ENDPOINTS", "equal, readable for NIXL, not loopback",
                  nixl_relations.nixl_endpoints, "give both sides the address of one etcd",
                  "docs/reference/endpoint-texts.md"),
    ConnectorRule(_INFRASTRUCTURE, "Dynamo", "ETCD_ENDPOINTS", "equal, not loopback", nixl_relations.endpoints,
                  "give both sides the address of one etcd", _RUNTIME),
    ConnectorRule(_INFRASTRUCTURE, "Dynamo", "NATS_SERVER", "equal, not loopback", nixl_relations.endpoints,
                  "give both sides the address of one NATS server", _RUNTIME),
    ConnectorRule(_INFRASTRUCTURE, "vLLM", "VLLM_NIXL_SIDE_CHANNEL_HOST", "not loopback", reachable,
                  "set it on each side to the address of its host or pod (fieldRef: status.podIP)", _USAGE),
    ConnectorRule(_INFRASTRUCTURE, "vLLM", "VLLM_NIXL_SIDE_CHANNEL_PORT", "different on one host",
                  engine_relations.side_channel_port, "give each side a port of its own", _USAGE),
    ConnectorRule(_INFRASTRUCTURE, "SGLang", "--host", "not loopback on prefill", prefill_listens,
                  "start prefill with --host 0.0.0.0, or with the address of its host",
                  "SGLang python/sglang/srt/managers/disagg_service.py"),
    ConnectorRule(_INFRASTRUCTURE, "", "--port", "different on one host", free_port,
                  "give each side a --port of its own", _PORT, direct=True),
    ConnectorRule(_NIXL, "vLLM", "backends", "a common backend", nixl_relations.backends,
                  "name the same backends in kv_connector_extra_config on both sides", _USAGE),
    ConnectorRule(_NIXL, "SGLang", "SGLANG_DISAGGREGATION_NIXL_BACKEND", "a common backend", nixl_relations.backends,
                  "give both sides the same backend", _NIXL_CONN),
    ConnectorRule(_NIXL, "", "NIXL_ETCD_NAMESPACE", "equal to the letter", nixl_relations.namespace,
                  "write the same NIXL_ETCD_NAMESPACE on both sides", _NIXL_ETCD),
    ConnectorRule(_NIXL, "", "EFA devices", "LIBFABRIC, if the pod has EFA", nixl_relations.efa_devices,
                  "give both sides LIBFABRIC", _EFA),
    ConnectorRule(_NIXL, "", GENERAL_VARIABLE, "the engine's own backend, because no engine reads it",
                  nixl_relations.general_variable, f"unset {GENERAL_VARIABLE}", _GENERAL),
    ConnectorRule(_NIXL, "", ALLOC_CONF[0], "no expandable_segments:True", nixl_relations.segments,
                  f"remove expandable_segments from {ALLOC_CONF[0]} on both sides", _SEGMENTS),
    ConnectorRule(_NIXL, "vLLM", TELEMETRY_VARIABLE, "not off", nixl_relations.telemetry,
                  f"unset {TELEMETRY_VARIABLE} on both sides, or set it to y", _TELEMETRY),
    _same(_NIXL, "vLLM", "kv_buffer_device", _BUFFER),
    ConnectorRule(_CONNECTOR, "vLLM", "kv_connector", "equal, and one that uses NIXL", engine_relations.vllm_connector,
                  "give both sides --kv-transfer-config with \"kv_connector\": \"NixlConnector\"", _USAGE),
    ConnectorRule(_CONNECTOR, "vLLM", "kv_role", "producer on prefill, consumer on decode, or both",
                  engine_relations.vllm_role,
                  "write kv_producer on prefill and kv_consumer on decode", _USAGE),
    ConnectorRule(_CONNECTOR, "vLLM", "engine_id", "different", different,
                  "remove engine_id, so that vLLM chooses one on each side", _ENGINE_ID),
    _same(_CONNECTOR, "vLLM", "--model", _HASH),
    _same(_CONNECTOR, "vLLM", "--revision", _REVISION),
    _same(_CONNECTOR, "vLLM", "--dtype", _HASH, equal(_dtype)),
    _same(_CONNECTOR, "vLLM", "--kv-cache-dtype", _HASH),
    ConnectorRule(_CONNECTOR, "vLLM", "--block-size", "equal, or decode's a multiple",
                  engine_relations.vllm_block_size, "give both sides the same --block-size", _HANDSHAKE),
    ConnectorRule(_CONNECTOR, "vLLM", "--tensor-parallel-size", "one divides the other", engine_relations.vllm_tp,
                  "choose sizes of which one divides the other", _HANDSHAKE),
    ConnectorRule(_CONNECTOR, "vLLM", "VLLM_KV_CACHE_LAYOUT", "equal", engine_relations.vllm_layout,
                  "give both sides the same layout, or unset it", _HANDSHAKE),
    _same(_CONNECTOR, "vLLM", "--attention-backend", _HASH),
    _same(_CONNECTOR, "vLLM", "enable_cross_layers_blocks", _HASH, engine_relations.vllm_cross_layers),
    _same(_CONNECTOR, "vLLM", "--disable-hybrid-kv-cache-manager", _HASH),
    _same(_CONNECTOR, "vLLM", "speculative method", _MATRIX),
    _same(_CONNECTOR, "vLLM", "speculative model", _MATRIX),
    ConnectorRule(_CONNECTOR, "vLLM", "enforce_handshake_compat", "not false", engine_relations.vllm_handshake,
                  "remove enforce_handshake_compat", _MATRIX),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-mode", "prefill and decode",
                  only(("prefill",), ("decode",)), "give each side its own --disaggregation-mode", _PD),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-transfer-backend", "nixl on both sides",
                  only(("nixl",), ("nixl",)), "give both sides --disaggregation-transfer-backend nixl", _PD),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-bootstrap-port", "equal", equal(),
                  "give both sides the same port, because decode uses its own if a request names none",
                  "SGLang python/sglang/srt/managers/scheduler.py", direct=True),
    _same(_CONNECTOR, "SGLang", "--model-path", _CACHE),
    _same(_CONNECTOR, "SGLang", "--revision", _CACHE),
    _same(_CONNECTOR, "SGLang", "--dtype", _CACHE, equal(_dtype)),
    _same(_CONNECTOR, "SGLang", "--kv-cache-dtype", _CONN),
    _same(_CONNECTOR, "SGLang", "--page-size", _CONN, engine_relations.sglang_page_size),
    ConnectorRule(_CONNECTOR, "SGLang", "--tp-size", "one divides the other", engine_relations.sglang_tp,
                  "choose sizes of which one divides the other", f"{_CONN.partition(' (')[0]} (_resolve_rank_mapping)"),
    ConnectorRule(_CONNECTOR, "SGLang", "--pp-size", "decode's 1, or equal", engine_relations.sglang_pp,
                  "start decode with --pp-size 1, or with prefill's",
                  f"{_CONN.partition(' (')[0]} (_resolve_rank_mapping)"),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-decode-tp", "decode's --tp-size",
                  engine_relations.states_decode, "correct or remove it on prefill", _ARGS),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-decode-dp", "decode's --dp-size",
                  engine_relations.states_decode, "correct or remove it on prefill", _ARGS),
    ConnectorRule(_CONNECTOR, "Dynamo", ROLE, "prefill and decode", only(("prefill",), ("decode", "")),
                  "start prefill with --disaggregation-mode prefill, and decode with --disaggregation-mode decode",
                  "Dynamo components/src/dynamo/vllm/backend_args.py"),
    _same(_CONNECTOR, "Dynamo", "--namespace", _RUNTIME),
    ConnectorRule(_CONNECTOR, "Dynamo", "--endpoint", "different", different,
                  "give prefill the component prefill, or remove --endpoint",
                  "Dynamo components/src/dynamo/vllm/args.py"),
    _same(_CONNECTOR, "Dynamo", "--discovery-backend", _RUNTIME),
    _same(_CONNECTOR, "Dynamo", "--request-plane", _RUNTIME),
    _same(_CONNECTOR, "Dynamo", "--response-plane", _RUNTIME),
    _same(_CONNECTOR, "Dynamo", "--event-plane", _RUNTIME),
)  # fmt: skip
