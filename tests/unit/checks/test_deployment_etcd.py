# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted in a real etcd are named, each in one sentence, whatever its keys and values are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.cli_run import environment
from helpers.etcd import Etcd, running_etcd, turn_authentication_on, wait_until
from helpers.published import DEFAULT, DOCUMENTED, bench_rank, metadata, publish
from helpers.three_node import ThreeNodeEtcd

from pytest_nixl import cli
from pytest_nixl.checks.deployment_etcd import key_survey
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import (
    DeploymentEtcd,
    judge_published,
    lines,
    survey_deployment,
)
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.errors import START_MEMBERS, EtcdError
from pytest_nixl.etcd.transaction import REQUEST_LIMIT, put, txn
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.supervisor import supervisor

NAMESPACE = NamespaceName(DEFAULT)
#: A value with the name of an agent and its metadata, which is longer than etcd's default limit.
OVERSIZE = metadata("big", info=b"\0" * REQUEST_LIMIT)
NO_ADDRESS = (
    "whether these agents still live cannot be known from etcd: their keys have no lease, and the connection info of "
    "their backends holds no readable address: "
)


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


#: The faults that are planted, in the order in which they are reported.
PLANTED = (
    "split-namespace", "agent-twice", "oversize", "bad-metadata", "other-agent", "bad-metadata", "foreign-key",
    "dead-nixlbench-group", "dead-group",
)  # fmt: skip


