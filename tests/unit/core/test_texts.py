# SPDX-License-Identifier: Apache-2.0
"""Texts in files: they are read when the first is needed, and not when a module that has them is imported."""

from __future__ import annotations

import pytest

from pytest_nixl.core.texts import Entries


def test_a_file_is_read_when_an_entry_is_needed() -> None:
    entries: Entries[dict[str, str]] = Entries("no-such-file", dict)
    with pytest.raises(FileNotFoundError):
        list(entries)
