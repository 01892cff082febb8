# SPDX-License-Identifier: Apache-2.0
"""Functions of test files run in a worker, however pytest has imported the files."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

#: Two files of one name, each with another answer, and an import from beside it.
FILE = """
from {imported} import FACTOR

def answer(agent, number):
    return [agent.name, number * FACTOR * {factor}]

def test_answer(nixl_agent):
    assert nixl_agent.run(f"{{__name__}}:answer", number=7) == [nixl_agent.name, 7 * 2 * {factor}]

def test_an_error_in_it_is_named(nixl_agent):
    nixl_agent.run(f"{{__name__}}:no_function")
"""


# Only importlib takes two test files of one name in folders that are not packages.
@pytest.mark.parametrize(
    ("mode", "packages"), [("importlib", True), ("importlib", False), ("append", True), ("prepend", True)]
)
def test_a_function_of_a_test_file_runs_in_a_worker(pytester: pytest.Pytester, mode: str, packages: bool) -> None:
    # Not in the current folder, which `python -m pytest` adds to sys.path.
    project = pytester.mkdir("project")
    (project / "pytest.ini").write_text("[pytest]\n")
    for folder, factor in (("one", 10), ("two", 100)):
        path = project / folder
        path.mkdir()
        if packages:
            (path / "__init__.py").touch()
        # A relative import needs a package; pytest gives one to each file that it imports by importlib.
        (path / f"helper_{folder}.py").write_text("FACTOR = 2\n")
        (path / "test_it.py").write_text(FILE.format(imported=f".helper_{folder}", factor=factor))
    if mode == "importlib":  # another module that a worker would find by this name
        (pytester.mkpydir("one") / "test_it.py").write_text("def answer(agent, number): return 'of another file'\n")
    result = run_pytest(pytester, "project", f"--import-mode={mode}", "--nixl-backend=UCX")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*AttributeError*no_function*"] * 2)
