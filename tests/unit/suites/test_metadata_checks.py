# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite ``metadata`` passes with a sound NIXL in memory, and names the fault of one that is not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.doubled_nixl import ETCD, DoubledNixl, DoubledProxy
from helpers.metadata_endings import (
    DEAF,
    MUTE,
    REACH,
    REFUSED,
    STALE,
    differ,
    late,
    unforgotten,
    unloaded,
    unpublished,
    unremoved,
    unwatched,
    unwritten,
)
from helpers.suite_calls import arguments_of, ending_of

from pytest_nixl.core import polling
from suites.metadata import namespace, test_data_path, test_exchange, test_lifecycle, test_many, test_namespaces
from suites.metadata.namespace import Namespace

Check = Callable[..., None]
Conclude = Callable[..., str]

by_etcd = test_exchange.test_an_agent_finds_another_through_etcd
by_side_channel = test_exchange.test_an_agent_finds_another_by_a_side_channel
by_listener = test_exchange.test_an_agent_sends_its_metadata_to_another_that_listens
parts_by_etcd = test_exchange.test_an_agent_finds_the_parts_that_another_published_under_labels
parts_by_side_channel = test_exchange.test_an_agent_learns_of_memory_by_and_by
update = test_exchange.test_an_agent_publishes_again_what_has_changed
without_etcd = test_data_path.test_transfers_do_not_touch_etcd
silent = test_data_path.test_an_agent_is_told_that_nothing_was_published
fetch_stuck = test_data_path.test_an_agent_fetches_again_when_etcd_is_back
watch_lost = test_data_path.test_what_is_withdrawn_after_etcd_was_away_is_forgotten
withdrawn = test_lifecycle.test_what_an_agent_withdraws_the_others_forget
later = test_lifecycle.test_an_agent_is_found_that_publishes_after_it_was_looked_for
in_turn = test_lifecycle.test_a_fetch_of_a_missing_agent_does_not_delay_the_next
dead = test_lifecycle.test_an_agent_that_has_ended_is_not_published_any_more
restarted = test_lifecycle.test_an_agent_that_was_restarted_is_found_by_those_who_knew_it
twins = test_lifecycle.test_two_agents_of_one_name_are_kept_apart_or_refused
deregistered = test_lifecycle.test_deregistered_memory_is_forgotten_by_who_fetches_again
many = test_many.test_many_agents_find_each_other
apart = test_namespaces.test_agents_of_one_name_in_two_namespaces_do_not_meet
default_namespace = test_namespaces.test_the_default_namespace_is_the_documented_one
several_endpoints = test_namespaces.test_agents_meet_through_a_list_of_endpoints_of_which_one_is_dead


