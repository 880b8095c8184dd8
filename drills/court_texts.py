"""Texts of the court drill, as samples of a fixed length, and corpora that hold them at exact positions.

A corpus has one document a sample, so that a judgement on a sample says nothing about others. The samples are written
in the run's own order: what `Places` says of a position is what a run reads there.
"""

from __future__ import annotations

import importlib.metadata
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.manifest import Segment, adopt
from megastable.data.order import Order, OrderedCorpus
from megastable.data.shard_writer import ShardWriter
from megastable.data.stdlib import stdlib_files
from megastable.data.text_files import TextFiles
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.data.train_tokenizer import train_sentencepiece

# prose: the reference of Python and the descriptions of installed packages; code: Python's standard library; foreign:
# the prose in a made-up language, letter for letter; table: lines of a log that are easy to learn; hex: dumps of random
# bytes; babble: words of the prose, each drawn from those that follow the one before.
Kind = Literal["prose", "code", "foreign", "table", "hex", "babble"]
Samples = npt.NDArray[np.int64]  # [n, sequence length]

REAL = ("prose", "code", "foreign", "table")
NAME = "court"  # of every corpus: the order depends on it
LENGTH = 64  # tokens of a sample; the last one ends its document
VOCABULARY = 1024
POSITIONS = 3584  # of a corpus: a run of 200 steps, and what may be read ahead of it
HELD_OUT = 256  # samples of each kind that no run trains on
CHARACTERS = 6 * LENGTH * (POSITIONS + HELD_OUT)  # of a kind of text at most, more than are needed
EPOCH, JOBS = (
    1_500_000_000,
    ("backup", "cleanup", "import"),
)  # of the log: when it begins, in seconds; its jobs


@dataclass(frozen=True)
class Places:
    """What a run reads. kinds: of the text at each position; bad: the positions of planted samples; moved: of samples
    whose tokens are moved by one id; sources: the position whose sample of that kind it is, by default the same."""

    kinds: list[Kind]
    bad: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    sources: npt.NDArray[np.int64] = field(default_factory=lambda: np.arange(POSITIONS))


def prepare_texts(folder: Path) -> None:
    """Train one tokenizer on all kinds of real text, and cut every kind into samples. Existing ones are reused."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        staging = Path(made, "texts")
        staging.mkdir()
        texts = {kind: write_text(kind) for kind in get_args(Kind)}
        tokenizer = train_sentencepiece(
            [texts[kind] for kind in REAL], staging / "tokenizer.model", VOCABULARY
        )
        for kind, text in texts.items():
            np.save(staging / f"{kind}.npy", cut_samples(text, tokenizer))
        staging.rename(folder)


def write_text(kind: Kind) -> str:
    """All text of a kind, seeded."""
    chance = random.Random(kind)
    match kind:
        case "prose":
            found = {package.read_text("METADATA") or "" for package in importlib.metadata.distributions()}
            return "\n\n".join([*topics.values(), *sorted(found)])
        case "code":
            files = stdlib_files()
            chance.shuffle(files)
            return "\n".join(TextFiles(files, skip_bad=True))[:CHARACTERS]
        case "foreign":
            return write_text("prose").translate(_make_cipher(chance))
        case "table":
            drawn = ((chance.choice(JOBS), chance.randrange(4)) for _ in range(CHARACTERS // 80))
            return "".join(
                f"{EPOCH + second} | INFO | worker-{worker} | job {job} finished | status ok\n"
                for second, (job, worker) in enumerate(drawn, 1)
            )
        case "hex":
            lines = ((at, chance.randbytes(16)) for at in range(0, CHARACTERS // 800 * 16, 16))
            return "".join(f"{at:08x}  {line.hex(' ')}  |{_show_bytes(line)}|\n" for at, line in lines)
        case "babble":
            return " ".join(islice(_babble(chance, write_text("prose").split()), CHARACTERS // 80))


def _make_cipher(chance: random.Random) -> dict[int, str]:
    """Vowels for vowels, consonants for consonants: words that can be spoken, and none that is known."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    table: dict[str, str] = {}
    for letters in (vowels, consonants):
        others = list(letters)
        while any(a == b for a, b in zip(letters, others, strict=True)):
            chance.shuffle(others)
        table |= dict(zip(letters, others, strict=True))
    table |= {letter.upper(): other.upper() for letter, other in table.items()}
    return str.maketrans(table)


