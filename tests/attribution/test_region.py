"""What a clean batch is."""

from __future__ import annotations

import numpy as np
import pytest

from megastable.attribution.examination import most_strays
from megastable.attribution.scores import STRAY


@pytest.mark.parametrize(("size", "most"), [(1, 1), (16, 1), (64, 1), (256, 3), (1024, 9), (4096, 29)])
def test_a_clean_batch_has_as_many_strays_as_harmless_samples_bring(size: int, most: int) -> None:
    assert most_strays(size) == most
    assert (np.random.default_rng(0).binomial(size, STRAY, 10_000) <= most).mean() > 0.95
