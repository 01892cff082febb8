# SPDX-License-Identifier: Apache-2.0
"""Are bytes delivered, correct, over an accepted transport, as fast as the profile says? Which rank is the
culprit? Is the fabric slow, or NIXL?
"""
