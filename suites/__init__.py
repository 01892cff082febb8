# SPDX-License-Identifier: Apache-2.0
"""The validation itself: plain pytest, one folder per question."""
