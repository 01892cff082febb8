# SPDX-License-Identifier: Apache-2.0
"""Rows that a program of another project measured: their keys begin with its name, as in ``nixlbench:UCX/WRITE/…``."""

from __future__ import annotations

from dataclasses import replace

from pytest_nixl.model.row_key import RowKey


def measured_by(key: RowKey, program: str) -> RowKey:
    """Return the key that the same row has where a program measured it; it is never one of our own."""
    return replace(key, backend=f"{program.replace('/', '_')}:{key.backend}")


def program_of(key: str) -> str:
    """Return the program that measured a row, by the row's key or its backend; empty: pytest-nixl itself."""
    return key.partition("/")[0].rpartition(":")[0]


def backend_of(key: str) -> str:
    """Return NIXL's name of a row's backend, by the row's key or its backend."""
    return key.partition("/")[0].rpartition(":")[2]
