# SPDX-License-Identifier: Apache-2.0
"""The checks of the control path: what agents do before and around transfers, timed as figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from pytest_nixl.core.units import KIB, MIB, format_size
from pytest_nixl.etcd.transaction import REQUEST_LIMIT
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory
from pytest_nixl.judge.growth import Growth, judge_growth
from pytest_nixl.model.figure import BYTES, Figure
from pytest_nixl.model.kv_cache import KvPlan
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import shake_hands
from pytest_nixl.processes.worker_process import results

#: The module with the functions that agents run in their workers.
_IN_WORKER = "pytest_nixl.checks.control_path.worker"

#: The size of a region where the number of regions matters: a page.
PAGE = 4096
#: The numbers of regions that are registered, each of a page, and whose metadata is exported and loaded.
COUNTS = (1, 16, 256)
#: The sizes of one region that is registered, and those at the level ``extended``.
SIZES, EXTENDED_SIZES = (MIB, 64 * MIB), (256 * MIB, 1024 * MIB)
#: How often each is repeated.
REPEATS = 10
#: Growth: the regions of one registration, the registrations without a deregistration between them, and the rounds.
PER_ROUND, CALLS, ROUNDS = 16, 64, 5
#: The size of the transfers after a connection.
TRANSFER = 64 * KIB
#: Notifications that are answered one by one, and those of the burst.
SINGLE, BURST = 200, 1000
#: The time that those that are answered one by one take at most, in seconds.
AT_MOST = 0.5

#: The words of etcd, and of gRPC for a request that is larger still.
_TOO_LARGE = re.compile(r"request is too large|larger than max", re.IGNORECASE)

GROWTH_REMEDY = (
    "Run the check again with another release of NIXL, and report the growth with both releases; until it is fixed, "
    "register memory in few calls before serving, instead of for each request."
)


def regions_of(plan: KvPlan) -> int:
    """Return the number of regions that an engine registers for a KV cache: one for each tensor."""
    return plan.layers * plan.tensors_per_layer


def sizes_that_fit(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of at most a quarter of the memory that is available on this host."""
    free = available_memory(FactsRoot())
    return tuple(size for size in sizes if free is None or 4 * size <= free.size)


@dataclass(frozen=True)
class ControlPath:
    """Two agents in workers of their own, on which the control path is timed.

    :param seconds: the deadline of each step.
    """

    backend: str
    agent: NixlAgent
    other: NixlAgent
    seconds: float

    @property
    def healthy(self) -> bool:
        """Whether both workers are alive."""
        return self.agent.worker.alive and self.other.worker.alive

    def creation(self, count: int = 3) -> tuple[Figure, ...]:
        """Time the creation of agents in a process that has one already."""
        progress_thread = shake_hands([self.backend])
        times = self._run("create_agents", backend=self.backend, count=count, progress_thread=progress_thread)
        return (self._figure("agent-creation", times),)

    def registration(self, count: int, size: int) -> tuple[Figure, ...]:
        """Time the registration of some regions in one call, and their deregistration."""
        times = self._run("register", count=count, size=size, repeats=REPEATS)
        labels = {"count": count, "size": format_size(size)}
        registered, deregistered = ([pair[side] for pair in times] for side in (0, 1))
        return (
            self._figure("registration", registered, **labels),
            self._figure("deregistration", deregistered, **labels),
        )

    def growth(self) -> dict[str, Growth]:
        """Return how registration, and deregistration, depends on how many there were before.

        What became slower is measured again, and the lesser growth counts.
        """
        growth = self._growth()
        if any(steps.slower for steps in growth.values()):
            again = self._growth()
            growth = {name: min(steps, again[name], key=lambda fit: fit.least_factor) for name, steps in growth.items()}
        return growth

    def _growth(self) -> dict[str, Growth]:
        times = self._run("accumulate", count=PER_ROUND, repeats=CALLS, rounds=ROUNDS)
        return {name: Growth.of(rounds, references) for name, (rounds, references) in times.items()}

    def metadata(self, count: int) -> tuple[Figure, ...]:
        """Time the export of the metadata of an agent with some regions, and loading it in the other agent."""
        times = self._run("export", count=count, repeats=REPEATS)
        # A backend that shakes hands cannot be loaded again after it was forgotten (LIBFABRIC-NO-RECONNECT).
        repeats = 1 if shake_hands([self.backend]) else REPEATS
        loaded = self._run("load", of=self.other, metadata=times["metadata"], repeats=repeats)
        size = Figure.of("metadata-size", len(times["metadata"]), {"backend": self.backend, "count": count})
        return (
            self._figure("metadata-export", times["seconds"], count=count),
            self._figure("metadata-load", loaded, count=count),
            size,
        )

    def connection(self, repeats: int = REPEATS) -> tuple[Figure, ...]:
        """Time the connection to the other agent, the first transfer, and later ones. The agents must be new."""
        local, remote = (agent.allocate(TRANSFER) for agent in (self.agent, self.other))
        self.agent.register(local)
        self.other.register(remote)
        self._introduce()
        times = self._with_answers(
            "connect_and_write",
            1,
            target=self.other.name,
            local=list(local.descriptor()),
            remote=list(remote.descriptor()),
            repeats=1 + repeats,
        )
        first, *later = times["transfers"]
        size = {"size": format_size(TRANSFER)}
        return (
            self._figure("connect", [times["connect"]]),
            self._figure("first-transfer", [first], **size),
            self._figure("later-transfer", later, **size),
        )

    def notifications(self) -> tuple[Figure, ...]:
        """Time notifications that are answered one by one, and a burst of them."""
        self._introduce()
        times = self._with_answers("notify", BURST, peer=self.other.name, single=SINGLE, seconds=AT_MOST, burst=BURST)
        latencies = [seconds / 2 for seconds in times["round_trips"]]
        rate = Figure.of("notification-rate", BURST / times["burst"], {"backend": self.backend})
        return (self._figure("notification-latency", latencies), rate)

    def _with_answers(self, function: str, until: int, /, **arguments: Any) -> Any:
        """Run a function while the other agent answers, until it has a burst of this many notifications."""
        timeout = {"timeout": self.seconds}
        answering = self._request("answer", self.other, peer=self.agent.name, burst=until, **timeout)
        asking = self._request(function, self.agent, **arguments, **timeout)
        return results([asking, answering])[0]

    def _introduce(self) -> None:
        """Let each agent load the present metadata of the other one."""
        self.agent.add_remote_agent(self.other.get_agent_metadata())
        self.other.add_remote_agent(self.agent.get_agent_metadata())

    def _figure(self, name: str, times: Sequence[float], **labels: object) -> Figure:
        return Figure.of(name, median(times), {"backend": self.backend, **labels}, tuple(times))

    def _run(self, function: str, *, of: NixlAgent | None = None, **arguments: Any) -> Any:
        return results([self._request(function, of or self.agent, **arguments)])[0]

    def _request(self, function: str, agent: NixlAgent, **arguments: Any) -> Any:
        worker, seconds = agent.worker, self.seconds + 5
        return worker.request(
            "run", seconds=seconds, agent=agent.ref, function=f"{_IN_WORKER}:{function}", arguments=arguments
        )


