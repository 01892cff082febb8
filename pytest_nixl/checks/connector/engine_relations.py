# SPDX-License-Identifier: Apache-2.0
"""Relations that one engine's own code demands: cache layout, block size, ports of ranks, connector and TP sizes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from pytest_nixl.checks.connector.engine_fields import EngineSide, ReleaseRange, older_than, release_of
from pytest_nixl.checks.connector.engines import DECODE_WAITS, OTHER_CONNECTORS, UNREAD
from pytest_nixl.checks.connector.relations import (
    Mismatch,
    SidePair,
    divisible,
    equal,
    one_of_each_side,
    positive_integers,
    undecided,
    unknown_value,
)
from pytest_nixl.model.verdicts import Verdict

_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
#: The short names of layouts, and the names that vLLM gives them: env_with_choices in vllm/envs.py.
_LAYOUTS = {"HND": "LBHNC", "NHD": "LBNHC"}
_LAYOUT_NAMES = frozenset({*_LAYOUTS.values(), "LHBNC", "BLHNC", "BLNHC", "BHLNC"})
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_ON = ("1", "true", "yes", "y", "on")
#: NIXL's backends that write files, and the variables by which KVBM gets one.
_FILES = ("POSIX", "GDS_MT", "GDS")
_KVBM_BACKEND = "DYN_KVBM_NIXL_BACKEND_"
_WINDOW_MEMORY = "--disable-hybrid-swa-memory"
#: Names of models whose sliding windows SGLang keeps in a cache of their own: is_hybrid_swa_model in model_config.py.
_SLIDING_WINDOWS = re.compile(r"(?:^|[/_-])(?:llama-?4|gpt-?oss|mimo-?v2|step-?3[.p]5|gemma-?4)\b", re.IGNORECASE)
#: Names of models whose layers keep states of Mamba or of linear attention.
_MAMBA = re.compile(
    r"mamba|jamba|nemotron-?h\b|nemotron-h-|nemotron-?(?:nano-|3-)|bamba|zamba|falcon-h1|granite-4.*-h-|qwen3-next|"
    r"qwen3\.[56]|kimi-linear|lfm2|minimax-text",
    re.IGNORECASE,
)


def vllm_tp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's tensor-parallel sizes: one divides the other, and heads can be split only with the layout HND."""
    if wrong := divisible(pair, field):
        return wrong
    prefill, decode = pair.values(field)
    if int(prefill.text) > int(decode.text) and any(older_than(side, "vllm", "0.14.0") for side in pair.sides):
        return Mismatch("prefill's may be the larger only from vLLM 0.14.0 on")
    layouts = [_layout(value.text) for value in pair.values(_LAYOUT) if value.is_known]
    if prefill.text != decode.text and _LAYOUTS["NHD"] in layouts:
        return Mismatch(f"they must be equal with {_LAYOUT}=NHD, which does not allow to split heads")
    return None


