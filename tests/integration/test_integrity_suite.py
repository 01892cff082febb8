# SPDX-License-Identifier: Apache-2.0
"""The check ``bytes-of-every-transfer`` with the real NIXL, of whose copies one in a hundred is spoiled.

The library of ``helpers/bad_copies.c`` spoils copies between host memories, and the stand-in for the CUDA driver those
between GPUs: no real fault can be made that spoils a known share of copies.
"""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, Finished, run
from helpers.needs import need_programs

pytestmark = pytest.mark.long

BETWEEN = ("DRAM:DRAM", "VRAM:VRAM")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which a run spoils what it is told: nothing."""
    need_programs("gcc")
    copies = tmp_path_factory.mktemp("copies") / "bad_copies.so"
    options = ("-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", copies, ROOT / "tests/helpers/bad_copies.c", "-ldl")
    subprocess.run(["gcc", *options], check=True)
    gpus = gpu_standin.build(tmp_path_factory.mktemp("driver"))
    return {**gpus, "LD_PRELOAD": str(copies), "STANDIN_NVLINKS": "18"}


def check(libraries: dict[str, str], **faults: str) -> Finished:
    """Run the check between host memories and between GPUs, with faults of both libraries."""
    options = ("--nixl-level=quick", f"--nixl-memory={','.join(BETWEEN)}")
    return run("suites/bandwidth/test_integrity.py", *options, env={**libraries, **faults})


def corrupt(done: Finished) -> dict[tuple[str, str], str]:
    """Return by operation and memories which bytes of which transfers are said to be wrong."""
    line = r"^CORRUPT bytes-of-every-transfer: UCX/(\w+)/([\w:]+)\S*, a pattern for each transfer: (.*)$"
    return {(op, memory): text for op, memory, text in re.findall(line, done.output, re.MULTILINE)}


@pytest.mark.parametrize(
    ("faults", "wrong"),
    [
        (
            {"BAD_COPIES_FLIP": "100", "STANDIN_CORRUPT": "100"},
            r"1 of \d+ bytes are wrong in transfer \d+ \(\d+ of 100 are corrupt\), the first at ",
        ),
        (
            {"BAD_COPIES_STALE": "10", "STANDIN_STALE": "10"},
            r"4096 of 4096 bytes are wrong in transfer \d+ \(10 of 100 are corrupt\)",
        ),
    ],
    ids=["one-flipped-byte-in-a-hundred-copies", "one-copy-of-ten-brings-nothing"],
)
def test_spoiled_copies_are_corrupt(libraries: dict[str, str], faults: dict[str, str], wrong: str) -> None:
    texts = corrupt(check(libraries, **faults).expect(1))
    assert set(texts) == {(op, memory) for op in ("WRITE", "READ") for memory in BETWEEN}
    assert all(re.match(wrong, texts[op, "DRAM:DRAM"]) for op in ("WRITE", "READ")), texts
