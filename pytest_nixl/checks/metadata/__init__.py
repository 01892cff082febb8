# SPDX-License-Identifier: Apache-2.0
"""Do agents find each other at any number of hops, and with several backends?"""
