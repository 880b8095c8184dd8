"""Corpora of any shape, written byte by byte as the format says, and the same as plain lists."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import xxhash
from hypothesis import strategies as st

from megastable.data.manifest import Manifest, Segment, TokenizerInfo
from megastable.data.shards import Shard

VOCABULARY = 1000
TOKENIZER = b"stands for a tokenizer"

Sequences = list[tuple[list[int], int]]  # of a document: tokens and mode of each


@dataclass
class Plain:
    """A shard as lists. modes: they are stored."""

    name: str
    documents: list[Sequences]
    modes: bool = False

    @property
    def sequences(self) -> Sequences:
        return [sequence for document in self.documents for sequence in document]

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.sequences for token in tokens]

    @property
    def edges(self) -> list[int]:
        """Token offsets at which documents begin, then the end."""
        return [0, *accumulate(sum(len(tokens) for tokens, _ in document) for document in self.documents)]


def write(folder: Path, shard: Plain, dtype: str) -> None:
    code, token = (8, "<u2") if dtype == "uint16" else (4, "<i4")
    itemsize = np.dtype(token).itemsize
    lengths = [len(tokens) for tokens, _ in shard.sequences]
    indices = [0, *accumulate(len(document) for document in shard.documents)]
    pointers = [itemsize * at for at in [0, *accumulate(lengths)][:-1]]
    content = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(indices))
    content += struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *pointers)
    content += struct.pack(f"<{len(indices)}q", *indices)
    if shard.modes:
        content += struct.pack(f"<{len(lengths)}b", *(mode for _, mode in shard.sequences))
    (folder / f"{shard.name}.idx").write_bytes(content)
    (folder / f"{shard.name}.bin").write_bytes(np.array(shard.tokens, dtype=token).tobytes())


def read(folder: Path, name: str) -> Plain:
    """A shard as another program would read it."""
    content = (folder / f"{name}.idx").read_bytes()
    _, _, code, sequences, entries = struct.unpack_from("<9sQBQQ", content)
    lengths = struct.unpack_from(f"<{sequences}i", content, 34)
    pointers = struct.unpack_from(f"<{sequences}q", content, 34 + 4 * sequences)
    indices = struct.unpack_from(f"<{entries}q", content, 34 + 12 * sequences)
    modes = content[34 + 12 * sequences + 8 * entries :]
    raw = (folder / f"{name}.bin").read_bytes()
    token = "<u2" if code == 8 else "<i4"
    found = [
        (np.frombuffer(raw, token, length, pointer).tolist(), mode - 256 * (mode > 127))
        for length, pointer, mode in zip(lengths, pointers, modes or bytes(sequences), strict=True)
    ]
    documents = [found[a:b] for a, b in pairwise(indices)]
    return Plain(name, documents, bool(modes))


def corpus(
    folder: Path, shards: list[Plain], splits: dict[str, list[tuple[str, int, int]]], dtype: str,
    bos: int | None = None,
) -> Manifest:  # fmt: skip
    """Write shards, tokenizer and manifest. splits: documents [first, end) of shards; bos: what begins documents."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(TOKENIZER)
    for shard in shards:
        write(folder, shard, dtype)
    by_name = {shard.name: shard for shard in shards}
    segments = {
        split: [_segment(by_name[name], *part) for name, *part in parts] for split, parts in splits.items()
    }
    info = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3=xxhash.xxh3_128_hexdigest(TOKENIZER),
        vocab_size=VOCABULARY, eod=0, bos=bos,
    )  # fmt: skip
    infos = [Shard(folder / shard.name).verify_shard() for shard in shards]
    manifest = Manifest(
        name="corpus", tokenizer=info, dtype=infos[0].dtype, shards=infos, source="tests",
        splits={split: [part for part in parts if part] for split, parts in segments.items()},
    )  # fmt: skip
    manifest.save_manifest(folder)
    return manifest


def _segment(shard: Plain, first: int, end: int) -> Segment | None:
    edges = shard.edges
    if edges[first] == edges[end]:
        return None
    # As the loader counts: a document belongs to where its first token is, an empty one to what is behind it.
    starts = edges[:-1]

    def before(edge: int) -> int:
        return len(starts) if edge == edges[-1] else sum(start < edge for start in starts)

    count = before(edges[end]) - before(edges[first])
    return Segment(
        shard=shard.name, first_token=edges[first], tokens=edges[end] - edges[first], documents=count
    )


@st.composite
def shelves(draw: st.DrawFn) -> tuple[list[Plain], dict[str, list[tuple[str, int, int]]], str]:
    """Shards, splits and dtype of a corpus: documents of several sequences, of none and without tokens, with modes,
    splits that begin and end inside of shards."""
    tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
    sequence = st.tuples(tokens, st.integers(-128, 127))
    document = st.lists(sequence, max_size=3)
    modes = draw(st.booleans())
    shards = []
    for number in range(draw(st.integers(1, 3))):
        documents = draw(st.lists(document, max_size=6))
        if not number:
            documents.append([([1, 2], 0)])  # at least one token to train on
        if not modes:
            documents = [[(ids, 0) for ids, _ in some] for some in documents]
        shards.append(Plain(f"part-{number}", documents, modes and any(map(len, documents))))
    splits: dict[str, list[tuple[str, int, int]]] = {"train": [], "validation": []}
    for shard in shards:
        cut = draw(st.integers(0, len(shard.documents)))
        splits["train"].append((shard.name, 0, cut))
        splits["validation"].append((shard.name, cut, len(shard.documents)))
    return shards, splits, draw(st.sampled_from(["uint16", "int32"]))
