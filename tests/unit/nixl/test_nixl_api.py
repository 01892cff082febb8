# SPDX-License-Identifier: Apache-2.0
"""What a worker gives to NIXL and says of its refusals. NIXL's modules are doubles, one for each kind of release."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.nixl_releases import USUAL_PORT
from pytest_nixl.nixl.installed import hidden_module
from pytest_nixl.nixl.worker import nixl_api

PARAMETERS = {
    "UCX": {"devices": "", "engines": "1"},
    "LIBFABRIC": {},
    "GDS": {"num_threads": "1"},
    "OBJ": {},
}
AGENT = SimpleNamespace(get_plugin_params=PARAMETERS.__getitem__)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_api, "installed", lambda: ("nixl-cu12", "1.5.1"))


def test_parameters_that_the_plugin_lists_are_passed_on() -> None:
    assert nixl_api.backend_parameters(AGENT, "UCX", {"engines": "2"}, 0) == {"engines": "2"}
    assert nixl_api.backend_parameters(AGENT, "OBJ", {"bucket": "b"}, 0) == {"bucket": "b"}, "it lists none"
    unlisted = {"device_list": "mlx5_0:1", "engine_config": "MAX_RMA_RAILS=2"}
    assert nixl_api.backend_parameters(AGENT, "UCX", unlisted, 0) == unlisted, "UCX reads them without listing them"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("UCX", "UCX of NIXL 1.5.1 has no parameter 'bucket': it has devices, engines"),
        ("LIBFABRIC", "LIBFABRIC of NIXL 1.5.1 has no parameter 'bucket': it has none"),
    ],
)
def test_a_parameter_that_the_plugin_lacks_is_named_with_those_that_it_has(backend: str, message: str) -> None:
    with pytest.raises(NixlPluginError) as caught:
        nixl_api.backend_parameters(AGENT, backend, {"bucket": "b"}, 0)
    assert (caught.value.reason, caught.value.remedy) == (message, "correct --nixl-backend-params")


def test_worker_threads_are_given_to_the_plugins_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl_api.backend_parameters(AGENT, "UCX", {}, 3) == {"num_threads": "3"}, "it takes it without listing it"
    monkeypatch.setattr(nixl_api, "THREADED", ("UCX", "GDS", "LIBFABRIC"))
    assert nixl_api.backend_parameters(AGENT, "GDS", {}, 3) == {"num_threads": "3"}
    assert nixl_api.backend_parameters(AGENT, "UCX", {"engines": "2"}, 3) == {"engines": "2", "num_threads": "3"}
    assert nixl_api.backend_parameters(AGENT, "OBJ", {}, 3) == {}
    with pytest.raises(NixlPluginError) as caught:
        nixl_api.backend_parameters(AGENT, "LIBFABRIC", {}, 3)
    assert caught.value.reason == "LIBFABRIC of NIXL 1.5.1 has no worker threads"
    assert caught.value.remedy == "omit --nixl-threads"


FIND_PROCESS = "find the process that has port 7 with `ss -tanp 'sport = :7'`; or create the agent with another"
SET_HOME = (
    "set HOME to a directory that this user can read, or NIXL_CONFIG_FILE to NIXL's configuration file: NIXL searches "
    "HOME for one"
)
FOLDER = "to the plugin folder of this NIXL build; run with NIXL_LOG_LEVEL=info to see why a plugin fails"
PORTS = [("0.9.0", False, True), ("1.1.0", False, False), ("1.2.0", True, False)]


@pytest.mark.parametrize(("version", "zero", "refused"), PORTS)
def test_a_listener_has_the_requested_port_or_a_free_one(version: str, zero: bool, refused: bool) -> None:
    assert (nixl_api.port_for(version, 0) == 0) is zero
    assert 0 <= nixl_api.port_for(version, 0) < 65536
    assert nixl_api.port_for(version, 0) != USUAL_PORT
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(NixlPluginError) if refused else nullcontext() as caught:
            assert nixl_api.port_for(version, port) == port
    if caught is not None:
        assert (caught.value.reason, caught.value.remedy) == (
            f"the agent cannot listen on port {port} (Address already in use), and NIXL 0.9.0 would silently create an "
            "agent that no peer can reach",
            "set another listen_port, or 0 for a free one",
        )


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("cannot bind metadata listener", FIND_PROCESS),
        ("telemetry is wrong", "correct or unset the variables NIXL_TELEMETRY_…"),
        ("Conversion to bool failed", "correct or unset the variables NIXL_TELEMETRY_…"),
        ("filesystem error: status: Permission denied [/root/.nixl.cfg]", SET_HOME),
        ("filesystem error: status: Permission denied [/plugins]", f"set NIXL_PLUGIN_DIR {FOLDER}"),
        ("cannot read /root/.nixl.cfg", f"set NIXL_PLUGIN_DIR {FOLDER}"),
    ],
)
def test_the_remedy_of_a_refused_agent_follows_from_nixls_words(
    error: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    assert nixl_api.creation_remedy(error, 7) == remedy
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/else")
    assert nixl_api.plugin_remedy() == f"unset NIXL_PLUGIN_DIR (now /else), or set it {FOLDER}"


class Api:
    """NIXL's module: it keeps what an agent was created with."""

    def __init__(self, **modes: Any) -> None:
        vars(self).update(modes)
        self.given: dict[str, Any] = {}

    def nixl_agent_config(self, **options: Any) -> str:
        self.given = options
        return "config"

    def nixl_agent(self, name: str, config: str) -> tuple[str, str]:
        return name, config


