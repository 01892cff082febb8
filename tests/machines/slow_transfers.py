# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for a machine that completes a few transfers of 1 MiB in a second: the faults of transfers."""

from __future__ import annotations

from pytest_nixl.checks.faults import scene, transfers

#: Bytes of a transfer, and seconds without a completed one after which a target that lives counts as silent: a silence
#: is then not the machine's slowness.
scene.REGION, transfers.SILENCE = 1 << 20, 30.0
