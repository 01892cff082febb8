# SPDX-License-Identifier: Apache-2.0
"""Give values of NIXL_ETCD_ENDPOINTS to real agents, see in etcd and on stderr what each does, and judge it.

A new agent stores an empty key ``<namespace>/<agent>/`` at once, with the client that later publishes its metadata.
This module looks for that key, so the agents need no backend.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import INVALID, Address, ReadOutcome
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_process import Worker

#: Maximum number of workers at a time.
WORKERS = 4
#: Seconds after which an agent without key and message is taken as failed (NIXL before 1.5 writes no message).
SILENCE = 2.0

_FAILED = re.compile(r"Failed to store agent (\S+) prefix key in etcd: (.*)")
#: gRPC would use these proxies even for an etcd on loopback.
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY")


@dataclass(frozen=True)
class EndpointTrial:
    """What a real agent did with one value.

    :param text: the value of NIXL_ETCD_ENDPOINTS.
    :param message: NIXL's message without credentials; empty if there was none.
    :param version: version of NIXL.
    """

    text: str
    outcome: ReadOutcome
    message: str
    version: str

    def agrees(self, prediction: ReadOutcome) -> bool:
        """Whether the outcome is the predicted one; NIXL before 1.5 does not distinguish kinds of failure."""
        if not self.message and ReadOutcome.PUBLISHES not in (self.outcome, prediction):
            return ReadOutcome.NO_AGENT not in (self.outcome, prediction)
        return self.outcome is prediction


def try_texts(
    texts: Mapping[str, ReadOutcome],
    client: EtcdClient,
    settings: Settings,
    supervisor: SupervisorClient,
    *,
    namespace: str,
    environment: Mapping[str, str | None] | None = None,
) -> Iterator[EndpointTrial]:
    """Give each value to a new agent, and yield the results in the same order.

    :param texts: values of NIXL_ETCD_ENDPOINTS with their expected outcomes.
    :param client: client of the etcd in which the agents would store their keys.
    :param settings: has the time limits: of each step, as the wait for a key, and of the start of a worker.
    :param supervisor: the supervisor that owns the workers.
    :param namespace: ``NIXL_ETCD_NAMESPACE`` of all agents; the caller deletes the keys under it.
    :param environment: further variables of the agents; None unsets a variable.
    :raises WorkerError: if NIXL dies or hangs on one of the values.
    """
    variables = {
        "NIXL_ETCD_ENDPOINTS": "none",
        "NIXL_ETCD_NAMESPACE": namespace,
        **dict.fromkeys(_PROXIES),
        **(environment or {}),
    }
    count = max(1, min(WORKERS, len(texts) // 8))
    limits = settings.timeout, settings.start_timeout
    workers = [LocalHost(supervisor).start("trial", variables, *limits) for _ in range(count)]
    try:
        queue = deque(texts.items())
        benches = [_Bench(worker, queue, client, namespace, settings.timeout) for worker in workers]
        done: dict[str, EndpointTrial] = {}
        while len(done) < len(texts):
            trials = [trial for bench in benches if (trial := bench.step()) is not None]
            done |= {trial.text: trial for trial in trials}
            if not trials:
                time.sleep(0.005)
    finally:
        for worker in workers:
            worker.kill()
    yield from (done[text] for text in texts)


class _Bench:
    """A worker that tries one value at a time, because an agent's thread may read the variable late."""

    def __init__(
        self, worker: Worker, queue: deque[tuple[str, ReadOutcome]], client: EtcdClient, namespace: str, timeout: float
    ) -> None:
        self._first = NixlAgent.within(worker, backends=[], progress_thread=False)
        self._queue = queue
        self._client = client
        self._namespace = namespace
        self._timeout = timeout
        self._text = self._name = ""
        self._until: float | None = None

    def step(self) -> EndpointTrial | None:
        """Start with the next value, or check the current one; return its result once there is one."""
        if self._until is None:
            return self._begin() if self._queue else None
        if self._client.get(f"{self._namespace}/{self._name}/") is not None:
            return self._end(ReadOutcome.PUBLISHES, "")
        complaint_text = complaint(self._first.worker.output(), self._name)
        if complaint_text or time.monotonic() > self._until:
            return self._end(
                ReadOutcome.INVALID if INVALID in complaint_text else ReadOutcome.UNREACHED, complaint_text
            )
        return None

    def _begin(self) -> EndpointTrial | None:
        self._text, expected = self._queue.popleft()
        self._name = f"trial-{secrets.token_hex(4)}"
        function = "pytest_nixl.checks.endpoints.worker:make"
        refusal = self._first.run(function, name=self._name, endpoints=self._text)
        if refusal:
            return self._end(ReadOutcome.NO_AGENT, redact(refusal))
        self._until = time.monotonic() + (self._timeout if expected is ReadOutcome.PUBLISHES else SILENCE)
        return None

    def _end(self, outcome: ReadOutcome, message: str) -> EndpointTrial:
        self._until = None
        return EndpointTrial(self._text, outcome, message, str(self._first.worker.versions["nixl"]))


