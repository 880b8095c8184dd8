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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable.cluster.lineup import lineup
from megastable.data.loader import Loader, Step, segments_of
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import Ledger, SkipEntry
from megastable.data.skips import Selection, Skips
from megastable.data.source import Source
from megastable.model.rope import document_positions
from tests.tiers import examples

MakeCorpus = Callable[..., Manifest]
LENGTH, EOD = 16, 0
SKIPS = Skips.of([(0, 3), (10, 11), (30, 75)])


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
    source: Source, steps: int, cursor: int = 0, skips: Skips | Selection = SKIPS, **options: Any
) -> list[Step]:
    layout = {"global_batch": 24, "micro_batch": 4, "data_rank": 0, "data_size": 1, **options}
    apart = layout.pop("keep_documents_apart", False)
    with Loader(source, skips, cursor, keep_documents_apart=apart, **layout) as loader:
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


def test_samples_are_what_order_and_streams_say(source: Source) -> None:
    positions = np.array([0, 5, 77, 1000])
    samples = source.samples(positions)
    assert samples.shape == (4, LENGTH + 1)
    for position, sample in zip(positions.tolist(), samples, strict=True):
        place = source.order.locate_one(position)
        assert np.array_equal(sample, source.streams[place.corpus].read(place.first_token, LENGTH + 1))
        assert np.array_equal(sample, source.sample(position))


def test_a_step(source: Source) -> None:
    (step,) = load(source, 1)
    assert step.first == 0
    assert step.positions.tolist() == [p for p in range(28) if p not in (0, 1, 2, 10)]
    assert step.next == 28
    assert len(step.micro_batches) == 6
    for number, batch in enumerate(step.micro_batches):
        assert batch.positions.tolist() == step.positions[4 * number : 4 * number + 4].tolist()
        samples = torch.from_numpy(source.samples(batch.positions.numpy()))
        assert torch.equal(batch.tokens, samples[:, :-1])
        assert torch.equal(batch.labels, samples[:, 1:])
        assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.labels.is_contiguous()
        assert batch.segments is None


@pytest.mark.parametrize(("micro_batch", "data_size"), [(24, 1), (1, 1), (4, 2), (2, 3), (1, 24), (3, 8)])
def test_the_global_order_is_the_same_in_every_layout(
    source: Source, micro_batch: int, data_size: int
) -> None:
    reference = load(source, 5, micro_batch=24)
    ranks = [
        load(source, 5, micro_batch=micro_batch, data_size=data_size, data_rank=rank)
        for rank in range(data_size)
    ]
    for number, expected in enumerate(reference):
        parts = [steps[number] for steps in ranks]
        together: dict[int, list[int]] = {}
        for part in parts:
            assert (part.first, part.next) == (expected.first, expected.next)
            assert np.array_equal(part.positions, expected.positions)
            assert len(part.micro_batches) == 24 // (micro_batch * data_size)
            together |= rows(part)
        assert together == rows(expected)
        # Accumulation outermost: the first micro-batches of all ranks are the first positions.
        front = [p for part in parts for p in part.micro_batches[0].positions.tolist()]
        assert front == expected.positions[: micro_batch * data_size].tolist()


HOSTS = tuple("abcdef")


@pytest.mark.slow
@settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    fates=st.lists(
        st.tuples(
            st.sets(st.sampled_from(HOSTS)),  # that are there
            st.dictionaries(st.sampled_from(HOSTS), st.booleans(), max_size=3),  # that failed before
            st.integers(1, 3),  # steps until the next loss or return
            st.integers(0, 2),  # of which so many are lost: done again from the last checkpoint
        ),
        min_size=1,
        max_size=6,
    )
)
def test_hosts_that_are_lost_and_come_back_change_no_order(
    source: Source, fates: list[tuple[set[str], dict[str, bool], int, int]]
) -> None:
    """Four hosts train and two are spares; each attempt has the hosts that cluster/lineup.py gives it."""
    cursor, done, last = 0, list[Step](), tuple[str, ...]()
    for there, barred, steps, lost in fates:
        names = lineup(HOSTS, 4, there, barred, last, 1e9, 0.0, lambda some: 24 % (2 * len(some)) == 0)
        if not names:
            continue  # it waits
        last = names if len(names) == 4 else last
        size = len(names)
        ranks = [
            load(source, steps, cursor=cursor, micro_batch=2, data_size=size, data_rank=rank)
            for rank in range(size)
        ]
        for parts in zip(*ranks, strict=True):
            together: dict[int, list[int]] = {}
            for part in parts:
                together |= rows(part)
            assert sorted(together) == parts[0].positions.tolist() and len(together) == 24  # none twice
            done.append(parts[0])
        if lost:
            del done[-min(lost, steps) :]
        cursor = done[-1].next if done else 0
    for one, other in zip(done, load(source, len(done), micro_batch=24) if done else [], strict=True):
        assert np.array_equal(one.positions, other.positions) and (one.first, one.next) == (
            other.first,
            other.next,
        )


