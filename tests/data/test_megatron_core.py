"""Both directions, byte for byte, with the reference reader and writer: megatron-core's IndexedDataset."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megastable.data.shards import Shard, ShardWriter

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
            shard.read_tokens(
                shard.document_bounds(document)[0], int(np.diff(shard.document_bounds(document))[0])
            ),
            np.cumsum(shard.sequence_lengths(slice(first, end)))[:-1],
        )
        modes = shard.sequence_modes(slice(first, end))
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
def test_shard_writer_writes_the_bytes_of_megatron_core(tmp_path: Path, vocabulary: int, modes: bool) -> None:
    ours(tmp_path / "ours", DOCUMENTS, vocabulary, modes)
    theirs(tmp_path / "theirs", DOCUMENTS, vocabulary, modes)
    assert both_files(tmp_path / "ours") == both_files(tmp_path / "theirs")
    plain = [[(tokens, mode if modes else 0) for tokens, mode in document] for document in DOCUMENTS]
    for name in ("ours", "theirs"):
        assert read_theirs(tmp_path / name, modes) == plain
        assert read_ours(tmp_path / name) == plain
        assert Shard(tmp_path / name, vocab_size=vocabulary).verify_shard().documents == len(plain)
