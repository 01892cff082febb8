# SPDX-License-Identifier: Apache-2.0
"""Texts in files: they are read when the first is needed, and their links are plain on a terminal."""

from __future__ import annotations

import pytest

from pytest_nixl.core.texts import CUDA_ERRORS, NVML_ERRORS, XIDS, Entries, GpuError, with_plain_links


def test_a_file_is_read_when_an_entry_is_needed() -> None:
    entries: Entries[dict[str, str]] = Entries("no-such-file", dict)
    with pytest.raises(FileNotFoundError):
        list(entries)


def test_each_table_of_errors_has_its_own_entries_by_their_ids() -> None:
    for table, key in ((CUDA_ERRORS, "999"), (NVML_ERRORS, "lost"), (XIDS, "79")):
        assert len(table) == len(list(table)) > 1
        assert (key in table, table[key].id, type(table[key])) == (True, key, GpuError)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("see [GPUs](../how-to/gpu.md), [x](checks.md)", "see GPUs (docs/how-to/gpu.md), x (docs/reference/checks.md)"),
        ("[a b](../how-to/gpu.md#xid-79)", "a b (docs/how-to/gpu.md#xid-79)"),
        ("[NIXL](https://a.b/c?d=e#f)", "NIXL (https://a.b/c?d=e#f)"),
        *((text, text) for text in ("[](x.md)", "[x]", "[x](http:// y)", "[x](y.html)", "a[0](b)", "[[]](x.md)")),
    ],
)
def test_a_link_is_its_name_with_its_address(text: str, plain: str) -> None:
    assert with_plain_links(text) == plain
