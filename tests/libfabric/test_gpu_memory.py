# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC of NIXL 1.5.0 and GPU memory: over tcp its plugin looks for no GPU, so it offers host memory only.

The driver is the stand-in of ``tests/gpu/driver.c``, and the GPUs on the PCI bus are those of a file of hwloc.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT

from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.session.settings import read_settings

#: A host with one NUMA node, two cores and two H100.
TOPOLOGY = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" {both} complete_{both} allowed_{both} {node} complete_{node} allowed_{node}>
    <object type="NUMANode" os_index="0" {both} complete_{both} {node} complete_{node} local_memory="1073741824"/>
    <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1" {node} complete_{node}/>
    <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2" {node} complete_{node}/>
    <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[00-ff]">
      <object type="PCIDev" pci_busid="0000:1a:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1" pci_link_speed="63.0"/>
      <object type="PCIDev" pci_busid="0000:1b:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1" pci_link_speed="63.0"/>
    </object>
  </object>
</topology>
"""


def test_gpu_memory_cannot_be_registered_over_tcp(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    topology = tmp_path / "topology.xml"
    topology.write_text(TOPOLOGY.format(both='cpuset="0x3"', node='nodeset="0x1"'))
    driver = gpu_standin.build(tmp_path, bindings=False)
    variables = {**driver, "HWLOC_XMLFILE": str(topology), "HWLOC_THISSYSTEM": "1", "PYTHONPATH": str(ROOT / "tests"),
            "NIXL_LOG_LEVEL": "DEBUG", "STANDIN_DMABUF": "1"}  # fmt: skip
    settings = replace(read_settings(pytestconfig, environ={}), backend=("LIBFABRIC",))
    with Agents(LocalHost(supervisor()), settings) as agents:
        agent = agents.start(environment=variables)
        assert agent.get_backend_mem_types("LIBFABRIC") == ["DRAM_SEG"]
        with pytest.raises(NixlError, match="NIXL_ERR_BACKEND"):
            agent.run("helpers.vram_functions:register_by_the_driver", size=4096)
        log = agent.worker.output()
    for expected in (
        "Using simplified topology for tcp devices (no topology mapping needed)",
        "1 NICs, 0 NVIDIA GPUs, 0 AWS accelerators",
        "No accelerator runtime, skipping VRAM support",
        "Memory type 1 is not supported by libfabric backend",
    ):
        assert expected in log, log
    calls = {line.split()[0] for line in Path(driver["STANDIN_LOG"]).read_text().splitlines()}
    assert ("allocate" in calls, "dma-buf" in calls) == (True, False)


def test_topology_file_of_hwloc_is_what_the_plugin_reads(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Else the test above would say nothing about GPUs on the PCI bus."""
    broken = tmp_path / "topology.xml"
    broken.write_text("<topology>")
    settings = replace(read_settings(pytestconfig, environ={}), backend=("LIBFABRIC",))
    with Agents(LocalHost(supervisor()), settings) as agents, pytest.raises(WorkerError) as caught:
        agents.start(environment={"HWLOC_XMLFILE": str(broken)})
    assert "Failed to load hwloc topology" in str(caught.value) + caught.value.detail
