# SPDX-License-Identifier: Apache-2.0
"""Does NIXL's telemetry count what was moved and what failed, and is each process measured?"""
