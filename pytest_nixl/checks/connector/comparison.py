# SPDX-License-Identifier: Apache-2.0
"""Compare two engines' configurations by all rules, and put each difference into one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import COMMON, EngineSide, FieldValue, read_fields
from pytest_nixl.checks.connector.engines import read_dynamo, read_sglang, read_vllm
from pytest_nixl.checks.connector.nixl_relations import releases
from pytest_nixl.checks.connector.relations import SidePair, is_loopback, is_unspecified
from pytest_nixl.checks.connector.rules import RULES, ConnectorRule
from pytest_nixl.core.redaction import hider, shown
from pytest_nixl.core.strict import escape
from pytest_nixl.model.verdicts import Verdict

_READERS: dict[str, Callable[[ConfiguredEngine], dict[str, FieldValue]]] = {"vLLM": read_vllm, "SGLang": read_sglang}
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST"


@dataclass(frozen=True)
class RuleResult:
    """The judgement of one rule.

    :param prefill: prefill's value as a message shows it, without secrets; likewise ``decode``.
    :param why: what is wrong; empty if nothing is.
    """

    rule: ConnectorRule
    verdict: Verdict
    prefill: str
    decode: str
    why: str = ""
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """The difference in one sentence."""
        return f"{self.rule.field}: prefill has {self.prefill}, decode has {self.decode}; {self.why}"


@dataclass(frozen=True)
class ConnectorComparison:
    """The judgements of all rules that apply, in the order in which to correct what they name."""

    pair: SidePair
    results: tuple[RuleResult, ...]

    @property
    def unread(self) -> tuple[str, ...]:
        """Sentences about variables that the files do not contain."""
        sides = (("prefill", self.pair.prefill), ("decode", self.pair.decode))
        return tuple(f"{name} has variables from {what}, which is not in the file"
                     for name, side in sides for what in side.source.unread)  # fmt: skip


def compare_connectors(
    prefill: ConfiguredEngine,
    decode: ConfiguredEngine,
    *,
    one_host: bool = False,
    plugins: frozenset[str] | None = None,
) -> ConnectorComparison:
    """Compare the configuration of both sides.

    :param one_host: whether both sides run on one host; two containers of one pod always do.
    :param plugins: NIXL's plugins in the engines' image; None if they are not known.
    :raises ValueError: if an option that must be JSON is not.
    """
    sides = _side(prefill), _side(decode)
    one_host = one_host or _on_one_host(*sides)
    pair = SidePair(*sides, one_host=one_host, plugins=plugins)
    hiders = [hider(source.launch.environment) for source in (prefill, decode)]

    def hide(text: str) -> str:
        return hiders[1](hiders[0](text))

    rules = [rule for rule in RULES if _applies(rule, pair)]
    return ConnectorComparison(pair, tuple(_result(rule, pair, hide) for rule in rules))


def _side(source: ConfiguredEngine) -> EngineSide:
    values = read_fields(source.launch, COMMON) | _READERS[source.launch.engine](source)
    if source.launch.dynamo:
        values |= read_dynamo(source)
    side = EngineSide(source, values)
    name = f"{side.engine} under Dynamo" if side.dynamo else side.engine
    values["engine"] = FieldValue(name)
    values["image"] = FieldValue(source.image, is_set=bool(source.image), is_readable=bool(source.image))
    efa = source.efa or 0
    values["EFA devices"] = FieldValue(str(efa), is_set=efa > 0, is_readable=source.efa is not None)
    installed = releases(side)
    values["installed releases"] = FieldValue(installed, is_set=bool(installed), is_readable=bool(installed))
    return side


def _on_one_host(prefill: EngineSide, decode: EngineSide) -> bool:
    """Return whether both sides are in one pod, or tell each other the same address."""
    if prefill.source.pod is not None and prefill.source.pod == decode.source.pod:
        return True
    hosts = [side.values.get(_SIDE_CHANNEL, FieldValue("", is_set=False)) for side in (prefill, decode)]
    return all(
        host.is_set and host.is_known and host.text == hosts[0].text and not is_loopback(host.text)
        and not is_unspecified(host.text)
        for host in hosts
    )  # fmt: skip


def _applies(rule: ConnectorRule, pair: SidePair) -> bool:
    sides = (pair.prefill, pair.decode)
    if rule.engine == "Dynamo":
        return all(side.dynamo and rule.field in side.values for side in sides)
    if rule.direct and any(side.dynamo for side in sides):
        return False
    return not rule.engine or all(side.engine == rule.engine for side in sides)


def _result(rule: ConnectorRule, pair: SidePair, hide: Callable[[str], str]) -> RuleResult:
    values = pair.values(rule.field)
    prefill, decode = (_shown(rule.field, value, hide) for value in values)
    if not all(value.is_readable for value in values):
        return RuleResult(rule, Verdict.NOT_APPLICABLE, prefill, decode)
    wrong = rule.relation(pair, rule.field)
    if wrong is None:
        return RuleResult(rule, Verdict.PASS, prefill, decode)
    why, remedy = (escape(hide(text)) for text in (wrong.why, wrong.remedy or rule.remedy))
    return RuleResult(rule, wrong.verdict, prefill, decode, why, remedy)


def _shown(field: str, value: FieldValue, hide: Callable[[str], str]) -> str:
    if not value.is_readable:
        return "a value that the file does not contain"
    if value.is_set:
        return escape(shown(field, hide(value.text))) or "an empty value"
    return f"none (default {value.text})" if value.text else "none"
