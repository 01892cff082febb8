# SPDX-License-Identifier: Apache-2.0
"""Another client can write to the ranks' etcd but does not have their token: the ranks ignore everything it writes.

Without a token every valid value is believed, and an invalid value is an error that names its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from helpers.etcd import Etcd, running_etcd, turn_authentication_on

from pytest_nixl.cluster import etcd as cluster_etcd
from pytest_nixl.cluster.etcd import for_agents, meeting_etcd, require_closed, require_etcd, require_secret
from pytest_nixl.cluster.group import (
    HOST,
    PID,
    PREFIX,
    SIZE,
    Candidate,
    Member,
    MembershipError,
    MissingRanksError,
    Roster,
    group_root,
)
from pytest_nixl.cluster.group_values import GroupValues, SealError, Seals, unsealed
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.placement import Placement
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.strict import StrictError, check
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy
from pytest_nixl.etcd.transaction import KeyValue
from pytest_nixl.etcd_servers.rank0 import credentials
from pytest_nixl.etcd_servers.sources import ExternalServer
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import supervisor

TOKEN = "of this group"
#: Seconds of a lease, and for each step: a busy machine may stop the threads for many seconds.
TTL, SECONDS = 20, 60
ROOT = group_root(PREFIX, "forged", TOKEN)
REMOVE = "remove that key; or give every rank a --nixl-group-token, or a --nixl-group that nothing else writes to"
#: The value of a member as a rank writes it, but without a seal.
FAKE = b'{"host": "stranger", "pid": 1, "size": 2, "requested_rank": 1}'
FORGED = (FAKE, b"junk", b"0" * 64 + b" " + FAKE, b"")


@pytest.fixture
def stranger(etcd: Etcd) -> Iterator[EtcdClient]:
    """A client that can write every key but does not have the token. No key is left after the test."""
    with connect([etcd.endpoint], timeout=SECONDS) as client:
        yield client
        assert client.get_prefix("/pytest-nixl/") == {}, "the last rank removes the forged keys under its root"


@contextmanager
def joined(
    etcd: Etcd,
    size: int = 2,
    token: str = TOKEN,
    meanwhile: Callable[[], None] = lambda: None,
    timeout: float = SECONDS,
    first_timeout: float = SECONDS,
) -> Iterator[list[Membership]]:
    """Yield the members of a group, each with its own client; ``meanwhile`` runs when only the first has registered.

    :param timeout: seconds that a member waits for the others.
    :param first_timeout: the same for the first member.
    """
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        clients = [stack.enter_context(connect([etcd.endpoint], timeout=SECONDS)) for _ in range(size)]

        def join_group(number: int) -> Membership:
            seconds = timeout if number else first_timeout
            return join(clients[number], "forged", size, ttl=TTL, timeout=seconds, token=token, wanted=number, host="h")

        root = group_root(PREFIX, "forged", token)
        joining = [pool.submit(join_group, 0)]
        wait_until(lambda: clients[-1].count_prefix(f"{root}members/") > 0, "the first rank", seconds=60)
        meanwhile()
        joining += [pool.submit(join_group, number) for number in range(1, size)]
        yield [stack.enter_context(future.result()) for future in joining]


def barrier(members: list[Membership]) -> None:
    """Let all members pass a barrier."""
    with ThreadPoolExecutor() as pool:
        for passing in [pool.submit(member.barrier, SECONDS) for member in members]:
            passing.result()


class TestSeals:
    def test_a_seal_is_valid_for_one_key_and_one_sequence_only(self) -> None:
        seals = Seals("t", "/r/")
        stored = seals.seal("/r/k", b"value", "1")
        assert seals.open("/r/k", stored, "1") == b"value"
        assert (len(stored), unsealed(stored)) == (64 + 1 + len(b"value"), b"value")
        assert (seals.sealed, Seals("", "/r/").sealed) == (True, False)
        forged = (b"", b"value", stored[:-1], b"0" * 64 + b" value", stored.replace(b"value", b"Value"))
        for other, key, sequence, text in (
            (seals, "/r/l", "1", stored),
            (seals, "/r/k", "2", stored),
            (seals, "/r/k", "", stored),
            (seals, "/r/k1", "", stored),  # a byte cannot move from the sequence to the key
            (Seals("u", "/r/"), "/r/k", "1", stored),
            (Seals("t", "/s/"), "/r/k", "1", stored),
            *((seals, "/r/k", "1", text) for text in forged),
        ):
            with pytest.raises(SealError, match="its writer does not have the group token, or the value is old"):
                other.open(key, text, sequence)

    def test_values_have_no_seal_without_a_token(self) -> None:
        seals = Seals("", "/r/")
        assert seals.seal("/r/k", b"value", "1") == b"value"
        assert seals.open("/r/k", b"anything", "1") == b"anything"
        sealed = Seals("t", "/r/").seal("/r/k", b"a value")
        for other in (b"", b"a value", sealed[1:], sealed[:63] + b"g" + sealed[64:], sealed.replace(b" ", b"-", 1)):
            assert unsealed(other) == other


class TestMembers:
    def test_forged_members_are_not_counted(self, etcd: Etcd, stranger: EtcdClient) -> None:
        forged = {f"{name}{number:015}": value for name in "0f" for number, value in enumerate(FORGED)}
        for name, value in {**forged, "not/one": FAKE}.items():
            stranger.put(f"{ROOT}members/{name}", value)
            stranger.put(f"{ROOT}registered/{name}", b"")
        with joined(etcd) as members:
            assert [member.rank for member in members] == [0, 1]
            assert [{member.host for member in joined.members} for joined in members] == [{"h"}, {"h"}]
            barrier(members)
            ignored = {**members[0].values.ignored, **members[1].values.ignored}
            assert {f"{ROOT}members/{name}" for name in (*forged, "not/one")} <= set(ignored)

    def test_an_old_member_that_is_written_again_is_not_counted(self, etcd: Etcd, stranger: EtcdClient) -> None:
        with joined(etcd):
            old = {key: value for key, value in stranger.get_prefix(ROOT).items() if "/members/" in key}
        assert len(old) == 2
        for key, value in old.items():
            stranger.put(key.replace("/members/", "/registered/"), b"")
            stranger.put(key, value)
        with joined(etcd) as members:
            assert not {member.token for member in members[0].members} & {key.rsplit("/", 1)[1] for key in old}

    def test_a_timeout_names_the_forged_member(self, stranger: EtcdClient) -> None:
        stranger.put(f"{ROOT}members/{'0' * 16}", FAKE)
        with pytest.raises(MissingRanksError) as caught:
            join(stranger, "forged", 2, ttl=TTL, timeout=0.5, token=TOKEN, wanted=0)
        assert caught.value.reason == (
            "waited 0.5 s for rank 1 of group 'forged' (1 of 2 arrived); not counted, without a seal of this group: "
            f"'{ROOT}members/{'0' * 16}'"
        )


def lists(etcd: Etcd, stranger: EtcdClient) -> dict[str, bytes]:
    """Rosters that the other client may write: forged ones, and one of an earlier run with the same group and token."""
    with joined(etcd):
        old = stranger.get(f"{ROOT}run/frozen")
    assert old is not None
    listed = [("0" * 16, "stranger", 1), ("1" * 16, "stranger", 2)]
    return {
        "list": Roster.value(TTL, listed),
        "refusal": Roster.value(TTL, listed, refusal="go away"),
        "old": old,
        "junk": b"[" * 100_000,
    }


class TestRoster:
    @pytest.mark.parametrize("kind", ["list", "refusal", "old", "junk"])
    def test_a_forged_roster_is_removed_before_and_during_the_start(
        self, etcd: Etcd, stranger: EtcdClient, kind: str
    ) -> None:
        value = lists(etcd, stranger)[kind]
        stranger.put(f"{ROOT}members/{'0' * 16}", FAKE)  # it does not make the group look alive
        stranger.put(f"{ROOT}run/frozen", value)
        stranger.put(f"{ROOT}run/gate", b'{"passed": 9}')
        with joined(etcd, meanwhile=lambda: stranger.put(f"{ROOT}run/frozen", value)) as members:
            assert [member.rank for member in members] == [0, 1]
            stranger.put(f"{ROOT}run/frozen", value)
            barrier(members)
            assert {member.host for member in members[1].members} == {"h"}

    def test_the_last_rank_at_a_barrier_learns_of_the_other_although_its_roster_was_overwritten(
        self, etcd: Etcd, stranger: EtcdClient
    ) -> None:
        """Rank 1 starts from an old roster, in which rank 0 is another process; the roster with both is overwritten."""
        old = lists(etcd, stranger)["old"]
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor())
            proxy = stack.enter_context(EtcdProxy(etcd.url))
            slow = proxy.client("slow")
            clients = [
                stack.enter_context(connect(parse_endpoints(url), timeout=SECONDS)) for url in (slow.endpoint, etcd.url)
            ]
            joining = pool.submit(join, clients[0], "forged", 2, ttl=TTL, timeout=SECONDS, token=TOKEN, wanted=0)
            proxy.wait(lambda: any(request.method == "Watch" for request in slow.requests), "rank 0", seconds=SECONDS)
            slow.hold(lambda request: request.method == "Txn")
            stranger.put(f"{ROOT}run/frozen", old)
            proxy.wait(lambda: slow.held, "rank 0 to read the old roster", seconds=SECONDS)
            last = stack.enter_context(join(clients[1], "forged", 2, ttl=TTL, timeout=SECONDS, token=TOKEN, wanted=1))
            slow.release()
            first = stack.enter_context(joining.result(SECONDS))
            stranger.put(f"{ROOT}run/frozen", old)
            early = pool.submit(first.barrier, SECONDS)
            wait_until(lambda: stranger.count_prefix(f"{ROOT}arrived/") == 1, "rank 0 at the barrier", seconds=60)
            assert last.members != first.members
            last.barrier(SECONDS)
            early.result()
            assert first.members == last.members

    def test_a_forged_gate_keeps_no_process_from_the_rank_of_one_that_died(
        self, etcd: Etcd, stranger: EtcdClient
    ) -> None:
        with joined(etcd) as members, connect([etcd.endpoint], timeout=SECONDS) as client:
            stranger.put(f"{ROOT}run/gate", b'{"passed": 9}')
            members[1].lease.revoke()
            with join(client, "forged", 2, ttl=TTL, timeout=SECONDS, token=TOKEN, wanted=1, host="h") as other:
                assert other.rank == 1
                barrier([members[0], other])


class TestBarrier:
    def test_a_barrier_waits_for_the_last_rank_whatever_is_written(self, etcd: Etcd, stranger: EtcdClient) -> None:
        with joined(etcd) as members, ThreadPoolExecutor() as pool:
            barrier(members)
            old = stranger.get_prefix(f"{ROOT}arrived/")
            passed = stranger.get(f"{ROOT}run/gate")
            assert passed is not None
            arrivals = f"{ROOT}arrived/000002/"
            for value in (b"", b"0" * 64 + b" ", *old.values()):
                stranger.put(f"{arrivals}000001", value)
                stranger.put(f"{arrivals}000007", value)
            for gate in (b"", b'{"passed": 2}', passed.replace(b"1", b"2"), passed):
                stranger.put(f"{ROOT}run/gate", gate)
            early = pool.submit(members[0].barrier, SECONDS)
            wait_until(lambda: stranger.get(f"{arrivals}000000") is not None, "rank 0 at the barrier", seconds=60)
            stranger.put(f"{ROOT}run/gate", b'{"passed": 2}')
            with pytest.raises(TimeoutError):
                early.result(0.5)
            members[1].barrier(SECONDS)
            early.result(SECONDS)


def test_a_message_is_read_only_from_its_sender_by_its_receiver_under_its_key() -> None:
    values, key = GroupValues(ROOT, TOKEN), f"{ROOT}mail/000001/000000/000000000000"
    sender, receiver = (Member(rank, f"token-{rank}", "h", 7) for rank in range(2))
    stored = values.message(key, b"end", sender, receiver)
    assert values.read_message(key, stored, sender, receiver) == b"end"
    for other_key, first, second in (
        (f"{key[:-1]}1", sender, receiver),
        (key, receiver, sender),
        (key, replace(sender, token="another run"), receiver),
        (key, sender, replace(receiver, token="another run")),
    ):
        with pytest.raises(SealError):
            values.read_message(other_key, stored, first, second)


@pytest.mark.parametrize("key", ["members/x", "run/frozen", "run/gate"])
def test_an_invalid_value_is_an_error_that_names_its_key_without_a_token(
    etcd: Etcd, stranger: EtcdClient, key: str
) -> None:
    root = group_root(PREFIX, "forged")
    # The rank that does not see the key waits for the other one until the timeout. Only the first rank's error is
    # looked at: it watches the roster, and reads the members when it stops waiting.
    timeout = SECONDS if "gate" in key else 1
    first = 1 if "members" in key else SECONDS
    with (
        pytest.raises(MembershipError) as caught,
        joined(etcd, 2, "", lambda: stranger.put(f"{root}{key}", b"null"), timeout, first) as members,
    ):
        barrier(members)
    assert caught.value.reason.startswith(f"the key '{root}{key}' has a value that no rank of this version writes")
    assert caught.value.remedy == REMOVE
    stranger.delete_prefix(root)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"etcd": "http://h:1"}, False),
        ({"etcd_listen": "h:1"}, False),
        ({"etcd_listen": "h:1", "etcd_user": "root:x"}, False),  # the etcd of rank 0 has no users
        ({"etcd_listen": "h:1", "group_token": "t"}, True),
        ({"etcd_user": "a:b"}, True),
        ({"etcd": "http://a:b@h:1"}, True),
        ({"etcd_cert": "f"}, True),
    ],
)
def test_a_gate_of_several_ranks_requires_a_secret_or_credentials_of_the_etcd(
    make_settings: Callable[..., Settings], options: dict[str, str], accepted: bool
) -> None:
    placement = Placement(2, 0, "g", "--nixl-ranks", None, ((0, 1),))
    require_secret(make_settings(**options), placement)
    if accepted:
        require_secret(make_settings(gate=True, **options), placement)
    else:
        with pytest.raises(pytest.UsageError) as caught:
            require_secret(make_settings(gate=True, **options), placement)
        assert str(caught.value) == (
            "--nixl-gate is refused with 2 ranks (--nixl-ranks) without a group token: anyone who can write to that "
            "etcd could change the verdict; run `export NIXL_GROUP_TOKEN=$(openssl rand -hex 16)` on one rank and set "
            "the same value on all others; or use an etcd that requires a password, and give --nixl-etcd-user "
            "NAME:PASSWORD"
        )


def test_a_gate_accepts_an_etcd_that_requires_a_password(etcd: Etcd, make_settings: Callable[..., Settings]) -> None:
    with running_etcd() as closed:
        turn_authentication_on(closed.url)
        server = ExternalServer([closed.endpoint], user="root", password="pw")
        require_closed(make_settings(gate=True), server)
    refusal = f"--nixl-gate is refused with an etcd that answers without a password ({etcd.url}) and no group token: "
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(refusal)}"):
        require_closed(make_settings(gate=True), ExternalServer([etcd.endpoint], user="root", password="secret"))
    require_closed(make_settings(), ExternalServer([etcd.endpoint]))
    require_closed(make_settings(gate=True, group_token="t"), ExternalServer([etcd.endpoint]))


@pytest.mark.parametrize(
    ("form", "accepted", "refused"),
    [
        (SIZE, (1, 2, 1_000_000), (0, -1, 1_000_001, 1.5, True, "1")),
        (PID, (0, 1, 1 << 32), (-1, (1 << 32) + 1, 0.5)),
        (HOST, ("a", "node-0", "h" * 255, "\u00e9"), ("", "h" * 256, "a\x1b", "a\x7f", "\n", "a\x9f", 1)),
    ],
)
def test_values_of_a_group_have_limits(form: object, accepted: tuple[object, ...], refused: tuple[object, ...]) -> None:
    for value in accepted:
        check(form, value)
    for value in refused:
        with pytest.raises(StrictError):
            check(form, value)


NODE = {"host": "node-0", "pid": 7131, "size": 2, "requested_rank": 1}


@pytest.mark.parametrize("requested", [None, 0, 1_000_000])
def test_a_registration_is_read_as_it_was_written(requested: int | None) -> None:
    written = Candidate("token", "node-0", 7131, 2, requested)
    assert Candidate.of("/g/members/token", written.value) == written
    assert json.loads(written.value) == {**NODE, "requested_rank": requested}


@pytest.mark.parametrize(
    "changes",
    [
        {"requested_rank": 1_000_001}, {"requested_rank": -1}, {"size": 0}, {"host": ""}, {"pid": {}},
        {"size": float("inf")}, {"more": 1},
    ],
)  # fmt: skip
def test_a_registration_beyond_its_limits_is_refused(changes: dict[str, Any]) -> None:
    reason = "the key '/g/members/t' has a value that no rank of this version writes: "
    with pytest.raises(MembershipError, match=f"^{reason}") as caught:
        Candidate.of("/g/members/t", json.dumps({**NODE, **changes}).encode())
    assert caught.value.remedy == REMOVE


ENTRIES = (("token-1", "node-0", 7), ("token-2", "node-1", 8))


def test_a_roster_has_each_member_under_its_rank() -> None:
    key = KeyValue("/g/run/frozen", Roster.value(30, ENTRIES, refusal="no", changes=3), 1, 1, 1)
    members = tuple(Member(rank, *entry) for rank, entry in enumerate(ENTRIES))
    assert Roster.of(key) == Roster(key, 30, members, "no", 3)
    assert Roster.of(replace(key, value=b'{"ttl": 1, "members": [["t", "h", 1]]}')).changes == 0
    assert [Roster.of(key).rank_of(token) for token in ("token-1", "token-2", "token-3")] == [0, 1, None]


ACCEPTED_ROSTERS: list[dict[str, Any]] = [
    {"ttl": 1}, {"ttl": 86_400}, {"members": [], "refusal": "no"}, {"changes": 1 << 32},
    {"members": [["t" * 128, "h" * 255, 1 << 32]]}, {"refusal": "x" * 65_536},
]  # fmt: skip
REFUSED_ROSTERS: list[dict[str, Any]] = [
    {"ttl": 0}, {"ttl": 1.5}, {"ttl": 86_401}, {"ttl": {}}, {"members": []}, {"members": {}},
    {"members": [["", "node-0", 7]]}, {"members": [["t" * 129, "node-0", 7]]}, {"members": [[[1], 2]]},
    {"members": [["a/b", "node-0", 7]]}, {"members": [["t", "node-0"]]}, {"refusal": "x" * 65_537},
    {"refusal": "\x1b"}, {"changes": -1}, {"changes": (1 << 32) + 1}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [*((changes, True) for changes in ACCEPTED_ROSTERS), *((changes, False) for changes in REFUSED_ROSTERS)],
)
def test_a_roster_is_read_up_to_its_limits(changes: dict[str, Any], accepted: bool) -> None:
    plain = {"ttl": 30, "members": ENTRIES, "refusal": "", "changes": 3, **changes}
    key = KeyValue("/g/run/frozen", json.dumps(plain).encode(), 1, 1, 1)
    with nullcontext() if accepted else pytest.raises(StrictError):
        Roster.of(key)
    with nullcontext() if accepted else pytest.raises(MembershipError, match=f"'/g/run/frozen' (.|\n)*{REMOVE}"):
        GroupValues("/g/").read_frozen(key)


@pytest.mark.parametrize("value", [b"x", b'{"passed": -1}', b'{"passed": 4294967297}', b"[" * 100_000])
def test_a_gate_that_no_rank_writes_is_refused_and_one_with_another_seal_ignored(value: bytes) -> None:
    key, members = "/g/run/gate", [Member(rank, *entry) for rank, entry in enumerate(ENTRIES)]
    with pytest.raises(MembershipError, match=f"the key '{key}' has a value that no rank"):
        GroupValues("/g/").read_gate(KeyValue(key, value, 1, 1, 1), members)
    sealed = GroupValues("/g/", "t")
    gate = KeyValue(key, sealed.gate(key, 3, members), 1, 1, 1)
    assert [sealed.read_gate(gate, members), sealed.read_gate(None, members)] == [3, 0]
    for other in (members[:1], members[::-1]):
        assert sealed.read_gate(gate, other) == 0, "it is the gate of other members, or of others' ranks"
    assert list(sealed.ignored) == [key]


def test_ranks_need_an_etcd_that_each_of_them_can_find(make_settings: Callable[..., Settings]) -> None:
    def placement(rank: int | None) -> Placement:
        return Placement(2, rank, "g", "--nixl-ranks", None, ())

    def fails(rank: int | None, **settings: str) -> str:
        with pytest.raises(pytest.UsageError) as raised:
            require_etcd(make_settings(**settings), placement(rank))
        return str(raised.value)

    assert fails(0) == (
        "2 ranks need an etcd to meet in, but none is given: give --nixl-etcd URL, or let rank 0 serve one with "
        "--nixl-etcd-listen ADDR:PORT"
    )
    assert fails(None, etcd_listen="0.0.0.0:2379") == (
        "--nixl-etcd-listen=0.0.0.0:2379 makes rank 0 serve etcd, but the rank of this process is unknown: give "
        "--nixl-rank R, or use a launcher that numbers its processes"
    )
    for rank, settings in ((None, {"etcd": "http://e:1"}), (0, {"etcd": "http://e:1"}), (1, {"etcd_listen": ":2379"})):
        require_etcd(make_settings(**settings), placement(rank))


@pytest.mark.parametrize("token", ["", "t"])
def test_a_peer_waits_only_for_the_etcd_of_rank_0_and_uses_it_with_the_certificates_of_its_token(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(cluster_etcd, "wait_for_etcd", lambda *arguments: waits.append(arguments))
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    existing = meeting_etcd(make_settings(etcd="http://h:1"), Placement(2, 1, "g", "x", None, ()), supervisor(), print)
    assert (existing.endpoint, waits) == ("http://h:1", [])
    settings = make_settings(etcd_listen=":2379", group_token=token, join_timeout=7.0)
    meeting = meeting_etcd(settings, Placement(2, 1, "g", "x", None, ()), supervisor(), print)
    endpoint = f"{'https' if token else 'http'}://node-0:2379"
    certificates = credentials(token, supervisor().directory)
    assert isinstance(meeting, ExternalServer)
    assert meeting.endpoint == endpoint
    assert {name: text for name, text in meeting.credentials.items() if text} == certificates
    assert waits == [(endpoint, 7.0, certificates, print)]


@pytest.mark.parametrize(
    ("settings", "usable"),
    [
        ({"etcd": "http://e:1"}, True),
        ({"etcd": "https://e:1"}, False),
        ({"etcd": "http://u:p@e:1"}, False),
        ({"etcd": "http://e:1", "etcd_user": "u:p"}, False),
        ({"etcd": "http://e:1", "etcd_cacert": "ca.pem"}, False),
        ({"etcd_listen": ":1"}, True),
        ({"etcd_listen": ":1", "group_token": "t"}, False),  # it is the password of rank 0's etcd
        ({"etcd": "http://e:1", "group_token": "t"}, True),
    ],
)
def test_agents_use_only_an_etcd_without_a_password_and_without_tls(
    make_settings: Callable[..., Settings], settings: dict[str, str], usable: bool
) -> None:
    assert for_agents(make_settings(**settings)) is usable
