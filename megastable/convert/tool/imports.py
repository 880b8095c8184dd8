"""`import-deepspeed`, `import-megatron`, `export-megatron`: read and write checkpoints of other frameworks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megastable.base.errors import ConfigError
from megastable.base.text import visible
from megastable.checkpoint import store
from megastable.checkpoint.target import refuse_existing
from megastable.checkpoint.whole import run_of
from megastable.config import recipe
from megastable.convert.foreign.deepspeed import import_deepspeed
from megastable.convert.foreign.megatron import export_megatron, import_megatron
from megastable.convert.foreign.megatron_args import flags_of
from megastable.convert.reshaping import Made
from megastable.convert.tool.verifying import good


def from_deepspeed(folder: Path, out: Path, recipe_path: Path, overrides: Sequence[str]) -> Made:
    """Raises CheckpointError, ConfigError."""
    refuse_existing(out)
    run = recipe.load(recipe_path, overrides)
    return made_of(out, import_deepspeed(folder, out, run, say))


def from_megatron(folder: Path, out: Path, recipe_path: Path | None, overrides: Sequence[str]) -> Made:
    """recipe_path: None for a recipe from Megatron's arguments. Raises CheckpointError, ConfigError."""
    refuse_existing(out)
    if recipe_path is None and overrides:
        raise ConfigError(f"{overrides[0]}: overrides need a recipe: give one with --recipe")
    run = None if recipe_path is None else recipe.load(recipe_path, overrides)
    made = made_of(out, import_megatron(folder, out, run, say))
    if run is None:
        say(
            "note: its recipe has the model of Megatron's arguments, and defaults for everything else: to train, add "
            "data.corpora='[{path: data/...}]', optimizer.lr=... and train.steps=..."
        )
    return made


def to_megatron(
    checkpoint: Path, out: Path, tensor: int, pipeline: int, local: bool, silent: bool
) -> tuple[Path, list[str]]:
    """What was written, and Megatron's options that load it. Raises CheckpointError, ConfigError."""
    refuse_existing(out)
    source = good(checkpoint, silent)
    written = export_megatron(source, out, tensor, pipeline, local=local)
    options = ["--load", str(out), "--use-checkpoint-args", "--no-load-optim", "--no-load-rng"]
    return written, options + flags_of(run_of(source).model, local)


def load_hint(written: Path, options: Sequence[str]) -> str:
    """How Megatron loads what was written."""
    return visible(f"{written}: load it with {shlex.join(options)}")


def made_of(out: Path, checkpoint: Path) -> Made:
    """The result of an import: such a run needs no ledgers."""
    state = store.read_state(checkpoint)
    return Made(out, checkpoint, state.step, state.layout, state.adam_step > 0, out)


def say(text: str) -> None:
    """Print to stderr: stdout is for the result."""
    print(visible(text), file=sys.stderr, flush=True)
