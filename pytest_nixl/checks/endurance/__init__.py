# SPDX-License-Identifier: Apache-2.0
"""Does anything grow while an agent repeats the same work?"""
