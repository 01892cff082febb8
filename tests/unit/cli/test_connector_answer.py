# SPDX-License-Identifier: Apache-2.0
"""What ``pytest-nixl connector`` prints of a comparison, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl import cli
from pytest_nixl.checks.connector.rules import ConfigurationLayer
from pytest_nixl.cli import connector
from pytest_nixl.model.verdicts import Verdict

INFRASTRUCTURE, NIXL, CONNECTOR = ConfigurationLayer


def value(text: str, *, known: bool = True, given: bool = True) -> Any:
    return SimpleNamespace(text=text, is_known=known, is_set=given)


def side(name: str, **values: Any) -> Any:
    kind = values.pop("kind", "NIXL")
    return SimpleNamespace(
        source=SimpleNamespace(label=f"{name}.sh"),
        values={"engine": value(f"vLLM for {name}"), "connector kind": value(kind), **values},
    )


def result(field: str, verdict: Verdict, layer: ConfigurationLayer = NIXL, slow: str = "") -> Any:
    rule = SimpleNamespace(field=field, layer=layer, source=f"source of {field}", requirement=f"{field} must match")
    return SimpleNamespace(
        rule=rule, verdict=verdict, slow=slow, sentence=f"{field} differs", remedy=f"correct {field}",
        prefill=f"{field} of prefill", decode=f"{field} of decode", why=f"{field} is odd",
    )  # fmt: skip


HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def comparison(*results: Any, unread: tuple[str, ...] = (), options: tuple[str, ...] = (), **values: Any) -> Any:
    pair = SimpleNamespace(prefill=side("p", **values), decode=side("d"), one_host=True)
    return SimpleNamespace(results=list(results), pair=pair, unread=unread, unjudged_options=options)


SIDES = ["prefill: p.sh (vLLM for p)", "decode:  d.sh (vLLM for d)"]
QUICK = "on both hosts: pytest-nixl run quick"
NEXT = f"next: on both hosts: pytest-nixl doctor; then {QUICK}"
PASS, WARN, DOUBT, SKIP = Verdict.PASS, Verdict.WARN, Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE
ORDER = "correct them from the top: infrastructure, NIXL, connector"


def shown(verdict: str, layer: str, field: str) -> list[str]:
    return [f"{verdict} {layer}: {field} differs", f"    remedy: correct {field}", f"    source: source of {field}"]


@pytest.mark.parametrize(
    ("compared", "gate", "code", "lines"),
    [
        (comparison(result("a", PASS), result("b", PASS)), False, 0,
         ["PASS: prefill and decode match in all 2 fields", NEXT]),
        (comparison(result("a", PASS), result("b", SKIP), result("c", SKIP), unread=("one", "two")), False, 0,
         ["note:    one", "note:    two",
          "PASS: prefill and decode match in the one field that both have (not in both files: b, c)", NEXT]),
        (comparison(result("a", Verdict.FAIL, CONNECTOR), result("b", Verdict.FAIL, INFRASTRUCTURE, slow="slow"),
                    result("c", PASS, slow="slow"), result("d", WARN, slow="slower"), result("e", SKIP)), False, 1,
         [*shown("FAIL", "infrastructure", "b"), *shown("WARN", "NIXL", "d"), *shown("FAIL", "connector", "a"),
          f"FAIL: 2 of 4 fields do not match, and 1 may; slow; slower; {ORDER} (not in both files: e)"]),
        (comparison(result("a", Verdict.FAIL)), True, 1,
         [*shown("FAIL", "NIXL", "a"), f"FAIL: 1 of 1 fields do not match; {ORDER}"]),
        (comparison(result("a", DOUBT), result("b", WARN, slow="slow"), result("c", PASS)), False, 0,
         [*shown("INCONCLUSIVE", "NIXL", "a"), *shown("WARN", "NIXL", "b"),
          "PASS: slow; no field is wrong for sure, but 2 of 3 may be: see above", NEXT]),
        (comparison(result("a", DOUBT)), True, 1,
         [*shown("INCONCLUSIVE", "NIXL", "a"), "FAIL: no field is wrong for sure, but 1 of 1 may be: see above"]),
    ],
    ids=["match", "some-skipped", "mismatches", "one-mismatch", "doubts", "doubts-with-the-gate"],
)  # fmt: skip
def test_what_differs_is_printed_in_the_order_in_which_to_correct_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, compared: Any, gate: bool,
    code: int, lines: list[str],
) -> None:  # fmt: skip
    asked: list[object] = []

    def compare(*sides: object, **how: object) -> Any:
        asked.append((sides, how))
        return compared

    for name in ("libplugin_UCX.so", "libplugin_.so", "libplugin_OBJ.so.1", "xlibplugin_GDS.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(connector, "read_engine", "engine {}".format)
    monkeypatch.setattr(connector, "compare_connectors", compare)
    options = ["--gate"] * gate
    assert cli.main(["connector", "p.sh", "d.sh", *options]) == code
    assert capsys.readouterr().out.splitlines() == [*SIDES, *lines]
    assert cli.main(["connector", "p.sh", "d.sh", *options, "--json", "--one-host", f"--plugin-dir={tmp_path}"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "verdict": "FAIL" if code else "PASS", "prefill": {"source": "p.sh", "engine": "vLLM for p"},
        "decode": {"source": "d.sh", "engine": "vLLM for d"}, "one_host": True, "notes": list(compared.unread),
        "unread_options": [], "slow": list(dict.fromkeys(each.slow for each in compared.results if each.slow)),
        "next": "" if code else NEXT.removeprefix("next: "),
        "fields": [
            {"field": each.rule.field, "layer": each.rule.layer.value, "verdict": str(each.verdict),
             "requirement": each.rule.requirement, "prefill": each.prefill, "decode": each.decode, "why": each.why,
             "remedy": each.remedy, "source": each.rule.source}
            for each in compared.results
        ],
    }  # fmt: skip
    engines = "engine p.sh", "engine d.sh"
    assert asked == [
        (engines, {"one_host": False, "plugins": None}), (engines, {"one_host": True, "plugins": {"UCX"}})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "doctor"),
    [
        ({HOST: value("10.0.0.1", given=False), PORT: value("5600")}, "HOST:5600 (HOST: prefill's address)"),
        ({HOST: value("10.0.0.1"), PORT: value("$P", known=False)}, "HOST:PORT (HOST: prefill's address)"),
        ({HOST: value("10.0.0.1")}, None),
        ({PORT: value("5600")}, None),
        ({HOST: value("10.0.0.1"), PORT: value("5600"), "kind": ""}, "10.0.0.1:5600"),
    ],
)
def test_the_next_step_asks_the_side_channel_of_prefill_if_it_is_known(
    values: dict[str, Any], doctor: str | None
) -> None:
    first = f"on decode's host: pytest-nixl doctor --side-channel {doctor}" if doctor else NEXT[6 : NEXT.index(";")]
    assert connector.next_step(comparison(**values)) == f"{first}; then {QUICK}"


def test_options_that_no_rule_reads_are_listed_if_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connector, "read_engine", str)
    compared = comparison(result("a", PASS), options=("--a", "--b\x1b"))
    monkeypatch.setattr(connector, "compare_connectors", lambda *sides, **how: compared)
    for options, notes in (([], []), (["-v"], [r"note:    not read: --a, --b\x1b (no rule is about them)"])):
        assert cli.main(["connector", "p.sh", "d.sh", *options]) == 0
        assert capsys.readouterr().out.splitlines()[2:-2] == notes
