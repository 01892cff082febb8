# SPDX-License-Identifier: Apache-2.0
"""A NIXL in memory: its agents register memory, exchange metadata through an etcd, and move bytes, on its own clock.

Nothing happens at once: what an agent is asked for happens while the clock's ``sleep`` moves it on. So a test that does
not wait for an event does not see it, and no test depends on the speed of the machine.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from pytest_nixl.core.errors import LateError
from pytest_nixl.nixl.backends import shake_hands
from pytest_nixl.processes.worker_errors import NixlError, WorkerDiedError, WorkerHungError

#: The address of the etcd.
ETCD = "http://etcd:2379"
#: Seconds until a request reaches etcd, and until a cut connection is there again.
REQUEST, RECONNECTED = 0.02, 0.7
#: Seconds for which an agent waits for the metadata of another that it fetches.
MISSING = 5.0


def nixl_error(reason: str, type_name: str = "nixlBackendError") -> NixlError:
    return NixlError(reason, "", "", type_name)


class DoubledClock:
    """A clock that only ``sleep`` moves on, and what happens at its times. It stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action))


class DoubledProxy:
    """A proxy to the etcd, which is cut off and restored; ``requests`` are those of agents that use it."""

    endpoint = "http://proxy:1"

    def __init__(self, nixl: DoubledNixl) -> None:
        self._nixl = nixl
        self.requests: tuple[Any, ...] = ()
        self.open_from = 0.0
        self.cuts = 0
        self.path = self

    def request(self, method: str, key: str) -> Any:
        """Count a request, and return it."""
        label = f"{method}({key})"
        request = type("DoubledRequest", (SimpleNamespace,), {"__str__": lambda _: label})(key=key, confirmed=False)
        self.requests += (request,) * ("ignores-proxy" not in self._nixl.faults)
        return request

    def cut(self) -> None:
        self.cuts += 1
        self.open_from = float("inf")
        for agent in self._nixl.agents_alive():
            if agent.proxy is self and "watch-lost" in self._nixl.faults:
                agent.watched.clear()

    def restore(self) -> None:
        if "never-back" not in self._nixl.faults:
            self.open_from = self._nixl.clock.now + RECONNECTED

    def wait(self, condition: Callable[[], bool], description: str, *, seconds: float) -> None:
        end = self._nixl.clock.now + seconds
        while not condition():
            if self._nixl.clock.now > end:
                raise LateError(f"waited {seconds:g} s for {description}")
            self._nixl.clock.sleep(0.01)


class DoubledEtcd:
    """A client of the etcd that all agents of a NIXL use. With the fault ``etcd-late`` every second answer is late."""

    endpoints: tuple[str, ...] = (ETCD,)

    def __init__(self, nixl: DoubledNixl) -> None:
        self._nixl = nixl
        self.keys: dict[str, bytes] = {}
        self._answers = itertools.count()

    def get(self, key: str) -> bytes | None:
        return self.get_prefix(key).get(key)

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        if "etcd-late" in self._nixl.faults and next(self._answers) % 2 == 0:
            raise LateError("etcd is late")
        if "etcd-fails" in self._nixl.faults:
            raise nixl_error("etcd fails")
        return {key: value for key, value in sorted(self.keys.items()) if key.startswith(prefix)}

    def count_prefix(self, prefix: str) -> int:
        return len(self.get_prefix(prefix))

    def lease_of(self, key: str) -> int | None:
        return (7 if "leases" in self._nixl.faults else 0) if key in self.keys else None


class DoubledBuffer:
    """Memory of an agent's process, of whole patterns only."""

    def __init__(self, number: int, size: int, memory: str) -> None:
        self.number, self.size, self.memory = number, size, memory
        self.content = b""

    def descriptor(self) -> tuple[int, int, int]:
        return (self.number, self.size, 0)

    def fill(self, seed: int, *, inverted: bool = False) -> Any:
        content = b"%d" % (-seed if inverted else seed)
        return SimpleNamespace(result=lambda: setattr(self, "content", content))

    def compare(self, seed: int) -> dict[str, int] | None:
        if self.content == b"%d" % seed:
            return None
        return {"wrong_bytes": self.size if self.content == b"%d" % -seed else 1, "offset": 0}


