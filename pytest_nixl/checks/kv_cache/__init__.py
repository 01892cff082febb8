# SPDX-License-Identifier: Apache-2.0
"""Do requests for KV blocks, made as engines make them, move the right blocks, and how fast?"""
