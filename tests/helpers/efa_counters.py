# SPDX-License-Identifier: Apache-2.0
"""The counters of EFA devices before and after a real run between two hosts: ``fixtures/efa-p5``."""

from __future__ import annotations

from pathlib import Path

from pytest_nixl.model.device_counters import Carrier, CarrierBytes, CountedDevice, difference

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "efa-p5"
#: The bytes of all rows of that run. The initiator was node-b.
PAYLOAD = 11_592_663_040


def read_efa_counters(when: str) -> dict[str, CountedDevice]:
    """Return the devices of both hosts, such as ``rdmap79s0 of node-b``.

    :param when: ``before`` or ``after``.
    """
    devices = {}
    for line in (FOLDER / f"efa-counters-{when}.txt").read_text().splitlines():
        name, *counters = line.split()
        if name.startswith("--"):
            node = counters[0].removeprefix("node=")
            continue
        values = {counter: int(value) for counter, value in (pair.split("=") for pair in counters)}
        devices[f"{name} of {node}"] = CountedDevice(f"{name} of {node}", "efa", values)
    return devices


def recorded_run() -> CarrierBytes:
    """Return what the devices counted during that run."""
    moved = difference(read_efa_counters("before"), read_efa_counters("after"))
    devices = (
        Carrier(name, "efa", device.carried("WRITE"), device.packet_bytes("WRITE")) for name, device in moved.items()
    )
    return CarrierBytes(tuple(devices), PAYLOAD)
