# SPDX-License-Identifier: Apache-2.0
"""The frozen values that every layer shares: settings, row keys, samples, verdicts, findings. Imports core."""
