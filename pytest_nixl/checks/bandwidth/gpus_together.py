# SPDX-License-Identifier: Apache-2.0
"""The check ``gpus-together``: how much do several GPUs of a rank transfer at the same time?"""

from __future__ import annotations

import os
from dataclasses import replace

from pytest_nixl.checks.bandwidth.gpu_judge import GpuEnd, measure_gpus, pairs_of, seats
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.cuda_visible import visible
from pytest_nixl.host.devices import UCX_CARDS, HostDevices
from pytest_nixl.host.gpu import read_gpus
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, most_severe
from pytest_nixl.nixl.gpus import gpus
from pytest_nixl.processes.worker_process import Worker
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run


def judge_gpus_together(run: Run, settings: Settings, cluster: Cluster, pairs: Launches, profile: Profile) -> Judgement:
    """Let all GPUs transfer at the same time, each with its nearest network cards, and judge whether one starves.

    :raises NotApplicableError: no GPU memory is requested, or an end has fewer than two GPUs.
    """
    kinds = {(link.backend, link.op, link.memory): None for link in run.links if "VRAM" in str(link.memory)}
    if not kinds:
        raise NotApplicableError("no GPU memory is requested: --nixl-memory has no VRAM")
    block, depth = max(settings.blocks), max(settings.depth)
    scaling = profile.machine.scaling if profile.machine is not None else None
    judgements: list[Judgement] = []
    for backend, op, memory in kinds:
        *ends, one_host = _seats(cluster, settings, memory)
        devices = pairs_of(len(ends[0]), len(ends[1]), one_host=one_host)
        if len(devices) < 2:
            raise NotApplicableError(_few(min(ends, key=len)))
        # Cards in UCX_NET_DEVICES are used as given. LIBFABRIC itself chooses cards by their position on the PCI bus.
        named = backend != "UCX" or UCX_CARDS in os.environ
        variables = [({}, {}) if named else (ends[0][pair.initiator].variables(), ends[1][pair.target].variables())
                     for pair in devices]  # fmt: skip
        links = pairs.between_devices(backend, op, memory, devices, variables=variables)
        seated = [(ends[0][pair.initiator], ends[1][pair.target]) for pair in devices]
        judgements.append(measure_gpus(f"{backend} {op} {memory}", links, seated, block, depth, scaling))
    return replace(most_severe(judgements), reason="; ".join(judgement.reason for judgement in judgements))


def _seats(cluster: Cluster, settings: Settings, memory: MemoryPair) -> tuple[list[GpuEnd], list[GpuEnd], bool]:
    """Return the GPUs with their positions for both ends, and whether both ends are on one host."""
    hosts = [HostDevices.of(plain) for plain in cluster.ask("devices")] or [HostDevices.here()] * 2
    workers: list[Worker] = []
    try:
        for host in cluster.hosts[:2]:
            workers.append(host.start("gpus", {}, settings.timeout, settings.start_timeout))
        one, other = (
            seats(gpus(worker, memory), hosts[worker.rank].gpus, hosts[worker.rank].rdma) for worker in workers
        )
        return one, other, len({worker.versions["host"] for worker in workers}) == 1
    finally:
        for worker in workers:
            worker.kill()


def _few(found: list[GpuEnd]) -> str:
    """Return a sentence about why there are fewer than two GPUs."""
    reason = visible(read_gpus(FactsRoot()).gpus, os.environ).why
    return f"only one GPU is visible, {found[0].gpu.name} {found[0].gpu.pci}, but this check needs two" + (
        f" ({reason})" if reason else ""
    )
