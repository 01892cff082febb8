# SPDX-License-Identifier: Apache-2.0
"""The keys of a group of nixlbench: whether their etcd still answers, and how they are removed at the end.

The etcd, the supervisor and the clock are doubles; ``test_nixlbench_driver`` has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.nixlbench import group as group_module
from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.group import EtcdWatch, Group
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.processes.supervisor import SupervisorError

ENDPOINT = "http://e:1"
#: A request for keys: the seconds that it takes, and the end of each key, or an error.
Answer = tuple[float, str | Exception]
FOUND: Answer = (0, "/rank/0 /rank/1")


def refused(seconds: float) -> Answer:
    return seconds, EtcdError("connection refused", cause="refused")


def late(seconds: float) -> Answer:
    return seconds, EtcdError("no answer", cause="timeout")


class Etcd:
    """A double of an etcd, of its client and server, of the supervisor and of the clock that all of them see.

    :ivar answers: of requests for keys; without one more, a request hangs.
    :ivar waits: is set once such a request hangs, or none is made any more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.answers: list[Answer] = []
        self.death: str | Exception | None = None
        self.silence: str | None = None
        self.unremovable = self.supervisor_ended = False
        self.calls: list[tuple[Any, ...]] = []
        self.waits, self.ends = Event(), Event()
        monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(group_module, "connect", self.connect)
        monkeypatch.setattr(group_module, "EVERY", 0.0)

    def sleep(self, seconds: float) -> None:
        self.now += 0.25

    @contextmanager
    def connect(self, endpoints: tuple[Endpoint, ...], *, timeout: float) -> Iterator[Etcd]:
        self.limits = endpoints, timeout
        yield self
        self.waits.set()

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        if not self.answers:
            self.waits.set()
            self.ends.wait(60)
            return {}
        seconds, answer = self.answers.pop(0)
        self.now += seconds
        if isinstance(answer, Exception):
            raise answer
        return {f"{prefix}{name}": b"" for name in answer.split()}

    def death_reason(self) -> str | None:
        self.calls.append(("death",))
        if isinstance(self.death, Exception):
            raise self.death
        return self.death

    def silence_reason(self) -> str | None:
        return self.silence

    def delete_prefix(self, prefix: str) -> None:
        self.calls.append(("delete", prefix))
        if self.unremovable:
            raise EtcdError("it is gone")

    def watch_prefix(self, *arguments: object) -> None:
        self.calls.append(("watch", *arguments))

    def unwatch_prefix(self, *arguments: object) -> None:
        self.calls.append(("unwatch", *arguments))
        if self.supervisor_ended:
            raise SupervisorError("it has ended")

    @contextmanager
    def watched(self, *, ours: bool = False, endpoint: str = ENDPOINT) -> Iterator[EtcdWatch]:
        """Watch the keys until no answer is left."""
        with EtcdWatch(endpoint, "g/", self if ours else None) as watch:  # type: ignore[arg-type]
            assert self.waits.wait(60)
            yield watch
        self.ends.set()

    def group(self, *, ours: bool = False) -> Group:
        double: Any = self
        return Group(double, ENDPOINT, double, our_server=double if ours else None)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Etcd]:
    double = Etcd(monkeypatch)
    yield double
    double.ends.set()


REFUSED, SILENT = "connection refused", "no answer"


@pytest.mark.parametrize(
    ("answers", "ours", "failure", "trouble"),
    [
        ([FOUND], False, "", None),
        # nixlbench itself reports an etcd that has never answered.
        ([late(7), refused(0), late(7)], False, SILENT, None),
        ([FOUND, refused(0)], False, REFUSED, None),
        ([FOUND, refused(0), refused(2), refused(2.75)], False, REFUSED, None),
        ([FOUND, refused(0), refused(2), refused(3)], False, REFUSED, REFUSED),
        ([FOUND, refused(2), refused(3)], True, REFUSED, REFUSED),
        ([FOUND, refused(2), FOUND, refused(3)], False, REFUSED, None),
        ([FOUND, refused(2), FOUND], False, "", None),
        # The host is busy if a request takes far longer than its timeout.
        ([FOUND, refused(2), refused(3.25), refused(2)], False, REFUSED, None),
        ([FOUND, late(7)], False, SILENT, SILENT),
        ([FOUND, late(10)], False, SILENT, SILENT),
        ([FOUND, late(10.25)], False, SILENT, None),
        # As long as the run's own etcd has not ended, it is only slow.
        ([FOUND, late(7), late(7)], True, SILENT, None),
        *(([FOUND, (0, error("odd"))], False, f"the keys under g/ are malformed: {error.__name__}", None)
          for error in (ValueError, KeyError, TypeError)),
    ],
)  # fmt: skip
def test_an_etcd_that_answered_and_does_not_any_more_is_gone(
    etcd: Etcd, answers: Sequence[Answer], ours: bool, failure: str, trouble: str | None
) -> None:
    etcd.answers = list(answers)
    with etcd.watched(ours=ours) as watch:
        found = watch.trouble()
        assert (watch.last_failure, found and found.reason) == (failure, trouble)
        assert watch.keys == ({"g//rank/0", "g//rank/1"} if FOUND in answers else set())
    assert etcd.answers == []
    assert etcd.limits == (parse_endpoints(ENDPOINT), 7.0)


def test_the_members_of_an_etcd_share_the_time_of_one_answer(etcd: Etcd) -> None:
    with etcd.watched(endpoint="http://e:1,http://f:2"):
        assert etcd.limits == (parse_endpoints("http://e:1,http://f:2"), 3.5)


