# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a machine, in words: checks that judge facts, for the infrastructure suite and the command."""
