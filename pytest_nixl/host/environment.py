# SPDX-License-Identifier: Apache-2.0
"""Environment variables that influence NIXL or its libraries, without secrets, and the launcher of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nixl.core.redaction import recorded
from pytest_nixl.host.fact import Fact
from pytest_nixl.host.recorded_tree import FactsRoot

_STEERING = re.compile(
    r"(?:UCX|NIXL|NIXLBENCH|XFERBENCH|FI|OFI|RDMAV|IBV|MLX5|EFA|NCCL|GDRCOPY|ETCD|ETCDCTL|ETCD_CPP|PYTEST_NIXL|NVIDIA|CUDA)_\w+|"
    r"VLLM_\w*NIXL\w*|VLLM_ALL2ALL_BACKEND|SGLANG_DISAGGREGATION_\w+|TRTLLM_NIXL_\w+|(?:RAY|MX|DYN_KVBM)_NIXL_\w+|"
    r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF|LD_LIBRARY_PATH|LD_PRELOAD|(?:HTTPS?|ALL|NO|GRPC)_PROXY|(?:https?|all|no|grpc|no_grpc)_proxy|GRPC_\w+"
)
_LAUNCHERS = re.compile(
    r"SLURM_(?:JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NNODES|NODEID|NTASKS|PROCID|LOCALID|STEP_ID|NODELIST)|"
    r"OMPI_COMM_WORLD_(?:RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)|PMI_(?:RANK|SIZE)|PMIX_RANK|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"JOB_COMPLETION_INDEX|LWS_WORKER_INDEX|LWS_GROUP_SIZE|KUBERNETES_SERVICE_HOST|POD_NAME|POD_NAMESPACE|NODE_NAME|HOSTNAME"
)
#: Variables in which deployments name their image; a container does not know its own image.
_IMAGES = ("PYTEST_NIXL_IMAGE", "NIXL_IMAGE", "CONTAINER_IMAGE", "IMAGE")
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True)
class Environment:
    """Environment variables without secrets, and the launcher of this process.

    :param steering: the variables that influence NIXL, UCX, libfabric, CUDA, etcd or the dynamic loader.
    :param launcher: the variables of Slurm, MPI or Kubernetes.
    :param kubernetes: the namespace of the pod.
    :param image: the name of the container image.
    """

    steering: dict[str, str]
    launcher: dict[str, str]
    kubernetes: Fact[str]
    image: Fact[str]

    def get(self, name: str) -> str:
        """Return the value of a variable in :attr:`steering`; empty if it is not set."""
        return self.steering.get(name, "")


def read_environment(root: FactsRoot, environ: Mapping[str, str] = os.environ) -> Environment:
    found = root.ask("environment", lambda: _ask(environ))
    return Environment(
        steering=found.get("steering", {}),
        launcher=found.get("launcher", {}),
        kubernetes=_namespace(root),
        image=_image(root, found.get("image", {})),
    )


def _ask(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    def matching(pattern: re.Pattern[str]) -> dict[str, str]:
        names = sorted(name for name in environ if pattern.fullmatch(name))
        return {name: recorded(name, environ[name]) for name in names}

    image = {name: recorded(name, environ[name]) for name in _IMAGES if environ.get(name)}
    return {"steering": matching(_STEERING), "launcher": matching(_LAUNCHERS), "image": image}


def _namespace(root: FactsRoot) -> Fact[str]:
    text = root.read(_NAMESPACE)
    return Fact(text, _NAMESPACE, "" if text else "this process does not run in a Kubernetes pod")


def _image(root: FactsRoot, named: Mapping[str, str]) -> Fact[str]:
    for name, value in named.items():
        return Fact(value, f"environment {name}")
    match = re.search(r'^image="(.*)"$', root.read("/run/.containerenv") or "", re.MULTILINE)
    if match:
        return Fact(match[1], "/run/.containerenv")
    return Fact(None, f"environment {', '.join(_IMAGES)}", "no variable names the image")
