"""Pruning against a plain reading of the format: what is left is what it was, and the proof finds everything else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from megastable.data.shard_format import CHUNK
from megastable.data.shards import Shard
from megastable_tools.forensics.pruning import gaps, prune
from megastable_tools.forensics.pruning.gaps import Span
from megastable_tools.forensics.pruning.prune import apply_plan, verify_pruned
from megastable_tools.forensics.pruning.prune_plan import Removal, format_plan
from megastable_tools.forensics.pruning.pruned import MAP, Pruned
from tests.forensics.shelves import Plain, Sequences, corpus, read, shelves
from tests.full_disk import files_no_larger_than
from tests.tiers import examples

EOD, BOS = 0, 1  # of the corpora of shelves.py
EIGHT: list[Sequences] = [[([10 * n + 1, 10 * n + 2, 10 * n + 3], n)] for n in range(8)]
SPLITS = {"train": [("a", 0, 6), ("b", 0, 8)], "validation": [("a", 6, 8)]}
Spans = Mapping[tuple[str, int], list[Span]]


def write_plan(
    folder: Path, whole: Sequence[tuple[str, int]] = (), spans: Spans | None = None, name: str = "plan.txt"
) -> Path:
    cuts = [
        Removal(*key, end - first, span=(first, end))
        for key, of in (spans or {}).items()
        for first, end in of
    ]
    path = folder.parent / name
    path.write_text(
        format_plan([*cuts, *(Removal(*key) for key in whole)], folder, Manifest.load_manifest(folder))
    )
    return path


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Two shards of eight documents with modes; the last two of the first are the validation split."""
    corpus(tmp_path / "corpus", [Plain("a", EIGHT, True), Plain("b", EIGHT, True)], SPLITS, "uint16")
    return tmp_path / "corpus"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """What is left of six documents of nine tokens without one of them, and without spans of two."""
    documents: list[Sequences] = [[([*range(10 * n + 1, 10 * n + 9), EOD], 0)] for n in range(6)]
    splits = {"train": [("a", 0, 5)], "validation": [("a", 5, 6)]}
    corpus(tmp_path / "corpus", [Plain("a", documents)], splits, "uint16")
    spans = {("a", 1): [(2, 4)], ("a", 3): [(0, 3), (6, 9)]}
    apply_plan(write_plan(tmp_path / "corpus", [("a", 4)], spans), tmp_path / "pruned")
    return tmp_path / "pruned"


def reseal(output: Path) -> None:
    """What a forger would do: hashes and seal that agree with the changed files."""
    manifest = Manifest.load_manifest(output)
    infos = [Shard(output / info.name).verify_shard() for info in manifest.shards]
    manifest.model_copy(update={"shards": infos}).save_manifest(output)
    names = {"manifest_xxh3": "manifest.json", "map_xxh3": MAP}
    hashes = {key: prune.hash_file(output / name) for key, name in names.items()}
    Pruned.load_file(output).model_copy(update=hashes).add_seal().save_file(output)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@contextmanager
