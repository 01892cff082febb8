# SPDX-License-Identifier: Apache-2.0
"""The etcd fixtures in real runs of pytest: with xdist, killed, interrupted, and with a server that dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.etcd import (
    ARGUMENTS,
    CONFTEST,
    container_names,
    engine_image,
    mentioning,
    running,
    running_etcd,
    start_pytest,
    wait_until,
)
from helpers.pytester_run import run_pytest

from pytest_nixl import cli
from pytest_nixl.etcd.client import connect

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Return a function that runs pytest on the given test file in a new process."""
    pytester.makeconftest(CONFTEST)

    def run(test: str, *arguments: str, fork: bool = True) -> pytest.RunResult:
        pytester.makepyfile(test_inner=test)
        return run_pytest(pytester, *arguments, plugin=ARGUMENTS, fork=fork)

    return run


EMBEDDED = "--nixl-etcd-server=embedded"


@pytest.mark.long
def test_each_test_gets_a_private_prefix(run: Run) -> None:
    with running_etcd() as etcd, connect([etcd.endpoint]) as client:
        client.put("/pytest-nixl/other", b"stays")
        result = run(
            """
            import pytest
            seen = set()
            @pytest.mark.parametrize("what", ["a b/c", "d"])
            def test_it(nixl_etcd, what):
                assert nixl_etcd.prefix not in seen
                seen.add(nixl_etcd.prefix)
                start, own, random, name, end = nixl_etcd.prefix.split("/")
                assert (start, own, end) == ("", "pytest-nixl", "")
                assert name == "test_it-a-b-c-" if what == "a b/c" else name == "test_it-d-"
                nixl_etcd.client.put(nixl_etcd.prefix + "key", b"1")
                assert nixl_etcd.client.count_prefix("") == 2
                assert nixl_etcd.server.kind == "external"
                assert nixl_etcd.endpoint == nixl_etcd.client.endpoint
            """,
            f"--nixl-etcd={etcd.url}",
        )
        result.assert_outcomes(passed=2)
        assert client.get_prefix("") == {"/pytest-nixl/other": b"stays"}


