# SPDX-License-Identifier: Apache-2.0
"""Relations that one engine's own code demands: cache layout, block size, ports of ranks, connector and TP sizes."""

from __future__ import annotations

from pytest_nixl.checks.connector.engines import NIXL_CONNECTORS
from pytest_nixl.checks.connector.relations import (
    Mismatch,
    SidePair,
    divisible,
    equal,
    only,
    reference,
    undecided,
    whole,
)
from pytest_nixl.model.verdicts import Verdict

_TP, _LAYOUT = "--tensor-parallel-size", "VLLM_KV_CACHE_LAYOUT"
#: The highest number of data-parallel ranks that the ports of a side are counted for.
_MOST_RANKS = 1 << 16


def vllm_tp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's tensor-parallel sizes: one divides the other, and heads can be split only with the layout HND."""
    if wrong := divisible(pair, field):
        return wrong
    prefill, decode = pair.values(field)
    layouts = pair.values(_LAYOUT)
    if prefill.text != decode.text and any(value.is_known and value.text == "NHD" for value in layouts):
        return Mismatch(f"they must be equal with {_LAYOUT}=NHD, which does not allow to split heads")
    return None


def vllm_block_size(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's block sizes: equal, or with restrictions decode's is a multiple of prefill's."""
    prefill, decode = pair.values(field)
    if prefill.text == decode.text:
        return None
    if not (prefill.is_set and decode.is_set):
        return equal()(pair, field)
    sizes, tp = whole(pair, field), whole(pair, _TP)
    if isinstance(sizes, Mismatch):
        return sizes
    if sizes[1] % sizes[0]:
        return Mismatch("they must be equal, or decode's a multiple of prefill's")
    if not isinstance(tp, Mismatch) and tp[0] > tp[1]:
        return Mismatch(f"they must be equal because prefill has the larger {_TP}")
    return undecided("vLLM allows this only for models without hybrid layers and without a host buffer")


def vllm_layout(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the layout of vLLM's cache: equal, or decode permutes prefill's HND."""
    wrong = equal(str.upper)(pair, field)
    prefill, decode = pair.values(field)
    permutes = pair.values("enable_permute_local_kv")[1].text == "true"
    return None if wrong and permutes and (prefill.text, decode.text) == ("HND", "NHD") else wrong


def vllm_connector(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the names of vLLM's connectors: both use NIXL, and in the same direction."""
    if unknown := reference(pair, field):
        return unknown
    if pair.prefill.dynamo and not all(value.is_set for value in pair.values(field)):
        return undecided("Dynamo chose NixlConnector by default in old releases only")
    prefill, decode = (value.text.replace("NixlPullConnector", "NixlConnector") for value in pair.values(field))
    if not {prefill, decode} <= set(NIXL_CONNECTORS):
        return Mismatch(f"both must be one of {', '.join(NIXL_CONNECTORS)}")
    return None if prefill == decode else Mismatch("they must be equal")


def vllm_role(pair: SidePair, field: str) -> Mismatch | None:
    """Judge vLLM's roles, if both sides have a connector."""
    if not all(value.is_set for value in pair.values("kv_connector")):
        return None
    return only(("kv_producer", "kv_both"), ("kv_consumer", "kv_both"))(pair, field)


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


def side_channel_port(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the ports of vLLM's handshake: a port for each data-parallel rank, counted from the given one."""
    if not pair.one_host:
        return None
    ports, ranks = whole(pair, field), whole(pair, "--data-parallel-size")
    if isinstance(ports, Mismatch):
        return ports
    count = (1, 1) if isinstance(ranks, Mismatch) else (min(ranks[0], _MOST_RANKS), min(ranks[1], _MOST_RANKS))
    if ports[0] < ports[1] + count[1] and ports[1] < ports[0] + count[0]:
        used = (
            f", and each side uses one port for each of its {count[0]} and {count[1]} ranks" if max(count) > 1 else ""
        )
        return Mismatch(f"both sides are on one host, so they must be different{used}")
    return None


def sglang_tp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the ranks that share an attention head in SGLang: TP, divided by DP with ``--enable-dp-attention``."""
    sizes, ranks = whole(pair, field), whole(pair, "--dp-size")
    if isinstance(sizes, Mismatch):
        return sizes
    if isinstance(ranks, Mismatch):
        return ranks
    groups = [
        size // rank if value.text == "true" and not size % rank else size
        for size, rank, value in zip(sizes, ranks, pair.values("--enable-dp-attention"), strict=True)
    ]
    if max(groups) % min(groups):
        return Mismatch("the larger must be a multiple of the smaller (with --enable-dp-attention after / --dp-size)")
    return None


def sglang_pp(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's pipeline stages: decode has one, or as many as prefill."""
    sizes = whole(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    prefill, decode = sizes
    return None if decode in (1, prefill) else Mismatch("decode's must be 1, or equal to prefill's")


def sglang_page_size(pair: SidePair, field: str) -> Mismatch | None:
    """Judge SGLang's page sizes: equal, unless decode has ``--enable-hisparse``."""
    return None if pair.values("--enable-hisparse")[1].text == "true" else equal()(pair, field)


def states_decode(pair: SidePair, field: str) -> Mismatch | None:
    """Judge ``--disaggregation-decode-tp`` and ``-dp``: what prefill says about decode must be true."""
    said = pair.values(field)[0]
    of_decode = pair.values(f"--{field.rpartition('-')[2]}-size")[1]
    if not said.is_set or not said.is_known or not of_decode.is_known or said.text == of_decode.text:
        return None
    return Mismatch(f"prefill's value must be decode's --{field.rpartition('-')[2]}-size, which is {of_decode.text}")