def test_other_batch_sizes_walk_the_same_positions(source: Source) -> None:
    walked = [np.concatenate([s.positions for s in load(source, 120 // n, global_batch=n)]) for n in (24, 40)]
    assert np.array_equal(*walked)
    assert not any(SKIPS.contains(int(position)) for position in walked[0])


def test_resumed_from_the_cursor(source: Source) -> None:
    straight = load(source, 6)
    with Loader(source, SKIPS, 0, 24, 4, 0, 1, False) as loader:
        first = list(islice(loader, 2))
        cursor = loader.cursor  # not the one of what was read ahead
    assert cursor == first[-1].next
    resumed = first + load(source, 4, cursor=cursor, micro_batch=2)
    for one, other in zip(straight, resumed, strict=True):
        assert np.array_equal(one.positions, other.positions)
        assert rows(one) == rows(other)


def test_go_to_keeps_out_what_was_read_ahead(source: Source) -> None:
    more = SKIPS.union(Skips.of([(90, 100), (101, 10**15)]))
    with Loader(source, SKIPS, 0, 24, 4, 0, 1, False, prefetch=4) as loader:
        next(loader)
        cursor = loader.cursor
        loader.go_to(loader.cursor, more)
        assert loader.cursor == cursor
        changed = list(islice(loader, 3))
    expected = load(source, 3, cursor=cursor, skips=more)
    assert [rows(step) for step in changed] == [rows(step) for step in expected]
    assert changed[-1].next > 10**15


@pytest.mark.parametrize("back", [0, 24, 55, 10**12])
def test_go_to_anywhere_is_a_start_there(source: Source, back: int) -> None:
    """Back, forward and to where it stands, with more skipped or less."""
    for skips in (SKIPS, Skips.of([]), Skips.of([(back, back + 40)])):
        with Loader(source, SKIPS, 24, 24, 4, 0, 1, False, prefetch=3) as loader:
            next(loader)
            loader.go_to(back, skips)
            assert loader.cursor == back
            again = list(islice(loader, 2))
        expected = load(source, 2, cursor=back, skips=skips)
        assert [(s.first, s.next, rows(s)) for s in again] == [(s.first, s.next, rows(s)) for s in expected]


def test_go_to_after_an_error_of_what_was_read_ahead(source: Source) -> None:
    with Loader(source, Skips.of([(72, 2**62)]), 0, 24, 4, 0, 1, False, prefetch=1) as loader:
        list(islice(loader, 3))
        with pytest.raises(DataError, match="all others are skipped"):
            next(loader)
        loader.go_to(24, SKIPS)
        assert rows(next(loader)) == rows(load(source, 1, cursor=24)[0])


def test_without_a_corpus_that_was_swapped_out(source: Source) -> None:
    """Only its samples are missing; those of the others come in the same order."""
    out = SkipEntry(first=30, end=2**62, reason="x", corpus="books")
    selection = Selection(source.order, Ledger([out]).exclusions, SKIPS.ranges)
    steps = load(source, 4, skips=selection)
    walked = np.concatenate([step.positions for step in steps])
    everything = np.concatenate([step.positions for step in load(source, 30)])
    kept = [p for p in everything.tolist() if p < 30 or source.order.locate_one(p).corpus == 1]
    assert walked.tolist() == kept[: 4 * 24]
    # A start with it, or on the way, is the same.
    assert [rows(s) for s in load(source, 2, cursor=steps[1].next, skips=selection)] == [
        rows(s) for s in steps[2:]
    ]


@pytest.mark.parametrize(("micro_batch", "data_size"), [(24, 1), (1, 1), (4, 2), (2, 3)])
def test_reading_any_positions(source: Source, micro_batch: int, data_size: int) -> None:
    """In the given order, repeated, skipped ones too; the run goes on as if nothing had been read."""
    unit = micro_batch * data_size
    wanted = np.array([(7 * i + 31) % 50 for i in range(3 * unit)])
    expected = [rows(step) for step in load(source, 3, micro_batch=24)]
    found = np.empty_like(wanted)
    walked: list[dict[int, list[int]]] = [{} for _ in expected]
    for rank in range(data_size):
        with Loader(source, SKIPS, 0, 24, micro_batch, rank, data_size, True) as loader:
            assert loader.unit == unit
            for part in walked:
                part |= rows(next(loader))
                before = (loader.cursor, loader.skips)
                batches = loader.read(wanted)
                assert (loader.cursor, loader.skips) == before
            assert loader.read(wanted[:0]) == []
        for number, batch in enumerate(batches):
            assert batch.positions.shape == (micro_batch,) and batch.segments is not None
            found[number * unit + rank * micro_batch :][:micro_batch] = batch.positions.numpy()
            samples = torch.from_numpy(source.samples(batch.positions.numpy()))
            assert torch.equal(batch.tokens, samples[:, :-1]) and torch.equal(batch.labels, samples[:, 1:])
    assert found.tolist() == wanted.tolist()
    assert walked == expected


@settings(
    deadline=None, max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([(24, 1), (4, 2), (2, 3), (1, 8)]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.booleans(),
    st.integers(0, 500),
)
def test_the_parts_of_a_context_group_joined_are_its_samples(
    source: Source, sizes: tuple[int, int], context: int, apart: bool, cursor: int
) -> None:
    """The same positions in the same order as without it, and segments of the whole sequence on every rank."""
    (micro_batch, groups), rest = sizes, {"cursor": cursor, "keep_documents_apart": apart}
    for group in range(groups):
        place = rest | {"micro_batch": micro_batch, "data_size": groups, "data_rank": group}
        whole = load(source, 2, **place)
        ranks = [load(source, 2, **place, part=(rank, context)) for rank in range(context)]
        for number, step in enumerate(whole):
            for parts, batch in zip(
                zip(*(steps[number].micro_batches for steps in ranks), strict=True),
                step.micro_batches,
                strict=True,
            ):
                assert torch.equal(torch.cat([p.tokens for p in parts], 1), batch.tokens)
                assert torch.equal(torch.cat([p.labels for p in parts], 1), batch.labels)
                for p in parts:
                    assert p.tokens.shape == (micro_batch, LENGTH // context) and p.tokens.is_contiguous()
                    assert torch.equal(p.positions, batch.positions)
                    assert (p.segments is None) is (batch.segments is None) is not apart
                    if p.segments is not None and batch.segments is not None:
                        assert torch.equal(p.segments, batch.segments)


@pytest.mark.parametrize("prefetch", [1, 5])
def test_prefetch_changes_nothing(source: Source, prefetch: int) -> None:
    assert [rows(step) for step in load(source, 4, prefetch=prefetch)] == [
        rows(step) for step in load(source, 4)
    ]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3))
def test_documents_against_a_naive_walk(tokens: list[list[int]]) -> None:
    segments = segments_of(np.array(tokens), eod=0)
    assert segments.dtype == np.int32
    for row, found in zip(tokens, segments.tolist(), strict=True):
        segment = 0
        for token, found_segment in zip(row, found, strict=True):
            assert found_segment == segment
            segment += token == 0


def test_documents_kept_apart_begin_where_the_index_says(source: Source) -> None:
    for step in load(source, 3, keep_documents_apart=True):
        for batch in step.micro_batches:
            assert batch.segments is not None
            assert batch.segments.dtype == torch.int32
            distances = document_positions(batch.segments)
            for row, position in enumerate(batch.positions.tolist()):
                place = source.order.locate_one(position)
                starts = source.streams[place.corpus].document_starts(place.first_token, LENGTH)
                resets = torch.nonzero(distances[row] == 0).flatten() + place.first_token
                assert set(resets.tolist()) == {*starts.tolist(), place.first_token}
                assert int(batch.segments[row, -1]) == len(resets) - 1


def test_an_error_of_the_thread_reaches_the_caller(source: Source, tmp_path: Path) -> None:
    with Loader(source, SKIPS, 0, 24, 4, 0, 1, False) as loader:
        next(loader)
        for shard in (tmp_path / "books").glob("*.bin"):
            os.truncate(shard, 0)
        with pytest.raises(DataError, match="became shorter"):
            list(islice(loader, 10))
        cursor = loader.cursor
        with pytest.raises(DataError, match="became shorter"):
            next(loader)
        assert loader.cursor == cursor


def test_closed_twice_and_with_work_ahead(source: Source) -> None:
    loader = Loader(source, SKIPS, 0, 24, 4, 0, 1, False, prefetch=8)
    loader.close()
    loader.close()


@pytest.mark.parametrize(
    "layout",
    [
        {"global_batch": 25}, {"data_size": 5}, {"micro_batch": 0}, {"data_rank": 1}, {"data_rank": -1},
        {"part": (0, 3)}, {"part": (2, 2)}, {"part": (-1, 2)},
    ],
)  # fmt: skip
def test_layouts_refused(source: Source, layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load(source, 1, **layout)


def test_an_order_of_other_corpora_is_refused(source: Source) -> None:
    with pytest.raises(DataError, match="the order was made for corpora of"):
        Source(source.order, source.streams[::-1], EOD)


def test_nothing_left_to_train_on(source: Source) -> None:
    """The steps before the end are not lost: the cursor is still that of the last one handed out."""
    with pytest.raises(DataError, match="all others are skipped"):
        load(source, 1, skips=Skips.of([(10, 2**62)]))
    with Loader(source, Skips.of([(72, 2**62)]), 0, 24, 4, 0, 1, False, prefetch=1) as loader:
        steps = list(islice(loader, 3))
        with pytest.raises(DataError, match="all others are skipped"):
            next(loader)
        assert loader.cursor == steps[-1].next == 72


def test_positions_are_looked_up_beside_the_training(source: Source) -> None:
    """With a convicted sample a look-up locates all positions of a step: not on the thread that trains."""
    threads = set[threading.Thread]()

    class Watched(Selection):
        def next_kept(self, cursor: int, count: int) -> Any:
            threads.add(threading.current_thread())
            return super().next_kept(cursor, count)

    with Loader(source, Watched(source.order), 0, 24, 4, 0, 1, False) as loader:
        list(islice(loader, 3))
        loader.go_to(0, Watched(source.order))
        next(loader)
    assert len(threads) == 1 and threading.main_thread() not in threads
