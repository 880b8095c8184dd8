"""Scenarios of the court drill: what a run reads, or what goes wrong in it, and what is wanted of the judgement.

Healthy scenarios have nothing to find: samples that are new, easy or repeated must be trained on. The others have
planted samples or faults, which must be found at a price, or be harmless. Wishes were written down before any run.
"""

from __future__ import annotations

import importlib.metadata
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field

from drills.exercise import Outcome
from drills.scenario import GLOBAL_BATCH, Fault
from megastable.base.errors import ConfigError, DataError
from megastable.data.manifest import Segment, adopt_shards
from megastable.data.order import Order, OrderedCorpus
from megastable.data.shard_format import ShardWriter
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from megastable_tools.prepare.stdlib import stdlib_files
from megastable_tools.prepare.text_files import TextFiles

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
# Of the log: when it begins, in seconds; its jobs.
EPOCH, JOBS = 1_500_000_000, ("backup", "cleanup", "import")
STEPS, STEP = 180, 100  # of a run; where a scenario begins
PLANTED, OF_EACH = 40, 8  # bad samples, and how many of them are in a step
FOUND = 36
NEAR = 0.02  # nats per token: what a loss may be worse
SEARCH = 256  # batches that a search may measure
SOON = 25  # steps within which a spoilt update must be seen
FAULTY = 10  # steps of a wrong gradient, and of wrong labels
CLEAN = "clean"


@dataclass(frozen=True)
class Places:
    """What a run reads. kinds: of the text at each position; bad: the positions of planted samples; moved: of samples
    whose tokens are moved by one id; sources: the position whose sample of that kind it is, by default the same."""

    kinds: list[Kind]
    bad: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    sources: npt.NDArray[np.int64] = field(default_factory=lambda: np.arange(POSITIONS))


class CaseOutcome(Outcome):
    """A run in figures. Losses in nats per token; None: not measured.

    planted, found: bad samples, and those of them that are skipped. lost: other samples that are skipped for good;
    untrained: those whose update was refused and that were not read again; deferred: to be read later. undone: steps;
    refused: updates. shifts: new levels of the loss that became usual. incidents: onset, verdict, cause and outcome of
    each; causes: theirs. seen: steps until the first refusal or incident from the scenario's begin on. without: the
    loss of the same run with stability.enabled=false; clean: of the clean run without it. search_batches,
    search_seconds: measured by recovery. missed: wishes that were not granted.
    """

    scenario: str
    seed: int
    ended: str = "finished"
    exit: int | None = 0
    planted: int = 0
    found: int = 0
    lost: int = 0
    untrained: int = 0
    deferred: int = 0
    rewinds: int = 0
    undone: int = 0
    refused: int = 0
    handovers: int = 0
    shifts: int = 0
    incidents: list[str] = Field(default_factory=list)
    causes: list[str] = Field(default_factory=list)
    seen: int | None = None
    loss: float | None = None
    without: float | None = None
    clean: float | None = None
    search_batches: int = 0
    search_seconds: float = 0.0
    wall_seconds: float = 0.0
    missed: list[str] = Field(default_factory=list)

    @property
    def worse(self) -> float | None:
        """Than the clean run."""
        return None if self.loss is None or self.clean is None else self.loss - self.clean

    def describe(self) -> str:
        return f"{', '.join(self.missed) or 'ok'}, {self.wall_seconds:.0f} s"

    def judged_by(self, wishes: Sequence[Wish]) -> CaseOutcome:
        """The same, with the wishes that were not granted."""
        return self.model_copy(update={"missed": [wish.words for wish in wishes if not wish.grants(self)]})


@dataclass(frozen=True)
class Wish:
    """What is wanted of a run, in words, and whether it was granted."""

    words: str
    grants: Callable[[CaseOutcome], bool]


