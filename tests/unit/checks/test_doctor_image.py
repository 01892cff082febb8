# SPDX-License-Identifier: Apache-2.0
"""What a profile may want of an image. ``test_doctor.py`` has what the doctor says of images."""

from __future__ import annotations

import pytest

from pytest_nixl.judge.profiles import parse_profile

HEAD = '[profile]\nname = "image"\n'


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("[image]\nplugins = []", "an empty list"),
        ('[image]\nplugins = "UCX"', "a text, not a list"),
        ('[image]\nplugins = ["U C X"]', "is not a backend name"),
        ('[image]\nplugin = ["UCX"]', "did you mean plugins?"),
        ("image = 3", "not a table"),
        ('[image]\netcd_uri_patch = "yes"', "not a boolean"),
        ('[versions]\nnixel = "1"', "did you mean nixl?"),
        ('[versions]\nnixl = "latest"', "'latest' is neither a version nor a bound"),
        ("[versions]\nnixl = 1.5", "the bare number 1.5, not a text"),
    ],
)
def test_table_that_is_not_valid_is_one_sentence(profile: str, words: str) -> None:
    text = profile + "\n" + HEAD if profile.startswith("image") else HEAD + profile
    with pytest.raises(ValueError) as caught:
        parse_profile(text.encode(), "p.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
