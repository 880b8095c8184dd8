"""The features of a piece, against a slow reference of each that counts in plain Python; and what tokens are."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from math import log
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.data.tokenizer import load_tokenizer
from megastable_tools.forensics.oddness.features import (
    BONUS,
    COUNTED,
    GRAM,
    NAMES,
    Features,
    Lexicon,
    Tables,
    halves_of,
    measure_pieces,
    pair_buckets,
)  # fmt: skip
from megastable_tools.forensics.oddness.yardstick import document_keys
from tests.data.texts import hugging_face_file
from tests.forensics.texts import VOCABULARY, documents, joined, tokenizer, yardstick
from tests.tiers import examples

IDS = st.integers(0, VOCABULARY) | st.integers(300, 303)
TEXT = "Naïve café\t(42 ABC)\r\n\x01\x00 \x7f end: wörld → 日本 Ã¤ \x85\n"


def _measure(pieces: list[list[int]], keys: list[int] | None = None) -> Features:
    ids = np.array([i for piece in pieces for i in piece], dtype=np.uint16)
    edges = np.append(0, np.cumsum([len(piece) for piece in pieces])).astype(np.int64)
    some = np.array(keys or range(len(pieces)), dtype=np.uint64)
    return measure_pieces(ids, edges, some, yardstick().lexicon, yardstick().tables)


def _reference(piece: list[int], key: int) -> dict[str, float]:
    lexicon, tables = yardstick().lexicon, yardstick().tables
    half = int(halves_of(np.array([key], dtype=np.uint64))[0])

    def together(pairs: list[tuple[int, int]]) -> float:
        told = [
            tables.start[half, a]
            + tables.bonus[half, int(pair_buckets(np.array([a]), np.array([b]))[0])] / BONUS
            for a, b in pairs
        ]
        return float(np.mean(told)) if told else 0.0

    def again(length: int) -> float:
        grams = [tuple(piece[at : at + length]) for at in range(n - length + 1)]
        return (len(grams) - len(set(grams))) / max(len(grams), 1)

    n, counts = len(piece), Counter(piece)
    apart = max(int(n * 0.381966), 1)
    far = [(a, piece[(at + apart) % n]) for at, a in enumerate(piece[:-1])]
    surprise, order = float(np.mean(tables.rarity[half][piece])), together(list(pairwise(piece)))
    entropy = -sum(c / n * log(c / n) for c in counts.values())
    shares = [
        sum(a == b for a, b in zip(piece[period:], piece)) / (n - period)
        for period in range(1, 65) if n >= 2 * period
    ]  # fmt: skip
    total = {name: int(lexicon.counts_of(name)[piece].sum()) for name in COUNTED}
    characters = max(total["characters"], 1)
    return {
        "surprise": surprise, "order": order, "unlikely": surprise - order,
        "gain": order - together(far) if n > 3 else order, "entropy": entropy / log(n) if n > 1 else 1,
        "top": max(counts.values()) / n, "run": max(len(list(group)) for _, group in groupby(piece)),
        "pairs": again(2), "repeats": again(GRAM), "period": max(shares, default=0) if again(GRAM) > 0.3 else 0,
        "bytes": total["bytes"] / n, "outside": piece.count(VOCABULARY) / n,
        "ends": piece[:-1].count(tokenizer().eod) / n,
        **{name: total[name] / characters for name in ("letters", "digits", "spaces")},
    }  # fmt: skip


def _check(pieces: list[list[int]], about: float) -> None:
    found = _measure(pieces)
    for number, piece in enumerate(pieces):
        expected = _reference(piece, number) if piece else dict.fromkeys(NAMES, 0.0)
        for name, value in expected.items():
            assert found[name][number] == pytest.approx(value, abs=about), name


@settings(max_examples=examples(40))
@given(st.lists(st.lists(IDS, max_size=40), min_size=1, max_size=6))
def test_measure_is_the_slow_reference(pieces: list[list[int]]) -> None:
    _check(pieces, 2e-4)


@settings(max_examples=examples(25))
@given(st.lists(IDS, min_size=1, max_size=12), st.integers(20, 250), st.randoms(use_true_random=False))
def test_measure_is_the_slow_reference_for_loops_and_real_pieces(
    unit: list[int], length: int, random: Random
) -> None:
    loop = [random.choice(unit) if random.random() < 0.02 else unit[at % len(unit)] for at in range(length)]
    _check([[5, 6, 7], loop, loop[3:], documents()[length % 8][:250].tolist()], 1e-3)


@pytest.mark.parametrize(
    ("text", "feature", "least"),
    [("\ufffd\ufffda", "replacements", 0.6), ("h\0e\0l\0l\0o\0", "nulls", 0.5), ("\x01\x02\x03a", "controls", 0.7),
     ("GrÃ¼Ã\x9fe aus KÃ¶ln", "latin1", 0.15), ("Привет", "foreign", 1.0), ("Привет", "fallbacks", 1.0),
     ("SGVsbG8gV29ybGQhIFRoaXM", "unbroken", 20)],
)  # fmt: skip
def test_measure_counts_characters_that_speak_of_damage(text: str, feature: str, least: float) -> None:
    sound = tokenizer().encode("All of this is a plain sentence, as good as any.")
    found = _measure([tokenizer().encode(text), sound])[feature]
    assert found[0] >= least and found[1] < least / 3


def test_tables_measure_a_document_without_itself() -> None:
    """One that nothing else is like: by tables that hold it as often as one likes, it is as rare as without."""
    strange = np.random.default_rng(0).integers(3, VOCABULARY, 400)
    tokens, edges = joined([*documents(), *[strange] * 30])
    keys = document_keys(tokens, edges)
    tables = Tables.learn_tables(tokens.astype(np.uint32), edges, keys, VOCABULARY + 1)
    own = int(halves_of(keys[-1:])[0])
    assert tables.rarity[own][strange].mean() > tables.rarity[1 - own][strange].mean() + 1
    assert 0.4 < halves_of(keys).mean() < 0.6


# What tokens are


def _sums(lexicon: Lexicon, ids: list[int]) -> dict[str, int]:
    return {name: int(lexicon.counts_of(name)[ids].sum()) for name in COUNTED}


def test_lexicon_counts_add_up_over_the_tokens_of_a_text(tmp_path: Path) -> None:
    for some in (tokenizer(), load_tokenizer(hugging_face_file(tmp_path))):
        found = _sums(Lexicon.of_tokenizer(some, some.vocab_size), some.encode(TEXT))
        assert (found["bytes"], found["characters"]) == (len(TEXT.encode()), len(TEXT))
        assert (found["foreign"], found["nulls"]) == (sum(c > "\x7f" for c in TEXT), 1)
        assert found["controls"] == 2  # \x01 and \x7f; a tab and a newline are text
    text = "def read(self, SIZE=42):\n\treturn None\n"
    found = _sums(Lexicon.of_tokenizer(tokenizer(), VOCABULARY), tokenizer().encode(text))
    assert found["letters"] == sum(c.isalpha() for c in text) and found["spaces"] == sum(
        map(str.isspace, text)
    )
    assert (found["digits"], found["capitals"], found["foreign"]) == (2, 5, 0)


def test_lexicon_knows_bytes_ends_padding_and_what_is_outside() -> None:
    lexicon, eod = Lexicon.of_tokenizer(tokenizer(), VOCABULARY + 10), tokenizer().eod
    ids = tokenizer().encode("\ufffd日")
    assert [int(lexicon.byte[i]) for i in ids] == list("\ufffd日".encode())
    assert _sums(lexicon, ids)["fallbacks"] == 6
    assert {name for name in COUNTED if lexicon.counts_of(name)[VOCABULARY + 10]} == {"outside"}
    assert {name for name in COUNTED if lexicon.counts_of(name)[eod]} == {"ends"}
    assert lexicon.counts_of("ends").sum() == lexicon.counts_of("outside").sum() == 1
    assert (lexicon.counts_of("specials")[VOCABULARY : VOCABULARY + 10] == 1).all()
    blind = Lexicon.of_tokenizer(None, 50, eod=3)
    assert not blind.known and blind.counts_of("ends")[3] == 1
    assert {name for name in COUNTED if blind.counts_of(name).any()} == {"ends", "outside"}
