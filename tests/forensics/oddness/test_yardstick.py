from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.forensics.oddness.features import NAMES
from megastable_tools.forensics.oddness.lexicon import Lexicon
from megastable_tools.forensics.oddness.tables import Tables, halves
from megastable_tools.forensics.oddness.yardstick import KINDS, PIECE, Yardstick, cut, document_keys
from tests.forensics.texts import VOCABULARY, documents, joined, scores, tokenizer, yardstick, yardstick_of


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(1, 1024))
def test_pieces_cover_their_documents_evenly(lengths: list[int], most: int) -> None:
    edges = np.append(7, 7 + np.cumsum(lengths)).astype(np.int64)
    pieces, owner = cut(edges, most)
    sizes = np.diff(pieces)
    assert pieces[0] == edges[0] and pieces[-1] == edges[-1]
    assert sizes.max(initial=0) <= most
    assert np.unique(owner).tolist() == list(range(len(lengths)))
    for document, length in enumerate(lengths):
        own = sizes[owner == document]
        assert own.sum() == length
        assert own.max() - own.min() <= 1
        assert len(own) == max(-(-length // most), 1)


def test_copies_of_a_document_have_one_key() -> None:
    tokens, edges = joined([documents()[0], documents()[1], documents()[0]])
    first, second, third = document_keys(tokens, edges)
    assert first == third != second


def test_keys_part_documents_into_halves() -> None:
    tokens, edges = joined(documents())
    share = halves(document_keys(tokens, edges)).mean()
    assert 0.4 < share < 0.6


def test_a_document_is_measured_without_itself() -> None:
    """One that nothing else is like: by tables that hold it as often as one likes, it is as rare as without."""
    random = np.random.default_rng(0)
    strange = random.integers(3, VOCABULARY, 400)
    tokens, edges = joined([*documents(), *[strange] * 30])
    ids, keys = tokens.astype(np.uint32), document_keys(tokens, edges)
    tables = Tables.of(ids, edges, keys, VOCABULARY + 1)
    own, other = int(halves(keys[-1:])[0]), 1 - int(halves(keys[-1:])[0])
    assert tables.rarity[own][strange].mean() > tables.rarity[other][strange].mean() + 1


def test_what_was_saved_judges_the_same(tmp_path: Path) -> None:
    path = tmp_path / "yardstick.npz"
    yardstick().save(path)
    some = documents()[:40]
    np.testing.assert_array_equal(scores(Yardstick.load(path), some), scores(yardstick(), some))


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "yardstick.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"yardstick\.npz"):
        Yardstick.load(path)


def test_a_file_cut_off_or_of_other_features_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "yardstick.npz"
    yardstick().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        Yardstick.load(path)
    np.savez(path, format=np.array(1), names=np.array(["other"]))
    with pytest.raises(DataError, match="another version"):
        Yardstick.load(path)
    with pytest.raises(DataError, match="cannot be read"):
        Yardstick.load(tmp_path / "missing.npz")


def test_a_sample_without_tokens_is_refused() -> None:
    lexicon = Lexicon.of(None, 10)
    for sample in ([], [(np.zeros(0, np.uint16), np.zeros(1, np.int64))]):
        with pytest.raises(DataError, match="no tokens"):
            Yardstick.of(sample, lexicon)


@pytest.mark.parametrize("lengths", [[1], [3, 0, 2], [1] * 50])
def test_tiny_samples_judge_without_an_error(lengths: list[int]) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 10, sum(lengths)).astype(np.uint16)
    edges = np.append(0, np.cumsum(lengths))
    tiny = Yardstick.of([(tokens, edges)], Lexicon.of(None, 10))
    judged = tiny.judge(tiny.measure(tokens, edges, document_keys(tokens, edges)))
    assert np.isfinite(judged.score).all() and (judged.score >= 0).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_ids_beyond_the_vocabulary_are_found_and_crash_nothing(dtype: type) -> None:
    tokens, edges = joined(documents()[:30])
    broken = tokens.astype(dtype)
    at = slice(int(edges[7]) + 5, int(edges[7]) + 60)
    broken[at] = np.iinfo(dtype).max
    if dtype != np.uint16:
        broken[at.start] = -1
    pieces, owner = cut(edges)
    judged = yardstick().judge(yardstick().measure(broken, pieces, document_keys(broken, edges)[owner]))
    assert owner[judged.score.argmax()] == 7
    assert KINDS[judged.kind[judged.score.argmax()]] == "outside of the vocabulary"


def test_types_of_ids_do_not_matter() -> None:
    tokens, edges = joined(documents()[:20])
    pieces, owner = cut(edges)
    keys = document_keys(tokens, edges)[owner]
    first, *others = (
        yardstick().measure(tokens.astype(dtype), pieces, keys) for dtype in (np.uint16, np.int32, np.int64)
    )
    for other in others:
        for name in NAMES:
            np.testing.assert_array_equal(first[name], other[name])


def test_without_a_tokenizer_noise_is_still_odd() -> None:
    tokens, edges = joined(documents())
    blind = Yardstick.of([(tokens, edges)], Lexicon.of(None, VOCABULARY, tokenizer().eod))
    random = np.random.default_rng(1)
    some = documents()[:20]
    mixed = [random.permutation(document) for document in some]
    assert np.median(scores(blind, mixed)) > 3 > 1 > np.median(scores(blind, some))


def test_junk_in_the_sample_does_not_make_junk_usual() -> None:
    random = np.random.default_rng(2)
    junk = [random.integers(3, VOCABULARY, 500) for _ in range(len(documents()) // 60)]
    spoiled = yardstick_of([*documents(), *junk])
    assert scores(spoiled, junk).min() > 3
    assert np.quantile(scores(spoiled, documents()), 0.9) < 1.5


def test_a_reference_judges_another_corpus() -> None:
    some, others = documents()[::2], documents()[1::2]
    by_reference = yardstick_of(some)
    random = np.random.default_rng(3)
    mixed = [random.permutation(document) for document in others]
    assert np.median(scores(by_reference, others)) < 1
    assert np.quantile(scores(by_reference, mixed), 0.05) > 1.5


def test_a_burst_of_noise_in_a_long_document_is_found() -> None:
    long = np.concatenate([d for d in documents() if len(d) > 400][:8])
    random = np.random.default_rng(4)
    spoiled = long.copy()
    spoiled[2000:2400] = random.integers(3, VOCABULARY, 400)
    whole, noisy = scores(yardstick(), [long, spoiled])
    assert noisy > 4 and noisy > whole + 2


def test_the_kind_and_the_sentence_are_for_people() -> None:
    tokens, edges = joined([np.resize(documents()[0][:9], 200), documents()[3]])
    features = yardstick().measure(tokens, edges, document_keys(tokens, edges))
    judged = yardstick().judge(features)
    assert KINDS[judged.kind[0]] == "repetition"
    values = {name: float(column[0]) for name, column in features.items()}
    told = yardstick().explain(values, "repeats")
    assert told.startswith("95 % of its 5-grams came before in it, usual ")
    assert yardstick().explain(values, NAMES.index("repeats")) == told
    assert yardstick().explain(values) == yardstick().explain(values, int(judged.feature[0]))


def test_no_piece_is_longer_than_a_word_can_count() -> None:
    assert PIECE <= 1024