def test_planted_faults_are_named_among_thousands_of_keys(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str]
) -> None:
    for first in range(0, 1200, 50):
        names = [f"agent-{number}" for number in range(first, first + 50)]
        puts = [part for name in names for part in
                (put(f"{DEFAULT}/{name}/", b""), put(f"{DEFAULT}/{name}/metadata", metadata(name)))]  # fmt: skip
        client.transaction(txn([], puts))
    publish(client, "twice")
    publish(client, "twice", DOCUMENTED)
    publish(client, "big", value=OVERSIZE)
    publish(client, "none", value=b"")
    publish(client, "cut", value=metadata("cut")[:-30])
    publish(client, "mine", value=metadata("yours"))
    client.put("/nixl/agents/stray", b"")
    bench_rank(client, "old", 1).revoke()
    client.put("/pytest-nixl/groups/ended/run/frozen", b"{}")
    assert cli.main(["etcd", etcd.url, f"--namespace={DEFAULT}"]) == 1
    out = capsys.readouterr().out
    note, *problems = out.partition(NO_ADDRESS)[2].splitlines()
    assert (note, problems[-1]) == ("'UCX' (1204)", "9 problems found")
    assert [line.partition(": ")[0] for line in problems[:-1]] == [
        part for kind in PLANTED for part in (kind, "  remedy")
    ]
    assert f"`pytest-nixl etcd {etcd.url} --namespace={DEFAULT} --agent=none --remove-dead`" in out
    assert "\n1,206 agents, 2,412 keys, " in out
    assert "\n  1,186 more; --all prints them\ngroups of nixlbench: 0 with a lease, 1 dead\n" in out

    publish(client, "big", label="two\nlines")
    assert cli.main(["etcd", etcd.url, "--json", f"--namespace={DOCUMENTED}"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [problem["kind"] for problem in report["problems"]] == list(PLANTED)
    assert [problem["finding"] for problem in report["problems"] if problem["finding"]] == [
        "NIXL-ETCD-NAMESPACE-SLASH",
        "NIXL-ETCD-OVERSIZE",
    ]
    assert (len(report["agents"]), report["agents"][1200]["labels"]) == (1206, ["metadata", "two\\nlines"])


def test_an_etcd_without_faults_is_fine(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, "a", DOCUMENTED)
    publish(client, "a", "/nixl/agents-of-others")
    publish(client, "b", DOCUMENTED, label="connections")
    client.put(f"{DOCUMENTED}/finder/", b"")
    client.put(f"{DOCUMENTED}/finder/", b"", client.lease(60))
    bench_rank(client, "living", 0)
    bench_rank(client, "living", 1)
    newest = client.page(f"{DOCUMENTED}/", limit=1).revision
    monkeypatch.setenv("NIXL_ETCD_NAMESPACE", DOCUMENTED)
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", etcd.url)
    assert cli.main(["etcd"]) == 0
    version, _, database, *remaining = capsys.readouterr().out.splitlines()
    assert ": members default; leader member 'default', raft term " in version
    assert f"; revision {newest}, " in database
    assert remaining == [
        "  alarms: none",
        "3 agents, 5 keys, 679 bytes; the oldest write comes first (etcd stores no times, only revisions)",
        *(
            f"  /nixl/agents/{name}/: {labels}; {size} bytes; last written at revision {newest - ago}, {ago} revisions "
            f"before the newest; written {writes}; address not readable"
            for name, labels, size, ago, writes in (
                ("a", "metadata", 328, 10, "1 time"),
                ("b", "connections", 331, 6, "1 time"),
                ("finder", "no metadata", 20, 4, "2 times, with a lease"),
            )
        ),
        "groups of nixlbench: 1 with a lease, 0 dead",
        "groups of pytest-nixl: 0 with a lease, 0 dead",
        "note: 1 agent published no metadata, only the anchor: an agent that only fetches, or whose metadata etcd "
        "refused",
        f"note: {NO_ADDRESS}'UCX' (2)",
        "no problem found",
    ]


HOSTILE_NAMES = ("a", "\x1b]0;x\x07\r\n", "\udcff\udcfe", "a/b", "n" * 5000, "it's $(x)")
HOSTILE_VALUES = (
    b"\xff" * 1_500_000,
    b"[" * 100_000,
    b"\x1b[2J\r\n",
    b'{"agent": 7}',
    b"nixlSerDes|Agent" + b"\xff" * 8 + b"x|",  # a length beyond the end
)


def test_hostile_keys_and_values_end_in_one_sentence(client: EtcdClient) -> None:
    for name in HOSTILE_NAMES:
        for number, value in enumerate(HOSTILE_VALUES):
            publish(client, f"{name}{number}", value=value)
    deployment = survey_deployment(client, NAMESPACE)
    assert [kind for kind in kinds(deployment) if kind != "near-limit"] == ["bad-metadata"] * 30
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


class TestServer:
    """Faults of the etcd itself."""

    def test_a_full_database_is_named(self) -> None:
        with running_etcd("--quota-backend-bytes=262144") as small, connect([small.endpoint], timeout=60) as client:
            with pytest.raises(EtcdError, match="database is full"):
                for number in range(1000):
                    client.put(f"/other/{number}", b"x" * 20_000)
            deployment = survey_deployment(client, NAMESPACE)
            assert kinds(deployment) == ["alarm", "near-quota"]
            assert f"`etcdctl compact {deployment.revision} && " in deployment.problems[0].remedy
            assert deployment.state.quota == 262_144

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
        assert (caught.value.remedy, caught.value.cause) == (START_MEMBERS, "no-leader")

    def test_what_a_user_may_not_read_is_a_note(self) -> None:
        with running_etcd() as guarded:
            turn_authentication_on(guarded.url)
            with connect([guarded.endpoint], user="bob", password="b", timeout=60) as bob:
                publish(bob, "a", "/bob/agents")
                publish(bob, "a", "/bob/agents/")
                deployment = survey_deployment(bob, NamespaceName("/bob/agents"))
                assert kinds(deployment) == ["split-namespace", "agent-twice"]
                unknown = [note.partition(":")[0] for note in deployment.notes if "permission denied" in note]
                assert unknown == [
                    f"the keys under {prefix} are unknown"
                    for prefix in ("bob/agents", "//bob/agents", "xferbench/", "/pytest-nixl/groups/")
                ]
                with pytest.raises(EtcdError, match="permission denied"):
                    survey_deployment(bob, NAMESPACE)


def test_a_page_that_is_too_large_is_read_in_smaller_ones_and_values_beyond_the_limit_are_not_judged(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        publish(client, f"a{number}", value=metadata(f"a{number}", info=b"\0" * 40_000))
    with monkeypatch.context() as patch:
        patch.setattr("pytest_nixl.etcd.bounded_http.LARGEST_ANSWER", 150_000)
        deployment = survey_deployment(client, NAMESPACE)
    assert (len(deployment.agents), kinds(deployment)) == (40, [])
    monkeypatch.setattr(key_survey, "MOST_BYTES", 100)
    deployment = survey_deployment(client, NAMESPACE)
    unread = sum(agent.size is None for agent in deployment.agents)
    assert (len(deployment.agents), 20 < unread < 40) == (40, True)
    note, *_ = deployment.notes
    assert note == f"the values of {unread} agents were not all read, because there are too many bytes"


def test_the_verdict_of_the_suite_names_what_is_wrong(client: EtcdClient, etcd: Etcd) -> None:
    publish(client, "a")
    assert judge_published(client, NAMESPACE, etcd.url) == Judgement(
        Verdict.PASS, "1 agent with 2 keys under /nixl/agents/: no split namespace, no agent twice, no oversize key"
    )
    remedy = f"run `pytest-nixl etcd {etcd.url} --namespace=/nixl/agents/`, which prints a remedy for each"
    for names, more in (("bcdef", ""), ("g", "; and 1 more")):
        for name in names:
            publish(client, name, value=b"x")
        sentences = [problem.sentence for problem in survey_deployment(client, NAMESPACE).problems]
        assert judge_published(client, NAMESPACE, etcd.url) == Judgement(
            Verdict.WARN, "; ".join(sentences[:5]) + more, remedy
        )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "no etcd is given\nremedy: give its URL, or set NIXL_ETCD_ENDPOINTS\n"),
        (["http://127.0.0.1:1", "--namespace=//"], "--namespace '//' names no namespace: expected a name such as "
         "/nixl/agents\n"),
        (["http://127.0.0.1:1"], "etcd at http://127.0.0.1:1: connection refused,"),
    ],
)  # fmt: skip
def test_an_etcd_and_a_namespace_must_be_named(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["etcd", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err[: 13 + len(error)]) == ("", f"pytest-nixl: {error}")
