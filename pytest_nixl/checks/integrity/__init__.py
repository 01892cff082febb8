# SPDX-License-Identifier: Apache-2.0
"""Is every byte of every transfer right, when each transfer has a pattern of its own?"""
