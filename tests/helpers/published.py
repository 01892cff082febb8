# SPDX-License-Identifier: Apache-2.0
"""Write keys into a real etcd as agents of NIXL and processes of nixlbench do, in the same order."""

from __future__ import annotations

from pytest_nixl.etcd.client import EtcdClient, Lease

DEFAULT, DOCUMENTED = "/nixl/agents/", "/nixl/agents"


def field(tag: bytes, value: bytes) -> bytes:
    """Return a field of NIXL's metadata."""
    return tag + len(value).to_bytes(8, "little") + value + b"|"


def metadata(agent: str, backend: str = "UCX", info: bytes = b"\x00\xff" * 100) -> bytes:
    """Return the beginning of metadata as NIXL 1.5.1 writes it, with one backend and no memory."""
    count = (1).to_bytes(8, "little")
    parts = [field(b"Agent", agent.encode(errors="surrogateescape")), field(b"Conns", count)]
    return b"".join([b"nixlSerDes|", *parts, field(b"t", backend.encode()), field(b"c", info),
                     field(b"", b"MemSection")])  # fmt: skip


def publish(
    client: EtcdClient, name: str, namespace: str = DEFAULT, *, label: str = "metadata", value: bytes | None = None
) -> None:
    """Write the keys of an agent: the anchor when it is created, then its metadata."""
    client.put(f"{namespace}/{name}/", b"")
    client.put(f"{namespace}/{name}/{label}", metadata(name) if value is None else value)


def bench_rank(client: EtcdClient, group: str, rank: int, seconds: int = 300) -> Lease:
    """Register a rank of nixlbench: its rank key with a lease, then the number of ranks without one."""
    lease = client.lease(seconds)
    client.put(f"xferbench/{group}//rank/{rank}", b"active", lease)
    client.put(f"xferbench/{group}//size", str(rank + 1).encode())
    return lease
