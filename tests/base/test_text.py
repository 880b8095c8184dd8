"""Spans of time, counts and text from outside: the same wherever a person is told something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.text import count_noun, make_visible, show_duration, show_number, show_ranges, show_size


@given(st.text(max_size=20), st.integers(1, 30))
def test_visible_text_is_short_and_acts_on_nothing(text: str, most: int) -> None:
    assert make_visible(text).isprintable() and make_visible(make_visible(text)) == make_visible(text)
    assert len(make_visible(text, most)) <= most
    assert make_visible(text, 400) == make_visible(text)
    make_visible(text).encode()


def test_visible_text_that_is_cut_says_so() -> None:
    assert (make_visible("abcdef", 4), make_visible("abcd", 4), make_visible("a\x07b", 4)) == (
        "abc…",
        "abcd",
        "a\\x…",
    )
    assert make_visible(5) == "5" and make_visible("a\nb", keep="\n") == "a\nb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (59.9, "1 min"), (80, "1 min 20 s"), (599.4, "9 min 59 s"),
     (599.6, "10 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"),
     (360_000, "4 d 4 h"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_duration_in_words(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_numbers_of_all_kinds() -> None:
    assert (show_size(73_509_951), show_size(9.8e10), show_size(None), show_size(True)) == (
        "73.5 MB",
        "98 GB",
        "?",
        "?",
    )
    assert (count_noun(1, "step"), count_noun(2000, "step")) == ("1 step", "2,000 steps")
    assert show_ranges([(1, 2), (5, 9), (20, 30)], 2) == "1, 5-8 and 1 more range"
    assert (show_number("nan"), show_number(None), show_number(10**400), show_number(2)) == (
        "nan",
        "?",
        "?",
        "2.000",
    )
