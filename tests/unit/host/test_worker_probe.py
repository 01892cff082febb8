# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked about its NIXL. The agent is a double: its answers are those that no release gives at will."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.double_libraries import build, in_a_child

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.host.ucx_rdma import offered_transports, printed
from pytest_nixl.host.worker_probe import ask_rdma, look, make, prepare, telemetry, variables_in
from pytest_nixl.nixl.backends import BACKENDS


class Agent:
    """A double of NIXL's agent that records its calls, and copies the bytes of a transfer.

    :param states: what the transfer answers, in order.
    :param fails: the method that fails.
    """

    name = "me"

    def __init__(self, *states: str, fails: str = "", plugins: tuple[str, ...] = ("UCX", "POSIX")) -> None:
        remaining = list(states)
        self._fails = fails
        self.calls: list[Any] = []
        self.metadata = b""
        self._answers: dict[str, Callable[..., Any]] = {
            "get_plugin_list": lambda: plugins,
            "get_backend_mem_types": lambda name: [f"{name}_A", "B"],
            "transfer": lambda handle: remaining.pop(0),
            "check_xfer_state": lambda handle: remaining.pop(0),
            "get_xfer_telemetry": lambda handle: SimpleNamespace(totalBytes=4096.0),
            "get_agent_metadata": lambda: self.metadata,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *arguments, *options.items()))
            if name == self._fails:
                raise ValueError("NIXL_ERR_BACKEND")
            return self._answers[name](*arguments) if name in self._answers else name

        return call


@pytest.mark.parametrize(
    ("agent", "answer", "created"),
    [
        (Agent(), {"memories": ["UCX_A", "B"]}, True),
        (Agent(plugins=("POSIX", "GDS")), {"error": "NIXL has no plugin UCX: it has POSIX, GDS"}, False),
        (Agent(plugins=()), {"error": "NIXL has no plugin UCX: it has none"}, False),
        (Agent(fails="create_backend"), {"error": "ValueError: NIXL_ERR_BACKEND"}, True),
    ],
    ids=["created", "no such plugin", "no plugin", "refused"],
)
def test_a_backend_is_created_or_its_error_is_returned(agent: Agent, answer: dict[str, Any], created: bool) -> None:
    assert make(agent, "UCX") == answer
    assert (("create_backend", "UCX") in agent.calls) is created


@pytest.mark.parametrize(
    ("agent", "answer"),
    [
        (Agent("DONE"), {"bytes": 4096}),
        (Agent("PROC", "PROC", "DONE"), {"bytes": 4096}),
        (Agent("PROC", "ERR"), {"error": "a transfer within one agent ended with ERR"}),
        (Agent("DONE", fails="get_xfer_telemetry"), {"error": "ValueError: NIXL_ERR_BACKEND"}),
    ],
    ids=["done at once", "done later", "failed", "no telemetry"],
)
def test_the_telemetry_of_a_transfer_within_one_agent_is_read(agent: Agent, answer: dict[str, Any]) -> None:
    assert telemetry(agent, "UCX") == answer
    (_, regions, *_), *calls = agent.calls
    [source, target] = [region[:3] for region in regions]
    assert (source[1:], target[1:], source[0] != target[0]) == ((4096, 0), (4096, 0), True)
    used = ("backends", ["UCX"])
    assert agent.calls[0] == ("register_memory", [(*source, ""), (*target, "")], "DRAM", used)
    handle, states = "initialize_xfer", [call for call in calls if call[0] in ("transfer", "check_xfer_state")]
    assert states == [("transfer", handle), *[("check_xfer_state", handle)] * (len(states) - 1)]
    assert [call for call in calls if call not in states and call[0] != "get_xfer_telemetry"] == [
        ("get_xfer_descs", [source], "DRAM"),
        ("get_xfer_descs", [target], "DRAM"),
        (handle, "WRITE", "get_xfer_descs", "get_xfer_descs", "me", used),
        ("release_xfer_handle", handle),
        ("deregister_memory", "register_memory"),
    ]


