"""The loader during warm-ups: every position once or skipped, whatever the ranks, stops, rewinds and skips."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.config.warmups import Stages
from megastable.data.loader import Loader, Step, segments_of
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skips import Skips
from megastable.data.source import Source
from megastable_tools.prepare.coming import batches_ahead
from tests.tiers import examples

LENGTH, EOD = 16, 0
UNIT = 12  # of all batches: divides over 1, 2, 3, 4, 6 and 12 ranks
Ranges = list[tuple[int, int]]
PIECES = Stages((0, 21, 40, 100), (2, 4, 8, 16))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    from tests.conftest import write_corpus

    folder = tmp_path_factory.mktemp("warmups")
    manifest: Manifest = write_corpus(folder, tokens=6000)
    stream = Stream(folder, manifest, "train")
    return Source(Order([OrderedCorpus("one", stream.tokens, 1.0)], LENGTH, seed=3, block=64), [stream], EOD)


@st.composite
def batch_stages(draw: st.DrawFn) -> Stages:
    sizes = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=4)))
    firsts = draw(st.lists(st.integers(0, 250), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    return Stages((0, *sorted(firsts)), tuple(UNIT * n for n in sizes))


skips = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 60)).map(lambda t: (t[0], t[0] + t[1])), max_size=6
)
layouts = st.sampled_from(
    [(ranks, micro) for ranks in (1, 2, 3, 4, 6) for micro in (1, 2, 3) if UNIT % (ranks * micro) == 0]
)


def walk(stages: Stages, left: Skips, cursor: int, steps: int) -> list[tuple[int, list[int]]]:
    """Cursor and positions of each step, one position after the other."""
    found = []
    for _ in range(steps):
        first, taken = cursor, list[int]()
        size = next(
            v for f, v in reversed(list(zip(stages.firsts, stages.values, strict=True))) if f <= first
        )
        while len(taken) < size:
            if not left.contains(cursor):
                taken.append(cursor)
            cursor += 1
        found.append((first, taken))
    return found


def load(
    source: Source, stages: Stages, left: Skips, cursor: int, layout: tuple[int, int], rank: int
) -> Loader:
    ranks, micro = layout
    return Loader(source, left, cursor, stages, micro, rank, ranks, False, pieces=PIECES)


def check(steps: list[list[Step]], wanted: list[tuple[int, list[int]]], layout: tuple[int, int]) -> None:
    """Every rank's steps: the same cursors, and parts that are the batch, each position on one rank."""
    ranks, micro = layout
    for number, (first, positions) in enumerate(wanted):
        together = np.full((len(positions) // (ranks * micro), ranks, micro), -1)
        for rank in range(ranks):
            step = steps[rank][number]
            assert (step.first, step.positions.tolist()) == (first, positions)
            assert step.next == positions[-1] + 1 and step.piece == PIECES.at(positions[-1])
            for index, batch in enumerate(step.micro_batches):
                together[index, rank] = batch.positions.numpy()
        assert together.ravel().tolist() == positions


@settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch_stages(), skips, layouts, layouts, st.integers(0, 8), st.integers(0, 8), st.data())
def test_every_position_is_trained_once_or_skipped(
    source: Source,
    stages: Stages,
    ranges: Ranges,
    before: tuple[int, int],
    after: tuple[int, int],
    stop: int,
    more: int,
    data: st.DataObject,
) -> None:
    """`stop` steps on some ranks; a rewind to an earlier one with further skips; a resume on other ranks: each leads to
    the steps of one walk over the positions, with nothing twice, and nothing left out but what is skipped."""
    left, back = Skips.of(ranges), data.draw(st.integers(0, stop))
    wanted = walk(stages, left, 0, stop)
    loaders = [load(source, stages, left, 0, before, rank) for rank in range(before[0])]
    try:
        check([list(islice(loader, stop)) for loader in loaders], wanted, before)
        # Back in memory, with more to skip from there on.
        cursor = wanted[back][0] if back < stop else loaders[0].cursor
        left = left.union(Skips.of(data.draw(skips)).minus(Skips.of([(0, max(cursor, 1))])))
        for loader in loaders:
            loader.go_to(cursor, left)
            assert loader.batch == stages.at(cursor)
        again = walk(stages, left, cursor, 2)
        check([list(islice(loader, 2)) for loader in loaders], again, before)
        cursor = loaders[0].cursor
    finally:
        for loader in loaders:
            loader.close()
    # And on with another number of ranks, from what a checkpoint holds: the cursor.
    rest = walk(stages, left, cursor, more)
    others = [load(source, stages, left, cursor, after, rank) for rank in range(after[0])]
    try:
        check([list(islice(loader, more)) for loader in others], rest, after)
    finally:
        for loader in others:
            loader.close()
    done = [p for _, positions in [*wanted[:back], *again, *rest] for p in positions]
    end = done[-1] + 1 if done else 0
    assert sorted({*done} | {p for p in range(end) if left.contains(p)}) == list(range(end))
    assert len(done) == len({*done}) and not any(left.contains(p) for p in done)


@settings(deadline=None, max_examples=examples(60))
@given(batch_stages(), skips, st.integers(0, 400), st.integers(0, 12))
@example(
    Stages((0, 24), (12, 24)), [(5, 20)], 0, 3
)  # a skip carries the second step past the end of the first stage
def test_what_is_ahead_is_what_will_be_read(stages: Stages, ranges: Ranges, cursor: int, steps: int) -> None:
    left = Skips.of(ranges)
    found = batches_ahead(left, stages, cursor, steps)
    assert [batch.tolist() for batch in found] == [taken for _, taken in walk(stages, left, cursor, steps)]


@settings(
    deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 130), st.booleans())