class DoubledWorker:
    """The process of agents, which can be killed and then answers no call."""

    def __init__(self, number: int, role: str = "agent") -> None:
        self.name = f"worker {number}"
        self.alive = True
        self.timeout = 60.0
        self.lines: list[str] = ["I0101 it starts"]

    def output(self) -> str:
        return "\n".join([*self.lines, "a line about nothing"])

    def kill(self) -> None:
        self.alive = False


class DoubledAgent:
    """An agent of a doubled NIXL: the methods of ``NixlAgent`` that suites call."""

    def __init__(self, nixl: DoubledNixl, name: str, worker: DoubledWorker, environment: Mapping[str, Any]) -> None:
        self.nixl, self.name, self.worker, self._environment = nixl, name, worker, environment
        self.memory: list[int] = []
        self.known: dict[str, dict[str, Any]] = {}
        self.watched: set[str] = set()
        self.notifications: list[tuple[str, bytes]] = []
        self.port, self.served, self.deleted = 0, nixl.threads, False
        self._connected: set[str] = set()
        self._fetches: deque[tuple[str, str]] = deque()
        #: The agents that it has fetched through etcd.
        self.looked_for: list[str] = []
        self._remembered: list[int] = []
        name_of = environment.get("NIXL_ETCD_NAMESPACE")
        default = "/nixl/agents" if "default-is-documented" in nixl.faults else "/nixl/agents/"
        self._prefix = default if name_of is None else str(name_of)
        if self.endpoint:
            self._send(f"{self._prefix}/{name}/", b"")

    @property
    def endpoint(self) -> str:
        """The first address that is an etcd's; empty if there is none."""
        endpoints = str(self._environment.get("NIXL_ETCD_ENDPOINTS") or "").split(",")
        return next((address for address in endpoints if address in (ETCD, DoubledProxy.endpoint)), "")

    @property
    def proxy(self) -> DoubledProxy | None:
        return self.nixl.proxy if self.endpoint == DoubledProxy.endpoint else None

    @property
    def alive(self) -> bool:
        return self.worker.alive and not self.deleted

    def _answers(self) -> bool:
        """Whether it answers an agent that loads its metadata."""
        return self.served or not shake_hands([self.nixl.backend])

    def _call(self) -> None:
        if not self.alive:
            raise WorkerDiedError(f"{self.worker.name} was ended by SIGKILL")
        if self in self.nixl.hung:
            raise WorkerHungError(f"{self.worker.name} hangs")

    def _reaches_etcd(self) -> bool:
        return bool(self.endpoint) and (self.proxy is None or self.proxy.open_from <= self.nixl.clock.now)

    def log(self, text: str) -> None:
        self.worker.lines.append(f"E0101 {text}")

    # Memory and transfers

    def get_plugin_list(self) -> list[str]:
        return self.nixl.plugins

    def create_backend(self, *arguments: Any) -> None:
        self.nixl.created.append((self.name, *arguments))

    def allocate_asked(self, size: int, *, initiator: bool = False) -> DoubledBuffer:
        return self.allocate(size, "VRAM" if initiator else "DRAM")

    def allocate(self, size: int, memory: str = "DRAM", **options: Any) -> DoubledBuffer:
        self._call()
        self.nixl.allocated.append((self.name, size, memory, options))
        buffer = DoubledBuffer(next(self.nixl.numbers), size, memory)
        self.nixl.buffers[buffer.number] = buffer
        return buffer

    def register(self, buffer: DoubledBuffer) -> int:
        self._call()
        self.memory.append(buffer.number)
        return buffer.number

    def deregister_memory(self, registration: int) -> None:
        self.memory.remove(registration)

    def get_xfer_descs(self, regions: Sequence[tuple[int, int, int]], memory: str) -> list[int]:
        assert all(self.nixl.buffers[number].memory == memory for number, _, _ in regions)
        return [number for number, _, _ in regions]

    def get_reg_descs(self, regions: Sequence[tuple[int, int, int, str]], memory: str) -> list[int]:
        assert all(self.nixl.buffers[number].memory == memory and text == "" for number, _, _, text in regions)
        assert regions or memory == "DRAM"
        return [number for number, _, _, _ in regions]

    def connect_to(self, other: DoubledAgent) -> None:
        self._connected.add(other.name)

    def initialize_xfer(
        self, op: str, local: list[int], remote: list[int], owner: str, text: bytes, *, backends: Sequence[str] = ("",)
    ) -> Any:
        self._call()
        ours = self._metadata(self.memory, connections=True)
        loaded = ours if owner == self.name else self.known.get(owner, {"memory": []})
        if not set(remote) <= set(loaded["memory"]) or not loaded["connections"] or not set(local) <= set(self.memory):
            raise nixl_error("no such memory", "nixlNotFoundError")
        if owner not in (self.name, *self._connected) and shake_hands([self.nixl.backend]):
            raise nixl_error("not connected")
        assert (op, len(local), len(remote)) == ("WRITE", 1, 1)
        (backend,) = backends
        self.nixl.initialized.append((self.name, owner, text, backend))
        state = {"done": False, "reported": False, "backend": backend}
        return SimpleNamespace(source=local[0], target=remote[0], loaded=loaded, text=text, **state)

    def query_xfer_backend(self, handle: Any) -> str:
        return "ANOTHER" if f"ignores-{handle.backend}" in self.nixl.faults else str(handle.backend)

    def transfer(self, handle: Any) -> str:
        self._call()
        owner: DoubledAgent = self.nixl.incarnations[handle.loaded["number"]]
        faults = self.nixl.faults
        self.nixl.posted += 1
        if not owner.alive or f"refuses-{self.nixl.posted}" in faults:
            raise nixl_error(f"{owner.name} cannot be reached", "nixlRemoteDisconnectError")
        if f"hangs-{self.nixl.posted}" in faults:
            raise WorkerHungError(f"{self.worker.name} hangs for {self.worker.timeout:g} s")

        def deliver() -> None:
            self.nixl.moved += 1
            if self.nixl.moved != self.nixl.spoiled:
                self.nixl.buffers[handle.target].content = self.nixl.buffers[handle.source].content
            if "unnotified" not in faults:
                owner.notifications.append((self.name, handle.text))

        if "posts" in faults and self._reaches_etcd() and self.proxy is not None:
            self.proxy.request("Put", f"{self._prefix}/{self.name}/metadata")
        if not {"stalls", f"stalls-{handle.backend}"}.intersection(faults):
            self.nixl.clock.after(self.nixl.done_after, lambda: setattr(handle, "done", True))
        self.nixl.clock.after(self.nixl.delivered_after if handle.text else self.nixl.done_after, deliver)
        handle.done = handle.reported = self.nixl.done_after == 0
        return "DONE" if handle.done else "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        assert not handle.reported, "a transfer that was done was polled"
        handle.reported = handle.done
        return "DONE" if handle.done else "PROC"

    def check_remote_xfer_done(self, name: str, text: bytes) -> bool:
        return (name, text) in self.notifications

    def release_xfer_handle(self, handle: Any) -> None:
        assert handle.done, "a transfer in flight was released"
        self.nixl.released += 1

    # Metadata

    def _metadata(self, memory: Sequence[int], *, connections: bool) -> dict[str, Any]:
        number = next(n for n, agent in self.nixl.incarnations.items() if agent is self)
        return {"name": self.name, "number": number, "memory": list(memory), "connections": connections}

    def get_agent_metadata(self) -> bytes:
        self._call()
        return json.dumps({**self._metadata(self.memory, connections=True), "whole": True}).encode()

    def get_partial_agent_metadata(self, part: list[int], connections: bool) -> bytes:
        if part and "parts-have-all" in self.nixl.faults:
            part = self.memory
        if "parts-have-none" in self.nixl.faults:
            part = []
        return json.dumps({**self._metadata(part, connections=connections), "whole": False}).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        loaded = json.loads(metadata)
        owner, name = self.nixl.incarnations[loaded["number"]], str(loaded["name"])
        assert owner._answers() or not loaded["connections"]
        self._load(loaded)
        return "another" if "other-name" in self.nixl.faults else name

    def _load(self, loaded: dict[str, Any], served_by: DoubledAgent | None = None) -> None:
        if served_by is not None and not served_by._answers():
            return
        before = self.known.get(loaded["name"])
        if before and before["number"] != loaded["number"]:
            if "restart-refused" in self.nixl.faults:
                self.log(f"etcd: {loaded['name']} is another agent")
                return
            before = None
        if before and (not loaded["whole"] or "deregistered-known" in self.nixl.faults):
            loaded["memory"] = [*before["memory"], *loaded["memory"]]
        loaded["connections"] |= before is not None and before["connections"]
        loaded["memory"] = [*loaded["memory"], *self._remembered]
        if f"all-memory-of-{loaded['name']}" in self.nixl.faults:
            loaded["memory"] = list(self.nixl.incarnations[loaded["number"]].memory)
        self._remembered = loaded["memory"] if "remembers" in self.nixl.faults else []
        for index in (0, 1):
            if not loaded["whole"] and f"parts-forget-{index}" in self.nixl.faults:
                del loaded["memory"][index]
        self.known[loaded["name"]] = loaded

    def check_remote_metadata(self, name: str, memory: Sequence[int] = ()) -> bool:
        self._call()
        loaded = self.known.get(name)
        return loaded is not None and set(memory) <= set(loaded["memory"])

    def remove_remote_agent(self, name: str) -> None:
        if "never-removes" not in self.nixl.faults:
            del self.known[name]

    def send_local_metadata(self, ip_addr: str = "", port: int = 0) -> None:
        self._send_or_give("metadata", self.get_agent_metadata(), ip_addr, port)

    def send_partial_agent_metadata(self, part: list[int], connections: bool, *, label: str) -> None:
        self._send_or_give(label, self.get_partial_agent_metadata(part, connections), "", 0)
        if "two-labels" in self.nixl.faults:
            self._send_or_give(f"{label}-again", self.get_partial_agent_metadata(part, connections), "", 0)

    def _send_or_give(self, label: str, metadata: bytes, ip_addr: str, port: int) -> None:
        self._call()
        faults = self.nixl.faults
        if "name-refused" in faults and self.nixl.client.keys.get(f"{self._prefix}/{self.name}/{label}"):
            raise nixl_error("the name is in use", "nixlInvalidParamError")
        if ip_addr:
            listener = self.nixl.listener(ip_addr, port)
            if "nobody-listens" in faults:
                self.log(f"could not connect to etcd or {port}")
            else:
                self.nixl.clock.after(self.nixl.load, lambda: listener._load(json.loads(metadata), served_by=self))
        elif not self._reaches_etcd():
            if "raises-when-cut" in faults:
                raise nixl_error("etcd is away")
            if "waits-when-cut" not in faults:
                self.nixl.clock.after(self.nixl.load, lambda: self.log("etcd is away"))
        elif f"mute-{self.name}" in faults:
            self.log("Failed to store metadata in etcd")
        elif not ("mute-again" in faults and self.nixl.client.keys.get(f"{self._prefix}/{self.name}/{label}")):
            self._send(f"{self._prefix}/{self.name}/{label}", metadata)

    def _send(self, key: str, value: bytes) -> None:
        if self.proxy is not None:
            self.proxy.request("Put", key)
        self.nixl.clock.after(REQUEST, lambda: self.nixl.client.keys.update({key: value}))

    def fetch_remote_metadata(self, name: str, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        self._call()
        if ip_addr:
            owner = self.nixl.listener(ip_addr, port)
            assert owner.name == name
            if "listener-complains" in self.nixl.faults:
                owner.log("etcd: listener has a fault")
            if "never-answers" not in self.nixl.faults:
                metadata = json.loads(owner.get_agent_metadata())
                self.nixl.clock.after(self.nixl.load, lambda: self._load(metadata, served_by=owner))
            return
        self._fetches.append((name, label or "metadata"))
        self.looked_for.append(name)
        if len(self._fetches) == 1:
            self.nixl.clock.after(REQUEST, self._fetch)

    def _fetch_next(self) -> None:
        """End a fetch: an agent fetches one after another."""
        self._fetches.popleft()
        if self._fetches:
            self.nixl.clock.after(REQUEST, self._fetch)

    def _fetch(self) -> None:
        name, label = self._fetches[0]
        key = f"{self._prefix}/{name}/{label}"
        if not self._reaches_etcd() or f"deaf-{self.name}" in self.nixl.faults:
            if "fetches-quietly" not in self.nixl.faults:
                self.log(f"etcd: cannot fetch {name}")
            if "fetch-stuck" not in self.nixl.faults:
                self._fetch_next()
            return
        if self.proxy is not None:
            self.proxy.request("Range", key)
        if self.nixl.client.keys.get(key):
            self._load_key(key, self._fetch_next)
        else:
            self._watch(key)
            self._await_key(key, self.nixl.clock.now + self.nixl.held_up)

    def _await_key(self, key: str, end: float) -> None:
        """Wait for a key that is missing; the next fetch waits meanwhile, if that is a fault of this NIXL."""
        if "serial" not in self.nixl.faults and self._fetches and self._fetches[0][0] == key.split("/")[-2]:
            self._fetch_next()
        if self.nixl.client.keys.get(key) and key in self.watched:
            self._load_key(key, lambda: None)
        elif self.nixl.clock.now < end:
            self.nixl.clock.after(0.01, lambda: self._await_key(key, end))
        elif "serial" in self.nixl.faults:
            self._fetch_next()

    def _load_key(self, key: str, next_fetch: Callable[[], None]) -> None:
        loaded = json.loads(self.nixl.client.keys[key])
        owner = self.nixl.incarnations[loaded["number"]]
        if not owner.alive and (shake_hands([self.nixl.backend]) or "hangs-on-dead" in self.nixl.faults):
            self.nixl.hung.append(self)
        elif not owner.alive and "loads-dead" not in self.nixl.faults:
            if "ignores-dead" not in self.nixl.faults:
                self.log(f"etcd: {owner.name} is dead")
            next_fetch()
        elif f"never-loads-{owner.name}" in self.nixl.faults:
            next_fetch()
        else:

            def load() -> None:
                if owner.alive and not owner._answers():
                    self.nixl.clock.after(0.01, load)
                    return
                self._load(loaded)
                self._watch(key.rpartition("/")[0] + "/")
                next_fetch()

            self.nixl.clock.after(self.nixl.load, load)

    def _watch(self, key: str) -> None:
        request = self.proxy.request("Watch", key) if self.proxy is not None else SimpleNamespace()

        def confirm() -> None:
            request.confirmed = True
            self.watched.add(key)

        if "never-watches" not in self.nixl.faults:
            self.nixl.clock.after(self.nixl.confirmed, confirm)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = 0) -> None:
        self._call()
        if {"never-removes", f"never-removes-{self.worker.name[-1]}"}.intersection(self.nixl.faults):
            return
        if ip_addr:
            listener = self.nixl.listener(ip_addr, port)
            self.nixl.clock.after(self.nixl.load, lambda: listener.known.pop(self.name, None))
            return
        anchor = f"{self._prefix}/{self.name}/"

        def remove() -> None:
            watchers = [agent for agent in self.nixl.agents_alive() if anchor in agent.watched]
            removed = "/" if "removes-all" in self.nixl.faults else anchor
            for key in [key for key in self.nixl.client.keys if key.startswith(removed)]:
                del self.nixl.client.keys[key]
            for agent in watchers:
                if not {"never-forgets", f"never-forgets-{agent.name}"}.intersection(self.nixl.faults):
                    self.nixl.clock.after(self.nixl.load, partial(agent.known.pop, self.name, None))

        self.nixl.clock.after(REQUEST, remove)

    # Life

    @contextmanager
    def polled(self) -> Iterator[None]:
        self.served = True
        yield
        self.served = self.nixl.threads

    def beside(self, name: str, **options: Any) -> DoubledAgent:
        self._call()
        self.nixl.beside.append((self.name, name, options))
        return self.nixl.create(name, self.worker, self._environment)

    def delete(self) -> None:
        self.deleted = True


