# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one run: how they register, meet, exchange messages and leave. Imports judge and below."""
