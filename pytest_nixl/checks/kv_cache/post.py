# SPDX-License-Identifier: Apache-2.0
"""The check ``kv-post-scaling``: the time to post a request grows with its descriptors, and not faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

from pytest_nixl.checks.kv_cache.blocks import KvLayout
from pytest_nixl.checks.kv_cache.link import KvLink, KvTraffic
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.memory import HOST
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import Host

#: The numbers of descriptors that are posted.
COUNTS = (1, 100, 10_000)
#: How many times as long the post of one descriptor may take if a request has a hundred times as many. A post whose
#: time grows with the square of their number takes a hundred times as long for each.
MOST_GROWTH = 5.0
#: The least number of requests. The fastest post of them counts, because other processes can only make a post slower.
_REQUESTS = 20
#: A cache with twice as many blocks as the largest request. The blocks are small, so that few bytes are copied.
_LAYOUT = KvLayout(tensors=1, blocks=2 * max(COUNTS), block_bytes=64, per_layer=1)


@dataclass(frozen=True)
class PostTimes:
    """The posts of requests over one link.

    :param seconds: the fastest post, by the number of its descriptors.
    :param contention: the largest contention: the CPU cores that the requests needed and other processes used.
    """

    seconds: Mapping[int, float]
    contention: float


def measure_posts(hosts: Sequence[Host], settings: Settings, backend: str, op: str) -> PostTimes:
    """Time posts of each of :data:`COUNTS` descriptors.

    :param hosts: those of the initiator and of the target.
    :raises WorkerError: a worker fails.
    """
    launch = Launch((hosts[0], hosts[1]), settings, BACKENDS[backend], HOST, _LAYOUT.size)
    with closing(launch):
        link = KvLink(launch, _LAYOUT, op, settings.timeout)
        measured = {
            count: link.measure(KvTraffic(count, merge=False), duration=0.0, least=_REQUESTS) for count in COUNTS
        }
    return PostTimes(
        {count: samples.step("post", 0) for count, samples in measured.items()},
        max(max(samples.contention) for samples in measured.values()),
    )


def judge_posts(posts: Mapping[str, PostTimes]) -> Judgement:
    """Judge whether the post of one descriptor takes longer if there are more of them.

    With contention the verdict is not FAIL, because a long post is interrupted more often than a short one.

    :param posts: the posts by backend and operation in words.
    """
    wrong = {name: _grown(post.seconds) for name, post in posts.items() if _grown(post.seconds)}
    grown = [f"{name}: {growth}" for name, growth in wrong.items()]
    contention = max((posts[name].contention for name in wrong), default=0.0)
    if contention > DISTURBED_CORES:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{'; '.join(grown)}, but other processes used {contention:.1f} of the cores that the requests needed",
            "Stop other processes on the machine and run the check again.",
        )
    if grown:
        return Judgement(
            Verdict.FAIL,
            f"{'; '.join(grown)}; the limit is {MOST_GROWTH:g} times",
            "Report it at https://github.com/ai-dynamo/nixl/issues with NIXL's release and the backend; until it is "
            "fixed, let the engine use larger blocks, such as vllm serve --block-size=64.",
        )
    return Judgement(
        Verdict.PASS, "; ".join(f"{name}: post of {_listed(post.seconds.items())}" for name, post in posts.items())
    )


def _grown(seconds_by_count: Mapping[int, float]) -> str:
    """Return where the post of one descriptor takes too much longer; empty: nowhere."""
    costs = {count: seconds / count for count, seconds in seconds_by_count.items()}
    for less, more in pairwise(sorted(costs)):
        if costs[more] > MOST_GROWTH * costs[less]:
            times = costs[more] / costs[less]
            return (
                f"in a post of {more} descriptors each takes {_us(costs[more])} us, {times:.1f} times as long as the "
                f"{_us(costs[less])} us in a post of {less}"
            )
    return ""


def _listed(seconds_by_count: Iterable[tuple[int, float]]) -> str:
    return ", ".join(f"{count} in {_us(seconds)} us" for count, seconds in seconds_by_count)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"
