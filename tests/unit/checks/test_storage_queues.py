# SPDX-License-Identifier: Apache-2.0
"""The kernel's queues for files on this host, and behind a real seccomp filter. test_doctor.py has recorded trees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.cli_run import ROOT
from helpers.fake_sysfs import Tree, p5

from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import StorageQueues, read_storage_queues
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Verdict


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("healthy") / "tree")


@pytest.fixture
def tree(healthy: Tree) -> Iterator[Tree]:
    with healthy.changed() as tree:
        yield tree


def test_facts_of_this_host_are_read_and_restored() -> None:
    queues = read_storage_queues(FactsRoot())
    assert queues.calls.value is not None
    assert set(queues.calls.value) == {"io_setup", "io_uring_setup"}
    assert from_plain(StorageQueues, to_plain(queues)) == queues


#: Forbids io_uring_setup to itself with EPERM, as the default profile of container engines does, and reads the facts.
FILTER = """
import ctypes, json, platform, struct
from pytest_nixl.core.plain import to_plain
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import read_storage_queues
program = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0),            # load the number of the call
    (0x15, 0, 1, 425),          # if it is io_uring_setup
    (0x06, 0, 0, 0x00050001),   # return EPERM
    (0x06, 0, 0, 0x7FFF0000),   # else allow it
))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
library = ctypes.CDLL(None, use_errno=True)
assert library.prctl(38, 1, 0, 0, 0) == 0
assert library.prctl(22, 2, ctypes.byref(Program(4, program))) == 0, ctypes.get_errno()
print(json.dumps(to_plain(read_storage_queues(FactsRoot()))))
"""


def test_real_seccomp_filter_is_named(tree: Tree) -> None:
    done = subprocess.run([sys.executable, "-c", FILTER], cwd=ROOT, capture_output=True, text=True, check=True)
    queues = from_plain(StorageQueues, json.loads(done.stdout))
    facts = gather(FactsRoot(tree.folder), backends=(), etcd="", environ={})
    # Of this host, only what the filter changes.
    facts = replace(facts, storage_queues=replace(facts.storage_queues, calls=queues.calls, seccomp=queues.seccomp))
    judged = judge_by_id("storage-queues", facts, Requirements(load_profile("loopback"), ("POSIX",)))
    assert judged.verdict is Verdict.WARN
    assert "io_uring: seccomp forbids io_uring_setup (EPERM)" in judged.reason
