"""Prepare the stage of drills: two small corpora from text in every Python installation, and one recipe.

The corpus is the source of Python's standard library, as in the quickstart, or any text, on which no constant was
tuned. The other one is of a different nature: the descriptions (METADATA: prose in Markdown) of the
installed Python packages, with the tokenizer of the first.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from drills import corrupt_texts
from drills.plan import Policy
from drills.scenario import GLOBAL_BATCH, STEPS, Scenario
from megastable.base.errors import DataError
from megastable.config import recipe
from megastable.data.manifest import FILE, Manifest, Segment, Stream
from megastable.data.plant import Planted, plant
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare.prepare import prepare_shards
from megastable_tools.prepare.stdlib import prepare_stdlib
from megastable_tools.prepare.text_files import TextFiles
from megastable_tools.prepare.train_tokenizer import train_sentencepiece

VOCABULARY = 1024
RANKS = 2
LAYERS = 2
PER_TOKEN = 4  # characters of generated text per token, an upper bound for tokenizers of this size
DOCUMENT = 3000  # minimum characters of a text's documents, cut at ends of lines
VALIDATION = 0.05  # share of such a text: a megabyte or so
SHORT = 4096  # tokens of a short document; many fit into a small corpus

# Peak rates of 2, 3, 4 and 5e-3 end at a validation loss of 3.76, 3.73, 3.69 and 4.09; without clipping 3e-3 ends at
# 3.75, 4e-3 at 4.24. So 3e-3 is nearly the best that all policies tolerate: if a higher rate were much better, a
# rate that is too high would do no harm.
RECIPE: dict[str, Any] = {
    "model": {"layers": LAYERS, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "sequence_length": 128},
    "optimizer": {"lr": 3e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 20, "floor": 0.05},
    "train": {"steps": STEPS, "global_batch": GLOBAL_BATCH, "eval_interval": 0},
    "checkpoint": {"interval": 30, "keep": 3},
    "logging": {"trackers": [], "norms_interval": 20, "layers_interval": 0, "interval": 20}
    | {"peak_tflops": 1.0},
    # The baseline is soon known here: steps take a tenth of a second.
    "supervise": {"hang_floor": 10.0},
}

# Only the updates are guarded; a hopeless run continues to its end.
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
    """folder: of everything in a drill. seed: of model, order of the data and faults. steps: of every run.
    text: its training text, a file or folder that `megastable prepare` takes; by default the standard library."""

    folder: Path
    seed: int
    steps: int = STEPS
    ranks: int = RANKS
    layers: int = LAYERS
    text: Path | None = None

    @property
    def recipe(self) -> Path:
        return self.folder / f"drill-{self.seed}.yaml"

    @property
    def corpus(self) -> Path:
        return self.folder / ("stdlib" if self.text is None else self.text.stem)

    @property
    def other(self) -> Path:
        return self.folder / f"{self.corpus.name}-descriptions"

    def prepare(self) -> None:
        """Prepare corpora and recipe; existing ones are reused. Raises DataError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.text is None:
            prepare_stdlib(self.corpus, vocab_size=VOCABULARY, workers=self.ranks, progress=False)
        elif not (self.corpus / FILE).exists():
            prepare_texts([self.text], [self.corpus], VALIDATION)
        tree = {**RECIPE, "run": {"seed": self.seed}, "data": {"corpora": [{"path": str(self.corpus)}]}}
        tree["model"] = {**tree["model"], "layers": self.layers}
        # With 1,024 samples, runs that differ in a few dozen innocent samples differ by 0.003 nat (standard deviation
        # of 6).
        samples = 1024 if self.steps == STEPS else 256
        micro = GLOBAL_BATCH // self.ranks
        tree["train"] = {
            **tree["train"], "steps": self.steps, "eval_samples": samples, "micro_batch": micro
        }  # fmt: skip
        self.recipe.write_text(yaml.safe_dump(tree))

    def corpus_of(self, scenario: Scenario) -> tuple[Path, Planted | None]:
        """The corpus of a scenario's runs, and its corruption."""
        corpus = self.corpus if scenario.epochs == 1 else self._part(scenario.epochs)
        if scenario.region is None:
            return corpus, None
        output = self.folder / f"{self.corpus.name}-{scenario.name}-{self.seed}"
        planted, _ = plant(
            corpus,
            output,
            recipe.load(self.recipe),
            step=scenario.step,
            samples=scenario.samples,
            seed=self.seed,
            kind=scenario.region,
            other=self._descriptions() if scenario.region == "shuffled" else None,
            text=self._text(scenario),
            of_each=scenario.of_each,
            overwrite=True,
        )
        return output, planted

    def _text(self, scenario: Scenario) -> str | None:
        """The text that a scenario plants, about as long as its samples. Corpus passages come from anywhere in it."""
        if scenario.text is None:
            return None
        random = Random(f"{scenario.name} {self.seed}")
        manifest = Manifest.load(self.corpus)
        stream = Stream(self.corpus, manifest, "train")
        tokens = min(stream.tokens, scenario.samples * RECIPE["model"]["sequence_length"])
        ids = stream.read(random.randrange(stream.tokens - tokens + 1), tokens)
        eod = manifest.tokenizer.eod
        tokenizer = load_tokenizer(self.corpus / manifest.tokenizer.file, eod)
        source = tokenizer.decode(ids[ids != eod].tolist())
        return corrupt_texts.make(scenario.text, random, source, PER_TOKEN * tokens)

    def _part(self, epochs: int) -> Path:
        """Short documents of the corpus, as many as give `epochs` epochs of a run."""
        part = self.folder / f"{self.corpus.name}-part-{self.steps}-{epochs}"
        if not part.exists():
            made = part.with_name(f"{part.name}.tmp")
            shutil.rmtree(made, ignore_errors=True)
            shutil.copytree(self.corpus, made)
            manifest = Manifest.load(made)
            wanted = self.steps * GLOBAL_BATCH * RECIPE["model"]["sequence_length"] // epochs
            chosen = _short_documents(Stream(made, manifest, "train"), manifest.splits["train"], wanted)
            manifest.model_copy(update={"splits": manifest.splits | {"train": chosen}}).save(made)
            made.rename(part)  # an existing one is complete
        return part

    def _descriptions(self) -> Path:
        if self.other.exists():
            return self.other
        with tempfile.TemporaryDirectory() as folder:
            for package in importlib.metadata.distributions():
                if text := package.read_text("METADATA"):
                    Path(folder, f"{package.name}.txt").write_text(text, encoding="utf-8")
            info = Manifest.load(self.corpus).tokenizer
            prepare_shards(
                [Path(folder)],
                self.other,
                self.corpus / info.file,
                validation=0,
                eod=info.eod,
                bos=info.bos is not None,
                skip_bad=True,
                progress=False,
            )
        return self.other


