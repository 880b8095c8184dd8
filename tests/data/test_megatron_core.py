"""Both directions, byte for byte, with the reference reader and writer: megatron-core's IndexedDataset."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest, TokenizerInfo, adopt
from megastable.data.shard_format import CODES, dtype_for
from megastable.data.shards import Shard, ShardWriter
from megastable_tools.forensics.pruning.proof import verify
from megastable_tools.forensics.pruning.prune import apply
from megastable_tools.forensics.pruning.prune_plan import Removal, text_of
from tests.forensics.shelves import VOCABULARY, Plain, corpus, read
from tests.tiers import examples

megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="bash launch/install.sh dev")

Sequences = list[tuple[list[int], int]]

# uint16 below 65,500 ids, int32 from there on, in both.
VOCABULARIES = pytest.mark.parametrize("vocabulary", [65_499, 65_500])
MODES = pytest.mark.parametrize("modes", [False, True])


def theirs(prefix: Path, documents: list[Sequences], vocabulary: int, modes: bool) -> None:
    builder = megatron.IndexedDatasetBuilder(
        f"{prefix}.bin", megatron.DType.optimal_dtype(vocabulary), multimodal=modes
    )
    for document in documents:
        for tokens, mode in document:
            builder.add_item(torch.tensor(tokens, dtype=torch.int64), mode)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def ours(prefix: Path, documents: list[Sequences], vocabulary: int, modes: bool) -> None:
    with ShardWriter(prefix, vocabulary, modes) as writer:
        for document in documents:
            tokens = np.array([token for part, _ in document for token in part], dtype=np.int64)
            writer.add_document(
                tokens, [len(part) for part, _ in document], [mode for _, mode in document] if modes else None
            )


def both_files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def read_theirs(prefix: Path, modes: bool) -> list[Sequences]:
    """All documents of a shard as megatron-core reads them."""
    dataset = megatron.IndexedDataset(
        str(prefix), multimodal=modes, mmap=Path(f"{prefix}.bin").stat().st_size > 0
    )
    items = [dataset[n] if modes else (dataset[n], 0) for n in range(len(dataset))]
    found = [(tokens.tolist(), int(mode)) for tokens, mode in items]
    indices = dataset.document_indices.tolist()
    return [found[a:b] for a, b in pairwise(indices)]


def read_ours(prefix: Path) -> list[Sequences]:
    shard = Shard(prefix)
    found = []
    for document in range(shard.documents):
        first, end = shard.sequence_bounds(document)
        tokens = np.split(
            shard.read(shard.document_bounds(document)[0], int(np.diff(shard.document_bounds(document))[0])),
            np.cumsum(shard.sequence_lengths(slice(first, end)))[:-1],
        )
        modes = shard.modes(slice(first, end))
        some = [0] * (end - first) if modes is None else modes.tolist()
        found.append([(part.tolist(), mode) for part, mode in zip(tokens[: end - first], some, strict=True)])
    return found


DOCUMENTS: list[Sequences] = [
    [([1, 2, 3], 0)],
    [([4], 1), ([5, 6], -128), ([7, 8, 9], 127)],
    [([10, 11], 0), ([], 3), ([12], 0)],
    [([65_498], 2)],
]


@VOCABULARIES
@MODES
def test_the_same_documents_become_the_same_bytes(tmp_path: Path, vocabulary: int, modes: bool) -> None:
    ours(tmp_path / "ours", DOCUMENTS, vocabulary, modes)
    theirs(tmp_path / "theirs", DOCUMENTS, vocabulary, modes)
    assert both_files(tmp_path / "ours") == both_files(tmp_path / "theirs")
    plain = [[(tokens, mode if modes else 0) for tokens, mode in document] for document in DOCUMENTS]
    for name in ("ours", "theirs"):
        assert read_theirs(tmp_path / name, modes) == plain
        assert read_ours(tmp_path / name) == plain
        assert Shard(tmp_path / name, vocab_size=vocabulary).verify().documents == len(plain)


def test_one_sequence_for_each_document(tmp_path: Path) -> None:
    """What tools/preprocess_data.py and we write of text."""
    documents = [[([number] * (number % 7 + 1), 0)] for number in range(500)]
    ours(tmp_path / "ours", documents, 1000, False)
    theirs(tmp_path / "theirs", documents, 1000, False)
    assert both_files(tmp_path / "ours") == both_files(tmp_path / "theirs")


def test_a_document_given_whole(tmp_path: Path) -> None:
    """Its other way to write a document of several sequences."""
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), np.uint16, multimodal=True)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 0, 3], [7, 8, 9])
    builder.finalize(str(tmp_path / "x.idx"))
    assert read_ours(tmp_path / "x") == [[([1, 2], 7), ([], 8), ([3, 4, 5], 9)]]


def test_what_it_merges_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        theirs(tmp_path / name, DOCUMENTS, 65_499, True)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "merged.bin"), np.uint16, multimodal=True)
    for name in ("a", "b"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "merged.idx"))
    assert read_ours(tmp_path / "merged") == DOCUMENTS * 2


def test_the_types_have_its_codes() -> None:
    assert {dtype: megatron.DType[dtype].value for dtype in CODES.values()} == {
        v: k for k, v in CODES.items()
    }
    for vocabulary in (1, 65_499, 65_500, 2**31):
        assert megatron.DType.optimal_dtype(vocabulary).__name__ == dtype_for(vocabulary)


@settings(max_examples=examples(40))
@given(
    documents=st.lists(
        st.lists(
            st.tuples(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), st.integers(-128, 127)),
            max_size=3,
        ),
        max_size=6,
    ),
    modes=st.booleans(),
    code=st.sampled_from([999, 70_000]),
)
def test_whatever_it_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Sequences], modes: bool, code: int
) -> None:
    """Empty shards, documents without sequences, sequences without tokens."""
    prefix = tmp_path_factory.mktemp("theirs") / "x"
    theirs(prefix, documents, code, modes)
    shard = Shard(prefix)
    assert shard.verify().documents == len(documents)
    assert shard.has_modes == (modes and shard.sequences > 0)
    plain = [[(tokens, mode if modes else 0) for tokens, mode in document] for document in documents]
    assert read_ours(prefix) == plain == read_theirs(prefix, modes)


@MODES
def test_its_shards_adopted_pruned_and_read_by_it(tmp_path: Path, modes: bool) -> None:
    folder = tmp_path / "corpus"
    corpus(folder, [Plain("unused", [[([1], 0)]])], {"train": [("unused", 0, 1)]}, "uint16")
    info = TokenizerInfo.model_validate(Manifest.load(folder).tokenizer.model_dump() | {"vocab_size": 65_499})
    for path in folder.glob("unused.*"):
        path.unlink()
    documents = [[(tokens, mode if modes else 0) for tokens, mode in d] for d in DOCUMENTS] * 3
    for name in ("a", "b"):
        theirs(folder / name, documents, 65_499, modes)
    manifest = adopt(folder, info, validation=0.3)
    manifest.save(folder)
    plan = tmp_path / "plan.txt"
    gone = [0, 5, 6, 10]
    plan.write_text(text_of([Removal("a", number) for number in gone], folder, manifest))
    apply(plan, tmp_path / "pruned")
    verify(tmp_path / "pruned")
    left = [document for number, document in enumerate(documents) if number not in gone]
    assert read_theirs(tmp_path / "pruned" / "a", modes) == left == read(tmp_path / "pruned", "a").documents
    assert both_files(tmp_path / "pruned" / "b") == both_files(folder / "b")
    theirs(tmp_path / "again", left, 65_499, modes)
    assert both_files(tmp_path / "again") == both_files(tmp_path / "pruned" / "a")


def test_types_that_are_no_token_ids_are_refused(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.int8, np.int16, np.int64, np.float64, np.float32):
        builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype)
        builder.add_item(torch.tensor([1, 2]))
        builder.end_document()
        builder.finalize(str(tmp_path / "x.idx"))
        with pytest.raises(DataError, match="type code"):
            Shard(tmp_path / "x")


@pytest.mark.parametrize(
    ("lengths", "modes", "message"),
    [
        ([1, 1], None, "its sequences 2"),
        ([4, -1], None, "give the length of each"),
        ([1, 2], [0], "2 sequences and 1 modes"),
        ([1, 2], [0, 128], "int8"),
    ],
)
def test_sequences_refused(tmp_path: Path, lengths: list[int], modes: list[int] | None, message: str) -> None:
    with pytest.raises(DataError, match=message), ShardWriter(tmp_path / "x", 1000, modes=True) as writer:
        writer.add_document(np.array([1, 2, 3]), lengths, modes)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="in a shard with modes"), ShardWriter(tmp_path / "x", 1000) as writer:
        writer.add_document(np.array([1, 2, 3]), [1, 2], [0, 0])
