# SPDX-License-Identifier: Apache-2.0
"""What workers do for the flows of a traffic pattern."""
