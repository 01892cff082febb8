# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a real etcd are named, each in one sentence, whatever its keys and values are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from socket import create_server

import pytest
from helpers.cli_run import environment
from helpers.etcd import Etcd, running_etcd, turn_authentication_on, wait_until
from helpers.published import DEFAULT, DOCUMENTED, bench_rank, metadata, publish
from helpers.three_node import ThreeNodeEtcd

from pytest_nixl import cli
from pytest_nixl.checks.deployment_etcd import deployment, key_survey
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import DeploymentEtcd, judge_published, lines, survey_deployment
from pytest_nixl.checks.deployment_etcd.key_survey import read_metadata
from pytest_nixl.checks.deployment_etcd.problem import quoted
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.strict import escape
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import REQUEST_LIMIT, none_leased, put, txn
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.supervisor import supervisor

NAMESPACE = NamespaceName(DEFAULT)
#: A value with the name of an agent and its metadata, which is longer than etcd's default limit.
OVERSIZE = metadata("big", info=b"\0" * REQUEST_LIMIT)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd("--max-request-bytes=8388608") as started:
        yield started


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=60) as opened:
        yield opened
        for prefix in ("/nixl", "nixl", "//nixl", "xferbench", "/pytest-nixl"):
            opened.delete_prefix(prefix)


def kinds(deployment: DeploymentEtcd) -> list[str]:
    return [problem.kind for problem in deployment.problems]


def plant(client: EtcdClient) -> None:
    """Plant every fault that keys can have."""
    publish(client, "twice")
    publish(client, "twice", DOCUMENTED)
    publish(client, "big", value=OVERSIZE)
    publish(client, "none", value=b"")
    publish(client, "cut", value=metadata("cut")[:-30])
    publish(client, "mine", value=metadata("yours"))
    client.put("/nixl/agents/stray", b"")
    bench_rank(client, "old", 1).revoke()
    client.put("/pytest-nixl/groups/ended/run/frozen", b"{}")


@pytest.mark.long
def test_planted_faults_are_named_among_ten_thousand_keys(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str]
) -> None:
    for first in range(0, 5000, 50):
        agents = [f"agent-{number}" for number in range(first, first + 50)]
        puts = [part for name in agents for part in
                (put(f"{DEFAULT}/{name}/", b""), put(f"{DEFAULT}/{name}/metadata", metadata(name)))]  # fmt: skip
        client.transaction(txn([], puts))
    plant(client)
    start = time.perf_counter()
    code = cli.main(["etcd", etcd.url, f"--namespace={DEFAULT}"])
    taken = time.perf_counter() - start
    out = capsys.readouterr().out
    print(f"10,000 keys took {taken:.2f} s")
    assert code == 1
    assert "5,006 agents, 10,012 keys" in out
    assert "4,986 more; --all prints them" in out
    for sentence in (
        "split-namespace: the namespace is split by a slash: 1 agent under /nixl/agents/AGENT/, 5,005 agents under "
        "/nixl/agents//AGENT/",
        "agent-twice: agent 'twice' is published 2 times, as /nixl/agents//twice/ (",
        f"oversize: /nixl/agents//big/metadata has {len(OVERSIZE) + 26:,} bytes, more than the 1,572,864 bytes",
        "bad-metadata: no agent can load /nixl/agents//none/metadata (27 bytes with its key): it is empty",
        "bad-metadata: no agent can load /nixl/agents//cut/metadata (",
        "other-agent: /nixl/agents//mine/metadata holds the metadata of agent 'yours'",
        "foreign-key: /nixl/agents/stray is in the namespace, but is not NAMESPACE/AGENT/LABEL",
        "dead-nixlbench-group: nixlbench's group 'old' is dead: xferbench/old//size says that 2 ranks registered",
        "dead-group: group 'ended' of pytest-nixl is dead: it has 1 key",
    ):
        assert out.count(sentence) == 1, sentence
    assert out.endswith("9 problems found\n")


