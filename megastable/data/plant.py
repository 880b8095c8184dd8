"""Plant a corruption at a known place: copy a corpus and replace the samples of a few steps by noise, one repeated
token, shuffled tokens of another corpus, or any text.

The data order is known in advance, so the damage can be placed exactly. Everything that decides the order stays the
same (name, sizes, index files): positions mean the same samples in the copy as in the clean corpus. So a run on the
copy that skips the planted positions trains on the same tokens as a run on the clean corpus that skips them, and the
findings of an incident can be compared with `planted.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base.durable import staged_directory, write_data_file
from megastable.base.errors import ConfigError, DataError
from megastable.base.text import count_noun
from megastable.config.recipe import find_recipe
from megastable.config.tree import CorpusConfig, RunConfig
from megastable.config.warmups import Stages
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.manifest import Manifest, Stream
from megastable.data.samples import Document, documents_at
from megastable.data.shard_format import little_endian, with_suffix
from megastable.data.shards import Shard
from megastable.data.skips import Range, numbers_of, ranges_of
from megastable.data.tokenizer import check_text, load_tokenizer

PLANTED = "planted.json"
Kind = Literal["random", "repeated", "shuffled", "text"]
WHAT: dict[Kind, str] = {
    "random": "noise",
    "repeated": "one repeated token",
    "shuffled": "shuffled tokens of another corpus",
    "text": "other text",
}
LONGEST = 64  # characters of a token: bounds how much of a long text has to be encoded
Tokens = npt.NDArray[Any]


class Planted(BaseModel):
    """A planted corruption: tokens of `kind`, drawn with `seed`, at `positions` of `order`, in `documents`.

    `positions` are ranges [first, end), ascending, that do not touch. `order` is the
    fingerprint of the order in the clean corpus: of its content, the seed of the run and the sequence length.
    `documents` are all documents at these positions. `other`: for shuffled tokens, the fingerprint of the corpus that
    they come from; for text, the xxh3-128 of its UTF-8; else "".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: list[Range] = Field(min_length=1)
    seed: int = Field(ge=0)
    order: str
    documents: list[Document]
    kind: Kind = "random"
    other: str = ""

    @property
    def first(self) -> int:
        """The first position."""
        return self.positions[0][0]

    @property
    def samples(self) -> int:
        return sum(range_end - range_first for range_first, range_end in self.positions)

    @property
    def places(self) -> str:
        """The positions as text."""
        last_position = self.positions[-1][1] - 1
        if len(self.positions) == 1:
            return f"the positions {self.first} to {last_position}"
        return f"{self.samples} of the positions {self.first} to {last_position}"

    def __str__(self) -> str:
        return f"{WHAT[self.kind]} at {self.places}, in {count_noun(len(self.documents), 'document')}"


def read_planted(directory: Path) -> Planted | None:
    """The corruption planted in the corpus `directory`; None for a clean one. Raises DataError for a broken file."""
    path = directory / PLANTED
    try:
        return Planted.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} cannot be read, remove the directory and plant again: {error}") from error


def positions_of(
    step: int, samples: int, batches: Stages, of_each: int | None = None, seed: int = 0
) -> list[Range]:
    """The positions of `samples` samples from step `step` on (steps count from 1), as ascending ranges [first, end).

    Without `of_each`, one range in the middle of whole batches: the first and the last batch hold clean samples too, so
    that naming the bad samples takes more than naming the batch. With it, `of_each` samples of each step (the rest
    in the last one), at places in the batch drawn with `seed`. Raises ConfigError for an `of_each` outside a batch.
    """
    begin = batches.reach_after(0, step - 1)
    if of_each is None:
        whole = next(n for n in range(1, samples + 3) if batches.reach_after(begin, n) - begin >= samples + 2)
        first_position = begin + (batches.reach_after(begin, whole) - begin - samples) // 2
        return [(first_position, first_position + samples)]
    batch_size = batches.value_at(begin)
    if not 1 <= of_each <= batch_size:
        raise ConfigError(
            f"{of_each} samples of each step: a step has {batch_size} (train.global_batch), choose 1 to {batch_size}"
        )
    random = np.random.default_rng((seed, 1))
    places = []
    for left in range(samples, 0, -of_each):
        places.append(begin + random.permutation(batches.value_at(begin))[: min(of_each, left)])
        begin += batches.value_at(begin)
    return ranges_of(np.concatenate(places))


