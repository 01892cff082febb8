# SPDX-License-Identifier: Apache-2.0
"""The keys of a group of nixlbench are deleted at its end, or by the supervisor if its etcd does not answer then.

The etcd and the supervisor are doubles; ``test_nixlbench_driver`` has real ones.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from pytest_nixl.checks.nixlbench import group as group_module
from pytest_nixl.checks.nixlbench.group import Group
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.processes.supervisor import SupervisorError

#: Nothing listens there, so that the watch of a group hears nothing.
NOWHERE = "http://127.0.0.1:9"


class Calls:
    """A double of the etcd's client, the supervisor and the run's etcd, which notes what it is asked for."""

    def __init__(self, *, fails: bool = False, death: str | None = None, silence: str | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails, self.death, self.silence = fails, death, silence

    def delete_prefix(self, prefix: str) -> None:
        self.calls.append(("delete", prefix))
        if self.fails:
            raise EtcdError("no answer")

    def watch_prefix(self, *given: object) -> None:
        self.calls.append(("watch", *given))

    def unwatch_prefix(self, *given: object) -> None:
        self.calls.append(("unwatch", *given))
        raise SupervisorError("it has ended")

    def death_reason(self) -> str | None:
        return self.death

    def silence_reason(self) -> str | None:
        return self.silence


def group(calls: Calls, *, ours: bool = False) -> Group:
    double = cast("Any", calls)
    return Group(double, NOWHERE, double, our_server=double if ours else None)


def test_a_group_has_a_new_name_and_no_keys() -> None:
    first, second = group(Calls()), group(Calls())
    assert first.name != second.name
    assert first.name.startswith("pytest-nixl-")
    assert first.prefix == f"xferbench/{first.name}/"
    assert (first.meeting.runtime, first.meeting.flags) == (
        "ETCD", {"runtime_type": "ETCD", "etcd_endpoints": NOWHERE, "benchmark_group": first.name})  # fmt: skip
    assert (first.endpoint, first.failure, first.trouble(), first.trouble(1.0)) == (NOWHERE, "", None, None)
    assert not first.registered(0)
    assert first.remaining_keys() == f"keys under {first.prefix}"


@pytest.mark.parametrize("ours", [False, True])
def test_the_keys_are_deleted_at_the_end(ours: bool) -> None:
    calls = Calls()
    with group(calls, ours=ours) as entered:
        watched = (entered.prefix, parse_endpoints(NOWHERE))
        assert calls.calls == ([] if ours else [("watch", *watched)])
    assert calls.calls[-2:] == [("delete", entered.prefix), ("unwatch", *watched)]


def test_keys_that_cannot_be_deleted_are_left_to_the_supervisor() -> None:
    calls = Calls(fails=True)
    with pytest.raises(EtcdError, match="no answer"), group(calls):
        pass
    assert [call[0] for call in calls.calls] == ["watch", "delete"]
    with pytest.raises(ZeroDivisionError), group(calls):
        raise ZeroDivisionError
    assert [call[0] for call in calls.calls] == ["watch", "delete"] * 2


class Watch:
    """A double of the watch of an etcd that answered, and then went for a reason; empty if it has not gone."""

    def __init__(self, cause: str = "") -> None:
        self.keys = frozenset[str]()
        self.last_failure = "refused"
        self.gone = EtcdError("gone", cause=cause) if cause else None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trouble(self) -> EtcdError | None:
        return None

    def settled(self, seconds: float) -> EtcdError | None:
        return EtcdError(f"after {seconds}")


def test_a_group_shows_the_first_six_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(group_module, "EtcdWatch", lambda *_: watch)
    entered = group(Calls())
    watch.keys = frozenset(f"{entered.prefix}/rank/{number}" for number in range(8)) - {f"{entered.prefix}/rank/3"}
    assert [entered.registered(rank) for rank in (3, 7)] == [False, True]
    assert entered.remaining_keys() == (
        f"7 keys under {entered.prefix} (/rank/0, /rank/1, /rank/2, /rank/4, /rank/5, /rank/6 and 1 more)"
    )
    watch.keys = frozenset({f"{entered.prefix}\x1b"})
    assert entered.remaining_keys() == f"1 key under {entered.prefix} (\\x1b)"
    assert (entered.failure, entered.trouble(), f"{entered.trouble(2.5)}") == ("refused", None, "after 2.5")


@pytest.mark.parametrize(("cause", "ends"), [("died", ["watch", "unwatch"]), ("stopped", ["watch"])])
def test_the_keys_of_an_etcd_that_is_gone_are_not_deleted(
    cause: str, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, calls = Watch(cause), Calls()
    monkeypatch.setattr(group_module, "EtcdWatch", lambda *_: watch)
    monkeypatch.setattr(watch, "trouble", lambda: watch.gone)
    with group(calls):
        pass
    assert [call[0] for call in calls.calls] == ends
