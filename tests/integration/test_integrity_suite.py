# SPDX-License-Identifier: Apache-2.0
"""The check ``bytes-of-every-transfer`` with the real NIXL, of whose copies one in a hundred is spoiled.

The library of ``helpers/bad_copies.c`` spoils copies between host memories, and the stand-in for the CUDA driver those
between GPUs: no real fault can be made that spoils a known share of copies.
"""

from __future__ import annotations

import re

import pytest
from helpers import bad_copies, gpu_standin
from helpers.cli_run import run

pytestmark = pytest.mark.long

CHECK = "suites/bandwidth/test_integrity.py"
QUICK = (CHECK, "--nixl-level=quick")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return bad_copies.build(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "STANDIN_NVLINKS": "18"}


def corrupt(output: str) -> dict[str, str]:
    """Return by operation which bytes of which transfers are said to be wrong."""
    return dict(
        re.findall(
            r"^CORRUPT bytes-of-every-transfer: UCX/(\w+)/\S+, a pattern for each transfer: (.*)$", output, re.MULTILINE
        )
    )


def test_healthy_copies_pass(host: dict[str, str]) -> None:
    done = run(*QUICK, env=host)
    assert (done.code, corrupt(done.output)) == (0, {})
    assert "NIXL verdict: PASS (2 PASS; 0 rows measured)" in done.output


def test_one_flipped_byte_in_a_hundred_copies_is_corrupt(host: dict[str, str]) -> None:
    done = run(*QUICK, env={**host, "BAD_COPIES_FLIP": "100"})
    assert done.code == 1
    wrong = corrupt(done.output)
    assert set(wrong) == {"WRITE", "READ"}, done.output
    for text in wrong.values():
        assert re.match(r"1 of \d+ bytes are wrong in transfer \d+ \(\d+ of 100 are corrupt\), the first at ", text)


def test_a_copy_that_brings_nothing_is_corrupt(host: dict[str, str]) -> None:
    wrong = corrupt(run(*QUICK, env={**host, "BAD_COPIES_STALE": "10"}).output)
    assert set(wrong) == {"WRITE", "READ"}
    for text in wrong.values():
        assert re.match(r"4096 of 4096 bytes are wrong in transfer \d+ \(10 of 100 are corrupt\)", text)


@pytest.mark.parametrize("fault", [{"STANDIN_CORRUPT": "100"}, {"STANDIN_STALE": "10"}], ids=str)
def test_spoiled_copies_between_gpus_are_corrupt(gpus: dict[str, str], fault: dict[str, str]) -> None:
    done = run(*QUICK, "--nixl-memory=VRAM:VRAM", env={**gpus, **fault})
    assert set(corrupt(done.output)) == {"WRITE", "READ"}, done.output


def test_healthy_copies_between_gpus_pass(gpus: dict[str, str]) -> None:
    done = run(*QUICK, "--nixl-memory=VRAM:VRAM", env=gpus)
    assert "NIXL verdict: PASS (2 PASS; 0 rows measured)" in done.output, done.output
