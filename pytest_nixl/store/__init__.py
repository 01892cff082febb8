# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: read, written, indexed, and found again as baselines. Imports host and below."""
