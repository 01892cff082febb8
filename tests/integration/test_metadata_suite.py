# SPDX-License-Identifier: Apache-2.0
"""Each check of the metadata suite fails with the fault that it looks for, which a plugin of an inner run causes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import NOT_BUSY, Finished, run

from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.verdicts import Verdict
from suites.metadata.test_namespaces import judge_namespace

pytestmark = pytest.mark.long

EXCHANGE, LIFECYCLE = "suites/metadata/test_exchange.py", "suites/metadata/test_lifecycle.py"
NAMESPACES, DATA_PATH = "suites/metadata/test_namespaces.py", "suites/metadata/test_data_path.py"


def broken(tmp_path: Path, fault: str, *arguments: str, seconds: int = 10, **variables: str) -> Finished:
    """Run tests of the suite with a plugin that causes a fault.

    :param seconds: the deadline of each step; short where the fault shows only when it has passed.
    """
    (tmp_path / "fault.py").write_text(fault + NOT_BUSY)
    options = (f"--nixl-timeout={seconds}s", "--nixl-etcd-server=embedded", "-p", "fault")
    return run(*arguments, *options, env={"PYTHONPATH": str(tmp_path), **variables})


def checks_that_fail(done: Finished) -> set[str]:
    """Return the ids of the checks that did not pass."""
    return set(re.findall(r"^(?:FAIL|ERROR) (\S+):", done.output, re.MULTILINE))


#: Gives only NIXL the address of a healthy etcd with a slash at the end.
SLASH = """
from dataclasses import replace
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    value = yield
    if fixturedef.argname == "nixl_etcd":
        value = replace(value, endpoint=value.endpoint + "/")
        fixturedef.cached_result = (value, *fixturedef.cached_result[1:])
    return value
"""


def test_agent_that_cannot_publish_is_named_with_the_message_of_nixl(tmp_path: Path) -> None:
    done = broken(tmp_path, SLASH, EXCHANGE, "-k", "through_etcd or a_side_channel")
    assert "ERROR metadata-by-etcd: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to publish its metadata under /pytest-nixl/" in done.output
    assert "remedy: read what NIXL wrote: " in done.output
    assert "the target uri is not valid" in done.output
    assert "1 PASS" in done.output, "the side channel works without etcd"
    assert done.code == 1


def test_etcd_that_nixl_cannot_use_is_reported_immediately(nixl_private_etcd: PrivateEtcd) -> None:
    etcd = (f"--nixl-etcd={nixl_private_etcd.endpoint}", "--nixl-etcd-user=root:secret")
    done = run(EXCHANGE, "-k", "through_etcd", *etcd)
    assert re.search(f"^ERROR metadata-by-etcd: NIXL .* {nixl_private_etcd.endpoint}: ", done.output, re.MULTILINE)
    assert "secret" not in done.output
    assert done.code == 1


#: Overwrites some of the arrived bytes before they are compared.
CORRUPT = """
from pytest_nixl.nixl.buffer import Buffer

compare = Buffer.compare
def spoiled(self, *arguments, **named):
    self.write(b"\\x00" * 16, 100)
    return compare(self, *arguments, **named)
Buffer.compare = spoiled
"""


def test_wrong_bytes_fail_every_check_of_an_exchange(tmp_path: Path) -> None:
    done = broken(tmp_path, CORRUPT, EXCHANGE, seconds=60)
    assert done.output.count(": the bytes at ") >= 6
    assert checks_that_fail(done) == {
        "metadata-by-etcd", "metadata-by-side-channel", "metadata-by-listener", "metadata-in-parts-by-etcd",
        "metadata-in-parts-by-side-channel", "metadata-update",
    }  # fmt: skip


#: Loses the second Put of any agent's metadata between agent and etcd, which is that of an update.
LOST_PUT = """
from dataclasses import replace
import pytest
from pytest_nixl.etcd.proxy import EtcdProxy

@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    value = yield
    if fixturedef.argname == "nixl_etcd":
        client = EtcdProxy(value.endpoint).client("lossy")
        client.lose_request(lambda request: request.method == "Put" and request.key.endswith("/metadata"), nth=2)
        value = replace(value, endpoint=client.endpoint)
        fixturedef.cached_result = (value, *fixturedef.cached_result[1:])
    return value
"""


def test_update_that_does_not_reach_etcd_is_reported(tmp_path: Path) -> None:
    done = broken(tmp_path, LOST_PUT, EXCHANGE, "-k", "publishes_again")
    assert "ERROR metadata-update: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to publish its metadata under /pytest-nixl/" in done.output
    assert "Failed to store metadata in etcd" in done.output
    assert done.code == 1


#: Starts every second worker of a test with another namespace.
WRONG_NAMESPACE = """
from suites.metadata.namespace import Namespace

