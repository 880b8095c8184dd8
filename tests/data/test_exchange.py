"""Exchanged samples: whatever is exchanged, and however often, the order stays a permutation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.data.deferral import Deferral, DeferralRoom, plan
from megastable.data.exchange import Exchange, Exchanged, swaps_of
from megastable.data.order import LAST_POSITION, Order, OrderedCorpus, Phase
from megastable.data.skips import Exclusions, Identity, Selection, Skips
from tests.tiers import examples

BLOCK = 64


def order(*sequences: int, phases: tuple[Phase, ...] = (), seed: int = 3) -> Order:
    """Corpora "a", "b", ... of so many sequences of 8 tokens, evenly blended in blocks of 64."""
    corpora = [OrderedCorpus(f"{chr(97 + i)}", 8 * n + 1, 1.0, chr(97 + i)) for i, n in enumerate(sequences)]
    return Order(corpora, 8, seed, BLOCK, phases)


def read(of: Order, positions: Any) -> list[tuple[int, int, int]]:
    """Corpus, epoch and sequence of what stands at some positions."""
    return list(zip(*(field.tolist() for field in of.locate(positions)[:3]), strict=True))


swaps = st.tuples(st.integers(0, 120), st.integers(0, 120), st.integers(1, 20)).map(
    lambda t: (t[0], t[0] + t[2] + t[1], t[2])
)
exchanges = st.lists(
    st.builds(Exchange, st.sampled_from(["a", "b"]), st.lists(swaps, min_size=1, max_size=3).map(tuple)),
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(exchanges=exchanges)
def test_any_exchanges_are_a_permutation_and_are_made_one_on_top_of_another(
    exchanges: list[Exchange],
) -> None:
    plain = order(150, 90)
    one_by_one = plain
    for exchange in exchanges:
        before, after = one_by_one, one_by_one.exchanging([exchange])
        index = "ab".index(exchange.corpus)
        slots = np.arange(400)
        held = read(before, before.positions_at(index, slots))
        for first, second, count in exchange.swaps:
            for a, b in zip(range(first, first + count), range(second, second + count), strict=True):
                held[a], held[b] = held[b], held[a]
        assert read(after, after.positions_at(index, slots)) == held
        one_by_one = after
    end = 12 * BLOCK
    assert sorted(read(one_by_one, np.arange(end))) == sorted(read(plain, np.arange(end)))
    assert read(plain.exchanging(exchanges), np.arange(end)) == read(one_by_one, np.arange(end))


@settings(deadline=None, max_examples=examples(40))
@given(exchanges=exchanges, first=st.integers(0, 300), length=st.integers(0, 400), data=st.data())
def test_the_way_back_finds_exchanged_samples(
    exchanges: list[Exchange], first: int, length: int, data: st.DataObject
) -> None:
    of = order(150, 90).exchanging(exchanges)
    corpus = data.draw(st.integers(0, 1))
    wanted = data.draw(st.lists(st.integers(0, of.sequences[corpus] - 1), max_size=8, unique=True))
    every = np.arange(first, first + length)
    expected = [
        p for p, (c, _, s) in zip(every.tolist(), read(of, every), strict=True) if c == corpus and s in wanted
    ]
    assert of.positions_of(corpus, wanted, first, first + length).tolist() == expected


def test_a_slot_that_is_not_exchanged_holds_its_own_sample() -> None:
    table = Exchanged([(2, 10, 3), (3, 20, 1)])
    slots = np.array([0, 2, 3, 4, 10, 11, 12, 20, 21, 10**12])
    assert table.samples(slots).tolist() == [0, 10, 20, 12, 2, 3, 4, 11, 21, 10**12]
    assert table.slots(table.samples(slots)).tolist() == slots.tolist()
    # 11 was put off to slot 20 from slot 3, which had it from an exchange.
    assert table.deferred.tolist() == [10, 11, 12, 20]
    assert Exchanged([]).samples(slots).tolist() == slots.tolist()


def test_as_few_stretches_as_there_are() -> None:
    firsts, seconds = np.array([1, 2, 3, 7, 8]), np.array([11, 12, 14, 15, 16])
    assert swaps_of(firsts, seconds) == ((1, 11, 2), (3, 14, 1), (7, 15, 2))
    assert swaps_of(firsts[:0], seconds[:0]) == ()


def test_the_fingerprint_until_a_position_knows_what_was_exchanged_before_it() -> None:
    plain, given = order(150, 90), ["x", "y"]
    place = int(plain.positions_at(0, np.array([40]))[0])
    of = plain.exchanging([Exchange("a", ((40, 70, 2),))])
    assert (
        of.fingerprint(given, before=place)
        == plain.fingerprint(given)
        == plain.fingerprint(given, before=place + 1)
    )
    assert of.fingerprint(given, before=place + 1) != plain.fingerprint(given)
    # However it came about: swapped and swapped back is no exchange.
    back = of.exchanging([Exchange("a", ((40, 70, 2),))])
    assert back.fingerprint(given) == plain.fingerprint(given)
    # Which sample came there matters, also where it had been exchanged itself.
    other = plain.exchanging([Exchange("a", ((70, 100, 2),)), Exchange("a", ((40, 70, 2),))])
    assert other.fingerprint(given, before=place + 1) != of.fingerprint(given, before=place + 1)


def test_a_new_blend_leaves_exchanges_as_they_are() -> None:
    """Each corpus goes on with its next sample: that of the exchange, also where it stands at another position."""
    phases = (Phase(0, {"a": 1, "b": 1}), Phase(2, {"a": 1, "b": 3}))
    exchange = [Exchange("a", ((10, 75, 5),)), Exchange("b", ((4, 70, 2),))]
    old, new = order(150, 90).exchanging(exchange), order(150, 90, phases=phases).exchanging(exchange)
    for index in (0, 1):
        slots = np.arange(100)
        assert read(old, old.positions_at(index, slots)) == read(new, new.positions_at(index, slots))
    # And so do samples that are skipped by position.
    positions = np.arange(2 * BLOCK, 4 * BLOCK)
    moved = old.moved_to(new, positions)
    assert sorted(read(old, positions)) == sorted(read(new, moved))


# Deferring


def deferred(
    of: Order, positions: list[int], begin: int, near: int, far: int, end: int, **left: Any
) -> tuple[Order, Deferral]:
    found = plan(of, Selection(of, **left), np.array(positions), DeferralRoom(begin, near, far, end))
    return of.exchanging(found.exchanges), found


def test_deferred_samples_are_read_far_behind_in_the_same_epoch() -> None:
    of = order(1000)
    after, found = deferred(of, [100, 101, 102, 110], 120, 150, 400, 900)
    assert found.positions.tolist() == [100, 101, 102, 110] and found.returns.tolist() == [400, 401, 402, 403]
    assert read(after, found.returns) == read(of, found.positions) and not found.lost.size
    assert after.deferred(0, 900).tolist() == [400, 401, 402, 403]
    assert after.deferred(401, 403).tolist() == [401, 402] and not of.deferred(0, 900).size


def test_where_there_is_little_room_they_are_read_as_late_as_there_is() -> None:
    of = order(1000)
    for end, returns in (
        (403, [399, 400, 401, 402]),
        (300, [296, 297, 298, 299]),
        (124, [120, 121, 122, 123]),
    ):
        _, found = deferred(of, [100, 101, 102, 110], 120, 150, 400, end)
        assert sorted(found.returns.tolist()) == returns, end
    _, found = deferred(of, [100, 101, 102, 110], 120, 150, 400, 122)
    assert found.positions.tolist() == [100, 101] and found.lost.tolist() == [102, 110]
    _, found = deferred(of, [100, 101], 120, 150, 400, 120)
    assert found.exchanges == [] and found.lost.tolist() == [100, 101] and not found.returns.size


def test_the_epoch_is_kept_where_it_has_room() -> None:
    of = order(200)  # ends before `far`
    after, found = deferred(of, [100, 101], 120, 150, 400, 900)
    assert sorted(found.returns.tolist()) == [198, 199]
    assert sorted(read(after, range(200))) == sorted(read(of, range(200)))
    # It ends right behind the trouble: in the next one, and over both all is read as often.
    after, found = deferred(of, [190, 191], 195, 230, 450, 900)
    assert found.returns.tolist() == [450, 451]
    assert sorted(read(after, range(600))) == sorted(read(of, range(600)))
    # A window across its end is of both.
    _, found = deferred(of, [199, 200, 201], 202, 210, 260, 900)
    assert found.returns.tolist() == [260, 261, 262] or found.returns.tolist() == [262, 260, 261]


def test_nobody_is_put_where_something_is_left_out_or_was_exchanged() -> None:
    of = order(1000)
    named = {Identity("a", "a"): Skips.of([(8 * s, 8 * s + 8) for _, _, s in read(of, [401])])}
    left = {"excluded": Exclusions(positions=Skips.of([(402, 404)]), tokens=named), "more": [(405, 406)]}
    of, found = deferred(of, [100, 101], 120, 150, 400, 900, **left)
    assert found.returns.tolist() == [400, 404]
    _, found = deferred(of, [110, 111, 402], 120, 150, 400, 900, **left)
    assert found.positions.tolist() == [110, 111] and found.returns.tolist() == [406, 407]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(40, 300), min_size=1, max_size=3),
    windows=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 30)), min_size=1, max_size=5),
    end=st.integers(300, 900),
    skipped=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 40)), max_size=3),
    room=st.tuples(st.integers(0, 50), st.integers(0, 200)),
)
def test_whatever_is_deferred_a_run_reads_the_same_samples(
    sizes: list[int],
    windows: list[tuple[int, int]],
    end: int,
    skipped: list[tuple[int, int]],
    room: tuple[int, int],
) -> None:
    """Any number of windows in any order: also those in which deferred samples have come back, and those of before."""
    plain = now = order(*sizes)
    more = [(first, first + count) for first, count in skipped]
    lost = set[int]()
    for first, count in windows:
        before = now
        left = Selection(now, more=[*more, *((p, p + 1) for p in lost)])
        window, begin = left.next_kept(first, count)
        if begin > end:
            continue
        found = plan(now, left, window, DeferralRoom(begin, begin + room[0], begin + room[0] + room[1], end))
        now = now.exchanging(found.exchanges)
        lost |= set(found.lost.tolist())
        assert sorted([*found.positions.tolist(), *found.lost.tolist()]) == window.tolist()
        assert (
            not left.mask(found.returns).any()
            and (found.returns >= begin).all()
            and (found.returns < end).all()
        )
        assert read(now, found.returns) == read(before, found.positions)
        assert read(now, range(first)) == read(before, range(first))  # nothing that was read already
        assert set(found.returns.tolist()) <= set(now.deferred(0, end).tolist())
    kept = np.setdiff1d(np.arange(end), [p for a, b in more for p in range(a, b)])
    if not lost:
        assert sorted(read(now, kept)) == sorted(read(plain, kept))
    assert sorted(read(now, range(end))) == sorted(read(plain, range(end)))
    assert read(now, [LAST_POSITION - 1]) == read(plain, [LAST_POSITION - 1])
