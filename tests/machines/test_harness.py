# SPDX-License-Identifier: Apache-2.0
"""What a test of a machine says where no machine can run, or where one does not boot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import machine
import pytest
from machine import Machine, MachineError, needed_folders, prepared


def test_machine_that_does_not_boot_shows_its_console(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("qemu", "vmlinuz"):
        (base / name).symlink_to(prepared() / name)
    (base / "initrd.gz").write_text("no archive")
    broken = Machine(base, tmp_path / "out", name="broken")
    try:
        with pytest.raises(
            MachineError, match=r"machine broken ended \(QEMU's code 0\) before the end of its boot"
        ) as caught:
            broken.booted()
    finally:
        broken.power_off()
    assert "its console's last lines:" in str(caught.value)
    assert "Unable to mount root fs" in str(caught.value)


@pytest.mark.parametrize("ci", [False, True])
def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: bool) -> None:
    monkeypatch.setenv("PYTEST_NIXL_MACHINES", str(tmp_path))
    monkeypatch.setenv("CI", "true" if ci else "")
    ends = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(ends, match=rf"run `sh tests/machines/prepare.sh {tmp_path}`"):
        prepared()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ends, match="needs root"):
        prepared()


def test_what_lies_below_a_hidden_folder_is_shown_to_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/tmp/clone/.tox/machine")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(machine, "PROJECT", Path("/tmp/clone"))
    assert needed_folders(Path("/run/qemu")) == [Path("/run/qemu"), Path("/tmp/clone")], "nothing twice"
    assert needed_folders(Path("/tmp/clone-of-another")) == [Path("/tmp/clone"), Path("/tmp/clone-of-another")]
    monkeypatch.setattr(machine, "PROJECT", Path("/home/clone"))
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert needed_folders(Path("/home/clone/.tox/qemu")) == []
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="a path without a space, comma"):
        needed_folders(Path("/tmp/my clone"))
