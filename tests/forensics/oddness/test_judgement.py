from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable_tools.forensics.oddness.features import FEATURES, NAMES, Features
from megastable_tools.forensics.oddness.judgement import (
    CLASSES,
    JUDGED,
    MANY,
    MOST,
    UsualFeatures,
    judge,
    length_class,
)
from megastable_tools.forensics.oddness.kinds import KINDS
from tests.tiers import examples

LENGTH = np.int64(200)
LENGTHS = np.array([LENGTH])
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


USUAL = UsualFeatures.of(_lengths(_ordinary()), _ordinary())


def test_a_score_is_the_power_of_ten_of_how_few_are_as_odd() -> None:
    """By a single feature, of pieces that the yardstick has not seen."""
    fresh = _ordinary(400_000, seed=1)
    scores = USUAL.scores(_lengths(fresh), fresh)
    for name in ("unlikely", "order", "controls"):
        row = scores[NAMES.index(name)]
        for decades in (2, 3, 4):
            assert np.mean(row >= decades) == pytest.approx(10.0**-decades, rel=0.7)


def test_the_score_of_a_piece_allows_for_how_many_features_there_are() -> None:
    fresh = _ordinary(100_000, seed=2)
    judged = judge(USUAL, _lengths(fresh), fresh)
    assert 0.2 < np.mean(judged.score >= 2) / 0.01 < 1.5
    assert set(np.unique(judged.feature)) <= set(JUDGED.tolist())


def test_only_the_odd_side_counts() -> None:
    low, high = _piece(order=-5.0), _piece(order=9.0)
    assert judge(USUAL, _lengths(low), low).score[0] > 5
    assert judge(USUAL, _lengths(high), high).score[0] == 0


def test_features_that_are_no_damage_make_no_score() -> None:
    found = _piece(digits=1.0, capitals=1.0, letters=0.0, surprise=99.0)
    judged = judge(USUAL, _lengths(found), found)
    assert judged.score[0] == 0 and KINDS[judged.kind[0]] == "usual"


def test_a_score_has_an_end() -> None:
    found = _piece(unlikely=1e9)
    assert judge(USUAL, _lengths(found), found).score[0] == MOST


def test_two_percent_of_junk_hardly_move_what_is_usual() -> None:
    clean, spoiled = _ordinary(), _ordinary()
    for feature in FEATURES:
        spoiled[feature.name][::50] = -50 if feature.side == "low" else 50
    with_junk = UsualFeatures.of(_lengths(spoiled), spoiled)
    piece = _piece(unlikely=3.0)
    before = judge(USUAL, _lengths(clean)[:1], piece).score[0]
    after = judge(with_junk, _lengths(clean)[:1], piece).score[0]
    assert after > 0.4 * before > 1


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 256), min_size=1, max_size=30))
def test_every_length_has_numbers_even_if_only_one_was_seen(lengths: list[int]) -> None:
    found = _ordinary(500)
    one = UsualFeatures.of(np.full(len(found["length"]), 100), found)
    taken = one.edge[length_class(np.array(lengths))]
    assert np.isfinite(taken).all()


def test_a_class_begins_at_its_length() -> None:
    assert length_class(CLASSES).tolist() == list(range(1, len(CLASSES) + 1))
    assert length_class(CLASSES - 1).tolist() == list(range(len(CLASSES)))


def test_of_nothing_nothing_is_odd() -> None:
    found = _piece(unlikely=50.0, outside=1.0)
    judged = judge(UsualFeatures.nothing(), _lengths(found), found)
    assert judged.score[0] == 0 and KINDS[judged.kind[0]] == "usual"


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
def test_what_a_piece_looks_like(kind: str, values: dict[str, float]) -> None:
    found = _piece(**values)
    judged = judge(USUAL, _lengths(found), found)
    assert KINDS[judged.kind[0]] == kind


def test_what_explains_a_piece_is_what_makes_its_kind() -> None:
    """Not what is odder still: "outside of the vocabulary: its 5-grams repeat" helps nobody."""
    found = _piece(outside=0.01, repeats=1.0, controls=0.5)
    judged = judge(USUAL, _lengths(found), found)
    assert KINDS[judged.kind[0]] == "outside of the vocabulary"
    assert NAMES[judged.feature[0]] == "outside"
    scores = USUAL.scores(_lengths(found), found)[JUDGED, 0]
    assert judged.score[0] == pytest.approx(float(min(scores.max() - MANY, MOST)))
    # Where nothing that makes the kind is odd by itself, the oddest feature speaks.
    found = _piece(run=150.0, unknowns=0.5)
    judged = judge(
        replace(USUAL, edge=np.where(np.array(NAMES) == "run", np.inf, USUAL.edge)), LENGTHS, found
    )
    assert (KINDS[judged.kind[0]], NAMES[judged.feature[0]]) == ("repetition", "unknowns")


def test_every_kind_has_a_rule_that_is_tested() -> None:
    assert {kind for kind, _ in RULES} == set(KINDS)
