# SPDX-License-Identifier: Apache-2.0
"""The keys of agents and groups, and the state of an etcd, are judged and described to the letter, without an etcd."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.published import DEFAULT, field, metadata

from pytest_nixl.checks.deployment_etcd import key_survey
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName, PublishedAgent, judge_agents
from pytest_nixl.checks.deployment_etcd.deployment import (
    DeploymentEtcd,
    answering,
    judge_addresses,
    lines,
    plain,
)
from pytest_nixl.checks.deployment_etcd.groups import KnownGroups, nixlbench_groups, own_groups
from pytest_nixl.checks.deployment_etcd.key_survey import AgentMetadata, SurveyedKey, SurveyedKeys, pages, read_metadata
from pytest_nixl.checks.deployment_etcd.problem import DeadKeys, EtcdProblem, quoted
from pytest_nixl.checks.deployment_etcd.server_state import EtcdState, describe_state, judge_state, read_state
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import START_MEMBERS, EtcdError
from pytest_nixl.etcd.maintenance import Alarm, ListedMember, MemberStatus
from pytest_nixl.etcd.transaction import KeyPage, KeyValue

NAMESPACE = NamespaceName(DEFAULT)
BEYOND = "it is truncated: a field goes beyond its end at byte"
NO_NIXL = "'nixlSerDes|', so it is not metadata of NIXL"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", AgentMetadata("it is empty")),
        (b"nixlSer", AgentMetadata(f"it is shorter than {NO_NIXL}")),
        (b"x" * 100, AgentMetadata(f"it does not begin with {NO_NIXL}")),
        (b"nixlSerDes|Agent" + bytes(8) + b"|", AgentMetadata(f"{BEYOND} 25")),
        (b"nixlSerDes|Agent" + bytes(8) + b"|other tag|", AgentMetadata("it does not begin with the name of an agent")),
        (b"nixlSerDes|Ag", AgentMetadata(f"{BEYOND} 13")),
        (b"nixlSerDes|Anybody", AgentMetadata("it does not begin with the name of an agent")),
        (b"nixlSerDes|" + field(b"Agent", b"a\xff") + b"another field|", AgentMetadata("", "a\udcff")),
        (metadata("a")[:-1] + b"?", AgentMetadata("it is truncated: no '|' follows its last field, at byte 290", "a",
                                                  ("UCX",))),
        # The connection info of a backend is an address if it is nothing else.
        *((metadata("a", "Mooncake", info), AgentMetadata("", "a", ("Mooncake",), addresses)) for info, addresses in (
            (b"192.0.2.7:1234", (("192.0.2.7", 1234),)),
            (b"[2001:db8::7]:1\0\0", (("2001:db8::7", 1),)),
            (b"192.0.2.7:65535", (("192.0.2.7", 65535),)),
            *((text, ()) for text in (b"192.0.2.7:65536", b"192.0.2.7:0", b"999.0.2.7:1", b"node-7:1234",
                                      b"192.0.2.7:12 and more")),
        )),
        (b"nixlSerDes|" + field(b"Agent", b"a") + field(b"Conns", (2).to_bytes(8, "little"))
         + b"".join(field(b"t", name) + field(b"c", b"192.0.2.%d:9" % place) for place, name in
                    enumerate((b"one", b"two", b"three"))),
         AgentMetadata("", "a", ("one", "two"), (("192.0.2.0", 9), ("192.0.2.1", 9)))),
    ],
)  # fmt: skip
def test_metadata_is_read_as_far_as_it_is_known(value: bytes, expected: AgentMetadata) -> None:
    assert read_metadata(value) == expected


def test_metadata_that_ends_anywhere_too_early_is_named() -> None:
    whole = metadata("agent", info=b"\x01" * 40)
    # Where one field ends and the next one has not begun, nothing tells that more should follow.
    early = [length for length in range(len(whole)) if not read_metadata(whole[:length]).fault]
    assert all(whole[length - 1 : length] == b"|" for length in early)
    assert len(early) <= 1


@pytest.mark.parametrize(
    ("text", "prefixes", "keys"),
    [
        ("/a/b/", ("/a/b", "a/b", "//a/b"), ("a/b", "//a/b//x", "/a/b/")),
        ("//a", ("//a", "/a", "a"), ("a", "/a/x")),
        ("a", ("a", "/a", "//a"), ("///a",)),
    ],
)
def test_a_namespace_has_the_keys_of_each_spelling(text: str, prefixes: tuple[str, ...], keys: tuple[str, ...]) -> None:
    namespace = NamespaceName(text)
    assert namespace.prefixes == prefixes
    assert all(map(namespace.has, keys))
    assert not any(namespace.has(f"{key.rstrip('/')}-of-others") for key in prefixes)


def key(name: str, revision: int = 1, **more: Any) -> SurveyedKey:
    """A key of one version, with metadata of agent ``a`` unless it is told otherwise."""
    return SurveyedKey(name, **{
        "create_revision": 1, "mod_revision": revision, "version": 1, "lease": 0, "size": 100, "short": b"",
        "metadata": AgentMetadata("", "a", ("UCX",)), **more,
    })  # fmt: skip


def test_agents_are_read_from_keys_of_nixls_form() -> None:
    keys = [key("/n//a/", 3), key("/n//a/l/m", 5, lease=7), key("n/a/x", size=None), key("/n/a"), key("/nn/a/x")]
    agents, foreign = NamespaceName("n").agents(keys)
    assert agents == [
        PublishedAgent("/n/", "a", (keys[0],)),
        PublishedAgent("/n/", "a/l", (keys[1],)),
        PublishedAgent("n", "a", (keys[2],)),
    ]
    assert foreign == keys[3:]
    agent = PublishedAgent("/n/", "a", tuple(keys[:2]))
    assert (agent.prefix, agent.labels, agent.size, agent.written, agent.leased) == ("/n//a/", ("l/m",), 200, 5, True)
    assert (agents[0].leased, agents[2].size) == (False, None)


def test_each_fault_of_an_agents_keys_is_reported() -> None:
    agents = [
        PublishedAgent("n", "a", (key("n/a/", 9, short=b"x", size=80), key("n/a/m", size=79), key("n/a/o", size=101))),
        PublishedAgent("/n", "a", (key("/n/a/", 8, size=1), key("/n/a/m", metadata=None, size=None))),
        PublishedAgent("/n", "b", (key("/n/b/m"), key("/n/b/x", size=None, metadata=AgentMetadata("bad")))),
    ]
    removing, of_b = (f"`cmd --namespace={owner} --remove-dead`" for owner in ("n --agent=a", "/n --agent=b"))
    publish_again = f"let the agent publish again; if it is dead, {of_b}"
    over = (
        "bytes that a request may have: etcd refuses what is larger, NIXL reports nothing, and peers go on loading the "
        "old value"
    )
    larger = (
        "start etcd with --max-request-bytes=16777216 and give it to this command, too; or register fewer, larger "
        "regions"
    )
    foreign = [key("n/\x07")]
    assert list(judge_agents(agents, foreign, limit=100, command="cmd")) == [EtcdProblem(*problem) for problem in (
        ("split-namespace", "the namespace is split by a slash: 2 agents under /n/AGENT/, 1 agent under n/AGENT/; "
         "agents of one part never find those of another",
         "set NIXL_ETCD_NAMESPACE=/n for every agent of the deployment, and start them again", ("n/a/", "/n/a/")),
        ("agent-twice", "agent 'a' is published 2 times, as /n/a/ (last written at revision 8) and n/a/ (last written "
         "at revision 9): a peer loads the one that its own spelling of the namespace leads to, dead or not",
         "if the older one is dead, `cmd --namespace=/n --agent=a --remove-dead`", ("/n/a/", "n/a/")),
        ("near-limit", f"n/a/ has 80 bytes, 80% of the 100 {over}", larger, ("n/a/",)),
        ("anchor-with-value", "n/a/ is the anchor of an agent, which NIXL writes without a value, but it has 80 bytes "
         "with its key: NIXL did not write it", f"if the agent is dead, {removing}", ("n/a/",)),
        ("oversize", f"n/a/o has 101 bytes, more than the 100 {over}", larger, ("n/a/o",), "NIXL-ETCD-OVERSIZE"),
        ("near-limit", f"/n/b/m has 100 bytes, 100% of the 100 {over}", larger, ("/n/b/m",)),
        ("other-agent", "/n/b/m holds the metadata of agent 'a': who fetches 'b' loads that one", publish_again,
         ("/n/b/m",)),
        ("bad-metadata", "no agent can load /n/b/x (0 bytes with its key): bad", publish_again, ("/n/b/x",)),
        ("foreign-key", "n/\\x07 is in the namespace, but is not NAMESPACE/AGENT/LABEL: NIXL did not write it",
         "if nothing of yours wrote it, `etcdctl del -- $'n/\\x07'`", ("n/\x07",)),
    )]  # fmt: skip


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A double of the network, in which port 1 answers, port 2 refuses, and port 3 is silent; the addresses tried."""
    tried: list[tuple[str, int]] = []

    def create_connection(address: tuple[str, int], timeout: float) -> Any:
        assert timeout == 2
        tried.append(address)
        if address[1] > 1:
            raise [ConnectionRefusedError(111, "Connection refused"), TimeoutError()][address[1] - 2]
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return tried


