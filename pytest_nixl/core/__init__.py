# SPDX-License-Identifier: Apache-2.0
"""Errors, units, text and process helpers that know nothing of NIXL. Imports nothing of ours."""