start = Namespace.start
def apart(self, *names):
    there = Namespace(self._agents, self.client, self.endpoint, f"{self.name}/", self.seconds)
    return [agent for name, where in zip(names, (self, there)) for agent in start(where, name)]
Namespace.start = apart
"""


def test_agents_in_different_namespaces_are_reported_with_the_variables_to_compare(tmp_path: Path) -> None:
    done = broken(tmp_path, WRONG_NAMESPACE, EXCHANGE, "-k", "through_etcd")
    assert "ERROR metadata-by-etcd: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert re.search("metadata of publisher .* /pytest-nixl/", done.output)
    assert re.search("remedy: .*NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE", done.output)
    assert done.code == 1


#: Every part contains all memory, and metadata for a port is sent to another port.
PARTS = """
from pytest_nixl.nixl.agent import NixlAgent
from suites.metadata import namespace, test_exchange
from pytest_nixl.core.free_ports import free_ports


everything = []
def of_everything(agent, *memory):
    known = [buffer for owner, buffer in everything if owner is agent]
    return agent.get_reg_descs([(*buffer.descriptor(), "") for buffer in known], "DRAM")
registered = test_exchange.registered
def remembered(agent):
    everything.append((agent, registered(agent)))
    return everything[-1][1]
namespace.registration = test_exchange.registration = of_everything
test_exchange.registered = remembered

send = NixlAgent.send_local_metadata
def to_nobody(self, ip_addr="", port=None):
    send(self, ip_addr, port and free_ports(1)[0])
NixlAgent.send_local_metadata = to_nobody
"""


def test_parts_with_too_much_memory_and_a_port_without_a_listener_are_reported(tmp_path: Path) -> None:
    done = broken(tmp_path, PARTS, EXCHANGE, "-k", "parts or by_and_by or listens")
    assert "FAIL metadata-in-parts-by-etcd: finder knows memory" in done.output
    assert "FAIL metadata-in-parts-by-side-channel: memory is known" in done.output
    assert re.search(r"ERROR metadata-by-listener: waited 10 s for listener .* port \d+", done.output)
    assert re.search(r"remedy: .* 127.0.0.1:\d+ .*could not connect", done.output)
    assert done.code == 1


#: Another process listens at the port that an agent is to listen at.
TAKEN_PORT = """
import socket
from suites.metadata import test_exchange

taken = socket.create_server(("", 0))
test_exchange.free_ports = lambda count: [taken.getsockname()[1]] * count
"""


def test_a_taken_port_is_reported_with_the_way_to_find_its_owner(tmp_path: Path) -> None:
    done = broken(tmp_path, TAKEN_PORT, EXCHANGE, "-k", "listens", seconds=60)
    assert "ERROR metadata-by-listener: NIXL cannot create an agent: " in done.output
    assert re.search(r"remedy: .*`ss -tanp 'sport = :\d+'`", done.output)
    assert done.code == 1


#: Kills the worker of an agent after it has published.
KILLED = """
from suites.metadata.namespace import Namespace

publish = Namespace.publish
def and_die(self, agent):
    publish(self, agent)
    agent.worker._process.kill()
Namespace.publish = and_die
"""


def test_worker_that_is_killed_during_a_check_is_named(tmp_path: Path) -> None:
    done = broken(tmp_path, KILLED, EXCHANGE, LIFECYCLE, "-k", "through_etcd or deregistered")
    ended = r"(rank 0 \(agent worker, pid \d+\) was ended by SIGKILL during|waited 10 s for)"
    for check in ("metadata-by-etcd", "metadata-of-deregistered-memory"):
        assert re.search(f"ERROR {check}: {ended}", done.output)
    assert done.code == 1


#: An agent that sends a request to etcd for each transfer, and agents that bypass the counting proxy.
ASKS = """
from pytest_nixl.nixl.agent import NixlAgent

transfer = NixlAgent.transfer
def and_publish(self, handle, notif_msg=b""):
    self.send_local_metadata()
    return transfer(self, handle, notif_msg)
NixlAgent.transfer = and_publish
"""
ELSEWHERE = """
from suites.metadata.namespace import Namespace

