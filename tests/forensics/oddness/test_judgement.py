from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megastable_tools.forensics.oddness.features import FEATURES, NAMES, Features
from megastable_tools.forensics.oddness.judgement import (
    JUDGED,
    KINDS,
    MANY,
    MOST,
    UsualFeatures,
    judge_features,
)

LENGTH = np.int64(200)
DAMAGE = ("controls", "nulls", "replacements", "latin1", "unknowns", "specials", "ends", "outside")


def _ordinary(count: int = 20_000, seed: int = 0) -> Features:
    """Exponential tails of every feature that can be odd, over something usual."""
    random = np.random.default_rng(seed)
    found = {name: np.full(count, 0.3, dtype=np.float32) for name in NAMES}
    for feature in FEATURES:
        if feature.scale == "plain":
            tail = random.exponential(feature.grain * 3, count).astype(np.float32)
            found[feature.name] = (1 - tail) if feature.side == "low" else tail
    return found | {"length": np.full(count, LENGTH, dtype=np.float32)}


def _lengths(features: Features) -> np.ndarray:
    return features["length"].astype(np.int64)


def _piece(**values: float) -> Features:
    """A piece with what is usual in `_ordinary` but for `values`, and nothing that speaks of damage."""
    usual = {name: float(np.median(column)) for name, column in _ordinary().items()} | dict.fromkeys(
        DAMAGE, 0.0
    )
    return {name: np.array([values.get(name, value)], dtype=np.float32) for name, value in usual.items()}


USUAL = UsualFeatures.learn_usual(_lengths(_ordinary()), _ordinary())


def _judge(found: Features, usual: UsualFeatures = USUAL) -> tuple[float, str, str]:
    judged = judge_features(usual, _lengths(found), found)
    return float(judged.score[0]), KINDS[judged.kind[0]], NAMES[judged.feature[0]]


def test_scores_are_powers_of_ten_of_how_few_are_as_odd() -> None:
    """By a single feature, of pieces that the yardstick has not seen; and for all, by how many features there are."""
    fresh = _ordinary(400_000, seed=1)
    scores = USUAL.score_features(_lengths(fresh), fresh)
    for name in ("unlikely", "order", "controls"):
        row = scores[NAMES.index(name)]
        for decades in (2, 3, 4):
            assert np.mean(row >= decades) == pytest.approx(10.0**-decades, rel=0.7)
    judged = judge_features(USUAL, _lengths(fresh), fresh)
    assert 0.2 < np.mean(judged.score >= 2) / 0.01 < 1.5
    assert set(np.unique(judged.feature)) <= set(JUDGED.tolist())


def test_judge_scores_only_damage_on_the_odd_side_up_to_an_end() -> None:
    assert _judge(_piece(order=-5.0))[0] > 5
    assert _judge(_piece(order=9.0))[0] == 0
    assert _judge(_piece(digits=1.0, capitals=1.0, letters=0.0, surprise=99.0))[:2] == (0, "usual")
    assert _judge(_piece(unlikely=1e9))[0] == MOST
    assert _judge(_piece(unlikely=50.0, outside=1.0), UsualFeatures.of_no_pieces())[:2] == (0, "usual")


# What `_piece` gives: gain 0.79, entropy 0.04, pairs 0.04; each row is what the rule needs.
RULES: list[tuple[str, dict[str, float]]] = [
    ("outside of the vocabulary", {"outside": 0.2, "controls": 0.5}),
    ("binary data", {"replacements": 0.4}),
    ("binary data", {"controls": 0.1, "latin1": 0.3}),
    ("binary data", {"nulls": 0.9, "controls": 0.05}),
    ("wrong encoding", {"nulls": 0.5}),
    ("wrong encoding", {"latin1": 0.2}),
    ("wrong encoding", {"foreign": 1.0, "top": 0.4}),
    ("repetition", {"repeats": 0.95}),
    ("repetition", {"run": 150.0}),
    ("encoded data", {"unbroken": 300.0, "spaces": 0.01, "letters": 0.8, "digits": 0.15, "capitals": 0.4}),
    ("random tokens", {"surprise": 9.0, "unlikely": 12.0, "gain": 0.0, "entropy": 0.98, "pairs": 0.0}),
    ("shuffled text", {"unlikely": 9.0, "order": -2.0, "gain": 0.0, "surprise": 0.2}),
    ("another language or register", {"surprise": 9.0, "unlikely": 12.0, "gain": 0.5}),
    ("another language or register", {"foreign": 0.9, "top": 0.1}),
    ("odd", {"unknowns": 0.5}),
    ("usual", {}),
]


@pytest.mark.parametrize(("kind", "values"), RULES)
def test_looks_like_names_the_kind(kind: str, values: dict[str, float]) -> None:
    assert _judge(_piece(**values))[1] == kind
    assert {kind for kind, _ in RULES} == set(KINDS)


def test_judge_explains_a_piece_by_what_makes_its_kind() -> None:
    """Not what is odder still: "outside of the vocabulary: its 5-grams repeat" helps nobody."""
    found = _piece(outside=0.01, repeats=1.0, controls=0.5)
    score, kind, feature = _judge(found)
    assert (kind, feature) == ("outside of the vocabulary", "outside")
    scores = USUAL.score_features(_lengths(found), found)[JUDGED, 0]
    assert score == pytest.approx(float(min(scores.max() - MANY, MOST)))
    # Where nothing that makes the kind is odd by itself, the oddest feature speaks.
    blind = replace(USUAL, edge=np.where(np.array(NAMES) == "run", np.inf, USUAL.edge))
    assert _judge(_piece(run=150.0, unknowns=0.5), blind)[1:] == ("repetition", "unknowns")
