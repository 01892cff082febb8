# SPDX-License-Identifier: Apache-2.0
"""Modules that a worker imports from the files from which pytest has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_nixl.nixl.worker.imported_files import import_file


@pytest.mark.parametrize("marked", [True, False])
def test_a_module_of_a_file_is_imported_after_its_packages(tmp_path: Path, marked: bool) -> None:
    inner = tmp_path / "outer_of_test" / "inner"
    inner.mkdir(parents=True)
    (inner / "value.py").write_text("VALUE = 7\n")
    (inner / "test_x.py").write_text("from .value import VALUE\nfrom ..inner.value import VALUE as SAME\n")
    for folder in (inner, inner.parent) if marked else ():
        (folder / "__init__.py").touch()
    try:
        module = import_file("outer_of_test.inner.test_x", str(inner / "test_x.py"))
        assert module.VALUE == module.SAME == 7
        assert import_file("outer_of_test.inner.test_x", str(inner / "test_x.py")) is module
    finally:
        for name in [name for name in sys.modules if name.startswith("outer_of_test")]:
            del sys.modules[name]


def test_a_module_is_imported_by_its_name_if_python_has_it_from_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    found, other, broken = (
        tmp_path / name for name in ("found_of_test.py", "own/found_of_test.py", "broken_of_test.py")
    )
    found.write_text("VALUE = 1\n")
    other.write_text("VALUE = 2\n")
    broken.write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert import_file("found_of_test", str(found)) is sys.modules["found_of_test"]
        assert import_file("found_of_test", f"{tmp_path}/own/../found_of_test.py").VALUE == 1
        assert import_file("found_of_test", str(other)).VALUE == 2
        assert import_file("found_of_test", f"{other}") is sys.modules["found_of_test"]
        with pytest.raises(ValueError, match="broken"):
            import_file("broken_of_test", str(broken))
        assert "broken_of_test" not in sys.modules
    finally:
        sys.modules.pop("found_of_test", None)
