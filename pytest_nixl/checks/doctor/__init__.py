# SPDX-License-Identifier: Apache-2.0
"""Checks that judge the facts of a machine, for the infrastructure suite and for ``pytest-nixl doctor``."""