def test_an_etcd_without_faults_is_fine(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, "a", DOCUMENTED)
    publish(client, "a", "/nixl/agents-of-others")
    publish(client, "b", DOCUMENTED, label="connections")
    client.put(f"{DOCUMENTED}/finder/", b"")
    bench_rank(client, "living", 0)
    bench_rank(client, "living", 1)
    monkeypatch.setenv("NIXL_ETCD_NAMESPACE", DOCUMENTED)
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", etcd.url)
    assert cli.main(["etcd"]) == 0
    out = capsys.readouterr().out
    assert "3 agents, 5 keys" in out
    assert "groups of nixlbench: 1 with a lease, 0 dead" in out
    assert "note: 1 agent published no metadata" in out
    assert "no readable address: 'UCX' (2)" in out
    assert "\n  leaders seen by one member since it started: 1\n" in out
    assert out.endswith("no problem found\n")


def test_json_holds_every_key(client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> None:
    plant(client)
    publish(client, "big", label="two\nlines")
    assert cli.main(["etcd", etcd.url, "--json", f"--namespace={DOCUMENTED}"]) == 1
    deployment = json.loads(capsys.readouterr().out)
    assert {problem["kind"] for problem in deployment["problems"]} == {
        *("split-namespace", "agent-twice", "oversize", "bad-metadata", "other-agent", "foreign-key"),
        *("dead-nixlbench-group", "dead-group"),
    }
    assert {name: agent["labels"] for agent in deployment["agents"] if (name := agent["name"]) in ("big", "cut")} == {
        "big": ["metadata", "two\\nlines"],
        "cut": ["metadata"],
    }
    assert all(problem["text"] and problem["remedy"] and problem["keys"] for problem in deployment["problems"])
    assert len(deployment["agents"]) == 6
    assert deployment["etcd"]["members"][0]["leader"] is True
    assert deployment["etcd"]["quota"] == 2 << 30


HOSTILE = {
    "1.5 MB": b"\xff" * 1_500_000,
    "deep JSON": b"[" * 100_000,
    "control characters": b"\x1b[2J\r\n",
    "another type": b'{"agent": 7}',
    "a length beyond the end": b"nixlSerDes|Agent" + b"\xff" * 8 + b"x|",
    "another tag": b"nixlSerDes|Anybody" + bytes(8) + b"|",
    "no name": b"nixlSerDes|Agent" + bytes(8) + b"|",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["a", "\x1b]0;x\x07\r\n", "\udcff\udcfe", "a/b", "n" * 5000, "it's $(x)"], ids=ascii)
def test_hostile_keys_and_values_end_in_one_sentence(client: EtcdClient, name: str, value: bytes) -> None:
    publish(client, name, value=value)
    deployment = survey_deployment(client, NAMESPACE)
    unusable = [problem for problem in deployment.problems if problem.kind in ("bad-metadata", "other-agent")]
    assert len(unusable) == 1
    assert {*kinds(deployment)} <= {"bad-metadata", "other-agent", "near-limit"}
    for problem in deployment.problems:
        assert problem.sentence.isprintable()
        assert problem.remedy.isprintable()
        assert len(problem.sentence) < 600
    for line in lines(deployment, everything=True):
        assert line.replace("\n  remedy: ", "").isprintable()


def test_hostile_groups_end_in_one_sentence(client: EtcdClient) -> None:
    client.put("xferbench/\x1b\r\n//size", b"\xff" * 1000)
    client.put("xferbench/text//size", b"two")
    client.put("xferbench/text//rank/99999999999999999999", b"active")
    client.put("xferbench/lost//barrier/a/0/1", b"1")
    client.put("/pytest-nixl/groups/\x07/run/frozen", b"[" * 10_000)
    deployment = survey_deployment(client, NAMESPACE)
    assert sorted(kinds(deployment)) == ["bad-size", "bad-size", "dead-group"]
    assert all(problem.sentence.isprintable() and problem.remedy.isprintable() for problem in deployment.problems)
    assert [note for note in deployment.notes if "group 'lost' has 1 key under xferbench/lost/, but neither" in note]
    assert [dead.prefix for dead in deployment.dead] == ["/pytest-nixl/groups/\x07/"]


def test_metadata_that_ends_anywhere_too_early_is_named() -> None:
    whole = metadata("agent", info=b"\x01" * 40)
    assert read_metadata(whole).fault == ""
    assert read_metadata(whole).backends == ("UCX",)
    # Where one field ends and the next one has not begun, nothing tells that more should follow.
    early = [length for length in range(len(whole)) if not read_metadata(whole[:length]).fault]
    assert all(whole[length - 1 : length] == b"|" for length in early)
    assert len(early) <= 1


def test_only_whole_addresses_are_read() -> None:
    for info, address in {
        b"192.0.2.7:1234": (("192.0.2.7", 1234),),
        b"[2001:db8::7]:1\0\0": (("2001:db8::7", 1),),
        b"192.0.2.7:99999": (),
        b"999.0.2.7:1": (),
        b"node-7:1234": (),
        b"192.0.2.7:12 and more": (),
    }.items():
        assert read_metadata(metadata("a", "Mooncake", info)).addresses == address, info


def test_real_metadata_is_read(client: EtcdClient, etcd: Etcd) -> None:
    """A real agent that was killed, with metadata of all and of a part: readable, and no address in it."""
    code = (
        "import sys\nimport numpy\nfrom nixl._api import nixl_agent, nixl_agent_config\n"
        "agent = nixl_agent('real', nixl_agent_config(enable_prog_thread=False, backends=['UCX']))\n"
        "memory = numpy.zeros(4096, dtype=numpy.uint8)\n"
        "regions = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, '')], 'DRAM')\n"
        "agent.register_memory(regions)\nagent.send_local_metadata()\n"
        "agent.send_partial_agent_metadata(regions, True, ['UCX'], label='part')\nsys.stdin.read()\n"
    )
    env = environment(NIXL_ETCD_ENDPOINTS=etcd.url, UCX_MODULES="^ib")
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE) as process:
        try:
            keys = [f"{DEFAULT}/real/{label}" for label in ("", "metadata", "part")]
            wait_until(
                lambda: list(client.get_prefix(f"{DEFAULT}/")) == keys or process.poll() is not None, 120, "keys"
            )
        finally:
            process.kill()
    deployment = survey_deployment(client, NAMESPACE)
    assert kinds(deployment) == []
    [agent] = deployment.agents
    assert agent.labels == ("metadata", "part")
    assert [key.metadata.backends for key in agent.keys if key.metadata][1:] == [("UCX",), ("UCX",)]
    assert agent.addresses == ()


