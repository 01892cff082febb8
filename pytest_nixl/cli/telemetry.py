# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl telemetry``: say whether a live NIXL, vLLM, SGLang or Dynamo uses NIXL, and whether it works."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pytest_nixl.checks.telemetry.exporters import metrics_url, read_page, scrape
from pytest_nixl.checks.telemetry.live_endpoint import answer_questions, endpoint_values
from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.host.loaded_libraries import live_nixl
from pytest_nixl.model.verdicts import NOTHING_CHECKED, Outcome, Verdict, outcome

if TYPE_CHECKING:
    from pytest_nixl.checks.telemetry.live_endpoint import Answer, EndpointValue
    from pytest_nixl.core.metrics_text import MetricSample
    from pytest_nixl.host.loaded_libraries import LiveNixl

#: Seconds for the whole answer.
_TIMEOUT = 10.0
_MOST_SECONDS = 3600.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    telemetry = commands.add_parser(
        "telemetry",
        help="say of the metrics of a live NIXL, vLLM, SGLang or Dynamo whether NIXL is used, fails or is slow",
        description="Read the Prometheus endpoint of a live NIXL, vLLM, SGLang or Dynamo once, or a page of metrics "
        "from a file, and answer three questions: is NIXL used at all, does it fail, is it slow? A page that cannot "
        "answer one says so. Then print failed transfers, expired requests and the mean times to post and to make a "
        "transfer since the process started. On the engine's host it also prints the backends of NIXL that its "
        "processes use, and the RDMA devices that they have opened. The command exits with 1 if a value is above its "
        "bound. With --gate it also does if a bounded value is unknown, or, without any bound, if a question is not "
        "answered.",
    )
    telemetry.add_argument(
        "url", metavar="URL", help="the endpoint, such as http://HOST:9090/metrics, or a file with what it answered"
    )
    telemetry.add_argument("--max-failed", metavar="N", type=_bound, help="the most failed transfers")
    telemetry.add_argument("--max-expired", metavar="N", type=_bound, help="the most requests whose KV blocks expired")
    telemetry.add_argument(
        "--max-post-us", metavar="N", type=_bound, help="the longest mean time to post a transfer, in microseconds"
    )
    telemetry.add_argument(
        "--max-transfer-us", metavar="N", type=_bound, help="the longest mean time of a transfer, in microseconds"
    )
    telemetry.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=_TIMEOUT,
        help=f"the deadline of the whole answer (default: {_TIMEOUT:g})",
    )
    telemetry.add_argument("--gate", action="store_true", help="also fail bounded values that are unknown")
    telemetry.add_argument("--json", action="store_true", help="print JSON")
    telemetry.set_defaults(run=_run)


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0")
    return value


def _seconds(text: str) -> float:
    value = _bound(text)
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds up to {_MOST_SECONDS:g}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    where, samples, (processes, unknown) = _read(arguments)
    answers = answer_questions(samples)
    values = endpoint_values(
        samples,
        max_failed=arguments.max_failed,
        max_expired=arguments.max_expired,
        max_post_us=arguments.max_post_us,
        max_transfer_us=arguments.max_transfer_us,
    )
    bounded = [value for value in values if value.at_most is not None]
    judged = [value.judgement.verdict for value in bounded] or [answer.verdict for answer in answers]
    failed = [verdict for verdict in judged if outcome(verdict, gate=arguments.gate) is Outcome.FAIL]
    verdict = _verdict(judged, failed)
    if arguments.json:
        plain = _plain(where, answers, values, verdict)
        print(json.dumps({**plain, "processes": [asdict(process) for process in processes], "why": unknown}, indent=1))
    else:
        for line in (*answers, *(value.judgement for value in values), *processes):
            print(line)
        if unknown:
            print(f"transport: unknown, because {unknown}")
        print(f"{verdict}: {_reason(bounded, len(judged), len(failed), verdict)}")
    return int(bool(failed))


def _read(arguments: argparse.Namespace) -> tuple[str, list[MetricSample], tuple[list[LiveNixl], str]]:
    """Return the URL or file, its metrics, and the processes of the endpoint, or why they are not known."""
    file = Path(arguments.url)
    if file.is_file():
        return arguments.url, read_page(file), ([], "a file does not say which process wrote it")
    url = metrics_url(arguments.url)
    return url, scrape(url, arguments.timeout), _processes(url)


def _processes(url: str) -> tuple[list[LiveNixl], str]:
    """Return the processes of the endpoint that have loaded NIXL, if it is on this host, or why they are not known."""
    parts = urlsplit(url)
    local_addresses = {text.partition("/")[0] for listed in ask_addresses().values() for text in listed} | {"localhost"}
    if parts.hostname not in local_addresses:
        return [], "the endpoint is not an address of this host: run the command beside the engine"
    return live_nixl(parts.port or (443 if parts.scheme == "https" else 80))


def _verdict(judged: list[Verdict], failed: list[Verdict]) -> str:
    if failed:
        return "FAIL"
    if Verdict.WARN in judged:
        return "WARN"
    return "PASS" if Verdict.PASS in judged else NOTHING_CHECKED


def _reason(bounded: list[EndpointValue], judged: int, failed: int, verdict: str) -> str:
    if not bounded and failed:
        return f"{failed} of {judged} questions {'has' if failed == 1 else 'have'} no answer"
    if not bounded:
        return {
            "WARN": "at least one answer needs a look: see its remedy",
            "PASS": "no answer is a warning; bounds for an alert: --max-failed, --max-expired",
        }.get(verdict, "this page answers none of the questions")
    if failed:
        return f"{failed} of {len(bounded)} bounded values do not keep their bounds"
    if verdict != "PASS":
        return f"none of {len(bounded)} bounded values is known"
    return f"no bounded value of {len(bounded)} is above its bound"


def _plain(url: str, answers: list[Answer], values: list[EndpointValue], verdict: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "answers": [
            {
                "question": answer.question,
                "verdict": answer.verdict.value,
                "text": answer.text,
                "remedy": answer.remedy,
            }
            for answer in answers
        ],
        "url": url,
        "values": [
            {
                "name": value.name,
                "verdict": value.judgement.verdict.value,
                "value": value.value if value.value is not None and math.isfinite(value.value) else None,
                "unit": value.unit.strip(),
                "at_most": value.at_most,
                "source": value.source,
            }
            for value in values
        ],
    }
