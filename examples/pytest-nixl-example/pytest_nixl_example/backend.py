# SPDX-License-Identifier: Apache-2.0
"""A backend: NIXL's plugin UCX, held to TCP. Runs can then compare UCX's choice of transport with TCP, row by row."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nixl import UcxBackend


class UcxOverTcp(UcxBackend):
    """UCX over TCP. ``NAME`` is what users type, ``PLUGIN`` NIXL's name of its plugin."""

    NAME = "UCX_TCP"
    PLUGIN = "UCX"

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of both workers. Without cuda_copy NIXL refuses UCX on a host with an NVIDIA GPU."""
        return {**super().environment(given), "UCX_TLS": "tcp,cuda_copy"}
