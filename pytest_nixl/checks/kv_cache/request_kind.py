# SPDX-License-Identifier: Apache-2.0
"""One kind of request for KV blocks: what a test of the suite ``kv_cache`` measures, and the key of its row."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.kv_model import KV_MODELS, KvModel
from pytest_nixl.model.kv_plan import KvPlan, format_tp
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey, Variant


@dataclass(frozen=True)
class KvRequestKind:
    """What one test of the suite measures.

    :param ranks: the ranks of initiator and target.
    :param way: how the blocks lie and how the transfer is made, such as ``scattered-prepped``.
    :param plan: how many blocks of how many bytes.
    :param devices: the GPUs that were requested by number; None: none were, or there is no GPU memory.
    :param requests: the number of requests in flight.
    :param rate: requests that start in each second; None: each starts when one is over.
    :param settings: what else differs from the default and is part of the key: how the agents are created.
    :param agent_options: how the agents are created.
    """

    backend: str
    op: str
    memory: MemoryPair
    ranks: tuple[int, int]
    way: str
    plan: KvPlan
    devices: DevicePair | None = None
    requests: int = 1
    rate: float | None = None
    settings: Variant = ()
    agent_options: AgentOptions = AgentOptions()  # noqa: RUF009 - frozen

    @property
    def key(self) -> RowKey:
        """The key of the row. Its block is what one descriptor moves, and its batch the descriptors of a request."""
        plan = self.plan
        variant = {"kv": self.way, "model": _name(plan.model), "tokens": str(plan.tokens), **dict(self.settings)}
        variant |= {"tp": format_tp(plan.tp)} if plan.tp != (1, 1) else {}
        variant |= {"requests": str(self.requests)} if self.requests != 1 else {}
        variant |= {"rate": f"{self.rate:.9g}"} if self.rate is not None else {}
        return RowKey(
            self.backend, self.op, self.memory, plan.piece_bytes, plan.descriptors, 1, self.ranks, self.devices,
            tuple(sorted(variant.items())),
        )  # fmt: skip

    def __str__(self) -> str:
        ranks = "" if self.ranks == (0, 1) else f"-{self.ranks[0]}:{self.ranks[1]}"
        settings = "".join(f"-{name}={value}" for name, value in self.settings)
        return f"{self.backend}-{self.op}-{self.memory}{ranks}-{self.way}{settings}"


def _name(model: KvModel) -> str:
    """Return a name for a row key: of a ``config.json``, whose path says nothing on another machine, its shape."""
    if KV_MODELS.get(model.name) is model:
        return model.name
    heads = "mla" if model.mla else f"{model.kv_heads}heads"
    return f"{model.layers}layers-{heads}-{model.head_dim}"
