# SPDX-License-Identifier: Apache-2.0
"""What another installed distribution adds: found by its name, loaded when it is used, and named if it is broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from helpers.fake_sysfs import facts_of

from pytest_nixl import ExtensionError
from pytest_nixl.checks.doctor.catalogue import checks, other_checks, result_lines
from pytest_nixl.checks.doctor.check import CheckResult, Requirements
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extensions import Extension, ExtensionPoint, Registry
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Outcome

#: Installs a distribution: its name, a group of entry points, their values by name, and the code of its one module.
Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make distributions that this process finds. Doubles: they have faults."""

    def make(distribution: str, group: str, values: Mapping[str, str], code: str = "") -> str:
        folder = tmp_path / distribution
        module = f"{distribution}_{tmp_path.name}".replace("-", "_")
        info = folder / f"{distribution.replace('-', '_')}-2.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
        lines = [f"{name} = {module}:{value}" for name, value in values.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(folder))
        return module

    return make


POINT = ExtensionPoint("acme.parts", "part", str.upper)


def accept(extension: Extension, loaded: object) -> str:
    if not isinstance(loaded, str):
        raise extension.fault("is not a text")
    return f"{extension.name} {loaded}"


def test_a_table_has_our_entries_and_then_those_of_others_by_name(install: Install) -> None:
    module = install("acme-nixl", POINT.group, {"b": "IT", "a": "IT"}, "IT = 'of acme'")
    calls = []

    def own() -> Mapping[str, str]:
        calls.append("own")
        return {"X": "ours"}

    registry: Registry[str] = Registry(POINT, own, accept)
    assert calls == []
    assert (registry["X"], "X" in registry, "A" in registry, "a" in registry) == ("ours", True, True, False)
    assert (list(registry), len(registry), calls) == (["X", "A", "B"], 3, ["own"])
    assert module not in sys.modules
    assert dict(registry) == {"X": "ours", "A": "A of acme", "B": "B of acme"}
    registry["Y"] = "new"
    del registry["X"]
    assert list(registry) == ["Y", "A", "B"]
    with pytest.raises(KeyError):
        registry["C"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("IT = 3", "is not a text"),
        ("", "cannot be loaded (AttributeError: module 'MODULE' has no attribute 'IT')"),
        ("raise ValueError('of two\\nlines')", "cannot be loaded (ValueError: of two lines)"),
    ],
)
def test_a_broken_extension_is_refused_in_one_sentence(install: Install, code: str, fault: str) -> None:
    module = install("acme-nixl", POINT.group, {"a": "IT"}, code)
    with pytest.raises(ExtensionError) as refused:
        Registry(POINT, {}, accept)["A"]
    assert str(refused.value) == (
        f"the part 'A' of acme-nixl 2.0 ({module}:IT) {fault.replace('MODULE', module)}: "
        "update or repair acme-nixl, or remove it (pip uninstall acme-nixl)"
    )


def test_a_refusal_by_the_extension_itself_stays_as_it_is(install: Install) -> None:
    install("acme-nixl", POINT.group, {"a": "IT"}, "IT = 'x'")
    refusal = NixlPluginError("no", "do so")

    def refuse() -> None:
        raise refusal

    with pytest.raises(NixlPluginError) as raised:
        POINT.extensions(())["A"].call(refuse)
    assert raised.value is refusal


@pytest.mark.parametrize("ours", [("A",), ()])
def test_a_name_with_two_owners_is_refused_with_both(install: Install, ours: tuple[str, ...]) -> None:
    install("acme-nixl", POINT.group, {"A": "IT"})
    install("other-nixl", POINT.group, {"a": "IT"})
    owners = {True: ("pytest-nixl", "acme-nixl"), False: ("acme-nixl 2.0", "other-nixl")}[bool(ours)]
    with pytest.raises(ExtensionError) as refused:
        Registry(POINT, dict.fromkeys(ours, ""), accept).extensions()
    assert str(refused.value) == (
        f"{owners[0]} and {owners[1]} 2.0 both have a part 'A': "
        f"uninstall one of them (pip uninstall {owners[1]}), or ask for another name"
    )


CHECK = """
from pytest_nixl import Check, Judgement, Verdict

def judge(facts, expected):
    return Judgement(Verdict.PASS, f"{facts.host.name.value} has {expected.backends}")

IT = Check("acme-check", "Why?", judge, image=True)
RAISES = Check("acme-raises", "Why?", lambda facts, expected: 1 / 0, image=True)
EMPTY = Check("acme-empty", "Why?", lambda facts, expected: None, image=True)
"""


def test_a_check_of_another_package_is_counted_as_one(install: Install) -> None:
    values = {"acme-check": "IT", "acme-raises": "RAISES", "acme-empty": "EMPTY"}
    module = install("acme-nixl", "pytest_nixl.doctor_checks", values, CHECK)
    facts, expected = facts_of("p5.48xl"), Requirements(load_profile("loopback"), ("UCX",))
    assert other_checks() == sorted(values)
    check, empty, raising = list(checks().values())[-3:]
    assert [item.topic for item in (check, empty, raising)] == ["of other packages"] * 3
    result = CheckResult(check, check.judge(facts, expected), Outcome.PASS, required=False)
    assert [line.text for line in result_lines([result])] == [
        "passed: of other packages 1; not applicable here: 0; -v lists each check with its reason",
        "NIXL doctor: PASS (1 PASS)",
    ]
    assert result.judgement.reason == f"{facts.host.name.value} has ('UCX',)"
    faults = {
        raising: (f"'acme-raises' of acme-nixl 2.0 ({module}:RAISES)", "failed (ZeroDivisionError: division by zero)"),
        empty: (f"'acme-empty' of acme-nixl 2.0 ({module}:EMPTY)", "returned NoneType instead of a Judgement"),
    }
    for broken, (owner, fault) in faults.items():
        judgement = broken.judge(facts, expected)
        assert str(judgement.verdict) == "UNKNOWN"
        assert judgement.reason == f"the check of the doctor {owner} {fault}"
        assert judgement.remedy == "update or repair acme-nixl, or remove it (pip uninstall acme-nixl)"


@pytest.mark.parametrize(
    ("code", "fault"),
    [("IT = print", "is not a pytest_nixl.Check"), (CHECK, "has another id in its code, 'acme-check'")],
)
def test_a_check_of_another_package_has_the_id_of_its_entry(install: Install, code: str, fault: str) -> None:
    install("acme-nixl", "pytest_nixl.doctor_checks", {"other": "IT"}, code)
    with pytest.raises(ExtensionError, match=fault):
        checks()
