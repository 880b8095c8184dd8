"""Advise a score threshold, and estimate how many documents above a score may be ordinary.

By construction one ordinary piece in 10^s has a score of s (`judgement.py`), so a document of n pieces does
with probability 1 - (1 - 10^-s)^n. If the far tail is heavier, the scores of the corpus itself (or of a
reference known to be good) show by how much, at a score that ordinary documents still reach. The advice is the
lowest score at which the expected ordinary documents are at most a given share of all documents above it: a
false discovery rate (Benjamini and Hochberg, 1995), by which a corpus without damage gets hardly any named, and a large
one a higher score than a small one.
"""

from __future__ import annotations

import numpy as np

from megastable_tools.forensics.oddness.judgement import MOST
from megastable_tools.forensics.oddness.yardstick import PIECE
from megastable_tools.forensics.scanning.scan_summary import STEP, Int64s, ScanSummary

# Chosen on the standard library's source, measured on C headers, prose and a mix of both: docs/data.md.
RATE = 0.1  # expected share of ordinary documents among those above the advised score
CHECKED = 2.0  # the score at which expected and observed counts are compared; no lower one is advised


def ordinary(lengths: Int64s, score: float) -> float:
    """Expected documents at `score` or above if all are ordinary. lengths: number of documents of 0 tokens, of 1, of
    2 and 3, ... by powers of two."""
    bits = np.arange(1, len(lengths))
    pieces = np.maximum(np.ceil(0.75 * 2.0**bits / PIECE), 1.0)
    return float(-np.expm1(pieces * np.log1p(-(10.0**-score))) @ lengths[1:])


def excess(usual: ScanSummary) -> float:
    """Ratio of documents of `usual` at CHECKED or above to the expectation, at least 1."""
    return max(1.0, usual.above(CHECKED)[0] / max(ordinary(usual.lengths, CHECKED), 1.0))


def advised(found: ScanSummary, times: float) -> float | None:
    """The lowest score, in steps of STEP, at which `times` the expected ordinary ones are at most RATE of all; None if
    there is none."""
    for score in np.arange(CHECKED, MOST + STEP, STEP).tolist():
        named = found.above(score)[0]
        if not named:
            return None
        if times * ordinary(found.lengths, score) <= RATE * named:
            return score
    return None
