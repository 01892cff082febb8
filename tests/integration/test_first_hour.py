# SPDX-License-Identifier: Apache-2.0
"""What a new user meets first: the header, a missing etcd, and a rank whose launcher gives it a terminal."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, WITHOUT, bandwidth, environment, execute, parse_line, profile, run
from helpers.needs import need_programs
from helpers.pytester_run import run_pytest

from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers import embedded
from pytest_nixl.nixl import installed
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
    monkeypatch.setattr(installed, "nixl_packages", dict)
    result = run_pytest(pytester, "--nixl-timeout=5s", in_process=True)
    remedy = f"  NIXL is not installed for {sys.executable}: `pip install --no-deps nixl nixl-cu12`"
    result.stdout.fnmatch_lines(["pytest-nixl *, no NIXL: --nixl-timeout=5s (-vv: all settings)", remedy])


def test_a_missing_etcd_does_not_print_the_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_binary", lambda: None)
    monkeypatch.setenv("PATH", "/a/long/path:/and/another")
    with pytest.raises(EtcdError) as caught:
        embedded.etcd_binary()
    assert "could not find the program 'etcd': it is neither in a directory of PATH nor in" in caught.value.reason
    assert "/a/long/path" not in str(caught.value)


@pytest.mark.parametrize(
    ("forced", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True), ({"PY_COLORS": "1"}, True)]
)
def test_a_rank_of_a_launcher_writes_no_escape_codes(tmp_path: Path, forced: dict[str, str], coloured: bool) -> None:
    """``mpirun`` gives each rank a terminal, and what all of them write ends in one file."""
    need_programs("script", packages="bsdutils")
    (tmp_path / "test_mine.py").write_text("def test_mine(nixl_settings): assert False\n")
    variables = environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2", TERM="xterm", **forced)
    options = ("-m", "pytest", *WITHOUT, "test_mine.py", "--nixl-etcd=http://127.0.0.1:9", "--nixl-join-timeout=1s")
    done = subprocess.run(
        ["script", "-qec", shlex.join([sys.executable, *options]), "/dev/null"], cwd=tmp_path, timeout=300,
        env={name: value for name, value in variables.items() if name not in ("CI", "NO_COLOR")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "connection refused" in done.stdout
    assert ("\x1b[" in done.stdout) == coloured


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


def ranks_on_this_host(lines: Sequence[str]) -> list[tuple[int, str]]:
    """Run a command line for each rank at the same time, and return exit codes and outputs."""
    env = environment(NIXL_GROUP_TOKEN="of a test", PYTEST_ADDOPTS="-p no:cacheprovider")

    def run_rank(line: str) -> tuple[int, str]:
        parsed = parse_line(line)
        assert parsed is not None, line
        variables, argv = parsed
        with TemporaryFile("w+") as output:
            code = execute(argv, cwd=ROOT, env={**env, **variables}, output=output, errors=output, timeout=600)
            output.seek(0)
            return code, output.read()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run_rank, lines))


@pytest.mark.long
def test_two_ranks_of_one_host_learn_that_the_profile_is_for_two_and_how_to_repeat_the_row(tmp_path: Path) -> None:
    """As someone does who rehearses with the profile that ``pytest-nixl init`` wrote."""
    expects = 'backend = ["UCX"]\ntransports = ["tcp"]\nfloor = "0.001 GB/s"'
    path, port = profile(tmp_path / "two-hosts.toml", expects), free_ports(1)[0]
    line = f"pytest {BANDWIDTH} --nixl-blocks=64KiB --nixl-op=WRITE --nixl-profile={path} --nixl-ranks=2 "
    line += f"--nixl-etcd-listen=127.0.0.1:{port} --nixl-rank="
    (code, output), (other, _) = ranks_on_this_host([f"MASTER_ADDR=127.0.0.1 {line}{rank}" for rank in (0, 1)])
    assert (code, other) == (1, 1), output
    assert f": both ranks are on one host, {platform.node()}, and this profile is for rows between two hosts" in output
    [again] = {results.strip() for results in output.splitlines() if results.strip().startswith("repeat: ")}
    command, _, how = again.removeprefix("repeat: ").partition("  # ")
    assert command.startswith("MASTER_ADDR=127.0.0.1 pytest ")
    assert how == "at the same time on the other rank, with its --nixl-rank, and with the same NIXL_GROUP_TOKEN on all"
    second = ranks_on_this_host([command, command.replace("--nixl-rank=0", "--nixl-rank=1")])
    assert [results for results, _ in second] == [1, 1], second
    assert "both ranks are on one host" in second[0][1]


@pytest.mark.long
def test_nixl_that_cannot_be_loaded_is_one_cause_and_one_worker(tmp_path: Path) -> None:
    """The bandwidth suite alone: no infrastructure check ends the run before its rows."""
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text('raise ImportError("it is broken")\n')
    done = bandwidth(blocks="4KiB,64KiB", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 1
    assert "4 ERROR; 0 rows measured" in done.output
    matches = re.findall(r"NIXL cannot be loaded in rank 0 \(initiator worker, pid (\d+)\): it is broken", done.output)
    assert len(set(matches)) == 1, done.output


@pytest.mark.long
def test_a_nixl_without_its_plugins_is_named_with_where_it_looked(tmp_path: Path) -> None:
    done = run("suites/infrastructure/test_nixl.py", "--nixl-keep-going", env={"NIXL_PLUGIN_DIR": str(tmp_path)})
    missing = "NIXL cannot create an agent: No plugins available for NIXL"
    remedy = f"remedy: unset NIXL_PLUGIN_DIR (now {tmp_path})"
    done.expect(1, f"ERROR nixl-loads: {missing}", f"ERROR backend-loads: {missing}", remedy, never=["Traceback"])
