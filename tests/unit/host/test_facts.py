# SPDX-License-Identifier: Apache-2.0
"""Facts are gathered, recorded, read back and compared between ranks, and contain no secret."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, environment
from helpers.cli_run import command as run_command
from helpers.fake_sysfs import Tree, build, p5

from pytest_nixl import cli
from pytest_nixl.checks.doctor.catalogue import checks
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.cli.facts import markdown, near_lines
from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.redaction import hider
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.recorded_tree import ANSWERS_FOLDER, Fact, FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.supervisor import close_supervisor


def separate(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest_nixl.cli", *arguments],
        env=environment(**changes), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def command(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which takes half a second less."""
    out, err, variables = io.StringIO(), io.StringIO(), environment(**changes)
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ).difference(variables):
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(arguments)
            except SystemExit as ended:  # argparse refuses the arguments
                code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


@pytest.fixture(scope="module")
def node(healthy: Tree) -> Facts:
    return gather(FactsRoot(healthy.folder), backends=("UCX",), environ={})


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[FactsRoot, Facts, Path]:
    """Return this machine, its facts, and the tree that was recorded of them."""
    live, folder = FactsRoot(), tmp_path_factory.mktemp("here") / "tree"
    facts = gather(live, environ={})
    close_supervisor()
    live.write(folder, hider({}))
    return live, facts, folder


@pytest.mark.long
def test_recorded_tree_of_this_machine_gives_the_same_facts(here: tuple[FactsRoot, Facts, Path]) -> None:
    live, facts, folder = here
    recorded = FactsRoot(folder)
    assert gather(recorded, environ={}) == facts
    # The recorded tree contains every answer, and only files that facts need.
    assert set(recorded.answers) == set(live.answers)
    places = {path.name for path in folder.iterdir()}
    assert places <= {"etc", "proc", "sys", "opt", "dev", "run", "var", "usr", ANSWERS_FOLDER, ".dockerenv"}
    assert {path.name for path in (folder / "etc").iterdir()} <= {"os-release", "resolv.conf"}


@pytest.mark.long
def test_hand_written_trees_have_the_form_of_a_recorded_tree(
    here: tuple[FactsRoot, Facts, Path], healthy: Tree
) -> None:
    ours, theirs = (
        {path.stem: json.loads(path.read_text()) for path in (folder / ANSWERS_FOLDER).iterdir()}
        for folder in (healthy.folder, here[2])
    )
    assert set(ours) == set(theirs)
    places: list[tuple[Any, ...]] = [("nixl",), ("nixl", "backends", "UCX"), ("image",), ("shm",), ("environment",)]
    of_image: list[tuple[Any, ...]] = [("plugins", 0), ("device_code", 0), ("versions",), ("verbs",)]
    for name, *path in (*places, *(("image", *place) for place in of_image)):
        written, recorded = (reduce(getitem, path, answers[name]) for answers in (ours, theirs))
        assert set(written) == set(recorded), (name, path)


def test_recorded_tree_of_a_host_with_gpus_and_network_cards_keeps_links(
    healthy: Tree, node: Facts, tmp_path: Path
) -> None:
    root = FactsRoot(healthy.folder)
    gather(root, backends=("UCX",), environ={})
    root.write(tmp_path / "again", hider({}))
    assert gather(FactsRoot(tmp_path / "again"), backends=("UCX",), environ={}) == node


def test_facts_survive_json(node: Facts) -> None:
    assert Facts.of(json.loads(json.dumps(node.plain()))) == node


def test_fact_of_another_type_is_refused() -> None:
    assert from_plain(Fact[int], {"value": 3, "source": "a", "why": ""}) == Fact(3, "a")
    with pytest.raises(ValueError, match="expected int or null"):
        from_plain(Fact[int], {"value": "3", "source": "a", "why": ""})


def test_every_fact_names_its_source(node: Facts) -> None:
    def look(value: object, where: str) -> None:
        if isinstance(value, Fact):
            assert value.source, where
            assert (value.value is None) == bool(value.why) or value.value is False, where
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                look(getattr(value, name), f"{where}.{name}")
        elif isinstance(value, tuple):
            for part in value:
                look(part, where)

    look(node, "facts")


def test_the_rate_of_a_device_is_that_of_its_fastest_port(node: Facts) -> None:
    device = node.rdma[0]
    ports = [replace(device.ports[0], rate=rate) for rate in (None, 25e9, 50e9, 12.5e9)]
    assert [replace(device, ports=tuple(ports[:count])).rate for count in range(5)] == [None, None, 25e9, 50e9, 50e9]


def test_only_addresses_that_other_hosts_reach_are_routable(node: Facts) -> None:
    addresses = ("10.0.0.1/16", "127.0.0.1/8", "169.254.1.1/16", "fe80::1/64", "2001:db8::1/64")
    nic = replace(node.nics[0], addresses=addresses)
    assert (nic.routable(), nic.link_local()) == (("10.0.0.1/16",), ("169.254.1.1/16",))


