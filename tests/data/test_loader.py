"""The loader: one global order whatever the layout, exact resumption, and a thread that leaves no trace."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable.config.tree import DataConfig
from megastable.config.warmups import Stages
from megastable.data.loader import Loader, RankPart, Step
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.samples import Source
from megastable.data.skips import Selection, Skips, batches_ahead
from megastable.parallel.layout import find_own_tokens
from tests.tiers import examples

MakeCorpus = Callable[..., Manifest]
LENGTH, EOD = 16, 0
SKIPS = Skips.from_ranges([(0, 3), (10, 11), (30, 75)])


@pytest.fixture
def source(tmp_path: Path, make_corpus: MakeCorpus) -> Source:
    """Two corpora, one of two shards."""
    streams, corpora = [], []
    for name, sizes, weight in [("books", [900, 700], 0.75), ("web", [500], 0.25)]:
        manifest = make_corpus(tmp_path / name, sizes, seed=len(streams))
        streams.append(Stream(tmp_path / name, manifest, "train"))
        corpora.append(OrderedCorpus(name, streams[-1].tokens, weight))
    return Source(Order(corpora, LENGTH, seed=3, block=64), streams, EOD)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def load(
    source: Source,
    steps: int,
    cursor: int = 0,
    skips: Skips | Selection = SKIPS,
    global_batch: int = 24,
    apart: bool = False,
    **part: Any,
) -> list[Step]:
    config = DataConfig(keep_documents_apart=apart)
    with Loader(
        source, skips, cursor, global_batch, RankPart(**{"micro_batch": 4, **part}), config
    ) as loader:
        return list(islice(loader, steps))


def rows(step: Step) -> dict[int, list[int]]:
    """Position -> its tokens and last label, as this rank was given them."""
    return {
        position: [*tokens, labels[-1]]
        for batch in step.micro_batches
        for position, tokens, labels in zip(
            batch.positions.tolist(), batch.tokens.tolist(), batch.labels.tolist(), strict=True
        )
    }


def test_loader_gives_a_step(source: Source) -> None:
    (step,) = load(source, 1)
    assert step.first == 0
    assert step.positions.tolist() == [p for p in range(28) if p not in (0, 1, 2, 10)]
    assert step.next == 28
    assert len(step.micro_batches) == 6
    for number, batch in enumerate(step.micro_batches):
        assert batch.positions.tolist() == step.positions[4 * number : 4 * number + 4].tolist()
        samples = torch.from_numpy(source.read_samples(batch.positions.numpy()))
        assert torch.equal(batch.tokens, samples[:, :-1])
        assert torch.equal(batch.labels, samples[:, 1:])
        assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.labels.is_contiguous()
        assert batch.segments is None


def test_go_to_recovers_from_an_error_ahead(source: Source) -> None:
    left = Skips.from_ranges([(72, 2**62)])
    with Loader(source, left, 0, 24, RankPart(4), DataConfig(prefetch=1)) as loader:
        list(islice(loader, 3))
        with pytest.raises(DataError, match="all others are skipped"):
            next(loader)
        loader.go_to(24, SKIPS)
        assert rows(next(loader)) == rows(load(source, 1, cursor=24)[0])


@settings(
    deadline=None, max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([(24, 1), (4, 2), (2, 3), (1, 8)]),
    st.sampled_from([(1, False), (2, False), (16, False), (1, True), (4, True), (8, True)]),
    st.booleans(),
    st.integers(0, 500),
)
def test_loader_parts_of_a_context_group_are_its_samples(
    source: Source, sizes: tuple[int, int], shared: tuple[int, bool], apart: bool, cursor: int
) -> None:
    """The same positions in the same order as without it, and segments of the whole sequence on every rank."""
    (micro_batch, groups), (context, ring) = sizes, shared
    places = [find_own_tokens(LENGTH, context, rank, ring) for rank in range(context)]
    order = torch.tensor([place for parts in places for part in parts for place in part]).argsort()
    for group in range(groups):
        place = {"micro_batch": micro_batch, "data_size": groups, "data_rank": group}
        whole = load(source, 2, cursor, apart=apart, **place)
        ranks = [load(source, 2, cursor, apart=apart, **place, tokens=own_tokens) for own_tokens in places]
        for number, step in enumerate(whole):
            for parts, batch in zip(
                zip(*(steps[number].micro_batches for steps in ranks), strict=True),
                step.micro_batches,
                strict=True,
            ):
                assert torch.equal(torch.cat([p.tokens for p in parts], 1)[:, order], batch.tokens)
                assert torch.equal(torch.cat([p.labels for p in parts], 1)[:, order], batch.labels)
                for p in parts:
                    assert p.tokens.shape == (micro_batch, LENGTH // context) and p.tokens.is_contiguous()
                    assert torch.equal(p.positions, batch.positions)
                    assert (p.segments is None) is (batch.segments is None) is not apart
                    if p.segments is not None and batch.segments is not None:
                        assert torch.equal(p.segments, batch.segments)


def test_loader_raises_what_its_thread_met(source: Source, tmp_path: Path) -> None:
    with Loader(source, SKIPS, 0, 24, RankPart(4), DataConfig()) as loader:
        next(loader)
        for shard in (tmp_path / "books").glob("*.bin"):
            os.truncate(shard, 0)
        with pytest.raises(DataError, match="became shorter"):
            list(islice(loader, 10))
        cursor = loader.cursor
        with pytest.raises(DataError, match="became shorter"):
            next(loader)
        assert loader.cursor == cursor


@pytest.mark.parametrize(
    "layout",
    [
        {"global_batch": 25}, {"data_size": 5}, {"micro_batch": 0}, {"data_rank": 1}, {"data_rank": -1},
        {"tokens": (range(-1, 3),)}, {"tokens": (range(0, 2), range(LENGTH, LENGTH + 2))},
    ],
)  # fmt: skip
def test_loader_refuses_layouts(source: Source, layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load(source, 1, **layout)


def test_source_refuses_an_order_of_other_corpora(source: Source) -> None:
    with pytest.raises(DataError, match="the order was made for corpora of"):
        Source(source.order, source.streams[::-1], EOD)


LENGTH, EOD = 16, 0
UNIT = 12  # of all batches: divides over 1, 2, 3, 4, 6 and 12 ranks
Ranges = list[tuple[int, int]]
PIECES = Stages((0, 21, 40, 100), (2, 4, 8, 16))


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory) -> Source:
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


def load_stages(
    long_source: Source, stages: Stages, left: Skips, cursor: int, layout: tuple[int, int], rank: int
) -> Loader:
    ranks, micro = layout
    return Loader(
        long_source, left, cursor, stages, RankPart(micro, rank, ranks), DataConfig(), pieces=PIECES
    )


def check(steps: list[list[Step]], wanted: list[tuple[int, list[int]]], layout: tuple[int, int]) -> None:
    """Every rank's steps: the same cursors, and parts that are the batch, each position on one rank."""
    ranks, micro = layout
    for number, (first, positions) in enumerate(wanted):
        together = np.full((len(positions) // (ranks * micro), ranks, micro), -1)
        for rank in range(ranks):
            step = steps[rank][number]
            assert (step.first, step.positions.tolist()) == (first, positions)
            assert step.next == positions[-1] + 1 and step.piece == PIECES.value_at(positions[-1])
            for index, batch in enumerate(step.micro_batches):
                together[index, rank] = batch.positions.numpy()
        assert together.ravel().tolist() == positions


@settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch_stages(), skips, layouts, layouts, st.integers(0, 8), st.integers(0, 8), st.data())
def test_loader_trains_every_position_once_or_skips_it(
    long_source: Source,
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
    left, back = Skips.from_ranges(ranges), data.draw(st.integers(0, stop))
    wanted = walk(stages, left, 0, stop)
    loaders = [load_stages(long_source, stages, left, 0, before, rank) for rank in range(before[0])]
    try:
        check([list(islice(loader, stop)) for loader in loaders], wanted, before)
        # Back in memory, with more to skip from there on.
        cursor = wanted[back][0] if back < stop else loaders[0].cursor
        left = left.union(Skips.from_ranges(data.draw(skips)).minus(Skips.from_ranges([(0, max(cursor, 1))])))
        for loader in loaders:
            loader.go_to(cursor, left)
            assert loader.batch == stages.value_at(cursor)
        again = walk(stages, left, cursor, 2)
        check([list(islice(loader, 2)) for loader in loaders], again, before)
        cursor = loaders[0].cursor
    finally:
        for loader in loaders:
            loader.close()
    # And on with another number of ranks, from what a checkpoint holds: the cursor.
    rest = walk(stages, left, cursor, more)
    others = [load_stages(long_source, stages, left, cursor, after, rank) for rank in range(after[0])]
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
def test_batches_ahead_are_what_will_be_read(stages: Stages, ranges: Ranges, cursor: int, steps: int) -> None:
    left = Skips.from_ranges(ranges)
    found = batches_ahead(left, stages, cursor, steps)
    assert [batch.tolist() for batch in found] == [taken for _, taken in walk(stages, left, cursor, steps)]


@settings(
    deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 130), st.booleans())
def test_loader_cuts_samples_by_their_position(long_source: Source, cursor: int, apart: bool) -> None:
    """In a step, and read again: into pieces of the length at the position; documents end there, too."""
    none, config = Skips.from_ranges([]), DataConfig(keep_documents_apart=apart)
    with Loader(long_source, none, cursor, UNIT, RankPart(3), config, pieces=PIECES) as loader:
        step = next(loader)
        again = loader.read_micro_batches(step.positions)
        alone = loader.read_micro_batches(np.repeat(step.positions[:1], 3))[0]
    whole = all(PIECES.value_at(p) == LENGTH for p in step.positions.tolist())
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
                cut = at and at % PIECES.value_at(position) == 0
                number += bool(at and (cut or (apart and tokens[at - 1] == EOD)))
                assert segments[at] == number, (position, at, token)
    first = step.micro_batches[0].segments
    if alone.segments is not None and first is not None:
        assert alone.segments[0].tolist() == first[0].tolist()