class TestAddresses:
    """A listener and a closed port on loopback: addresses that are usually not tried, because they are of this host."""

    @pytest.fixture
    def loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deployment, "_can_be_tried", lambda host: True)

    @pytest.mark.usefixtures("loopback")
    def test_an_agent_whose_address_does_not_answer_is_named(self, client: EtcdClient) -> None:
        [closed] = free_ports(1)
        with closing(create_server(("127.0.0.1", 0))) as listening:
            for name, port in (("living", listening.getsockname()[1]), ("dead", closed)):
                publish(client, name, value=metadata(name, "Mooncake", f"127.0.0.1:{port}".encode()))
            deployment = survey_deployment(client, NAMESPACE)
        [problem] = deployment.problems
        assert problem.kind == "address-silent"
        assert f"agent 'dead' published under {DEFAULT}/dead/ an address" in problem.sentence
        assert f"127.0.0.1:{closed}: connection refused" in problem.sentence
        assert "--agent=dead --remove-dead" in problem.remedy

    def test_loopback_is_not_tried(self) -> None:
        assert deployment.answering([("127.0.0.1", 1), ("::1", 1), ("0.0.0.0", 1), ("224.0.0.1", 1)]) == {}


class TestNixlbench:
    def test_a_rank_without_lease_beside_a_living_one_is_named(self, client: EtcdClient) -> None:
        bench_rank(client, "g", 0).revoke()
        bench_rank(client, "g", 1)
        deployment = survey_deployment(client, NAMESPACE)
        [problem] = deployment.problems
        assert problem.kind == "stale-rank"
        assert "1 rank (0) lost the lease and 1 did not" in problem.sentence
        assert deployment.dead == []

    def test_a_group_that_registers_is_not_dead(self, client: EtcdClient) -> None:
        """An older release writes ``size`` before its rank, while it holds the lock."""
        client.put("xferbench/g//lock/1", b"", client.lease(60))
        client.put("xferbench/g//size", b"1")
        deployment = survey_deployment(client, NAMESPACE)
        assert (kinds(deployment), deployment.dead) == ([], [])

    def test_ranks_that_never_had_a_lease_are_a_note(self, client: EtcdClient) -> None:
        client.put("xferbench//size", b"1")
        client.put("xferbench//rank/0", b"active")
        deployment = survey_deployment(client, NAMESPACE)
        assert (kinds(deployment), deployment.dead) == ([], [])
        assert any("etcd cannot tell whether its processes live" in note for note in deployment.notes)


