# SPDX-License-Identifier: Apache-2.0
"""The settings that the engines read for a transfer: what they do not read has no effect, or ends the engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from pytest_nixl.checks.connector.engine_fields import EngineSide
from pytest_nixl.checks.connector.relations import Mismatch, SidePair
from pytest_nixl.checks.connector.releases import Holds
from pytest_nixl.model.verdicts import Verdict

#: Variables of a transfer that an engine has read in some release. A variable that begins as one of them does, and is
#: not one of them, is misspelt. From vllm/envs.py, and SGLang's environ.py.
VARIABLES = {
    "vLLM": (
        "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
        "VLLM_NIXL_EP_MAX_NUM_RANKS", "VLLM_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT",
    ),
    "SGLang": (
        "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE", "SGLANG_DISAGGREGATION_QUEUE_SIZE",
        "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT", "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT", "SGLANG_DISAGGREGATION_NIXL_BACKEND",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS",
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL", "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "SGLANG_DISAGGREGATION_NUM_PRE_ALLOCATE_REQS",
    ),
}  # fmt: skip
_PREFIXES = {"vLLM": ("VLLM_NIXL_",), "SGLang": ("SGLANG_DISAGGREGATION_",)}
#: How the variables of a transfer begin.
TRANSFER_VARIABLES = tuple(prefix for prefixes in _PREFIXES.values() for prefix in prefixes)
#: Keys of kv_connector_extra_config that NixlConnector has read in some release.
EXTRA_KEYS = (
    "backends", "num_threads", "kv_lease_duration", "bidirectional_kv_xfer", "decoder_kv_blocks_ttl", "engine_ttl",
    "enforce_handshake_compat", "kv_recompute_threshold", "push_registration_timeout", "enable_cross_layers_blocks",
)  # fmt: skip
#: Keys of --kv-transfer-config.
TRANSFER_KEYS = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config",
    "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy",
)  # fmt: skip
#: Those that vLLM refuses from 0.33.0 on.
OLD_TRANSFER_KEYS = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")


class RetiredSetting(NamedTuple):
    """A setting that no longer is read.

    :param holds: the releases that do not read it.
    :param instead: what to do.
    """

    engine: str
    name: str
    holds: Holds
    instead: str


RETIRED = (
    RetiredSetting("vLLM", "VLLM_ATTENTION_BACKEND", Holds("vllm", since="0.16.0"),
                   "give --attention-backend, or --attention-config.backend"),
    RetiredSetting("vLLM", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", Holds("vllm", since="0.25.0"),
                   "set kv_lease_duration in kv_connector_extra_config"),
)  # fmt: skip


def unread_settings(pair: SidePair, field: str) -> Mismatch | None:
    """Judge settings of a transfer that no release reads, or not this one."""
    wrong = [mismatch for name, side in (("prefill", pair.prefill), ("decode", pair.decode))
             for mismatch in _of_side(name, side)]  # fmt: skip
    if not wrong:
        return None
    worst = min(wrong, key=lambda mismatch: mismatch.verdict is not Verdict.FAIL)
    texts = dict.fromkeys(mismatch.why for mismatch in wrong)
    remedies = dict.fromkeys(mismatch.remedy for mismatch in wrong)
    return Mismatch("; ".join(texts), "; ".join(remedies), worst.verdict)


def _of_side(name: str, side: EngineSide) -> Iterator[Mismatch]:
    environment = side.source.launch.environment
    variables = VARIABLES.get(side.engine, ())
    for variable in environment:
        if variable.startswith(_PREFIXES.get(side.engine, ("\0",))) and variable not in variables:
            yield _misspelt(f"no release of {side.engine} reads {name}'s {variable}", variable, variables)
    for retired in RETIRED:
        if retired.engine == side.engine and environment.get(retired.name) and not retired.holds.excludes(side):
            reason = f"{name} sets {retired.name}, which {retired.holds} on is not read"
            yield Mismatch(reason, retired.instead, Verdict.WARN)
    if side.engine != "vLLM" or side.values["connector kind"].text != "NIXL":
        return
    for key in side.values["kv_connector_extra_config"].text.split():
        if key not in EXTRA_KEYS:
            yield _misspelt(f"{name}'s NixlConnector does not read {key} of kv_connector_extra_config", key, EXTRA_KEYS)
    for key in side.values["kv_transfer_config"].text.split():
        if key in OLD_TRANSFER_KEYS:
            holds = Holds("vllm", since="0.33.0")
            if not holds.excludes(side):
                yield Mismatch(f"{holds} on refuses {name}'s {key}", f"remove {key}", Verdict.WARN)
        elif key not in TRANSFER_KEYS:
            wrong = _misspelt(f"no release of vLLM has {name}'s {key} of --kv-transfer-config", key, TRANSFER_KEYS)
            yield Mismatch(wrong.why, wrong.remedy)


def _misspelt(why: str, name: str, names: tuple[str, ...]) -> Mismatch:
    meant = difflib.get_close_matches(name, names, 1, 0.75)
    return Mismatch(why, f"write {meant[0]}" if meant else f"remove {name}", Verdict.WARN)