class DoubledNixl:
    """What doubled agents share; it also stands for ``Agents``, which starts them.

    :param backend: the backend of the agents.
    :param faults: what is wrong, or what the real NIXL does and should not, by the names that this module asks for.
    """

    def __init__(self, *faults: str, backend: str = "UCX") -> None:
        self.faults, self.backend = faults, backend
        self.clock = DoubledClock()
        self.client, self.proxy = DoubledEtcd(self), DoubledProxy(self)
        self.numbers = itertools.count(1)
        self.buffers: dict[int, DoubledBuffer] = {}
        self.incarnations: dict[int, DoubledAgent] = {}
        self.hung: list[DoubledAgent] = []
        #: The starts: the names, and the options.
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.beside: list[tuple[str, str, dict[str, Any]]] = []
        self.plugins = ["UCX", "LIBFABRIC", "POSIX"]
        #: The backends that were created, the buffers, and the transfers: each with the agent.
        self.created: list[tuple[Any, ...]] = []
        self.allocated: list[tuple[str, int, str, dict[str, Any]]] = []
        self.initialized: list[tuple[str, str, bytes, str]] = []
        self.posted = self.moved = self.released = 0
        #: The number of the transfer that moves nothing.
        self.spoiled = next((int(fault.rpartition("-")[2]) for fault in faults if fault.startswith("spoils-")), 0)
        #: Seconds until a transfer is done and until its bytes and its notification are there, and to load metadata.
        self.done_after, self.delivered_after, self.load = 0.03, 0.05, 0.3
        #: Seconds for which a fetch of a missing agent waits.
        self.held_up = MISSING
        #: Seconds until a watch is confirmed.
        self.confirmed = 0.09
        #: Whether agents make progress without being polled.
        self.threads = True

    def create(self, name: str, worker: DoubledWorker, environment: Mapping[str, Any]) -> DoubledAgent:
        agent = DoubledAgent(self, name, worker, environment)
        self.incarnations[next(self.numbers)] = agent
        return agent

    def start_each(self, names: Sequence[str], environment: Mapping[str, Any] | None = None, **options: Any) -> Any:
        self.started.append((list(names), {**(environment or {}), **options}))
        workers = [DoubledWorker(next(self.numbers)) for _ in names]
        return [self.create(name, worker, environment or {}) for name, worker in zip(names, workers, strict=True)]

    def start(self, name: str, *, listen_port: int = 0, **options: Any) -> DoubledAgent:
        (agent,) = self.start_each([name], **options)
        agent.port = listen_port
        return agent  # type: ignore[no-any-return]

    def listener(self, ip_addr: str, port: int) -> DoubledAgent:
        assert ip_addr == "127.0.0.1"
        return next(agent for agent in self.agents_alive() if agent.port == port)

    def agents_alive(self) -> list[DoubledAgent]:
        return [agent for agent in self.incarnations.values() if agent.alive]
