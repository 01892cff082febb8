# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl telemetry``: judge the metrics of a live NIXL, vLLM or Dynamo."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.checks.telemetry.live_endpoint import EndpointValue
    from pytest_nixl.host.live_nixl import LiveNixl

#: Seconds for the whole answer.
_TIMEOUT = 10.0
_MOST_SECONDS = 3600.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    telemetry = commands.add_parser(
        "telemetry",
        help="judge the metrics of a live NIXL, vLLM or Dynamo: failed transfers, expired requests, times of transfers",
        description="Read the Prometheus endpoint of a live NIXL, vLLM or Dynamo once, and print failed transfers, "
        "expired requests and the mean times to post and to make a transfer since the process started. On the engine's "
        "host it also prints the backends of NIXL that its processes use, and the RDMA devices that they have opened. "
        "The command "
        "exits with 1 if a value is above its bound. With --gate it also does if a bounded value is unknown, or if no "
        "bound is given.",
    )
    telemetry.add_argument("url", metavar="URL", help="the endpoint, such as http://HOST:9090/metrics")
    telemetry.add_argument("--max-failed", metavar="N", type=_bound, help="the most failed transfers")
    telemetry.add_argument("--max-expired", metavar="N", type=_bound, help="the most requests whose KV blocks expired")
    telemetry.add_argument(
        "--max-post-us", metavar="N", type=_bound, help="the longest mean time to post a transfer, in microseconds"
    )
    telemetry.add_argument(
        "--max-transfer-us", metavar="N", type=_bound, help="the longest mean time of a transfer, in microseconds"
    )
    telemetry.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=_TIMEOUT,
        help=f"the deadline of the whole answer (default: {_TIMEOUT:g})",
    )  # fmt: skip
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
    from pytest_nixl.checks.telemetry.live_endpoint import endpoint_values
    from pytest_nixl.checks.telemetry.scrape import metrics_url, scrape
    from pytest_nixl.model.verdicts import Outcome, outcome

    url = metrics_url(arguments.url)
    values = endpoint_values(
        scrape(url, arguments.timeout),
        max_failed=arguments.max_failed,
        max_expired=arguments.max_expired,
        max_post_us=arguments.max_post_us,
        max_transfer_us=arguments.max_transfer_us,
    )
    processes, unknown = _processes(url)
    bounded = [each for each in values if each.at_most is not None]
    failed = [each for each in bounded if outcome(each.judgement.verdict, gate=arguments.gate) is Outcome.FAIL]
    if arguments.json:
        plain = _plain(url, values, _verdict(bounded, failed))
        print(json.dumps({**plain, "processes": [asdict(each) for each in processes], "why": unknown}, indent=1))
    else:
        for each in values:
            print(each.judgement)
        for process in processes:
            print(process)
        if unknown:
            print(f"transport: unknown, because {unknown}")
        print(f"{_verdict(bounded, failed)}: {_reason(bounded, failed)}")
    return int(bool(failed) or (arguments.gate and not bounded))


def _processes(url: str) -> tuple[list[LiveNixl], str]:
    """Return the processes of the endpoint that have loaded NIXL, if it is on this host, or why they are not known."""
    from urllib.parse import urlsplit

    from pytest_nixl.core.addresses import ask_addresses
    from pytest_nixl.host.live_nixl import live_nixl

    parts = urlsplit(url)
    here = {text.partition("/")[0] for listed in ask_addresses().values() for text in listed} | {"localhost"}
    if parts.hostname not in here:
        return [], "the endpoint is not an address of this host: run the command beside the engine"
    return live_nixl(parts.port or (443 if parts.scheme == "https" else 80))


def _verdict(bounded: list[EndpointValue], failed: list[EndpointValue]) -> str:
    from pytest_nixl.model.verdicts import NOTHING_CHECKED, Verdict

    if failed:
        return "FAIL"
    return "PASS" if any(each.judgement.verdict is Verdict.PASS for each in bounded) else NOTHING_CHECKED


def _reason(bounded: list[EndpointValue], failed: list[EndpointValue]) -> str:
    if failed:
        return f"{len(failed)} of {len(bounded)} bounded values do not keep their bounds"
    if not bounded:
        return "no bound was given: add --max-failed, --max-expired, --max-post-us or --max-transfer-us"
    if _verdict(bounded, failed) != "PASS":
        return f"none of {len(bounded)} bounded values is known"
    return f"no bounded value of {len(bounded)} is above its bound"


def _plain(url: str, values: list[EndpointValue], verdict: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "url": url,
        "values": [
            {
                "name": each.name,
                "verdict": each.judgement.verdict.value,
                "value": each.value if each.value is not None and math.isfinite(each.value) else None,
                "unit": each.unit.strip(),
                "at_most": each.at_most,
                "source": each.source,
            }
            for each in values
        ],
    }