Namespace.reached_by = lambda self, endpoint: self
"""


def test_transfer_that_sends_a_request_to_etcd_fails_with_the_request(tmp_path: Path) -> None:
    done = broken(tmp_path, ASKS, DATA_PATH, "-k", "do_not_touch", seconds=60)
    pattern = r"FAIL data-path-without-etcd: 25 transfers made \d+ requests to etcd: agents \d+: Put\(/pytest-nixl/"
    assert re.search(pattern, done.output)
    assert done.code == 1


def test_agents_that_bypass_the_counting_proxy_fail(tmp_path: Path) -> None:
    selection = "do_not_touch or after_it_was_looked_for or fetches_again"
    done = broken(tmp_path, ELSEWHERE, DATA_PATH, LIFECYCLE, "-k", selection)
    assert "FAIL data-path-without-etcd: " in done.output
    assert "ERROR metadata-of-a-later-agent: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "ERROR metadata-fetch-after-etcd-was-away: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert done.code == 1


#: Cuts the finder off from etcd when it could learn of a removal.
DEAF = """
from suites.metadata.namespace import Namespace

await_watch = Namespace.await_watch
def and_cut(self, way, finder, owner):
    await_watch(self, way, finder, owner)
    way.cut()
    way.restore()
Namespace.await_watch = and_cut
"""
#: Does not remove the metadata.
STAYS = """
from pytest_nixl.nixl.agent import NixlAgent

NixlAgent.invalidate_local_metadata = lambda self, ip_addr="", port=None: None
"""


@pytest.mark.parametrize(
    ("fault", "message", "remedy"),
    [
        (DEAF, "to forget publisher", "watch"),
        (STAYS, "etcd to have no key under /pytest-nixl/", "NIXL wrote: "),
    ],
    ids=["not-heard", "not-withdrawn"],
)
def test_removal_that_does_not_happen_or_is_not_noticed_is_reported(
    tmp_path: Path, fault: str, message: str, remedy: str
) -> None:
    done = broken(tmp_path, fault, LIFECYCLE, "-k", "the_others_forget")
    assert "ERROR metadata-invalidation: waited 10 s for " in done.output
    assert message in done.output
    assert re.search(f"remedy: .*{remedy}", done.output)
    assert done.code == 1


#: One namespace where there should be two, and a list of endpoints that are all dead.
TOGETHER = """
from suites.metadata.namespace import Namespace

Namespace.part = lambda self, name: self
reached_by = Namespace.reached_by
def by_the_dead(self, endpoint):
    return reached_by(self, endpoint.split(",")[0])
Namespace.reached_by = by_the_dead
"""


def test_equal_namespaces_and_dead_endpoints_fail(tmp_path: Path) -> None:
    done = broken(tmp_path, TOGETHER, NAMESPACES, "-k", "do_not_meet or one_is_dead")
    assert re.search(r"(ERROR|FAIL) metadata-namespaces-apart: ", done.output)
    assert "ERROR metadata-by-several-endpoints: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "connections to all backends failing" in done.output
    assert done.code == 1


#: Six agents, one of which never publishes.
SIX = """
from pytest_nixl.nixl.agent import NixlAgent
from suites.metadata import test_many

test_many.WORKERS, test_many.PER_WORKER = 2, 3
send = NixlAgent.send_local_metadata
NixlAgent.send_local_metadata = lambda self, *to: None if self.name == "finder-1-2" else send(self, *to)
"""


def test_single_agent_that_does_not_publish_is_noticed(tmp_path: Path) -> None:
    done = broken(tmp_path, SIX, "suites/metadata/test_many.py")
    assert "ERROR metadata-of-200-agents: waited 10 s for etcd to have the metadata of 6 agents under " in done.output
    assert re.search("remedy: .* has 5: ", done.output)
    assert done.code == 1


#: Changes the real NIXL so that it has none of the defects, because every release has them.
MENDED = """
import sys
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.etcd.proxy import ProxyClient
from pytest_nixl.processes.worker_errors import NixlError
from suites import early
from suites.metadata.namespace import DOCUMENTED, Namespace

early._beside_each_other = lambda config: False  # they would share what is changed here

cut, cut_off = ProxyClient.cut, []
ProxyClient.cut = lambda self: cut_off.append(self)  # a connection that nothing harms
ProxyClient.restore = lambda self: cut_off.clear()

names, send = {}, NixlAgent.send_local_metadata
def pytest_runtest_setup():
    cut_off.clear()
    names.clear()

def complain(agent):
    print("etcd is away", file=sys.stderr, flush=True)

def told(self, *to):
    if cut_off:
        raise NixlError("etcd is away", "", "", "nixlBackendError")
    if names.setdefault(self.name, self) is not self and names[self.name].worker.alive:
        raise NixlError("the name is taken", "", "", "nixlInvalidParamError")
    names[self.name] = self
    send(self, *to)
