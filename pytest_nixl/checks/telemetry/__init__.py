# SPDX-License-Identifier: Apache-2.0
"""NIXL's telemetry: does it count what was moved, is each process measured, and what does a live endpoint say?"""
