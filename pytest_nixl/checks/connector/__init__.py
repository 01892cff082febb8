# SPDX-License-Identifier: Apache-2.0
"""Compare the configuration of a prefill and a decode engine: vLLM, SGLang, or either of them under Dynamo."""
