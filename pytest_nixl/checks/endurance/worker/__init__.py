# SPDX-License-Identifier: Apache-2.0
"""What workers repeat, and what their process holds."""
