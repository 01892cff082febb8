# SPDX-License-Identifier: Apache-2.0
"""Checks read the variables as they are. What is written of them, and what a check says, has no secrets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_sysfs import Tree, p5, read_tree

from pytest_nixl.checks.doctor.catalogue import checks
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.core.plain import to_plain
from pytest_nixl.core.redaction import HIDDEN
from pytest_nixl.host.etcd import Name
from pytest_nixl.host.facts import Facts, read_environment
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


@pytest.fixture(scope="module")
def facts(tree: Tree) -> Facts:
    return read_tree(tree)


def judged(facts: Facts, environ: dict[str, str]) -> Judgement:
    """Return the verdict of ``variables-agree`` in a process with these variables."""
    live = replace(facts, environment=read_environment(FactsRoot(), environ))
    return checks()["variables-agree"].judge(live, Requirements(load_profile("p5.48xlarge"), ("UCX",)))


def test_a_text_hides_what_is_hidden_of_the_variables(tree: Tree) -> None:
    variables = {"UCX_OF_TOMORROW": "rc,Sw0rdfish-1", "NIXL_ANY": "x y", "UCX_TLS": "rc,sm"}
    environment = read_environment(FactsRoot(), {**variables, "ETCDCTL_USER": "me:Dogf1sh"})
    text = " ".join(f"{name}={value}" for name, value in variables.items())
    shown = "UCX_OF_TOMORROW=*** NIXL_ANY=*** UCX_TLS=rc,sm; *** token=***"
    assert environment.hide(f"{text}; Dogf1sh token=Sw0rdfish-1") == shown
    assert environment.get("UCX_OF_TOMORROW") == "rc,Sw0rdfish-1"
    assert "Sw0rdfish" not in str(to_plain(environment)) + repr(environment)
    assert read_tree(tree).environment.hide(text) == text


STEERING = """
    UCX_X NIXL_X NIXLBENCH_X XFERBENCH_X FI_X OFI_X RDMAV_X IBV_X MLX5_X EFA_X NCCL_X GDRCOPY_X ETCD_X ETCDCTL_X
    PYTEST_NIXL_X NVIDIA_X CUDA_X SGLANG_DISAGGREGATION_X TRTLLM_NIXL_X RAY_NIXL_X MX_NIXL_X DYN_KVBM_NIXL_X GRPC_X
    LMCACHE_NIXL_X VLLM_NIXL VLLM_X_NIXL_X VLLM_ALL2ALL_BACKEND PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_HIP_ALLOC_CONF
    LD_LIBRARY_PATH LD_PRELOAD HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY GRPC_PROXY http_proxy https_proxy all_proxy
    no_proxy grpc_proxy no_grpc_proxy
"""
LAUNCHERS = """
    SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_PROCID
    SLURM_LOCALID SLURM_STEP_ID SLURM_NODELIST OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK
    OMPI_COMM_WORLD_LOCAL_SIZE PMI_RANK PMI_SIZE PMIX_RANK RANK WORLD_SIZE LOCAL_RANK JOB_COMPLETION_INDEX
    LWS_WORKER_INDEX LWS_GROUP_SIZE KUBERNETES_SERVICE_HOST POD_NAME POD_NAMESPACE NODE_NAME HOSTNAME
