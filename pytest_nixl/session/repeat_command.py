# SPDX-License-Identifier: Apache-2.0
"""The command that runs a test, or the measurement of a row, again."""

from __future__ import annotations

import shlex

import pytest

from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.session.options import given_options
from pytest_nixl.session.run import Run

#: Options that judge or write a whole run.
_LEFT_OUT = {"--nixl-gate", "--nixl-baseline", "--nixl-store", "--nixl-report", "--nixl-rank", "--nixl-log-dir"}


def repeat_command(item: pytest.Item, row: RowKey | None) -> str:
    """Return the command that runs this test, or this row, again. Secrets are left out."""
    given = {flag: value for flag, value in given_options(item.config).items() if flag not in _LEFT_OUT}
    if row is None or row.kv or row.pattern or (row.walks and Run.of(item.config).settings.footprint is None):
        where = _suite(item)
        where[-1] += "".join(f"::{part}" for part in item.nodeid.split("::", 1)[1:])
    else:
        where = _suite(item)
        given |= {
            "--nixl-backend": row.plain_backend,
            "--nixl-op": row.op,
            "--nixl-memory": str(row.memory),
            "--nixl-blocks": str(row.block),
            "--nixl-batch": str(row.batch),
            "--nixl-depth": str(row.depth),
        }
        progress = Run.of(item.config).settings.progress_thread
        if len(progress) > 1 and not row.program:
            given["--nixl-progress-thread"] = "on" if ("progress-thread", "on") in row.variant else "off"
        if Run.of(item.config).in_cluster and row.pair[0] != row.pair[1]:
            given["--nixl-pairs"] = f"{row.pair[0]}:{row.pair[1]}"
    for option in OPTIONS:
        if option.secret:
            given.pop(option.flag, None)
    return shlex.join(["pytest", *where, *(f"{flag}={value}" for flag, value in given.items())])


def _suite(item: pytest.Item) -> list[str]:
    """Return the command-line arguments that select the suite of a test: its module if importable, else its file."""
    if item.config.getoption("pyargs"):
        module = getattr(item, "module", None)
        if module is not None and module.__name__.startswith("pytest_nixl."):
            return ["--pyargs", module.__name__]
    try:
        return [str(item.path.relative_to(item.config.invocation_params.dir))]
    except ValueError:
        return [str(item.path)]