def test_an_agent_is_created_without_backends_and_listens_only_if_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Api(nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_RW="rw mode"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(nixl_api, "port_for", lambda version, port: (version, port))
    assert nixl_api.make_agent("a", progress_thread=True, telemetry=True) == ("a", "config")
    assert api.given == {
        "enable_prog_thread": True, "enable_listen_thread": False, "listen_port": 0, "capture_telemetry": True,
        "backends": [],
    }  # fmt: skip
    nixl_api.make_agent("a", listen_thread=True, listen_port=9, sync_mode="rw")
    assert api.given == {
        "enable_prog_thread": False, "enable_listen_thread": True, "listen_port": ("1.5.1", 9),
        "capture_telemetry": False, "backends": [], "sync_mode": "rw mode",
    }  # fmt: skip


def test_a_release_without_synchronization_modes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", Api())
    with pytest.raises(NixlPluginError) as caught:
        nixl_api.make_agent("a", sync_mode="rw")
    assert caught.value.reason == "an agent of NIXL 1.5.1 has no synchronization mode"
    assert caught.value.remedy == "set --nixl-sync-mode=auto, or install NIXL 1.2 or newer"


def test_an_empty_list_is_made_by_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = SimpleNamespace(
        nixlRegDList=lambda memory: ("reg", memory), nixlXferDList=lambda memory: ("xfer", memory)
    )
    monkeypatch.setitem(sys.modules, "bindings_of_test", bindings)
    bound = type("nixlAgent", (), {"__module__": "bindings_of_test"})
    agent = SimpleNamespace(agent=bound(), nixl_mems={"DRAM": 7})
    lists = [nixl_api.empty_list(agent, method, "DRAM") for method in ("get_reg_descs", "get_xfer_descs")]
    assert lists == [("reg", 7), ("xfer", 7)]


@pytest.mark.parametrize(("version", "torch"), [("1.3.2", True), ("1.4.0", False)])
def test_a_release_that_imports_torch_asks_for_it(monkeypatch: pytest.MonkeyPatch, version: str, torch: bool) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)  # an import of it fails
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(nixl_api, "installed", lambda: ("nixl-cu12", version))
    with pytest.raises(NixlPluginError if torch else nixl_api.NixlImportError) as caught:
        nixl_api.load()
    if isinstance(caught.value, NixlPluginError):
        assert (caught.value.reason, caught.value.remedy) == (
            "NIXL cannot be loaded: nixl-cu12 1.3.2 imports torch, like every release before 1.4, but torch is not "
            "installed",
            "install NIXL 1.4 or newer, or run `pip install torch` (without a GPU, its CPU build is enough)",
        )


def load_with(folder: Path) -> list[str]:
    """Load NIXL with a folder in PYTHONPATH; return the reason and the remedy of the refusal, or nothing."""
    script = """
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.nixl.worker import nixl_api
try:
    nixl_api.load()
except (NixlPluginError, nixl_api.NixlImportError) as error:
    print(getattr(error, "reason", error), error.remedy, sep="\\n")
"""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


NAME, VERSION = nixl_api.installed()


@pytest.mark.parametrize(
    ("cuda", "reason", "remedy"),
    [
        ("11.8.1", "NIXL cannot be loaded: torch is built for CUDA 11, for which there is no package of NIXL",
         "install a torch that is built for CUDA 12 or newer"),
        # NIXL itself chooses its package: by the CUDA version of the torch that is installed.
        ("99.0.1",
         f"torch is built for CUDA 99, and beside it NIXL loads only nixl-cu99; installed: {NAME} {VERSION}",
         f"install NIXL for this Python: `pip install --no-deps nixl-cu99=={VERSION}`, or use the image's own build"),
    ],
)  # fmt: skip
def test_a_nixl_for_another_cuda_than_that_of_torch_is_named_with_what_to_install(
    cuda: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda = {cuda!r}\n")
    assert load_with(tmp_path) == [reason, remedy]


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("nixl.py", "raise SystemExit(3)", "SystemExit: 3"),
        ("nixl.py", "def (:", "SyntaxError: "),
        ("nixl_meta_utils.py", "", "cannot import name 'detect_cuda_major'"),
    ],
)
def test_file_that_hides_a_module_of_nixl_is_named_and_nothing_is_to_install(
    file: str, text: str, error: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_text(text)
    reason, remedy = load_with(tmp_path)
    assert reason.startswith(error)
    assert f"{path} hides the module {path.stem} of nixl" in reason
    assert remedy == f"rename {path}, or take {tmp_path} out of PYTHONPATH and do not start in it"


def test_a_package_hides_no_module_that_another_also_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        info = tmp_path / name / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "RECORD").write_text("module_of_both.py,,\n")
        (tmp_path / name / "module_of_both.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert hidden_module(ImportError(name="module_of_both")) is None
