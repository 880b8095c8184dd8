"""Adopt shards of other programs as a corpus: Megatron's in place, datatrove's and llm.c's as a copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megastable.base.errors import DataError
from megastable.data.local_copy import staged_directory
from megastable.data.manifest import FILE, Manifest, adopt, split_at_document
from megastable.data.shard_format import ShardInfo, dtype_for, with_suffix
from megastable.data.shards import ShardWriter
from megastable.data.tokenizer import OWN, Tokenizer, load_tokenizer
from megastable_tools.prepare.command_summary import Summary
from megastable_tools.prepare.document_edges import DocumentEdges
from megastable_tools.prepare.left_out import CountedFiles
from megastable_tools.prepare.prepare import check_free, corpus_name
from megastable_tools.prepare.progress import Meter
from megastable_tools.prepare.token_files import IdType, TokenFile, bin_file, datatrove_file

TOLD_EVERY = 1000  # documents


def adopt_directory(
    directory: Path,
    tokenizer_path: Path,
    name: str | None = None,
    validation: float = 0.0,
    eod: str | int | None = None,
    overwrite: bool = False,
    output: Path | None = None,
    raw: IdType | None = None,
    bos: bool = False,
    progress: bool = True,
) -> Summary:
    """Make a corpus of token ids that another program wrote to `directory`: check them, add tokenizer and manifest.

    Megatron's shards stay in place. datatrove's `.ds` and llm.c's `.bin` (and, with their type as `raw`, `.bin` of bare
    ids) are copied to one shard each in `output`, which appears complete or not at all. Documents that do not end with
    the end-of-document token cause a warning; with `bos`, so do those that do not begin with the tokenizer's own
    begin-of-document token. A special token that every document begins with is one that begins documents, also without
    `bos`.

    Raises DataError for files that are damaged, ambiguous or made with a larger vocabulary, and for a corpus that
    already exists, unless `overwrite`.
    """
    indices, foreign = sorted(directory.glob("*.idx")), _foreign(directory)
    if indices and foreign:
        raise DataError(
            f"{directory} holds Megatron shards and {foreign[0].name}, which has no .idx: restore that, or move it away"
        )
    if foreign:
        if output is None:
            raise DataError(
                f"{directory} holds {foreign[0].name}, which is no Megatron shard: give --output, a folder for a copy"
            )
        files = [_opened(path, raw) for path in foreign]
        name = corpus_name(name, output)
        tokenizer = load_tokenizer(tokenizer_path, eod, OWN if bos else None)
        return _copy(directory, files, output, tokenizer, name, validation, overwrite, progress)
    if output is not None:
        raise DataError(f"Megatron shards are adopted in place: leave --output out ({directory})")
    if (directory / FILE).exists() and not overwrite:
        raise DataError(f"{directory / FILE} exists already: replace it with --overwrite")
    tokenizer = load_tokenizer(tokenizer_path, eod, OWN if bos else None)
    edges = DocumentEdges(tokenizer)
    manifest = adopt(directory, tokenizer.info, validation, corpus_name(name, directory), edges.count_tokens)
    tokenizer, warnings = _begun(tokenizer, edges, sum(shard.documents for shard in manifest.shards))
    manifest = manifest.model_copy(update={"tokenizer": tokenizer.info})
    tokenizer.copy_to(directory)
    manifest.save(directory)
    return Summary.of("adopted", directory, manifest, tokenizer, warnings=warnings)


def _begun(tokenizer: Tokenizer, edges: DocumentEdges, documents: int) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with the begin-of-document token that the documents have, and warnings about their edges."""
    if tokenizer.bos is None and edges.bos is not None:
        tokenizer = tokenizer.beginning(edges.bos, "as every document here")
    return tokenizer, edges.warnings(tokenizer.bos, documents)


def _foreign(directory: Path) -> list[Path]:
    """The files of ids that are not part of a Megatron shard, sorted."""
    found = [*directory.glob("*.ds"), *directory.glob("*.bin")]
    return sorted(
        path
        for path in found
        if path.suffix == ".ds" or not with_suffix(path.with_suffix(""), ".idx").exists()
    )


def _opened(path: Path, raw: IdType | None) -> TokenFile:
    try:
        return datatrove_file(path) if path.suffix == ".ds" else bin_file(path, raw)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _copy(
    directory: Path,
    files: Sequence[TokenFile],
    output: Path,
    tokenizer: Tokenizer,
    name: str,
    validation: float,
    overwrite: bool,
    progress: bool,
) -> Summary:
    begin, left_out = time.monotonic(), CountedFiles()
    if len({file.path.stem for file in files}) < len(files):
        raise DataError(
            f"{directory}: two files have one name but for the ending, adopt them one folder at a time"
        )
    check_free(output, overwrite)
    shards, edges = list[ShardInfo](), DocumentEdges(tokenizer)
    total, read, documents = sum(file.tokens for file in files), 0, 0
    with (
        staged_directory(output) as staging,
        Meter(total, not progress, "adopting", "adopted", "tokens") as meter,
    ):
        tokenizer.copy_to(staging)
        for file in files:
            with ShardWriter(staging / file.path.stem, tokenizer.vocab_size) as writer:
                opening = closing = tokenizer.eod
                for ids in file.documents(tokenizer.eod):
                    read += ids.size
                    if not ids.size:
                        left_out.document("empty documents")
                        continue
                    edges.count_document(ids)
                    opening, closing = opening if writer.documents else int(ids[0]), int(ids[-1])
                    writer.add_document(ids)
                    documents += 1
                    if documents % TOLD_EVERY == 0:
                        meter.update(read, documents, read)
                # Without an index a file may start and end inside a document (llm.c cuts files anywhere).
                if file.ends is None and writer.documents > 1:
                    edges.uncount(opening, closing)
                shards.append(writer.close())
        tokenizer, odd = _begun(tokenizer, edges, documents)
        manifest = Manifest(
            name=name,
            tokenizer=tokenizer.info,
            dtype=dtype_for(tokenizer.vocab_size),
            shards=shards,
            splits=split_at_document(staging, shards, validation),
            source="adopted files of token ids",
        )
        manifest.save(staging)
    warnings = [file.note for file in files if file.note] + odd
    return Summary.of(
        "adopted", output, manifest, tokenizer, seconds=time.monotonic() - begin, left_out=left_out,
        warnings=warnings,
    )  # fmt: skip
