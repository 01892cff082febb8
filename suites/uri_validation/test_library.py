# SPDX-License-Identifier: Apache-2.0
"""Which etcd client library does NIXL load, is it nixlbench's too, and is a known patch in it?"""

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
    """What the NIXL of this run has loaded."""
    found = loaded_library(nixl_agent.worker.pid)
    if found is None:
        pytest.skip("this NIXL has loaded no libetcd-cpp-api: it was built without etcd, or with it inside")
    return found


@pytest.mark.nixl_check("etcd-library")
def test_nixl_and_nixlbench_load_the_same_etcd_client(
    library: EtcdLibrary, verdict: Callable[[Judgement], None]
) -> None:
    """The etcd client library in NIXL's process is the one that nixlbench would load, where that is on PATH."""
    program = shutil.which("nixlbench")
    if program is None:
        verdict(Judgement(Verdict.PASS, f"NIXL loads {library.path}; nixlbench is not on PATH"))
        return
    other = linked_library(program)
    if other is None:
        reason = f"NIXL loads {library.path}, and {program} links none: it has one inside, or no etcd"
        verdict(Judgement(Verdict.WARN, reason, "compare the versions of etcd-cpp-apiv3 that both were built with"))
    elif other.digest == library.digest:
        verdict(Judgement(Verdict.PASS, f"NIXL loads {library.path}, and {program} loads the same from {other.path}"))
    else:
        patch = f" ({PATCH} is in {'that of NIXL' if library.patched else 'that of nixlbench'} only)"
        reason = f"NIXL loads {library.path}, and {program} another one, {other.path}"
        remedy = "what is mended in the one is not in the other: compare LD_LIBRARY_PATH and the programs' run paths"
        verdict(Judgement(Verdict.WARN, reason + (patch if library.patched != other.patched else ""), remedy))


@pytest.mark.nixl_check("uri-validation-patch")
def test_the_patch_of_uri_validation_is_known(
    library: EtcdLibrary,
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """Whether the library has the patch, whether its variable is set, and whether that changes what an agent does."""
    value = os.environ.get(PATCH)
    is_set = f"{PATCH} is {f'set to {value!r}' if value is not None else 'not set'}"
    where = f"{PATCH} is {'in' if library.patched else 'not in'} {library.path}"
    # gRPC itself could read this form; NIXL's client refuses it before, unless the patch lets it through.
    address = parse_endpoints(nixl_private_etcd.endpoint)[0]
    text = f"ipv4:{address.host}:{address.port}"
    without, with_it = (_outcome(text, setting, nixl_private_etcd, nixl_settings) for setting in (None, "1"))
    effect = "it changes nothing" if without is with_it else f"with it an agent {with_it}, without it {without}"
    said = f"{where}; {is_set}; tried with {text.partition(':')[0]}:HOST:PORT, {effect}"
    if value is not None and without is with_it:
        remedy = f"unset {PATCH}: it mends nothing here; write endpoints as `pytest-nixl endpoint` says"
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
