# SPDX-License-Identifier: Apache-2.0
"""The commands by which workers fill and compare KV caches, and make requests for their blocks."""
