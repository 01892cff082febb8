# SPDX-License-Identifier: Apache-2.0
"""The check ``bytes-of-every-transfer``: transfers with a pattern each, compared before the next one is posted.

The hot rows of the suite move the same bytes thousands of times, so that a later transfer hides what an earlier one
did wrong. Here nothing hides it. A fault that spoils one copy in ``1 / rate`` is seen with the probability
:func:`detection`.
"""

from __future__ import annotations

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.units import KIB, format_size
from pytest_nixl.measure.link import Link
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS

#: The number of transfers of a link, and at ``--nixl-level=extended``.
TRANSFERS, EXTENDED_TRANSFERS = 200, 5000
#: The larger of the two sizes of transfers in bytes, unless all blocks are smaller. UCX and libfabric move blocks of
#: this size as they move larger ones, and those of the smallest block in other ways.
LARGE_BLOCK = 64 * KIB


def detection(rate: float, transfers: int) -> float:
    """Return the probability that so many transfers show a fault that spoils this share of copies."""
    return 1.0 - (1.0 - rate) ** transfers


def judge_every_transfer(link: Link, settings: Settings) -> Judgement:
    """Move transfers of two sizes, half of them of each, and compare each one.

    :raises NotApplicableError: the target is storage.
    :raises WorkerError: a worker dies or hangs, or NIXL reports an error.
    """
    if BACKENDS[link.backend].STORAGE:
        raise NotApplicableError(
            f"{link.backend} moves bytes to storage, whose rows and checks compare them",
            "give --nixl-backend=UCX or LIBFABRIC, and a --nixl-memory without FILE and OBJ",
        )
    total = EXTENDED_TRANSFERS if settings.extended else TRANSFERS
    sizes = sorted({min(settings.blocks), min(LARGE_BLOCK, max(settings.blocks))})
    for block in sizes:
        corruption = link.move_each(block, total // len(sizes))
        if corruption is not None:
            return Judgement(
                Verdict.CORRUPT,
                f"{link.key(block)}, a pattern for each transfer: {corruption}",
                "Do not trust any transfer over this transport: keep the workers' logs, and run this check again with "
                "--nixl-level=extended over another transport, such as UCX_TLS=tcp,cuda_copy with UCX. If that one is "
                "right, report the first.",
            )
    size_list = " and ".join(map(format_size, sizes))
    return Judgement(Verdict.PASS, f"{total} transfers of {size_list} were compared, each with a pattern of its own")
