"""Crowds of moderately bad samples: synthetic tokens and losses, harmless ones of two corpora."""

from __future__ import annotations

import numpy as np
import pytest

from megastable_guard.scores import (
    Resemblance,
    Scale,
    ScoredSamples,
    Words,
    conformal,
    group_test,
    judge_alike,
    judge_suspects,
    name_crowd,
)

LENGTH, VOCABULARY = 64, 500
SIGNIFICANCE, FALSE_RATE = 0.001, 0.03


def text(random: np.random.Generator, count: int, corpus: int = 0, hard: float = 1.0) -> ScoredSamples:
    """Words by Zipf's law, in another order for each corpus; a sample of rarer words is harder, and z says so."""
    rare = random.gamma(8.0, 1 / 8, count) * hard
    share = np.arange(1, VOCABULARY + 1)[None] ** (-1.2 / rare[:, None])
    share /= share.sum(axis=1, keepdims=True)
    tokens = np.stack([random.choice(VOCABULARY, LENGTH + 1, p=p) for p in share])
    z = 1.5 * (rare - 1) + random.standard_t(5, count) * 0.8
    return ScoredSamples((tokens + 7 * corpus) % VOCABULARY, z, np.full(count, corpus))


def other(random: np.random.Generator, count: int, z: float, corpus: int = 0) -> ScoredSamples:
    """Text of quite other pairs, each sample moderately bad."""
    tokens = (np.arange(LENGTH + 1)[None] * 17 + random.integers(0, VOCABULARY, (count, 1))) % VOCABULARY
    return ScoredSamples(tokens, random.normal(z, 0.3, count), np.full(count, corpus))


