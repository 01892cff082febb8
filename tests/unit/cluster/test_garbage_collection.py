# SPDX-License-Identifier: Apache-2.0
"""The keys of groups without members are removed from a real etcd, and groups with members are not changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.etcd import Etcd

from pytest_nixl import cli
from pytest_nixl.cluster.etcd import DeadGroup, LiveGroup, clean
from pytest_nixl.cluster.group import Candidate, JoinRefusedError, group_root
from pytest_nixl.cluster.joining import join
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy

PREFIX = "/pytest-nixl/groups"
#: Seconds of a lease, and for each step on a busy machine.
TTL, SECONDS = 30, 60


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=SECONDS) as opened:
        opened.put("/other/key", b"another's")
        yield opened
        assert opened.get_prefix("") == {"/other/key": b"another's"}


def die(client: EtcdClient, name: str, token: str = "") -> None:
    """Leave the three keys of a group whose members were killed and whose leases have ended."""
    member = join(client, name, 1, ttl=TTL, token=token)
    member.barrier(SECONDS)
    client.put(f"{member.root}kept", b"")
    member.lease.revoke()
    remaining = [key.removeprefix(member.root) for key in client.get_prefix(member.root)]
    assert remaining == ["kept", "run/frozen", "run/gate"]


def test_groups_without_members_are_removed_and_others_are_named_and_kept(client: EtcdClient) -> None:
    die(client, "a")
    die(client, "b", "token")
    with join(client, "alive", 1, ttl=TTL, host="node-a", token="token") as member:
        before, own_keys = client.get_prefix(""), client.get_prefix(member.root)
        for dry_run in (True, False):
            cleaned = clean(client, dry_run=dry_run)
            assert (cleaned.removed, cleaned.keys) == ((DeadGroup("a", 3), DeadGroup("b", 3)), 6)
            assert cleaned.refused == (LiveGroup("alive", (Candidate(member.token, "node-a", os.getpid(), 1),)),)
            with pytest.raises(JoinRefusedError) as caught:
                cleaned.check()
            assert caught.value.reason == f"group 'alive' still has members: node-a (pid {os.getpid()})"
            assert caught.value.remedy == (
                "end these processes first; a killed process stays a member until its lease expires (6 s, unless that "
                "run had another --nixl-lease)"
            )
            assert client.get_prefix("" if dry_run else PREFIX) == (before if dry_run else own_keys)
        member.barrier(SECONDS)
    cleaned = clean(client)
    cleaned.check()
    assert (cleaned.removed, cleaned.keys) == ((), 0)


def test_one_group_is_removed_whatever_its_tokens(client: EtcdClient) -> None:
    for name, token in (("a", ""), ("a", "token"), ("ab", ""), ("b", "")):
        die(client, name, token)
    assert clean(client, group="a").removed == (DeadGroup("a", 3), DeadGroup("a", 3))
    assert clean(client, group="nobody").removed == ()
    assert {dead.group for dead in clean(client).removed} == {"ab", "b"}


def test_every_group_is_found_whatever_keys_stand_beside_it(client: EtcdClient) -> None:
    names = ["a", "a-b", "a.b", "a0", "a00", "b"]
    for name in names:
        die(client, name)
    # These have no group: a key of the root, a key without a folder, and one with an empty folder.
    strays = (f"{PREFIX}/", f"{PREFIX}/a", f"{PREFIX}//x")
    for key in strays:
        client.put(key, b"")
    assert sorted(group.group for group in clean(client).removed) == names
    assert tuple(client.get_prefix(PREFIX)) == tuple(sorted(strays))
    client.delete_prefix(PREFIX)


def test_keys_under_another_prefix_are_kept(client: EtcdClient) -> None:
    client.put("/mine/g/run/frozen", b"")
    assert clean(client).removed == ()
    assert clean(client, "/mine/").removed == (DeadGroup("g", 1),)


def test_a_group_that_gets_a_member_after_it_was_listed_is_kept(client: EtcdClient, etcd: Etcd) -> None:
    die(client, "late")
    with EtcdProxy(etcd.url) as path, ThreadPoolExecutor() as pool:
        proxy_client = path.client()
        proxy_client.hold(lambda request: request.writes)
        with connect(parse_endpoints(proxy_client.endpoint), timeout=SECONDS) as slow:
            cleaning = pool.submit(clean, slow)
            path.wait(lambda: proxy_client.held, "the removal", seconds=SECONDS)
            with join(client, "late", 1, ttl=TTL, host="node-a") as member:
                before = client.get_prefix(PREFIX)
                proxy_client.release()
                cleaned = cleaning.result(SECONDS)
                alive = LiveGroup("late", (Candidate(member.token, "node-a", os.getpid(), 1),))
                assert (cleaned.removed, cleaned.refused) == ((), (alive,))
                assert client.get_prefix(PREFIX) == before
                member.barrier(SECONDS)


class TestCommand:
    """``pytest-nixl clean``."""

    @pytest.fixture(autouse=True)
    def _host_without_killed_runs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def test_output_lists_the_removed_groups(
        self, client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str]
    ) -> None:
        die(client, "a")
        die(client, "b")
        assert cli.main(["clean", "--etcd", etcd.url, "--dry-run"]) == 0
        assert capsys.readouterr().out == (
            "nothing to remove on this host\n"
            "would remove group 'a': 3 keys\nwould remove group 'b': 3 keys\nwould remove 2 groups, 6 keys\n"
        )
        assert cli.main(["clean", "--etcd", etcd.url, "--group", "a"]) == 0
        assert capsys.readouterr().out == "removed group 'a': 3 keys\nremoved 1 group, 3 keys\n"
        assert list(client.get_prefix(group_root(PREFIX, "a"))) == []
        assert cli.main(["clean", "--etcd", etcd.url]) == 0
        capsys.readouterr()
        assert cli.main(["clean", "--etcd", etcd.url]) == 0
        assert capsys.readouterr() == ("nothing to remove on this host\nnothing to remove in the etcd\n", "")

    def test_a_group_with_members_is_refused(
        self, client: EtcdClient, etcd: Etcd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        die(client, "a")
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", etcd.url)
        with join(client, "alive", 1, ttl=TTL, host="node-a"):
            assert cli.main(["clean"]) == 1
            out, err = capsys.readouterr()
            assert out.endswith("host\nremoved group 'a': 3 keys\nremoved 1 group, 3 keys\n")
            reason, _, remedy = err.partition("\nremedy: ")
            assert reason.startswith("pytest-nixl: group 'alive' ")
            assert reason.endswith(f"node-a (pid {os.getpid()})")
            assert "end these processes first" in remedy

    def test_an_unreachable_etcd_is_an_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        [port] = free_ports(1)
        assert cli.main(["clean", "--etcd", f"http://127.0.0.1:{port}"]) == 2
        out, err = capsys.readouterr()
        assert out == "nothing to remove on this host\n"
        assert f"etcd at http://127.0.0.1:{port}: " in err

    def test_without_an_etcd_this_host_is_cleaned_and_no_group_can_be(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"):
            monkeypatch.delenv(name, raising=False)
        assert cli.main(["clean"]) == 0
        assert capsys.readouterr() == ("nothing to remove on this host\n", "")
        assert cli.main(["clean", "--group", "a"]) == 2
        assert capsys.readouterr() == (
            "", "pytest-nixl: no etcd is given\nremedy: give --etcd URL, or set NIXL_ETCD_ENDPOINTS\n"
        )  # fmt: skip
