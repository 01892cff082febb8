# SPDX-License-Identifier: Apache-2.0
"""What a loop that stops its clock at DONE claims of LIBFABRIC's WRITE, beside what is delivered.

Run it where LIBFABRIC works, with an interface that is up and is not loopback: see docs/libfabric.md.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from pytest_nixl.keeper import close_keeper, keeper
from pytest_nixl.link import Pairs
from pytest_nixl.record.samples import percentile
from pytest_nixl.settings import MemoryPair, Settings, read_settings

BLOCK = 65536


def main() -> None:
    """Print, for three launches, the median of single WRITEs by DONE and the delivered bandwidth."""
    config = SimpleNamespace(getoption=lambda name, default=None: default, getini=lambda name: None)
    settings: Settings = replace(read_settings(cast(Any, config), environ={}), blocks=(BLOCK,))
    for _ in range(3):
        pairs = Pairs(keeper(), settings)
        samples = pairs.link("LIBFABRIC", "WRITE", MemoryPair("DRAM", "DRAM")).measure(BLOCK)
        fastest, median = samples.latencies[0], percentile(samples.latencies, 50)
        print(
            f"64 KiB WRITE over {'+'.join(samples.transports)}: by DONE {BLOCK / median / 1e9:.2f} GB/s in the median "
            f"({BLOCK / fastest / 1e9:.2f} at best), delivered {samples.bandwidth / 1e9:.2f} GB/s"
        )
        pairs.close()
    close_keeper()


if __name__ == "__main__":
    main()
