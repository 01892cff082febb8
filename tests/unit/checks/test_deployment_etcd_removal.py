# SPDX-License-Identifier: Apache-2.0
"""Only keys of the dead are removed from a real etcd, each only if nobody changed it, and all are recorded."""

from __future__ import annotations

import base64
import json
import shlex
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.etcd import Etcd
from helpers.published import DEFAULT, DOCUMENTED, bench_rank, metadata, publish

from pytest_nixl import cli
from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import survey_deployment
from pytest_nixl.checks.deployment_etcd.removal import RemovalRecord, RemovedKeys, plan_removal, remove
from pytest_nixl.cluster.joining import join
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import KeyValue, put, txn

NAMESPACE = NamespaceName(DEFAULT)


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


def removed(file: Path) -> dict[str, bool | None]:
    """Return of each key in a record whether it was removed."""
    return {load["key"]: load["removed"] for load in json.loads(file.read_text())["keys"]}


#: The owners of what is dead, with their keys, in the order in which they are removed.
DEAD = {
    "nixlbench's group 'old'": ["xferbench/old//size"],
    "group 'old' of pytest-nixl": ["/pytest-nixl/groups/old/run/frozen"],
    f"agent 'gone' under {DEFAULT}/gone/": [f"{DEFAULT}/gone/", f"{DEFAULT}/gone/metadata"],
}
DEAD_KEYS = [key for keys in DEAD.values() for key in keys]


def test_the_printed_command_removes_what_was_printed(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(client)
    before = everything(client)
    revision = client.page("/", limit=1).revision
    items = {key: client.page(key, limit=1).items[0] for key in DEAD_KEYS}
    assert cli.main(["etcd", etcd.url, "--remove-dead", "--agent=gone"]) == 0
    command = (
        f"pytest-nixl etcd {etcd.url} --remove-dead --agent=gone --namespace={DEFAULT} --unchanged-since={revision} "
        "--yes --record=removed.json"
    )
    listed = [
        line
        for owner, keys in DEAD.items()
        for line in (f"would remove {len(keys)} key{'s' * (len(keys) > 1)} of {owner}:",
                     *(f"  {key} (revision {items[key].mod_revision})" for key in keys))
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        *listed,
        "nothing is removed without --yes; to remove these keys, if their owners are dead:",
        command,
    ]
    assert everything(client) == before, "a dry run removed keys"

    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"removed {len(keys)} key{'s' * (len(keys) > 1)} of {owner}" for owner, keys in DEAD.items()),
        "removed 4 keys; removed.json has them with their values",
    ]
    assert everything(client) == {key: value for key, value in before.items() if key not in DEAD_KEYS}
    [file] = tmp_path.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("removed.json", 0o600)

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    assert json.loads(file.read_text()) == {
        "format": "keys removed by pytest-nixl etcd, 1", "etcd": [etcd.url], "revision": revision, "finished": True,
        "keys": [
            {"owner": owner, "key": key, "key_base64": encoded(key.encode()), "value_base64": encoded(before[key]),
             "create_revision": items[key].create_revision, "mod_revision": items[key].mod_revision,
             "version": items[key].version, "removed": True}
            for owner, keys in DEAD.items() for key in keys
        ],
    }  # fmt: skip
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
        (["--remove-dead", "--agent=nobody"], "agent 'nobody' has no key under /nixl/agents//nobody/\n"
         "remedy: correct --agent: `pytest-nixl etcd --all` lists the agents"),
        (["--remove-dead", "--agent=other"], "agent 'other' has no key under /nixl/agents//other/\n"
         "remedy: give --namespace=/nixl/agents\n"),
        (["--max-request-bytes=x"], "'x' is not"),
    ],
)  # fmt: skip
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


OWNERS = list(DEAD)
#: What happens while keys are removed, and the place of the owner in DEAD whose keys it concerns.
CHANGES: dict[str, tuple[Callable[[EtcdClient], object], int]] = {
    "the agent starts again": (lambda etcd: etcd.put(f"{DEFAULT}/gone/", b""), 2),
    "the agent publishes a part": (lambda etcd: etcd.put(f"{DEFAULT}/gone/part", metadata("gone")), 2),
    "the agent publishes with a lease": (lambda etcd: etcd.put(f"{DEFAULT}/gone/x", b"", etcd.lease(60)), 2),
    "another process deletes a key": (lambda etcd: etcd.delete(f"{DEFAULT}/gone/metadata"), 2),
    "a rank registers": (lambda etcd: etcd.put("xferbench/old//rank/0", b"active", etcd.lease(60)), 0),
    "a member registers": (lambda etcd: etcd.put("/pytest-nixl/groups/old/members/x", b"", etcd.lease(60)), 1),
}


