# SPDX-License-Identifier: Apache-2.0
"""Typed facts of a host, each with its source, read from this machine or from a recorded tree."""
