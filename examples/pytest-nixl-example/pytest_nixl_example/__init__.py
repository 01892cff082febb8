# SPDX-License-Identifier: Apache-2.0
"""One example of each thing that another package can add to pytest-nixl."""
