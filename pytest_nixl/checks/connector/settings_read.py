# SPDX-License-Identifier: Apache-2.0
"""The settings that the engines read for a transfer: what they do not read has no effect, or ends the engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from pytest_nixl.checks.connector.engine_fields import COMMON_FIELDS, EngineSide, ReleaseRange
from pytest_nixl.checks.connector.engines import DYNAMO_FIELDS, ROLE_FIELDS, SGLANG_FIELDS, VLLM_FIELDS
from pytest_nixl.checks.connector.nixl_relations import SLOW_SETTINGS
from pytest_nixl.checks.connector.relations import Mismatch, SidePair
from pytest_nixl.model.nixl_releases import TELEMETRY_VARIABLE
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
    "backends",
    "num_threads",
    "kv_lease_duration",
    "bidirectional_kv_xfer",
    "decoder_kv_blocks_ttl",
    "engine_ttl",
    "enforce_handshake_compat",
    "kv_recompute_threshold",
    "push_registration_timeout",
    "enable_cross_layers_blocks",
)
#: Keys of --kv-transfer-config.
TRANSFER_KEYS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
#: Those that vLLM refuses from 0.33.0 on.
OLD_TRANSFER_KEYS = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")


class RetiredSetting(NamedTuple):
    """A setting that no longer is read.

    :param releases: the releases that do not read it.
    :param instead: what to do.
    """

    engine: str
    name: str
    releases: ReleaseRange
    instead: str


RETIRED = (
    RetiredSetting(
        "vLLM",
        "VLLM_ATTENTION_BACKEND",
        ReleaseRange("vllm", since="0.16.0"),
        "give --attention-backend, or --attention-config.backend",
    ),
    RetiredSetting(
        "vLLM",
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
        ReleaseRange("vllm", since="0.25.0"),
        "set kv_lease_duration in kv_connector_extra_config",
    ),
    *(
        RetiredSetting(
            "SGLang",
            f"--disaggregation-{name}",
            ReleaseRange("sglang", since="0.5.23"),
            f"remove --disaggregation-{name}: SGLang learns it from the other side",
        )
        for name in ("decode-tp", "decode-dp", "prefill-pp")
    ),
)


#: Options that are read elsewhere: of what stands in other files, of several hosts, and of GPUs.
_OTHER_OPTIONS = frozenset(
    {
        "--version",
        "--config",
        "--engine-config-json",
        "--kv-transfer-config",
        "--kv-events-config",
        "--spec-method",
        "--speculative-config",
        "--spec-model",
        "--spec-tokens",
        "--attention-backend",
        "--attention-config",
        "--nnodes",
        "--node-rank",
        "--headless",
        "--base-gpu-id",
        "--dist-init-addr",
        "--distributed-executor-backend",
        *(
            f"--data-parallel-{name}"
            for name in ("address", "size-local", "rank", "start-rank", "hybrid-lb", "external-lb", "backend")
        ),
    }
)
_OPTIONS = {
    engine: frozenset(option for part in fields for option in part.options)
    for engine, fields in (("vLLM", VLLM_FIELDS), ("SGLang", SGLANG_FIELDS), ("Dynamo", (*DYNAMO_FIELDS, *ROLE_FIELDS)))
}
#: Variables of UCX, NIXL and libfabric that a rule reads.
_COMMON_VARIABLES = (
    *(name for part in COMMON_FIELDS for name in part.variables if name.startswith(("UCX_", "NIXL_"))),
    *(setting.variable for setting in SLOW_SETTINGS),
    TELEMETRY_VARIABLE,
)
#: The least likeness of two words of an option's name, one of which is a slip of the other.
_LIKE = 0.66
#: The most options of a command that are compared with known ones, and the most letters of one.
_MOST_OPTIONS, _MOST_LETTERS = 500, 80


def unknown_options(side: EngineSide) -> dict[str, str]:
    """Return the options that no rule knows, each with the reason why the engine does not have it; empty if it may."""
    launch = side.source.launch
    if not launch.is_read:
        return {}
    known = _OPTIONS[side.engine] | _OTHER_OPTIONS | ({"--connector"} | _OPTIONS["Dynamo"] if side.dynamo else set())
    unknown = {}
    for name in islice(launch.options, _MOST_OPTIONS):
        option = f"--{name.partition('.')[0].removeprefix('--').removeprefix('no-')}"
        if not name.startswith("--") or len(name) > _MOST_LETTERS or option in known:
            continue
        _, meant = max(((_likeness(option, text), text) for text in known if _is_meant(option, text)), default=(0, ""))
        other = next((engine for engine in VARIABLES if option in _OPTIONS[engine]), "")
        hint = f"meant {meant}?" if meant else f"{other} has" if other else ""
        unknown[name] = f"{side.engine} has no such option; {hint}" if hint else ""
        if meant.startswith(f"{option}-"):
            unknown[name] = f"an abbreviation, write {meant}"
    return unknown


def _is_meant(option: str, known: str) -> bool:
    """Return whether an option is a slip of a known one: in each word a letter or two, a missing dash, or the end.

    Short words are names of their own, such as tp and dp, so that they must be equal.
    """
    words, right = option[2:].split("-"), known[2:].split("-")
    if known == option[1:] or known.startswith(f"{option}-") or "".join(words) == "".join(right):
        return True
    return _are_slips(words, right)


def _are_slips(words: list[str], right: list[str]) -> bool:
    return len(words) == len(right) and all(
        word == text or (len(text) > 3 and ((len(word) > 3 and text.startswith(word)) or _likeness(word, text) > _LIKE))
        for word, text in zip(words, right, strict=True)
    )


def _likeness(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text, other).ratio()


def unread_options(pair: SidePair, field: str) -> Mismatch | None:
    """Warn of options that an engine does not have."""
    reasons = {name: reason for side in pair.sides for name, reason in unknown_options(side).items() if reason}
    if not reasons:
        return None
    listed = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return Mismatch(f"not read: {listed}", "", Verdict.WARN)


def unread_settings(pair: SidePair, field: str) -> Mismatch | None:
    """Judge settings of a transfer that no release reads, or not this one."""
    wrong = [
        mismatch
        for name, side in (("prefill", pair.prefill), ("decode", pair.decode))
        for mismatch in _of_side(name, side)
    ]
    if not wrong:
        return None
    worst = min(wrong, key=lambda mismatch: mismatch.verdict is not Verdict.FAIL)
    texts = dict.fromkeys(mismatch.reason for mismatch in wrong)
    remedies = dict.fromkeys(mismatch.remedy for mismatch in wrong)
    return Mismatch("; ".join(texts), "; ".join(remedies), worst.verdict)


def misspelt_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of UCX, NIXL and libfabric that are slips of one that a rule reads, with that one."""
    return {
        name: meant
        for name in islice(environment, _MOST_OPTIONS)
        if name.startswith(("UCX_", "NIXL_", "FI_")) and len(name) < _MOST_LETTERS and name not in _COMMON_VARIABLES
        for meant in [text for text in _COMMON_VARIABLES if _are_slips(name.split("_"), text.split("_"))][:1]
    }