LACKS = [{"soname": "libneed.so", "versions": [], "words": "libneed.so, which libplugin_ODD.so needs, was not found"}]
UNPREPARED: dict[str, Any] = {"missing": [], "error": "", "remedy": "", "memories": [], "versions": {}, "release": ""}


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (None, {"missing": LACKS}),
        ({"x": "2.3"}, {"missing": LACKS, "versions": {"x": "2.3"}}),
        ({"x": "2.3", "y": "FOLDER/libneed.so"}, {"versions": {"x": "2.3", "y": "FOLDER/libneed.so"}}),
        (NixlPluginError("no CUDA", "install it"), {"missing": LACKS, "error": "no CUDA", "remedy": "install it"}),
    ],
    ids=["another backend", "loads nothing", "loads what the plugin needs", "cannot load"],
)
def test_a_backend_is_prepared_with_what_its_plugin_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any, changes: dict[str, Any]
) -> None:
    [need] = build(tmp_path / "need", {"libneed.so": "int need(void) { return 1; }"})
    linked = [f"-L{tmp_path}/need", "-Wl,--no-as-needed", "-lneed"]
    [plugin] = build(tmp_path, {"libplugin_ODD.so": "int f(void) { return 1; }"}, *linked)
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    text = json.dumps({**UNPREPARED, **changes}).replace("FOLDER", str(tmp_path / "need"))

    def provide(nixl: dict[str, str]) -> dict[str, str]:
        assert nixl == {"nixl_package": "none"}
        if isinstance(load, Exception):
            raise load
        return {name: value.replace("FOLDER", os.path.dirname(need)) for name, value in load.items()}

    if load is not None:
        monkeypatch.setitem(BACKENDS, "ODD", SimpleNamespace(load=provide, PLUGIN="ODD"))
    prepared = prepare(Agent(), "ODD", {"nixl_package": "none"})
    assert prepared["backend"] == {**json.loads(text), "plugin": plugin}
    assert need not in prepared["libraries"]


def test_a_plugin_that_is_absent_or_no_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    absent = {name: value for name, value in UNPREPARED.items() if name != "release"}
    assert prepare(Agent(), "ODD", {"nixl_package": "none"})["backend"] == {**absent, "plugin": ""}
    plugin = tmp_path / "libplugin_ODD.so"
    plugin.write_text("text")
    error = f"{plugin} is not a 64-bit shared library"
    prepared = prepare(Agent(), "ODD", {"nixl_package": "none"})["backend"]
    assert prepared == {**UNPREPARED, "plugin": str(plugin), "error": error}


def test_a_transfer_that_cannot_be_prepared_leaves_no_handle() -> None:
    agent = Agent(fails="initialize_xfer")
    assert telemetry(agent, "UCX") == {"error": "ValueError: NIXL_ERR_BACKEND"}
    assert [call[0] for call in agent.calls][-2:] == ["initialize_xfer", "deregister_memory"]


#: Libraries that have what is asked of those of UCX, libfabric and NIXL. Doubles: this process loads none of these.
SOURCES = {
    "libucs.so.0": """
        #include <stdio.h>
        char ucs_config_global_list[8];
        void ucs_config_parser_print_all_opts(FILE *to, const char *prefix, int flags, void *list, void *filter) {
            fprintf(to, "# %sNO=1\\n%sFLAGS_%d=1\\n", prefix, prefix, flags);
            fprintf(to, "%sLIST_%d=1\\n", prefix, list == ucs_config_global_list && !filter);
        }
    """,
    "libfabric.so.1": """
        struct parameter { const char *name; int type; const char *help; const char *value; };
        static struct parameter all[] = {{"FI_A", 1, "x", "y"}, {"FI_B", 2, "x", "y"}};
        int fi_getparams(struct parameter **to, int *count) { *to = all; *count = 2; return 0; }
    """,
    "libnixl.so": 'const char *text = "NIXL_OF_LIBRARY";',
}
BROKEN = {
    "libucs-0a1b2c3d.so.0": "int x;",
    "libfabric-0a1b2c3d.so.1": "int fi_getparams(void *to, int *count) { return 1; }",
}