def prepare_texts(texts: Sequence[Path], corpora: Sequence[Path], validation: float) -> None:
    """A corpus of each text, a file or folder, with one tokenizer of their own. Raises DataError."""
    with tempfile.TemporaryDirectory() as folder:
        cuts = [Path(folder, f"{number}.jsonl") for number in range(len(texts))]
        for text, cut in zip(texts, cuts, strict=True):
            with cut.open("w", encoding="utf-8") as file:
                for whole in TextFiles([text], skip_bad=True):
                    file.writelines(json.dumps({"text": part}) + "\n" for part in documents(whole))
        tokenizer = train_sentencepiece(TextFiles(cuts), Path(folder, "tokenizer.model"), VOCABULARY)
        for cut, corpus in zip(cuts, corpora, strict=True):
            prepare_shards(
                [cut], corpus, tokenizer.file, name=corpus.name, validation=validation, progress=False
            )  # fmt: skip


def documents(text: str) -> Iterator[str]:
    """Split a text into pieces of `DOCUMENT` characters and the rest of a line: a single document would be guilty
    whole."""
    part = ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= DOCUMENT:
            yield part
            part = ""
    if part.strip():
        yield part


def _short_documents(stream: Stream, segments: Sequence[Segment], wanted: int) -> list[Segment]:
    """Documents of a split in their order, with `wanted` tokens, less at most a short one. Raises DataError if there
    are too few."""
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
            f"{stream.directory} has {wanted - left:,} tokens in short documents, but {wanted:,} are needed"
        )
    return chosen