@pytest.mark.long
def test_one_server_for_the_session(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
        import pathlib
        def test_1(nixl_etcd):
            pathlib.Path("told").write_text(nixl_etcd.server.describe())
            assert nixl_etcd.server.kind == "embedded"
        def test_2(nixl_etcd):
            assert pathlib.Path("told").read_text() == nixl_etcd.server.describe()
        """,
        EMBEDDED,
    )
    result.assert_outcomes(passed=2)
    url = (pytester.path / "told").read_text().rsplit(" ", 1)[1]
    assert not mentioning(url)


def test_no_etcd_is_started_before_a_test_needs_it(run: Run) -> None:
    run(
        """
        import sys
        def test_it(nixl_etcd_server):
            assert not {"docker", "testcontainers", "requests"} & sys.modules.keys()
            from pytest_nixl.processes import supervisor
            assert supervisor._current is None
        """,
        fork=False,
    ).assert_outcomes(passed=1)


@pytest.mark.long
def test_a_dead_server_fails_one_test_and_is_replaced(run: Run) -> None:
    result = run(
        """
        import os, re, signal, time
        def test_kills(nixl_etcd):
            pid = nixl_etcd.server.pid
            os.kill(pid, signal.SIGKILL)
            while nixl_etcd.server.death_reason() is None:
                time.sleep(0.01)
        def test_next(nixl_etcd):
            nixl_etcd.client.put(nixl_etcd.prefix, b"")
        """,
        EMBEDDED,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_kills*",
            "*EtcdError: the etcd of this run has died: embedded etcd *, pid *, at http://*, ended by SIGKILL*",
            "*the last lines of its log:*",
        ]
    )


@pytest.mark.long
def test_a_private_etcd_may_be_stopped_and_killed(run: Run) -> None:
    run(
        """
        import pytest
        from pytest_nixl.etcd.errors import EtcdError
        def test_it(nixl_private_etcd, nixl_etcd):
            assert nixl_private_etcd.endpoint != nixl_etcd.endpoint
            client = nixl_private_etcd.client
            client.put("/x", b"1")
            for end in (nixl_private_etcd.stop, nixl_private_etcd.kill):
                end()
                with pytest.raises(EtcdError, match="connection refused"):
                    client.get("/x")
                nixl_private_etcd.restart()
                assert client.get("/x") == b"1"
            nixl_private_etcd.stop()
        def test_no_leftover(nixl_private_etcd):
            from pytest_nixl.processes.supervisor import supervisor
            assert nixl_private_etcd.client.count_prefix("") == 0
            assert len(list(supervisor().directory.glob("etcd-*.data"))) == 2
        """,
        EMBEDDED,
    ).assert_outcomes(passed=2)


@pytest.mark.long
def test_an_etcd_that_does_not_answer_is_reported_in_one_sentence(run: Run) -> None:
    result = run("def test_it(nixl_etcd): pass", "--nixl-etcd=http://127.0.0.1:9")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*etcd at http://127.0.0.1:9: connection refused, nothing listens there*"])


@pytest.mark.long
def test_each_worker_of_xdist_has_its_own_server(run: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    result = run(
        """
        import json, os, pathlib, time
        import pytest
        @pytest.mark.parametrize("number", range(6))
        def test_it(nixl_etcd, number):
            nixl_etcd.client.put(nixl_etcd.prefix + "x", b"1")
            time.sleep(0.1)
            from pytest_nixl.processes.supervisor import supervisor
            worker = os.environ["PYTEST_XDIST_WORKER"]
            told = [worker, nixl_etcd.server.describe(), str(supervisor().directory), nixl_etcd.prefix]
            pathlib.Path(f"told-{number}").write_text(json.dumps(told))
        """,
        EMBEDDED,
        "-n2",
    )
    result.assert_outcomes(passed=6)
    documents = [json.loads(path.read_text()) for path in pytester.path.glob("told-*")]
    assert len(documents) == 6
    workers, servers, directories, prefixes = map(set, zip(*documents, strict=True))
    assert [len(values) for values in (workers, servers, directories, prefixes)] == [2, 2, 2, 6]
    wait_until(lambda: not any(map(os.path.exists, directories)), 60, "the run directories have gone")
    wait_until(lambda: not any(map(mentioning, directories)), 60, "no process of the run is left")


INNER = """
import json, os, pathlib, time
import pytest
def test_it(nixl_etcd, nixl_private_etcd, tmp_path):
    from pytest_nixl.processes.supervisor import supervisor
    nixl_etcd.client.put(nixl_etcd.prefix + "x", b"1")
    told = dict(pytest=os.getpid(), directory=str(supervisor().directory), prefix=nixl_etcd.prefix,
                supervisor=supervisor().pid,
                etcd=nixl_private_etcd.server.pid, name=getattr(nixl_etcd.server, "name", ""))
    pathlib.Path("told.new").write_text(json.dumps(told))
    pathlib.Path("told.new").rename("told")
    if WAIT:
        for _ in range(3000):  # a signal that arrives before a sleep begins does not end it
            time.sleep(0.1)
"""


@pytest.mark.parametrize("server", ["external", "container", "embedded"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "end"])
def test_nothing_is_left_behind(tmp_path: Path, server: str, how: str) -> None:
    inner = INNER.replace("WAIT", str(how != "end"))
    with running_etcd() as etcd, connect([etcd.endpoint]) as client:
        arguments = {
            "external": lambda: [f"--nixl-etcd={etcd.url}"],
            "container": lambda: ["--nixl-etcd-server=container", f"--nixl-etcd-image={engine_image()}"],
            "embedded": lambda: [EMBEDDED],
        }[server]()
        process = start_pytest(tmp_path, inner, *arguments)
        wait_until(lambda: (tmp_path / "told").exists() or process.poll() is not None, 300, "the test is under way")
        assert (tmp_path / "told").exists(), process.communicate()[0]
        document = json.loads((tmp_path / "told").read_text())
        if how != "end":
            if server == "external":
                assert client.count_prefix(document["prefix"]) == 1
            if server == "container":
                assert document["name"] in container_names()
            assert running(document["etcd"])
            process.send_signal(getattr(signal, how))
        output = process.communicate(timeout=300)[0]
        expected = {"SIGKILL": -signal.SIGKILL, "SIGINT": pytest.ExitCode.INTERRUPTED, "end": pytest.ExitCode.OK}
        assert process.returncode == expected[how], output
        directory = Path(document["directory"])
        wait_until(lambda: not directory.exists(), 60, "the run directory has gone")
        wait_until(lambda: not mentioning(str(directory)), 60, "no process of the run is left")
        assert not running(document["etcd"])
        wait_until(lambda: not running(document["supervisor"]), 60, "the supervisor, which ends last, has gone")
        assert client.count_prefix("/") == 0
        if server == "container":
            assert document["name"] not in container_names()


def test_clean_removes_a_killed_run_with_an_embedded_etcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inner = INNER.replace("WAIT", "True")
    process = start_pytest(tmp_path, inner, EMBEDDED, TMPDIR=str(tmp_path))
    wait_until((tmp_path / "told").exists, 300, "the test is under way")
    document = json.loads((tmp_path / "told").read_text())
    for pid in (document["supervisor"], process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)
    # A supervisor that is still dying holds its directory's lock.
    wait_until(lambda: not running(document["supervisor"]), 60, "the supervisor has ended")
    assert cli.main(["clean"]) == 0
    assert f"removed what a killed run left: {document['directory']}\n" in capsys.readouterr().out
    assert not Path(document["directory"]).exists()


def test_nothing_is_left_behind_by_killed_workers(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    image = engine_image()
    inner = INNER.replace("def test_it(", '@pytest.mark.parametrize("n", range(2))\ndef test_it(n, ')
    inner = inner.replace('"told.new"', 'f"{n}.new"').replace('"told"', 'f"told-{n}"').replace("WAIT", "True")
    process = start_pytest(tmp_path, inner, "-n2", "--nixl-etcd-server=container", f"--nixl-etcd-image={image}")
    wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, 300, "both tests are under way")
    documents = [json.loads(path.read_text()) for path in tmp_path.glob("told-*")]
    assert {run["name"] for run in documents} <= set(container_names())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    directories = [run["directory"] for run in documents]
    wait_until(lambda: not any(map(os.path.exists, directories)), 60, "the run directories have gone")
    assert not {run["name"] for run in documents} & set(container_names())
    wait_until(lambda: not any(map(mentioning, directories)), 60, "no process of the run is left")
