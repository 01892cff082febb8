# SPDX-License-Identifier: Apache-2.0
"""Secrets in commands and texts are hidden, and a text of any length is read in a time that grows with its length."""

from __future__ import annotations

import shlex

import pytest

from pytest_nixl.core.redaction import HIDDEN, MOST_COMMAND, clean, hide_command, hider, redact, shown


def test_secrets_of_a_command_are_hidden() -> None:
    assert hide_command("env API_TOKEN=abcd UCX_TLS=tcp curl http://me:pw@host/") == (
        "env 'API_TOKEN=***' UCX_TLS=tcp curl 'http://***@host/'"
    )
    assert hide_command("env 'API_TOKEN=abcd") == HIDDEN


def test_the_key_of_an_azure_account_is_hidden_whole_and_alone() -> None:
    told = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=c2VjcmV0IQ==;BlobEndpoint=http://host/me;"
    name = "AZURE_STORAGE_CONNECTION_STRING"
    assert shown(name, told) == HIDDEN
    hide = hider({name: told})
    assert hide(f"it is {told}") == f"it is {HIDDEN}"
    assert hide("the key c2VjcmV0IQ== is wrong") == f"the key {HIDDEN} is wrong"
    assert "c2VjcmV0IQ" not in clean(told)
    assert "AccountName=me" in clean(told)


def test_a_command_that_is_too_long_is_hidden_without_being_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "x" * MOST_COMMAND
    assert hide_command(longest) == longest

    def refuse(_: str) -> list[str]:
        raise AssertionError("a command without a bound was taken apart")

    monkeypatch.setattr(shlex, "split", refuse)
    assert hide_command("env API_TOKEN=abcd " + longest) == HIDDEN


def test_a_long_word_is_searched_once() -> None:
    """With a search that starts again at each character this would take minutes."""
    word = "a" * (256 << 10)
    assert redact(word) == word
    assert redact(f"{word}://me:pw@host").endswith("***@host")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("x@y " + "a://" * 16384, "***@y " + "a://" * 16384),
        (",a:" * 16384 + " x@y", ",a:" * 16384 + " ***@y"),
    ],
    ids=["urls", "users"],
)
def test_many_beginnings_of_urls_are_searched_only_as_far_as_an_at_sign(text: str, hidden: str) -> None:
    # Otherwise each of them takes more than half a minute.
    assert redact(text) == hidden


@pytest.mark.parametrize("length", [1, 64, 65, 500])
def test_the_length_of_a_scheme_does_not_show_a_password(length: int) -> None:
    assert "hunter2" not in redact(f"see {'s' * length}://me:hunter2@host")
    assert "hunter2" not in redact(f"{'s' * length}://me:hunter2@host")
