"""Units and blocks cover every document once, whatever the sizes; samples are spread; damage is told."""

from __future__ import annotations

import os
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable_tools.forensics.oddness.yardstick import PIECE, cut_documents
from megastable_tools.forensics.scanning import units as module
from megastable_tools.forensics.scanning.units import (
    Unit,
    edges_of,
    open_unit,
    read_blocks,
    sample_documents,
    split_into_units,
)
from tests.forensics.shelves import Plain, write
from tests.tiers import examples

Lengths = list[list[int]]
lengths = st.lists(st.lists(st.integers(0, 12) | st.integers(13, 90), max_size=12), min_size=1, max_size=4)


def shelf(folder: Path, documents: Lengths) -> list[Shard]:
    """Shards of documents of these lengths, each of one to three sequences; token t of all is t."""
    folder.mkdir(exist_ok=True)
    at, shards = 0, []
    for number, shard in enumerate(documents):
        content = []
        for length in shard:
            tokens = list(range(at, at + length))
            cuts = [0, length // 3, length // 3, length] if length % 2 else [0, length]
            content.append([(tokens[a:b], 0) for a, b in pairwise(cuts)])
            at += length
        write(folder, Plain(f"s{number}", content), "int32")
        shards.append(Shard(folder / f"s{number}"))
    return shards


@settings(max_examples=examples(60))
@given(lengths, st.integers(1, 60), st.integers(1, 5))
def test_units_are_all_documents_in_order(
    tmp_path_factory: pytest.TempPathFactory, documents: Lengths, size: int, most: int
) -> None:
    shards = shelf(tmp_path_factory.mktemp("units"), documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DOCUMENTS", most)
        found = list(split_into_units(shards, size))
    assert [unit.number for unit in found] == list(range(len(found)))
    for index, shard in enumerate(shards):
        edges, document = np.cumsum([0, *documents[index]]), 0
        for unit in (unit for unit in found if unit.shard == index):
            assert (unit.first_document, unit.before) == (document, sum(map(len, documents[:index])))
            assert 1 <= unit.documents <= most
            document += unit.documents
            own = edges[unit.first_document : document + 1]
            assert (unit.first_token, unit.first_token + unit.tokens) == (own[0], own[-1])
            assert own[-2] - own[0] < size or unit.documents == 1  # without its last document it is too short
            assert edges_of(shard, unit).tolist() == own.tolist()
        assert document == len(documents[index])


@settings(max_examples=examples(60))
@given(lengths, st.integers(1, 60))
def test_blocks_hold_every_token_once_and_cut_only_long_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: Lengths, size: int
) -> None:
    (shard,) = shelf(tmp_path_factory.mktemp("blocks"), [list(chain(*documents))])
    edges, seen = shard.document_edges(0, shard.documents), set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", size)
        found = list(read_blocks(shard, edges, lambda at: cut_documents(at, 7)))
    assert [int(t) for block in found for t in block.tokens] == list(range(shard.tokens))
    for block in found:
        assert block.edges[0] == 0 and block.edges[-1] == len(block.tokens) > 0
        assert block.first_token == block.tokens[0] and len(block.tokens) <= max(size, 7)
        for a, b, owner in zip(block.edges[:-1], block.edges[1:], block.owner.tolist()):
            assert edges[owner] <= block.first_token + a < block.first_token + b <= edges[owner + 1]
            assert b - a <= 7
        held = set(block.owner.tolist())
        assert all(edges[owner + 1] - edges[owner] > size for owner in seen & held)
        assert len(held) == 1 or all(edges[owner + 1] - edges[owner] <= size for owner in held)
        seen |= held


@settings(max_examples=examples(60))
@given(lengths, st.integers(1, 400), st.integers(5, 80))
def test_sample_is_all_of_a_small_corpus_and_spread_over_a_large_one(
    tmp_path_factory: pytest.TempPathFactory, documents: Lengths, most: int, block: int
) -> None:
    shards = shelf(tmp_path_factory.mktemp("sample"), documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUNS", 8)
        patch.setattr(module, "BLOCK", block)
        found = list(sample_documents(shards, most))
    total, tokens = sum(map(sum, documents)), []
    for shard, edges, numbers in found:
        assert len(edges) == len(numbers) + 1 and edges[0] < edges[-1]
        tokens += shard.read_raw(int(edges[0]), int(edges[-1] - edges[0])).tolist()
        for number, a, b in zip(numbers.tolist(), edges[:-1], edges[1:]):
            first, end = shard.document_bounds(number)
            part = end - first > block and first <= a <= b <= end and b - a <= block
            assert part or (first, end) == (a, b)
    assert len(tokens) == len(set(tokens))
    if total <= most:
        assert tokens == list(range(total))
    elif total:  # what one stretch may bring beyond its share is its last document
        assert 0 < len(tokens) <= most + 2 * max(map(max, filter(None, documents))) + most // 8 + 8


def test_sample_of_a_large_corpus_comes_from_everywhere(tmp_path: Path) -> None:
    shards = shelf(tmp_path / "many", [[20] * 3000, [], [20] * 1000])
    starts = [
        int(edges[0]) + 60_000 * (shard is shards[2]) for shard, edges, _ in sample_documents(shards, 8_000)
    ]
    assert len(starts) >= 64 and np.histogram(starts, 8, (0, 80_000))[0].min() >= 4
    one = shelf(tmp_path / "one", [[3_000_000]])
    parts = [int(edges[0]) for _, edges, _ in sample_documents(one, 600_000)]
    assert np.histogram(parts, 8, (0, 3_000_000))[0].min() >= 32


def test_units_of_damaged_or_changed_files_name_the_file(tmp_path: Path) -> None:
    (shard,) = shelf(tmp_path, [[5, 6, 7, 8, 9]])
    good = shard.idx_path.read_bytes()
    (unit,) = split_into_units([shard], 1000)
    documents_at = 34 + 12 * shard.sequences + 8 * 2
    for wrong in (10**6, -3, 0):
        content = good[:documents_at] + np.array([wrong], "<i8").tobytes() + good[documents_at + 8 :]
        shard.idx_path.write_bytes(content)
        with pytest.raises(DataError, match=r"s0\.idx"):
            edges_of(Shard(tmp_path / "s0"), unit)
    shard.idx_path.write_bytes(good)
    with pytest.raises(DataError, match=r"s0\.idx changed while it was in use"):
        edges_of(shard, Unit(**vars(unit) | {"tokens": unit.tokens - 1}))
    os.utime(shard.idx_path, ns=(0, 0))
    with pytest.raises(DataError, match=r"s0\.bin or \.idx changed while it was in use"):
        open_unit(unit)
    shard.idx_path.unlink()
    with pytest.raises(DataError, match=r"s0\.idx"):
        open_unit(unit)


@pytest.mark.slow
def test_units_take_a_document_of_more_than_2_31_tokens(tmp_path: Path) -> None:
    """Three sequences of int32 lengths, in a sparse file of 26 GB."""
    count, long = 3, 2**31 - 1
    path = tmp_path / "long.idx"
    content = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x04"
    content += np.array([count + 1, 3], "<u8").tobytes() + np.array([long] * count + [5], "<i4").tobytes()
    content += (4 * np.array([long * number for number in range(count + 1)], "<i8")).tobytes()
    path.write_bytes(content + np.array([0, count, count + 1], "<i8").tobytes())
    with (tmp_path / "long.bin").open("wb") as file:
        os.truncate(file.fileno(), 4 * (count * long + 5))
    shard = Shard(tmp_path / "long")
    (one, two) = split_into_units([shard], module.unit_size(shard.tokens))
    assert (one.documents, one.tokens, two.tokens) == (1, count * long, 5)
    edges = edges_of(shard, one)
    walk = read_blocks(shard, edges, cut_documents)
    block = next(walk)
    assert len(block.tokens) <= module.BLOCK and set(block.owner.tolist()) == {0}
    assert np.diff(block.edges).max() <= PIECE
    assert next(walk).first_token == len(block.tokens)
    assert sum(int(e[-1] - e[0]) for _, e, _ in sample_documents([shard])) <= 1.001 * module.SAMPLE
