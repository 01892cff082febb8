# SPDX-License-Identifier: Apache-2.0
"""Only keys of the dead are removed from a real etcd, each only if nobody changed it, and all are recorded."""

from __future__ import annotations

import base64
import json
import random
import re
import shlex
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import repeats
from helpers.etcd import Etcd, running_etcd
from helpers.published import DEFAULT, DOCUMENTED, bench_rank, metadata, publish

from pytest_nixl import cli
from pytest_nixl.checks.deployment_etcd import deployment
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import survey_deployment
from pytest_nixl.checks.deployment_etcd.removal import RemovalRecord, plan_removal, remove
from pytest_nixl.cluster.joining import join
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import put, txn

NAMESPACE = NamespaceName(DEFAULT)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=60) as opened:
        yield opened
        for prefix in ("/nixl", "xferbench", "/pytest-nixl"):
            opened.delete_prefix(prefix)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_ETCD_NAMESPACE", raising=False)


def plant(client: EtcdClient) -> None:
    """Plant an agent that may be dead and one that lives, and a dead and a living group of both kinds."""
    publish(client, "gone")
    publish(client, "living")
    publish(client, "gone", DOCUMENTED)
    bench_rank(client, "old", 0).revoke()
    bench_rank(client, "new", 0)
    client.put("/pytest-nixl/groups/old/run/frozen", b"{}")


def everything(client: EtcdClient) -> dict[str, bytes]:
    return {**client.get_prefix("/"), **client.get_prefix("xferbench")}


DEAD = (f"{DEFAULT}/gone/", f"{DEFAULT}/gone/metadata", "/pytest-nixl/groups/old/run/frozen", "xferbench/old//size")


