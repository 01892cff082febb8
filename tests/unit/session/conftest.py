# SPDX-License-Identifier: Apache-2.0
"""Settings that are read from options, ini values and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.session.settings import read_settings


@pytest.fixture
def configure(pytester: pytest.Pytester) -> Callable[..., pytest.Config]:
    """Return pytest's configuration with options on the command line and values in an ini file, each by its field.

    The files that these tests name exist: here.pem, own.toml and raw/ucx_perftest.
    """
    pytester.path.joinpath("here.pem").touch()
    pytester.mkdir("raw").joinpath("ucx_perftest").touch(0o755)
    pytester.path.joinpath("own.toml").write_text('[profile]\nname = "own"\n')

    def make(options: Mapping[str, str] | None = None, ini: Mapping[str, str] | None = None) -> pytest.Config:
        pytester.makeini("\n".join(["[pytest]", *(f"nixl_{name} = {text}" for name, text in (ini or {}).items())]))
        given = [(item, (options or {})[item.field]) for item in OPTIONS if item.field in (options or {})]
        return parse_config(pytester, *(item.flag if item.switch else f"{item.flag}={text}" for item, text in given))

    return make


@pytest.fixture
def read(configure: Callable[..., pytest.Config]) -> Callable[..., Settings]:
    """Read settings from options, ini values and variables."""

    def read(
        options: Mapping[str, str] | None = None,
        ini: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        return read_settings(configure(options, ini), environ or {})

    return read
