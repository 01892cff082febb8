# SPDX-License-Identifier: Apache-2.0
"""etcd: where it is, how to reach it, and a server of our own where there is none."""
