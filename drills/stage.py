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

from drills.scenario import GLOBAL_BATCH, STEPS, Scenario, make_text
from megastable.base.errors import DataError
from megastable.config import recipe
from megastable.data.manifest import FILE, Manifest, Segment, Stream
from megastable.data.plant import Planted, plant_corruption
from megastable.data.tokenizer import load_tokenizer
from megastable.run.directory import RunDirectory
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from megastable_tools.prepare.prepare import prepare_shards
from megastable_tools.prepare.stdlib import prepare_stdlib
from megastable_tools.prepare.text_files import TextFiles

VOCABULARY = 1024
RANKS = 2
LAYERS = 2
PER_TOKEN = 4  # characters of generated text per token, an upper bound for tokenizers of this size
DOCUMENT = 3000  # minimum characters of a text's documents, cut at ends of lines
VALIDATION = 0.05  # share of such a text: a megabyte or so
SHORT = 4096  # tokens of a short document; many fit into a small corpus

# Peak rates of 2, 3, 4 and 5e-3 end at a validation loss of 3.76, 3.73, 3.69 and 4.09. If a much higher rate than this
# one were better, a rate that is too high would do no harm.
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


@dataclass(frozen=True)
class Stage:
    """folder: of everything in a drill. seed: of model, order of the data and faults. steps: of every run.
    text: its training text, a file or folder that `megastable prepare` takes; by default the standard library.
    settings: KEY=VALUE, of every run's recipe, over those of its scenario."""

    folder: Path
    seed: int
    steps: int = STEPS
    ranks: int = RANKS
    layers: int = LAYERS
    text: Path | None = None
    settings: tuple[str, ...] = ()

    @property
    def recipe(self) -> Path:
        return self.folder / f"drill-{self.seed}.yaml"

    @property
    def corpus(self) -> Path:
        return self.folder / ("stdlib" if self.text is None else self.text.stem)

    def name_run(self, scenario: str, guarded: bool = True) -> RunDirectory:
        """The directory of a scenario's run. guarded: False for the one with the guard off."""
        ending = "" if guarded else "-without"
        return RunDirectory(self.folder / "runs" / f"{scenario}{ending}-{self.seed}")

    @property
    def other(self) -> Path:
        return self.folder / f"{self.corpus.name}-descriptions"

    def prepare(self) -> None:
        """Prepare corpora and recipe; existing ones are reused. Raises DataError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.text is None:
            prepare_stdlib(self.corpus, vocab_size=VOCABULARY, workers=self.ranks, progress=False)
        elif not (self.corpus / FILE).exists():
            prepare_text(self.text, self.corpus)
        tree = {**RECIPE, "run": {"seed": self.seed}, "data": {"corpora": [{"path": str(self.corpus)}]}}
        tree["model"] = {**tree["model"], "layers": self.layers}
        # With 1,024 samples, runs that differ in a few dozen harmless samples differ by 0.003 nat (standard deviation
        # of 6).
        eval_samples = 1024 if self.steps == STEPS else 256
        micro_batch = GLOBAL_BATCH // self.ranks
        tree["train"] = {
            **tree["train"], "steps": self.steps, "eval_samples": eval_samples, "micro_batch": micro_batch
        }  # fmt: skip
        self.recipe.write_text(yaml.safe_dump(tree))

    def corpus_of(self, scenario: Scenario) -> tuple[Path, Planted | None]:
        """The corpus of a scenario's runs, and its corruption."""
        corpus_folder = self.corpus if scenario.epochs == 1 else self._part(scenario.epochs)
        if scenario.region is None:
            return corpus_folder, None
        planted_folder = self.folder / f"{self.corpus.name}-{scenario.name}-{self.seed}"
        planted, _ = plant_corruption(
            corpus_folder,
            planted_folder,
            recipe.load_recipe(self.recipe),
            step=scenario.step,
            samples=scenario.samples,
            seed=self.seed,
            kind=scenario.region,
            other=self._descriptions() if scenario.region == "shuffled" else None,
            text=self._text(scenario),
            of_each=scenario.of_each,
            overwrite=True,
        )
        return planted_folder, planted

    def _text(self, scenario: Scenario) -> str | None:
        """The text that a scenario plants, about as long as its samples. Corpus passages come from anywhere in it."""
        if scenario.text is None:
            return None
        text_random = Random(f"{scenario.name} {self.seed}")
        manifest = Manifest.load_manifest(self.corpus)
        stream = Stream(self.corpus, manifest, "train")
        token_count = min(stream.tokens, scenario.samples * RECIPE["model"]["sequence_length"])
        passage_ids = stream.read_tokens(text_random.randrange(stream.tokens - token_count + 1), token_count)
        eod_token = manifest.tokenizer.eod
        tokenizer = load_tokenizer(self.corpus / manifest.tokenizer.file, eod_token)
        passage_text = tokenizer.decode(passage_ids[passage_ids != eod_token].tolist())
        return make_text(scenario.text, text_random, passage_text, PER_TOKEN * token_count)

    def _part(self, epochs: int) -> Path:
        """Short documents of the corpus, as many as give `epochs` epochs of a run."""
        part_folder = self.folder / f"{self.corpus.name}-part-{self.steps}-{epochs}"
        if not part_folder.exists():
            made = part_folder.with_name(f"{part_folder.name}.tmp")
            shutil.rmtree(made, ignore_errors=True)
            shutil.copytree(self.corpus, made)
            manifest = Manifest.load_manifest(made)
            wanted = self.steps * GLOBAL_BATCH * RECIPE["model"]["sequence_length"] // epochs
            chosen = _short_documents(Stream(made, manifest, "train"), manifest.splits["train"], wanted)
            manifest.model_copy(update={"splits": manifest.splits | {"train": chosen}}).save_manifest(made)
            made.rename(part_folder)  # an existing one is complete
        return part_folder

    def _descriptions(self) -> Path:
        if self.other.exists():
            return self.other
        with tempfile.TemporaryDirectory() as text_folder:
            for package in importlib.metadata.distributions():
                if package_text := package.read_text("METADATA"):
                    Path(text_folder, f"{package.name}.txt").write_text(package_text, encoding="utf-8")
            tokenizer_info = Manifest.load_manifest(self.corpus).tokenizer
            prepare_shards(
                [Path(text_folder)],
                self.other,
                self.corpus / tokenizer_info.file,
                validation=0,
                eod=tokenizer_info.eod,
                bos=tokenizer_info.bos is not None,
                skip_bad=True,
                progress=False,
            )
        return self.other


