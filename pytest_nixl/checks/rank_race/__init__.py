# SPDX-License-Identifier: Apache-2.0
"""Test whether a rank assignment can give a rank twice, by making claims overlap."""