"""


def test_variables_are_recorded_by_what_they_concern() -> None:
    steering, launchers = set(STEERING.split()), set(LAUNCHERS.split())
    others = {f"MY_{name}" for name in steering | launchers} | {f"{name}_OLD" for name in launchers}
    environment = read_environment(FactsRoot(), dict.fromkeys((*steering, *launchers, *others, "UCX", "LD_DEBUG"), "1"))
    assert environment.steering.keys() == steering
    assert environment.launcher.keys() == launchers


def test_value_that_was_hidden_in_a_recorded_tree_is_no_value(tree: Tree, tmp_path: Path) -> None:
    recorded = tree.copy(tmp_path / "tree")
    recorded.variable("UCX_OF_TOMORROW", HIDDEN)
    assert read_tree(recorded).environment.get("UCX_OF_TOMORROW") == ""


ETCD_VARIABLE = "NIXL_ETCD_ENDPOINTS"
ETCD, PROXY = "http://etcd.default:2379", "http://proxy:3128"
THROUGH = "{} is set, so NIXL's gRPC connection to etcd goes through that proxy"
NO_PROXY_AT_ALL = (
    "run `export grpc_proxy=` where the ranks start: empty, it means no proxy to gRPC, which NIXL uses for etcd"
)


@pytest.mark.parametrize(
    ("endpoints", "proxies", "proxy", "exempting"),
    [
        # The host of ETCD is 172.20.32.220. The answers are those of the gRPC 1.73 in the wheel of NIXL 1.5.1.
        (ETCD, {"grpc_proxy": PROXY}, "grpc_proxy", "172.20.32.220 no_proxy"),
        (ETCD, {"https_proxy": "HTTP://u:p@proxy:3128/", "http_proxy": PROXY}, "https_proxy", "172.20.32.220 no_proxy"),
        (ETCD, {"http_proxy": PROXY, "https_proxy": ""}, "", ""),
        (ETCD, {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY, "GRPC_PROXY": PROXY}, "", ""),
        (ETCD, {"http_proxy": "https://proxy:3128"}, "", ""),
        *(
            (ETCD, {"http_proxy": PROXY, "no_proxy": exempt}, "http_proxy", "172.20.32.220 no_proxy")
            for exempt in ("a,*", "etcd.default", "172.20.32.22", "10.0.0.0/8")
        ),
        *(
            (ETCD, {"http_proxy": PROXY, "no_proxy": exempt}, "", "")
            for exempt in ("a, 172.20.32.220 ,b", ".32.220", "172.20.99.1/8", "a, ,b")
        ),
        (ETCD, {"http_proxy": PROXY, "no_grpc_proxy": "172.20.32.220", "no_proxy": "b"}, "", ""),
        (ETCD, {"http_proxy": PROXY, "no_grpc_proxy": "", "no_proxy": "172.20.32.220"}, "http_proxy",
         "172.20.32.220 no_grpc_proxy"),
        # An address of IPv6 is compared without brackets and port, as it is written.
        *(
            ("http://[fd00::5]:2379", {"http_proxy": PROXY, "no_proxy": exempt}, "http_proxy", "fd00::5 no_proxy")
            for exempt in ("[fd00::5]", "fd00:0::5", "fd01::/16")
        ),
        *(
            ("http://[FD00::5]:2379", {"http_proxy": PROXY, "no_proxy": exempt}, "", "")
            for exempt in ("::5", "10.0.0.1,fd00::/64")
        ),
        # Of a name without a known address only the name can be compared.
        ("http://root:Sw0rdfish-1@etcd.svc:2379", {"http_proxy": PROXY, "no_proxy": "ETCD.svc"}, "", ""),
        ("http://root:Sw0rdfish-1@etcd.svc:2379", {"http_proxy": PROXY, "no_proxy": "other.svc"}, "http_proxy",
         "etcd.svc no_proxy"),
        # gRPC compares several addresses as one text.
        (f"{ETCD},http://10.0.0.5:2379", {"http_proxy": PROXY, "no_proxy": "172.20.32.220,10.0.0.5"}, "http_proxy", ""),
        (f"{ETCD},http://10.0.0.5:2379", {"http_proxy": PROXY, "no_proxy": "10.0.0.5:2379"}, "", ""),
        ("", {"http_proxy": PROXY}, "", ""),
        ("http://etcd.default", {"http_proxy": PROXY}, "", ""),  # etcd-answers says that the port is missing
    ],
)  # fmt: skip
def test_the_proxy_of_etcd_is_the_one_that_grpc_uses(
    endpoints: str, proxies: dict[str, str], proxy: str, exempting: str, facts: Facts
) -> None:
    judgement = judged(facts, {"NIXL_ETCD_ENDPOINTS": endpoints, **proxies})
    if not proxy:
        assert judgement.verdict is Verdict.PASS, judgement
        return
    address, _, variable = exempting.partition(" ")
    several = "; no_proxy exempts no etcd of several addresses"
    alone = f"; or add etcd's address ({address}) to {variable}, without a port"
    remedy = f"{NO_PROXY_AT_ALL}{alone if address else several}"
    assert judgement == Judgement(Verdict.FAIL, THROUGH.format(proxy), remedy)


def test_the_address_of_etcd_is_the_one_of_ipv4(facts: Facts) -> None:
    """NIXL's client asks for no other."""
    names = (Name("etcd.default", ("fd00::1", "10.0.0.5"), ""),)
    both = replace(facts, etcd=replace(facts.etcd, names=names))
    variables = {ETCD_VARIABLE: ETCD, "http_proxy": PROXY}
    assert "(10.0.0.5) to no_proxy" in judged(both, variables).remedy
    assert judged(both, {**variables, "no_proxy": "10.0.0.5"}).verdict is Verdict.PASS


