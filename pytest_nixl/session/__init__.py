# SPDX-License-Identifier: Apache-2.0
"""One pytest run: its options and settings, its state, its gate, and what it records. Imports cluster and below."""
