# SPDX-License-Identifier: Apache-2.0
"""Compare two engines' configurations by all rules, and put each difference into one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pytest_nixl.checks.connector.containers import OPTIONS_OF, ConfiguredEngine
from pytest_nixl.checks.connector.engine_fields import (
    COMMON_FIELDS,
    EngineSide,
    FieldValue,
    named_releases,
    read_fields,
)
from pytest_nixl.checks.connector.engines import LMCACHE, read_dynamo, read_sglang, read_vllm
from pytest_nixl.checks.connector.nixl_relations import SLOW_SETTINGS
from pytest_nixl.checks.connector.pod_relations import readable_ports
from pytest_nixl.checks.connector.relations import Mismatch, SidePair, is_loopback, is_unspecified
from pytest_nixl.checks.connector.rules import RULES, ConnectorRule
from pytest_nixl.checks.connector.settings_read import TRANSFER_VARIABLES, misspelt_variables, unknown_options
from pytest_nixl.core.redaction import hider, redact_value
from pytest_nixl.core.strict import escape
from pytest_nixl.model.verdicts import Verdict

_READERS: dict[str, Callable[[ConfiguredEngine], dict[str, FieldValue]]] = {"vLLM": read_vllm, "SGLang": read_sglang}
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST"
#: The most characters of a reason, which may name several settings.
_MOST_REASON = 600


@dataclass(frozen=True)
class RuleResult:
    """The judgement of one rule.

    :param prefill: prefill's value as a message shows it, without secrets; likewise ``decode``.
    :param why: what is wrong; empty if nothing is.
    :param slow: what makes the transfer slow although it works; empty if nothing does.
    """

    rule: ConnectorRule
    verdict: Verdict
    prefill: str
    decode: str
    why: str = ""
    remedy: str = ""
    slow: str = ""

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
    def unjudged_options(self) -> tuple[str, ...]:
        """The options of which no rule knows."""
        names = (name for side in self.pair.sides for name, reason in unknown_options(side).items() if not reason)
        return tuple(sorted(set(names)))

    @property
    def unread(self) -> tuple[str, ...]:
        """Sentences about variables that the files do not contain, or that other readers of them read differently."""
        sentences = []
        for name, side in (("prefill", self.pair.prefill), ("decode", self.pair.decode)):
            for source in side.source.unread:
                origin = source if source.startswith(OPTIONS_OF) else f"variables from {source}"
                sentences.append(f"{name} has {origin}, which is not in the file")
            sentences += [f"{name} has {remark}" for remark in side.source.remarks]
            lmcache = side.values.get("LMCACHE_CONFIG_FILE")
            if lmcache is not None and lmcache.is_set:
                sentences.append(
                    f"{name} has {OPTIONS_OF} {escape(lmcache.text)} (LMCACHE_CONFIG_FILE), which is not read"
                )
        return tuple(sentences)


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
    if any(source.launch.script and source.launch.environment for source in (prefill, decode)):
        # One script sets variables, so that scripts are where these two engines get them from.
        prefill, decode = _with_environment(prefill), _with_environment(decode)
    sides = _side(prefill), _side(decode)
    one_host = one_host or _on_one_host(*sides)
    pair = SidePair(*sides, one_host=one_host, plugins=plugins)
    hiders = [hider(source.launch.environment) for source in (prefill, decode)]

    def hide(text: str) -> str:
        return hiders[1](hiders[0](text))

    rules = [rule for rule in RULES if _applies(rule, pair)]
    return ConnectorComparison(pair, tuple(_result(rule, pair, hide) for rule in rules))


def _with_environment(source: ConfiguredEngine) -> ConfiguredEngine:
    complete = bool(source.launch.script) and not source.unread
    return replace(source, launch=replace(source.launch, has_environment=True)) if complete else source


def _side(source: ConfiguredEngine) -> EngineSide:
    values = read_fields(source.launch, COMMON_FIELDS)
    if source.launch.is_read:
        values |= _READERS[source.launch.engine](source)
    if source.launch.dynamo and source.launch.is_read:
        values |= read_dynamo(source)
    side = EngineSide(source, values)
    engine = side.engine or source.launch.launcher
    name = f"{engine} under Dynamo" if side.dynamo else engine
    values["engine"] = FieldValue(name)
    values["image"] = FieldValue(source.image, is_set=bool(source.image), is_readable=bool(source.image))
    efa = source.efa or 0
    values["EFA devices"] = FieldValue(str(efa), is_set=efa > 0, is_readable=source.efa is not None)
    named = ", ".join(f"{package} {version}" for package, version in sorted(named_releases(side).items()))
    values["installed releases"] = FieldValue(named, is_set=bool(named), is_readable=bool(named))
    counts = {} if source.resources is None else source.resources.requests
    requests = ", ".join(f"{resource}: {count}" for resource, count in counts.items())
    for field in ("GPUs", "RDMA devices"):
        values[field] = FieldValue(requests, is_set=bool(requests), is_readable=source.resources is not None)
    opened = ", ".join(f"{port.setting} {port.first}" for port in readable_ports(side))
    values["ports"] = FieldValue(opened, is_set=bool(opened))
    unread = ", ".join(text for text in source.unread if text.startswith(OPTIONS_OF))
    values["--config"] = FieldValue(unread, is_set=bool(unread))
    environment = source.launch.environment
    misspelt = misspelt_variables(environment)
    names = sorted(name for name in environment if name.startswith(TRANSFER_VARIABLES) or name in misspelt)
    values["settings"] = FieldValue(", ".join(names), is_set=bool(names))
    steering = [
        f"{setting.variable}={environment[setting.variable]}"
        for setting in SLOW_SETTINGS
        if environment.get(setting.variable)
    ]
    absent = [name for name, reason in unknown_options(side).items() if reason]
    values["options"] = FieldValue(", ".join(absent), is_set=bool(absent), is_readable=source.launch.has_options)
    values["slow settings"] = FieldValue(", ".join(steering), is_set=bool(steering))
    return side


def _on_one_host(prefill: EngineSide, decode: EngineSide) -> bool:
    """Return whether both sides are in one pod, or tell each other the same address."""
    if prefill.source.pod is not None and prefill.source.pod == decode.source.pod:
        return True
    hosts = [side.values.get(_SIDE_CHANNEL, FieldValue("", is_set=False)) for side in (prefill, decode)]
    if _may_share_host(prefill) and _may_share_host(decode) and _differ(prefill, decode):
        return True
    return all(
        host.is_set
        and host.is_known
        and host.text == hosts[0].text
        and not is_loopback(host.text)
        and not is_unspecified(host.text)
        for host in hosts
    )


def _may_share_host(side: EngineSide) -> bool:
    """Return whether a side tells no address by which another host could reach it, outside a pod."""
    host = side.values.get(_SIDE_CHANNEL) or side.values.get("--host", FieldValue("localhost"))
    reaches_itself = is_loopback(host.text or "localhost") or is_unspecified(host.text)
    return side.source.resources is None and host.is_known and reaches_itself


def _differ(prefill: EngineSide, decode: EngineSide) -> bool:
    """Return whether two sides choose different GPUs and different ports. The first GPU need not be chosen."""
    launches = [side.source.launch for side in (prefill, decode)]
    visible = [launch.environment.get("CUDA_VISIBLE_DEVICES") for launch in launches]
    first = [launch.options.get("--base-gpu-id", ["0"])[-1] for launch in launches]
    ports = [side.values.get("--port", FieldValue("")).text for side in (prefill, decode)]
    return ports[0] != ports[1] and (first[0] != first[1] or (None not in visible and visible[0] != visible[1]))


def _applies(rule: ConnectorRule, pair: SidePair) -> bool:
    sides = (pair.prefill, pair.decode)
    if rule.releases is not None and any(rule.releases.excludes(side) for side in sides):
        return False
    kinds = [side.values.get("connector kind", FieldValue("")).text for side in sides]
    if rule.kinds and not all(kind in rule.kinds or not kind for kind in kinds):
        return False
    if rule.kinds == (LMCACHE,) and LMCACHE not in kinds:
        return False
    if rule.engine == "Dynamo":
        return all(side.dynamo for side in sides) and any(rule.field in side.values for side in sides)
    if rule.direct and any(side.dynamo for side in sides):
        return False
    return not rule.engine or all(side.engine == rule.engine for side in sides)


def _result(rule: ConnectorRule, pair: SidePair, hide: Callable[[str], str]) -> RuleResult:
    values = pair.values(rule.field)
    prefill, decode = (_shown(rule.field, value, hide) for value in values)
    readable = all(value.is_readable for value in values)
    wrong = rule.relation(pair, rule.field) if readable else _by_default(rule, pair)
    if wrong is None:
        return RuleResult(rule, Verdict.PASS if readable else Verdict.NOT_APPLICABLE, prefill, decode)
    reason, remedy = (escape(hide(text), _MOST_REASON) for text in (wrong.reason, wrong.remedy or rule.remedy))
    if not readable:
        reason += f", unless the containers set {rule.field}"
        return RuleResult(rule, Verdict.INCONCLUSIVE, prefill, decode, reason, remedy)
    if rule.releases is not None:
        reason += f" ({rule.releases})"
    return RuleResult(rule, wrong.verdict, prefill, decode, reason, remedy, wrong.slow)


def _by_default(rule: ConnectorRule, pair: SidePair) -> Mismatch | None:
    """Return what is wrong with a variable that neither file contains, if nothing else sets it; None: nothing is."""
    values = pair.values(rule.field)
    if not rule.field.isupper() or any(value.is_readable or not value.text for value in values):
        return None
    prefill, decode = (
        replace(side, values={**side.values, rule.field: FieldValue(value.text, is_set=False)})
        for side, value in zip(pair.sides, values, strict=True)
    )
    return rule.relation(replace(pair, prefill=prefill, decode=decode), rule.field)


def _shown(field: str, value: FieldValue, hide: Callable[[str], str]) -> str:
    if not value.is_readable or "\u00a0" in value.text or value.text == f"$({field})":  # known only where it runs
        return "a value that the file does not contain"
    if value.is_set:
        return escape(redact_value(field, hide(value.text))) or "an empty value"
    return f"none (default {value.text})" if value.text else "none"
