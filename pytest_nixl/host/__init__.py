# SPDX-License-Identifier: Apache-2.0
"""What a host is: typed facts, each with where it was read, from this machine or from a recorded tree of one."""
