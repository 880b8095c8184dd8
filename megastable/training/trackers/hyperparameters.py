"""Chooses the keys of a recipe that trackers are told, and those that a table of runs compares: what everybody looks
for, and what was set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from megastable.config.tree import RunConfig

ALWAYS = (
    "model.layers", "model.hidden", "model.heads", "model.sequence_length", "optimizer.name", "optimizer.lr",
    "optimizer.weight_decay", "schedule.kind", "train.steps", "train.global_batch", "precision.kind", "run.seed",
)  # fmt: skip
SECTIONS = ("model.", "data.corpora.", "optimizer.", "schedule.", "train.", "parallel.", "precision.")
# May hold secrets, and tell nothing of the training.
UNTOLD = ("supervise", "logging.tracker_command", "eval.command")


def is_untold(key: str) -> bool:
    """Whether a key of a recipe, or a section of it, is kept from trackers."""
    return any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in UNTOLD)


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Values by path, those in lists of sections too: data.corpora.0.path."""
    if isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
        tree = {str(i): entry for i, entry in enumerate(tree)}
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {
        path: value for key, below in tree.items() for path, value in leaves(below, f"{prefix}{key}.").items()
    }


@cache
def _defaults() -> dict[str, Any]:
    return leaves(RunConfig().model_dump(mode="json"))


def hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Of a recipe's values by path."""
    chosen = {
        path: value for path, value in config.items() if value is not None
        and (path in ALWAYS or (path.startswith(SECTIONS) and value != _defaults().get(path)))
    }  # fmt: skip
    return {
        path: value if isinstance(value, bool | int | float | str) else str(value)
        for path, value in chosen.items()
    }
