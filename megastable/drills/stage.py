"""What drills are run on: two small corpora that every Python installation has the text for, and one recipe.

The corpus is the source of Python's standard library, as in the quickstart. The other one is of a different nature: the
descriptions (METADATA: prose in Markdown) of the Python packages that are installed, with the tokenizer of the first.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megastable import recipe
from megastable.data.manifest import Manifest, Segment, Stream
from megastable.data.plant import plant
from megastable.data.prepare import prepare_shards
from megastable.data.skips import Range
from megastable.data.stdlib import prepare_stdlib
from megastable.drills.plan import Policy
from megastable.drills.scenarios import STEPS, Scenario
from megastable.errors import DataError

VOCABULARY = 1024
RANKS = 2
SHORT = 4096  # tokens of a document, of which many fit into a small corpus

# Peak rates of 2, 3, 4 and 5e-3 end at a validation loss of 3.76, 3.73, 3.69 and 4.09; without clipping 3e-3 ends at
# 3.75, 4e-3 at 4.24. So 3e-3 is nearly the best that all policies can bear: where a higher rate were much better, one
# that is too high would do no harm.
RECIPE: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "sequence_length": 128},
    "optimizer": {"lr": 3e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 20, "floor": 0.05},
    "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 8, "eval_interval": 0},
    "checkpoint": {"interval": 30, "keep": 3},
    "logging": {"tensorboard": False, "norms_interval": 20, "layers_interval": 0, "interval": 20}
    | {"peak_tflops": 1.0},
    # What is usual here is known soon: steps of a tenth of a second.
    "supervise": {"hang_floor": 10.0},
}

# Nothing but the updates is looked after; a run that is beyond help goes on to its end.
BARE = [
    "stability.enabled=false",
    "stability.max_discards=1000000",
    "checkpoint.interval=0",
    "checkpoint.at_end=false",
]
OVERRIDES: dict[Policy, list[str]] = {
    Policy.NOTHING: [*BARE, "optimizer.clip=0"],
    Policy.CLIPPING: [*BARE, "optimizer.clip=1"],
    Policy.SKIPPING: [*BARE, "optimizer.clip=1"],
    Policy.OURS: ["optimizer.clip=1"],
}


@dataclass(frozen=True)
class Stage:
    """folder: where everything of a drill lies. seed: of model, order of the data and faults. steps: of every run."""

    folder: Path
    seed: int
    steps: int = STEPS

    @property
    def recipe(self) -> Path:
        return self.folder / "drill.yaml"

    @property
    def corpus(self) -> Path:
        return self.folder / "stdlib"

    @property
    def other(self) -> Path:
        return self.folder / "descriptions"

    def prepare(self) -> None:
        """Corpora and recipe; what is there is reused. Raises DataError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        prepare_stdlib(self.corpus, vocab_size=VOCABULARY, workers=RANKS, progress=False)
        tree = {**RECIPE, "run": {"seed": self.seed}, "data": {"corpora": [{"path": str(self.corpus)}]}}
        # With 1,024 samples, runs that differ in a few dozen innocent samples differ by 0.003 nat (deviation of 6).
        samples = 1024 if self.steps == STEPS else 256
        tree["train"] = {**tree["train"], "steps": self.steps, "eval_samples": samples}
        self.recipe.write_text(yaml.safe_dump(tree))

    def corpus_of(self, scenario: Scenario) -> tuple[Path, Range | None]:
        """The corpus of a scenario's runs, and the bad positions [first, end) in it."""
        corpus = self.corpus if scenario.epochs == 1 else self._part(scenario.epochs)
        if scenario.region is None:
            return corpus, None
        planted, _ = plant(
            corpus,
            self.folder / f"stdlib-{scenario.name}",
            recipe.load(self.recipe),
            step=scenario.step,
            samples=scenario.samples,
            seed=self.seed,
            kind=scenario.region,
            other=self._descriptions() if scenario.region == "shuffled" else None,
            overwrite=True,
        )
        return self.folder / f"stdlib-{scenario.name}", planted.positions

    def _part(self, epochs: int) -> Path:
        """Short documents of the corpus, as many as make so many epochs of a run."""
        part = self.folder / f"stdlib-part-{self.steps}-{epochs}"
        if not part.exists():
            made = part.with_name(f"{part.name}.tmp")
            shutil.rmtree(made, ignore_errors=True)
            shutil.copytree(self.corpus, made)
            manifest = Manifest.load(made)
            wanted = (
                self.steps * RECIPE["train"]["global_batch"] * RECIPE["model"]["sequence_length"] // epochs
            )
            chosen = _short_documents(Stream(made, manifest, "train"), manifest.splits["train"], wanted)
            manifest.model_copy(update={"splits": manifest.splits | {"train": chosen}}).save(made)
            made.rename(part)  # what is there is whole
        return part

    def _descriptions(self) -> Path:
        if self.other.exists():
            return self.other
        texts = self.folder / "texts"
        texts.mkdir(exist_ok=True)
        for package in importlib.metadata.distributions():
            if text := package.read_text("METADATA"):
                (texts / f"{package.name}.txt").write_text(text, encoding="utf-8")
        tokenizer = self.corpus / "tokenizer.model"
        prepare_shards([texts], self.other, tokenizer, validation=0, skip_bad=True, progress=False)
        return self.other


def _short_documents(stream: Stream, segments: Sequence[Segment], wanted: int) -> list[Segment]:
    """Documents of a split in their order, `wanted` tokens less no more than a short one. Raises DataError where there
    are not as many."""
    chosen, left = list[Segment](), wanted
    for segment in segments:
        shard = stream.open(segment.shard)
        for number in range(shard.document_of(segment.first_token), shard.documents):
            first, end = shard.document_bounds(number)
            if end > segment.end:
                break
            if first < end and end - first <= min(SHORT, left):
                left -= end - first
                chosen.append(Segment(shard=shard.name, first_token=first, tokens=end - first, documents=1))
    if left > SHORT:
        raise DataError(
            f"{stream.directory} has {wanted - left:,} tokens in short documents, {wanted:,} are needed"
        )
    return chosen
