"""A corruption with a known place: a copy of a corpus in which the samples of a few steps are noise, one token over
and over, or the shuffled tokens of another corpus.

What a run will read at a position is known beforehand, so the damage can be put exactly there. Everything that
decides the order stays as it was (name, sizes, index files): positions mean the same samples in the copy as in the
clean corpus. So a run on the copy that skips the planted positions trains on the very tokens of a run on the clean
corpus that skips them, and whatever an incident names can be compared with `planted.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.config import CorpusConfig, RunConfig
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.documents import Document, documents_at
from megastable.data.manifest import FILE, Manifest, Stream
from megastable.data.shard_format import little_endian, with_suffix
from megastable.data.shards import Shard
from megastable.data.skips import Range
from megastable.data.staging import staged_directory, write_file
from megastable.errors import ConfigError, DataError
from megastable.recipe import find

PLANTED = "planted.json"
Kind = Literal["random", "repeated", "shuffled"]
WHAT: dict[Kind, str] = {
    "random": "noise",
    "repeated": "one repeated token",
    "shuffled": "shuffled tokens of another corpus",
}
Tokens = npt.NDArray[Any]


class Planted(BaseModel):
    """What was planted: tokens of `kind`, drawn with `seed`, at the positions [first, end) of `order`, in `documents`.

    `order` is the fingerprint of the order in the clean corpus: of its content, the seed of the run and the sequence
    length. `documents` are all that the positions were made of. `other`: the fingerprint of the corpus that shuffled
    tokens are from, "" without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: Range
    seed: int = Field(ge=0)
    order: str
    documents: list[Document]
    kind: Kind = "random"
    other: str = ""

    def __str__(self) -> str:
        first, end = self.positions
        return f"{WHAT[self.kind]} at the positions {first} to {end - 1}, in {len(self.documents)} documents"


def read_planted(directory: Path) -> Planted | None:
    """What was planted in the corpus `directory`; None for a clean one. Raises DataError for a broken file."""
    path = directory / PLANTED
    try:
        return Planted.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} cannot be read, remove the directory and plant again: {error}") from error


