# SPDX-License-Identifier: Apache-2.0
"""With `--nixl-pattern incast`, `alltoall` or a matrix: what does each flow keep when all run together, and who
slows whom?
"""
