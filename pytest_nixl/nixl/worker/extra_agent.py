# SPDX-License-Identifier: Apache-2.0
"""In a worker: further agents, each with endpoints of its own: NIXL reads the variable for each agent afresh."""

from __future__ import annotations

import os
from typing import Any

from pytest_nixl.nixl.worker import nixl_api

#: They live as long as the worker: one that cannot reach its etcd may take minutes to end.
_kept: list[Any] = []


def make(agent: Any, name: str, endpoints: str) -> str:
    """Make an agent with ``NIXL_ETCD_ENDPOINTS=endpoints``; return NIXL's words where it makes none, else nothing.

    The variable is there already, so that to set it moves nothing that another thread may read.
    """
    os.environ["NIXL_ETCD_ENDPOINTS"] = endpoints
    try:
        _kept.append(nixl_api.make_agent(name, listen_thread=True))
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""
