# SPDX-License-Identifier: Apache-2.0
"""The shipped manifests, with pods on hosts of a network: green for a healthy subject, and red for a broken one.

Real are kustomize, etcd and NIXL. A kubelet and the controllers cannot be had here: :mod:`helpers.kubelet` starts the
containers, with the labels and the variables that the controllers would add. The image is this machine.
"""

from __future__ import annotations

import os
import shlex
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, environment, eventually
from helpers.kubelet import Given, command_of, container_of, variables_of
from helpers.kustomize import OVERLAYS, built, rank_pod
from helpers.manifests import Manifest, Pod, pods_of
from helpers.namespaces import ENDS_WITH_ALL, Host, Network, network, require_tools
from helpers.shipped_commands import JUDGED
from ranks import Ranks, all_end_with
from servers import ETCD_PORT, keys
from shipped import NOT_TCP, OVER_TCP, SHORT, failures, passed, variables, went_over_tcp

from pytest_nixl.etcd_servers.embedded import etcd_binary

#: A pod on the network of its node has the node's name, and another one its own name.
NODES, PODS = ("node-0", "node-1"), ("nixl-0", "nixl-1")
#: The names that controllers give to rank 0: those of a JobSet and of a LeaderWorkerSet.
FIRST_OF_JOB_SET, FIRST_OF_GROUP = "nixl-rank-0-0.nixl", "nixl-0.nixl.default"
#: What every container gets from its kubelet, and what a pod of a Job gets in addition from the controller.
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
OF_JOB = {"JOB_COMPLETION_INDEX": "{index}"}


@dataclass(frozen=True)
class Controller:
    """What a controller adds to its pods, with ``{index}`` for the number of the pod.

    :param rests: whether its pods do not end, and so keep their exit code until they are deleted.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    rests: bool = False


CONTROLLERS = {
    "indexed-job.yaml": Controller(variables=OF_JOB),
    "jobset.yaml": Controller(variables=OF_JOB),
    "statefulset.yaml": Controller({"apps.kubernetes.io/pod-index": "{index}"}, rests=True),
    "leaderworkerset.yaml": Controller(
        {"leaderworkerset.sigs.k8s.io/worker-index": "{index}"},
        {"LWS_WORKER_INDEX": "{index}", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": FIRST_OF_GROUP},
        rests=True,
    ),
}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two nodes, the networks of two pods, and that of the pod behind the Service of etcd."""
    require_tools()
    folder = tmp_path_factory.mktemp("network")
    with network(folder, *NODES, *PODS, "nixl-etcd") as network_hosts:
        with (folder / "hosts").open("a") as names:
            names.write(f"{network_hosts[NODES[0]].address} {FIRST_OF_JOB_SET} {FIRST_OF_GROUP}\n")
        yield network_hosts


@pytest.fixture(scope="module")
def overlay(net: Network) -> Manifest:
    return built(OVERLAYS / "tcp")


