"""Whether a corpus is, byte for byte, what its manifest says."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import DataError
from megastable.base.progress_bar import bar
from megastable.data.manifest import FILE, Manifest, Stream
from megastable.data.shards import Shard
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare.command_summary import Summary
from megastable_tools.prepare.document_edges import DocumentEdges


def verify_corpus(directory: Path, silent: bool = True) -> Summary:
    """Read all files of a corpus: hashes, token ids, indices, the edges of all splits, the tokenizer.

    Raises DataError for the first thing that is wrong.
    """
    manifest = Manifest.load(directory)
    tokenizer = load_tokenizer(
        directory / manifest.tokenizer.file, manifest.tokenizer.eod, manifest.tokenizer.bos
    )
    if tokenizer.info != manifest.tokenizer:
        raise DataError(f"{tokenizer.file} is not the file that {directory / FILE} describes: restore it")
    edges, documents = DocumentEdges(tokenizer), sum(info.documents for info in manifest.shards)
    with bar("verifying", sum(info.tokens for info in manifest.shards), silent, "tokens") as watch:
        for info in manifest.shards:
            Shard(directory / info.name, info, manifest.tokenizer.vocab_size).verify(edges.count_tokens)
            watch(info.tokens)
    for split, segments in manifest.splits.items():
        stream, first = Stream(directory, manifest, split), 0
        for segment in segments:
            stream.read(first, 1)  # checks that the segment consists of whole documents
            first += segment.tokens
    warnings = edges.warnings(tokenizer.bos, documents)
    return Summary.of("verified", directory, manifest, tokenizer, warnings=warnings)
