# SPDX-License-Identifier: Apache-2.0
"""Each pair of files and each page of metrics of ``tests/field`` gets its answer; rules are compared to sources."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from field.engine_source import main, read_source, unread_rules
from field.score_files import HALVES, read_entries, score_page, score_pair

PAIRS = [pair for half in HALVES for pair in read_entries(half, "pair")]
PAGES = [page for half in HALVES for page in read_entries(half, "page")]

#: A piece of vLLM's source that reads what some rules name.
SOURCE = """
    import os

    class EngineArgs:
        block_size: int = 16
        kv_cache_dtype: str = "auto"

    def compute_nixl_compatibility_hash(config):
        return {"model": config.model, "dtype": config.dtype}

    port = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    lease = config.get_from_extra_config("kv_lease_duration", 30)
"""


def name_of(entry: dict[str, Any]) -> str:
    return str(entry["name"])


@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_a_pair_of_files_gets_its_answer(pair: dict[str, Any], tmp_path: Path) -> None:
    score, printed = score_pair(pair, tmp_path)
    assert (score, printed) == ("right", printed)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_of_metrics_gets_its_answers(page: dict[str, Any]) -> None:
    score, printed = score_page(page)
    assert (score, printed) == ("right", printed)


def test_a_line_that_is_too_many_scores_false(tmp_path: Path) -> None:
    wrong = next(pair for pair in PAIRS if pair["expect"] and pair["expect"][0].startswith("FAIL"))
    assert score_pair({**wrong, "expect": []}, tmp_path)[0] == "false"
    right = next(pair for pair in PAIRS if not pair["expect"])
    assert score_pair({**right, "expect": ["FAIL --model"]}, tmp_path)[0] == "silent"


def test_a_rule_that_names_what_the_source_does_not_read_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(textwrap.dedent(SOURCE))
    (tmp_path / "broken.py").write_text("def (")
    source = read_source(tmp_path)
    assert source.extra_keys == {"kv_lease_duration"}
    assert source.hash_factors == {"model", "dtype"}
    unread = {rule.field for rule in unread_rules("vLLM", source)}
    assert {"--block-size", "--kv-cache-dtype", "kv_lease_duration"}.isdisjoint(unread)
    assert {"--revision", "enable_cross_layers_blocks", "VLLM_KV_CACHE_LAYOUT"} <= unread
    assert "enable_cross_layers_blocks" not in {rule.field for rule in unread_rules("vLLM", source, "0.33.0")}
    monkeypatch.setattr("sys.argv", ["engine_source.py", "vLLM", str(tmp_path)])
    assert main() == 1
    assert "NOT READ: --revision" in capsys.readouterr().out
