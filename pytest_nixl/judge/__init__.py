# SPDX-License-Identifier: Apache-2.0
"""What measured rows are worth: floors, ceilings, regressions, culprits, and the profiles that say so.

Imports measure and below.
"""
