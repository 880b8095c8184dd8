"""Pruning against a plain reading of the format: what is left is what it was, and nothing else is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest
from megastable.data.shard_format import CHUNK
from megastable.data.shards import Shard
from megastable_tools.forensics.pruning import gaps, prune
from megastable_tools.forensics.pruning.proof import verify
from megastable_tools.forensics.pruning.prune import apply
from megastable_tools.forensics.pruning.prune_plan import Removal, text_of
from megastable_tools.forensics.pruning.pruned import Pruned
from megastable_tools.prepare.verify import verify_corpus
from tests.forensics.shelves import Plain, corpus, read
from tests.full_disk import files_no_larger_than

EIGHT = [[([10 * n + 1, 10 * n + 2, 10 * n + 3], n)] for n in range(8)]
SPLITS = {"train": [("a", 0, 6), ("b", 0, 8)], "validation": [("a", 6, 8)]}


def plan_of(folder: Path, manifest: Manifest, gone: list[tuple[str, int]], name: str = "plan.txt") -> Path:
    path = folder.parent / name
    path.write_text(text_of([Removal(shard, document) for shard, document in gone], folder, manifest))
    return path


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Two shards of eight documents with modes; the last two of the first are the validation split."""
    corpus(tmp_path / "corpus", [Plain("a", EIGHT, True), Plain("b", EIGHT, True)], SPLITS, "uint16")
    return tmp_path / "corpus"


def pruned_of(original: Path, gone: list[tuple[str, int]]) -> Path:
    output = original.parent / "pruned"
    apply(plan_of(original, Manifest.load(original), gone), output)
    return output


@contextmanager
def small_runs(size: int) -> Iterator[None]:
    """Files are read in runs of `size` tokens, as large ones are."""
    old, gaps.RUN = gaps.RUN, size
    try:
        yield
    finally:
        gaps.RUN = old


@pytest.mark.slow
def test_every_changed_byte_is_found(original: Path) -> None:
    output = pruned_of(original, [("a", 2), ("a", 3), ("b", 7)])
    verify(output)
    for path in sorted(output.iterdir()):
        content = path.read_bytes()
        # All bytes of the shards; of the others, which are hashed as a whole, every 23rd.
        for at in range(0, len(content), 1 if path.suffix in (".bin", ".idx") else 23):
            changed = bytearray(content)
            changed[at] ^= 1 << (at % 8)
            path.write_bytes(changed)
            with pytest.raises(DataError):
                verify(output)
        for other in (content[:-1], content + b"\0", b""):
            path.write_bytes(other)
            with pytest.raises(DataError):
                verify(output)
        path.write_bytes(content)
    verify(output)


def reseal(output: Path, **changes: object) -> None:
    """What a forger would do: hashes and seal that agree with the changed files."""
    manifest = Manifest.load(output)
    infos = [Shard(output / info.name).verify() for info in manifest.shards]
    manifest.model_copy(update={"shards": infos}).save(output)
    hashes = {"manifest_xxh3": prune.hash_file(output / "manifest.json")}
    hashes["map_xxh3"] = prune.hash_file(output / "documents.parquet")
    Pruned.load(output).model_copy(update=hashes | changes).sealed().save(output)


def test_a_forgery_with_true_hashes_is_found_and_named(original: Path) -> None:
    output = pruned_of(original, [("a", 2), ("b", 0)])
    reseal(output)
    verify(output)
    path = output / "b.bin"
    content = bytearray(path.read_bytes())
    content[2 * (3 * 4 + 1)] ^= 1
    path.write_bytes(content)
    reseal(output)
    with pytest.raises(DataError, match=r"b\.bin is not what .* gives without the documents"):
        verify(output)
    content[2 * (3 * 4 + 1)] ^= 1
    path.write_bytes(content)
    index = bytearray((output / "a.idx").read_bytes())
    index[-1] ^= 1
    (output / "a.idx").write_bytes(index)
    reseal(output)
    with pytest.raises(DataError, match=r"a\.idx is not what"):
        verify(output)


