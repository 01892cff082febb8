# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl run`` chooses the options of a run by the facts of the host, prints the command and runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment, eventually
from helpers.fake_sysfs import facts_of

from pytest_nixl import cli
from pytest_nixl.cli.run import choose, split
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.recorded_tree import FactsRoot

#: The part of a run that starts no worker: a suite of which nothing is selected, which the gate does not pass.
NOTHING = ("run", "quick", "--backend=UCX", "--suite=uri_validation", "--", "-k", "no_such_test or none")


def ended(*arguments: str, directory: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_nixl.cli", *arguments], cwd=directory, env=environment(**changes),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def printed(output: str) -> str:
    """Return the command that was printed."""
    [line] = [line for line in output.splitlines() if line.startswith("$ ")]
    return line.removeprefix("$ ")


@pytest.fixture(scope="module")
def node() -> Facts:
    """A p5.48xlarge with 8 GPUs and 32 EFA devices."""
    return facts_of("p5.48xl")


def without(node: Facts, *, plugins: tuple[str, ...] = (), devices: bool = True) -> Facts:
    """Return the same host with these plugins of NIXL, and without RDMA devices and GPUs if ``devices`` is false."""
    plain = node.plain()
    plain["software"]["plugins"] = list(plugins)
    if not devices:
        plain["rdma"], plain["gpu"]["gpus"] = [], []
    return Facts.of(plain)


def test_a_node_with_efa_gets_the_gate_over_libfabric_and_its_profile(node: Facts, tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/rdmap79s0").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("p5.48xlarge\n")
    chosen = choose(node, environ={}, root=tmp_path)
    assert str(chosen) == (
        "level standard (8 GPUs and 32 RDMA devices), backend LIBFABRIC (32 EFA devices), "
        "profile p5.48xlarge (this host's product name is p5.48xlarge)"
    )


@pytest.mark.parametrize(
    ("plugins", "devices", "expected"),
    [
        (("UCX",), True, "UCX (this NIXL has no plugin LIBFABRIC)"),
        (("UCX", "LIBFABRIC"), False, "UCX (no EFA device)"),
        (("LIBFABRIC",), False, "LIBFABRIC (this NIXL has no plugin UCX)"),
        ((), True, "LIBFABRIC (32 EFA devices)"),  # NIXL could not be loaded
        ((), False, "UCX (no EFA device)"),
    ],
)
def test_the_backend_follows_from_devices_and_plugins(
    node: Facts, plugins: tuple[str, ...], devices: bool, expected: str, tmp_path: Path
) -> None:
    chosen = choose(without(node, plugins=plugins, devices=devices), environ={}, root=tmp_path)
    assert str(chosen.backend) == expected
    assert chosen.level.value == ("standard" if devices else "quick")


@pytest.mark.parametrize(
    ("models", "profile"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "h100"),
        (["NVIDIA GB200"], "YOURS"),
    ],
)
def test_on_a_host_with_gpus_the_command_for_their_memory_is_named(
    node: Facts, models: list[str], profile: str, tmp_path: Path
) -> None:
    gpus = tuple(replace(node.gpu.gpus[0], name=model) for model in models)
    chosen = choose(replace(node, gpu=replace(node.gpu, gpus=gpus)), environ={}, root=tmp_path)
    expected = f"for GPU memory: pytest-nixl run --profile {profile} --nixl-memory=VRAM:VRAM"
    assert chosen.for_gpu_memory() == f"it measures host memory; {expected}"
    assert choose(without(node, devices=False), environ={}, root=tmp_path).for_gpu_memory() == ""


@pytest.mark.long
def test_the_printed_command_has_the_same_end_as_the_run(tmp_path: Path) -> None:
    done = ended(*NOTHING, "--nixl-report=page.html", directory=tmp_path)
    assert done.stdout.startswith("pytest-nixl run: level quick (given), backend UCX (given), profile loopback (")
    assert printed(done.stdout).endswith(
        "suites/uri_validation --nixl-gate --nixl-level=quick --nixl-backend=UCX --nixl-profile=loopback "
        "-k 'no_such_test or none' --nixl-report=page.html"
    )
    assert done.returncode == 1
    copied = subprocess.run(
        ["/bin/sh", "-c", printed(done.stdout)], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    gate_lines = [line for line in done.stdout.splitlines() if line.startswith("NIXL gate: ")]
    assert gate_lines
    assert copied.returncode == 1
    assert [line for line in copied.stdout.splitlines() if line.startswith("NIXL gate: ")] == gate_lines


@pytest.mark.long
def test_without_arguments_it_ends_in_a_verdict_of_this_host(tmp_path: Path) -> None:
    done = ended("run", "--suite=metadata", "-p", "no:cacheprovider", directory=tmp_path)
    assert re.match(r"pytest-nixl run: level \w+ \(.+\), backend \w+ \(.+\), profile \S+ \(.+\)\n", done.stdout)
    assert re.search(r"^NIXL gate: PASS ", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "\nwrote nixl-report.html\nnext: accept: nothing to do; figures: nixl-report.html; to compare" in done.stdout
    assert done.returncode == 0


QUICK, PAGE = "--nixl-gate --nixl-level=quick --nixl-backend=UCX", "--nixl-report=nixl-report.html"
LOOPBACK, SUITES = "--nixl-profile=loopback", str(ROOT / "suites")


@pytest.mark.parametrize(
    ("arguments", "environ", "command"),
    [
        ("quick --backend=UCX", {}, f"{SUITES} {QUICK} {LOOPBACK} {PAGE}"),
        ("--nixl-level=quick", {"NIXL_BACKEND": "ucx"}, f"{SUITES} {QUICK} {LOOPBACK} {PAGE}"),
        ("--nixl-level=quick --nixl-backend=POSIX --nixl-profile h100", {},
         f"{SUITES} --nixl-gate --nixl-level=quick --nixl-backend=POSIX --nixl-profile=h100 {PAGE}"),
        ("extended --no-gate --backend=ucx,libfabric", {},
         f"{SUITES} --nixl-level=extended --nixl-backend=UCX,LIBFABRIC {LOOPBACK} {PAGE}"),
        ("quick --backend=UCX --suite=metadata --suite=faults --suite=metadata", {},
         f"{SUITES}/metadata {SUITES}/faults {QUICK} {LOOPBACK} {PAGE}"),
        # Several ranks may be on hosts that the default profile does not describe.
        ("quick --backend=UCX --nixl-ranks=1", {}, f"{SUITES} {QUICK} {LOOPBACK} {PAGE} --nixl-ranks=1"),
        ("quick --backend=UCX --nixl-ranks=2", {}, f"{SUITES} {QUICK} {PAGE} --nixl-ranks=2"),
        ("quick --backend=UCX --nixl-ranks 16", {}, f"{SUITES} {QUICK} {PAGE} --nixl-ranks 16"),
        ("quick --backend=UCX --nixl-ranks=2 --profile=loopback", {},
         f"{SUITES} {QUICK} {LOOPBACK} {PAGE} --nixl-ranks=2"),
        # The user names reports.
        ("quick --backend=UCX -- --nixl-report=mine.csv", {}, f"{SUITES} {QUICK} {LOOPBACK} --nixl-report=mine.csv"),
        ("quick --backend=UCX -k 'a b'", {"PYTEST_ADDOPTS": "-q --nixl-report mine.csv"},
         f"{SUITES} {QUICK} {LOOPBACK} -k 'a b'"),
        ("quick --backend=UCX -- --nixl-etcd-user=me:hunter=22 --nixl-group-token hunter33 --my-token=hunter4 "
         "--nixl-etcd=http://me:hunter5@h:2 http://me:hunter6@h --my-text=a=b", {},
         f"{SUITES} {QUICK} {LOOPBACK} {PAGE} '--nixl-etcd-user=***' --nixl-group-token '***' '--my-token=***' "
         "'--nixl-etcd=http://***@h:2' 'http://***@h' --my-text=a=b"),
        ("--as-given -- -k 'a b' --nixl-group-token=hunter22", {}, "-k 'a b' '--nixl-group-token=***'"),
    ],
)  # fmt: skip
def test_the_command_is_printed_whole_and_without_secrets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    environ: dict[str, str],
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # which has no pytest of its own
    monkeypatch.delenv("NIXL_BACKEND", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--print", *shlex.split(arguments)]) == 0
    *remarks, line = capsys.readouterr().out.splitlines()
    assert line == f"$ {tmp_path / 'python'} -m pytest {command}"
    assert [text.partition(" ")[0] for text in remarks] == (
        ([] if "--as-given" in arguments else ["pytest-nixl"]) + (["engines"] if "libfabric" in arguments else [])
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "asked", "choice"),
    [
        ("", {}, True, "level standard (8 GPUs and 32 RDMA devices), backend LIBFABRIC (32 EFA devices), profile"),
        ("--nixl-level=extended", {}, True, "level extended (given), backend LIBFABRIC (32 EFA devices), profile"),
        ("--backend=UCX", {}, True, "level standard (8 GPUs and 32 RDMA devices), backend UCX (given), profile"),
        (
            "",
            {"NIXL_BACKEND": "ucx"},
            True,
            "level standard (8 GPUs and 32 RDMA devices), backend UCX (NIXL_BACKEND), ",
        ),
        (
            "quick",
            {"NIXL_BACKEND": "ucx"},
            False,
            "level quick (given), backend UCX (NIXL_BACKEND), profile loopback (",
        ),
        (
            "quick --backend=UCX --profile=h100",
            {"NIXL_BACKEND": "posix"},
            False,
            "level quick (given), backend UCX (given), profile h100 (given)",
        ),
    ],
)
def test_the_host_is_asked_for_what_is_not_given(
    node: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str,
    environ: dict[str, str], asked: bool, choice: str,
) -> None:  # fmt: skip
    gathered: list[dict[str, object]] = []

    def gather(root: FactsRoot, **how: object) -> Facts:
        gathered.append({"live": root.live, **how})
        return node

    monkeypatch.setattr("pytest_nixl.cli.run.gather", gather)
    monkeypatch.delenv("NIXL_BACKEND", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for more in ((), ("--nixl-memory=VRAM:VRAM",), ("-x", "--nixl-memory", "VRAM:VRAM")):
        assert cli.main(["run", "--print", *arguments.split(), *more]) == 0
        first, *remarks, _ = capsys.readouterr().out.splitlines()
        assert first.startswith(f"pytest-nixl run: {choice}")
        beginnings = ["it measures host memory"] * (asked and not more) + ["engines use UCX"] * ("LIBFABRIC" in choice)
        assert [remark[: len(begin)] for remark, begin in zip(remarks, beginnings, strict=True)] == beginnings
    assert gathered == [{"live": True, "backends": (), "etcd": ""}] * (3 * asked)


def test_no_page_is_overwritten_and_suites_are_named_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for existing in ("nixl-report.html", "nixl-report-2.html"):
        (tmp_path / existing).touch()
    assert cli.main(["run", "quick", "--backend=UCX", "--print"]) == 0
    assert printed(capsys.readouterr().out).endswith("--nixl-report=nixl-report-3.html")
    monkeypatch.chdir(ROOT)
    assert cli.main(["run", "quick", "--backend=UCX", "--print"]) == 0
    assert f" suites {QUICK} " in printed(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("folder", "suites", "arguments"),
    [
        ("/site/pytest_nixl/suites", "", "--pyargs pytest_nixl.suites"),
        ("/site/pytest_nixl/suites", "--suite=faults", "--pyargs pytest_nixl.suites.faults"),
        ("/clone/suites", "--suite=faults --suite=metadata", "/clone/suites/faults /clone/suites/metadata"),
    ],
)
def test_installed_suites_are_named_as_modules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str, suites: str, arguments: str
) -> None:
    monkeypatch.setattr("pytest_nixl.cli.run.suites_folder", lambda: Path(folder))
    assert cli.main(["run", "quick", "--backend=UCX", "--print", *suites.split()]) == 0
    assert f" {arguments} --nixl-gate " in printed(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "ours", "theirs"),
    [
        (["quick", "--nixl-memory=VRAM:VRAM"], ["quick"], ["--nixl-memory=VRAM:VRAM"]),
        (["-k", "quick", "standard"], ["standard"], ["-k", "quick"]),
        (["--nixl-memory=DRAM:DRAM", "quick"], ["quick"], ["--nixl-memory=DRAM:DRAM"]),
        (["-x", "--nixl-backend", "UCX", "--print"], ["--nixl-backend", "UCX", "--print"], ["-x"]),
        (["-x", "quick", "-vv", "-p", "standard"], ["quick"], ["-x", "-vv", "-p", "standard"]),
        (["--nixl-gate", "quick"], ["quick"], ["--nixl-gate"]),
        (["--print", "quick", "--", "mine.py", "--print"], ["--print", "quick"], ["mine.py", "--print"]),
        (["--", "--nixl-backend=UCX", "--backend", "x"], ["--nixl-backend=UCX"], ["--backend", "x"]),
    ],
)
def test_an_option_that_is_not_of_run_goes_to_pytest(arguments: list[str], ours: list[str], theirs: list[str]) -> None:
    assert split(["run", *arguments]) == (["run", *ours], theirs)


def test_without_arguments_the_first_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    named = re.findall(r"^  pytest-nixl (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert named == ["doctor", "run", "connector", "explain", "init"]


@pytest.mark.parametrize(
    ("path", "python", "program"),
    [
        ("other", "python", "python -m pytest"),
        ("links", "python", "python -m pytest"),
        ("links", "other/python", "pytest"),  # a link to the pytest of this Python
        ("nothing", "python", "python -m pytest"),
    ],
)
def test_only_the_pytest_of_this_python_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
    python: str,
    program: str,
) -> None:
    for name in ("other", "links", "nothing"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "pytest").touch(0o755)
    (tmp_path / "links" / "pytest").symlink_to(tmp_path / "other" / "pytest")
    monkeypatch.setattr(sys, "executable", str(tmp_path / python))
    monkeypatch.setenv("PATH", str(tmp_path / path))
    assert cli.main(["run", "quick", "--backend=UCX", "--print"]) == 0
    folder = f"{tmp_path}/" if " " in program else ""
    assert printed(capsys.readouterr().out).startswith(f"{folder}{program} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["quick", "--backend=FOO"],
            "'FOO' is not a supported backend: expected UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB",
        ),
        (["quick", "--profile=nowhere"], "there is no profile 'nowhere': expected "),
        (["quick", "--backend=UCX", "--suite=bandwith"], "'bandwith' is not a suite: expected one of bandwidth, "),
        (["quick", "--nixl-level=standard", "--print"], "two levels are given, quick and standard: expected one"),
        (["quick", "--as-given", "--", "suites"], "--as-given chooses nothing: give the options of pytest after --"),
        *(
            (["--as-given", *more, "--", "suites"], "--as-given chooses nothing: give the options of pytest after --")
            for more in (
                ["--nixl-level=quick"],
                ["--backend=UCX"],
                ["--profile=h100"],
                ["--suite=faults"],
                ["--no-gate"],
            )
        ),
        (["--as-given"], "--as-given needs the arguments of pytest after --"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_package_without_suites_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pytest_nixl.cli.run.check_ids_by_suite", dict)
    assert cli.main(["run", "quick", "--backend=UCX", "--print"]) == 2
    assert "install pytest-nixl whole, or run this command in a clone" in capsys.readouterr().err


#: The line of a program that says with which exit code a run was judged.
ENDS = """echo '{}' > "$PYTEST_NIXL_ENDING" """


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ENDS.format('{"exit_code": 0}'), 0), ("", 1), (ENDS.format("{}"), 1), (ENDS.format("no"), 1),
        (ENDS.format("[]"), 1), (ENDS.format('{"exit_code": 5}'), 1), ("exit 5", 5), ("kill -9 $$", 137),
    ],
    ids=["judged", "not-judged", "no-code", "no-json", "a-list", "another-code", "failed", "killed"],
)  # fmt: skip
def test_as_given_runs_pytest_with_the_arguments_alone_and_demands_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    program = tmp_path / "pytest"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/arguments\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setattr("pytest_nixl.cli.run._pytest", lambda: [str(program)])
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in signals]
    assert cli.main(["run", "--as-given", "--", "-k", "a b", "--nixl-level=quick"]) == code
    assert (tmp_path / "arguments").read_text() == "-k\na b\n--nixl-level=quick\n"
    assert [signal.getsignal(number) for number in signals] == handlers
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("the run ended before it was judged" in printed.err) is (code == 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "conftest",
    [
        "raise SystemExit(0)",
        "import pytest\ndef pytest_configure(): pytest.exit('enough', returncode=0)",
        "import pytest\ndef pytest_sessionstart(): pytest.exit('enough', returncode=0)",
        "import os\ndef pytest_sessionstart(): os._exit(0)",
        "def pytest_unconfigure(): raise SystemExit(0)",
    ],
    ids=["import", "configure", "sessionstart", "os._exit", "unconfigure"],
)
def test_a_run_that_ends_with_0_before_it_was_judged_ends_with_1(tmp_path: Path, conftest: str) -> None:
    (tmp_path / "ends.py").write_text(conftest)
    done = ended(*NOTHING, "-p", "ends", PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert done.returncode == 1
    assert "pytest-nixl run: the run ended before it was judged: pytest ended with exit code 0" in done.stderr


@pytest.mark.long
def test_sigterm_reaches_the_pytest_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time\ndef pytest_runtestloop():\n    os.mkfifo(os.environ['STARTED'])\n    time.sleep(60)\n"
    )
    started = tmp_path / "started"
    arguments = ("run", "quick", "--backend=UCX", "--suite=uri_validation", "--", "-p", "waits")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_nixl.cli", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=environment(PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))), STARTED=str(started)),
    )  # fmt: skip
    assert eventually(started.exists)
    process.terminate()
    output, _ = process.communicate()
    assert "ended by SIGTERM" in output.splitlines()[-1]
    assert process.returncode == 143
