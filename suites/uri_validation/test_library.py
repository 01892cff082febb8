# SPDX-License-Identifier: Apache-2.0
"""Which etcd client library does NIXL load? Does nixlbench load the same one? Does it have a known patch?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, NixlAgent, PrivateEtcd, Settings, Verdict, parse_endpoints, supervisor
from pytest_nixl.checks.endpoints.trial import try_texts
from pytest_nixl.host.etcd_library import PATCH, EtcdLibrary, linked_library, loaded_library
from pytest_nixl.nixl.endpoint_readers import ReadOutcome


@pytest.fixture
def library(nixl_agent: NixlAgent) -> EtcdLibrary:
    """The etcd client library that the NIXL of this run has loaded."""
    found = loaded_library(nixl_agent.worker.pid)
    if found is None:
        pytest.skip("this NIXL has loaded no libetcd-cpp-api: it was built without etcd, or links it statically")
    return found


@pytest.mark.nixl_check("etcd-library")
def test_nixl_and_nixlbench_load_the_same_etcd_client(
    library: EtcdLibrary, verdict: Callable[[Judgement], None]
) -> None:
    """NIXL and nixlbench (if it is on PATH) load the same etcd client library."""
    program = shutil.which("nixlbench")
    if program is None:
        verdict(Judgement(Verdict.PASS, f"NIXL loads {library.path}; nixlbench is not on PATH"))
        return
    other = linked_library(program)
    if other is None:
        reason = f"NIXL loads {library.path}, but {program} loads none: it links one statically, or has no etcd"
        verdict(Judgement(Verdict.WARN, reason, "compare the versions of etcd-cpp-apiv3 with which both were built"))
    elif other.digest == library.digest:
        verdict(Judgement(Verdict.PASS, f"NIXL loads {library.path}, and {program} loads the same from {other.path}"))
    else:
        patch = f" (only that of {'NIXL' if library.patched else 'nixlbench'} has {PATCH})"
        reason = f"NIXL loads {library.path}, but {program} loads another one, {other.path}"
        remedy = "compare LD_LIBRARY_PATH and the run paths of both: a fix in one library is not in the other"
        verdict(Judgement(Verdict.WARN, reason + (patch if library.patched != other.patched else ""), remedy))


@pytest.mark.nixl_check("uri-validation-patch")
def test_the_patch_of_uri_validation_is_known(
    library: EtcdLibrary,
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """Report whether the library has the patch, its variable is set, and this changes what an agent does."""
    value = os.environ.get(PATCH)
    is_set = f"{PATCH} is {f'set to {value!r}' if value is not None else 'not set'}"
    where = f"{PATCH} is {'in' if library.patched else 'not in'} {library.path}"
    # gRPC can read this form, but NIXL's client refuses it first, unless the patch lets it pass.
    address = parse_endpoints(nixl_private_etcd.endpoint)[0]
    text = f"ipv4:{address.host}:{address.port}"
    without, with_it = (_outcome(text, setting, nixl_private_etcd, nixl_settings) for setting in (None, "1"))
    effect = "it has no effect" if without is with_it else f"with it an agent {with_it}, without it {without}"
    said = f"{where}; {is_set}; tried with {text.partition(':')[0]}:HOST:PORT, {effect}"
    if value is not None and without is with_it:
        remedy = f"unset {PATCH}: it has no effect here; write endpoints as `pytest-nixl endpoint` suggests"
        verdict(Judgement(Verdict.WARN, said, remedy))
    else:
        verdict(Judgement(Verdict.PASS, said))


def _outcome(text: str, setting: str | None, etcd: PrivateEtcd, settings: Settings) -> ReadOutcome:
    (trial,) = try_texts(
        {text: ReadOutcome.INVALID},
        supervisor=supervisor(),
        client=etcd.client,
        namespace="/patch",
        timeout=settings.timeout,
        start_timeout=settings.start_timeout,
        environment={PATCH: setting},
    )
    return trial.outcome
