# SPDX-License-Identifier: Apache-2.0
"""What forbids the kernel's queues for files: in recorded trees, and by a real seccomp filter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from pytest_nixl.model.verdicts import Judgement, Verdict

DISABLED, AIO_MAX, AIO_USED = "/proc/sys/kernel/io_uring_disabled", "/proc/sys/fs/aio-max-nr", "/proc/sys/fs/aio-nr"
KERNEL = "/proc/sys/kernel/osrelease"


def ask(root: FactsRoot, *backends: str) -> Judgement:
    facts = gather(root, backends=(), etcd="", environ={})
    return judge_by_id("storage-queues", facts, Requirements(load_profile("loopback"), backends or ("UCX", "POSIX")))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("healthy") / "tree")


@pytest.fixture
def tree(healthy: Tree) -> Iterator[Tree]:
    with healthy.changed() as tree:
        yield tree


def calls(io_setup: str = "EFAULT", io_uring_setup: str = "EFAULT") -> Callable[[Tree], None]:
    return lambda tree: tree.answer("storage-queues", {"io_setup": io_setup, "io_uring_setup": io_uring_setup})


def limited(kernel: str) -> Callable[[Tree], None]:
    line = "Max locked memory         65536                65536                bytes     "

    def make(tree: Tree) -> None:
        tree.write("/proc/self/limits", line)
        tree.write("/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0")
        tree.write(KERNEL, kernel)

    return make


def filtered(tree: Tree) -> None:
    tree.write("/proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t2")
    calls("EFAULT", "EPERM")(tree)


def test_host_that_allows_both_passes(tree: Tree) -> None:
    judged = ask(FactsRoot(tree.folder))
    assert judged == Judgement(Verdict.PASS, "io_uring and aio can be set up; 65536 requests of aio are free")
    assert ask(FactsRoot(tree.folder), "UCX").verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("make", "reason", "remedy"),
    [
        (lambda tree: tree.write(DISABLED, 2), "io_uring_disabled=2 forbids it to all", "io_uring_disabled = 0"),
        (lambda tree: (tree.write(DISABLED, 1), calls(io_uring_setup="EPERM")(tree)),
         "io_uring_disabled=1 forbids it to processes without", "io_uring_disabled = 0"),
        (filtered, "seccomp forbids io_uring_setup (EPERM)", "allow io_uring_setup in the seccomp profile"),
        (calls(io_uring_setup="ENOSYS"), "this kernel has none", "io_uring_setup"),
        (calls(io_setup="ENOSYS"), "this kernel does not allow io_setup (ENOSYS)", "allow io_setup"),
        (lambda tree: tree.write(AIO_USED, 65000), "65000 of 65536 requests are reserved", "fs.aio-max-nr = 1048576"),
        (limited("5.10.0-20-amd64"), "may lock only 65536 bytes", "memlock"),
    ],
    ids=["disabled", "unprivileged", "seccomp", "no-uring", "no-aio", "aio-max", "memlock"],
)  # fmt: skip
def test_what_forbids_one_queue_is_a_warning_with_its_remedy(
    tree: Tree, make: Callable[[Tree], object], reason: str, remedy: str
) -> None:
    make(tree)
    judged = ask(FactsRoot(tree.folder))
    assert judged.verdict is Verdict.WARN
    assert reason in judged.reason
    assert remedy in judged.remedy


def test_host_that_allows_neither_fails(tree: Tree) -> None:
    tree.write(DISABLED, 2)
    tree.write(AIO_MAX, 100)
    judged = ask(FactsRoot(tree.folder))
    assert judged.verdict is Verdict.FAIL
    assert "io_uring: " in judged.reason
    assert "; aio: " in judged.reason


@pytest.mark.parametrize(
    "make",
    [
        limited("6.1.0"),  # rings are not counted as locked
        lambda tree: tree.write(DISABLED, 1),  # this process is privileged: the call is allowed
        lambda tree: (tree.remove(AIO_MAX), tree.remove(AIO_USED)),
    ],
)
def test_what_forbids_nothing_passes(tree: Tree, make: Callable[[Tree], object]) -> None:
    make(tree)
    assert ask(FactsRoot(tree.folder)).verdict is Verdict.PASS


def test_tree_without_the_answer_is_unknown(tree: Tree) -> None:
    tree.remove("/pytest-nixl/storage-queues.json")
    assert ask(FactsRoot(tree.folder)).verdict is Verdict.UNKNOWN


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
