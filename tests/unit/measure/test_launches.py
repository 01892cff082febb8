# SPDX-License-Identifier: Apache-2.0
"""Which launches a session makes, reuses and ends. The launches are doubles, because a real one takes most of a second.

The tests of ``test_launch.py`` see the same of real workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.cluster.placement import ALONE
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.measure import launches
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.worker_errors import NixlAbsentError
from pytest_nixl.session.requested_links import requested_links

HOST, GPU = MemoryPair("DRAM", "DRAM"), MemoryPair("DRAM", "VRAM")
PROGRESS = AgentOptions(progress_thread=True)
MakeSettings = Callable[..., Settings]


class Launch(SimpleNamespace):
    """A launch that keeps how it was made, and how it ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, initiator=None, target=None, buffers=(None, None), healthy=True, ended="")

    def close(self) -> None:
        self.ended = "closed"

    def kill(self) -> None:
        self.ended = "killed"


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that are made."""
    started: list[Launch] = []

    def launch(**arguments: Any) -> Launch:
        started.append(Launch(**arguments))
        return started[-1]

    monkeypatch.setattr(launches, "Launch", launch)
    return started


def pairs_of(settings: Settings) -> Launches:
    return Launches(cast(Any, ["a", "b", "c", "d"]), settings)


def launch_of(link: Link) -> Launch:
    """Return the current launch of a link."""
    return cast(Launch, link._launch)


@pytest.mark.parametrize(
    ("first", "then", "ended"),
    [
        ({}, {"op": "READ"}, None),
        ({}, {"memory": GPU}, ""),
        ({}, {"backend": "LIBFABRIC"}, ""),
        ({}, {"ranks": (1, 2)}, "closed"),
        ({"agent_options": PROGRESS}, {}, "closed"),
        ({"agent_options": PROGRESS}, {"agent_options": PROGRESS}, None),
        # A progress thread takes CPU time also while its agents are idle.
        ({"agent_options": PROGRESS}, {"agent_options": PROGRESS, "memory": GPU}, "closed"),
        ({}, {"footprint": 1 << 20}, "closed"),
        ({"memory": GPU}, {"memory": GPU, "devices": DevicePair(0, 1)}, ""),
        # Host memory has no GPU.
        ({}, {"devices": DevicePair(0, 1)}, None),
    ],
)
def test_a_launch_is_reused_for_the_same_kind_and_ended_if_it_would_disturb_the_next(
    make_settings: MakeSettings, created: list[Launch], first: dict[str, Any], then: dict[str, Any], ended: str | None
) -> None:
    """``ended``: how the first launch ended, if there is a second one; None: the first one is used again."""
    pairs, usual = pairs_of(make_settings()), {"backend": "UCX", "op": "WRITE", "memory": HOST}
    pairs.link(**{**usual, **first})
    link = pairs.link(**{**usual, **then})
    assert len(created) == (1 if ended is None else 2)
    assert created[0].ended == (ended or "")
    assert launch_of(link) is created[-1]
    assert created[-1].ended == ""
    pairs.close()
    assert {launch.ended for launch in created} == {"closed"}


@pytest.mark.parametrize(("footprint", "capacity"), [(16, 64 * 3 * 2), (4096, 4096)])
def test_the_buffers_hold_the_largest_row_or_the_footprint(
    make_settings: MakeSettings, created: list[Launch], footprint: int, capacity: int
) -> None:
    pairs = pairs_of(make_settings(blocks=(48, 64), batch=(1, 3), depth=(2, 1)))
    link = pairs.link("UCX", "READ", GPU, (2, 1), DevicePair(3, 4), footprint=footprint)
    assert (created[0].capacity, created[0].alignment, link.footprint) == (capacity, 16, footprint)
    assert (created[0].hosts, created[0].devices, created[0].variables) == (("c", "b"), DevicePair(3, 4), ({}, {}))


def test_the_settings_choose_agents_and_gpus_unless_a_link_does(
    make_settings: MakeSettings, created: list[Launch]
) -> None:
    pairs = pairs_of(make_settings(progress_thread=("on", "off"), devices=DevicePair(5, 6)))
    for memory, options in ((HOST, None), (GPU, None), (GPU, AgentOptions(progress_thread=False))):
        pairs.link("UCX", "WRITE", memory, agent_options=options)
    assert [launch.devices for launch in created] == [None, DevicePair(5, 6), DevicePair(5, 6)]
    assert [launch.agent_options.progress_thread for launch in created] == [True, True, False]
    mixed = [MemoryPair("VRAM", "DRAM"), MemoryPair("DRAM", "VRAM"), MemoryPair("VRAM", "VRAM")]
    other = pairs_of(make_settings(pages="base"))
    assert [other.link("UCX", "WRITE", memory) and created[-1].pages for memory in mixed] == ["base", "base", ""]


@pytest.mark.parametrize(("notify", "pages"), [("last", "huge"), ("each", "base")])
def test_a_requested_row_is_measured_with_its_key(
    make_settings: MakeSettings, created: list[Launch], notify: str, pages: str
) -> None:
    settings = make_settings(
        backend=("UCX", "POSIX"), memory=(HOST, GPU), progress_thread=("off", "on"), devices=DevicePair(5, 6),
        footprint=4096, notify=notify, pages=pages, blocks=(16, 32),
    )  # fmt: skip
    pairs = pairs_of(settings)
    rows = requested_links(settings, ALONE)
    assert len(rows) == 12
    for row in rows:
        same = replace(row, block=32, batch=2, depth=3)
        assert pairs.link_of(row, row.pair).key(32, batch=2, depth=3) == same
        assert (created[-1].agent_options.progress_thread, created[-1].devices) == (
            ("progress-thread", "on") in row.variant, row.devices
        )  # fmt: skip
        assert created[-1].pages == row.pages
        agent = created[-1].agent_options
        again = pairs.link(row.backend, row.op, row.memory, agent_options=agent, footprint=row.footprint)
        assert again.key(32, batch=2, depth=3) == same


def test_a_row_gets_the_agents_that_it_had(make_settings: MakeSettings, created: list[Launch]) -> None:
    pairs = pairs_of(make_settings(progress_thread=("off", "on")))
    row = RowKey("UCX", "READ", HOST, 65536, variant=(("footprint", "1MiB"), ("progress-thread", "on")))
    link = pairs.link_of(row, (2, 3))
    assert (link.op, link.footprint, created[-1].hosts) == ("READ", 1 << 20, ("c", "d"))
    assert created[-1].agent_options.progress_thread is True
    # Agents as no option of this run makes them.
    with pytest.raises(ValueError, match=r"makes no agents as the row UCX/READ/DRAM:DRAM/64KiB.*/threads=9 had them"):
        pairs.link_of(RowKey("UCX", "READ", HOST, 65536, variant=(("threads", "9"),)), (2, 3))
    assert len(created) == 1


def test_a_launch_that_is_not_healthy_is_replaced(make_settings: MakeSettings, created: list[Launch]) -> None:
    pairs = pairs_of(make_settings())
    pairs.link("UCX", "WRITE", HOST)
    created[0].healthy = False
    assert launch_of(pairs.link("UCX", "WRITE", HOST)) is created[1]
    assert [launch.ended for launch in created] == ["killed", ""]


def test_the_next_launch_of_a_link_is_of_its_kind(make_settings: MakeSettings, created: list[Launch]) -> None:
    pairs = pairs_of(make_settings())
    host, gpu = (pairs.link("UCX", "WRITE", memory) for memory in (HOST, GPU))
    gpu.relaunch()
    assert [launch.ended for launch in created] == ["", "closed", ""]
    assert [launch_of(gpu), launch_of(host)] == [created[2], created[0]]
    assert created[2].memory == GPU
    host.relaunch()
    assert launch_of(host) is created[3]
    assert created[3].memory == HOST
    assert launch_of(pairs.link("UCX", "WRITE", GPU)) is created[2]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        # What a backend refuses for one kind of memory, another kind may have.
        (NotApplicableError("no GPU memory"), {"memory": HOST}),
        # Without NIXL on a rank, none of its pairs can start.
        (NixlAbsentError("no NIXL"), {"ranks": (1, 2)}),
    ],
)
def test_what_cannot_be_launched_is_not_tried_again(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, error: Exception, again: dict[str, Any]
) -> None:
    tried: list[MemoryPair] = []

    def refused(*, memory: MemoryPair, **_: Any) -> None:
        tried.append(memory)
        raise error

    monkeypatch.setattr(launches, "Launch", refused)
    pairs, usual = pairs_of(make_settings()), {"backend": "UCX", "op": "WRITE", "memory": GPU}
    for arguments, count in (({}, 1), ({"op": "READ"}, 1), (again, 2), (again, 2)):
        with pytest.raises(type(error)) as caught:
            pairs.link(**{**usual, **arguments})
        assert caught.value is error
        assert len(tried) == count
    with pytest.raises(type(error)):
        pairs.link("UCX", "WRITE", HOST)
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("progress", "first", "ended"),
    [
        (("off",), {"ranks": (0, 2)}, "closed"),
        (("on",), {"ranks": (0, 1), "memory": GPU}, "closed"),
        (("off", "on"), {"ranks": (0, 1), "memory": GPU}, ""),  # the first kind of agent that is asked for
    ],
)
def test_links_of_several_pairs_of_ranks_run_at_the_same_time(
    make_settings: MakeSettings, created: list[Launch], progress: tuple[str, ...], first: dict[str, Any], ended: str
) -> None:
    pairs = pairs_of(make_settings(progress_thread=progress))
    pairs.link(**{"backend": "UCX", "op": "WRITE", "memory": HOST, **first})
    links = pairs.together("UCX", "READ", HOST, [(0, 1), (2, 3)])
    assert [launch_of(link).hosts for link in links] == [("a", "b"), ("c", "d")]
    assert {link.op for link in links} == {"READ"}
    assert created[0].ended == ended
    assert all(launch_of(link).ended == "" for link in links)


def test_links_between_gpus_have_their_variables_and_nothing_runs_beside_them(
    make_settings: MakeSettings, created: list[Launch]
) -> None:
    pairs, devices = pairs_of(make_settings(progress_thread=("off", "on"))), [DevicePair(0, 1), DevicePair(2, 3)]
    pairs.link("UCX", "WRITE", HOST)
    plain = pairs.between_devices("UCX", "WRITE", HOST, devices)
    assert [launch.ended for launch in created] == ["closed", "", ""]
    assert [(launch.devices, launch.variables) for launch in created[1:]] == [(pair, ({}, {})) for pair in devices]
    assert {(launch.hosts, launch.agent_options.progress_thread) for launch in created} == {(("a", "b"), False)}
    variables = [({"B": "1", "A": "2"}, {}), ({}, {"C": "3"})]
    links = pairs.between_devices("UCX", "WRITE", HOST, devices, (2, 3), variables)
    assert [(launch.hosts, launch.variables) for launch in created[3:]] == [
        (("c", "d"), launch) for launch in variables
    ]
    assert {launch.footprint for launch in (*plain, *links)} == {0}
    assert [launch.ended for launch in created] == ["closed"] * 3 + [""] * 2
    with pytest.raises(ValueError):
        pairs.between_devices("UCX", "WRITE", HOST, devices, (2, 3), variables[:1])
