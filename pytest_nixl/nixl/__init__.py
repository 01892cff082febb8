# SPDX-License-Identifier: Apache-2.0
"""NIXL agents in worker processes, their buffers and GPUs, and how NIXL reads endpoints.

Imports etcd_servers and below.
"""
