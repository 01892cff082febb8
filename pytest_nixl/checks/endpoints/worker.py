# SPDX-License-Identifier: Apache-2.0
"""Create additional agents in a worker with different endpoints: NIXL reads the variable anew for each agent."""

from __future__ import annotations

import os
from typing import Any

from pytest_nixl.nixl.worker import nixl_api

#: The agents are kept until the worker ends, because an agent that cannot reach etcd may take minutes to end.
_kept_alive: list[Any] = []


def make(agent: Any, name: str, endpoints: str) -> str:
    """Create an agent with other endpoints.

    The variable is already set, so setting it again does not move memory that another thread may read.

    :param agent: the raw agent of the worker, which is not used.
    :param name: the name of the new agent.
    :param endpoints: the value of ``NIXL_ETCD_ENDPOINTS``.
    :return: NIXL's message if it refuses the agent; otherwise an empty text.
    """
    os.environ["NIXL_ETCD_ENDPOINTS"] = endpoints
    try:
        _kept_alive.append(nixl_api.make_agent(name, listen_thread=True))
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""