NixlAgent.send_local_metadata = told

fetch = NixlAgent.fetch_remote_metadata
def anew(self, name, *to, **by):
    if name == "missing" and name not in names:
        return
    if cut_off:
        return self.run("fault:complain")
    if self.check_remote_metadata(name):
        self.remove_remote_agent(name)
    fetch(self, name, *to, **by)
NixlAgent.fetch_remote_metadata = anew

await_key = Namespace.await_key
def leased(self, agent, label, metadata):
    await_key(self, agent, label, metadata)
    if agent.name in ("killed", "deleted"):
        self.client.put(self.key(agent, label), metadata, self.client.lease(60))
Namespace.await_key = leased

start = Namespace.start
def documented(self, *names):
    self.name = self.name or DOCUMENTED
    return start(self, *names)
Namespace.start = documented
"""
#: The findings that the suite looks for.
LOOKED_FOR = {
    "NIXL-ETCD-SILENT-FAILURE", "NIXL-ETCD-STALE-KEY", "NIXL-ETCD-RESTART-REFUSED", "NIXL-ETCD-DUPLICATE-NAME",
    "NIXL-ETCD-SERIAL-FETCH", "NIXL-ETCD-FETCH-STUCK", "NIXL-ETCD-WATCH-LOST", "NIXL-ETCD-NAMESPACE-SLASH",
    "NIXL-DEREGISTERED-KNOWN",
}  # fmt: skip


def test_accepted_finding_that_no_longer_occurs_fails(tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    accepts = "".join(
        f'[[accept]]\nid = "{id}"\nreason = "known"\nexpires = 2999-12-31\n' for id in FINDINGS if id in LOOKED_FOR
    )
    profile.write_text(f'[profile]\nname = "mine"\n{accepts}')
    files = (LIFECYCLE, NAMESPACES, DATA_PATH)
    done = broken(
        tmp_path, MENDED, *files, "-k", "not do_not_touch and not do_not_meet", f"--nixl-profile={profile}", seconds=20
    )
    gone = re.findall(r"^FAIL (\S+): .* it no longer occurs", done.output, re.MULTILINE)
    assert set(gone) == LOOKED_FOR, done.output


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        (None, Verdict.PASS, "is not set"),
        ("/nixl/agents/", Verdict.PASS, "agents publish under /nixl/agents//<agent>/"),
        ("/prod/nixl/agents", Verdict.PASS, "agents publish under /prod/nixl/agents/<agent>/"),
        ("/nixl/agents", Verdict.WARN, "they never find each other"),
        ("prod", Verdict.WARN, "keys are prod/<agent>/"),
        ("", Verdict.WARN, "slash"),
    ],
)
def test_namespace_of_a_deployment_is_judged(name: str | None, verdict: Verdict, text: str) -> None:
    judgement = judge_namespace(name)
    assert judgement.verdict is verdict
    assert text in judgement.reason


def test_namespace_of_the_run_is_judged() -> None:
    done = run(NAMESPACES, "-k", "of_this_deployment", env={"NIXL_ETCD_NAMESPACE": "/nixl/agents"})
    assert "WARN namespace-well-formed: NIXL_ETCD_NAMESPACE=/nixl/agents: agents publish under" in done.output
    assert done.code == 0


#: Reports that a transfer by POSIX is done, and does not post it.
LOST = """
from pytest_nixl.nixl.agent import NixlAgent

post = NixlAgent.transfer

def lost(self, handle, notification=b""):
    return "DONE" if self.query_xfer_backend(handle) == "POSIX" else post(self, handle, notification)

NixlAgent.transfer = lost
"""


def test_an_agent_with_two_backends_uses_each_as_chosen_and_a_lost_transfer_is_found(tmp_path: Path) -> None:
    where = ("suites/metadata/test_backends.py", "--nixl-level=extended")
    done = broken(tmp_path, "", *where, seconds=60)
    assert done.code == 0, done.output
    assert re.search(
        r"an agent with UCX and POSIX: DRAM:DRAM by UCX over \S+; DRAM:FILE by POSIX over \S+$", done.output, re.M
    ), done.output
    done = broken(tmp_path, LOST, *where, seconds=60)
    assert done.code == 1
    assert re.search(
        r"^CORRUPT several-backends: an agent with UCX and POSIX: \d+ of 65536 bytes of DRAM:FILE by POSIX .* are ",
        done.output,
        re.M,
    ), done.output
