# SPDX-License-Identifier: Apache-2.0
"""etcd: parse its address, connect to it, explain its errors, and start a server if the site has none."""
