# SPDX-License-Identifier: Apache-2.0
"""The functions of claimants make their requests in this order, and announce their rank at this moment."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl.checks.rank_race import functions
from pytest_nixl.etcd.endpoints import parse_endpoints

ENDPOINT = "http://10.0.0.1:2379"
ENDPOINTS = parse_endpoints(ENDPOINT)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The client of etcd, the group that is joined, and what announces a rank; the calls of all in their order."""
    calls = MagicMock()
    monkeypatch.setattr(functions, "connect", calls.connect)
    monkeypatch.setattr(functions, "join", calls.join)
    calls.join.return_value.__enter__.return_value.rank = 3
    return calls


def connected(timeout: float) -> list[Any]:
    return [call.connect(ENDPOINTS, timeout=timeout), call.connect().__enter__()]


LEFT = call.connect().__exit__(None, None, None)


@pytest.mark.parametrize(
    ("function", "timeout", "ready", "steps"),
    [
        ("membership", 60.0, [], ["announce"]),
        ("membership_with_barrier", 5, [], ["barrier", "announce", "barrier"]),
        ("membership_from_a_start", 60.0, [call.announce(-1)], ["barrier", "announce"]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"ttl": 4}])
def test_a_member_joins_its_group_and_announces_its_rank(
    calls: MagicMock, function: str, timeout: float, ready: list[Any], steps: list[str], options: dict[str, int]
) -> None:
    getattr(functions, function)(ENDPOINT, "/p/x/g/", 2, calls.announce, **options)
    client = calls.connect.return_value.__enter__.return_value
    step_calls = {"announce": call.announce(3), "barrier": call.join().__enter__().barrier(60.0)}
    assert calls.mock_calls == [
        *connected(timeout),
        *ready,
        call.join(client, "g", 2, ttl=options.get("ttl", 120), timeout=60.0, prefix="/p/x"),
        call.join().__enter__(),
        *(step_calls[step] for step in steps),
        call.join().__exit__(None, None, None),
        LEFT,
    ]


@pytest.mark.parametrize(("size_key", "rank"), [(None, 0), (b"1", 1)])
def test_the_known_race_reads_its_rank_and_writes_the_next_one(
    calls: MagicMock, size_key: bytes | None, rank: int
) -> None:
    client = calls.connect.return_value.__enter__.return_value
    client.get.return_value = size_key
    functions.read_modify_write(ENDPOINT, "/g/", 2, calls.announce)
    requests = call.connect().__enter__()
    assert calls.mock_calls == [
        *connected(60.0),
        requests.get("/g/size"),
        requests.lease(120),
        requests.put(f"/g/rank/{rank}", b"", client.lease.return_value),
        requests.put("/g/size", b"%d" % (rank + 1)),
        call.announce(rank),
        LEFT,
    ]


def test_the_known_race_refuses_a_rank_that_its_group_does_not_have(calls: MagicMock) -> None:
    calls.connect.return_value.__exit__.return_value = False
    calls.connect.return_value.__enter__.return_value.get.return_value = b"2"
    with pytest.raises(RuntimeError, match=r"^Rank 2 is greater than or equal to global size 2$"):
        functions.read_modify_write(ENDPOINT, "/g/", 2, calls.announce)
    calls.connect.return_value.__enter__.return_value.put.assert_not_called()
    calls.announce.assert_not_called()
