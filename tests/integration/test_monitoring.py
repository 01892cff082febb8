# SPDX-License-Identifier: Apache-2.0
"""The dashboard, the alerts and the recipe for metrics, with a real Prometheus and a real Pushgateway."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from helpers.cli_run import ROOT, environment
from helpers.doc_blocks import blocks
from helpers.metrics_server import metrics_server
from helpers.monitoring import SECONDS, Prometheus, prometheus, promtool, pushgateway
from helpers.needs import program
from helpers.records import key, record

from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import metrics_text
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
(RECIPE,) = (block for block in blocks() if "$PUSHGATEWAY" in block.text)
SUMMARY = tuple(Figure(f"figure-{unit}", 1.0, unit, {"backend": "UCX"}) for unit in ("s", "B", "B/s", "1/s", "1"))
#: The record has its own date; a run of today ended when the tests began.
TODAY = datetime.now(timezone.utc)


def run(*results: Result, when: datetime = TODAY, factor: float = 1.0) -> RecordedRun:
    """A recorded run with two rows, whose floor is 3 GB/s and whose ceiling is 13 GB/s."""
    rows = {key("64KiB", op): [4.0 * factor + 0.01 * launch for launch in range(5)] for op in ("WRITE", "READ")}
    measured = Result("notifications", "n.py::n", Verdict.PASS, measured=SUMMARY)
    data = record("image:1", rows, results=(measured, *results), extra={"floor": 3e9, "ceiling": 13e9})
    return replace(parse_recorded(data, "run"), when=when)


def regressed() -> RunReport:
    """The report of a run whose rows lost half of their bandwidth, and are still above their floor."""
    now = run(factor=0.8)
    compared = compare_runs(run(), now, 0.05)
    return RunReport(replace(now, results=(*now.results, *compared.results)), compared)


REPORTS = {
    "healthy": RunReport(run()),
    "failed": RunReport(run(Result("bandwidth", "x", Verdict.FAIL, "below its floor"), factor=0.5)),
    "old": RunReport(run(when=datetime(2026, 3, 2, tzinfo=timezone.utc))),
}
#: The run that is pushed has the name of this host, because the recipe says so.
PUSHED = os.uname().nodename
ALERTS = {
    ("NixlRunFailed", "failed"),
    ("NixlRowBelowFloor", "failed"),
    ("NixlRunFailed", PUSHED),
    ("NixlRunRegressed", PUSHED),
    ("NixlRunOld", "old"),
}


def push(url: str, report: RunReport, directory: Path) -> None:
    """Push the metrics of a run with the command of the docs, as it is printed."""
    (directory / "nixl.prom").write_text(metrics_text(report))
    variables = {name: value for name, value in environment().items() if not name.lower().endswith("_proxy")}
    program("curl")
    subprocess.run(
        ["bash", "-e", "-c", RECIPE.text],
        cwd=directory,
        env={**variables, "PUSHGATEWAY": url},
        timeout=SECONDS,
        check=True,
    )


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the shipped configuration and alerts that scrapes four runs, one of them pushed."""
    directory = tmp_path_factory.mktemp("monitored")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    with ExitStack() as stack:
        gateway = stack.enter_context(pushgateway(directory))
        push(gateway, regressed(), directory)
        jobs["pushgateway"]["static_configs"] = [{"targets": [gateway.removeprefix("http://")]}]
        jobs["node"]["static_configs"] = []
        for name, report in REPORTS.items():
            port = stack.enter_context(metrics_server(metrics_text(report).encode))
            target = {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
            jobs["node"]["static_configs"].append(target)
        config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
        path = directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        yield stack.enter_context(prometheus(path, directory))


def queries() -> list[str]:
    """Every query of the dashboard, of all instances and rows, as Grafana asks them first."""
    results = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = {item["name"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"}
    used = {name for text in results for name in re.findall(r"\$(\w+)", text)}
    assert used == variables
    return [re.sub(r"\$\w+", ".*", text) for text in results]


@pytest.mark.long
def test_every_query_of_the_dashboard_has_data(monitored: Prometheus) -> None:
    expressions = queries()
    assert len(expressions) > 15
    monitored.eventually(lambda: [expression for expression in expressions if not monitored.query(expression)], [])
    assert monitored.query(expressions[0].replace("nixl_run_passed", "nixl_run_past")) == []
    for item in DASHBOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", item["query"]["query"])
        assert match is not None
        assert match[2] == item["name"]
        assert monitored.get(f"label/{match[2]}/values", **{"match[]": match[1]})


@pytest.mark.long
def test_every_metric_of_a_report_is_in_the_dashboard(monitored: Prometheus) -> None:
    """A new metric needs its place in the dashboard."""
    names = {
        name
        for report in (*REPORTS.values(), regressed())
        for name in re.findall(r"# TYPE (\w+)", metrics_text(report))
    }
    assert len(names) > 12
    assert {name for name in names if not any(re.search(rf"\b{name}\b", text) for text in queries())} == set()


@pytest.mark.long
def test_alerts_fire_for_the_runs_that_they_are_for_and_not_for_a_healthy_one(monitored: Prometheus) -> None:
    instances = {*REPORTS, PUSHED}
    monitored.eventually(
        lambda: {entry["metric"]["instance"] for entry in monitored.query("nixl_run_passed")}, instances
    )
    scraped = time.time()

    def firing() -> set[tuple[str, str]]:
        """The alerts that fire by an evaluation that saw all runs."""
        (group,) = monitored.get("rules")["groups"]
        if any(datetime.fromisoformat(_micro(rule["lastEvaluation"])).timestamp() < scraped for rule in group["rules"]):
            return set()
        return {
            (rule["name"], alert["labels"].get("instance", ""))
            for rule in group["rules"]
            for alert in rule["alerts"]
            if alert["state"] == "firing"
        }

    monitored.eventually(firing, ALERTS)


def _micro(text: str) -> str:
    """A time of Go, with nanoseconds and possibly Z, as each Python reads it."""
    return re.sub(r"\.(\d{1,6})\d*", lambda found: f".{found[1]:0<6}", text).replace("Z", "+00:00")


def test_a_pushed_run_replaces_the_one_before_it_whole(tmp_path: Path) -> None:
    """With POST the metrics that the later run does not have would stay, and so would their alert."""
    with pushgateway(tmp_path) as url, requests.Session() as http:
        http.trust_env = False
        push(url, regressed(), tmp_path)
        assert re.search(r"^nixl_regressed\{.*\} 1$", http.get(f"{url}/metrics").text, re.MULTILINE)
        push(url, REPORTS["healthy"], tmp_path)
        text = http.get(f"{url}/metrics").text
        assert "nixl_regressed" not in text
        assert f'nixl_run_passed{{instance="{PUSHED}",job="nixl"}} 1' in text


@pytest.mark.long
@pytest.mark.parametrize("name", [*REPORTS, "regressed"])
def test_promtool_accepts_the_metrics(name: str) -> None:
    done = promtool("check", "metrics", text=metrics_text(REPORTS.get(name) or regressed()))
    assert (done.returncode, done.stdout) == (0, "")


def test_promtool_accepts_rules_and_configuration_and_sees_each_alert_fire() -> None:
    for expected in (
        ("check", "rules", "--lint=all", "--lint-fatal", MONITORING / "alerts.yml"),
        ("check", "config", MONITORING / "prometheus.yml"),
        ("test", "rules", ROOT / "tests" / "alerts.test.yml"),
    ):
        done = promtool(*expected)
        assert done.returncode == 0, done.stdout
    tested = set(re.findall(r"alertname: (\w+)\n *exp_alerts", (ROOT / "tests" / "alerts.test.yml").read_text()))
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == tested


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """The fields of a JSON document that another one does not have, or has with another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            path_of_value
            for name, value in given.items()
            for path_of_value in lost(value, kept.get(name), f"{path}.{name}")
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [
            path_of_value
            for number, (value, other) in pairs
            for path_of_value in lost(value, other, f"{path}[{number}]")
        ]
    return [] if given == kept else [path]


def through_grafana(document: dict[str, Any]) -> Any:
    """The document as the types that Grafana generates from its schema read and write it."""
    # They need Python 3.11.
    if sys.version_info < (3, 11):
        pytest.skip("grafana-foundation-sdk needs Python 3.11")
    try:
        plugins = importlib.import_module("grafana_foundation_sdk.cog.plugins")
        models = importlib.import_module("grafana_foundation_sdk.models.dashboard")
        encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip("needs grafana-foundation-sdk")
    plugins.register_default_plugins()
    return json.loads(json.dumps(models.Dashboard.from_json(document), cls=encoder.JSONEncoder))


def test_grafanas_types_know_every_field_of_the_dashboard() -> None:
    """No Grafana can be installed here: this is what is known of its schema."""
    assert lost(DASHBOARD, through_grafana(DASHBOARD)) == []
