# SPDX-License-Identifier: Apache-2.0
"""Does the object store of a storage backend keep what is written to it?"""
