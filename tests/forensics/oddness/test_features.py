"""The features of a piece, against a slow reference of each that counts in plain Python."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from math import log
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable_tools.forensics.oddness.features import FEATURES, GRAM, NAMES, Features, inside, measure
from megastable_tools.forensics.oddness.lexicon import LONGEST_PIECE, Lexicon
from megastable_tools.forensics.oddness.tables import BONUS, Tables, bucket, halves
from tests.forensics.texts import VOCABULARY, documents, joined, tokenizer, yardstick
from tests.tiers import examples


def _measure(pieces: list[list[int]], keys: list[int] | None = None) -> Features:
    ids = np.array([i for piece in pieces for i in piece], dtype=np.uint16)
    edges = np.append(0, np.cumsum([len(piece) for piece in pieces])).astype(np.int64)
    some = np.array(keys or range(len(pieces)), dtype=np.uint64)
    return measure(ids, edges, some, yardstick().lexicon, yardstick().tables)


def _reference(piece: list[int], key: int, lexicon: Lexicon, tables: Tables) -> dict[str, float]:
    half = int(halves(np.array([key], dtype=np.uint64))[0])

    def together(pairs: list[tuple[int, int]]) -> float:
        told = [
            tables.start[half, a] + tables.bonus[half, int(bucket(np.array([a]), np.array([b]))[0])] / BONUS
            for a, b in pairs
        ]
        return float(np.mean(told)) if told else 0.0

    n = len(piece)
    apart = max(int(n * 0.381966), 1)
    far = [(a, piece[(at + apart) % n]) for at, a in enumerate(piece[:-1])]
    surprise = float(np.mean(tables.rarity[half][piece]))
    order = together(list(pairwise(piece)))
    counts = Counter(piece)
    entropy = -sum(c / n * log(c / n) for c in counts.values())

    def again(length: int) -> float:
        grams = [tuple(piece[at : at + length]) for at in range(n - length + 1)]
        return (len(grams) - len(set(grams))) / max(len(grams), 1)

    shares = [
        sum(a == b for a, b in zip(piece[period:], piece)) / (n - period)
        for period in range(1, 65)
        if n >= 2 * period
    ]
    total = {
        name: int(lexicon.table(name)[piece].sum()) for name in ("characters", "letters", "digits", "spaces")
    }
    characters = max(total["characters"], 1)
    return {
        "surprise": surprise,
        "order": order,
        "unlikely": surprise - order,
        "gain": order - together(far) if n > 3 else order,
        "entropy": entropy / log(n) if n > 1 else 1,
        "top": max(counts.values()) / n,
        "run": max(len(list(group)) for _, group in groupby(piece)),
        "pairs": again(2),
        "repeats": again(GRAM),
        "period": max(shares, default=0) if again(GRAM) > 0.3 else 0,
        "bytes": int(lexicon.table("bytes")[piece].sum()) / n,
        "letters": total["letters"] / characters,
        "digits": total["digits"] / characters,
        "spaces": total["spaces"] / characters,
        "outside": piece.count(VOCABULARY) / n,
        "ends": piece[:-1].count(tokenizer().eod) / n,
    }


IDS = st.integers(0, VOCABULARY) | st.integers(300, 303)


@settings(max_examples=examples(40))
@given(st.lists(st.lists(IDS, max_size=40), min_size=1, max_size=6))
def test_every_piece_is_as_the_slow_reference_says(pieces: list[list[int]]) -> None:
    found = _measure(pieces)
    for number, piece in enumerate(pieces):
        if not piece:
            assert all(found[name][number] == 0 for name in NAMES)
            continue
        reference = _reference(piece, number, yardstick().lexicon, yardstick().tables)
        for name, value in reference.items():
            assert found[name][number] == pytest.approx(value, abs=2e-4), name


def test_real_pieces_are_as_the_slow_reference_says() -> None:
    pieces = [document[:250].tolist() for document in documents()[:8]]
    found = _measure(pieces)
    for number, piece in enumerate(pieces):
        for name, value in _reference(piece, number, yardstick().lexicon, yardstick().tables).items():
            assert found[name][number] == pytest.approx(value, abs=1e-3), name


@settings(max_examples=examples(25))
@given(st.lists(IDS, min_size=1, max_size=12), st.integers(20, 250), st.randoms(use_true_random=False))
def test_loops_are_as_the_slow_reference_says(unit: list[int], length: int, random: Random) -> None:
    loop = [random.choice(unit) if random.random() < 0.02 else unit[at % len(unit)] for at in range(length)]
    found = _measure([[5, 6, 7], loop, loop[3:]])
    for number, piece in ((1, loop), (2, loop[3:])):
        reference = _reference(piece, number, yardstick().lexicon, yardstick().tables)
        for name in ("period", "repeats", "run", "pairs"):
            assert found[name][number] == pytest.approx(reference[name], abs=1e-5), name


def test_a_piece_is_measured_the_same_whatever_lies_beside_it() -> None:
    pieces = [document[:200].tolist() for document in documents()[:9]]
    beside = _measure(pieces)
    for number, piece in enumerate(pieces):
        alone = _measure([piece], [number])
        for name in NAMES:
            assert beside[name][number] == pytest.approx(alone[name][0], abs=1e-5), name


def test_a_longer_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="1024 at most"):
        _measure([[5] * (LONGEST_PIECE + 1)])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_ids_of_any_type_and_value_become_ids_of_the_vocabulary_or_the_one_beyond(dtype: type) -> None:
    info = np.iinfo(dtype)
    given = np.array([0, 9, 10, info.max, info.min], dtype=dtype)
    expected = [0, 9, 10, 10, 0 if info.min == 0 else 10]
    assert inside(given, 10).tolist() == expected
    assert not np.shares_memory(given, inside(given, 10)) or inside(given, 10).dtype == given.dtype


def test_ids_of_two_bytes_in_a_vocabulary_that_holds_them_all_are_not_copied() -> None:
    ids = np.arange(5, dtype=np.uint16)
    assert np.shares_memory(inside(ids, 1 << 17), ids)


@pytest.mark.parametrize(
    ("text", "feature", "least"),
    [
        ("\ufffd\ufffda", "replacements", 0.6),
        ("h\0e\0l\0l\0o\0", "nulls", 0.5),
        ("\x01\x02\x03a", "controls", 0.7),
        ("GrÃ¼Ã\x9fe aus KÃ¶ln", "latin1", 0.15),
        ("Привет", "foreign", 1.0),
        ("Привет", "fallbacks", 1.0),
        ("SGVsbG8gV29ybGQhIFRoaXM", "unbroken", 20),
    ],
)
def test_characters_that_speak_of_damage_are_counted(text: str, feature: str, least: float) -> None:
    found = _measure([tokenizer().encode(text)])
    assert found[feature][0] >= least
    sound = _measure([tokenizer().encode("All of this is a plain sentence, as good as any.")])
    assert sound[feature][0] < least / 3


def test_order_is_what_shuffling_takes_away() -> None:
    tokens, edges = joined([document for document in documents() if len(document) >= 250][:50])
    pieces = [tokens[a : a + 250] for a in edges[:-1]]
    random = np.random.default_rng(0)
    text = _measure([piece.tolist() for piece in pieces])
    mixed = _measure([random.permutation(piece).tolist() for piece in pieces])
    assert text["order"].min() > mixed["order"].max()
    assert abs(float(mixed["gain"].mean())) < 0.1 < 1.5 < float(text["gain"].mean())
    np.testing.assert_allclose(text["surprise"], mixed["surprise"], rtol=1e-5)


def test_values_are_shown_with_their_unit() -> None:
    about = {feature.name: feature for feature in FEATURES}
    assert about["repeats"].shown(0.94) == "94 %"
    assert about["controls"].shown(0.0) == "0.0 %"
    assert about["run"].shown(40.0) == "40"
    assert about["order"].shown(2.234) == "2.23"
