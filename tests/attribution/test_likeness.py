"""How alike samples are by their tokens: synthetic languages."""

from __future__ import annotations

import numpy as np
import pytest

from megastable.attribution.scores import Resemblance, Words

LENGTH, VOCABULARY = 128, 1000


def zipf(random: np.random.Generator, count: int) -> np.ndarray:
    share = 1 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, (count, LENGTH + 1), p=share / share.sum())


def test_rare_words_are_surprising() -> None:
    random = np.random.default_rng(0)
    words = Words(zipf(random, 400))
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
    resemblance = Resemblance(noise[:20], harmless[:200])
    other = resemblance.of(harmless[200:])
    assert resemblance.of(noise[20:]).min() > other.max()
    # Harmless samples that are accused are like any other, as long as each is left out of its own measure.
    innocent = Resemblance(harmless[200:220], harmless[:200])
    every = np.ones(20, dtype=bool)
    own, others = innocent.of(harmless[200:220], every), innocent.of(harmless[220:])
    assert abs(own.mean() - others.mean()) < 0.5 * others.std()
    assert innocent.of(harmless[200:220]).mean() > others.max()  # what leaving them out is for
    alone = Resemblance(harmless[200:201], harmless[:200])
    assert alone.of(harmless[200:201], every[:1]).tolist() == [0.0]
