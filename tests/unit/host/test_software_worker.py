# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked about NIXL and its backends, in which order, and what is kept if it fails or ends.

The worker is a double, because no release of NIXL fails at each of these steps.
"""

from __future__ import annotations

import math
import socket
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.wire import Ref
from pytest_nixl.host import software
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.software import read_software
from pytest_nixl.processes.worker_errors import WorkerDiedError

HELLO = {"nixl": "1.5.1", "nixl_package": "nixl-cu12", "python": "3.12"}
BY_HAND = "create an agent with that backend by hand, with NIXL_LOG_LEVEL=info and UCX_LOG_LEVEL=info, and read the log"
LOG = (
    "[1.5] [vm:3 :0]  ib.c:25 UCX  WARN  it is slow\n"
    "[1.5] [vm:3 :0]  p.c:2 UCX  WARN  unused environment variable: UCX_A\n"
    "libibverbs: Warning: Driver efa does not support the kernel ABI of 3 for device /sys/uverbs0\n"
)
UNUSED = {"UCX_A": ""}


class Pending:
    """A request that is answered, or fails, as the test says."""

    deadline, wait_seconds, hopeless = math.inf, 0.0, False

    def __init__(self, worker: Worker, answer: Any) -> None:
        self.worker, self._answer = worker, answer

    def result(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return deepcopy(self._answer)


class Worker:
    """A worker with these answers, by the function that is asked and the backend."""

    rank, role, pid, answered = 0, "facts", 1 << 30, True

    def __init__(self, **answers: Any) -> None:
        self._answers = {"create_agent": {"agent": Ref(1, "agent"), "versions": {}}, **answers}
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"answers")
        self.versions, self.agent_names = dict(HELLO), dict[int, str]()
        self.requests: list[Any] = []
        self.kills = 0

    def request(self, command: str, **options: Any) -> Pending:
        arguments = options.get("arguments", {})
        function = options.get("function", command).rpartition(":")[2]
        asked = (
            dict(arguments) if command == "run" else {name: options[name] for name in ("name", "backends", "telemetry")}
        )
        asked.pop("nixl", None)
        self.requests.append((function, *asked.values()))
        key = f"{function}_{arguments['name']}" if function in ("prepare", "make") else function
        return Pending(self, self._answers[key])

    def fileno(self) -> int:
        return self._ours.fileno()

    def kill(self) -> None:
        self.kills += 1

    def output(self) -> str:
        return LOG

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def prepared(plugin: str, *libraries: str, **changes: Any) -> dict[str, Any]:
    """Return the answer about a backend before it is created."""
    backend = {"plugin": plugin, "missing": [], "memories": [], "versions": {}, "error": "", "remedy": ""}
    return {"backend": {**backend, **changes}, "libraries": list(libraries)}


RDMA = {"module": "/u/libuct_ib.so", "libibverbs": "", "offered": {}, "answers": {}}
HEALTHY: dict[str, Any] = {
    "prepare_UCX": prepared("/p/libplugin_UCX.so", "/a/libucs.so.0"),
    "prepare_POSIX": prepared("/p/libplugin_POSIX.so", "/a/libucs.so.0", "/a/libaio.so.1"),
    "ask_rdma": RDMA,
    "make_UCX": {"memories": ["DRAM"]},
    "make_POSIX": {"memories": ["FILE"]},
    "telemetry": {"bytes": 4096},
    "look": {"plugins": ["UCX", "POSIX"], "libraries": ["/b/libucs.so.0"]},
}
BOTH = ("UCX", "POSIX")
AGENT: Any = ("create_agent", "pytest-nixl-facts", [], True)
PREPARE = [("prepare", "UCX"), ("prepare", "POSIX")]
PLUGINS = ["/p/libplugin_UCX.so", "/p/libplugin_POSIX.so"]
ASK, MAKE_UCX, MAKE_POSIX = ("ask_rdma", PLUGINS[0]), ("make", "UCX"), ("make", "POSIX")
NO_CLIENT = {"path": "", "patched": False}
DIED = WorkerDiedError("the worker was ended by SIGSEGV", "read the log below")
DIED.last_line = "UCX ERROR odd"
ENDED = {"error": "the worker was ended by SIGSEGV; its last line: UCX ERROR odd", "remedy": BY_HAND}


@pytest.fixture(autouse=True)
def damage(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is wrong with the wheel and with the limits of this process; nothing, unless a test says so."""
    faults: dict[str, Any] = {"wheel_damage": None, "shortage": None}
    for name in faults:
        monkeypatch.setattr(software, name, lambda name=name: faults[name])
    return faults


