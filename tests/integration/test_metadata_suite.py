# SPDX-License-Identifier: Apache-2.0
"""The suite of metadata, each check with the fault that it is for: a plugin of an inner run makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import NOT_BUSY, Finished, run

from pytest_nixl.fixtures.etcd import PrivateEtcd
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.verdicts import Verdict
from suites.metadata.test_namespaces import judge_namespace

pytestmark = pytest.mark.apart

EXCHANGE, LIFECYCLE = "suites/metadata/test_exchange.py", "suites/metadata/test_lifecycle.py"
NAMESPACES, DATA_PATH = "suites/metadata/test_namespaces.py", "suites/metadata/test_data_path.py"


def broken(tmp_path: Path, fault: str, *arguments: str, seconds: int = 10, **variables: str) -> Finished:
    """Run tests of the suite with a plugin that breaks what they look at."""
    (tmp_path / "fault.py").write_text(fault + NOT_BUSY)
    options = (f"--nixl-timeout={seconds}s", "--nixl-etcd-server=embedded", "-p", "fault")
    return run(*arguments, *options, env={"PYTHONPATH": str(tmp_path), **variables})


def checks_that_fail(done: Finished) -> set[str]:
    """Return the ids of the checks that did not pass."""
    return set(re.findall(r"^(?:FAIL|ERROR) (\S+):", done.output, re.MULTILINE))


#: Gives NIXL, and only NIXL, the address of a healthy etcd with a slash behind it.
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


def test_an_agent_that_cannot_publish_is_named_with_nixls_own_words(tmp_path: Path) -> None:
    done = broken(tmp_path, SLASH, EXCHANGE, "-k", "through_etcd or a_side_channel")
    assert "ERROR metadata-by-etcd: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to publish its metadata under /pytest-nixl/" in done.output
    assert "remedy: read what NIXL wrote: " in done.output
    assert "the target uri is not valid" in done.output
    assert "1 PASS" in done.output, "the side channel needs no etcd"
    assert done.code == 1


def test_an_etcd_that_nixl_cannot_use_is_told_at_once(nixl_private_etcd: PrivateEtcd) -> None:
    etcd = (f"--nixl-etcd={nixl_private_etcd.endpoint}", "--nixl-etcd-user=root:secret")
    done = run(EXCHANGE, "-k", "through_etcd", *etcd)
    assert f"ERROR metadata-by-etcd: NIXL cannot use the etcd at {nixl_private_etcd.endpoint}: " in done.output
    assert "secret" not in done.output
    assert done.code == 1


#: Overwrites some of what arrived before it is compared.
CORRUPT = """
from pytest_nixl.nixl.agent import Buffer

compare = Buffer.compare
def spoiled(self, *arguments, **named):
    self.write(b"\\x00" * 16, 100)
    return compare(self, *arguments, **named)
Buffer.compare = spoiled
"""


def test_wrong_bytes_after_an_exchange_fail_every_way_of_it(tmp_path: Path) -> None:
    done = broken(tmp_path, CORRUPT, EXCHANGE)
    assert done.output.count(": the bytes that arrived at ") >= 6
    assert checks_that_fail(done) == {
        "metadata-by-etcd", "metadata-by-side-channel", "metadata-by-listener", "metadata-in-parts-by-etcd",
        "metadata-in-parts-by-side-channel", "metadata-update",
    }  # fmt: skip


#: Loses, on the way of the agents to etcd, the second Put of any agent's metadata: that of an update.
LOST_PUT = """
from dataclasses import replace
import pytest
from pytest_nixl.etcd.proxy import EtcdPath

@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    value = yield
    if fixturedef.argname == "nixl_etcd":
        client = EtcdPath(value.endpoint).client("lossy")
        client.lose_request(lambda request: request.method == "Put" and request.key.endswith("/metadata"), nth=2)
        value = replace(value, endpoint=client.endpoint)
        fixturedef.cached_result = (value, *fixturedef.cached_result[1:])
    return value
"""


def test_an_update_that_is_lost_on_its_way_is_missed_in_etcd(tmp_path: Path) -> None:
    done = broken(tmp_path, LOST_PUT, EXCHANGE, "-k", "publishes_again")
    assert "ERROR metadata-update: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to publish its metadata under /pytest-nixl/" in done.output
    assert "NIXL reported no error to Python\n" in done.output
    assert "Failed to store metadata in etcd" in done.output
    assert done.code == 1


#: Has every second worker of a test look in another namespace.
WRONG_NAMESPACE = """
from suites.metadata.namespace import Namespace

