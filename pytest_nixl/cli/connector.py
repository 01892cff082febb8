# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl connector``: compare the configuration of the prefill and the decode side of vLLM, SGLang or Dynamo."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.connector.rules import ConfigurationLayer
from pytest_nixl.core.sentences import named
from pytest_nixl.core.strict import escape
from pytest_nixl.model.verdicts import Outcome, Verdict, outcome

if TYPE_CHECKING:
    from pytest_nixl.checks.connector.comparison import ConnectorComparison, RuleResult


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    connector = commands.add_parser(
        "connector",
        help="compare the configuration of a prefill and a decode engine, and name each field that must match and "
        "does not",
        description="Read how the prefill side and the decode side of vLLM (NixlConnector) or SGLang are started, also "
        "under Dynamo, and name each field that must match and does not, in the order in which to correct them: "
        "infrastructure, NIXL, connector. The command connects to nothing and looks up no name. It exits with 1 if a "
        "field differs that must match.",
    )
    form = "a pod spec or Compose file (YAML or JSON), an env file, a shell command, or a kv_transfer_config object"
    connector.add_argument("prefill", metavar="PREFILL", help=f"{form}; FILE#NAME chooses one of several containers")
    connector.add_argument("decode", metavar="DECODE", help="the same of the decode side")
    connector.add_argument(
        "--one-host",
        action="store_true",
        help="both sides run on one host: loopback addresses are right, and ports must differ",
    )
    connector.add_argument(
        "--plugin-dir",
        metavar="DIR",
        type=Path,
        help="the folder of NIXL's plugins in the engines' image, to check that the named backends are built in",
    )
    connector.add_argument("--gate", action="store_true", help="also fail undecided fields, as --nixl-gate does")
    connector.add_argument(
        "-v", "--verbose", action="store_true", help="also list the options of the engines that no rule reads"
    )
    connector.add_argument("--json", action="store_true", help="print JSON")
    connector.set_defaults(run=_connector)


def _connector(arguments: argparse.Namespace) -> int:
    plugins = None if arguments.plugin_dir is None else _plugins(arguments.plugin_dir)
    compared = compare_connectors(
        read_engine(arguments.prefill), read_engine(arguments.decode), one_host=arguments.one_host, plugins=plugins
    )
    failed = any(outcome(result.verdict, gate=arguments.gate) is Outcome.FAIL for result in compared.results)
    print(
        json.dumps(_plain(compared, failed), indent=1)
        if arguments.json
        else "\n".join(_lines(compared, failed, arguments.verbose))
    )
    return int(failed)


def _plugins(folder: Path) -> frozenset[str]:
    """Return the names of the plugins in a folder. :raises OSError: if it cannot be read."""
    names = (re.fullmatch(r"libplugin_(\w+)\.so", path.name) for path in folder.iterdir())
    return frozenset(match[1] for match in names if match is not None)


def _lines(compared: ConnectorComparison, failed: bool, verbose: bool) -> Iterator[str]:
    for name, side in (("prefill", compared.pair.prefill), ("decode", compared.pair.decode)):
        yield f"{name + ':':<9}{side.source.label} ({side.values['engine'].text})"
    for sentence in compared.unread:
        yield f"note:    {sentence}"
    if verbose and compared.unjudged_options:
        yield f"note:    not read: {', '.join(map(escape, compared.unjudged_options))} (no rule is about them)"
    judged = [result for result in compared.results if result.verdict is not Verdict.NOT_APPLICABLE]
    for layer in ConfigurationLayer:
        for result in (
            finding for finding in judged if finding.rule.layer is layer and finding.verdict is not Verdict.PASS
        ):
            yield f"{result.verdict} {layer.value}: {result.sentence}"
            yield f"    remedy: {result.remedy}"
            yield f"    source: {result.rule.source}"
    skipped = [result.rule.field for result in compared.results if result.verdict is Verdict.NOT_APPLICABLE]
    yield _summary(judged, skipped, failed)
    if not failed:
        yield f"next: {next_step(compared)}"


def _summary(judged: list[RuleResult], skipped: list[str], failed: bool) -> str:
    counts = {verdict: sum(result.verdict is verdict for result in judged) for verdict in Verdict}
    suffix = f" (not in both files: {named(skipped, 6)})" if skipped else ""
    unproven = counts[Verdict.WARN] + counts[Verdict.INCONCLUSIVE]
    doubt = f", and {unproven} may" if unproven else ""
    slow = "".join(f"{text}; " for text in dict.fromkeys(result.slow for result in judged if result.slow))
    if counts[Verdict.FAIL]:
        order = "correct them from the top: infrastructure, NIXL, connector"
        return f"FAIL: {counts[Verdict.FAIL]} of {len(judged)} fields do not match{doubt}; {slow}{order}{suffix}"
    if unproven:
        verdict = "FAIL" if failed else "PASS"
        return f"{verdict}: {slow}no field is wrong for sure, but {unproven} of {len(judged)} may be: see above{suffix}"
    fields = "the one field that both have" if len(judged) == 1 else f"all {len(judged)} fields"
    return f"PASS: prefill and decode match in {fields}{suffix}"


def next_step(compared: ConnectorComparison) -> str:
    """Return what to do after a comparison without a mismatch, with prefill's address if the file has it."""
    prefill, quick = compared.pair.prefill, "on both hosts: pytest-nixl run quick"
    host, port = (prefill.values.get(f"VLLM_NIXL_SIDE_CHANNEL_{part}") for part in ("HOST", "PORT"))
    if host is None or port is None or prefill.values["connector kind"].text not in ("NIXL", ""):
        return f"on both hosts: pytest-nixl doctor; then {quick}"
    known = host.is_set and host.is_known and port.is_known
    address = f"{host.text}:{port.text}" if known else f"HOST:{port.text if port.is_known else 'PORT'}"
    prefills = "" if known else " (HOST: prefill's address)"
    return f"on decode's host: pytest-nixl doctor --side-channel {address}{prefills}; then {quick}"


def _plain(compared: ConnectorComparison, failed: bool) -> dict[str, object]:
    sides = {"prefill": compared.pair.prefill, "decode": compared.pair.decode}
    return {
        "verdict": "FAIL" if failed else "PASS",
        **{name: {"source": side.source.label, "engine": side.values["engine"].text} for name, side in sides.items()},
        "one_host": compared.pair.one_host,
        "notes": list(compared.unread),
        "unread_options": list(compared.unjudged_options),
        "slow": list(dict.fromkeys(result.slow for result in compared.results if result.slow)),
        "next": "" if failed else next_step(compared),
        "fields": [
            {
                "field": result.rule.field,
                "layer": result.rule.layer.value,
                "verdict": result.verdict.value,
                "requirement": result.rule.requirement,
                "prefill": result.prefill,
                "decode": result.decode,
                "why": result.why,
                "remedy": result.remedy,
                "source": result.rule.source,
            }
            for result in compared.results
        ],
    }
