# SPDX-License-Identifier: Apache-2.0
"""Settings that are read from options, ini values and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.session.settings import read_settings


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the files that settings name, in the directory of the test: here.pem, own.toml and raw/ucx_perftest."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "ucx_perftest").touch(0o755)
    (tmp_path / "here.pem").touch()
    (tmp_path / "own.toml").write_text('[profile]\nname = "own"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def configure(files: Path) -> Callable[..., pytest.Config]:
    """Return a configuration with options and ini values, each by its field.

    A double: pytest's own takes a tenth of a second. One test compares the two.
    """

    def make(options: Mapping[str, str] | None = None, ini: Mapping[str, str] | None = None) -> pytest.Config:
        given, lines = options or {}, ini or {}
        typed = {item.ini: "yes" if item.switch else given[item.field] for item in OPTIONS if item.field in given}
        values = {item.ini: lines.get(item.field) for item in OPTIONS}
        return cast(
            pytest.Config,
            SimpleNamespace(getoption=lambda name, default: typed.get(name, default), getini=values.__getitem__),
        )

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
