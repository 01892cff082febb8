# SPDX-License-Identifier: Apache-2.0
"""``tests/helpers/mutations.py``: the changes of meaning that ``tox -e mutants`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.matrix import cover
from helpers.mutations import MEANING, OPERATORS, Mutant, mutants_of
from helpers.swapped import Functions, differences

from suites.metadata import test_exchange


@pytest.mark.parametrize(
    ("operator", "code", "changed"),
    [
        ("swap_arguments", "move(initiator, target)", "move(target, initiator)"),
        ("swap_arguments", "Row(sent=a.b, received=c.d)", "Row(sent=c.d, received=a.b)"),
        ("drop_element", "'\\n'.join([a, b, c])", "'\\n'.join([a, c])"),
        ("drop_element", "last = {(f.name, f.labels): f for f in x}", "last = {(f.name,): f for f in x}"),
        ("drop_element", "merge(self.transports + other.transports)", "merge((self.transports))"),
        ("drop_element", "outcome(verdict, gate=gate, required=required)", "outcome(verdict, gate=gate)"),
        ("take_another", "worst = max(values)", "worst = min(values)"),
        ("take_another", "value = values[0]", "value = values[-1]"),
        ("take_another", "name = text.split('/', 1)", "name = text.rsplit('/', 1)"),
        ("take_another", "first.setdefault(key, value)", "first[key] = value"),
        ("other_side", "use(initiator, target)", "use(target, target)"),
        ("other_unit", "rate = size / 1e9", "rate = size / 2**30"),
        ("drop_clause", "x = row.kv or row.pattern", "x = (row.kv)"),
        ("drop_clause", "x = [r for r in rows if r.up]", "x = [r for r in rows if True]"),
        ("drop_clause", "if nic.up and nic.driver: use(nic)", "if (nic.driver): use(nic)"),
        ("drop_clause", "if done: stop()", "if False: stop()"),
        ("skip_one", "for rank in ranks: stop(rank)", "for rank in list(ranks)[1:]: stop(rank)"),
        ("skip_one", "proxy.close()", "pass"),
        ("reorder_clock", "start = monotonic()\nsend()", "send()\nstart = monotonic()"),
        ("reorder_clock", "send()\ntook = time.time() - start", "took = time.time() - start\nsend()"),
        ("weaken_pattern", "re.compile(r'^a(b|c)')", "re.compile(r'^a(b)')"),
        ("weaken_pattern", "re.compile(r'^a(b|c)')", "re.compile(r'^a(b|c)?')"),
        ("weaken_pattern", "re.compile(r'^a(b|c)')", "re.compile(r'a(b|c)')"),
        ("return_input", "text = hide(line)", "text = (line)"),
        ("return_input", "name = text.strip()", "name = text"),
        ("change_operator", "fast = rate > floor", "fast = rate >= floor"),
        ("change_value", "gate = True", "gate = False"),
        ("change_flow", "for rank in ranks: break", "for rank in ranks: continue"),
    ],
)
def test_an_operator_makes_the_change_that_it_names(operator: str, code: str, changed: str) -> None:
    mutants = mutants_of("module", code, {operator: {**MEANING, **OPERATORS}[operator]})
    assert changed in [mutant.code(code) for mutant in mutants if mutant.is_python(code)]


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys",
        "def f(x: tuple[int, str]): ...",
        "__all__ = ['a', 'b']",
        "TIMEOUT_SECONDS = 10",
        "wait(timeout=5.0)",
        "zip(a, strict=True)",
        "_log.debug('%s and %s', a, b)",
        "names = text.split('/')",
        "if __name__ == '__main__': main()",
        "DELAY_SECONDS = 1\ndef f(): time()",
        "late = monotonic() > end",
    ],
)
def test_what_no_test_could_notice_is_not_changed(code: str) -> None:
    operators = {name: MEANING[name] for name in MEANING if name != "drop_element"} | dict(OPERATORS)
    assert mutants_of("module", code, operators) == [
        mutant for mutant in mutants_of("module", code, operators) if mutant.edit[2] == "pass"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "name in ('a', 'b')",
        "frozenset((a, b))",
        "try: f()\nexcept (A, B): pass",
        "{a, b}",
        "max(a, b)",
        "suppress(A, B)",
        "end = monotonic() + 5\nopen()",
        "open()\nremaining = end - monotonic()",
    ],
)
def test_what_has_no_order_is_not_swapped(code: str) -> None:
    operators = {name: MEANING[name] for name in ("swap_arguments", "reorder_clock")}
    assert mutants_of("module", code, operators) == []


CODE = "LIMIT = 1\ndef f(x=1):\n    def inner(): return 1\n    return inner\nclass C:\n    def g(self): return 1\n"


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (CODE.replace("self): return 1", "self): return 2"), ["g"]),
        (CODE.replace("inner(): return 1", "inner(): return 2"), ["f", "inner"]),
        (CODE.replace("self): return 1", "self): return 1.0"), ["g"]),
        (f"\n{CODE}", []),
        (CODE.replace("x=1", "x=2"), None),
        (CODE.replace("LIMIT = 1", "LIMIT = 2"), None),
        (CODE.replace("C:", "C:\n    x = 1"), None),
    ],
)
def test_functions_get_changed_code_unless_what_runs_at_import_differs(changed: str, names: list[str] | None) -> None:
    pairs = differences(compile(CODE, "a", "exec"), compile(changed, "a", "exec"))
    assert (None if pairs is None else [old.co_name for old, _ in pairs]) == names


def test_the_cheapest_tests_that_kill_all_are_kept() -> None:
    a, b, c = (Mutant("module", line, "skip_one", (0, 1, "")) for line in (1, 2, 3))
    kills = {"both": {a, b}, "first": {a}, "second": {b}, "nothing": set[Mutant](), "always": {c}, "again": {c}}
    cost = dict.fromkeys(kills, 1.0)
    assert cover(kills, cost, ["always"]) == ["again", "first", "nothing", "second"]
    assert cover(kills, {**cost, "both": 9.0}, []) == ["always", "both", "nothing"]


def test_a_test_of_the_suites_is_changed_although_pytest_rewrites_its_assertions() -> None:
    root = Path(test_exchange.__file__).parents[2]
    module = "suites/metadata/test_exchange"
    text = (root / f"{module}.py").read_text(encoding="utf-8")
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "== owner.name" in line)
    changes = [change for change in mutants_of(module, text, OPERATORS) if change.line == line]
    functions = Functions(root)
    assert [[function.__name__ for function, _ in functions.swaps(change) or ()] for change in changes] == [
        ["test_an_agent_finds_another_by_a_side_channel"]
    ]
