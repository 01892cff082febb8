# SPDX-License-Identifier: Apache-2.0
"""Whether a way to hand out ranks can hand one out twice: every overlap of its requests is made, none is waited for."""