def test_the_printed_command_removes_what_was_printed(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(client)
    before = everything(client)
    assert cli.main(["etcd", etcd.url, "--remove-dead", "--agent=gone"]) == 0
    out = capsys.readouterr().out
    assert everything(client) == before, "a dry run removed keys"
    assert re.findall(r"^  (\S+) \(revision \d+\)$", out, re.MULTILINE) == [DEAD[3], DEAD[2], *DEAD[:2]]
    command = shlex.split(out.splitlines()[-1])
    assert command[:3] == ["pytest-nixl", "etcd", etcd.url]
    monkeypatch.chdir(tmp_path)
    assert cli.main(command[1:]) == 0
    assert "removed 4 keys; removed.json has them with their values" in capsys.readouterr().out
    assert everything(client) == {key: value for key, value in before.items() if key not in DEAD}
    file = tmp_path / "removed.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["removed.json"]
    record = json.loads(file.read_text())
    assert record["finished"] is True
    recorded = {base64.b64decode(record_key["key_base64"]).decode(): record_key for record_key in record["keys"]}
    assert sorted(recorded) == sorted(DEAD)
    for key, record_key in recorded.items():
        assert record_key["removed"] is True
        assert base64.b64decode(record_key["value_base64"]) == before[key]
        assert record_key["mod_revision"] > 0
    assert cli.main(["etcd", etcd.url, "--remove-dead"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--agent=a"], "--agent has no effect without --remove-dead"),
        (["--yes"], "--yes has no effect without --remove-dead"),
        (["--unchanged-since=0"], "--unchanged-since has no effect without --remove-dead"),
        (["--remove-dead", "--yes"], "--yes removes keys, and needs a record of them: give --record FILE"),
        (["--remove-dead", "--record=x"], "--record has nothing to record without --yes"),
        (["--remove-dead", "--json"], "--remove-dead prints no JSON"),
        (["--remove-dead", "--yes", "--record=x", "--agent=a"], "--yes with --agent needs --unchanged-since REVISION"),
        (["--remove-dead", "--yes", "--record=here"], "here already exists: give --record the name of a new file"),
        (["--remove-dead", "--yes", "--record=none/x"], "none/x cannot be written (No such file or directory)"),
        (["--remove-dead", "--agent=nobody"], "agent 'nobody' has no key under /nixl/agents//nobody/"),
        (["--remove-dead", "--agent=other"], "give --namespace=/nixl/agents"),
        (["--max-request-bytes=x"], "'x' is not"),
    ],
)
def test_a_bad_use_is_one_sentence(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("")
    publish(client, "other", DOCUMENTED)
    bench_rank(client, "old", 0).revoke()
    before = everything(client)
    assert cli.main(["etcd", etcd.url, *options]) == 2
    assert reason in capsys.readouterr().err
    assert everything(client) == before


def _restart_agent(client: EtcdClient) -> None:
    client.put(f"{DEFAULT}/gone/", b"")


def _publish_label(client: EtcdClient) -> None:
    client.put(f"{DEFAULT}/gone/part", metadata("gone"))


def _publish_leased(client: EtcdClient) -> None:
    client.put(f"{DEFAULT}/gone/metadata", metadata("gone"), client.lease(60))


def _delete_key(client: EtcdClient) -> None:
    client.delete(f"{DEFAULT}/gone/metadata")


def _register_rank(client: EtcdClient) -> None:
    client.put("xferbench/old//rank/0", b"active", client.lease(60))


def _register_member(client: EtcdClient) -> None:
    client.put("/pytest-nixl/groups/old/members/x", b"", client.lease(60))


CHANGES: dict[str, tuple[Callable[[EtcdClient], None], str]] = {
    "the agent starts again": (_restart_agent, f"{DEFAULT}/gone/"),
    "the agent publishes a part": (_publish_label, f"{DEFAULT}/gone/"),
    "the agent publishes with a lease": (_publish_leased, f"{DEFAULT}/gone/"),
    "somebody deletes a key": (_delete_key, f"{DEFAULT}/gone/"),
    "a rank registers": (_register_rank, "xferbench/old/"),
    "a member registers": (_register_member, "/pytest-nixl/groups/old/"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before-they-are-read", "before-the-transaction"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_after_the_look_is_kept(
    client: EtcdClient, etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: tuple[Callable[[EtcdClient], None], str], late: bool,
) -> None:  # fmt: skip
    """The owner comes back at the worst moment: between the look and the reading, or just before the transaction."""
    act, prefix = change
    plant(client)
    plan = plan_removal(survey_deployment(client, NAMESPACE), ["gone"])
    transaction = client.transaction

    def first_change(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with connect([etcd.endpoint], timeout=60) as other:
            act(other)
        monkeypatch.setattr(client, "transaction", transaction)
        return transaction(*args, **kwargs)

    if late:
        monkeypatch.setattr(client, "transaction", first_change)
        plan.dead.sort(key=lambda dead: dead.prefix != prefix)
    else:
        act(client)
    remaining: dict[str, bytes] = {}
    file = tmp_path / "record.json"
    done = list(remove(client, plan, RemovalRecord(file, client.endpoints, plan.revision)))
    remaining = client.get_prefix(prefix)
    assert remaining, "keys of an owner that came back were removed"
    refused = [removal for removal in done if removal.why_not]
    assert [removal.keys for removal in refused] == [0]
    assert len(done) == 3
    recorded = {load["key"]: load["removed"] for load in json.loads(file.read_text())["keys"]}
    assert all(removed is not key.startswith(prefix) for key, removed in recorded.items())
    assert everything(client).items() >= {**remaining, f"{DEFAULT}/living/": b""}.items()


def test_an_agent_that_may_live_is_kept(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a lease, its address answers, or it wrote after the revision that the dry run printed."""
    monkeypatch.setattr(deployment, "_can_be_tried", lambda host: True)  # a double: the address is on loopback
    client.put(f"{DEFAULT}/leased/", b"", client.lease(60))
    publish(client, "answers", value=metadata("answers", "Mooncake", f"127.0.0.1:{etcd.endpoint.port}".encode()))
    publish(client, "later")
    since = client.page(f"{DEFAULT}/later/", limit=1).items[0].mod_revision - 1
    names = ("leased", "answers", "later")
    options = [*(f"--agent={name}" for name in names), f"--unchanged-since={since}"]
    assert cli.main(["etcd", etcd.url, "--remove-dead", *options]) == 1
    out = capsys.readouterr().out
    assert "kept: agent 'leased' under /nixl/agents//leased/ has a lease, so it lives" in out
    assert f"answers at 127.0.0.1 port {etcd.endpoint.port}, so it may live" in out
    assert f"after revision {since}" in out
    assert out.endswith("nothing to remove\n")


def test_an_agent_that_is_named_twice_is_removed_once(client: EtcdClient) -> None:
    publish(client, "gone")
    deployment = survey_deployment(client, NAMESPACE)
    assert plan_removal(deployment, ["gone", "gone"]) == plan_removal(deployment, ["gone"])


def test_a_living_group_of_pytest_nixl_is_kept(client: EtcdClient) -> None:
    with join(client, "alive", 1, ttl=30) as member:
        member.barrier(60)
        assert survey_deployment(client, NAMESPACE).dead == []
        member.lease.revoke()
        assert [dead.prefix for dead in survey_deployment(client, NAMESPACE).dead] == ["/pytest-nixl/groups/alive/"]


def test_a_large_group_is_removed_in_several_transactions(client: EtcdClient, tmp_path: Path) -> None:
    client.put("xferbench/large//size", b"2")
    for first in range(0, 250, 125):
        client.transaction(txn([], [put(f"xferbench/large/barrier/{first + n}", b"1") for n in range(125)]))
    plan = plan_removal(survey_deployment(client, NAMESPACE), [])
    [done] = remove(client, plan, RemovalRecord(tmp_path / "record.json", client.endpoints, plan.revision))
    assert (done.keys, done.why_not) == (251, "")
    assert client.count_prefix("xferbench/") == 0


def test_an_etcd_that_goes_while_keys_are_removed_leaves_a_record(
    client: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(client)
    plan = plan_removal(survey_deployment(client, NAMESPACE), ["gone"])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise EtcdError("etcd at http://a:1: timeout", cause="timeout")

    monkeypatch.setattr(client, "transaction", fail)  # a double: the answer of a transaction is lost
    file = tmp_path / "record.json"
    with pytest.raises(EtcdError):
        list(remove(client, plan, RemovalRecord(file, client.endpoints, plan.revision)))
    recorded = {load["key"]: load["removed"] for load in json.loads(file.read_text())["keys"]}
    assert recorded == {DEAD[3]: None, DEAD[2]: False, DEAD[0]: False, DEAD[1]: False}


class LiveAgents:
    """Agents that come and go, and know which keys they have in etcd. One thread runs each.

    :param etcd: where they publish.
    :param revived: names of dead agents that start again.
    """

    def __init__(self, etcd: Etcd, names: list[str], revived: list[str], seed: int) -> None:
        self.keys: dict[str, bytes] = {}
        self._etcd = etcd
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(names) + len(revived) + 1)
        self._running = [self._pool.submit(self._come_and_go, name, random.Random(f"{seed} {name}")) for name in names]
        self._running += [self._pool.submit(self._come_back, name, random.Random(f"{seed} {name}")) for name in revived]
        self._running.append(self._pool.submit(self._register, random.Random(seed)))

    def _put(self, client: EtcdClient, key: str, value: bytes, seconds: int = 0) -> None:
        client.put(key, value, client.lease(seconds) if seconds else None)
        self.keys[key] = value

    def _publish(self, client: EtcdClient, name: str, value: bytes) -> None:
        self._put(client, f"{DEFAULT}/{name}/", b"")
        self._put(client, f"{DEFAULT}/{name}/metadata", value)

    def _come_and_go(self, name: str, chance: random.Random) -> None:
        with connect([self._etcd.endpoint], timeout=60) as client:
            while not self._stop.is_set():
                self._publish(client, name, metadata(name, info=chance.randbytes(50)))
                if chance.random() < 0.5:
                    for key in (f"{DEFAULT}/{name}/", f"{DEFAULT}/{name}/metadata"):
                        self.keys.pop(key)
                    client.delete_prefix(f"{DEFAULT}/{name}/")

    def _come_back(self, name: str, chance: random.Random) -> None:
        with connect([self._etcd.endpoint], timeout=60) as client:
            for _ in range(chance.randrange(8)):
                client.status()  # some of the time that the removal takes
            self._publish(client, name, metadata(name, info=b"new"))

    def _register(self, chance: random.Random) -> None:
        with connect([self._etcd.endpoint], timeout=60) as client:
            for _ in range(chance.randrange(8)):
                client.status()
            self._put(client, "xferbench/again//rank/0", b"active", 60)
            self._put(client, "xferbench/again//size", b"1")

    def close(self) -> None:
        self._stop.set()
        for future in self._running:
            future.result(120)
        self._pool.shutdown()


@pytest.mark.long
@pytest.mark.soak
def test_no_live_key_is_removed_while_agents_come_and_go(client: EtcdClient, etcd: Etcd, tmp_path: Path) -> None:
    """Agents come and go, dead ones start again, and a group of nixlbench gets a new rank, before or after the look."""
    tries = max(5, len(repeats()))
    dead, revived = ["dead-0", "dead-1"], ["back-0", "back-1"]
    outcomes = {"removed": 0, "kept": 0}
    for number in range(tries):
        for name in (*dead, *revived):
            publish(client, name)
        for group in ("gone", "again"):
            bench_rank(client, group, 0).revoke()
        since = client.page("/nixl", limit=1).revision
        with ExitStack() as stack:
            file = tmp_path / f"{number}.json"
            if number % 2:
                live = LiveAgents(etcd, ["a", "b"], revived, number)
                stack.callback(live.close)
            plan = plan_removal(survey_deployment(client, NAMESPACE), [*dead, *revived], since)
            if number % 2 == 0:
                live = LiveAgents(etcd, ["a", "b"], revived, number)
                stack.callback(live.close)
            done = list(remove(client, plan, RemovalRecord(file, client.endpoints, plan.revision)))
        stored = everything(client)
        missing = {key for key, value in live.keys.items() if stored.get(key) != value}
        assert missing == set(), f"try {number}: keys of living owners are missing"
        assert not any(f"{DEFAULT}/{name}/" in stored for name in dead)
        assert "xferbench/gone//size" not in stored
        outcomes["removed"] += sum(not removal.why_not for removal in done)
        outcomes["kept"] += sum(bool(removal.why_not) for removal in done) + len(plan.refused)
        for prefix in ("/nixl", "xferbench"):
            client.delete_prefix(prefix)
    print(outcomes)
    assert outcomes["removed"] >= 3 * tries
