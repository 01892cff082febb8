# SPDX-License-Identifier: Apache-2.0
"""Give values of NIXL_ETCD_ENDPOINTS to real agents, and see in etcd and on stderr what each agent does.

A new agent stores an empty key ``<namespace>/<agent>/`` at once, with the client that later publishes its metadata.
This module looks for that key, so the agents need no backend.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.endpoint_reading import INVALID, ReadOutcome
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
    :param words: NIXL's message without credentials; empty if there was none.
    :param version: version of NIXL.
    """

    text: str
    outcome: ReadOutcome
    words: str
    version: str

    def agrees(self, prediction: ReadOutcome) -> bool:
        """Whether the outcome is the predicted one; NIXL before 1.5 does not distinguish kinds of failure."""
        if not self.words and ReadOutcome.PUBLISHES not in (self.outcome, prediction):
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

    def _end(self, outcome: ReadOutcome, words: str) -> EndpointTrial:
        self._until = None
        return EndpointTrial(self._text, outcome, words, str(self._first.worker.versions["nixl"]))


def complaint(output: str, agent: str) -> str:
    """Return NIXL's last message about an agent's keys in etcd, without credentials; empty if there is none."""
    for name, message in reversed(_FAILED.findall(output)):
        if name == agent:
            return redact(message)
    return ""
