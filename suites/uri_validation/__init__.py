# SPDX-License-Identifier: Apache-2.0
"""Can NIXL's C++ client read the etcd endpoints of this deployment?"""