def runs_of(size: int) -> Iterator[None]:
    """Files are read in runs of `size` tokens, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "RUN", size)
        yield


def cut_plainly(document: Sequences, spans: list[Span], bos: int | None) -> list[Sequences]:
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
def test_apply_leaves_what_a_plain_reading_leaves(
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
    there = [key for key, size in sizes.items() if size]
    spans, whole = dict[tuple[str, int], list[Span]](), []
    for key in data.draw(st.lists(st.sampled_from(there), min_size=1, unique=True)):
        edges = st.integers(0, sizes[key])
        span = st.tuples(edges, edges).filter(lambda pair: pair[0] != pair[1]).map(lambda p: (min(p), max(p)))
        if of := data.draw(st.lists(span, max_size=3)):
            spans[key] = of
        else:
            whole.append(key)

    def left(key: tuple[str, int], document: Sequences) -> list[Sequences]:
        if key in whole:
            return []
        return cut_plainly(document, spans[key], bos) if key in spans else [document]

    wanted = {s.name: [left((s.name, n), d) for n, d in enumerate(s.documents)] for s in shards}
    tokens = {
        split: [
            token for name, first, end in parts for of in wanted[name][first:end] for document in of
            for ids, _ in document for token in ids
        ]
        for split, parts in splits.items()
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place, runs_of(block):
        folder, output = Path(place) / "corpus", Path(place) / "pruned"
        manifest = corpus(folder, shards, splits, dtype, bos)
        plan = write_plan(folder, whole, spans)
        if any(manifest.splits[split] and not tokens[split] for split in tokens) or len(whole) == len(sizes):
            with pytest.raises(DataError, match="delete its line"):
                apply_plan(plan, output)
            return
        made = apply_plan(plan, output)
        for shard in shards:
            documents = [document for of in wanted[shard.name] for document in of]
            if not documents and shard.documents:
                assert not (output / f"{shard.name}.idx").exists()
                continue
            found = read(output, shard.name)
            assert found.documents == documents
            assert found.modes == (shard.modes and bool(found.sequences))
        new = Manifest.load_manifest(output)
        for split, ids in tokens.items():
            parts = [Shard(output / s.shard).read_tokens(s.first_token, s.tokens) for s in new.splits[split]]
            assert np.concatenate([np.empty(0, np.int64), *parts]).tolist() == ids
        proof = verify_pruned(output, plan=plan)
        assert (proof.documents, proof.gone, proof.cut) == (made.documents_left, made.documents, made.cut)
        before, after = (sum(info.tokens for info in some.shards) for some in (manifest, new))
        assert before - made.tokens + proof.added == after == made.tokens_left
        assert (manifest.fingerprint() != new.fingerprint()) == bool(made.tokens or whole)


def test_apply_ends_documents_at_cuts_and_the_map_says_so(tmp_path: Path) -> None:
    """The bytes themselves. Documents that begin with BOS go on with it behind a cut; none is nothing but BOS and EOD,
    and a document that had no end of its own has none where it ended."""
    documents: list[Sequences] = [
        [([BOS, 12, 13, 14, 15, EOD], 0)], [([7, 8, EOD], 0)], [([9, 10, 11], 0)], [([BOS, 22, EOD], 0)],
        [([BOS, EOD], 0)],
    ]  # fmt: skip
    corpus(tmp_path / "corpus", [Plain("a", documents)], {"train": [("a", 0, 5)]}, "uint16", BOS)
    spans = {("a", 0): [(2, 3)], ("a", 1): [(1, 3)], ("a", 2): [(1, 2)], ("a", 3): [(1, 3)]}
    output = tmp_path / "pruned"
    plan = write_plan(tmp_path / "corpus", (), spans)
    apply_plan(plan, output)
    found = [[token for ids, _ in of for token in ids] for of in read(output, "a").documents]
    assert found == [[BOS, 12, EOD], [BOS, 14, 15, EOD], [7, EOD], [9, EOD], [11], [BOS, EOD]]
    columns = ["old", "new", "first", "end", "closed", "opened"]
    assert [tuple(row.values()) for row in pq.read_table(output / MAP).select(columns).to_pylist()] == [
        (0, 0, 0, 2, True, False), (0, 1, 3, 6, False, True), (1, 2, 0, 1, True, False), (2, 3, 0, 1, True, False),
        (2, 4, 2, 3, False, False), (3, None, None, None, False, False), (4, 5, None, None, False, False),
    ]  # fmt: skip
    proof = verify_pruned(output, plan=plan)
    assert (proof.gone, proof.gone_tokens, proof.cut, proof.added) == (1, 6, 3, 3)


def test_apply_keeps_empty_sequences_with_what_they_touch(tmp_path: Path) -> None:
    document: Sequences = [([], 1), ([1, 2], 2), ([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]
    corpus(tmp_path / "corpus", [Plain("a", [document, [([9], 7)]], True)], {"train": [("a", 0, 2)]}, "int32")
    left: dict[Span, list[Sequences]] = {
        (1, 2): [[([], 1), ([1, EOD], 2)], [([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]],
        (3, 5): [[([], 1), ([1, 2], 2), ([], 3), ([3, EOD], 4)]],
        (0, 2): [[([], 3), ([3, 4], 4), ([5, EOD], 5), ([], 6)]],
    }
    for span, documents in left.items():
        output = tmp_path / str(span[0])
        apply_plan(write_plan(tmp_path / "corpus", (), {("a", 0): [span]}), output)
        assert read(output, "a").documents == [*documents, [([9], 7)]]
        verify_pruned(output)


@pytest.mark.slow
def test_verify_finds_every_changed_byte(original: Path) -> None:
    output = original.parent / "pruned"
    apply_plan(write_plan(original, [("a", 2), ("a", 3), ("b", 7)]), output)
    verify_pruned(output)
    for path in sorted(output.iterdir()):
        content = path.read_bytes()
        # All bytes of the shards; of the others, which are hashed as a whole, every 23rd.
        for at in range(0, len(content), 1 if path.suffix in (".bin", ".idx") else 23):
            flip(path, at)
            with pytest.raises(DataError):
                verify_pruned(output)
            path.write_bytes(content)
        for other in (content[:-1], content + b"\0", b""):
            path.write_bytes(other)
            with pytest.raises(DataError):
                verify_pruned(output)
        path.write_bytes(content)


@pytest.mark.parametrize("at", [11, 12, 27])
def test_verify_names_a_forgery_with_true_hashes(cut: Path, at: int) -> None:
    """A token where a document was cut, one behind the cut, one between two cuts."""
    reseal(cut)
    verify_pruned(cut)
    flip(cut / "a.bin", 2 * at)
    reseal(cut)
    with pytest.raises(DataError, match=r"a\.bin is not what .* gives without"):
        verify_pruned(cut)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("first", 2, 3), ("end", 1, 3), ("end", 2, 8), ("closed", 1, False), ("closed", 2, True), ("first", 1, None),
     ("end", 1, 99), ("old", 2, 2), ("new", 2, 3), ("opened", 2, True)],
)  # fmt: skip
def test_verify_finds_a_map_that_says_something_else(cut: Path, column: str, row: int, value: object) -> None:
    table = pq.read_table(cut / MAP)
    values = table[column].to_pylist()
    assert values[row] != value
    values[row] = value
    number = table.schema.get_field_index(column)
    changed = table.set_column(number, table.schema.field(column), [values])
    pq.write_table(changed, cut / MAP, row_group_size=1 << 20)
    reseal(cut)
    with pytest.raises(DataError, match="prune again"):
        verify_pruned(cut)


def test_verify_tells_another_plan_and_other_documents(original: Path) -> None:
    output, other = original.parent / "pruned", original.parent / "other"
    apply_plan(write_plan(original, [("a", 2), ("b", 0)]), output)
    apply_plan(write_plan(original, [("a", 2), ("b", 1)], name="other.txt"), other)
    with pytest.raises(DataError, match=r"does not name what .* lacks of b"):
        verify_pruned(output, plan=original.parent / "other.txt")
    with pytest.raises(DataError, match=r"does not name what"):
        verify_pruned(output, plan=write_plan(original, [("a", 2)], {("b", 0): [(0, 2)]}, "cut.txt"))
    for suffix in (".bin", ".idx"):
        shutil.copy(other / f"b{suffix}", output / f"b{suffix}")
    reseal(output)
    with pytest.raises(DataError, match=r"b\.idx is not what"):
        verify_pruned(output)
    shutil.copy(other / MAP, output / MAP)
    reseal(output)
    with pytest.raises(DataError, match="removed does not match map and shards"):
        verify_pruned(output)
    (output / "c.idx").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.idx is not a shard of this corpus"):
        verify_pruned(output)


def test_apply_seals_no_damage_of_the_original(original: Path) -> None:
    plan = write_plan(original, [("a", 2)])
    for name, at in (
        ("a.bin", 3),
        ("a.bin", 13),
        ("b.bin", 0),
        ("a.idx", 40),
        ("b.idx", -1),
        ("tokenizer.model", 0),
    ):
        flip(original / name, at)
        with pytest.raises(DataError, match=name.split(".")[0]):
            apply_plan(plan, original.parent / "pruned")
        assert not (original.parent / "pruned").exists()
        flip(original / name, at)
    apply_plan(plan, original.parent / "pruned")


def test_apply_refuses_outputs_in_the_way(original: Path) -> None:
    plan, occupied = write_plan(original, [("a", 2)]), original.parent / "occupied"
    (original.parent / "link").symlink_to(original)
    occupied.mkdir()
    (occupied / "file").write_text("mine")
    inside = (
        original,
        original / "in",
        original.parent,
        original.parent / "link",
        original / ".." / "corpus",
    )
    for output in (*inside, occupied, occupied / "file"):
        with pytest.raises(DataError, match=r"must not change|lie in each other|exists already"):
            apply_plan(plan, output)
    for info in Manifest.load_manifest(original).shards:
        Shard(original / info.name, info).verify_shard()


def test_apply_leaves_nothing_on_a_full_disk_or_after_an_interruption(tmp_path: Path) -> None:
    documents: list[Sequences] = [[([n % 1000] * 500, 0)] for n in range(2000)]
    corpus(tmp_path / "corpus", [Plain("a", documents)], {"train": [("a", 0, 2000)]}, "uint16")
    plan = write_plan(tmp_path / "corpus", [("a", 0)])
    before = sorted(os.listdir(tmp_path))
    for size in (100, 10_000, 1_000_000):
        with files_no_larger_than(size), pytest.raises(DataError, match="could not be written"):
            apply_plan(plan, tmp_path / "pruned")
        assert sorted(os.listdir(tmp_path)) == before

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_plan(plan, tmp_path / "pruned", progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == before


def test_apply_prunes_again_what_was_pruned_and_moved(original: Path) -> None:
    first, second = original.parent / "first", original.parent / "second"
    apply_plan(write_plan(original, [("a", 2), *(("b", n) for n in range(8))]), first)
    assert [info.name for info in Manifest.load_manifest(first).shards] == ["a"] and not (
        first / "b.bin"
    ).exists()
    apply_plan(write_plan(first, [("a", 2)], {("a", 0): [(1, 2)]}, "again.txt"), second)
    found = [[token for ids, _ in of for token in ids] for of in read(second, "a").documents]
    assert found[:3] == [[1, EOD], [3], [11, 12, 13]] and [of[0] for of in found[3:]] == [41, 51, 61, 71]
    verify_pruned(second)
    with pytest.raises(DataError, match=r"is not what .* was pruned of"):
        verify_pruned(second, original)
    moved = original.rename(original.parent / "moved")
    with pytest.raises(DataError, match="not a prepared corpus"):
        verify_pruned(first)
    verify_pruned(first, moved)
    apply_plan(original.parent / "plan.txt", original.parent / "third", corpus=moved)


@pytest.mark.slow
def test_apply_takes_indices_longer_than_a_chunk(tmp_path: Path) -> None:
    """More documents than are looked at in one go."""
    count, random = CHUNK + 1000, np.random.default_rng(0)
    lengths = random.integers(0, 3, count).astype("<i4")
    folder = tmp_path / "corpus"
    manifest = corpus(folder, [Plain("a", [[([1], 0)]])], {"train": [("a", 0, 1)]}, "uint16")
    tokens = random.integers(1, 1000, int(lengths.sum())).astype("<u2")
    header = (folder / "a.idx").read_bytes()[:18] + np.array([count, count + 1], "<u8").tobytes()
    pointers = (np.cumsum(lengths) - lengths).astype("<i8") * 2
    (folder / "a.idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + np.arange(count + 1, dtype="<i8").tobytes()
    )
    (folder / "a.bin").write_bytes(tokens.tobytes())
    info = Shard(folder / "a").verify_shard()
    segment = manifest.splits["train"][0].model_copy(update={"tokens": info.tokens, "documents": count})
    manifest = manifest.model_copy(update={"shards": [info], "splits": {"train": [segment]}})
    manifest.save_manifest(folder)
    gone = np.unique(random.integers(0, count, 5000))
    apply_plan(write_plan(folder, [("a", n) for n in gone.tolist()]), tmp_path / "pruned")
    verify_pruned(tmp_path / "pruned")
    left = np.delete(np.arange(count), gone)
    pruned = Shard(tmp_path / "pruned" / "a")
    assert np.array_equal(pruned.sequence_lengths(slice(0, len(left))), lengths[left])
    assert np.array_equal(
        pruned.read_raw(0, pruned.tokens), tokens[np.isin(np.repeat(np.arange(count), lengths), left)]
    )
