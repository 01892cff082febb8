# SPDX-License-Identifier: Apache-2.0
"""Rows that an external program measured. Their keys begin with its name, as in ``nixlbench:UCX/WRITE/…``."""

from __future__ import annotations

from dataclasses import replace

from pytest_nixl.model.row_key import RowKey


def measured_by(key: RowKey, program: str) -> RowKey:
    """Return the key of the same row measured by an external program; it differs from the key of every other row."""
    return replace(key, backend=f"{program.replace('/', '_')}:{key.backend}")


def program_of(key: str) -> str:
    """Return the program that measured a row; empty: pytest-nixl itself.

    :param key: the row's key, or only its backend.
    """
    return key.partition("/")[0].rpartition(":")[0]


def backend_of(key: str) -> str:
    """Return a row's backend without the program's name.

    :param key: the row's key, or only its backend.
    """
    return key.partition("/")[0].rpartition(":")[2]