def test_samples_are_cut_by_their_own_position(source: Source, cursor: int, apart: bool) -> None:
    """In a step, and read again: into pieces of the length at the position; documents end there, too."""
    with Loader(source, Skips.of([]), cursor, UNIT, 3, 0, 1, apart, pieces=PIECES) as loader:
        step = next(loader)
        again = loader.read(step.positions)
        alone = loader.read(np.repeat(step.positions[:1], 3))[0]
    whole = all(PIECES.at(p) == LENGTH for p in step.positions.tolist())
    for batch, same in zip(step.micro_batches, again, strict=True):
        assert (batch.segments is None) == (whole and not apart)
        if batch.segments is None:
            assert same.segments is None
            continue
        assert same.segments is not None and same.segments.tolist() == batch.segments.tolist()
        for position, tokens, segments in zip(
            batch.positions.tolist(), batch.tokens.tolist(), batch.segments.tolist(), strict=True
        ):
            number = 0
            for at, token in enumerate(tokens):
                cut = at and at % PIECES.at(position) == 0
                number += bool(at and (cut or (apart and tokens[at - 1] == EOD)))
                assert segments[at] == number, (position, at, token)
    first = step.micro_batches[0].segments
    if alone.segments is not None and first is not None:
        assert alone.segments[0].tolist() == first[0].tolist()


def test_no_label_is_lost(source: Source) -> None:
    """Pieces have the tokens and labels of the whole sample."""
    with Loader(source, Skips.of([]), 0, UNIT, UNIT, 0, 1, False, pieces=PIECES) as cut:
        (one,) = next(cut).micro_batches
    with Loader(source, Skips.of([]), 0, UNIT, UNIT, 0, 1, False) as whole:
        (other,) = next(whole).micro_batches
    assert one.tokens.equal(other.tokens) and one.labels.equal(other.labels) and other.segments is None
    assert segments_of(one.tokens.numpy(), None, np.full(UNIT, 2)).tolist() == one.segments.tolist()  # type: ignore[union-attr]


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(source: Source) -> None:
    with pytest.raises(ConfigError, match="a global batch of 12 cannot be cut"):
        Loader(source, Skips.of([]), 0, Stages((0, 9), (12, 16)), 4, 0, 4, False)
