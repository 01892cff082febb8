# SPDX-License-Identifier: Apache-2.0
"""Validate that NVIDIA NIXL moves data here, correctly and as fast as it should, and say why where it does not."""
