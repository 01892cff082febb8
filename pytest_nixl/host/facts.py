# SPDX-License-Identifier: Apache-2.0
"""All facts of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.host.environment import Environment, read_environment, read_ucx_files
from pytest_nixl.host.etcd import ETCD_VARIABLES, EtcdFacts, read_etcd
from pytest_nixl.host.gpu import DriverQuestions, Gpus, read_gpus
from pytest_nixl.host.gpu_nic_affinity import GpuNics, Topology
from pytest_nixl.host.image import ImageFacts, read_image
from pytest_nixl.host.network import Network, Nic, read_network
from pytest_nixl.host.pci import PciDevice, read_pci
from pytest_nixl.host.peers import ReachedPeer, read_peers, read_side_channels
from pytest_nixl.host.plugin_files import PluginsInAdvance, installed_libnixl
from pytest_nixl.host.rdma import RdmaDevice, read_rdma
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.software import Software, nixl_worker, read_software
from pytest_nixl.host.system import HostFacts, StorageQueues, read_host, read_storage_queues
from pytest_nixl.model.transfer_proof import TransferProof


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