class InTurn(Executor):
    """A pool without threads: whoever waits moves the clock on, and a thread that got no turn would be late."""

    def submit(self, call: Callable[..., Any], /, *values: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(call(*values, **named))
        return done


@pytest.fixture
def conclude(monkeypatch: pytest.MonkeyPatch) -> Conclude:
    """Call a check with the agents, the etcd and the clock of a doubled NIXL, and return how it ends."""

    def conclude(check: Check, nixl: DoubledNixl, *, progress: str = "auto", extended: bool = False) -> str:
        monkeypatch.setattr(polling, "time", nixl.clock)
        monkeypatch.setattr(test_lifecycle, "time", nixl.clock)
        monkeypatch.setattr(namespace, "_numbers", itertools.count())
        monkeypatch.setattr(test_many, "ThreadPoolExecutor", lambda workers: InTurn())
        monkeypatch.setattr(test_exchange, "free_ports", lambda count: [4001, 4002][:count])
        run: Any = nixl
        values: dict[str, Any] = {
            "namespace": Namespace(run, run.client, ETCD, "/n", 30.0, HOSTS),
            "proxy_client": nixl.proxy,
            "agents": nixl,
            "agent_backend": nixl.backend,
            "agent_progress": progress,
            "nixl_settings": SimpleNamespace(timeout=30.0, extended=extended),
            "nixl_private_etcd": SimpleNamespace(client=nixl.client, endpoint=ETCD),
        }
        return ending_of(check, **arguments_of(check, values))

    return conclude


HOSTS: Any = ("host of rank 0", "host of rank 1")
DIRECT = {
    "NIXL_ETCD_ENDPOINTS": ETCD,
    "NIXL_ETCD_NAMESPACE": "/n",
    "hosts": HOSTS,
    "listen_thread": True,
    "progress_thread": None,
}
PROXIED = {**DIRECT, "NIXL_ETCD_ENDPOINTS": DoubledProxy.endpoint, "hosts": ()}
NO_ETCD = {"progress_thread": None}
LISTENS = {"listen_thread": True, "progress_thread": None}
PAIR = (["publisher", "finder"], DIRECT)
SEPARATE = [(["publisher"], DIRECT), (["finder"], PROXIED)]


def part(name: str) -> dict[str, Any]:
    return {**DIRECT, "NIXL_ETCD_NAMESPACE": f"/n/{name}"}


LAST = ("finder", "last-0", {"progress_thread": None})
KEYS = "in etcd are /nixl/agents//one/, /nixl/agents//one/metadata, /nixl/agents/other/, /nixl/agents/other/metadata"

#: Of each check with a sound NIXL: how it ends, the agents that it starts and those beside them, and its transfers.
SOUND: dict[Check, tuple[str, list[tuple[list[str], dict[str, Any]]], list[tuple[str, str, dict[str, Any]]], int]] = {
    by_etcd: ("no conclusion", [PAIR], [], 1),
    by_side_channel: ("no conclusion", [(["writer", "owner"], NO_ETCD)], [], 1),
    by_listener: ("no conclusion", [(["listener"], LISTENS), (["caller"], LISTENS)], [], 1),
    parts_by_etcd: ("no conclusion", [PAIR], [], 1),
    parts_by_side_channel: ("no conclusion", [(["writer", "owner"], NO_ETCD)], [], 2),
    update: ("no conclusion", [PAIR], [LAST], 2),
    without_etcd: ("no conclusion", [(["publisher", "finder"], PROXIED)], [], 51),
    silent: (
        "NIXL-ETCD-SILENT-FAILURE occurs: with etcd cut off, send_local_metadata() returned like after a success; NIXL "
        "wrote E0101 etcd is away",
        [(["publisher"], PROXIED)],
        [],
        0,
    ),
    fetch_stuck: (
        "NIXL-ETCD-FETCH-STUCK does not occur: after a fetch with etcd cut off, fetches succeed again with etcd back: "
        "2 requests in 5 s; NIXL wrote: E0101 etcd: cannot fetch publisher",
        SEPARATE,
        [],
        0,
    ),
    watch_lost: (
        "NIXL-ETCD-WATCH-LOST does not occur: etcd could not be reached for a moment, and the finder reaches it again; "
        "metadata that was removed since, it forgot",
        SEPARATE,
        [],
        0,
    ),
    withdrawn: ("no conclusion", SEPARATE, [], 1),
    later: ("no conclusion", [(["publisher", "finder"], PROXIED)], [], 1),
    in_turn: (
        "NIXL-ETCD-SERIAL-FETCH does not occur: an agent with metadata in etcd was found 0.3 s after a fetch of a "
        "missing agent, and in 0.3 s without such a fetch",
        [PAIR],
        [("publisher", "present", {}), ("publisher", "missing", {}), LAST],
        0,
    ),
    dead: (
        "NIXL-ETCD-STALE-KEY occurs: the metadata of killed and deleted is still in etcd without a lease; an agent "
        "that fetches that of the killed agent cannot load it: E0101 etcd: killed is dead",
        [(["killed", "finder"], DIRECT)],
        [("finder", "deleted", {}), ("finder", "living", {}), LAST],
        0,
    ),
    restarted: (
        "NIXL-ETCD-RESTART-REFUSED does not occur: the finder reached the restarted agent after fetching it again",
        [(["restarted", "finder"], DIRECT), (["restarted"], DIRECT)],
        [LAST],
        1,
    ),
    twins: (
        "NIXL-ETCD-DUPLICATE-NAME occurs: the second agent's metadata replaced the first agent's without an error, and "
        "when the first agent removed its metadata, that of the second was removed from etcd",
        [(["twin", "twin"], DIRECT)],
        [],
        0,
    ),
    deregistered: (
        "NIXL-DEREGISTERED-KNOWN does not occur: after its owner deregistered it and published again, and the finder "
        "fetched again, the memory is unknown to the finder",
        [PAIR],
        [LAST],
        0,
    ),
    apart: (
        "no conclusion",
        [(["same"], part("one")), (["same"], part("two")), (["finder"], part("one")), (["finder"], part("two"))],
        [],
        2,
    ),
    default_namespace: (
        f"NIXL-ETCD-NAMESPACE-SLASH occurs: {KEYS}",
        [
            ([name], {**DIRECT, "NIXL_ETCD_NAMESPACE": namespace, "hosts": ()})
            for name, namespace in (("one", None), ("other", "/nixl/agents"))
        ],
        [],
        0,
    ),
}
#: What a NIXL with LIBFABRIC does otherwise.
RECONNECTS = (
    "LIBFABRIC-NO-RECONNECT {}: publisher removed its metadata and published again, finder fetched it again, and a "
    "WRITE to it {}"
)
OF_LIBFABRIC = {
    withdrawn: (RECONNECTS.format("does not occur", "arrived"), 2),
    dead: (
        "NIXL-ETCD-STALE-KEY occurs: the metadata of killed and deleted is still in etcd without a lease; an agent "
        "that fetches that of the killed agent does not answer within 5.0 s, and found a living one in 0.3 s",
        0,
    ),
}


@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
@pytest.mark.parametrize("check", SOUND, ids=lambda check: check.__name__)
def test_a_check_ends_as_a_sound_nixl_demands(conclude: Conclude, check: Check, backend: str) -> None:
    nixl = DoubledNixl(backend=backend)
    conclusion, started, beside, moved = SOUND[check]
    if backend == "LIBFABRIC":
        conclusion, moved = OF_LIBFABRIC.get(check, (conclusion, moved))
    assert conclude(check, nixl) == conclusion
    assert (nixl.started, nixl.beside[: len(beside)]) == (started, beside)
    assert (nixl.moved, nixl.released) == (moved, moved)
    assert nixl.proxy.cuts == (check in (without_etcd, silent, fetch_stuck, watch_lost))
    assert {buffer.size for buffer in nixl.buffers.values()} <= {65536}
    timeouts = {agent.worker.timeout for agent in nixl.incarnations.values()}
    assert timeouts == ({60.0, 5.0} if (check, backend) in ((withdrawn, "LIBFABRIC"), (dead, "LIBFABRIC")) else {60.0})


@pytest.mark.parametrize("check", [by_etcd, by_side_channel, by_listener, parts_by_etcd, parts_by_side_channel])
def test_an_agent_without_a_thread_is_polled_while_another_loads_its_metadata(conclude: Conclude, check: Check) -> None:
    nixl = DoubledNixl(backend="LIBFABRIC")
    nixl.threads = False
    assert conclude(check, nixl) == "no conclusion"
    assert not any(agent.served for agent in nixl.agents_alive())


#: A check, the faults of NIXL, and how the check ends.
FAULTS = [
    (by_etcd, "mute-publisher", unpublished("/n/publisher/metadata", MUTE)),
    (by_etcd, "deaf-finder", unloaded("worker 2", "publisher", "/n/publisher/metadata", DEAF)),
    (by_etcd, "spoils-1", differ("publisher")),
    (by_etcd, "etcd-late", "no conclusion"),
    (by_etcd, "etcd-fails", "NixlError: etcd fails"),
    (
        by_etcd,
        "stalls",
        unwritten(
            "finder", "publisher", "the transfer is not done at finder, and its notification has arrived at publisher"
        ),
    ),
    (
        by_etcd,
        "unnotified",
        unwritten(
            "finder", "publisher", "the transfer is done at finder, and its notification has not arrived at publisher"
        ),
    ),
    (by_side_channel, "other-name", "AssertionError: assert 'another' == 'owner'"),
    (by_side_channel, "spoils-1", differ("owner")),
    (
        by_side_channel,
        "stalls",
        unwritten("writer", "owner", "the transfer is not done at writer, and its notification has arrived at owner"),
    ),
    (
        by_listener,
        "nobody-listens",
        late(
            "listener to load the metadata that arrived at port 4001", f"{REACH}E0101 could not connect to etcd or 4001"
        ),
    ),
    (
        by_listener,
        "never-answers listener-complains",
        late("caller to load the metadata that it fetched from port 4001", f"{REACH}E0101 etcd: listener has a fault"),
    ),
    (by_listener, "never-removes", late("listener to forget caller, which removed its metadata", f"{REACH}nothing")),
    (by_listener, "spoils-1", differ("listener")),
    (parts_by_etcd, "mute-publisher", unpublished("/n/publisher/connections", MUTE)),
    (parts_by_etcd, "two-labels", "AssertionError: a part was also published under another label"),
    (parts_by_etcd, "all-memory-of-publisher", "AssertionError: finder knows memory whose metadata it has not fetched"),
    (parts_by_etcd, "parts-have-all", "AssertionError: finder knows memory that was not published"),
    (parts_by_etcd, "parts-have-none", unloaded("worker 2", "publisher", "/n/publisher/memory", "nothing")),
    (parts_by_etcd, "spoils-1", differ("publisher")),
    (parts_by_side_channel, "parts-have-none", "AssertionError: the memory of the loaded part is unknown"),
    (parts_by_side_channel, "all-memory-of-owner", "AssertionError: memory is known although its part was not loaded"),
    (parts_by_side_channel, "spoils-1", differ("owner")),
    (parts_by_side_channel, "spoils-2", differ("owner")),
    (update, "mute-again", unpublished("/n/publisher/metadata")),
    (update, "parts-forget-0", "NixlError: no such memory"),
    (update, "parts-forget-1", "NixlError: no such memory"),
    (update, "spoils-1", differ("publisher")),
    (update, "spoils-2", differ("publisher")),
    (
        without_etcd,
        "ignores-proxy",
        "AssertionError: the agents found each other, but the proxy to etcd counted no request",
    ),
    (without_etcd, "never-watches", unwatched("worker 2", "/n/publisher/", "so as to hear when it is withdrawn")),
    (
        without_etcd,
        "posts",
        "AssertionError: 25 transfers made 25 requests to etcd: Put(/n/finder/metadata), "
        "Put(/n/finder/metadata), Put(/n/finder/metadata)",
    ),
    *((without_etcd, f"spoils-{number}", differ("publisher")) for number in (1, 2, 26, 27, 51)),
    (
        silent,
        "raises-when-cut",
        "NIXL-ETCD-SILENT-FAILURE does not occur: with etcd cut off, send_local_metadata() "
        "raised an error: etcd is away",
    ),
    (
        silent,
        "waits-when-cut",
        "NIXL-ETCD-SILENT-FAILURE does not occur: with etcd cut off, send_local_metadata() "
        "returned like after a success; NIXL wrote nothing",
    ),
    (
        silent,
        "never-back",
        late(
            "worker 1 to publish again after etcd is back",
            "restart the agent: its etcd client does not reconnect; NIXL wrote: E0101 etcd is away",
        ),
    ),
    (
        silent,
        "never-back waits-when-cut",
        late(
            "worker 1 to publish again after etcd is back",
            "restart the agent: its etcd client does not reconnect; NIXL wrote: nothing",
        ),
    ),
    (
        fetch_stuck,
        "fetch-stuck",
        "NIXL-ETCD-FETCH-STUCK occurs: after a fetch with etcd cut off, fetches did not "
        f"succeed with etcd back: 0 requests in 5 s; NIXL wrote: {DEAF}",
    ),
    (
        fetch_stuck,
        "fetches-quietly",
        late(
            "worker 3 to log that it cannot fetch while it is cut off from etcd",
            "it has logged nothing: its request was answered before the cut, or its log has another form",
        ),
    ),
    (
        watch_lost,
        "watch-lost",
        "NIXL-ETCD-WATCH-LOST occurs: etcd could not be reached for a moment, and the finder "
        "reaches it again; metadata that was removed since, it still has 5 s later",
    ),
    (watch_lost, "never-removes", unremoved("/n/publisher/")),
    (watch_lost, "never-watches", unwatched("worker 3", "/n/publisher/", "so as to hear when it is withdrawn")),
    (withdrawn, "never-removes", unremoved("/n/publisher/")),
    (withdrawn, "never-forgets", unforgotten("worker 3", "publisher")),
    (withdrawn, "never-watches", unwatched("worker 3", "/n/publisher/", "so as to hear when it is withdrawn")),
    (withdrawn, "spoils-1", differ("publisher")),
    (later, "never-watches", unwatched("worker 2", "/n/publisher/metadata", "which is not there yet")),
    (later, "spoils-1", differ("publisher")),
    (
        in_turn,
        "serial",
        "NIXL-ETCD-SERIAL-FETCH occurs: an agent with metadata in etcd was found 5.4 s after a fetch "
        "of a missing agent, and in 0.3 s without such a fetch",
    ),
    (dead, "leases", STALE.format("does not occur", "neither", "cannot load it: E0101 etcd: killed is dead")),
    (dead, "loads-dead", STALE.format("occurs", "killed and deleted", "loads it")),
    (dead, "ignores-dead", STALE.format("occurs", "killed and deleted", "cannot load it: NIXL wrote nothing")),
    (dead, "hangs-on-dead", "WorkerHungError: worker 2 hangs"),
    (restarted, "restart-refused", REFUSED.format("E0101 etcd: restarted is another agent")),
    (restarted, "refuses-1", REFUSED.format("NIXL wrote nothing")),
    (restarted, "hangs-1", "WorkerHungError: worker 2 hangs for 60 s"),
    (restarted, "restart-refused spoils-1", differ("restarted")),
    (restarted, "spoils-1", differ("restarted")),
    (
        twins,
        "name-refused",
        "NIXL-ETCD-DUPLICATE-NAME does not occur: the second agent got an error: the name is in use",
    ),
    (twins, "never-removes-1", unremoved("/n/twin/")),
    (twins, "mute-again", unpublished("/n/twin/metadata", worker="worker 2")),
    (
        deregistered,
        "deregistered-known",
        "NIXL-DEREGISTERED-KNOWN occurs: after its owner deregistered it and "
        "published again, and the finder fetched again, the memory is known to the "
        "finder",
    ),
    (
        deregistered,
        "remembers",
        "AssertionError: memory that is not published is still known after remove_remote_agent",
    ),
    (apart, "spoils-1", differ("same")),
    (apart, "spoils-2", differ("same")),
    (apart, "never-removes", unremoved("/n/one/same/")),
    (apart, "removes-all", "AssertionError: metadata that was removed in one namespace is also missing in the other"),
    (
        default_namespace,
        "default-is-documented",
        "NIXL-ETCD-NAMESPACE-SLASH does not occur: in etcd are /nixl/agents/one/, /nixl/agents/one/metadata, "
        "/nixl/agents/other/, /nixl/agents/other/metadata",
    ),
    (
        default_namespace,
        "mute-one",
        late(
            "worker 1 to publish its metadata under any key: NIXL reported no error to Python",
            f"read what NIXL wrote: {MUTE}",
        ),
    ),
    (default_namespace, "mute-other", unpublished("/nixl/agents/other/metadata", MUTE, "worker 3")),
    (several_endpoints, "", "no conclusion"),
    (several_endpoints, "mute-publisher", unpublished("/n/publisher/metadata", MUTE)),
    (several_endpoints, "deaf-finder", unloaded("worker 2", "publisher", "/n/publisher/metadata", DEAF)),
    (several_endpoints, "spoils-1", differ("publisher")),
]


@pytest.mark.parametrize(
    ("check", "faults", "conclusion"), FAULTS, ids=[f"{check.__name__}-{faults}" for check, faults, _ in FAULTS]
)
def test_a_check_names_the_fault_of_nixl(conclude: Conclude, check: Check, faults: str, conclusion: str) -> None:
    assert conclude(check, DoubledNixl(*faults.split())) == conclusion


@pytest.mark.parametrize(("held_up", "occurs", "seconds"), [(1.7, "does not occur", 2.1), (2.1, "occurs", 2.5)])
def test_a_fetch_is_held_up_if_it_takes_two_seconds_longer_than_usual(
    conclude: Conclude, held_up: float, occurs: str, seconds: float
) -> None:
    nixl = DoubledNixl("serial")
    nixl.held_up = held_up
    assert conclude(in_turn, nixl) == (
        f"NIXL-ETCD-SERIAL-FETCH {occurs}: an agent with metadata in etcd was found {seconds} s after a fetch of a "
        "missing agent, and in 0.3 s without such a fetch"
    )


@pytest.mark.parametrize(
    ("check", "faults", "times", "deadline", "conclusion"),
    [
        (
            dead,
            "",
            {"load": 1.5},
            15.3,
            STALE.format(
                "occurs", "killed and deleted", "does not answer within 15.3 s, and found a living one in 1.5 s"
            ),
        ),
        (
            dead,
            "",
            {"load": 0.1},
            5.0,
            STALE.format(
                "occurs", "killed and deleted", "does not answer within 5.0 s, and found a living one in 0.1 s"
            ),
        ),
        (withdrawn, "refuses-2", {}, 5.0, RECONNECTS.format("occurs", "failed: publisher cannot be reached")),
        (withdrawn, "hangs-2", {}, 5.0, RECONNECTS.format("occurs", "failed: the call did not return within 5.0 s")),
        (
            withdrawn,
            "hangs-2",
            {"done_after": 2.0},
            20.1,
            RECONNECTS.format("occurs", "failed: the call did not return within 20.1 s"),
        ),
        (
            withdrawn,
            "hangs-2",
            {"confirmed": 3.0},
            5.0,
            RECONNECTS.format("occurs", "failed: the call did not return within 5.0 s"),
        ),
        (withdrawn, "spoils-1", {}, 60.0, differ("publisher")),
        (withdrawn, "spoils-2", {}, 5.0, differ("publisher")),
    ],
)
def test_a_handshake_may_take_ten_times_as_long_as_the_one_before(
    conclude: Conclude, check: Check, faults: str, times: dict[str, float], deadline: float, conclusion: str
) -> None:
    nixl = DoubledNixl(*faults.split(), backend="LIBFABRIC")
    vars(nixl).update(times)
    assert conclude(check, nixl) == conclusion
    assert [agent.worker.timeout for agent in nixl.incarnations.values() if agent.name == "finder"] == [
        pytest.approx(deadline, abs=0.05)
    ]


def test_a_list_of_endpoints_begins_with_one_at_which_nothing_listens(conclude: Conclude) -> None:
    nixl = DoubledNixl()
    assert conclude(several_endpoints, nixl) == "no conclusion"
    ((names, options),) = nixl.started
    assert re.fullmatch(rf"http://127\.0\.0\.1:[1-9]\d*,{ETCD}", options.pop("NIXL_ETCD_ENDPOINTS"))
    expected = {**DIRECT, "hosts": ()}
    assert (names, options) == (["publisher", "finder"], {name: expected[name] for name in options})


TOO_MANY = (
    "NotApplicableError: each agent with {} {} a progress thread, which uses a whole core, and {} of them would "
    "overload the host"
)


@pytest.mark.parametrize(
    ("backend", "options", "faults", "conclusion"),
    [
        ("UCX", {}, "", "PASS: 40 agents in 4 processes found each other; --nixl-level=extended tries 200"),
        ("UCX", {"extended": True}, "", "PASS: 200 agents in 4 processes found each other"),
        ("UCX", {"progress": "on"}, "", TOO_MANY.format("UCX", "has", 40)),
        ("LIBFABRIC", {"progress": "off"}, "", TOO_MANY.format("LIBFABRIC", "needs", 40)),
        ("LIBFABRIC", {"progress": "on", "extended": True}, "", TOO_MANY.format("LIBFABRIC", "has", 200)),
        (
            "UCX",
            {},
            "mute-finder-1-3",
            late("etcd to have the metadata of 40 agents under /n/", "etcd has 39: read what NIXL wrote: nothing"),
        ),
        (
            "UCX",
            {},
            "mute-finder-0",
            late("etcd to have the metadata of 40 agents under /n/", f"etcd has 39: read what NIXL wrote: {MUTE}"),
        ),
        (
            "UCX",
            {},
            "deaf-finder-2",
            late(
                "worker 3 to load the metadata of 39 agents",
                "39 are missing, first finder-0; NIXL wrote: E0101 etcd: cannot fetch finder-3-9",
            ),
        ),
        (
            "UCX",
            {},
            "deaf-finder-0 fetches-quietly",
            late("worker 1 to load the metadata of 39 agents", "39 are missing, first finder-0-1; NIXL wrote: nothing"),
        ),
        (
            "UCX",
            {},
            "never-loads-finder-1-5",
            late("worker 1 to load the metadata of 39 agents", "25 are missing, first finder-1-5; NIXL wrote: nothing"),
        ),
        (
            "UCX",
            {},
            "never-removes",
            late("etcd to have the metadata of 0 agents under /n/", "etcd has 40: read what NIXL wrote: nothing"),
        ),
        *(
            ("UCX", {}, f"never-forgets-finder-{number}", unforgotten(f"worker {number + 1}", f"finder-{number - 1}-9"))
            for number in (1, 2, 3)
        ),
        ("UCX", {}, "never-forgets", unforgotten("worker 1", "finder-3-9")),
        *(("UCX", {}, f"spoils-{number + 1}", differ(f"finder-{(number + 1) % 4}-9")) for number in range(4)),
    ],
)
def test_many_agents_find_each_other_or_the_missing_ones_are_counted(
    conclude: Conclude, backend: str, options: dict[str, Any], faults: str, conclusion: str
) -> None:
    nixl = DoubledNixl(*faults.split(), backend=backend)
    nixl.load = 0.05
    assert conclude(many, nixl, **options) == conclusion
    if conclusion.startswith("PASS"):
        count = 50 if options else 10
        crews = {(f"finder-{finder}", f"finder-{finder}-{number}") for finder in range(4) for number in range(1, count)}
        assert nixl.started == [([f"finder-{number}" for number in range(4)], DIRECT)]
        assert {(owner, name) for owner, name, options in nixl.beside if not options} == crews
        assert [owner for owner, _, options in nixl.beside if options] == [f"finder-{number}" for number in range(4)]
        everybody = {agent.name for agent in nixl.incarnations.values()}
        assert (nixl.moved, nixl.released) == (4, 4)
        # Each finder has looked for all others, and has forgotten them.
        for finder in nixl.incarnations.values():
            looked_for = {fetch for fetch in finder.looked_for if not fetch.startswith("last")}
            named = {name for name in everybody if not name.startswith("last")} - {finder.name}
            assert looked_for == (named if re.fullmatch(r"finder-\d", finder.name) else set())
            assert {name for name in finder.known if not name.startswith("last")} == set()
