# SPDX-License-Identifier: Apache-2.0
"""The generated reference pages are up to date, and describe every option, check, finding, fixture and variable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.reference_pages import REFERENCE, generator

from pytest_nixl import cli
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.selection import check_ids_by_suite


@pytest.fixture(scope="module")
def generate() -> Any:
    """The generator as a module."""
    return generator()


def headings(page: str) -> set[str]:
    text = (REFERENCE / f"{page}.md").read_text(encoding="utf-8")
    return {line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")}


def test_pytest_declares_the_options_of_the_settings(generate: Any) -> None:
    assert generate.OPTION_TABLE.read_text(encoding="utf-8") == generate.option_table()


def test_every_option_has_a_section() -> None:
    assert headings("options") >= {option.flag for option in OPTIONS}


def test_every_check_has_a_section() -> None:
    ids = {id for checks in check_ids_by_suite().values() for id in checks}
    assert len(ids) > 90
    assert headings("checks") >= ids


def test_every_finding_has_a_section() -> None:
    assert headings("findings") >= set(FINDINGS)


def test_every_verdict_has_a_line() -> None:
    text = (REFERENCE / "verdicts.md").read_text(encoding="utf-8")
    assert [str(verdict) for verdict in Verdict if f"| **{verdict}** |" not in text] == []


def test_every_command_has_a_section() -> None:
    assert headings("cli") >= {f"pytest-nixl {name}" for name in cli.COMMANDS}


def test_every_fixture_has_a_section(generate: Any) -> None:
    results = {fixture.name for fixture in generate.fixtures()}
    assert results >= {"nixl_link", "nixl_agent", "nixl_etcd", "nixl_cluster", "nixl_settings"}
    assert headings("fixtures") >= results


def test_an_option_without_a_help_text_is_undocumented(generate: Any) -> None:
    with pytest.raises(generate.UndocumentedError, match="--nixl-backend"):
        generate.options_page([replace(OPTIONS[0], help="")])


def test_a_check_without_a_fault_is_undocumented(generate: Any) -> None:
    new = generate.SuiteCheck("new-check", "suites/metadata/test_new.py::test_new", "standard", (), "It is new.")
    with pytest.raises(generate.UndocumentedError, match="new-check"):
        generate.checks_page([*generate.declared_checks(), new])


def test_a_check_without_a_docstring_is_undocumented(generate: Any) -> None:
    first, *remainder = generate.declared_checks()
    with pytest.raises(generate.UndocumentedError, match="has no docstring"):
        generate.checks_page([replace(first, text=""), *remainder])


def test_a_fault_of_a_check_that_is_gone_is_an_error(generate: Any) -> None:
    checks = [check for check in generate.declared_checks() if check.id != "memlock"]
    with pytest.raises(generate.UndocumentedError, match="memlock"):
        generate.checks_page(checks)


def test_a_variable_without_a_text_is_undocumented(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = generate.variables_read()
    monkeypatch.setattr(generate, "variables_read", lambda: {*read, "NIXL_NEW"})
    with pytest.raises(generate.UndocumentedError, match="NIXL_NEW"):
        generate.environment_page()


@pytest.mark.long
def test_a_finding_without_a_page_makes_the_page_stale(
    generate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "PAGES", {"findings": generate.PAGES["findings"]})
    assert generate.main(["--check"]) == 0
    new = replace(next(iter(FINDINGS.values())), id="NIXL-NEW")
    monkeypatch.setattr(generate, "FINDINGS", {**FINDINGS, "NIXL-NEW": new})
    assert generate.main(["--check"]) == 1
    assert "docs/reference/findings.md is stale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return ``x``.", "Return `x`."),
        ("Keep <name>/* of ``<name>/*``.", "Keep &lt;name>/\\* of `<name>/*`."),
        ("Measure :class:`pytest.Item`.", "Measure `pytest.Item`."),
        ("Do it.\n\n:param a: first.\n:param b: second,\n  and more.\n:raises ValueError: if not.",
         "Do it.\n\n- `a`: first.\n- `b`: second, and more.\n- raises `ValueError`: if not."),
        ("Do it. :raises ValueError: if not.", "Do it.\n\n- raises `ValueError`: if not."),
    ],
)  # fmt: skip
def test_a_docstring_becomes_markdown(generate: Any, docstring: str, expected: str) -> None:
    assert generate.markdown(docstring) == expected
