"""Adopt shards of other programs as a corpus: Megatron's in place, datatrove's and llm.c's as a copy. And verify that a
corpus is, byte for byte, what its manifest says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megastable.base.durable import staged_directory
from megastable.base.errors import DataError
from megastable.base.progress_bar import show_bar
from megastable.data.manifest import FILE, Manifest, Stream, adopt_shards, split_at_document
from megastable.data.shard_format import ShardInfo, Tokens, dtype_for, with_suffix
from megastable.data.shards import Shard, ShardWriter
from megastable.data.tokenizer import OWN, Tokenizer, load_tokenizer
from megastable_tools.prepare.prepare import check_free, corpus_name
from megastable_tools.prepare.reporting import CountedFiles, Meter, Summary
from megastable_tools.prepare.token_files import Ids, IdType, TokenFile, bin_file, datatrove_file

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
    index_files = sorted(directory.glob("*.idx"))
    foreign = sorted(  # files of ids that are not part of a Megatron shard
        path
        for path in (*directory.glob("*.ds"), *directory.glob("*.bin"))
        if path.suffix == ".ds" or not with_suffix(path.with_suffix(""), ".idx").exists()
    )
    if index_files and foreign:
        raise DataError(
            f"{directory} holds Megatron shards and {foreign[0].name}, which has no .idx: restore that, or move it away"
        )
    if foreign:
        if output is None:
            raise DataError(
                f"{directory} holds {foreign[0].name}, which is no Megatron shard: give --output, a folder for a copy"
            )
        files = list[TokenFile]()
        for path in foreign:
            try:
                files.append(datatrove_file(path) if path.suffix == ".ds" else bin_file(path, raw))
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
        name = corpus_name(name, output)
        tokenizer = load_tokenizer(tokenizer_path, eod, OWN if bos else None)
        return _copy(directory, files, output, tokenizer, name, validation, overwrite, progress)
    if output is not None:
        raise DataError(f"Megatron shards are adopted in place: leave --output out ({directory})")
    if (directory / FILE).exists() and not overwrite:
        raise DataError(f"{directory / FILE} exists already: replace it with --overwrite")
    tokenizer = load_tokenizer(tokenizer_path, eod, OWN if bos else None)
    edges = DocumentEdges(tokenizer)
    manifest = adopt_shards(
        directory, tokenizer.info, validation, corpus_name(name, directory), edges.count_tokens
    )
    tokenizer, warnings = _begun(tokenizer, edges, sum(shard.documents for shard in manifest.shards))
    manifest = manifest.model_copy(update={"tokenizer": tokenizer.info})
    tokenizer.copy_to(directory)
    manifest.save_manifest(directory)
    return Summary.of_corpus("adopted", directory, manifest, tokenizer, warnings=warnings)


def _begun(tokenizer: Tokenizer, edges: DocumentEdges, documents: int) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with the begin-of-document token that the documents have, and warnings about their edges."""
    if tokenizer.bos is None and edges.bos is not None:
        tokenizer = tokenizer.begin_with(edges.bos, "as every document here")
    return tokenizer, edges.find_warnings(tokenizer.bos, documents)


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
    begin_time, left_out = time.monotonic(), CountedFiles()
    if len({file.path.stem for file in files}) < len(files):
        raise DataError(
            f"{directory}: two files have one name but for the ending, adopt them one folder at a time"
        )
    check_free(output, overwrite)
    shard_infos, document_edges = list[ShardInfo](), DocumentEdges(tokenizer)
    total_tokens, tokens_read, document_count = sum(file.tokens for file in files), 0, 0
    with (
        staged_directory(output) as staging,
        Meter(total_tokens, not progress, "adopting", "adopted", "tokens") as meter,
    ):
        tokenizer.copy_to(staging)
        for file in files:
            with ShardWriter(staging / file.path.stem, tokenizer.vocab_size) as writer:
                opening_token = closing_token = tokenizer.eod
                for ids in file.read_documents(tokenizer.eod):
                    tokens_read += ids.size
                    if not ids.size:
                        left_out.count_document("empty documents")
                        continue
                    document_edges.count_document(ids)
                    closing_token = int(ids[-1])
                    if not writer.documents:
                        opening_token = int(ids[0])
                    writer.add_document(ids)
                    document_count += 1
                    if document_count % TOLD_EVERY == 0:
                        meter.show_progress(tokens_read, document_count, tokens_read)
                # Without an index a file may start and end inside a document (llm.c cuts files anywhere).
                if file.ends is None and writer.documents > 1:
                    document_edges.firsts -= Counter([opening_token])
                    document_edges.lasts -= Counter([closing_token])
                shard_infos.append(writer.close())
        tokenizer, edge_warnings = _begun(tokenizer, document_edges, document_count)
        manifest = Manifest(
            name=name,
            tokenizer=tokenizer.info,
            dtype=dtype_for(tokenizer.vocab_size),
            shards=shard_infos,
            splits=split_at_document(staging, shard_infos, validation),
            source="adopted files of token ids",
        )
        manifest.save_manifest(staging)
    warnings = [file.note for file in files if file.note] + edge_warnings
    return Summary.of_corpus(
        "adopted", output, manifest, tokenizer, seconds=time.monotonic() - begin_time, left_out=left_out,
        warnings=warnings,
    )  # fmt: skip


