# SPDX-License-Identifier: Apache-2.0
"""Each check of the metadata suite fails with the fault that it looks for, which a plugin of an inner run causes."""

from __future__ import annotations

import re

import pytest
from helpers.cli_run import NOT_BUSY, Finished, run

from pytest_nixl.fixtures.opened_etcd import PrivateEtcd

pytestmark = pytest.mark.long

EXCHANGE, LIFECYCLE = "suites/metadata/test_exchange.py", "suites/metadata/test_lifecycle.py"
NAMESPACES, DATA_PATH = "suites/metadata/test_namespaces.py", "suites/metadata/test_data_path.py"
MANY, BACKENDS = "suites/metadata/test_many.py", "suites/metadata/test_backends.py"


def broken(fault: str, *arguments: str, seconds: int = 60) -> Finished:
    """Run tests of the suite with a fault; ``seconds`` is the deadline of each step."""
    return run(*arguments, f"--nixl-timeout={seconds}s", "--nixl-etcd-server=embedded", fault=fault + NOT_BUSY)


#: The faults of one run, each in one check only, and by check what is awaited in vain, and what NIXL writes about it.
FAULTS = """
from helpers.faults_of_checks import is_in_vain, within
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.proxy import EtcdProxy
from pytest_nixl.nixl.agent import NixlAgent
from suites.metadata import moving, namespace, test_data_path, test_exchange, test_many
from suites.metadata.namespace import Namespace

# Every second worker is started with another namespace.
@within("metadata-by-etcd", Namespace, "start")
def apart(start, self, *names):
    there = Namespace(self._agents, self.client, self.endpoint, f"{self.name}/", self.seconds)
    return [agent for name, where in zip(names, (self, there)) for agent in start(where, name)]
is_in_vain("metadata-by-etcd", namespace, "to load the metadata of publisher")

# The second Put of metadata is lost between agent and etcd, which is that of an update.
@within("metadata-update", Namespace, "start")
def lossy(start, self, *names):
    client = EtcdProxy(self.endpoint).client("lossy")
    client.lose_request(lambda request: request.method == "Put" and request.key.endswith("/metadata"), nth=2)
    self.endpoint = client.endpoint
    return start(self, *names)
is_in_vain("metadata-update", namespace, "to publish its metadata", "Failed to store metadata in etcd")

# Every part contains all memory.
everything = []
def registered(register, agent, **options):
    everything.append((agent, register(agent, **options)))
    return everything[-1][1]
def of_everything(registration, agent, *memory):
    return registration(agent, *(buffer for owner, buffer in everything if owner is agent))
for check, module in (("metadata-in-parts-by-etcd", namespace), ("metadata-in-parts-by-side-channel", test_exchange)):
    within(check, test_exchange, "registered")(registered)
    within(check, module, "registration")(of_everything)

# Metadata for a port is sent to another port.
@within("metadata-by-listener", NixlAgent, "send_local_metadata")
def to_nobody(send, self, ip_addr="", port=None):
    send(self, ip_addr, port and free_ports(1)[0])
is_in_vain("metadata-by-listener", test_exchange, "to load the metadata that arrived", "could not connect")

# Only NIXL gets the address of a healthy etcd with a slash at its end.
@within("metadata-of-a-restarted-agent", Namespace, "start")
def with_a_slash(start, self, *names):
    self.endpoint += "/"
    return start(self, *names)
is_in_vain("metadata-of-a-restarted-agent", namespace, "to publish its metadata", "the target uri is not valid")

# The worker of an agent is killed.
@within("metadata-of-deregistered-memory", Namespace, "find")
def and_die(find, self, finder, owner, *memory):
    find(self, finder, owner, *memory)
    owner.worker._process.kill()

# The finder is cut off from etcd when it could learn of a removal.
@within("metadata-invalidation", Namespace, "await_watch")
def and_cut(await_watch, self, client, finder, owner):
    await_watch(self, client, finder, owner)
    client.cut()
    client.restore()
is_in_vain("metadata-invalidation", namespace, "to forget publisher")

# Metadata is not removed.
@within("metadata-of-one-name-twice", NixlAgent, "invalidate_local_metadata")
def stays(invalidate, self):
    pass
is_in_vain("metadata-of-one-name-twice", namespace, "etcd to have no key")

# A transfer sends a request to etcd.
@within("data-path-without-etcd", NixlAgent, "transfer")
def and_publish(transfer, self, handle, notif_msg=b""):
    self.send_local_metadata()
    return transfer(self, handle, notif_msg)

# Agents bypass the proxy that counts and is cut.
for check in ("metadata-of-a-later-agent", "metadata-fetch-after-etcd-was-away"):
    within(check, Namespace, "reached_by")(lambda reached_by, self, endpoint: self)
@within("metadata-of-a-later-agent", Namespace, "await_watch")
def soon(await_watch, self, *arguments):
    self.seconds = 1
    await_watch(self, *arguments)
is_in_vain("metadata-fetch-after-etcd-was-away", test_data_path, "to log that it cannot fetch")

# There is one namespace where there should be two, and the endpoints of a list are all dead.
within("metadata-namespaces-apart", Namespace, "part")(lambda part, self, name: self)
is_in_vain("metadata-namespaces-apart", namespace, "to load the metadata of same")
is_in_vain("metadata-namespaces-apart", moving, "a WRITE of")
@within("metadata-by-several-endpoints", Namespace, "reached_by")
def by_the_dead(reached_by, self, endpoint):
    return reached_by(self, endpoint.split(",")[0])
is_in_vain("metadata-by-several-endpoints", namespace, "to publish its metadata", "connections to all backends failing")

# One of six agents never publishes.
test_many.WORKERS, test_many.PER_WORKER = 2, 3
send = NixlAgent.send_local_metadata
NixlAgent.send_local_metadata = lambda self, *to: None if self.name == "finder-1-2" else send(self, *to)
is_in_vain("metadata-of-200-agents", test_many, "etcd to have the metadata of 6 agents", "etcd has 5")
"""


