# SPDX-License-Identifier: Apache-2.0
"""Profiles, expectations, verdicts: what a measured row is worth."""
