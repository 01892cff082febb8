# SPDX-License-Identifier: Apache-2.0
"""Does anything grow while agents do the same work for hours: memory, descriptors, threads, regions, keys, time?"""
