# SPDX-License-Identifier: Apache-2.0
"""``tests/helpers/near.py``: which test files are nearest to a change."""

from __future__ import annotations

import pytest
from helpers import near
from helpers.cli_run import ROOT


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("pytest_nixl/judge/floors.py", {"tests/unit/judge/test_floors.py"}),  # named like it
        ("pytest_nixl/report/matrix.py", {"tests/unit/report/test_report_formats.py"}),  # of a module that imports it
        ("pytest_nixl/__main__.py", {"tests/integration/test_bounds.py"}),  # run by another process only
        ("suites/early.py", {"tests/integration/test_early.py"}),  # named like it
        ("suites/metadata/test_many.py", {"tests/integration/test_metadata_suite.py"}),  # runs it
        ("tests/helpers/s3.py", {"tests/unit/nixl/test_obj.py"}),
        ("tests/unit/core/test_units.py", {"tests/unit/core/test_units.py"}),
        ("README.md", {"tests/integration/test_docs.py"}),
    ],
)
def test_the_tests_of_a_file_are_near(path: str, tests: set[str]) -> None:
    assert tests <= set(near.near([path]))


def test_tests_that_do_not_use_a_module_are_not_near() -> None:
    assert "tests/unit/core/test_units.py" not in near.near(["pytest_nixl/judge/floors.py"])


def test_each_module_has_tests_that_are_near() -> None:
    modules = list(near.PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    assert [module for module in modules if not near.near([str(module)])] == []


def test_a_path_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert near.main(["pytest_nixl/no_such_module.py"]) == near.NOTHING
    assert "pytest_nixl/no_such_module.py does not exist; name files or folders" in capsys.readouterr().err
