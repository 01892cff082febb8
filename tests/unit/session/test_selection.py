# SPDX-License-Identifier: Apache-2.0
"""Which suite a test belongs to, what a run left out, and checks that may be repeated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.session.outcome import refuse_marked
from pytest_nixl.session.run import Run
from pytest_nixl.session.selection import (
    check_expected,
    pyargs_of_pasted,
    suite_names,
    suite_of,
    suites_not_chosen,
)

ALL = "bandwidth control_path endurance faults infrastructure kv_cache metadata rank_race telemetry uri_validation"


def test_a_pasted_node_id_of_a_suite_is_named_for_pyargs(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "test_misuse.py").touch()  # a file of the user
    pasted = {
        "metadata/test_exchange.py::test_it[a]": "pytest_nixl.suites.metadata.test_exchange::test_it[a]",
        "test_exchange.py": "pytest_nixl.suites.metadata.test_exchange",
    }
    others = ("faults/test_misuse.py", "metadata/test_none.py", "a/metadata/test_exchange.py", "test_exchange.pyc",
              "metadata/exchange.py", "metadata", "-k", "xmetadata/test_exchange.py", "exchange.py")  # fmt: skip
    assert pyargs_of_pasted([*pasted, *others], tmp_path) == pasted


def test_the_suite_of_a_test_is_a_folder_of_the_suites() -> None:
    for path, suite in (
        ("/a/suites/metadata/test_it.py", "metadata"), ("/a/suites/metadata/more/test_it.py", "metadata"),
        ("/a/suites/mine/test_it.py", None), ("/a/metadata/test_it.py", None), ("/a/suites/test_it.py", None),
    ):  # fmt: skip
        assert suite_of(Path(path)) == suite
    assert suite_names() == {*ALL.split(), "pattern"}
    assert suites_not_chosen({"metadata", "faults"}) == [
        suite for suite in ALL.split() if suite not in ("metadata", "faults")
    ]


def test_a_check_is_expected_of_a_run_that_selected_its_suite() -> None:
    for check, chosen, expected in (
        ("nixl-loads", {"infrastructure"}, True), ("nixl-loads", {"metadata"}, False), ("nixl-loads", set(), False),
        ("of-a-user", set(), True),
    ):  # fmt: skip
        assert check_expected(check, chosen) is expected


def test_a_check_that_is_marked_to_be_repeated_is_refused() -> None:
    def item(*names: str, id: str = "a") -> Any:
        markers = {name: SimpleNamespace(args=(id,) if id else ()) for name in names}
        return SimpleNamespace(nodeid=f"t.py::{'-'.join(names)}", get_closest_marker=markers.get)

    refuse_marked([item("flaky"), item("nixl_check"), item("nixl_check", "flaky", id="")], "--nixl-gate")
    with pytest.raises(pytest.UsageError) as refused:
        refuse_marked([item("nixl_check"), item("nixl_check", "flaky")], "--nixl-gate")
    assert str(refused.value) == (
        "--nixl-gate is refused with t.py::nixl_check-flaky, which is marked flaky: it would be repeated until it "
        "passes; remove the marker, or start pytest with -p no:rerunfailures"
    )


def test_a_run_with_a_bad_setting_is_not_usable() -> None:
    def configured(backend: str) -> Any:
        return SimpleNamespace(
            stash=pytest.Stash(), getini=lambda _: None,
            getoption=lambda name, default: backend if name == "nixl_backend" else default,
        )  # fmt: skip

    assert (Run.of(configured("banana")).usable, Run.of(configured("UCX")).usable) == (False, True)
    config = configured("UCX")
    assert Run.of(config) is Run.of(config)