def find_all(finder: NixlAgent, owners: Sequence[NixlAgent], seconds: float) -> list[str]:
    """Let an agent fetch the metadata of others from etcd; return the names of those that it did not load in time."""
    names = [other.name for other in owners]
    return cast("list[str]", finder.run(f"{_IN_WORKER}:find", names=names, timeout=seconds))


def register_regions(agent: NixlAgent, count: int) -> bytes:
    """Register this many regions of a page each for good, and return the metadata of the agent."""
    agent.run(f"{_IN_WORKER}:keep_registered", count=count)
    return agent.get_agent_metadata()


def refusal_of(output: str) -> str:
    """Return the line in which NIXL reports that etcd refused a request for its size; empty: it wrote none."""
    return next((line.strip() for line in reversed(output.splitlines()) if _TOO_LARGE.search(line)), "")


def describe_oversize(regions: int, size: int, published: bytes | None, wrote: str) -> str:
    """Return what was seen when an agent published metadata, as one sentence.

    :param regions: the number of regions that it had registered.
    :param size: the bytes of its metadata.
    :param published: what etcd has; None: nothing.
    :param wrote: what NIXL wrote about it; empty: nothing.
    """
    description = f"metadata of {regions} regions ({BYTES.show(size)})"
    if published is not None and len(published) == size:
        return f"{description} was published to etcd, which by default accepts requests of up to 1.5 MiB"
    held = "nothing" if published is None else f"the {BYTES.show(len(published))} of an earlier publication"
    limit = " of 1.5 MiB" if size > REQUEST_LIMIT else ""
    from_nixl = f"; on stderr NIXL wrote: {wrote}" if wrote else ""
    return f"{description} exceeds etcd's request limit{limit}: etcd still has {held}{from_nixl}"


def judge_path_growth(path: ControlPath) -> Judgement:
    """Judge whether registration or deregistration becomes slower with each repeat: the first that does, else PASS."""
    judged = [judge_growth(name, growth, GROWTH_REMEDY) for name, growth in path.growth().items()]
    slower = [judgement for judgement in judged if judgement.verdict is not Verdict.PASS]
    return slower[0] if slower else Judgement(Verdict.PASS, "; ".join(judgement.reason for judgement in judged))
