# SPDX-License-Identifier: Apache-2.0
"""Child processes: the supervisor that cleans up after them, and workers as pytest sees them.

Imports etcd and below.
"""