def ask(worker: Worker, *backends: str) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the answer of a worker, and the lists of libraries that were loaded before backends were created."""
    root, loaded = FactsRoot(), list[Any]()
    double: Any = worker
    read_software(root, backends, "/no/such", worker=double, loaded=loaded.append)
    worker.close()
    answer: dict[str, Any] = root.answers["nixl"]
    return answer, loaded


def backend(name: str, **changes: Any) -> dict[str, Any]:
    ucx = {"said": ["it is slow"]} if name == "UCX" else {}
    result: dict[str, Any] = {**HEALTHY[f"prepare_{name}"]["backend"], **ucx, **changes}
    return result


def test_each_backend_is_prepared_before_the_first_is_created() -> None:
    worker = Worker(**HEALTHY)
    answer, loaded = ask(worker, *BOTH)
    assert answer == {
        **HELLO,
        "backends": {"UCX": backend("UCX", memories=["DRAM"]), "POSIX": backend("POSIX", memories=["FILE"])},
        "ucx_rdma": {**RDMA, "other_abi": {"uverbs0": "Driver efa does not support the kernel ABI of 3"}},
        "telemetry": {"bytes": 4096},
        **HEALTHY["look"],
        "etcd_client": NO_CLIENT,
        "unused": UNUSED,
    }
    assert loaded == [["/a/libucs.so.0", "/a/libaio.so.1"]]
    look = ("look", PLUGINS)
    assert worker.requests == [AGENT, *PREPARE, ASK, MAKE_UCX, MAKE_POSIX, ("telemetry", "UCX"), look]
    assert worker.kills == 1


LACKS = [{"soname": "x", "versions": [], "words": "no x"}]
HANGS = {"memories": [], "error": "it hangs", "remedy": BY_HAND}


@pytest.mark.parametrize(
    ("changes", "requests", "differences"),
    [
        (
            {"prepare_UCX": prepared("", error="it is not there", remedy="install it")},
            [*PREPARE, MAKE_POSIX, ("look", ["", PLUGINS[1]])],
            {"UCX": {"plugin": "", "memories": [], "error": "it is not there", "remedy": "install it"}},
        ),
        (
            {"prepare_UCX": prepared(PLUGINS[0], missing=LACKS)},
            [*PREPARE, MAKE_UCX, MAKE_POSIX, ("telemetry", "UCX"), ("look", PLUGINS)],
            {"UCX": {"missing": LACKS}},
        ),
        (
            {"make_UCX": {"error": "NIXL_ERR_BACKEND"}},
            [*PREPARE, ASK, MAKE_UCX, MAKE_POSIX, ("look", PLUGINS)],
            {"UCX": {"memories": [], "error": "NIXL_ERR_BACKEND"}},
        ),
        ({"make_POSIX": DIED}, [*PREPARE, ASK, MAKE_UCX, MAKE_POSIX], {"POSIX": {"memories": [], **ENDED}}),
        (
            {"prepare_UCX": NixlPluginError("it hangs", "look at it")},
            [PREPARE[0]],
            {name: {**HANGS, "plugin": "", "remedy": "look at it"} for name in BOTH},
        ),
        ({"ask_rdma": NixlPluginError("it hangs")}, [*PREPARE, ASK], dict.fromkeys(BOTH, HANGS)),
    ],
    ids=["no plugin", "a library is missing", "not created", "dies", "not prepared", "asking RDMA"],
)
def test_a_backend_that_fails_has_its_error_and_the_others_their_facts(
    changes: dict[str, Any], requests: list[Any], differences: dict[str, dict[str, Any]]
) -> None:
    worker = Worker(**{**HEALTHY, **changes})
    answer, _ = ask(worker, *BOTH)
    healthy = {"UCX": backend("UCX", memories=["DRAM"]), "POSIX": backend("POSIX", memories=["FILE"])}
    expected = {name: {**values, **differences.get(name, {})} for name, values in healthy.items()}
    assert (answer["backends"], worker.requests, worker.kills) == (expected, [AGENT, *requests], 1)


DAMAGE = ("libnixl.so is damaged", "install it again")


@pytest.mark.parametrize(
    ("error", "faults", "answer"),
    [
        (DIED, {}, {"why": ENDED["error"], "remedy": "read the log below"}),
        (
            NixlPluginError("it fails", "mend it"),
            {"wheel_damage": DAMAGE, "shortage": ("x", "y")},
            {"why": "it fails; libnixl.so is damaged", "remedy": "install it again"},
        ),
        (
            NixlPluginError("it fails", "mend it"),
            {"shortage": ("no shm", "y")},
            {"why": "it fails; no shm", "remedy": "y"},
        ),
        (
            NixlPluginError("see: libnixl.so is damaged", "mend it"),
            {"wheel_damage": DAMAGE},
            {"why": "see: libnixl.so is damaged", "remedy": "mend it"},
        ),
    ],
)
def test_an_agent_that_cannot_be_created_has_its_cause(
    damage: dict[str, Any], error: Exception, faults: dict[str, Any], answer: dict[str, str]
) -> None:
    damage.update(faults)
    assert ask(Worker(create_agent=error), "UCX")[0] == answer


def test_a_damaged_wheel_is_the_cause_of_each_backend_that_fails(damage: dict[str, Any]) -> None:
    damage["wheel_damage"] = DAMAGE
    answers = {
        "prepare_UCX": prepared(PLUGINS[0], missing=LACKS),
        "prepare_A": prepared("", error="it fails", remedy="mend it"),
        "prepare_B": prepared("", error="see: libnixl.so is damaged", remedy="mend it"),
    }
    answer, _ = ask(Worker(**{**HEALTHY, **answers}), "UCX", "POSIX", "A", "B")
    assert {name: (values["error"], values["remedy"]) for name, values in answer["backends"].items()} == {
        "UCX": ("libnixl.so is damaged", "install it again"),
        "POSIX": ("", ""),
        "A": ("it fails; libnixl.so is damaged", "install it again"),
        "B": ("see: libnixl.so is damaged", "install it again"),
    }


def test_the_etcd_client_of_nixl_is_read(tmp_path: Path) -> None:
    library = tmp_path / "libetcd-cpp-api.so"
    library.write_bytes(b"ETCD_CPP_API_DISABLE_URI_VALIDATION")
    answer, loaded = ask(Worker(look={"libraries": ["/a/libucs.so", str(library)]}))
    assert (answer["etcd_client"], loaded) == ({"path": str(library), "patched": True}, [[]])
