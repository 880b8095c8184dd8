"""The advised score, from tables of scores: what is planted is named, what is ordinary hardly ever."""

from __future__ import annotations

import numpy as np
import pytest

from megastable_tools.forensics.oddness.yardstick import PIECE
from megastable_tools.forensics.scanning.scan_summary import BINS, LENGTHS, STEP, ScanSummary
from megastable_tools.forensics.scanning.score_threshold import CHECKED, RATE, advised, excess, ordinary


def tally(scores: np.ndarray, lengths: np.ndarray) -> ScanSummary:
    made = ScanSummary(1)
    made.documents[1] += np.bincount(np.minimum(scores / STEP, BINS - 1).astype(int), minlength=BINS)
    made.lengths += np.bincount(np.frexp(lengths.astype(float))[1], minlength=LENGTHS)
    return made


def drawn(random: np.random.Generator, pieces: np.ndarray, heavier: float = 1.0) -> np.ndarray:
    """Scores of ordinary documents of so many pieces: each the worst of its pieces'."""
    return np.array([heavier * (-np.log10(random.random(int(n)))).max() for n in pieces])


def test_how_many_ordinary_documents_lie_as_high() -> None:
    """What is expected is what is drawn, of short documents and of long ones."""
    random = np.random.default_rng(0)
    pieces = random.integers(1, 60, 20_000)
    scores = drawn(random, pieces)
    # A document of a power of two is taken for three quarters of the next: on the average of all lengths that is right.
    lengths = tally(scores, pieces * PIECE).lengths
    for score in (1.0, 2.0, 3.0, 4.0):
        assert ordinary(lengths, score) == pytest.approx((scores >= score).sum(), rel=0.15, abs=8)
    assert ordinary(lengths, 30.0) < 1e-20 < ordinary(lengths, 20.0)
    empty = np.zeros(LENGTHS, np.int64)
    empty[0] = 5
    assert ordinary(empty, 1.0) == 0.0


@pytest.mark.parametrize("documents", [300, 3000, 30_000])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.15])
def test_what_is_planted_is_named_and_little_else(documents: int, share: float) -> None:
    random = np.random.default_rng(documents)
    pieces = random.integers(1, 40, documents)
    scores, bad = drawn(random, pieces), random.random(documents) < share
    scores[bad] = random.uniform(7.5, 9, bad.sum())
    made = tally(scores, pieces * PIECE)
    score = advised(made, excess(made))
    if not bad.any():
        assert score is None or (scores >= score).sum() <= 2
        return
    assert score is not None and (scores[bad] >= score).all()
    wrong = int((scores[~bad] >= score).sum())
    assert wrong <= max(6, 2 * RATE * bad.sum())
    assert score * (score / STEP == int(score / STEP)) >= CHECKED


def test_a_corpus_of_heavier_tails_raises_no_storm() -> None:
    """Scores half as high again as they should be: that is seen where ordinary documents still are."""
    random = np.random.default_rng(1)
    pieces = random.integers(1, 40, 5000)
    scores = drawn(random, pieces, heavier=1.3)
    made = tally(scores, pieces * PIECE)
    naive, score = advised(made, 1.0), advised(made, excess(made))
    assert naive is not None and excess(made) > 1.5
    assert score is None or score > naive
    larger = tally(drawn(random, np.full(50_000, 20)), np.full(50_000, 20 * PIECE))
    named = advised(larger, excess(larger))
    assert named is None or larger.above(named)[0] <= 3


def test_no_documents_no_advice() -> None:
    assert advised(ScanSummary(1), 1.0) is None
    assert excess(ScanSummary(1)) == 1.0