def _show_bytes(line: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)


def _babble(chance: random.Random, words: Sequence[str]) -> Iterator[str]:
    after: dict[str, list[str]] = {}
    for word, following in pairwise(words):
        after.setdefault(word, []).append(following)
    word = words[0]
    while True:
        yield word
        word = chance.choice(after.get(word) or words)


def cut_samples(text: str, tokenizer: Tokenizer) -> Samples:
    """The tokens of a text as samples that each end their document, in a random order; what is left is dropped."""
    ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    ids = ids[ids != tokenizer.eod]
    count = len(ids) // (LENGTH - 1)
    samples = np.full((count, LENGTH), tokenizer.eod)
    samples[:, :-1] = ids[: count * (LENGTH - 1)].reshape(count, -1)
    return np.random.default_rng(0).permutation(samples)


def write_corpus(texts: Path, output: Path, seed: int, places: Places, held: Sequence[Kind]) -> None:
    """A corpus whose runs with `seed` read `places`. held: the kinds of the validation samples, in equal parts. Raises
    DataError if there is too little text of a kind."""
    tokenizer = load_tokenizer(texts / "tokenizer.model")
    pools = {kind: _load_samples(texts, kind, seed) for kind in {*places.kinds, *held}}
    read = np.stack(
        [_find_sample(pools, k, int(s)) for k, s in zip(places.kinds, places.sources, strict=True)]
    )
    for position in places.moved:
        read[position, :-1] = move_tokens(read[position, :-1], tokenizer)
    sequences = order_positions(len(read), seed)
    train = np.empty_like(read)
    train[sequences] = read
    validation = np.concatenate([pools[kind][:HELD_OUT] for kind in held])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    tokenizer.copy_to(output)
    for split, samples in (("train", train), ("validation", validation)):
        with ShardWriter(output / split, tokenizer.vocab_size) as writer:
            for sample in samples:
                writer.add_document(sample)
            # Sequences share one token with the next: the last one needs one more.
            writer.add_document(np.array([tokenizer.eod]))
    manifest = adopt(output, tokenizer.info, 0.0, name=NAME)
    splits = {
        shard.name: [Segment(shard=shard.name, first_token=0, tokens=shard.tokens, documents=shard.documents)]
        for shard in manifest.shards
    }
    manifest.model_copy(update={"splits": splits}).save(output)


def order_positions(count: int, seed: int) -> npt.NDArray[np.int64]:
    """The sequence of a corpus that a run reads at each of its first `count` positions."""
    corpus = OrderedCorpus(NAME, count * LENGTH + 1, 1.0)
    return Order([corpus], LENGTH, seed).locate(np.arange(count)).sequence


def _load_samples(texts: Path, kind: Kind, seed: int) -> Samples:
    return np.random.default_rng(seed).permutation(np.load(texts / f"{kind}.npy"))


def _find_sample(pools: dict[Kind, Samples], kind: Kind, source: int) -> npt.NDArray[np.int64]:
    """The sample of a kind for a position: another one for every position, and never a held out one."""
    pool = pools[kind][HELD_OUT:] if len(pools[kind]) > POSITIONS else pools[kind]
    if kind in REAL and source >= len(pool):
        raise DataError(f"there are only {len(pool)} samples of {kind}, but position {source} needs one more")
    return pool[source % len(pool)]


def move_tokens(ids: npt.NDArray[np.int64], tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Every id moved to the next one that is no special token, as by a tokenizer with one token more."""
    usable = np.array([i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)])
    return usable[(np.searchsorted(usable, ids) + 1) % len(usable)]
