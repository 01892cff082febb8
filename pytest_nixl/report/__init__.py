# SPDX-License-Identifier: Apache-2.0
"""What people and their tools read: the terminal, the page, tables, metrics, JUnit. Imports checks and below."""
