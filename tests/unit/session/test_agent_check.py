# SPDX-License-Identifier: Apache-2.0
"""A bad option of agents ends the run before a test, in one sentence, with the real NIXL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.model.agent_options import BackendParameter, ThreadCounts
from pytest_nixl.model.settings import Settings
from pytest_nixl.session.preconditions import refuse_agent_options

MakeSettings = Callable[..., Settings]


def parameter(name: str, value: str) -> dict[str, Any]:
    return {"backend_params": (BackendParameter("UCX", name, value),)}


@pytest.mark.long
def test_an_unknown_parameter_is_named_with_the_accepted_ones(make_settings: MakeSettings) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        refuse_agent_options(make_settings(**parameter("banana", "1")))
    message = str(caught.value)
    assert "UCX of NIXL " in message
    assert " has no parameter 'banana': it has " in message
    assert "num_workers" in message
    assert "\n" not in message


@pytest.mark.long
def test_a_value_that_the_backend_refuses_is_reported_in_its_words(make_settings: MakeSettings) -> None:
    with pytest.raises(
        pytest.UsageError, match=r"NIXL cannot create the backend UCX with these options: .*'many'.* num_workers"
    ):
        refuse_agent_options(make_settings(**parameter("num_workers", "many")))


def test_good_options_and_no_options_are_accepted(make_settings: MakeSettings) -> None:
    refuse_agent_options(make_settings())
    good = make_settings(threads=ThreadCounts(2, 0), sync_mode="strict", **parameter("num_workers", "2"))
    refuse_agent_options(good)


@pytest.mark.long
def test_a_nixl_that_does_not_work_is_left_to_the_checks(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    refuse_agent_options(make_settings(**parameter("banana", "1")))


@pytest.mark.long
def test_the_run_ends_before_its_first_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(nixl_settings): pass")
    result = run_pytest(pytester, "--nixl-backend-params=UCX:banana=1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nixl-backend-params=UCX:banana=1: UCX of NIXL * has no parameter 'banana'*"])
    assert "passed" not in result.stdout.str()