def positions_of(step: int, samples: int, global_batch: int) -> Range:
    """The positions [first, end) of `samples` samples from step `step` on (steps count from 1).

    They lie in the middle of whole batches, so that the first and the last one hold clean samples too: what is
    named guilty is then more than "the batch".
    """
    batches = -(-(samples + 2) // global_batch)
    first = (step - 1) * global_batch + (batches * global_batch - samples) // 2
    return first, first + samples


def plant(
    corpus: Path,
    output: Path,
    config: RunConfig,
    *,
    step: int = 120,
    samples: int = 40,
    seed: int = 0,
    kind: Kind = "random",
    other: Path | None = None,
    overwrite: bool = False,
) -> tuple[Planted, bool]:
    """Make `output`, the corpus `corpus` with noise where a run of `config` reads `samples` samples from `step` on.

    Returns what is planted and whether it was there already: an `output` with the same is reused. The tokens are
    replaced by others but 0 and the end of a document: "random", uniformly drawn ids; "repeated", a single one;
    "shuffled", the first ones of the corpus `other`, in any order. Ends of documents keep their place. So does the
    first token of a sample, which is the last label of another one. `data.corpora` and `data.skip` of `config` have
    no influence. `output` appears whole or not at all; only an older planted corpus is replaced, with `overwrite`.

    Raises ConfigError for a run that blends corpora; DataError for a corpus that is damaged, planted already or too
    small, for an `output` that is occupied, and for an `other` that is missing, of another tokenizer or too small.
    """
    corpus = find(corpus)
    if (kind == "shuffled") != (other is not None):
        raise DataError(
            f"kind {kind!r}: shuffled tokens need the corpus they are from (other), no other kind does"
        )
    if len(config.data.corpora) > 1:
        raise ConfigError(
            f"data.corpora names {len(config.data.corpora)} corpora: noise is planted for runs on one, "
            f"say data.corpora='[{{path: {output}}}]'"
        )
    if step < 1 or samples < 1 or seed < 0:
        raise ConfigError(f"step {step}, samples {samples}, seed {seed}: at least 1, 1 and 0")
    if read_planted(corpus) is not None:
        raise DataError(f"{corpus} is planted already: give the clean corpus that it was made of")
    length = config.model.sequence_length
    corpora = open_corpora([CorpusConfig(path=corpus)], length, config.run.seed)
    if output.resolve().is_relative_to(corpus.resolve()):
        raise DataError(f"the output {output} is inside of the corpus {corpus}, which stays as it is")
    if corpora.vocab_size < 3:
        raise DataError(f"{corpus}: a vocabulary of {corpora.vocab_size} has no token to replace others with")
    first, end = positions_of(step, samples, config.train.global_batch)
    (sequences,) = corpora.train.order.sequences
    if length < 2 or end > sequences:
        raise DataError(
            f"positions {first} to {end - 1} cannot be planted: {corpus} has {sequences} samples of {length} tokens "
            "before any comes again, and each needs 2 tokens; choose an earlier step or fewer samples, or train on the "
            f"clean corpus: data.corpora='[{{path: {corpus}}}]'"
        )
    foreign = None if other is None else _foreign(other, corpora, (end - first) * (length - 1))
    planted = Planted(
        positions=(first, end),
        seed=seed,
        order=corpora.order_fingerprint,
        documents=documents_at(corpora.train, range(first, end)),
        kind=kind,
        other="" if other is None else Manifest.load(find(other)).fingerprint(),
    )
    if _occupied(output, planted, overwrite):
        return planted, True
    with staged_directory(output) as staging:
        manifest = _write(corpus, staging, corpora, planted, foreign)
        write_file(staging / PLANTED, planted.model_dump_json(indent=1).encode() + b"\n")
        manifest.save(staging)
    return planted, False


def _foreign(other: Path, corpora: Corpora, count: int) -> Tokens:
    """The first `count` tokens of a corpus that may replace others, int64 [count]."""
    other = find(other)
    manifest = Manifest.load(other)
    if manifest.tokenizer.xxh3 != corpora.manifests[0].tokenizer.xxh3:
        raise DataError(
            f"{other} was made with another tokenizer: its token ids mean something else; prepare it with "
            f"{corpora.manifests[0].tokenizer.file} of the corpus"
        )
    stream = Stream(other, manifest, "train")
    tokens = stream.read(0, min(stream.tokens, 4 * count)).astype(np.int64)
    tokens = tokens[(tokens != 0) & (tokens != corpora.train.eod)]
    if tokens.size < count:
        raise DataError(
            f"{other}: {tokens.size:,} tokens are too few to replace {count:,}: choose fewer samples"
        )
    return tokens[:count]


def _occupied(output: Path, planted: Planted, overwrite: bool) -> bool:
    """Whether `output` holds the same already. Raises DataError when it may not be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    there = read_planted(output)
    if there is None:
        raise DataError(f"{output} exists already and is not a planted corpus: choose another output")
    manifest = Manifest.load(output)
    if there == planted:
        for split in manifest.splits:
            Stream(output, manifest, split)  # looks at the sizes of all its files
        return True
    if not overwrite:
        first, end = there.positions
        raise DataError(
            f"{output} was planted for another run or corpus (positions {first} to {end - 1}, seed {there.seed}): "
            "choose another output, or replace it with --overwrite"
        )
    own = {FILE, PLANTED, *_files(manifest)}
    if foreign := sorted(path.name for path in output.iterdir() if path.name not in own):
        raise DataError(f"{output} will not be replaced: {foreign[0]} in it is not part of its corpus")
    return False


def _files(manifest: Manifest) -> list[str]:
    shards = [shard.name + suffix for shard in manifest.shards for suffix in (".bin", ".idx")]
    return [manifest.tokenizer.file, *shards]


def _write(
    corpus: Path, staging: Path, corpora: Corpora, planted: Planted, foreign: Tokens | None
) -> Manifest:
    """All files of the corpus but its manifest, which is returned."""
    (manifest,) = corpora.manifests
    infos = {shard.name: shard for shard in manifest.shards}
    touched = {document.shard for document in planted.documents}
    try:
        for name in _files(manifest):
            shutil.copyfile(corpus / name, staging / name)
        for name in touched:
            # Or else the new hashes would hide a damage of before.
            Shard(staging / name, infos[name]).verify()
        _replace(staging, corpora, planted, foreign)
    except OSError as error:
        raise DataError(f"{corpus} could not be copied to {staging}: {error}") from error
    for name in touched:
        infos[name] = Shard(staging / name, vocab_size=manifest.tokenizer.vocab_size).verify()
    first, end = planted.positions
    source = f"{manifest.source}; {WHAT[planted.kind]} at positions {first} to {end - 1}"
    return manifest.model_copy(update={"shards": list(infos.values()), "source": source})


def _replace(staging: Path, corpora: Corpora, planted: Planted, foreign: Tokens | None) -> None:
    order, (stream,), eod = corpora.train.order, corpora.train.streams, corpora.train.eod
    draw = _drawer(corpora, planted, foreign)
    for begin in order.locate(range(*planted.positions)).first_token.tolist():
        for shard, at, count, _ in stream.pieces(begin + 1, order.sequence_length - 1):
            noise = np.where(shard.read(at, count) == eod, eod, draw(count))
            dtype = little_endian(shard.dtype)
            with with_suffix(staging / shard.name, ".bin").open("r+b") as file:
                file.seek(at * dtype.itemsize)
                file.write(noise.astype(dtype).tobytes())


def _drawer(corpora: Corpora, planted: Planted, foreign: Tokens | None) -> Callable[[int], Tokens]:
    """What gives the next so many tokens to plant."""
    random = np.random.default_rng(planted.seed)
    ids = np.setdiff1d(np.arange(corpora.vocab_size), [0, corpora.train.eod])
    if planted.kind == "random":
        return lambda count: random.choice(ids, count)
    if planted.kind == "repeated":
        token = random.choice(ids)
        return lambda count: np.full(count, token)
    assert foreign is not None
    shuffled = iter(random.permutation(foreign))
    return lambda count: np.fromiter(shuffled, np.int64, count)
