"""Damage somewhere in a document: its score and its kind do not depend on where the pieces are cut, and it is found."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megastable.forensics.oddness.kinds import KINDS
from megastable.forensics.oddness.windows import WINDOW, judge_pieces, spans_of
from megastable.forensics.oddness.yardstick import NAMES, PIECE, Lexicon, Yardstick, cut, document_keys

VOCABULARY, NOISE = 600, 256


def walk(random: np.random.Generator, length: int) -> np.ndarray:
    """Text of a kind, of half of the vocabulary: each token is near the one before it, so that neighbours tell much of
    each other."""
    return (random.integers(VOCABULARY) + random.integers(-3, 4, length).cumsum()) % (VOCABULARY // 2) + 1


@pytest.fixture(scope="module")
def yardstick() -> Yardstick:
    random = np.random.default_rng(0)
    documents = [walk(random, int(n)) for n in random.integers(200, 2000, 250)]
    tokens, edges = np.concatenate(documents), np.append(0, np.cumsum([len(d) for d in documents]))
    return Yardstick.of([(tokens, edges, document_keys(tokens, edges))], Lexicon.of(None, VOCABULARY))


def document(offset: int, noise: int = NOISE, length: int = 2000) -> np.ndarray:
    random = np.random.default_rng(offset)
    ids = walk(random, length)
    ids[offset : offset + noise] = random.integers(1, VOCABULARY, noise)
    return ids


def test_noise_is_told_wherever_it_begins(yardstick: Yardstick) -> None:
    """As long as a piece and across two: neither half of one hides it."""
    whole, scores, kinds = list[float](), list[float](), set[str]()
    for offset in range(300, 300 + PIECE, 16):
        ids = document(offset)
        edges, owner = cut(np.array([0, len(ids)]))
        keys = np.full(len(owner), 7, np.uint64)
        judged = judge_pieces(yardstick, ids, edges, keys)
        worst = int(judged.worst.score.argmax())
        scores.append(float(judged.worst.score[worst]))
        kinds.add(KINDS[judged.worst.kind[worst]])
        first, end = int(judged.first[worst]), int(judged.first[worst] + judged.tokens[worst])
        assert min(end, offset + NOISE) - max(first, offset) >= (end - first) // 2
        name = NAMES[judged.worst.feature[worst]]
        part = yardstick.measure(ids, np.array([first, end]), keys[:1])
        assert judged.value[worst] == pytest.approx(float(part[name][0]), rel=1e-5)
        whole.append(float(yardstick.judge(yardstick.measure(ids, edges, keys)).score.max()))
    assert kinds == {"random tokens"}
    assert min(scores) > 0.8 * max(scores) and min(scores) > 1.3 * min(whole)


def test_sound_pieces_are_what_they_were(yardstick: Yardstick) -> None:
    ids = walk(np.random.default_rng(5), 3000)
    edges, owner = cut(np.array([0, len(ids)]))
    keys = np.full(len(owner), 7, np.uint64)
    judged, plain = (
        judge_pieces(yardstick, ids, edges, keys),
        yardstick.judge(yardstick.measure(ids, edges, keys)),
    )
    sound = plain.score < 1
    assert sound.any() and np.array_equal(judged.worst.score[sound], plain.score[sound])
    assert np.array_equal(judged.first[sound], edges[:-1][sound])
    assert (judged.worst.score >= plain.score).all()


@pytest.mark.parametrize(("offset", "noise"), [(700, 256), (333, 600), (1000, 100), (0, 256), (1744, 256)])
def test_where_it_is(yardstick: Yardstick, offset: int, noise: int) -> None:
    ids = document(offset, noise)
    for least in (3.0, 24.0):
        ((first, end),) = spans_of(yardstick, ids, 7, least)
        assert abs(first - offset) <= WINDOW // 2 and abs(end - offset - noise) <= WINDOW // 2


def test_several_places_and_none(yardstick: Yardstick) -> None:
    ids = np.concatenate(
        [document(400, 200, 1000), document(500, 150, 1000), walk(np.random.default_rng(3), 500)]
    )
    found = spans_of(yardstick, ids, 7, 3.0)
    assert (
        len(found) == 2 and all(a < b for a, b in found) and all(b < c for (_, b), (c, _) in pairwise(found))
    )
    assert abs(found[0][0] - 400) <= WINDOW // 2 and abs(found[1][1] - 1650) <= WINDOW // 2
    # What is as odd nowhere is odd where it is worst; a document shorter than a window is odd as a whole.
    assert len(spans_of(yardstick, walk(np.random.default_rng(4), 900), 7, 25.0)) == 1
    assert spans_of(yardstick, ids[:40], 7, 3.0) == [(0, 40)]
    noise = np.random.default_rng(6).integers(1, VOCABULARY, 1000)
    assert spans_of(yardstick, noise, 7, 3.0) == [(0, 1000)]
