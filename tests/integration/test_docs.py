# SPDX-License-Identifier: Apache-2.0
"""The tests printed in README and docs run as they are printed."""

from __future__ import annotations

import re

import pytest
from helpers.cli_run import ROOT
from helpers.pytester_run import run_pytest

pytestmark = pytest.mark.apart

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: What README's example calls beside the raw agent.
_MY_MODULE = """
def function(agent, peer):
    return {"ok": agent.check_remote_metadata(peer)}
"""


def _printed_tests() -> dict[str, str]:
    """Return each block of Python that holds a test, by its page and its place there."""
    return {
        f"{page.stem}-{number}": block
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for number, block in enumerate(_BLOCK.findall(page.read_text()), 1)
        if "def test_" in block
    }


PRINTED = _printed_tests()


@pytest.mark.parametrize("block", PRINTED.values(), ids=PRINTED)
def test_a_printed_test_runs(block: str, pytester: pytest.Pytester) -> None:
    """Where it asks for GPU memory it is skipped with that reason."""
    pytester.makepyfile(test_printed=block, my_module=_MY_MODULE)
    run = run_pytest(pytester, "--nixl-blocks=1MiB", "--nixl-timeout=60s", "-rs")
    counted = run.parseoutcomes()
    skipped = counted.get("skipped", 0)
    assert run.ret == 0, run.stdout.str()
    assert counted.get("passed", 0) + skipped >= block.count("def test_")
    assert skipped == run.stdout.str().count("needs a GPU, and this host has")


def test_pages_with_tests_are_found() -> None:
    assert PRINTED.keys() >= {"README-1", "gpu-1", "rank-race-1"}
