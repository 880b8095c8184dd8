"""Tokenize text into a corpus: Megatron shards, the tokenizer and a manifest in one new directory.

Several processes encode documents, which are written in input order, so the shards have the same bytes for any number
of workers. Each document ends with the end-of-document token, and may begin with a begin-of-document token. A keyed
hash of its text assigns it to training or validation: exact duplicates always go to the same split.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from rich.filesize import decimal

from megastable.base.durable import staged_directory
from megastable.base.errors import DataError, MegastableError
from megastable.base.text import count_noun, make_visible, show_share
from megastable.data.manifest import Manifest, Segment, TokenizerInfo
from megastable.data.shard_format import ShardInfo, dtype_for
from megastable.data.shards import ShardWriter
from megastable.data.tokenizer import (
    MOST_LOST,
    OWN,
    SHOWN,
    LossCounter,
    Tokenizer,
    describe_loss,
    load_tokenizer,
)
from megastable_tools.prepare.reporting import Meter, Summary, tell_counts
from megastable_tools.prepare.text_files import TextFiles

SHARD_TOKENS = 1 << 30
BATCH = 1 << 20  # characters of text per batch for a worker
SPLITS = ("train", "validation")
# From so much text on, the share lost so far ends the pass: a tokenizer that does not fit shows after seconds, and the
# end of a large corpus comes after hours. Of less, a few odd documents may be too much.
JUDGED_FROM = 100_000_000  # bytes
VALIDATION = 0.01  # share of the documents, unless another is given
IN_BOTH = "training documents with the text of a validation document"


class DocumentBatch(NamedTuple):
    """Some documents, and the number of input bytes read when they were complete."""

    texts: list[str]
    read_bytes: int


class Encoded(NamedTuple):
    """The documents of a batch, encoded."""

    tokens: npt.NDArray[np.integer]  # uint16 or int32 [sum(lengths)], one document after another
    lengths: list[int]  # including the tokens that begin and end a document
    hashes: list[int]  # 64 bits each, of the UTF-8 text
    text_bytes: list[int]  # of each
    read_bytes: int
    lost_bytes: int  # of the text; see `tokenizer.LossCounter`
    worst: tuple[int, str]  # the most that a document lost, and its beginning


def prepare_shards(
    inputs: Sequence[Path],
    output: Path,
    tokenizer_path: Path,
    *,
    name: str | None = None,
    validation: float | None = None,
    validation_inputs: Sequence[Path] = (),
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    key: str = "text",
    eod: str | int | None = None,
    bos: bool = False,
    seed: int = 0,
    skip_bad: bool = False,
    globs: Sequence[str] = (),
    as_text: bool = False,
    max_lost: float = MOST_LOST,
    overwrite: bool = False,
    source: str | None = None,
    progress: bool = True,
) -> Summary:
    """Make the corpus `output` from the text in `inputs` (files, and files of folders that `globs` match; see
    `text_files.py`).

    `validation` is the share of the documents to hold back (None: a hundredth, or none with `validation_inputs`); with
    two or more different documents, both splits get at least one. The documents of `validation_inputs` are the
    validation split; training documents with the text of one of them are left out and counted. A shard is closed after
    the document that brings it to `shard_tokens`. `output` appears complete or not at all; an older corpus there is
    replaced only with `overwrite`. With `bos` every document begins with the tokenizer's own begin-of-document token.

    Raises DataError for bad input, a tokenizer that loses more than the share `max_lost` of the text (`LossCounter`),
    or of that so far from `JUDGED_FROM` on, an empty corpus, an `output` that is occupied, or a full disk.
    """
    begin_time = time.monotonic()
    if validation and validation_inputs:
        raise DataError(
            f"validation is {validation}, and there are documents for validation already: choose one of --validation "
            "and --validation-input"
        )
    if validation is None:
        validation = 0.0 if validation_inputs else VALIDATION
    if not 0 <= validation < 1:
        raise DataError(f"validation is {validation}: give a share of the documents, at least 0, below 1")
    if workers < 1 or shard_tokens < 1:
        raise DataError(f"{workers} workers, {shard_tokens} tokens per shard: both must be 1 at least")
    if not 0 <= max_lost <= 1:
        raise DataError(f"max_lost is {max_lost}: give a share of the text, from 0 to 1")
    name = corpus_name(name, output)
    if "/" in name:
        raise DataError(f"the name {name!r} becomes part of file names: leave out the /")
    check_free(output, overwrite)
    for folder in (*inputs, *validation_inputs):
        if output.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"the output {output} is inside of the input {folder}: it would be read as well")
    chosen = load_tokenizer(tokenizer_path, eod, OWN if bos else None)
    corpus = TextFiles(inputs, key, skip_bad, globs, as_text)
    held_back = TextFiles(validation_inputs, key, skip_bad, globs, as_text) if validation_inputs else None
    with staged_directory(output) as staging:
        tokenizer = load_tokenizer(chosen.copy_to(staging), chosen.eod, chosen.bos)
        job = _Tokenization(
            corpus, held_back, staging, tokenizer, name, workers, shard_tokens, seed, max_lost, progress
        )
        threshold = round(validation * 2**64)
        written = job.write(threshold)
        if not written.hashes:
            left_out = "; ".join(tell_counts(corpus.left_out.counts, corpus.left_out.files, where_all=""))
            raise DataError(
                f"the corpus is empty: no text in {count_noun(len(corpus.files), 'file')} of "
                + ", ".join([*map(str, inputs[:3]), *(["..."] if len(inputs) > 3 else [])])
                + (f"; left out: {left_out}" if left_out else "")
                + "; give other --input"
            )
        job.check_loss(written)
        if held_back is not None and (
            empty := {"train", "validation"} - {s for s in SPLITS if written.shards[s]}
        ):
            raise DataError(
                f"nothing is left for the {empty.pop()} split: no text, or all of it is in the other input, too; give "
                "other --input and --validation-input"
            )
        settled_threshold = settle_threshold(threshold, *written.hashes)
        if settled_threshold != threshold:
            first_pass, written = written, job.write(settled_threshold)
            if written.hashes != first_pass.hashes:
                raise DataError("the input changed while it was read, or is a pipe: put it into a file")
        manifest = written.manifest(name, tokenizer, source or make_visible(", ".join(map(str, inputs))))
        manifest.save_manifest(staging)
    if held_back is not None:
        corpus.left_out.add_counts(held_back.left_out)
        corpus.read.add_counts(held_back.read)
    warnings = []
    if chosen.kind == "huggingface" and chosen.bos is None and chosen.added not in ((), (chosen.eod,)):
        spelled = ", ".join(make_visible(chosen.spell_token(token)) for token in chosen.added)
        warnings.append(
            f"other programs put {spelled} before every text with this tokenizer, and no document here begins with it: "
            "--bos begins every document with the tokenizer's own token"
        )
    if validation and "validation" not in manifest.splits:
        warnings.append("no validation split: there is only one document, or all are the same")
    held = (
        0.0
        if held_back is not None
        else manifest.count_tokens("validation") / sum(map(manifest.count_tokens, SPLITS))
    )
    if held > max(0.05, 3 * validation):
        warnings.append(
            f"the validation split holds {held:.0%} of the tokens, {validation:.0%} of the documents were asked for: "
            "there are few documents, and they go as a whole (a text file is one); cut them up, e.g. into JSON lines"
        )
    return Summary.of_corpus(
        "prepared",
        output,
        manifest,
        chosen,
        seconds=time.monotonic() - begin_time,
        read=corpus.read,
        left_out=corpus.left_out,
        lost_share=written.lost_share,
        warnings=warnings,
    )


def settle_threshold(wanted: int, lowest: int, highest: int) -> int:
    """The lowest hash of training documents, given the lowest and highest hash of a corpus.

    `wanted` stays if it is 0 (all for training) or leaves a document on both sides; otherwise it moves as little as
    possible. If all documents have the same hash they are for training.
    """
    if wanted == 0 or lowest < wanted <= highest:
        return wanted
    if lowest == highest:
        return min(wanted, lowest)
    return min(max(wanted, lowest + 1), highest)


def encode_batch(batch: DocumentBatch, tokenizer_path: Path, info: TokenizerInfo, seed: int) -> Encoded:
    """Encode the documents of a batch; runs in the worker processes."""
    tokenizer, counter = _cached_tokenizer(tokenizer_path, info)
    dtype = np.dtype(dtype_for(tokenizer.vocab_size))
    begin_ids = np.array([] if info.bos is None else [info.bos], dtype=dtype)
    end_ids = np.array([info.eod], dtype=dtype)
    raw_texts = [text.encode() for text in batch.texts]
    encoded_texts = tokenizer.encode_batch(batch.texts)
    lost_bytes = counter.count_lost(batch.texts, raw_texts, encoded_texts)
    worst_index = max(range(len(lost_bytes)), key=lost_bytes.__getitem__)
    document_ids = [encoded_part.astype(dtype) for encoded_part in encoded_texts]
    # A text may have the token that ends documents, or begins them, where that is a piece of one character, a byte or
    # the unknown piece, which cannot be taken from texts.
    for does, option, token in (("ends", "--eod", tokenizer.eod), ("begins", "--bos", tokenizer.bos)):
        if token is not None and any((document_id == token).any() for document_id in document_ids):
            raise DataError(
                f"the token {token} ({tokenizer.spell_token(token)!r}), which {does} documents ({option}), is in "
                f"the text of a document, too: {tokenizer.file.name} needs it for texts. "
                + ("Name another" if does == "ends" else f"Leave {option} out")
            )
    return Encoded(
        tokens=np.concatenate(
            [encoded_part for document in document_ids for encoded_part in (begin_ids, document, end_ids)]
        ),
        lengths=[begin_ids.size + document.size + 1 for document in document_ids],
        hashes=[xxhash.xxh3_64_intdigest(raw_text, seed) for raw_text in raw_texts],
        text_bytes=[len(raw_text) for raw_text in raw_texts],
        read_bytes=batch.read_bytes,
        lost_bytes=sum(lost_bytes),
        worst=(lost_bytes[worst_index], batch.texts[worst_index][:SHOWN] if lost_bytes[worst_index] else ""),
    )


@lru_cache(maxsize=1)
def _cached_tokenizer(path: Path, info: TokenizerInfo) -> tuple[Tokenizer, LossCounter]:
    # The hash in `info` is part of the key: one process may see different files at one path.
    tokenizer = load_tokenizer(path, info.eod, info.bos)
    return tokenizer, LossCounter(tokenizer)


def corpus_name(name: str | None, directory: Path) -> str:
    """`name`, or that of `directory`. Raises DataError for a name that a manifest cannot hold."""
    name = name or directory.resolve().name
    if name != make_visible(name):
        raise DataError(f"the name {make_visible(name)} is not plain text: give another with --name")
    return name


def check_free(output: Path, overwrite: bool) -> None:
    """Raise a DataError unless a corpus may be written to `output`.

    That is a path where nothing exists, or, with `overwrite`, a corpus without any foreign files.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise DataError(f"{output} exists already: choose another --output, or replace it with --overwrite")
    Manifest.load_manifest(output).check_replaceable(output)


