# SPDX-License-Identifier: Apache-2.0
"""If an agent dies, stops or returns while bytes move, or is called wrongly, is that reported in time, and does
the rest go on?
"""