def vllm_block_size(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's block sizes: equal, or decode's is a multiple of prefill's, without a host buffer."""
    prefill, decode = pair.values(field)
    if prefill.text == decode.text:
        return None
    if not (prefill.is_set and decode.is_set):
        return equal()(pair, field)
    sizes = positive_integers(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    if sizes[1] % sizes[0]:
        return Mismatch("they must be equal, or decode's a multiple of prefill's")
    if any(value.text == "cpu" for value in pair.values("kv_buffer_device")):
        return Mismatch("they must be equal with a host buffer (kv_buffer_device cpu)")
    return undecided("vLLM allows this only for models without hybrid layers, and if prefill's TP is not the larger")


def _layout(name: str) -> str:
    """Return vLLM's name of a layout. vLLM refuses another case and spaces: env_with_choices compares to the letter."""
    return _LAYOUTS.get(name, name)


def vllm_layout(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the layout of vLLM's cache, which has several names: equal, or decode permutes prefill's HND."""
    wrong = equal(_layout)(pair, field)
    prefill, decode = (_layout(value.text) for value in pair.values(field))
    for value in pair.values(field):
        if value.is_known and _layout(value.text) not in _LAYOUT_NAMES:
            return Mismatch(
                f"vLLM ends at its start, because it has no layout {value.text}", "write HND on both sides, or unset it"
            )
    permutes = pair.values("enable_permute_local_kv")[1].text == "true"
    return None if wrong and permutes and (prefill, decode) == (_LAYOUTS["HND"], _LAYOUTS["NHD"]) else wrong


def vllm_connector(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the names of vLLM's connectors: both use NIXL or LMCache, and in the same direction."""
    if unknown := unknown_value(pair, field):
        return unknown
    values, kinds = pair.values(field), pair.values("connector kind")
    for name, value, kind in zip(("prefill", "decode"), values, kinds, strict=True):
        if kind.text == UNREAD:
            reason = "does not use NIXL" if value.text in OTHER_CONNECTORS else "is not known here"
            return undecided(
                f"{name}'s {value.text} {reason}, so that nothing that it demands was read",
                "see its own documentation; with NixlConnector the fields below are compared",
            )
    if not any(value.is_set for value in values) and not pair.prefill.dynamo:
        return Mismatch("without --kv-transfer-config no engine transfers anything")
    names = []
    for name, value, side in zip(("prefill", "decode"), values, pair.sides, strict=True):
        by_default = not value.is_set and older_than(side, "ai-dynamo", "1.0.0")
        names.append("NixlConnector" if by_default else value.text.replace("NixlPullConnector", "NixlConnector"))
        if not value.is_set and not by_default:
            ends = ", and Dynamo from 1.0.0 on ends at its start" if side.dynamo and name == "prefill" else ""
            return Mismatch(f"{name} has no --kv-transfer-config{ends}")
    if names[0] != names[1]:
        return Mismatch("they must be equal")
    unread = ", ".join(dict.fromkeys(value.text for value in pair.values("unread connectors") if value.is_set))
    if unread:
        return undecided(
            f"the same MultiConnector has {unread}, which is not known here and was not read",
            "see its own documentation",
        )
    return None


def vllm_role(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's roles: each one that vLLM accepts. NixlConnector uses none of them to choose a direction."""
    if not all(value.is_set for value in pair.values("kv_connector")):
        return None
    return one_of_each_side(_ROLES, _ROLES)(pair, field)


def vllm_stages(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's pipeline stages: one, except on prefill with the push connector."""
    stages = positive_integers(pair, field)
    if isinstance(stages, Mismatch):
        return stages
    push = pair.values("kv_connector")[0].text == "NixlPushConnector"
    if stages[1] > 1:
        return Mismatch("decode must have one pipeline stage")
    if stages[0] > 1 and not push:
        return Mismatch("prefill may have several pipeline stages with NixlPushConnector only")
    return None


def vllm_lease(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the lease of blocks: decode renews it every sixth of its own, so prefill's must last longer than that."""
    leases = positive_integers(pair, field)
    if isinstance(leases, Mismatch):
        return leases
    if leases[1] // 6 >= leases[0]:
        return Mismatch(
            f"decode renews every {leases[1] // 6} s (a sixth of its own), when prefill's lease of {leases[0]} s has "
            "expired"
        )
    return None


def vllm_both_ways(pair: SidePair, field: str) -> Mismatch | None:
    """Warn if prefill alone, or decode alone, is to read the other side's blocks of an earlier turn."""
    prefill, decode = pair.values(field)
    if prefill.text == decode.text:
        return None
    return unknown_value(pair, field) or Mismatch("it has an effect only if both sides have it", "", Verdict.WARN)


def vllm_ttl(pair: SidePair, field: str) -> Mismatch | None:
    """Judge how long decode keeps blocks for prefill's next turn: as long as prefill remembers decode."""
    keeps = positive_integers(pair, field)
    if isinstance(keeps, Mismatch):
        return keeps
    remembers = positive_integers(pair, "engine_ttl")
    if isinstance(remembers, Mismatch):
        return _of_another_field(remembers, "engine_ttl")
    connector, both_ways = pair.values("kv_connector")[1], pair.values("bidirectional_kv_xfer")[1]
    if both_ways.text != "true" and connector.text != "NixlPushConnector":
        unread = any(value.is_set for value in pair.values(field))
        return Mismatch("it has no effect without bidirectional_kv_xfer", "", Verdict.WARN) if unread else None
    if remembers[0] < keeps[1]:
        reason = f"prefill forgets decode after {remembers[0]} s (engine_ttl), and decode keeps blocks for longer"
        return Mismatch(reason, "raise engine_ttl", Verdict.WARN)
    return None


def _of_another_field(mismatch: Mismatch, field: str) -> Mismatch:
    """Return a mismatch that names the field whose value is wrong or not known."""
    return replace(mismatch, reason=f"{field}: {mismatch.reason}", remedy=mismatch.remedy or f"correct {field}")


def sglang_waits(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's time limits: positive numbers, on the side that reads them."""
    values = pair.values(field)
    for name, value in zip(("prefill", "decode"), values, strict=True):
        if value.is_set and value.is_known and not re.fullmatch(r"0*[1-9]\d{0,9}(\.\d+)?|0*\.0*[1-9]\d*", value.text):
            return Mismatch(f"{name}'s must be a positive number of seconds or times")
    reader = 1 if field in DECODE_WAITS else 0
    if values[1 - reader].is_set and not values[reader].is_set and values[reader].is_readable:
        name = ("prefill", "decode")[reader]
        return Mismatch(f"only {name} reads it", f"set it on {name}", Verdict.WARN)
    return None


def vllm_prefill_context(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's prefill context parallelism, which only a producer may have."""
    sizes = positive_integers(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    for name, size, role in zip(("prefill", "decode"), sizes, pair.values("kv_role"), strict=True):
        if size > 1 and role.text != "kv_producer":
            return Mismatch(f"{name} may have more than 1 only with kv_role kv_producer")
    return None


def vllm_conv_state(pair: SidePair, field: str) -> Mismatch | None:
    """Warn if a model that is a Mamba hybrid by its name has a layout of states that vLLM cannot transfer."""
    for model, value in zip(pair.values("--model"), pair.values(field), strict=True):
        if value.is_known and value.text != "DS" and _MAMBA.search(model.text):
            return Mismatch(
                f"{model.text} is a Mamba hybrid by its name, and vLLM transfers its states only as DS",
                "",
                Verdict.WARN,
            )
    return None


def buffer_device(pair: SidePair, field: str) -> Mismatch | None:
    """Warn of blocks that are staged in host memory, and of two kinds of device memory. Some platforms must stage."""
    staged = [
        name
        for name, side, value in zip(("prefill", "decode"), pair.sides, pair.values(field), strict=True)
        if value.text == "cpu" and not _must_stage(side)
    ]
    if staged:
        reason = f"{' and '.join(staged)} {'copy' if len(staged) > 1 else 'copies'} each block through host memory"
        return Mismatch(f"{reason}, which works and is slower", "", Verdict.WARN, "KV goes through host memory: slow")
    kinds = {value.text for value in pair.values(field) if value.is_set and value.is_known}
    if len(kinds - {"cpu"}) > 1:
        return Mismatch(f"{' and '.join(sorted(kinds))} memory may need host memory between them", "", Verdict.WARN)
    return None


def _must_stage(side: EngineSide) -> bool:
    """Return whether a side runs on a platform without GPU memory that NIXL can register."""
    resources = () if side.source.resources is None else side.source.resources.requests
    return any("tpu" in text or "cpu-" in text or "-cpu" in text for text in (side.source.image, *resources))


def vllm_attention(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the attention backend, which releases before 0.16.0 also read from a variable: equal."""
    variables = pair.values("VLLM_ATTENTION_BACKEND")
    if all(older_than(side, "vllm", "0.16.0") for side in pair.sides) and variables[0] != variables[1]:
        texts = [
            value.text if value.is_set else by_variable.text
            for value, by_variable in zip(pair.values(field), variables, strict=True)
        ]
        return (
            Mismatch(f"VLLM_ATTENTION_BACKEND makes them {' and '.join(text or 'unset' for text in texts)}")
            if texts[0] != texts[1]
            else None
        )
    return equal()(pair, field)


def lmcache_seed(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the seed of Python's hash, by which LMCache names its chunks: the same on both sides."""
    if unknown := unknown_value(pair, field):
        return unknown
    prefill, decode = pair.values(field)
    if prefill.text == decode.text and prefill.text != "random":
        return None if prefill.is_set else undecided("LMCache names chunks by Python's hash, which needs one seed")
    return Mismatch("LMCache names chunks by Python's hash, so that no chunk is the same on both sides")


def dynamo_connector(pair: SidePair, field: str) -> Mismatch | None:
    """Judge Dynamo's own option for connectors, which vLLM's workers refuse from 1.0.0 on."""
    for side, value in zip(pair.sides, pair.values(field), strict=True):
        if not value.is_set or older_than(side, "ai-dynamo", "1.0.0"):
            continue
        ends = "Dynamo from 1.0.0 on ends with an error at its start"
        if release_of(side, "ai-dynamo"):
            return Mismatch(ends)
        if "kvbm" not in value.text:
            return Mismatch(ends, "", Verdict.WARN)
    return None


def disk_tier(pair: SidePair, field: str) -> Mismatch | None:
    """Judge KVBM's tier of blocks on disk, which needs a backend of NIXL that writes files."""
    for side, value in zip(pair.sides, pair.values(field), strict=True):
        used = side.values.get("KVBM")
        environment = side.source.launch.environment
        writes = any(environment.get(f"{_KVBM_BACKEND}{name}", "").strip().lower() in _ON for name in _FILES)
        if used is not None and used.text == "true" and value.is_set and value.text != "0" and not writes:
            return Mismatch("a tier on disk needs a backend of NIXL for files: POSIX or GDS_MT", "", Verdict.WARN)
    return None


def vllm_draft(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the draft's model and revision: equal, if the methods are."""
    methods = pair.values("speculative method")
    return equal()(pair, field) if methods[0].text == methods[1].text else None


def vllm_handshake(pair: SidePair, field: str) -> Mismatch | None:
    """Warn if vLLM's own check of the handshake is off."""
    if all(value.text != "false" for value in pair.values(field)):
        return None
    return Mismatch("vLLM does not compare the sides itself if it is false", "", Verdict.WARN)


def vllm_cross_layers(pair: SidePair, field: str) -> Mismatch | None:
    """Judge whether blocks span layers: equal, and Dynamo's PdConnector never lets them (ai-dynamo/dynamo#10027)."""
    if wrong := equal()(pair, field):
        return wrong
    wrappers, sides = pair.values("wrapping connector"), pair.values(field)
    if wrappers[0].text != wrappers[1].text and any(
        wrapper.text == "PdConnector" and other.text == "true"
        for wrapper, other in zip(wrappers, reversed(sides), strict=True)
    ):
        return Mismatch("PdConnector ignores it, so only the other side uses it", f"remove {field} on both sides")
    return None


def sglang_tp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the ranks that share an attention head in SGLang."""
    groups = _attention_ranks(pair)
    if isinstance(groups, Mismatch):
        return groups
    if max(groups) % min(groups):
        return Mismatch("the larger must be a multiple of the smaller (with --enable-dp-attention after / --dp-size)")
    has_windows = any(_SLIDING_WINDOWS.search(value.text) for value in pair.values("--model-path"))
    if len(set(groups)) > 1 and has_windows and any(value.text != "true" for value in pair.values(_WINDOW_MEMORY)):
        return Mismatch(
            "SGLang's nixl backend refuses different sizes for a model with sliding windows",
            f"give both sides the same {field}, or {_WINDOW_MEMORY}",
        )
    return None


def _attention_ranks(pair: SidePair) -> tuple[int, ...] | Mismatch:
    """Return for each side SGLang's TP, divided by DP with ``--enable-dp-attention``, or what is wrong with them."""
    sizes, ranks = positive_integers(pair, "--tp-size"), positive_integers(pair, "--dp-size")
    if isinstance(sizes, Mismatch):
        return sizes
    if isinstance(ranks, Mismatch):
        return _of_another_field(ranks, "--dp-size")
    return tuple(
        size // rank if value.text == "true" and not size % rank else size
        for size, rank, value in zip(sizes, ranks, pair.values("--enable-dp-attention"), strict=True)
    )


def sglang_pp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's pipeline stages: decode has one, or as many as prefill."""
    sizes = positive_integers(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    prefill, decode = sizes
    return None if decode in (1, prefill) else Mismatch("decode's must be 1, or equal to prefill's")


def sglang_backend(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's transfer backends: nixl on both sides. Another one on both is not read here."""
    prefill, decode = pair.values(field)
    if prefill.is_known and prefill.is_set and prefill.text == decode.text != "nixl":
        return undecided(f"{prefill.text} does not use NIXL, so that nothing that it demands was read")
    return one_of_each_side(("nixl",), ("nixl",))(pair, field)


def sglang_context(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's decode context parallelism: equal, or prefill's 1 for MLA models."""
    sizes = positive_integers(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    if sizes[0] not in (1, sizes[1]):
        return Mismatch("they must be equal, or prefill's 1")
    if sizes[1] == 1:
        return None
    if pair.values("--attn-cp-size")[0].text != "1":
        return Mismatch("decode's may be larger than 1 only if prefill's --attn-cp-size is 1", f"remove {field}")
    return undecided("decode's may be larger than 1 for MLA models only")


def sglang_policy(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's allocation policy: equal, and prefill_complete for a prefill that runs on one GPU."""
    if wrong := equal()(pair, field):
        return wrong
    groups = _attention_ranks(pair)
    sizes = [pair.values(size)[0].text for size in ("--attn-cp-size", "--pp-size")]
    if pair.values(field)[0].text == "prefill_complete" and (
        isinstance(groups, Mismatch) or groups[0] > 1 or sizes != ["1", "1"]
    ):
        return Mismatch(
            "prefill_complete allows only 1 on prefill: attention TP, --attn-cp-size and --pp-size",
            f"remove {field} on both sides",
        )
    return None


def sglang_decode_context(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's attention context parallelism, which decode may not have."""
    value = pair.values(field)[1]
    return None if not value.is_known or value.text == "1" else Mismatch("decode's must be 1")


def sglang_parameters(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the backend parameters of SGLang: a JSON object of strings."""
    for name, value in zip(("prefill", "decode"), pair.values(field), strict=True):
        if not value.is_set or not value.is_known:
            continue
        try:
            parameters = json.loads(value.text)
        except (ValueError, RecursionError):
            return Mismatch(f"{name}'s is not JSON", """write it as '{"num_threads": "8"}'""")
        if not isinstance(parameters, dict) or not all(isinstance(part, str) for part in parameters.values()):
            return Mismatch(f"SGLang ends at its start if a value of {name}'s is not a string")
    return None


def ib_device(pair: SidePair, field: str) -> Mismatch | None:
    """Warn about SGLang's option for devices, which its nixl backend reads from 0.5.23 on, and for UCX only."""
    backends = pair.values("SGLANG_DISAGGREGATION_NIXL_BACKEND")
    for name, side, value, backend in zip(("prefill", "decode"), pair.sides, pair.values(field), backends, strict=True):
        variable = side.values["UCX_NET_DEVICES"]
        if not value.is_set or side.values["--disaggregation-transfer-backend"].text != "nixl":
            continue
        if backend.text != "UCX":
            return Mismatch(
                f"SGLang does not use it with {backend.text}, so that it has no effect on {name}",
                f"remove {field}",
                Verdict.WARN,
            )
        if not variable.is_set and ReleaseRange("sglang", since="0.5.23").excludes(side):
            return Mismatch(f"the nixl backend of {name} does not read it", "", Verdict.WARN)
        if not variable.is_set and not release_of(side, "sglang"):
            return Mismatch(f"the nixl backend of {name} reads it only from SGLang 0.5.23 on", "", Verdict.WARN)
    return None


def staging_buffer(pair: SidePair, field: str) -> Mismatch | None:
    """Warn if one side alone has SGLang's staging buffer for unequal TP sizes."""
    on = [value.text.strip().lower() in _ON for value in pair.values(field)]
    if on[0] == on[1] or not all(value.is_known for value in pair.values(field)):
        return None
    return Mismatch("a staging buffer on one side has no other side to talk to", "", Verdict.WARN)
