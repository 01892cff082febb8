# SPDX-License-Identifier: Apache-2.0
"""The check ``object-store``: can the servers of OBJ and AZURE_BLOB be used, by another client and by NIXL?

It names a fault of one server within 30 s, or within 50 s if the server is slow to answer the first request. The time
that this host needs to start workers is not counted. The other client has 20 s, and NIXL what is left of them, at least
6 s. If NIXL is not done after 5 s, the other client asks the server again, for at most 20 s, and the parameters that
may help are tried while NIXL goes on. So a host that is only busy is not accused.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.units import KIB
from pytest_nixl.model.agent_options import AgentOptions, BackendParameter
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.backends import plugin_of
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS
from pytest_nixl.nixl.worker.object_stores import CHECKSUM, MOST_SKEW, PREFIX, ObjectStoreError, StoreClient
from pytest_nixl.nixl.worker.object_stores import SECONDS as CLIENT_SECONDS
from pytest_nixl.nixl.worker.s3 import ObjectClient
from pytest_nixl.processes.worker_errors import NixlError, WorkerHungError

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker import objects
else:  # it imports numpy
    objects = lazy_module("pytest_nixl.nixl.worker.objects")

#: The bytes of the object.
SIZE = 64 * KIB
#: The time of the check until NIXL is done, in seconds. NIXL would try again for minutes.
SECONDS = 20.0
#: NIXL has at least this time, also after a server that needed long to answer the other client.
LEAST_SECONDS = 6.0
#: After this time of NIXL, the other client asks the server, and parameters are tried.
ASK_SECONDS = 5.0
#: The time that NIXL has with a parameter that may help.
TRIAL_SECONDS = 6.0
#: The time for each step after NIXL's WRITE, and for each request of the other client after that.
LAST_SECONDS = 4.0
#: A larger difference of the clocks is a WARN, in seconds.
_LITTLE_SKEW = 60.0
_CHECKSUM_MODE = "req_checksum"


class _RefusedError(Exception):
    """NIXL failed to move or find the object."""


class _StoreFaultError(Exception):
    """The other client found a fault of the server."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(judgement.reason)
        self.judgement = judgement


