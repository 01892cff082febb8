# SPDX-License-Identifier: Apache-2.0
"""The value of UCX_TLS as UCX reads it, and which of its transports can carry NIXL on a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.fake_sysfs import facts_of

from pytest_nixl.host.facts import Facts
from pytest_nixl.host.ucx_rdma import UcxRdma
from pytest_nixl.host.ucx_transports import UcxTransports


def refuses(names: str, offered: str) -> str:
    """Return UCX's sentence about transports that it cannot use."""
    return f"transport{'s' * (',' in names)} {names} not available, please use one or more of: {offered}"


def facts(*said: str, kinds: str = "", gpus: int = 0, offered: dict[str, tuple[str, ...]] | None = None) -> Facts:
    """Return the facts of a host.

    :param said: what UCX said.
    :param kinds: the kind of each of its RDMA devices, which are named by their numbers.
    :param gpus: how many GPUs it has.
    :param offered: the transports that UCX offers for each RDMA device; None: it was not asked.
    """
    p5 = facts_of("p5.48xl")
    backend = p5.software.backend("UCX")
    assert backend is not None
    uses = None if offered is None else UcxRdma("", "", offered, {})
    software = replace(p5.software, backends=(replace(backend, said=said),), ucx_rdma=uses)
    rdma = tuple(replace(p5.rdma[0], name=str(number), kind=kind) for number, kind in enumerate(kinds.split()))
    return replace(p5, software=software, rdma=rdma, gpu=replace(p5.gpu, gpus=p5.gpu.gpus[:gpus]))


NONE = UcxTransports(False, (), frozenset(), False, False, False, frozenset(), frozenset())


@pytest.mark.parametrize(
    ("text", "host", "changes"),
    [
        ("", facts(), {}),
        ("rc,\\ud:aux,,tcp:aux", facts(), {"names": ("rc", "ud", "tcp"), "auxiliary": frozenset({"ud", "tcp"})}),
        ("^rc,\\sm", facts(), {"without": True, "names": ("rc", "sm")}),
        ("", facts(kinds="mlx efa", gpus=1), {"has_rdma": True, "has_gpu": True}),
        ("", facts(kinds="efa efa"), {"has_rdma": True, "efa_only": True}),
        (
            "",
            facts(kinds="efa mlx", offered={}),
            {"has_rdma": True, "unused": ("0", "1")},
        ),
        (
            "",
            facts(kinds="efa mlx", offered={"0": ("srd",), "1": ("rc", "ud")}),
            {"has_rdma": True, "of_devices": frozenset({"srd", "rc", "ud"})},
        ),
        (
            "",
            facts(
                "it is odd",
                refuses("'rc' is", "tcp, sm,self"),
                refuses("'dc','odd' are", "tcp"),
                refuses(" is", "quoted"),
            ),
            {"refused": frozenset({"rc", "dc", "odd"}), "offered": frozenset({"tcp", "sm", "self"})},
        ),
        (
            "",
            facts(refuses("'x' is", "rc")),
            {"refused": frozenset({"x"}), "offered": frozenset({"rc"}), "has_rdma": True},
        ),
    ],
    ids=["nothing", "names", "excluded", "cards and GPUs", "EFA", "unused", "offered", "UCX says", "UCX offers RDMA"],
)
def test_a_value_is_read_as_ucx_reads_it(text: str, host: Facts, changes: dict[str, Any]) -> None:
    assert UcxTransports.of(text, host) == replace(NONE, **changes)


@pytest.mark.parametrize(
    ("text", "host", "strange", "absent", "carriers", "meant"),
    [
        ("tcp,sm,self,all", facts(), [], [], ["tcp", "all"], ""),
        ("rc,cuda,tcp:aux", facts(), [], ["rc", "cuda"], [], ""),
        ("rc,cuda,tcp:aux", facts(kinds="mlx", gpus=1), [], [], ["rc"], ""),
        ("rc,srd,ud,ib", facts(kinds="efa"), [], ["rc"], ["srd", "ud", "ib"], ""),
        ("tcp,odd", facts(refuses("'tcp' is", "odd, sm")), [], ["tcp"], [], ""),
        ("RC_mlx5, tpc,xyz", facts(kinds="mlx"), ["RC_mlx5", " tpc", "xyz"], [], [], " (did you mean rc_mlx5, tcp?)"),
        ("rc,xyzzy", facts(kinds="mlx"), ["xyzzy"], [], ["rc"], ""),
        ("newer", facts(refuses("'x' is", "newest")), ["newer"], [], [],
         " (did you mean newest?)"),
        ("^tcp", facts(), [], [], [], ""),
        ("^sm", facts(), [], [], ["tcp"], ""),
        ("^all", facts(kinds="mlx"), [], [], [], ""),
        ("^ib", facts(kinds="mlx"), [], [], ["tcp"], ""),
        ("^rc,dc,gga,ud_v,tcp", facts(kinds="mlx"), [], [], ["srd", "ud", "ud_mlx5", "ud_verbs", "ud_x"], ""),
    ],
)  # fmt: skip
def test_the_transports_of_a_value_that_can_carry_nixl(
    text: str, host: Facts, strange: list[str], absent: list[str], carriers: list[str], meant: str
) -> None:
    read = UcxTransports.of(text, host)
    assert (read.strange(), read.absent(), read.carriers(), read.meant()) == (strange, absent, carriers, meant)


REMEDY = "correct or unset UCX_TLS; transports that can carry NIXL on this host: "


@pytest.mark.parametrize(
    ("host", "names"),
    [
        (facts(), "tcp"),
        (facts(kinds="mlx", offered={"0": ("ud", "rc", "cma")}), "rc, tcp, ud"),
        (
            facts(refuses("'x' is", "sm, dc, ud, tcp"), offered={"0": ("rc",)}),
            "dc, tcp, ud",
        ),
        (facts(refuses("'x' is", "sm")), "tcp"),
    ],
)
def test_the_remedy_names_what_can_carry_nixl(host: Facts, names: str) -> None:
    assert UcxTransports.of("x", host).remedy() == f"{REMEDY}{names}"


def test_no_device_is_told_from_devices_that_ucx_does_not_use() -> None:
    unused = UcxTransports.of("rc", facts(kinds="mlx efa", offered={}))
    reason = "UCX uses none of this host's RDMA devices (0, 1), and ucx-uses-rdma says why"
    assert unused.without_device(["rc", "ud"]) == reason
    assert unused.without_device(["rc", "cuda"]) == "this host has no device for rc, cuda"
    assert UcxTransports.of("rc", facts()).without_device(["rc"]) == "this host has no device for rc"
