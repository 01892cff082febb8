# SPDX-License-Identifier: Apache-2.0
"""The child process that owns NIXL: NIXL, UCX and libfabric are loaded here and nowhere else."""
