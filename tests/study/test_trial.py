"""Results of trials: smoothing, divergence, and their files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.study.trial import LEARNT, WINDOW, TrialResult, smoothed


def result(*losses: float, first: float = 8.0) -> TrialResult:
    return TrialResult(losses, first, math.nan, 1.5, 1000)


def test_smoothing_and_divergence() -> None:
    means = smoothed([float(i) for i in range(20)])
    assert means[0] == 0 and means[1] == 0.5 and means[19] == sum(range(10, 20)) / WINDOW
    assert smoothed([1.0, math.nan, 1.0]) == (1.0, math.inf, math.inf)


def test_a_loss_is_capped_at_that_of_the_initialization() -> None:
    assert result(7.0, 5.0).capped == 5.0 and not result(7.0, 5.0).diverged
    assert result(7.0, math.inf).capped == 8.0 and result(7.0, math.inf).diverged
    assert result(8.0 - LEARNT / 2).diverged  # the uniform distribution is nothing learnt


def test_a_file_holds_the_whole_result(tmp_path: Path) -> None:
    for index, given in enumerate((result(7.0, 5.25), result(7.0, math.inf))):
        path = tmp_path / f"{index}.json"
        given.save(path)
        found = TrialResult.load(path)
        assert math.isnan(found.validation) and repr(found) == repr(given)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"losses": 1}', json.dumps({"losses": ["x"], "first": 1})])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"x\.json: not the result of a run"):
        TrialResult.load(path)