@dataclass
class _Written:
    """The shards of one pass over the corpus."""

    shards: dict[str, list[ShardInfo]]
    text_bytes: int = 0
    hashes: tuple[int, int] | tuple[()] = ()  # the lowest and the highest; empty without documents
    lost_bytes: int = 0
    worst: tuple[int, str] = (0, "")

    @property
    def lost_share(self) -> float:
        return self.lost_bytes / max(1, self.text_bytes)

    def note(self, encoded: Encoded, left_out_bytes: int = 0) -> None:
        self.text_bytes += sum(encoded.text_bytes) - left_out_bytes
        self.lost_bytes += encoded.lost_bytes
        self.worst = max(self.worst, encoded.worst, key=lambda worst: worst[0])
        all_hashes = (*self.hashes, *encoded.hashes)
        self.hashes = (min(all_hashes), max(all_hashes))

    def manifest(self, name: str, tokenizer: Tokenizer, source: str) -> Manifest:
        segments_by_split = {
            split: [
                Segment(shard=shard.name, first_token=0, tokens=shard.tokens, documents=shard.documents)
                for shard in shards
            ]
            for split, shards in self.shards.items()
            if shards
        }
        return Manifest(
            name=name,
            tokenizer=tokenizer.info,
            dtype=dtype_for(tokenizer.vocab_size),
            shards=[shard for shards in self.shards.values() for shard in shards],
            splits=segments_by_split,
            text_bytes=self.text_bytes,
            source=source,
        )