DONE = Wish("exit code 0", lambda r: r.ended == "finished" and r.exit == 0)
NO_LOOP = Wish("1 hand-over at most", lambda r: r.handovers <= 1 and r.exit not in (76, 78))
NOTHING_LOST = Wish("0 samples lost", lambda r: r.lost + r.untrained == 0)
ONE_REWIND = Wish("1 rewind at most", lambda r: r.rewinds <= 1)
NO_REWIND = Wish("0 rewinds", lambda r: r.rewinds == 0)
NOTHING = Wish("nothing done", lambda r: not (r.incidents or r.refused or r.deferred))
NEAR_CLEAN = Wish(f"within {NEAR} of clean", lambda r: r.worse is not None and r.worse <= NEAR)
MOST_FOUND = Wish(f"{FOUND} found", lambda r: r.found >= FOUND)
FEW_HARMLESS = Wish("2 harmless ones lost at most", lambda r: r.lost <= 2)
SHORT = Wish(f"{SEARCH} batches measured at most", lambda r: r.search_batches <= SEARCH)
ONE_SHIFT = Wish("1 shift at most", lambda r: r.shifts <= 1)
FOUND_OR_HARMLESS = Wish(
    f"{FOUND} found or harmless", lambda r: r.found >= FOUND or (NEAR_CLEAN.grants(r) and r.lost == 0)
)
SEEN_SOON = Wish(f"seen within {SOON} steps", lambda r: r.seen is not None and r.seen <= SOON)
DATA_NAMED = Wish("cause data", lambda r: "data" in r.causes)

Lay = Callable[[np.random.Generator], Places]


@dataclass(frozen=True)
class Case:
    """A scenario. lay: what its runs read; held: kinds of the validation samples, the clean run's if it is compared
    with that."""

    name: str
    title: str
    wishes: tuple[Wish, ...]
    lay: Lay
    held: tuple[Kind, ...] = ("prose",)
    fault: Fault | None = None
    ranks: int = 1
    steps: int = STEPS

    @property
    def compared(self) -> bool:
        """Whether its loss should be that of the clean run."""
        return self.held == ("prose",) and self.steps == STEPS


def first_position(step: int) -> int:
    """The first position of a step."""
    return (step - 1) * GLOBAL_BATCH


def lay_prose(chance: np.random.Generator) -> Places:
    return Places(["prose"] * POSITIONS)


def lay_between(kind: Kind, first: int, end: int | None = None) -> Lay:
    """Prose, but another kind from step `first` to before step `end`, or to the end."""
    begin, stop = first_position(first), POSITIONS if end is None else first_position(end)
    kinds: list[Kind] = [kind if begin <= p < stop else "prose" for p in range(POSITIONS)]
    return lambda chance: Places(kinds)


def lay_drift(chance: np.random.Generator) -> Places:
    share = np.clip(
        (np.arange(POSITIONS) - first_position(20)) / (first_position(160) - first_position(20)), 0.0, 1.0
    )
    kind_by_position: list[Kind] = ["code" if late else "prose" for late in chance.random(POSITIONS) < share]
    return Places(kind_by_position)


def lay_repeats(chance: np.random.Generator) -> Places:
    """The samples of eight steps, again and again in another order."""
    source_positions, turn_size = np.arange(POSITIONS), 8 * GLOBAL_BATCH
    repeat_begin = first_position(REPEATS_STEP)
    for turn_number in range(REPEATS):
        turn_begin = repeat_begin + turn_number * turn_size
        source_positions[turn_begin : turn_begin + turn_size] = repeat_begin + chance.permutation(turn_size)
    return Places(["prose"] * POSITIONS, sources=source_positions)


REPEATS_STEP, REPEATS, REPEATS_STEPS = 31, 15, 200