def test_an_agent_of_which_no_address_answers_is_named(network: list[tuple[str, int]]) -> None:
    def agent(name: str, *addresses: tuple[str, int]) -> PublishedAgent:
        return PublishedAgent("/n", name, (key(f"/n/{name}/m", metadata=AgentMetadata("", name, (), addresses)),))

    silent, local = ("192.0.2.1", 2), [(host, 1) for host in ("127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "fe80::1")]
    gone = agent("gone", silent, ("2001:db8::1", 3))
    agents = [agent("half", silent, ("192.0.2.1", 1)), agent("local", *local), gone]
    states = answering([address for agent in agents for address in agent.addresses])
    assert states == {silent: "connection refused", ("192.0.2.1", 1): "", ("2001:db8::1", 3): "no answer"}
    assert sorted(network) == sorted(states), "each address once, and none of another host's own"
    assert list(judge_addresses(agents, states, "cmd")) == [
        EtcdProblem(
            "address-silent",
            "agent 'gone' published under /n/gone/ an address that does not answer from this host within 2 s "
            "(192.0.2.1:2: connection refused, [2001:db8::1]:3: no answer): who loads it cannot reach it",
            "if this host can reach the agents' network and the agent is dead, `cmd --namespace=/n --agent=gone "
            "--remove-dead`",
            ("/n/gone/",),
        )
    ]
    assert answering([("127.0.0.1", 1)]) == {}
    assert len(answering([(f"192.0.2.{host}", port) for host in range(200) for port in (1, 2)])) == 256


OLD_RELEASE = (
    "nixlbench's group 'g' has 2 keys, and its rank keys have no lease, as in older releases of nixlbench: etcd "
    "cannot tell whether its processes live; if none runs, `etcdctl del --prefix -- xferbench/g/`"
)
STALE = "of the {} ranks that registered in nixlbench's group 'g', {} lost the lease and {} did not: the living wait"


@pytest.mark.parametrize(
    ("keys", "living", "problem", "note"),
    [
        # An older release writes ``size`` before its rank, while it holds the lock.
        ({"/lock/1": (7, b""), "/size": (0, b"1")}, 1, "", ""),
        ({"/rank/1": (7, b""), "/size": (0, b"2")}, 1, STALE.format(2, "1 rank (0)", 1), ""),
        ({"rank/3": (7, b""), "/size": (0, b"9")}, 1, STALE.format(9, "8 ranks (0, 1, 2, 4, 5, 6 and 2 more)", 1), ""),
        ({"/rank/0": (7, b""), "/rank/1": (7, b""), "/size": (0, b"2")}, 1, "", ""),
        ({"/rank/0": (7, b"")}, 1, "", ""),
        ({"/rank/0": (0, b"active"), "/size": (0, b"1")}, 0, "", OLD_RELEASE),
        ({"/rank/1234567": (0, b""), "/size": (0, b"1234567")}, 0, "xferbench/g//size of nixlbench's group 'g' is not "
         "a number of ranks: every process that joins it ends", ""),
        ({"/rank/0": (7, b""), "/size": (0, b"2 ")}, 1, "xferbench/g//size of nixlbench's group 'g' is not a", ""),
        ({"/barrier/1": (0, b""), "/rank/": (0, b"")}, 0, "", "nixlbench's group 'g' has 2 keys under xferbench/g/, "
         "but neither size nor ranks, so that nothing tells whose they are; if no process of this group runs, `etcdctl "
         "del --prefix -- xferbench/g/`"),
    ],
)  # fmt: skip
def test_a_group_of_nixlbench_that_may_live_is_not_dead(
    keys: dict[str, tuple[int, bytes]], living: int, problem: str, note: str
) -> None:
    surveyed = [key(f"xferbench/g/{name}", lease=lease, short=value) for name, (lease, value) in keys.items()]
    groups = nixlbench_groups([*surveyed, key("xferbench/no-folder")], "cmd")
    assert (groups.living, groups.dead, groups.notes) == (living, [], [note] if note else [])
    assert [item.sentence[: len(problem)] for item in groups.problems] == ([problem] if problem else [])


def test_a_group_of_nixlbench_without_a_lease_and_without_ranks_is_dead() -> None:
    keys = [key("xferbench/g//size", short=b"2"), key("xferbench/g//barrier/1", short=None)]
    assert nixlbench_groups(keys, "cmd") == KnownGroups(0, [EtcdProblem(
        "dead-nixlbench-group", "nixlbench's group 'g' is dead: xferbench/g//size says that 2 ranks registered, and "
        "the lease of none is left; the next processes of this group are refused a rank, or wait 181 s",
        "`cmd --remove-dead` prints its 2 keys", ("xferbench/g//size", "xferbench/g//barrier/1"),
    )], [], [DeadKeys("nixlbench's group 'g'", "xferbench/g/", tuple(keys))])  # fmt: skip


def test_a_group_of_pytest_nixl_lives_while_a_member_or_a_lease_is_there() -> None:
    names = ("one/a", "one/b", "two/members/x", "three/a", "three/members-of-others")
    keys = [key(f"/pytest-nixl/groups/{name}", lease=name == "one/b") for name in (*names, "stray")]
    prefix = "/pytest-nixl/groups/three/"
    groups = own_groups(keys, "cmd")
    assert groups.living == 2
    assert groups.dead == [DeadKeys("group 'three' of pytest-nixl", prefix, tuple(keys[3:5]))]
    assert groups.problems == [EtcdProblem(
        "dead-group", f"group 'three' of pytest-nixl is dead: it has 2 keys under {prefix}, and no member has a lease",
        "`cmd --remove-dead` prints them; `pytest-nixl clean` also removes them",
        (f"{prefix}a", f"{prefix}members-of-others"),
    )]  # fmt: skip


def status(member: int, version: str = "3.6.1", **changes: Any) -> MemberStatus:
    return replace(MemberStatus(1, member, version, 10, 4, 100, 60, None, False), **changes)


def state_of(*statuses: MemberStatus | EtcdError, **changes: Any) -> EtcdState:
    members = (ListedMember(10, "ten", False), ListedMember(11, "", True))
    by_endpoint = {f"http://e{number}:1": status for number, status in enumerate(statuses)}
    return replace(EtcdState(by_endpoint, members, (), 1 << 30, 3, 7, ()), **changes)


FREEING = "`etcdctl compact 99 && etcdctl defrag --cluster && etcdctl alarm disarm`; or raise --quota-backend-bytes"


@pytest.mark.parametrize(
    ("state", "problems"),
    [
        (state_of(status(10), status(11)), []),
        (state_of(EtcdError("it is off"), EtcdError("it is off", "turn it on"), quota=1), [
            ("member-silent", "the member at http://e0:1 does not answer: it is off", "start that member"),
            ("member-silent", "the member at http://e1:1 does not answer: it is off", "turn it on")]),
        (state_of(status(10), alarms=(Alarm("NOSPACE", 10), Alarm("CORRUPT", 255))), [
            ("alarm", "member 'ten' raised the alarm NOSPACE: its database is full, and etcd accepts no write until "
             "the alarm is disarmed, so that no agent can publish", FREEING),
            ("alarm", "member ff raised the alarm CORRUPT: its data differs from the others'",
             "remove it with `etcdctl member remove ff`, and add it again without data")]),
        (state_of(status(10, db_size=1000, db_in_use=5), status(11, db_size=1600, db_in_use=3), quota=2000), [
            ("near-quota", "the database has 1,600 bytes (5 in use), 80% of the quota of 2,000: when it is full, etcd "
             "accepts no more writes", FREEING)]),
        (state_of(status(10, db_size=1599), quota=2000), []),
        (state_of(status(10), status(11, leader=0)), [
            ("no-leader", "member b knows no leader: etcd accepts no writes", START_MEMBERS)]),
        (state_of(status(10), EtcdError("off", "on"), status(11, cluster=255, leader=11)), [
            ("member-silent", "the member at http://e1:1 does not answer: off", "on"),
            ("several-etcds", "the endpoints belong to different etcds: http://e0:1 (1), http://e2:1 (ff)",
             "give NIXL_ETCD_ENDPOINTS the members of one etcd: agents that reach different ones never meet")]),
        (state_of(status(10, raft_term=3), status(11, leader=11)), [
            ("leader-disputed", "the members name different leaders: member 'ten' names member 'ten' in term 3, member "
             "b names member b in term 4", "run this command again: an election takes a second; if it stays, check the "
             "network between the members")]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_etcd_is_one_sentence_with_its_remedy(
    state: EtcdState, problems: list[tuple[str, str, str]]
) -> None:
    assert list(judge_state(state, 99)) == [EtcdProblem(*problem) for problem in problems]


def test_what_an_etcd_does_not_report_is_a_note() -> None:
    """The etcd is a double, because none of today refuses its list of members."""

    def refuse() -> Any:
        raise EtcdError("it is refused")

    statuses = {f"http://e{at}:1": status(at, quota=quota) for at, quota in enumerate((300, 200, None))}
    members = [ListedMember(number, "", False) for number in range(4)]
    counters = {
        "etcd_server_quota_backend_bytes": 500.0,
        "etcd_server_leader_changes_seen_total": 2.0,
        "etcd_debugging_mvcc_compact_revision": -1.0,
    }

    def read(**answers: Any) -> EtcdState:
        defaults = {"each_status": lambda: statuses, "listed": lambda: members, "alarms": lambda: (),
                    "counters": lambda: counters}  # fmt: skip
        maintenance = SimpleNamespace(**{**defaults, **answers})
        return read_state(cast("EtcdClient", SimpleNamespace(status=dict, maintenance=maintenance)))

    state = read()
    assert (state.quota, state.leader_changes, state.compacted) == (200, 2, 0)
    assert state.unknown == ("1 of its 4 members were not asked: give the URLs of all",)
    state = read(listed=refuse, alarms=refuse, counters=dict, each_status=lambda: {"http://e2:1": status(12)})
    assert (state.members, state.alarms, state.quota, state.leader_changes, state.compacted) == (None,) * 5
    assert state.unknown == (
        "its list of members is unknown: it is refused",
        "its alarms are unknown: it is refused",
        "its quota is unknown: it serves no /metrics at this address, and reports it only from 3.6 on",
    )
    assert read(each_status=lambda: {"http://e2:1": status(12)}).quota == 500


def test_an_etcd_is_described_with_what_is_known_of_it() -> None:
    members = status(11, db_size=1000, db_in_use=50), status(10, "3.5.9", db_size=900, db_in_use=60, raft_term=9)
    assert list(describe_state(state_of(*members, alarms=(Alarm("NOSPACE", 10), Alarm("CORRUPT", 11))), 99)) == [
        "etcd 3.6.1: members ten, b (learner); leader member 'ten', raft term 4",
        "  leaders seen by one member since it started: 3",
        "  database 1,000 bytes, 60 in use; quota 1GiB; revision 99, compacted up to 7",
        "  alarms: NOSPACE, CORRUPT",
    ]
    unknown = state_of(status(10, leader=0), members=None, alarms=None, quota=None, leader_changes=None, compacted=None)
    assert list(describe_state(unknown, 99)) == [
        "etcd 3.6.1: members not known; leader none, raft term 4",
        "  database 100 bytes, 60 in use; quota not known; revision 99, compaction not known",
        "  alarms: not known",
    ]
    assert list(describe_state(state_of(EtcdError("off")), 99)) == []


def deployment_of(*agents: PublishedAgent, **changes: Any) -> DeploymentEtcd:
    groups = KnownGroups(), KnownGroups(2, [], [], [DeadKeys("it", "/p/\x07/", ())])
    state = state_of(status(10), EtcdError("off"))
    return replace(DeploymentEtcd(NAMESPACE, 99, state, agents, {}, *groups, (), ()), **changes)


def test_a_long_report_is_cut_unless_all_is_asked_for() -> None:
    agents = [PublishedAgent("/n", f"{number}", (key(f"/n/{number}/m", 50 - number),)) for number in range(22)]
    problems = [EtcdProblem("kind", f"sentence {number}", "remedy") for number in range(52)]
    deployment = deployment_of(*agents, problems=(*problems, EtcdProblem("other", "last", "remedy")), notes=("a note",))
    printed = list(lines(deployment))[4:]
    whole = list(lines(deployment, everything=True))[4:]
    assert printed == [*whole[:21], "  2 more; --all prints them", *whole[23:76], whole[78],
                       "kind: 2 more; --all prints them", "53 problems found"]  # fmt: skip
    assert [line.split(":")[0] for line in whole[:25]] == [
        "22 agents, 22 keys, 2,200 bytes; the oldest write comes first (etcd stores no times, only revisions)",
        *(f"  /n/{number}/" for number in reversed(range(22))), "groups of nixlbench", "groups of pytest-nixl",
    ]  # fmt: skip
    assert whole[24:27] == ["groups of pytest-nixl: 2 with a lease, 1 dead", "note: a note",
                            "kind: sentence 0\n  remedy: remedy"]  # fmt: skip
    assert list(lines(deployment_of()))[4] == "no agent has keys under /nixl/agents/"


@pytest.mark.parametrize(
    ("keys", "silent", "line"),
    [
        ([key("/n/a/", 90, version=5), *(key(f"/n/a/{label}", 99, version=2, size=25) for label in "mnop")], {},
         "m, n, o, p; 200 bytes; last written at revision 99, 0 revisions before the newest; written 5 times; address "
         "not readable"),
        ([key(f"/n/a/{label}", 100, size=None, lease=1) for label in ("one", "two", "three", "four", "five", "six")],
         {}, "one, two, three, four, 2 more; size not read; last written at revision 100, 0 revisions before the "
         "newest; written 1 time, with a lease; address not readable"),
        *(([key("/n/a/m", 98, metadata=AgentMetadata("", "a", (), tuple(("192.0.2.1", port) for port in range(4))))],
           silent, "m; 100 bytes; last written at revision 98, 1 revision before the newest; written 1 time; 192.0.2.1 "
           f"port 0, 192.0.2.1 port 1, 192.0.2.1 port 2 {state}")
          for silent, state in ((
              {}, "not tried"), ({("192.0.2.1", 1): "off", ("192.0.2.1", 3): ""}, "answers"),
              ({("192.0.2.1", 1): "off"}, "does not answer"))),
    ],
)  # fmt: skip
def test_the_line_of_an_agent_has_its_keys_writes_and_addresses(
    keys: list[SurveyedKey], silent: dict[tuple[str, int], str], line: str
) -> None:
    deployment = deployment_of(PublishedAgent("/n", "a", tuple(keys)), silent=silent)
    assert list(lines(deployment))[5] == f"  /n/a/: {line}"


def test_json_has_all_that_is_known() -> None:
    address = ("192.0.2.1", 9)
    agent = PublishedAgent("/\x08", "\x07", tuple(
        key(f"/\x08/\x07/{label}", 4, metadata=AgentMetadata("", "a", (), (address,))) for label in ("m", "n")
    ))  # fmt: skip
    problem = EtcdProblem("kind", "sentence", "remedy", ("/n/\udcff",), "FINDING")
    deployment = deployment_of(agent, silent={address: "off"}, problems=(problem,), notes=("a note",))
    assert plain(deployment) == {
        "revision": 99,
        "namespace": "/nixl/agents/",
        "etcd": {
            "members": [
                {"endpoint": "http://e0:1", "version": "3.6.1", "name": "member 'ten'", "learner": False,
                 "leader": True, "raft_term": 4, "db_size": 100, "db_in_use": 60},
                {"endpoint": "http://e1:1", "error": "off"},
            ],
            "alarms": [], "quota": 1 << 30, "leader_changes": 3, "compacted": 7,
        },
        "agents": [
            {"namespace": "/\\x08", "name": "\\x07", "key": "/\\x08/\\x07/", "key_base64": "LwgvBy8=",
             "labels": ["m", "n"],
             "size": 200, "written": 4, "lease": False,
             "addresses": [{"host": "192.0.2.1", "port": 9, "silent": "off"}]},
        ],
        "groups": {"nixlbench": {"living": 0, "dead": []}, "pytest-nixl": {"living": 2, "dead": ["/p/\\x07/"]}},
        "notes": ["a note"],
        "problems": [{"kind": "kind", "text": "sentence", "remedy": "remedy", "finding": "FINDING",
                      "keys": [{"key": "/n/\\udcff", "key_base64": "L24v/w=="}]}],
    }  # fmt: skip
    state = state_of(status(10, leader=11), alarms=(Alarm("NOSPACE", 10),))
    assert plain(deployment_of(state=state))["etcd"]["alarms"] == ["NOSPACE"]
    assert plain(deployment_of(state=state))["etcd"]["members"][0]["leader"] is False


def test_values_are_read_only_if_they_are_wanted() -> None:
    values: dict[str, bytes] = {"/a": b"x" * 64, "/b": b"x" * 65, "/c": b""}
    reads: list[bool] = []

    def page(prefix: str, *, after: str, limit: int, keys_only: bool) -> KeyPage:
        reads.append(keys_only)
        items = [KeyValue(name, b"" if keys_only else value, 2, 3, 4, 5) for name, value in values.items()]
        # A key that was made since is not kept.
        return KeyPage((*items, *([] if keys_only else [KeyValue("/new", b"", 1, 1, 1)])), False, 7 if keys_only else 8)

    client = cast("EtcdClient", SimpleNamespace(page=page))
    facts = SurveyedKey("/a", 2, 3, 4, 5), SurveyedKey("/b", 2, 3, 4, 5)
    assert key_survey.survey(client, "/", values=False, matches=lambda name: name != "/c") == SurveyedKeys(facts, 7)
    surveyed = key_survey.survey(client, "/", values=True, matches=lambda name: name != "/c")
    bad = AgentMetadata("it does not begin with 'nixlSerDes|', so it is not metadata of NIXL")
    assert surveyed == SurveyedKeys(
        (replace(facts[0], size=66, short=values["/a"], metadata=bad), replace(facts[1], size=67, metadata=bad)), 7
    )
    assert reads == [True, True, False]


@pytest.mark.parametrize(
    ("size", "keys_only", "limits"),
    [(10, False, [16, 64, 256, 1000, 1000]), ((1 << 20) - 99, False, [16, 4, 4, 4]), (3 << 21, False, [16, 1, 1]),
     (10, True, [1000, 1000]), (0, False, [16, 2, 8, 32]),
     (0, True, [1000, 125, 500, 1000])],
)  # fmt: skip
def test_pages_grow_while_their_values_are_small(size: int, keys_only: bool, limits: list[int]) -> None:
    """The etcd is a double, because it needs values of gigabytes; without a size, its first answer is too late."""
    requested: list[int] = []

    def page(prefix: str, *, after: str, limit: int, keys_only: bool) -> KeyPage:
        requested.append(limit)
        if not size and len(requested) == 1:
            raise EtcdError("it is late", cause="timeout")
        items = (KeyValue(f"/{len(requested)}{at:04}", bytes(size), 1, 1, 1) for at in range(limit))
        return KeyPage(tuple(items), len(requested) < len(limits), 1)

    client = cast("EtcdClient", SimpleNamespace(page=page))
    assert len(list(pages(client, "/", keys_only=keys_only))) == len(limits) - (not size)
    assert requested == limits


def test_a_key_can_be_typed() -> None:
    for text in ("/plain", "it's", "\x1b\n", "\udcff", "$(x) `y`", "-x", "", "\\'"):
        done = subprocess.run(["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True)
        assert done.stdout == text.encode(errors="surrogateescape")
    assert quoted("\x1b ~\x7f") == "$'\\x1b ~\\x7f'"