def joined(*parts: ScoredSamples) -> ScoredSamples:
    return ScoredSamples(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


@pytest.fixture(scope="module")
def scale() -> Scale:
    random = np.random.default_rng(1)
    return Scale(joined(text(random, 800), text(random, 400, 1)))


def named(scale: Scale, suspects: ScoredSamples, error: float = 0.1) -> np.ndarray:
    alone = np.zeros(suspects.z.shape, dtype=bool)
    return judge_suspects(scale, suspects, alone, error, SIGNIFICANCE, FALSE_RATE).bad


@pytest.mark.quick("12-20-5.0")
@pytest.mark.parametrize(
    ("bad", "clean", "z"), [(40, 24, 2.0), (40, 24, 5.0), (40, 120, 3.0), (12, 20, 3.5), (12, 20, 5.0)]
)
def test_many_moderately_bad_samples_are_named_and_hardly_an_harmless_one(
    scale: Scale, bad: int, clean: int, z: float
) -> None:
    missed = wrong = 0
    for seed in range(5):
        random = np.random.default_rng(seed)
        suspects = joined(other(random, bad, z), text(random, clean // 2), text(random, clean // 2, 1))
        found_bad = named(scale, suspects)
        missed, wrong = missed + (~found_bad[:bad]).sum(), wrong + found_bad[bad:].sum()
    # A dozen say less of what they have in common.
    assert missed <= (0 if bad == 40 else 0.1 * 5 * bad) and wrong <= FALSE_RATE * 5 * bad


@pytest.mark.quick("0.0")
@pytest.mark.parametrize("z", [-1.5, 0.0, 3.0])
def test_easy_text_that_is_alike_is_named_where_its_gradient_shows_it(scale: Scale, z: float) -> None:
    """Whatever its losses are; harmless ones of the suspected batches are cleared, the like of the others not."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        suspects = joined(other(random, 36, z), text(random, 28))
        judged = judge_alike(scale, suspects, np.arange(64) >= 12, FALSE_RATE)
        assert judged.bad[:36].sum() >= 34 and judged.bad[36:].sum() <= 2
        far = joined(other(random, 16, z), text(random, 200))
        assert judged.score is not None
        bad = judged.score.score_samples(far) >= judged.bar
        assert bad[:16].sum() >= 14 and bad[16:].sum() <= 3


def test_a_few_that_are_alike_are_no_crowd(scale: Scale) -> None:
    random = np.random.default_rng(0)
    suspects = joined(other(random, 4, 0.0), text(random, 28))
    assert not judge_alike(scale, suspects, np.ones(32, bool), FALSE_RATE).bad.any()
    nobody = judge_alike(scale, suspects, np.zeros(32, bool), FALSE_RATE)
    assert not nobody.bad.any() and nobody.score is None
    unknown = other(random, 32, 3.0, corpus=2)
    assert not judge_alike(scale, unknown, np.ones(32, bool), FALSE_RATE).bad.any()


def test_hard_words_are_harmless(scale: Scale) -> None:
    """Twice as rare words explain a z of 1.5 above the others; without them it is a crowd."""
    random = np.random.default_rng(0)
    easy = text(random, 64)
    assert not named(scale, text(random, 64, hard=1.1)).any()
    assert named(scale, easy._replace(z=easy.z + 4.0)).any()


@pytest.mark.slow
def test_the_group_test_keeps_its_error_rate() -> None:
    """p of harmless groups is uniform: below 5 % in a twentieth of them."""
    random = np.random.default_rng(0)
    harmless = random.standard_t(4, 2000)
    p = np.array([group_test(random.standard_t(4, 48), harmless, 0.0) for _ in range(300)])
    assert 0.02 <= (p <= 0.05).mean() <= 0.09 and (p <= 0.001).mean() <= 0.01
    assert group_test(random.standard_t(4, 48) + 1.0, harmless, 0.0) == 1e-4
    assert group_test(random.standard_t(4, 48) + 1.0, harmless, 1.0) > 0.05


def test_conformal_counts_harmless_samples_that_are_just_as_bad() -> None:
    assert conformal(np.array([1.0, 2.0]), np.array([0.0, 1.0, 1.0])).tolist() == [3 / 4, 1 / 4]


def test_a_crowd_keeps_its_false_discovery_rate() -> None:
    random = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        harmless = random.normal(0, 1, 600)
        suspects = np.concatenate([random.normal(3.0, 1, 40), random.normal(0, 1, 60)])
        found_bad = name_crowd(suspects, harmless, FALSE_RATE)
        shares.append(found_bad[40:].sum() / max(1, found_bad.sum()))
    assert np.mean(shares) <= 1.5 * FALSE_RATE


LONG, MANY = 128, 1000


def zipf(random: np.random.Generator, count: int) -> np.ndarray:
    share = 1 / np.arange(1, MANY + 1)
    return random.choice(MANY, (count, LONG + 1), p=share / share.sum())


def test_rare_words_are_surprising() -> None:
    random = np.random.default_rng(0)
    words = Words(zipf(random, 400))
    usual, rare = (
        words.surprisal(zipf(random, 100)),
        words.surprisal(random.integers(0, MANY, (100, LONG + 1))),
    )
    share = 1 / np.arange(1, MANY + 1)
    share /= share.sum()
    assert usual.mean() == pytest.approx(-(share * np.log(share)).sum(), abs=0.1)
    assert rare.min() > usual.max()


def test_the_like_of_the_suspects_are_told_from_harmless_samples_and_nobody_resembles_himself() -> None:
    random = np.random.default_rng(0)
    harmless, noise = zipf(random, 400), random.integers(0, MANY, (60, LONG + 1))
    resemblance = Resemblance(noise[:20], harmless[:200])
    other = resemblance.measure_likeness(harmless[200:])
    assert resemblance.measure_likeness(noise[20:]).min() > other.max()
    # Harmless samples that are suspected are like any other, as long as each is left out of its own measure.
    stray = Resemblance(harmless[200:220], harmless[:200])
    every = np.ones(20, dtype=bool)
    own, others = (
        stray.measure_likeness(harmless[200:220], every),
        stray.measure_likeness(harmless[220:]),
    )
    assert abs(own.mean() - others.mean()) < 0.5 * others.std()
    assert stray.measure_likeness(harmless[200:220]).mean() > others.max()  # what leaving them out is for
    alone = Resemblance(harmless[200:201], harmless[:200])
    assert alone.measure_likeness(harmless[200:201], every[:1]).tolist() == [0.0]
