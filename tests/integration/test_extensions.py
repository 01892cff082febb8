# SPDX-License-Identifier: Apache-2.0
"""Backends, launchers, doctor checks, profiles and report formats of other distributions, found by entry point."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, environment, execute, run, run_command, start

from pytest_nixl import BACKENDS, ExtensionError, LauncherPlacement, NixlAgent, PrivateEtcd, WorkerError, load_profile
from pytest_nixl.checks.doctor.catalogue import checks
from pytest_nixl.cluster.placement import placement_by_launcher
from pytest_nixl.report.files import FORMATS
from pytest_nixl.session.parsers import parse_backends, parse_reports

pytestmark = pytest.mark.long

#: The test that asks the doctor's checks.
MACHINE = "suites/infrastructure/test_machine.py::test_machine"

EXAMPLE = ROOT / "examples" / "pytest-nixl-example"
ROW = "UCX_TCP/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1"

#: Installs a distribution whose one entry point is ``group``, ``name``, and whose only module has this code.
Install = Callable[..., str]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed by pip in a folder of its own."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")  # building writes beside the sources
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(folder / "site"), str(folder / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install small distributions where this process and what it starts find them. Doubles: they have faults."""
    modules = []

    def make(group: str, name: str, code: str, *, distribution: str = "acme-nixl", value: str = "") -> str:
        folder = tmp_path / distribution
        module = f"{distribution.replace('-', '_')}_{tmp_path.name.replace('-', '_')}"
        info = folder / f"{distribution.replace('-', '_')}-2.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[pytest_nixl.{group}]\n{name} = {value or f'{module}:it'}\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        modules.append(module)
        return module

    yield make
    for module in modules:
        sys.modules.pop(module, None)


def test_examples_of_four_kinds_are_used_in_one_run(site: Path, tmp_path: Path, nixl_private_etcd: PrivateEtcd) -> None:
    """Flux's variables place two ranks, whose workers move bytes by the example's backend, judged by its profile."""
    arguments = (
        "--nixl-lease=120s", BANDWIDTH, "--nixl-backend=ucx_tcp", "--nixl-profile=example-site",
        "--nixl-blocks=64KiB", "--nixl-op=WRITE",
        f"--nixl-etcd={nixl_private_etcd.endpoint}", f"--nixl-report={tmp_path / 'rows.md'}",
    )  # fmt: skip
    # Flux sets PMI's variables too: that they are those of nobody shows which launcher was asked first.
    shared = {"FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f5", "PMI_RANK": "0", "PMI_SIZE": "1"}
    logs = [tmp_path / f"rank-{rank}" for rank in range(2)]
    with ExitStack() as started:
        running = []
        for rank, log in enumerate(logs):
            env = {"PYTHONPATH": str(site), "FLUX_TASK_RANK": str(rank), **shared}
            running.append(start(*arguments, log=log, env=env))
            started.callback(running[rank].kill)
        codes = [process.wait(timeout=400) for process in running]
    outputs = [log.read_text() for log in logs]
    assert codes == [0, 0], outputs
    assert "Flux: FLUX_TASK_RANK" in outputs[0]
    written = (tmp_path / "rows.md").read_text()
    assert f"| {ROW} |" in written
    assert "tcp/" in written


def test_infrastructure_suite_asks_the_check_of_the_example(site: Path) -> None:
    done = run(f"{MACHINE}[loopback-is-up]", "-rA", env={"PYTHONPATH": str(site)})
    assert done.code == 0
    assert "NIXL verdict: PASS (1 PASS" in done.output
    assert f"PASSED {MACHINE}[loopback-is-up]" in done.output


def test_infrastructure_suite_without_other_packages_has_no_test_for_them() -> None:
    done = run(MACHINE, "--collect-only", "-q")
    assert f"{MACHINE}[memlock]" in done.output
    assert "loopback-is-up" not in done.output


