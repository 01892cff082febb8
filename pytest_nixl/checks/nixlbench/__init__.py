# SPDX-License-Identifier: Apache-2.0
"""What nixlbench prints: read, and judged without running anything."""
