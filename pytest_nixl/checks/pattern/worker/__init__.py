# SPDX-License-Identifier: Apache-2.0
"""The commands by which workers move the flows of a traffic pattern."""
