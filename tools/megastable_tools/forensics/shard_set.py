"""Open a set of shards to examine: a corpus with its manifest, or bare `.bin/.idx` files from any program; and split
texts at their tokens, so that each can be coloured.

Token ids are raw here: one beyond the vocabulary is a finding, not an error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megastable.base.errors import DataError
from megastable.config.recipe import find_recipe
from megastable.data.manifest import FILE, Manifest
from megastable.data.shards import Shard
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.report.sheet import Span


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

    def find_shard(self, name: str) -> Shard:
        """The shard of that name. Raises DataError if there is none."""
        named_shard = next((shard for shard in self.shards if shard.name == name), None)
        if named_shard is None:
            known_names = ", ".join(shard.name for shard in self.shards[:5])
            raise DataError(
                f"{self.name} has no shard {name!r}, it has {known_names}{', ...' * (len(self.shards) > 5)}"
            )
        return named_shard


def open_shelf(paths: Sequence[Path], tokenizer: Path | None = None) -> Shelf:
    """Open what `paths` name: one corpus directory, or any number of shards, each by its prefix, .idx or .bin.

    tokenizer: for bare shards; for a corpus it must be its own. Raises DataError for anything missing, damaged, foreign
    or made with another tokenizer.
    """
    if not paths:
        raise DataError("no shards are named: give a corpus directory or shards")
    paths = [find_recipe(shard_path) for shard_path in paths]
    if len(paths) == 1 and paths[0].is_dir():
        if (paths[0] / FILE).exists():
            return _corpus(paths[0], tokenizer)
        index_files = sorted(paths[0].glob("*.idx"))
        if not index_files:
            raise DataError(f"{paths[0]} holds neither {FILE} nor any .idx file: it holds no shards")
        paths = index_files
    if folder_paths := [shard_path for shard_path in paths if shard_path.is_dir()]:
        raise DataError(f"{folder_paths[0]} is a folder: give one corpus, or shards by their files")
    shards = [Shard(prefix_of(shard_path)) for shard_path in paths]
    names = [shard.name for shard in shards]
    if name_twice := next((shard_name for shard_name in names if names.count(shard_name) > 1), None):
        raise DataError(
            f"two shards are named {name_twice}: documents could not be told apart, look at one at a time"
        )
    if len({shard.dtype for shard in shards}) > 1:
        raise DataError("some of these shards are uint16, others int32: look at one kind at a time")
    if tokenizer is None:
        parent_folders = {shard_path.parent for shard_path in paths}
        if len(parent_folders) == 1 and (next(iter(parent_folders)) / FILE).exists():
            # Single shards of a corpus: its manifest applies.
            return _of_corpus(next(iter(parent_folders)), names)
    known = None if tokenizer is None else load_tokenizer(find_recipe(tokenizer))
    # Hashing the contents would take long; the modification times stand in for them.
    shard_facts = [(s.name, s.bin_bytes, s.idx_bytes, s.bin_path.stat().st_mtime_ns) for s in shards]
    return Shelf(
        name=names[0] if len(names) == 1 else paths[0].resolve().parent.name,
        shards=shards, directory=None, manifest=None, tokenizer=known,
        vocab_size=known.vocab_size if known else None, eod=known.eod if known else None,
        problem="" if known else "no tokenizer is known (--tokenizer): token ids are shown instead of text",
        fingerprint=_digest(shard_facts, known.xxh3 if known else ""),
    )  # fmt: skip


def prefix_of(path: Path) -> Path:
    """PREFIX of PREFIX, PREFIX.idx or PREFIX.bin."""
    return path.with_name(path.name[: -len(path.suffix)]) if path.suffix in (".idx", ".bin") else path


def _corpus(directory: Path, given: Path | None) -> Shelf:
    manifest = Manifest.load_manifest(directory)
    info = manifest.tokenizer
    own_file, problem = directory / info.file, ""
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = load_tokenizer(find_recipe(given) if given is not None else own_file, info.eod)
    except DataError as error:
        if given is not None:
            raise
        problem = f"token ids are shown instead of text: {error}"
    if tokenizer is not None and tokenizer.xxh3 != info.xxh3:
        problem_text = f"{tokenizer.file} is not the tokenizer that {directory / FILE} was made with"
        if given is not None:
            raise DataError(f"{problem_text}: leave it out, or give the one that is")
        tokenizer, problem = None, f"token ids are shown instead of text: {problem_text}"
    shards = [Shard(directory / shard.name, shard) for shard in manifest.shards]
    return Shelf(
        name=manifest.name, shards=shards, directory=directory, manifest=manifest, tokenizer=tokenizer,
        vocab_size=info.vocab_size, eod=info.eod, problem=problem, fingerprint=manifest.fingerprint(),
    )  # fmt: skip


def _of_corpus(directory: Path, names: Sequence[str]) -> Shelf:
    whole = _corpus(directory, None)
    shards = [whole.find_shard(shard_name) for shard_name in names]
    assert whole.manifest is not None
    shard_infos = [shard.model_dump() for shard in whole.manifest.shards if shard.name in names]
    name, digest = names[0] if len(names) == 1 else whole.name, _digest(shard_infos, whole.fingerprint)
    return replace(whole, name=name, shards=shards, directory=directory, manifest=None, fingerprint=digest)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


HOT = 12.0  # nats: the loss with the strongest colour; a vocabulary of 160,000 has ln = 12
CONTEXT = 4  # preceding tokens that a token's text may depend on: the first of a text loses its space
LONGEST = 8  # maximum tokens per character


def split_at_tokens(
    ids: Sequence[int], tokenizer: Tokenizer | None, losses: Sequence[float] | None = None
) -> list[Span]:
    """The text of `ids`, split at tokens; joined it equals `tokenizer.decode`. losses: nats, one per token.

    Tokens that form a character only together are one piece, with the highest of their losses. Without a tokenizer, or
    for ids beyond its vocabulary, the ids themselves are shown.
    """
    if tokenizer is None or max(ids, default=0) >= tokenizer.vocab_size:
        if losses is None:
            return [Span(f"{token} ", None, "") for token in ids]
        return [Span(f"{token} ", _heat(loss), f"{loss:.2f} nats") for token, loss in zip(ids, losses)]
    if losses is None:
        return [Span(tokenizer.decode(ids))] if ids else []
    spans_found, tokens_before = [], 0
    for piece_text, token_count in _pieces(ids, tokenizer):
        piece_losses = losses[tokens_before : tokens_before + token_count]
        hottest_loss = max(piece_losses, key=lambda loss: -math.inf if math.isnan(loss) else loss)
        spans_found.append(Span(piece_text, _heat(hottest_loss), f"{hottest_loss:.2f} nats"))
        tokens_before += token_count
    return spans_found


def _heat(loss: float) -> float | None:
    return None if math.isnan(loss) else min(1.0, max(0.0, loss / HOT))


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Texts and the number of tokens of each."""
    piece_begin = 0
    for piece_end in range(1, len(ids) + 1):
        ids_before = ids[max(0, piece_begin - CONTEXT) : piece_begin]
        known_text = tokenizer.decode(ids_before)
        piece_text = tokenizer.decode([*ids_before, *ids[piece_begin:piece_end]])[len(known_text) :]
        # An incomplete character shows as U+FFFD.
        if piece_text.endswith("\ufffd") and piece_end - piece_begin < LONGEST and piece_end < len(ids):
            continue
        yield piece_text, piece_end - piece_begin
        piece_begin = piece_end
