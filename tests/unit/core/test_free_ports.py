# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are about to start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pytest_nixl.core import free_ports as module
from pytest_nixl.core.free_ports import EPHEMERAL, free_ports


@pytest.fixture
def outgoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the range of outgoing connections, which a test writes."""
    path = tmp_path / "range"
    monkeypatch.setattr(module, "EPHEMERAL", path)
    return path


def test_no_port_is_returned_twice() -> None:
    assert len({*free_ports(30), *free_ports(30)}) == 60


def test_outgoing_connections_do_not_use_the_ports(outgoing: Path) -> None:
    outgoing.write_text("12000\t60999\n")
    assert all(10_000 <= port < 12_000 for port in free_ports(50))


def test_a_port_that_is_taken_on_one_address_is_not_returned(outgoing: Path) -> None:
    """All ports but a few are in the range of outgoing connections, and one of these few is taken."""
    outgoing.write_text("11000\t60999\n")
    with socket.socket() as taken:
        port = next(port for port in range(10_000, 11_000) if taken.connect_ex(("127.0.0.1", port)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert port not in free_ports(900)


@pytest.mark.parametrize("text", ["1024\t65535\n", "junk", ""])
def test_the_system_chooses_if_it_leaves_no_ports(outgoing: Path, text: str) -> None:
    outgoing.write_text(text)
    first, second = free_ports(2)
    assert first != second


def test_the_file_of_the_system_has_the_expected_form() -> None:
    lowest, highest = map(int, EPHEMERAL.read_text().split())
    assert 0 < lowest < highest < 1 << 16