@pytest.mark.parametrize(
    ("topology", "profile", "gpu", "rate"),
    [
        ("p4d.24xl", "p4d.24xlarge", "NVIDIA A100-SXM4-40GB", "100 Gb/sec (4X EDR)"),
        # A p6 has two ConnectX adapters that only manage NVLink, and that a pod is not meant to have.
        ("p6-b200.48xl", "p6-b200.48xlarge", "NVIDIA B200", "400 Gb/sec (4X NDR)"),
        ("g5.48xl", "g5.48xlarge", "NVIDIA A10G", "100 Gb/sec (4X EDR)"),
    ],
)
def test_other_real_topologies_are_judged_by_their_profiles(
    tmp_path: Path, topology: str, profile: str, gpu: str, rate: str
) -> None:
    tree = build(tmp_path / "tree", topology, gpu=gpu, rate=rate)
    facts = gather(FactsRoot(tree.folder), backends=("UCX",), environ={})
    requirements = Requirements(load_profile(profile), ("UCX",))
    judged = {id: check.judge(facts, requirements) for id, check in checks().items()}
    good = (Verdict.PASS, Verdict.NOT_APPLICABLE)
    bad = {id: judgement.reason for id, judgement in judged.items() if judgement.verdict not in good}
    assert bad.keys() == {"engine-backend-fits"}, bad


def test_links_of_folders_loops_and_answers_out_of_a_recorded_tree_are_not_followed(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    for folder in (outside, tree / "etc", tree / ANSWERS_FOLDER):
        folder.mkdir(parents=True)
    for name in ("secret", "nixl.json"):
        (outside / name).write_text("7")
    (tree / "sys").symlink_to(outside)
    (tree / "etc" / "loop").symlink_to("loop")
    (tree / "etc" / "secret").symlink_to(outside / "secret")
    (tree / "etc" / "os-release").symlink_to("loop/../secret")
    (tree / "etc" / "out").symlink_to(outside)
    (tree / "etc" / "folder").symlink_to("loop/../out")
    (tree / ANSWERS_FOLDER / "nixl.json").symlink_to(outside / "nixl.json")
    (tree / ANSWERS_FOLDER / "ucx.json").symlink_to("ucx.json")
    root = FactsRoot(tree)
    for path in ("/sys/secret", "/etc/secret", "/etc/os-release", "/etc/folder/secret"):
        assert root.read(path) is None
    assert [root.entries(path) for path in ("/sys", "/..")] == [(), ()]
    assert not root.exists("/sys/secret")
    assert root.resolve("/etc/secret") is None
    with pytest.raises(ValueError, match="lies outside the recorded tree"):
        root.ask("nixl", dict)
    with pytest.raises(ValueError, match=r"ucx\.json cannot be read"):
        root.ask("ucx", dict)


@pytest.mark.long
def test_command_reports_namespaces_that_differ_in_a_slash(tmp_path: Path) -> None:
    for number, namespace in enumerate(("/nixl/agents", "/nixl/agents/")):
        done = command("facts", f"--record={tmp_path}/{number}", NIXL_ETCD_NAMESPACE=namespace)
        assert done.returncode == 0, done.stderr
    done = command("facts", "--compare", f"{tmp_path}/0", f"{tmp_path}/1")
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if "FAIL: NIXL_ETCD_NAMESPACE" in line]
    assert "rank 0" in line
    assert "slash" in line
    assert command("facts", "--compare", f"{tmp_path}/0", f"{tmp_path}/0").returncode == 0
    assert command("facts", "--compare", f"{tmp_path}/0").returncode == 2
    done = command("facts", "--compare", f"{tmp_path}/0", str(tmp_path))
    assert (done.returncode, "is not a recorded tree" in done.stderr) == (2, True)


# The commands.


def test_doctor_judges_a_recorded_tree(healthy: Tree, tmp_path: Path) -> None:
    good = separate("doctor", f"--root={healthy.folder}", "--profile=p5.48xlarge", "--gate")
    assert good.returncode == 0, good.stdout
    assert re.search(r"^NIXL doctor: PASS \(\d+ PASS, 6 NOT-APPLICABLE\)$", good.stdout, re.MULTILINE), good.stdout
    tree = healthy.copy(tmp_path / "tree")
    tree.write("/sys/class/infiniband/rdmap80s0/ports/1/state", "1: DOWN")
    bad = command("doctor", f"--root={tree.folder}", "--profile=p5.48xlarge")
    assert bad.returncode == 1
    assert re.search(r"^FAIL +rdma-ports +1 of 32 .*rdmap80s0 \(DOWN\)\n +remedy: \w+", bad.stdout, re.M)
    assert "\033[" not in bad.stdout