def plant_corruption(
    corpus: Path,
    output: Path,
    config: RunConfig,
    *,
    step: int = 120,
    samples: int = 40,
    seed: int = 0,
    kind: Kind = "random",
    other: Path | None = None,
    text: str | None = None,
    of_each: int | None = None,
    overwrite: bool = False,
) -> tuple[Planted, bool]:
    """Make `output`, a copy of `corpus` with noise where a run of `config` reads `samples` samples from `step` on.

    of_each: replace only this many samples per step, so that they spread over more steps. Returns the corruption and
    whether it already existed: an identical `output` is reused. The new tokens are never 0 or the end of a document:
    "random", uniformly drawn ids; "repeated", a single one; "shuffled", the first tokens of the corpus `other`, in
    random order; "text", the tokens of `text` by the corpus's tokenizer, continued from sample to sample and repeated
    at its end. Ends of documents stay in place. So does the first token of a sample, which is the last label of
    another one. `data.corpora` and `data.skip` of `config` have no influence. `output` appears complete or not at all;
    only an older planted corpus is replaced, with `overwrite`.

    Raises ConfigError for a run that blends corpora and for an invalid number; DataError for a corpus that is damaged,
    already planted or too small, for an occupied `output`, for an `other` that is missing, of another tokenizer or too
    small, and for a text without tokens.
    """
    corpus = find_recipe(corpus)
    if (kind == "shuffled") != (other is not None):
        raise DataError(
            f"kind {kind!r}: shuffled tokens need the corpus they are from (other), no other kind does"
        )
    if (kind == "text") != (text is not None):
        raise DataError(f"kind {kind!r}: text needs what is planted (text), and no other kind takes it")
    if len(config.data.corpora) > 1:
        raise ConfigError(
            f"data.corpora names {len(config.data.corpora)} corpora: noise is planted for runs on one, "
            f"say data.corpora='[{{path: {output}}}]'"
        )
    if step < 1 or samples < 1 or seed < 0:
        raise ConfigError(f"step {step}, samples {samples}, seed {seed}: at least 1, 1 and 0")
    if read_planted(corpus) is not None:
        raise DataError(f"{corpus} is planted already: give the clean corpus that it was made from")
    length = config.model.sequence_length
    corpora = open_corpora([CorpusConfig(path=corpus)], length, config.run.seed)
    if output.resolve().is_relative_to(corpus.resolve()):
        raise DataError(f"the output {output} is inside of the corpus {corpus}, which must not change")
    if corpora.vocab_size < 3:
        raise DataError(f"{corpus}: a vocabulary of {corpora.vocab_size} has no token to replace others with")
    positions = positions_of(step, samples, config.batches, of_each, seed)
    (sequence_count,) = corpora.train.order.sequences
    if length < 2 or positions[-1][1] > sequence_count:
        raise DataError(
            f"positions {positions[0][0]} to {positions[-1][1] - 1} cannot be planted: {corpus} has {sequence_count} "
            f"samples of {length} tokens before any repeats, and each needs 2 tokens; choose an earlier step or "
            f"fewer samples, or train on the clean corpus: data.corpora='[{{path: {corpus}}}]'"
        )
    foreign, source, count = None, "", samples * (length - 1)
    if other is not None:
        other = find_recipe(other)
        foreign, source = _foreign(other, corpora, count), Manifest.load_manifest(other).fingerprint()
    elif text is not None:
        foreign, source = _encoded(text, corpus, corpora, count), xxhash.xxh3_128_hexdigest(text.encode())
    planted = Planted(
        positions=positions,
        seed=seed,
        order=corpora.order_fingerprint,
        documents=documents_at(corpora.train, numbers_of(positions)),
        kind=kind,
        other=source,
    )
    if _occupied(output, planted, overwrite):
        return planted, True
    with staged_directory(output) as staging:
        manifest = _write(corpus, staging, corpora, planted, foreign)
        write_data_file(staging / PLANTED, planted.model_dump_json(indent=1).encode() + b"\n")
        manifest.save_manifest(staging)
    return planted, False


def _foreign(other: Path, corpora: Corpora, count: int) -> Tokens:
    """The first `count` tokens of a corpus that may replace others, int64 [count]."""
    other_manifest = Manifest.load_manifest(other)
    if other_manifest.tokenizer.xxh3 != corpora.manifests[0].tokenizer.xxh3:
        raise DataError(
            f"{other} was made with another tokenizer: its token ids mean something else; prepare it with "
            f"{corpora.manifests[0].tokenizer.file} of the corpus"
        )
    train_stream = Stream(other, other_manifest, "train")
    usable_tokens = train_stream.read_tokens(0, min(train_stream.tokens, 4 * count)).astype(np.int64)
    usable_tokens = usable_tokens[(usable_tokens != 0) & (usable_tokens != corpora.train.eod)]
    if usable_tokens.size < count:
        raise DataError(
            f"{other}: {usable_tokens.size:,} tokens are too few to replace {count:,}: choose fewer samples"
        )
    return usable_tokens[:count]