def _of_side(name: str, side: EngineSide) -> Iterator[Mismatch]:
    environment = side.source.launch.environment
    variables = VARIABLES.get(side.engine, ())
    for variable, meant in misspelt_variables(environment).items():
        yield Mismatch(f"nothing reads {name}'s {variable}", f"write {meant}", Verdict.WARN)
    for variable in environment:
        if variable.startswith(_PREFIXES.get(side.engine, ("\0",))) and variable not in variables:
            yield _misspelt(f"no release of {side.engine} reads {name}'s {variable}", variable, variables)
    for retired in RETIRED:
        is_set = environment.get(retired.name) or retired.name in side.source.launch.options
        if retired.engine == side.engine and is_set and not retired.releases.excludes(side):
            reason = f"{name} sets {retired.name}, which {retired.releases} on does not read"
            yield Mismatch(reason, retired.instead, Verdict.WARN)
    if side.engine != "vLLM" or side.values["connector kind"].text != "NIXL":
        return
    for key in side.values["kv_connector_extra_config"].text.split():
        if key not in EXTRA_KEYS:
            yield _misspelt(f"{name}'s NixlConnector does not read {key} of kv_connector_extra_config", key, EXTRA_KEYS)
    for key in side.values["kv_transfer_config"].text.split():
        if key in OLD_TRANSFER_KEYS:
            holds = ReleaseRange("vllm", since="0.33.0")
            if not holds.excludes(side):
                yield Mismatch(f"{holds} on refuses {name}'s {key}", f"remove {key}", Verdict.WARN)
        elif key not in TRANSFER_KEYS:
            wrong = _misspelt(f"no release of vLLM has {name}'s {key} of --kv-transfer-config", key, TRANSFER_KEYS)
            yield Mismatch(wrong.reason, wrong.remedy)


def _misspelt(why: str, name: str, names: tuple[str, ...]) -> Mismatch:
    meant = difflib.get_close_matches(name, names, 1, 0.75)
    return Mismatch(why, f"write {meant[0]}" if meant else f"remove {name}", Verdict.WARN)
