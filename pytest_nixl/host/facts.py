# SPDX-License-Identifier: Apache-2.0
"""All facts of one host, its environment among them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import InitVar, dataclass, field
from typing import Any

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.core.redaction import HIDDEN, hide_all, hider, recorded
from pytest_nixl.host.devices import GpuNics, Topology
from pytest_nixl.host.etcd import ETCD_VARIABLES, EtcdFacts, read_etcd
from pytest_nixl.host.gpu import DriverQuestions, Gpus, read_gpus
from pytest_nixl.host.image import ImageFacts, read_image
from pytest_nixl.host.network import Network, Nic, ReachedPeer, read_network, read_peers, read_side_channels
from pytest_nixl.host.pci import PciDevice, read_pci
from pytest_nixl.host.plugin_files import PluginsInAdvance, installed_libnixl
from pytest_nixl.host.rdma import RdmaDevice, read_rdma
from pytest_nixl.host.recorded_tree import Fact, FactsRoot
from pytest_nixl.host.software import Software, nixl_worker, read_software
from pytest_nixl.host.system import HostFacts, StorageQueues, read_host, read_storage_queues
from pytest_nixl.model.transfer_proof import TransferProof

_STEERING = re.compile(
    r"(?:UCX|NIXL|NIXLBENCH|XFERBENCH|FI|OFI|RDMAV|IBV|MLX5|EFA|NCCL|GDRCOPY|ETCD|ETCDCTL|ETCD_CPP|PYTEST_NIXL|NVIDIA|CUDA)_\w+|"
    r"VLLM_\w*NIXL\w*|VLLM_ALL2ALL_BACKEND|SGLANG_DISAGGREGATION_\w+|TRTLLM_NIXL_\w+|(?:RAY|MX|DYN_KVBM|LMCACHE)_NIXL_\w+|"
    r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF|LD_LIBRARY_PATH|LD_PRELOAD|(?:HTTPS?|ALL|NO|GRPC)_PROXY|(?:https?|all|no|grpc|no_grpc)_proxy|GRPC_\w+"
)
_LAUNCHERS = re.compile(
    r"SLURM_(?:JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NNODES|NODEID|NTASKS|PROCID|LOCALID|STEP_ID|NODELIST)|"
    r"OMPI_COMM_WORLD_(?:RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)|PMI_(?:RANK|SIZE)|PMIX_RANK|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"JOB_COMPLETION_INDEX|LWS_WORKER_INDEX|LWS_GROUP_SIZE|KUBERNETES_SERVICE_HOST|POD_NAME|POD_NAMESPACE|NODE_NAME|HOSTNAME"
)
#: Variables in which deployments name their image; a container does not know its own image.
_IMAGES = ("PYTEST_NIXL_IMAGE", "NIXL_IMAGE", "CONTAINER_IMAGE", "IMAGE")
_NO_POD = "this process does not run in a Kubernetes pod"
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True)
class Environment:
    """Environment variables, and the launcher of this process. Its fields, which are written, have no secrets.

    :param steering: the variables that influence NIXL, UCX, libfabric, CUDA, etcd or the dynamic loader.
    :param launcher: the variables of Slurm, MPI or Kubernetes.
    :param kubernetes: the namespace of the pod.
    :param image: the name of the container image.
    :param raw: the variables of this process as they are, for :meth:`get`; None for those of another or a recorded one.
    """

    steering: dict[str, str]
    launcher: dict[str, str]
    kubernetes: Fact[str]
    image: Fact[str]
    raw: InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, raw: Mapping[str, str] | None) -> None:
        values = {name: value for name, value in self.steering.items() if value != HIDDEN}
        if raw is not None:
            values |= {name: raw[name] for name in self.steering}
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_hide", None if raw is None else hider(values))

    @property
    def values(self) -> Mapping[str, str]:
        """The variables in :attr:`steering` as they are. A value that was hidden when it was recorded is not there."""
        values: Mapping[str, str] = self._values  # type: ignore[attr-defined]
        return values

    def get(self, name: str) -> str:
        """Return a variable of :attr:`values`; empty if it is not there."""
        return self.values.get(name, "")

    def hide(self, text: str) -> str:
        """Hide in a text what :attr:`steering` hides of the variables."""
        hide: Callable[[str], str] | None = self._hide  # type: ignore[attr-defined]
        if hide is None:
            return text
        for name, value in self.values.items():
            if value != self.steering[name]:
                text = text.replace(f"{name}={value}", f"{name}={self.steering[name]}")
        return hide(text)


def read_environment(root: FactsRoot, environ: Mapping[str, str] = os.environ) -> Environment:
    answer = root.ask("environment", lambda: _ask(environ))
    return Environment(
        steering=answer.get("steering", {}),
        launcher=answer.get("launcher", {}),
        kubernetes=Fact.read(
            root.read(_NAMESPACE) or None, _NAMESPACE, "this process does not run in a Kubernetes pod"
        ),
        image=_image(root, answer.get("image", {})),
        raw=environ if root.live else None,
    )


def read_ucx_files(root: FactsRoot, environ: Mapping[str, str], libraries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the settings in the files ``ucx.conf`` that UCX reads, by file. A variable of the same name wins.

    :param libraries: the paths of the libraries that a process with NIXL has loaded.
    """
    installed = [os.path.dirname(path) for path in libraries if os.path.basename(path).startswith("libucs")]
    folders = [environ.get("UCX_CONFIG_DIR"), environ.get("HOME"), os.curdir, "/etc/ucx"]
    folders += [f"{folder}/../etc/ucx" for folder in installed]

    def ask() -> dict[str, list[str]]:
        files = {os.path.realpath(f"{folder}/ucx.conf") for folder in folders if folder}
        settings = {
            file: re.findall(r"^[ \t]*(UCX_\w+=.*?)[ \t]*$", text, re.MULTILINE)
            for file in sorted(files)
            if (text := FactsRoot().read(file))
        }
        return {file: listed for file, listed in settings.items() if listed}

    return {file: tuple(listed) for file, listed in root.ask("ucx_files", ask).items() if file != "why"}


