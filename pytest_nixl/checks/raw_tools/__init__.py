# SPDX-License-Identifier: Apache-2.0
"""The same bytes over the same path without NIXL: by the test programs of UCX and libfabric themselves."""