@dataclass
class _Tokenization:
    corpus: TextFiles
    held_back: TextFiles | None
    staging: Path
    tokenizer: Tokenizer
    name: str
    workers: int
    shard_tokens: int
    seed: int
    max_lost: float
    progress: bool

    def check_loss(self, written: _Written, of: str = "the text") -> None:
        """Raise a DataError if too much of the text is lost."""
        if written.lost_share > self.max_lost:
            allowed_share = f"{min(1, written.lost_share + 0.001):.3f}"
            lost = describe_loss(written.lost_share, self.tokenizer, written.worst[1], of)
            raise DataError(
                f"{lost}: take another, train one on this text (megastable prepare tokenizer), or allow the loss with "
                f"--max-lost {allowed_share}"
            )

    def write(self, threshold: int) -> _Written:
        """Write all shards: documents whose hash is below `threshold` are for validation."""
        for old_file in (*self.staging.glob("*.bin"), *self.staging.glob("*.idx")):
            old_file.unlink()
        encode_documents = partial(
            encode_batch, tokenizer_path=self.tokenizer.file, info=self.tokenizer.info, seed=self.seed
        )
        written = _Written({})
        document_count = token_count = 0
        held_hashes = set[int]()
        with ExitStack() as stack:
            total_bytes = self.corpus.total_bytes + (self.held_back.total_bytes if self.held_back else 0)
            meter = stack.enter_context(Meter(total_bytes, silent=not self.progress))
            train_writer, validation_writer = (
                stack.enter_context(_SplitWriter(self, split)) for split in SPLITS
            )

            def encoded_batches(corpus: TextFiles) -> Iterator[Encoded]:
                encoded_results = ordered_map(encode_documents, _batches(corpus), self.workers)
                yield from stack.enter_context(closing(encoded_results))

            def note(encoded: Encoded, read_bytes: int, left_out_bytes: int = 0) -> None:
                nonlocal document_count, token_count
                written.note(encoded, left_out_bytes)
                document_count += len(encoded.lengths)
                token_count += encoded.tokens.size
                loss_text = f"{show_share(written.lost_share)} lost" if written.lost_bytes else ""
                meter.show_progress(read_bytes, document_count, token_count, loss_text)
                if written.text_bytes >= JUDGED_FROM:
                    self.check_loss(written, f"the first {decimal(written.text_bytes)} of text")

            # First what is held back, to know it in the other input.
            for encoded in encoded_batches(self.held_back) if self.held_back else ():
                for document_ids in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]):
                    validation_writer.add(document_ids)
                held_hashes.update(encoded.hashes)
                note(encoded, encoded.read_bytes)
            read_before = self.held_back.read_bytes if self.held_back else 0
            for encoded in encoded_batches(self.corpus):
                document_ends, left_out_bytes = np.cumsum(encoded.lengths)[:-1], 0
                for document_ids, text_hash, text_bytes in zip(
                    np.split(encoded.tokens, document_ends), encoded.hashes, encoded.text_bytes, strict=True
                ):
                    if text_hash in held_hashes:
                        self.corpus.left_out.count_document(IN_BOTH)
                        left_out_bytes += text_bytes
                        continue
                    (validation_writer if text_hash < threshold else train_writer).add(document_ids)
                note(encoded, read_before + encoded.read_bytes, left_out_bytes)
            written.shards = {"train": train_writer.close(), "validation": validation_writer.close()}
        return written