class TestServer:
    """Faults of the etcd itself."""

    def test_a_full_database_is_named(self) -> None:
        with running_etcd("--quota-backend-bytes=262144") as small, connect([small.endpoint], timeout=60) as client:
            with pytest.raises(EtcdError, match="database is full"):
                for number in range(1000):
                    client.put(f"/other/{number}", b"x" * 20_000)
            deployment = survey_deployment(client, NAMESPACE)
            assert kinds(deployment) == ["alarm", "near-quota"]
            alarm, quota = deployment.problems
            assert "member 'default' raised the alarm NOSPACE" in alarm.sentence
            assert (
                f"`etcdctl compact {deployment.revision} && etcdctl defrag --cluster && etcdctl alarm" in alarm.remedy
            )
            assert "of the quota of 262,144" in quota.sentence

    def test_a_silent_member_and_members_of_two_etcds_are_named(self, etcd: Etcd, client: EtcdClient) -> None:
        with running_etcd() as other:
            both = f"{etcd.url},{other.url}"
            with connect(parse_endpoints(both), timeout=60) as two:
                assert kinds(survey_deployment(two, NAMESPACE)) == ["several-etcds"]
        with connect(parse_endpoints(both), timeout=60) as member_client:
            [problem] = survey_deployment(member_client, NAMESPACE).problems
        assert problem.kind == "member-silent"
        assert other.url in problem.sentence

    def test_a_dead_member_of_three_and_members_that_are_not_asked_are_named(self) -> None:
        with ThreeNodeEtcd(supervisor()) as three:
            with connect(parse_endpoints(three.endpoint)[:1], timeout=60) as first_member:
                deployment = survey_deployment(first_member, NAMESPACE)
            assert kinds(deployment) == []
            assert "2 of its 3 members were not asked: give the URLs of all" in deployment.notes
            three.kill_leader()
            with connect(parse_endpoints(three.endpoint), timeout=60) as every:
                looks: list[DeploymentEtcd] = []

                def only_one_is_silent() -> bool:
                    with suppress(EtcdError):  # there is no leader yet
                        looks.append(survey_deployment(every, NAMESPACE))
                    return bool(looks) and kinds(looks[-1]) == ["member-silent"]

                # The third member may learn of the new leader a little later.
                wait_until(only_one_is_silent, 60, "only one member is silent")
                deployment = looks[-1]
            assert "does not answer: etcd at" in deployment.problems[0].sentence
            assert deployment.state.leader_changes is not None
            assert deployment.state.leader_changes >= 2

    def test_an_etcd_that_has_lost_most_of_its_members_has_no_leader(self) -> None:
        with ThreeNodeEtcd(supervisor()) as three:
            for place in (0, 2):
                three.stop(place)
            with connect(three.members, timeout=5) as client:
                wait_until(lambda: not client.status().get("leader"), 60, "the second member knows no leader")
                with pytest.raises(EtcdError, match="has no leader") as caught:
                    survey_deployment(client, NAMESPACE)
        first, _, third = map(str, three.members)
        assert caught.value.reason == (
            f"the etcd at {three.endpoint} has no leader, and so reads and writes no key: 2 of 3 members do not "
            f"answer: {first}: timeout, no answer within 5 s; {third}: timeout, no answer within 5 s"
        )
        assert caught.value.remedy == "start the missing members: more than half of them must be up"

    def test_what_a_user_may_not_read_is_a_note(self) -> None:
        with running_etcd() as guarded:
            turn_authentication_on(guarded.url)
            with connect([guarded.endpoint], user="bob", password="b", timeout=60) as bob:
                publish(bob, "a", "/bob/agents")
                publish(bob, "a", "/bob/agents/")
                deployment = survey_deployment(bob, NamespaceName("/bob/agents"))
                assert kinds(deployment) == ["split-namespace", "agent-twice"]
                unknown = [note for note in deployment.notes if "permission denied" in note]
                for prefix in ("bob/agents", "//bob/agents", "xferbench/", "/pytest-nixl/groups/"):
                    assert any(note.startswith(f"the keys under {prefix} are unknown") for note in unknown), prefix
                with pytest.raises(EtcdError, match="permission denied"):
                    survey_deployment(bob, NAMESPACE)

    def test_an_etcd_that_does_not_answer_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        [port] = free_ports(1)
        assert cli.main(["etcd", f"http://127.0.0.1:{port}"]) == 2
        assert f"etcd at http://127.0.0.1:{port}: connection refused" in capsys.readouterr().err


