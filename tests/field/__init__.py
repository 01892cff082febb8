# SPDX-License-Identifier: Apache-2.0
"""Lines of logs with their right answers."""
