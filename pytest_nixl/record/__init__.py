# SPDX-License-Identifier: Apache-2.0
"""What was measured, and where it is written."""