def choose_planted(chance: np.random.Generator) -> tuple[int, ...]:
    """Positions of the planted samples: some of each step from the scenario's begin on."""
    planted_steps = range(STEP, STEP + PLANTED // OF_EACH)
    drawn_positions = [
        first_position(step) + chance.permutation(GLOBAL_BATCH)[:OF_EACH] for step in planted_steps
    ]
    return tuple(sorted(np.concatenate(drawn_positions).tolist()))


def lay_planted(kind: Kind) -> Lay:
    """Prose with planted samples of a kind; of prose, its ids moved by one."""

    def lay(chance: np.random.Generator) -> Places:
        bad_positions = choose_planted(chance)
        kind_by_position: list[Kind] = [kind if p in bad_positions else "prose" for p in range(POSITIONS)]
        return Places(kind_by_position, bad_positions, bad_positions if kind == "prose" else ())

    return lay


def lay_wrong_labels(chance: np.random.Generator) -> Places:
    return Places(["prose"] * POSITIONS, tuple(range(first_position(STEP), first_position(STEP + FAULTY))))


TRAINED = (DONE, NOTHING_LOST, ONE_REWIND)
STEADY = (DONE, NO_LOOP, NOTHING_LOST, NO_REWIND)
SPOILT = (DONE, SEEN_SOON, NEAR_CLEAN)
Held = tuple[Kind, ...]
CODE: Held = ("prose", "code")
EASY: Held = ("prose", "table")
FOREIGN: Held = ("prose", "foreign")
UPDATES = {
    "permuted_head": "an update permutes 64 rows of the head",
    "shrunk_moments": "an update makes a block's second moments 100 times too small",
    "cleared_norm": "an update makes the weights of a norm zero",
    "grown_embeddings": "an update makes 16 embeddings 30 times too large",
    "grown_block": "an update makes a block's weights 3 times too large",
}


def _fault(kind: str, steps: int = 1) -> Fault:
    return Fault.model_validate({"kind": kind, "step": STEP, "steps": steps, "factor": 8.0})


CASES = (
    Case("clean", "prose throughout", (DONE, NOTHING), lay_prose),
    Case("switch", "prose, then code", TRAINED, lay_between("code", STEP), CODE),
    Case("drift", "prose slowly becomes code", (*STEADY, NOTHING), lay_drift, CODE),
    Case("visit", "40 steps of code", TRAINED, lay_between("code", STEP, STEP + 40), CODE),
    Case("templated", "50 steps of easy log lines", TRAINED, lay_between("table", STEP, STEP + 50), EASY),
    Case("repeats", f"8 steps {REPEATS} times, then new ones", STEADY, lay_repeats, steps=REPEATS_STEPS),
    Case("whole", "another language to the end", (*STEADY, ONE_SHIFT), lay_between("foreign", STEP), FOREIGN),
    Case("shifted", f"{PLANTED} samples with ids moved", (DONE, MOST_FOUND, FEW_HARMLESS, SHORT), lay_planted("prose")),
    Case("hex", f"{PLANTED} hex dumps", (DONE, FOUND_OR_HARMLESS), lay_planted("hex")),
    Case("babble", f"{PLANTED} samples of babble", (DONE, FOUND_OR_HARMLESS), lay_planted("babble")),
    *(Case(f"weights-{k.replace('_', '-')}", t, SPOILT, lay_prose, fault=_fault(k)) for k, t in UPDATES.items()),
    Case(
        "rank-x8", f"one rank's gradient 8 times too large for {FAULTY} steps", (DONE, NO_LOOP, NOTHING_LOST),
        lay_prose, fault=_fault("grown_gradient", FAULTY), ranks=2,
    ),
    Case(
        "labels", f"labels off by one for {FAULTY} steps", (DONE, FEW_HARMLESS, DATA_NAMED, NEAR_CLEAN),
        lay_wrong_labels, fault=_fault("shifted_labels", FAULTY),
    ),
)  # fmt: skip
NAMES = tuple(case.name for case in CASES)


def choose_cases(names: Sequence[str]) -> list[Case]:
    """Scenarios by name or its part before a hyphen; without names: all. Raises ConfigError."""
    if unknown_names := [n for n in names if not any(_matches(name, n) for name in NAMES)]:
        raise ConfigError(f"{unknown_names[0]}: there is no such scenario: {', '.join(NAMES)}")
    return [case for case in CASES if not names or any(_matches(case.name, n) for n in names)]


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}-")


# Texts, as samples of a fixed length, and corpora that hold them at exact positions. A corpus has one document a
# sample, so that a judgement on a sample says nothing about others. The samples are written in the run's own order:
# what `Places` says of a position is what a run reads there.


def prepare_texts(folder: Path) -> None:
    """Train one tokenizer on all kinds of real text, and cut every kind into samples. Existing ones are reused."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary_folder:
        staging_folder = Path(temporary_folder, "texts")
        staging_folder.mkdir()
        text_by_kind = {kind: write_text(kind) for kind in get_args(Kind)}
        tokenizer = train_sentencepiece(
            [text_by_kind[kind] for kind in REAL], staging_folder / "tokenizer.model", VOCABULARY
        )
        for kind, kind_text in text_by_kind.items():
            np.save(staging_folder / f"{kind}.npy", cut_samples(kind_text, tokenizer))
        staging_folder.rename(folder)


def write_text(kind: Kind) -> str:
    """All text of a kind, seeded."""
    random_draws = random.Random(kind)
    match kind:
        case "prose":
            found = {package.read_text("METADATA") or "" for package in importlib.metadata.distributions()}
            return "\n\n".join([*topics.values(), *sorted(found)])
        case "code":
            source_files = stdlib_files()
            random_draws.shuffle(source_files)
            return "\n".join(TextFiles(source_files, skip_bad=True))[:CHARACTERS]
        case "foreign":
            return write_text("prose").translate(_make_cipher(random_draws))
        case "table":
            drawn = ((random_draws.choice(JOBS), random_draws.randrange(4)) for _ in range(CHARACTERS // 80))
            return "".join(
                f"{EPOCH + second} | INFO | worker-{worker} | job {job_number} finished | status ok\n"
                for second, (job_number, worker) in enumerate(drawn, 1)
            )
        case "hex":
            dump_lines = ((at, random_draws.randbytes(16)) for at in range(0, CHARACTERS // 800 * 16, 16))
            return "".join(f"{at:08x}  {line.hex(' ')}  |{_show_bytes(line)}|\n" for at, line in dump_lines)
        case "babble":
            return " ".join(islice(_babble(random_draws, write_text("prose").split()), CHARACTERS // 80))


def _make_cipher(chance: random.Random) -> dict[int, str]:
    """Vowels for vowels, consonants for consonants: words that can be spoken, and none that is known."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    cipher_table: dict[str, str] = {}
    for letters in (vowels, consonants):
        cipher_letters = list(letters)
        while any(plain_letter == b for plain_letter, b in zip(letters, cipher_letters, strict=True)):
            chance.shuffle(cipher_letters)
        cipher_table |= dict(zip(letters, cipher_letters, strict=True))
    cipher_table |= {letter.upper(): cipher_letter.upper() for letter, cipher_letter in cipher_table.items()}
    return str.maketrans(cipher_table)


