# SPDX-License-Identifier: Apache-2.0
"""Are rows as fast as they should be: cold, over several GPUs, and on all ranks together?"""
