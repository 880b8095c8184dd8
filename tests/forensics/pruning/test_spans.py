"""Spans cut out of documents, against a plain reading: what is left, what the map and the proof say of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest
from megastable.data.shards import Shard
from megastable_tools.forensics.pruning.choose import make_plan
from megastable_tools.forensics.pruning.gaps import Span
from megastable_tools.forensics.pruning.proof import verify
from megastable_tools.forensics.pruning.prune import apply
from megastable_tools.forensics.pruning.prune_plan import Removal, read_plan, text_of
from megastable_tools.forensics.pruning.pruned import MAP, Pruned
from megastable_tools.forensics.pruning.token_loss import Loss, share_of
from tests.forensics.pruning.test_prune import reseal, small_runs
from tests.forensics.shelves import Plain, Sequences, corpus, read, shelves
from tests.tiers import examples

EOD = 0  # of the corpora of shelves.py
BOS = 1


def cut(
    folder: Path, spans: dict[tuple[str, int], list[Span]], whole: Sequence[tuple[str, int]] = ()
) -> Path:
    """A plan for spans of documents, and whole documents."""
    found = [Removal(*key, end - first, span=(first, end)) for key, of in spans.items() for first, end in of]
    path = folder.parent / "plan.txt"
    path.write_text(text_of([*found, *(Removal(*key) for key in whole)], folder, Manifest.load(folder)))
    return path


def pieces(document: Sequences, spans: list[Span], bos: int | None) -> list[Sequences]:
    """The documents that one becomes, token by token: each keeps the bounds of its sequences."""
    flat = [(token, number) for number, (tokens, _) in enumerate(document) for token in tokens]
    closes = bool(flat) and flat[-1][0] == EOD
    opens = bos is not None and len(flat) > closes and flat[0][0] == bos
    text = range(int(opens), len(flat) - closes)
    bad = {at for first, end in spans for at in range(first, end)} & set(text)
    runs = [[at] for at in text if at not in bad]
    for before, run in reversed(list(pairwise(runs))):
        if before[-1] + 1 == run[0]:
            before += run
            runs.remove(run)
    made = []
    for run in runs:
        tokens = [flat[at] for at in run]
        if opens:
            tokens.insert(0, flat[0] if run[0] == 1 else (flat[0][0], tokens[0][1]))
        if run[-1] == len(flat) - 1 - closes:
            tokens += flat[-1:] * closes
        else:
            tokens.append((EOD, tokens[-1][1]))
        of: dict[int, list[int]] = {number: [] for _, number in tokens}
        for token, number in tokens:
            of[number].append(token)
        made.append([(ids, document[number][1]) for number, ids in of.items()])
    return made


@settings(max_examples=examples(60))
@given(
    given_=shelves(), data=st.data(), block=st.sampled_from([1, 3, 12, 64, 1 << 20]),
    bos=st.sampled_from([None, BOS]),
)  # fmt: skip
def test_what_is_left_is_what_a_plain_reading_leaves(
    given_: Any, data: st.DataObject, block: int, bos: int | None
) -> None:
    shards, splits, dtype = given_
    # Empty sequences are tested apart: here a document is told by its tokens alone.
    for shard in shards:
        shard.documents = [[part for part in document if part[0]] for document in shard.documents]
        shard.modes = shard.modes and bool(shard.sequences)
        for document in shard.documents:
            if bos is not None and document and data.draw(st.booleans()):
                document[0] = [bos, *document[0][0]], document[0][1]
    sizes = {(s.name, n): sum(len(ids) for ids, _ in d) for s in shards for n, d in enumerate(s.documents)}
    named = data.draw(
        st.lists(st.sampled_from([key for key, size in sizes.items() if size]), min_size=1, unique=True)
    )
    spans, whole = dict[tuple[str, int], list[Span]](), []
    for key in named:
        edges = st.integers(0, sizes[key])
        span = st.tuples(edges, edges).filter(lambda pair: pair[0] != pair[1]).map(lambda p: (min(p), max(p)))
        if of := data.draw(st.lists(span, max_size=3)):
            spans[key] = of
        else:
            whole.append(key)

    def left(name: str, number: int, document: Sequences) -> list[Sequences]:
        return (
            []
            if (name, number) in whole
            else pieces(document, spans[name, number], bos)
            if (name, number) in spans
            else [document]
        )

    wanted = {s.name: [left(s.name, n, d) for n, d in enumerate(s.documents)] for s in shards}
    with tempfile.TemporaryDirectory() as place, small_runs(block):
        folder, output = Path(place) / "corpus", Path(place) / "pruned"
        manifest = corpus(folder, shards, splits, dtype, bos)
        plan = cut(folder, spans, whole)
        tokens = {
            split: [
                token for name, first, end in parts for of in wanted[name][first:end] for document in of
                for ids, _ in document for token in ids
            ]
            for split, parts in splits.items()
        }  # fmt: skip
        if any(manifest.splits[split] and not tokens[split] for split in tokens) or len(whole) == len(sizes):
            with pytest.raises(DataError, match="delete its line"):
                apply(plan, output)
            return
        made = apply(plan, output)
        for shard in shards:
            documents = [document for of in wanted[shard.name] for document in of]
            if not documents and shard.documents:
                assert not (output / f"{shard.name}.idx").exists()
                continue
            found = read(output, shard.name)
            assert found.documents == documents
            assert found.modes == (shard.modes and bool(found.sequences))
        there = Manifest.load(output)
        for split, ids in tokens.items():
            parts = [
                Shard(output / part.shard).read(part.first_token, part.tokens) for part in there.splits[split]
            ]
            assert np.concatenate([np.empty(0, np.int64), *parts]).tolist() == ids
        proof = verify(output, plan=plan)
        assert (proof.documents, proof.gone, proof.cut) == (
            made.documents_left,
            made.documents,
            made.cut or 0,
        )
        before, after = (
            sum(info.tokens for info in manifest.shards),
            sum(info.tokens for info in there.shards),
        )
        assert before - made.tokens + proof.added == after == made.tokens_left
        assert manifest.name == there.name
        assert (manifest.fingerprint() != there.fingerprint()) == bool(made.tokens or whole)


def test_a_cut_is_an_end_of_a_document_and_the_map_says_so(tmp_path: Path) -> None:
    """The bytes themselves: what the docstring of gaps.py promises."""
    documents: list[Sequences] = [
        [([1, 2, 3, 4, 5, 6, EOD], 0)],
        [([7, 8, EOD], 0)],
        [([9, 10, 11], 0)],
        [([12], 0)],
    ]
    corpus(tmp_path / "corpus", [Plain("a", documents)], {"train": [("a", 0, 4)]}, "uint16")
    spans = {("a", 0): [(2, 4)], ("a", 1): [(1, 3)], ("a", 2): [(1, 2)]}
    said: list[Loss] = []
    apply(cut(tmp_path / "corpus", spans), tmp_path / "pruned", say=said.append)
    found = [
        [token for ids, _ in document for token in ids]
        for document in read(tmp_path / "pruned", "a").documents
    ]
    # The second keeps its own end; the third had none: what ends at a cut has one, what ends with the third has not.
    assert found == [[1, 2, EOD], [5, 6, EOD], [7, EOD], [9, EOD], [11], [12]]
    rows = (
        pq.read_table(tmp_path / "pruned" / MAP).select(["old", "new", "first", "end", "closed"]).to_pylist()
    )
    assert [tuple(row.values()) for row in rows] == [
        (0, 0, 0, 2, True), (0, 1, 4, 7, False), (1, 2, 0, 1, True), (2, 3, 0, 1, True), (2, 4, 2, 3, False),
        (3, 5, None, None, False),
    ]  # fmt: skip
    pruned = Pruned.load(tmp_path / "pruned")
    assert (pruned.documents, pruned.cut, pruned.tokens, pruned.added) == (0, 3, 4, 2)
    assert [(loss.documents, loss.cut, loss.tokens) for loss in said] == [(0, 3, 4)]
    assert str(verify(tmp_path / "pruned")).endswith(
        "; 0 documents and 4 tokens are gone, 3 documents were cut, 2 boundary tokens put in between"
    )


def test_what_is_left_begins_as_the_document_did(tmp_path: Path) -> None:
    """Every piece of a document that begins with BOS begins with it, and none is nothing but BOS and EOD."""
    documents: list[Sequences] = [[([BOS, *range(10 * n + 2, 10 * n + 6), EOD], 0)] for n in range(1, 6)]
    documents += [[([72, 73, 74, EOD], 0)], [([BOS, EOD], 0)]]
    corpus(tmp_path / "corpus", [Plain("a", documents)], {"train": [("a", 0, 7)]}, "uint16", BOS)
    spans = {0: (2, 3), 1: (0, 3), 2: (1, 6), 3: (0, 1), 4: (3, 6), 5: (1, 2)}
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"a {n} {first}:{end}\n" for n, (first, end) in spans.items()))
    _, planned = make_plan(tmp_path / "corpus", tmp_path / "planned.txt", lists=[listed])
    assert (planned.documents, planned.cut, planned.tokens) == (1, 4, 1 + 2 + 6 + 2 + 1)
    by_hand = cut(tmp_path / "corpus", {("a", n): [span] for n, span in spans.items()})
    for number, plan in enumerate([tmp_path / "planned.txt", by_hand]):
        output = tmp_path / f"pruned-{number}"
        apply(plan, output)
        found = [[token for ids, _ in of for token in ids] for of in read(output, "a").documents]
        assert found == [
            [BOS, 12, EOD], [BOS, 14, 15, EOD], [BOS, 24, 25, EOD], [BOS, 42, 43, 44, 45, EOD], [BOS, 52, 53, EOD],
            [72, EOD], [74, EOD], [BOS, EOD],
        ]  # fmt: skip
        rows = pq.read_table(output / MAP).select(["old", "first", "end", "closed", "opened"]).to_pylist()
        pieces = [tuple(row.values()) for row in rows if row["end"] is not None and row["old"] != 3]
        assert pieces == [
            (0, 0, 2, True, False), (0, 3, 6, False, True), (1, 3, 6, False, True), (4, 0, 3, True, False),
            (5, 0, 1, True, False), (5, 2, 4, False, False),
        ]  # fmt: skip
        proof = verify(output, plan=plan)
        # EOD and BOS in the first, EOD in the sixth; those of the others are their own.
        assert (proof.gone, proof.gone_tokens, proof.added) == (1, 12, 3)
        table = pq.read_table(output / MAP)
        opened = [not value if row == 1 else value for row, value in enumerate(table["opened"].to_pylist())]
        pq.write_table(table.set_column(6, table.schema.field("opened"), [opened]), output / MAP)
        reseal(output)
        with pytest.raises(DataError, match="prune again"):
            verify(output)


def test_empty_sequences_stay_with_what_they_touch(tmp_path: Path) -> None:
    document: Sequences = [([], 1), ([1, 2], 2), ([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]
    corpus(tmp_path / "corpus", [Plain("a", [document, [([9], 7)]], True)], {"train": [("a", 0, 2)]}, "int32")
    left: dict[Span, list[Sequences]] = {
        (1, 2): [[([], 1), ([1, EOD], 2)], [([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]],
        (3, 5): [[([], 1), ([1, 2], 2), ([], 3), ([3, EOD], 4)]],
        (0, 2): [[([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]],
    }
    for span, documents in left.items():
        output = tmp_path / str(span[0])
        apply(cut(tmp_path / "corpus", {("a", 0): [span]}), output)
        assert read(output, "a").documents == [*documents, [([9], 7)]]
        verify(output)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    documents: list[Sequences] = [[([*range(10 * n + 1, 10 * n + 9), EOD], 0)] for n in range(6)]
    corpus(
        tmp_path / "corpus",
        [Plain("a", documents)],
        {"train": [("a", 0, 5)], "validation": [("a", 5, 6)]},
        "uint16",
    )
    spans = {("a", 1): [(2, 4)], ("a", 3): [(0, 3), (6, 9)]}
    apply(cut(tmp_path / "corpus", spans, [("a", 4)]), tmp_path / "pruned")
    return tmp_path / "pruned"


@pytest.mark.parametrize("at", [11, 12, 27])
def test_a_forgery_with_true_hashes_is_found_and_named(made: Path, at: int) -> None:
    """A token where a document was cut, one behind the cut, one between two cuts."""
    content = np.fromfile(made / "a.bin", "<u2")
    content[at] ^= 1
    content.tofile(made / "a.bin")
    reseal(made)
    with pytest.raises(DataError, match=r"a\.bin is not what .* gives without"):
        verify(made)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("first", 2, 3), ("end", 1, 3), ("end", 2, 8), ("closed", 1, False), ("closed", 2, True), ("first", 1, None),
     ("end", 1, 99), ("old", 2, 2), ("new", 2, 3)],
)  # fmt: skip
def test_a_map_that_says_something_else_is_found(made: Path, column: str, row: int, value: object) -> None:
    table = pq.read_table(made / MAP)
    values = table[column].to_pylist()
    assert values[row] != value
    values[row] = value
    number = table.schema.get_field_index(column)
    changed = table.set_column(number, table.schema.field(column), [values])
    pq.write_table(changed, made / MAP, row_group_size=1 << 20)
    reseal(made)
    with pytest.raises(DataError, match=r"prune again|removed is not"):
        verify(made)


def test_another_plan_is_told_from_this_one(made: Path) -> None:
    for spans in ({("a", 1): [(2, 5)], ("a", 3): [(0, 3), (6, 9)]}, {("a", 1): [(2, 4)]}):
        other = cut(made.parent / "corpus", spans, [("a", 4)])
        with pytest.raises(DataError, match=r"does not name what"):
            verify(made, plan=other)
    # The same in other words: spans that overlap, one that leaves the end of its document alone.
    spans = {("a", 1): [(2, 3), (2, 4)], ("a", 3): [(6, 8), (0, 3)]}
    verify(made, plan=cut(made.parent / "corpus", spans, [("a", 4)]))


def test_what_was_pruned_before_spans_could_be_cut_is_verified(made: Path) -> None:
    """Maps without the columns of pieces, or without that of BOS; and what has no spans says nothing of them."""
    output = made.parent / "whole"
    apply(cut(made.parent / "corpus", {}, [("a", 4)]), output)
    assert not {"cut", "added"} & set((output / "pruned.json").read_text().split('"'))
    pq.write_table(pq.read_table(output / MAP).select(["shard", "old", "new"]), output / MAP)
    reseal(output)
    assert verify(output).cut == 0
    # Those with pieces, but of before BOS was put before them.
    pq.write_table(pq.read_table(made / MAP).drop_columns("opened"), made / MAP)
    reseal(made)
    assert verify(made).cut == 2


def test_a_limit_is_kept_before_anything_is_written(made: Path) -> None:
    folder, before = made.parent / "corpus", sorted(os.listdir(made.parent))
    plan = cut(folder, {("a", 1): [(0, 4)]})
    apply(plan, made.parent / "at", most=4 / 54)
    with pytest.raises(
        DataError, match=r"1 more document cut, 4 tokens of 54 \(7.407%\): more than 7 % .*--most 7.5%"
    ):
        apply(plan, made.parent / "above", most=0.07)
    listed = made.parent / "list.txt"
    listed.write_text("a 2\n")
    with pytest.raises(DataError, match=r"1 document of 6 \(16.667%\), .*plan --spans.*--most 16.7%"):
        make_plan(folder, made.parent / "other.txt", lists=[listed], most=0.05)
    with pytest.raises(DataError, match=r"the plan would take .*; narrow what it is made of") as refused:
        make_plan(folder, made.parent / "other.txt", lists=[listed], most=0.05)
    assert "delete" not in str(refused.value)
    assert sorted(os.listdir(made.parent)) == sorted([*before, "at", "list.txt"])
    assert (share_of("5%"), share_of(" 0.05 "), share_of("100 %")) == (0.05, 0.05, 1.0)
    for text in ("5", "-1%", "101%", "x", "5%%", ""):
        with pytest.raises(DataError, match=r"such as 5% or 0.05"):
            share_of(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a 1 4:4"], r"line 2: the span 4:4 is empty"),
        (["a 1 5:4"], r"line 2: the span 5:4 is empty"),
        (["a 1 3:10"], r"tokens 3:10 of document 1 of a, which has 9"),
        (["a 1 2:3", "a 1"], r"line 3 names document 1 of a as a whole, another line a span"),
        (["a 1 2-3"], r"line 2: .* is not a shard and a document number"),
        (['{"shard": "a", "document": 1, "first": 2}'], "line 2"),
        ([f"a {n} 0:8" for n in range(5)], r"leaves nothing of the split 'train': delete its line 2"),
    ],
)
def test_spans_refused(made: Path, lines: list[str], message: str) -> None:
    path = made.parent / "plan.txt"
    path.write_text(
        "\n".join([f"fingerprint: {Manifest.load(made.parent / 'corpus').fingerprint()}", *lines])
    )
    with pytest.raises(DataError, match=message):
        apply(path, made.parent / "other", made.parent / "corpus")
    assert not (made.parent / "other").exists()


@pytest.mark.parametrize("lines", ["a 1 8:9", "a 1 8:9\na 2 8:9"])
def test_a_plan_of_nothing_is_not_written(made: Path, lines: str) -> None:
    """A list of nothing but what ends documents, which stays."""
    listed, output = made.parent / "list.txt", made.parent / "spans.txt"
    listed.write_text(lines)
    with pytest.raises(DataError, match="there is nothing to plan"):
        make_plan(made.parent / "corpus", output, lists=[listed])
    assert not output.exists()


@pytest.mark.parametrize(
    "text",
    [
        "a 1 2:4\na, 3, 0:3 # why\na 1 3:5",
        "shard,document,first,end\na,1,2,4\na,3,0,3\na,1,3,5\n",
        '{"shard": "a", "document": 1, "first": 2, "end": 5}\n{"shard": "a", "document": 3, "first": 0, "end": 3}',
    ],
)
def test_spans_in_lists_by_hand(made: Path, text: str) -> None:
    listed, output = made.parent / "list.txt", made.parent / "spans.txt"
    listed.write_text(text)
    found, loss = make_plan(made.parent / "corpus", output, lists=[listed])
    assert [(r.document, r.span) for r in found] == [(1, (2, 5)), (3, (0, 3))]
    assert (loss.documents, loss.cut, loss.tokens) == (0, 2, 6)
    named = read_plan(output).named(made.parent / "corpus", Manifest.load(made.parent / "corpus"))
    assert (named["a"].documents.size, named["a"].spans) == (0, {1: [(2, 5)], 3: [(0, 3)]})


def test_what_is_cut_can_be_cut_again(made: Path) -> None:
    second = made.parent / "second"
    apply(cut(made, {("a", 1): [(1, 2)]}), second)
    verify(second)
    assert [ids for document in read(second, "a").documents for ids, _ in document][:3] == [
        [1, 2, 3, 4, 5, 6, 7, 8, EOD], [11, EOD], [15, 16, 17, 18, EOD],
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"not what .* was pruned of"):
        verify(second, made.parent / "corpus")
