# SPDX-License-Identifier: Apache-2.0
"""The check ``object-store``: can the servers of OBJ and AZURE_BLOB be used, by another client and by NIXL?"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from pytest_nixl.core.errors import LateError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.units import KIB
from pytest_nixl.model.agent_options import AgentOptions, BackendParameter
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.backends import plugin_of
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS
from pytest_nixl.nixl.worker.object_stores import MOST_SKEW, ObjectStoreError, StoreClient
from pytest_nixl.nixl.worker.objects import PREFIX, open_store
from pytest_nixl.nixl.worker.s3 import ObjectClient
from pytest_nixl.nixl.worker.s3_faults import CHECKSUM
from pytest_nixl.processes.worker_errors import NixlError

#: The bytes of the object.
SIZE = 64 * KIB
#: The time that NIXL has for one transfer, in seconds. It would try again for minutes.
SECONDS = 25.0
#: A larger difference of the clocks is a WARN, in seconds.
_LITTLE_SKEW = 60.0
_CHECKSUM_MODE = "req_checksum"


class _RefusedError(Exception):
    """NIXL failed to move or find the object."""


def judge_object_store(agents: Agents, settings: Settings, environ: Mapping[str, str] = os.environ) -> Judgement:
    """Judge the servers of the rows of OBJ and AZURE_BLOB.

    A client that shares nothing with NIXL tries each first, then NIXL.

    :param agents: starts agents with the run's settings.
    :param environ: the variables that name the server, the bucket or container, and the key.
    :returns: the first judgement that is not PASS; otherwise PASS with the reasons of all servers.
    """
    names = [name for name in settings.backend if plugin_of(name) in OBJECT_PLUGINS]
    if not names:
        asked = ",".join(settings.backend)
        only = " and ".join(OBJECT_PLUGINS)
        return Judgement(Verdict.NOT_APPLICABLE, f"--nixl-backend={asked} uses no object store: only {only} do")
    reasons = []
    for name in names:
        judged = _judge(agents, name, settings.agents[0], environ)
        if judged.verdict is not Verdict.PASS:
            return judged
        reasons.append(judged.reason)
    return Judgement(Verdict.PASS, "; ".join(reasons))


def _judge(agents: Agents, name: str, options: AgentOptions, environ: Mapping[str, str]) -> Judgement:
    """Judge the server of one backend."""
    try:
        store = open_store(plugin_of(name), options.parameters_of(name), environ)
    except ObjectStoreError as error:
        return Judgement(Verdict.FAIL, error.reason, error.remedy)
    key = f"{PREFIX}/{secrets.token_hex(8)}/check"
    with contextlib.closing(store) as client:
        if (fault := _fault(client, key)) is not None:
            return fault
        try:
            found = _by_nixl(agents, name, options, client, key)
        except _RefusedError as error:
            return _fault(client, key) or _compared(agents, name, options, client, key, str(error))
        finally:
            with contextlib.suppress(ObjectStoreError):
                client.delete(key)
        return found or _clock(client) or Judgement(Verdict.PASS, _described(client, options, name))


def _described(client: StoreClient, options: AgentOptions, name: str) -> str:
    mode = options.parameters_of(name).get(_CHECKSUM_MODE, "supported")
    how = f" ({_CHECKSUM_MODE}={mode})" if plugin_of(name) == "OBJ" else ""
    return (
        f"{client.server} stores, returns and deletes objects of {client.space}, and NIXL writes, finds and reads "
        f"them{how}"
    )


def _fault(client: StoreClient, key: str) -> Judgement | None:
    """Return what the other client finds wrong with the server; None: nothing."""
    try:
        client.probe(key)
    except ObjectStoreError as error:
        # Some servers refuse a wrong time as a wrong signature.
        refused = error.kind in ("credentials", "rights", "clock")
        if refused and client.ahead is not None and abs(client.ahead) > MOST_SKEW:
            reason = f"{error.reason}: {_skew(client.ahead)}, and such servers refuse more than {MOST_SKEW:g} s"
            return Judgement(Verdict.FAIL, reason, client.clock.remedy)
        return Judgement(Verdict.FAIL, error.reason, error.remedy)
    return None


def _clock(client: StoreClient) -> Judgement | None:
    if client.ahead is None or abs(client.ahead) <= _LITTLE_SKEW:
        return None
    reason = f"{client.server}: {_skew(client.ahead)}; such servers refuse more than {MOST_SKEW:g} s"
    return Judgement(Verdict.WARN, reason, client.clock.remedy)


def _skew(ahead: float) -> str:
    return f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"


def _compared(
    agents: Agents, name: str, options: AgentOptions, client: StoreClient, key: str, reason: str
) -> Judgement:
    """Judge what NIXL alone cannot do: does a parameter help?"""
    says = f"{reason}; another client stores, reads and deletes objects of {client.server}"
    for trial in _trials(options.parameters_of(name), client) if plugin_of(name) == "OBJ" else ():
        others = tuple(each for each in options.parameters if (each.backend, each.name) != (name, trial.parameter))
        with_it = (*others, BackendParameter(name, trial.parameter, trial.value))
        with contextlib.suppress(_RefusedError):
            if _by_nixl(agents, name, replace(options, parameters=tuple(sorted(with_it))), client, key) is None:
                helps = f"so does NIXL with {trial.parameter}={trial.value}"
                return Judgement(Verdict.FAIL, f"{says}, and {helps}: {trial.means}", trial.remedy)
    return Judgement(
        Verdict.FAIL, says, "set NIXL_LOG_LEVEL=debug, run it again, and read the worker's log and the server's"
    )


class _Trial(NamedTuple):
    """A parameter that helps against one fault: what it proves if NIXL succeeds with it, and the remedy."""

    parameter: str
    value: str
    means: str
    remedy: str


def _trials(given: Mapping[str, str], client: StoreClient) -> Iterator[_Trial]:
    """Yield what may help OBJ; first that without which NIXL fails only when its time is up."""
    if isinstance(client, ObjectClient) and (doubt := client.doubt()) is not None and client.store.bundle:
        means = (
            "without it NIXL's plugin does not trust the server's certificate, because it reads neither AWS_CA_BUNDLE "
            "nor, in a wheel, the certificates of Debian or Ubuntu"
        )
        yield _Trial("ca_bundle", client.store.bundle, means, doubt.remedy)
    mode = given.get(_CHECKSUM_MODE, "supported")
    if mode != "required":
        means = f"this server does not accept the checksums that NIXL sends with {_CHECKSUM_MODE}={mode}"
        yield _Trial(_CHECKSUM_MODE, "required", means, CHECKSUM.remedy)


def _by_nixl(agents: Agents, name: str, options: AgentOptions, client: StoreClient, key: str) -> Judgement | None:
    """Write an object, look for it and read it by NIXL, and compare with what the other client sees.

    :returns: what NIXL does wrong; None: nothing.
    :raises _RefusedError: NIXL reports an error, or is not done in time.
    """
    agent = agents.start(backends=[name], agent_options=options, progress_thread=False)
    try:
        buffer = agent.allocate(SIZE)
        agent.register(buffer)
        agent.register_memory([(0, SIZE, 1, key)], "OBJ")
        content = secrets.token_bytes(SIZE)
        buffer.write(content)
        _transfer(agent, name, "WRITE", buffer.descriptor())
        if (wrong := _not_stored(client, key, content)) is not None:
            return wrong
        if (unfound := _unfound(agent, name, key)) is not None:
            return unfound
        buffer.write(bytes(SIZE))
        _transfer(agent, name, "READ", buffer.descriptor())
        return None if buffer.read() == content else _corrupt("NIXL's READ", client, key)
    except NixlError as error:
        raise _RefusedError(error.reason) from None
    finally:
        # NIXL's own end would wait for its retries.
        agent.worker.kill()


def _not_stored(client: StoreClient, key: str, content: bytes) -> Judgement | None:
    """Return what the other client finds wrong with an object whose WRITE is DONE; None: nothing."""
    try:
        found = client.get(key, 0, SIZE)
    except ObjectStoreError as error:
        if error.kind == "key":
            return _corrupt("NIXL's WRITE", client, key, "the object does not exist")
        return Judgement(Verdict.FAIL, error.reason, error.remedy)
    return None if found == content else _corrupt("NIXL's WRITE", client, key)


def _unfound(agent: NixlAgent, name: str, key: str) -> Judgement | None:
    """Return what is wrong with NIXL's answers for an object that exists and one that does not; None: nothing."""
    try:
        asked = [(0, SIZE, 0, key), (0, SIZE, 0, f"{key}-absent")]
        present, absent = agent.query_memory(asked, plugin_of(name), "OBJ")
    except NixlError as error:
        says = f"query_memory of NIXL fails for objects, although NIXL can write them: {error.reason}"
    else:
        if present is not None and absent is None:
            return None
        says = f"query_memory of NIXL answers {present} for an object that exists and {absent} for one that does not"
    return Judgement(
        Verdict.FAIL, says, "give this key the rights to read and list objects: query_memory sends HEAD requests"
    )


def _transfer(agent: NixlAgent, name: str, op: str, memory: tuple[int, int, int]) -> None:
    local, remote = agent.get_xfer_descs([memory], "DRAM"), agent.get_xfer_descs([(0, SIZE, 1)], "OBJ")
    handle = agent.initialize_xfer(op, local, remote, agent.name, b"", backends=[plugin_of(name)])
    state = agent.transfer(handle)
    try:
        wait_until(lambda: state == "DONE" or agent.check_xfer_state(handle) == "DONE", "NIXL", seconds=SECONDS)
    except LateError:
        raise _RefusedError(f"NIXL's {op} of an object of {SIZE} bytes is not done after {SECONDS:g} s") from None
    agent.release_xfer_handle(handle)


def _corrupt(
    what: str, client: StoreClient, key: str, but: str = "its bytes are not those that were written"
) -> Judgement:
    return Judgement(
        Verdict.CORRUPT,
        f"{what} of object {key} on {client.server} is DONE, but {but}",
        "use another release of NIXL or of the server, and keep the worker's log",
    )