def prepare_text(text: Path, corpus: Path) -> None:
    """A corpus of a text, a file or folder, with a tokenizer of its own. Raises DataError."""
    with tempfile.TemporaryDirectory() as folder:
        cut_path = Path(folder, "cut.jsonl")
        with cut_path.open("w", encoding="utf-8") as cut_file:
            for whole_text in TextFiles([text], skip_bad=True):
                cut_file.writelines(json.dumps({"text": part}) + "\n" for part in documents(whole_text))
        tokenizer = train_sentencepiece(TextFiles([cut_path]), Path(folder, "tokenizer.model"), VOCABULARY)
        prepare_shards(
            [cut_path], corpus, tokenizer.file, name=corpus.name, validation=VALIDATION, progress=False
        )  # fmt: skip


def documents(text: str) -> Iterator[str]:
    """Split a text into pieces of `DOCUMENT` characters and the rest of a line: a single document would be bad
    whole."""
    document_text = ""
    for text_line in text.splitlines(keepends=True):
        document_text += text_line
        if len(document_text) >= DOCUMENT:
            yield document_text
            document_text = ""
    if document_text.strip():
        yield document_text


def _short_documents(stream: Stream, segments: Sequence[Segment], wanted: int) -> list[Segment]:
    """Documents of a split in their order, with `wanted` tokens, less at most a short one. Raises DataError if there
    are too few."""
    chosen, tokens_left = list[Segment](), wanted
    for segment in segments:
        shard = stream.open_shard(segment.shard)
        for document_number in range(shard.document_of(segment.first_token), shard.documents):
            first, end = shard.document_bounds(document_number)
            if end > segment.end:
                break
            if first < end and end - first <= min(SHORT, tokens_left):
                tokens_left -= end - first
                chosen.append(Segment(shard=shard.name, first_token=first, tokens=end - first, documents=1))
    if tokens_left > SHORT:
        raise DataError(
            f"{stream.directory} has {wanted - tokens_left:,} tokens in short documents, but {wanted:,} are needed"
        )
    return chosen