def test_doctor_prints_colours_only_on_a_terminal(healthy: Tree, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    tree = healthy.copy(tmp_path / "tree")
    tree.write("/sys/class/infiniband/rdmap80s0/ports/1/state", "1: DOWN")
    tree.remove("/dev/gdrdrv")
    options = ("--profile=p5.48xlarge", f"--root={tree.folder}", "-v")
    arguments = [sys.executable, "-m", "pytest_nixl.cli", "doctor", *options]
    with subprocess.Popen(arguments, stdout=theirs, env=environment(TERM="xterm", NO_COLOR=""), cwd=ROOT) as doctor:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
    os.close(ours)
    assert doctor.returncode == 1
    assert "\033[32mPASS            nixl-loads" in shown.decode()
    assert "\033[33mWARN            gdrcopy" in shown.decode()
    assert "\033[31mFAIL            rdma-ports" in shown.decode()
    assert "\033[2mNOT-APPLICABLE  nic-rate" in shown.decode()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("doctor", "--root=/no/such"), "'/no/such'"),
        (("doctor", "--profile=nope"), "'nope'"),
        (("doctor", "--backend=GDS"), "'GDS'"),
        (("doctor", "--peer=a b"), "peer 'a b'"),
        (("doctor", "--side-channel=a:b"), "side channel 'a:b'"),
        (("facts", "--record=/tmp"), "/tmp"),
    ],
)
def test_wrong_argument_is_reported_in_one_sentence(arguments: tuple[str, ...], value: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert value in done.stderr
    assert "Traceback" not in done.stderr


def test_the_template_of_a_node_and_its_nearest_cards_are_printed(healthy: Tree, node: Facts) -> None:
    for option, lines in (("--markdown", markdown(node)), ("--near", near_lines(node))):
        assert command("facts", f"--root={healthy.folder}", option).stdout == "\n".join(lines) + "\n"


# Secrets.

SECRETS = {
    "ETCDCTL_USER": "etcd-root:Sw0rdfish-user",
    "ETCDCTL_PASSWORD": "Sw0rdfish-password",
    "NIXL_ETCD_ENDPOINTS": "http://agent:Sw0rdfish-endpoint@127.0.0.1:1",
    "ETCD_ENDPOINTS": "http://agent:Sw0rdfish%2Dother@127.0.0.1:1,http://u:Sw0rdfish-third@127.0.0.1:2",
    "NIXL_OBJ_SECRET_KEY": "Sw0rdfish-object",
    "UCX_AUTH_TOKEN": "Sw0rdfish-ucx",
    "FI_CXI_AUTH_KEY": "Sw0rdfish-fabric",
    "https_proxy": "http://proxy-user:Sw0rdfish-proxy@proxy:3128",
    "NIXL_IMAGE": "https://puller:Sw0rdfish-image@registry/nixl:1",
    "NIXL_LOG_FILE": "https://bucket/log?X-Amz-Signature=Sw0rdfish-signature",
    "AWS_SECRET_ACCESS_KEY": "Sw0rdfish-aws",
    "LD_LIBRARY_PATH": "/opt/Sw0rdfish-aws/lib",
}


def found_in(text: str) -> list[str]:
    return re.findall(r".{0,60}Sw0rdfish.{0,20}", text)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor",),
        ("doctor", "--json"),
        ("doctor", "--image"),
        ("doctor", "--etcd=http://me:Sw0rdfish-option@127.0.0.1:1"),
        ("doctor", "--etcd=http://me:Sw0rdfish/option@127.0.0.1:1"),
        ("facts",),
        ("facts", "--markdown"),
    ],
    ids=" ".join,
)
def test_no_secret_is_in_what_the_commands_print(arguments: tuple[str, ...]) -> None:
    done = command(*arguments, **SECRETS)
    assert done.returncode in (0, 1), done.stderr
    assert len(done.stdout) > 200
    assert found_in(done.stdout + done.stderr) == []


@pytest.mark.long
def test_no_secret_is_in_a_recorded_tree(tmp_path: Path) -> None:
    done = separate("facts", f"--record={tmp_path}/tree", "--etcd=http://me:Sw0rdfish-option@127.0.0.1:1", **SECRETS)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    assert len(files) > 30
    assert [hit for path in files for hit in found_in(path.read_text())] == []
    assert [path for path in files if "Sw0rdfish" in str(path)] == []
    # The names of the variables and the host of etcd are kept.
    environment = json.loads((tmp_path / "tree" / ANSWERS_FOLDER / "environment.json").read_text())
    assert environment["steering"]["ETCDCTL_PASSWORD"] == "***"
    assert environment["steering"]["NIXL_ETCD_ENDPOINTS"] == "http://***@127.0.0.1:1"


@pytest.mark.long
def test_no_secret_is_in_the_files_of_a_run(tmp_path: Path) -> None:
    out = [f"--junit-xml={tmp_path}/junit.xml", f"--benchmark-json={tmp_path}/benchmark.json"]
    done = subprocess.run(
        run_command("-v", "suites/infrastructure", "--nixl-backend=UCX", "--nixl-etcd-server=embedded",
                    "--nixl-etcd-user=me:Sw0rdfish-typed", *out, quiet=False),
        env=environment(**SECRETS), cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert "NIXL verdict: FAIL" in done.stdout  # the given etcd does not answer, and some variables are unknown
    assert found_in(done.stdout + done.stderr) == []
    assert found_in((tmp_path / "junit.xml").read_text()) == []
    assert not (tmp_path / "benchmark.json").exists() or found_in((tmp_path / "benchmark.json").read_text()) == []