def test_a_page_that_is_too_large_is_read_in_smaller_ones(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        publish(client, f"a{number}", value=metadata(f"a{number}", info=b"\0" * 40_000))
    monkeypatch.setattr("pytest_nixl.etcd.bounded_http.LARGEST_ANSWER", 150_000)
    monkeypatch.setattr(key_survey, "_PAGE_BYTES", 1 << 30)
    deployment = survey_deployment(client, NAMESPACE)
    assert (len(deployment.agents), kinds(deployment)) == (40, [])


def test_a_value_beyond_the_limit_of_all_values_is_not_judged(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        publish(client, f"a{number}")
    monkeypatch.setattr(key_survey, "MOST_BYTES", 100)
    deployment = survey_deployment(client, NAMESPACE)
    assert len(deployment.agents) == 40
    assert any("were not all read" in note for note in deployment.notes)


def test_the_verdict_of_the_suite_names_what_is_wrong(client: EtcdClient, etcd: Etcd) -> None:
    publish(client, "a")
    assert judge_published(client, NAMESPACE, etcd.url).verdict is Verdict.PASS
    publish(client, "a", DOCUMENTED)
    publish(client, "big", value=OVERSIZE)
    judgement = judge_published(client, NAMESPACE, etcd.url)
    assert judgement.verdict is Verdict.WARN
    for part in ("split by a slash", "agent 'a' is published 2 times", "/nixl/agents//big/metadata has"):
        assert part in judgement.reason
    assert judgement.remedy.startswith(f"run `pytest-nixl etcd {etcd.url} --namespace=/nixl/agents/`")


def test_the_line_of_an_agent_counts_writes_and_revisions(client: EtcdClient) -> None:
    """It was ``last written at revision 3, 2 ago, as version 1``; etcd has no times."""
    publish(client, "often")
    publish(client, "often")
    publish(client, "later")
    client.put("/nixl/agents//later/", b"")
    deployment = survey_deployment(client, NAMESPACE)
    newest = deployment.revision
    often, later = (line for line in lines(deployment) if line.startswith("  /nixl/agents//"))
    assert f"; last written at revision {newest - 3}, 3 revisions before the newest; written 2 times; " in often
    assert f"; last written at revision {newest}, 0 revisions before the newest; written 2 times; " in later
    client.put("/nixl/agents//new/", b"")
    *_, later, new = (
        line for line in lines(survey_deployment(client, NAMESPACE)) if line.startswith("  /nixl/agents//")
    )
    assert f"; last written at revision {newest}, 1 revision before the newest; written 2 times; " in later
    assert f"; last written at revision {newest + 1}, 0 revisions before the newest; written 1 time; " in new


def test_without_an_etcd_the_command_says_what_to_give(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["etcd"]) == 2
    error = "pytest-nixl: no etcd is given\nremedy: give its URL, or set NIXL_ETCD_ENDPOINTS\n"
    assert capsys.readouterr() == ("", error)


def test_a_key_can_be_typed() -> None:
    for key in ("/plain", "it's", "\x1b\n", "\udcff", "$(x) `y`", "-x", "", "\\'"):
        done = subprocess.run(["bash", "-c", f"printf %s {quoted(key)}"], capture_output=True, check=True)
        assert done.stdout == key.encode(errors="surrogateescape")
    assert escape("a" * 500).endswith("… (500 characters)")


def test_a_namespace_of_slashes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["etcd", "http://127.0.0.1:1", "--namespace=//"]) == 2
    assert "--namespace '//' names no namespace" in capsys.readouterr().err


def test_a_lease_under_a_prefix_is_a_condition(client: EtcdClient) -> None:
    client.put("/nixl/x/1", b"")
    assert client.transaction(txn([none_leased("/nixl/x/")], []))["succeeded"]
    client.put("/nixl/x/2", b"", client.lease(60))
    assert not client.transaction(txn([none_leased("/nixl/x/")], [])).get("succeeded", False)