class DocumentEdges:
    """The first and last tokens of the non-empty documents of a corpus.

    firsts, lasts: how many documents begin and end with a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.firsts, self.lasts = Counter[int](), Counter[int]()

    def count_tokens(self, shard: Shard, first: int, tokens: Tokens) -> None:
        """Count the tokens of a shard from offset `first` on, as `Shard.verify_shard` passes them."""
        end_offset = first + tokens.size
        edges = shard.document_starts(first, min(end_offset + 1, shard.tokens) - first)
        begin_offsets, end_offsets = edges[edges < end_offset], edges[edges > first]
        if end_offset == shard.tokens:
            end_offsets = np.append(end_offsets, end_offset)
        for counts, token_indexes in (
            (self.firsts, begin_offsets - first),
            (self.lasts, end_offsets - first - 1),
        ):
            found_tokens, token_times = np.unique(tokens[token_indexes], return_counts=True)
            counts.update(dict(zip(found_tokens.tolist(), token_times.tolist(), strict=True)))

    def count_document(self, ids: Ids) -> None:
        """Count one document, 1-D, not empty."""
        self.firsts[int(ids[0])] += 1
        self.lasts[int(ids[-1])] += 1

    @property
    def bos(self) -> int | None:
        """The special token that every document begins with and that does not end documents; None if there is none."""
        if len(self.firsts) != 1:
            return None
        (token,) = self.firsts
        return token if token != self.tokenizer.eod and self.tokenizer.is_special(token) else None

    def find_warnings(self, bos: int | None, documents: int) -> list[str]:
        """What does not fit the end-of-document token, or `bos`, the begin-of-document token of the manifest.

        Args:
            bos: None for none.
            documents: of the corpus, with those that were not counted.
        """
        warning_texts, eod_token = list[str](), self.tokenizer.eod
        special_tokens = [
            token for token in self.firsts if token != eod_token and self.tokenizer.is_special(token)
        ]
        if bos is not None and (other_count := self.firsts.total() - self.firsts[bos]):
            warning_texts.append(
                f"{other_count:,} of {documents:,} documents do not begin with token {bos}, contrary to "
                "--bos: leave it out if most do not, or write the shards again with one"
            )
        elif bos is None and special_tokens:
            usual = max(special_tokens, key=self.firsts.__getitem__)
            warning_texts.append(
                f"{self.firsts[usual]:,} of {documents:,} documents begin with token {usual} "
                f"({self.tokenizer.spell_token(usual)}), and the manifest names none that begins documents, so "
                "prompts and "
                "exports have none: adopt the shards with --bos if most begin with the tokenizer's own, or write them "
                "again, all with one or all without"
            )
        if open_ends := self.lasts.total() - self.lasts[eod_token]:
            warning_texts.append(
                f"{open_ends:,} of {documents:,} documents do not end with the end-of-document token "
                f"({eod_token}): a model trained on them does not learn where texts end; name their last "
                "token by --eod, or write the shards again with one"
            )
        return warning_texts


def verify_corpus(directory: Path, silent: bool = True) -> Summary:
    """Read all files of a corpus: hashes, token ids, indices, the edges of all splits, the tokenizer.

    Raises DataError for the first thing that is wrong.
    """
    manifest = Manifest.load_manifest(directory)
    tokenizer = load_tokenizer(
        directory / manifest.tokenizer.file, manifest.tokenizer.eod, manifest.tokenizer.bos
    )
    if tokenizer.info != manifest.tokenizer:
        raise DataError(f"{tokenizer.file} is not the file that {directory / FILE} describes: restore it")
    edges, document_count = DocumentEdges(tokenizer), sum(info.documents for info in manifest.shards)
    with show_bar(
        "verifying", sum(info.tokens for info in manifest.shards), silent, "tokens"
    ) as progress_watch:
        for info in manifest.shards:
            Shard(directory / info.name, info, manifest.tokenizer.vocab_size).verify_shard(edges.count_tokens)
            progress_watch(info.tokens)
    for split, segments in manifest.splits.items():
        stream, first_token = Stream(directory, manifest, split), 0
        for segment in segments:
            stream.read_tokens(first_token, 1)  # checks that the segment consists of whole documents
            first_token += segment.tokens
    warnings = edges.find_warnings(tokenizer.bos, document_count)
    return Summary.of_corpus("verified", directory, manifest, tokenizer, warnings=warnings)
