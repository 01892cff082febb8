# SPDX-License-Identifier: Apache-2.0
"""The worker process that owns NIXL: NIXL, UCX and libfabric are loaded here and nowhere else.

Imports core, model and nixl.backends.
"""