def test_a_document_too_many_or_too_few_is_found(original: Path) -> None:
    output, other = pruned_of(original, [("a", 2), ("b", 0)]), original.parent / "other"
    apply(plan_of(original, Manifest.load(original), [("a", 2), ("b", 1)], "other.txt"), other)
    with pytest.raises(DataError, match=r"does not name what .* lacks of b"):
        verify(output, plan=original.parent / "other.txt")
    for suffix in (".bin", ".idx"):
        shutil.copy(other / f"b{suffix}", output / f"b{suffix}")
    reseal(output)
    with pytest.raises(DataError, match=r"b\.idx is not what"):
        verify(output)
    shutil.copy(other / "documents.parquet", output / "documents.parquet")
    reseal(output)
    with pytest.raises(DataError, match="removed does not match map and shards"):
        verify(output)
    (output / "c.idx").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.idx is not a shard of this corpus"):
        verify(output)


def test_damage_of_the_original_is_not_sealed(original: Path) -> None:
    plan = plan_of(original, Manifest.load(original), [("a", 2)])
    for name, at in (
        ("a.bin", 3),
        ("a.bin", 13),
        ("b.bin", 0),
        ("a.idx", 40),
        ("b.idx", -1),
        ("tokenizer.model", 0),
    ):
        content = bytearray((original / name).read_bytes())
        content[at] ^= 1
        (original / name).write_bytes(content)
        with pytest.raises(DataError, match=name.split(".")[0]):
            apply(plan, original.parent / "pruned")
        assert not (original.parent / "pruned").exists()
        content[at] ^= 1
        (original / name).write_bytes(content)
    apply(plan, original.parent / "pruned")


def test_where_it_may_not_be(original: Path) -> None:
    plan = plan_of(original, Manifest.load(original), [("a", 2)])
    (original.parent / "link").symlink_to(original)
    for output in (
        original,
        original / "in",
        original.parent,
        original.parent / "link",
        original / ".." / "corpus",
    ):
        with pytest.raises(DataError, match=r"must not change|lie in each other"):
            apply(plan, output)
    occupied = original.parent / "occupied"
    occupied.mkdir()
    (occupied / "file").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        apply(plan, occupied)
    with pytest.raises(DataError, match="exists already"):
        apply(plan, occupied / "file")
    verify_shards(original)


def verify_shards(folder: Path) -> None:
    for info in Manifest.load(folder).shards:
        Shard(folder / info.name, info).verify()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    documents = [[([n % 1000] * 500, 0)] for n in range(2000)]
    manifest = corpus(tmp_path / "corpus", [Plain("a", documents)], {"train": [("a", 0, 2000)]}, "uint16")
    plan = plan_of(tmp_path / "corpus", manifest, [("a", 0)])
    before = sorted(os.listdir(tmp_path))
    for size in (100, 10_000, 1_000_000):
        with files_no_larger_than(size), pytest.raises(DataError, match="could not be written"):
            apply(plan, tmp_path / "pruned")
        assert sorted(os.listdir(tmp_path)) == before


def test_an_interruption_leaves_nothing(original: Path) -> None:
    plan = plan_of(original, Manifest.load(original), [("a", 2)])
    before = sorted(os.listdir(original.parent))

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(plan, original.parent / "pruned", progress=interrupt)
    assert sorted(os.listdir(original.parent)) == before


def test_a_shard_without_documents_left_is_gone(original: Path) -> None:
    output = pruned_of(original, [("b", n) for n in range(8)])
    assert [info.name for info in Manifest.load(output).shards] == ["a"]
    assert not (output / "b.bin").exists()
    verify(output)


def test_a_pruned_corpus_can_be_pruned_again(original: Path) -> None:
    first = pruned_of(original, [("a", 2)])
    plan = plan_of(first, Manifest.load(first), [("a", 2)], "again.txt")
    apply(plan, original.parent / "second")
    assert [document[0][0][0] for document in read(original.parent / "second", "a").documents] == [
        1,
        11,
        41,
        51,
        61,
        71,
    ]
    verify(original.parent / "second")
    with pytest.raises(DataError, match=r"is not what .* was pruned of"):
        verify(original.parent / "second", original)


