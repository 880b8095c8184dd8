"""Damage somewhere in a document: its score and its kind do not depend on where the pieces are cut, and it is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from megastable_tools.forensics.oddness.judgement import Judgement
from megastable_tools.forensics.oddness.kinds import KINDS, ODD
from megastable_tools.forensics.oddness.windows import WINDOW, JudgedPieces, judge_pieces, spans_of
from megastable_tools.forensics.oddness.yardstick import NAMES, PIECE, Lexicon, Yardstick, cut, document_keys

VOCABULARY, NOISE = 600, 256
HALF = PIECE // 2
Random = np.random.Generator


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


def noise(random: Random, length: int) -> np.ndarray:
    return random.integers(1, VOCABULARY, length)


def shuffled(random: Random, length: int) -> np.ndarray:
    return random.permutation(walk(random, length))


def loop(random: Random, length: int) -> np.ndarray:
    return np.resize(walk(random, 50), length)


def table(random: Random, length: int) -> np.ndarray:
    """It repeats itself, with other entries each time."""
    rows = np.resize(walk(random, 20), length)
    return np.where(random.random(length) < 0.06, shuffled(random, length), rows)


def foreign(random: Random, length: int, share: float = 1.0) -> np.ndarray:
    """Text of the other half of the vocabulary, and of this one."""
    return walk(random, length) + (random.random(length) < share) * (VOCABULARY // 2 - 1)


def by_halves(
    yardstick: Yardstick, first: np.ndarray, second: np.ndarray
) -> tuple[Judgement, Judgement, JudgedPieces]:
    """A piece of two halves: as a whole, each half alone, and what is made of both."""
    ids, key = np.concatenate([first, second]), np.full(2, 7, np.uint64)
    whole, halves = np.array([0, PIECE]), np.array([0, HALF, PIECE])
    return (
        yardstick.judge(yardstick.measure(ids, whole, key[:1])),
        yardstick.judge(yardstick.measure(ids, halves, key)),
        judge_pieces(yardstick, ids, whole, key[:1]),
    )


@pytest.mark.parametrize(
    ("damage", "kind"), [(noise, "random tokens"), (shuffled, "shuffled text"), (loop, "repetition")]
)
@pytest.mark.parametrize("seed", range(2))
def test_what_a_half_is_full_of_is_told(
    yardstick: Yardstick, damage: Callable[[Random, int], np.ndarray], kind: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    whole, halves, judged = by_halves(yardstick, walk(random, HALF), damage(random, HALF))
    assert KINDS[judged.worst.kind[0]] == kind != KINDS[whole.kind[0]]
    assert judged.worst.score[0] == halves.score[1] > whole.score[0]
    assert (judged.first[0], judged.tokens[0]) == (HALF, HALF)


@pytest.mark.parametrize(
    ("damage", "kind"), [(foreign, "another language or register"), (table, "repetition")]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_half_that_is_only_unusual_makes_its_piece_no_odder(
    yardstick: Yardstick, damage: Callable[[Random, int], np.ndarray], kind: str, seed: int
) -> None:
    """Halves of sound text are that more often than whole pieces: they would crowd out what is damaged."""
    random = np.random.default_rng(seed)
    whole, halves, judged = by_halves(yardstick, walk(random, HALF), damage(random, HALF))
    assert KINDS[halves.kind[1]] == kind and halves.score[1] > whole.score[0] >= ODD
    for name in ("score", "kind", "feature"):
        assert getattr(judged.worst, name)[0] == getattr(whole, name)[0]
    assert (judged.first[0], judged.tokens[0]) == (0, PIECE)


def test_a_half_that_is_only_unusual_does_not_hide_the_other(yardstick: Yardstick) -> None:
    random = np.random.default_rng(2)
    whole, halves, judged = by_halves(yardstick, loop(random, HALF), foreign(random, HALF, 0.2))
    assert halves.score[1] > halves.score[0] > whole.score[0]
    assert judged.worst.score[0] == halves.score[0] and KINDS[judged.worst.kind[0]] == "repetition"


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