def test_commands_of_the_pages_run(site: Path, tmp_path: Path) -> None:
    """All but ``pip install``, which :func:`site` has done. Both pages print the same."""
    pages = ROOT / "docs" / "how-to" / "extending.md", EXAMPLE / "README.md"
    blocks = [re.search(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages]
    [printed] = {block[1] for block in blocks if block is not None}
    assert None not in blocks
    install_it, *remainder = [shlex.split(line.removeprefix("$ ")) for line in printed.splitlines()]
    assert install_it[:2] == ["pip", "install"]
    assert ROOT / install_it[-1] == EXAMPLE
    with (tmp_path / "printed").open("w+") as output:
        for arguments in remainder:
            module = ["-m", "pytest_nixl.cli"] if arguments[0] == "pytest-nixl" else []
            options = [argument.replace("rows.md", str(tmp_path / "rows.md")) for argument in arguments[1:]]
            code = execute(
                [sys.executable, *module, *options], cwd=ROOT, env=environment(PYTHONPATH=str(site)), output=output,
                errors=output, timeout=300,
            )  # fmt: skip
            # The doctor may find something wrong with this machine.
            assert code in ((0, 1) if "doctor" in arguments else (0,)), Path(output.name).read_text()
        output.seek(0)
        assert "example-site.toml of pytest-nixl-example 1.0" in output.read()
    assert ROW in (tmp_path / "rows.md").read_text()


def one_sentence(text: str, *parts: str) -> None:
    """Check that a message is one line that names the distribution, what is wrong, and what to do."""
    assert "\n" not in text
    assert text.endswith("(pip uninstall acme-nixl)")
    for part in ("acme-nixl 2.0", *parts):
        assert part in text


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import nowhere_at_all", "cannot be loaded (ModuleNotFoundError: No module named 'nowhere_at_all')"),
        ("it = 3 / 0", "cannot be loaded (ZeroDivisionError: division by zero)"),
        ("", "cannot be loaded (AttributeError: "),
        (
            "it = 3",
            "is no backend: it lacks creating, environment, load, mistaken, transports, NAME, PLUGIN, STORAGE, "
            "COMPLETION_IMPLIES_DELIVERY, SHAKES_HANDS",
        ),
        ("class it:\n    def __init__(self, size): ...", "cannot be made (TypeError: "),
        ("from pytest_nixl import UcxBackend as it", "has another name in its code, NAME = 'UCX'"),
    ],
)
def test_broken_backend_is_refused_in_one_sentence(install: Install, code: str, fault: str) -> None:
    install("backends", "ACME", code)
    with pytest.raises(ExtensionError) as refused:
        parse_backends("acme")
    one_sentence(str(refused.value), "the backend 'ACME' of", fault)


def test_broken_backend_ends_a_run_with_a_usage_error(install: Install) -> None:
    install("backends", "ACME", "import nowhere_at_all")
    done = run(BANDWIDTH, "--nixl-backend=ACME")
    assert done.code == 4
    assert "Traceback" not in done.output
    [line] = [line for line in done.output.splitlines() if "acme-nixl 2.0" in line]
    one_sentence(line, "No module named 'nowhere_at_all'")


def test_unused_extension_is_not_loaded(install: Install) -> None:
    module = install("backends", "ACME", "raise SystemExit")
    assert parse_backends("UCX") == ("UCX",)
    assert "ACME" in BACKENDS
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def it(environ): raise KeyError('ACME_RANK')", "failed (KeyError: 'ACME_RANK')"),
        ("def it(environ): return 3", "returned int instead of LauncherPlacement or None"),
        ("it = 3", "is not a function of the environment"),
    ],
)
def test_broken_launcher_is_refused_in_one_sentence(install: Install, code: str, fault: str) -> None:
    install("launchers", "acme", code)
    with pytest.raises(ExtensionError) as refused:
        placement_by_launcher({})
    one_sentence(str(refused.value), "the launcher 'acme' of", fault)


def test_added_launcher_is_asked_before_ours(install: Install) -> None:
    placement = "LauncherPlacement('Acme', 'ACME_RANK', int(environ['ACME_RANK']), 4)"
    function = f"def it(environ): return {placement} if 'ACME_RANK' in environ else None"
    install("launchers", "acme", f"from pytest_nixl import LauncherPlacement\n{function}")
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert placement_by_launcher({**pmi, "ACME_RANK": "3"}) == LauncherPlacement("Acme", "ACME_RANK", 3, 4)
    assert placement_by_launcher(pmi) == LauncherPlacement("PMI", "PMI_RANK", 1, 2)


COUNT = """
from pytest_nixl import WorkerCommand

def count(objects, text, letter):
    return {"count": text.count(letter) + WRONG}

it = WorkerCommand({"text": str, "letter": str}, {"count": int}, function=f"{__name__}:count")
"""
ANNOTATED = """
def it(objects, text: str, letter: str) -> dict[str, int]:
    return {"count": text.count(letter)}
"""


