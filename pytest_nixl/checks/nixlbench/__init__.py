# SPDX-License-Identifier: Apache-2.0
"""nixlbench: run it, watch its processes, read its output, and judge its rows."""
