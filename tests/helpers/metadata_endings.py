# SPDX-License-Identifier: Apache-2.0
"""How checks of the suite ``metadata`` end, with whole sentences: by what a doubled NIXL does wrong."""

from __future__ import annotations


def differ(owner: str) -> str:
    return (
        f"AssertionError: the bytes at {owner} differ from those that were sent: {{'wrong_bytes': 65536, 'offset': 0}}"
    )


def late(description: str, remedy: str = "") -> str:
    return f"LateError: waited 30 s for {description}" + (f"\nremedy: {remedy}" if remedy else "")


def unpublished(key: str, written: str = "nothing", worker: str = "worker 1") -> str:
    description = f"{worker} to publish its metadata under {key}: NIXL reported no error to Python"
    return late(description, f"read what NIXL wrote: {written}")


def unloaded(worker: str, owner: str, key: str, written: str) -> str:
    remedy = "compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both agents, including slashes"
    description = f"{worker} to load the metadata of {owner} that is in etcd under {key}"
    return late(description, f"{remedy}; what NIXL wrote last: {written}")


def unwritten(writer: str, owner: str, remedy: str) -> str:
    description = f"a WRITE of 65536 bytes from {writer} to {owner}, and its notification there"
    return late(description, f"check whether the two hosts reach each other: {remedy}")


def unforgotten(worker: str, owner: str) -> str:
    return late(
        f"{worker} to forget {owner}, which removed its metadata from etcd",
        "check whether its watch reaches etcd (a proxy may end idle streams); as a workaround call "
        "remove_remote_agent; what NIXL wrote last: nothing",
    )


def unremoved(anchor: str, worker: str = "worker 1") -> str:
    return late(f"etcd to have no key under {anchor}, which {worker} removed", "read what NIXL wrote: nothing")


def unwatched(worker: str, key: str, purpose: str) -> str:
    return late(f"{worker} to watch {key}, {purpose}")


REACH = "check whether 127.0.0.1:4001 can be reached; NIXL wrote: "
MUTE, DEAF = "E0101 Failed to store metadata in etcd", "E0101 etcd: cannot fetch publisher"
STALE = (
    "NIXL-ETCD-STALE-KEY {}: the metadata of {} is still in etcd without a lease; an agent that fetches that of the "
    "killed agent {}"
)
REFUSED = (
    "NIXL-ETCD-RESTART-REFUSED occurs: after a second fetch the finder still had the dead agent, and reached the new "
    "one only after remove_remote_agent: {}"
)
