# SPDX-License-Identifier: Apache-2.0
"""The table of options, compared with its page in the reference and with what must not be forgotten."""

from __future__ import annotations

from helpers.cli_run import ROOT

from pytest_nixl.model.settings import LEVELS, OPTIONS, REPORT_ENDINGS, SYNC_MODES, Option


def section(option: Option) -> list[str]:
    """Return the lines that the reference has about an option."""
    facts = [
        f"- value: {'none: it is a switch' if option.switch else option.form}",
        f"- default: `{option.default}`" if option.default else "- default: none",
        f"- ini: `nixl_{option.field}`",
    ]
    if option.environment:
        facts.append(f"- environment: {', '.join(f'`{name}`' for name in option.environment)}")
    if option.secret:
        facts.append("- secret: its value is never printed")
    flag = option.flag if option.switch else f"{option.flag}={option.metavar}"
    return [option.flag, f"`{flag}`", f"{option.help}.", *facts]


def test_the_reference_has_each_option_in_order() -> None:
    _, *sections = (ROOT / "docs/reference/options.md").read_text().replace("\\", "").split("\n## ")
    shown = [[line for line in text.splitlines() if line] for text in sections]
    for lines in shown:
        lines[2] = lines[2][0].lower() + lines[2][1:]
    expected = [[line.replace("\\", "") for line in section(option)] for option in OPTIONS]
    assert shown == [[flag, usage, help[0].lower() + help[1:], *facts] for flag, usage, help, *facts in expected]


def test_options_with_a_password_or_without_a_text_are_known() -> None:
    assert [option.field for option in OPTIONS if option.secret] == ["etcd_user", "group_token"]
    assert {option.field for option in OPTIONS if option.hidden} == {
        "etcd", "nixlbench_args", "image", "compare_image", "backend_params"
    }  # fmt: skip
    assert {option.field for option in OPTIONS if option.empty is None} == {
        "ranks", "rank", "pattern", "devices", "footprint", "kv_dtype", "kv_rate", "compare_image", "threads"
    }  # fmt: skip
    assert {option.field for option in OPTIONS if option.empty == ()} == {"nixlbench_args", "report", "backend_params"}
    assert {option.field for option in OPTIONS if option.switch} == {"gate", "keep_going"}
    assert LEVELS == ("quick", "standard", "extended")
    assert (REPORT_ENDINGS, SYNC_MODES) == ((".html", ".csv", ".prom", ".json"), ("auto", "none", "strict", "rw"))
