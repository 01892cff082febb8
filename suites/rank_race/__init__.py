# SPDX-License-Identifier: Apache-2.0
"""Can two processes get the same rank, in any order of their requests?"""