def _show_bytes(line: bytes) -> str:
    return "".join(chr(one_byte) if 32 <= one_byte < 127 else "." for one_byte in line)


def _babble(chance: random.Random, words: Sequence[str]) -> Iterator[str]:
    following_words: dict[str, list[str]] = {}
    for current_word, next_word in pairwise(words):
        following_words.setdefault(current_word, []).append(next_word)
    current_word = words[0]
    while True:
        yield current_word
        current_word = chance.choice(following_words.get(current_word) or words)


def cut_samples(text: str, tokenizer: Tokenizer) -> Samples:
    """The tokens of a text as samples that each end their document, in a random order; what is left is dropped."""
    token_ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    token_ids = token_ids[token_ids != tokenizer.eod]
    sample_count = len(token_ids) // (LENGTH - 1)
    cut_rows = np.full((sample_count, LENGTH), tokenizer.eod)
    cut_rows[:, :-1] = token_ids[: sample_count * (LENGTH - 1)].reshape(sample_count, -1)
    return np.random.default_rng(0).permutation(cut_rows)


def write_corpus(texts: Path, output: Path, seed: int, places: Places, held: Sequence[Kind]) -> None:
    """A corpus whose runs with `seed` read `places`. held: the kinds of the validation samples, in equal parts. Raises
    DataError if there is too little text of a kind."""
    tokenizer = load_tokenizer(texts / "tokenizer.model")
    pool_by_kind = {kind: _load_samples(texts, kind, seed) for kind in {*places.kinds, *held}}
    samples_read = np.stack(
        [_find_sample(pool_by_kind, k, int(s)) for k, s in zip(places.kinds, places.sources, strict=True)]
    )
    for position in places.moved:
        samples_read[position, :-1] = move_tokens(samples_read[position, :-1], tokenizer)
    sequence_by_position = order_positions(len(samples_read), seed)
    train_samples = np.empty_like(samples_read)
    train_samples[sequence_by_position] = samples_read
    held_samples = np.concatenate([pool_by_kind[kind][:HELD_OUT] for kind in held])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    tokenizer.copy_to(output)
    for split, samples in (("train", train_samples), ("validation", held_samples)):
        with ShardWriter(output / split, tokenizer.vocab_size) as writer:
            for sample in samples:
                writer.add_document(sample)
            # Sequences share one token with the next: the last one needs one more.
            writer.add_document(np.array([tokenizer.eod]))
    manifest = adopt_shards(output, tokenizer.info, 0.0, name=NAME)
    segments_by_split = {
        shard.name: [Segment(shard=shard.name, first_token=0, tokens=shard.tokens, documents=shard.documents)]
        for shard in manifest.shards
    }
    manifest.model_copy(update={"splits": segments_by_split}).save_manifest(output)


def order_positions(count: int, seed: int) -> npt.NDArray[np.int64]:
    """The sequence of a corpus that a run reads at each of its first `count` positions."""
    ordered_corpus = OrderedCorpus(NAME, count * LENGTH + 1, 1.0)
    return Order([ordered_corpus], LENGTH, seed).locate_samples(np.arange(count)).sequence


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
    usable_ids = np.array([i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)])
    return usable_ids[(np.searchsorted(usable_ids, ids) + 1) % len(usable_ids)]
