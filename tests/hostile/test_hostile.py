# SPDX-License-Identifier: Apache-2.0
"""Thousands of seeded hostile inputs: options, files, etcds, secrets, signals and ends of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.cli_run import repeats
from helpers.fake_sysfs import p5
from tries import CLASSES, hostile_etcd, make_tries

from pytest_nixl.session.default_profile import PRODUCT_NAME


@pytest.mark.soak
@pytest.mark.parametrize("name", CLASSES)
def test_hostile_inputs_end_in_a_value_or_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    count = CLASSES[name].tries * (10 if len(repeats()) > 1 else 1)
    with ExitStack() as stack:
        more: dict[str, object] = {}
        if name == "etcds":
            more["server"] = stack.enter_context(hostile_etcd())
        elif name == "trees":
            recorded = p5(tmp_path / "node")
            recorded.write(PRODUCT_NAME, "p5.48xlarge")
            more["node"] = recorded.folder
        faults = make_tries(name, count, tmp_path, **more)
    record_property("hostile", (name, count, len(faults)))
    assert faults == []
