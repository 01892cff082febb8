# SPDX-License-Identifier: Apache-2.0
"""What proves how bytes moved, beside what a backend says of itself."""
