"""Open a set of shards to examine: a corpus with its manifest, or bare `.bin/.idx` files from any program.

Token ids are raw here: one beyond the vocabulary is a finding, not an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastable.base.errors import DataError
from megastable.config.recipe import find
from megastable.data.manifest import FILE, Manifest
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Shelf:
    """Opened shards. directory, manifest: of their corpus, None for bare shards.

    vocab_size, eod: None if unknown. tokenizer: None if there is none; `problem` says why. fingerprint:
    of everything that the result of a scan depends on.
    """

    name: str
    shards: list[Shard]
    directory: Path | None
    manifest: Manifest | None
    tokenizer: Tokenizer | None
    vocab_size: int | None
    eod: int | None
    problem: str
    fingerprint: str

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def folder_name(self) -> str:
        """A folder name that distinguishes it from other corpora of the same name."""
        return self.directory.resolve().name if self.directory is not None else self.name

    def shard(self, name: str) -> Shard:
        """The shard of that name. Raises DataError if there is none."""
        found = next((shard for shard in self.shards if shard.name == name), None)
        if found is None:
            known = ", ".join(shard.name for shard in self.shards[:5])
            raise DataError(
                f"{self.name} has no shard {name!r}, it has {known}{', ...' * (len(self.shards) > 5)}"
            )
        return found


def open_shelf(paths: Sequence[Path], tokenizer: Path | None = None) -> Shelf:
    """Open what `paths` name: one corpus directory, or any number of shards, each by its prefix, .idx or .bin.

    tokenizer: for bare shards; for a corpus it must be its own. Raises DataError for anything missing, damaged, foreign
    or made with another tokenizer.
    """
    if not paths:
        raise DataError("no shards are named: give a corpus directory or shards")
    paths = [find(path) for path in paths]
    if len(paths) == 1 and paths[0].is_dir():
        if (paths[0] / FILE).exists():
            return _corpus(paths[0], tokenizer)
        inside = sorted(paths[0].glob("*.idx"))
        if not inside:
            raise DataError(f"{paths[0]} holds neither {FILE} nor any .idx file: it holds no shards")
        paths = inside
    if folders := [path for path in paths if path.is_dir()]:
        raise DataError(f"{folders[0]} is a folder: give one corpus, or shards by their files")
    shards = [Shard(prefix_of(path)) for path in paths]
    names = [shard.name for shard in shards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(
            f"two shards are named {twice}: documents could not be told apart, look at one at a time"
        )
    if len({shard.dtype for shard in shards}) > 1:
        raise DataError("some of these shards are uint16, others int32: look at one kind at a time")
    if tokenizer is None:
        beside = {path.parent for path in paths}
        if len(beside) == 1 and (next(iter(beside)) / FILE).exists():
            # Single shards of a corpus: its manifest applies.
            return _of_corpus(next(iter(beside)), names)
    known = None if tokenizer is None else load_tokenizer(find(tokenizer))
    return Shelf(
        name=names[0] if len(names) == 1 else paths[0].resolve().parent.name,
        shards=shards, directory=None, manifest=None, tokenizer=known,
        vocab_size=known.vocab_size if known else None, eod=known.eod if known else None,
        problem="" if known else "no tokenizer is known (--tokenizer): token ids are shown instead of text",
        fingerprint=_digest([_facts(shard) for shard in shards], known.xxh3 if known else ""),
    )  # fmt: skip


def prefix_of(path: Path) -> Path:
    """PREFIX of PREFIX, PREFIX.idx or PREFIX.bin."""
    return path.with_name(path.name[: -len(path.suffix)]) if path.suffix in (".idx", ".bin") else path


def _corpus(directory: Path, given: Path | None) -> Shelf:
    manifest = Manifest.load(directory)
    info = manifest.tokenizer
    own, problem = directory / info.file, ""
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = load_tokenizer(find(given) if given is not None else own, info.eod)
    except DataError as error:
        if given is not None:
            raise
        problem = f"token ids are shown instead of text: {error}"
    if tokenizer is not None and tokenizer.xxh3 != info.xxh3:
        text = f"{tokenizer.file} is not the tokenizer that {directory / FILE} was made with"
        if given is not None:
            raise DataError(f"{text}: leave it out, or give the one that is")
        tokenizer, problem = None, f"token ids are shown instead of text: {text}"
    shards = [Shard(directory / shard.name, shard) for shard in manifest.shards]
    return Shelf(
        name=manifest.name, shards=shards, directory=directory, manifest=manifest, tokenizer=tokenizer,
        vocab_size=info.vocab_size, eod=info.eod, problem=problem, fingerprint=manifest.fingerprint(),
    )  # fmt: skip


def _of_corpus(directory: Path, names: Sequence[str]) -> Shelf:
    whole = _corpus(directory, None)
    shards = [whole.shard(name) for name in names]
    parts = (
        [shard.model_dump() for shard in whole.manifest.shards if shard.name in names]
        if whole.manifest
        else []
    )
    return Shelf(
        name=names[0] if len(names) == 1 else whole.name, shards=shards, directory=directory, manifest=None,
        tokenizer=whole.tokenizer, vocab_size=whole.vocab_size, eod=whole.eod, problem=whole.problem,
        fingerprint=_digest(parts, whole.fingerprint),
    )  # fmt: skip


def _facts(shard: Shard) -> tuple[str, int, int, int]:
    # Hashing the contents would take long; the modification time stands in for them.
    return shard.name, shard.bin_bytes, shard.idx_bytes, shard.bin_path.stat().st_mtime_ns


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