def test_each_check_names_its_fault_and_the_remedy() -> None:
    tests = (
        "through_etcd or publishes_again or parts or by_and_by or listens or was_restarted or deregistered "
        "or others_forget or one_name_are or do_not_touch or after_it_was_looked_for or fetches_again or do_not_meet "
        "or one_is_dead or many_agents"
    )
    done = broken(FAULTS, EXCHANGE, LIFECYCLE, NAMESPACES, DATA_PATH, MANY, "-k", tests)
    waited = "waited 1 s for rank 0 (agent worker, pid ...)"
    done.expect(
        1,
        f"ERROR metadata-by-etcd: {waited} to load the metadata of publisher ... /pytest-nixl/",
        "remedy: compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both agents",
        f"ERROR metadata-update: {waited} to publish its metadata under /pytest-nixl/",
        "remedy: read what NIXL wrote: ...Failed to store metadata in etcd",
        "FAIL metadata-in-parts-by-etcd: finder knows memory",
        "FAIL metadata-in-parts-by-side-channel: memory is known",
        "ERROR metadata-by-listener: waited 1 s for listener ... port",
        "remedy: ...127.0.0.1:... could not connect",
        f"ERROR metadata-of-a-restarted-agent: {waited} to publish its metadata under /pytest-nixl/",
        "remedy: read what NIXL wrote: ...the target uri is not valid",
        "ERROR metadata-of-deregistered-memory: rank 0 (agent worker, pid ...) was ended by SIGKILL during",
        f"ERROR metadata-invalidation: {waited} to forget publisher",
        "remedy: check whether its watch reaches etcd",
        "ERROR metadata-of-one-name-twice: waited 1 s for etcd to have no key under /pytest-nixl/",
        "FAIL data-path-without-etcd: 25 transfers made ... requests to etcd: agents ...: Put(/pytest-nixl/",
        f"ERROR metadata-of-a-later-agent: {waited} to watch",
        f"ERROR metadata-fetch-after-etcd-was-away: {waited} to log",
        f"ERROR metadata-by-several-endpoints: {waited} to publish",
        "remedy: read what NIXL wrote: ...connections to all backends failing",
        "ERROR metadata-of-200-agents: waited 1 s for etcd to have the metadata of 6 agents under ",
        "remedy: etcd has 5: ",
    )
    assert re.search(r"^(ERROR|FAIL) metadata-namespaces-apart: ", done.output, re.MULTILINE)


def test_etcd_that_nixl_cannot_use_is_reported_immediately(nixl_private_etcd: PrivateEtcd) -> None:
    etcd = (f"--nixl-etcd={nixl_private_etcd.endpoint}", "--nixl-etcd-user=root:secret")
    done = run(EXCHANGE, "-k", "through_etcd", *etcd)
    done.expect(1, f"ERROR metadata-by-etcd: NIXL ... {nixl_private_etcd.endpoint}: ", never=["secret"])


#: Another process listens at the port that an agent is to listen at, and agents bypass the counting proxy.
TAKEN_PORT_AND_NO_PROXY = """
import socket
from suites.metadata import test_exchange
from suites.metadata.namespace import Namespace

taken = socket.create_server(("", 0))
test_exchange.free_ports = lambda count: [taken.getsockname()[1]] * count
Namespace.reached_by = lambda self, endpoint: self
"""


def test_a_taken_port_and_a_proxy_without_requests_are_named() -> None:
    broken(TAKEN_PORT_AND_NO_PROXY, EXCHANGE, DATA_PATH, "-k", "listens or do_not_touch").expect(
        1,
        "ERROR metadata-by-listener: NIXL cannot create an agent: ",
        "remedy: ...`ss -tanp 'sport = :...'`",
        "FAIL data-path-without-etcd: the agents found each other, but the proxy to etcd counted no request",
    )


def test_namespace_of_the_run_is_judged() -> None:
    done = run(NAMESPACES, "-k", "of_this_deployment", env={"NIXL_ETCD_NAMESPACE": "/nixl/agents"})
    done.expect(0, "WARN namespace-well-formed: NIXL_ETCD_NAMESPACE=/nixl/agents: agents publish under")


#: Reports that a transfer by POSIX is done, and does not post it.
LOST = """
from pytest_nixl.nixl.agent import NixlAgent

post = NixlAgent.transfer

def lost(self, handle, notification=b""):
    return "DONE" if self.query_xfer_backend(handle) == "POSIX" else post(self, handle, notification)

NixlAgent.transfer = lost
"""


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("", 0, "an agent with UCX and POSIX: DRAM:DRAM by UCX over ...; DRAM:FILE by POSIX over "),
        (LOST, 1, "CORRUPT several-backends: an agent with UCX and POSIX: ... of 65536 bytes of DRAM:FILE by POSIX"),
    ],
    ids=["healthy", "lost-transfer"],
)
def test_an_agent_with_two_backends_uses_each_as_chosen(fault: str, code: int, line: str) -> None:
    broken(fault, BACKENDS, "--nixl-level=extended").expect(code, line)
