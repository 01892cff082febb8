# SPDX-License-Identifier: Apache-2.0
"""What NIXL, nixlbench and pytest-nixl left in the etcd of a deployment, what is wrong with it, and how to remove it.

Keys and values come from other processes: nothing in them is believed, and all of it is printed escaped.
"""