def test_moved_corpora(original: Path) -> None:
    output = pruned_of(original, [("a", 2)])
    moved = original.rename(original.parent / "moved")
    with pytest.raises(DataError, match="not a prepared corpus"):
        verify(output)
    verify(output, moved)
    apply(original.parent / "plan.txt", original.parent / "again", corpus=moved)


def test_documents_longer_than_an_int32_counts(tmp_path: Path) -> None:
    """A document of 2^31 + 5 tokens in two sequences, between two of a few tokens; sparse files."""
    lengths, indices = [2, 2**31 - 1, 6, 3], [0, 1, 3, 4]
    total = sum(lengths)
    folder = tmp_path / "corpus"
    corpus(
        folder,
        [Plain("a", [[([1, 2], 0)], [([], 0), ([], 0)], [([5, 6, 7], 0)]])],
        {"train": [("a", 0, 3)]},
        "uint16",
    )
    with (folder / "a.bin").open("r+b") as file:
        try:
            file.truncate(2 * total)
        except OSError as error:
            pytest.skip(f"no sparse file of 4.3 GB here: {error}")
        file.seek(2 * (total - 3))
        file.write(np.array([5, 6, 7], "<u2").tobytes())
    index = bytearray((folder / "a.idx").read_bytes())
    pointers = np.array([0, *np.cumsum(lengths[:-1])]) * 2
    index[34:] = (
        np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.array(indices, "<i8").tobytes()
    )
    (folder / "a.idx").write_bytes(index)
    shard = Shard(folder / "a")
    assert shard.document_bounds(1) == (2, 2**31 + 7)
    assert shard.document_of(2**31 + 7) == 2
    assert shard.read(2**31 + 5, 5).tolist() == [0, 0, 5, 6, 7]
    removed = gaps.Gaps.of(shard, np.array([1]))
    assert removed.tokens.tolist() == [removed.gone] == [2**31 + 5]
    assert removed.tokens_lost_before(2) == 2**31 + 5


@pytest.mark.slow
def test_indices_longer_than_a_chunk(tmp_path: Path) -> None:
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
    info = Shard(folder / "a").verify()
    segment = manifest.splits["train"][0].model_copy(update={"tokens": info.tokens, "documents": count})
    manifest = manifest.model_copy(update={"shards": [info], "splits": {"train": [segment]}})
    manifest.save(folder)
    gone = np.unique(random.integers(0, count, 5000))
    apply(plan_of(folder, manifest, [("a", n) for n in gone.tolist()]), tmp_path / "pruned")
    verify(tmp_path / "pruned")
    left = np.delete(np.arange(count), gone)
    pruned = Shard(tmp_path / "pruned" / "a")
    assert np.array_equal(pruned.sequence_lengths(slice(0, len(left))), lengths[left])
    assert np.array_equal(
        pruned.raw(0, pruned.tokens), tokens[np.isin(np.repeat(np.arange(count), lengths), left)]
    )


def test_a_corpus_that_was_prepared(tmp_path: Path) -> None:
    """A real one, with a tokenizer that loads: what is left passes the usual verification."""
    from megastable_tools.prepare.prepare import prepare_shards
    from tests.data.texts import documents, sentencepiece_file

    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(30)))
    prepare_shards([lines], tmp_path / "corpus", sentencepiece_file(tmp_path), name="n", validation=0.2)
    manifest = Manifest.load(tmp_path / "corpus")
    gone = [(info.name, n) for info in manifest.shards for n in range(0, info.documents, 3)]
    apply(plan_of(tmp_path / "corpus", manifest, gone), tmp_path / "pruned")
    made = verify_corpus(tmp_path / "pruned")
    assert sum(made.documents.values()) == 30 - len(gone)
    verify(tmp_path / "pruned")
