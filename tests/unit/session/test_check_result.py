# SPDX-License-Identifier: Apache-2.0
"""The result of a check by how its test ended, what pytest shows of it, and the command that repeats it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import profile
from helpers.pytester_run import parse_config, run_pytest
from helpers.records import ROW

from pytest_nixl.core.cpu_contention import HostLoad
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.measure.transfer_proof import steering_names
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.check_result import LESS_TO_DO, MORE_TIME, name_steering_fault, repeat_command
from pytest_nixl.session.run import Run

STALE = f"{FINDINGS['NIXL-ETCD-STALE-KEY'].title}: a stale key"
TIMEOUT = "Timeout (>3.0s) from pytest-timeout."
#: Tests whose names are the ids of their checks.
ENDINGS = """
import warnings
import pytest
from pytest_nixl.core.errors import LateError, NixlPluginError, NotApplicableError
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.outcome import JUDGEMENT

def check(function):
    return pytest.mark.nixl_check(function.__name__.removeprefix("test_").replace("_", "-"))(function)

@check
def test_passes(): pass

@check
def test_fails(): assert 1 == 2

@check
def test_fails_in_two_lines(): pytest.fail("  one\\ntwo")

@check
def test_fails_without_a_text(): raise AssertionError

@check
def test_raises(): raise ValueError("one\\ntwo")

@check
def test_raises_without_a_text(): raise ValueError

@check
def test_skips(): pytest.skip("no such device")

@check
def test_does_not_apply(): raise NotApplicableError("this host has no GPU", "run it elsewhere")

@check
def test_is_refused(): raise NixlPluginError("it is \\x1b hunter2", "set hunter2\\x1b", "a log")

@check
def test_meets_a_finding(): raise FindingError("NIXL-ETCD-STALE-KEY", "a stale key", "a log", "remove it")

@check
def test_is_late(): raise LateError("no answer within 3 s", "wait")

@pytest.mark.nixl_check("is-late-itself", own=True)
def test_is_late_itself(): raise LateError("no answer within 3 s", "wait")

@check
def test_times_out(): pytest.fail("Timeout (>3.0s) from pytest-timeout.")

@check
def test_is_not_called(): pass

@check
def test_fails_before_it_is_called(): pass

@check
def test_concludes(request):
    request.node.stash[JUDGEMENT] = Judgement(Verdict.WARN, "it is odd", "look at it")

@check
def test_concludes_and_fails(request):
    request.node.stash[JUDGEMENT] = Judgement(Verdict.CORRUPT, "bytes are wrong", "look at them")
    pytest.fail("told before")

@check
def test_concludes_and_raises(request):
    request.node.stash[JUDGEMENT] = Judgement(Verdict.CORRUPT, "bytes are wrong", "look at them")
    raise ValueError("and then")

@pytest.fixture
def broken(): raise NixlPluginError("no worker starts", "start one")

@pytest.fixture
def breaks():
    yield
    raise NixlPluginError("no worker ends", "end it")

@check
def test_is_not_set_up(broken): pass

@check
def test_is_not_torn_down(breaks): pass

def test_of_a_user(): raise NixlPluginError("not a check")
"""
CONFTEST = """
import json
from pathlib import Path
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.name == "test_fails_before_it_is_called":
        raise ValueError("before")
    return True if pyfuncitem.name == "test_is_not_called" else None

def pytest_runtest_logreport(report):
    result = getattr(report, "nixl_result", None)
    with Path("reports.jsonl").open("a") as file:
        values = report.nodeid.partition("::test_")[2], report.when, report.outcome, report.longreprtext
        plain = None if result is None else result.plain()
        print(json.dumps([*values, plain, getattr(report, "nixl_module", None)]), file=file)