start = Namespace.start
def apart(self, *names):
    there = Namespace(self._agents, self.client, self.endpoint, f"{self.name}/", self.seconds)
    return [agent for name, where in zip(names, (self, there)) for agent in start(where, name)]
Namespace.start = apart
"""


def test_agents_that_look_in_another_namespace_are_told_to_compare(tmp_path: Path) -> None:
    done = broken(tmp_path, WRONG_NAMESPACE, EXCHANGE, "-k", "through_etcd")
    assert "ERROR metadata-by-etcd: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to load the metadata of publisher that is in etcd under /pytest-nixl/" in done.output
    assert "remedy: compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both, slash for slash" in done.output
    assert done.code == 1


#: Every part holds all memory, and what is sent to a port goes to another one.
PARTS = """
from pytest_nixl.nixl.agent import NixlAgent
from suites.metadata import namespace, test_exchange
from pytest_nixl.etcd_servers.embedded import free_ports

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


def test_parts_that_hold_too_much_and_a_port_where_nobody_listens_are_named(tmp_path: Path) -> None:
    done = broken(tmp_path, PARTS, EXCHANGE, "-k", "parts or by_and_by or listens")
    assert "FAIL metadata-in-parts-by-etcd: finder knows memory of which it was told nothing" in done.output
    assert "FAIL metadata-in-parts-by-side-channel: memory is known of which no part was loaded" in done.output
    assert "ERROR metadata-by-listener: waited 10 s for listener to load what came at port " in done.output
    assert re.search(r"remedy: see whether 127.0.0.1:\d+ can be reached; NIXL wrote: .*could not connect", done.output)
    assert done.code == 1


#: Kills the worker of whoever publishes, once it has.
KILLED = """
from suites.metadata.namespace import Namespace

publish = Namespace.publish
def and_die(self, agent):
    publish(self, agent)
    agent.worker._process.kill()
Namespace.publish = and_die
"""


def test_a_worker_that_is_killed_in_the_middle_is_named(tmp_path: Path) -> None:
    done = broken(tmp_path, KILLED, EXCHANGE, LIFECYCLE, "-k", "through_etcd or deregistered")
    ended = r"(rank 0 \(agent worker, pid \d+\) was ended by SIGKILL during|waited 10 s for)"
    for check in ("metadata-by-etcd", "metadata-of-deregistered-memory"):
        assert re.search(f"ERROR {check}: {ended}", done.output)
    assert done.code == 1


#: An agent that asks etcd for each transfer; and one whose way to etcd is not the one that counts.
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


def test_a_transfer_that_asks_etcd_is_caught_with_what_it_asked(tmp_path: Path) -> None:
    done = broken(tmp_path, ASKS, DATA_PATH, "-k", "do_not_touch")
    words = r"FAIL data-path-without-etcd: 25 transfers made \d+ requests to etcd: agents \d+: Put\(/pytest-nixl/"
    assert re.search(words, done.output)
    assert done.code == 1


def test_agents_that_are_not_on_the_way_that_counts_do_not_pass(tmp_path: Path) -> None:
    which = "do_not_touch or after_it_was_looked_for or fetches_again"
    done = broken(tmp_path, ELSEWHERE, DATA_PATH, LIFECYCLE, "-k", which)
    assert "FAIL data-path-without-etcd: the agents found each other with no request on the way" in done.output
    assert "ERROR metadata-of-a-later-agent: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "which is not there yet" in done.output
    assert "ERROR metadata-fetch-after-etcd-was-away: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "to say that it cannot fetch, since it is cut off from etcd" in done.output
    assert done.code == 1


#: Cuts the finder off at the moment in which it could hear of a withdrawal.
DEAF = """
from suites.metadata.namespace import Namespace

await_watch = Namespace.await_watch
def and_cut(self, way, finder, owner):
    await_watch(self, way, finder, owner)
    way.cut()
    way.restore()
Namespace.await_watch = and_cut
"""
#: Withdraws nothing.
STAYS = """
from pytest_nixl.nixl.agent import NixlAgent

NixlAgent.invalidate_local_metadata = lambda self, ip_addr="", port=None: None
"""


