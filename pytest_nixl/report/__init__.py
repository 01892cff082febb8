# SPDX-License-Identifier: Apache-2.0
"""What people read at the end."""
