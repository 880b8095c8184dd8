"""Gather the inputs of an FP8 check: a checkpoint's model, recipes, and samples of its run, of a text, or random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import ConfigError, DataError, MegastableError
from megastable.checkpoint.plain import PlainModel, load_plain
from megastable.checkpoint.store import read_state
from megastable.config.recipe import find_recipe
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.corpora import open_corpora
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import Selection
from megastable.data.tokenizer import load_tokenizer
from megastable.run.directory import RunDirectory
from megastable_tools.forensics.scoring.losses import make_inputs
from megastable_tools.fp8_check.effect import EvaluationBatch
from megastable_tools.generate.load import DTYPES, find_device, tokenizer_of

Int64s = npt.NDArray[np.int64]
SHORTEST = 16  # tokens of a sample, of a short text


def open_model(checkpoint: Path, dtype: str | None, device: str | None) -> PlainModel:
    """dtype: bf16, fp32, or None: the run's. device: None: a GPU if there is one.

    Raises CheckpointError as `load_plain`, DataError for a missing device, ConfigError for a run in fp16.
    """
    plain_model = load_plain(checkpoint, DTYPES[dtype] if dtype else None, find_device(device))
    if plain_model.run.precision.kind == "fp16" and dtype is None:
        raise ConfigError(
            f"{plain_model.checkpoint} trains in fp16, which FP8 does not support: add --dtype bf16 to check it "
            "with precision.kind=bf16"
        )
    return plain_model


def configs_of(
    run: RunConfig, recipes: Sequence[str], formats: str | None, history: int
) -> tuple[dict[str, Fp8Config], dict[str, object]]:
    """(what to measure, by recipe; KEY -> VALUE that a run needs besides): everything else as in the run, except that
    all layers take part."""
    own_config = run.precision.fp8 or Fp8Config()
    every = {"keep_first": 0, "keep_last": 0, "keep": (), "history": history}
    chosen = formats or own_config.formats
    configs_by_recipe = {
        recipe: Fp8Config.model_validate(
            own_config.model_dump() | every | {"recipe": recipe, "formats": chosen}
        )
        for recipe in recipes
    }
    overrides_said: dict[str, object] = {}
    if run.precision.kind == "fp16":
        overrides_said["precision.kind"] = "bf16"
    if chosen != own_config.formats:
        overrides_said["precision.fp8.formats"] = chosen
    overrides_said |= {
        f"precision.fp8.{key}": 0 for key in ("keep_first", "keep_last") if getattr(own_config, key)
    }
    if own_config.keep:
        overrides_said["precision.fp8.keep"] = "[]"
    return configs_by_recipe, overrides_said


def describe_model(model: PlainModel) -> str:
    """The model in one line."""
    size = sum(model_parameter.numel() for model_parameter in model.parameters()) / 1e6
    weight_dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"{model.checkpoint}: step {model.step:,}, {size:,.1f}M parameters, {weight_dtype} on {model.device.type}"


@dataclass(frozen=True)
class Material:
    """tokens: int64 [n, L + 1]. origin: in words. eod: ends a document, if known."""

    tokens: Int64s
    origin: str
    eod: int | None = None
    notes: Sequence[str] = ()

    def micro_batches_of(self, model: PlainModel, micro_batch: int) -> list[EvaluationBatch]:
        """Micro-batches in order. Raises DataError for tokens outside the model's vocabulary."""
        batches_found = []
        for first in range(0, len(self.tokens), micro_batch):
            tokens, segments, is_strange = make_inputs(
                model, self.tokens[first : first + micro_batch], self.eod
            )
            if is_strange.any():
                raise DataError(
                    f"{self.origin} has token ids beyond the model's vocabulary of {model.vocabulary:,}: it was made "
                    "with another tokenizer; give --text"
                )
            batches_found.append(EvaluationBatch(tokens, segments))
        return batches_found


def gather_material(
    model: PlainModel, count: int, text: Path | None = None, tokenizer: Path | None = None, seed: int = 0
) -> Material:
    """`count` samples of the model's sequence length: of `text`, or of its run, or random.

    Of the run: its first validation samples; if they do not suffice, those that it would train on next. tokenizer:
    of `text`, else that of the run's corpus. Raises DataError for a text that cannot be used.
    """
    if text is not None:
        return _of_text(model, count, text, tokenizer)
    try:
        return _of_run(model, count)
    except MegastableError as error:
        why = str(error)
    shape = (count, model.config.sequence_length + 1)
    tokens = np.random.default_rng(seed).integers(0, model.vocabulary, shape)
    note = (
        f"random tokens: {why}. Their losses and activations differ from those of text: give --text FILE, or "
        "restore the corpus"
    )
    return Material(tokens, f"{count} samples of random tokens", None, [note])


def _of_run(model: PlainModel, count: int) -> Material:
    run, folder = model.run, model.checkpoint.parent
    # A checkpoint may have been moved out of its run.
    run_directory = RunDirectory(folder.parent) if folder.name == "checkpoints" else None
    sequence_length = model.config.sequence_length
    run_blends = read_blends(run_directory.blends) if run_directory else ()
    corpora = open_corpora(run.data.corpora, sequence_length, run.run.seed, run_blends, run.data.validation)
    if corpora.vocab_size > model.vocabulary:
        raise DataError(
            f"the corpus has a vocabulary of {corpora.vocab_size:,}, the model of {model.vocabulary:,}"
        )
    validation_source = corpora.validation
    if (
        validation_source is not None
        and sum(max(0, c.tokens - 1) // sequence_length for c in validation_source.order.corpora) >= count
    ):
        source, positions, what = validation_source, np.arange(count), "validation samples"
    else:
        source, cursor = corpora.train, read_state(model.checkpoint).cursor
        if run_directory is None:
            selection = Selection(source.order, more=run.data.skip)
        else:
            skips = run_directory.skips
            selection, _ = Ledger.read_ledger(skips, []).select_usable(skips, source.order, run.data.skip)
        positions, _ = selection.next_kept(cursor, count)
        what = f"training samples from position {cursor:,} on"
    origin = f"{len(positions)} {what} of the run ({run.data.corpora[0].path})"
    return Material(source.read_samples(positions), origin, source.eod)


def _of_text(model: PlainModel, count: int, text: Path, tokenizer: Path | None) -> Material:
    try:
        text_content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 at byte {error.start}"
        raise DataError(f"--text {text} cannot be read: {reason}") from None
    where = str(model.checkpoint)
    text_tokenizer = load_tokenizer(find_recipe(tokenizer)) if tokenizer else tokenizer_of(model.run, where)
    ids = np.asarray(text_tokenizer.encode(text_content), dtype=np.int64)
    sample_length = min(model.config.sequence_length, (len(ids) - 1) // count)
    if sample_length < min(SHORTEST, model.config.sequence_length):
        raise DataError(
            f"--text {text} is {len(ids):,} tokens: too short for {count} samples (--samples, and micro-batches before "
            f"them for delayed scaling); give {count * SHORTEST + 1:,} or more, or lower --samples, --micro-batch and "
            "--history"
        )
    tokens = np.stack([ids[i * sample_length : (i + 1) * sample_length + 1] for i in range(count)])
    is_whole = sample_length == model.config.sequence_length
    text_notes = [] if is_whole else [f"the text is short: samples of {sample_length} tokens"]
    return Material(tokens, f"{count} samples of {text}", text_tokenizer.eod, text_notes)
