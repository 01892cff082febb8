# SPDX-License-Identifier: Apache-2.0
"""The last lines of a rank's worker logs, as they are sent to the other ranks."""

from __future__ import annotations

from typing import Any

from pytest_nixl.cluster.logs import last_words
from pytest_nixl.processes.supervisor import supervisor

TABLE = "[17.95] [node-1:1149 :0]   |  1..65528 | zero-copy  | tcp/veth0  |\n"


def test_last_words_are_the_last_unusual_lines_without_secrets(make_settings: Any) -> None:
    settings = make_settings(group_token="open sesame", etcd_user="bob:swordfish")
    first, second = (supervisor().directory / f"rank1-{role}-0.log" for role in ("initiator", "target"))
    try:
        lines = [*(f"line {number}" for number in range(99)), "open sesame, swordfish", "http://u:pw@h:1"]
        first.write_text("\n".join(lines) + "\n" + TABLE * 99)
        second.write_text(TABLE)
        words = last_words(supervisor(), settings)
    finally:
        first.unlink()
        second.unlink()
    assert words[second.name] == ""
    told = words[first.name].splitlines()
    assert len(told) == 20
    assert told[0] == "line 81"
    assert told[-2:] == ["***, ***", "http://***@h:1"]
