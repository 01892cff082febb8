# SPDX-License-Identifier: Apache-2.0
"""The rules: each field of the two sides, how it must be related, the remedy, and where the engine says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pytest_nixl.checks.connector import engine_relations, nixl_relations, pod_relations
from pytest_nixl.checks.connector.engine_fields import ReleaseRange
from pytest_nixl.checks.connector.engines import DECODE_WAITS, LMCACHE, NIXL, ROLE
from pytest_nixl.checks.connector.relations import (
    Relation,
    different,
    divisible,
    equal,
    one_of_each_side,
    prefill_listens,
)
from pytest_nixl.checks.connector.settings_read import unread_options, unread_settings
from pytest_nixl.model.engine_backends import ALLOC_CONF, GENERAL_VARIABLE
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
    :param kinds: what carries the blocks of the connectors for which the rule holds; empty for all.
    :param releases: the releases for which the rule holds; None for all.
    """

    layer: ConfigurationLayer
    engine: str
    field: str
    requirement: str
    relation: Relation
    remedy: str
    source: str
    direct: bool = False
    kinds: tuple[str, ...] = ()
    releases: ReleaseRange | None = None


_SPELLINGS: Mapping[str, str] = {"half": "float16", "float": "float32", "auto": ""}

_TLS = "docs/reference/checks.md (transports-allowed)"
_DEVICES = "inferred: lo reaches this host only, and tcp uses network interfaces only"
_CACHE = "inferred: the model decides the values in the cache, and SGLang does not compare it"
_REVISION = "inferred: weights decide the values in the cache, and vLLM compares only the model's name"
_ENGINE = "inferred: each engine has a handshake of its own"
_ENGINE_ID = "inferred from vLLM vllm/config/kv_transfer.py (a UUID by default)"
_PORT = "vLLM kv_connector/v1/nixl/base_scheduler.py (side_channel_port); inferred: one port has one server"
_POD = "inferred: a container sees the devices that it requests"
_USAGE = "https://docs.vllm.ai/en/stable/features/nixl_connector_usage/"
_MATRIX = "https://docs.vllm.ai/en/stable/features/nixl_connector_compatibility/"
_HASH = "vLLM kv_connector/v1/nixl/metadata.py (compute_nixl_compatibility_hash)"
_SPECULATIVE = "vLLM kv_connector/v1/nixl/metadata.py (_get_speculative_compatibility_factors)"
_HANDSHAKE = "vLLM kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake)"
_WORKER = "vLLM kv_connector/v1/nixl/base_worker.py (__init__)"
_NIXL_ETCD = "NIXL src/core/nixl_etcd_metadata_backend.cpp"
_CONN = "SGLang python/sglang/srt/disaggregation/common/conn.py (try_ensure_parallel_info)"
_RANKS = "SGLang python/sglang/srt/disaggregation/common/conn.py (_resolve_rank_mapping)"
_PD = "https://docs.sglang.io/advanced_features/pd_disaggregation.html"
_NIXL_CONN = "SGLang python/sglang/srt/disaggregation/nixl/conn.py"
_EFA = "https://github.com/ray-project/ray/pull/62339, aws-samples/awsome-inference#72"
_GENERAL = "https://github.com/vllm-project/vllm/issues/41814"
_SEGMENTS = "https://github.com/ai-dynamo/nixl/issues/1754"
_TELEMETRY = "docs/reference/findings.md (NIXL-TELEMETRY-OFF-RAISES)"
_RUNTIME = "inferred from Dynamo components/src/dynamo/common/configuration/groups/runtime_args.py"
_DYNAMO_VLLM = "Dynamo components/src/dynamo/vllm/args.py (update_dynamo_config_with_engine)"
_KVBM = "Dynamo lib/llm/src/block_manager/config.rs"
_SETTINGS = "vLLM vllm/envs.py and vllm/config/kv_transfer.py; SGLang python/sglang/srt/environ.py"
_HASHED = ReleaseRange("vllm", since="0.13.0")


def _dtype(text: str) -> str:
    return _SPELLINGS.get(text, text)


