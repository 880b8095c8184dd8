"""The baseline of a corpus: what is odd by it, where in a document, and how it is kept."""

from __future__ import annotations

import base64
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.forensics.oddness.features import NAMES, Lexicon
from megastable_tools.forensics.oddness.judgement import KINDS, ODD
from megastable_tools.forensics.oddness.yardstick import (
    PIECE,
    WINDOW,
    Yardstick,
    cut_documents,
    document_keys,
    find_odd_spans,
    judge_pieces,
)  # fmt: skip
from tests.forensics.texts import (
    VOCABULARY,
    Ids,
    documents,
    joined,
    scores,
    tokenizer,
    yardstick,
    yardstick_of,
)

WALKED, NOISE, HALF = 600, 256, PIECE // 2
Random = np.random.Generator


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(1, 1024))
def test_cut_covers_documents_evenly(lengths: list[int], most: int) -> None:
    edges = np.append(7, 7 + np.cumsum(lengths)).astype(np.int64)
    pieces, owner = cut_documents(edges, most)
    sizes = np.diff(pieces)
    assert pieces[0] == edges[0] and pieces[-1] == edges[-1] and sizes.max(initial=0) <= most
    assert np.unique(owner).tolist() == list(range(len(lengths)))
    for document, length in enumerate(lengths):
        own = sizes[owner == document]
        assert (own.sum(), len(own)) == (length, max(-(-length // most), 1)) and own.max() - own.min() <= 1


def test_yardstick_that_was_saved_judges_the_same_and_damage_is_named(tmp_path: Path) -> None:
    path, some = tmp_path / "yardstick.npz", documents()[:40]
    yardstick().save_file(path)
    np.testing.assert_array_equal(scores(Yardstick.load_file(path), some), scores(yardstick(), some))
    for content in (b"", b"not a zip", b"PK\x03\x04 cut off", path.read_bytes()[: path.stat().st_size // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"yardstick\.npz cannot be read"):
            Yardstick.load_file(path)
    np.savez(path, format=np.array(1), names=np.array(["other"]))
    with pytest.raises(DataError, match="another version"):
        Yardstick.load_file(path)


@pytest.mark.parametrize("lengths", [[1], [3, 0, 2], [1] * 50])
def test_yardstick_of_tiny_samples_judges_and_of_none_is_refused(lengths: list[int]) -> None:
    tokens = np.random.default_rng(0).integers(0, 10, sum(lengths)).astype(np.uint16)
    edges = np.append(0, np.cumsum(lengths))
    keys = document_keys(tokens, edges)
    tiny = Yardstick.learn_from([(tokens, edges, keys)], Lexicon.of_tokenizer(None, 10))
    judged = tiny.judge_features(tiny.measure_features(tokens, edges, keys))
    assert np.isfinite(judged.score).all() and (judged.score >= 0).all()
    for sample in ([], [(tokens[:0], edges[:1], keys[:0])]):
        with pytest.raises(DataError, match="no tokens"):
            Yardstick.learn_from(sample, Lexicon.of_tokenizer(None, 10))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_measure_takes_ids_of_any_type_and_finds_those_beyond(dtype: type) -> None:
    tokens, edges = joined(documents()[:30])
    pieces, owner = cut_documents(edges)
    keys = document_keys(tokens, edges)[owner]
    plain, same = (yardstick().measure_features(tokens.astype(t), pieces, keys) for t in (np.uint16, dtype))
    assert all(np.array_equal(plain[name], same[name]) for name in NAMES)
    broken = tokens.astype(dtype)
    broken[int(edges[7]) + 5 : int(edges[7]) + 60] = np.iinfo(dtype).max
    if dtype != np.uint16:
        broken[int(edges[7]) + 5] = -1
    judged = yardstick().judge_features(yardstick().measure_features(broken, pieces, keys))
    worst = judged.score.argmax()
    assert (owner[worst], KINDS[judged.kind[worst]]) == (7, "outside of the vocabulary")


def test_yardstick_without_a_tokenizer_or_of_another_corpus_judges_noise() -> None:
    some, others, random = documents()[::2], documents()[1::2], np.random.default_rng(1)
    blind = yardstick_of(some, Lexicon.of_tokenizer(None, VOCABULARY, tokenizer().eod))
    mixed = [random.permutation(document) for document in others]
    for by in (blind, yardstick_of(some)):
        assert np.median(scores(by, mixed)) > 3 > 1 > np.median(scores(by, others))


def test_junk_in_the_sample_does_not_make_junk_usual() -> None:
    random = np.random.default_rng(2)
    junk = [random.integers(3, VOCABULARY, 500) for _ in range(len(documents()) // 60)]
    spoiled = yardstick_of([*documents(), *junk])
    assert scores(spoiled, junk).min() > 3
    assert np.quantile(scores(spoiled, documents()), 0.9) < 1.5


def _spelled(make: Callable[[bytes], str]) -> Callable[[Ids, Random], list[int]]:
    return lambda ids, random: tokenizer().encode(make(tokenizer().decode(ids.tolist()).encode()))[: len(ids)]


@pytest.mark.parametrize(
    ("kind", "corrupt"),
    [
        ("random tokens", lambda ids, random: random.integers(3, VOCABULARY, len(ids))),
        ("shuffled text", lambda ids, random: random.permutation(ids)),
        ("repetition", lambda ids, random: np.resize(ids[:20], len(ids))),
        ("wrong encoding", _spelled(lambda text: text.decode().encode("utf-16-le").decode("latin-1"))),
        ("encoded data", _spelled(lambda text: base64.b64encode(text).decode())),
    ],
)
def test_every_kind_of_corruption_is_odder_than_text(
    kind: str, corrupt: Callable[[Ids, Random], list[int]]
) -> None:
    random = np.random.default_rng(5)
    some = [document for document in documents() if len(document) >= 300][:30]
    spoiled = [np.array(corrupt(document, random)) for document in some]
    assert (scores(yardstick(), spoiled) > np.quantile(scores(yardstick(), documents()), 0.99)).mean() > 0.8
    tokens, edges = joined([document[: PIECE - 1] for document in spoiled])
    judged = yardstick().judge_features(
        yardstick().measure_features(tokens, edges, document_keys(tokens, edges))
    )
    assert (np.array(KINDS)[judged.kind] == kind).mean() > 0.5


# Where in a document


def walk(random: Random, length: int) -> Ids:
    """Text of a kind, of half of the vocabulary: each token is near the one before it."""
    return (random.integers(WALKED) + random.integers(-3, 4, length).cumsum()) % (WALKED // 2) + 1


def shuffled(random: Random, length: int) -> Ids:
    return random.permutation(walk(random, length))


def loop(random: Random, length: int) -> Ids:
    return np.resize(walk(random, 50), length)


def table(random: Random, length: int) -> Ids:
    """It repeats itself, with other entries each time."""
    rows = np.resize(walk(random, 20), length)
    return np.where(random.random(length) < 0.06, shuffled(random, length), rows)


def foreign(random: Random, length: int, share: float = 1.0) -> Ids:
    """Text of the other half of the vocabulary, and of this one."""
    return walk(random, length) + (random.random(length) < share) * (WALKED // 2 - 1)


@pytest.fixture(scope="module")
def walks() -> Yardstick:
    random = np.random.default_rng(0)
    some = [walk(random, int(n)) for n in random.integers(200, 2000, 250)]
    tokens, edges = np.concatenate(some), np.append(0, np.cumsum([len(d) for d in some]))
    return Yardstick.learn_from(
        [(tokens, edges, document_keys(tokens, edges))], Lexicon.of_tokenizer(None, WALKED)
    )


def noisy(offset: int, noise: int = NOISE, length: int = 2000) -> Ids:
    random = np.random.default_rng(offset)
    ids = walk(random, length)
    ids[offset : offset + noise] = random.integers(1, WALKED, noise)
    return ids


def test_judge_pieces_tells_noise_wherever_it_begins(walks: Yardstick) -> None:
    """As long as a piece and across two: neither half of one hides it. Sound pieces are what they were."""
    whole, worst_scores, kinds = list[float](), list[float](), set[str]()
    for offset in range(300, 300 + PIECE, 16):
        ids = noisy(offset)
        edges, owner = cut_documents(np.array([0, len(ids)]))
        keys = np.full(len(owner), 7, np.uint64)
        judged, plain = (
            judge_pieces(walks, ids, edges, keys),
            walks.judge_features(walks.measure_features(ids, edges, keys)),
        )
        worst = int(judged.worst.score.argmax())
        worst_scores.append(float(judged.worst.score[worst]))
        kinds.add(KINDS[judged.worst.kind[worst]])
        first, end = int(judged.first[worst]), int(judged.first[worst] + judged.tokens[worst])
        assert min(end, offset + NOISE) - max(first, offset) >= (end - first) // 2
        part = walks.measure_features(ids, np.array([first, end]), keys[:1])
        value = float(part[NAMES[judged.worst.feature[worst]]][0])
        assert judged.value[worst] == pytest.approx(value, rel=1e-5)
        sound = plain.score < 1
        assert sound.any() and np.array_equal(judged.worst.score[sound], plain.score[sound])
        assert np.array_equal(judged.first[sound], edges[:-1][sound])
        whole.append(float(plain.score.max()))
    assert kinds == {"random tokens"}
    assert min(worst_scores) > 0.8 * max(worst_scores) and min(worst_scores) > 1.3 * min(whole)


@pytest.mark.parametrize(
    ("damage", "kind", "counts"),
    [(lambda random, n: random.integers(1, WALKED, n), "random tokens", True), (shuffled, "shuffled text", True),
     (loop, "repetition", True), (foreign, "another language or register", False), (table, "repetition", False)],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_judge_pieces_takes_damage_of_a_half_and_nothing_that_is_only_unusual(
    walks: Yardstick, damage: Callable[[Random, int], Ids], kind: str, counts: bool, seed: int
) -> None:
    """Halves of sound text are unusual more often than whole pieces: they would crowd out what is damaged."""
    random = np.random.default_rng(seed)
    ids, key = np.concatenate([walk(random, HALF), damage(random, HALF)]), np.full(2, 7, np.uint64)
    edges = np.array([0, PIECE])
    whole = walks.judge_features(walks.measure_features(ids, edges, key[:1]))
    parts = walks.judge_features(walks.measure_features(ids, np.array([0, HALF, PIECE]), key))
    judged = judge_pieces(walks, ids, edges, key[:1])
    assert KINDS[parts.kind[1]] == kind and parts.score[1] > whole.score[0] >= ODD
    wanted = (
        (parts.score[1], parts.kind[1], HALF, HALF) if counts else (whole.score[0], whole.kind[0], 0, PIECE)
    )
    assert (judged.worst.score[0], judged.worst.kind[0], judged.first[0], judged.tokens[0]) == wanted


@pytest.mark.parametrize(("offset", "noise"), [(700, 256), (333, 600), (1000, 100), (0, 256), (1744, 256)])
def test_spans_of_says_where_it_is(walks: Yardstick, offset: int, noise: int) -> None:
    for least in (3.0, 24.0):
        ((first, end),) = find_odd_spans(walks, noisy(offset, noise), 7, least)
        assert abs(first - offset) <= WINDOW // 2 and abs(end - offset - noise) <= WINDOW // 2


def test_spans_of_several_places_and_none(walks: Yardstick) -> None:
    random = np.random.default_rng(3)
    ids = np.concatenate([noisy(400, 200, 1000), noisy(500, 150, 1000), walk(random, 500)])
    found = find_odd_spans(walks, ids, 7, 3.0)
    assert (
        len(found) == 2 and all(a < b for a, b in found) and all(b < c for (_, b), (c, _) in pairwise(found))
    )
    assert abs(found[0][0] - 400) <= WINDOW // 2 and abs(found[1][1] - 1650) <= WINDOW // 2
    # What is as odd nowhere is odd where it is worst; a document shorter than a window is odd as a whole.
    assert len(find_odd_spans(walks, walk(np.random.default_rng(4), 900), 7, 25.0)) == 1
    assert find_odd_spans(walks, ids[:40], 7, 3.0) == [(0, 40)]
    assert find_odd_spans(walks, random.integers(1, WALKED, 1000), 7, 3.0) == [(0, 1000)]
