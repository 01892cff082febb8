# SPDX-License-Identifier: Apache-2.0
"""What workers do around a fault."""
