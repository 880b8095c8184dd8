from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megastable.data.tokenizer import load_tokenizer
from megastable_tools.forensics.oddness.lexicon import COUNTED, LONGEST_PIECE, MOST, Lexicon, unpack
from tests.data.texts import hugging_face_file
from tests.forensics.texts import VOCABULARY, tokenizer

TEXT = "Naïve café\t(42 ABC)\r\n\x01\x00 \x7f end: wörld → 日本 Ã¤ \x85\n"


@cache
def _lexicon() -> Lexicon:
    return Lexicon.of(tokenizer(), VOCABULARY)


def _sums(lexicon: Lexicon, ids: list[int]) -> dict[str, int]:
    return {name: int(lexicon.table(name)[ids].sum()) for name in COUNTED}


def test_the_counts_of_a_text_add_up_over_its_tokens() -> None:
    text = "def read(self, SIZE=42):\n\treturn None\n"
    found = _sums(Lexicon.of(tokenizer(), VOCABULARY), tokenizer().encode(text))
    assert found["bytes"] == len(text) == found["characters"]
    assert found["letters"] == sum(c.isalpha() for c in text)
    assert found["digits"] == 2
    assert found["capitals"] == 5
    assert found["spaces"] == sum(c.isspace() for c in text)
    assert found["controls"] == found["nulls"] == found["foreign"] == found["outside"] == 0


def test_bytes_and_characters_add_up_for_both_kinds_of_tokenizer(tmp_path: Path) -> None:
    for some in (tokenizer(), load_tokenizer(hugging_face_file(tmp_path))):
        found = _sums(Lexicon.of(some, some.vocab_size), some.encode(TEXT))
        assert found["bytes"] == len(TEXT.encode())
        assert found["characters"] == len(TEXT)
        assert found["foreign"] == sum(c > "\x7f" for c in TEXT)
        assert found["nulls"] == 1
        assert found["controls"] == 2  # \x01 and \x7f; a tab and a newline are text


def test_bytes_of_a_fallback_are_known_and_counted() -> None:
    lexicon = Lexicon.of(tokenizer(), VOCABULARY)
    ids = tokenizer().encode("\ufffd日")
    assert [int(lexicon.byte[i]) for i in ids] == list("\ufffd日".encode())
    assert _sums(lexicon, ids)["fallbacks"] == 6


def test_the_entry_beyond_the_vocabulary_is_outside_and_nothing_else() -> None:
    lexicon = Lexicon.of(tokenizer(), VOCABULARY)
    assert {name for name in COUNTED if lexicon.table(name)[VOCABULARY]} == {"outside"}
    assert not lexicon.table("outside")[:VOCABULARY].any()


def test_the_end_of_a_document_counts_as_nothing_but_an_end() -> None:
    lexicon = Lexicon.of(tokenizer(), VOCABULARY)
    assert {name for name in COUNTED if lexicon.table(name)[tokenizer().eod]} == {"ends"}
    assert lexicon.table("ends").sum() == 1


def test_padding_of_the_vocabulary_is_special() -> None:
    lexicon = Lexicon.of(tokenizer(), VOCABULARY + 10)
    assert (lexicon.table("specials")[VOCABULARY : VOCABULARY + 10] == 1).all()
    assert lexicon.table("outside")[VOCABULARY + 10] == 1


def test_without_a_tokenizer_only_ends_and_ids_are_known() -> None:
    lexicon = Lexicon.of(None, 50, eod=3)
    assert not lexicon.known
    counted = {name for name in COUNTED if lexicon.table(name).any()}
    assert counted == {"ends", "outside"}
    assert lexicon.table("ends")[3] == 1


@given(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=LONGEST_PIECE))
def test_sums_of_packed_words_are_sums_of_counts(ids: list[int]) -> None:
    lexicon = _lexicon()
    sums = unpack(lexicon.words[:, ids].sum(axis=1, dtype=np.uint64)[:, None])
    for name in COUNTED:
        assert int(sums[name][0]) == int(lexicon.table(name)[ids].sum())


def test_the_longest_piece_of_the_fullest_tokens_overflows_nothing() -> None:
    assert LONGEST_PIECE * MOST < 1 << 16
