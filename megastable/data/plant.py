"""A corruption with a known place: a copy of a corpus in which the samples of a few steps are noise.

What a run will read at a position is known beforehand, so the damage can be put exactly there. Everything that
decides the order stays as it was (name, sizes, index files): positions mean the same samples in the copy as in the
clean corpus. So a run on the copy that skips the planted positions trains on the very tokens of a run on the clean
corpus that skips them, and whatever an incident names can be compared with `planted.json`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
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


class Planted(BaseModel):
    """What was planted: noise of `seed` at the positions [first, end) of `order`, in `documents`.

    `order` is the fingerprint of the order in the clean corpus: of its content, the seed of the run and the sequence
    length. `documents` are all that the positions were made of.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: Range
    seed: int = Field(ge=0)
    order: str
    documents: list[Document]

    def __str__(self) -> str:
        first, end = self.positions
        return f"noise at the positions {first} to {end - 1}, in {len(self.documents)} documents"


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
    overwrite: bool = False,
) -> tuple[Planted, bool]:
    """Make `output`, the corpus `corpus` with noise where a run of `config` reads `samples` samples from `step` on.

    Returns what is planted and whether it was there already: an `output` with the same is reused. The tokens are
    replaced by uniformly random ids but 0 and the end of a document; ends of documents keep their place. So does the
    first token of a sample, which is the last label of another one. `data.corpora` and `data.skip` of `config` have
    no influence. `output` appears whole or not at all; only an older planted corpus is replaced, with `overwrite`.

    Raises ConfigError for a run that blends corpora; DataError for a corpus that is damaged, planted already or too
    small, and for an `output` that is occupied.
    """
    corpus = find(corpus)
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
    planted = Planted(
        positions=(first, end),
        seed=seed,
        order=corpora.order_fingerprint,
        documents=documents_at(corpora.train, range(first, end)),
    )
    if _occupied(output, planted, overwrite):
        return planted, True
    with staged_directory(output) as staging:
        manifest = _write(corpus, staging, corpora, planted)
        write_file(staging / PLANTED, planted.model_dump_json(indent=1).encode() + b"\n")
        manifest.save(staging)
    return planted, False


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


def _write(corpus: Path, staging: Path, corpora: Corpora, planted: Planted) -> Manifest:
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
        _scramble(staging, corpora, planted)
    except OSError as error:
        raise DataError(f"{corpus} could not be copied to {staging}: {error}") from error
    for name in touched:
        infos[name] = Shard(staging / name, vocab_size=manifest.tokenizer.vocab_size).verify()
    first, end = planted.positions
    source = f"{manifest.source}; noise at positions {first} to {end - 1}"
    return manifest.model_copy(update={"shards": list(infos.values()), "source": source})


def _scramble(staging: Path, corpora: Corpora, planted: Planted) -> None:
    order, (stream,), eod = corpora.train.order, corpora.train.streams, corpora.train.eod
    random = np.random.default_rng(planted.seed)
    ids = np.setdiff1d(np.arange(corpora.vocab_size), [0, eod])
    for begin in order.locate(range(*planted.positions)).first_token.tolist():
        for shard, at, count, _ in stream.pieces(begin + 1, order.sequence_length - 1):
            noise = np.where(shard.read(at, count) == eod, eod, random.choice(ids, count))
            dtype = little_endian(shard.dtype)
            with with_suffix(staging / shard.name, ".bin").open("r+b") as file:
                file.seek(at * dtype.itemsize)
                file.write(noise.astype(dtype).tobytes())
