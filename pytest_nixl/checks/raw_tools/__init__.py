# SPDX-License-Identifier: Apache-2.0
"""Raw tools: measure the same transfer without NIXL, by the test programs of UCX and libfabric."""
