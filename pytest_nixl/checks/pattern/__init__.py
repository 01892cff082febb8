# SPDX-License-Identifier: Apache-2.0
"""Do the flows of a traffic pattern get their share when all run at the same time?"""
