# SPDX-License-Identifier: Apache-2.0
"""What a worker says of an error of NIXL beside its code."""

from __future__ import annotations

import sys
import types

import pytest

from pytest_nixl.core import rdma_fault
from pytest_nixl.nixl.worker import __main__ as worker

#: The module that only a worker with GPU memory imports.
VRAM = "pytest_nixl.nixl.worker.vram"


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - NIXL's name
    """A double of NIXL's error, which needs a card that cannot access GPU memory."""


class nixlBackendError(Exception):  # noqa: N801 - NIXL's name
    """A double of NIXL's error, which needs a card that cannot be used."""


for error in (nixlRemoteDisconnectError, nixlBackendError):
    error.__module__ = "nixl_cu12._bindings"


def test_passed_through_card_is_named_if_the_worker_has_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "passthrough_fault", lambda environ: ("a card beside a GPU", "try another card"))
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setitem(sys.modules, VRAM, types.ModuleType(VRAM))
    said = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert (said["kind"], said["type"]) == ("nixl", "nixlRemoteDisconnectError")
    assert (said["message"], said["remedy"]) == ("NIXL_ERR_REMOTE_DISCONNECT: a card beside a GPU", "try another card")
    monkeypatch.delitem(sys.modules, VRAM)
    said = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert (said["message"], said.get("remedy")) == ("NIXL_ERR_REMOTE_DISCONNECT", None)


def test_agent_that_does_not_answer_over_rdma_is_looked_for_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "rdma_fault", lambda environ: ("", ""))
    monkeypatch.setenv("UCX_TLS", "rc")
    remedy = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))["remedy"]
    assert "check that the other agent's process runs" in remedy
    own = worker._error(nixlBackendError("NIXL_ERR_BACKEND"))["remedy"]
    assert "the other agent" not in own
    assert remedy.endswith(own), "the doctor of this host, too"