class _SplitWriter:
    """The shards NAME-SPLIT-00000, NAME-SPLIT-00001, ... of one split; a context manager."""

    def __init__(self, job: _Tokenization, split: str) -> None:
        self._prefix = job.staging / f"{job.name}-{split}"
        self._vocab_size, self._limit = job.tokenizer.vocab_size, job.shard_tokens
        self._done: list[ShardInfo] = []
        self._open: ShardWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)

    def add(self, document: npt.NDArray[np.integer]) -> None:
        if self._open is None:
            shard_prefix = self._prefix.with_name(f"{self._prefix.name}-{len(self._done):05d}")
            self._open = ShardWriter(shard_prefix, self._vocab_size)
        self._open.add_document(document)
        if self._open.tokens >= self._limit:
            self.close()

    def close(self) -> list[ShardInfo]:
        if self._open is not None:
            self._done.append(self._open.close())
            self._open = None
        return self._done


def _batches(corpus: TextFiles) -> Iterator[DocumentBatch]:
    batch_texts: list[str] = []
    character_count = 0
    for corpu_text in corpus:
        batch_texts.append(corpu_text)
        character_count += len(corpu_text)
        if character_count >= BATCH:
            yield DocumentBatch(batch_texts, corpus.read_bytes)
            batch_texts, character_count = [], 0
    if batch_texts:
        yield DocumentBatch(batch_texts, corpus.read_bytes)


Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """`map(function, items)` in `workers` spawned processes, or in this one if `workers` is 1.

    At most 3 items per worker are in flight, so a slow consumer stops the reading of `items`. Exceptions of
    `function` are raised here. Close the iterator (`contextlib.closing`) to end the workers early;
    they also end when this process ends in any way. Raises MegastableError when a worker is killed.
    """
    if workers == 1:
        yield from map(function, items)
        return
    process_pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    pending_results: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _interrupts_held():
                pending_results.append(process_pool.submit(function, item))
            if len(pending_results) >= 3 * workers:
                yield pending_results.popleft().result()
        while pending_results:
            yield pending_results.popleft().result()
    except BrokenProcessPool as error:
        raise MegastableError(
            "a worker process was killed, probably for lack of memory: try again with fewer --workers"
        ) from error
    finally:
        process_pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start: they inherit the mask, so that only this process receives it.

    The mask is this thread's; when another thread takes the signal, Python still calls the handler here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals_received: list[int] = []
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    old_handler = signal.signal(signal.SIGINT, lambda number, frame: signals_received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        if signals_received:
            signal.raise_signal(signal.SIGINT)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_handle = parent_process()
    if parent_handle is not None:
        parent_handle.join()
        os._exit(1)