def _ask(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    def matching(pattern: re.Pattern[str]) -> dict[str, str]:
        names = sorted(name for name in environ if pattern.fullmatch(name))
        return {name: recorded(name, environ[name]) for name in names}

    image = {name: recorded(name, environ[name]) for name in _IMAGES if environ.get(name)}
    return {"steering": matching(_STEERING), "launcher": matching(_LAUNCHERS), "image": image}


def _image(root: FactsRoot, named: Mapping[str, str]) -> Fact[str]:
    for name, value in named.items():
        return Fact(value, f"environment {name}")
    match = re.search(r'^image="(.*)"$', root.read("/run/.containerenv") or "", re.MULTILINE)
    if match:
        return Fact(match[1], "/run/.containerenv")
    return Fact(None, f"environment {', '.join(_IMAGES)}", "no variable names the image")


@dataclass(frozen=True)
class Facts:
    """The facts of one host: hardware, network, software, environment and etcd."""

    host: HostFacts
    network: Network
    rdma: tuple[RdmaDevice, ...]
    pci: tuple[PciDevice, ...]
    gpu: Gpus
    near: tuple[GpuNics, ...]
    software: Software
    image: ImageFacts
    environment: Environment
    etcd: EtcdFacts
    peers: tuple[ReachedPeer, ...]
    side_channels: tuple[ReachedPeer, ...]
    storage_queues: StorageQueues
    #: What came of moving bytes between two workers; empty if that was not tried.
    transfers: tuple[TransferProof, ...] = ()
    #: The settings in UCX's configuration files, as ``NAME=VALUE``, by file.
    ucx_files: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The network interfaces that belong to a device (not bridges, veth pairs or loopback)."""
        return tuple(nic for nic in self.network.nics if not nic.virtual)

    @property
    def efa(self) -> tuple[RdmaDevice, ...]:
        """The RDMA devices that are EFA."""
        return tuple(device for device in self.rdma if device.kind == "efa")

    def plain(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Facts:
        """Restore facts from the values of :meth:`plain`.

        :raises ValueError: the values are not facts of this version.
        """
        return from_plain(cls, plain, exact=True)


def gather(
    root: FactsRoot,
    *,
    backends: Sequence[str] = ("UCX",),
    etcd: str | None = None,
    connect: Callable[[], Any] | None = None,
    nixlbench: str = "",
    peers: Sequence[str] = (),
    side_channels: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """Gather the facts of this machine or of a recorded tree, without secrets.

    :param root: this machine or the recorded tree.
    :param backends: NIXL backends to create in a worker; if empty, NIXL is only loaded.
    :param etcd: etcd's endpoints; None for those in ``environ``; empty to ask no etcd.
    :param connect: returns the client of that etcd; by default one without certificates is created.
    :param nixlbench: the path of nixlbench; empty to search PATH.
    :param peers: hosts that this host must reach, as ``HOST`` or ``HOST:PORT``.
    :param side_channels: engines whose side channel must answer, as ``HOST`` or ``HOST:PORT``.
    :param environ: the environment variables.
    :raises ValueError: a peer cannot be parsed, or a recorded file is damaged.
    """
    source = "given"
    if etcd is None:
        source = next((name for name in ETCD_VARIABLES if environ.get(name)), "")
        etcd = environ.get(source, "") if source else ""
    with (
        closing(DriverQuestions(root)) as questions,
        nixl_worker(root) as worker,
        closing(PluginsInAdvance(environ)) as plugins,
    ):
        # NIXL, its plugins and the GPU driver are loaded while this process reads the rest.
        if worker is not None:
            plugins.start(installed_libnixl())
        rdma, host, network, pci = read_rdma(root), read_host(root), read_network(root), read_pci(root)
        queues, variables = read_storage_queues(root), read_environment(root, environ)
        software = read_software(root, backends, nixlbench, worker=worker, loaded=plugins.start)
        image = read_image(root, software, environ, plugins)
        gpu = read_gpus(root, questions)
    facts = Facts(
        host=host,
        network=network,
        rdma=rdma,
        pci=pci,
        gpu=gpu,
        near=Topology.of(gpu, rdma).nearest(),
        software=software,
        image=image,
        environment=variables,
        etcd=read_etcd(root, etcd, source, connect),
        peers=read_peers(root, peers),
        side_channels=read_side_channels(root, side_channels),
        storage_queues=queues,
        ucx_files=read_ucx_files(root, environ, [library.path for library in software.libraries]),
    )
    # Each reader hides the secrets that it knows; this hides secrets that came another way, such as in a message.
    return Facts.of(hide_all(facts.plain(), hider(environ)))
