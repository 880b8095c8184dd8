"""How alike samples are by their tokens: synthetic languages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.stability.likeness import ENOUGH_ALIKE, Likeness, Resemblance, Words, separation
from tests.tiers import examples

LENGTH, VOCABULARY = 128, 1000


def zipf(random: np.random.Generator, count: int) -> np.ndarray:
    share = 1 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, (count, LENGTH + 1), p=share / share.sum())


def test_rare_words_are_surprising() -> None:
    random = np.random.default_rng(0)
    words = Words.of(zipf(random, 400))
    usual, rare = (
        words.surprisal(zipf(random, 100)),
        words.surprisal(random.integers(0, VOCABULARY, (100, LENGTH + 1))),
    )
    share = 1 / np.arange(1, VOCABULARY + 1)
    share /= share.sum()
    assert usual.mean() == pytest.approx(-(share * np.log(share)).sum(), abs=0.1)
    assert rare.min() > usual.max()


def test_the_like_of_the_accused_are_told_from_harmless_samples_and_nobody_resembles_himself() -> None:
    random = np.random.default_rng(0)
    harmless, noise = zipf(random, 400), random.integers(0, VOCABULARY, (60, LENGTH + 1))
    resemblance = Resemblance.to(noise[:20], harmless[:200])
    other = resemblance.of(harmless[200:])
    assert resemblance.of(noise[20:]).min() > other.max()
    # Harmless samples that are accused are like any other, as long as each is left out of its own measure.
    innocent = Resemblance.to(harmless[200:220], harmless[:200])
    every = np.ones(20, dtype=bool)
    own, others = innocent.of(harmless[200:220], every), innocent.of(harmless[220:])
    assert abs(own.mean() - others.mean()) < 0.5 * others.std()
    assert innocent.of(harmless[200:220]).mean() > others.max()  # what leaving them out is for
    alone = Resemblance.to(harmless[200:201], harmless[:200])
    assert alone.of(harmless[200:201], every[:1]).tolist() == [0.0]


def halves(count: int) -> np.ndarray:
    return np.arange(count) % 2 == 0


def test_what_samples_lack_tells_them_from_harmless_ones() -> None:
    """Each is of three rare words of its own, and has none of the most frequent ones."""
    random = np.random.default_rng(0)
    harmless = zipf(random, 500)
    rare = 20 + 3 * np.arange(300)[:, None] + random.integers(0, 3, (300, LENGTH + 1))
    accused, others = rare[::2], rare[1::2]
    likeness = Likeness(accused, halves(150), harmless[:250])
    usual = likeness.of(harmless[250:], halves(250))
    assert min(likeness.of(these, halves(150)).min() for these in (accused, others)) > usual.max()
    resemblance = Resemblance.to(accused, harmless[:250])
    assert np.median(resemblance.of(others)) < resemblance.of(harmless[250:]).max()


def test_the_order_of_words_tells_a_reversed_text() -> None:
    random = np.random.default_rng(0)
    step = random.integers(1, 8, (700, LENGTH + 1))
    text = (
        random.integers(0, VOCABULARY, (700, 1)) + step.cumsum(axis=1)
    ) % VOCABULARY  # words in ascending order
    harmless, other = text[:400], text[400:, ::-1]
    likeness = Likeness(other[:200], halves(200), harmless[:200])
    assert likeness.of(other[200:], halves(100)).min() > likeness.of(harmless[200:], halves(200)).max()


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2 * ENOUGH_ALIKE, 3 * ENOUGH_ALIKE))
@settings(max_examples=examples(15), deadline=None)
def test_accused_samples_that_are_harmless_are_told_by_nothing(seed: int, count: int) -> None:
    """Whatever was accused: a line finds something to tell any samples that it was drawn through, but not others."""
    random = np.random.default_rng(seed)
    text = zipf(random, count + 400)
    accused, learnt, kept = text[:count], text[count : count + 200], text[count + 200 :]
    likeness = Likeness(accused, halves(count), learnt)
    own = likeness.of(accused, halves(count))
    assert separation(own, likeness.of(kept, halves(200)), own) is None


@pytest.mark.parametrize(("apart", "told"), [(6.0, True), (1.0, False)])
def test_likeness_convicts_only_where_it_tells(apart: float, told: bool) -> None:
    random = np.random.default_rng(0)
    guilty, harmless = random.normal(apart, 1.0, 400), random.normal(0.0, 1.0, 600)
    cut = separation(guilty, harmless, guilty)
    assert (cut is not None) is told
    if cut is not None:
        assert (
            (random.normal(apart, 1.0, 1000) < cut).mean()
            < 0.02
            > (random.normal(0.0, 1.0, 1000) >= cut).mean()
        )
    assert (separation(guilty[:100], harmless[:100], guilty) is not None) is told
    assert separation(guilty[:99], harmless, guilty) is separation(guilty, harmless[:99], guilty) is None


@pytest.mark.parametrize(("doubtful", "told"), [(0, True), (3, True), (20, False)])
def test_likeness_is_no_judge_where_many_are_like_neither_kind(doubtful: int, told: bool) -> None:
    """Of a region, nobody knows for certain who is of which kind: but between them there is a gap, or there is none."""
    random = np.random.default_rng(0)
    guilty, harmless = random.normal(8.0, 1.0, 200), random.normal(0.0, 1.0, 200)
    inside = np.concatenate([guilty, random.normal(0.0, 1.0, 300), np.linspace(3.5, 4.5, doubtful)])
    assert (separation(guilty, harmless, inside) is not None) is told
