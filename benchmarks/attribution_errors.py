"""Measure the error rates of attribution on healthy and on planted windows, on states of real small runs.

    found = measure(text, seed=1, windows=24, planted=2, folder=folder, settings=AttributionConfig())

A run of 3 layers of 128 trains on a text, and stops at `STATES`. On each of these states windows of unseen samples are
examined, as after a rewind to it: any conviction in a healthy window is wrong. The caller chooses the texts, which can
differ from those that constants were tuned on. Planted text replaces samples in memory; the state is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drills import corrupt_texts
from drills.stage import PER_TOKEN, RECIPE, VOCABULARY, prepare_texts
from megastable.attribution.examination import examine
from megastable.attribution.sample_replay import Laboratory, Trained
from megastable.config import deepspeed_json
from megastable.config.stability import AttributionConfig
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.loader import Loader
from megastable.data.skips import Skips
from megastable.data.source import Source
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology

Int64s = npt.NDArray[np.int64]

BATCH, LAYERS, WARMUP = 16, 3, 20
STATES = (50, 100)  # steps of the run, after which windows are examined
SIZES = (1, 2, 4)  # batches of a window, in turns
REACH = 30  # batches of a planted text at most, ahead of its first one


@dataclass(frozen=True)
class Plant:
    """samples: of a text, in one piece, or `of_each` in each batch. window: batches to examine: all, or the
    first ones of a longer region."""

    text: corrupt_texts.Text
    samples: int = 40
    of_each: int | None = None
    window: int = 3

    def places(self, random: np.random.Generator) -> Int64s:
        """Indexes of the bad samples from the first of the window on, ascending."""
        if self.of_each is None:
            return 4 + np.arange(self.samples)
        batches = range(-(-self.samples // self.of_each))
        every = [n * BATCH + random.permutation(BATCH)[: self.of_each] for n in batches]
        return np.sort(np.concatenate(every))


PLANTS = {
    "base64, 40 samples": Plant("base64"),
    "sorted words, 40": Plant("sorted words"),
    "JSON logs, 40": Plant("json logs"),
    "reversed text, 40": Plant("reversed text"),
    "shuffled words, 40": Plant("shuffled words"),
    "one sentence, 400": Plant("a sentence", 400, window=4),
    "base64, 4 of 16, 40": Plant("base64", 40, of_each=4, window=4),
    "base64, 1 of 16, 8": Plant("base64", 8, of_each=1, window=8),
}


@dataclass
class Found:
    """Results for the windows of one kind on one text: their number, the number with a wrong conviction, and the number
    of wrongly convicted samples; the mean share of innocent ones among the convicted; bad samples, and convicted ones
    among them. reasons: of wrong convictions."""

    text: str
    kind: str
    windows: int = 0
    wrong: int = 0
    innocent: int = 0
    samples: int = 0
    shares: list[float] = field(default_factory=list)
    bad: int = 0
    named: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, convicted: Sequence[int], bad: set[int], samples: int, reason: str) -> None:
        right = len(bad & set(convicted))
        wrong = len(convicted) - right
        self.windows, self.samples = self.windows + 1, self.samples + samples
        self.wrong, self.innocent = self.wrong + bool(wrong), self.innocent + wrong
        self.bad, self.named = self.bad + len(bad), self.named + right
        self.shares.append(wrong / max(1, len(convicted)))
        if wrong:
            self.reasons.append(reason)


def pooled(found: Sequence[Found]) -> list[Found]:
    """The results of all runs on a text together."""
    together = dict[tuple[str, str], Found]()
    for f in found:
        sum_ = together.setdefault((f.text, f.kind), Found(f.text, f.kind))
        for name in ("windows", "wrong", "innocent", "samples", "shares", "bad", "named", "reasons"):
            setattr(sum_, name, getattr(sum_, name) + getattr(f, name))
    return list(together.values())


class Planted(Source):
    """A source with some samples replaced. instead: tokens by position."""

    def __init__(self, of: Source) -> None:
        super().__init__(of.order, of.streams, of.eod)
        self.instead: dict[int, Int64s] = {}

    def samples(self, positions: Int64s) -> Int64s:
        found = super().samples(positions)
        for row, position in zip(found, positions.tolist(), strict=True):
            if position in self.instead:
                # The first token is the last label of another sample.
                row[1:] = np.where(row[1:] == self.eod, self.eod, self.instead[position])
        return found


class Remembering(Laboratory):
    """Caches the gradient norm of a batch: a window is examined in several ways."""

    def forget(self) -> None:
        self._norms: dict[bytes, float] = {}

    def gradient_norm(self, positions: Int64s) -> float:
        key = positions.tobytes()
        if key not in self._norms:
            self._norms[key] = super().gradient_norm(positions)
        return self._norms[key]


def parse(text: str) -> list[tuple[Path, float]]:
    """PATH, or PATH+PATH:SHARE+...: files or folders of each corpus, and its share. Raises ValueError."""
    parts = [part.rpartition(":") if ":" in part else (part, "", "") for part in text.split("+")]
    shares = [float(share) if share else None for _, _, share in parts]
    left = 1 - sum(share for share in shares if share is not None)
    return [
        (Path(path), left / shares.count(None) if share is None else share)
        for (path, _, _), share in zip(parts, shares, strict=True)
    ]


def prepare(text: str, folder: Path) -> list[dict[str, Any]]:
    """The corpora of a text, with one tokenizer, as `data.corpora` of a recipe. Raises DataError."""
    corpora = parse(text)
    folders = [folder / str(number) for number in range(len(corpora))]
    prepare_texts([path for path, _ in corpora], folders, validation=0)
    return [{"path": at, "weight": share} for at, (_, share) in zip(folders, corpora, strict=True)]


def measure(
    text: str,
    seed: int,
    windows: int,
    planted: int,
    folder: Path,
    settings: AttributionConfig,
    advance: Callable[[], None] = lambda: None,
) -> list[Found]:
    """One run on one text; in a process group of one. windows, planted: number of healthy ones, and of each kind of
    planted ones, per state. Raises DataError."""
    model = {**RECIPE["model"], "layers": LAYERS, "vocab_size": VOCABULARY}
    given = {
        **RECIPE, "precision": {"kind": "fp32"}, "model": model, "run": {"seed": seed, "dir": folder / "run"},
        "data": {"corpora": prepare(text, folder)},
        "train": {"steps": STATES[-1], "global_batch": BATCH, "micro_batch": BATCH, "eval_interval": 0},
    }  # fmt: skip
    config = RunConfig.model_validate(given)
    torch.manual_seed(seed)
    engine = Engine(config, deepspeed_json.build(config, 1), Topology(Layout(1, 1, 1), 0, config.run.timeout))
    corpora = open_corpora(config.data.corpora, config.model.sequence_length, seed)
    source = Planted(corpora.train)
    info = corpora.manifests[0].tokenizer
    tokenizer = load_tokenizer(config.data.corpora[0].path / info.file, info.eod)
    found = dict[str, Found]()
    with Loader(source, Skips.of([]), 0, BATCH, BATCH, 0, 1, config.data.keep_documents_apart) as loader:
        laboratory = Remembering(settings, engine, loader)
        history = list[Trained]()
        for state in STATES:
            while len(history) < state:
                batch, step = next(loader), len(history) + 1
                rate = config.optimizer.lr * min(1.0, step / WARMUP)
                measured, _ = engine.train_step(batch.micro_batches, rate, _finite)
                history.append(Trained(step, batch.positions, measured.losses.numpy(), True))
            bench = Bench(text, laboratory, source, list(history), loader.cursor, tokenizer, seed, found)
            for _ in bench.healthy(windows):
                advance()
            for _ in bench.planted(planted):
                advance()
    return list(found.values())


def _finite(measured: Measured) -> bool:
    return measured.finite


@dataclass
class Bench:
    """Examinations on one state, after `history`; found: results by kind."""

    text: str
    laboratory: Remembering
    source: Planted
    history: list[Trained]
    cursor: int
    tokenizer: Tokenizer
    seed: int
    found: dict[str, Found]

    def __post_init__(self) -> None:
        # Later samples repeat an epoch, for at least one corpus.
        order = self.source.order
        self.end = min(int(order.positions_at(i, np.array([n]))[0]) for i, n in enumerate(order.sequences))
        self.random = np.random.default_rng((self.seed, self.cursor))
        self.laboratory.forget()

    def healthy(self, count: int) -> Iterator[None]:
        """Examine consecutive unseen windows, as they are, and as if they were next to skipped samples; and the tenth
        of the batches with the highest losses, where a detector would trip."""
        last = (self.end - self.cursor) // BATCH * BATCH + self.cursor
        batches = np.arange(self.cursor, last).reshape(-1, BATCH)
        first = 0
        for size in (SIZES[number % len(SIZES)] for number in range(count)):
            if first + size > len(batches):
                break
            window = batches[first : first + size]
            self._examine("healthy", window)
            self._examine("healthy, next to what was skipped", window, adjacent=True)
            first += size
            yield
        means = self.laboratory.losses(batches.ravel()).reshape(batches.shape).mean(axis=1)
        for batch in batches[np.argsort(-means)[: len(batches) // 10]]:
            self._examine("healthy, the highest tenth", batch[None])

    def planted(self, count: int) -> Iterator[None]:
        """Examine `count` windows of each kind, at random places."""
        for kind, plant in PLANTS.items():
            for number in range(count):
                places = plant.places(self.random)
                room = self.end - self.cursor - places[-1] - BATCH
                first = self.cursor + int(self.random.integers(max(1, room)))
                self._plant(plant, places + first, f"{kind} {self.cursor} {number}")
                window = np.arange(first, first + plant.window * BATCH).reshape(-1, BATCH)
                self._examine(kind, window)
                self.source.instead.clear()
                yield

    def _plant(self, plant: Plant, positions: Int64s, seed: str) -> None:
        length = self.source.order.sequence_length
        random = Random(seed)
        own = self.source.samples(np.arange(positions.size))[:, 1:].ravel()
        passage = self.tokenizer.decode(own[own != self.source.eod].tolist())
        text = corrupt_texts.make(plant.text, random, passage, PER_TOKEN * positions.size * length)
        ids = np.resize(
            [i for i in self.tokenizer.encode(text) if i != self.source.eod], positions.size * length
        )
        self.source.instead = dict(zip(positions.tolist(), ids.reshape(-1, length), strict=True))

    def _examine(self, kind: str, window: Int64s, adjacent: bool = False) -> None:
        """window: positions, [batches, BATCH]."""
        if self.source.instead:
            self.laboratory.forget()
        step = self.history[-1].step
        losses = self.laboratory.losses(window.ravel()).reshape(window.shape)
        steps = [
            Trained(step + n, *part, False) for n, part in enumerate(zip(window, losses, strict=True), 1)
        ]
        skips = Skips.of([])
        told = examine(self.laboratory, steps, self.history, self.cursor, skips, adjacent)
        if self.source.instead:
            self.laboratory.forget()
        found = self.found.setdefault(kind, Found(self.text, kind))
        found.add(told.convicted, set(self.source.instead), window.size, told.reason)