def test_commands_of_other_packages_are_run_by_a_worker_and_their_arguments_and_answers_are_checked(
    install: Install, nixl_agent: NixlAgent
) -> None:
    install("worker_commands", "acme_count", COUNT.replace("WRONG", "0"))
    install("worker_commands", "acme_annotated", ANNOTATED, distribution="annotated-nixl")
    install("worker_commands", "acme_wrong", COUNT.replace("WRONG", "0.5"), distribution="wrong-nixl")
    install("worker_commands", "acme_none", "it = 3", distribution="none-nixl")
    worker = nixl_agent.another().worker
    for command in ("acme_count", "acme_annotated"):
        assert worker.call(command, text="banana", letter="a") == {"count": 3}
        with pytest.raises(WorkerError, match=f"invalid arguments of '{command}': it has no field 'letter'"):
            worker.call(command, text="banana")
    with pytest.raises(WorkerError, match=r"'acme_none' of none-nixl 2.0 .* is not an annotated function"):
        worker.call("acme_none")
    with pytest.raises(WorkerError, match="acme_wrong"):  # it ends the worker
        worker.call("acme_wrong", text="banana", letter="a")


def test_doctor_asks_checks_of_other_packages_and_one_that_raises_is_unknown(install: Install, site: Path) -> None:
    install(
        "doctor_checks", "acme-check",
        "from pytest_nixl import Check\nit = Check('acme-check', 'Why?', lambda facts, wanted: 1 / 0, image=True)",
    )  # fmt: skip
    done = run_command("doctor", "--json", env={"PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"]])})
    results = {entry["id"]: (entry["verdict"], entry["reason"]) for entry in json.loads(done.stdout)["checks"]}
    verdict, reason = results["loopback-is-up"]
    assert (verdict, "127.0.0.1" in reason) == ("PASS", True)
    verdict, reason = results["acme-check"]
    assert verdict == "UNKNOWN"
    assert "acme-nixl 2.0" in reason
    assert "ZeroDivisionError" in reason


def test_profile_package_without_profiles_is_refused(install: Install) -> None:
    install("profiles", "acme", "", value="json")
    with pytest.raises(ExtensionError) as refused:
        load_profile("loopback")
    one_sentence(str(refused.value), "the directory of profiles 'acme' of", "has no .toml file")


def test_report_format_that_raises_is_named(install: Install, tmp_path: Path) -> None:
    install("report_formats", "acme", "def it(report): return report.nothing")
    assert parse_reports(str(tmp_path / "rows.acme")) == (str(tmp_path / "rows.acme"),)
    with pytest.raises(ExtensionError) as refused:
        FORMATS[".acme"](None)  # type: ignore[arg-type]
    one_sentence(str(refused.value), "the report format '.acme' of", "AttributeError")


@pytest.mark.parametrize(
    ("group", "name", "read", "noun"),
    [
        ("backends", "ucx", lambda: parse_backends("UCX"), "backend 'UCX'"),
        ("launchers", "Slurm", lambda: placement_by_launcher({}), "launcher 'Slurm'"),
        ("doctor_checks", "memlock", checks, "check of the doctor 'memlock'"),
        ("report_formats", "html", lambda: parse_reports("r.html"), "report format '.html'"),
    ],
)
def test_name_of_ours_is_refused_with_both_owners(
    install: Install, group: str, name: str, read: Callable[[], object], noun: str
) -> None:
    install(group, name, "it = None")
    with pytest.raises(ExtensionError) as refused:
        read()
    assert f"pytest-nixl and acme-nixl 2.0 both have a {noun}: " in str(refused.value)


def test_profile_with_a_name_of_ours_is_refused_with_both_owners(install: Install, tmp_path: Path) -> None:
    (tmp_path / "acme-nixl" / "acme_profiles").mkdir(parents=True)
    (tmp_path / "acme-nixl" / "acme_profiles" / "__init__.py").touch()
    (tmp_path / "acme-nixl" / "acme_profiles" / "loopback.toml").touch()
    install("profiles", "acme", "", value="acme_profiles")
    with pytest.raises(ExtensionError) as refused:
        load_profile("loopback")
    sys.modules.pop("acme_profiles", None)
    one_sentence(str(refused.value), "has a profile 'loopback', and so has pytest-nixl")


def test_name_that_two_distributions_have_is_refused_with_both_owners(install: Install) -> None:
    install("backends", "ACME", "")
    install("backends", "acme", "", distribution="other-nixl")
    with pytest.raises(ExtensionError) as refused:
        parse_backends("UCX")
    message = str(refused.value)
    assert "acme-nixl 2.0" in message
    assert "other-nixl 2.0" in message
    assert "backend 'ACME'" in message
