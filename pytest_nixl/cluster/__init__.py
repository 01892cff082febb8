# SPDX-License-Identifier: Apache-2.0
"""Several ranks: how they meet."""
