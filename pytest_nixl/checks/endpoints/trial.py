# SPDX-License-Identifier: Apache-2.0
"""Texts of NIXL_ETCD_ENDPOINTS given verbatim to real agents, and what etcd and their stderr say became of them.

An agent stores an empty key ``<namespace>/<agent>/`` as soon as it is made, through the client that later carries its
metadata: that key is what is looked for, and no backend has to be created for it.
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
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.endpoint_readers import INVALID, ReadOutcome
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_process import START_SECONDS, Worker

#: Workers at a time, at most.
WORKERS = 4
#: Seconds in which an agent that writes nothing (NIXL before 1.5 does not) has stored its key, where it can.
SILENCE = 2.0

_FAILED = re.compile(r"Failed to store agent (\S+) prefix key in etcd: (.*)")
#: gRPC would honour these, for an etcd on loopback too.
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY")


@dataclass(frozen=True)
class EndpointTrial:
    """What became of one text.

    :param words: NIXL's own, without credentials; empty where it said nothing.
    :param version: of that NIXL.
    """

    text: str
    outcome: ReadOutcome
    words: str
    version: str

    def agrees(self, prediction: ReadOutcome) -> bool:
        """Whether this is what was predicted; NIXL before 1.5 does not tell one failure from another."""
        if not self.words and ReadOutcome.PUBLISHES not in (self.outcome, prediction):
            return ReadOutcome.NO_AGENT not in (self.outcome, prediction)
        return self.outcome is prediction


def try_texts(
    texts: Mapping[str, ReadOutcome],
    *,
    supervisor: SupervisorClient,
    client: EtcdClient,
    namespace: str,
    timeout: float,
    start_timeout: float = START_SECONDS,
    environment: Mapping[str, str | None] | None = None,
) -> Iterator[EndpointTrial]:
    """Give each text to an agent of its own and yield, in their order, what became of it.

    :param texts: each with what is expected of it: a key that is expected is waited for up to ``timeout``.
    :param client: of the etcd in which the agents' keys would be.
    :param namespace: ``NIXL_ETCD_NAMESPACE`` of all of them; keys under it are the caller's to delete.
    :param timeout: seconds for each step.
    :param start_timeout: seconds for each worker to start.
    :param environment: further variables of the agents; None unsets one.
    :raises WorkerError: where NIXL dies or hangs over one of the texts.
    """
    variables = {
        "NIXL_ETCD_ENDPOINTS": "none",
        "NIXL_ETCD_NAMESPACE": namespace,
        **dict.fromkeys(_PROXIES),
        **(environment or {}),
    }
    count = max(1, min(WORKERS, len(texts) // 8))
    workers = [LocalHost(supervisor).start("trial", variables, timeout, start_timeout) for _ in range(count)]
    try:
        queue = deque(texts.items())
        benches = [_Bench(worker, queue, client, namespace, timeout) for worker in workers]
        done: dict[str, EndpointTrial] = {}
        while len(done) < len(texts):
            found = [trial for bench in benches if (trial := bench.step()) is not None]
            done |= {trial.text: trial for trial in found}
            if not found:
                time.sleep(0.005)
    finally:
        for worker in workers:
            worker.kill()
    yield from (done[text] for text in texts)


class _Bench:
    """A worker that tries one text after the other: an agent's thread may read the variable after it was made."""

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
        """Begin with the next text, or see what has become of the one that was begun."""
        if self._until is None:
            return self._begin() if self._queue else None
        if self._client.get(f"{self._namespace}/{self._name}/") is not None:
            return self._end(ReadOutcome.PUBLISHES, "")
        words = complaint(self._first.worker.output(), self._name)
        if words or time.monotonic() > self._until:
            return self._end(ReadOutcome.INVALID if INVALID in words else ReadOutcome.UNREACHED, words)
        return None

    def _begin(self) -> EndpointTrial | None:
        self._text, expected = self._queue.popleft()
        self._name = f"trial-{secrets.token_hex(4)}"
        function = "pytest_nixl.nixl.worker.extra_agent:make"
        refusal = self._first.run(function, name=self._name, endpoints=self._text)
        if refusal:
            return self._end(ReadOutcome.NO_AGENT, redact(refusal))
        self._until = time.monotonic() + (self._timeout if expected is ReadOutcome.PUBLISHES else SILENCE)
        return None

    def _end(self, outcome: ReadOutcome, words: str) -> EndpointTrial:
        self._until = None
        return EndpointTrial(self._text, outcome, words, str(self._first.worker.versions["nixl"]))


def complaint(output: str, agent: str) -> str:
    """Return the last thing that NIXL wrote about an agent's keys in etcd, without credentials; empty for nothing."""
    for name, words in reversed(_FAILED.findall(output)):
        if name == agent:
            return redact(words)
    return ""