"""
NOT_CALLED = "the check did not run: another plugin or a conftest.py let it pass without calling its function"
WITHOUT_IT = "start pytest without it (-p no:NAME): it has a hook such as pytest_pyfunc_call or pytest_runtest_call"
REPEAT = "repeat the test "
PASSES = ("call", "passed", "")
#: Of each check on an idle host: the phase, the outcome and the text that pytest has, and verdict, reason and remedy.
ENDED: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "passes": (PASSES, ("PASS", "", "")),
    "fails": (("call", "failed", "assert 1 == 2"), ("FAIL", "assert 1 == 2", "")),
    "fails_in_two_lines": (("call", "failed", "Failed:   one\ntwo"), ("FAIL", "one", "")),
    "fails_without_a_text": (("call", "failed", "AssertionError"), ("FAIL", "AssertionError", "")),
    "raises": (("call", "failed", "ValueError: one\ntwo"), ("ERROR", "ValueError: one", "")),
    "raises_without_a_text": (("call", "failed", "ValueError"), ("ERROR", "ValueError: ValueError", "")),
    "skips": (("call", "skipped", "Skipped: no such device"), ("NOT-APPLICABLE", "no such device", "")),
    "does_not_apply": (("call", "skipped", "Skipped: this host has no GPU"),
                       ("NOT-APPLICABLE", "this host has no GPU", "run it elsewhere")),
    "is_refused": (("call", "failed", "NixlPluginError: it is \\x1b ***\nremedy: set ***\\x1b\na log"),
                   ("ERROR", "it is \\x1b ***", "set ***\\x1b")),
    "meets_a_finding": (("call", "failed", f"FindingError: {STALE}\nremedy: remove it\na log"),
                        ("FAIL", STALE, "remove it")),
    "is_late": (("call", "failed", "LateError: no answer within 3 s\nremedy: wait"),
                ("ERROR", "no answer within 3 s", "wait")),
    "is_late_itself": (("call", "failed", "LateError: no answer within 3 s\nremedy: wait"),
                       ("ERROR", "no answer within 3 s", "wait")),
    "times_out": (("call", "failed", f"Failed: {TIMEOUT}"), ("FAIL", TIMEOUT, MORE_TIME)),
    "is_not_called": (("call", "failed",
                       f"{Judgement(Verdict.MISSING, NOT_CALLED, WITHOUT_IT)}\n{REPEAT}is_not_called"),
                      ("MISSING", NOT_CALLED, WITHOUT_IT)),
    "fails_before_it_is_called": (("call", "failed", "ValueError: before"), ("ERROR", "ValueError: before", "")),
    "concludes": (PASSES, ("WARN", "it is odd", "look at it")),
    "concludes_and_fails": (("call", "failed", f"told before\n{REPEAT}concludes_and_fails"),
                            ("CORRUPT", "bytes are wrong", "look at them")),
    "concludes_and_raises": (("call", "failed", "ValueError: and then"), ("ERROR", "ValueError: and then", "")),
    "is_not_set_up": (("setup", "failed", f"no worker starts\nremedy: start one\n{REPEAT}is_not_set_up"),
                      ("ERROR", "no worker starts", "start one")),
    "is_not_torn_down": (("teardown", "failed", f"no worker ends\nremedy: end it\n{REPEAT}is_not_torn_down"),
                         ("ERROR", "no worker ends", "end it")),
}  # fmt: skip
BUSY = "no answer within 3 s; the host was busy"
LATE = {
    "is_late": (("call", "skipped", f"Skipped: {BUSY}"), ("INCONCLUSIVE", BUSY, LESS_TO_DO)),
    "is_late_itself": (("call", "skipped", f"Skipped: {BUSY}"), ("WARN", BUSY, LESS_TO_DO)),
}
#: In a suite, with a gate whose profile requires the check that does not apply: the text of an error is all of it.
GATED = {
    "does_not_apply": (("call", "failed", f"this host has no GPU\nremedy: run it elsewhere\n{REPEAT}does_not_apply"),
                       ENDED["does_not_apply"][1]),
    "is_refused": (("call", "failed", f"it is \\x1b ***\nremedy: set ***\\x1b\na log\n{REPEAT}is_refused"),
                   ENDED["is_refused"][1]),
    "meets_a_finding": (("call", "failed", f"{STALE}\nremedy: remove it\na log\n{REPEAT}meets_a_finding"),
                        ENDED["meets_a_finding"][1]),
    "is_late": (("call", "failed", f"no answer within 3 s\nremedy: wait\n{REPEAT}is_late"), LATE["is_late"][1]),
    "is_late_itself": LATE["is_late_itself"],
}  # fmt: skip


def shown(text: str) -> str:
    """Return what pytest shows of a failure without the lines of the test, or of a skip without its place."""
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    skipped = re.fullmatch(r"\(.*, (\d+), ['\"](Skipped: .*)['\"]\)", text)
    assert skipped is None or ENDINGS.splitlines()[int(skipped[1]) - 1].startswith(("@", "def test_"))
    return re.sub(r"^pytest_nixl\.[\w.]*\.", "", "\n".join(lines)) if lines else skipped[2] if skipped else text


@pytest.mark.parametrize(
    ("path", "busy", "gate", "changes"),
    [
        ("test_it.py", "", False, {}),
        ("test_it.py", "the host was busy", False, LATE),
        ("suites/metadata/test_it.py", "the host was busy", True, GATED),
    ],
    ids=["idle", "busy", "gate-of-a-suite"],
)
def test_a_check_has_the_result_by_which_its_test_ended(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, path: str, busy: str, gate: bool, changes: Any
) -> None:
    monkeypatch.setattr(HostLoad, "words", lambda self: busy)
    (pytester.path / path).parent.mkdir(parents=True, exist_ok=True)
    (pytester.path / path).write_text(ENDINGS)
    pytester.makeconftest(CONFTEST)
    required = profile(pytester.path / "p.toml", "floor = '1 KB/s'", required="['does-not-apply']")
    options = ["--nixl-gate", f"--nixl-profile={required}"] if gate else []
    run_pytest(pytester, path, *options, env={"NIXL_TOKEN": "hunter2"}, in_process=True)
    reports = [json.loads(line) for line in (pytester.path / "reports.jsonl").read_text().splitlines()]
    ended = {}
    for name, when, outcome, text, result, module in reports:
        if result is not None:
            assert module == ("pytest_nixl.suites.metadata.test_it" if "suites" in path else None)
            assert result["check"] == name.replace("_", "-")
            repeat = " ".join([f"pytest {path}::test_{name}", *options[1:]])
            assert result["repeat"] == repeat
            plain = shown(text).replace(f"repeat: {repeat}", f"{REPEAT}{name}")
            ended[name] = (
                (when, outcome, plain),
                (result["verdict"], result.get("reason", ""), result.get("remedy", "")),
            )
    assert ended == {**ENDED, **changes}


TEST = "suites/bandwidth/test_bandwidth.py"
#: The options that measure one row again.
ONE_ROW = "--nixl-backend=UCX --nixl-op=WRITE --nixl-memory=DRAM:DRAM --nixl-blocks=65536 --nixl-batch=1 --nixl-depth=1"
TOKEN = "and with the same NIXL_GROUP_TOKEN on all"


def of_variant(*variant: tuple[str, str], **changes: Any) -> RowKey:
    return replace(ROW, variant=variant, **changes)


@pytest.mark.parametrize(
    ("options", "row", "environ", "command"),
    [
        ("", None, {}, f"pytest {TEST}::TestRows::test_row[a b]"),
        ("--nixl-gate --nixl-depth=2 --nixl-etcd-user=me:hunter2 --nixl-group-token=hunter2 --nixl-report=a.html "
         "--nixl-log-dir=logs --nixl-store=. --nixl-baseline=new.json", None, {},
         f"pytest {TEST}::TestRows::test_row[a b] --nixl-depth=2"),
        ("--nixl-depth=2 --nixl-timeout=5s", ROW, {},
         f"pytest {TEST} --nixl-depth=1 --nixl-timeout=5s {ONE_ROW.removesuffix(' --nixl-depth=1')}"),
        ("", replace(ROW, backend="nixlbench:UCX", op="READ", memory=MemoryPair("VRAM", "DRAM"), batch=2, depth=3), {},
         f"pytest {TEST} --nixl-backend=UCX --nixl-op=READ --nixl-memory=VRAM:DRAM --nixl-blocks=65536 --nixl-batch=2 "
         "--nixl-depth=3"),
        # Rows of KV requests and patterns, and those of a check that walks by itself, are named by their test.
        *(("", of_variant(variant), {}, f"pytest {TEST}::TestRows::test_row[a b]")
          for variant in (("kv", "scattered"), ("pattern", "incast:4"), ("footprint", "1GiB"))),
        ("--nixl-footprint=1GiB", of_variant(("footprint", "1GiB")), {},
         f"pytest {TEST} --nixl-footprint=1GiB {ONE_ROW}"),
        *(("--nixl-progress-thread=off,on", row, {}, f"pytest {TEST} --nixl-progress-thread={which} {ONE_ROW}")
          for row, which in ((ROW, "off"), (of_variant(("progress-thread", "on")), "on"),
                             (replace(ROW, backend="nixlbench:UCX"), "off,on"))),
        ("--nixl-progress-thread=on", of_variant(("progress-thread", "on")), {},
         f"pytest {TEST} --nixl-progress-thread=on {ONE_ROW}"),
        ("--nixl-ranks=2", ROW, {"MASTER_ADDR": "node-a"},
         f"pytest {TEST} --nixl-ranks=2 {ONE_ROW} --nixl-pairs=0:1  # at the same time on the other rank, {TOKEN}"),
        ("--nixl-ranks=3 --nixl-rank=0 --nixl-etcd-listen=h:1", replace(ROW, pair=(2, 2)), {"MASTER_ADDR": "node a"},
         f"MASTER_ADDR='node a' pytest {TEST} --nixl-etcd-listen=h:1 --nixl-ranks=3 --nixl-rank=0 {ONE_ROW}  "
         f"# at the same time on the other 2 ranks, with its --nixl-rank, {TOKEN}"),
        ("--nixl-ranks=2 --nixl-etcd-listen=h:1", replace(ROW, pair=(1, 1)), {},
         f"pytest {TEST} --nixl-etcd-listen=h:1 --nixl-ranks=2 {ONE_ROW}  # at the same time on the other rank, "
         f"{TOKEN}"),
        ("--nixl-etcd-listen=h:1", None, {"PMI_RANK": "0", "PMI_SIZE": "4", "MASTER_ADDR": "node-a"},
         f"pytest {TEST}::TestRows::test_row[a b] --nixl-etcd-listen=h:1  # on all 4 ranks, by PMI"),
    ],
)  # fmt: skip
def test_a_command_repeats_a_test_or_its_row(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    row: RowKey | None,
    environ: dict[str, str],
    command: str,
) -> None:
    for name in [name for name in os.environ if re.match(r"SLURM_|OMPI_|PMI_|MASTER_ADDR|NIXL_", name)]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = parse_config(pytester, *options.split())
    item = SimpleNamespace(config=config, nodeid="x.py::TestRows::test_row[a b]", path=pytester.path / TEST)
    expected = command.replace("::TestRows::test_row[a b]", "::TestRows::test_row[a b]'").replace(
        f"pytest {TEST}::", f"pytest '{TEST}::"
    )
    assert repeat_command(cast(pytest.Item, item), row) == expected


@pytest.mark.parametrize(
    ("module", "path", "where"),
    [
        ("pytest_nixl.suites.metadata.test_it", "a/test_it.py", "--pyargs pytest_nixl.suites.metadata.test_it"),
        ("their.test_it", "a/test_it.py", "a/test_it.py"),
        (None, "a/test_it.py", "a/test_it.py"),
        ("their.test_it", "/elsewhere/test_it.py", "/elsewhere/test_it.py"),
    ],
)
def test_a_test_is_named_by_its_module_if_that_can_be_imported(
    pytester: pytest.Pytester, module: str | None, path: str, where: str
) -> None:
    item = SimpleNamespace(config=parse_config(pytester, "--pyargs"), nodeid="t.py::test_it", path=pytester.path / path)
    if module is not None:
        item.module = SimpleNamespace(__name__=module)
    assert repeat_command(cast(pytest.Item, item), None) == f"pytest {where}::test_it"
    item.config = parse_config(pytester)
    assert repeat_command(cast(pytest.Item, item), None) == f"pytest {path}::test_it"


@pytest.mark.parametrize(
    ("error", "environ", "row", "change", "backend"),
    [
        (WorkerError("it died", "restart it"), {"UCX_TLS": "sm"}, ROW, {}, "UCX"),
        (WorkerError("it died", "restart it"), {"UCX_TLS": "sm"}, None, {}, "POSIX"),
        (NixlPluginError("it died"), {"UCX_TLS": "sm"}, ROW, {}, ""),
        (WorkerError("UCX_TLS is bad"), {"UCX_TLS": "sm"}, ROW, {}, ""),
        (WorkerError("it died"), {}, ROW, {}, ""),
        (WorkerError("it died"), {"UCX_TLS": "sm"}, ROW, {"check": None}, ""),
        (WorkerError("it died"), {"UCX_TLS": "sm"}, ROW, {"measured": True}, ""),
        (WorkerError("it died"), {"UCX_TLS": "sm"}, ROW, {"culprits": ()}, "UCX"),
        (WorkerError("it died"), {"UCX_TLS": "sm"}, ROW, {"provable": False}, ""),
    ],
    ids=["a-row", "no-row", "no-worker", "named", "no-variable", "no-check", "a-row-was-measured", "no-culprit",
         "not-provable"],
)  # fmt: skip
def test_the_variable_that_keeps_bytes_from_arriving_is_named_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, error: Any, environ: dict[str, str], row: RowKey | None,
    change: dict[str, Any], backend: str,
) -> None:  # fmt: skip
    for name in steering_names(os.environ):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    proofs: list[object] = []
    fault, remedy = "bytes arrive without UCX_TLS", "unset UCX_TLS"
    culprits = change.get("culprits", ("UCX_TLS",))
    proof = SimpleNamespace(culprits=culprits, steering_fault=fault, steering_remedy=remedy)

    def prove(name: str, memory: object) -> Any:
        proofs.append((name, memory))
        return proof

    monkeypatch.setattr("pytest_nixl.session.check_result.Prover", lambda settings: SimpleNamespace(prove=prove))
    monkeypatch.setattr("pytest_nixl.session.check_result.provable", lambda names: change.get("provable", True))
    config = parse_config(pytester, "--nixl-backend=POSIX,UCX")
    if change.get("measured"):
        Run.of(config).record.results = (Result("bandwidth", "a", Verdict.PASS, summary=cast(Any, "measured")),)
    marker = SimpleNamespace(args=[change.get("check", "mine")]) if change.get("check", "mine") else None
    item: Any = SimpleNamespace(
        config=config, get_closest_marker=lambda _: marker, fixturenames=["nixl_rows"],
        callspec=SimpleNamespace(params={"key": row}),
    )  # fmt: skip
    before = error.reason, error.remedy
    name_steering_fault(item, error)
    named = f"{before[0]}; {fault}", remedy
    assert (error.reason, error.remedy) == (named if backend and culprits else before)
    if backend:  # a backend is proved once
        name_steering_fault(item, WorkerError("it died again"))
    assert proofs == ([(backend, HOST)] if backend else [])
