# SPDX-License-Identifier: Apache-2.0
"""What a new user meets first: the header, a missing etcd, and a rank whose launcher gives it a terminal."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.cli_run import WITHOUT, environment
from helpers.pytester_run import run_pytest
from helpers.terminal_screen import run_on_terminal

from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers import binary
from pytest_nixl.report import terminal


def _ucx() -> str:
    """Return what NIXL's UCX says of itself. It is loaded in a process of its own."""
    package = find_spec("nixl_cu12")
    assert package is not None
    assert package.origin is not None
    [library] = Path(f"{Path(package.origin).parent}.libs").glob("libucp-*.so*")
    ask = (
        "import ctypes, sys; ask = ctypes.CDLL(sys.argv[1]).ucp_get_version_string; ask.restype = ctypes.c_char_p; "
        "print(ask().decode())"
    )
    return subprocess.run(
        [sys.executable, "-c", ask, library], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_header_has_the_versions_of_nixl_and_ucx(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(nixl_settings): pass")
    result = run_pytest(pytester, "--nixl-timeout=5s", in_process=True)
    versions = f"pytest-nixl {version('pytest-nixl')}, NIXL {version('nixl-cu12')}, UCX {_ucx()}"
    result.stdout.fnmatch_lines([f"{versions}: --nixl-timeout=5s (-vv: all settings)"])


def test_without_nixl_the_header_says_so_and_how_to_install_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_it(nixl_settings): pass")
    monkeypatch.setattr(terminal, "installed_nixl", lambda: "")
    result = run_pytest(pytester, "--nixl-timeout=5s", in_process=True)
    remedy = f"  NIXL is not installed for {sys.executable}: `pip install --no-deps nixl nixl-cu12`"
    result.stdout.fnmatch_lines(["pytest-nixl *, no NIXL: --nixl-timeout=5s (-vv: all settings)", remedy])


def test_a_missing_etcd_does_not_print_the_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "find_binary", lambda: None)
    monkeypatch.setenv("PATH", "/a/long/path:/and/another")
    with pytest.raises(EtcdError) as caught:
        binary.etcd_binary()
    assert "could not find the program 'etcd': it is neither in a directory of PATH nor in" in caught.value.reason
    assert "/a/long/path" not in str(caught.value)


@pytest.mark.parametrize(("forced", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True)])
def test_a_rank_of_a_launcher_writes_no_escape_codes(tmp_path: Path, forced: dict[str, str], coloured: bool) -> None:
    """``mpirun`` gives each rank a terminal, and what all of them write ends in one file."""
    (tmp_path / "test_mine.py").write_text("def test_mine(nixl_settings): assert False\n")
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "TERM": "xterm"}
    words = [
        sys.executable,
        "-m",
        "pytest",
        *WITHOUT,
        "test_mine.py",
        "--nixl-etcd=http://127.0.0.1:9",
        "--nixl-join-timeout=1s",
    ]
    kept = environment(**ranks, **forced)
    code, output = run_on_terminal(
        words, cwd=tmp_path, env={k: v for k, v in kept.items() if k not in ("CI", "NO_COLOR")}
    )
    assert code == 1
    assert "connection refused" in output
    assert ("\x1b[" in output) == coloured


@pytest.mark.parametrize(
    ("pasted", "test"),
    [
        ("infrastructure/test_nixl.py::test_nixl_loads", "infrastructure/test_nixl.py::test_nixl_loads"),
        ("test_nixl.py::test_nixl_loads", "infrastructure/test_nixl.py::test_nixl_loads"),
        ("test_mine.py::test_mine", "test_mine.py::test_mine"),
        ("test_lost.py::test_lost", ""),
    ],
)
def test_an_id_that_pytest_printed_can_be_pasted_back(pytester: pytest.Pytester, pasted: str, test: str) -> None:
    """With ``--pyargs`` pytest prints the ids of the suites without the folder in which they are."""
    pytester.makepyfile(test_mine="def test_mine(): pass")
    done = run_pytest(pytester, "--collect-only", "-q", pasted, in_process=True)
    if test:
        assert done.outlines[0].endswith(test.rpartition("/")[2].rpartition(".py")[2])
        assert "1 test collected" in done.stdout.str()
    else:
        assert int(done.ret) == pytest.ExitCode.USAGE_ERROR
        assert "file or directory not found: test_lost.py::test_lost" in done.stderr.str()
