"""Spans of time, counts and text from outside: the same wherever a person is told something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.text import duration, number, plural, ranges, size, visible


@given(st.text(max_size=20), st.integers(1, 30))
def test_visible_text_is_short_and_acts_on_nothing(text: str, most: int) -> None:
    assert visible(text).isprintable() and visible(visible(text)) == visible(text)
    assert len(visible(text, most)) <= most
    assert visible(text, 400) == visible(text)
    visible(text).encode()


def test_visible_text_that_is_cut_says_so() -> None:
    assert (visible("abcdef", 4), visible("abcd", 4), visible("a\x07b", 4)) == ("abc…", "abcd", "a\\x…")
    assert visible(5) == "5" and visible("a\nb", keep="\n") == "a\nb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (59.9, "1 min"), (80, "1 min 20 s"), (599.4, "9 min 59 s"),
     (599.6, "10 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"),
     (360_000, "4 d 4 h"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_duration_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_of_all_kinds() -> None:
    assert (size(73_509_951), size(9.8e10), size(None), size(True)) == ("73.5 MB", "98 GB", "?", "?")
    assert (plural(1, "step"), plural(2000, "step")) == ("1 step", "2,000 steps")
    assert ranges([(1, 2), (5, 9), (20, 30)], 2) == "1, 5-8 and 1 more range"
    assert (number("nan"), number(None), number(10**400), number(2)) == ("nan", "?", "?", "2.000")