@pytest.mark.parametrize(
    ("fault", "words", "remedy"),
    [
        (DEAF, "to forget publisher, which withdrew its metadata from etcd", "see whether its watch reaches etcd"),
        (STAYS, "etcd to have no key under /pytest-nixl/", "read what NIXL wrote: "),
    ],
    ids=["not-heard", "not-withdrawn"],
)
def test_a_withdrawal_that_does_not_happen_or_is_not_heard_is_told(
    tmp_path: Path, fault: str, words: str, remedy: str
) -> None:
    done = broken(tmp_path, fault, LIFECYCLE, "-k", "the_others_forget")
    assert "ERROR metadata-invalidation: waited 10 s for " in done.output
    assert words in done.output
    assert f"remedy: {remedy}" in done.output
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


def test_namespaces_that_are_one_and_endpoints_that_are_all_dead_fail(tmp_path: Path) -> None:
    done = broken(tmp_path, TOGETHER, NAMESPACES, "-k", "do_not_meet or one_is_dead")
    assert re.search(r"(ERROR|FAIL) metadata-namespaces-apart: ", done.output)
    assert "ERROR metadata-by-several-endpoints: waited 10 s for rank 0 (agent worker, pid " in done.output
    assert "connections to all backends failing" in done.output
    assert done.code == 1


#: Few agents, one of which never publishes.
SIX = """
from pytest_nixl.nixl.agent import NixlAgent
from suites.metadata import test_many

test_many.WORKERS, test_many.EACH = 2, 3
send = NixlAgent.send_local_metadata
NixlAgent.send_local_metadata = lambda self, *to: None if self.name == "finder-1-2" else send(self, *to)
"""


def test_the_one_of_many_that_does_not_publish_is_missed(tmp_path: Path) -> None:
    done = broken(tmp_path, SIX, "suites/metadata/test_many.py")
    assert "ERROR metadata-of-200-agents: waited 10 s for etcd to have the metadata of 6 agents under " in done.output
    assert "remedy: it has 5: read what NIXL wrote: " in done.output
    assert done.code == 1


#: A NIXL that has none of the defects, made of the real one: no released one is so.
MENDED = """
import sys
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.etcd.proxy import PathClient
from pytest_nixl.processes.worker_process import NixlError
from suites.metadata.namespace import DOCUMENTED, Namespace

cut, cut_off = PathClient.cut, []
PathClient.cut = lambda self: cut_off.append(self)  # a connection that nothing harms
PathClient.restore = lambda self: cut_off.clear()

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
#: What the checks of the suite look for.
LOOKED_FOR = {
    "NIXL-ETCD-SILENT-FAILURE", "NIXL-ETCD-STALE-KEY", "NIXL-ETCD-RESTART-REFUSED", "NIXL-ETCD-DUPLICATE-NAME",
    "NIXL-ETCD-SERIAL-FETCH", "NIXL-ETCD-FETCH-STUCK", "NIXL-ETCD-WATCH-LOST", "NIXL-ETCD-NAMESPACE-SLASH",
    "NIXL-DEREGISTERED-KNOWN",
}  # fmt: skip


def test_what_is_accepted_and_does_not_occur_any_more_fails(tmp_path: Path) -> None:
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
    ("name", "verdict", "words"),
    [
        (None, Verdict.PASS, "is not set"),
        ("/nixl/agents/", Verdict.PASS, "agents publish under /nixl/agents//<agent>/"),
        ("/prod/nixl/agents", Verdict.PASS, "agents publish under /prod/nixl/agents/<agent>/"),
        ("/nixl/agents", Verdict.WARN, "they never find each other"),
        ("prod", Verdict.WARN, "does not start with a slash: keys are prod/<agent>/"),
        ("", Verdict.WARN, "does not start with a slash"),
    ],
)
def test_the_namespace_of_a_deployment_is_judged(name: str | None, verdict: Verdict, words: str) -> None:
    judgement = judge_namespace(name)
    assert judgement.verdict is verdict
    assert words in judgement.reason


def test_the_namespace_of_the_run_is_the_one_that_is_judged() -> None:
    done = run(NAMESPACES, "-k", "of_this_deployment", env={"NIXL_ETCD_NAMESPACE": "/nixl/agents"})
    assert "WARN namespace-well-formed: NIXL_ETCD_NAMESPACE=/nixl/agents: agents publish under" in done.output
    assert done.code == 0