@pytest.mark.parametrize("late", [False, True], ids=["before-they-are-read", "before-the-transaction"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_after_the_look_is_kept(
    client: EtcdClient, etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: tuple[Callable[[EtcdClient], object], int], late: bool,
) -> None:  # fmt: skip
    """The owner comes back at the worst moment: between the look and the reading, or just before the transaction."""
    act, place = change
    plant(client)
    plan = plan_removal(survey_deployment(client, NAMESPACE), ["gone"])
    transaction = client.transaction
    stored: list[dict[str, bytes]] = []

    def change_first(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if not stored:
            with connect([etcd.endpoint], timeout=60) as other:
                act(other)
                stored.append(everything(other))
        return transaction(*args, **kwargs)

    if late:
        monkeypatch.setattr(client, "transaction", change_first)
        plan.dead.insert(0, plan.dead.pop(place))
    else:
        act(client)
        stored.append(everything(client))
    file = tmp_path / "record.json"
    results = list(remove(client, plan, RemovalRecord(file, client.endpoints, plan.revision)))
    refused = RemovedKeys(OWNERS[place], 0, "a key of it was written, or removed, after it was looked at")
    assert sorted(results, key=lambda result: OWNERS.index(result.owner)) == [
        refused if number == place else RemovedKeys(owner, len(DEAD[owner])) for number, owner in enumerate(DEAD)
    ]
    dead = [key for number, keys in enumerate(DEAD.values()) for key in keys if number != place]
    assert everything(client) == {key: value for key, value in stored[0].items() if key not in dead}
    unremoved = dict.fromkeys(DEAD[OWNERS[place]], False) if late else {}
    assert removed(file) == {**dict.fromkeys(dead, True), **unremoved}


@pytest.mark.parametrize("leased", [False, True])
def test_a_large_group_is_removed_in_transactions_until_it_changes(
    client: EtcdClient, etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    client.put("xferbench/large//size", b"2")
    for first in range(0, 250, 125):
        client.transaction(txn([], [put(f"xferbench/large/barrier/{first + n}", b"1") for n in range(125)]))
    plan = plan_removal(survey_deployment(client, NAMESPACE), [])
    transaction, sizes = client.transaction, list[int]()

    def change_last(payload: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(payload["success"]))
        if leased and len(sizes) == 3:
            client.put("xferbench/large/z", b"", client.lease(60))
        return transaction(payload)

    monkeypatch.setattr(client, "transaction", change_last)
    record = RemovalRecord(tmp_path / "record.json", client.endpoints, plan.revision)
    [result] = remove(client, plan, record)
    assert sizes == [100, 100, 51]
    assert (result.keys, bool(result.why_not)) == ((200, True) if leased else (251, False))
    assert client.count_prefix("xferbench/") == (52 if leased else 0)
    assert sum(bool(value) for value in removed(tmp_path / "record.json").values()) == result.keys


def test_an_agent_that_may_live_is_kept(
    client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a lease, its address answers, or it wrote after the revision that the dry run printed."""
    # A double of the network: no test reaches another host.
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    client.put(f"{DEFAULT}/leased/", b"", client.lease(60))
    publish(client, "answers", value=metadata("answers", "Mooncake", b"192.0.2.1:9"))
    publish(client, "equal")
    publish(client, "later")
    written = client.page(f"{DEFAULT}/later/metadata", limit=1).items[0].mod_revision
    names = ("leased", "answers", "later", "equal")
    options = [*(f"--agent={name}" for name in names), f"--unchanged-since={written - 2}"]
    assert cli.main(["etcd", etcd.url, "--remove-dead", *options]) == 1
    assert capsys.readouterr().out.splitlines()[:4] == [
        "kept: agent 'leased' under /nixl/agents//leased/ has a lease, so it lives",
        "kept: agent 'answers' under /nixl/agents//answers/ answers at 192.0.2.1 port 9, so it may live",
        f"kept: agent 'later' under /nixl/agents//later/ wrote at revision {written}, after revision {written - 2}",
        "would remove 2 keys of agent 'equal' under /nixl/agents//equal/:",
    ]
    assert cli.main(["etcd", etcd.url, "--remove-dead", "--no-connect", "--agent=answers", "--agent=answers"]) == 0
    assert capsys.readouterr().out.count("would remove") == 1


def test_a_living_group_of_pytest_nixl_is_kept(client: EtcdClient) -> None:
    with join(client, "alive", 1, ttl=30) as member:
        member.barrier(60)
        assert survey_deployment(client, NAMESPACE).dead == []
        member.lease.revoke()
        assert [dead.prefix for dead in survey_deployment(client, NAMESPACE).dead] == ["/pytest-nixl/groups/alive/"]


@pytest.mark.parametrize(
    ("cause", "noted"), [("timeout", None), ("closed", None), ("no-leader", None), ("refused", False)]
)
def test_an_etcd_that_goes_while_keys_are_removed_leaves_a_record(
    client: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, noted: bool | None
) -> None:
    plant(client)
    plan = plan_removal(survey_deployment(client, NAMESPACE), ["gone"])
    file = tmp_path / "record.json"

    def fail(*args: Any, **kwargs: Any) -> Any:
        assert set(removed(file).values()) == {None}, "the record is written before the first key is removed"
        raise EtcdError("etcd at http://a:1: it failed", cause=cause)

    monkeypatch.setattr(client, "transaction", fail)  # a double: the answer of a transaction is lost
    with suppress(EtcdError):
        list(remove(client, plan, RemovalRecord(file, client.endpoints, plan.revision)))
    assert removed(file) == {**dict.fromkeys(DEAD_KEYS, False), DEAD_KEYS[0]: noted}


def test_more_bytes_than_a_record_holds_are_refused(tmp_path: Path) -> None:
    class Large(bytes):
        """A double of a value, because a real one needs too much memory."""

        def __len__(self) -> int:
            return (256 << 20) - 3

    record = RemovalRecord(tmp_path / "record.json", [], 1)
    record.add("it", KeyValue("key", Large(), 1, 1, 1))
    with pytest.raises(NixlPluginError, match="the keys to remove have more than 256 MiB, which no record holds"):
        record.add("it", KeyValue("k", b"", 1, 1, 1))