def _same(
    layer: ConfigurationLayer,
    engine: str,
    field: str,
    source: str,
    relation: Relation | None = None,
    remedy: str = "",
    *,
    kinds: tuple[str, ...] = (),
    holds: ReleaseRange | None = None,
) -> ConnectorRule:
    remedy = remedy or f"give both sides the same {field}"
    kinds = kinds or ((NIXL,) if engine == "vLLM" else ())
    return ConnectorRule(
        layer, engine, field, "equal", relation or equal(), remedy, source, kinds=kinds, releases=holds
    )


def _vllm(
    layer: ConfigurationLayer,
    field: str,
    requirement: str,
    relation: Relation,
    remedy: str,
    source: str,
    holds: ReleaseRange | None = None,
    kinds: tuple[str, ...] = (NIXL,),
) -> ConnectorRule:
    return ConnectorRule(layer, "vLLM", field, requirement, relation, remedy, source, kinds=kinds, releases=holds)


_INFRASTRUCTURE, _NIXL, _CONNECTOR = ConfigurationLayer
_BOTH = (NIXL, LMCACHE)

RULES: tuple[ConnectorRule, ...] = (
    ConnectorRule(_INFRASTRUCTURE, "", "engine", "equal, and one whose options are read", pod_relations.engines,
                  "run the same engine on both sides", _ENGINE),
    ConnectorRule(_INFRASTRUCTURE, "", "--config", "a file that can be read", pod_relations.options_files,
                  "lay the file beside this one, or write its options into the command",
                  "vLLM vllm/utils/argparse_utils.py, SGLang python/sglang/srt/server_args.py"),
    _same(_INFRASTRUCTURE, "", "image", _MATRIX, nixl_relations.image,
          "run both sides from the same image"),
    _same(_INFRASTRUCTURE, "", "installed releases", "docs/reference/versions.md", nixl_relations.nixl_releases,
          "install the same release of the engine and of NIXL on both sides"),
    ConnectorRule(_INFRASTRUCTURE, "", "GPUs", "as many as the engine's sizes need", pod_relations.gpus,
                  "request as many GPUs, or choose smaller sizes", _POD),
    ConnectorRule(_INFRASTRUCTURE, "", "RDMA devices", "one, if only RDMA is allowed", pod_relations.rdma_devices,
                  "request an RDMA device of the cluster's device plugin, such as rdma/ib: 1", _POD),
    ConnectorRule(_INFRASTRUCTURE, "", "UCX_TLS", "a common transport", nixl_relations.transports,
                  "unset UCX_TLS on both sides, or write the same transports", _TLS),
    ConnectorRule(_INFRASTRUCTURE, "", "UCX_NET_DEVICES", "devices that UCX_TLS can use, and not lo",
                  pod_relations.net_devices,
                  "unset UCX_NET_DEVICES, or name a device of the network between the hosts", _DEVICES),
    ConnectorRule(_INFRASTRUCTURE, "", "slow settings", "none", nixl_relations.slow_settings, "unset them",
                  "UCX src/ucp/core/ucp_context.c, src/uct/ib/base/ib_md.c; libfabric man/fi_efa.7.md"),
    ConnectorRule(_INFRASTRUCTURE, "", "NIXL_ETCD_ENDPOINTS", "equal, readable for NIXL, not loopback",
                  nixl_relations.nixl_endpoints, "give both sides the address of one etcd",
                  "docs/reference/endpoint-texts.md"),
    ConnectorRule(_INFRASTRUCTURE, "", "NIXL_TCPSTORE_ENDPOINT", "equal, not loopback, without etcd",
                  pod_relations.metadata_stores, "unset NIXL_ETCD_ENDPOINTS or NIXL_TCPSTORE_ENDPOINT", _NIXL_ETCD),
    ConnectorRule(_INFRASTRUCTURE, "Dynamo", "ETCD_ENDPOINTS", "equal, not loopback, with discovery by etcd",
                  nixl_relations.discovery_endpoints, "give both sides the address of one etcd", _RUNTIME),
    ConnectorRule(_INFRASTRUCTURE, "Dynamo", "NATS_SERVER", "equal, not loopback, with a plane over NATS",
                  nixl_relations.nats_endpoints, "give both sides the address of one NATS server", _RUNTIME),
    _vllm(_INFRASTRUCTURE, "VLLM_NIXL_SIDE_CHANNEL_HOST", "its own address, and not loopback",
          pod_relations.own_address,
          "set it on each side to the address of its host or pod (fieldRef: status.podIP); if both sides run on one "
          "host, add --one-host", _USAGE),
    ConnectorRule(_INFRASTRUCTURE, "SGLang", "--host", "not loopback on prefill", prefill_listens,
                  "start prefill with --host 0.0.0.0, or with the address of its host; if both sides run on one host, "
                  "add --one-host", "SGLang python/sglang/srt/managers/disagg_service.py"),
    ConnectorRule(_INFRASTRUCTURE, "", "ports", "all different on one host", pod_relations.ports,
                  "give each of them a port of its own", _PORT),
    _vllm(_NIXL, "backends", "a common backend", nixl_relations.backends,
          "name the same backends in kv_connector_extra_config on both sides", _USAGE),
    ConnectorRule(_NIXL, "SGLang", "SGLANG_DISAGGREGATION_NIXL_BACKEND", "a common backend", nixl_relations.backends,
                  "give both sides the same backend", _NIXL_CONN),
    ConnectorRule(_NIXL, "SGLang", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "a JSON object of strings",
                  engine_relations.sglang_parameters, "write each value in quotation marks", _NIXL_CONN,
                  releases=ReleaseRange("sglang", since="0.5.16")),
    ConnectorRule(_NIXL, "SGLang", "--disaggregation-ib-device", "read by the transfer backend",
                  engine_relations.ib_device, "set UCX_NET_DEVICES to these devices with their ports, as in mlx5_0:1",
                  _NIXL_CONN),
    ConnectorRule(_NIXL, "", "NIXL_ETCD_NAMESPACE", "equal to the letter", nixl_relations.namespace,
                  "write the same NIXL_ETCD_NAMESPACE on both sides", _NIXL_ETCD),
    ConnectorRule(_NIXL, "", "EFA devices", "LIBFABRIC, if the pod has EFA", nixl_relations.efa_devices,
                  "give both sides LIBFABRIC", _EFA),
    ConnectorRule(_NIXL, "", GENERAL_VARIABLE, "the engine's own backend, because no engine reads it",
                  nixl_relations.general_variable, f"unset {GENERAL_VARIABLE}", _GENERAL),
    ConnectorRule(_NIXL, "", ALLOC_CONF[0], "no expandable_segments:True", nixl_relations.segments,
                  f"remove expandable_segments from {ALLOC_CONF[0]} on both sides", _SEGMENTS),
    _vllm(_NIXL, TELEMETRY_VARIABLE, "not off", nixl_relations.telemetry,
          f"unset {TELEMETRY_VARIABLE} on both sides, or set it to y", _TELEMETRY),
    _vllm(_NIXL, "kv_buffer_device", "GPU memory, unless it must be staged", engine_relations.buffer_device,
          "remove kv_buffer_device on both sides, unless the GPU's memory cannot be registered", _WORKER),
    ConnectorRule(_NIXL, "Dynamo", "DYN_KVBM_DISK_CACHE_GB", "a backend for files", engine_relations.disk_tier,
                  "set DYN_KVBM_NIXL_BACKEND_POSIX=true, or DYN_KVBM_NIXL_BACKEND_GDS_MT=true", _KVBM),
    ConnectorRule(_NIXL, "", "settings", "each is read by the engine's release", unread_settings,
                  "remove what is not read", _SETTINGS),
    ConnectorRule(_CONNECTOR, "", "options", "each is one that the engine has", unread_options,
                  "correct or remove them: an engine ends at an option that it does not have",
                  "vLLM vllm/engine/arg_utils.py; SGLang python/sglang/srt/server_args.py"),
    ConnectorRule(_CONNECTOR, "Dynamo", "--connector", "unset", engine_relations.dynamo_connector,
                  "give both workers --kv-transfer-config with \"kv_connector\": \"NixlConnector\"", _DYNAMO_VLLM,
                  releases=ReleaseRange("ai-dynamo", since="1.0.0")),
    ConnectorRule(_CONNECTOR, "vLLM", "kv_connector", "equal, and one that is read", engine_relations.vllm_connector,
                  "give both sides --kv-transfer-config with \"kv_connector\": \"NixlConnector\"", _USAGE),
    _vllm(_CONNECTOR, "kv_role", "kv_producer, kv_consumer or kv_both", engine_relations.vllm_role,
          "write kv_producer on prefill and kv_consumer on decode", "vLLM vllm/config/kv_transfer.py"),
    _vllm(_CONNECTOR, "PYTHONHASHSEED", "equal", engine_relations.lmcache_seed,
          "set PYTHONHASHSEED=0 on both sides", "LMCache lmcache/v1/token_database.py", kinds=(LMCACHE,)),
    _same(_CONNECTOR, "vLLM", "LMCACHE_CHUNK_SIZE", "LMCache lmcache/v1/token_database.py", kinds=(LMCACHE,)),
    _vllm(_CONNECTOR, "LMCACHE_NIXL_BACKENDS", "a common backend", nixl_relations.backends,
          "give both sides the same backends", "LMCache lmcache/v1/config.py (nixl_backends)", kinds=(LMCACHE,)),
    _vllm(_CONNECTOR, "engine_id", "different", different,
          "remove engine_id, so that vLLM chooses one on each side", _ENGINE_ID),
    _same(_CONNECTOR, "vLLM", "--model", _HASH, kinds=_BOTH),
    _same(_CONNECTOR, "vLLM", "--revision", _REVISION, kinds=_BOTH),
    _same(_CONNECTOR, "vLLM", "--dtype", _HASH, equal(_dtype), kinds=_BOTH),
    _same(_CONNECTOR, "vLLM", "--kv-cache-dtype", _HASH, kinds=_BOTH),
    _vllm(_CONNECTOR, "--block-size", "equal, or decode's a multiple", engine_relations.vllm_block_size,
          "give both sides the same --block-size", _HANDSHAKE),
    _vllm(_CONNECTOR, "--tensor-parallel-size", "one divides the other", engine_relations.vllm_tp,
          "choose sizes of which one divides the other", _HANDSHAKE),
    _vllm(_CONNECTOR, "--pipeline-parallel-size", "1, or on prefill with NixlPushConnector",
          engine_relations.vllm_stages, "use --tensor-parallel-size instead", _WORKER),
    _vllm(_CONNECTOR, "--decode-context-parallel-size", "one divides the other", divisible,
          "choose sizes of which one divides the other", _HANDSHAKE),
    _vllm(_CONNECTOR, "--prefill-context-parallel-size", "1, or on a producer", engine_relations.vllm_prefill_context,
          "write kv_producer on prefill, and remove the option on decode", "vLLM kv_connector/v1/nixl/connector.py"),
    _vllm(_CONNECTOR, "VLLM_KV_CACHE_LAYOUT", "equal", engine_relations.vllm_layout,
          "give both sides the same layout, or unset it", _HANDSHAKE),
    _vllm(_CONNECTOR, "VLLM_SSM_CONV_STATE_LAYOUT", "DS for Mamba hybrids", engine_relations.vllm_conv_state,
          "set VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides", _WORKER, ReleaseRange("vllm", since="0.20.0")),
    _vllm(_CONNECTOR, "kv_lease_duration", "longer than decode's way to renew it", engine_relations.vllm_lease,
          "give both sides the same kv_lease_duration", "vLLM kv_connector/v1/nixl/base_scheduler.py (__init__)",
          ReleaseRange("vllm", since="0.25.0")),
    _vllm(_CONNECTOR, "bidirectional_kv_xfer", "equal", engine_relations.vllm_both_ways,
          "give both sides the same bidirectional_kv_xfer", _USAGE, ReleaseRange("vllm", since="0.25.0")),
    _vllm(_CONNECTOR, "decoder_kv_blocks_ttl", "read, and no longer than engine_ttl", engine_relations.vllm_ttl,
          "set bidirectional_kv_xfer on both sides, or remove decoder_kv_blocks_ttl",
          "vLLM kv_connector/v1/nixl/pull_scheduler.py (request_finished); inferred for engine_ttl",
          ReleaseRange("vllm", since="0.25.0")),
    _same(_CONNECTOR, "vLLM", "--attention-backend", _HASH, engine_relations.vllm_attention, holds=_HASHED),
    _same(_CONNECTOR, "vLLM", "enable_cross_layers_blocks", _HASH, engine_relations.vllm_cross_layers,
          holds=ReleaseRange("vllm", since="0.16.0", before="0.29.0")),
    _same(_CONNECTOR, "vLLM", "--disable-hybrid-kv-cache-manager", _HASH, holds=_HASHED),
    _same(_CONNECTOR, "vLLM", "speculative method", _SPECULATIVE),
    _same(_CONNECTOR, "vLLM", "speculative model", _SPECULATIVE, engine_relations.vllm_draft),
    _same(_CONNECTOR, "vLLM", "speculative revision", _SPECULATIVE, engine_relations.vllm_draft,
          holds=ReleaseRange("vllm", since="0.29.0")),
    _vllm(_CONNECTOR, "enforce_handshake_compat", "not false", engine_relations.vllm_handshake,
          "remove enforce_handshake_compat", _MATRIX, _HASHED),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-mode", "prefill and decode",
                  one_of_each_side(("prefill",), ("decode",)), "give each side its own --disaggregation-mode", _PD),
    ConnectorRule(_CONNECTOR, "SGLang", "--disaggregation-transfer-backend", "nixl on both sides",
                  engine_relations.sglang_backend, "give both sides --disaggregation-transfer-backend nixl", _PD),
    _same(_CONNECTOR, "SGLang", "--disaggregation-decode-allocation-policy",
          "SGLang python/sglang/srt/disaggregation/common/conn.py", engine_relations.sglang_policy,
          holds=ReleaseRange("sglang", since="0.5.22")),
    *(ConnectorRule(_CONNECTOR, "SGLang", variable, f"a positive number, on {side}", engine_relations.sglang_waits,
                    f"set a positive number on {side}",
                    "SGLang python/sglang/srt/disaggregation/common/conn.py (__init__)")
      for side, variables in (("prefill", ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",)), ("decode", DECODE_WAITS))
      for variable in variables),
    _same(_CONNECTOR, "SGLang", "--model-path", _CACHE),
    _same(_CONNECTOR, "SGLang", "--revision", _CACHE),
    _same(_CONNECTOR, "SGLang", "--dtype", _CACHE, equal(_dtype)),
    _same(_CONNECTOR, "SGLang", "--kv-cache-dtype", _CONN),
    _same(_CONNECTOR, "SGLang", "--page-size", _CONN),
    _same(_CONNECTOR, "SGLang", "SGLANG_DSV4_KV_LAYOUT", _CONN, holds=ReleaseRange("sglang", since="0.5.21")),
    ConnectorRule(_CONNECTOR, "SGLang", "--tp-size", "one divides the other", engine_relations.sglang_tp,
                  "choose sizes of which one divides the other", f"{_RANKS} and nixl/conn.py (maybe_send_extra)"),
    ConnectorRule(_CONNECTOR, "SGLang", "SGLANG_DISAGG_STAGING_BUFFER", "equal", engine_relations.staging_buffer,
                  "set it on both sides", _NIXL_CONN, releases=ReleaseRange("sglang", since="0.5.16")),
    ConnectorRule(_CONNECTOR, "SGLang", "--pp-size", "decode's 1, or equal", engine_relations.sglang_pp,
                  "start decode with --pp-size 1, or with prefill's", _RANKS),
    ConnectorRule(_CONNECTOR, "SGLang", "--attn-cp-size", "decode's 1", engine_relations.sglang_decode_context,
                  "remove it on decode", _RANKS),
    ConnectorRule(_CONNECTOR, "SGLang", "--dcp-size", "equal, or prefill's 1", engine_relations.sglang_context,
                  "give both sides the same --dcp-size",
                  "SGLang python/sglang/srt/disaggregation/common/conn.py (requires_dcp_relayout)"),
    ConnectorRule(_CONNECTOR, "Dynamo", ROLE, "prefill and decode", one_of_each_side(("prefill",), ("decode", "")),
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