@pytest.mark.parametrize(
    ("death", "silence", "error"),
    [
        (None, None, None),
        ("etcd, pid 7, ended\nline 1\nline 2", None, ("etcd, pid 7, ended", "line 1\nline 2", "died")),
        (None, "it was stopped: kill -CONT 7", ("it was stopped: kill -CONT 7", "", "stopped")),
        (NixlPluginError("no supervisor", "", "a\nb"), None, ("no supervisor", "a\nb", "died")),
    ],
)
def test_the_etcd_of_the_run_that_fails_or_hangs_is_looked_at(
    etcd: Etcd, death: str | Exception | None, silence: str | None, error: tuple[str, str, str] | None
) -> None:
    etcd.answers, etcd.death, etcd.silence = [FOUND, refused(0)], death, silence
    with etcd.watched(ours=True) as watch:
        failed = watch.trouble()
    etcd.waits, etcd.ends = Event(), Event()
    etcd.calls.clear()
    with etcd.watched(ours=True) as watch:  # its first request hangs
        etcd.now += 1
        assert watch.trouble() is None
        assert etcd.calls == []
        etcd.now += 0.25
        hanging = [watch.trouble(), watch.trouble()]
        assert etcd.calls == [("death",)], "it is looked at once in a second"
        etcd.now += 1.25
        hanging.append(watch.trouble())
        assert len(etcd.calls) == (2 if error is None else 1)
    for gone in (failed, *hanging):
        assert (gone and (gone.reason, gone.detail, gone.cause)) == error
        assert gone is None or gone.endpoint == ENDPOINT


@pytest.mark.parametrize(
    ("answers", "hangs", "waited"),
    [([FOUND], 0.75, 0.0), ([FOUND], 1.0, 4.0), ([FOUND, refused(0)], 0.0, 4.0), ([FOUND, late(7)], 0.0, 0.0)],
    ids=["answers", "hangs", "is refused", "gone"],
)
def test_an_etcd_that_does_not_answer_now_is_waited_for(
    etcd: Etcd, answers: Sequence[Answer], hangs: float, waited: float
) -> None:
    etcd.answers = list(answers)
    with etcd.watched() as watch:
        start = etcd.now = etcd.now + hangs
        assert watch.settled(4.0) is watch.trouble()
        assert etcd.now - start == waited


def test_a_group_has_a_new_name_and_no_keys(etcd: Etcd) -> None:
    first, second = etcd.group(), etcd.group()
    assert first.name != second.name
    assert first.name.startswith("pytest-nixl-")
    assert first.prefix == f"xferbench/{first.name}/"
    assert first.meeting == Meeting(
        "ETCD", {"runtime_type": "ETCD", "etcd_endpoints": ENDPOINT, "benchmark_group": first.name}
    )
    assert (first.endpoint, first.failure, first.trouble(), first.trouble(1.0)) == (ENDPOINT, "", None, None)
    assert not first.registered(0)
    assert first.remaining_keys() == f"keys under {first.prefix}"


@pytest.mark.parametrize(
    ("keys", "ranks", "description"),
    [
        ("/rank/7", [7], "1 key under {} (/rank/7)"),
        ("/rank/1 /rank/0 \x01", [0, 1], "3 keys under {} (\\x01, /rank/0, /rank/1)"),
        ("/g /f /e /d /c /b /a", [], "7 keys under {} (/a, /b, /c, /d, /e, /f and 1 more)"),
        ("/f /e /d /c /b /a", [], "6 keys under {} (/a, /b, /c, /d, /e, /f)"),
    ],
)
def test_a_group_knows_its_keys_of_the_last_answer(
    etcd: Etcd, keys: str, ranks: Sequence[int], description: str
) -> None:
    etcd.answers = [(0, keys), refused(0), refused(0)]
    with etcd.group() as group:
        assert etcd.waits.wait(60)
        assert [rank for rank in range(9) if group.registered(rank)] == list(ranks)
        assert group.remaining_keys() == description.format(group.prefix)
        assert group.failure == REFUSED


@pytest.mark.parametrize(
    ("values", "answers", "ours", "calls", "error"),
    [
        ({}, [FOUND], False, "watch delete unwatch", None),
        ({"supervisor_ended": True}, [FOUND], False, "watch delete unwatch", None),
        ({}, [FOUND], True, "delete", None),
        ({"unremovable": True}, [FOUND], False, "watch delete", EtcdError),
        ({"unremovable": True}, [FOUND], False, "watch delete", ZeroDivisionError),
        ({}, [FOUND, late(7)], False, "watch", None),
        ({"death": "it has ended"}, [FOUND, refused(0)], True, "", None),
    ],
    ids=["all", "no supervisor", "ours", "not deleted", "after an error", "gone", "dead"],
)
def test_the_keys_are_deleted_at_the_end_or_left_to_the_supervisor(
    etcd: Etcd, values: dict[str, Any], answers: list[Answer], ours: bool, calls: str, error: type[Exception] | None
) -> None:
    vars(etcd).update(values, answers=list(answers))
    with pytest.raises(error) if error else nullcontext(), etcd.group(ours=ours) as group:
        assert etcd.waits.wait(60)
        if error is ZeroDivisionError:
            raise error
    endpoints = parse_endpoints(ENDPOINT)
    arguments = {"watch": (group.prefix, endpoints), "delete": (group.prefix,), "unwatch": (group.prefix, endpoints)}
    assert [call for call in etcd.calls if call != ("death",)] == [(name, *arguments[name]) for name in calls.split()]
