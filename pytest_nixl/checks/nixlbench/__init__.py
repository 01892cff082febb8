# SPDX-License-Identifier: Apache-2.0
"""Run nixlbench between two ranks, read what it prints, and judge it."""