def complaint(output: str, agent: str) -> str:
    """Return NIXL's last message about an agent's keys in etcd, without credentials; empty if there is none."""
    for name, message in reversed(_FAILED.findall(output)):
        if name == agent:
            return redact(message)
    return ""


#: The namespace of the agents in the test's etcd.
NAMESPACE = "/conformance"
REMEDY = "report this output with the version of NIXL to pytest-nixl: NIXL reads endpoints differently than predicted"


def judge_readings(
    texts: Sequence[str], client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> Judgement:
    """Give each text to a real agent, and judge whether the outcome is the predicted one.

    :param texts: values of NIXL_ETCD_ENDPOINTS, at least one.
    :param client: a client of the etcd that some of the texts name.
    """
    expected = {text: explain(text).predict(answers) for text in texts}
    trials = list(try_texts(expected, client, settings, supervisor, namespace=NAMESPACE))
    differences = [line for trial in trials if (line := _difference(trial))]
    if differences:
        description = f"{len(differences)} of {len(texts)} texts are not read as predicted: {'; '.join(differences)}"
        return Judgement(Verdict.FAIL, description, REMEDY)
    return Judgement(Verdict.PASS, f"NIXL {trials[0].version} reads {len(texts)} texts as predicted")


def suggestions(texts: Sequence[str], port: int) -> list[str]:
    """Return the values that ``pytest-nixl endpoint`` suggests for these texts and that name one etcd and no other.

    :param port: the port of that etcd, on this host.
    """
    rewrites = dict.fromkeys(rewrite for text in texts if (rewrite := explain(text).rewrite))
    return [rewrite for rewrite in rewrites if _answering_ports(rewrite) == {port}]


def judge_suggestions(
    rewrites: Sequence[str], client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> Judgement:
    """Give each suggested value to a real agent, and judge whether the agent publishes with it.

    :param rewrites: what :func:`suggestions` returned.
    :param client: a client of the etcd that they name.
    """
    expected = dict.fromkeys(rewrites, ReadOutcome.PUBLISHES)
    trials = list(try_texts(expected, client, settings, supervisor, namespace=NAMESPACE))
    broken = [
        f"{trial.text}: {trial.outcome} ({trial.message})"
        for trial in trials
        if trial.outcome is not ReadOutcome.PUBLISHES
    ]
    if broken:
        return Judgement(Verdict.FAIL, f"suggested values that do not work: {'; '.join(broken)}", REMEDY)
    return Judgement(Verdict.PASS, f"{len(rewrites)} rewrites work")


def answers(address: Address) -> bool:
    """Whether something accepts a TCP connection at this address."""
    try:
        socket.create_connection((address.host, address.port), timeout=2).close()
    except OSError:
        return False
    return True


def _difference(trial: EndpointTrial) -> str:
    explanation = explain(trial.text)
    predicted = explanation.predict(answers, trial.version)
    if trial.agrees(predicted):
        return ""
    answer = f" ({trial.message})" if trial.message else ""
    return f"{explanation.text!r}: predicted: {predicted}; NIXL {trial.version}: {trial.outcome}{answer}"


def _answering_ports(text: str) -> set[int]:
    members = [Address(endpoint.host, endpoint.port) for endpoint in parse_endpoints(text)]
    return {member.port for member in members if answers(member)}