class _Stopwatch:
    """The time of the check of one server. It stands still while a worker starts."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def passed(self) -> float:
        """The seconds since the beginning."""
        return time.monotonic() - self._began

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the time of the body."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._began += time.monotonic() - began


def judge_object_store(agents: Agents, settings: Settings) -> Judgement:
    """Judge the servers of the rows of OBJ and AZURE_BLOB.

    A client that shares nothing with NIXL tries each first, then NIXL.

    :param agents: starts agents with the run's settings.
    :returns: the first judgement that is not PASS; otherwise PASS with the reasons of all servers.
    """
    names = [name for name in settings.backend if plugin_of(name) in OBJECT_PLUGINS]
    if not names:
        backends = ",".join(settings.backend)
        only = " and ".join(OBJECT_PLUGINS)
        return Judgement(Verdict.NOT_APPLICABLE, f"--nixl-backend={backends} uses no object store: only {only} do")
    reasons = []
    for name in names:
        judged = _judge(agents, name, settings.agents[0])
        if judged.verdict is not Verdict.PASS:
            return judged
        reasons.append(judged.reason)
    return Judgement(Verdict.PASS, "; ".join(reasons))


def _judge(agents: Agents, name: str, options: AgentOptions) -> Judgement:
    """Judge the server of one backend."""
    try:
        store = objects.open_store(plugin_of(name), options.parameters_of(name))
    except ObjectStoreError as error:
        return Judgement(Verdict.FAIL, error.reason, error.remedy)
    key = f"{PREFIX}/{secrets.token_hex(8)}/check"
    with contextlib.closing(store) as client:
        watch = _Stopwatch()
        if (fault := _fault(client, key, CLIENT_SECONDS)) is not None:
            return fault
        attempt = _Attempt(agents, name, options, client, key, watch)
        try:
            judgement = attempt.judge()
        except _StoreFaultError as error:
            return error.judgement
        except _RefusedError as error:
            return _fault(client, key, LAST_SECONDS) or attempt.compared(str(error))
        finally:
            client.discard(key, LAST_SECONDS)
        return judgement or _clock(client) or Judgement(Verdict.PASS, _described(client, options, name))


def _described(client: StoreClient, options: AgentOptions, name: str) -> str:
    mode = options.parameters_of(name).get(_CHECKSUM_MODE, "supported")
    how = f" ({_CHECKSUM_MODE}={mode})" if plugin_of(name) == "OBJ" else ""
    return (
        f"{client.server} stores, returns and deletes objects of {client.space}, and NIXL writes, finds and reads "
        f"them{how}"
    )


def _fault(client: StoreClient, key: str, seconds: float) -> Judgement | None:
    """Return what the other client finds wrong with the server in some seconds; None: nothing."""
    try:
        client.probe(key, seconds)
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


class _Trial(NamedTuple):
    """A parameter that helps against one fault: what it proves if NIXL succeeds with it, and the remedy."""

    parameter: str
    value: str
    means: str
    remedy: str


def _trials(parameters: Mapping[str, str], client: StoreClient) -> Iterator[_Trial]:
    """Yield what may help OBJ; first that without which NIXL fails only when its time is up."""
    if isinstance(client, ObjectClient) and (doubt := client.doubt()) is not None and client.store.bundle:
        means = (
            "without it NIXL's plugin does not trust the server's certificate, because it reads neither AWS_CA_BUNDLE "
            "nor, in a wheel, the certificates of Debian or Ubuntu"
        )
        yield _Trial("ca_bundle", client.store.bundle, means, doubt.remedy)
    mode = parameters.get(_CHECKSUM_MODE, "supported")
    if mode != "required":
        means = f"this server does not accept the checksums that NIXL sends with {_CHECKSUM_MODE}={mode}"
        yield _Trial(_CHECKSUM_MODE, "required", means, CHECKSUM.remedy)


class _Attempt:
    """NIXL's attempt to write, find and read an object, and what is known of it.

    :param key: the object.
    :param watch: the time of the check.
    """

    def __init__(
        self, agents: Agents, name: str, options: AgentOptions, client: StoreClient, key: str, watch: _Stopwatch
    ) -> None:
        self._agents, self._name, self._options = agents, name, options
        self._client, self._key, self._watch = client, key, watch
        self._tried = False
        self._helps: _Trial | None = None

    def judge(self) -> Judgement | None:
        """Return what NIXL does wrong; None: nothing.

        :raises _RefusedError: NIXL reports an error, or is not done in time.
        :raises _StoreFaultError: NIXL is not done soon, and the server has a fault.
        """
        return self._by_nixl(self._options, max(SECONDS, self._watch.passed + LEAST_SECONDS), self._ask)

    def compared(self, reason: str) -> Judgement:
        """Judge what NIXL alone cannot do: does a parameter help?

        :param reason: what NIXL reported.
        """
        self._try_parameters()
        failure = f"{reason}; another client stores, reads and deletes objects of {self._client.server}"
        if (trial := self._helps) is not None:
            helps = f"so does NIXL with {trial.parameter}={trial.value}"
            return Judgement(Verdict.FAIL, f"{failure}, and {helps}: {trial.means}", trial.remedy)
        return Judgement(
            Verdict.FAIL, failure, "set NIXL_LOG_LEVEL=debug, run it again, and read the worker's log and the server's"
        )

    def _ask(self) -> None:
        """Ask the server by the other client. If it has no fault, try what may help NIXL.

        :raises _StoreFaultError: the server has a fault.
        """
        if (fault := _fault(self._client, self._key, CLIENT_SECONDS)) is not None:
            raise _StoreFaultError(fault)
        self._try_parameters()

    def _try_parameters(self) -> None:
        """Find the first parameter with which NIXL can use the server. Each is tried once."""
        if self._tried or plugin_of(self._name) != "OBJ":
            return
        self._tried = True
        for trial in _trials(self._options.parameters_of(self._name), self._client):
            changed = BackendParameter(self._name, trial.parameter, trial.value)
            kept_parameters = (
                parameter
                for parameter in self._options.parameters
                if (parameter.backend, parameter.name) != changed[:2]
            )
            options = replace(self._options, parameters=tuple(sorted((*kept_parameters, changed))))
            with contextlib.suppress(_RefusedError):
                if self._by_nixl(options, self._watch.passed + TRIAL_SECONDS) is None:
                    self._helps = trial
                    return

    def _by_nixl(self, options: AgentOptions, until: float, ask: Callable[[], None] | None = None) -> Judgement | None:
        """Write an object, look for it and read it by NIXL, and compare with what the other client sees.

        :param until: the time of the check at which NIXL must be done, in seconds.
        :param ask: called once if NIXL is not done soon.
        :returns: what NIXL does wrong; None: nothing.
        :raises _RefusedError: NIXL reports an error, or is not done in time.
        """
        client, key, name = self._client, f"{self._key}{'' if ask else '-trial'}", self._name
        with self._watch.stopped():
            agent = self._agents.start(backends=[name], agent_options=options, progress_thread=False)
        try:
            buffer = agent.allocate(SIZE)
            agent.register(buffer)
            agent.register_memory([(0, SIZE, 1, key)], "OBJ")
            content = secrets.token_bytes(SIZE)
            buffer.write(content)
            _transfer(agent, name, "WRITE", buffer.descriptor(), self._waiting("WRITE", until, ask))
            if (wrong := _not_stored(client, key, content, self._remaining(until))) is not None:
                return wrong
            usual, agent.worker.timeout = agent.worker.timeout, self._remaining(until)  # this step waits for the server
            if (unfound := _unfound(agent, name, key)) is not None:
                return unfound
            agent.worker.timeout = usual
            buffer.write(bytes(SIZE))
            until = self._watch.passed + self._remaining(until)
            _transfer(agent, name, "READ", buffer.descriptor(), self._waiting("READ", until, ask))
            return None if buffer.read() == content else _corrupt("NIXL's READ", client, key)
        except (NixlError, WorkerHungError) as error:
            raise _RefusedError(error.reason) from None
        finally:
            # NIXL's own end would wait for its retries.
            agent.worker.kill()
            if not ask:
                client.discard(key, LAST_SECONDS)

    def _remaining(self, until: float) -> float:
        """Return the seconds for a step after WRITE."""
        return max(LAST_SECONDS, until - self._watch.passed)

    def _waiting(self, op: str, until: float, ask: Callable[[], None] | None) -> Callable[[float], None]:
        """Return what is called while NIXL makes a transfer, with its seconds."""
        asks = [ask] if ask else []

        def waiting(seconds: float) -> None:
            if asks and seconds > ASK_SECONDS:
                asks.pop()()
            elif self._watch.passed > until:
                raise _RefusedError(f"NIXL's {op} of an object of {SIZE} bytes is not done after {seconds:.0f} s")

        return waiting


def _transfer(
    agent: NixlAgent, name: str, op: str, memory: tuple[int, int, int], waiting: Callable[[float], None]
) -> None:
    """Make a transfer.

    :param waiting: called with the seconds since its post until it is done.
    """
    local, remote = agent.get_xfer_descs([memory], "DRAM"), agent.get_xfer_descs([(0, SIZE, 1)], "OBJ")
    handle = agent.initialize_xfer(op, local, remote, agent.name, b"", backends=[plugin_of(name)])
    began, state = time.monotonic(), agent.transfer(handle)
    while state != "DONE" and (state := agent.check_xfer_state(handle)) != "DONE":
        waiting(time.monotonic() - began)
        time.sleep(0.01)
    agent.release_xfer_handle(handle)


def _not_stored(client: StoreClient, key: str, content: bytes, seconds: float) -> Judgement | None:
    """Return what the other client finds wrong in some seconds with an object whose WRITE is DONE; None: nothing."""
    try:
        stored = client.within(seconds, lambda: client.get(key, 0, SIZE))
    except ObjectStoreError as error:
        if error.kind == "key":
            return _corrupt("NIXL's WRITE", client, key, "the object does not exist")
        return Judgement(Verdict.FAIL, error.reason, error.remedy)
    return None if stored == content else _corrupt("NIXL's WRITE", client, key)


def _unfound(agent: NixlAgent, name: str, key: str) -> Judgement | None:
    """Return what is wrong with NIXL's answers for an object that exists and one that does not; None: nothing."""
    try:
        queries = [(0, SIZE, 0, key), (0, SIZE, 0, f"{key}-absent")]
        present, absent = agent.query_memory(queries, plugin_of(name), "OBJ")
    except NixlError as error:
        failure = f"query_memory of NIXL fails for objects, although NIXL can write them: {error.reason}"
    else:
        if present is not None and absent is None:
            return None
        failure = f"query_memory of NIXL answers {present} for an object that exists and {absent} for one that does not"
    return Judgement(
        Verdict.FAIL, failure, "give this key the rights to read and list objects: query_memory sends HEAD requests"
    )


def _corrupt(
    operation: str, client: StoreClient, key: str, but: str = "its bytes are not those that were written"
) -> Judgement:
    return Judgement(
        Verdict.CORRUPT,
        f"{operation} of object {key} on {client.server} is DONE, but {but}",
        "use another release of NIXL or of the server, and keep the worker's log",
    )
