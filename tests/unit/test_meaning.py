# SPDX-License-Identifier: Apache-2.0
"""What a slip of one word would change: the other side, one element less, the last instead of the first."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.etcd import running_etcd
from helpers.fake_sysfs import Tree, facts_of
from helpers.records import KEY, ROW, record
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl import cli
from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.checks.doctor.network import mtu
from pytest_nixl.core.metrics_text import read_metrics
from pytest_nixl.core.rdma_fault import allows_cuda, wants_rdma
from pytest_nixl.host.etcd import read_etcd
from pytest_nixl.host.network import read_network
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import Profile, parse_profile
from pytest_nixl.model.device_counters import Carrier, CarrierBytes
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.figure import (
    BANDWIDTH,
    BYTES,
    COUNT,
    FIGURE_KINDS,
    PER_SECOND,
    SECONDS,
    Figure,
    FigureUnit,
)
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.nixlbench_table import read_files, read_output
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, Samples
from pytest_nixl.model.verdicts import SEVERITY, Judgement, Verdict, most_severe
from pytest_nixl.nixl.installed import import_fault
from pytest_nixl.report.files import metrics_text
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.benchmark import described, rounds
from pytest_nixl.session.gate import failing_results, missing_results, refuse_silence
from pytest_nixl.session.outcome import Reruns
from pytest_nixl.session.requested_links import requested_rows, row_of
from pytest_nixl.session.run import Run
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded


def profile(*required: str) -> Profile:
    checks = f"[required]\nchecks = {list(required)}\n" if required else ""
    return parse_profile(f'[profile]\nname = "mine"\nsummary = "s"\n{checks}'.encode(), "mine")


def recorded(*results: Result) -> RecordedRun:
    return parse_recorded(record("image:1", {KEY: [1.0]}, results=results), "r.json")


def engines(folder: Path, prefill: dict[str, str], decode: dict[str, str]) -> list[str]:
    """Write a Deployment of vLLM for each side with more variables; return both files."""
    paths = []
    for role, kind, more in (("prefill", "kv_producer", prefill), ("decode", "kv_consumer", decode)):
        transfer = {"kv_connector": "NixlConnector", "kv_role": kind, "engine_id": role, "kv_buffer_device": "cuda"}
        variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": f"10.0.0.{len(role)}", "VLLM_KV_CACHE_LAYOUT": "HND", **more}
        container = {
            "name": "engine",
            "image": "vllm/vllm-openai:v0.14.0",
            "command": ["vllm", "serve"],
            "args": ["--model", "Qwen/Qwen3-32B", "--block-size", "64", "--kv-transfer-config", json.dumps(transfer)],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
        }
        path = folder / f"{role}.json"
        spec = {"template": {"spec": {"containers": [container]}}}
        path.write_text(json.dumps({"kind": "Deployment", "metadata": {"name": role}, "spec": spec}))
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("secret_of", ["prefill", "decode"])
@pytest.mark.parametrize("shown_by", ["prefill", "decode"])
@pytest.mark.parametrize("variable", ["UCX_TLS", "NIXL_ETCD_NAMESPACE", "NIXL_BACKEND"])
def test_a_secret_of_either_engine_is_shown_of_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], secret_of: str, shown_by: str, variable: str
) -> None:
    sides: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}
    sides[secret_of]["HF_TOKEN"] = "hf_abcdef"
    sides[shown_by][variable] = "hf_abcdef"
    paths = engines(tmp_path, **sides)
    for options in ([], ["--json"]):
        cli.main(["connector", *paths, *options])
        out = capsys.readouterr().out
        assert "***" in out
        assert "hf_abcdef" not in out


@pytest.mark.parametrize(
    ("decode", "verdict"),
    [
        ("http://etcd:2379", Verdict.PASS),
        ("http://etcd.default.svc:2379", Verdict.INCONCLUSIVE),
        ("http://etcd.default.svc:2380", Verdict.FAIL),
        ("http://other.default.svc:2379", Verdict.FAIL),
        ("http://etcd.default.svc:2379,http://etcd:2379", Verdict.FAIL),
    ],
)
def test_etcd_may_have_a_longer_name_but_not_another_port(tmp_path: Path, decode: str, verdict: Verdict) -> None:
    paths = engines(tmp_path, {"NIXL_ETCD_ENDPOINTS": "http://etcd:2379"}, {"NIXL_ETCD_ENDPOINTS": decode})
    results = compare_connectors(*map(read_engine, paths)).results
    assert [result.verdict for result in results if result.rule.field == "NIXL_ETCD_ENDPOINTS"] == [verdict]


@pytest.mark.parametrize("place", ["first", "between", "last"])
@pytest.mark.parametrize(
    ("state", "verdict"), [("up", Verdict.FAIL), ("down", Verdict.PASS), ("unknown", Verdict.PASS)]
)
def test_only_an_interface_that_is_up_needs_the_same_mtu(state: str, verdict: Verdict, place: str) -> None:
    facts = facts_of("p5.48xl")
    nic = next(nic for nic in facts.nics if nic.state == "up" and nic.driver)
    odd = replace(nic, name="odd0", state=state, mtu=1500)
    nics = {"first": (odd, nic, nic), "between": (nic, odd, nic), "last": (nic, nic, odd)}[place]
    named = tuple(replace(nic, name=f"{nic.name}{number}") for number, nic in enumerate(nics))
    network = replace(facts.network, nics=named)
    judgement = mtu(replace(facts, network=network), Requirements(profile(), ("UCX",)))
    assert judgement.verdict is verdict


@pytest.mark.parametrize(
    ("routes", "name"),
    [
        (["a0 00000000 0100000A 0003 0 0 100 00000000 0 0 0"], "a0"),
        (["a0 00000000 0100000A 0003 0 0 100 00000080 0 0 0", "b0 00000000 01000010 0003 0 0 9 00000000 0 0 0"], "b0"),
        (["a0 0000000A 00000000 0001 0 0 100 00000000 0 0 0", "b0 00000000 01000010 0003 0 0 9 00000000 0 0 0"], "b0"),
        (["b0 00000000 01000010 0003 0 0 100 00000000 0 0 0", "a0 00000000 0100000A 0003 0 0 9 00000000 0 0 0"], "b0"),
        (["a0 00000000 0100000A 0003 0 0 100 00000080 0 0 0"], None),
        (["a0 00000000 0100000A"], None),
    ],
)
def test_the_default_route_has_neither_a_destination_nor_a_mask(
    tmp_path: Path, routes: list[str], name: str | None
) -> None:
    tree = Tree(tmp_path)
    tree.write("/proc/net/route", "\n".join(["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU", *routes]))
    tree.answer("addresses", {})
    assert read_network(FactsRoot(tmp_path)).default.value == name


@pytest.mark.parametrize(("speed", "rate"), [("100000", 12.5e9), ("0", None), ("-1", None), ("4294967295", None)])
def test_the_rate_of_an_interface_is_in_bytes_per_second(tmp_path: Path, speed: str, rate: float | None) -> None:
    tree = Tree(tmp_path)
    for name, text in {"operstate": "up", "speed": speed, "mtu": "9001", "type": "772"}.items():
        tree.write(f"/sys/class/net/eth0/{name}", text)
    tree.answer("addresses", {"eth0": ["10.0.0.1/16"], "eth1": ["10.0.0.2/16"]})
    [nic] = read_network(FactsRoot(tmp_path)).nics
    assert (nic.rate, nic.mtu, nic.loopback, nic.virtual) == (rate, 9001, True, True)
    assert nic.addresses == ("10.0.0.1/16",)


@pytest.mark.parametrize(
    ("unit", "suffix"),
    [
        (SECONDS, "seconds"),
        (BYTES, "bytes"),
        (BANDWIDTH, "bytes_per_second"),
        (PER_SECOND, "per_second"),
        (COUNT, "value"),
    ],
)
def test_the_name_of_a_metric_has_the_unit_of_its_figure(unit: FigureUnit, suffix: str) -> None:
    kind = next(kind for kind in FIGURE_KINDS.values() if kind.unit == unit)
    figure = Figure.of(kind.name, 2.0, dict.fromkeys(kind.labels, 1))
    text = metrics_text(RunReport(recorded(Result("x", "y", Verdict.PASS, measured=(figure,)))))
    names = [sample.name for family in text_string_to_metric_families(text) for sample in family.samples]
    assert [name for name in names if name.startswith("nixl_figure_")] == [f"nixl_figure_{suffix}"]


def test_two_launches_of_a_row_keep_what_both_measured() -> None:
    fields = ("windows", "transfers", "latencies", "transports", "contention", "gpu_waits")
    first, second = (
        Samples(ROW, (n,), (int(n),), (n / 10,), (f"tcp/eth{n:g}", "cma"), contention=(n,), gpu_waits=(n,))
        for n in (1.0, 2.0)
    )
    both = first.with_launch(second)
    for field in fields:
        assert tuple(getattr(both, field)) == tuple(dict.fromkeys(getattr(first, field) + getattr(second, field)))
    assert both.windows_of_launches == (1, 1)
    counted = [replace(one, counted=CarrierBytes((Carrier("eth0", "net", 5),), 9)) for one in (first, second)]
    assert counted[0].with_launch(counted[1]).counted == CarrierBytes((Carrier("eth0", "net", 10),), 18)
    assert counted[0].with_launch(second).counted is first.with_launch(counted[1]).counted is None
    for earlier, other in ((first, second), (second, first)):
        assert earlier.with_launch(replace(other, corruption="wrong")).corruption == "wrong"
        assert replace(earlier, corruption="wrong").with_launch(other).corruption == "wrong"


#: Verdicts from the most to the least severe. What a gate fails is worse than what it passes with a warning.
MOST_SEVERE_FIRST = (
    "CORRUPT", "FAIL", "WRONG-TRANSPORT", "IMPLAUSIBLE", "REGRESSED", "ERROR", "MISSING", "UNKNOWN", "INCONCLUSIVE",
    "NO-EXPECTATION", "WARN", "PASS", "IMPROVED", "UNCHANGED", "NOT-APPLICABLE",
)  # fmt: skip


def test_of_two_verdicts_the_more_severe_counts() -> None:
    assert set(MOST_SEVERE_FIRST) == {str(verdict) for verdict in SEVERITY}
    judgements = [Judgement(Verdict(name), "a reason") for name in MOST_SEVERE_FIRST]
    for worse, better in combinations(judgements, 2):
        assert most_severe([worse, better]) is most_severe([better, worse]) is worse


def test_a_repeated_check_is_inconclusive_by_its_first_attempt() -> None:
    def report(outcome: str) -> pytest.TestReport:
        return cast(pytest.TestReport, SimpleNamespace(outcome=outcome))

    reruns = Reruns()
    for number, verdict in enumerate((Verdict.FAIL, Verdict.ERROR), 1):
        reruns.judge(Result("x", "a", verdict, f"reason {number}"), report("rerun"))
    last = reruns.judge(Result("x", "a", Verdict.PASS, "well"), report("passed"))
    assert (last.verdict, last.reason) == (
        Verdict.INCONCLUSIVE, "the first attempt was FAIL (reason 1), and attempt 3 was PASS"
    )  # fmt: skip
    assert reruns.judge(Result("x", "b", Verdict.PASS), report("passed")).verdict is Verdict.PASS
    assert reruns.judge(Result("x", "a", Verdict.CORRUPT), report("failed")).verdict is Verdict.CORRUPT


@pytest.mark.parametrize(
    ("gate", "required", "fails"),
    [
        (False, (), {"FAIL"}),
        (True, (), {"FAIL", "INCONCLUSIVE"}),
        (True, ("not-applicable",), {"FAIL", "INCONCLUSIVE", "NOT-APPLICABLE"}),
        (False, ("not-applicable",), {"FAIL"}),
    ],
)
def test_a_check_that_the_profile_requires_must_apply(gate: bool, required: tuple[str, ...], fails: set[str]) -> None:
    verdicts = ("PASS", "WARN", "FAIL", "INCONCLUSIVE", "NOT-APPLICABLE")
    results = [Result(verdict.lower(), f"test_{verdict}", Verdict(verdict), "a reason") for verdict in verdicts]
    assert {str(result.verdict) for result in failing_results(results, profile(*required), gate=gate)} == fails


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        ((), []),
        ((("kv", "scattered"),), ["no row was measured"]),
        ((("pattern", "incast:4"),), ["no row was measured"]),
    ],
)
def test_only_a_row_of_whole_blocks_is_a_requested_row(
    make_settings: Any, variant: tuple[tuple[str, str], ...], missing: list[str]
) -> None:
    placement = SimpleNamespace(ranks=2, pairs=[(0, 1)], several=False)
    settings = make_settings(blocks=(65536,), memory=(MemoryPair("DRAM", "DRAM"),), op=("WRITE",))
    [row] = requested_rows(settings, cast(Any, placement))
    results = [Result("x", "a", Verdict.PASS, row=replace(row, variant=variant), summary=recorded().rows[ROW])]
    run = SimpleNamespace(
        config=SimpleNamespace(stash={}), record=SimpleNamespace(results=results, ended=""), settings=settings,
        placement=placement, links=[], collected=SimpleNamespace(suites=frozenset({"bandwidth"})),
    )  # fmt: skip
    assert [result.reason.partition(",")[0] for result in missing_results(profile(), cast(Run, run))] == missing


def test_a_test_measures_the_row_of_its_parameters() -> None:
    sizes = {"block": 4096, "batch": 2, "depth": 3}
    link = SimpleNamespace(key=ROW)
    for params, row in (
        ({"nixl_link": link, **sizes}, replace(ROW, **sizes)),  # type: ignore[arg-type]
        ({"nixl_link": link}, ROW),
        ({"mine": link, **sizes}, ROW),
        ({"mine": ROW, **sizes}, ROW),
        (sizes, None),
    ):
        item = SimpleNamespace(fixturenames=["nixl_rows"], callspec=SimpleNamespace(params=params))
        assert row_of(cast(pytest.Item, item)) == row
        assert row_of(cast(pytest.Item, SimpleNamespace(fixturenames=[], callspec=item.callspec))) is None


def test_a_row_anywhere_among_the_tests_needs_an_expectation() -> None:
    row, other = (
        cast(pytest.Item, SimpleNamespace(fixturenames=names, callspec=SimpleNamespace(params={"link": ROW})))
        for names in (["nixl_rows"], [])
    )
    refuse_silence(profile(), [other, other])
    for items in ([row], [row, other], [other, row]):
        with pytest.raises(pytest.UsageError, match="'mine' has no"):
            refuse_silence(profile(), items)


def test_the_clock_of_etcd_is_that_of_its_first_member() -> None:
    with running_etcd() as etcd:
        facts = read_etcd(FactsRoot(), f"{etcd.url},http://127.0.0.1:9", "the test")
    assert facts.clock.value == pytest.approx(0, abs=2), facts.clock.why


def test_libraries_that_cannot_be_mapped_have_a_reason_and_a_remedy() -> None:
    reason, remedy = import_fault(ImportError("libnixl.so: failed to map segment from shared object"))
    assert (reason, "ulimit" in remedy) == ("the kernel refuses to map it", True)


def test_a_row_has_the_floor_and_the_values_that_it_was_judged_by() -> None:
    samples = Samples(ROW, (1.0, 2.0), (10, 10), (0.1, 0.4))
    expectation = Expectation(source="made by a test", floor=3e9, ceiling=9e9)
    summary = RowSummary.of(samples, expectation)
    assert (summary.floor, summary.ceiling, summary.transfers) == (3e9, 9e9, 20)
    assert (RowSummary.of(samples, None).floor, RowSummary.of(samples, None).ceiling) == (0.0, 0.0)
    assert summary.p50 <= summary.p90 <= summary.p99 <= summary.p999 <= 0.4


def test_what_is_recorded_of_a_row_has_its_units() -> None:
    samples = Samples(ROW, (1.0, 2.0), (10, 40), (1e-6, 3e-6), ("tcp/eth0",), contention=(0.5,), gpu_waits=(2e-3,))
    values = {
        "key": KEY, "pages": "huge", "GB/s": 983_040e-9, "Gb/s": 8 * 983_040e-9, "launches": [983_040.0], "p50_us": 1.0,
        "p90_us": 3.0, "p99_us": 3.0, "p99.9_us": 3.0, "transfers": 50, "transfer_bytes": 65536, "others_cores": [0.5],
        "gpu_waits_us": [2000.0], "transports": ["tcp/eth0"], "payload_bytes": 50 * 65536, "counted_bytes": {},
    }  # fmt: skip
    recorded = described(samples)
    assert recorded.keys() == values.keys()
    assert all(recorded[name] == pytest.approx(value) for name, value in values.items())
    assert rounds(samples) == (0.1, 0.05)


def test_the_properties_of_a_row_have_their_units() -> None:
    summary = RowSummary(2e9, 1.5e-6, 3e-6, 10, 0.0, 0.0, ("tcp/eth0", "cma"))
    result = Result("bandwidth", "a", Verdict.WARN, "odd", row=ROW, summary=summary, finding="F", known_limit=True)
    of_row = [("nixl_gigabytes_per_second", 2.0), ("nixl_p50_microseconds", 1.5), ("nixl_p99_microseconds", 3.0)]
    assert result.properties() == [
        ("nixl_check", "bandwidth"), ("nixl_verdict", "WARN"), ("nixl_reason", "odd"), ("nixl_finding", "F"),
        ("nixl_known_limit", "not met"), ("nixl_row", KEY), *of_row, ("nixl_transports", "tcp/eth0,cma"),
    ]  # fmt: skip
    assert Result("x", "y", Verdict.PASS).properties() == [("nixl_check", "x"), ("nixl_verdict", "PASS")]
    unknown = replace(result, summary=replace(summary, p50=float("nan"), p99=float("nan")))
    assert [name for name, _ in unknown.properties() if "microseconds" in name] == []


@pytest.mark.parametrize(
    ("text", "rdma"),
    [
        *((name, True) for name in ("rc", "rc_x", "ud", "ud_v", "dc", "dc_x", "ib", "srd", "gga_x", "efa", "tcp,rc")),
        *((name, False) for name in ("", "tcp", "sm", "cuda_copy", "_x", "rcx", "all", "^rc", "^rc,ud")),
    ],
)
def test_transports_of_rdma_devices_are_recognised(text: str, rdma: bool) -> None:
    assert wants_rdma({"UCX_TLS": text}) is rdma


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        *((name, True) for name in ("all", "rc,cuda_copy", "\\cuda", "^rc", "^tcp,rc")),
        *((name, False) for name in ("", "rc", "cuda_ipc", "^cuda", "^rc,\\cuda_copy", "^all")),
    ],
)
def test_transports_for_gpu_memory_are_recognised(text: str, cuda: bool) -> None:
    assert allows_cuda(text) is cuda


@pytest.mark.parametrize(
    ("line", "fails"),
    [
        ("Failed to acquire lock: no", True),
        ("Timeout waiting for rank 1", True),
        ("E1128 10:00:00 worker.cpp] no", True),
        ("[1764000000.1] [node-a:1:0] ib.c:1 UCX  ERROR no device", True),
        ("[1764000000.1] [node-a:1:0] ib.c:1 UCX  FATAL no device", True),
        ("[1764000000.1] [node-a:1:0] ib.c:1 UCX  WARN no device", False),
        ("W1128 10:00:00 worker.cpp] no", False),
        ("Error: no", True),
        ("Errors: 0", False),
        ("Failed_rows: 0", False),
        ("E112 10:00:00 no", False),
        ("[a UCX  ERROR no", False),
        ("\x1b[31mFailed to do\x1b[0m", True),
        ("\x1b]0;a title\x07Failed to do", True),
        ("\x1b]0;a title\x1b\\Failed to do", True),
        ("\x1b]Failed to do", True),  # no end of a title
        ("\x1b(Failed to do", True),
        ("Failed to do\x1b", True),
    ],
)
def test_a_line_of_nixlbench_is_a_failure_or_a_warning(line: str, fails: bool) -> None:
    output = read_output(f"{line}\n")
    assert bool(output.faults) is fails


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("exit code 3", 3),
        ("exit code: 3", 3),
        ("Exit Status 139", 139),
        *(
            (line, None)
            for line in ("exit 3", "exit: 3", "exit  3", "exit : 3", "exit codes 3", "an exit code 3", "exit code 3.")
        ),
    ],
)
def test_the_last_line_of_a_shell_is_the_exit_code_of_its_rank(line: str, code: int | None) -> None:
    output = read_output(f"Init nixl worker, dev all rank 1, type target\n{line}\n")
    assert dict(output.endings) == ({} if code is None else {1: code})


def test_devices_of_the_pci_bus_are_counted_by_their_kind() -> None:
    kinds = [device.kind for device in facts_of("p5.48xl").pci]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"gpu": 8, "efa": 32}


@pytest.mark.parametrize(
    "text", ['a{x="1" } 2', 'a { x="1"} 2', 'a\t{x="1"}\t2', 'a  {x="1"}   2 1764000000', 'a{x="1",} 2', 'a{x="1", } 2']
)
def test_blanks_between_the_parts_of_a_series_mean_nothing(text: str) -> None:
    [sample] = read_metrics(f"{text}\n".encode())
    assert (sample.name, sample.labels, sample.value) == ("a", {"x": "1"}, 2.0)


def test_each_launch_is_undisturbed_by_its_own_cores_and_gpu() -> None:
    values, busy, waiting = (1.0, 2.0, 3.0), 2 * DISTURBED_CORES, 2 * BUSY_GPU
    for place in range(3):
        cores = tuple(busy if number == place else 0.0 for number in range(3))
        summary = RowSummary.of_launches(values, ("tcp",), contention=cores)
        assert summary.undisturbed == tuple(value for number, value in enumerate(values) if number != place)
        other = tuple(waiting if number == place else 0.0 for number in range(3))
        summary = RowSummary.of_launches(values, ("tcp",), contention=cores, gpu_waits=other)
        assert [by for by in summary.used_by_others if by] == [("cores", "a GPU")]


def test_outputs_of_two_ranks_of_nixlbench_are_one_output(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.out" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(
            f"etcd: Registered as rank {rank} item 1 of 2\n"
            f"W1128 10:00:00 worker.cpp] odd {rank}\nW1128 10:00:00 worker.cpp] both\nFailed to do {rank}\n"
            f"Caught signal 1{rank}\n"
        )
    output = read_files(paths)
    assert [registration.rank for registration in output.registrations] == [0, 1]
    assert [text.rpartition("] ")[2] for text in output.warnings] == ["odd 0", "both", "odd 1"]
    assert [fault.text.rpartition(" ")[2] for fault in output.faults] == ["0", "1"]
    assert output.crashes == ("Caught signal 10", "Caught signal 11")
    assert [read_files([path]).registrations[0].rank for path in paths] == [0, 1]


@pytest.mark.parametrize("namespace", [None, "of-the-container"])
def test_a_container_overrides_the_namespace_of_its_service(tmp_path: Path, namespace: str | None) -> None:
    service = {
        "dynamoNamespace": "of-the-service",
        "extraPodSpec": {
            "mainContainer": {
                "image": "vllm-runtime:1",
                "command": ["python3", "-m", "dynamo.vllm"],
                "args": ["--model", "m"],
                "env": [{"name": "DYN_NAMESPACE", "value": namespace}] if namespace else [],
            }
        },
    }
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"metadata": {"name": "g"}, "spec": {"services": {"decode": service}}}))
    environment = read_engine(f"{path}#decode").launch.environment
    assert environment["DYN_NAMESPACE"] == (namespace or "of-the-service")
