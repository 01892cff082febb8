# SPDX-License-Identifier: Apache-2.0
"""Where the etcd of a run comes from: an existing one, a container, or a process of ours.

Imports processes and below.
"""