def looking(folder: Path, sources: dict[str, str], *plugins: str) -> dict[str, Any]:
    """Return what a child of this process sees that has loaded such libraries."""
    answer: dict[str, Any] = in_a_child(build(folder, sources), lambda: look(Agent(), list(plugins)))
    return answer


def test_the_variables_that_loaded_libraries_know_are_read(tmp_path: Path) -> None:
    plugin = tmp_path / "libplugin_X.so"
    plugin.write_bytes(b"NIXL_LOG_LEVEL\0xNIXL_A1 NIXL_ERR_X NIXL_IN_PROG NIXL_AB_\0NIXL_lower NIXL_1")
    answer = looking(tmp_path, SOURCES, "", str(plugin))
    assert sorted(answer.pop("libraries")) == sorted(str(tmp_path / name) for name in SOURCES)
    assert answer == {
        "plugins": ["UCX", "POSIX"],
        "ucx_variables": ["UCX_FLAGS_9", "UCX_LIST_1"],
        "fabric_variables": ["FI_A", "FI_B"],
        "nixl_variables": ["NIXL_A1", "NIXL_AB", "NIXL_LOG_LEVEL", "NIXL_OF_LIBRARY"],
        "advertised": [],
        "ucx": "",
    }


def test_libraries_that_do_not_answer_know_no_variable(tmp_path: Path) -> None:
    answer = looking(tmp_path, BROKEN)
    assert (answer["ucx_variables"], answer["fabric_variables"], answer["nixl_variables"]) == ([], [], [])


def test_a_process_without_nixl_knows_no_variable() -> None:
    agent = Agent()
    addresses = [text.partition("/")[0] for texts in ask_addresses().values() for text in texts if ":" not in text]
    assert "127.0.0.1" in addresses
    agent.metadata = b"x\x7f\x00\x00\x01y"
    answer = look(agent, [])
    assert (answer["plugins"], answer["advertised"]) == (["UCX", "POSIX"], ["127.0.0.1"])
    assert [answer[f"{name}_variables"] for name in ("ucx", "fabric", "nixl")] == [[], [], []]
    failing = Agent(fails="get_agent_metadata")
    with pytest.raises(ValueError, match="NIXL_ERR_BACKEND"):
        look(failing, [])


def test_a_host_without_rdma_devices_is_not_asked_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert ask_rdma(Agent(), "/no/such/libplugin_UCX.so") is None


def test_the_transports_that_ucx_offers_are_read_for_each_device() -> None:
    lines = (
        "#    resource 0  :  md 0  dev 0  flags -s -- self/memory0:1",
        "#    resource 10 :  md 4  dev 3  flags -- -- rc_verbs/mlx5_0:1",
        "#    resource 11 :  md 4  dev 3  flags -- -- ud_verbs/mlx5_0:1",
        "#    resource 12 :  md 4  dev 3  flags -- -- rc_verbs/mlx5_1:2 x",
        "#    resource 13 :  md 4  dev 3  flags -- -- /mlx5_1:2",
        "#    resource 14 :  md 4  dev 3  flags -- -- rc_verbs/:1",
        "#    resource 15 :  md 4  dev 3  flags -- -- rc_verbs/mlx5_2:1",
    )
    offered = offered_transports("\n".join(lines), ["mlx5_1", "mlx5_0"])
    assert offered == {"mlx5_0": ["rc_verbs", "ud_verbs"]}
    assert offered_transports(lines[5], [""]) == {}


def test_the_variables_of_ucx_are_the_names_before_values() -> None:
    assert variables_in("#\n# of UCX_TLS=x\n\nUCX_TLS=all\n=\nUCX_LOG=\n") == ["UCX_TLS", "UCX_LOG"]


def test_what_a_library_prints_to_a_stream_is_returned() -> None:
    libc = ctypes.CDLL(None)
    assert printed(lambda stream: libc.fputs(b"a\xff\n", stream)) == "a\ufffd\n"
    assert printed(lambda stream: None) == ""
