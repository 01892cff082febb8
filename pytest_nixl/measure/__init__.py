# SPDX-License-Identifier: Apache-2.0
"""Links between agents, and how a row is measured over one or several of them. Imports store and below."""
