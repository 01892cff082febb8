# SPDX-License-Identifier: Apache-2.0
"""The checks ``etcd-library`` and ``uri-validation-patch``: which etcd client does NIXL load, and is it patched?"""

from __future__ import annotations

import os
import shutil

from pytest_nixl.checks.endpoints.trial import try_texts
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary, linked_etcd_client, loaded_etcd_client
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.endpoint_reading import ReadOutcome
from pytest_nixl.processes.supervisor import SupervisorClient


def library_of(agent: NixlAgent) -> EtcdLibrary:
    """Return the etcd client library that the NIXL of an agent has loaded.

    :raises NotApplicableError: it has loaded none.
    """
    library = loaded_etcd_client(agent.worker.pid)
    if library is None:
        raise NotApplicableError(
            "this NIXL has loaded no libetcd-cpp-api: it was built without etcd, or links it statically"
        )
    return library


def judge_library(library: EtcdLibrary) -> Judgement:
    """Judge whether nixlbench, if it is on PATH, loads the same etcd client library as NIXL."""
    program = shutil.which("nixlbench")
    if program is None:
        return Judgement(Verdict.PASS, f"NIXL loads {library.path}; nixlbench is not on PATH")
    other = linked_etcd_client(program)
    if other is None:
        reason = f"NIXL loads {library.path}, but {program} loads none: it links one statically, or has no etcd"
        return Judgement(Verdict.WARN, reason, "compare the versions of etcd-cpp-apiv3 with which both were built")
    if other.digest == library.digest:
        return Judgement(Verdict.PASS, f"NIXL loads {library.path}, and {program} loads the same from {other.path}")
    patch = f" (only that of {'NIXL' if library.patched else 'nixlbench'} has {URI_PATCH})"
    reason = f"NIXL loads {library.path}, but {program} loads another one, {other.path}"
    remedy = "compare LD_LIBRARY_PATH and the run paths of both: a fix in one library is not in the other"
    return Judgement(Verdict.WARN, reason + (patch if library.patched != other.patched else ""), remedy)


def judge_patch(
    library: EtcdLibrary, endpoint: Endpoint, client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> Judgement:
    """Judge whether the patch's variable is set although it changes nothing that an agent does.

    :param endpoint: an etcd on this host, which agents try to reach.
    :param client: a client of this etcd.
    """
    value = os.environ.get(URI_PATCH)
    is_set = f"{URI_PATCH} is {f'set to {value!r}' if value is not None else 'not set'}"
    where = f"{URI_PATCH} is {'in' if library.patched else 'not in'} {library.path}"
    # gRPC can read this form, but NIXL's client refuses it first, unless the patch lets it pass.
    text = f"ipv4:{endpoint.host}:{endpoint.port}"
    without, with_it = (outcome_with(text, setting, client, settings, supervisor) for setting in (None, "1"))
    effect = "it has no effect" if without is with_it else f"with it an agent {with_it}, without it {without}"
    description = f"{where}; {is_set}; tried with {text.partition(':')[0]}:HOST:PORT, {effect}"
    if value is not None and without is with_it:
        remedy = f"unset {URI_PATCH}: it has no effect here; write endpoints as `pytest-nixl endpoint` suggests"
        return Judgement(Verdict.WARN, description, remedy)
    return Judgement(Verdict.PASS, description)


def outcome_with(
    text: str, setting: str | None, client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> ReadOutcome:
    """Return what an agent does with a text if the patch's variable has this setting; None: it is not set."""
    texts = {text: ReadOutcome.INVALID}
    (trial,) = try_texts(texts, client, settings, supervisor, namespace="/patch", environment={URI_PATCH: setting})
    return trial.outcome