def _encoded(text: str, corpus: Path, corpora: Corpora, count: int) -> Tokens:
    """The first `count` tokens of a text, repeated at its end, int64 [count]."""
    info = corpora.manifests[0].tokenizer
    tokenizer, text = load_tokenizer(corpus / info.file, info.eod), text[: LONGEST * count]
    check_text(text, tokenizer)
    text_tokens = tokenizer.encode(text)
    text_ids = np.array([text_token for text_token in text_tokens if text_token != info.eod], dtype=np.int64)
    if not text_ids.size:
        raise DataError(f"the text has no tokens ({len(text)} characters): give one that is not empty")
    return np.resize(text_ids, count)


def _occupied(output: Path, planted: Planted, overwrite: bool) -> bool:
    """Whether `output` already holds the same. Raises DataError if it may not be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    there = read_planted(output)
    if there is None:
        raise DataError(f"{output} exists already and is not a planted corpus: choose another output")
    manifest = Manifest.load_manifest(output)
    if there == planted:
        for split in manifest.splits:
            Stream(output, manifest, split)  # checks the sizes of all its files
        return True
    if not overwrite:
        raise DataError(
            f"{output} was planted with other settings, or for another run or corpus ({there}, seed {there.seed}): "
            "choose another output, or replace it with --overwrite"
        )
    manifest.check_replaceable(output, {PLANTED})
    return False


def _write(
    corpus: Path, staging: Path, corpora: Corpora, planted: Planted, foreign: Tokens | None
) -> Manifest:
    """Write all files of the corpus except its manifest, which is returned."""
    (manifest,) = corpora.manifests
    info_by_shard = {shard.name: shard for shard in manifest.shards}
    touched_shards = {document.shard for document in planted.documents}
    try:
        for name in manifest.files:
            shutil.copyfile(corpus / name, staging / name)
        for name in touched_shards:
            # Otherwise the new hashes would hide earlier damage.
            Shard(staging / name, info_by_shard[name]).verify_shard()
        _replace(staging, corpora, planted, foreign)
    except OSError as error:
        raise DataError(f"{corpus} could not be copied to {staging}: {error}") from error
    for name in touched_shards:
        info_by_shard[name] = Shard(staging / name, vocab_size=manifest.tokenizer.vocab_size).verify_shard()
    source_text = f"{manifest.source}; {WHAT[planted.kind]} at {planted.places}"
    return manifest.model_copy(update={"shards": list(info_by_shard.values()), "source": source_text})


def _replace(staging: Path, corpora: Corpora, planted: Planted, foreign: Tokens | None) -> None:
    order, (stream,), eod_token = corpora.train.order, corpora.train.streams, corpora.train.eod
    draw_tokens = _drawer(corpora, planted, foreign)
    for first_token in order.locate_samples(numbers_of(planted.positions)).first_token.tolist():
        for shard, shard_offset, count, _ in stream.split_range(first_token + 1, order.sequence_length - 1):
            old_tokens = shard.read_tokens(shard_offset, count)
            planted_tokens = np.where(old_tokens == eod_token, eod_token, draw_tokens(count))
            dtype = little_endian(shard.dtype)
            with with_suffix(staging / shard.name, ".bin").open("r+b") as bin_file:
                bin_file.seek(shard_offset * dtype.itemsize)
                bin_file.write(planted_tokens.astype(dtype).tobytes())


def _drawer(corpora: Corpora, planted: Planted, foreign: Tokens | None) -> Callable[[int], Tokens]:
    """A function that returns the next n tokens to plant."""
    random = np.random.default_rng(planted.seed)
    ids = np.setdiff1d(np.arange(corpora.vocab_size), [0, corpora.train.eod])
    if planted.kind == "random":
        return lambda count: random.choice(ids, count)
    if planted.kind == "repeated":
        repeated_token = random.choice(ids)
        return lambda count: np.full(count, repeated_token)
    assert foreign is not None
    foreign_tokens = iter(foreign if planted.kind == "text" else random.permutation(foreign))
    return lambda count: np.fromiter(foreign_tokens, np.int64, count)
