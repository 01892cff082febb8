# SPDX-License-Identifier: Apache-2.0
"""What workers do for requests of KV blocks."""
