# SPDX-License-Identifier: Apache-2.0
"""What real agents do with a text of NIXL_ETCD_ENDPOINTS."""