#: Creates agents of the real NIXL, each with variables of its own.
AGENTS = """
import contextlib, json, os, sys
from nixl._api import nixl_agent, nixl_agent_config
for number, variables in enumerate(json.load(sys.stdin)):
    os.environ.update(variables)
    with contextlib.suppress(Exception):
        nixl_agent(f"a{number}", nixl_agent_config(backends=[]))
    for name in variables:
        del os.environ[name]
os._exit(0)
"""


@contextlib.contextmanager
def listening(host: str) -> Iterator[tuple[int, list[bytes]]]:
    """Listen, and keep what each client sends first; nobody is answered."""
    starts: list[bytes] = []
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        starts.append(client.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], starts
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_real_client_of_nixl_uses_the_proxy_that_the_doctor_names(facts: Facts) -> None:
    proxy, four, six = {"http_proxy": "http://{proxy}"}, "http://127.0.0.1:{etcd}", "http://[::1]:{etcd}"
    exempting = ("*", "127.0.0.1:{etcd}", "127.0.0.1", "127.0.0.0/8")
    cases: list[dict[str, str]] = [
        {ETCD_VARIABLE: four, **proxy},
        *({ETCD_VARIABLE: four, **proxy, "no_proxy": text} for text in exempting),
        *({ETCD_VARIABLE: four, **proxy, name: ""} for name in ("grpc_proxy", "no_grpc_proxy")),
        {ETCD_VARIABLE: four, **proxy, "NO_PROXY": "127.0.0.1"},
        {ETCD_VARIABLE: four, "http_proxy": "{proxy}"},
    ]
    if Path("/proc/net/if_inet6").read_text():  # this host has an IPv6 address
        cases += [{ETCD_VARIABLE: six, **proxy, "no_proxy": text} for text in ("[::1]", "::1", "::/8")]
    with contextlib.ExitStack() as opened:
        port, requests = opened.enter_context(listening("127.0.0.1"))
        hosts = ["::1" if case[ETCD_VARIABLE] == six else "127.0.0.1" for case in cases]
        etcds = [opened.enter_context(listening(host)) for host in hosts]
        filled = [
            {name: text.format(proxy=f"127.0.0.1:{port}", etcd=etcd) for name, text in case.items()}
            for case, (etcd, _) in zip(cases, etcds, strict=True)
        ]
        environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        subprocess.run([sys.executable, "-c", AGENTS], input=json.dumps(filled), env=environ, capture_output=True,
                       text=True, timeout=120, check=True)  # fmt: skip
    used = [[any(b":%d HTTP" % etcd in text for text in requests), bool(starts)] for etcd, starts in etcds]
    doctors = [judged(facts, variables).verdict is Verdict.FAIL for variables in filled]
    assert used == [[through, not through] for through in doctors]


@pytest.mark.parametrize(
    ("variable", "wrong", "right", "does"),
    [
        ("FI_EFA_USE_DEVICE_RDMA", "0 false No OFF", "1 true yes on", "disables EFA's RDMA"),
        ("FI_HMEM_DISABLE_P2P", "1 True yes ON", "0 false no off", "denies network cards access to GPU memory"),
        ("UCX_IB_GPU_DIRECT_RDMA", "n No 0 off", "y yes 1 try", "denies network cards access to GPU memory"),
    ],
)
def test_a_switch_that_contradicts_this_host_is_named(
    variable: str, wrong: str, right: str, does: str, facts: Facts
) -> None:
    for value in wrong.split():
        judgement = Judgement(Verdict.FAIL, f"{variable}={value} {does}", f"unset {variable}")
        assert judged(facts, {variable: value}) == judgement
    assert {judged(facts, {variable: value}).verdict for value in ("", *right.split())} == {Verdict.PASS}


def test_answer_of_a_check_has_no_secret(facts: Facts) -> None:
    first, other = "http://root:Sw0rdfish-1@one:2379", "http://root:Sw0rdfish-1@other:2379"
    judgement = judged(facts, {"NIXL_ETCD_ENDPOINTS": first, "ETCD_ENDPOINTS": other})
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == (
        "NIXL_ETCD_ENDPOINTS=http://***@one:2379 and ETCD_ENDPOINTS=http://***@other:2379 name different servers"
    )
