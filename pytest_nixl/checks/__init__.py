# SPDX-License-Identifier: Apache-2.0
"""Questions too large for the lines of one test: one package each. Imports session and below."""