@pytest.fixture(scope="module")
def running_etcd(net: Network, overlay: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The etcd of the overlay, with the program of this Python."""
    folder, host = tmp_path_factory.mktemp("etcd"), net["nixl-etcd"]
    (pod,) = (pod for document in overlay.documents for pod in pods_of(document) if not pod.runs_ranks)
    program = container_of(pod)["command"]
    assert program == ["/usr/local/bin/etcd"]
    program[:] = [etcd_binary()]
    values, log = Given(folder), folder / "etcd.log"
    env = environment(**variables_of(pod, values))
    with host.running(*ENDS_WITH_ALL, *command_of(pod, values), log=log, env=env):
        assert eventually(lambda: host.listens(ETCD_PORT)), log.read_text()
        yield host


@pytest.fixture
def etcd(running_etcd: Host) -> Iterator[Host]:
    """The etcd of the overlay. No key may be left in it."""
    yield running_etcd
    assert keys(running_etcd) == []


def run_pods(
    hosts: Sequence[Host], pod: Pod, controller: Controller, folder: Path, images: Sequence[Mapping[str, str]]
) -> tuple[list[Finished], Path]:
    """Run a pod on each host, and wait until all have ended. Pods that rest are deleted when all do.

    :param images: the variables of the image that each pod gets.
    :returns: how each pod ended, and the folder of the results in their volume.
    """
    uid, pids, results = str(uuid.uuid4()), [], folder
    with Ranks(folder / "pods") as ranks:
        for index, (host, image) in enumerate(zip(hosts, images, strict=True)):
            labels = {"batch.kubernetes.io/controller-uid": uid, **controller.labels}
            added = {**KUBERNETES, **controller.variables}
            values = Given(
                folder / host.name,
                claims={"nixl-results": folder / "volume"},
                secrets={"nixl-group": {"token": "hunter2"}},
                labels={name: value.format(index=index) for name, value in labels.items()},
                variables={**image, **{name: value.format(index=index) for name, value in added.items()}},
            )
            env = variables_of(pod, values)
            results = folder / "volume" / env["RUN"]
            pids.append(ranks.start(host, *ENDS_WITH_ALL, *command_of(pod, values), **env))
        if controller.rests:
            eventually(lambda: all("ended with exit code" in ranks.output(n) for n in range(len(pids))), 600)
            for pid in pids:
                [first] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                os.kill(int(first), signal.SIGTERM)
        done = ranks.finish()
    assert "hunter2" not in "".join(ended.output for ended in done)
    return done, results


class TestTcpOverlay:
    """``deploy/overlays/tcp``."""

    def pod(self, overlay: Manifest) -> Pod:
        """The pod of the Job, of which there is one for each of two hosts, with a short run."""
        pod = rank_pod(Manifest(overlay.name, overlay.text))
        assert pod.owner["spec"]["completions"] == len(PODS)
        container_of(pod)["args"] += SHORT
        return pod

    def test_healthy_pods_pass(self, net: Network, overlay: Manifest, etcd: Host, tmp_path: Path) -> None:
        hosts = [net[name] for name in PODS]
        done, results = run_pods(hosts, self.pod(overlay), Controller(variables=OF_JOB), tmp_path, [variables()] * 2)
        all_end_with(0, done)
        # It warns that the names of Services do not resolve, because a kubelet would write /etc/resolv.conf.
        assert "NIXL gate: PASS, with warnings (" in done[0].output
        passed(results, PODS)

    def test_a_node_with_an_image_without_plugins_fails(
        self, net: Network, overlay: Manifest, etcd: Host, tmp_path: Path
    ) -> None:
        """As if the second node had an older image of the same name."""
        (tmp_path / "none").mkdir()
        hosts, images = [net[name] for name in PODS], [variables(), variables(NIXL_PLUGIN_DIR=str(tmp_path / "none"))]
        done, results = run_pods(hosts, self.pod(overlay), Controller(variables=OF_JOB), tmp_path, images)
        all_end_with(1, done)
        assert failures(results, PODS)["nixl-plugins"]["reason"].startswith("rank 1 on nixl-1: NIXL cannot ")


def pod_of(name: str) -> Pod:
    return rank_pod(Manifest(name, (ROOT / "deploy" / "kubernetes" / name).read_text()))


# Each manifest has a run in which nothing but the row fails. Healthy is one that keeps the exit code. An indexed Job is
# also the pod of the overlay.
@pytest.mark.parametrize(
    ("name", "more", "code"),
    [
        pytest.param("indexed-job.yaml", (NOT_TCP,), 1, marks=pytest.mark.whole),
        ("jobset.yaml", (NOT_TCP,), 1),
        pytest.param("statefulset.yaml", (NOT_TCP,), 1, marks=pytest.mark.whole),
        ("leaderworkerset.yaml", (NOT_TCP,), 1),
        ("statefulset.yaml", (), 0),
    ],
)
def test_a_manifest_of_a_controller(
    net: Network, etcd: Host, tmp_path: Path, name: str, more: tuple[str, ...], code: int
) -> None:
    pod = pod_of(name)
    container_of(pod)["args"] += [*OVER_TCP, *SHORT, *more]
    hosts = [net[name] for name in NODES]
    done, results = run_pods(hosts, pod, CONTROLLERS[name], tmp_path, [variables(UCX_TLS="tcp")] * 2)
    all_end_with(code, done)
    (went_over_tcp if code else passed)(results, NODES)


def test_pods_that_end_have_the_exit_code_of_pytest_and_pods_that_rest_keep_it_by_the_same_script() -> None:
    """So that the exit code of one manifest says how the others end."""
    commands = {name: container_of(pod_of(name))["command"] for name in CONTROLLERS}
    assert commands["indexed-job.yaml"] == commands["jobset.yaml"] == shlex.split(JUDGED)
    assert commands["leaderworkerset.yaml"] == commands["statefulset.yaml"]
