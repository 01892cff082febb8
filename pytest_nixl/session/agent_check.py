# SPDX-License-Identifier: Apache-2.0
"""Try the options of agents once before any test runs, so that a bad one ends the run with one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.processes.worker_process import Worker

#: A line with an error of NIXL in a worker's output.
_NIXL_ERROR = re.compile(r"^E\d{4} [^]]*\] (.+)$", re.MULTILINE)
#: The fields of the settings that are tried here. A progress thread needs no trial: every NIXL has one.
_TRIED = ("threads", "sync_mode", "backend_params")


def refuse_agent_options(settings: Settings) -> None:
    """Create an agent with each backend and the options of the run in a worker of this host.

    :raises pytest.UsageError: an agent can be created without the options, but not with them. If it cannot be created
        without them either, the checks say why.
    """
    options = replace(settings.agents[0], progress_thread=None)
    if options == AgentOptions():
        return
    for backend in settings.backend:
        if not options.variant(backend, BACKENDS[backend].PLUGIN) and options.sync_mode == "auto":
            continue
        if (fault := _fault(settings, backend, options)) and not _fault(settings, backend, AgentOptions()):
            raise pytest.UsageError(f"{' '.join(_typed_options(settings))}: {fault}")


def _typed_options(settings: Settings) -> Iterator[str]:
    """Yield the options that are not the default, as typed."""
    for item in OPTIONS:
        if item.field in _TRIED and settings.sources.get(item.field) != "default":
            yield f"{item.flag}={item.show(getattr(settings, item.field))}"


def _fault(settings: Settings, backend: str, options: AgentOptions) -> str:
    """Return in one sentence why an agent cannot be created; empty if it can."""
    worker: Worker | None = None
    try:
        variables = own_variables(settings.programs, memory=settings.memory)
        worker = LocalHost(supervisor(), own=variables).start(
            "agent", {"NIXL_ETCD_ENDPOINTS": None}, settings.timeout, settings.start_timeout
        )
        NixlAgent.within(worker, backends=[backend], progress_thread=False, agent_options=options)
    except NixlError as error:
        lines = _NIXL_ERROR.findall(worker.output()) if worker is not None else []
        return f"NIXL cannot create the backend {backend} with these options: {lines[0] if lines else error.type_name}"
    except WorkerError as error:
        return error.reason.partition(" (in ")[0]
    finally:
        if worker is not None:
            worker.kill()
    return ""
